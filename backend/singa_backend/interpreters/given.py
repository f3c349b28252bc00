"""The inputs of a call, as far as the body of the call depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SETTING = 16
"""The number of elements of a constant up to which it is part of the body: a shape, an axis, a length."""


@dataclass(frozen=True)
class Given:
    """An input of a call, as far as a body depends on it.

    Attributes:
        dtype: its dtype.
        shape: its sizes, a name or None for one that is not fixed; None if the rank is not known.
        setting: its contents, if they are part of the body.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None = None
    setting: bytes | None = None

    @classmethod
    def of(cls, dtype: np.dtype[Any], shape: tuple[int | str | None, ...] | None, constant: np.ndarray | None) -> Given:
        """An input of this dtype and shape, which may be constant."""
        part = constant is not None and constant.dtype.kind in "iub" and constant.size <= SETTING
        return cls(dtype, shape, constant.tobytes() if part and constant is not None else None)

    @property
    def array(self) -> np.ndarray:
        """The contents."""
        assert self.setting is not None and self.shape is not None
        return np.frombuffer(self.setting, self.dtype).reshape([int(d or 0) for d in self.shape])
