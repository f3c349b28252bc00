"""Reads and writes ONNX models; `singa.sonnx` and `singa.exporting` are the public modules."""
