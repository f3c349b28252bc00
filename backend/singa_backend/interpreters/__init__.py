"""ONNX operators as functions, which an interpreter computes or writes to a graph."""
