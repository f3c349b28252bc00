"""Child processes die, hang, start again and end with their parent, and a user's script needs no guard."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from singa_backend.io.processes import Child, ChildFailure, ask_all

FUNCTIONS = '''
import os, sys, time

def power(exponent):
    """Answers base ** exponent; some words make it die, hang, raise or describe itself."""
    count = 0

    def answer(request):
        nonlocal count
        count += 1
        if request == "die":
            os._exit(3)
        if request == "hang":
            time.sleep(600)
        if request == "raise":
            raise ValueError("on purpose")
        if request == "fill":
            return len(bytearray(8 << 30))
        if request == "about":
            return os.getpid(), count, sys.path, sys.argv, "written_by_a_user" in dir(sys.modules["__main__"])
        return request**exponent

    return answer

def broken():
    raise RuntimeError("cannot start")

def hanging():
    time.sleep(600)

def slow():
    time.sleep(2)
    return abs

def length():
    return len
'''


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that only this process's sys.path leads to."""
    (tmp_path / "functions_of_a_child.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("functions_of_a_child")
    del sys.modules["functions_of_a_child"]


def ended(pid: int, patience: float = 20.0) -> bool:
    """Whether a process that is not our child ends within `patience` seconds."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # nobody has waited for it yet
            return True
        time.sleep(0.05)
    return False


def test_answers_come_from_one_warm_process(functions: ModuleType) -> None:
    with Child(functions.power, 2) as child:
        assert child.pid is None and not child.alive
        assert [child.ask(n, 60) for n in (3, 4)] == [9, 16]
        pid, count, path, _, _ = child.ask("about", 60)
        assert (pid, count) == (child.pid, 3) and child.alive
        assert path[:1] == sys.path[:1] and set(filter(None, sys.path)) <= set(path)
    assert child.pid is None and not child.alive and ended(pid)


def test_a_death_is_reported_with_the_exit_code_and_the_child_starts_again(functions: ModuleType) -> None:
    with Child(functions.power, 2) as child:
        for how, code in (("die", 3), ("raise", 1)):
            with pytest.raises(ChildFailure, match=f"^exit code {code}$") as caught:
                child.ask(how, 60)
            assert (caught.value.how, caught.value.exit_code) == ("died", code)
            assert child.ask(5, 60) == 25
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildFailure, match="exit code -9"):
            child.ask(5, 60)
        assert child.ask(5, 60) == 25


def test_a_hang_is_reported_and_the_child_starts_again(functions: ModuleType) -> None:
    with Child(functions.power, 2) as child:
        assert child.ask(5, 60) == 25
        pid = child.pid
        assert pid
        start = time.monotonic()
        with pytest.raises(ChildFailure, match=r"^no answer within 0\.4 s$") as caught:
            child.ask("hang", 0.4)
        assert caught.value.how == "timeout" and caught.value.exit_code is None and time.monotonic() - start < 10
        assert ended(pid) and child.ask(5, 60) == 25


def test_the_time_limit_runs_from_when_the_child_is_ready(functions: ModuleType) -> None:
    with Child(functions.slow) as child:
        assert child.ask(-2, 1.5) == 2


def test_a_child_that_cannot_start_has_died(functions: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with Child(functions.broken) as child, pytest.raises(ChildFailure, match="exit code 1"):
        child.ask(1, 60)
    assert "RuntimeError: cannot start" in capfd.readouterr().err


def test_ask_all_ends_if_a_child_cannot_start(functions: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildFailure, match="exit code 1") as caught:
        list(ask_all([1, 2, 3], functions.broken, jobs=2, timeout=60))
    assert not caught.value.started and "RuntimeError: cannot start" in capfd.readouterr().err


def test_a_large_request_waits_for_the_child_and_not_in_send(functions: ModuleType) -> None:
    request = bytes(4 << 20)  # more than a pipe holds
    with Child(functions.length) as child:
        assert child.ask(request, 60) == len(request)
    with Child(functions.hanging) as child:
        start = time.monotonic()
        child.send(request, 60)  # nothing reads it
        assert not child.answered() and time.monotonic() - start < 10


def test_a_request_that_does_not_fit_into_memory_ends_the_child(functions: ModuleType) -> None:
    with Child(functions.length, memory=1 << 30) as child:
        assert child.ask(b"small", 60) == 5
        with pytest.raises(ChildFailure) as caught:
            child.ask(bytes(900 << 20), 60)
        assert caught.value.how == "died" and caught.value.started
        assert child.ask(b"small", 60) == 5


def test_a_good_child_writes_nothing(functions: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with Child(functions.power, 2) as child:
        child.ask(1, 60)
    assert capfd.readouterr() == ("", "")


def test_memory_is_bounded(functions: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with Child(functions.power, 2, memory=6 << 30) as child:
        assert child.ask(2, 60) == 4
        with pytest.raises(ChildFailure, match="exit code 1"):
            child.ask("fill", 60)
    assert "MemoryError" in capfd.readouterr().err


def test_what_a_child_cannot_import_is_refused() -> None:
    def inner() -> Any:
        return None

    with pytest.raises(ValueError, match="must be at the top of a module"):
        Child(inner)


def test_all_answers_as_they_come(functions: ModuleType) -> None:
    found = dict(ask_all([1, "die", 2, "hang", 3], functions.power, 2, jobs=2, timeout=2))
    assert (found[0], found[2], found[4]) == (1, 4, 9)
    assert str(found[1]) == "exit code 3" and (found[3].how, str(found[3])) == ("timeout", "no answer within 2 s")
    assert list(ask_all([], functions.power, 2)) == []


def test_children_end_where_the_caller_stops(functions: ModuleType) -> None:
    answers = ask_all(["about", "hang", "hang"], functions.power, 2, jobs=2)
    position, about = next(answers)
    assert position == 0
    answers.close()  # type: ignore[attr-defined]
    assert ended(about[0])


PARENT = """
import os, signal, sys
from functions_of_a_child import power
from singa_backend.io.processes import Child
child = Child(power, 2)
print(child.ask("about", 60)[0], flush=True)
{then}
"""


ENDS = {
    "leaves": "",
    "drops out": "child.send('hang'); os._exit(0)",
    "killed": "child.send('hang'); os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_child_ends_with_its_parent_whatever_it_computes(functions: ModuleType, tmp_path: Path, how: str) -> None:
    code = PARENT.format(then=ENDS[how])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert not done.stderr and ended(int(done.stdout))


SCRIPT = """
print("the script runs")
written_by_a_user = 1
import numpy as np
from onnx import parser
from functions_of_a_child import power
from singa_backend.engines.oracle import Oracle
from singa_backend.io.processes import Child
model = parser.parse_model('<ir_version: 10, opset_import: ["": 17]> m (float[2] x) => (float[2] y) { y = Relu (x) }')
with Oracle("sonnx") as oracle:
    print(oracle.run(model.SerializeToString(), {"x": np.array([-1, 2], np.float32)}, timeout=60)["y"].tolist())
with Child(power, 2) as child:
    print(child.ask("about", 60)[-1])
"""


@pytest.mark.parametrize("how", ["file", "standard input", "-c"])
def test_a_script_needs_no_guard(functions: ModuleType, tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = {"file": [str(script)], "standard input": ["-"], "-c": ["-c", SCRIPT]}[how]
    given = SCRIPT if how == "standard input" else ""
    done = subprocess.run([sys.executable, *command], input=given, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("the script runs\n[0.0, 2.0]\nFalse\n", "")
