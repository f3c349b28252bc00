"""ONNX models in and out; the public `sonnx` lists their functions."""
