"""The built site: every link leads to a page, a file and an anchor, and the reference has every public name and command."""

from __future__ import annotations

import os
import re
import zlib
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.docs.test_docstrings import MODULES, public_values

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


def test_options_are_shown_as_they_are_typed() -> None:
    dashes = {path.name: re.findall(r"[–—][a-z][\w-]+", path.read_text(encoding="utf-8")) for path in pages()}
    assert {name: found for name, found in dashes.items() if found} == {}  # "--json" with one typographic dash
