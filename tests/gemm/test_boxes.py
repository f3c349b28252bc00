"""NonMaxSuppression by machine code: against its form in NumPy, which tests/operators/test_order.py judges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.helpers.gemm_frames import OTHERS, Frame, assembly

from singa_backend.devices.namespaces import numpy
from singa_backend.elementwise.compile import LEVELS, available, target
from singa_backend.gemm.boxes import DIGITS, SELECTED, selecting
from singa_backend.ir.versioned import versioned
from singa_backend.kernels import boxes as kernel

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

F = np.float32
SPECIAL = np.array([math.nan, -math.nan, math.inf, -math.inf, 0, -0.0, 1e-45, -1e-45, 3e38, -3e38], F)


def by_numpy(monkeypatch: pytest.MonkeyPatch, *inputs: Any, center: int) -> np.ndarray:
    """The result without machine code."""
    given = [None if x is None else np.asarray(x, F if isinstance(x, float) else None) for x in inputs]
    with monkeypatch.context() as without, np.errstate(all="ignore"):
        without.setenv("SONNX_MACHINE_CODE", "off")
        assert kernel.selected_boxes(*inputs, center) is None
        (y,) = versioned("", "NonMaxSuppression", 11).run(numpy, given, {"center_point_box": center}, [True])
    return np.asarray(y)


def drawn(g: np.random.Generator, entries: int, classes: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes and scores: few different ones or many, of any magnitude, with special numbers or without."""
    boxes = g.integers(0, 6, (entries, count, 4)) if g.random() < 0.5 else g.uniform(0, 1, (entries, count, 4))
    scores = g.integers(-3, 4, (entries, classes, count)) / 4 if g.random() < 0.5 else g.uniform(-1, 1, (entries, classes, count))
    arrays = (boxes * 10.0 ** g.choice([0, 0, -22, 19])).astype(F), scores.astype(F)
    for a in arrays if g.random() < 0.5 else ():
        special = g.random(a.shape) < 0.05
        a[special] = g.choice(SPECIAL, special.sum())
    return arrays


@pytest.mark.parametrize("center", [0, 1])
def test_the_bits_are_those_of_numpy(limited: str, monkeypatch: pytest.MonkeyPatch, center: int) -> None:
    g, rows = np.random.default_rng(center), 0
    monkeypatch.setattr(kernel, "TOGETHER", 200)  # some results are of several calls
    for count in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 300) * 10:
        boxes, scores = drawn(g, int(g.integers(1, 3)), int(g.integers(1, 4)), count)
        most, iou = int(g.choice([-1, 0, 1, 5, 16, 17, 2**63 - 1])), float(g.choice(np.array([0, 0.25, 0.5, 0.7, 1], F)))
        least = None if g.random() < 0.3 else float(g.choice(np.array([-math.inf, -0.0, 0.25, math.nan], F)))
        y = kernel.selected_boxes(boxes, scores, most, iou, least, center)
        expected = by_numpy(monkeypatch, boxes, scores, most, iou, least, center=center)
        assert y is not None and y.dtype == np.int64
        np.testing.assert_array_equal(y, expected, str((boxes.shape, scores.shape, most, iou, least)))
        rows += len(y)
    assert rows > 1000


@pytest.mark.parametrize("count", [1, 16, 21, 150])
def test_nothing_beyond_the_arrays_is_read_or_written(ended: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    boxes, scores = np.random.default_rng(count).uniform(0, 1, (1, count, 4)).astype(F), np.ones((1, 2, count), F)
    room = -(-count // 16) * 16
    sizes = dict.fromkeys(SELECTED.numbers, 0) | {"rows": 2, "classes": 2, "count": count, "most": count, "room": room}
    arrays = {
        "boxes": boxes, "scores": scores, "keys": np.empty(count + 16, np.int64), "sorted": np.empty(count, np.int64),
        "digits": np.empty(DIGITS, np.int64), "sides": np.empty((5, room), F), "total": np.zeros(1, np.int64),
        "y": np.empty((2 * count, 3), np.int64),
    }  # fmt: skip
    held = {name: ended(a) for name, a in arrays.items()}
    Frame(selecting(), {**sizes, "iou": int(F(1).view(np.int32))}, held)()
    assert held["total"] == 2 * count  # no overlap exceeds 1
    np.testing.assert_array_equal(held["y"], by_numpy(monkeypatch, boxes, scores, count, 1.0, None, center=0))


def test_every_level_has_objects() -> None:
    assert all(target(name).object(selecting().text("f")) for name in LEVELS)
    assert not any(word in assembly(selecting(), name) for name in OTHERS for word in ("memset", "chkstk"))
