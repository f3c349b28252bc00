"""Writes files with a fault at each operation, and reports what is in the folder afterwards.

Each case writes over an older result.  Opening, writing, flushing, renaming and removing files is counted.  At one of these
operations the operation fails, or the process dies: by a signal in a forked child, or, to be fast, by an exception that every
later operation raises too, so that nothing changes any more.  Then the result must be the old or the new one, and after one more
write to the folder nothing else may be there.

One JSON object a line on standard input ({"name", "kills", "every"}), one on standard output ({"operations", "wrong"}).
"""

from __future__ import annotations

import builtins
import errno
import gc
import io
import json
import os
import random
import re
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa import codegen, layer, model, snapshot, sonnx, tensor
from singa.cli import main
from singa_backend import SonnxError, debug, inspection
from singa_backend.adapters import Adapter, LowRank
from singa_backend.conform import device_check, foreign, gaps, releases, results, worker
from singa_backend.conform.device_check import StageResult
from singa_backend.debug.guards.document import Guard
from singa_backend.debug.guards.summary import Level
from singa_backend.io import files, temporary
from singa_backend.io.files import write_text
from singa_backend.plans.profile import Profile
from singa_backend.proto import checker, test_data
from singa_backend.sweep import SweepReport, SweepRow, SweepSettings
from singa_backend.sweep.results import SweepStore

F = np.float32


# --- faults -----------------------------------------------------------------------------------------------------------


class Died(BaseException):
    """The process does nothing any more."""


class Faults:
    """Counts the operations on files, and fails at one of them.

    how: "fail": an error; "die": an exception, also at all later operations; "kill": a signal.
    """

    def __init__(self, at: int, how: str, unit: str = "operations") -> None:
        self.at, self.how, self.unit = at, how, unit
        self.seen = {"operations": 0, "bytes": 0}
        self.dead = False

    def step(self, name: str, size: int = 0) -> int | None:
        """Count one operation; fail if it is the one.  Returns how many bytes to write before the failure."""
        if self.dead:
            raise Died
        before = self.seen[self.unit]
        self.seen["operations"] += 1
        self.seen["bytes"] += size
        if before < self.at <= self.seen[self.unit]:
            if name != "write":
                self.fail()
            return size // 2 if self.unit == "operations" else self.at - before - 1
        return None

    def fail(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "die":
            self.dead = True
            raise Died
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __enter__(self) -> Faults:
        faults, opened = self, io.open
        self.patched = pytest.MonkeyPatch()

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                view = memoryview(data).cast("B")
                part = faults.step("write", len(view))
                if part is not None:
                    super().write(view[:part])
                    faults.fail()
                return super().write(view)

        def open_(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
                  closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
            if not set(mode) & set("wxa+") or (isinstance(file, int) and not stat.S_ISREG(os.fstat(file).st_mode)):
                return opened(file, mode, buffering, encoding, errors, newline, closefd, opener)
            faults.step("open")
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if not buffering:
                return raw
            binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

        self.patched.setattr(io, "open", open_)
        self.patched.setattr(builtins, "open", open_)
        for name in ("replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir", "ftruncate", "chmod", "symlink", "fsync"):
            self.patched.setattr(os, name, self.counted(name, getattr(os, name)))
        self.patched.setattr(os, "write", self.written(os.write))
        return self

    def __exit__(self, *_: object) -> None:
        self.patched.undo()

    def counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.step(name)
            return real(*args, **kwargs)

        return call

    def written(self, real: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def call(handle: int, data: Any) -> int:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return real(handle, data)
            part = self.step("write", len(data))
            if part is not None:
                real(handle, data[:part])
                self.fail()
            return real(handle, data)

        return call


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What writes, and how its result is read.

    Attributes:
        run: writes in the current folder; the argument is 0 for the old result, 1 for the new one.
        read: the results by name, of the current folder; what is missing is left out.
        old: whether there is an older result.
        interim: what a result may also be before it is complete.
    """

    run: Callable[[int], Any]
    read: Callable[[], dict[str, str]]
    old: bool = True
    covers: list[tuple[str, str]] = field(default_factory=list)
    interim: tuple[str, ...] = ()


CASES: dict[str, Case] = {}


def case(
    read: Callable[[], dict[str, str]], *, covers: str = "", old: bool = True, interim: tuple[str, ...] = ()
) -> Callable[..., Any]:
    def add(run: Callable[[int], Any]) -> Callable[[int], Any]:
        pairs = [tuple(pair.split()) for pair in covers.split(",") if pair]
        CASES[run.__name__] = Case(run, read, old, pairs, interim)  # type: ignore[arg-type]
        return run

    return add


def digest(data: bytes | str) -> str:
    return sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def models(*paths: str) -> Callable[[], dict[str, str]]:
    """Each model, loaded with its external data."""

    def read() -> dict[str, str]:
        found = {}
        for path in filter(os.path.exists, paths):
            loaded = onnx.load(path)
            values = {t.name: digest(numpy_helper.to_array(t).tobytes()) for t in loaded.graph.initializer}
            found[path] = f"{loaded.opset_import[0].version} {sorted(values.items())}"
        return found

    return read


def archives(*paths: str) -> Callable[[], dict[str, str]]:
    def read() -> dict[str, str]:
        found = {}
        for path in filter(os.path.exists, paths):
            with np.load(path) as stored:
                found[path] = str(sorted((n, digest(stored[n].tobytes())) for n in stored.files))
        return found

    return read


def texts(*paths: str) -> Callable[[], dict[str, str]]:
    return lambda: {p: digest(Path(p).read_bytes()) for p in paths if os.path.exists(p)}


def programs(path: str) -> Callable[[], dict[str, str]]:
    """The program, and the arrays that it reads."""

    def read() -> dict[str, str]:
        if not os.path.exists(path):
            return {}
        text = Path(path).read_text()
        line = re.search("^WEIGHTS = (.*)$", text, re.MULTILINE)
        assert line
        weights = eval(line[1], {"Path": Path, "__file__": os.path.abspath(path)})
        return {path: digest(text.replace(line[0], "")) + archives(str(weights))()[str(weights)]}

    return read


def onnx_model(new: int, opset: int = 21) -> ModelProto:
    made = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[n, 4] x) => (float[n, 300] y)'
        "{ p = MatMul(x, w) \n y = Gather<axis = 1>(p, order) }"
    )
    rng = np.random.default_rng(new)
    made.graph.initializer.append(numpy_helper.from_array(rng.normal(size=(4, 300)).astype(F), "w"))
    made.graph.initializer.append(numpy_helper.from_array(rng.permutation(300), "order"))
    return made


def net(new: int) -> model.Model:
    class Net(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layer.Linear(300)

        def forward(self, x: Any) -> Any:
            return self.fc(x)

    made = Net()
    made.compile([tensor.from_numpy(np.zeros((2, 4), F))], is_train=False)
    for t in made.get_states().values():
        t.data[...] = new + 1
    return made


def sonnx_command(*arguments: str) -> None:
    main(list(arguments), prog_name="sonnx")


IMAGE = '<ir_version: 8, opset_import: ["": 21]> g (float[1, 2, 3, 3] x) => (float[1, 2, 3, 3] y) { y = Add(x, w) }'
PROGRAM = "from __main__ import net\nold = lambda: net(0)\nnew = lambda: net(1)\n"


def sources() -> None:
    """The inputs of the cases: two models in folders of their own, and arrays."""
    rng = np.random.default_rng(5)
    for new in (0, 1):
        os.makedirs(f"in{new}")
        image = parser.parse_model(IMAGE)
        image.graph.initializer.append(numpy_helper.from_array(rng.normal(size=(1, 2, 3, 3)).astype(F), "w"))
        onnx.save(image, f"in{new}/image.onnx")
        onnx.save(onnx_model(new), f"in{new}/m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
        adapter_of(new, f"in{new}/a.safetensors")
        np.savez(f"in{new}/data.npz", x=rng.normal(size=(4, 4)).astype(F), y=rng.normal(size=(4, 300)).astype(F))
    Path("net.py").write_text(PROGRAM)


@case(archives("o.npz"), covers="run --save-outputs")
def run(new: int) -> None:
    sonnx_command("run", f"in{new}/m.onnx", "--random", "0", "-o", "o.npz")


@case(archives("i.npz"), covers="run --save-inputs")
def run_inputs(new: int) -> None:
    sonnx_command("run", f"in{new}/m.onnx", "--random", str(new), "--save-inputs", "i.npz")


@case(models("t.onnx"), covers="train --output")
def train(new: int) -> None:
    sonnx_command(*f"train in{new}/m.onnx --data in{new}/data.npz --loss mse_loss --batch-size 4 --no-graph -o t.onnx".split())


@case(models("m.onnx"))
def train_in_place(new: int) -> None:
    if not new:
        onnx.save(onnx_model(0), "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
        return
    sonnx_command(
        *["train", "m.onnx", "--data", "in1/data.npz", "--loss", "mse_loss", "--batch-size", "4", "--no-graph", "-o", "m.onnx"]
    )


def checkpoints() -> dict[str, str]:
    if not os.path.exists("c.zip"):
        return {}
    with zipfile.ZipFile("c.zip") as pack, np.load(io.BytesIO(pack.read("tensor_dict.npz"))) as stored:
        return {"c.zip": str(sorted((n, digest(stored[n].tobytes())) for n in stored.files))}


@case(checkpoints, covers="train --checkpoint")
def checkpoint(new: int) -> None:
    options = "--data in0/data.npz --loss mse_loss --batch-size 4 --no-graph --checkpoint c.zip"
    sonnx_command("train", "in0/m.onnx", *options.split(), *(["--resume", "--epochs", "2"] if new else ["--epochs", "1"]))


def parts(name: str) -> Any:
    """What the checkpoint knows of a part: a training that continues begins with it."""
    if not os.path.exists("c.zip"):
        return None
    with zipfile.ZipFile("c.zip") as pack, np.load(io.BytesIO(pack.read("tensor_dict.npz"))) as stored:
        return json.loads(stored["fit.run"].tobytes())["parts"][name]


def beginning(path: str, known: dict[str, Any]) -> bytes:
    data = Path(path).read_bytes()[: known["bytes"]]
    assert sha256(data).hexdigest() == known["sha256"], f"{path} does not begin with what the checkpoint knows"
    return data


def tables() -> dict[str, str]:
    known = parts("metrics")
    if known is None:
        return {}
    lines = beginning("m.csv", known).decode().splitlines()
    return {"m.csv": digest("\n".join(line.rpartition(",")[0] for line in lines))}  # without the speed


def event_files() -> dict[str, str]:
    from tensorboardX.proto.event_pb2 import Event

    known, found = parts("tensorboard"), []
    for file in known["files"] if known else ():
        data, at = beginning(f"tb/{file['name']}", file), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value if not v.tag.endswith("per_second")]
            at += size + 16
    return {"tb": digest(str(found))} if known else {}


def recorded(new: int, *more: str) -> None:
    options = "--data in0/data.npz --loss mse_loss --batch-size 4 --no-graph --checkpoint c.zip"
    sonnx_command("train", "in0/m.onnx", *options.split(), *more, *(["--resume", "--epochs", "2"] if new else ["--epochs", "1"]))


@case(tables, covers="train --metrics")
def metrics(new: int) -> None:
    recorded(new, "--metrics", "m.csv")


@case(event_files, covers="train --tensorboard")
def tensorboard(new: int) -> None:
    recorded(new, "--tensorboard", "tb")


def kept() -> dict[str, str]:
    """The steps of the checkpoints; the older ones stay until the newest is complete."""
    found = {}
    for path in ("c.step-000001.zip", "c.zip"):
        if os.path.exists(path):
            with zipfile.ZipFile(path) as pack, np.load(io.BytesIO(pack.read("tensor_dict.npz"))) as stored:
                found[path] = str(len(stored["fit.losses"]))
    return found


@case(kept)
def keep(new: int) -> None:
    recorded(new, "--keep", "2")


@case(texts("p.html"), covers="train --plot")
def plot(new: int) -> None:
    options = f"--data in{new}/data.npz --loss mse_loss --batch-size 4 --no-graph --plot p.html"
    sonnx_command("train", f"in{new}/m.onnx", *options.split(), "-o", os.devnull)


@case(models("c.onnx"), covers="convert --output")
def convert(new: int) -> None:
    sonnx_command("convert", f"in{new}/m.onnx", "--opset", "17", "-o", "c.onnx", "--external-data")


@case(models("c.onnx"), old=False)
def convert_to_a_new_file(new: int) -> None:
    sonnx_command("convert", f"in{new}/m.onnx", "--opset", "17", "-o", "c.onnx", "--external-data")


@case(models("w.onnx"), covers="lower --output")
def lower(new: int) -> None:
    sonnx_command("lower", f"in{new}/m.onnx", "-o", "w.onnx", "--external-data")


@case(models("e.onnx"), covers="export --output")
def export(new: int) -> None:
    sonnx_command("export", f"net.py:{'new' if new else 'old'}", "-i", "x=float32[2,4]", "-o", "e.onnx")


@case(models("l.onnx"), covers="layout --output")
def layout(new: int) -> None:
    sonnx_command("layout", f"in{new}/image.onnx", "--to", "channels_last", "-o", "l.onnx")


@case(models("p.onnx"), covers="extract --output")
def extract(new: int) -> None:
    sonnx_command("extract", f"in{new}/m.onnx", "--outputs", "p", "-o", "p.onnx")


@case(models("q.onnx"), covers="quantize --output")
def quantize(new: int) -> None:
    sonnx_command("quantize", f"in{new}/m.onnx", "--dynamic", "-o", "q.onnx")


def adapter_of(new: int, path: str) -> None:
    """An adapter of the model in a folder of `sources`."""
    rng = np.random.default_rng(new)
    change = LowRank(rng.normal(size=(2, 4)).astype(F), rng.normal(size=(300, 2)).astype(F), 0.5)
    Adapter({"w": change}, {}, "", {"modules": {"w": ["fc", "weight"]}}).save(path)


@case(models("g.onnx"), covers="merge --output")
def merge(new: int) -> None:
    sonnx_command("merge", f"in{new}/m.onnx", f"in{new}/a.safetensors", "-o", "g.onnx")


@case(texts("a.safetensors"))
def adapter_file(new: int) -> None:
    adapter_of(new, "a.safetensors")


@case(texts("a.onnx_adapter"), covers="adapter --output")
def adapter(new: int) -> None:
    sonnx_command("adapter", f"in{new}/a.safetensors", "-o", "a.onnx_adapter")


def peft_folder() -> dict[str, str]:
    """The folder is whole or absent."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    return {"peft": digest("".join(digest(Path("peft", n).read_bytes()) for n in names))} if os.path.exists("peft") else {}


@case(peft_folder, old=False)
def adapter_folder(new: int) -> None:
    sonnx_command("adapter", f"in{new}/a.safetensors", "--model", f"in{new}/m.onnx", "-o", "peft")


@case(models("s.onnx"), covers="sanitize --output")
def sanitize(new: int) -> None:
    sonnx_command("sanitize", f"in{new}/m.onnx", "-o", "s.onnx")


@case(models("z.onnx"), covers="optimize --output")
def optimize(new: int) -> None:
    sonnx_command("optimize", f"in{new}/m.onnx", "-o", "z.onnx")


@case(texts("p.html"), covers="inspect --html")
def inspect(new: int) -> None:
    class Seen:
        html, to_dict = staticmethod(lambda *_: f"page {new}" * 1000), staticmethod(dict)

    inspection.inspect = lambda *_, **__: Seen  # type: ignore[assignment]
    sonnx_command("inspect", f"in{new}/m.onnx", "--html", "p.html", "--json")


@case(texts("p.html"), covers="compare --html")
def compare_page(new: int) -> None:
    class Seen:
        html = staticmethod(lambda **_: f"page {new}" * 1000)

    inspection.inspect = lambda *_, **__: Seen  # type: ignore[assignment]
    sonnx_command("compare", f"in{new}/m.onnx", "--against", "sonnx", "--html", "p.html", "--json")


@case(texts("r/results.jsonl"), covers="device-check --to", interim=(digest(""),))  # the lines of an earlier run go at once
def check_of_a_device(new: int) -> None:
    outcomes = [StageResult("versions", "passed", 1.0, "", {"n": [new] * 1000})]
    device_check.run = lambda *_: iter(outcomes)  # type: ignore[assignment]
    sonnx_command("device-check", "--to", "r", "--json")


@case(texts("p.html"), covers="diff --html")
def diff_page(new: int) -> None:
    debug.diff_page = lambda *_: f"page {new}" * 1000  # type: ignore[assignment]
    sonnx_command("diff", f"in{new}/m.onnx", f"in{new}/m.onnx", "--html", "p.html", "--json")


def profiled(new: int, *options: str) -> None:
    """Profile a model; the documents are those of this number, whatever the times are."""

    class Seen:
        html = staticmethod(lambda _: f"page {new}" * 1000)

    inspection.inspect = lambda *_, **__: Seen  # type: ignore[assignment]  # the picture holds times
    Profile.chrome_trace = lambda _: [f"step {new}"] * 1000  # type: ignore[method-assign]  # as does the trace
    sonnx_command("profile", f"in{new}/m.onnx", "--runs", "1", "--json", *options)


@case(texts("p.html"), covers="profile --html")
def profile_page(new: int) -> None:
    profiled(new, "--html", "p.html")


@case(texts("t.json"), covers="profile --trace")
def profile_trace(new: int) -> None:
    profiled(new, "--trace", "t.json")


@case(programs("g.py"), covers="codegen --output")
def generate(new: int) -> None:
    sonnx_command("codegen", f"in{new}/m.onnx", "-o", "g.py", "--force")


@case(programs("g.py"), old=False)
def generate_new(new: int) -> None:
    codegen.generate(f"in{new}/m.onnx").write("g.py")


REPRO = ("repro/model.onnx", "repro/test_data_set_0/input_0.pb", "repro/test_data_set_0/output_0.pb")


@case(texts(*REPRO), covers="bisect --to,reduce --to,fuzz --write,guard --to")
def reproduction(new: int) -> None:
    test_data.write(Path("repro"), onnx_model(new), {"input_0.pb": b"x" * (new + 1), "output_0.pb": b"y" * (new + 1)})


@case(texts(*REPRO), old=False)
def new_reproduction(new: int) -> None:
    reproduction(new)


@case(texts("r/a.json", "r/a.md"), covers="conform --report,fuzz --report,gradients --to,opsets --to,report --to")
def publish(new: int) -> None:
    results.publish({"new": new}, Path("r/a.json"), {"a.md": lambda document: f"Generated by {document}"})


@case(texts("r.json"), covers="conform --results,fuzz --results")
def document(new: int) -> None:
    (releases if new else results).save({"new": new, "releases": {}, "executed": []}, Path("r.json"))


@case(texts("r.xml"), covers="conform --junit")
def junit(new: int) -> None:
    results.write_junit([worker.Result(f"case{new}", "node", "passed", "passed")], gaps.Judgement([], [], {}), Path("r.xml"))


@case(texts("m.guard"), covers="guard --output")
def guard_file(new: int) -> None:
    found = Guard({"file": f"m{new}.onnx"}, {}, Level(1, 1), [], [], [], {}, [])
    write_text("m.guard", found.text(1 << 16))


@case(texts("s.xml"), covers="sweep --junit,guard --junit")
def sweep_junit(new: int) -> None:
    SweepReport(SweepSettings("check"), [SweepRow(f"m{new}.onnx", "passed")], []).write_junit(Path("s.xml"))


@case(texts("swept/0.json"), covers="sweep --results")
def sweep_result(new: int) -> None:
    settings = SweepSettings("check", seed=new)
    answer = {"status": "passed", "reason": "", "code": "", "facts": {}, "seconds": 0.0}
    SweepStore(Path("swept")).keep("0", answer, settings)


@case(texts("r/foreign.json", "r/foreign.md"), covers="foreign --to")
def foreign_report(new: int) -> None:
    foreign.markdown = lambda document: f"Generated by {document}"  # type: ignore[assignment]
    foreign.write({"new": new, "comparisons": []}, Path("r"))


@case(models("s.onnx"))
def save_model(new: int) -> None:
    sonnx.save(onnx_model(new), "s.onnx")


@case(models("s.onnx"))
def save_with_data(new: int) -> None:
    sonnx.save(onnx_model(new), "s.onnx", save_as_external_data=True)


@case(models("s.onnx"))
def save_with_data_of_a_name(new: int) -> None:
    sonnx.save(onnx_model(new), "s.onnx", save_as_external_data=True, location="s.bin", size_threshold=0)


@case(models("s.onnx"))
def save_with_a_file_for_each_tensor(new: int) -> None:
    sonnx.save(onnx_model(new), "s.onnx", save_as_external_data=True, all_tensors_to_one_file=False)


@case(models("e.onnx"))
def export_with_data(new: int) -> None:
    sonnx.export(net(new), [tensor.from_numpy(np.zeros((2, 4), F))], "e.onnx", external_data=True)


def states() -> dict[str, str]:
    if not os.path.exists("s.zip"):
        return {}
    other = net(5)
    other.load_states("s.zip")
    return {"s.zip": str(sorted((n, digest(t.data.tobytes())) for n, t in other.get_states().items()))}


@case(states, old=False)
def save_states(new: int) -> None:
    net(new).save_states("s.zip")


def snapshots() -> dict[str, str]:
    if not os.path.exists("snap"):
        return {}
    found = snapshot.Snapshot("snap", False).read()
    return {"snap": str(sorted((n, digest(t.data.tobytes())) for n, t in found.items()))}


@case(snapshots)
def save_snapshot(new: int) -> None:
    with snapshot.Snapshot("snap", True) as out:
        for name in ("a", "b"):
            out.write(name, tensor.from_numpy(np.full(3000, new, F)))


# --- running them -----------------------------------------------------------------------------------------------------


def run_case(case: Case, folder: Path, new: int, faults: Faults) -> tuple[int | None, str]:
    """The exit code, None after a death, and the text on standard error."""
    os.chdir(folder)
    if faults.how == "kill":
        child = os.fork()
        if not child:
            with faults, suppress(BaseException):
                case.run(new)
            os._exit(0)
        return (None if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else 0), ""
    log, code = io.StringIO(), 0
    with redirect_stderr(log), faults:
        try:
            case.run(new)
        except SonnxError as error:
            code = 3
            log.write(str(error))
        except SystemExit as end:
            code = int(end.code or 0)
        except Died:
            pass
        except BaseException:
            code = 70
            log.write(traceback.format_exc())
        gc.collect()  # files that were not closed
    return (None if faults.dead else code), log.getvalue()


def result(case: Case, folder: Path) -> dict[str, str]:
    os.chdir(folder)
    try:
        return case.read()
    finally:
        os.chdir("/")


def names(folder: Path) -> list[str]:
    """The files of a folder; the number in the name of a model's data does not count."""
    found = [str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.name.startswith(temporary.PREFIX)]
    return sorted(re.sub(r"(\.\d+)?(\.data)?$", r"\2", name) for name in found)


def inject(name: str, kills: int, every: int, home: Path) -> dict[str, Any]:
    """Run a case with each fault at every so many operations, and with kills at random bytes."""
    case, seed, work = CASES[name], home / "seed", home / "work"
    seed.mkdir(parents=True)
    os.chdir(seed)
    sources()
    bare = names(seed)
    code, log = run_case(case, seed, 0, Faults(0, ""))
    assert code == 0, log
    if not case.old:
        for path in {n.partition("/")[0] for n in names(seed) if n not in bare}:
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    gc.freeze()  # what was imported is not searched again
    before, there = result(case, seed), names(seed)

    def fresh() -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(seed, work)

    fresh()
    code, log = run_case(case, work, 1, count := Faults(0, ""))
    assert code == 0, log
    after, now = result(case, work), names(work)
    assert after and all(before.get(n) != after[n] for n in after), f"{name}: the old and the new result are equal"
    wrong = []
    rng = random.Random(name)
    plan = [(how, i, "operations") for how in ("die", "fail") for i in range(1, count.seen["operations"] + 1)]
    plan = plan[rng.randrange(every) :: every]
    plan += [("kill", rng.randint(1, count.seen["bytes"]), "bytes") for _ in range(kills)]
    for how, at, unit in plan:
        fresh()
        code, log = run_case(case, work, 1, Faults(at, how, unit))
        where = f"{name}: {how} at {unit} {at}: "
        if how == "fail" and (code not in (0, 3) or "Traceback" in log):
            wrong.append(f"{where}exit code {code}: {log[-1500:]}")
        for later in ("", "after the next write, "):
            try:
                found = result(case, work)
            except Exception as error:
                wrong.append(f"{where}{later}cannot be read: {error!r}")
                break
            odd = [n for n in {**before, **after} if found.get(n) not in (before.get(n), after.get(n), *case.interim)]
            if odd or (code == 0 and found != after):
                wrong.append(f"{where}{later}neither old nor new: {odd}, exit code {code}")
            if not later:
                for folder in [work, *(p for p in work.rglob("*") if p.is_dir() and temporary.PREFIX not in str(p))]:
                    files.write_text(folder / "next", "")
                    os.unlink(folder / "next")
        left = [n for n in names(work) if n not in there and n not in now]
        if left:  # what an interim result refers to, which the next write of this result removes
            code, log = run_case(case, work, 1, Faults(0, ""))
            left = [n for n in names(work) if n not in now]
            if code or left or result(case, work) != after:
                wrong.append(f"{where}left behind: {left}, exit code {code}")
    return {"operations": count.seen["operations"], "wrong": wrong}


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # commands print their results
    assert checker.require_valid
    checker.require_valid = lambda *_, **__: ""
    checker.check_model = lambda *_, **__: checker.CheckerResult(True)  # type: ignore[assignment]
    os.fsync = lambda handle: None  # type: ignore[assignment]  # slow, and a process that dies does not need it
    sys.unraisablehook = lambda error: None
    with tempfile.TemporaryDirectory() as name:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                found = inject(**asked, home=Path(name) / asked["name"])
            except Exception:
                found = {"operations": 0, "wrong": [traceback.format_exc()]}
            print(json.dumps(found), file=answers, flush=True)
        os.chdir("/")


if __name__ == "__main__":
    serve()
