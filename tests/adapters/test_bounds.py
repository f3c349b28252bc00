"""Adapters that need much memory or time are refused before: heads, expressions, ranks, parameters that share bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.adapters.test_peft_folders import CONFIG, WEIGHTS, folder, model_of, normal, pair, two
from tests.helpers import bounded

from singa_backend.adapters import Adapter, insert, merge
from singa_backend.adapters.flat_file import MAGIC, read_parameters
from singa_backend.adapters.peft import read_peft

MANY = "a" * 60
"""A path in which an expression of nested repetitions backtracks 2^60 times."""


def shared(count: int, size: int, rank: int = 1) -> bytes:
    """An adapter of onnxruntime whose parameters have one array of bytes."""
    out = bytearray(struct.pack("<I4s", 28, MAGIC) + struct.pack("<6H", 12, 20, 4, 8, 12, 16) + bytes(8))
    out += struct.pack("<i3iI", 28 - 8, 1, 1, 1, 4) + struct.pack("<I", count)
    first = len(out)
    out += bytes(4 * count)
    tables = []
    for i in range(count):
        out += struct.pack("<6H", 12, 20, 4, 8, 12, 16)
        tables.append(len(out))
        struct.pack_into("<I", out, first + 4 * i, tables[i] - (first + 4 * i))
        out += struct.pack("<iIIiI", 12, 0, 0, 1, 0)
    for i, table in enumerate(tables):
        struct.pack_into("<I", out, table + 4, len(out) - table - 4)
        out += struct.pack("<I", 16) + f"parameter{i:07}".encode()
    for at, content in (
        (8, struct.pack(f"<I{rank}q", rank, size // 4, *[1] * (rank - 1))),
        (16, struct.pack("<I", size) + bytes(size)),
    ):
        for table in tables:
            struct.pack_into("<I", out, table + at, len(out) - table - at)
        out += content
    return bytes(out)


def flat(folder_: Path, data: bytes) -> Callable[[], object]:
    (folder_ / "x.onnx_adapter").write_bytes(data)
    return lambda: read_parameters(folder_ / "x.onnx_adapter")


def head(rows: int) -> Callable[[], object]:
    adapter = Adapter({}, {"w": normal(5, 9), "b": normal(9)}, "", {"head": rows})
    return lambda: (insert(two(), adapter), merge(two(), adapter))


def peft(at: Path, tensors: dict[str, np.ndarray], model: Any = None, **config: Any) -> Callable[[], object]:
    made = folder(at / "p", tensors, **config)
    return lambda: read_peft(made, model or two())


def safetensors(at: Path, shape: list[int]) -> Callable[[], object]:
    made = folder(at / "p", pair("a.fc", 6, 5))
    text = json.dumps({"base_model.model.a.fc.lora_A.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (made / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert (made / CONFIG).is_file()
    return lambda: read_peft(made, two())


TEXT = f"g (float[n,6] x) => (float[n,5] y) {{ y = Gemm<transB=1>(x, {MANY}X__weight) }}"

CASES: dict[str, tuple[str, Callable[[Path], Callable[[], object]]]] = {
    "a head": ("", lambda at: head(9)),
    "a head of 2^31 rows": ("SX971", lambda at: head(1 << 31)),
    "a head of 2^27 rows": ("SX971", lambda at: head(1 << 27)),
    "a bias for a head of 2^20 rows": ("", lambda at: peft(at, {"b.0.fc.bias": np.zeros(1 << 20, np.float32)})),
    "a weight of 2^31 rows without columns": (
        "", lambda at: peft(at, {"b.0.fc.weight": np.zeros((1 << 31, 0), np.float32)}),
    ),
    "an expression that backtracks": (
        "",
        lambda at: peft(at, pair(f"{MANY}X", 6, 5), model_of(TEXT, **{f"{MANY}X__weight": normal(5, 6)}),
                        alpha_pattern={"(a+)+Y": 1, "(a|a)*Y": 2, "(.*)*Y": 3}),
    ),
    "200,000 expressions": ("SX606", lambda at: peft(at, pair("a.fc", 6, 5), alpha_pattern={f"x{i}": 1 for i in range(200_000)})),
    "3,000 long names that are not in the model": (
        "SX981", lambda at: peft(at, {f"m{i}.{'ab' * 200}.lora_{p}.weight": normal(1, 1) for i in range(3000) for p in "AB"}),
    ),
    "a rank of 400,000 dimensions in safetensors": ("SX607", lambda at: safetensors(at, [1] * 400_000)),
    "a rank of 400,000 dimensions": ("SX607", lambda at: flat(at, shared(3, 4, 400_000))),
    "one parameter": ("", lambda at: flat(at, shared(1, 1 << 20))),
    "2,000 parameters that share 1 MiB": ("SX982", lambda at: flat(at, shared(2000, 1 << 20))),
}  # fmt: skip


def call(case: list[str]) -> None:
    name, at = case
    CASES[name][1](Path(at))()


@pytest.mark.skipif(not bounded.available, reason="the system does not show the memory of a process")
def test_each_adapter_is_read_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    pytest.importorskip("re2")
    places = [tmp_path / str(i) for i in range(len(CASES))]
    for place in places:
        place.mkdir()
    found = bounded.calls(call, [[name, str(at)] for name, at in zip(CASES, places, strict=True)])
    assert len(found) == len(CASES)
    for (name, (code, _)), answer in zip(CASES.items(), found, strict=True):
        assert answer["code"] == code and answer["mebibytes"] <= 64 and answer["seconds"] <= 10, (name, answer)
