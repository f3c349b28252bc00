"""Tensors, the tape of operators that made them, and its way back."""
