"""The options for a model's inputs: files, an archive, a test_data_set folder, or random arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from onnx import ModelProto

from singa_backend import Value
from singa_backend.proto import test_data

from . import _feeds
from ._common import SEED, pairs_of

if TYPE_CHECKING:
    from singa_backend.debug import Source

_OPTIONS = (
    click.option("--input", "-i", "files", multiple=True, metavar="NAME=FILE", help="An input from a .npy, .npz or .pb file."),
    click.option("--inputs", "archive", type=click.Path(path_type=Path), help="All inputs by name from a .npz file."),
    click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Inputs from a test_data_set folder."),
    click.option("--random", "seed", type=SEED, metavar="SEED", help="Random inputs by the declared shapes."),
    click.option("--size", "sizes", multiple=True, metavar="NAME=SIZE", help="A symbolic size, for --random (default: 1)."),
)


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command receives them as keywords and passes them to `gather`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def gather(
    model: ModelProto,
    values: Sequence[Value],
    *,
    files: Sequence[str] = (),
    archive: Path | None = None,
    data: Path | None = None,
    seed: int | None = None,
    sizes: Sequence[str] = (),
    draw: bool = True,
    optional: Sequence[Value] = (),
) -> dict[str, Any]:
    """Return the inputs by name.

    Args:
        model: The model, whose types are used to read a test_data_set folder.
        values: The inputs that the model needs.
        files: The values of --input, NAME=FILE.
        archive: The file of --inputs.
        data: The folder of --data.
        seed: The seed of --random.
        sizes: The values of --size, NAME=SIZE.
        draw: Whether to draw random inputs with seed 0 if no inputs are given.
        optional: The inputs that the model does not need.

    Raises:
        InvalidInput: A file cannot be read, or a random input cannot be drawn.
    """
    random = seed is not None or (draw and not (files or archive or data))
    if sizes and not random:
        raise click.UsageError("--size needs --random: other inputs have the sizes of their arrays")
    chosen = _feeds.sizes_of(sizes, values)
    declared = {v.name: v for v in (*values, *optional)}
    named = {n: _feeds.known(n, declared) for n in pairs_of(files, "--input", "NAME=FILE")}
    feeds: dict[str, Any] = _feeds.random_inputs(values, seed or 0, chosen) if random else {}
    if archive:
        feeds |= _feeds.from_npz(archive, declared)
    if data:
        feeds |= dict(zip((i.name for i in model.graph.input), test_data.data_set(data, model)[0], strict=False))
    for name, file in pairs_of(files, "--input", "NAME=FILE").items():
        feeds[name] = _feeds.from_file(Path(file), named[name])
    return feeds


def gather_of(source: Source, **given: Any) -> dict[str, Any]:
    """Return the inputs of a model that is debugged; the arguments are the options of `gather`."""
    return gather(source.proto, source.inputs, optional=source.optional_inputs, **given)
