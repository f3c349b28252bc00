"""The node cases of the installed onnx in a file of the user's cache: onnx takes seconds to generate them."""

from __future__ import annotations

import os
import platform
import re
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import platformdirs
from onnx import TypeProto, load_model_from_string, numpy_helper

from ..errors import SonnxError
from ..io.archives import Archive, open_archive
from ..io.documents import parse_document
from ..io.files import names_in, remove, writing
from ..proto import test_data
from ..rendering import json_text

FORM = 1
"""The number of the layout of the file; a file of another one is replaced."""

MARK = b"PK"
_INDEX = "index.json"
_MOST = 1 << 30
_FILES = 3
"""The files that are kept: those of the environments that were written last."""

_ENTRY = {"name": str, "rtol": float, "atol": float, "data": [[int, int]]}

Stored = tuple[str, bytes, list[tuple[list[Any], list[Any]]], float, float]
"""The name of a case, its model, its data sets, and its tolerances."""


def path() -> Path:
    """Return the file for the installed onnx and NumPy, whose values may differ in the last bit on other machines."""
    folder = Path(platformdirs.user_cache_dir("sonnx", appauthor=False)) / "onnx-cases"
    return folder / f"node-{FORM}-{onnx.__version__}-{np.__version__}-{platform.machine()}.zip"


def read(select: str) -> list[Stored] | None:
    """Read the cases whose names match.

    Args:
        select: A regular expression.

    Returns:
        The cases; None if there is no file, or it cannot be read.
    """
    file = path()
    if not os.path.exists(file):
        return None
    try:
        with open_archive(file, "SX804") as archive:
            entries = parse_document(archive.read(_INDEX, _MOST), str(file), "SX804").matches([_ENTRY])
            return [_case(archive, e) for e in entries if re.search(select, e["name"])]
    except SonnxError:
        return None


def _case(archive: Archive, entry: Any) -> Stored:
    name = entry["name"]
    model = bytes(archive.read(f"{name}/model.onnx", _MOST))
    graph = load_model_from_string(model).graph

    def side(n: int, kind: str, count: int, declared: Any) -> list[Any]:
        members = [bytes(archive.read(f"{name}/{n}/{kind}_{i}.pb", _MOST)) for i in range(count)]
        return [test_data.value(data, declared[i].type) for i, data in enumerate(members)]

    data = [
        (side(n, "input", counts[0], graph.input), side(n, "output", counts[1], graph.output))
        for n, counts in enumerate(entry["data"])
    ]
    return name, model, data, entry["rtol"], entry["atol"]


def write(cases: Iterable[Stored]) -> None:
    """Keep all node cases, and remove the oldest files of other environments; nothing is kept if no file can be written."""
    with suppress(SonnxError, OSError):  # another process may have removed a file
        _write(cases)
        folder = path().parent
        files = [folder / name for name in names_in(folder) if name.startswith("node-")]
        for old in sorted(files, key=lambda f: f.stat().st_mtime)[:-_FILES]:
            remove(old, MARK)


def _write(cases: Iterable[Stored]) -> None:
    with writing(path(), parents=True, mark=MARK) as file, zipfile.ZipFile(file, "w") as pack:
        index = []
        for name, model, data, rtol, atol in cases:
            graph = load_model_from_string(model).graph
            pack.writestr(f"{name}/model.onnx", model)
            for n, sides in enumerate(data):
                for kind, values, declared in zip(("input", "output"), sides, (graph.input, graph.output), strict=True):
                    for i, value in enumerate(values):
                        pack.writestr(f"{name}/{n}/{kind}_{i}.pb", _serialized(value, declared[i].type))
            index.append({"name": name, "rtol": rtol, "atol": atol, "data": [[len(a), len(b)] for a, b in data]})
        pack.writestr(_INDEX, json_text(index))


def _serialized(value: Any, declared: TypeProto) -> bytes:
    if declared.HasField("optional_type"):
        return bytes(numpy_helper.from_optional(value).SerializeToString())
    if isinstance(value, list):
        return bytes(numpy_helper.from_list(value).SerializeToString())
    return bytes(numpy_helper.from_array(np.asarray(value)).SerializeToString())
