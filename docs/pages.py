"""The pages of the site that are not files of docs/: copies of the project's other pages, the reference, the commands."""

import inspect
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from tests.docs.test_docstrings import MODULES, PACKAGES, SECTION, public_values

from singa._core.variable import Variable
from singa_backend.comparison import tolerances
from singa_backend.conform import html
from singa_backend.conform.results import load
from singa_backend.rendering import markdown

DOCS = Path(__file__).parent
PROJECT = DOCS.parent
MADE = DOCS / "made"

COPIED = {
    **{PROJECT / f"{name}.md": MADE / f"{name.lower()}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")},
    **{page: MADE / "reports" / page.name for page in sorted((PROJECT / "reports").glob("*.md"))},
}
"""The pages outside docs/, and their places in the site."""

FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")

FINISHED = {
    'class="caption" role="heading"': 'class="caption" role="heading" aria-level="2"',
    '<aside class="sidebar-drawer"': '<aside class="sidebar-drawer" aria-label="Pages"',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
    '<label class="nav-overlay-icon"': '<label tabindex="0" role="button" aria-label="Pages" class="nav-overlay-icon"',
    '<label class="toc-overlay-icon': '<label tabindex="0" role="button" aria-label="On this page" class="toc-overlay-icon',
}
"""What keyboards and screen readers need and the theme does not write: its HTML, in every page, and what replaces it."""

LINES = {
    '<dd><em class="sig-param"': '<dd role="none"><em class="sig-param"',
    '<dl>\n<dd role="none">': '<dl role="none">\n<dd role="none">',
}
"""The same for signatures of several lines, which Sphinx writes as lists of definitions without terms; not every page has one."""

SUPPORT = "files/reports/support.html"
"""The support report with filters, in the site: it is rendered from support.json."""

files: set[Path] = set()
"""The files of the project that pages link to, and that are copied into the site."""


def version() -> str:
    """Return the version of the project."""
    return str(tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def in_site(text: str, origin: Path, page: Path) -> str:
    """Change the links of a page so that they lead to the same pages and files in the site.

    Args:
        text: Markdown.
        origin: The file in the project that has this text.
        page: Its place in the site's source.

    Returns:
        The text with other links. Links to nothing are left, and fail the build.
    """

    def link(found: re.Match[str]) -> str:
        image, label, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = (origin.parent / target).resolve()
        if path in COPIED or (path.suffix == ".md" and DOCS in path.parents):
            return f"[{label}]({os.path.relpath(COPIED.get(path, path), page.parent)}{anchor})"
        if not path.is_file():
            return found[0]
        if image:
            return f"![{label}]({os.path.relpath(path, page.parent)})"
        files.add(path)
        up = "../" * (len(page.relative_to(DOCS).parts) - 1)
        return f'<a href="{up}files/{path.relative_to(PROJECT).as_posix()}">{label}</a>'

    parts = FENCE.split(text)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def relink(app: Any, docname: str, source: list[str]) -> None:
    """Change the links of a page of docs/ while it is read; those of copied pages are changed already.

    Args:
        app: The Sphinx application.
        docname: The name of the page.
        source: Its text, the only element.
    """
    page = DOCS / f"{docname}.md"
    if MADE not in page.parents:
        source[0] = in_site(source[0], page, page)


def copy_files(app: Any, error: Exception | None) -> None:
    """Copy the files that pages link to, and render the support report as a page with filters.

    Args:
        app: The Sphinx application.
        error: What ended the build, or None.
    """
    if error is not None:
        return
    for path in files:
        to = Path(app.outdir, "files", path.relative_to(PROJECT))
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
    to = Path(app.outdir, SUPPORT)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(html.page(load(PROJECT / "reports" / "support.json")), encoding="utf-8")


def finish(app: Any, error: Exception | None) -> None:
    """Replace the parts of `FINISHED` and `LINES` in the pages that were written.

    Args:
        app: The Sphinx application.
        error: What ended the build, or None.

    Raises:
        ExtensionError: The theme no longer writes one of these parts.
    """
    written = [Path(app.outdir, f"{name}.html") for name in [*app.env.found_docs, "genindex", "py-modindex", "search"]]
    for page in written if error is None else ():
        text = page.read_text(encoding="utf-8")
        for old, new in FINISHED.items():
            if old not in text and new not in text:  # a page of an earlier build is finished already
                raise ExtensionError(f"{page.name} has no {old!r}; change FINISHED in docs/pages.py to what the theme writes now")
        for old, new in {**FINISHED, **LINES}.items():
            text = text.replace(new, old).replace(old, new)
        page.write_text(text, encoding="utf-8")


def data_doc(name: str, value: Any) -> str:
    """Return the text below the assignment of a public value, in the module that assigns it; "" if there is none.

    Args:
        name: The name of the value.
        value: The value.
    """
    for module in [m for n, m in sys.modules.items() if n.partition(".")[0] in PACKAGES and vars(m).get(name) is value]:
        found = ModuleAnalyzer.for_module(module.__name__).find_attr_docs().get(("", name))
        if found:
            return "\n".join(plain(blocks(found)))
    return ""


def directive(module: str, name: str, value: Any, seen: dict[int, str]) -> list[str]:
    """Return the directive that documents one public name.

    Args:
        module: The module that has the name.
        name: The name.
        value: What it is bound to.
        seen: The first name of every class and function, by its id. Later names refer to it.
    """
    full = f"{module}.{name}"
    kind = "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
    doc = ""
    if kind != "data":
        first = seen.setdefault(id(value), full)
        if first == full:
            options = ["   :members:", "   :show-inheritance:"] if kind == "class" else []
            if kind == "class" and issubclass(value, Variable):  # the methods of Tensor are in several files
                options.append("   :inherited-members: Variable")
            return [f".. auto{kind}:: {full}", *options, ""]
        doc = f"The same as :py:{'class' if kind == 'class' else 'func'}:`{first}`."
    elif inspect.ismodule(value):
        doc = f"See :py:mod:`{value.__name__}`." if value.__name__ in MODULES else inspect.cleandoc(value.__doc__ or "")
    else:
        doc = data_doc(name, value)
    return [f".. py:{kind}:: {name}", f"   :module: {module}", "", *(f"   {line}".rstrip() for line in doc.splitlines()), ""]


def reference(name: str, seen: dict[int, str]) -> str:
    """Return the page of one module, in reStructuredText as its docstrings are.

    Args:
        name: The name of the module.
        seen: The first name of every class and function, by its id; this page adds its own.
    """
    module = import_module(name)
    lines = [name, "=" * len(name), "", f".. py:module:: {name}", ""]
    # not cleandoc, which would remove the indentation of code if all lines but the first are code
    lines += plain(blocks([*(module.__doc__ or "").strip().splitlines(), ""]))
    for public, value in sorted(public_values(module).items(), key=lambda item: (not inspect.isclass(item[1]), item[0].lower())):
        lines += directive(name, public, value, seen)
    return "\n".join(lines)


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
    """Mark the code in a docstring, before its sections are read.

    Args:
        app: The Sphinx application.
        what: The kind of the object.
        name: Its name.
        value: The object.
        options: The options of the directive.
        lines: The docstring, changed in place.
    """
    lines[:] = blocks(lines)


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


def tolerance_tables() -> str:
    """Return the tables of docs/tolerances.md, in Markdown."""
    lines = ["| operators | steps | steps of the largest summand | units of integers | reason |", "|---|---:|---:|---:|---|"]
    for one in tolerances.RULES:
        names = ", ".join(f"`{name}`" for name in one.operators)
        reason = one.reason + ("; steps are at least those of float32" if one.single else "")
        lines.append(f"| {names} | {one.ulps:g} | {one.norm:g} | {one.steps} | {markdown(reason, 1000)} |")
    made = ["### Of one node", "", *lines, ""]
    for use in tolerances.USES:
        made += [f"### {use.where}", "", f"`{use.formula}`", "", "| dtype | rtol | atol | reason |", "|---|---:|---:|---|"]
        for dtypes, bound in use.rows():
            atol = "" if bound.atol is None else f"{bound.atol:g}"
            made.append(f"| {', '.join(dtypes)} | {bound.rtol:g} | {atol} | {markdown(bound.reason, 1000)} |")
        made.append("")
    return "\n".join(made)


def made() -> Iterator[tuple[Path, str]]:
    """Yield every page that is not a file of docs/, and its text."""
    for origin, page in COPIED.items():
        yield page, in_site(origin.read_text(encoding="utf-8"), origin, page)
    seen: dict[int, str] = {}
    for name in MODULES:
        yield MADE / "reference" / f"{name}.rst", reference(name, seen)
    listed = "\n".join(f"reference/{name}" for name in MODULES)
    yield (
        MADE / "reference.md",
        f"# Python reference\n\nEvery public name, from its docstring.\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n",
    )
    listed = "\n".join(f"reports/{page.stem}" for page in COPIED.values() if page.parent.name == "reports")
    yield (
        MADE / "reports.md",
        "# Reports\n\nGenerated from executed cases and committed with the code that produced them. "
        f'<a href="../{SUPPORT}">support.html</a> has the support report with filters and the details of every operator.\n\n'
        f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n",
    )
    yield MADE / "tolerances.inc", tolerance_tables()
    yield MADE / "commands.rst", "Commands\n========\n\n.. click:: singa.cli._main:main\n   :prog: sonnx\n   :nested: full\n"


def write(app: Any, config: Any) -> None:
    """Write the pages that are not files of docs/. A page that is the same stays, and is not read again.

    Args:
        app: The Sphinx application.
        config: Its configuration.
    """
    written = dict(made())
    for path in MADE.rglob("*.*"):
        if path not in written:
            path.unlink()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
