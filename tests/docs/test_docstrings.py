"""The docstrings of the public API are complete: each name has a summary, each parameter and each result is described."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("singa", "singa_backend")

MODULES = [
    "singa.autograd", "singa.callbacks", "singa.codegen", "singa.data", "singa.device", "singa.exporting", "singa.image_tool",
    "singa.initializer", "singa.layer", "singa.model", "singa.opt", "singa.quantization", "singa.singa_wrap",
    "singa.snapshot", "singa.sonnx", "singa.tape", "singa.tensor", "singa.utils", "singa_backend", "singa_backend.adapters",
    "singa_backend.collectives", "singa_backend.debug", "singa_backend.debug.guards", "singa_backend.devices.device",
    "singa_backend.doctor",
    "singa_backend.engines.oracle", "singa_backend.errors", "singa_backend.inspection", "singa_backend.limits",
    "singa_backend.passes", "singa_backend.passes.change_layout", "singa_backend.proto.load", "singa_backend.sweep",
]  # fmt: skip

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Examples?|Notes?):")
ITEM = re.compile(r"    \*{0,2}(\w+)(?: \([^)]*\))?:(?: |$)")


def sections(doc: str) -> dict[str, list[str]]:
    """The lines of each section of a docstring; its summary and text have the name "" ."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(doc).splitlines():
        heading = SECTION.fullmatch(line)
        if heading:
            current = heading[1]
            found[current] = []
        elif line and not line.startswith(" ") and current:  # text after a section
            current = ""
        else:
            found[current].append(line)
    return {name: lines for name, lines in found.items() if not name or any(map(str.strip, lines))}


def described(doc: str, *names: str) -> set[str]:
    """The names of the items in some sections."""
    lines = (line for name in names for line in sections(doc).get(name, ()))
    return {item[1] for item in map(ITEM.match, lines) if item}


def in_project(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in PACKAGES


def parameters(function: Callable[..., Any], bound: bool) -> list[str]:
    """The names of the parameters; the first one, self or cls, is left out if the function is a method."""
    names = list(inspect.signature(function).parameters)
    return names[1:] if bound else names


def without_result(function: Callable[..., Any]) -> bool:
    return inspect.signature(function).return_annotation in (None, "None", "NoReturn")


def summary_problems(doc: str | None) -> Iterator[str]:
    if not doc or not doc.strip():
        yield "there is no docstring"
        return
    first, *rest = inspect.cleandoc(doc).splitlines()
    if not first.endswith(".") or first[0].islower():
        yield f"the first line is not a sentence: {first!r}"
    if rest and rest[0]:
        yield f"there is no blank line after the summary {first!r}"


def parameter_problems(documented: set[str], items: set[str], expected: list[str], allowed: list[str]) -> Iterator[str]:
    """Compare parameters with the documented names; `items` are those that must be parameters."""
    missing = [name for name in expected if name not in documented]
    unknown = sorted(items - set(allowed))
    if missing:
        yield f"not described: {', '.join(missing)}"
    if unknown:
        yield f"described, but not a parameter: {', '.join(unknown)}"


def function_problems(function: Callable[..., Any], doc: str | None, bound: bool) -> Iterator[str]:
    yield from summary_problems(doc)
    if not doc:
        return
    names = parameters(function, bound)
    yield from parameter_problems(described(doc, "Args"), described(doc, "Args"), names, names)
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        if "Yields" not in sections(doc):
            yield "there is no section Yields"
    elif not without_result(function) and "Returns" not in sections(doc):
        yield "there is no section Returns"


def property_problems(doc: str | None) -> Iterator[str]:
    yield from summary_problems(doc)
    if doc and "Returns" not in sections(doc) and not re.match(r"The |Return|Whether ", inspect.cleandoc(doc)):
        yield "the summary of a property starts with 'The', 'Whether' or 'Return'"


def own_parameters(cls: type) -> list[str] | None:
    """The arguments that a class defines itself; None if it inherits its constructor."""
    if issubclass(cls, enum.Enum) or getattr(cls, "_is_protocol", False):
        return None
    if "_fields" in vars(cls):  # a named tuple
        return list(vars(cls)["_fields"])
    return parameters(vars(cls)["__init__"], True) if "__init__" in vars(cls) else None


def class_problems(cls: type) -> Iterator[str]:
    doc = vars(cls).get("__doc__")
    if doc and doc.startswith(f"{cls.__name__}("):  # a dataclass or a named tuple makes this text itself
        doc = None
    yield from summary_problems(doc)
    if doc:
        constructors = (own_parameters(base) for base in cls.__mro__ if base is cls or in_project(base))
        allowed = next((names for names in constructors if names is not None), [])
        expected = own_parameters(cls) or []
        init = getattr(vars(cls).get("__init__"), "__doc__", None) or ""  # that of a dataclass or of object has no sections
        items = described(doc, "Args") | described(init, "Args")
        yield from parameter_problems(items | described(doc, "Attributes"), items, expected, allowed)


def method_doc(owner: type, name: str, function: Callable[..., Any]) -> str | None:
    """The docstring of a method, or that of the method which it overrides if both take the same parameters."""
    if function.__doc__:
        return function.__doc__
    mine = inspect.signature(function).parameters.values()
    for base in filter(in_project, owner.__mro__[1:]):
        overridden = unbound(vars(base).get(name))
        if inspect.isfunction(overridden) and overridden.__doc__:
            theirs = inspect.signature(overridden).parameters.values()
            return overridden.__doc__ if [(p.name, p.kind) for p in mine] == [(p.name, p.kind) for p in theirs] else None
    return None


def unbound(member: Any) -> Any:
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else member


def member_problems(cls: type) -> Iterator[tuple[str, list[str]]]:
    """The public methods and properties of a class and of its bases in this project."""
    for owner in filter(in_project, cls.__mro__):
        for name, member in vars(owner).items():
            function, label = unbound(member), f"{owner.__module__}.{owner.__qualname__}.{name}"
            if name.startswith("_"):
                continue
            if isinstance(member, (property, functools.cached_property)):
                yield label, list(property_problems(member.__doc__))
            elif inspect.isfunction(function):
                bound = not isinstance(member, staticmethod)
                yield label, list(function_problems(function, method_doc(owner, name, function), bound))


def public_values(module: ModuleType) -> dict[str, Any]:
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    here = {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return {name: value for name, value in here.items() if not name.startswith("_")}


def problems(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """The public names of a module and what their docstrings lack."""
    yield module.__name__, list(summary_problems(module.__doc__))
    for name, value in public_values(module).items():
        label = f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            yield label, list(summary_problems(value.__doc__))
        elif inspect.isclass(value) and in_project(value):
            yield label, list(class_problems(value))
            yield from member_problems(value)
        elif inspect.isroutine(value):
            yield label, list(function_problems(value, value.__doc__, False))


def test_every_public_module_is_checked() -> None:
    assert {f"singa.{name}" for name in import_module("singa").__all__} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_complete(name: str) -> None:
    checked = dict(problems(import_module(name)))
    lacking = [f"{label}: {problem}" for label, found in checked.items() for problem in found]
    print(f"{name}: {len(checked)} names checked")
    assert not lacking, f"{len(lacking)} of {len(checked)} names of {name}:\n" + "\n".join(lacking)


# --- the check itself -------------------------------------------------------------------------------------------------


class Example:
    """An example.

    Args:
        size: A size.
    """

    def __init__(self, size: int, other: int) -> None:
        self.size, self.other = size, other

    def method(self, x: int, *args: int) -> int:
        """A method.

        Args:
            x: A number.
            y: A number.
        """
        return x + sum(args)

    def numbers(self) -> Iterator[int]:
        """return numbers"""
        yield self.size


class Derived(Example):
    """A class derived from another."""

    def method(self, x: int, *args: int) -> int:
        return x

    def numbers(self, first: int = 0) -> Iterator[int]:  # another signature: it needs its own docstring
        yield first


def test_the_check_finds_what_is_missing() -> None:
    assert list(class_problems(Example)) == ["not described: other"]
    assert list(function_problems(Example.method, Example.method.__doc__, True)) == [
        "not described: args",
        "described, but not a parameter: y",
        "there is no section Returns",
    ]
    assert list(function_problems(Example.numbers, Example.numbers.__doc__, True)) == [
        "the first line is not a sentence: 'return numbers'",
        "there is no section Yields",
    ]
    assert list(property_problems("A size.")) == ["the summary of a property starts with 'The', 'Whether' or 'Return'"]


def test_a_method_may_rely_on_the_docstring_that_it_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGES", (__name__.partition(".")[0],))
    assert method_doc(Derived, "method", Derived.method) == Example.method.__doc__
    assert method_doc(Derived, "numbers", Derived.numbers) is None
