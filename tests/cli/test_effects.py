"""Effects before validation: a command that refuses an argument has started no process and written no file by then.

Generated from the commands: each option with each value that its kind refuses.  The first effect ends the command, and the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser
from tests.helpers.language_models import Decoder, write

from singa.cli import main
from singa.cli._common import CROWD, LateChoice
from singa.cli._main import COMMANDS
from singa_backend.adapters import Adapter, LowRank
from singa_backend.machine import usable_cores

BASES = {
    "adapter": "task.safetensors",
    "bisect": "m.onnx --against reference --random 0",
    "check": "m.onnx",
    "codegen": "m.onnx -o m.py",
    "compare": "m.onnx --against reference --random 0",
    "completion": "bash",
    "conform": "-k test_abs$ --kind node",
    "convert": "m.onnx -o o.onnx --opset 13",
    "device-check": "--stage versions",
    "diff": "m.onnx m.onnx",
    "doctor": "",
    "export": "net.py:build -o o.onnx -i x=float32[2,3]",
    "extract": "m.onnx --outputs y -o o.onnx",
    "foreign": "-k ^nothing$",
    "fuzz": "--count 3",
    "generate": "gpt2 --prompt a --max-new-tokens 2",
    "gradients": "^Neg-13$ --points 1 --oracle none",
    "guard": "write m.onnx -o m.guard",
    "inspect": "m.onnx",
    "lower": "m.onnx -o o.onnx",
    "merge": "m.onnx task.safetensors -o o.onnx",
    "layout": "m.onnx --to channels_last -o o.onnx",
    "opsets": "^Neg$ --oracle none",
    "optimize": "m.onnx -o o.onnx",
    "profile": "m.onnx --runs 1 --random 0",
    "quantize": "m.onnx --dynamic -o o.onnx",
    "reduce": "m.onnx --raises SX404 --random 0",
    "report": "run.json --to out",
    "run": "m.onnx --random 0",
    "sanitize": "m.onnx -o o.onnx",
    "sweep": "folder --task check",
    "tolerances": "Gelu",
    "train": "m.onnx --data data.npz -o o.onnx",
}
"""Arguments with which each command works."""

WRONG = {
    "--device": ["GPU9"], "--backend": ["nowhere:Nothing"], "--limit": ["bits=3"], "--size": ["x"], "--map": ["x"],
    "--input": ["x"], "--against": ["nowhere.onnx"], "--random": ["-1"], "--exclude": [], "--select": ["("],
    "--by": ["nowhere.onnx"], "--operators": ["nowhere_at_all"], "--at": ["nowhere"],
}  # fmt: skip
"""Values that options of text refuse."""

FREE = {
    "--prompt": "any text", "--system": "any text", "--stop": "any text",
    "--target": "a name in a file", "--freeze": "a pattern", "--lora-target": "a pattern",
    "--aux": "a name in the model", "--inputs": "names in the model",
    "--outputs": "names in the model", "--raises": "any code", "--command": "any program", "--against-command": "any program",
    "--operator": "a name in the model", "--name": "a name in the model", "--extra-opset": "a domain and a version",
    "--release": "a version in the manifest", "--exclude": "a pattern", "--ignore-index": "any integer",
    "--exclude-operator": "any name", "--metadata": "any text", "--doc": "any text",
    "--case": "a name in a file", "--input-name": "any name", "--output-name": "any name",
    "--pass": "checked by tests of the passes",
}  # fmt: skip
"""Options of text of which every value is taken, or whose names are only known from the model."""

WRITTEN = {"--output", "--results", "--junit", "--report", "--to", "--write", "--html", "--plot", "--checkpoint", "--trace",
           "--save-inputs", "--save-outputs", "--cache", "--metrics", "--tensorboard"}  # fmt: skip
"""Options with a path that is written."""

NEEDS = {
    ("quantize", "--block-size"): "--weight-only int4",
    ("fuzz", "--write"): "--only 1", ("train", "--sparsity"): "--dist-option sparseTopK --workers 2",
    **{("train", name): "--lora 2" for name in ("--lora-alpha", "--lora-dropout", "--lora-bias", "--rslora", "--qlora")},
    ("train", "--at"): "--head 2", ("sweep", "--random"): "--task run", ("sweep", "--against"): "--task compare",
    ("conform", "--cache"): "--release 1.2.1", ("conform", "--report"): "",
}  # fmt: skip
"""Further arguments that an option needs."""


class Effect(BaseException):
    """The first effect of a command."""


_watching: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or (arguments and isinstance(arguments[0], (str, bytes)) and "__pycache__" in os.fsdecode(arguments[0])):
        return
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.mkdir", "os.rename", "socket.connect"):
        raise Effect(f"{event} {arguments[:2]}")
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and os.fsdecode(path) != os.devnull:
            raise Effect(f"open {os.fsdecode(path)} for writing")


sys.addaudithook(_hook)  # for ever: it does nothing unless a test watches


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 4] y) { a = MatMul(x, w) y = Relu(a) }'
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 4), np.float32), "w"))
    onnx.save(model, "m.onnx")
    np.savez("data.npz", x=np.ones((64, 3), np.float32), y=np.zeros(64, np.int32))
    Adapter({"w": LowRank(np.ones((1, 3), np.float32), np.ones((4, 1), np.float32), 1.0)}, {}, "", {}).save("task.safetensors")
    Path("net.py").write_text("from singa import layer, model\nclass Net(model.Model):\n    def __init__(self):\n"
                              "        super().__init__()\n        self.a = layer.Linear(2)\n    def forward(self, x):\n"
                              "        return self.a(x)\ndef build():\n    return Net()\n")  # fmt: skip
    Path("run.json").write_text("{}")
    Path("folder").mkdir()
    onnx.save(model, "folder/m.onnx")
    write(Path("gpt2"), {"model": Decoder().model()})
    return tmp_path


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def wrong(parameter: click.Parameter) -> list[str]:
    """Values that the kind of an option or argument refuses."""
    kind, name = parameter.type, next((o for o in parameter.opts if o.startswith("--")), parameter.opts[0])
    if isinstance(kind, (click.IntRange, click.FloatRange)):
        step = 0 if getattr(kind, "min_open", False) else 1
        bounds = [str(kind.min - step)] if kind.min is not None else []
        return [*bounds, *([str(kind.max * 2)] if kind.max is not None else []), "x", *(["nan"] if step == 0 else [])]
    if isinstance(kind, (click.Choice, LateChoice)):
        return ["no-such-choice"]
    if isinstance(kind, click.Path):
        if name not in WRITTEN:
            return ["nowhere/at.all"]
        return ["m.onnx/below", *(["folder"] if kind.file_okay and name != "--cache" else []),
                *(["m.onnx"] if kind.dir_okay and not kind.file_okay else [])]  # fmt: skip
    return WRONG.get(name, [])


def cases() -> Iterator[tuple[str, str, str]]:
    for name in sorted(COMMANDS):
        for parameter in command(name).params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                for value in wrong(parameter):
                    yield name, next(o for o in parameter.opts if o.startswith("--")), value


def contents(place: Path) -> list[Path]:
    """The files and folders, without those of the interpreter."""
    return sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts)


def run(line: list[str]) -> tuple[int, str]:
    """The exit code and output of a command, which ends at its first effect."""
    _watching.append(True)
    try:
        done = CliRunner().invoke(main, line)
    finally:
        _watching.clear()
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(("name", "option", "value"), list(cases()))
def test_a_refused_option_has_no_effect(name: str, option: str, value: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))  # empty, so that a command that uses it would write
    before = contents(place)
    line = [name, *BASES[name].split(), *NEEDS.get((name, option), "").split(), option, value]
    if (name, option) == ("conform", "--report"):  # it needs the whole suite
        line = [name, option, value]
    code, told = run(line)
    assert code in (2, 3), told
    assert contents(place) == before


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_arguments_are_right_without_it(name: str, place: Path) -> None:
    """Otherwise the test above would see another refusal."""
    if name == "report":  # its file is made by conform
        return
    try:
        code, told = run([name, *BASES[name].split()])
    except Effect:
        return
    assert code in (0, 1) or "SX321" in told, told  # SX321: the model does not fail, so that there is nothing to reduce


def test_every_option_has_values_that_are_refused() -> None:
    """Or is of a kind that refuses none, in the list above."""
    for name in COMMANDS:
        for parameter in command(name).params:
            if isinstance(parameter, click.Option) and not parameter.is_flag and not wrong(parameter):
                known = parameter.callback is not None or any(o in FREE for o in parameter.opts)
                assert known, (name, parameter.opts)


PROCESSES = [
    (name, o) for name in COMMANDS for p in command(name).params for o in p.opts if o in ("--workers", "--processes", "--jobs")
]


@pytest.mark.parametrize(("name", "option"), PROCESSES)
def test_too_many_processes_are_refused(name: str, option: str, place: Path) -> None:
    """Before any is started; `--oversubscribe` permits them, and a warning stays."""
    most = CROWD * usable_cores()
    base = [name, *BASES[name].split()]
    for count in (most + 1, 5000, 60_000, 100_000):
        code, told = run([*base, option, str(count)])
        assert code == 2 and (f"must be at most {most}" in told or count > 1 << 16), told
    assert run([*base, option, "100000", "--oversubscribe"])[0] == 2
    for more in ([option, str(most)], [option, str(most + 1), "--oversubscribe"], ["--oversubscribe", option, str(most + 1)]):
        try:
            code, told = run([*base, "--batch-size", "7", *more] if name == "train" else [*base, *more])
        except Effect:
            continue
        assert name in ("train", "device-check", "sweep") and "must be at most" not in told, told


def test_the_list_of_processes_is_complete() -> None:
    assert {name for name, _ in PROCESSES} == {"train", "conform", "fuzz", "gradients", "opsets", "device-check", "sweep"}


@pytest.mark.parametrize(("more", "told"), [
    ("--sparsity 2 --dist-option sparseTopK --workers 2", "spars must be in (0, 1] for topK, got 2.0"),
    ("--sparsity 0.1 --workers 2", "--sparsity needs --dist-option"), ("--dist-option half", "--dist-option needs --workers"),
    ("--optimizer adam --momentum 0.5", "--momentum needs --optimizer sgd"),
    ("--warmup 1000 --workers 2", "--warmup must be below"),
    ("--target z --workers 2", "must contain 'z'"), ("--freeze nothing --workers 2", "nothing"),
    ("--data other.npz --workers 2", "one number of samples"), ("--device CUDA --workers 2", "CUDA"),
    ("--validation other.npz --workers 2", "one number of samples"),
    ("--head 0 --workers 2", "--head"), ("--keep-best loss --workers 2", "--keep-best needs --validation"),
    ("--keep 2", "--keep needs --checkpoint"), ("--metrics m.onnx", "--metrics must differ from MODEL"),
    ("--metrics folder/old.csv --workers 2", "SX395"), ("--tensorboard folder/old --workers 2", "SX395"),
    ("--data nowhere:nothing --workers 2", "no module nowhere"),
    ("--loss mse_loss --validation data.npz --keep-best accuracy --workers 2", "--keep-best accuracy needs class numbers"),
    ("--checkpoint old.ckpt --resume --workers 2", "old.ckpt"), ("--every 2 --workers 2", "--every needs --checkpoint"),
])  # fmt: skip
def test_a_training_is_refused_before_its_workers_start(
    more: str, told: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez("other.npz", x=np.ones((64, 3), np.float32), y=np.zeros(63, np.int32))
    Path("old.ckpt").write_text("no checkpoint")
    Path("folder/old.csv").write_text("a,b\n")
    Path("folder/old").mkdir()
    Path("folder/old/events.out.tfevents.1").write_text("")
    monkeypatch.setattr("singa.cli.train.check_launcher", lambda: None)
    code, found = run(["train", *BASES["train"].split(), *more.split()])
    assert code in (2, 3) and told in found.replace("\n", " "), found


def test_a_training_with_workers_starts_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("singa.cli.train.check_launcher", lambda: None)
    with pytest.raises(Effect):
        run(["train", *BASES["train"].split(), "--workers", "2"])
