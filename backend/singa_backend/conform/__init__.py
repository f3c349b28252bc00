"""Runs ONNX's own test suite against a backend: cases, verdicts, known gaps with reasons, and the support report."""
