"""The words of search.toml in the index of the search: entries that a query finds first, keywords, and scores."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.search.en import SearchEnglish

DOCS = Path(__file__).parent
DATA = tomllib.loads((DOCS / "search.toml").read_text(encoding="utf-8"))
EXPECTED: dict[str, list[str]] = DATA["expected"]


class Questions(SearchEnglish):
    """English, without the words with which questions begin."""

    stopwords = SearchEnglish.stopwords | {
        *("can", "could", "do", "does", "how", "i", "my", "should", "what", "when", "where", "which", "who", "why")
    }


def spellings(word: str) -> list[str]:
    """Return a word with its hyphen, with a space and with nothing instead.

    Args:
        word: A word or phrase.
    """
    return list(dict.fromkeys([word, word.replace("-", " "), word.replace("-", "")]))


def words(page: str) -> dict[str, str]:
    """Return the words of a page in all spellings, and the anchor for each.

    Args:
        page: The name of the page.
    """
    found: dict[str, str] = {}
    for place, listed in DATA["pages"].items():
        name, _, anchor = place.partition("#")
        if name == page:
            found |= {spelling: anchor for word in listed for spelling in spellings(word)}
    return found


def scorer() -> str:
    """Return the program of the scores, with the words of all pages."""
    pages = dict.fromkeys(place.partition("#")[0] for place in DATA["pages"])
    listed = {page: sorted(words(page)) for page in pages}
    return (DOCS / "scorer.js").read_text(encoding="utf-8").replace("__WORDS__", json.dumps(listed))


def add_words(app: Any, doctree: nodes.document) -> None:
    """Add the words of a page to it, unseen: as entries of the index, and as keywords.

    Args:
        app: The Sphinx application.
        doctree: The page.

    Raises:
        ExtensionError: search.toml names a heading that the page does not have.
    """
    found = words(app.env.docname)
    ids = {name for section in doctree.findall(nodes.section) for name in section["ids"]}
    if missing := set(found.values()) - ids - {""}:
        raise ExtensionError(f"docs/search.toml: {app.env.docname} has no headings {sorted(missing)}")
    if found:
        single = dict.fromkeys(part for word in found for part in re.findall(r"\w+", word))
        entries = [("single", word, anchor, "main", None) for word, anchor in found.items()]
        doctree.insert(0, addnodes.index(entries=entries))
        doctree.insert(0, nodes.meta(name="keywords", content=", ".join(single)))


def check(app: Any, env: Any) -> None:
    """Check that every page of search.toml exists.

    Args:
        app: The Sphinx application.
        env: Its environment.

    Raises:
        ExtensionError: There is no such page.
    """
    named = {place.partition("#")[0] for place in [*DATA["pages"], *(page for pages in EXPECTED.values() for page in pages)]}
    if missing := named - env.found_docs:
        raise ExtensionError(f"docs/search.toml: there are no pages {sorted(missing)}")
