"""Engines of other packages: backend classes and programs in compare, bisect, reduce and run, saved values in compare and run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto, parser

from singa.cli import main
from singa_backend import InvalidInput, SonnxError, debug
from singa_backend.engines.command import CommandEngine
from singa_backend.engines.oracle import EngineFailure, Oracle

# A vendor's engine: whole models only, through onnx's base class (whose checks need typed outputs), wrong in one operator.
VENDOR = """
import os, time
import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

class Tanh(OpRun):
    def _run(self, x):
        return (np.tanh(x) * np.float32(1.01),)

class Rep(BackendRep):
    def __init__(self, model, changed=lambda values: values):
        self.session, self.changed = ReferenceEvaluator(model, new_ops=[Tanh]), changed
    def run(self, inputs, **options):
        print("a line of the vendor")
        return self.changed(tuple(self.session.run(None, dict(zip(self.session.input_names, inputs)))))

class Engine(Backend):
    changed = staticmethod(lambda values: values)
    @classmethod
    def prepare(cls, model, device="CPU", **options):
        onnx.checker.check_model(model, full_check=True)
        return Rep(model, cls.changed)

def wrong(change):
    return type("Wrong", (Engine,), {"changed": staticmethod(change)})

Dies = wrong(lambda values: os._exit(7))
Hangs = wrong(lambda values: time.sleep(600))
Few = wrong(lambda values: values[1:])
Array = wrong(lambda values: values[0])
Wide = wrong(lambda values: tuple(v.astype(np.float64) for v in values))
Text = wrong(lambda values: tuple("y" for v in values))
Odd = wrong(lambda values: tuple(v.astype("datetime64[s]") for v in values))

class Lacking:
    pass

class Whole:
    @classmethod
    def run_model(cls, model, inputs, device="CPU", **options):
        return Engine.prepare(model).run(inputs)
"""

# The same engine as a program of npz files, and one of its failures as its first argument.
PROGRAM = """
import os, signal, sys, time
import numpy as np, onnx
how, model, inputs, outputs = sys.argv[1:]
print("what a program prints")
if how == "fails": sys.exit("it is too hot")
if how == "dies": os.kill(os.getpid(), signal.SIGKILL)
if how == "hangs": time.sleep(600)
from vendor import Engine
feeds = np.load(inputs)
names = [i.name for i in onnx.load(model).graph.input]
found = Engine.prepare(onnx.load(model)).run([feeds[n] for n in names])
found = {o.name: v for o, v in zip(onnx.load(model).graph.output, found)}
if how == "few": found.popitem()
if how == "more": found["extra"] = feeds[names[0]]
if how == "wide": found = {n: v.astype(np.float64) for n, v in found.items()}
if how != "silent": np.savez(outputs, **found)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the vendor's engine, its program and a model; it is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vendor.py").write_text(VENDOR)
    (tmp_path / "program.py").write_text(PROGRAM)
    onnx.save(net(), tmp_path / "net.onnx")
    return tmp_path


def net() -> ModelProto:
    """A small net with one Tanh in the middle, whose input has no rank that inference knows."""
    return parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x) => (float[n,2] y, float[n,4] r)'
        " <float[4,4] w = {0.5,-1,2,1, 1,0.5,-1,1, 2,1,1,-0.5, 1,1,0.5,1}, float[4,2] v = {1,-1,0.5,2,1,1,-2,1}> {"
        " r = MatMul(x, w) s = Shape(r) t = Reshape(r, s) u = Tanh(t) z = Sigmoid(u) y = MatMul(z, v) }"
    )


def call(how: str) -> str:
    return f"{sys.executable} program.py {how} {{model}} {{inputs}} {{outputs}}"


X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def sonnx(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words])


SIDES = [["--against", "vendor:Engine"], ["--against", "vendor:Whole"], ["--against-command", call("well")]]


@pytest.mark.parametrize("side", SIDES, ids=["class", "run_model", "command"])
def test_an_engine_wrong_in_one_operator_is_bisected_to_its_node(side: list[str], place: Path) -> None:
    found = sonnx("bisect", "net.onnx", *side, "--size", "n=3", "--to", "repro", "--json")
    assert found.exit_code == 1, found.output
    told = json.loads(found.stdout)
    assert told["node"]["operator"] == "Tanh" and told["node"]["values"] == ["u"] and told["alone"]
    assert [n.op_type for n in onnx.load(place / "repro/model.onnx").graph.node] == ["Tanh"]


def test_compare_lists_the_values_and_reduce_keeps_the_node(place: Path) -> None:
    found = sonnx("compare", "net.onnx", "--against", "vendor:Engine", "--size", "n=3", "--json")
    told = json.loads(found.stdout)
    assert found.exit_code == 1 and told["theirs"] == "vendor:Engine" and told["not_compared"] == []
    assert {r["value"]: r["verdict"] == "agrees" for r in told["rows"]} == {
        "r": True, "s": True, "t": True, "u": False, "z": False, "y": False
    }  # fmt: skip
    left = sonnx("reduce", "net.onnx", "--against", "vendor:Engine", "--size", "n=3", "--to", "small", "--json")
    assert left.exit_code == 0, left.output
    assert json.loads(left.stdout)["operators"] == ["Tanh"]


@pytest.mark.parametrize("side", SIDES[1:], ids=["class", "command"])
def test_run_compares_its_outputs_with_an_engine(side: list[str]) -> None:
    found = sonnx("run", "net.onnx", "--random", 0, *side, "--json")
    assert found.exit_code == 1 and "outputs[0]" in json.loads(found.stdout)["difference"], found.output
    assert sonnx("run", "net.onnx", "--random", 0, *side, "--rtol", 1).exit_code == 0


def test_saved_outputs_are_compared_by_name(place: Path) -> None:
    run = sonnx("run", "net.onnx", "--random", 3, "--size", "n=3", "--aux", "t",
                "--save-inputs", "in.npz", "--save-outputs", "out.npz")  # fmt: skip
    assert run.exit_code == 0, run.output
    found = sonnx("compare", "net.onnx", "--inputs", "in.npz", "--against", "out.npz", "--json")
    assert found.exit_code == 0, found.output
    assert [r["value"] for r in json.loads(found.stdout)["rows"]] == ["r", "t", "y"]
    values = dict(np.load("out.npz"))
    np.savez("one.npz", t=values["t"] + 1)
    found = sonnx("compare", "net.onnx", "--inputs", "in.npz", "--against", "one.npz", "--json")
    told = json.loads(found.stdout)
    assert found.exit_code == 1 and told["first"]["operator"] == "Reshape" and told["first"]["inputs_agreed"] is None
    assert [r["value"] for r in told["rows"]] == ["t"]
    assert sonnx("run", "net.onnx", "--inputs", "in.npz", "--against", "out.npz", "--aux", "t").exit_code == 0
    refused = sonnx("run", "net.onnx", "--inputs", "in.npz", "--against", "out.npz")
    assert refused.exit_code == 3 and "--aux" in refused.stderr


def test_saved_values_keep_bfloat16_and_sequences(place: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (bfloat16[4] x) => (bfloat16[4] y, seq(bfloat16[N]) s)'
        " { y = Abs(x) s = SequenceConstruct(x, y) }"
    )
    onnx.save(model, place / "bf.onnx")
    assert sonnx("run", "bf.onnx", "--random", 3, "--save-inputs", "in.npz", "-o", "out.npz").exit_code == 0
    with np.load("out.npz") as saved:
        assert set(saved) == {"y", "s/0", "s/1"}
    found = debug.compare(model, {"x": debug.ComparedModel(model).feeds(_bfloat16("in.npz"))["x"]}, against="out.npz")
    assert found.agrees and len(found.rows) == 2
    assert not debug.compare(model, {"x": -_bfloat16("in.npz")["x"]}, against="out.npz").agrees


def _bfloat16(path: str) -> dict[str, Any]:
    import ml_dtypes

    return {n: a.view(ml_dtypes.bfloat16) for n, a in np.load(path).items()}


@pytest.mark.parametrize("words", [
    ["compare", "--against", "out.npz", "--local"], ["bisect", "--against", "out.npz", "--local"],
    ["compare", "--against", "typo.npz"], ["run", "--random", "0", "--against", "typo.npz"],
])  # fmt: skip
def test_what_saved_values_cannot_do_is_refused(words: list[str]) -> None:
    np.savez("out.npz", y=np.zeros((1, 2), np.float32))
    np.savez("typo.npz", yy=np.zeros((1, 2), np.float32))
    found = sonnx(words[0], "net.onnx", *words[1:])
    assert found.exit_code == 3 and "SX320" in found.stderr, found.output
    assert "typo.npz" not in words or "did you mean 'y'" in found.stderr


UNUSABLE = {
    "no_such_module:Engine": "No module named", "vendor:Engin": "did you mean 'Engine'", "vendor:Lacking": "prepare",
    "breaks:Engine": "ZeroDivisionError", "exits:Engine": "died: exit code 9", "nonsense": "MODULE:CLASS",
}  # fmt: skip


@pytest.mark.parametrize("engine", UNUSABLE)
def test_an_engine_that_cannot_be_used_is_refused_at_once(engine: str, place: Path) -> None:
    (place / "breaks.py").write_text("1 / 0")
    (place / "exits.py").write_text("import os; os._exit(9)")
    with pytest.raises(SonnxError, match=UNUSABLE[engine]) as error:
        if engine == "nonsense":
            Oracle(engine)
        else:
            debug.compare(net(), {"x": X}, against=engine)
    assert error.value.code == "SX901"


@pytest.mark.parametrize("text", ["no-such-program {model} {inputs} {outputs}", "cat {model} {inputs}", "cat '{model}", ""])
def test_a_command_that_cannot_be_used_is_refused_at_once(text: str) -> None:
    found = sonnx("compare", "net.onnx", "--against-command", text)
    assert found.exit_code == 3 and "SX901" in found.stderr, found.output


FAILURES = {
    "Dies": ("died", "exit code 7"), "Hangs": ("timeout", "no answer within"), "Few": ("refused", "2 values, one for each"),
    "Array": ("refused", "must return a tuple"), "Wide": ("refused", "is double, but the model declares float"),
    "Text": ("refused", "must be a NumPy array"), "Odd": ("refused", "datetime64"),
}  # fmt: skip


def run(engine: Any) -> EngineFailure:
    model = net()
    try:
        with pytest.raises(EngineFailure) as error:
            engine.run(model, None, {"x": X})
    finally:
        engine.close()
    assert error.value.code == "SX900"
    return error.value


@pytest.mark.parametrize("name", FAILURES)
def test_a_backend_that_fails_is_a_typed_error(name: str) -> None:
    from singa_backend.engines.local import Foreign

    error = run(Foreign(f"vendor:{name}", timeout=0.5 if name == "Hangs" else 60.0))
    assert error.how == FAILURES[name][0] and FAILURES[name][1] in error.reason


COMMANDS = {
    "fails": ("refused", "exit code 1; standard error: it is too hot"), "dies": ("died", "signal 9"),
    "hangs": ("timeout", "no answer within"), "silent": ("refused", "did not write"), "few": ("refused", "it has no 'r'"),
    "more": ("refused", "'extra'"), "wide": ("refused", "is double, but the model declares float"),
}  # fmt: skip


@pytest.mark.parametrize("how", COMMANDS)
def test_a_program_that_fails_is_a_typed_error(how: str) -> None:
    error = run(CommandEngine(call(how), timeout=0.5 if how == "hangs" else 60.0))
    assert error.how == COMMANDS[how][0] and COMMANDS[how][1] in error.reason


def test_a_failing_engine_is_named_at_its_node(place: Path) -> None:
    (place / "partial.py").write_text(
        "from vendor import Engine as Base\nclass Engine(Base):\n    @classmethod\n"
        "    def prepare(cls, model, device='CPU', **options):\n"
        "        if any(n.op_type == 'Sigmoid' for n in model.graph.node): raise NotImplementedError('no Sigmoid')\n"
        "        return Base.prepare(model)\n"
    )
    found = debug.compare(net(), {"x": X}, against="partial:Engine")
    assert [(n.operator, n.side, n.failure.code) for n in found.not_compared] == [("Sigmoid", "theirs", "SX900")]
    assert "no Sigmoid" in found.not_compared[0].failure.message and not found.agrees


def test_a_command_runs_without_a_shell(place: Path) -> None:
    run(CommandEngine(f"{sys.executable} -c '' {{model}} {{inputs}} {{outputs}} ; touch made"))
    assert not (place / "made").exists()


def test_only_one_trusted_side() -> None:
    for command in ("compare", "bisect", "reduce", "run"):
        found = sonnx(command, "net.onnx", "--against", "reference", "--against-command", call("well"), "--random", 0)
        assert found.exit_code == 2 and "--against-command" in found.stderr, found.output
    with pytest.raises(InvalidInput, match="names map"):
        debug.compare(net(), {"x": X}, against="vendor:Engine", names={"y": "z"})
