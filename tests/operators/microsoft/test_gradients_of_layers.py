"""Gradients of onnxruntime's norms, gates, recurrences and experts, against differences of their definitions in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from singa_backend.conform import gradients
from singa_backend.proto.schemas import LAX, MICROSOFT, load_domain, newest

load_domain(MICROSOFT)

NAMES = [
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "EmbedLayerNormalization",
    "BiasSoftmax",
    "GemmFastGelu",
    "GroupNorm",
    "SkipGroupNorm",
    "BiasSplitGelu",
    "BiasAdd",
    "SwiGLU",
    "ScaledSiLU",
    "GatedRMSNorm",
    "BranchwiseRMSNorm",
    "GatedAdd",
    "EngramGate",
    "HyperConnectionPreMix",
    "HyperConnectionPostMix",
    "HyperConnectionLowRankMix",
    "LinearAttentionGate",
    "LinearAttention",
    "GatedDeltaNet",
    "CausalConvWithState",
    "VarlenCausalConvWithState",
    "AttnLSTM",
    "MoE",
    "MoEGroupRouter",
]
EARLY = [
    "Crop",
    "DynamicSlice",
    "ImageScaler",
    "LayerNormalization",
    "ParametricSoftplus",
    "ScaledTanh",
    "SimplifiedLayerNormalization",
]


@pytest.mark.parametrize("key", [*((MICROSOFT, n) for n in NAMES), *((LAX, n) for n in EARLY)], ids=lambda k: k[1])
def test_the_gradient_is_that_of_differences(key: tuple[str, str]) -> None:
    agreed = 0
    for i, point in enumerate(gradients.points(*key, 1, seed=3, count=3)):
        found = gradients.judge(replace(point, opset=newest("")), np.random.default_rng(i))
        assert all(f.verdict in ("agree", "kink") for f in found), [(point.case.describe(), f) for f in found]
        agreed += sum(f.verdict == "agree" for f in found)
    assert agreed
