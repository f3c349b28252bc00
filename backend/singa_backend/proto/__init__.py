"""ONNX's messages, schemas and files; knows nothing of this package's declarations."""
