"""The options for a model's inputs: files, an archive, a test_data_set folder, or random arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from onnx import ModelProto

from singa_backend import Value
from singa_backend.proto import test_data

from . import _feeds

_OPTIONS = (
    click.option("--input", "-i", "files", multiple=True, metavar="NAME=FILE", help="An input from a .npy, .npz or .pb file."),
    click.option("--inputs", "archive", type=click.Path(path_type=Path), help="All inputs by name from a .npz file."),
    click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Inputs from a test_data_set folder."),
    click.option("--random", "seed", type=int, metavar="SEED", help="Random inputs by the declared shapes."),
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

    Raises:
        InvalidInput: A file cannot be read, or a random input cannot be drawn.
    """
    random = seed is not None or (draw and not (files or archive or data))
    feeds: dict[str, Any] = _feeds.random_inputs(values, seed or 0, _feeds.sizes_of(sizes)) if random else {}
    if archive:
        feeds |= _feeds.from_npz(archive)
    if data:
        feeds |= dict(zip((v.name for v in values), test_data.data_set(data, model)[0], strict=False))
    for pair in files:
        name, _, file = pair.partition("=")
        if not file:
            raise click.BadParameter(f"must be NAME=FILE, got {pair!r}", param_hint="--input")
        feeds[name] = _feeds.from_file(Path(file))
    return feeds
