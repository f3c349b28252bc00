"""The option `--operators`: modules that define custom operators, for a command and its child processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from singa_backend import CustomOperator

NAME = "operator_modules"
"""The keyword of the modules, which `exit_codes` takes from the arguments of a command."""

OPTION = click.Option(
    ["--operators", NAME],
    multiple=True,
    metavar="MODULE",
    help="Import a module that registers custom operators; its code runs (repeatable).",
)

WITHOUT = ("adapter", "completion", "conform", "device-check", "doctor", "export", "foreign", "report", "tolerances")
"""The commands without the option: they load no model, or only those of ONNX's suite or of a program."""


def load(modules: Sequence[str]) -> None:
    """Import modules, from the current folder too; child processes will import them as well.

    Args:
        modules: The names of the modules.

    Raises:
        InvalidInput: A module cannot be imported, or registers no operator (SX389).
    """
    if not modules:
        return
    from singa_backend.errors import InvalidInput, described
    from singa_backend.io import processes
    from singa_backend.ir.custom import registered

    here, operators = os.getcwd(), list["CustomOperator"]()
    if here not in sys.path:  # a console script does not search it
        sys.path.append(here)
    for name in modules:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            why = str(error) if isinstance(error, ModuleNotFoundError) else described(error, 1)
            plain = name.removesuffix(".py").replace(os.sep, ".")
            hint = f"modules are searched in {here} and among the packages" + (f"; write {plain}" if plain != name else "")
            message = f"--operators must name a module that can be imported, got {name!r}: {why}"
            raise InvalidInput(message, code="SX389", hint=hint) from None
        own = registered(name)
        if not own:
            hint = "put @sonnx.register_operator(domain=...) above a function; define_operator is for prepare(operators=[...])"
            message = f"--operators must name a module that registers an operator, got {name!r}"
            raise InvalidInput(message, code="SX389", hint=hint)
        operators += own
        processes.preloaded.append(name)
    click.get_current_context().meta[NAME] = operators


def loaded() -> list[CustomOperator]:
    """Return the operators of the modules of the running command."""
    operators: list[CustomOperator] = click.get_current_context().meta.get(NAME, [])
    return operators
