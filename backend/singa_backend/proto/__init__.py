"""ONNX's messages, schemas and files; independent of this package's declarations."""
