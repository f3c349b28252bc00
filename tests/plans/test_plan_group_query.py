"""GroupQueryAttention in plans: the kernel, and caches that grow in their memory without a new plan for each length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from singa_backend import SingaBackend
from singa_backend.plans.caches import shows_cache

HEADS, GROUPS, SIZE, DENSE = 4, 2, 16, 8
ROWS = np.random.default_rng(0)


def model(batch: int, packed: bool, rotary: bool, **attributes: Any) -> Any:
    """Attention over growing caches; the lengths are computed from a mask, as onnxruntime-genai's models do."""
    width = HEADS * SIZE + (2 * GROUPS * SIZE if packed else 0)
    f, i64 = TensorProto.FLOAT, TensorProto.INT64
    inputs = [helper.make_tensor_value_info("q", f, [batch, "s", width])]
    if not packed:
        inputs += [helper.make_tensor_value_info(n, f, [batch, "s", GROUPS * SIZE]) for n in ("k", "v")]
    inputs.append(helper.make_tensor_value_info("mask", i64, [batch, "t"]))
    inputs += [helper.make_tensor_value_info(n, f, [batch, GROUPS, "p", SIZE]) for n in ("past_key", "past_value")]
    angles = np.arange(64)[:, None] / 50 ** (np.arange(SIZE // 2) / SIZE)
    tables = [helper.make_tensor(n, f, a.shape, a.reshape(-1).astype(np.float32)) for n, a in
              (("cos", np.cos(angles)), ("sin", np.sin(angles)))]  # fmt: skip
    constants = [helper.make_tensor("axis", i64, [1], [1]), helper.make_tensor("one", i64, [], [1])]
    nodes = [
        helper.make_node("ReduceSum", ["mask", "axis"], ["sums"], keepdims=0),
        helper.make_node("Sub", ["sums", "one"], ["less"]),
        helper.make_node("Cast", ["less"], ["lengths"], to=TensorProto.INT32),
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["long"]),
        helper.make_node("Cast", ["long"], ["total"], to=TensorProto.INT32),
        helper.make_node(
            "GroupQueryAttention",
            ["q", *(["", ""] if packed else ["k", "v"]), "past_key", "past_value", "lengths", "total",
             *(["cos", "sin"] if rotary else [])],
            ["a", "present_key", "present_value"],
            domain="com.microsoft", num_heads=HEADS, kv_num_heads=GROUPS, do_rotary=int(rotary), **attributes,
        ),
    ]  # fmt: skip
    for n in range(DENSE):  # most steps of a model do not depend on the length
        source, target = ("a" if n == 0 else f"h{n}"), ("y" if n == DENSE - 1 else f"h{n + 1}")
        nodes += [helper.make_node("MatMul", [source, "w"], [f"m{n}"]), helper.make_node("Tanh", [f"m{n}"], [target])]
    w = ROWS.standard_normal((HEADS * SIZE, HEADS * SIZE)).astype(np.float32) / 8
    constants.append(helper.make_tensor("w", f, w.shape, w.reshape(-1)))
    outputs = [helper.make_tensor_value_info("y", f, [batch, "s", HEADS * SIZE])]
    outputs += [helper.make_tensor_value_info(n, f, None) for n in ("present_key", "present_value")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [*tables, *constants])
    return helper.make_model(
        graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    )


def fed(batch: int, packed: bool, rows: int, total: int, caches: list[np.ndarray]) -> dict[str, np.ndarray]:
    width = HEADS * SIZE + (2 * GROUPS * SIZE if packed else 0)
    feeds = {"q": ROWS.standard_normal((batch, rows, width)).astype(np.float32)}
    if not packed:
        feeds |= {n: ROWS.standard_normal((batch, rows, GROUPS * SIZE)).astype(np.float32) for n in ("k", "v")}
    return {**feeds, "mask": np.ones((batch, total), np.int64), "past_key": caches[0], "past_value": caches[1]}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "attributes", [{"rotary": True}, {"rotary": False}, {"rotary": True, "rotary_interleaved": 1, "local_window_size": 3}]
)
def test_caches_grow_in_place_without_new_plans(packed: bool, attributes: dict[str, Any]) -> None:
    proto = model(2, packed, **attributes)
    plain, rep = SingaBackend.prepare(proto, optimize=0), SingaBackend.prepare(proto)
    caches = [np.zeros((2, GROUPS, 0, SIZE), np.float32)] * 2
    total, memory = 0, set()
    for rows in (5, *[1] * 12):
        total += rows
        feeds = fed(2, packed, rows, total, caches)
        expected = plain.run(feeds)
        found = rep.run(feeds)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and np.allclose(a, b, rtol=2e-5, atol=2e-6)
        caches = [found[1], found[2]]
        memory.add(found[1].ctypes.data)
    assert shows_cache(caches[0]) and shows_cache(caches[1])
    assert len(memory) <= 3  # the caches of the prompt, and a copy with room
    planner = rep._session._planner
    assert planner is not None and len(planner.plans) == 2  # of the prompt, and of one row after any past
    assert "numpy.group_query" in {s.kernel for s in rep.profile(feeds).steps}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "attributes", [{"rotary": True}, {"rotary": False}, {"rotary": True, "rotary_interleaved": 1, "local_window_size": 3}]
)
def test_buffers_of_a_maximum_length_need_no_new_plans(packed: bool, attributes: dict[str, Any]) -> None:
    """The arrays of the caller stay as they are; after the end of the buffer the caches grow, as in the definition."""
    proto = model(2, packed, **attributes)
    plain, rep = SingaBackend.prepare(proto, optimize=0), SingaBackend.prepare(proto)
    caches = [np.full((2, GROUPS, 20, SIZE), x, np.float32) for x in (np.nan, 3e38)]  # rows without a token have no effect
    caches = [np.where(np.arange(20)[:, None] < 5, ROWS.standard_normal(c.shape), c).astype(np.float32) for c in caches]
    total = 5
    for rows in (2, *[1] * 16):
        total += rows
        feeds = fed(2, packed, rows, total, caches)
        before = [c.copy() for c in caches]
        expected = plain.run(feeds)
        found = rep.run(feeds)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and np.allclose(a, b, rtol=2e-5, atol=2e-6, equal_nan=a.ndim == 4)
        assert all(np.array_equal(c, b, equal_nan=True) for c, b in zip(caches, before, strict=True))
        caches = [found[1], found[2]]
        assert caches[0].shape[2] == max(20, total)
        planner = rep._session._planner
        assert planner is not None and len(planner.plans) <= 2 and (rep._session.reason is None or total > 20)


def test_padded_sequences_are_computed_by_the_definition() -> None:
    proto = model(2, False, True)
    full = fed(2, False, 4, 4, [np.zeros((2, GROUPS, 0, SIZE), np.float32)] * 2)
    padded = full | {"mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]])}
    first, rep = SingaBackend.prepare(proto), SingaBackend.prepare(proto)
    for feeds in (padded, padded, full, full, padded, full):
        expected = SingaBackend.run_model(proto, feeds, optimize=0)
        for one in (rep, first):
            found = one.run(feeds)
            for a, b in zip(found, expected, strict=True):
                rows = slice(None) if feeds is full else slice(2)  # the results of padding are not specified
                assert np.allclose(a[0], b[0], rtol=2e-5, atol=2e-6)
                assert a.ndim == 4 or np.allclose(a[1, rows], b[1, rows], rtol=2e-5, atol=2e-6)
        first = SingaBackend.prepare(proto)
        first.run(full)


def test_padded_sequences_in_buffers_are_computed_by_the_definition() -> None:
    """Before, between and after runs without padding, whose lengths grow."""
    proto = model(2, False, True)
    rep, plain = SingaBackend.prepare(proto), SingaBackend.prepare(proto, optimize=0)
    caches = [ROWS.standard_normal((2, GROUPS, 16, SIZE)).astype(np.float32) for _ in range(2)]
    for total, short in ((4, 0), (5, 0), (6, 1), (7, 1), (8, 0), (9, 0), (10, 0), (11, 2), (12, 0)):
        feeds = fed(2, False, 1, total, caches)
        feeds["mask"][1, total - short :] = 0
        found, expected = rep.run(feeds), plain.run(feeds)
        for a, b in zip(found, expected, strict=True):
            assert np.allclose(a, b, rtol=2e-5, atol=2e-6), (total, short)


@pytest.mark.parametrize("attributes", [{"softcap": 2.0}, {"smooth_softmax": 1}, {"causal": 0}])
def test_other_forms_are_computed_by_the_definition(attributes: dict[str, Any]) -> None:
    proto = model(1, False, True, **attributes)
    feeds = fed(1, False, 4, 4, [np.zeros((1, GROUPS, 0, SIZE), np.float32)] * 2)
    rep = SingaBackend.prepare(proto)
    expected = SingaBackend.run_model(proto, feeds, optimize=0)
    assert all(np.allclose(a, b, rtol=2e-5, atol=2e-6) for a, b in zip(rep.run(feeds), expected, strict=True))
    (node,) = [n for n in rep.profile(feeds).nodes if n.operator == "GroupQueryAttention"]
    assert any("not causal" in text for text in node.notes), node
