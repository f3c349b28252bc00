"""Shapes and sizes before a run: each rule, in both kinds of graph, judged by the expected outputs of ONNX's cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper
from singa_backend.plans.fusion.view import RegionView
from singa_backend.plans.region import region_of

from singa_backend.conform import cases
from singa_backend.ir.declaration import declarations
from singa_backend.ir.reader import read
from singa_backend.passes.model import ModelEditor
from singa_backend.passes.rewriter import ModelRewriter

NAMES: dict[str, Callable[[int, int, int], Any]] = {
    "numbers": lambda i, axis, size: size,
    "a name for each size": lambda i, axis, size: f"{i}.{axis}",
    "a name for equal sizes": lambda i, axis, size: f"n{size}",
    "numbers and unknown sizes": lambda i, axis, size: size if (i + axis) % 2 else None,
}
"""How the sizes of the inputs are known."""


@cache
def node_cases() -> list[cases.Case]:
    return cases.load(["node"])


def with_constants(case: cases.Case, constants: bool) -> tuple[ModelProto, list[Any], list[Any]] | None:
    """The model, its inputs and outputs; with `constants`, inputs that are lists of integers are initializers."""
    proto, (inputs, outputs) = ModelProto.FromString(case.model), case.data[0]
    kept = []
    inputs = [np.asarray(x) if isinstance(x, np.generic) else x for x in inputs]
    for info, value in zip(list(proto.graph.input), inputs, strict=False):
        if not isinstance(value, np.ndarray) or not info.type.HasField("tensor_type"):
            return None
        if constants and value.dtype == np.int64 and value.ndim <= 1 and proto.ir_version >= 4:
            proto.graph.initializer.append(numpy_helper.from_array(value, info.name))
            proto.graph.input.remove(info)
        else:
            kept.append(value)
    return proto, kept, outputs


def problems(shape: Sequence[Any] | None, output: Any, sizes: dict[str, int]) -> Iterator[str]:
    """The mistakes of an inferred shape of an output; `sizes` collects the size of each name."""
    if shape is None or not isinstance(output, np.ndarray):
        return
    if len(shape) != output.ndim:
        yield f"rank {len(shape)}, not {output.ndim}"
        return
    for inferred, size in zip(shape, output.shape, strict=True):
        if isinstance(inferred, int) and inferred != size:
            yield f"{tuple(shape)}, not {output.shape}"
        elif isinstance(inferred, str) and sizes.setdefault(inferred, size) != size:
            yield f"{inferred} is {size} and {sizes[inferred]}"


@pytest.mark.parametrize("constants", [False, True], ids=["inputs", "constants"])
@pytest.mark.parametrize("names", NAMES)
def test_no_rule_contradicts_an_expected_output_of_onnx(names: str, constants: bool) -> None:
    wrong, known = [], Counter[str]()
    for case in node_cases():
        found = with_constants(case, constants)
        if found is None:
            continue
        proto, inputs, outputs = found
        region = region_of(read(proto))
        known_as = [tuple(NAMES[names](i, axis, n) for axis, n in enumerate(x.shape)) for i, x in enumerate(inputs)]
        types = {v: (x.dtype, s) for v, x, s in zip(region.inputs, inputs, known_as, strict=True)}
        sizes = {
            f"={d}": n
            for x, s in zip(inputs, known_as, strict=True)
            for d, n in zip(s, x.shape, strict=True)
            if isinstance(d, str)
        }
        view = RegionView(region, types)
        for value, output in zip(region.outputs, outputs, strict=True):
            shape = view.shape(value)
            wrong += [f"{case.name}: {problem}" for problem in problems(shape, output, sizes)]
            if shape is not None and (call := view.producer(value)) is not None:
                known[call.operator] += 1
    assert not wrong, "\n".join(wrong)
    ruled = {name for (domain, name), d in declarations.items() if not domain and d[max(d)].shapes_rule is not None}
    assert len(known) > 100, known
    if constants:
        assert ruled <= set(known), f"rules that no case judges: {ruled - set(known)}"


@pytest.mark.parametrize("constants", [False, True], ids=["inputs", "constants"])
def test_models_know_what_onnx_and_the_rules_know(constants: bool) -> None:
    """A view of a model contradicts no expected output either, if the file leaves the sizes of its inputs open."""
    wrong, known = [], 0
    for case in node_cases():
        found = with_constants(case, constants)
        if found is None:
            continue
        proto, inputs, outputs = found
        for info in proto.graph.input:
            for axis, d in enumerate(info.type.tensor_type.shape.dim):
                d.dim_param = f"{info.name}.{axis}"
        for info in proto.graph.output:
            info.type.tensor_type.ClearField("shape")
        sizes = {f"{info.name}.{a}": n for info, x in zip(proto.graph.input, inputs, strict=True) for a, n in enumerate(x.shape)}
        editor = ModelEditor(proto)
        rewriter = ModelRewriter(editor, editor.main)
        for value, output in zip(editor.main.outputs, outputs, strict=True):
            shape = rewriter.shape(value)
            wrong += [f"{case.name}: {problem}" for problem in problems(shape, output, sizes)]
            known += shape is not None
    assert not wrong, "\n".join(wrong)
    assert known > 1000, known
