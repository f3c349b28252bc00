"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made.

A family is imported when a kernel of an operator is first looked up (`singa_backend.domains`).
"""
