"""Writes a model as a readable Python program on `singa`, with its weights in an .npz file.

program = codegen.generate("model.onnx")          program.text, program.arrays
program.write("model.py")                         model.py and model.npz, both or none
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from singa_backend.errors import InvalidInput
from singa_backend.io.files import Stage, staged, write_npz
from singa_backend.io.places import free_name
from singa_backend.ir.reader import read
from singa_backend.limits import reports_shortage
from singa_backend.proto.load import ModelSource, load_model

from ._codegen import program
from ._codegen.lowering import lower

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
            if not force and any(map(os.path.lexists, (target, weights))):
                raise FileExistsError
            with staged(target, new=not force, overwrite=force) as stage:
                self._stage(stage, weights.name, self.text)
                there = os.path.exists(target) and not stage.through
                if there and (used := program.spare_weights(target.read_text("utf-8", "replace"), target.stem)):
                    stage.remove_later(used)
                if there and os.path.exists(weights):
                    # The program in place reads this file until it is replaced: first replace it by one that reads another file.
                    spare = free_name(stage.target.parent, weights.name)
                    with staged(target) as first:
                        self._stage(first, spare, self.text.replace(program.WEIGHTS, program.weights_line(spare)))
                    stage.remove_later(spare)
        except FileExistsError:
            found = [str(p) for p in (target, weights) if os.path.lexists(p)]
            what = f"{' and '.join(found)} already exist" if len(found) > 1 else f"{''.join(found)} already exists"
            raise InvalidInput(what, code="SX376", hint="choose another name, or pass --force (force=True)") from None
        return [target, weights]

    def _stage(self, stage: Stage, weights: str, text: str) -> None:
        with stage.create(weights) as out:
            write_npz(out, self.arrays)
        stage.write(stage.target.name, text)


@reports_shortage
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
