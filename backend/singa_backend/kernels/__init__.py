"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import views

__all__ = ["views"]
