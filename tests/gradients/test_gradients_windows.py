"""Gradients of convolutions and maximum pooling on their shorter ways, against sums written as loops."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from singa_backend.autodiff.tape import Tape
from singa_backend.devices import namespaces
from singa_backend.interpreters.eager import Eager
from singa_backend.operators import conv

RNG = np.random.default_rng(3)


def gradients(op_type: str, xs: list[Any], attributes: dict[str, Any], dy: Any) -> list[Any]:
    tape = Tape(Eager())
    values = [tape.variable(x) for x in xs]
    return tape.gradients([tape.call(op_type, values, attributes, 1)[0]], [dy], values)


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 2, 3)])
def test_filters_of_one_cell(group: int, pads: tuple[int, ...]) -> None:
    x, w = RNG.normal(size=(3, 6, 5, 4)), RNG.normal(size=(12, 6 // group, 1, 1))
    seen = np.pad(x, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
    dy = RNG.normal(size=(3, 12, *seen.shape[2:]))
    expected = np.zeros_like(w)
    for m, c in np.ndindex(12, 6 // group):
        expected[m, c, 0, 0] = (dy[:, m] * seen[:, m // (12 // group) * (6 // group) + c]).sum()
    found = gradients("Conv", [x, w], {"group": group, "pads": pads}, dy)[1]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 60, 1 << 19])
def test_transposed_convolutions_do_not_depend_on_their_pieces(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples and of the kernel's offsets, of which the last reaches no cell: it lies in what the pads take away."""
    monkeypatch.setattr(conv, "BLOCK", block)
    x, w = RNG.normal(size=(3, 4, 1, 3)), RNG.normal(size=(4, 2, 3, 2))
    expected = np.zeros((3, 4, 3, 7))
    for o, k, m in itertools.product(np.ndindex(1, 3), np.ndindex(3, 2), range(4)):
        c = slice(m // 2 * 2, m // 2 * 2 + 2)
        expected[:, m, o[0] + k[0], o[1] * 2 + k[1] * 2] += x[:, c, o[0], o[1]] @ w[c, m % 2, k[0], k[1]]
    y = conv.conv_transpose(namespaces.numpy, x, w, group=2, strides=(1, 2), dilations=(1, 2), pads=(0, 1, 1, 0))
    np.testing.assert_allclose(y, expected[:, :, :2, 1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "strides", "pads", "dilations"),
    [((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)), ((2, 3), (3, 3), (1, 1, 1, 2), (1, 1)), ((3, 3), (2, 1), (1, 1, 1, 1), (1, 1)),
     ((2, 2), (5, 5), (2, 3, 2, 2), (1, 1)), ((2, 2), (2, 2), (1, 1, 1, 1), (2, 2)), ((17, 16), (1, 1), (9, 9, 9, 9), (1, 1))],
)  # fmt: skip
@pytest.mark.parametrize("nan", [False, True])
def test_the_first_of_the_largest_gets_it_all(kernel: Any, strides: Any, pads: Any, dilations: Any, nan: bool) -> None:
    """Of few different values, with infinities; also windows of padding alone, and kernels of more than 256 cells."""
    x = RNG.integers(-2, 3, (2, 3, 8, 9)).astype(np.float64)
    x[RNG.random(x.shape) < 0.2] = -np.inf
    if nan:
        x[RNG.random(x.shape) < 0.1] = np.nan
    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads, "dilations": dilations}
    y = Eager().call("MaxPool", [x], attributes, 1)[0]
    dy = RNG.integers(1, 9, y.shape).astype(np.float64)
    expected = np.zeros_like(x)
    for n, c, *o in np.ndindex(*y.shape):
        best = None
        for k in np.ndindex(*kernel):
            i, j = (o[a] * strides[a] - pads[a] + k[a] * dilations[a] for a in (0, 1))
            if 0 <= i < 8 and 0 <= j < 9:
                value = x[n, c, i, j]
                if best is None or value > x[(n, c, *best)] or (np.isnan(value) and not np.isnan(x[(n, c, *best)])):
                    best = (i, j)
        if best is not None:
            expected[(n, c, *best)] += dy[(n, c, *o)]
    assert np.array_equal(gradients("MaxPool", [x], attributes, dy)[0], expected)
