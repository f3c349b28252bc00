"""The Python reference: the groups of reference.toml, each name in one line at the top of its group, then from its docstring."""

import builtins
import inspect
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import find_pending_xref_condition
from tests.docs.test_docstrings import MODULES, PACKAGES, SECTION, public_values

from singa._core.variable import Variable

ORDER = Path(__file__).parent / "reference.toml"

COMMON = ("singa.sonnx", "singa_backend")
"""Modules that programs import by name; the tables of their parts show it."""


@dataclass
class Part:
    """A part of a group: its title, its names in their order, and the modules whose docstrings introduce it."""

    title: str
    names: list[str]
    modules: list[str]


@dataclass
class Group:
    """A group of the reference, and whether each of its parts has a page."""

    page: str
    title: str
    about: str
    parts: list[Part]
    pages: bool


@cache
def values() -> dict[str, Any]:
    """Return every public name of the modules, with its module, and its value."""
    return {f"{module}.{name}": value for module in MODULES for name, value in public_values(import_module(module)).items()}


@cache
def groups() -> tuple[list[Group], dict[str, list[str]]]:
    """Return the groups, and the other names of each name in them.

    Raises:
        ExtensionError: reference.toml names what is not public, or leaves out a module.
    """
    listed = tomllib.loads(ORDER.read_text(encoding="utf-8"))["group"]
    items = [item for group in listed for part in group["parts"].values() for item in part]
    unknown = [n for n in items if n not in values() and n.removesuffix(".*") not in MODULES]
    wild = [item.removesuffix(".*") for item in items if item.endswith(".*")]
    if unknown or sorted(wild) != sorted(MODULES) or len(set(items)) != len(items):
        raise ExtensionError(
            f"docs/reference.toml: not public: {unknown}; once each, as module.*: {sorted(set(MODULES) ^ set(wild))}"
        )
    rest: dict[str, list[str]] = {module: [] for module in MODULES}
    first = {key(name): name for name in reversed(items) if name in values()}
    others = defaultdict(list)
    everywhere = [
        f"{module}.{name}"
        for module in sorted(MODULES, key=wild.index)
        for name in sorted(public_values(import_module(module)), key=lambda name: (name.lstrip("_").lower(), name.swapcase()))
    ]
    for name in everywhere:
        if first.setdefault(key(name), name) != name:
            others[first[key(name)]].append(name)
        elif name not in items:
            rest[name.rpartition(".")[0]].append(name)
    made = []
    for group in listed:
        parts = []
        for title, names in group["parts"].items():
            modules = [n.removesuffix(".*") for n in names if n.endswith(".*")]
            full = [name for item in names for name in (rest[item.removesuffix(".*")] if item.endswith(".*") else [item])]
            parts.append(Part(title, full, modules))
        made.append(Group(group["page"], group["title"], group["about"], parts, group.get("pages", False)))
    return made, others


def key(name: str) -> Any:
    """Return what names have in common that are bound to one class or function; any other value has one name only."""
    value = values()[name]
    return id(value) if inspect.isclass(value) or inspect.isroutine(value) else name


def data_doc(full: str) -> str:
    """Return the text below the assignment of a public value, in its module or in the one that assigns it; "" if there is none.

    Args:
        full: The name with its module.
    """
    home, _, name = full.rpartition(".")
    modules = [n for n, m in sys.modules.items() if n.partition(".")[0] in PACKAGES and vars(m).get(name) is values()[full]]
    for module in [home, *modules]:
        found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
        if found:
            return "\n".join(plain(blocks(found)))
    return ""


def kind(value: Any) -> str:
    """Return the kind of a value, as the directives of Sphinx name it."""
    return "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"


def documentation(full: str) -> str:
    """Return the text of a value that is not a class or a function."""
    value = values()[full]
    if inspect.ismodule(value):
        return f"See :py:mod:`{value.__name__}`." if value.__name__ in MODULES else inspect.cleandoc(value.__doc__ or "")
    return data_doc(full)


def directive(full: str) -> list[str]:
    """Return the directive that documents one public name.

    Args:
        full: The name with its module.
    """
    value = values()[full]
    module, _, name = full.rpartition(".")
    if kind(value) == "data":
        text = [f"   {line}".rstrip() for line in documentation(full).splitlines()]
        return [f".. py:data:: {name}", f"   :module: {module}", "", *text, ""]
    options = ["   :members:", "   :show-inheritance:"] if inspect.isclass(value) else []
    if inspect.isclass(value) and issubclass(value, Variable):  # the methods of Tensor are in several files
        options.append("   :inherited-members: Variable")
    return [f".. auto{kind(value)}:: {full}", *options, ""]


def short(full: str, part: Part) -> str:
    """Return a name as tables show it: bare in the part of its module, otherwise as after `from singa import sonnx`."""
    module, _, name = full.rpartition(".")
    return name if module in part.modules and module not in COMMON else full.removeprefix("singa.")


def line(full: str) -> str:
    """Return the first sentence of the documentation of a name, in reStructuredText.

    Raises:
        ExtensionError: It has none.
    """
    value = values()[full]
    text = documentation(full) if kind(value) == "data" else "\n".join(plain((inspect.getdoc(value) or "").splitlines()))
    found = " ".join(text.strip().split("\n\n")[0].split())
    if not found:
        raise ExtensionError(f"{full} has no documentation for its line in the reference")
    return found


def link(full: str, part: Part) -> str:
    """Return a link to the description of a name."""
    role = {"class": "class", "function": "func", "data": "data"}[kind(values()[full])]
    return f":py:{role}:`{short(full, part)} <{full}>`"


def caption(part: Part) -> str:
    """Return the title of a part, with the modules whose names are bare in its table."""
    bare = [f"``{module}``" for module in part.modules if module not in COMMON]
    return f"**{part.title}**" + (f" (names without a module are in {', '.join(bare)})" if bare else "")


def table(part: Part) -> list[str]:
    """Return a table of the names of a part, each with its line; names with the same line share a row."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name in part.names:
        rows[line(name)].append(name)
    lines = [".. list-table::", "   :class: names", "   :widths: 30 70", ""]
    for text, named in rows.items():
        lines += [f"   * - {', '.join(link(name, part) for name in named)}", f"     - {text}"]
    return [*lines, ""]


def heading(text: str, mark: str) -> list[str]:
    """Return a heading in reStructuredText."""
    return [text, mark * len(text), ""]


def introduction(module: str) -> list[str]:
    """Return the docstring of a module, below its directive."""
    text = (import_module(module).__doc__ or "").strip()  # not cleandoc: text in which all lines but one are code
    return [f".. py:module:: {module}", "", *plain(blocks([*text.splitlines(), ""]))]


def details(part: Part) -> list[str]:
    """Return the documentation of the names of a part."""
    introduced = [text for module in part.modules for text in introduction(module)]
    return [*introduced, *(text for name in part.names for text in directive(name))]


def pages() -> Iterator[tuple[str, str]]:
    """Yield the pages of the reference: their names below made/, and their text."""
    made, _ = groups()
    hub = [*heading("Python reference", "="), "Every public name, by what it is for.", ""]
    hub += [".. toctree::", "   :hidden:", "", *(f"   reference/{group.page}" for group in made), ""]
    for group in made:
        page = [*heading(group.title, "="), group.about, ""]
        hub += [*heading(group.title, "-"), f"{group.about} :doc:`Each in a line <reference/{group.page}>`.", ""]
        if group.pages:
            page += [".. toctree::", "   :hidden:", "", *(f"   {part.title}" for part in group.parts), ""]
            hub += [".. list-table::", "   :class: names", "   :widths: 30 70", ""]
        for part in group.parts:
            if group.pages:
                about = line_of_module(part.title)
                hub += [f"   * - :doc:`{part.title} <reference/{part.title}>`", f"     - {about}"]
                page += [*heading(part.title, "-"), f"{about} :doc:`In full <{part.title}>`.", "", *table(part)]
                yield f"reference/{part.title}.rst", "\n".join([*heading(part.title, "="), *table(part), *details(part)])
            else:
                page += [caption(part), "", *table(part)]
                hub += [f"**{part.title}:** {', '.join(link(name, part) for name in part.names)}", ""]
        hub.append("")
        if not group.pages:
            page += [text for part in group.parts for text in [*heading(part.title, "-"), *details(part)]]
        yield f"reference/{group.page}.rst", "\n".join(page)
    yield "reference.rst", "\n".join(hub)


def line_of_module(name: str) -> str:
    """Return the first line of the docstring of a module."""
    return plain((import_module(name).__doc__ or "").strip().splitlines()[:1])[0]


def note_other_names(app: Any, doctree: Any) -> None:
    """Let links to the other names of classes and functions of a page lead to their descriptions.

    Args:
        app: The Sphinx application.
        doctree: The page.
    """
    domain = app.env.domains.python_domain
    _, others = groups()
    for full, entry in [*domain.objects.items()]:
        if entry.docname == app.env.docname and not entry.aliased:
            for other in set(others.get(full, ())) - domain.objects.keys():  # autodoc notes the name where it is defined
                domain.note_object(other, entry.objtype, entry.node_id, aliased=True)


def keep_builtins(app: Any, doctree: Any) -> None:
    """Keep the types of Python, such as bytes, from being links to attributes of that name.

    Args:
        app: The Sphinx application.
        doctree: The page.
    """
    for node in [*doctree.findall(addnodes.pending_xref)]:
        if node.get("refdomain") == "py" and hasattr(builtins, node["reftarget"]):
            written = find_pending_xref_condition(node, "*")  # autodoc also has a text for links that are found
            node.replace_self(written.children if written else node.children)


def blocks(lines: list[str]) -> list[str]:
    """Mark code in a docstring as literal blocks: sections Example, and indented text outside sections.

    Args:
        lines: The lines of a docstring, without its indentation.
    """
    marked: list[str] = []
    in_section = True
    for i, line in enumerate(lines):
        if re.fullmatch(r"Examples?:", line):
            marked += ["Example::", ""]
            in_section = True
            continue
        if line and not line.startswith(" "):
            in_section = bool(SECTION.fullmatch(line)) or line.startswith(("* ", "- "))
        elif line and not in_section and i and not lines[i - 1]:
            marked += ["::", ""]
            in_section = True
        marked.append(line)
    return marked


def plain(lines: list[str]) -> list[str]:
    """Escape what reStructuredText would read as markup in plain text; code in backticks and literal blocks stay.

    Args:
        lines: The lines of a docstring.
    """
    escaped, literal = [], False
    for paragraph in re.split(r"(\n(?:[ ]*\n)+)", "\n".join(lines)):
        if paragraph.strip():
            literal = literal and paragraph.startswith(" ")
            if not literal:
                parts = re.split(r"(``?[^`]+``?)", paragraph)
                paragraph_ = [
                    p if i % 2 else re.sub(r"(?<!\\)[*|](?! )|(?<=\w)_(?!\w)", r"\\\g<0>", p) for i, p in enumerate(parts)
                ]
                literal, paragraph = paragraph.endswith("::"), "".join(paragraph_)
        escaped.append(paragraph)
    return "".join(escaped).split("\n")


def read_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Mark the code in a docstring, before its sections are read, and add its other names.

    Args:
        app: The Sphinx application.
        what: The kind of the object.
        name: Its name.
        value: The object.
        options: The options of the directive.
        lines: The docstring, changed in place.
    """
    lines[:] = blocks(lines)
    if others := groups()[1].get(name):
        lines += ["", f"Also {', '.join(f'`{other}`' for other in others)}.", ""]


def escape_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape a docstring, after its sections are read.

    Args:
        app: The Sphinx application.
        what: The kind of the object.
        name: Its name.
        value: The object.
        options: The options of the directive.
        lines: The docstring, changed in place.
    """
    lines[:] = plain(lines)


def escape_help(app: Any, context: Any, lines: list[str]) -> None:
    """Escape a help text of the command line.

    Args:
        app: The Sphinx application.
        context: The command.
        lines: The text, changed in place.
    """
    lines[:] = plain(lines)
