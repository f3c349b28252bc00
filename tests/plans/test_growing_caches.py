"""A model that generates text, whose past grows in each run: one plan computes all lengths, and its caches grow in place."""

from __future__ import annotations

import gc
import os
import signal
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests.helpers import language_models

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.errors import InvalidInput, ResourceExhausted
from singa_backend.kernels.values import Buffer, Value
from singa_backend.limits import Budget, Limits
from singa_backend.plans import caches
from singa_backend.plans.passed import PASSED
from singa_backend.plans.plan import Plan

HEADS, SIZE, WORDS = 4, 16, 50
WIDTH = HEADS * SIZE


def node(name: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(name, inputs.split(), outputs.split(), **attributes)


def decoder(layers: int = 2) -> onnx.ModelProto:
    """A decoder of text: learned positions, attention to the past with a mask, a residual sum, a projection to words."""
    draw = np.random.default_rng(0)
    weights = {
        "words": draw.standard_normal((WORDS, WIDTH)), "places": draw.standard_normal((2048, WIDTH)),
        "head": draw.standard_normal((WIDTH, WORDS)),
    }  # fmt: skip
    integers = {"one": [1], "zero": [0], "end": [1 << 40], "two": [2], "parts": [0, 0, HEADS, SIZE], "flat": [0, 0, WIDTH]}
    scalars = {"start": 0, "step": 1}
    nodes = [
        node("Shape", "past_0_key", "sizes"), node("Gather", "sizes two", "length1"), node("Squeeze", "length1", "length"),
        node("Shape", "tokens", "tsizes"), node("Gather", "tsizes one", "count1"), node("Squeeze", "count1", "count"),
        node("Add", "length count", "total"), node("Range", "length total step", "positions"),
        node("Gather", "places positions", "placed"), node("Gather", "words tokens", "found"), node("Add", "found placed", "x0"),
        node("Range", "start total step", "keys"), node("Unsqueeze", "positions one", "rows"),
        node("LessOrEqual", "keys rows", "seen"), node("Where", "seen nothing lowest", "causal"),
        node("Cast", "mask", "shown", to=TensorProto.BOOL), node("Unsqueeze", "shown middle", "wide"),
        node("Where", "wide nothing lowest", "padding"), node("Add", "causal padding", "bias"),
    ]  # fmt: skip
    weights |= {"nothing": np.zeros(()), "lowest": np.full((), -1e9), "factor": np.full((), SIZE**-0.5)}
    inputs = [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, "now"]),
        helper.make_tensor_value_info("mask", TensorProto.INT64, [1, "all"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "now", WORDS])]
    for n in range(layers):
        for w, shape in (
            ("qkv", (WIDTH, 3 * WIDTH)),
            ("out", (WIDTH, WIDTH)),
            ("up", (WIDTH, 2 * WIDTH)),
            ("down", (2 * WIDTH, WIDTH)),
        ):
            weights[f"{w}{n}"] = draw.standard_normal(shape) / np.sqrt(shape[0])
        weights[f"g{n}"], weights[f"b{n}"] = np.ones(WIDTH), np.zeros(WIDTH)
        nodes += [
            node("LayerNormalization", f"x{n} g{n} b{n}", f"n{n}"), node("MatMul", f"n{n} qkv{n}", f"three{n}"),
            node("Split", f"three{n}", f"q{n} k{n} v{n}", axis=-1, num_outputs=3),
        ]  # fmt: skip
        for what in "qkv":
            nodes += [
                node("Reshape", f"{what}{n} parts", f"{what}p{n}"),
                node("Transpose", f"{what}p{n}", f"{what}h{n}", perm=[0, 2, 1, 3]),
            ]
        for what, word in ("k", "key"), ("v", "value"):
            nodes.append(node("Concat", f"past_{n}_{word} {what}h{n}", f"present_{n}_{word}", axis=-2))
            inputs.append(helper.make_tensor_value_info(f"past_{n}_{word}", TensorProto.FLOAT, [1, HEADS, "past", SIZE]))
            outputs.append(helper.make_tensor_value_info(f"present_{n}_{word}", TensorProto.FLOAT, [1, HEADS, "all", SIZE]))
        nodes += [
            node("Transpose", f"present_{n}_key", f"kt{n}", perm=[0, 1, 3, 2]), node("MatMul", f"qh{n} kt{n}", f"s{n}"),
            node("Mul", f"s{n} factor", f"scaled{n}"), node("Add", f"scaled{n} bias", f"masked{n}"),
            node("Softmax", f"masked{n}", f"p{n}", axis=-1), node("MatMul", f"p{n} present_{n}_value", f"y{n}"),
            node("Transpose", f"y{n}", f"t{n}", perm=[0, 2, 1, 3]), node("Reshape", f"t{n} flat", f"f{n}"),
            node("MatMul", f"f{n} out{n}", f"o{n}"), node("Add", f"o{n} x{n}", f"r{n}"), node("MatMul", f"r{n} up{n}", f"u{n}"),
            node("Gelu", f"u{n}", f"a{n}"), node("MatMul", f"a{n} down{n}", f"d{n}"), node("Add", f"d{n} r{n}", f"x{n + 1}"),
        ]  # fmt: skip
    nodes.append(node("MatMul", f"x{layers} head", "logits"))
    held = [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()]
    held += [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in {**integers, **scalars, "middle": [1]}.items()]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def first(model: SingaRep, length: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(length)
    made: dict[str, np.ndarray] = {"tokens": np.array([[7]]), "mask": np.ones((1, length + 1), np.int64)}
    for v in model.inputs[2:]:
        made[v.name] = draw.standard_normal((1, HEADS, length, SIZE)).astype(np.float32)
    return made


def following(outputs: Any, feeds: dict[str, np.ndarray], token: int) -> dict[str, np.ndarray]:
    made = {n: outputs[n.replace("past", "present")] for n in feeds if n.startswith("past")}
    return {"tokens": np.array([[token]]), "mask": np.ones((1, feeds["mask"].shape[1] + 1), np.int64), **made}


def growing(rep: SingaRep) -> Plan:
    """The plan that was used last, whose caches grow."""
    planner = rep._session._planner
    assert planner is not None and planner.latest is not None and planner.latest.caches
    return planner.latest


def close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(b).max(initial=0))))


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return decoder()


def test_one_plan_computes_all_lengths_and_caches_grow_in_place(model: onnx.ModelProto) -> None:
    plan, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    feeds = first(plan, 30)
    seen, in_place = [], 0
    for n in range(150):
        outputs = plan.run(feeds)
        if n % 7 < 2 or n > 145:
            close(outputs, definition.run(feeds))
        seen.append((outputs, [np.array(o) for o in outputs]))
        if n:
            pasts = [k for k in feeds if k.startswith("past")]
            in_place += all(np.shares_memory(outputs[k.replace("past", "present")], feeds[k]) for k in pasts)
        feeds = following(outputs, feeds, n % WORDS)
    planner = plan._session._planner
    assert planner is not None and len(planner.plans) == 1
    assert in_place >= 150 - 1 - 2  # a copy only when there is no room
    for outputs, copies in seen:  # no later run has changed them
        for a, b in zip(outputs, copies, strict=True):
            np.testing.assert_array_equal(a, b)
    assert all(c.owner is None and c.value.buffer.memory is None for c in growing(plan).caches)  # nothing of the caller is kept


def grown(batch: int, tokens: int, pasts: dict[str, np.ndarray], past: int) -> dict[str, np.ndarray]:
    """The inputs of a decoder of tests/helpers/language_models.py."""
    made = {"input_ids": np.full((batch, tokens), 7), "attention_mask": np.ones((batch, past + tokens), np.int64)}
    return made | {"position_ids": np.broadcast_to(np.arange(past, past + tokens), (batch, tokens)).copy(), **pasts}


def test_prompts_and_texts_of_any_length_and_batch() -> None:
    """One plan computes prompts, and one the rows after a past, for one text; two others for several."""
    file = language_models.Decoder().model()
    rep, definition = SingaBackend.prepare(file), SingaBackend.prepare(file, optimize=0)
    names = [v.name for v in rep.inputs[3:]]
    texts = [(1, n, 1) for n in (3, 4, 6, 5, 9, 7)] + [(1, 8, 12), (2, 5, 12), (1, 10, 12), (3, 4, 12), (2, 9, 12)]
    for batch, length, runs in texts:
        empty = np.zeros((batch, language_models.HEADS, 0, language_models.SIZE), np.float32)
        feeds = grown(batch, length, dict.fromkeys(names, empty), 0)
        for n in range(runs):
            outputs = rep.run(feeds)
            assert rep._session.reason is None
            close(outputs, definition.run(feeds))
            feeds = grown(batch, 1, {k: outputs[k.replace("past_key_values", "present")] for k in names}, length + n)
    planner = rep._session._planner
    assert planner is not None and len(planner.plans) == 4


def test_a_cache_that_shares_memory_is_read_only(model: onnx.ModelProto) -> None:
    rep = SingaBackend.prepare(model)
    feeds = first(rep, 10)
    for n in range(3):
        outputs = rep.run(feeds)
        feeds = following(outputs, feeds, n)
    with pytest.raises(ValueError, match="read-only"):
        outputs["present_0_key"][:] = 0
    outputs["logits"][:] = 0


def test_an_array_of_out_must_not_show_a_cache(model: onnx.ModelProto) -> None:
    """A caller may make the memory of a cache writable; another output of a run must not overwrite it."""
    rep, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    feeds = first(rep, 10)
    for n in range(4):
        outputs = rep.run(feeds)
        feeds = following(outputs, feeds, n)
    past = feeds["past_0_key"]
    assert past.base is not None and past.base.flags.writeable
    view = np.ndarray(outputs["logits"].shape, np.float32, past.base, -past.base.ctypes.data % 64)
    for out in (view, view[...], view[:, :, ::-1]):
        with pytest.raises(InvalidInput, match="cache") as caught:
            rep.run(feeds, out={"logits": out})
        assert caught.value.code == "SX385"
    close(rep.run(feeds), definition.run(feeds))


def test_two_continuations_of_one_past_do_not_meet(model: onnx.ModelProto) -> None:
    rep, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    feeds = first(rep, 20)
    for n in range(3):
        feeds = following(rep.run(feeds), feeds, n)
    beams = [{**feeds, "tokens": np.array([[t]])} for t in (1, 2, 3)]
    for n in range(4):
        results = [rep.run(b) for b in beams]
        for found, b in zip(results, beams, strict=True):
            close(found, definition.run(b))
        beams = [following(r, b, n) for r, b in zip(results, beams, strict=True)]


def test_a_window_of_a_cache_is_an_input_like_another(model: onnx.ModelProto) -> None:
    rep, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    feeds = first(rep, 12)
    for n in range(12):
        outputs = rep.run(feeds)
        close(outputs, definition.run(feeds))
        feeds = following(outputs, feeds, n)
        if n % 3 == 2:  # forget the first two
            feeds = {k: v[:, :, 2:] if k.startswith("past") else v for k, v in feeds.items()}
            feeds["mask"] = np.ones((1, feeds["past_0_key"].shape[2] + 1), np.int64)


def test_nan_in_a_cache_is_found(model: onnx.ModelProto) -> None:
    rep, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    feeds = first(rep, 20)
    for n in range(4):
        feeds = following(rep.run(feeds), feeds, n)
    feeds["past_1_value"] = feeds["past_1_value"].copy()
    feeds["past_1_value"][0, 1, 2, 3] = np.nan
    for found, expected in zip(rep.run(feeds), definition.run(feeds), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert np.isnan(rep.run(feeds)["logits"]).any()


def test_inputs_of_unequal_lengths_are_refused_as_before(model: onnx.ModelProto) -> None:
    rep = SingaBackend.prepare(model)
    feeds = first(rep, 20)
    for n in range(4):
        feeds = following(rep.run(feeds), feeds, n)
    with pytest.raises(Exception, match="past"):
        rep.run({**feeds, "past_0_key": feeds["past_0_key"][:, :, :-1]})
    with pytest.raises(Exception, match=r"Add|broadcast"):
        rep.run({**feeds, "mask": np.ones((1, 3), np.int64)})
    close(rep.run(feeds), SingaBackend.prepare(model, optimize=0).run(feeds))


def test_limits_hold(model: onnx.ModelProto) -> None:
    rep = SingaBackend.prepare(model)
    feeds = first(rep, 20)
    for n in range(4):
        feeds = following(rep.run(feeds), feeds, n)
    with pytest.raises(ResourceExhausted):
        rep.run(feeds, limits=Limits(executions=20))
    with pytest.raises(ResourceExhausted):
        rep.run(feeds, limits=Limits(tensor_bytes=HEADS * SIZE * 4 * 10))
    close(rep.run(feeds), SingaBackend.prepare(model, optimize=0).run(feeds))


def test_values_are_kept_up_to_their_last_use() -> None:
    """Many tokens after a past: the weights of attention of one layer are live at one time, and limits hold."""
    model = decoder(6)
    rep, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)

    def feeds(length: int) -> dict[str, np.ndarray]:
        more = {"tokens": np.ones((1, 200), np.int64), "mask": np.ones((1, length + 200), np.int64)}
        return {**first(rep, length), **more}

    for length in (200, 201):
        rep.run(feeds(length))
    assert growing(rep).first.arena_bytes
    given = feeds(203)
    peaks = []
    for each in (rep, definition):
        tracemalloc.start()
        each.run(given)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 2 * peaks[1]
    for each in (rep, definition):
        with pytest.raises(ResourceExhausted, match="SX604"):
            each.run(given, limits=Limits(live_bytes=peaks[1] // 2))


def test_threads_take_turns(model: onnx.ModelProto) -> None:
    rep = SingaBackend.prepare(model)
    expected: dict[int, list[np.ndarray]] = {}
    found: dict[int, list[np.ndarray]] = {}

    def generate(key: int, into: dict[int, list[np.ndarray]], run: Any) -> None:
        feeds = first(rep, key)
        for n in range(20):
            outputs = run(feeds)
            feeds = following(outputs, feeds, n)
        into[key] = [np.array(o) for o in outputs]

    keys = range(10, 13)
    for key in keys:
        generate(key, expected, SingaBackend.prepare(model, optimize=0).run)
    threads = [threading.Thread(target=generate, args=(key, found, rep.run)) for key in keys]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for key in keys:
        close(found[key], expected[key])


def generate_a_little(model: onnx.ModelProto) -> tuple[SingaRep, dict[str, np.ndarray]]:
    """A model with a plan whose caches grow, and its next inputs."""
    rep = SingaBackend.prepare(model)
    feeds = first(rep, 10)
    for n in range(4):
        feeds = following(rep.run(feeds), feeds, n)
    growing(rep)
    return rep, feeds


def test_a_run_that_fails_keeps_no_array_of_the_caller(model: onnx.ModelProto) -> None:
    rep, feeds = generate_a_little(model)
    for name, bad in (
        ("past_0_value", np.full(feeds["past_0_value"].shape, np.nan, np.float32)),
        ("tokens", np.array([[WORDS + 7]])),
    ):
        given = {k: v.copy() for k, v in {**feeds, name: bad}.items()}
        kept = [weakref.ref(v) for v in given.values()]
        with suppress(Exception):
            rep.run(given)
        del given
        gc.collect()
        assert all(r() is None for r in kept), name


def passes_in_a_child(run: Callable[[], Any]) -> bool:
    """Whether a call ends without an error in a forked child."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_generates_whatever_threads_of_its_parent_did(model: onnx.ModelProto) -> None:
    rep, feeds = generate_a_little(model)
    with growing(rep).turn.lock:
        assert passes_in_a_child(lambda: rep.run(feeds))
    close(rep.run(feeds), SingaBackend.prepare(model, optimize=0).run(feeds))


def simple(nodes: list[onnx.NodeProto], outputs: dict[str, list[Any]], **constants: Any) -> onnx.ModelProto:
    """A model of a past (1, L, 4), x (1, 4) and a table (64, 4)."""
    given = {"past": [1, "L", 4], "x": [1, 4], "table": [64, 4]}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in given.items()],
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in outputs.items()],
        [numpy_helper.from_array(np.array(v), k) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def steps(model: onnx.ModelProto, lengths: Any) -> SingaRep:
    """Compare plan and definition at some lengths of the past."""
    plan, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    draw = np.random.default_rng(0)
    table = draw.standard_normal((64, 4)).astype(np.float32)
    for length in lengths:
        past = draw.standard_normal((1, length, 4)).astype(np.float32)
        feeds = {"past": past, "x": draw.standard_normal((1, 4)).astype(np.float32), "table": table}
        close(plan.run(feeds), definition.run(feeds))
    return plan


FILLER = [node("Tanh" if n % 2 else "Sin", f"w{n}", f"w{n + 1}") for n in range(8)]


@pytest.mark.parametrize(
    "lengths", [range(3, 14), (9, 10, 4, 5, 6), (3, 4, 3, 4, 12, 3, 5, 7)], ids=["growing", "shrinking", "mixed"]
)
def test_a_length_that_counts_only_from_some_point_on(lengths: Any) -> None:
    """The smaller of the length and 6: the same constant in the first runs, and another one later."""
    nodes = [
        node("Shape", "past", "s"), node("Gather", "s one", "n"), node("Max", "n six", "m"), node("Unsqueeze", "m zero", "m1"),
        node("Slice", "table zero m1 zero", "rows"), node("ReduceSum", "rows zero", "t", keepdims=0), node("Add", "x t", "w0"),
        *FILLER, node("Identity", "w8", "y"),
    ]  # fmt: skip
    steps(simple(nodes, {"y": [1, 4]}, one=1, six=6, zero=np.array([0])), lengths)


def test_a_result_whose_shape_changes_later() -> None:
    nodes = [
        node("Shape", "past", "s"), node("Gather", "s one", "n"), node("Div", "n four", "m"),
        node("Add", "m one", "k"),
        node("Unsqueeze", "k zero", "k1"), node("Slice", "table zero k1 zero", "rows"), node("Mul", "rows x", "w0"), *FILLER,
        node("Identity", "w8", "y"),
    ]  # fmt: skip
    steps(simple(nodes, {"y": ["k", 4]}, one=1, four=4, zero=np.array([0])), range(4, 20))


def test_a_row_of_an_input_at_the_length() -> None:
    """The row is a view of an input, which is read again later: it must not be written into that input."""
    nodes = [
        node("Relu", "table", "held"), node("Shape", "past", "s"), node("Gather", "s one", "n"), node("Add", "n one", "end"),
        node("Unsqueeze", "n zero", "n1"), node("Unsqueeze", "end zero", "end1"), node("Slice", "held n1 end1 zero", "row"),
        node("Add", "row x", "w0"), *FILLER, node("MatMul", "held turned", "square"),
        node("ReduceSum", "square", "total", keepdims=0),
        node("Add", "w8 total", "y"),
    ]  # fmt: skip
    steps(simple(nodes, {"y": [1, 4]}, one=1, zero=np.array([0]), turned=np.ones((4, 4), np.float32)), range(4, 20))


def test_a_value_that_the_kernel_reads_from_a_copy() -> None:
    """The pool of `h` is read from the copy that the convolution made."""
    draw = np.random.default_rng(0)
    nodes = [
        node("Shape", "past", "s"), node("Gather", "s one", "n"), node("Cast", "n", "length", to=1),
        node("Tanh", "x", "h"), node("Conv", "h weight", "w0"), *FILLER, node("Conv", "w8 weight", "w9"),
        node("AveragePool", "h", "pooled", kernel_shape=[3, 3], pads=[1, 1, 1, 1]), node("Mul", "pooled length", "long"),
        node("Add", "w9 long", "y"),
    ]  # fmt: skip
    shape = [1, 8, 16, 16]
    weights = {"one": np.array(1), "weight": draw.standard_normal((8, 8, 1, 1)).astype(np.float32) / 3}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("past", 1, [1, "L"]), helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info("y", 1, shape)], [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    plan, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    for length in range(3, 9):
        feeds = {"past": np.zeros((1, length), np.float32), "x": draw.standard_normal(shape).astype(np.float32)}
        close(plan.run(feeds), definition.run(feeds))
    assert plan._session._planner is not None and len(plan._session._planner.plans) == 1


def cached(dtype: int, *nodes: onnx.NodeProto, **outputs: list[Any]) -> onnx.ModelProto:
    """A model of a cache past (B, L, 4), to which it appends new (B, 1, 4), and of x (B, 4)."""
    calls = [node("Concat", "past new", "present", axis=-2)]
    calls += [node("Tanh" if n % 2 else "Sin", f"x{n}" if n else "x", f"x{n + 1}") for n in range(10)]
    value = helper.make_tensor_value_info
    constants = {"one": np.array([1]), "weight": np.eye(4, dtype=np.float32)}
    graph = helper.make_graph(
        [*calls, *nodes], "g",
        [value("past", dtype, ["B", "L", 4]), value("new", dtype, ["B", 1, 4]), value("x", 1, ["B", 4])],
        [value("present", dtype, ["B", "M", 4]), *[value(k, TensorProto.FLOAT, s) for k, s in outputs.items()]],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.complex64]
)
def test_caches_of_any_type(dtype: Any) -> None:
    """A NaN in a cache is found in all types that have one."""
    nodes = [
        node("Cast", "present", "floats", to=1), node("ReduceMax", "floats one", "flat", keepdims=0),
        node("MatMul", "flat weight", "product"), node("Relu", "product", "positive"), node("Add", "positive x10", "y"),
    ]  # fmt: skip
    if dtype is np.complex64:
        nodes = [node("MatMul", "x10 weight", "product"), node("Relu", "product", "y")]
    model = cached(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), *nodes, y=["B", 4])
    plan, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    past, draw = np.ones((2, 3, 4), dtype), np.random.default_rng(0)
    for n in range(8):
        if n == 5 and dtype is not np.int8:
            past = past.copy()
            past[0, 1, 2] = np.nan
        feeds = {"past": past, "new": np.full((2, 1, 4), n, dtype), "x": draw.standard_normal((2, 4)).astype(np.float32)}
        outputs, expected = plan.run(feeds), definition.run(feeds)
        np.testing.assert_allclose(outputs["y"], expected["y"], 1e-4, 1e-4)
        assert outputs["present"].tobytes() == expected["present"].tobytes()
        past = outputs["present"]
    assert [c.call is not None for c in growing(plan).caches] == [True]


def test_an_output_that_is_not_copied() -> None:
    nodes = [node("Pad", "x10 pads", "wide"), node("Relu", "wide", "large"), node("ReduceSum", "large", "sum", keepdims=0)]
    nodes += [node("ReduceSum", "present one", "total", keepdims=0), node("Add", "total sum", "y")]
    model = cached(TensorProto.FLOAT, *nodes, y=["B", 4], large=["B", "W"])
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 0, PASSED // 4]), "pads"))
    plan, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    past, draw = np.ones((2, 3, 4), np.float32), np.random.default_rng(0)
    for _ in range(5):
        x = draw.standard_normal((2, 4)).astype(np.float32)
        feeds = {"past": past, "new": np.ones((2, 1, 4), np.float32), "x": x}
        outputs = plan.run(feeds)
        close(outputs, definition.run(feeds))
        past = outputs["present"]
    growing(plan)


def test_a_shape_that_depends_on_data_needs_plans_of_several_segments() -> None:
    nodes = [node("NonZero", "x", "places"), node("Cast", "places", "y", to=1)]
    model = cached(TensorProto.FLOAT, *nodes, y=[2, "N"], x10=["B", 4])
    plan, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    for batch, length, count in ((2, 5, 0), (3, 9, 0), (2, 5, 1), (3, 9, 0), (3, 10, 0), (3, 11, 1), (3, 12, 2), (3, 13, 0)):
        x = np.ones((batch, 4), np.float32)
        x[0, :count] = 0
        feeds = {"past": np.ones((batch, length, 4), np.float32), "new": np.ones((batch, 1, 4), np.float32), "x": x}
        close(plan.run(feeds), definition.run(feeds))
        planner = plan._session._planner
        assert planner is not None and planner.latest is not None
        assert not planner.latest.caches  # they are copied


@st.composite
def drawn(draw: st.DrawFn) -> onnx.ModelProto:
    """A model that mixes values of fixed and of growing shapes."""
    fixed, growing, nodes = ["x"], [("past", 0)], []
    wide = False
    for n in range(draw(st.integers(6, 24))):
        y = f"v{n}"
        kind = draw(st.integers(0, 11))
        f, (g, more) = draw(st.sampled_from(fixed)), draw(st.sampled_from(growing))
        if kind <= 3:
            nodes.append(node(draw(st.sampled_from(["Add", "Sub", "Max"])), f"{f} {draw(st.sampled_from(fixed))}", y))
        elif kind == 4:
            nodes.append(node(draw(st.sampled_from(["Tanh", "Relu", "Sin", "Neg"])), f, y))
        elif kind == 5:
            nodes += [node("MatMul", f"{f} weight", f"{y}a"), node("Tanh", f"{y}a", y)]
        elif kind == 6:
            nodes.append(node(draw(st.sampled_from(["ReduceMean", "ReduceMax"])), f"{g} one1", y, keepdims=0))
        elif kind == 7:
            nodes += [node("Shape", g, f"{y}s"), node("Gather", f"{y}s one", f"{y}n"), node("Cast", f"{y}n", f"{y}f", to=1)]
            nodes += [node("Mul", f"{y}f hundredth", f"{y}h"), node("Mul", f"{y}h {f}", y)]
        elif kind == 8:
            source = draw(st.sampled_from(["table", "fixed_table", "tanh_table"]))
            wide |= source == "tanh_table"
            nodes += [node("Shape", g, f"{y}s"), node("Gather", f"{y}s one1", f"{y}n"), node("Add", f"{y}n one1", f"{y}e")]
            nodes.append(node("Slice", f"{source} {y}n {y}e zero1", y))
        elif kind == 9:
            nodes += [node("Unsqueeze", f"{f} one1", f"{y}u"), node("Concat", f"{g} {f'{y}u'}", y, axis=1)]
            growing.append((y, more + 1))
            continue
        elif kind == 10:
            nodes.append(node(draw(st.sampled_from(["Add", "Mul"])), f"{g} {f}", y))
            growing.append((y, more))
            continue
        else:
            nodes.append(node(draw(st.sampled_from(["Relu", "Tanh", "Identity"])), g, y))
            growing.append((y, more))
            continue
        fixed.append(y)
    if wide:
        nodes.insert(0, node("Tanh", "table", "tanh_table"))
    outputs = draw(
        st.lists(st.sampled_from([*fixed[1:], *[g for g, _ in growing[1:]]] or ["x"]), min_size=1, max_size=4, unique=True)
    )
    lengths = dict(growing)
    if outputs == ["x"]:
        nodes.append(node("Identity", "x", "only"))
        outputs = ["only"]
    if not nodes:
        nodes.append(node("Identity", "x", outputs[0]))
    return simple(
        nodes, {o: [1, f"L{lengths[o]}", 4] if o in lengths else [1, 4] for o in outputs},
        one=1, one1=np.array([1]), zero1=np.array([0]), hundredth=np.float32(0.01),
        weight=np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4),
        fixed_table=np.linspace(0, 1, 256, dtype=np.float32).reshape(64, 4),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn(), st.lists(st.integers(1, 30), min_size=3, max_size=6))
def test_drawn_models(model: onnx.ModelProto, lengths: list[int]) -> None:
    steps(model, [lengths[0], lengths[0] + 1, *lengths])


def cache_of(shape: tuple[int, ...], axis: int, rows: int) -> caches.GrowingCache:
    """A cache of a plan, to which rows are appended."""
    length = shape[axis] + rows
    value, present = (Value(Buffer(0), s, (), np.dtype(np.float32)) for s in (shape, (*shape[:axis], length, *shape[axis + 1 :])))
    return caches.GrowingCache(value, axis=axis, rows=rows, present=present)


def extended(x: np.ndarray, rows: int) -> tuple[np.ndarray, caches.CacheMemory]:
    """A cache with room for more rows along axis 1, as a run returns it, and its memory."""
    cache = cache_of(x.shape, 1, rows)
    cache.choose_memory(x, cache.room_of(x), Budget(Limits()))
    memory = cache.owner
    assert memory is not None and cache.present is not None
    return cache.take(cache.present), memory


def test_memory_of_a_cache() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    y, memory = extended(x, 2)
    np.testing.assert_array_equal(y[:, :3], x)
    assert memory.sizes == (2, 5 + caches.SPARE, 4) and y.base is memory and y.ctypes.data % 64 == 0
    z, again = extended(y, 1)
    assert again is memory and z.ctypes.data == y.ctypes.data
    other, copy = extended(y, 1)  # y is not the longest any more
    assert copy is not memory
    np.testing.assert_array_equal(other[:, :5], y)
    for given_array in (z[:, 1:], z[:, ::-1], z[::-1], np.asfortranarray(z), z[:1]):
        made, where = extended(given_array, 1)
        assert where is not memory
        np.testing.assert_array_equal(made[:, :-1], given_array)
    full, same = extended(z, caches.SPARE - 2)
    assert same is memory
    over, moved = extended(full, 1)  # which would leave no room
    assert moved is not memory
    np.testing.assert_array_equal(over[:, :-1], full)


@pytest.mark.parametrize("number", [0.0, np.nan])
def test_large_arrays_of_fixed_shapes_are_not_copied(number: float) -> None:
    """A state that every run reads, and logits: neither depends on the length."""
    nodes = [
        node("MatMul", "state weight", "m"), node("Relu", "m", "hidden"), node("Concat", "past x", "present", axis=0),
        node("ReduceSum", "present zero", "sum"), node("Add", "hidden sum", "y"), node("Neg", "x", "w0"), *FILLER,
    ]  # fmt: skip
    given = {"past": ["L", 512], "x": [1, 512], "state": [300, 512]}
    results = {"y": [300, 512], "hidden": [300, 512], "present": ["L1", 512], "w8": [1, 512]}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in given.items()],
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in results.items()],
        [numpy_helper.from_array(np.eye(512, dtype=np.float32), "weight"), numpy_helper.from_array(np.array([0]), "zero")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    rep, definition = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    draw = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        k: draw.standard_normal([5 if d == "L" else d for d in s]).astype(np.float32) for k, s in given.items()
    }
    feeds["state"].flags.writeable = False
    kept = []
    for n in range(6):
        if n == 4:
            feeds["state"] = feeds["state"].copy()
            feeds["state"][3, 4] += number
        outputs = rep.run(feeds)
        close(outputs, definition.run(feeds))
        kept.append((outputs, [np.array(o) for o in outputs]))
        feeds = {**feeds, "past": outputs["present"]}
    for found, copies in kept:
        for a, b in zip(found, copies, strict=True):
            np.testing.assert_array_equal(a, b)
    first = growing(rep).first
    assert len(first.passed) == 4 and all(p.array is None for p in first.passed)
    assert "definition" not in {s.kernel for s in first.steps}


def test_views_of_a_cache_are_results_of_their_own() -> None:
    """Its last rows, and the whole in another order, are outputs next to it."""
    nodes = [
        node("Concat", "past new", "present", axis=1), node("Slice", "present minus huge one", "last"),
        node("Transpose", "present", "turned", perm=[0, 2, 1]),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("past", 1, [1, "L", 4]), value("new", 1, [1, "N", 4])],
        [value("present", 1, [1, "M", 4]), value("last", 1, [1, 1, 4]), value("turned", 1, [1, 4, "M"])],
        [numpy_helper.from_array(np.array([v]), n) for n, v in (("minus", -1), ("huge", 1 << 40), ("one", 1))],
    )  # fmt: skip
    rep = SingaBackend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
    draw, past = np.random.default_rng(0), np.ones((1, 3, 4), np.float32)
    for rows in (1, 2, 1, 5, 1):
        new = draw.standard_normal((1, rows, 4)).astype(np.float32)
        outputs, whole = rep.run({"past": past, "new": new}), np.concatenate([past, new], 1)
        for y, expected in zip(outputs, (whole, whole[:, -1:], whole.transpose(0, 2, 1)), strict=True):
            np.testing.assert_array_equal(y, expected)
        past = outputs["present"]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_caches_that_append_different_numbers_of_rows_have_room(order: str) -> None:
    """Their pasts have one length; a run may append any number to each."""
    names = [(f"past_{n}", f"new_{n}", f"present_{n}") for n in order]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node("Concat", f"{p} {x}", y, axis=1) for p, x, y in names], "g",
        [v for p, x, _ in names for v in (value(p, 1, [1, "L", 4]), value(x, 1, [1, f"{x}_rows", 4]))],
        [value(y, 1, [1, f"{y}_rows", 4]) for _, _, y in names],
    )  # fmt: skip
    rep = SingaBackend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
    draw = np.random.default_rng(0)
    for length, rows in ((10, (2, 3)), (11, (2, 4)), (12, (2, 900)), (12, (700, 2)), (13, (2, 3))):
        feeds = {}
        for (p, x, _), count in zip(names, rows, strict=True):
            feeds[p], feeds[x] = (draw.standard_normal((1, n, 4)).astype(np.float32) for n in (length, count))
        for y, (p, x, _) in zip(rep.run(feeds), names, strict=True):
            np.testing.assert_array_equal(y, np.concatenate([feeds[p], feeds[x]], 1))


def test_a_plan_that_declines_gives_a_cache_back() -> None:
    """Texts in turn, for whose lengths a plan assumes different things: neither is copied in each run."""
    nodes = [
        node("Concat", "past new", "present", axis=1), node("Slice", "present zero most one", "first"),
        node("ReduceSum", "first one", "y", keepdims=0),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("past", 1, [1, "L", 4]), value("new", 1, [1, 1, 4])],
        [value("present", 1, [1, "M", 4]), value("y", 1, [1, 4])],
        [numpy_helper.from_array(np.array([v]), n) for n, v in (("zero", 0), ("most", 32), ("one", 1))],
    )  # fmt: skip
    rep = SingaBackend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
    new, shared = np.ones((1, 1, 4), np.float32), []
    texts = [np.ones((1, n, 4), np.float32) for n in (3, 60)]
    for _ in range(8):
        for i, past in enumerate(texts):
            outputs = rep.run({"past": past, "new": new})
            np.testing.assert_array_equal(outputs["y"], np.full((1, 4), min(32, past.shape[1] + 1)))
            shared.append(np.shares_memory(outputs["present"], past))
            texts[i] = outputs["present"]
    assert all(shared[4:])
