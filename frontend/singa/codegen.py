"""Writes a model as a readable Python program on `singa`, with its weights in an .npz file.

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
    """A program and the arrays that it reads.

    Attributes:
        text: the Python source.
        arrays: the contents of the .npz file, by key.
        facts: the numbers of nodes, layers, parameters and arrays.
    """

    text: str
    arrays: dict[str, np.ndarray]
    facts: dict[str, int] = field(default_factory=dict)

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
        """Write the program, and its arrays to an .npz file of the same name: both complete, or neither.

        Args:
            path: the file of the program, which ends in .py.
            force: overwrite existing files.

        Returns:
            The paths of the program and of the .npz file.

        Raises:
            InvalidInput: the name does not end in .py (SX377), a file exists and `force` is not set (SX376), or the folder
                cannot be written (SX351).
        """
        target = Path(path)
        if target.suffix != ".py" or not target.stem:
            raise InvalidInput(f"the file of a program must end in .py, got {target}", code="SX377")
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
    """Move files into place, all or none."""
    undo: list[tuple[Path, Path | None]] = []
    try:
        for made, place in pairs:
            kept = stage / f"{place.name}.before" if force and place.exists() else None
            if kept is None:
                os.link(made, place)  # fails if the file has been created meanwhile
            else:
                os.link(place, kept)
                os.replace(made, place)
            undo.append((place, kept))
    except OSError as error:
        for place, before in undo:
            os.unlink(place) if before is None else os.replace(before, place)
        if isinstance(error, FileExistsError):
            there = [str(place) for _, place in pairs if place.exists()]
            what = f"{' and '.join(there)} already exist" if len(there) > 1 else f"{there[0]} already exists"
            raise InvalidInput(what, code="SX376", hint="choose another name, or pass --force (force=True)") from None
        raise


def generate(model: ModelSource, name: str = "") -> Program:
    """Generate the program of a model; equal models result in equal text.

    Args:
        model: a ModelProto, bytes or a path.
        name: the file name of the program, without .py, for its usage text; by default that of the model's file.

    Returns:
        The program and its arrays.

    Raises:
        InvalidModel: the model breaks a rule of ONNX.
        UnsupportedModel: an operator is not implemented, or a node cannot be written as a call (SX207).

    Example:
        >>> program = generate("vit.onnx")
        >>> program.write("vit.py")
    """
    stem = name or (Path(model).stem if isinstance(model, (str, os.PathLike)) else "model")
    proto, folder = load_model(model)
    text, stored, facts = program.write(lower(read(proto, folder)), stem)
    return Program(text, stored.arrays, facts)
