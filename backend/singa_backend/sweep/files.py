"""The model files of a folder, and the hash of everything that the result of a file depends on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from onnx import TensorProto

from ..errors import InvalidInput, SonnxError
from ..proto.load import open_light
from ..proto.save import tensors
from ..proto.source import file_digest
from ..proto.tensor_data import opened
from .settings import SweepSettings

DATA_SETS = "test_data_set_*"
"""The folders of inputs and expected outputs next to a model."""


def find_files(folder: str | os.PathLike[str], task: str, select: str = "") -> dict[str, Path]:
    """Find the model files of a folder and of the folders in it.

    Args:
        folder: the folder; names that begin with a dot are left out, and links to folders are not followed.
        task: "conform" finds only models with folders test_data_set_* next to them.
        select: a regular expression that a name must match.

    Returns:
        The paths by name, which is relative to the folder, in the order of the names.

    Raises:
        InvalidInput: there is none (SX992).
    """
    top = Path(folder)
    found = {}
    for path in top.rglob("*.onnx"):
        parts = path.relative_to(top)
        if any(p.startswith(".") for p in parts.parts) or not os.path.isfile(path):
            continue
        if re.search(select, parts.as_posix()) and (task != "conform" or data_sets(path)):
            found[parts.as_posix()] = path
    if not found:
        what = f" with {DATA_SETS} next to it" if task == "conform" else ""
        named = f" whose name matches {select!r}" if select else ""
        raise InvalidInput(f"{top} must have a file .onnx{what}{named}, got none", code="SX992")
    return dict(sorted(found.items()))


def data_sets(path: Path) -> list[Path]:
    """The folders of data next to a model, in the order of their names."""
    return sorted(p for p in path.parent.glob(DATA_SETS) if os.path.isdir(p))


def content_of(path: Path, task: str) -> str:
    """The hash of a model's file, of its external data and, for a task that reads them, of its data sets; raises OSError."""
    state = hashlib.sha256(file_digest(path).encode())
    for name, file in _external(path):
        state.update(f"\0{name}\0{file_digest(file) if file else ''}".encode("utf-8", "surrogatepass"))
    if task == "conform":
        for folder in data_sets(path):
            for file in sorted(folder.glob("*.pb")):
                state.update(f"\0{folder.name}/{file.name}\0{file_digest(file)}".encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def _external(path: Path) -> Iterator[tuple[str, Path | None]]:
    """The location of each file of external data, and its path if a model may read it."""
    try:
        model, folder = open_light(path)
    except SonnxError:  # the task reports it
        return
    found: dict[str, Path | None] = {}
    for tensor in tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        location, length = str(entries.get("location", "")), str(entries.get("length", "0"))
        if location in found or location == path.name:  # its own file: `open_light` left the tensor there
            continue
        try:
            with opened(tensor, folder, int(length) if length.isascii() and length.isdigit() else 0):
                found[location] = path.resolve().parent / location  # it is a plain file in the folder of the model
        except SonnxError:  # the task reports it
            found[location] = None
    yield from sorted(found.items())


def key_of(content: str, settings: SweepSettings) -> str:
    """The name under which a result is stored: a hash of the content, the task, its engine and seed, and the versions."""
    facts = [content, settings.task, settings.engine, settings.seed, settings.versions]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]
