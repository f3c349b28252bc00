"""`sonnx export`: write a model that a Python program builds as an ONNX file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.errors import InvalidInput
from singa_backend.io.places import STANDARD_OUTPUT, check

from . import _feeds
from ._common import echo, exit_codes, json_option, write_json
from ._writing import FUNCTIONS, LOWER, given, write_options

if TYPE_CHECKING:
    from singa_backend import Value

    from .._core.tensor import Tensor
    from ..model import Model


@click.command("export")
@click.argument("target", metavar="PROGRAM:NAME")
@click.option(
    "--inputs",
    "archive",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Example inputs, by name and in order, from a .npz file.",
)
@click.option(
    "--input",
    "-i",
    "drawn",
    multiple=True,
    metavar="NAME=DTYPE[SIZE,...]",
    help="A random example input: x=float32[2,3,8,8].",
)
@click.option(
    "--compare",
    "compared",
    is_flag=True,
    help="Compare the model with the file in onnxruntime and in sonnx: all outputs, two seeds, two batch sizes.",
)
@write_options(values=True)
@LOWER
@FUNCTIONS
@json_option
@exit_codes
def command(
    target: str, archive: Path | None, drawn: tuple[str, ...], compared: bool, path: Path, as_json: bool, **options: Any
) -> None:
    """Write a model that a Python program builds as an ONNX file.

    PROGRAM is a file (net.py) or a module; NAME is a Model in it, a subclass of Model, or a function that returns a Model, or a
    Model and a list of Tensors to call it with. The program is imported, so use only programs that you trust.
    """
    from singa_backend.proto.save import save

    from .._core.tensor import Tensor
    from .._onnx import export, verify

    check(path, keeps=[archive])
    arrays = _feeds.from_npz(archive) if archive else _feeds.random_inputs([*map(_declared, drawn)], 0, {})
    model, inputs = _built(target)
    if arrays:
        inputs = [Tensor(data=a, requires_grad=False, name=n) for n, a in arrays.items()]
    if inputs and not model.get_states():
        model.compile(list(inputs), is_train=False)
    chosen = given(options)
    if compared:
        piped = path == STANDARD_OUTPUT  # the engines read the file: the model that they ran is written
        made, checked = verify.export_and_check(model, inputs or [], None if piped else path, **chosen)
        if piped:
            save(made, path, external=chosen.get("external_data"), check=False)
        result: Any = {"errors": checked.errors, "comparisons": [str(c) for c in checked.comparisons]}
        text = str(checked)
    else:
        _, report = export.export(model, inputs, path, with_report=True, **chosen)
        result, text = report.to_dict(), str(report)
    if as_json:
        write_json(result, name="export.comparison" if compared else "")
    else:
        echo(text)


def _built(target: str) -> tuple[Model, list[Tensor] | None]:
    """Return the model that a program builds, and its example inputs if the program returns them."""
    from ..model import Model

    place, _, name = target.rpartition(":")
    if not place or not name:
        raise click.BadParameter(f"must be PROGRAM:NAME, such as net.py:Net, got {target!r}")
    found = getattr(_program(place), name, None)
    if found is None:
        raise InvalidInput(f"{place} has no {name!r}", code="SX361")
    made = found() if inspect.isclass(found) or (callable(found) and not isinstance(found, Model)) else found
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, Model):
        raise InvalidInput(f"{target} must be a Model or return one, got {type(model).__name__}", code="SX361")
    return model, None if inputs is None else list(inputs)


def _program(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise InvalidInput(
                f"there is no module {place!r}: {error}", code="SX361", hint="name a module or a file: net.py:Net"
            ) from None
    path = Path(os.path.realpath(place))
    if not os.path.isfile(path):
        raise InvalidInput(f"there is no file {place!r}", code="SX361")
    spec = importlib.util.spec_from_file_location(f"sonnx_program_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle need it
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _declared(text: str) -> Value:
    import numpy as np

    from singa_backend import Value

    found = re.fullmatch(r"(.+)=(\w+)\[([\d, ]*)\]", text)
    if found is None:
        raise click.BadParameter(f"must be NAME=DTYPE[SIZE,...], such as x=float32[2,3,8,8], got {text!r}")
    try:
        dtype = np.dtype(found[2])
    except TypeError:
        raise click.BadParameter(f"the dtype must be float32, int64, bool or another of NumPy's, got {found[2]!r}") from None
    return Value(found[1], "tensor", dtype, tuple(int(d) for d in found[3].split(",") if d.strip()))
