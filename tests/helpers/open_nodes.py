"""The cases of ONNX's suite of nodes, with inputs of open sizes: plans are bound to the sizes of a case and to others.

    python -m tests.helpers.open_nodes

runs all of them; the tests run a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from onnx import ModelProto
from onnx.backend.test.case.node import collect_testcases

from singa_backend import SingaBackend
from singa_backend.errors import SonnxError

RANDOM = ("bernoulli", "random", "multinomial", "dropout")
"""Parts of the names of cases whose results are drawn."""

MOST = 1 << 20
"""The highest number of elements of all inputs."""


@cache
def open_cases() -> list[tuple[str, ModelProto, list[np.ndarray]]]:
    """The cases whose inputs are tensors: their names, the models without sizes, and the inputs."""
    made = []
    for case in sorted(collect_testcases(None), key=lambda c: str(c.name)):
        if case.model is None or not case.data_sets or any(word in case.name for word in RANDOM):
            continue
        inputs, model = list(case.data_sets[0][0]), ModelProto()
        model.CopyFrom(case.model)
        values = model.graph.input
        if inputs and all(isinstance(x, np.ndarray) for x in inputs) and all(v.type.HasField("tensor_type") for v in values):
            for v in values:
                for d in v.type.tensor_type.shape.dim:
                    d.Clear()
            for v in model.graph.output:
                v.type.ClearField("tensor_type") if v.type.HasField("tensor_type") else None
            made.append((case.name, model, inputs))
    return made


def variants(inputs: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The inputs, and others: all of them, or the first one, twice as long along an axis."""
    yield inputs
    for axis in range(3):
        longer = [np.concatenate([x, x], axis) if x.ndim > axis else x for x in inputs]
        if any(x.ndim > axis for x in inputs):
            yield longer
        if len(inputs) > 1 and inputs[0].ndim > axis:
            yield [longer[0], *inputs[1:]]


def open_difference(model: ModelProto, inputs: list[np.ndarray]) -> str:
    """How plans differ from the definitions in some sizes, in two rounds; empty if they agree."""
    try:
        plans, definitions = SingaBackend.prepare(model, threads=1), SingaBackend.prepare(model, optimize=0)
    except SonnxError:
        return ""
    for _ in range(2):
        for given in variants(inputs):
            if sum(x.size for x in given) <= MOST:
                found, expected = (_answer(rep, given) for rep in (plans, definitions))
                if not _alike(found, expected):
                    return f"{[x.shape for x in given]}: {found!r:.300} in place of {expected!r:.300}"
    return ""


def _answer(rep: Any, inputs: list[np.ndarray]) -> Any:
    try:
        return list(rep.run(inputs))
    except SonnxError as error:
        return error.code


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return bool(found == expected)
    return all(map(_same, found, expected))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return type(a) is type(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind in "biuO":
        return a.tolist() == b.tolist()
    wide = [v if v.dtype.kind in "fc" else v.astype(np.float32) for v in (a, b)]
    return np.allclose(*wide, rtol=1e-3, atol=1e-4, equal_nan=True)


def main() -> None:
    """Compare all cases."""
    failed = 0
    for name, model, inputs in open_cases():
        if reason := open_difference(model, inputs):
            failed += 1
            print(name, reason, flush=True)
    print(f"{len(open_cases())} cases, {failed} differ")


if __name__ == "__main__":
    main()
