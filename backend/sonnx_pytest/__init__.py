"""The options of the pytest plugin, in a package that imports neither onnx nor NumPy."""
