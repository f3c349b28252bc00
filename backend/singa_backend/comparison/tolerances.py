"""The registry of tolerances: by operator, and by use and dtype, each with its reason; everything that compares values reads it.

An operator's rule bounds the error of one node alone, in steps of the dtype.  A use (a command or a function) has a bound for
each dtype, for values whose errors may come from many nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import dtypes
from ..choices import CASE_ATOL, CASE_RTOL


@dataclass(frozen=True)
class Allowance:
    """The error that one node of some operators may have, compared with another correct implementation.

    Attributes:
        operators: their names; those of other domains than ai.onnx begin with the domain.
        reason: why this error is allowed.
        ulps: allowed steps of the expected value.
        norm: allowed steps of the largest summand, which is bounded by the product of the inputs' largest values, each to the
            `power`.
        power: see `norm`.
        steps: the allowed difference of integers (if they are rounded from reals).
        single: a part of the operator computes in float32 whatever the dtype, so that a step is at least float32's.
    """

    operators: tuple[str, ...]
    reason: str
    ulps: float = 0.0
    norm: float = 0.0
    power: int = 1
    steps: int = 0
    single: bool = False


@dataclass(frozen=True)
class ErrorBound:
    """An allowed error.

    Attributes:
        rtol: the relative part.
        reason: why this error is allowed.
        atol: the absolute part; None if it depends on the value.
    """

    rtol: float
    reason: str
    atol: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the bound as plain data.

        Returns:
            A dict of the attributes.
        """
        return dict(vars(self))


NARROW = "narrower floats"
"""The key of floats that a use does not name."""

OTHERS = "all other types"
"""The key of integers, bools and strings."""

EQUAL = ErrorBound(0.0, "they must be equal: a difference of 1 is a whole unit for the nodes that follow", 0.0)


@dataclass(frozen=True)
class ToleranceUse:
    """A place that compares values, with its tolerances by dtype.

    Attributes:
        where: the commands and functions.
        formula: what the tolerances are relative to.
        bounds: by NumPy's name of the dtype, `NARROW` or `OTHERS`.
    """

    where: str
    formula: str
    bounds: Mapping[str, ErrorBound] = field(default_factory=dict)

    def bound(self, dtype: np.dtype[Any]) -> ErrorBound:
        """Return the tolerance of a dtype.

        Args:
            dtype: of the expected value.

        Returns:
            The bound; `EQUAL` if the use has none.
        """
        floating = dtypes.is_float(dtype) or dtype.kind == "c"
        return self.bounds.get(dtype.name) or self.bounds.get(NARROW if floating else OTHERS, EQUAL)

    def rows(self) -> list[tuple[list[str], ErrorBound]]:
        """Return the bounds and the dtypes that have each.

        Returns:
            Pairs in the order of `bounds`.
        """
        found: dict[ErrorBound, list[str]] = {}
        for name, bound in self.bounds.items():
            found.setdefault(bound, []).append(name)
        return [(names, bound) for bound, names in found.items()]


RULES: tuple[Allowance, ...] = (
    Allowance(("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Exp", "Log", "Sin", "Sinh", "Tan", "Tanh"),
              "libraries compute elementary functions to a few ulps; near a zero the digits of the argument are lost", 8, 4),
    Allowance(("Celu", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Mish", "Pow", "Reciprocal", "Selu", "Sigmoid",
               "Softplus", "Softsign", "SwiGLU", "Swish"),
              "chains of elementary functions, rounded once or at each step; cancellation in the tails", 16, 8),
    Allowance(("Add", "Div", "LeakyRelu", "Mod", "Mul", "PRelu", "Shrink", "Sqrt", "Sub"),
              "IEEE 754 rounds each correctly; one step if an engine fuses operations", 1),
    Allowance(("LogSoftmax", "Softmax"), "an exponential, a sum and a division; some engines round each step in halves", 16, 16),
    Allowance(("AveragePool", "CumSum", "GlobalAveragePool", "Mean", "ReduceL1", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean",
               "ReduceSum", "Sum"),
              "the order of a sum is free", 8, 16),
    Allowance(("GlobalLpPool", "LpNormalization", "LpPool", "ReduceL2", "ReduceSumSquare"),
              "sums of squares in any order, and a root", 16, 16, 2),
    Allowance(("CumProd", "ReduceProd"), "the order of a product is free: one step per factor", 64),
    Allowance(("CausalConvWithState", "Col2Im", "Conv", "ConvTranspose", "DFT", "DeformConv", "Einsum", "Gemm", "MatMul", "STFT"),
              "sums of products in any order; transforms by different algorithms", 16, 64),
    Allowance(("Det",), "elimination with or without pivots", 64, 512),
    Allowance(("GroupNormalization", "LayerNormalization", "RMSNormalization"),
              "as BatchNormalization, with the statistics in float32 (stash_type)", 64, 512, single=True),
    Allowance(("BatchNormalization", "InstanceNormalization", "MeanVarianceNormalization"),
              "a mean, a variance and a root; a small variance magnifies their rounding", 64, 512),
    Allowance(("LRN",), "a sum of squares and a power", 64, 32),
    Allowance(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), "a logarithm and a mean, summed in any order", 32, 64),
    Allowance(("Attention", "LinearAttention", "RotaryEmbedding", "ai.onnx.preview.FlexAttention"),
              "two products and a softmax, summed in any order; the scale and the softcap are float32", 64, 128, single=True),
    Allowance(("GRU", "LSTM", "RNN"), "each time step adds the error of its activations", 64, 512),
    Allowance(("AffineGrid", "GridSample", "MaxRoiPool", "Resize", "RoiAlign", "Upsample"),
              "float32 coordinates are computed in any order, and are the weights of the interpolation",
              64, 512, steps=1, single=True),
    Allowance(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "Range"),
              "computed in float32 or float64 whatever the dtype; integers are truncated", 16, 16, steps=1, single=True),
    Allowance(("DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear"),
              "a real is rounded to an integer: at a half, the last bit of the real decides", 2, 2, 1, 1),
    Allowance(("DequantizeLinear",), "one product", 1),
    Allowance(("ai.onnx.preview.training.Adagrad", "ai.onnx.preview.training.Adam", "ai.onnx.preview.training.Momentum"),
              "a few products, sums and a root", 32, 32, 2),
    Allowance(("TfIdfVectorizer", "ai.onnx.ml.LinearClassifier", "ai.onnx.ml.LinearRegressor", "ai.onnx.ml.Normalizer",
               "ai.onnx.ml.SVMClassifier", "ai.onnx.ml.SVMRegressor", "ai.onnx.ml.Scaler", "ai.onnx.ml.TreeEnsemble",
               "ai.onnx.ml.TreeEnsembleClassifier", "ai.onnx.ml.TreeEnsembleRegressor"),
              "float32 sums in any order, and a post-transform", 64, 64),
    Allowance(("Cast", "CastLike", "Ceil", "Floor", "Round"), "ONNX defines the rounding to the bit"),
    Allowance(("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
              "random values: engines draw other numbers, and none are compared; `fuzz` tests their properties"),
    Allowance(("If", "Loop", "Scan", "SequenceMap", "ai.onnx.preview.training.Gradient"),
              "they run other operators, and round nothing themselves"),
    Allowance(("Abs", "And", "ArgMax", "ArgMin", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
               "CenterCropPad", "Clip", "Compress", "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "ConvInteger",
               "DepthToSpace", "Dropout", "Equal", "Expand", "EyeLike", "Flatten", "Gather", "GatherElements", "GatherND",
               "GlobalMaxPool", "Greater", "GreaterOrEqual", "Hardmax", "Identity", "ImageDecoder", "IsInf", "IsNaN", "Less",
               "LessOrEqual", "MatMulInteger", "Max", "MaxPool", "MaxUnpool", "Min", "Neg", "NonMaxSuppression", "NonZero", "Not",
               "OneHot", "Optional", "OptionalGetElement", "OptionalHasElement", "Or", "Pad", "ReduceMax", "ReduceMin",
               "RegexFullMatch", "Relu", "Reshape", "ReverseSequence", "Scatter", "ScatterElements", "ScatterND", "SequenceAt",
               "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "Shape", "Sign", "Size",
               "Slice", "SpaceToDepth", "Split", "SplitToSequence", "Squeeze", "StringConcat", "StringNormalizer", "StringSplit",
               "TensorScatter", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where", "Xor",
               "ai.onnx.ml.ArrayFeatureExtractor", "ai.onnx.ml.Binarizer", "ai.onnx.ml.CastMap", "ai.onnx.ml.CategoryMapper",
               "ai.onnx.ml.DictVectorizer", "ai.onnx.ml.FeatureVectorizer", "ai.onnx.ml.Imputer", "ai.onnx.ml.LabelEncoder",
               "ai.onnx.ml.OneHotEncoder", "ai.onnx.ml.ZipMap"),
              "these operators move, select or compare values, or compute on integers, without rounding"),
)  # fmt: skip
"""The rules of ONNX's operators; each operator is in one of them."""

_MICROSOFT_FLOAT = (
    Allowance(("FastGelu",), "onnxruntime's constants are of float32 for doubles too", 16, 64, single=True),
    Allowance(("Gelu", "BiasGelu", "QuickGelu", "ParametricSoftplus", "ScaledTanh"),
              "chains of elementary functions, which onnxruntime approximates in float32", 16, 64),
    Allowance(("Affine", "ImageScaler", "Scale"), "a product and a sum, which onnxruntime may fuse", 2, 2),
    Allowance(("GroupNorm", "SkipGroupNorm", "BiasSplitGelu", "BiasAdd", "GemmFastGelu", "BiasSoftmax", "BiasDropout",
               "BitmaskDropout", "BitmaskBiasDropout"),
              "no kernel of onnxruntime for the CPU: the body, which rounds at other places", 16, 16),
    Allowance(("CausalConvWithState", "VarlenCausalConvWithState"), "a sum of products in any order, and an exponential", 16, 16),
    Allowance(("AttnLSTM", "GatedDeltaNet", "LinearAttention"),
              "each token adds the error of its products, summed in any order", 64, 64),
    Allowance(("MoE", "MoEGroupRouter"), "sums of products in any order, and approximations of exponentials", 16, 64),
    Allowance(("QOrderedGelu", "QOrderedLayerNormalization"), "a value between two steps may be rounded to either", steps=1),
    Allowance(("LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
               "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization"),
              "a mean and a mean square of float32, summed in any order; halves may be rounded after each stage", 16, 16,
              single=True),
    Allowance(("QEmbedLayerNormalization",),
              "as EmbedLayerNormalization; the summands are up to 255 times the scales, which are the float inputs", 16, 4096),
    Allowance(("SwiGLU", "ScaledSiLU", "GatedRMSNorm", "GatedAdd", "EngramGate", "LinearAttentionGate", "RouterGateUpProj",
               "BranchwiseRMSNorm", "HyperConnectionPreMix", "HyperConnectionPostMix", "HyperConnectionLowRankMix"),
              "chains of elementary functions and sums in any order; halves may be rounded after each stage", 16, 16),
)  # fmt: skip

_MICROSOFT_ATTENTION = (
    Allowance(("RotaryEmbedding", "MRotaryEmbedding", "GemmaRotaryEmbedding"),
              "a sum of two products, which may be fused; halves are rounded after each step or once", 4, 4),
    Allowance(("GatedRelativePositionBias",), "sums of products in any order, and a sigmoid", 32, 64),
    Allowance(("RelativePositionBias", "RemovePadding", "RestorePadding"), "these operators move values"),
    Allowance(("GroupQueryAttention",),
              "two products and a softmax, summed in any order; a real in a quantized cache is rounded to an integer",
              16, 32, steps=1, single=True),
    Allowance(("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "Attention", "QAttention",
               "SparseAttention", "PackedAttention", "PackedMultiHeadAttention"),
              "two products and a softmax, summed in any order", 16, 32, single=True),
)  # fmt: skip

_MICROSOFT_FEW_BITS = (
    Allowance(("MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight", "MatMulBnb4", "MatMulFpQ4", "MatMulNBits",
               "MatMulNBitsMlp", "MatMulNBitsQLoRA", "MatMulNBitsQkv"),
              "sums of products in any order; weights are rounded to the dtype, or not", 16, 64, single=True),
    Allowance(("DequantizeLinear", "GatherBlockQuantized"), "one product", 1),
    Allowance(("QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv", "QLinearGlobalAveragePool",
               "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
               "QuantizeLinear"),
              "a real is rounded to an integer: at a half, the last bit of the real decides", 4, 4, 1, 1),
    Allowance(("DynamicQuantizeMatMul", "MatMulIntegerToFloat"), "exact sums, two products and a sum", 4, 16, 2),
    Allowance(("QMoE",), "a softmax, and two products with an activation between, which onnxruntime approximates", 64, 256,
              single=True),
    Allowance(("DynamicQuantizeLSTM",), "each time step adds the error of its activations", 64, 512),
    Allowance(("MatMulInteger16", "MulInteger", "NhwcMaxPool", "ReduceSumInteger"), "integers, without rounding"),
)  # fmt: skip

_MICROSOFT_OTHER: tuple[Allowance, ...] = (
    Allowance(("ComplexMul", "ComplexMulConj", "ConvTransposeWithDynamicPads", "FusedConv", "FusedGemm", "FusedMatMul",
               "FusedMatMulActivation", "NhwcConv", "NhwcFusedConv", "SparseToDenseMatMul", "TransposeMatMul"),
              "sums of products in any order, and an activation that onnxruntime approximates in float32", 16, 64),
    Allowance(("CDist",), "onnxruntime computes |a|^2 - 2ab + |b|^2, which cancels for close points, and a root", 16, 64, 2),
    Allowance(("CropAndResize", "GridSample"), "coordinates, computed in any order, are the weights of the interpolation",
              64, 512, single=True),
    Allowance(("WordConvEmbedding",), "sums of products in any order, and a tanh that is approximated in float32", 16, 64),
    Allowance(("Rfft", "Irfft"), "transforms by different algorithms", 16, 64),
    Allowance(("BeamSearch", "WhisperBeamSearch"), "sums of log-probabilities from products that are added in any order", 16, 64),
    Allowance(("BifurcationDetector", "DynamicTimeWarping", "ExpandDims", "GatherND", "GatherPacked", "GreedySearch",
               "IsAllFinite", "MaxpoolWithMask", "MurmurHash3", "NGramHashMapping", "NGramRepeatBlock", "Pad", "Range",
               "SampleOp", "Sampling", "Tokenizer", "TorchEmbedding", "Trilu", "UnfoldTensor", "Unique",
               "VarlenNGramHashMapping"),
              "these operators move, select, number or compare values, or compute on integers, without rounding"),
    Allowance(("Inverse",), "elimination with or without pivots; onnxruntime has it in float16 too", 64, 64),
)  # fmt: skip

MICROSOFT_RULES = (*_MICROSOFT_FLOAT, *_MICROSOFT_ATTENTION, *_MICROSOFT_FEW_BITS, *_MICROSOFT_OTHER)
"""The rules of onnxruntime's own operators, those of com.microsoft by their names without the domain."""

UNLISTED = Allowance((), "an operator of another domain: its definition decides, to the bit")
"""The rule of operators that no rule names."""

_BY_NAME = {name: one for one in RULES for name in one.operators}
_BY_NAME |= {f"com.microsoft.{name}": one for one in MICROSOFT_RULES for name in one.operators}


def qualified(domain: str, operator: str) -> str:
    """Return an operator's name in the registry.

    Args:
        domain: its domain; "" or "ai.onnx" for ONNX's own.
        operator: its type.

    Returns:
        "Softmax", or "ai.onnx.ml.Scaler"; what onnxruntime reads in ONNX's domain is listed with com.microsoft.
    """
    return operator if domain in ("", "ai.onnx") else f"{domain.replace(' of onnxruntime', 'com.microsoft')}.{operator}"


def rule(domain: str, operator: str) -> Allowance:
    """Return the rule of an operator.

    Args:
        domain: its domain.
        operator: its type.

    Returns:
        The rule; `UNLISTED` if none names the operator.
    """
    return _BY_NAME.get(qualified(domain, operator), UNLISTED)


ADDS_UP = "the errors of all earlier nodes add up"
"""The start of the reason of tolerances that do not depend on the operator."""

_CASE = "ONNX's own tolerance of test cases; a case that defines one keeps it"
_FLOATS, _HALVES, _COMPLEX = ("float64", "float32"), ("float16", "bfloat16"), ("complex128", "complex64")

COMPARE = ToleranceUse(
    "`sonnx compare`, `bisect` and `reduce`; `singa_backend.debug`",
    "|mine - theirs| <= atol + rtol * |theirs|; atol is rtol times the median magnitude of the non-zero elements",
    {
        "float64": ErrorBound(1e-9, f"{ADDS_UP}: 4.5 million steps of float64"),
        "float32": ErrorBound(1e-4, f"{ADDS_UP}: 840 steps of float32"),
        "float16": ErrorBound(1e-2, f"{ADDS_UP}: 10 steps of float16; some engines round each operation, others the result"),
        "bfloat16": ErrorBound(5e-2, f"{ADDS_UP}: 6 steps of bfloat16; some engines round each operation, others the result"),
        "complex128": ErrorBound(1e-9, f"{ADDS_UP}: 4.5 million steps of float64"),
        "complex64": ErrorBound(1e-4, f"{ADDS_UP}: 840 steps of float32"),
        NARROW: ErrorBound(0.25, "one step of a float with two bits of mantissa"),
        OTHERS: EQUAL,
    },
)
"""Values of a whole model, node by node."""

EXPORT = ToleranceUse(
    "`sonnx.export_and_check`, `sonnx export --compare`",
    "|model - engine| <= atol + rtol * |model|",
    {
        "float64": ErrorBound(1e-8, f"{ADDS_UP}; attributes of the file are float32", 1e-10),
        "float32": ErrorBound(1e-4, f"{ADDS_UP}: 840 steps of float32", 1e-5),
        NARROW: ErrorBound(1e-2, "10 steps of float16: engines round halves at other places", 1e-3),
        OTHERS: EQUAL,
    },
)
"""Outputs of an exported model and of engines."""

IMPORT = ToleranceUse(
    "`sonnx.from_pytorch`, `from_tensorflow`, `from_paddle`, `from_sklearn`",
    "|ours - theirs| <= rtol * the largest |theirs|; the argument `tolerance` replaces 1e-4",
    {
        **dict.fromkeys((*_FLOATS, *_COMPLEX), ErrorBound(1e-4, "other kernels; some exporters write doubles as float32")),
        "float16": ErrorBound(1e-2, "10 steps of float16: the framework rounds at other places"),
        "bfloat16": ErrorBound(5e-2, "6 steps of bfloat16: the framework rounds at other places"),
        OTHERS: EQUAL,
    },
)
"""Outputs of an imported model and of its framework."""

CASES = ToleranceUse(
    "`sonnx conform`, `sonnx run --data` and `--against`, the pytest plugin",
    "|ours - expected| <= atol + rtol * |expected|",
    {
        **dict.fromkeys((*_FLOATS, "float16", *_COMPLEX), ErrorBound(CASE_RTOL, _CASE, CASE_ATOL)),
        "bfloat16": ErrorBound(2.0**-6, "two steps of bfloat16, if the case's own tolerance is lower", CASE_ATOL),
        NARROW: ErrorBound(0.0, "floats of 8 and fewer bits are stored, not computed: equal codes", 0.0),
        OTHERS: EQUAL,
    },
)
"""ONNX's test cases, and data sets next to a model, under the strict verdict."""

OPSETS = ToleranceUse(
    "`sonnx opsets`, a model at another opset against the model it was written from",
    "|ours - expected| <= rtol * (|expected| + the largest |expected|, at least 1)",
    {
        "float64": ErrorBound(1e-6, "attributes, and constants of function bodies, are float32"),
        "float32": ErrorBound(1e-4, "a composition of other operators rounds at other places"),
        "complex128": ErrorBound(1e-6, "attributes, and constants of function bodies, are float32"),
        "complex64": ErrorBound(1e-4, "a composition of other operators rounds at other places"),
        "float16": ErrorBound(1e-2, "a composition rounds after each operator: 10 steps of float16"),
        "bfloat16": ErrorBound(6e-2, "a composition rounds after each operator: 8 steps of bfloat16"),
        NARROW: ErrorBound(0.0, "these dtypes are only moved: equal", 0.0),
        OTHERS: EQUAL,
    },
)
"""Drawn models written at other opsets; ONNX's own cases have those of `CASES`."""

OPSETS_WITNESS = ToleranceUse(
    "`sonnx opsets`, onnxruntime as the second witness",
    "|theirs - expected| <= atol + rtol * |expected|",
    {
        **dict.fromkeys(
            (*_FLOATS, *_COMPLEX), ErrorBound(1e-3, "ONNX's own tolerance of test cases, for values near zero too", 1e-3)
        ),
        **dict.fromkeys(_HALVES, ErrorBound(1e-2, "onnxruntime rounds halves after each operator", 1e-2)),
        OTHERS: EQUAL,
    },
)
"""onnxruntime's outputs of a model written at another opset; one tolerance for all outputs of a model."""

GRADIENTS = ToleranceUse(
    "`sonnx gradients`, against differences",
    "|gradient - difference| <= rtol * the size of the gradient along a direction, at least 1e-3; in float32 at least 1e-2",
    {
        "float64": ErrorBound(1e-6, "fourth-order differences with steps of 1e-3 and 1e-4 have errors of about 1e-8"),
        "float32": ErrorBound(1e-3, "onnxruntime's operators without float64: only the differences are taken in float64"),
    },
)
"""A gradient rule and the slope of its operator."""

GRADIENTS_WITNESS = ToleranceUse(
    "`sonnx gradients`, onnxruntime as the second witness",
    "|ours - theirs| <= rtol * the largest |ours|, at least 1e-2",
    {"float32": ErrorBound(1e-3, "onnxruntime computes the graph in float32, this package in float64")},
)
"""A gradient in float64, and its graph in onnxruntime."""

GRADIENTS_GRAPH = ToleranceUse(
    "`sonnx gradients`, the tape against the graph",
    "|tape - graph| <= atol + rtol * |graph|",
    {"float64": ErrorBound(1e-9, "the same operators in the same dtype; sums of gradients may be in another order", 1e-12)},
)
"""A gradient computed by the tape, and by the graph."""

FOREIGN = ToleranceUse(
    "`sonnx foreign`, programs of `sonnx codegen --onnx`",
    "|ours - theirs| <= rtol * the largest |theirs|",
    {
        **dict.fromkeys((*_FLOATS, *_HALVES, *_COMPLEX, NARROW), ErrorBound(1e-4, f"{ADDS_UP}: 840 steps of float32")),
        OTHERS: EQUAL,
    },
)
"""Every value of models that other tools wrote, and onnxruntime's."""

DEVICE = ToleranceUse(
    "`sonnx device-check`, a device against the CPU; ONNX's cases have the tolerances of `CASES`",
    "|device - CPU| <= rtol * the largest |CPU|, at least 1e-3",
    {
        "float64": ErrorBound(
            1e-9, "sums in another order, and elementary functions of another library: 4.5 million steps of float64"
        ),
        "float32": ErrorBound(1e-5, "sums in another order, and elementary functions of another library: 84 steps of float32"),
        OTHERS: EQUAL,
    },
)
"""Gradients and training programs on a device, and the same on the CPU."""

DEVICE_LEAST = 1e-3
"""The lowest magnitude that the tolerances of `DEVICE` are relative to."""

USES = (
    COMPARE, EXPORT, IMPORT, CASES, OPSETS, OPSETS_WITNESS, GRADIENTS, GRADIENTS_WITNESS, GRADIENTS_GRAPH, FOREIGN, DEVICE,
)  # fmt: skip
"""All places that compare values."""

RANGES: Mapping[str, float] = {
    **dict.fromkeys(("Cos", "Erf", "HardSigmoid", "Sigmoid", "Sin", "Softmax", "Softsign", "Tanh"), 1.0),
    **dict.fromkeys(("Asin", "Atan"), math.pi / 2), "Acos": math.pi,
    **dict.fromkeys(("Gelu", "HardSwish", "Mish", "Softplus", "Swish"), 1.0),
    **dict.fromkeys((f"com.microsoft.{n}" for n in ("BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "QuickGelu")), 1.0),
}  # fmt: skip
"""The end of the range of operators that are bounded, or approach 0 on one side because one of their factors does.

Far from 0 an engine that computes a complement, clamps the argument or flushes tiny numbers has an error that is small in
relation to this end, not to the value.
"""

_IN_SINGLE = {"float64": "float32", "complex128": "complex64"}


def range_floor(dtype: np.dtype[Any], operators: Collection[str]) -> float:
    """Return the absolute error that is allowed near 0, because an operator's results have a bounded range.

    Args:
        dtype: of the value.
        operators: qualified names of the operators from which it has errors; those in `RANGES` count.

    Returns:
        The steps of the operator's rule, of the end of its range, at most the tolerance of `COMPARE` for a value of that
        magnitude; the maximum over the operators, 0 without any.
    """
    bounded = [n for n in operators if n in RANGES]
    if not bounded or not dtypes.is_float(dtype):
        return 0.0
    eps, most = float(dtypes.float_info(dtype).eps), COMPARE.bound(dtype).rtol
    return max(RANGES[n] * min(most, eps * (_BY_NAME[n].ulps + _BY_NAME[n].norm)) for n in bounded)


def narrowest(kinds: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype for whose values `COMPARE` allows most.

    Args:
        kinds: dtypes, at least one.

    Returns:
        One of them; of equal tolerances the last.
    """
    return max(reversed(list(kinds)), key=lambda d: COMPARE.bound(d).rtol)


def looser(operators: Collection[str]) -> frozenset[str]:
    """Select the operators after which `COMPARE` allows more than the dtype's tolerance.

    Args:
        operators: qualified names.

    Returns:
        Those that compute in float32 whatever the dtype.
    """
    return frozenset(name for name in operators if _BY_NAME.get(name, UNLISTED).single)


def in_model(dtype: np.dtype[Any], operators: Collection[str] = ()) -> ErrorBound:
    """Return the tolerance of a value of a model.

    Args:
        dtype: of the value.
        operators: qualified names of the operators from which it has errors; only those of `looser` count.

    Returns:
        The dtype's bound; that of float32 for a float64 value of an operator that computes in float32.
    """
    found = sorted(looser(operators)) if dtype.name in _IN_SINGLE else []
    if not found:
        return COMPARE.bound(dtype)
    rtol = COMPARE.bounds[_IN_SINGLE[dtype.name]].rtol
    return ErrorBound(rtol, f"{', '.join(found)} computes in float32: {_BY_NAME[found[0]].reason}")
