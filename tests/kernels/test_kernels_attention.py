"""The kernel of Attention against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import check, drawn, model_of

from singa_backend.kernels import onednn

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
node = helper.make_node


def run(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past: Any = None,
    constant_mask: bool = False,
    opset: int = 24,
    outputs: int = 1,
    **given: Any,
) -> list[str]:
    feeds = []
    for seed in (1, 2):
        feed = drawn(seed, q=q, k=k, v=v)
        if mask is not None:
            feed["m"] = mask(np.random.default_rng(seed)) if callable(mask) else mask
        if past is not None:
            feed |= drawn(seed + 9, pk=past[0], pv=past[1])
        feeds.append(feed)
    names = ["q", "k", "v", "m" if mask is not None else "", *(["pk", "pv"] if past is not None else [])]
    held = {}
    if constant_mask:
        held = {"m": feeds[0]["m"]}
        feeds = [{n: x for n, x in f.items() if n != "m"} for f in feeds]
    ys = ["y", "present_key", "present_value"][:outputs]
    return check(model_of([node("Attention", names, ys, **given)], feeds[0], ys, held, opset=opset), feeds)


FLAT = {"q": (2, 20, 48), "k": (2, 33, 48), "v": (2, 33, 64), "q_num_heads": 4, "kv_num_heads": 4}
DEEP = {"q": (2, 4, 20, 16), "k": (2, 4, 33, 16), "v": (2, 4, 33, 8)}
FEW = {"q": (2, 6, 20, 16), "k": (2, 2, 33, 16), "v": (2, 2, 33, 8)}
ONE = {"q": (2, 6, 1, 16), "k": (2, 2, 133, 16), "v": (2, 2, 133, 8)}
STEP = {"q": (2, 12, 1, 64), "k": (2, 12, 1, 64), "v": (2, 12, 1, 64), "past": ((2, 12, 99, 64), (2, 12, 99, 64))}


def masks(shape: tuple[int, ...], truth: bool) -> Any:
    def make(rng: np.random.Generator) -> np.ndarray:
        if not truth:
            return rng.standard_normal(shape).astype(np.float32)
        made = rng.random(shape) < 0.7
        made[..., 0] = True
        return made

    return make


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("form", [FLAT, DEEP, FEW, ONE, STEP])
@pytest.mark.parametrize(
    "given", [{}, {"is_causal": 1}, {"scale": 0.3}, {"softcap": 2.0}, {"scale": 1.0, "softmax_precision": 1}]
)
def test_forms(form: Any, given: Any, opset: int) -> None:
    used = run(**form, **given, opset=opset)
    assert "definition" not in used
    assert sum(u.startswith("matmul") for u in used) == 2 and sum(u.startswith("softmax") for u in used) == 1


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("truth", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (20,), (1, 1, 20), (2, 1, 1), (2, 1, 20), (1, 4, 20), (2, 4, 20), (4, 1)])
def test_masks(lead: tuple[int, ...], truth: bool, causal: int, constant: bool) -> None:
    used = run(**FLAT, mask=masks((*lead, 33), truth), constant_mask=constant, is_causal=causal)
    assert "definition" not in used


@pytest.mark.parametrize("form", [FEW, ONE])
@pytest.mark.parametrize("truth", [False, True])
def test_masks_of_heads_that_share_keys(form: Any, truth: bool) -> None:
    (batch, heads, queries, _), keys = form["q"], form["k"][2]
    for lead in ((queries,), (batch, 1, 1), (1, heads, 1), (batch, heads, queries)):
        used = run(**form, mask=masks((*lead, keys), truth))
        assert "definition" not in used


def test_short_masks() -> None:
    for constant in (False, True):
        for truth in (False, True):
            run(**DEEP, mask=masks((20, 30), truth), constant_mask=constant)


def test_queries_without_keys_return_zero() -> None:
    def hidden(rng: np.random.Generator) -> np.ndarray:
        made = rng.random((2, 4, 20, 33)) < 0.5
        made[0, 1, 3] = made[1, :, 5:7] = False
        return made

    for constant in (False, True):
        run(**DEEP, mask=hidden, constant_mask=constant)
        run(**DEEP, mask=lambda rng: np.where(hidden(rng), 0, -np.inf).astype(np.float32), constant_mask=constant)
        run(**DEEP, mask=hidden, constant_mask=constant, is_causal=1)


def test_windows() -> None:
    for left, right in ((3, -1), (-1, 2), (4, 0)):
        run(**DEEP, opset=25, left_window_size=left, right_window_size=right)
        run(**DEEP, opset=25, left_window_size=left, right_window_size=right, is_causal=1, mask=masks((20, 33), True))


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("heads", [12, 3])
def test_presents(heads: int, queries: int, causal: int) -> None:
    now, past = (2, heads, queries, 64), (2, heads, 40, 64)
    used = run((2, 12, queries, 64), now, now, past=(past, past), outputs=3, is_causal=causal)
    assert sum(u == "numpy.copy" for u in used) == 2 and "definition" not in used


def test_presents_without_a_past() -> None:
    run(**FLAT, outputs=3)
    run(**DEEP, outputs=3)


def test_heads_of_a_joined_product_are_not_copied() -> None:
    feeds = [drawn(s, x=(2, 20, 48)) for s in (1, 2)]
    nodes = [
        node("MatMul", ["x", "w"], ["j"]),
        node("Split", ["j"], ["q", "k", "v"], axis=-1, num_outputs=3),
        node("Attention", ["q", "k", "v"], ["a"], q_num_heads=4, kv_num_heads=4),
        node("MatMul", ["a", "u"], ["y"]),
    ]
    used = check(model_of(nodes, feeds[0], ["y"], drawn(3, w=(48, 144), u=(48, 48))), feeds)
    assert [u.split()[0] for u in used] == ["matmul", "matmul", "softmax", "matmul", "matmul"]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_not_finite(number: float) -> None:
    feeds = [drawn(s, **{n: DEEP[n] for n in "qkv"}) for s in (1, 2, 3)]
    feeds[1]["k"][0, 1, 2, 3] = number
    check(model_of([node("Attention", ["q", "k", "v"], ["y"])], feeds[0], ["y"]), feeds)
