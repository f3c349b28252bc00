"""Attention whose caches grow in their memory: one plan for all lengths, and no copy of the past."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from singa_backend import SingaBackend
from singa_backend.plans.caches import shows_cache

HEADS, SIZE, DENSE = 4, 16, 6
WIDTH = HEADS * SIZE
RNG = np.random.default_rng(0)


def model(kind: str, dtype: int = TensorProto.FLOAT) -> Any:
    """Attention over growing caches, and products that do not depend on the length."""
    real = helper.tensor_dtype_to_np_dtype(dtype)
    weights: list[Any] = []

    def weight(name: str, *shape: int) -> str:
        array = (RNG.standard_normal(shape) / 8).astype(real)
        weights.append(helper.make_tensor(name, dtype, shape, array.tobytes(), raw=True))
        return name

    def info(name: str, *shape: Any) -> Any:
        return helper.make_tensor_value_info(name, dtype, shape or None)

    inputs, pasts = [info("x", 1, "s", WIDTH)], ["past_key", "past_value"]
    node = helper.make_node
    if kind == "joined":
        pasts = ["past"]
        call = node("Attention", ["x", weight("wx", WIDTH, 3 * WIDTH), weight("bx", 3 * WIDTH), "", "past"], ["a", "present"],
                    domain="com.microsoft", num_heads=HEADS, unidirectional=1)  # fmt: skip
    elif kind == "multi-head":
        call = node("MultiHeadAttention", ["q", "k", "v", weight("bx", 3 * WIDTH), "", "", *pasts],
                    ["a", "present_key", "present_value"], domain="com.microsoft", num_heads=HEADS, unidirectional=1)  # fmt: skip
    else:
        call = node("Attention", ["q", "k", "v", "", *pasts], ["a", "present_key", "present_value"],
                    q_num_heads=HEADS, kv_num_heads=HEADS, is_causal=1)  # fmt: skip
    nodes = [] if kind == "joined" else [node("MatMul", ["x", weight(f"w{n}", WIDTH, WIDTH)], [n]) for n in "qkv"]
    nodes.append(call)
    names = ["a", *(f"h{i}" for i in range(1, DENSE)), "y"]
    for i in range(DENSE):
        nodes += [node("MatMul", [names[i], weight(f"d{i}", WIDTH, WIDTH)], [f"m{i}"]), node("Tanh", [f"m{i}"], [names[i + 1]])]
    inputs += [info(n, *([2] if kind == "joined" else []), 1, HEADS, "p", SIZE) for n in pasts]
    outputs = [info("y", 1, "s", WIDTH), *(info(n.replace("past", "present")) for n in pasts)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=imports)


def begun(proto: Any, rows: int = 0) -> dict[str, np.ndarray]:
    """Caches with some drawn rows."""
    made = {}
    for x in list(proto.graph.input)[1:]:
        kind = x.type.tensor_type
        shape = [d.dim_value or rows for d in kind.shape.dim]
        made[x.name] = RNG.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return made


def rows(count: int, like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"x": RNG.standard_normal((1, count, WIDTH)).astype(next(iter(like.values())).dtype), **like}


KINDS = ["joined", "multi-head", "ai.onnx"]


@pytest.mark.parametrize("kind", KINDS)
def test_caches_grow_in_place_without_new_plans(kind: str) -> None:
    proto = model(kind)
    plain, rep = SingaBackend.prepare(proto, optimize=0), SingaBackend.prepare(proto)
    caches, memory, seen = begun(proto), [], []
    for count in (5, *[1] * 20):
        feeds = rows(count, caches)
        found, expected = rep.run(feeds), plain.run(feeds)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and np.allclose(a, b, rtol=2e-5, atol=2e-6)
        caches = dict(zip(caches, list(found)[1:], strict=True))
        memory.append([c.ctypes.data for c in caches.values()])
        seen.append((found, [np.array(y) for y in found]))
    assert all(shows_cache(c) for c in caches.values())
    assert len({tuple(m) for m in memory[1:]}) == 1
    planner = rep._session._planner
    assert planner is not None and len(planner.plans) == 2  # of the prompt, and of one row after any past
    for found, copies in seen:  # no later run has changed them
        for a, b in zip(found, copies, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_cache_is_found(kind: str) -> None:
    """A step of kernels that need finite values is not run on others."""
    proto = model(kind)
    plain, rep = SingaBackend.prepare(proto, optimize=0), SingaBackend.prepare(proto)
    caches = begun(proto, 4)
    for n in range(8):
        feeds = rows(1, caches)
        if n == 6:
            feeds = {k: v.copy() for k, v in feeds.items()}
            feeds[next(iter(caches))][..., 0, :] = np.nan
        found, expected = rep.run(feeds), plain.run(feeds)
        for a, b in zip(found, expected, strict=True):
            assert np.allclose(a, b, rtol=2e-5, atol=2e-6, equal_nan=True)
        assert np.isnan(found[0]).any() == (n >= 6)
        caches = dict(zip(caches, list(found)[1:], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_halves_are_those_of_the_definition(kind: str) -> None:
    proto = model(kind, TensorProto.FLOAT16)
    plain, rep = SingaBackend.prepare(proto, optimize=0), SingaBackend.prepare(proto)
    caches = begun(proto)
    for count in (4, *[1] * 8):
        feeds = rows(count, caches)
        found, expected = rep.run(feeds), plain.run(feeds)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and np.allclose(a, b, rtol=1e-2, atol=1e-3)
        caches = dict(zip(caches, list(found)[1:], strict=True))


def test_a_past_of_another_shape_is_refused_as_before() -> None:
    proto = model("multi-head")
    rep, caches = SingaBackend.prepare(proto), begun(proto)
    for _ in range(6):
        caches = dict(zip(caches, list(rep.run(rows(1, caches)))[1:], strict=True))
    feeds = rows(1, caches) | {"past_key": np.zeros((1, HEADS, 9, SIZE), np.float32)}
    with pytest.raises(Exception) as plain:
        SingaBackend.prepare(proto, optimize=0).run(feeds)
    with pytest.raises(type(plain.value)) as planned:
        rep.run(feeds)
    assert str(planned.value) == str(plain.value)
