"""Attributes, inputs and shapes at the edges of int32 and int64: plans must agree with the definitions.

    python tests/hostile/edges.py --count 100000 --seed 1    # tox -e fuzz-edges
    python tests/hostile/edges.py --seed 1 --only 4711       # one case in this process, with its traceback

A case is a valid node (the recipes of `conform.fuzz`) of an operator with windows, axes, counts or sizes, with one to three
changes: numbers of a window that belong together, an attribute, elements of an input, the size of an axis.  It runs by the
definitions, of NumPy or of the device STRICT, and by plans; both must return equal results or raise errors with equal codes.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper
from workers import main

from singa_backend.conform.fuzz import generate
from singa_backend.conform.fuzz.generate import NodeCase

LIMITS: dict[str, Any] = {
    "tensor_bytes": 16 << 20, "live_bytes": 128 << 20, "executions": 10**5, "iterations": 10**4, "deadline": 60.0,
}  # fmt: skip
"""The limits of each run."""

ROUNDED = 2.0**10
"""Multiplies the tolerance where few-bit weights permit an input that is rounded to 8 or 16 bits, and where masks add -10000:
if they hide all keys, the scores keep 10 bits after the point."""

WIDE = LIMITS | {"tensor_bytes": 256 << 20, "live_bytes": 512 << 20}
"""Those of a definition that needs more memory than the plan, which ended within the limits."""

POWERS = [2**15, 2**16, 2**20, 2**24, 2**31, 2**32, 2**33, 2**62, 2**63 - 1]
LOW, HIGH = -(2**63), 2**63 - 1

SELECTIONS = [
    r"^(Conv|ConvTranspose|ConvInteger|QLinearConv|MaxPool|AveragePool|LpPool)-",
    r"^(Conv|ConvTranspose|ConvInteger|QLinearConv|DeformConv|Col2Im|MaxPool|AveragePool|LpPool|MaxUnpool|Global.*Pool|LRN|Resize"
    r"|Upsample|RoiAlign|MaxRoiPool|GridSample|AffineGrid|CausalConvWithState)-",
    r"^(Pad|Slice|Gather.*|Scatter.*|TensorScatter|OneHot|Compress|TopK|Arg.*|Unique|ArrayFeatureExtractor|Split.*|Concat|Reshape"
    r"|Flatten|Squeeze|Unsqueeze|Transpose|Expand|Tile|DepthToSpace|SpaceToDepth|CenterCropPad|ReverseSequence|Trilu|EyeLike"
    r"|ConstantOfShape|Range|NonMaxSuppression|Shape|BitShift|Cast)-",
    r"^(Softmax|LogSoftmax|Hardmax|Reduce.*|Cum.*|LpNormalization|.*Normalization|MatMul.*|QLinearMatMul|Gemm|Einsum|Attention"
    r"|RotaryEmbedding|LinearAttention|RNN|GRU|LSTM|DFT|STFT|.*Window|MelWeightMatrix|.*Loss|QuantizeLinear|DequantizeLinear"
    r"|TreeEnsemble.*|SVM.*|Random.*|Bernoulli|Multinomial|TfIdfVectorizer|Einsum|Det|Sequence.*)-",
    r"^com.microsoft:(Nhwc.*|FusedConv|ConvTransposeWithDynamicPads|QLinear.*|MaxpoolWithMask|Attention|QAttention|.*Conv.*|Crop.*"
    r"|Pad|Range|UnfoldTensor|MatMul.*|FusedMatMul|FusedGemm|QGemm|Skip.*|Group.*|DynamicQuantize.*|.*Embedding.*|Gather.*|Rfft|Irfft"
    r"|ExpandDims|Trilu|AttnLSTM|BifurcationDetector|NGram.*|TorchEmbedding|BiasSplitGelu|BiasSoftmax|CDist|RelativePositionBias"
    r"|.*MultiHeadAttention|SparseAttention|.*Padding|MoE.*|QMoE|QOrdered.*|Tokenizer|DynamicTimeWarping)-",
]
"""What a case selects, by its index: convolutions and pools most often."""


@dataclass
class Drawn:
    """A case: the node, the model, its inputs, and the changes in words."""

    case: NodeCase
    model: ModelProto
    feeds: dict[str, Any]
    text: str
    terms: int
    """How many times more terms the sums have than those of a recipe."""
    strict: bool
    """Whether the definition runs on the device STRICT."""


def edge(rng: random.Random) -> int:
    """A small number, or one next to a power of 2, of either sign."""
    turn = rng.random()
    if turn < 0.25:
        return rng.choice([0, 1, 2, 3, 4, 5, 7, -1, -2, -3])
    value = rng.choice(POWERS) + rng.choice([-1, 0, 0, 1, 1, 2, 3])
    return max(LOW, min(HIGH, -value if turn > 0.85 else value))


def draw(seed: int, index: int | str) -> Drawn | None:
    """The case, one of `NAMED` for a name; None if the operator has no valid node of the drawn types."""
    if isinstance(index, str):
        return named(*NAMED[index])
    turn, selection = divmod(index, len(SELECTIONS))
    case = generate.draw(seed, turn, SELECTIONS[selection])
    for again in range(1, 4):  # kernels take few dtypes
        if case is not None and (selection or case.inputs["x0"].dtype.name in ("float32", "int8", "uint8")):
            break
        case = generate.draw(seed, turn + again * 10**7, SELECTIONS[selection])
    if case is None:
        return None
    rng = random.Random(f"{seed} {index} edges")
    node = NodeProto.FromString(case.node.SerializeToString())
    inputs = {n: list(v) if isinstance(v, list) else v.copy() for n, v in case.inputs.items()}
    terms = rng.choice([1, 1, 8, 16, 32]) if not selection else 1
    words = [_widened(rng, case, inputs, terms)] if terms > 1 else []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice([_window, _window, _attribute, _input, _input, _size])
        words.append(change(rng, case, node, inputs) or _attribute(rng, case, node, inputs))
    constants = case.constants if rng.random() < 0.8 else frozenset(n for n in inputs if rng.random() < 0.5)
    changed = NodeCase(**{**vars(case), "node": node, "inputs": inputs, "constants": constants, "model": None})
    return Drawn(changed, _model(changed), changed.feeds, f"{changed.describe()} | {', '.join(words)}", terms, rng.random() < 0.5)


def _model(case: NodeCase) -> ModelProto:
    """The model, whose outputs have no shape: that of the valid node may be wrong now."""
    constants = frozenset(n for n in case.constants if not isinstance(case.inputs[n], list))
    case.constants = constants
    graph = helper.make_graph(
        [case.node],
        "edges",
        [helper.make_value_info(n, generate.type_of(v)) for n, v in case.inputs.items() if n not in constants],
        [helper.make_empty_tensor_value_info(n) for n in case.node.output if n],
        [numpy_helper.from_array(case.inputs[n], n) for n in case.inputs if n in constants],
    )
    return helper.make_model(graph, opset_imports=generate.imports(case), ir_version=generate.ir_version(case))


def _widened(rng: random.Random, case: NodeCase, inputs: dict[str, Any], times: int) -> str:
    """Repeat the channels of a convolution or a pool: oneDNN has other code for 8 channels or more."""
    arrays = {name: inputs[name] for name in case.node.input if name}
    x, *weights = (n for n, v in arrays.items() if v.ndim == arrays["x0"].ndim)
    inputs[x] = np.repeat(inputs[x], times, 1)
    for name in weights:
        transposed = case.operator == "ConvTranspose"
        inputs[name] = np.repeat(inputs[name], times, 0 if transposed else 1)
        if not transposed and case.operator == "Conv" and rng.random() < 0.5:
            inputs[name] = np.repeat(inputs[name], times, 0)
            if "x2" in inputs:
                inputs["x2"] = np.repeat(inputs["x2"], times, 0)
    return f"{times} times the channels"


WINDOW = ("strides", "dilations", "pads", "kernel_shape", "output_padding", "output_shape")


def _window(rng: random.Random, case: NodeCase, node: NodeProto, inputs: dict[str, Any]) -> str:
    """Set numbers of one axis of a window to edges of one size: each alone is often refused, together they may be valid."""
    lists = [n for n in WINDOW if n in case.schema.attributes]
    first = inputs.get(node.input[0]) if node.input else None
    if not lists or isinstance(first, list) or first is None or first.ndim < 3:
        return ""
    given = {a.name: list(a.ints) for a in node.attribute if a.name in lists}
    kernels = [v.shape[2:] for v in list(inputs.values())[1:] if not isinstance(v, list) and v.ndim == first.ndim]
    sizes = [v for n, v in given.items() if n not in ("pads", "output_shape")]
    rank = len([*sizes, *kernels, first.shape[2:]][0])
    if not rank:
        return ""
    axis, base = rng.randrange(rank), abs(edge(rng))
    chosen = rng.sample(lists, rng.choice([1, 1, 2, 2, 3]) if len(lists) > 2 else 1)
    for name in chosen:
        default = {"pads": [0] * (2 * rank), "output_padding": [0] * rank}.get(name, [1] * rank)
        values = given.get(name, default)
        if len(values) < len(default):
            values = default
        values[axis] = _near(rng, base)
        if name == "pads" and rng.random() < 0.5:
            values[axis + rank] = rng.choice([values[axis], _near(rng, base), 0])
        _set(node, name, values)
    if "auto_pad" in case.schema.attributes and "pads" in chosen and rng.random() < 0.8:
        _drop(node, "auto_pad")
    return f"window {base} {' '.join(chosen)}"


def _near(rng: random.Random, base: int) -> int:
    turn = rng.randrange(8)
    value = base // 2 if turn == 0 else base * 2 if turn == 1 else base + rng.choice([-2, -1, 0, 0, 0, 1, 1, 2, 3])
    return max(LOW, min(HIGH, value))


def _set(node: NodeProto, name: str, value: Any) -> None:
    _drop(node, name)
    node.attribute.append(helper.make_attribute(name, value, attr_type=AttributeProto.INTS if isinstance(value, list) else None))


def _drop(node: NodeProto, name: str) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def _attribute(rng: random.Random, case: NodeCase, node: NodeProto, inputs: dict[str, Any]) -> str:
    """Change an integer or a list of integers, or add one of the schema."""
    kinds = {n: generate.attribute_type(a) for n, a in sorted(case.schema.attributes.items())}
    names = [n for n, kind in kinds.items() if kind in (AttributeProto.INT, AttributeProto.INTS)]
    if not names:
        return "nothing"
    name = rng.choice(names)
    if kinds[name] == AttributeProto.INT:
        _set(node, name, value := edge(rng))
        return f"{name}={value}"
    values = next((list(a.ints) for a in node.attribute if a.name == name), [])
    values = values or [1] * rng.choice([1, 2, 2, 3, 4])
    for i in range(len(values)) if rng.random() < 0.3 else [rng.randrange(len(values))]:
        values[i] = edge(rng)
    _set(node, name, values)
    return f"{name}={values}"


PLACES = re.compile("Resize|Upsample|Roi|Grid|Deform|Range|NonMax|Crop")
"""Operators that compute places or sizes from floats."""

FLOATS = [0.0, -1.0, 2.0**31, 2.0**32, 2.0**62, 1e30, -1e30, 1e-30, float("inf"), float("nan")]


def _input(rng: random.Random, case: NodeCase, node: NodeProto, inputs: dict[str, Any]) -> str:
    """Set elements of an integer input, or of a float input that determines places or sizes."""
    arrays = [n for n, v in inputs.items() if not isinstance(v, list) and v.size and v.dtype.name in _INTEGERS]
    others = [n for n, v in inputs.items() if not isinstance(v, list) and v.size and v.dtype.name in ("float32", "float64")]
    if PLACES.search(case.operator) and (not arrays or (others and rng.random() < 0.5)):
        arrays = others[1:] or others
    if not arrays:
        return ""
    name = rng.choice(arrays)
    flat = inputs[name].reshape(-1)
    for i in range(flat.size) if rng.random() < 0.2 else [rng.randrange(flat.size) for _ in range(rng.choice([1, 1, 2]))]:
        value: Any = rng.choice(FLOATS)
        if flat.dtype.kind in "iu":
            info = np.iinfo(flat.dtype)
            value = max(info.min, min(info.max, edge(rng)))
        flat[i] = value
    inputs[name] = flat.reshape(inputs[name].shape)
    return f"{name}={flat.tolist()[:8]}"


_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def _size(rng: random.Random, case: NodeCase, node: NodeProto, inputs: dict[str, Any]) -> str:
    """Change the size of an axis of an input to 0, 1 or another size, or the rank."""
    arrays = [n for n, v in inputs.items() if not isinstance(v, list)]
    if not arrays:
        return ""
    name = rng.choice(arrays)
    value = inputs[name]
    shape = list(value.shape)
    if shape and rng.random() < 0.85:
        shape[rng.randrange(len(shape))] = rng.choice([0, 0, 1, 1, 2, 3, 7, 300])
    elif rng.random() < 0.5:
        shape.insert(rng.randrange(len(shape) + 1), 1)
    else:
        shape = shape[1:]
    inputs[name] = np.resize(value, shape) if value.size else np.zeros(shape, value.dtype)
    return f"{name} of {shape}"


# --- named cases ------------------------------------------------------------------------------------------------------

OPERATORS = ("Conv", "ConvTranspose", "ConvInteger", "MaxPool", "AveragePool")
NUMBERS = {"2^31 - 1": 2**31 - 1, "2^31": 2**31, "2^32 + 1": 2**32 + 1, "2^61": 2**61}

SEEN = {
    "Conv by groups that steps far": (
        "Conv", (1, 64, 1, 13), (64, 1, 1, 5), {"strides": [65537, 2**24 + 1], "pads": [0, 2**24, 0, 2**24], "group": 64},
    ),
    "Conv to 32 channels": (
        "Conv", (1, 1, 8, 1), (32, 1, 5, 1),
        {"strides": [1, 2**32 + 2], "dilations": [2**31, 1], "pads": [2**32, 0, 2**32, 0]},
    ),
    "Conv to 1 channel": (
        "Conv", (1, 32, 2, 13), (1, 32, 2, 3), {"dilations": [2**31 - 8, 1], "pads": [2**30 - 4, 0, 2**30 - 4, 0]},
    ),
    "ConvInteger to 1 channel": (
        "ConvInteger", (1, 32, 2, 13), (1, 32, 2, 3), {"dilations": [2**31 - 8, 1], "pads": [2**30 - 4, 0, 2**30 - 4, 0]},
    ),
    "ConvTranspose from 64 channels": (
        "ConvTranspose", (1, 64, 5, 28), (64, 16, 2, 1),
        {"dilations": [2**31 - 8, 2**32 + 1], "pads": [2**30 - 4, 0, 2**30 - 4, 0]},
    ),
}  # fmt: skip
"""Nodes that ended the process: the operator, the shapes of x and of the weights, and the attributes."""


def _window_of(operator: str, kind: str, number: int) -> tuple[str, tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]:
    """A node with this number as stride, dilation or padding along one axis, whose output has a few cells."""
    transposed = operator == "ConvTranspose"
    size, kernel, lists = 5, 3, {"strides": [number, 1]}
    if kind == "dilations":  # one cell of each window is in the input
        kernel, lists = 2, {"dilations": [number, 1], "pads": [number - 2 if transposed else number, 0, 0, 0]}
    elif transposed:
        size, lists["pads"] = (2, [number - 2, 0, 0, 0]) if kind == "strides" else (3, [number, 0, number, 0])
    elif kind == "pads":
        lists["pads"] = [number, 0, number, 0]
    if "Pool" in operator:
        return operator, (1, 16, size, 5), None, lists | {"kernel_shape": [kernel, kernel]}
    return operator, (1, 16, size, 5), (16, 16, kernel, kernel), lists


NAMED = SEEN | {
    f"{operator} {kind} {name}": _window_of(operator, kind, number)
    for operator in OPERATORS
    for kind in ("strides", "dilations", "pads")
    for name, number in NUMBERS.items()
}
"""Windows with numbers that the 32 bits of a library may not hold."""


def named(operator: str, x: tuple[int, ...], w: tuple[int, ...] | None, attributes: dict[str, Any]) -> Drawn:
    """A node of `NAMED` with whole numbers as inputs, whose sums are exact."""
    rng = np.random.default_rng(0)
    dtype = np.uint8 if operator == "ConvInteger" else np.float32
    inputs = {"x0": x} | ({} if w is None else {"x1": w})
    arrays = {name: rng.integers(0, 100, shape).astype(dtype) for name, shape in inputs.items()}
    node = helper.make_node(operator, list(arrays), ["y0"], name="node", **attributes)
    version = max(generate.schemas["", operator])
    case = NodeCase(0, 0, "", operator, version, version, node, arrays, frozenset(arrays) - {"x0"}, {})
    return Drawn(case, _model(case), case.feeds, case.describe(), 1, False)


# --- one case ---------------------------------------------------------------------------------------------------------


class Differs(Exception):
    """A plan and the definitions do not agree."""


def enter(drawn: Drawn) -> None:
    """Run the case both ways; raises Differs, the common error, or what else is raised."""
    from singa_backend.comparison import tolerances
    from singa_backend.conform.fuzz.compare import compare, magnitude
    from singa_backend.ir.declaration import declarations, has_trait

    case = drawn.case
    place = "STRICT" if drawn.strict else "CPU"
    actual = _ended(drawn, "CPU", 2, LIMITS)
    expected = _ended(drawn, place, 0, LIMITS)
    if isinstance(actual, list) and not isinstance(expected, list) and expected.code.startswith("SX6"):
        expected = _ended(drawn, place, 0, WIDE)
    if not isinstance(expected, list) or not isinstance(actual, list):
        equal = not isinstance(expected, list) and not isinstance(actual, list)
        if not equal or (expected.code != actual.code and not drawn.strict):  # STRICT looks for other errors first
            raise Differs(f"plan: {_shown(actual)}; definition: {_shown(expected)}")
        raise actual
    if has_trait(case.domain, case.operator, "random"):
        return
    rule = tolerances.rule(case.domain, case.operator)
    masks = "mask_filter_value" in declarations[case.domain, case.operator][case.version].attributes
    rounds = any(a.name == "accuracy_level" and a.i >= 2 for a in case.node.attribute)
    slack = drawn.terms * (ROUNDED if rounds or masks else 1)
    found = compare(actual, expected, rule, magnitude(list(case.inputs.values()), rule.power), slack)
    if found.why:
        raise Differs(f"plan: {found.why}")


def _ended(drawn: Drawn, device: str, optimize: int, limits: dict[str, Any]) -> Any:
    """The outputs of two runs, which must be equal, or the error."""
    from singa_backend import Limits, SingaBackend, SonnxError
    from singa_backend.comparison import verdict

    try:
        rep = SingaBackend.prepare(drawn.model, device, optimize=optimize, limits=Limits(**limits))
        outputs = list(rep.run(drawn.feeds))
        if optimize and not _is_random(drawn.case) and not verdict.same_bits(outputs, list(rep.run(drawn.feeds))):
            raise Differs("the second run returned another result")
        return outputs
    except SonnxError as error:
        return error


def _is_random(case: NodeCase) -> bool:
    from singa_backend.ir.declaration import has_trait

    return has_trait(case.domain, case.operator, "random")


def _shown(ended: Any) -> str:
    return f"results {[getattr(v, 'shape', v) for v in ended]}" if isinstance(ended, list) else f"{ended.code} {ended}"[:300]


if __name__ == "__main__":
    sys.exit(main("edges", "Run drawn numbers at the edges of int32 and int64."))
