"""onnxruntime's own operators: those of com.microsoft, and those that it reads in ONNX's domain.

One family per file, written as those of ONNX.  `_schemas` declares their schemas first.
"""
