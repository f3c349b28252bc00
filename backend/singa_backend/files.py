"""Deprecated; import from `singa_backend.io.files`: programs that `sonnx codegen` 0.2 wrote import `write_npz` from here."""

import warnings

from .io.files import write_bytes, write_npz, write_text

__all__ = ["write_bytes", "write_npz", "write_text"]

warnings.warn("singa_backend.files is now singa_backend.io.files", DeprecationWarning, stacklevel=2)
