"""Gradients of calls and of graphs, written in ONNX operators."""
