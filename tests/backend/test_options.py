"""The options of `prepare`: which values are accepted, and what they change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from singa import sonnx, tensor
from singa.cli import main
from singa_backend import InvalidInput, SingaBackend, SingaRep
from singa_backend.kernels import onednn, options
from singa_backend.runtime.executor import Visitor

WEIGHTS = ", ".join(str((i * 37 % 23 - 11) / 11) for i in range(108))
MODEL = f"""<ir_version: 8, opset_import: ["": 17]>
g (float[2, 3, 9, 9] x) => (float[2, 4, 9, 9] y, float[2, 4] z)
<float[4, 3, 3, 3] w = {{{WEIGHTS}}}, float[4] b = {{1, -2, 3, -4}}>
{{ c = Conv<pads = [1, 1, 1, 1]>(x, w, b)  y = Relu(c)  z = Det(y) }}"""

X = np.random.default_rng(0).normal(size=(2, 3, 9, 9)).astype(np.float32)


def model() -> onnx.ModelProto:
    return parser.parse_model(MODEL)


def large() -> onnx.ModelProto:
    """A convolution that is worth several threads."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 32, 48, 48] x) => (float[1, 64, 48, 48] y, float[1, 64] z) { y = Conv<pads = [1, 1, 1, 1]>(x, w)  z = Det(y) }"""
    made = parser.parse_model(text)
    w = np.random.default_rng(0).normal(size=(64, 32, 3, 3)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return made


def kernels(rep: SingaRep) -> list[str]:
    planner = rep._session._planner
    return [] if planner is None else [step.kernel for p in planner.plans.values() for s in p.segments for step in s.steps]


WRONG: list[tuple[str, Any]] = [
    ("threads", 0), ("threads", -1), ("threads", 1.5), ("threads", "2"), ("threads", True), ("threads", 10**6), ("threads", [2]),
    ("precision", "bfloat16"), ("precision", 16), ("precision", None), ("precision", np.float32), ("optimize", 3),
    ("optimize", -1), ("optimize", True), ("optimize", "2"), ("optimize", np.ones(2)), ("deterministic", 1),
    ("deterministic", "no"), ("memory", "fast"), ("memory", None), ("memory", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
@pytest.mark.parametrize("prepare", [SingaBackend.prepare, sonnx.prepare])
def test_other_values_are_refused(name: str, value: Any, prepare: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be") as error:
        prepare(model(), **{name: value})
    assert error.value.code == "SX384" and repr(value) in error.value.message
    assert not SingaBackend.is_compatible(model(), **{name: value})


def test_several_threads_are_not_deterministic() -> None:
    with pytest.raises(InvalidInput, match="threads must be 1 or None with deterministic=True, got 2"):
        SingaBackend.prepare(model(), threads=2, deterministic=True)
    assert SingaBackend.prepare(model(), threads=1, deterministic=True).options.threads == 1


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.0", " 2", "²", "9" * 400, "2000"])
def test_the_variable_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_NUM_THREADS", text)
    with pytest.raises(InvalidInput, match="SONNX_NUM_THREADS must be") as error:
        SingaBackend.prepare(model())
    assert error.value.code == "SX384"
    assert SingaBackend.prepare(model(), threads=2).options.threads == 2


@pytest.mark.parametrize(
    ("own", "openmp", "workers", "threads"),
    [("", "", "", 4), ("6", "", "", 6), ("6", "1", "4", 6), ("", "1", "", 1), ("", "3,2", "", 3), ("", "64", "", 4),
     ("", "many", "", 4), ("", "0", "", 4), ("", "", "2", 2), ("", "", "8", 1), ("", "1", "2", 1)],
)  # fmt: skip
def test_the_default_number_of_threads(
    own: str, openmp: str, workers: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "usable_cores", lambda: 4)
    for name, value in (("SONNX_NUM_THREADS", own), ("OMP_NUM_THREADS", openmp), ("PYTEST_XDIST_WORKER_COUNT", workers)):
        monkeypatch.setenv(name, value)
    assert SingaBackend.prepare(model()).options.threads == threads


@pytest.mark.skipif(onednn.library() is None, reason="oneDNN has the threads")
def test_a_run_has_its_threads_and_restores_those_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    if onednn.library().runtime != "OpenMP":
        pytest.skip("only OpenMP has a number of threads")
    seen, visit = [], Visitor.visit

    def seeing(self: Visitor, *arguments: Any) -> Any:  # Det is computed by its definition
        seen.append(onednn.threads())
        return visit(self, *arguments)

    rep, before = SingaBackend.prepare(large(), threads=3), onednn.threads()
    x = np.ones((1, 32, 48, 48), np.float32)
    monkeypatch.setattr(Visitor, "visit", seeing)
    for _ in range(3):
        rep.run([x])
    assert seen == [3] * 3 and onednn.threads() == before
    monkeypatch.setattr(Visitor, "visit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rep.run([x])
    assert onednn.threads() == before


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_of_any_number_of_threads_agree(threads: int) -> None:
    expected = SingaBackend.prepare(model(), optimize=0).run([X])
    rep = SingaBackend.prepare(model(), threads=threads)
    for _ in range(2):
        y, e = rep.run([X])[0], expected[0]
        np.testing.assert_allclose(y, e, atol=1e-5 * float(np.abs(e).max()))


def test_levels() -> None:
    reps = [SingaBackend.prepare(model(), optimize=level) for level in (0, 1, 2)]
    for rep in reps:
        rep.run([X])
    none, single, fused = map(kernels, reps)
    assert none == [] and single and fused
    if onednn.library() is not None:
        assert len(fused) < len(single)


def test_deterministic_runs_have_equal_bits_also_after_a_change_of_weights() -> None:
    reps = [sonnx.prepare(model(), deterministic=True) for _ in range(2)]
    reps[0].run([X])
    for rep in reps:
        w = rep.imported.parameters["w"]
        w.copy_from_numpy(tensor.to_numpy(w) * np.float32(0.3))
    first, second, third = reps[0].run([X]), reps[0].run([X]), reps[1].run([X])
    assert kernels(reps[0]) == kernels(reps[1]) != []
    for a, b, c in zip(first, second, third, strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()


def test_bf16_is_within_its_bound() -> None:
    exact = SingaBackend.prepare(model(), optimize=0).run([X])[0]
    rep = SingaBackend.prepare(model(), precision="bf16")
    for _ in range(2):
        assert np.abs(rep.run([X])[0] - exact).max() <= 2**-7 * float(np.abs(exact).max())


def test_the_options_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    told = []
    for more in ([], ["--threads", "1"], ["--precision", "bf16"], ["--optimize", "0"]):
        done = CliRunner().invoke(main, ["run", str(path), "--random", "0", "--json", *more])
        assert done.exit_code == 0, done.output
        told.append(json.loads(done.output)["outputs"][0]["max"])
    np.testing.assert_allclose(told[1:], [told[0]] * 3, rtol=1e-2)
    for more in (["--threads", "0"], ["--precision", "half"], ["--optimize", "3"]):
        assert CliRunner().invoke(main, ["run", str(path), *more]).exit_code == 2
