"""Loading object files without a linker: what is refused, what the memory permits, and that kept code does not need llvmlite."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_backend.elementwise import compile as machine
from singa_backend.elementwise.compile import available, native, target
from singa_backend.elementwise.load import HERE, NotLoaded, load, sections

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=available()),
    pytest.mark.skipif(not HERE, reason="llvmlite links code on this system"),
]

SCALED = """define void @f(ptr %x) {
  %v = load double, ptr %x
  %w = fmul double %v, 0x400921FB54442D18
  store double %w, ptr %x
  ret void
}
"""
"""A function whose constant is in another section."""

COUNTED = """@n = internal global i64 1
define void @f(ptr %x) {
  %v = load i64, ptr @n
  store i64 %v, ptr %x
  %w = add i64 %v, 1
  store i64 %w, ptr @n
  ret void
}
"""
"""A function with memory that it writes."""


def text(number: int) -> str:
    return f"define void @f(ptr %x) {{\n  store i64 {number}, ptr %x\n  ret void\n}}\n"


def made(number: int) -> machine.Compiled:
    return machine.compiled(text(number), "f", lambda: text(number))


def value(function: machine.Compiled) -> int:
    place = np.zeros(1, np.int64)
    function.call(place.ctypes.data)
    return int(place[0])


def mappings() -> dict[range, str]:
    """What the process may do with its memory."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights = line.split()[:2]
        first, last = (int(p, 16) for p in place.split("-"))
        found[range(first, last)] = rights
    return found


def rights(address: int) -> str:
    return next((r for place, r in mappings().items() if address in place), "")


def test_a_constant_in_another_section() -> None:
    function = machine.compiled(SCALED, "f", lambda: SCALED)
    place = np.array([2.0])
    function.call(place.ctypes.data)
    assert place[0] == 2 * np.pi


def test_code_is_never_writable_and_executable() -> None:
    before = {place for place, r in mappings().items() if "w" in r and "x" in r}  # other libraries may have such memory
    functions = [made(i) for i in range(300, 320)]
    assert {rights(f.address) for f in functions} == {"r-xp"}
    assert {place for place, r in mappings().items() if "w" in r and "x" in r} <= before


def test_memory_is_freed_with_the_function() -> None:
    function = made(330)
    address = function.address
    assert rights(address) == "r-xp"
    del function
    gc.collect()
    assert "x" not in rights(address)


def test_many_functions() -> None:
    functions = [made(i) for i in range(1000, 1300)]
    assert [value(f) for f in functions] == list(range(1000, 1300))


def relocation(code: bytes, kind: int) -> bytes:
    """The code with another type of its first relocation."""
    first = next(s.start for s in sections(code) if s.kind == 4)
    return code[: first + 8] + struct.pack("<I", kind) + code[first + 12 :]


def elsewhere(code: bytes) -> bytes:
    """The code with all symbols outside of it."""
    found = bytearray(code)
    for table in sections(code):
        for at in table.entries if table.kind == 2 else ():
            struct.pack_into("<H", found, at + 6, 0)
    return bytes(found)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: relocation(native().object(SCALED), 1), "a relocation of type 1$"),
        (lambda: elsewhere(native().object(SCALED)), "is not in it$"),
        (lambda: native().object(COUNTED), "other sections than code and constants"),
        (lambda: target("aarch64").object(text(1)), "not an object file for this processor"),
        (lambda: native().object(text(1).replace("@f", "@g")), "it has no f$"),
    ],
)
def test_objects_that_are_not_loaded(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(NotLoaded, match=reason):
        load(make(), "f")


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns the number of objects of a cache of its own that are made when a function is not in memory."""
    monkeypatch.setattr(machine, "folder", lambda: tmp_path / "code")

    def count() -> int:
        gc.collect()
        assert value(made(340)) == 340
        return len(list((tmp_path / "code").iterdir()))

    return count


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(Path, "read_bytes", lambda path: b"changed"),
        lambda m: m.setattr(Path, "read_bytes", lambda path: path.open("rb").read() + b"0.1" * (path.name == "_version.py")),
        lambda m: m.setattr(machine.machine, "features", lambda: {"model": "none", "flags": "avx2 fma"}),
        lambda m: m.setattr(machine, "FORM", 0),
    ],
)
def test_what_decides_on_code_has_changed(compilations: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    assert [compilations(), compilations()] == [1, 1]
    try:
        change(monkeypatch)
        machine._here.cache_clear()
        assert [compilations(), compilations()] == [2, 2]
    finally:
        monkeypatch.undo()
        machine._here.cache_clear()


def test_notes_are_kept_with_the_code(compilations: Any) -> None:
    notes = "0 ~1 2\n<f4 |b1"
    function = machine.compiled(text(350), "f", lambda: text(350), notes=notes)
    assert function.notes == notes
    del function
    gc.collect()
    again = machine.kept(text(350), "f")
    assert again is not None and again.notes == notes and value(again) == 350


PROGRAM = """
import sys
import numpy as np
from singa import sonnx
from onnx import TensorProto, helper

info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [64, 1000]) for n in "xy"]
nodes = [helper.make_node("Sigmoid", ["x"], ["a"]), helper.make_node("Mul", ["x", "a"], ["b"])]
nodes += [helper.make_node("Tanh", ["b"], ["c"]), helper.make_node("Add", ["c", "x"], ["y"])]
model = helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 17)])
x = np.linspace(-9, 9, 64000, dtype=np.float32).reshape(64, 1000)
prepared = sonnx.prepare(model)
for _ in range(2):
    (y,) = prepared.run([x])
np.testing.assert_allclose(y, np.tanh(x / (1 + np.exp(-x))) + x, rtol=1e-5, atol=1e-6)
from singa_backend.kernels.frames import _KNOWN
assert [type(k) for k in _KNOWN.values()] == [tuple], _KNOWN
print("llvmlite" in sys.modules)
"""


def run(program: str, home: Path) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(home), "SONNX_MACHINE_CODE": "wait"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_kept_code_does_not_import_llvmlite(tmp_path: Path) -> None:
    assert [run(PROGRAM, tmp_path) for _ in range(2)] == ["True", "False"]
    (file,) = (tmp_path / "sonnx" / "machine-code").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert [run(PROGRAM, tmp_path) for _ in range(2)] == ["True", "False"]


def test_a_system_that_refuses_executable_memory(tmp_path: Path) -> None:
    """Memory that was writable cannot be made executable (PR_SET_MDWE)."""
    program = "import ctypes\nif ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): print('old')\nelse:\n"
    program += "    from singa_backend.elementwise.compile import available\n    print(available())\n"
    found = run(program, tmp_path)
    if found == "old":
        pytest.skip("Linux has no such rule before 6.3")
    assert found.startswith("the system refuses code that is made at run time: ")
