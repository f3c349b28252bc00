"""Compiling and linking: the cache of objects, damage to it, who may write it, threads, forks, and texts that have no code."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_backend.elementwise import compile as machine
from singa_backend.elementwise.compile import NotCompiled, available, native, target, undefined

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows keeps the user's folders private")


def text(number: int, name: str = "f") -> str:
    """A function that writes a number."""
    return f"define void @{name}(ptr %x) {{\n  store i64 {number}, ptr %x\n  ret void\n}}\n"


def compiled(text: str, name: str, features: str | None = None) -> machine.Compiled:
    return machine.compiled(text, name, lambda: text, features)


def value(function: machine.Compiled) -> int:
    place = np.zeros(1, np.int64)
    function.call(place.ctypes.data)
    return int(place[0])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    monkeypatch.setattr(machine, "folder", lambda: tmp_path / "code")
    return tmp_path / "code"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts that are compiled."""
    texts: list[str] = []
    original = machine.Machine.object

    def noted(self: machine.Machine, text: str) -> bytes:
        texts.append(text)
        return original(self, text)

    monkeypatch.setattr(machine.Machine, "object", noted)
    yield texts


def test_an_object_is_compiled_once(home: Path, compilations: list[str]) -> None:
    first = compiled(text(1), "f")
    assert compiled(text(1), "f") is first  # in memory
    assert value(first) == 1
    del first
    gc.collect()
    assert value(compiled(text(1), "f")) == 1  # from the file
    assert len(compilations) == 1
    assert value(compiled(text(2), "f")) == 2
    assert len(compilations) == 2


def test_features_and_text_are_in_the_key(home: Path, compilations: list[str]) -> None:
    kept = [compiled(text(3), "f"), compiled(text(3), "f", native().features + ",+fma"), compiled(text(4), "f")]
    assert [value(k) for k in kept] == [3, 3, 4]
    assert len(compilations) == len(list(home.iterdir())) == 3


@POSIX
def test_the_cache_is_private(home: Path, compilations: list[str]) -> None:
    compiled(text(5), "f")
    assert home.stat().st_mode & 0o777 == 0o700
    (file,) = home.iterdir()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: b"",
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
    ],
)
def test_a_damaged_object_is_replaced(home: Path, compilations: list[str], damage: Any) -> None:
    number = len(damage(bytes(range(256)) * 2))
    assert value(compiled(text(number), "f")) == number
    gc.collect()
    (file,) = home.iterdir()
    data = file.read_bytes()
    file.write_bytes(damage(data))
    assert value(compiled(text(number), "f")) == number
    assert len(compilations) == 2
    assert file.read_bytes() == data


def test_an_object_of_another_key_is_replaced(home: Path, compilations: list[str]) -> None:
    """A file that was renamed has valid code, but of another text."""
    compiled(text(6), "f")
    (file,) = home.iterdir()
    old = file.read_bytes()
    compiled(text(7), "f")
    (other,) = set(home.iterdir()) - {file}
    other.write_bytes(old)
    gc.collect()
    assert value(compiled(text(7), "f")) == 7


@POSIX
def test_a_folder_that_others_can_write_is_not_used(home: Path, compilations: list[str]) -> None:
    compiled(text(8), "f")
    gc.collect()
    home.chmod(0o777)
    assert value(compiled(text(8), "f")) == 8
    assert len(compilations) == 2
    compiled(text(9), "f")
    assert len(list(home.iterdir())) == 1


@POSIX
def test_a_file_that_others_can_write_is_not_used(home: Path, compilations: list[str]) -> None:
    compiled(text(10), "f")
    gc.collect()
    (file,) = home.iterdir()
    file.chmod(0o666)
    assert value(compiled(text(10), "f")) == 10
    assert len(compilations) == 2
    assert file.stat().st_mode & 0o077 == 0


@POSIX
def test_a_link_is_not_a_folder(home: Path, tmp_path: Path, compilations: list[str]) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "elsewhere")
    assert value(compiled(text(11), "f")) == 11
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_cannot_be_made_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.parent.joinpath("file").write_text("")
    monkeypatch.setattr(machine, "folder", lambda: home.parent / "file" / "code")
    assert value(compiled(text(12), "f")) == 12


def test_a_full_disk_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert value(compiled(text(13), "f")) == 13
    assert not list(home.iterdir())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("define void @f(ptr %x) {\n  nonsense\n}\n", "not valid"),
        ("define void @f(ptr %x) {\n  ret i32 1\n}\n", "not valid"),
        (
            "declare void @pow_of_nobody()\ndefine void @f(ptr %x) {\n  call void @pow_of_nobody()\n  ret void\n}\n",
            "pow_of_nobody",
        ),
        (
            "define void @f(ptr %x) {\n  %v = load double, ptr %x\n  %w = call double @llvm.pow.f64(double %v, double %v)\n"
            "  store double %w, ptr %x\n  ret void\n}\ndeclare double @llvm.pow.f64(double, double)\n",
            "pow",
        ),
        ("define void @f(ptr %x) {\n  %p = load ptr, ptr @thing\n  ret void\n}\n@thing = external global ptr\n", ""),
    ],
)
def test_texts_without_code_are_refused(home: Path, bad: str, reason: str) -> None:
    if not reason:  # the load is removed, so nothing is left that is outside
        assert undefined(native().object(bad)) == []
        return
    with pytest.raises(NotCompiled, match=reason):
        compiled(bad, "f")
    assert not home.exists() or not list(home.iterdir())
    assert value(compiled(text(14), "f")) == 14  # the linker still works


def test_symbols_that_an_object_refers_to() -> None:
    bad = "declare void @outside()\ndefine void @f() {\n  call void @outside()\n  ret void\n}\n"
    for level in machine.LEVELS:
        with pytest.raises(NotCompiled, match="the code calls outside"):
            target(level).object(bad)
        assert undefined(target(level).object(text(1))) == []


def test_threads_compile_at_once(home: Path) -> None:
    found: dict[int, int] = {}

    def work(i: int) -> None:
        found[i] = value(compiled(text(100 + i % 5), "f"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {i: 100 + i % 5 for i in range(20)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_calls_and_compiles(home: Path) -> None:
    """Also if another thread compiles at the time of the fork."""
    before, stop = compiled(text(20), "f"), threading.Event()

    def busy() -> None:
        number = 1000
        while not stop.is_set():
            compiled(text(number := number + 1), "f")

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for i in range(5):
            child = os.fork()
            if child == 0:
                ok = value(before) == 20 and value(compiled(text(30 + i), "f")) == 30 + i
                os._exit(0 if ok else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_code_lives_as_long_as_its_object(home: Path) -> None:
    kept = [compiled(text(i), "f") for i in range(40, 60)]
    for i in range(200, 260):
        compiled(text(i), "f")
    gc.collect()
    assert [value(k) for k in kept] == list(range(40, 60))
    call, place = kept.pop().call, np.zeros(1, np.int64)
    gc.collect()
    assert value(compiled(text(260), "f")) == 260
    call(place.ctypes.data)  # lives without its object
    assert place[0] == 59


def test_importing_does_not_import_llvmlite() -> None:
    code = "import sys, singa.sonnx, singa_backend.elementwise.compile, singa_backend.elementwise.machine_code\n"
    code += "assert 'llvmlite' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reasons_without_llvmlite() -> None:
    code = "import sys; sys.modules['llvmlite'] = sys.modules['llvmlite.binding'] = None\n"
    code += "from singa_backend.elementwise.compile import NotCompiled, available, compiled\n"
    code += "assert available() == 'llvmlite is not installed', available()\n"
    code += "try:\n    compiled('', 'f', str)\nexcept NotCompiled as e:\n    print(e)\n"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "llvmlite is not installed"
