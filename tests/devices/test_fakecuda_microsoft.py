"""Drawn nodes of onnxruntime's own operators on an emulated CUDA device, compared with the CPU."""

from __future__ import annotations

from typing import Any

import fakecuda
import numpy as np
import pytest

import singa_backend
from singa_backend.comparison import tolerances
from singa_backend.conform.fuzz import compare, generate
from singa_backend.errors import SonnxError
from singa_backend.proto.schemas import MICROSOFT, load_domain

load_domain(MICROSOFT)

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("capturable_products")]
VERSIONS = {generate.label(*key): key for key in generate.cells(MICROSOFT)[1]}
CASES, DRAWS = 2, 40


def run(case: generate.NodeCase, device: str) -> list[Any] | str:
    """The outputs of the definition; the code of the error with which it refuses the inputs."""
    try:
        rep = singa_backend.prepare(case.model, device=device, optimize=0)
        return list(rep.run(case.feeds))
    except SonnxError as error:
        return error.code


@pytest.mark.parametrize("name", VERSIONS)
def test_drawn_nodes_are_those_of_the_cpu(name: str) -> None:
    select, seen = f"^{name}$", 0
    for index in range(DRAWS):
        case = generate.draw(5, index, select)
        if case is None:
            continue
        if seen == CASES:
            break
        expected = run(case, "CPU")
        with fakecuda.order("both"):  # a race fails the test
            found = run(case, "CUDA")
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected, (index, case.describe())
            continue
        rule = tolerances.rule(*VERSIONS[name][:2])
        scale = compare.magnitude(list(case.inputs.values()), rule.power)
        says = compare.compare(found, expected, rule, scale, 2.0)
        assert not says.why, (index, case.describe(), says.why)
        assert all(isinstance(y, np.ndarray) for y in found)
        seen += 1
    assert seen
