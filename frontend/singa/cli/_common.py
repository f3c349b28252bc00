"""Shared parts of the commands: errors as exit codes, options, places of results, and printing."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import fields
from fractions import Fraction
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text
from typing_extensions import override

from . import _operators
from ._group import first_to_tell
from ._interrupts import is_interrupt

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from singa_backend import Limits

    from ._tables import TextTable

NO, REFUSED, LOST = 1, 3, 4


class _Console(Console):
    """A console on which text is data: names from a model have no markup, no emoji codes and no control characters."""

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        from singa_backend.rendering import TEXT, printable

        return super().render_str(printable(text, TEXT, lines=True), **options)


out = _Console(markup=False, emoji=False)
err = _Console(stderr=True, markup=False, emoji=False)


def exit_codes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: print a SonnxError (as JSON with --json) and exit with REFUSED, or LOST if another process ended.

    The modules of `--operators` are imported first.
    """

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        from singa_backend.collectives import launched_rank
        from singa_backend.errors import CommunicationError, SonnxError

        modules = kwargs.pop(_operators.NAME, ())
        try:
            with _messages_apart(kwargs.get("as_json", False)):
                _operators.load(modules)
                return command(*args, **kwargs)
        except SonnxError as error:
            if is_interrupt(error):
                raise
            if kwargs.get("as_json") and not launched_rank():  # one document for all workers
                write_json(error.to_dict(), name="error")
            elif first_to_tell(error.message):  # a hint may have values of one worker
                err.print(Text(type(error).__name__, "red"), str(error), highlight=False, soft_wrap=True)
            sys.exit(LOST if isinstance(error, CommunicationError) else REFUSED)

    return run


model_argument = click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
adapter_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Add an adapter: a file .safetensors or .onnx_adapter, or a folder of PEFT (repeatable).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
device_option = click.option("--device", default="CPU", show_default=True, help="CPU, CUDA, CUDA:1, or STRICT (for tests).")


CROWD = 8
"""Processes for each core, above which `--oversubscribe` is needed."""

_CROWDED = "singa.cli.oversubscribe"


def processes_option(*names: str, help: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command: add an option for the number of processes, and `--oversubscribe`.

    Args:
        *names: The names of the option.
        help: Its line in the help.
        **settings: Further arguments of `click.option`.
    """

    def crowded(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        context.meta[_CROWDED] = value

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        count = click.option(*names, help=help, type=click.IntRange(1, 1 << 16), callback=_processes, **settings)
        many = click.option("--oversubscribe", is_flag=True, is_eager=True, expose_value=False, callback=crowded,
                            help=f"Start more than {CROWD} processes for each usable core.")  # fmt: skip
        return count(many(command))

    return add


def _processes(context: click.Context, parameter: click.Parameter, count: int | None) -> int | None:
    """Check a number of processes against the cores; a callback of click."""
    from singa_backend.collectives import launched_size
    from singa_backend.machine import usable_cores

    if count is None or count == 1 or launched_size() > 1:  # the launcher has started them
        return count
    cores = usable_cores()
    if count > CROWD * cores and not context.meta.get(_CROWDED):
        raise click.BadParameter(
            f"must be at most {CROWD * cores}, {CROWD} for each usable core, got {count}; --oversubscribe permits more"
        )
    if count > cores:
        err.print(f"{count} processes share {cores} usable cores", highlight=False, soft_wrap=True, style="yellow")
    return count


def expression(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """Check an option or argument that is a regular expression; a callback of click."""
    try:
        re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"must be a regular expression, got {text!r}: {error}") from None
    return text


class FiniteNumber(click.FloatRange):
    """A finite number: `float` and FloatRange accept NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, context)
        return number


class LateChoice(click.types.StringParamType):
    """A choice whose values are read when they are needed, because their module takes long to import."""

    name = "choice"

    def __init__(self, read: Callable[[], Sequence[str]]) -> None:
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        return click.Choice(self.read()).convert(value, param, context)

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return click.Choice(self.read()).shell_complete(context, param, incomplete)


SECONDS = FiniteNumber(min=0, min_open=True, max=10**7)
"""The type of options that are a time."""

TOLERANCE = FiniteNumber(min=0)
"""The type of options that are a tolerance."""

MEMORY = click.IntRange(1, 1 << 40)
"""The type of options that are a number of MiB."""


_STANDARD_OUTPUT = "singa.cli.standard_output"


class OutputPath(click.Path):
    """The path of something that a command writes; for a single file, "-" is the standard output.

    What the command prints then goes to standard error (`exit_codes`).

    Args:
        alone: Why it must be a file with a name; "" if it may be the standard output.
        **settings: Further arguments of `click.Path`.
    """

    def __init__(self, *, alone: str = "", **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)
        self.alone = alone if self.file_okay else "only a single file can go to standard output"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if os.fspath(value) != "-":
            return super().convert(value, param, context)
        if self.alone:
            kind = "file" if self.file_okay else "folder"
            self.fail(f"must be a {kind}, got '-': {self.alone} (a {kind} of this name is ./-)", param, context)
        if context is not None and param is not None:
            first = context.meta.setdefault(_STANDARD_OUTPUT, param.opts[0])
            if first != param.opts[0]:
                self.fail(f"must be a file, got '-': {first} goes to standard output already", param, context)
        from singa_backend.io.places import STANDARD_OUTPUT

        return STANDARD_OUTPUT


def _messages_apart(as_json: bool) -> AbstractContextManager[object]:
    """Return a context in which messages go to standard error if an option has sent a file to standard output."""
    context = click.get_current_context(silent=True)
    option = context.meta.get(_STANDARD_OUTPUT) if context else None
    if option is None:
        return nullcontext()
    if as_json:
        raise click.UsageError(f"{option} - and --json both go to standard output: write one of them to a file")
    sys.stdout.flush()
    return redirect_stdout(sys.stderr)


OUTPUT = OutputPath(dir_okay=False)
"""The type of options that name a file to write; "-" is the standard output."""


def model_output(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option of the model file that a command writes."""
    return click.option(
        "--output",
        "-o",
        "target",
        required=required,
        type=OUTPUT,
        metavar="OUT",
        help="The file to write; external data go to OUT.data.",
    )


OUTPUT_PATH = OutputPath()
"""The same; that it is a folder is found when it is written (SX351)."""

OUTPUT_FOLDER = OutputPath(file_okay=False)
"""The type of options that name a folder to write."""

SEED = click.IntRange(0, (1 << 63) - 1)
"""The type of options that are a seed."""


def pairs_of(pairs: Sequence[str], option: str, form: str) -> dict[str, str]:
    """Parse NAME=VALUE options.

    Args:
        pairs: The values of the option.
        option: The name of the option.
        form: The form of a value, for messages.

    Returns:
        The values by name; the first "=" of a pair separates them.

    Raises:
        click.BadParameter: A pair has no name or no value, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise click.BadParameter(f"must be {form}, got {pair!r}", param_hint=option)
        if name in found:
            raise click.BadParameter(f"the name {name!r} occurs twice", param_hint=option)
        found[name] = value
    return found


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _limits(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> Limits:
    from singa_backend import Limits, SonnxError

    known = {field.name for field in fields(Limits)}
    given: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(KiB|MiB|GiB)?", value)
        if name not in known or not found:
            raise click.BadParameter(f"must be NAME=NUMBER or NAME=8GiB with a name of {', '.join(sorted(known))}, got {pair!r}")
        if name in given:
            raise click.BadParameter(f"the name {name!r} occurs twice")
        number = Fraction(found[1]) * _UNITS[found[2] or ""]
        if name != "deadline" and number.denominator != 1:
            raise click.BadParameter(f"the limit {name} must be an integer, got {value!r}")
        given[name] = float(number) if name == "deadline" else int(number)
    try:
        return Limits(**given)
    except SonnxError as error:
        raise click.BadParameter(error.message) from None


limit_option = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_limits,
    help="A limit for the model: tensor_bytes=8GiB, iterations=5000000, deadline=2.5 (seconds), ...",
)


def collected(
    name: str, kind: type[Any], options: Sequence[Callable[..., Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options, which the command receives as one object.

    Args:
        name: The keyword of the object.
        kind: Its class, a dataclass whose fields are the parameters of the options.
        options: The options, in the order of the help.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(**given: Any) -> Any:
            values = {f.name: given.pop(f.name) for f in fields(kind)}
            return command(**{name: kind(**values)}, **given)

        for option in reversed(options):
            run = option(run)
        return run

    return add


precision_option = click.option(
    "--precision", type=click.Choice(["float32", "bf16"]), default="float32", show_default=True,
    help="bf16 permits products in bfloat16.",
)  # fmt: skip

_PLAN = (
    click.option("--threads", type=click.IntRange(1, 1024), help="Threads of a run on the CPU (default: the usable cores)."),
    precision_option,
    click.option("--optimize", type=click.IntRange(0, 2), default=2, show_default=True,
                 help="0 runs definitions, 1 kernels of single nodes, 2 fused ones too."),
)  # fmt: skip


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of plans; the command receives `threads`, `precision` and `optimize`, which are keywords of `prepare`."""
    for option in reversed(_PLAN):
        command = option(command)
    return command


def echo(text: str, *, style: str | None = None) -> None:
    """Print a line to standard output, without wrapping and markup."""
    out.print(text, style=style, highlight=False, soft_wrap=True)


def show(table: TextTable) -> None:
    """Print a table: to a terminal in its width, otherwise in full."""
    for line, style in table.lines(out.width if out.is_terminal else None, out.encoding.lower().startswith("utf")):
        out.print(Text(line, style), highlight=False, soft_wrap=True)


def write_json(document: dict[str, Any], *, name: str = "") -> None:
    """Print a document with its schema, "sonnx." and a name (by default the command's), and the version of the schema.

    Raises:
        ValueError: The document has a key of that name already.
    """
    head = {"schema": f"sonnx.{name or click.get_current_context().command.name}", "schema_version": 1}
    if taken := head.keys() & document.keys():
        raise ValueError(f"the document must not have the keys {', '.join(sorted(taken))}")
    click.echo(json.dumps(head | document))


def check_places(
    *files: Path | None, folders: Sequence[Path | None] = (), pages: tuple[Path | None, Sequence[str]] = (None, ())
) -> None:
    """Refuse the places of results that cannot be written, before the work; nothing is created.

    Args:
        *files: Files that are written, whose folders are created.
        folders: Folders in which files are written.
        pages: A folder in which documents and pages of these names are written, by `conform.results`.

    Raises:
        InvalidInput: A file or a folder cannot be written, or a document would replace another file (SX351).
    """
    from singa_backend.io.places import check, check_folder, check_folder_of

    for path in filter(None, files):
        check(path, parents=True)
    for folder in filter(None, folders):
        check_folder(folder)
    if pages[0]:
        from singa_backend.conform.results import MARK

        check_folder_of(pages[0], pages[1], MARK)


def wrote(*paths: Path | None) -> None:
    """Print where the results are, in a line for each file or folder that was written."""
    for path in filter(None, paths):
        echo(f"wrote {path}")


def witness(engine: str, quiet: bool) -> str | None:
    """Return the second engine; None if it is "none" or not installed (a warning is printed unless `quiet`)."""
    if engine == "none":
        return None
    if find_spec(engine) is None:
        if not quiet:
            err.print(f"{engine} is not installed, so there is no second witness: pip install 'sonnx[oracle]'", style="yellow")
        return None
    return engine


def check_matrix(what: str, command: str, folder: Path, why: str, as_json: bool) -> None:
    """Print whether the matrix in a folder is stale; exit with NO if it is.

    Args:
        what: The matrix's name.
        command: The command that writes it.
        folder: The folder.
        why: The difference; "" if it is up to date.
        as_json: Print JSON.
    """
    if as_json:
        write_json({"folder": str(folder), "stale": why}, name=f"{command}.check")
    else:
        echo(f"stale: {why}; run sonnx {command} --to {folder}" if why else f"{what} is up to date")
    if why:
        sys.exit(NO)
