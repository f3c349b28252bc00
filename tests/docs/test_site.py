"""The built site: every link leads to a page, a file and an anchor, and the reference has every public name and command."""

from __future__ import annotations

import json
import os
import re
import tomllib
import zlib
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.docs.test_docstrings import MODULES, public_values
from tests.helpers.paths import PROJECT

from singa.cli._main import COMMANDS

SITE = Path(os.environ.get("SONNX_SITE", ""))

pytestmark = pytest.mark.skipif("SONNX_SITE" not in os.environ, reason="needs a built site: tox -e docs")


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@cache
def pages() -> dict[Path, Page]:
    own = (path for path in SITE.rglob("*.html") if "files" not in path.relative_to(SITE).parts)
    return {path.resolve(): Page(path) for path in own}


def problem(page: Path, link: str) -> str | None:
    """What is wrong with a link; links to other hosts are not followed, and none of the site's own may need a network."""
    url = urlsplit(link)
    if url.scheme or url.netloc:
        return None
    path = (page.parent / unquote(url.path)).resolve() if url.path else page
    if not path.is_file():
        return "no such file"
    if url.fragment and path in pages() and unquote(url.fragment) not in pages()[path].anchors:
        return "no such anchor"
    return None


def test_every_link_leads_somewhere() -> None:
    found = {(page, link): problem(page, link) for page, content in pages().items() for link in content.links}
    assert len(pages()) > 60 and len(found) > 1000
    assert [f"{page.name}: {link}: {why}" for (page, link), why in found.items() if why] == []


def test_nothing_is_loaded_from_a_network() -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"((?:https?:)?//[^\"]+)", re.IGNORECASE)
    assert {found for path in pages() for found in loads.findall(path.read_text(encoding="utf-8"))} == set()


def test_every_public_name_is_in_the_reference() -> None:
    raw = (SITE / "objects.inv").read_bytes()
    lines = zlib.decompress(raw.split(b"\n", 4)[4]).decode().splitlines()
    documented = {line.split()[0] for line in lines if line.split()[1].startswith("py:")}
    names = {f"{module}.{name}" for module in MODULES for name in public_values(import_module(module))}
    assert sorted(names - documented) == []
    assert len(names) > 400


def test_every_command_is_on_the_page_of_commands() -> None:
    text = (SITE / "made" / "commands.html").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f'id="sonnx-{name}"' not in text] == []


def row(page: str, name: str) -> str:
    """The line that describes a name at the top of a page of the reference."""
    table = (SITE / "made" / "reference" / page).read_text(encoding="utf-8")
    found = re.search(
        rf'<tr class="row-\w+"><td>(?:(?!</tr>).)*?href="[^"]*#{re.escape(name)}".*?</td>\s*<td>(.*?)</td>', table, re.DOTALL
    )
    assert found, f"{page} has no row for {name}"
    return re.sub(r"<[^>]+>", "", found[1]).strip()


def test_the_reference_is_grouped_and_begins_with_prepare() -> None:
    hub = (SITE / "made" / "reference.html").read_text(encoding="utf-8").partition('<article role="main"')[2]
    titles = re.findall(r"<h2>([^<]+)<", hub)
    assert titles == [
        "Prepare and run", "Errors", "Compare and debug", "Train", "Write", "Tensors, layers, optimizers", "Tools",
    ]  # fmt: skip
    assert re.findall(r'href="[^"]*#(singa[\w.]+)"', hub)[0] == "singa.sonnx.prepare"
    assert row("prepare.html", "singa.sonnx.prepare") == "Read a model, check it, and place it on a device."
    assert row("singa.autograd.html", "singa.autograd.Sigmoid") == row("singa.autograd.html", "singa.autograd.sigmoid")
    assert row("tensors.html", "singa.opt.SGD").startswith("Stochastic gradient descent")


def test_docstrings_are_rendered_as_code_and_lists() -> None:
    """No indented text is a quotation, which code would be without its mark, and no heading of a section is left as text."""
    text = {page: page.read_text(encoding="utf-8") for page in (SITE / "made" / "reference").glob("*.html")}
    assert [page.name for page, html in text.items() if "<blockquote" in html] == []
    left = {
        page.name: re.findall(r"(?:Args|Returns|Yields|Raises|Attributes|Examples?):\s*<", html) for page, html in text.items()
    }
    assert {name: found for name, found in left.items() if set(found) - {"Example:<"}} == {}
    whole = "".join(text.values())
    assert whole.count("Parameters<span") > 500 and whole.count("Returns<span") > 500 and whole.count("Raises<span") > 100


def test_the_search_lists_the_right_page_first() -> None:
    """The entries of the index that a query finds have 100 points or few less; names, titles and words have at most 30.

    `tox -e site-look` asks the search itself, also for queries that are no entries.
    """
    text = (SITE / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    expected = tomllib.loads((PROJECT / "docs" / "search.toml").read_text(encoding="utf-8"))["expected"]
    wrong, asked = {}, 0
    for query, wanted in expected.items():
        entry = index["indexentries"].get(query.lower())
        if entry is None:
            continue
        asked += 1
        first = sorted({index["docnames"][page] for page, _, main in entry if main})
        if len(first) > 3 or not set(first) & set(wanted):
            wrong[query] = first
    assert wrong == {}
    assert asked >= 15


def test_options_are_shown_as_they_are_typed() -> None:
    dashes = {path.name: re.findall(r"[–—][a-z][\w-]+", path.read_text(encoding="utf-8")) for path in pages()}
    assert {name: found for name, found in dashes.items() if found} == {}  # "--json" with one typographic dash
