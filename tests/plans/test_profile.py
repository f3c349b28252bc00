"""Profiles: work, kernels and reasons by step, node and operator; the trace; the page; the command.  No test depends on time."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser

from singa import sonnx
from singa.cli import main
from singa_backend import InvalidInput, Profile, SingaBackend
from singa_backend.inspection import inspect
from singa_backend.kernels import onednn
from singa_backend.kernels.work import Rates, flops, moved, rates
from singa_backend.plans.profile import _together
from singa_backend.runtime.executor import Executor

needs_library = pytest.mark.skipif(onednn.library() is None, reason=f"oneDNN is not available: {onednn.missing()}")

NUMBERS = ", ".join(str((i * 37 % 23 - 11) / 11) for i in range(8 * 3 * 9))
NET = f"""<ir_version: 8, opset_import: ["": 17]>
net (float[1, 3, 10, 12] x) => (float[1, 8, 10, 12] y, float[1, 8] d, float[N, 4] z)
<float[8, 3, 3, 3] w = {{{NUMBERS}}}, float[8] b = {{1, 2, 3, 4, 5, 6, 7, 8}}>
{{
  c = Conv<pads = [1, 1, 1, 1]>(x, w, b)
  y = Relu(c)
  s = Slice(y, zero, ten, three)
  zero = Constant<value = int64[2] {{0, 0}}>()
  ten = Constant<value = int64[2] {{10, 10}}>()
  three = Constant<value = int64[2] {{2, 3}}>()
  d = Det(s)
  n = NonZero(y)
  z = Cast<to = 1>(t)
  t = Transpose(n)
}}"""

LOOP = """<ir_version: 8, opset_import: ["": 17]>
loops (int64 n, bool go, float[2, 3] x) => (float[2, 3] y) {
  y = Loop<body = body (int64 i, bool c, float[2, 3] v) => (bool k, float[2, 3] w) {
    k = Identity(c)  u = Exp(v)  w = Tanh(u)
  }>(n, go, x)
}"""

X = np.random.default_rng(0).normal(size=(1, 3, 10, 12)).astype(np.float32)


def profiled(model: str | onnx.ModelProto, inputs: Any, device: str = "CPU", runs: int = 3, **options: Any) -> Profile:
    proto = parser.parse_model(model) if isinstance(model, str) else model
    return SingaBackend.prepare(proto, device, **options).profile(inputs, runs=runs)


def consistent(found: Profile) -> None:
    """Sums, shares and references within a profile."""
    total = sum(s.seconds for s in found.steps)
    assert found.step_seconds == pytest.approx(total) and found.seconds > 0
    assert sum(s.share for s in found.steps) == pytest.approx(1.0)
    for rows in (found.nodes, found.operators):
        assert sum(r.seconds for r in rows) == pytest.approx(total)
        assert sum(r.bytes for r in rows) == sum(s.bytes for s in found.steps)
        assert sum(r.flops or 0 for r in rows) <= sum(s.flops or 0 for s in found.steps)
    assert [s.index for s in found.steps] == list(range(len(found.steps)))
    assert sorted(i for n in found.nodes for i in n.steps) == list(range(len(found.steps)))
    assert sum(o.nodes for o in found.operators) == len(found.nodes)
    names = {n.name for n in found.nodes}
    assert all(n.part_of in names for n in found.nodes if n.part_of)
    assert not any(n.part_of for n in found.nodes if n.steps)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["steps"]


def test_a_plan() -> None:
    found = profiled(SHORT, [X])
    consistent(found)
    assert found.by == "plan" and found.device == "CPU" and found.runs == 3
    nodes = {n.operator: n for n in found.nodes}
    assert set(nodes) == {"Conv", "Relu", "Slice", "Det"} and all(n.main for n in found.nodes)
    assert nodes["Conv"].flops is not None and nodes["Conv"].flops >= 2 * 8 * 10 * 12 * 27
    assert found.arena_bytes >= found.live_bytes > 0 and found.weight_bytes >= 8 * 27 * 4
    assert found.peak_bytes is None or found.peak_bytes > 1 << 20
    assert found.rates is not None and found.rates.gflops > 0 and found.rates.gbytes > 0
    assert nodes["Det"].kernels == ("definition",) and nodes["Det"].notes == ("no kernel of Det",)


SHORT = re.sub(r"  n = .*\n  z = .*\n  t = .*\n", "", NET).replace(", float[N, 4] z", "")


@needs_library
def test_fused_nodes_are_part_of_the_one_that_does_the_work() -> None:
    fused, single = (profiled(SHORT, [X], optimize=level) for level in (2, 1))
    relu = next(n for n in fused.nodes if n.operator == "Relu")
    conv = next(n for n in fused.nodes if n.operator == "Conv")
    assert relu.part_of == conv.name and relu.seconds == 0 and not relu.steps
    assert conv.flops == 2 * 8 * 10 * 12 * 27 + 8 * 10 * 12
    assert any("conv" in k for k in conv.kernels)
    assert any("acdb" in t for s in fused.steps if "Conv" in s.operators for t in (*s.inputs, *s.outputs))
    alone = next(n for n in single.nodes if n.operator == "Relu")
    assert alone.steps and not alone.part_of


LARGE = """<ir_version: 8, opset_import: ["": 17]>
net (float[1, 256, 5, 9] x, float[256, 8, 8, 8] w, float[8] b) => (float[1, 8, 14, 22] y) {
  c = ConvTranspose<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w, b)
  y = Relu(c)
}"""


@needs_library
def test_implementations_that_are_not_trusted_are_named(tmp_path: Path) -> None:
    inputs = [np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in ((1, 256, 5, 9), (256, 8, 8, 8), (8,))]
    found = profiled(LARGE, inputs, runs=1)
    notes = {n for s in found.steps if "conv" in s.kernel for n in s.notes}
    assert any(re.search(r"not trusted: brg_conv:\w+\+brgconv_strided:\w+: adds the bias", n) for n in notes)
    assert any(n in notes for s in json.loads(json.dumps(found.to_dict()))["steps"] for n in s["notes"])
    onnx.save(parser.parse_model(LARGE), tmp_path / "m.onnx")
    shown = CliRunner().invoke(main, ["profile", str(tmp_path / "m.onnx"), "--runs", "1"], terminal_width=200)
    assert shown.exit_code == 0 and "trusted" in shown.output and "brgconv_strided" in shown.output
    assert not any("trusted" in n for s in profiled(SHORT, [X], runs=1).steps for n in s.notes)


@needs_library
def test_the_reason_for_a_slower_kernel_is_told() -> None:
    found = profiled(
        SHORT.replace("float[8", "double[8").replace("(float[", "(double[").replace(" float[1", " double[1"), [X.astype(float)]
    )
    conv = next(n for n in found.nodes if n.operator == "Conv")
    assert "definition" in conv.kernels and any(note.startswith("onednn.conv: ") for note in conv.notes), conv


def test_segments_of_values_whose_shape_depends_on_data() -> None:
    other = -np.abs(X)
    rep = SingaBackend.prepare(parser.parse_model(NET))
    for x in (X, other, X):
        rep.run([x])
    found = rep.profile([X], runs=2)
    consistent(found)
    assert found.by == "plan" and found.segments > 1 and {s.segment for s in found.steps} >= {0, 1}


DEFINITIONS: list[tuple[str, dict[str, Any]]] = [("STRICT", {}), ("CPU", {"optimize": 0})]


@pytest.mark.parametrize(("device", "options"), DEFINITIONS)
def test_definitions(device: str, options: dict[str, Any]) -> None:
    found = profiled(SHORT, [X], device, **options)
    consistent(found)
    assert found.by == "definitions" and found.device == device and found.arena_bytes == 0
    assert [s.operators[0] for s in found.steps] == ["Conv", "Relu", *["Constant"] * 3, "Slice", "Det"]
    assert {s.kernel for s in found.steps} == {"definition"}
    assert found.steps[0].flops == 2 * 8 * 10 * 12 * 27 and found.steps[0].inputs[0] == "float[1, 3, 10, 12]"


BRANCH = """<ir_version: 8, opset_import: ["": 17]>
branches (float[N] x, bool c) => (float[M] y, float[K] z) {
  s = ReduceSum<keepdims = 0>(x)
  p = Greater(s, o)
  o = Constant<value_float = 0.0>()
  a = If<then_branch = yes () => (float[N] r) { r = Exp(x) }, else_branch = no () => (float[N] r) { q = Neg(x)  r = Abs(q) }>(p)
  e = If<then_branch = big () => (seq(float[N]) l) { l = SequenceConstruct(a, x) },
         else_branch = small () => (seq(float[N]) l) { l = SequenceConstruct(x) }>(c)
  y = ConcatFromSequence<axis = 0>(e)
  n = Greater(y, o)
  z = Compress(y, n)
}"""


@pytest.mark.parametrize("go", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_every_step_is_that_of_a_node(go: bool, sign: int) -> None:
    """In branches, of sequences, and of values whose shape depends on data."""
    inputs = [np.arange(1, 5, dtype=np.float32) * sign, np.array(go)]
    for options in ({}, {"optimize": 1}, {"optimize": 0}):
        found = profiled(BRANCH, inputs, **options)
        consistent(found)
        assert all(s.nodes and s.operators for s in found.steps)
        assert ("Exp" in {n.operator for n in found.nodes if n.steps}) == (sign > 0)


def test_nodes_of_loops_run_several_times() -> None:
    inputs = [np.array(5), np.array(True), np.ones((2, 3), np.float32)]
    found = profiled(LOOP, inputs, optimize=0)
    consistent(found)
    calls = {s.operators[0]: (s.calls, s.flops) for s in found.steps}
    assert calls == {"Identity": (5, 0), "Exp": (5, 30), "Tanh": (5, 30), "Loop": (1, None)}
    assert {n.operator: n.main for n in found.nodes} == {"Loop": True, "Identity": False, "Exp": False, "Tanh": False}
    consistent(profiled(LOOP, inputs))


def test_a_profile_changes_no_result() -> None:
    rep = sonnx.prepare(parser.parse_model(SHORT))
    before = rep.run([X])
    rep.profile({"x": X}, runs=2)
    for a, b in zip(before, rep.run([X]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_changed_weights_are_profiled_by_a_plan() -> None:
    rep = sonnx.prepare(parser.parse_model(SHORT))
    rep.run([X])
    rep.imported.parameters["b"].copy_from_numpy(np.zeros(8, np.float32))
    assert rep.profile([X], runs=1).by == "plan"


@pytest.mark.parametrize("runs", [0, -1, 1.5, "3", True])
def test_the_number_of_runs_is_checked(runs: Any) -> None:
    with pytest.raises(InvalidInput, match="runs must be an integer") as error:
        profiled(SHORT, [X], runs=runs)
    assert error.value.code == "SX309"


def test_errors_of_a_run_are_those_of_run() -> None:
    with pytest.raises(InvalidInput, match="SX301"):
        profiled(SHORT, [X, X])


def test_the_trace_has_every_step_in_order() -> None:
    for options in ({}, {"optimize": 0}):
        found = profiled(SHORT, [X], **options)
        events = found.chrome_trace()["traceEvents"]
        assert len(events) == len(found.steps) and {e["ph"] for e in events} == {"X"}
        for a, b in pairwise(events):
            assert a["ts"] >= 0 and a["ts"] + a["dur"] <= b["ts"] + 1e-3


# --- work

WORK: list[tuple[str, dict[str, Any], list[Any], tuple[int, ...], int | None]] = [
    ("Conv", {}, [(2, 6, 9, 9), (4, 3, 3, 3), (4,)], (2, 4, 7, 7), 2 * 2 * 4 * 49 * 27),
    ("QLinearConv", {}, [(1, 3, 5, 5), (), (), (2, 3, 1, 1)], (1, 2, 5, 5), 2 * 50 * 3),
    ("ConvTranspose", {}, [(1, 3, 4, 4), (3, 2, 2, 2)], (1, 2, 8, 8), 2 * 48 * 8),
    ("MatMul", {}, [(5, 2, 3), (3, 4)], (5, 2, 4), 2 * 40 * 3), ("MatMul", {}, [(3,), (3,)], (), 6),
    ("Gemm", {"transA": 1}, [(3, 2), (3, 4)], (2, 4), 48), ("Gemm", {"transA": 0}, [(2, 3), (3, 4)], (2, 4), 48),
    ("LSTM", {}, [(7, 2, 3), (1, 20, 3), (1, 20, 5)], (7, 1, 2, 5), 2 * 14 * 160),
    ("Attention", {}, [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6)], (1, 2, 3, 6), 2 * 2 * 3 * 5 * (4 + 6)),
    ("Einsum", {"equation": b"ij, jk -> ik"}, [(2, 3), (3, 4)], (2, 4), 48),
    ("Einsum", {"equation": "...i->..."}, [(2, 3)], (2,), None),
    ("MaxPool", {"kernel_shape": (2, 3)}, [(1, 1, 4, 6)], (1, 1, 2, 2), 24), ("ReduceSum", {}, [(4, 5)], (4,), 20),
    ("Resize", {"mode": b"linear"}, [(1, 1, 2, 2)], (1, 1, 4, 4), 16 * 8),
    ("Resize", {"mode": "nearest"}, [(1, 1, 2, 2)], (1, 1, 4, 4), 0),
    ("Add", {}, [(2, 1), (1, 3)], (2, 3), 6), ("Transpose", {}, [(2, 3)], (3, 2), 0), ("Loop", {}, [(), ()], (3,), None),
    ("MatMul", {}, [None, (3, 4)], (2, 4), None), ("LSTM", {}, [(7, 2, 3)], (7, 1, 2, 5), None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attributes", "inputs", "output", "expected"), WORK)
def test_work(name: str, attributes: dict[str, Any], inputs: list[Any], output: tuple[int, ...], expected: int | None) -> None:
    assert flops("", name, attributes, inputs, output) == expected
    assert flops("com.example", name, attributes, inputs, output) is None


def test_no_operator_of_a_run_has_work_that_raises() -> None:
    """Whatever the inputs are, also those that are not tensors."""
    from singa_backend.ir.declaration import declarations

    shapes: list[list[Any]] = [[], [None], [(), ()], [(2,)] * 9, [(2, 3), None, (3, 4)], [(0, 3)] * 4]
    for domain, name in declarations:
        for inputs in shapes:
            for output in ((), (2, 3)):
                found = flops(domain, name, {}, inputs, output)
                assert found is None or found >= 0


def test_rates() -> None:
    assert rates(1) is rates(1) and rates(1).threads == 1
    r = Rates(100.0, 10.0, 1, "float32", "")
    assert r.seconds(10**9, 0) == pytest.approx(0.01) and r.seconds(None, 10**9) == pytest.approx(0.1)
    assert r.reached(10**9, 0, 0.02) == pytest.approx(0.5) and r.reached(0, 0, 0.02) is None and r.reached(5, 5, 0.0) is None


def test_a_part_of_the_rates_is_at_most_one_or_nothing() -> None:
    r = Rates(100.0, 10.0, 1, "float32", "", ((1000, 20.0), (4000, 40.0)))
    assert r.seconds(0, 500) == r.seconds(0, 4000) / 8 == pytest.approx(500 / 40e9)  # a smaller copy may be slower, by its call
    assert r.seconds(0, 4001) == pytest.approx(4001 / 10e9)
    assert r.reached(10**9, 0, 0.01 / 1.2) == 1.0 and r.reached(10**9, 0, 0.01 / 1.3) is None
    measured = rates(1)
    assert [size for size, _ in measured.caches] == sorted(size for size, _ in measured.caches)
    assert measured.caches[-1][0] < 1 << 25 and all(rate > 0 for _, rate in measured.caches)


def selecting() -> ModelProto:
    """A lookup in a table of 8 MB, a product of bytes and one of floats."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[4,8] i, float[64,256] x, uint8[64,256] q)'
        " => (float[4,8,64] e, float[64,256] y, int32[64,256] p)"
        " { e = Gather(table, i) y = MatMul(x, w) p = MatMulInteger(q, v) }"
    )
    rng = np.random.default_rng(0)
    arrays = {
        "table": rng.standard_normal((30000, 64)).astype(np.float32), "w": rng.standard_normal((256, 256)).astype(np.float32),
        "v": rng.integers(0, 99, (256, 256)).astype(np.int8),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


@pytest.mark.parametrize("level", [0, 2])
def test_a_table_counts_by_its_rows_and_bytes_have_no_rate(level: int) -> None:
    feeds = {
        "i": np.arange(32).reshape(4, 8), "x": np.ones((64, 256), np.float32), "q": np.ones((64, 256), np.uint8),
    }  # fmt: skip
    found = SingaBackend.prepare(selecting(), optimize=level).profile(feeds, runs=2)
    nodes = {n.operator: n for n in found.nodes}
    assert nodes["Gather"].bytes <= 2 * 4 * 8 * 64 * 4
    assert nodes["MatMulInteger"].roofline is None and nodes["MatMulInteger"].flops == 2 * 64 * 256 * 256
    rows = [*found.steps, *found.nodes, *found.operators]
    assert all(r.roofline is None or 0 < r.roofline <= 1 for r in rows)


def test_a_float_product_with_packed_weights_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are fixed: those of the machine depend on what else runs."""
    monkeypatch.setattr("singa_backend.plans.profile.rates", lambda *_: Rates(1e9, 1e9, 1, "float32", ""))
    feeds = {"i": np.zeros((4, 8), np.int64), "x": np.ones((64, 256), np.float32), "q": np.ones((64, 256), np.uint8)}
    found = SingaBackend.prepare(selecting()).profile(feeds, runs=2)
    nodes = {n.operator: n for n in found.nodes}
    assert nodes["MatMul"].roofline is not None and nodes["Gather"].roofline is not None
    assert nodes["MatMulInteger"].roofline is None


def test_a_node_is_the_sum_of_its_steps() -> None:
    assert _together([(0.5, 1.0, True), (1.0, 1.0, True)]) == pytest.approx(0.75)
    assert _together([(0.5, 1.0, True), (None, 1.0, True)]) is None
    assert _together([(0.5, 1.0, True), (None, 1.0, False)]) == pytest.approx(0.25)
    assert _together([]) is None and _together([(None, 1.0, False)]) is None


@pytest.mark.parametrize(
    ("names", "read", "written", "expected"),
    [
        (["Gather"], 1000, 10, 20),
        (["Slice", "Gather"], 5, 10, 15),
        (["Gather", "Relu"], 1000, 10, 1010),
        (["ReduceSum"], 99, 1, 100),
    ],
)
def test_bytes_of_selections(names: list[str], read: int, written: int, expected: int) -> None:
    assert moved(names, read, written) == expected


# --- the page and the command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(SHORT), path)
    return path


def test_the_page_has_a_bar_for_every_node_that_takes_time(path: Path) -> None:
    found = SingaBackend.prepare(path).profile([X], runs=2)
    text = inspect(path).html(found)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    bars = {v["n"]: v["m"] for v in data["graphs"][0]["vertices"] if "m" in v}
    assert set(bars) == {n.name for n in found.nodes}
    assert max(b["b"] for b in bars.values()) == 1.0 and data["time"]["by"] == "plan"
    for node in found.nodes:
        assert (bars[node.name]["b"] > 0) <= bool(node.steps)
        assert [row[1] for row in bars[node.name]["r"] if row[0] == "kernel"] == list(node.kernels)
    plain = json.loads(re.search(r'id="data">(.*?)</script>', inspect(path).html(), re.DOTALL)[1])
    assert "time" not in plain and not any("m" in v for v in plain["graphs"][0]["vertices"])


def test_the_command(path: Path, tmp_path: Path) -> None:
    trace, page = tmp_path / "new" / "trace.json", tmp_path / "page.html"
    more = ["--runs", "2", "--trace", str(trace), "--html", str(page)]
    done = CliRunner().invoke(main, ["profile", str(path), "--json", *more])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["by"] == "plan" and told["runs"] == 2 and told["options"]["threads"] >= 1
    assert len(json.loads(trace.read_text())["traceEvents"]) == len(told["steps"])
    assert '"by":"plan"' in page.read_text()
    done = CliRunner().invoke(main, ["profile", str(path), "--runs", "1", "--top", "1", "--nodes"])
    assert done.exit_code == 0 and "1 of" in done.output and "GFLOP/s in products" in done.output
    for node in told["nodes"]:
        assert node["name"] in done.output and node["operator"] in done.output
    done = CliRunner().invoke(main, ["profile", str(path), "--runs", "1", "--device", "STRICT", "--json"])
    assert json.loads(done.stdout)["by"] == "definitions"


def test_where_the_files_cannot_be_written_nothing_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "run", lambda *_, **__: 1 / 0)
    for option in ("--trace", "--html"):
        done = CliRunner().invoke(main, ["profile", str(path), option, str(path / "no.json")])
        assert done.exit_code == 3, done.output
