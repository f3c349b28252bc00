"""ONNX's operators, a family a file; each is declared once (see `singa_backend.operator`)."""
