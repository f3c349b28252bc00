"""Each hostile model or input is refused by a typed error within seconds, in little memory, without opening other files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.paths import TESTS

HERE = TESTS / "hostile"
SECONDS, MEBIBYTES = 4.0, 64.0
"""Seconds of processor time, which a busy neighbour on the core can triple: the longest case takes 0.7 on an idle machine."""
SEED = int(os.environ.get("SONNX_HOSTILE_SEED", "11"))
COUNT = int(os.environ.get("SONNX_HOSTILE_INPUTS", "300"))
BLOCK = 50
"""The seed and the number of drawn inputs, and how many a test passes."""
MODELS = int(os.environ.get("SONNX_HOSTILE_MODELS", "390"))
MODEL_BLOCK = 130
"""The number of drawn models of a damaged structure, and how many a test passes."""


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"hostile_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus, inputs, structure = _load("corpus"), _load("inputs"), _load("structure")
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux shows it")


class Server:
    """The process that forks a child for each case: warm, so that a case is measured and not the imports."""

    def __init__(self, *what: str) -> None:
        for package in ("re2", "PIL"):
            pytest.importorskip(package)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "server.py"), *what]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, name: str, device: str, path: Path) -> dict[str, Any]:
        return self.request({"name": name, "device": device, "path": str(path)})

    def request(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("name", corpus.CASES)
def test_hostile(name: str, device: str, server: Server, tmp_path: Path) -> None:
    case = corpus.CASES[name]
    folder = tmp_path / "model"
    folder.mkdir()
    found = server.ask(name, device, case.write(folder))
    if case.code:
        assert found["code"].startswith(case.code), found
        assert "foreign" not in found["outcome"], found
    else:
        assert found["outcome"] == "ok", found
    assert found["opened"] == [], found
    # Processor time, so that a busy machine fails no one; what sleeps for ever is ended by the server and has no code.
    assert min(found["cpu"], found["seconds"]) <= SECONDS, found
    assert found["mebibytes"] <= MEBIBYTES, found


def test_the_corpus_is_large_enough() -> None:
    assert len(corpus.CASES) >= 300 and len({case.group for case in corpus.CASES.values()}) >= 24


def test_the_server_notices(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is legal and opens its own data: nothing is reported; the same folder seen as another's: it is."""
    folder = tmp_path / "model"
    folder.mkdir()
    path = corpus.CASES["external_plain_runs"].write(folder)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.onnx").symlink_to(path)
    assert server.ask("external_plain_runs", "CPU", path)["opened"] == []
    assert server.ask("external_plain_runs", "CPU", tmp_path / "elsewhere" / "model.onnx")["opened"] == [str(folder)]


# --- drawn inputs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doors() -> Iterator[Server]:
    server = Server("doors")
    yield server
    server.close()


@pytest.mark.parametrize("first", range(0, COUNT, BLOCK))
def test_drawn_inputs_are_refused(first: int, doors: Server, tmp_path: Path) -> None:
    failed = []
    for index in range(first, min(first + BLOCK, COUNT)):
        drawn = inputs.draw(SEED, index)
        base = tmp_path / str(index)
        (base / "in").mkdir(parents=True)
        drawn.write(base / "in")
        found = doors.request({"seed": SEED, "index": index, "path": str(base / "in")})
        # Processor time, so that a busy machine fails no one; what hangs is ended by the server and is not "refused".
        good = (
            found["outcome"] == "refused" and min(found["cpu"], found["seconds"]) <= SECONDS and found["mebibytes"] <= MEBIBYTES
        )
        if not good or [p.name for p in base.iterdir()] != ["in"]:
            failed.append(f"{index} {drawn}: {json.dumps(found)[:1500]}")
    assert not failed, "\n".join(failed)


def test_the_drawing_covers_doors_damages_and_sizes() -> None:
    drawn = [inputs.draw(SEED, i) for i in range(COUNT)]
    names = [*inputs.FILE_DOORS, *inputs.OTHER_DOORS]  # the latter open several doors each
    turns = Counter(names[i % len(names)] for i in range(COUNT))
    assert min(turns.values()) >= 10 and len(turns) == len(names)
    assert {n: Counter(d.door for d in drawn)[n] for n in inputs.FILE_DOORS} == {n: turns[n] for n in inputs.FILE_DOORS}
    assert len({d.damage for d in drawn}) >= 100 and len({str(d) for d in drawn}) >= 200
    assert {*inputs.SIZES, *inputs.BOMBS} <= {d.size for d in drawn}


def test_whole_files_pass(doors: Server, tmp_path: Path) -> None:
    """Whole files pass every door that reads files and then ends, so that a refusal is due to the damage."""
    for name in (
        "load_states",
        "Snapshot",
        "run -i npy",
        "run -i npz",
        "run -i pb",
        "run --inputs",
        "run --data",
        "compare --inputs",
    ):
        door = inputs.FILE_DOORS[name]
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        door.prepare(folder)
        (folder / door.name).write_bytes(inputs.whole(door.form))
        assert doors.request({"door": name, "path": str(folder)})["outcome"] == "ok", name


# --- models of a damaged structure ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Iterator[Server]:
    server = Server("models")
    yield server
    server.close()


@pytest.mark.parametrize("first", range(0, MODELS, MODEL_BLOCK))
def test_drawn_models_run_or_are_refused(first: int, models: Server) -> None:
    last = min(first + MODEL_BLOCK, MODELS)
    found = models.request({"seed": SEED, "first": first, "last": last})
    assert not found["failed"], "\n".join(found["failed"])
    counts = {door: found["ended"].get(f"{door} ok", 0) + found["ended"].get(f"{door} refused", 0) for door in structure.ALWAYS}
    assert set(counts.values()) == {last - first}
    if last - first >= 100:  # some damages leave a model that runs
        assert all(found["ended"].get(f"{door} ok", 0) >= 5 for door in structure.ALWAYS)


def test_the_models_are_valid_before_the_damage(tmp_path: Path) -> None:
    for name, model in structure.BASES.items():
        for door in structure.ALWAYS:
            structure.DOORS[door](model.SerializeToString(), structure.feeds(name))


def test_the_drawing_covers_models_damages_and_fields() -> None:
    drawn = [structure.draw(SEED, i) for i in range(390)]
    assert {d.base for d in drawn} == set(structure.BASES)
    done = [what for d in drawn for what in d.damages]
    assert {what.split()[0] for what in done} == set(structure.DAMAGES)
    assert len({what.split()[1] for what in done}) >= 60
    assert {door for i in range(390) for door in structure.doors_of(i)} == set(structure.DOORS)


# --- conversion ----------------------------------------------------------------------------------------------------------


CONVERSIONS = 500
"""The number of damaged models that the tests convert; `tox -e fuzz-conversion` runs 100,000."""


def test_damaged_models_are_converted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every writer: no case kills or hangs its worker, exceeds the limits or raises another error than a SonnxError."""
    monkeypatch.syspath_prepend(str(HERE))  # a worker imports the module by its name
    conversion, workers = (importlib.import_module(name) for name in ("conversion", "workers"))
    wrong: list[str] = []
    seen = workers.run("conversion", 1, 0, CONVERSIONS, lambda index, found: wrong.append(f"{index}: {json.dumps(found)[:1500]}"))
    assert not wrong, "\n".join(wrong)
    assert seen["ok"] > CONVERSIONS // 4 and seen["refused"] > CONVERSIONS // 4
    drawn = [conversion.draw(1, i) for i in range(CONVERSIONS)]
    assert {d.door for d in drawn if d} == set(conversion.DOORS) and {d.opset for d in drawn if d} == set(range(7, 28))


def test_a_death_or_a_hang_is_the_result_of_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    workers = importlib.import_module("workers")
    from singa_backend.io.processes import Child, ChildFailure

    asked: list[int] = []
    real = Child.ask

    def ask(child: Child, request: Any, timeout: float | None = None) -> Any:
        asked.append(request[1])
        if request[1] in (1, 2):
            raise ChildFailure("died" if request[1] == 1 else "timeout", "injected", -11 if request[1] == 1 else None)
        return real(child, request, timeout)

    monkeypatch.setattr(Child, "ask", ask)
    wrong: dict[int, str] = {}
    seen = workers.run("conversion", 1, 0, 4, lambda index, found: wrong.update({index: found["outcome"]}))
    assert asked == [0, 1, 2, 3] and wrong == {1: "died", 2: "timeout"} and sum(seen.values()) == 4


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("loop_2_63", []),
        ("external_up", []),
        ("file_of_text", []),
        ("constant_of_shape", []),
        ("loop_that_asks", ["--limit", "deadline=0.3"]),
        ("function_calls_itself", []),
        ("bad_utf8_value", []),
        ("concat_doubles", ["--limit", "tensor_bytes=8MiB"]),
        ("file_pipe", []),
    ],
)
@pytest.mark.parametrize("json_too", [False, True])
def test_the_command_line(name: str, options: list[str], json_too: bool, tmp_path: Path) -> None:
    case = corpus.CASES[name]
    path = case.write(tmp_path)
    from click.testing import CliRunner

    from singa.cli import main

    result = CliRunner().invoke(main, ["run", str(path), *options, *["--json"] * json_too])
    assert result.exit_code == 3, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit) and "Traceback" not in result.output
    if json_too:
        assert json.loads(result.stdout)["code"].startswith(case.code)
    else:
        assert re.search(rf"\[{case.code}", result.stderr)
