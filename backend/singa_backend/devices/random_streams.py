"""The sources of random numbers of ONNX's random operators, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from .graphs import refuse_capture


def random_stream(seed: float | None) -> Any:
    """Return a source of random numbers with the methods that RandomState and Generator share."""
    refuse_capture("draws random numbers")
    if seed is None:
        return np.random.Generator(np.random.Philox())
    if isinstance(seed, float) and not (seed.is_integer() and 0 <= seed < 2**32):
        seed = int(np.array(seed, np.float32).view(np.uint32))
    return np.random.RandomState(int(seed) % 2**32)
