"""A model as a readable Python program on `singa`, with its weights beside it in an .npz file.

program = codegen.generate("model.onnx")          program.text, program.arrays
program.write("model.py")                         model.py and model.npz, both or none
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from singa_backend.errors import InvalidInput
from singa_backend.ir.reader import read
from singa_backend.proto.load import ModelSource, load_model

from ._codegen import program
from ._codegen.lowering import lower
from ._codegen.stored import write_npz

__all__ = ["Program", "generate"]


@dataclass(frozen=True)
class Program:
    """A program and the arrays that it reads, by key.  facts: how many nodes, layers, parameters and arrays there are."""

    text: str
    arrays: dict[str, np.ndarray]
    facts: dict[str, int] = field(default_factory=dict)

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
        """Write the program to `path`, which ends in .py, and its arrays beside it; both appear whole, or neither does.

        force: take the place of files that are there.
        Raises InvalidInput where there are such without `force`, for another ending, and where the folder cannot be written.
        """
        target = Path(path)
        if target.suffix != ".py" or not target.stem:
            raise InvalidInput(f"a program is written to a file that ends in .py, not to {target}", code="SX377")
        weights = target.with_suffix(".npz")
        try:
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
                stage = Path(name)
                write_npz(stage / weights.name, self.arrays)
                (stage / target.name).write_text(self.text, encoding="utf-8")
                _place([(stage / weights.name, weights), (stage / target.name, target)], stage, force)
        except OSError as error:
            raise InvalidInput(f"{target} cannot be written: {error.strerror or error}", code="SX351") from None
        return [target, weights]


def _place(pairs: list[tuple[Path, Path]], stage: Path, force: bool) -> None:
    """Put files into their places; what was done is undone where one of them cannot be put there."""
    undo: list[tuple[Path, Path | None]] = []
    try:
        for made, place in pairs:
            kept = stage / f"{place.name}.before" if force and place.exists() else None
            if kept is None:
                os.link(made, place)  # refuses where the file has appeared meanwhile
            else:
                os.link(place, kept)
                os.replace(made, place)
            undo.append((place, kept))
    except OSError as error:
        for place, before in undo:
            os.unlink(place) if before is None else os.replace(before, place)
        if isinstance(error, FileExistsError):
            there = [str(place) for _, place in pairs if place.exists()]
            what = f"{' and '.join(there)} exist already" if len(there) > 1 else f"{there[0]} exists already"
            raise InvalidInput(what, code="SX376", hint="choose another name, or give --force (force=True)") from None
        raise


def generate(model: ModelSource, name: str = "") -> Program:
    """The program of a model: a ModelProto, bytes or a path.  The same model gives the same text.

    name: of the program's file, for the lines that say how to call it; that of the model's file when absent.
    Raises InvalidModel, and UnsupportedModel for what no program can hold.
    """
    stem = name or (Path(model).stem if isinstance(model, (str, os.PathLike)) else "model")
    proto, folder = load_model(model)
    text, stored, facts = program.write(lower(read(proto, folder)), stem)
    return Program(text, stored.arrays, facts)
