"""`sonnx device-check`: its stages, what makes each fail, and what it reports without a device and on emulated ones."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner, Result

from singa.cli import _device_stages as stages
from singa.cli import main
from singa_backend import SingaBackend
from singa_backend.conform import device_check, device_check_capture, device_check_load, device_check_stages
from singa_backend.conform.device_check import FAILED, NOT_RUN, ONE_DEVICE, PASSED, CheckSetup, CheckStage, StageResult
from singa_backend.conform.device_check_page import page, public
from singa_backend.devices import cuda
from singa_backend.devices import device as devices
from singa_backend.errors import DeviceFailure, ResourceExhausted
from singa_backend.interpreters.eager import Eager
from singa_backend.io.processes import ChildFailure
from singa_backend.limits import Limits

PROJECT = Path(__file__).parents[2]
NAMES = [s.name for s in stages.STAGES]


def sonnx(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["device-check", *map(str, arguments)])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


# --- the processes of the stages ----------------------------------------------------------------------------------------

FUNCTIONS = """
import os, time
from singa_backend.conform.device_check import OneDevice, Wrong
from singa_backend.errors import DeviceUnavailable

def passes(setup, details): details["every"], details["process"] = setup.every, os.getpid()
def wrong(setup, details):
    details["before"] = 1
    raise Wrong("it is wrong")
def raises(setup, details): [][0]
def dies(setup, details): os._exit(7)
def hangs(setup, details): time.sleep(600)
def one(setup, details): raise OneDevice("only one")
def unusable(setup, details): raise DeviceUnavailable("no device")
"""


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "checks_of_a_device.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("checks_of_a_device")
    del sys.modules["checks_of_a_device"]


def outcomes(checks: ModuleType, names: str, **setup: Any) -> dict[str, StageResult]:
    chosen = [CheckStage(name, getattr(checks, name), 1.0 if name == "hangs" else 100) for name in names.split()]
    return {o.stage: o for o in device_check.run(chosen, CheckSetup(**setup))}


def test_a_stage_may_die_or_hang_and_the_others_run(checks: ModuleType) -> None:
    found = outcomes(checks, "dies hangs passes", every=5)
    assert [o.status for o in found.values()] == [FAILED, FAILED, PASSED]
    assert found["dies"].reason == "its process died: exit code 7"
    assert found["hangs"].reason == "deadline: not finished within 1 s"
    assert found["passes"].details["every"] == 5 and found["passes"].reason == ""


def test_what_a_stage_raises_is_its_outcome(checks: ModuleType) -> None:
    found = {n: device_check.attempt(n, getattr(checks, n), CheckSetup()) for n in ("wrong", "raises", "one", "unusable")}
    assert [o.status for o in found.values()] == [FAILED, FAILED, ONE_DEVICE, FAILED]
    assert (found["wrong"].reason, found["wrong"].details) == ("it is wrong", {"before": 1})
    assert "IndexError" in found["raises"].reason and "in raises" in found["raises"].reason
    assert found["one"].reason == "only one" and [n for n, o in found.items() if o.unusable] == ["unusable"]


def test_nothing_runs_after_the_deadline_or_without_a_device(checks: ModuleType) -> None:
    found = outcomes(checks, "hangs passes", deadline=0.5)
    assert [o.status for o in found.values()] == [FAILED, NOT_RUN]
    assert found["hangs"].reason.startswith("deadline: ") and "0.5 s for all stages" in found["passes"].reason
    assert outcomes(checks, "hangs", deadline=1200.0)["hangs"].reason == "deadline: not finished within 2 s"
    found = outcomes(checks, "unusable passes")
    assert [o.status for o in found.values()] == [FAILED, NOT_RUN]
    assert found["passes"].reason == "the stage unusable found no usable device"


@pytest.mark.parametrize(
    ("statuses", "code"),
    [([PASSED, PASSED], 0), ([PASSED, ONE_DEVICE], 0), ([PASSED, FAILED], 1), ([PASSED, NOT_RUN], 1), ([FAILED, PASSED], 1)],
)
def test_every_stage_is_written_as_it_ends(
    statuses: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def run(chosen: Any, setup: CheckSetup) -> Iterator[StageResult]:
        for i, status in enumerate(statuses):
            yield StageResult(f"stage{i}", status, 1.5, "why" * (status != PASSED), {"n": i})
            seen.append(len(lines(tmp_path / "r")))

    monkeypatch.setattr(device_check, "run", run)
    found = sonnx("--to", tmp_path / "r")
    assert (found.exit_code, seen) == (code, [1, 2])
    keys = ["stage", "status", "seconds", "reason", "details"]
    assert [list(line) for line in lines(tmp_path / "r")] == [keys, keys]
    assert [line["status"] for line in lines(tmp_path / "r")] == statuses
    assert ("every stage passed" in found.output) == (code == 0)
    assert ("no second device was tested: stage1" in found.output) == (ONE_DEVICE in statuses) and found.output.endswith(
        f"wrote {tmp_path / 'r/results.jsonl'}\nwrote {tmp_path / 'r/results.md'}\n"
    )


def test_without_a_device_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = sonnx("--to", tmp_path, "--json")
    document = json.loads(found.output)
    assert (found.exit_code, document["schema"], document["passed"]) == (1, "sonnx.device-check", False)
    assert document["stages"] == lines(tmp_path)
    assert [s["stage"] for s in document["stages"]] == NAMES
    assert [s["status"] for s in document["stages"]] == [FAILED] + [NOT_RUN] * (len(NAMES) - 1)
    assert "[SX50" in document["stages"][0]["reason"] and document["stages"][0]["details"]["packages"]["numpy"] == np.__version__


@pytest.mark.parametrize("name", NAMES)
def test_no_stage_passes_without_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "situation", lambda: (0, cuda.Cause("SX504", "there is none", "")))
    found = attempt(name, "CUDA", every=1000)
    assert (found.status, found.unusable) == (FAILED, True) and "SX504" in found.reason


def test_a_stage_alone_needs_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that judges no result: `versions`, which every result needs, runs before it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = sonnx("--stage", "kernels", "--every", 1000, "-n", 1, "--json")
    document = json.loads(found.output)
    assert (found.exit_code, document["passed"]) == (1, False)
    assert [(s["stage"], s["status"]) for s in document["stages"]] == [("versions", FAILED), ("kernels", NOT_RUN)]


def test_the_results_of_an_earlier_run_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(chosen: Any, setup: CheckSetup) -> Iterator[StageResult]:
        assert lines(tmp_path) == []
        raise KeyboardInterrupt
        yield

    (tmp_path / "results.jsonl").write_text('{"stage": "versions", "status": "passed"}\n')
    monkeypatch.setattr(device_check, "run", cut)
    assert sonnx("--to", tmp_path).exit_code != 0 and lines(tmp_path) == []
    (tmp_path / "file").touch()
    assert sonnx("--to", tmp_path / "file" / "folder").exit_code == 3  # before a stage runs


@pytest.mark.parametrize("device", ["CPU", "STRICT", "CUDA:", "CUDA:x", "cuda0"])
def test_other_devices_are_refused(device: str) -> None:
    found = sonnx("--device", device)
    assert found.exit_code == 2 and f"got {device!r}" in found.output


# --- what the stages find, on a device that needs no GPU -----------------------------------------------------------------


def attempt(name: str, device: str = "STRICT", **setup: Any) -> StageResult:
    stage = next(s for s in stages.STAGES if s.name == name)
    return device_check.attempt(name, stage.check, CheckSetup(device, **setup))


@pytest.mark.parametrize("name", ["smoke", "products", "traps", "training", "determinism", "api", "threads", "sizes", "speed"])
def test_stages_pass_on_the_strict_namespace(name: str) -> None:
    found = attempt(name)
    assert (found.status, found.reason) == (PASSED, "")


def test_devices_needs_two() -> None:
    assert attempt("devices").status == ONE_DEVICE


def change_operator(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Change the results of an operator on the strict namespace, for eager calls."""
    call = Eager.call_version

    def changed(self: Any, operator: Any, *arguments: Any) -> Any:
        results = call(self, operator, *arguments)
        if operator.declaration.name != name or self.device.is_host:
            return results
        return [self.device.put(change(np.array(self.device.get(r)))) for r in results]

    monkeypatch.setattr(Eager, "call_version", changed)


def rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & 0xFFFFE000).view(np.float32) if x.dtype == np.float32 else x


def doubled(x: np.ndarray) -> np.ndarray:
    return x + x


@pytest.mark.parametrize(
    ("name", "operator", "change", "why"),
    [
        ("smoke", "MatMul", doubled, "MatMul must return"),
        ("products", "MatMul", lambda x: x.astype(np.float32), r"must be float16, got float32"),
        ("products", "MatMul", lambda x: x * np.asarray(1.01, x.dtype), "must be within its bound"),
        ("products", "MatMulInteger", lambda x: x + (x == x.max()), "MatMulInteger must return"),
        ("training", "Gemm", doubled, "Perceptron, tape: value"),
        ("determinism", "ScatterElements", lambda x: x + np.random.default_rng().random(), "must have equal bits"),
        ("api", "ReduceMax", doubled, "max: value"),
        ("sizes", "ReduceSum", doubled, "a sum must be within 1e-05"),
        ("sizes", "ReduceMax", doubled, "must be exact"),
        ("sizes", "ArgMax", lambda x: x + 1, "must be the first maximum"),
    ],
)
def test_a_wrong_operator_is_found(name: str, operator: str, change: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change_operator(monkeypatch, operator, change)
    found = attempt(name)
    assert found.status == FAILED and why in found.reason


def test_models_that_differ_from_the_cpu_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = SingaBackend.prepare

    def changed(model: Any, device: str, **options: Any) -> Any:
        rep = prepare(model, device, **options)
        if device == "STRICT":
            run = rep.run
            rep.run = lambda inputs, **how: [np.asarray(y) * 1.001 for y in run(inputs, **how)]
        return rep

    monkeypatch.setattr(SingaBackend, "prepare", changed)
    assert "ResNet-50: the outputs must be within" in attempt("sizes").reason


def test_a_run_in_a_thread_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = SingaBackend.prepare

    def changed(model: Any, device: str, **options: Any) -> Any:
        rep = prepare(model, device, **options)
        run = rep.run
        rep.run = lambda inputs, **how: [y + (threading.current_thread() is not threading.main_thread()) for y in run(inputs)]
        return rep

    monkeypatch.setattr(SingaBackend, "prepare", changed)
    assert "must have the bits of a run alone" in attempt("threads").reason


def test_speeds_below_their_shares_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = device_check_load._REDUCED
    rates = dict.fromkeys(device_check_load._LEAST, 100.0)
    monkeypatch.setattr(device_check_load, "_sizes", lambda device: (replace(sizes, models={}), True))
    monkeypatch.setattr(device_check_load, "_primitives", lambda device, chosen: rates)
    monkeypatch.setattr(device_check_load, "_roofline", lambda device: {"roofline, GB/s": 130.0, "roofline, TFLOP/s": 990.0})
    monkeypatch.setattr(device_check_load.device_check_peers, "measure", lambda *_: {"PyTorch": "not measured: why"})
    found = attempt("speed")
    assert (found.status, found.details["PyTorch"]) == (PASSED, "not measured: why")
    assert found.details["least"]["product, TFLOP/s"] == {"of": "roofline, TFLOP/s", "share": 0.1, "got": 0.101}
    for slow in rates:
        of, share = device_check_load._LEAST[slow]
        lower = rates | {slow: 0.99 * share * {"copy, GB/s": 100.0, "roofline, GB/s": 130.0}.get(of, 990.0)}
        monkeypatch.setattr(device_check_load, "_primitives", lambda device, chosen, lower=lower: lower)
        found = attempt("speed")
        assert found.status == FAILED and re.search(rf"got {slow}: [0-9.]+ of {of}$", found.reason)


def test_pytorch_is_not_measured_if_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = device_check_load.device_check_peers
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.measure("cuda:0", 4, 4, 1, 1.0) == {"PyTorch": "not measured: it is not installed"}


@pytest.mark.fakecuda
def test_the_speeds_count_the_passes_that_kernels_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is one of the driver, and the chain three kernels, or one."""
    import fakecuda

    counted: list[dict[str, int]] = []

    def once(run: Callable[[], Any], wait: Any, calls: int = 1) -> float:
        with fakecuda.counting() as during:
            run()
        counted.append(during)
        return 1.0

    monkeypatch.setattr(device_check_load, "seconds", once)
    device = stages.resolve("CUDA")
    device_check_load._primitives(device, device_check_load._REDUCED)
    assert list(device_check_load.PASSES) == ["copy", "chain as operators", "chain as a model"]
    assert [(c["on_device"], c["launches"]) for c in counted[:3]] == [(1, 0), (0, 3), (0, 1)]


def test_products_in_tf32_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Eager.call

    def changed(self: Any, op_type: str, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if op_type == "MatMul":
            inputs = [self.device.put(rounded_to_tf32(np.array(self.device.get(x)))) for x in inputs]
        return call(self, op_type, inputs, *arguments, **options)

    monkeypatch.setattr(Eager, "call", changed)
    monkeypatch.setattr(device_check_stages, "SHAPES", {})  # their bounds find it too
    assert "must not be rounded to TF32" in attempt("products").reason


def test_indices_that_wrap_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_node = SingaBackend.run_node

    def wrapping(node: Any, inputs: Any, device: str, **options: Any) -> Any:
        if device == "STRICT" and node.op_type == "Gather":
            inputs = [inputs[0], inputs[1] % 4]
        return run_node(node, inputs, device, **options)

    monkeypatch.setattr(SingaBackend, "run_node", wrapping)
    found = attempt("traps")
    assert found.status == FAILED and len(found.details["wrong"]) == 4
    assert "Gather of element 4 of 4: float32[1], on the CPU the error SX401" in found.reason


def test_memory_that_grows_is_found() -> None:
    flat = {"pool_used": [5, 5, 5], "pool_held": [9, 9, 9], "device_used": [7, 8, 9]}
    stages.judge_memory(flat)  # another process uses the device too
    for changed in ({"pool_used": [5, 5, 6]}, {"pool_held": [9, 10, 10]}, {"pool_held": [0, 0, 0]}):
        with pytest.raises(device_check.Wrong, match="must be constant"):
            stages.judge_memory(flat | changed)


@pytest.mark.parametrize(
    ("there", "here", "same"),
    [
        (1.0, 1.0 + 1e-10, True), (1.0, 1.0 + 1e-8, False), ([1.0, None], [1.0, None], True), ([1.0], [1.0, 2.0], False),
        (None, 1.0, False), (np.nan, np.nan, True), (np.nan, 1.0, False), (np.inf, np.inf, True), (np.inf, -np.inf, False),
        (np.int32(1), np.int32(2), False), (np.float32(1), np.float32(1.000005), True),
        (np.float32(1), np.float32(1.00005), False),
        (np.float32(1), np.float64(1), False), (np.array([1e6, 0.0]), np.array([1e6, 1e-5]), True),
    ],
)  # fmt: skip
def test_values_are_compared_within_the_tolerance(there: Any, here: Any, same: bool) -> None:
    assert (device_check_stages.unlike(there, here) == "") == same


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take some cases, which are loaded at once, for the suite."""
    load = device_check_stages.cases.load
    monkeypatch.setattr(device_check_stages.cases, "load", lambda: load(("simple",)))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["suite", "kernels", "gradients"])
def test_a_stage_reports_what_it_did_before_its_deadline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check_stages, "_last_call", lambda setup: 0.0)
    found = attempt(name, every=2 if name != "gradients" else 150, processes=1)
    done = {"suite": "cases", "kernels": "operators", "gradients": "operator_versions"}[name]
    assert found.status == FAILED and found.reason.startswith("deadline: ")
    assert found.details[done] == 1 < found.details["of"]


@pytest.mark.usefixtures("few")
def test_gradients_that_are_not_compared_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_check_stages.worker, "answers", lambda requests, *_, **__: ((i, None) for i, _ in enumerate(requests))
    )
    found = attempt("gradients", every=100)
    assert found.status == FAILED and "no gradient was compared" in found.reason


def test_cases_and_gradients_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(chosen: Any, backend: str, device: str, processes: Any, timeout: float, note: Any) -> None:
        for case in chosen:
            note(device_check_stages.worker.Result(case.name, case.kind, "died", "failed", "exit code -11"))

    monkeypatch.setattr(device_check_stages.worker, "run", dying)
    found = attempt("suite")
    assert found.status == FAILED and " cases differ from gaps.txt: test_" in found.reason and "(died)" in found.reason
    answers: list[Any] = ["tape: value: 1 of 2 differ", ChildFailure("died", "exit code -11"), None, ""]
    monkeypatch.setattr(device_check_stages.worker, "answers", lambda requests, *_, **__: enumerate(answers[: len(requests)]))
    found = attempt("gradients", every=100)
    assert found.status == FAILED and found.reason.startswith("2 of 4 gradients differ") and len(found.details["wrong"]) == 2
    assert found.details["points"] == 3


# --- on emulated devices ------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_MEMORY_MIB", "256")


@pytest.mark.fakecuda
@pytest.mark.usefixtures("small")
def test_every_stage_passes_on_emulated_devices(tmp_path: Path) -> None:
    found = sonnx("--to", tmp_path, "--every", 300, "-n", 2, "--deadline", 6000, "--json")
    document = json.loads(found.output)
    assert [(s["stage"], s["status"], s["reason"]) for s in document["stages"]] == [(n, PASSED, "") for n in NAMES]
    assert (found.exit_code, document["emulated"], document["name"]) == (0, True, "emulated device 0")
    assert lines(tmp_path) == document["stages"]
    details = {s["stage"]: s["details"] for s in document["stages"]}
    assert details["suite"]["cases"] == details["suite"]["of"] > 5 and details["gradients"]["points"] > 0
    assert details["memory"]["steps"] == 1000 and len(details["memory"]["samples"]["device_used"]) == 10
    assert (
        details["capture"]["product"]
        == details["capture"]["sort (thrust)"]
        == details["capture"]["transform (cuFFT)"]
        == "equal bits"
    )
    assert details["capture"]["runs of a model"] == 100 and details["capture"]["bytes of its graphs"] > 0
    assert details["devices"]["devices"] == 2 and details["versions"]["cuda"]["nvrtc"]


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("settings", "stage", "status", "reason"),
    [
        ({"FAKECUDA_DEVICES": "0"}, "versions", FAILED, "SX504"),
        ({"FAKECUDA_WITHOUT": "cublas"}, "versions", FAILED, "cuBLAS"),
        ({"FAKECUDA_WITHOUT": "cufft"}, "versions", FAILED, "cufft not found; pip install 'sonnx[gpu]'"),
        ({"FAKECUDA_DEVICES": "0"}, "smoke", NOT_RUN, "no usable device"),
        ({"FAKECUDA_DEVICES": "1"}, "devices", ONE_DEVICE, "nothing was tested on a second one"),
    ],
)
def test_a_machine_that_lacks_something_does_not_pass(
    settings: dict[str, str], stage: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    found = sonnx("--device", "cuda", "--stage", stage, "--json")
    document = json.loads(found.output)
    last = document["stages"][-1]
    assert (last["stage"], last["status"], found.exit_code) == (stage, status, 0 if status == ONE_DEVICE else 1)
    assert reason in last["reason"] and document["emulated"] == (True if status == ONE_DEVICE or "cufft" in reason else None)


def refused(*_: Any) -> Any:
    raise RuntimeError("cannot be captured")


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("read", lambda read: lambda graph: -read(graph), "chain: replay 0 has other bits"),
        ("write", lambda write: lambda graph, x: None, "chain: replay 1 has other bits"),
        ("__init__", lambda init: refused, "chain: refused: RuntimeError: cannot be captured"),
    ],
)
def test_graphs_that_fail_are_named(name: str, change: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = device_check_capture.SmokeGraph
    monkeypatch.setattr(graph, name, change(getattr(graph, name)))
    found = attempt("capture", "CUDA")
    assert found.status == FAILED and f"; {why}" in found.reason and found.details["chain"] == why.partition(": ")[2]


@pytest.mark.fakecuda
def test_what_no_graph_needs_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    works = device_check_capture.smoke_works

    def some(device: Any) -> dict[str, Any]:
        return {n: w for n, w in works(device).items() if n in ("chain", "reductions (cub)")} | {
            "sort (thrust)": (refused, False)
        }

    monkeypatch.setattr(device_check_capture, "smoke_works", some)
    monkeypatch.setattr(
        device_check_capture,
        "_uncaptured",
        lambda cupy, work, samples, run=device_check_capture._uncaptured: [] if work is refused else run(cupy, work, samples),
    )
    for name in ("_failures", "_model"):
        monkeypatch.setattr(device_check_capture, name, lambda *_: None)
    found = attempt("capture", "CUDA")
    assert (found.status, found.details["graphs in turn"]) == (PASSED, 2)
    assert found.details["sort (thrust)"] == "refused: RuntimeError: cannot be captured"


@pytest.mark.fakecuda
def test_a_read_back_that_a_capture_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check_capture, "_in_a_capture", lambda cupy, work, x: x + x)
    found = attempt("capture", "CUDA")
    assert (found.status, found.reason) == (FAILED, "a read-back in a capture must be refused, got a graph")


@pytest.mark.fakecuda
def test_a_model_whose_later_runs_differ_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check_capture, "smoke", lambda *_: {})
    monkeypatch.setattr(device_check_capture, "_failures", lambda *_: None)
    prepare, runs = SingaBackend.prepare, iter(range(10**6))

    def changed(model: Any, device: str, **options: Any) -> Any:
        rep = prepare(model, device, **options)
        run = rep.run
        if options["optimize"]:
            rep.run = lambda inputs: [y + np.float32(next(runs) == 2) for y in run(inputs)]
        return rep

    monkeypatch.setattr(SingaBackend, "prepare", changed)
    assert attempt("capture", "CUDA").reason.startswith("run 2 of BERT with three inputs in turn")


@pytest.mark.fakecuda
def test_a_device_that_is_never_current_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages.resolve("CUDA:1").device_id == 1  # tried before the contexts are changed
    monkeypatch.setattr(devices.cuda, "context", lambda ordinal: nullcontext())
    found = attempt("devices", "CUDA")
    assert (found.status, found.reason) == (FAILED, "Device.put of CUDA:1 must be on device 1, got device 0")


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([[np.ones(3)]], "must be refused, got a result"),
        ([DeviceFailure("an illegal memory access")], "must raise ResourceExhausted, got .* an illegal memory access"),
        ([ResourceExhausted("out of memory", code="SX613"), [np.zeros(3)]], "a small run after it must return"),
        ([ResourceExhausted("out of memory", code="SX613"), DeviceFailure("the device is lost")], "the device is lost"),
    ],
)
def test_a_device_that_does_not_survive_a_model_that_is_too_large_is_found(
    answers: list[Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Mock()
    prepared.run.side_effect = answers
    monkeypatch.setattr(SingaBackend, "prepare", lambda *_, **__: prepared)
    found = attempt("out-of-memory", "CUDA")
    assert found.status == FAILED and re.search(why, found.reason)


@pytest.mark.fakecuda
def test_a_step_that_keeps_its_memory_is_found() -> None:
    cupy = pytest.importorskip("cupy")
    kept: list[Any] = []
    samples = stages.watched(lambda: kept.append(cupy.empty(100, np.uint8)), stages.resolve("CUDA"), 20)
    with pytest.raises(device_check.Wrong, match="device_used from"):
        stages.judge_memory(samples)
    kept.clear()
    stages.judge_memory(stages.watched(lambda: cupy.empty(100, np.uint8), stages.resolve("CUDA"), 20))


@pytest.mark.fakecuda
def test_a_model_on_another_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = SingaBackend.prepare
    monkeypatch.setattr(SingaBackend, "prepare", lambda model, device: prepare(model, "CUDA:0"))
    found = attempt("devices", "CUDA")
    assert found.status == FAILED and "an output of a model of CUDA:1 must be on device 1, got device 0" in found.reason


@pytest.mark.fakecuda
def test_a_refusal_by_a_limit_is_no_test_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check_stages, "Limits", lambda **sizes: Limits(tensor_bytes=1 << 20))
    found = attempt("out-of-memory", "CUDA")
    assert found.status == FAILED and "must raise ResourceExhausted, got [SX603]" in found.reason


def test_the_page_of_a_check_names_what_did_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(chosen: Any, setup: CheckSetup) -> Iterator[StageResult]:
        yield StageResult("versions", PASSED, 1.0, "", {"name": "a | device", "packages": {"numpy": "2"}, "emulated": True})
        yield StageResult("traps", FAILED, 2.0, "1 of 65 differs\nTraceback", {"calls": 65, "wrong": ["x"] * 99})

    monkeypatch.setattr(device_check, "run", run)
    sonnx("--to", tmp_path)
    found = (tmp_path / "results.md").read_text()
    assert found == page(lines(tmp_path))
    assert "a \\| device" in found and "**1 of 2** stages passed" in found and "emulated" in found
    assert "* The stage `traps`: failed. 1 of 65 differs\n" in found and "| calls: 65; wrong: 99 values |" in found


def test_the_page_states_what_speeds_must_reach_and_what_an_earlier_version_measured() -> None:
    least = {"chain as a model, GB/s": {"of": "copy, GB/s", "share": 0.6, "got": 0.715}}
    speed = {"stage": "speed", "status": PASSED, "seconds": 1.0, "reason": "", "details": {"copy, GB/s": 1.0}}
    assert "`copy` was `Concat`" in page([speed])
    now = page([speed | {"details": {"copy, GB/s": 1.0, "passes": {"copy": 2}, "least": least}}])
    assert "* `chain as a model, GB/s` must be at least 0.6 of `copy, GB/s`, and is 0.715.\n" in now and "Concat" not in now


def test_the_reported_check_is_of_a_device_and_its_page_is_rendered_from_it() -> None:
    path = PROJECT / "reports" / "device-check.jsonl"
    stages = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.with_suffix(".md").read_text() == page(stages) and stages == public(stages)
    assert [s["stage"] for s in stages] == [n for n in NAMES if n != "capture"]  # it is newer than that check
    assert not stages[0]["details"]["emulated"]
    assert {s["status"] for s in stages} <= {PASSED, ONE_DEVICE}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("NVRM version: NVIDIA x86_64 Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "NVIDIA x86_64 Module 535.104.05"),
        ("NVRM version: NVIDIA Open Module for x86_64  580.1  Release Build  (a@b)", "NVIDIA Open Module for x86_64 580.1"),
        ("another driver", "another driver"),
    ],
)  # fmt: skip
def test_the_driver_is_named_without_its_build(line: str, name: str) -> None:
    assert device_check_stages._driver_name(line) == name
