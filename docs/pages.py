"""The pages of the site that are not files of docs/: copies of the project's other pages, the reference, the commands."""

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
import search
from sphinx.errors import ExtensionError

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
}
"""What keyboards and screen readers need and the theme does not write: its HTML, in every page, and what replaces it."""

LINES = {
    "</strong> -- ": "</strong>: ",
    "</strong></a> -- ": "</strong></a>: ",
    "</em>) -- ": "</em>): ",
    "</em></a>) -- ": "</em></a>): ",
    '<th class="head"><p></p></th>': '<td class="head"></td>',
    '<th class="head text-right"><p></p></th>': '<td class="head text-right"></td>',
    '<div id="search-results"></div>': '<h1>Search</h1>\n<div id="search-results"></div>',
}
"""The same for what some pages have: parameters, empty heads of columns, and the page of the search, which has no heading."""

SIGNATURE = re.compile(r'<dl>\n(?:<dd><em class="sig-param">.*?</dd>\n)+</dl>')
"""A signature of several lines, which Sphinx writes as a list of definitions without terms."""

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


def lines_of_signature(found: re.Match[str]) -> str:
    """Return a signature of several lines without a list."""
    text = found[0].replace("<dl>", '<div class="sig-lines">').replace("<dd>", "<div>")
    return text.replace("</dd>", "</div>").replace("</dl>", "</div>")


def finish(app: Any, error: Exception | None) -> None:
    """Replace the parts of `FINISHED` and `LINES`, and `SIGNATURE`, in the pages that were written.

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
        text = SIGNATURE.sub(lines_of_signature, text)
        page.write_text(text, encoding="utf-8")


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
    for name, text in reference.pages():
        yield MADE / name, text
    listed = "\n".join(f"reports/{page.stem}" for page in COPIED.values() if page.parent.name == "reports")
    yield (
        MADE / "reports.md",
        "# Reports\n\nGenerated from executed cases and committed with the code that produced them. "
        f'<a href="../{SUPPORT}">support.html</a> has the support report with filters and the details of every operator.\n\n'
        f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n",
    )
    yield MADE / "scorer.js", search.scorer()
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
