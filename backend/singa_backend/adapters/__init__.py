"""Adapters: small trained changes of the weights of a model file, which stays as it is."""

from .adapter import Adapter, LowRank, base_digest
from .create import create
from .insert import factor_inputs, insert, merge

__all__ = ["Adapter", "LowRank", "base_digest", "create", "factor_inputs", "insert", "merge"]
