"""Look at the built site in Chromium, from disk: axe-core on every page, three widths, light and dark; the keys; the search.

`tox -e site-look` builds the site and runs this. It needs `chromium` (or Chrome) and `chromedriver`, and fails if one is absent.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

WIDTHS = (390, 800, 1280)
SCHEMES = ("light", "dark")
FAILING = ("serious", "critical")
LAYOUT = {
    "no page is wider than the window": "wider than the window",
    "nothing in the content is clipped": "clipped: ",
    f"no code is wider than the page at {WIDTHS[-1]} pixels": "code is too wide",
}
"""What holds for every page, and what the problems of a page that fails have in their text."""
PRINTED = 20
"""How many places of a violation are printed."""
STOPS = 40
"""How many stops of the Tab key are followed on a page."""

MEASURE = """
const done = arguments[arguments.length - 1];
const drawn = f => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(f)));  // the page follows its new width
drawn(() => axe.run(document, {resultTypes: ["violations"], preload: false}).then(found => done(found.violations.map(v =>
    ({rule: v.id, impact: v.impact, help: v.help, places: v.nodes.map(n => n.target.flat().join(" "))})))));
"""

CODE = """
const wide = [...document.querySelectorAll("pre")].filter(p => p.scrollWidth > p.clientWidth && p.getClientRects().length);
return wide.map(p => p.innerText.split("\\n").reduce((a, b) => a.length > b.length ? a : b));
"""
"""The longest line of each block of code that is wider than its place."""

CLIPPED = """
const cut = x => { const s = getComputedStyle(x); return s.overflowX === "hidden" || s.overflowX === "clip"; };
const shown = [...document.querySelectorAll("article *")].filter(x => x.getClientRects().length && x.checkVisibility());
return shown.filter(x => cut(x) && x.scrollWidth > x.clientWidth + 1 && x.clientWidth > 1).map(x => x.outerHTML.slice(0, 80));
"""
"""What is cut off in the content, and cannot be scrolled to."""

RESULTS = "return [...document.querySelectorAll('#search-results li a')].slice(0, 3).map(a => a.getAttribute('href'))"
FINISHED = "return document.querySelector('#search-results h2')?.innerText === 'Search Results'"

OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"

FOCUS = """
const e = document.activeElement;
if (!e || e === document.body) return null;
const look = x => { const s = getComputedStyle(x);
    return [s.outlineStyle + s.outlineWidth + s.outlineColor, s.boxShadow, s.borderColor, s.backgroundColor].join(";"); };
const label = e.htmlFor ? null : e.id && document.querySelector(`label[for="${CSS.escape(e.id)}"]`);
const parts = [e, e.parentElement, label].filter(x => x);
const focused = parts.map(look).join("|");
e.blur();
const plain = parts.map(look).join("|");
e.focus({preventScroll: true});
return {name: e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") + "." + e.className + " " + e.textContent.trim().slice(0, 40),
    seen: focused !== plain};
"""

INSIDE = """
const e = document.activeElement;
if (!e || e === document.body) return true;
const box = e.getBoundingClientRect();
return box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
"""


@dataclass
class Found:
    """What was found: violations by rule, problems of layout and keys, and the number of looks."""

    violations: dict[tuple[str, str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    looks: int = 0

    def check(self, passed: bool, rule: str, detail: str = "") -> None:
        """Record one check.

        Args:
            passed: Whether the site does so.
            rule: What it must do.
            detail: What it does instead.
        """
        if passed:
            self.checked.append(rule)
        else:
            self.problems.append(f"{rule}: {detail}" if detail else rule)


def required(*names: str) -> str:
    """Return the path of the first program that is installed.

    Args:
        names: Programs that do the same.

    Raises:
        SystemExit: None is installed.
    """
    for path in map(shutil.which, names):
        if path:
            return path
    raise SystemExit(
        f"site-look needs a browser and its driver, and found no {' or '.join(names)} (Debian: chromium, chromium-driver)"
    )


def axe() -> Path:
    """Return the file of axe-core in the installed package axe-playwright-python, of which nothing else is used.

    Raises:
        SystemExit: It is not installed.
    """
    spec = find_spec("axe_playwright_python")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("site-look needs axe-core: pip install --no-deps axe-playwright-python, or --axe axe.min.js")
    return Path(spec.submodule_search_locations[0], "axe.min.js")


def browser() -> webdriver.Chrome:
    """Start Chromium without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = required("chromium", "google-chrome", "chromium-browser")
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1400,900"):
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to start as root with it
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(required("chromedriver")))
    started.set_script_timeout(300)
    return started


def show(driver: webdriver.Chrome, width: int, scheme: str) -> None:
    """Set the width of the window and the colours that the reader prefers.

    Args:
        driver: The browser.
        width: Pixels.
        scheme: "light" or "dark".
    """
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {
        "features": [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    }
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def look_at(driver: webdriver.Chrome, page: Path, name: str, source: str, found: Found, pictures: Path | None) -> None:
    """Look at one page at every width, light and dark.

    Args:
        driver: The browser.
        page: The file.
        name: What the summary calls it.
        source: The text of axe-core.
        found: Extended.
        pictures: A folder for a picture of each look, or None.
    """
    driver.get(page.as_uri())
    for entry in driver.get_log("browser"):
        if entry["level"] == "SEVERE":
            found.problems.append(f"{name}: {entry['message'].replace(page.as_uri().removesuffix(name), '')}")
    driver.execute_script(source)
    for width in WIDTHS:
        for scheme in SCHEMES:
            show(driver, width, scheme)
            found.looks += 1
            for v in driver.execute_async_script(MEASURE):
                found.violations[v["impact"], v["rule"], v["help"]] += [f"{name} at {width} {scheme}: {p}" for p in v["places"]]
            if pictures:
                driver.save_screenshot(str(pictures / f"{name.replace('/', '-')}-{width}-{scheme}.png"))
        if (beyond := driver.execute_script(OVERFLOW)) > 0:
            found.problems.append(f"{name} at {width}: the page is {beyond} pixels wider than the window")
        for cut in driver.execute_script(CLIPPED):
            found.problems.append(f"{name} at {width}: clipped: {cut}")
    for line in driver.execute_script(CODE):  # at the last width
        found.problems.append(f"{name} at {WIDTHS[-1]}: code is too wide for the page: {line.strip()}")


def press(driver: webdriver.Chrome, *keys: str) -> None:
    """Press keys wherever the focus is.

    Args:
        driver: The browser.
        keys: The keys, one after the other.
    """
    webdriver.ActionChains(driver).send_keys(*keys).perform()


def stops(driver: webdriver.Chrome) -> Iterator[dict[str, Any]]:
    """Press Tab and yield what has the focus, until it leaves the page.

    Args:
        driver: The browser.
    """
    for _ in range(STOPS):
        press(driver, Keys.TAB)
        inside = until(driver, 2, lambda d: d.execute_script(INSIDE))  # the page may scroll smoothly
        at = driver.execute_script(FOCUS)
        if at is None:
            return
        yield {**at, "inside": inside}


def until(driver: webdriver.Chrome, seconds: float, condition: Callable[[webdriver.Chrome], bool]) -> bool:
    """Return whether a condition becomes true.

    Args:
        driver: The browser.
        seconds: How long to wait.
        condition: A function of the browser.
    """
    try:
        return bool(WebDriverWait(driver, seconds).until(condition))
    except WebDriverException:
        return False


def try_keys(driver: webdriver.Chrome, site: Path, found: Found) -> None:
    """Use the site by keyboard: skip link, Tab, search, and tables wider than the window.

    Args:
        driver: The browser.
        site: The built site.
        found: Extended.
    """
    for name in ("index.html", "errors.html", "made/commands.html", "made/reports/opsets.html"):
        for width in (WIDTHS[0], WIDTHS[-1]):
            show(driver, width, "light")
            driver.get((site / name).as_uri())
            reached = list(stops(driver))
            unseen = [at for at in reached if not at["seen"] or not at["inside"]]
            found.check(
                len(reached) > 5 and not unseen,
                f"{name} at {width}: every stop of Tab is in the window and looks focused",
                str(unseen),
            )
    show(driver, WIDTHS[-1], "light")
    driver.get((site / "errors.html").as_uri())
    press(driver, Keys.TAB)
    first = driver.execute_script("return document.activeElement.textContent.trim()")
    press(driver, Keys.ENTER)
    press(driver, Keys.TAB)
    where = "return Boolean(document.activeElement.closest('article, .content')) && !document.activeElement.closest('aside, nav')"
    found.check("content" in first.lower() and driver.execute_script(where), "the first stop of Tab skips to the content", first)
    for width in (WIDTHS[-1], WIDTHS[0]):
        for label, keys in {"/": "/", "Ctrl-K": Keys.CONTROL + "k"}.items():
            show(driver, width, "light")
            driver.get((site / "errors.html").as_uri())
            driver.find_element(By.TAG_NAME, "body").send_keys(keys)
            at = driver.execute_script("const e = document.activeElement; return [e.name, getComputedStyle(e).visibility]")
            found.check(at == ["q", "visible"], f"{label} at {width} moves to the search field", f"the focus is at {at!r}")
    driver.get((site / "errors.html").as_uri())
    buttons = [at["name"] for at in stops(driver) if "overlay-icon" in at["name"]]
    found.check(len(buttons) == 2, f"at {WIDTHS[0]} Tab reaches the buttons of both drawers", str(buttons))
    for selector, drawer in {".nav-overlay-icon": ".sidebar-drawer", ".toc-header-icon": ".toc-drawer"}.items():
        driver.execute_script("document.querySelector(arguments[0]).focus()", selector)
        press(driver, Keys.ENTER)
        inside = driver.execute_script("return Boolean(document.activeElement.closest(arguments[0]))", drawer)
        press(driver, Keys.ESCAPE)
        back = driver.execute_script("return document.activeElement.matches(arguments[0])", selector)
        found.check(
            inside and back, f"Enter opens {drawer} and moves into it, Escape closes it and moves back", f"{inside}, {back}"
        )
    show(driver, WIDTHS[-1], "light")
    driver.get((site / "errors.html").as_uri())
    press(driver, "/")
    driver.find_element(By.CSS_SELECTOR, "input[name=q]").send_keys("bisect", Keys.ENTER)
    results = "return document.querySelectorAll('#search-results li a').length"
    arrived = until(driver, 30, lambda d: d.execute_script(results) > 3)
    found.check(arrived, "the search finds pages from disk", driver.current_url)
    show(driver, WIDTHS[0], "light")
    driver.get((site / "made/reports/opsets.html").as_uri())
    wide = "return [...document.querySelectorAll('.table-wrapper')].find(t => t.scrollWidth > t.clientWidth + 20)"
    table = driver.execute_script(wide)
    if table is None:
        found.problems.append("no table of the page is wider than the window; name another page in docs/look.py")
        return
    driver.execute_script("arguments[0].focus()", table)
    press(driver, *[Keys.ARROW_RIGHT] * 5)
    scrolled = until(driver, 5, lambda d: d.execute_script("return arguments[0].scrollLeft", table) > 0)
    found.check(scrolled, "a table wider than the window scrolls by the arrow keys")


def try_copying(driver: webdriver.Chrome, site: Path, found: Found) -> None:
    """Copy a block of commands and their output by keyboard.

    Args:
        driver: The browser.
        site: The built site.
        found: Extended.
    """
    driver.get((site / "debugging.html").as_uri())
    button = ".highlight-console button.copybtn"
    until(driver, 10, lambda d: d.execute_script(f"return Boolean(document.querySelector('{button}'))"))
    driver.execute_script("addEventListener('copy', e => { window.copied = e.target.value; }, true)")
    driver.execute_script(f"document.querySelector('{button}').focus()")
    press(driver, Keys.ENTER)
    shown = driver.execute_script(f"return document.querySelector('{button}').parentElement.innerText")
    commands = [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]
    copied = driver.execute_script("return window.copied") or ""
    right = bool(commands) and copied.splitlines() == commands
    found.check(right, "Enter on a copy button copies the commands of the block", f"{copied!r}, not {commands!r}")


def try_search(driver: webdriver.Chrome, site: Path, found: Found) -> None:
    """Ask the search what docs/search.toml expects of it.

    Args:
        driver: The browser.
        site: The built site.
        found: Extended.
    """
    show(driver, WIDTHS[-1], "light")
    expected = tomllib.loads((Path(__file__).parent / "search.toml").read_text(encoding="utf-8"))["expected"]
    for query, pages in expected.items():
        driver.get(f"{(site / 'search.html').as_uri()}?q={quote(query)}")
        until(driver, 30, lambda d: d.execute_script(FINISHED))
        first = driver.execute_script(RESULTS)
        right = {f"{page}.html" for page in pages} & {link.partition("#")[0] for link in first}
        found.check(bool(right), f"the search for {query!r} lists {' or '.join(pages)} among its first three results", str(first))


def summary(found: Found, pages: int, versions: str) -> str:
    """Return the result as Markdown.

    Args:
        found: What was found.
        pages: The number of pages.
        versions: The browser and axe-core.
    """
    lines = [
        "# The site in a browser",
        "",
        "Generated by `tox -e site-look`; do not edit.",
        "",
        f"{pages} pages, opened from disk in {versions}, at {', '.join(map(str, WIDTHS))} pixels, light and dark: "
        f"{found.looks} looks.",
        "A look runs every rule of axe-core that is on by default. Violations of serious or critical impact fail the command.",
        "",
        "| impact | rule | places | first place |",
        "|---|---|---|---|",
        *(f"| {i} | {r}: {escape(h, quote=False)} | {len(p)} | `{p[0]}` |" for (i, r, h), p in sorted(found.violations.items())),
        *([] if found.violations else ["| | none | 0 | |"]),
        "",
        "## Layout, keys and search",
        "",
        *(f"* passed: {text}" for text in [rule for rule, sign in LAYOUT.items() if not any(sign in p for p in found.problems)]),
        *(f"* passed: {text}" for text in found.checked),
        *(f"* **failed**: {text}" for text in found.problems),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at the site, write the summary, and return 1 if something is wrong.

    Args:
        arguments: Those of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="the built site")
    parser.add_argument("--to", type=Path, required=True, help="the file of the summary")
    parser.add_argument("--only", default="*.html", help="a pattern of pages")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of every look")
    parser.add_argument("--axe", type=Path, help="axe.min.js; that of axe-playwright-python if absent")
    options = parser.parse_args(arguments)
    source = (options.axe or axe()).read_text(encoding="utf-8")
    site = options.site.resolve()
    pages = sorted(site.rglob(options.only))
    if not pages:
        raise SystemExit(f"there are no pages {options.only} in {site}; tox -e docs builds the site")
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    found = Found()
    driver = browser()
    try:
        for page in pages:
            look_at(driver, page, page.relative_to(site).as_posix(), source, found, options.pictures)
        if options.only == "*.html":
            try_keys(driver, site, found)
            try_copying(driver, site, found)
            try_search(driver, site, found)
        chromium = driver.capabilities["browserVersion"].split(".")[0]
        versions = f"Chromium {chromium} with axe-core {source.partition(' v')[2].split()[0]}"
    finally:
        driver.quit()
    text = summary(found, len(pages), versions)
    options.to.write_text(text, encoding="utf-8")
    print(text)
    for (impact, rule, _), places in found.violations.items():
        if impact in FAILING:
            print(impact, rule, *list(dict.fromkeys(places))[:PRINTED], sep="\n    ", file=sys.stderr)
    return int(bool(found.problems) or any(impact in FAILING for impact, _, _ in found.violations))


if __name__ == "__main__":
    sys.exit(main())
