"""Which operators can be written at an opset: by the registry if the opset has them, otherwise by trying the writer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from onnx import ModelProto, parser

from ...errors import InvalidInput, SonnxError
from ...ir.graph import Graph
from ...ir.reader import read
from ...opsets.convert import convert
from ...opsets.target_schema import Unwritable
from ...opsets.writer import LEAST, OpsetWriter
from ...proto.schemas import newest, schemas
from .problems import Operator, current, drawn, listed


@dataclass(frozen=True)
class Support:
    """How an operator is written at an opset.

    Attributes:
        how: "native" if the opset has it (some of its calls may still need a newer one), "composed" if other operators can
            express some of its calls, "" if it cannot be written.
        least: The lowest opset, this one or newer, that can write one of its calls; None if there is none.
    """

    how: str
    least: int | None

    def __bool__(self) -> bool:
        return bool(self.how)


def supported_ops(opset: int) -> dict[Operator, Support]:
    """Return for every operator that ONNX defines how it can be written at an opset.

    Operators of the domains other than ai.onnx have separate versions and can be used at every opset.

    Args:
        opset: An opset of ai.onnx, from the lowest that the writer supports to the newest.

    Returns:
        (domain, name) -> Support, sorted by key; the domain "" is ai.onnx.

    Raises:
        InvalidInput: The writer does not support the opset (SX323).
    """
    if not LEAST <= opset <= newest(""):
        raise InvalidInput(f"the opset must be in [{LEAST}, {newest('')}], got {opset}", code="SX323")
    found: dict[Operator, Support] = {}
    for operator in listed():
        least = next((o for o in range(opset, newest("") + 1) if how(operator, o)), None)
        found[operator] = Support(how(operator, opset), least)
    return found


def how(operator: Operator, opset: int) -> str:
    """Return "native", "composed" or "": see Support."""
    domain, name = operator
    if domain:
        return "native"
    there = max((v for v in schemas[operator] if v <= opset), default=None)
    if there is not None and not schemas[operator][there].deprecated:
        return "native"
    return "composed" if _composed(name, opset) else ""


@cache
def _composed(name: str, opset: int) -> bool:
    """Whether the writer can write one of the models drawn for an operator."""
    for graph in _probes(name):
        writer = OpsetWriter(opset)
        writer.finds_minimum_opset = False
        try:
            convert(graph, opset, writer=writer)
        except Unwritable:
            continue
        return True
    return False


@cache
def _probes(name: str) -> tuple[Graph, ...]:
    return tuple(_graphs(name))


_SIMPLE = {
    "Attention": """g (float[2, 3, 4, 8] q, float[2, 3, 6, 8] k, float[2, 3, 6, 8] v) => (float[2, 3, 4, 8] y)
        { y = Attention (q, k, v) }""",
    "ConstantOfShape": "g () => (float[3] y) <int64[1] s = {3}> { y = ConstantOfShape (s) }",
}
"""Calls that older opsets can express, of operators whose drawn calls need newer ones."""


def _graphs(name: str) -> Iterator[Graph]:
    if name in _SIMPLE:
        head = f'<ir_version: 10, opset_import: ["": {current("", name)}]>'
        yield read(parser.parse_model(f"{head} {_SIMPLE[name]}"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for problem in drawn("", name, current("", name)):
            try:
                yield read(ModelProto.FromString(problem.model))
            except SonnxError:
                continue
