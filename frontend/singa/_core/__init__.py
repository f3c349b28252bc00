"""Tensors, the tape on which operators are recorded, and the backward pass."""
