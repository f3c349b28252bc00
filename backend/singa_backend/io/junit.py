"""Writes JUnit XML, which services of continuous integration read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

from ..rendering import xml
from .files import writing
from .places import StrPath


@dataclass(frozen=True)
class JUnitCase:
    """A test case: it passed if neither a failure nor a reason to skip it is there.

    Attributes:
        group: the name of its class.
        name: of the case.
        failure: the message of its failure; "" if it did not fail.
        text: the whole text of the failure; "" for none.
        skipped: why it was skipped; "" if it was not.
        seconds: its time; None if it is not known.
    """

    group: str
    name: str
    failure: str = ""
    text: str = ""
    skipped: str = ""
    seconds: float | None = None


def write_suite(path: StrPath, name: str, cases: Iterable[JUnitCase]) -> None:
    """Write the cases of a suite and their counts; raises InvalidInput (SX351)."""
    suite = ElementTree.Element("testsuite", name=xml(name))
    for case in cases:
        made = ElementTree.SubElement(suite, "testcase", classname=xml(case.group), name=xml(case.name))
        if case.seconds is not None:
            made.set("time", f"{case.seconds:.4f}")
        if case.failure:
            ElementTree.SubElement(made, "failure", message=xml(case.failure)).text = xml(case.text) or None
        elif case.skipped:
            ElementTree.SubElement(made, "skipped", message=xml(case.skipped))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("./testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("./testcase/skipped"))))
    with writing(path, parents=True) as out:
        ElementTree.ElementTree(suite).write(out, encoding="utf-8", xml_declaration=True)
