"""Attributes of com.microsoft that are counts: each integer one at values that are too large, in bounded memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from onnx import AttributeProto
from tests.helpers import bounded

from singa_backend import Limits, SingaBackend
from singa_backend.conform.fuzz import generate
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import MICROSOFT, load_domain, schemas

VALUES = (1 << 12, 1 << 27, 1 << 28, (1 << 31) - 1, 1 << 62)
LIMITS = {"tensor_bytes": 8 << 20, "live_bytes": 24 << 20, "iterations": 100_000, "executions": 1_000_000}
MEBIBYTES, SECONDS = 64.0, 10.0

load_domain(MICROSOFT)
OPERATORS = sorted(name for domain, name in declarations if domain == MICROSOFT)


def integers(name: str) -> list[str]:
    """The integer attributes of an operator."""
    kinds = (AttributeProto.INT, AttributeProto.INTS)
    attributes = schemas[MICROSOFT, name][1].attributes
    return [a for a, declared in attributes.items() if generate.attribute_type(declared) in kinds]


@lru_cache(1)
def drawn(name: str) -> generate.NodeCase:
    """A node of the operator that runs."""
    for index in range(40):
        case = generate.draw(7, 2 * index, f"^com.microsoft:{name}-1$")
        if case is not None:
            return case
    raise AssertionError(name)


def call(request: list[Any]) -> None:
    """Run the drawn node of an operator with one attribute changed."""
    name, attribute, value = request
    case = drawn(name)
    model = generate.model(case)
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.ClearField("type")
    node = model.graph.node[0]
    numbers = next((list(a.ints) for a in node.attribute if a.name == attribute), [])
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend(kept)
    kind = generate.attribute_type(schemas[MICROSOFT, name][1].attributes[attribute])
    changed = AttributeProto(name=attribute, type=kind)
    if kind == AttributeProto.INT:
        changed.i = value
    else:
        changed.ints.extend([value, *numbers[1:]] if numbers else [value])
    node.attribute.append(changed)
    SingaBackend.prepare(model, limits=Limits(**LIMITS)).run(case.feeds)


@pytest.mark.skipif(not bounded.available, reason="the system does not show the memory of a process")
@pytest.mark.parametrize("part", range(4))
def test_large_counts_are_refused_or_computed_in_bounded_memory(part: int) -> None:
    cases = [[n, a, v] for n in OPERATORS[part::4] for a in integers(n) for v in VALUES]
    found = bounded.calls(call, cases)
    wrong = [
        (case, answer)
        for case, answer in zip(cases, found, strict=True)
        if not (answer["code"].startswith("SX") or not answer["code"])
        or answer["code"] == "SX601"  # more memory was requested than the child may have
        or answer["mebibytes"] > MEBIBYTES
        or answer["seconds"] > SECONDS
    ]
    assert not wrong, wrong[:10]
