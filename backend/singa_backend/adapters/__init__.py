"""Adapters: small trained changes of the weights of a model file, which stays as it is."""

from .adapter import Adapter, LowRank, base_digest

__all__ = ["Adapter", "LowRank", "base_digest"]
