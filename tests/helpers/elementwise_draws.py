"""Draws nodes of elementwise operators and of their neighbours, such as rows, from the recipes of the project."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

import singa_backend.operators  # noqa: F401  # declares ONNX's operators
from singa_backend.conform.fuzz import recipes
from singa_backend.conform.fuzz.generate import allowed_types, draw_opset
from singa_backend.conform.fuzz.strategies import Draw, Skip
from singa_backend.domains import load_domain
from singa_backend.ir.declaration import declarations, has_trait
from singa_backend.proto.schemas import LAX, MICROSOFT, schemas

load_domain(MICROSOFT)
TRAINING = "ai.onnx.preview.training"
Key = tuple[str, str]

FURTHER: list[Key] = [
    *((TRAINING, name) for name in ("Adagrad", "Adam", "Momentum")),
    *(("", name) for name in (
        "BitCast", "DynamicQuantizeLinear", "Dropout", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool",
        "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization",
        "QuantizeLinear", "RMSNormalization", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax",
        "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Softmax", "SwiGLU",
    )),
    *((MICROSOFT, name) for name in (
        "BiasAdd", "BiasGelu", "DequantizeLinear", "FastGelu", "QLinearAdd", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid",
        "QOrderedGelu", "QOrderedLayerNormalization", "QuantizeLinear", "ScaledSiLU", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    )),
]  # fmt: skip
"""What the trait of an elementwise operator does not name: optimizers, several inputs with rules of their own, rows, numbers of
other types."""

NATIVE = [np.dtype(c) for c in "?bBhHiIlLefd"]


class Special(Draw):
    """Draws special values for half of the elements of a tensor of floats that may have them."""

    def _floats(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> np.ndarray:
        x = super()._floats(dtype, shape, kind)
        if kind not in ("any", "small"):
            return x
        info = np.finfo(dtype)
        tiny = [info.smallest_subnormal, 3 * info.smallest_subnormal, -info.smallest_subnormal, info.tiny, -info.tiny, info.eps]
        large = [info.max, -info.max, 1e4, -1e4, 88.5, -103.5, 20, -20, 3, -3]
        values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, *tiny, *large], dtype)
        return np.where(self.rng.random(shape) < 0.5, self.rng.choice(values, shape), x)


def elementwise() -> list[Key]:
    """The operators that are elementwise by their newest declaration."""
    domains = ("", MICROSOFT, LAX, TRAINING)
    return sorted(
        key for key in declarations if key[0] in domains and (has_trait(*key, "unary") or has_trait(*key, "broadcasting"))
    )


def combinations(key: Key, version: int) -> list[dict[str, np.dtype[Any]]]:
    """The types of a version that NumPy has; of many combinations each type of each parameter at least once."""
    allowed = {p: [d for d in found if d in NATIVE] for p, found in allowed_types(schemas[key][version]).items()}
    if np.prod([len(found) for found in allowed.values()]) <= len(NATIVE) ** 2:
        return [dict(zip(allowed, types, strict=True)) for types in product(*allowed.values())]
    return [{p: found[(i + j) % len(found)] for j, (p, found) in enumerate(allowed.items())} for i in range(len(NATIVE))]


def draws(key: Key, version: int, types: dict[str, np.dtype[Any]], count: int, kind: type[Draw] = Special) -> Iterator[Draw]:
    """So many nodes of these types."""
    rng = np.random.default_rng([version, *key[1].encode(), *"".join(d.char for d in types.values()).encode()])
    found = 0
    for _ in range(10 * count):
        d = kind(rng, schemas[key][version], draw_opset(rng, *key, version), types)
        try:
            recipes.recipe_of(*key)(d)
        except Skip:
            continue
        yield d
        if (found := found + 1) == count:
            return
