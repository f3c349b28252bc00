"""Operators that later opsets fused: the node itself where the opset has it, else what it is made of, equal in onnxruntime."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs, helper

from singa import sonnx, tensor
from singa._core.ops import op
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import UnsupportedModel
from singa_backend.proto.schemas import newest

F = np.float32
NEWEST = newest("")
ORT_NEWEST = 27
"""The newest opset that onnxruntime reads."""


def drawn(*shape: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * 2).astype(F)


X, ROWS, CHANNELS, IMAGE = drawn(3, 5), drawn(2, 3, 4), drawn(2, 4, 3), drawn(2, 3, 4, 4)
HEADS = tuple(drawn(2, 2, 3, 4, seed=i) for i in range(3))
SCORES, LABELS = drawn(4, 3), np.array([0, 2, 1, 1])

FUSED: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    # name: (the opset that brought the operator, how it is written, inputs)
    "Mod": (10, op.Mod, (np.array([-7, 7, -1]), np.array([3, 3, 3]))),
    "Range": (11, lambda a, b: op.Range(a, b, 2.0), (np.array(-1, F), np.array(6, F))),
    "Round": (11, op.Round, (X,)),
    "CumSum": (11, lambda x: op.CumSum(x, 1), (X,)),
    "Celu": (12, lambda x: op.Celu(x, alpha=0.5), (X,)),
    "Einsum": (12, lambda a, b: op.Einsum(a, b, equation="ij,kj->ik"), (X, drawn(2, 5))),
    "GreaterOrEqual": (12, op.GreaterOrEqual, (X, drawn(5, seed=1))),
    "LessOrEqual": (12, op.LessOrEqual, (X, drawn(5, seed=1))),
    "NegativeLogLikelihoodLoss": (12, op.NegativeLogLikelihoodLoss, (SCORES, LABELS)),
    "SoftmaxCrossEntropyLoss": (12, op.SoftmaxCrossEntropyLoss, (SCORES, LABELS)),
    "HardSwish": (14, op.HardSwish, (X,)),
    "Trilu": (14, op.Trilu, (X,)),
    "CastLike": (15, op.CastLike, (X, np.array(1))),
    "LayerNormalization": (17, lambda x, s, b: op.LayerNormalization(x, s, b), (ROWS, drawn(4), drawn(4, seed=1))),
    "CenterCropPad": (18, lambda x: op.CenterCropPad(x, [3, 6], axes=[1, 2]), (IMAGE,)),
    "Mish": (18, op.Mish, (X,)),
    "Gelu": (20, op.Gelu, (X,)),
    "Gelu by tanh": (20, lambda x: op.Gelu(x, approximate="tanh"), (X,)),
    "GroupNormalization": (21, lambda x, s, b: op.GroupNormalization(x, s, b, num_groups=2),
                           (CHANNELS, drawn(4), drawn(4, seed=1))),
    "Attention": (23, lambda q, k, v: op.Attention(q, k, v, is_causal=1), HEADS),
    "RMSNormalization": (23, op.RMSNormalization, (ROWS, drawn(4))),
    "RotaryEmbedding": (23, op.RotaryEmbedding, (HEADS[0], drawn(2, 3, 2), drawn(2, 3, 2, seed=1))),
    "Swish": (24, lambda x: op.Swish(x, alpha=1.5), (X,)),
    "ThresholdedRelu": (10, lambda x: op.ThresholdedRelu(x, alpha=0.5), (X,)),
    "MeanVarianceNormalization": (9, op.MeanVarianceNormalization, (IMAGE,)),
}  # fmt: skip

MAY_BE_REFUSED = {"Mod", "Round", "CumSum", "Einsum", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "Trilu"}
"""What opset 9 may have no words for: then the error names the least opset that has, and there it is written."""

NO_KERNEL = {"Swish"}
"""Operators of the newest opsets that onnxruntime does not have yet: SingaRep stands in."""


def answer(oracle: Oracle, proto: onnx.ModelProto, arrays: dict[str, Any]) -> Any:
    """The outputs of onnxruntime; SingaRep where it reads neither the opset nor the operator."""
    opset = proto.opset_import[0].version
    kinds = {n.op_type for n in proto.graph.node}
    if any(defs.get_schema(k, opset).since_version > ORT_NEWEST for k in kinds) or kinds & NO_KERNEL:
        return sonnx.prepare(proto).run(arrays)[0]
    proto.opset_import[0].version = min(opset, ORT_NEWEST)
    proto.ir_version = helper.find_min_ir_version_for(proto.opset_import)
    return next(iter(oracle.run(proto.SerializeToString(), arrays).values()))


@pytest.mark.row("E20")
@pytest.mark.parametrize("opset", [9, 17, 20, NEWEST])
@pytest.mark.parametrize("name", FUSED)
def test_native_where_the_opset_has_it_and_split_below(name: str, opset: int, oracle: Oracle) -> None:
    since, write, arrays = FUSED[name]
    xs = [tensor.from_numpy(a) for a in arrays]
    for i, x in enumerate(xs):
        x.name = f"x{i}"
    y = write(*xs)
    try:
        proto = sonnx.to_onnx(xs, [y], opset=opset)
    except UnsupportedModel as refusal:
        least = re.search(r"the minimum opset is (\d+)", str(refusal))
        assert name in MAY_BE_REFUSED and least and opset < int(least[1]) <= since, refusal
        opset = int(least[1])
        proto = sonnx.to_onnx(xs, [y], opset=opset)
    kinds = [n.op_type for n in proto.graph.node if n.op_type != "Constant"]
    if opset >= since:
        assert kinds == [name.split()[0]]
    else:
        assert name.split()[0] not in kinds and {n.domain for n in proto.graph.node} == {""}
    found = answer(oracle, proto, {x.name: a for x, a in zip(xs, arrays, strict=True)})
    assert found.dtype == y.data.dtype
    np.testing.assert_allclose(found, y.data, rtol=1e-5, atol=1e-6)


@pytest.mark.row("E20")
def test_the_opsets_are_onnxs_own() -> None:
    for name, (since, _, _) in FUSED.items():
        versions = [s.since_version for s in defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", name.split()[0])]
        there = [v for v in versions if not defs.get_schema(name.split()[0], v).deprecated]
        assert min(there) == since, name


@pytest.mark.parametrize("opset", [9, NEWEST])
def test_a_mean_far_from_zero_costs_no_digits(opset: int, oracle: Oracle) -> None:
    """ONNX's body for it takes the mean of the squares less the square of the mean: of 1000 ± 1 nothing would be left."""
    values = (1000 + drawn(4, 64)).astype(F)
    x, scale = tensor.from_numpy(values), tensor.from_numpy(np.ones(64, F))
    x.name = "x"
    proto = sonnx.to_onnx([x], [op.LayerNormalization(x, scale)], opset=opset)
    wide = values.astype(np.float64)
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(answer(oracle, proto, {"x": values}), want, atol=2e-4)
