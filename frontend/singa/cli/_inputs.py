"""MODEL and the options for its inputs: files, an archive, a test_data_set folder, or random arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import _feeds
from ._common import SEED, collected, err, model_argument, pairs_of

if TYPE_CHECKING:
    from onnx import ModelProto

    from singa_backend import Value
    from singa_backend.debug import ComparedModel

_OPTIONS = (
    click.option("--input", "-i", "files", multiple=True, metavar="NAME=FILE", help="An input from a .npy, .npz or .pb file."),
    click.option("--inputs", "archive", type=click.Path(path_type=Path), help="All inputs by name from a .npz file."),
    click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Inputs from a test_data_set folder."),
    click.option("--random", "seed", type=SEED, metavar="SEED", help="Random inputs by the declared shapes."),
    click.option("--size", "sizes", multiple=True, metavar="NAME=SIZE", help="A symbolic size, for --random (default: 1)."),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add MODEL and the options; the command receives them as `model` and `inputs`, an `InputOptions`."""
    return model_argument(collected("inputs", InputOptions, _OPTIONS)(command))


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options without MODEL; the command receives them as `inputs`, an `InputOptions`."""
    return collected("inputs", InputOptions, _OPTIONS)(command)


@dataclass(frozen=True)
class InputOptions:
    """The options for a model's inputs, by the names of their parameters.

    Attributes:
        files: The values of --input, NAME=FILE.
        archive: The file of --inputs.
        data: The folder of --data.
        seed: The seed of --random.
        sizes: The values of --size, NAME=SIZE.
    """

    files: tuple[str, ...]
    archive: Path | None
    data: Path | None
    seed: int | None
    sizes: tuple[str, ...]

    @property
    def given(self) -> bool:
        """Whether an option passes arrays."""
        return bool(self.files or self.archive or self.data)

    def gather(
        self, model: ModelProto, values: Sequence[Value], *, draw: bool = True, optional: Sequence[Value] = ()
    ) -> dict[str, Any]:
        """Return the inputs by name.

        Args:
            model: The model, whose types are used to read a test_data_set folder.
            values: The inputs that the model needs.
            draw: Whether to draw random inputs with seed 0 if no inputs are given.
            optional: The inputs that the model does not need.

        Raises:
            InvalidInput: A file cannot be read, or a random input cannot be drawn.
        """
        from singa_backend.proto import test_data

        random = self.seed is not None or (draw and not self.given)
        if self.sizes and not random:
            raise click.UsageError("--size needs --random: other inputs have the sizes of their arrays")
        chosen = _feeds.sizes_of(self.sizes, values)
        declared = {v.name: v for v in (*values, *optional)}
        files = pairs_of(self.files, "--input", "NAME=FILE")
        named = {n: _feeds.known(n, declared) for n in files}
        feeds: dict[str, Any] = _feeds.random_inputs(values, self.seed or 0, chosen) if random else {}
        if self.archive:
            feeds |= _feeds.from_npz(self.archive, declared)
        if self.data:
            feeds |= dict(zip((i.name for i in model.graph.input), test_data.data_set(self.data, model)[0], strict=False))
        for name, file in files.items():
            feeds[name] = _feeds.from_file(Path(file), named[name])
        return feeds

    def gather_of(self, source: ComparedModel, other: Any = None) -> dict[str, Any]:
        """Return the inputs of a model that is debugged; drawn ones have open sizes that it accepts, and a line tells them.

        Args:
            source: The model.
            other: The trusted side; if it is an engine, it must accept the sizes too.
        """
        feeds = self.gather(source.proto, source.inputs, optional=source.optional_inputs)
        if self.given:
            return feeds
        from singa_backend.debug.lockstep import refusal
        from singa_backend.debug.setting import is_engine, trusted

        chosen = _feeds.sizes_of(self.sizes, source.inputs)
        with ExitStack() as stack:
            engine = cache(lambda: stack.enter_context(closing(trusted(other))))  # a process, which most models do not need
            found, line = _feeds.accepted_inputs(
                source.inputs,
                self.seed or 0,
                chosen,
                lambda drawn: refusal(source, drawn),
                (lambda drawn: refusal(source, drawn, engine())) if isinstance(other, str) and is_engine(other) else None,
            )
        if line:
            err.print(line, style="yellow", highlight=False, soft_wrap=True)
        return found
