"""ONNX operators, one family per file; each operator is declared once (see `singa_backend.ir.declaration`).

A family is imported when an operator of it is first looked up (`singa_backend.domains`).
"""
