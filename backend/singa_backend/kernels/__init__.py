"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import elementwise, movement, reductions, views

__all__ = ["elementwise", "movement", "reductions", "views"]
