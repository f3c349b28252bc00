"""Compares runs of plans with the definitions, for the tests of kernels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from singa_backend.backend import SingaBackend, SingaRep
from singa_backend.kernels.table import Options


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    opset: int = 24,
) -> onnx.ModelProto:
    """A model with these nodes; inputs have the shapes and dtypes of the arrays, outputs are of any float32 shape."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()],
        [helper.make_value_info(n, onnx.TypeProto()) for n in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    kinds = onnx.shape_inference.infer_shapes(model)
    found = {v.name: v for v in kinds.graph.output}
    for o in model.graph.output:
        o.type.CopyFrom(found[o.name].type)
        if o.type.tensor_type.HasField("shape"):
            o.type.tensor_type.ClearField("shape")
    return model


def kernels_used(rep: SingaRep) -> list[str]:
    """The kernel of each step of the only plan; none if all inputs had to be computed by the definitions."""
    assert rep._session._planner is not None and len(rep._session._planner.plans) <= 1
    return [step.kernel for plan in rep._session._planner.plans.values() for segment in plan.segments for step in segment.steps]


def check(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, np.ndarray]],
    *,
    options: Options | None = None,
    tolerance: float = 1e-5,
) -> list[str]:
    """Run a model by a plan and by the definitions on each feed, twice each; return the kernels of the plan.

    The first run is the trace; later ones run what was bound.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = SingaBackend.prepare(model)
        graph, device = truth.graph, truth.device
        exact, planned = (
            SingaRep(graph, device, options=Options(level=0)),
            SingaRep(graph, device, options=options or Options(threads=2)),
        )
        for feed in (*feeds, feeds[0]):
            values = list(feed.values())
            wanted, got = exact.run(values), planned.run(values)
            for w, g in zip(wanted, got, strict=True):
                same(g, w, tolerance)
    return kernels_used(planned)


def same(got: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    """Require equal shape and dtype, NaN and infinities at equal places, and values within a fraction of the largest."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if wanted.dtype.kind != "f":
        np.testing.assert_array_equal(got, wanted)
        return
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    if finite.any():
        largest = float(np.abs(wanted[finite]).max())
        assert float(np.abs(got[finite] - wanted[finite]).max()) <= tolerance * max(largest, 1e-30)


def drawn(seed: int, **shapes: Sequence[int]) -> dict[str, np.ndarray]:
    """Standard normal float32 arrays."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(tuple(s)).astype(np.float32) for n, s in shapes.items()}
