"""ONNX's own suite, run against a backend: cases, verdicts, gaps with reasons, and the support report."""
