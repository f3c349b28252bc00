"""ONNX operators as functions, with one meaning for each interpreter: compute, or build a graph."""
