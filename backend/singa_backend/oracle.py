"""Deprecated; import from `singa_backend.engines.oracle`."""

import warnings

from .engines.oracle import ENGINES, EngineFailure, Oracle

__all__ = ["ENGINES", "EngineFailure", "Oracle"]

warnings.warn("singa_backend.oracle is now singa_backend.engines.oracle", DeprecationWarning, stacklevel=2)
