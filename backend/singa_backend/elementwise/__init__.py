"""Elementwise expressions: the definition of an operator, recorded once, becomes calls of NumPy or machine code."""
