"""What every command shares: typed errors as exit codes, options, progress that is a bar on a terminal and lines elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from singa_backend import Limits

NO, REFUSED = 1, 3

out = Console()
err = Console(stderr=True)


def exit_codes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print a SonnxError as it wants to be read (as JSON with --json) and leave with REFUSED."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        from singa_backend.errors import SonnxError

        try:
            return command(*args, **kwargs)
        except SonnxError as error:
            if kwargs.get("as_json"):
                click.echo(json.dumps(error.to_dict()))
            else:
                err.print(f"[red]{type(error).__name__}[/red]", end=" ")
                err.print(str(error), markup=False, highlight=False, soft_wrap=True)
            sys.exit(REFUSED)

    return run


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
device_option = click.option("--device", default="CPU", show_default=True, help="CPU, CUDA, CUDA:1, or STRICT (for tests).")


def expression(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """The callback of an option, or an argument, that is a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"{text!r} is no regular expression: {error}") from None
    return text


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _limits(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> Limits:
    from singa_backend import Limits, SonnxError

    known = {field.name for field in fields(Limits)}
    given: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB)?", value)
        if name not in known or not found:
            raise click.BadParameter(f"{pair!r} is not NAME=NUMBER or NAME=8GiB with one of {', '.join(sorted(known))}")
        number = float(found[1]) * _UNITS[found[2] or ""]
        given[name] = number if name == "deadline" else int(number)
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
    help="A bound on what the model may use: tensor_bytes=8GiB, iterations=5000000, deadline=2.5 (seconds), ...",
)


def echo(text: str, *, style: str | None = None) -> None:
    """A line for people, on standard output, never wrapped and never read as markup."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def witness(engine: str, quiet: bool) -> str | None:
    """The engine to ask beside us; None where "none" is asked for, or it is not installed, which is said unless `quiet`."""
    if engine == "none":
        return None
    if find_spec(engine) is None:
        if not quiet:
            err.print(f"{engine} is not installed, so there is no second witness: pip install 'sonnx\\[oracle]'", style="yellow")
        return None
    return engine


def check_matrix(what: str, command: str, folder: Path, why: str, as_json: bool) -> None:
    """Say whether the matrix in a folder is stale; where it is, leave with NO.

    what: what it is called.  command: which one writes it.  why: what is stale about it; empty where nothing is.
    """
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "stale": why}))
    else:
        echo(f"stale: {why}; run sonnx {command} --to {folder}" if why else f"{what} is up to date")
    if why:
        sys.exit(NO)


def progress(total: int | None, what: str, *, quiet: bool = False) -> AbstractContextManager[Callable[..., None]]:
    """A callable to step through `total` units of work, on standard error.

    It takes `note=`, a few words that replace the description.  A bar on a terminal, a line every tenth elsewhere
    (every 100 where the total is unknown), nothing when `quiet` (with --json).
    """
    if quiet:
        return nullcontext(lambda note="": None)
    return _Bar(total, what) if err.is_terminal else nullcontext(_Lines(total, what))


class _Lines:
    def __init__(self, total: int | None, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self.every = max(1, total // 10) if total else 100

    def __call__(self, note: str = "") -> None:
        self.done += 1
        if self.done == self.total or self.done % self.every == 0:
            total = "" if self.total is None else f"/{self.total}"
            click.echo(f"{self.what}: {self.done}{total}" + (f", {note}" if note else ""), err=True)


class _Bar(AbstractContextManager[Callable[..., None]]):
    def __init__(self, total: int | None, what: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=err, transient=True)
        self.total, self.what = total, what

    def __enter__(self) -> Callable[..., None]:
        self.bar.start()
        self.task = self.bar.add_task(self.what, total=self.total)
        return self._step

    def _step(self, note: str = "") -> None:
        self.bar.update(self.task, advance=1, description=f"{self.what}, {note}" if note else self.what)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
