"""`where` of many elements selects by bits, as NumPy does by copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_backend.devices.namespaces import numpy

RNG = np.random.default_rng(0)
SHAPE = (64, 129)


@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "?bHiqQefd"], ids=str)
@pytest.mark.parametrize("shapes", [(SHAPE, SHAPE), (SHAPE, ()), ((), SHAPE), ((), ()), ((129,), SHAPE)], ids=str)
def test_many_elements_are_selected_by_bits(dtype: np.dtype[Any], shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, y = (RNG.bytes(int(np.prod(s)) * dtype.itemsize) for s in shapes)
    x, y = (np.frombuffer(v, f"u{dtype.itemsize}").reshape(s) for v, s in zip((x, y), shapes, strict=True))
    x, y = (v % 2 == 1 if dtype.kind == "b" else v.view(dtype) for v in (x, y))
    for condition in (RNG.random(SHAPE) < 0.5, RNG.random(SHAPE[::-1]).T < 0.5, RNG.random((64, 1)) < 0.5):
        made, expected = numpy.where(condition, x, y), np.where(condition, x, y)
        assert made.dtype == expected.dtype and made.shape == expected.shape and made.tobytes() == expected.tobytes()


def test_numbers_take_the_type_of_the_array() -> None:
    x = RNG.standard_normal(SHAPE).astype(np.float32)
    for y in (0, 1.5, np.float64(2), np.int8(3)):
        made, expected = numpy.where(x < 0, x, y), np.where(x < 0, x, y)
        assert made.dtype == expected.dtype
        np.testing.assert_array_equal(made, expected)
