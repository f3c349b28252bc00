"""The witnesses of a case: onnxruntime, also in another dtype or as another version; the function body; a decomposition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from onnx import FunctionProto, NodeProto, TypeProto, helper

from ... import dtypes
from ...comparison import tolerances
from ...interpreters.eager import Eager
from ...ir.declaration import declarations, has_trait
from ...proto.schemas import LAX, MICROSOFT, is_custom, newest, schemas
from . import generate
from .generate import NodeCase, allowed_types

Outputs = list[Any]

_F32 = np.dtype(np.float32)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


WIDE: dict[np.dtype[Any], np.dtype[Any]] = {
    **{d: _F32 for d in dtypes.NARROW_FLOATS if d != np.float16},
    **{np.dtype(a): np.dtype(b) for a, b in ((ml_dtypes.int4, np.int8), (ml_dtypes.int2, np.int8), (ml_dtypes.uint4, np.uint8),
                                             (ml_dtypes.uint2, np.uint8))},
}  # fmt: skip
"""Dtypes that onnxruntime cannot exchange through NumPy, and the NumPy dtypes that represent all their values."""

MOVES = _names(
    "Concat Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Split Slice Pad DepthToSpace SpaceToDepth "
    "CenterCropPad ReverseSequence Trilu Gather GatherElements GatherND ScatterElements Scatter ScatterND Compress "
    "Where TensorScatter Identity OneHot SequenceConstruct SequenceAt SequenceErase SequenceInsert ConcatFromSequence "
    "SplitToSequence"
)
"""Operators that move elements without reading them: numbered elements represent all others."""

_DTYPE_MATTERS = _names(
    "Cast CastLike BitCast BitShift QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul "
    "ConvInteger MatMulInteger Constant ConstantOfShape If Loop Scan Shape Size Optional SequenceEmpty SequenceMap "
    "RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial TfIdfVectorizer"
)
"""Operators whose result depends on the dtype itself."""

_BROADCAST = _names("Add Sub Mul Div And Or Xor Equal Greater Less Pow")

CHANGED: dict[str, tuple[int, ...]] = {
    "Softmax": (13,), "LogSoftmax": (13,), "Hardmax": (13,), "AveragePool": (19, 22), "ConvTranspose": (11,), "PRelu": (7,),
    "GroupNormalization": (21,), "Resize": (11, 13, 18, 19), "RoiAlign": (16,), "GridSample": (20,), "Scan": (9,), "Tile": (6,),
    "Dropout": (12,), "BatchNormalization": (9, 14), "Cast": (6, 9, 19, 24), "CastLike": (19, 24), "Clip": (6, 11),
    "Mod": (28,), "Attention": (24,), "TopK": (10,), "OneHot": (11,), "Upsample": (7, 9), "Gather": (11,), "Shape": (15,),
    "LpPool": (18, 22), "MaxPool": (22,), "DFT": (20,), "BitShift": (28,), "LabelEncoder": (2, 4), "Pad": (18,),
    "Add": (7,), "Sub": (7,), "Mul": (7,), "Div": (7,), "And": (7,), "Or": (7,), "Xor": (7,), "Equal": (7,), "Greater": (7,),
    "Less": (7,), "Pow": (7,), "Gemm": (7,),
}  # fmt: skip
"""The versions that changed the meaning but not the signature; the schemas show changed signatures."""


@dataclass
class WitnessRun:
    """One run for onnxruntime: a model, its inputs, and the function that converts its outputs to those of the case.

    dtype: the dtype it computes in, if it is not the case's.
    """

    witness: str
    key: tuple[Any, ...]
    model: bytes
    feeds: dict[str, Any]
    decode: Callable[[dict[str, Any]], Outputs]
    dtype: np.dtype[Any] | None = None


def plans(case: NodeCase) -> Iterator[WitnessRun]:
    """Yield the runs for onnxruntime, the most direct first; none for random operators and for those that it lacks."""
    if (is_custom(case.domain) and case.domain not in (MICROSOFT, LAX)) or has_trait(case.domain, case.operator, "random"):
        return
    yield _plan("onnxruntime", case, case)
    others = list(_other_versions(case))
    for version in others:
        yield _plan(f"onnxruntime as version {version.version}", case, version)
    if _moved(case) is not None:
        for base in (case, *others[:1]):
            if numbered := _numbered(base):
                other, table = numbered
                yield _plan("onnxruntime on numbered elements", case, other, table=table)
    elif case.operator not in _DTYPE_MATTERS:
        for base in (case, *others[:1]):
            for other in _other_dtypes(base):
                yield _plan("onnxruntime in another dtype", case, other, dtype=_narrowest(other))


def _narrowest(case: NodeCase) -> np.dtype[Any] | None:
    floats = [v.dtype for v in case.inputs.values() if not isinstance(v, list) and v.dtype.kind == "f"]
    return _F32 if _F32 in floats or not floats else None


def _plan(
    witness: str, case: NodeCase, asked: NodeCase, *, table: dict[str, Any] | None = None, dtype: np.dtype[Any] | None = None
) -> WitnessRun:
    """Make inputs that cannot be fed initializers, and cast outputs that cannot be returned."""
    unfed = {n for n, v in asked.inputs.items() if not isinstance(v, list) and v.dtype in WIDE}
    rename, casts, names = {}, [], []
    for info in generate.model(asked).graph.output:
        kind = info.type.tensor_type.elem_type
        found = dtypes.numpy_dtype(kind) if kind else None
        names.append(info.name)
        if found in WIDE:
            rename[info.name] = f"{info.name}_narrow"
            casts.append(helper.make_node("Cast", [f"{info.name}_narrow"], [info.name], to=dtypes.onnx_code(WIDE[found])))
    node = NodeProto()
    node.CopyFrom(asked.node)
    for i, name in enumerate(node.output):
        node.output[i] = rename.get(name, name)
    proto = generate.model(asked, [node, *casts], names, frozenset(asked.constants | unfed))
    targets = output_dtypes(case)

    def decode(outputs: dict[str, Any]) -> Outputs:
        values = [outputs[n] for n in names]
        if table is not None:
            return [_replace(v, table, t) for v, t in zip(values, targets, strict=True)]
        return [cast(v, t) for v, t in zip(values, targets, strict=True)]

    feeds = {n: v for n, v in asked.inputs.items() if n not in asked.constants | unfed}
    kinds = tuple("seq" if isinstance(v, list) else v.dtype.name for v in asked.inputs.values())
    key = (asked.domain, asked.operator, asked.opset, kinds, tuple(t.name if t is not None else "" for t in targets))
    return WitnessRun(witness, key, proto.SerializeToString(), feeds, decode, dtype)


def output_dtypes(case: NodeCase) -> list[np.dtype[Any] | None]:
    """Return the dtypes of the outputs (or of a sequence's elements); None if ONNX's inference does not know it."""
    out: list[np.dtype[Any] | None] = []
    for info in case.model.graph.output:
        kind = info.type
        if kind.HasField("sequence_type"):
            kind = kind.sequence_type.elem_type
        code = kind.tensor_type.elem_type
        out.append(dtypes.numpy_dtype(code) if code else None)
    return out


def cast(value: Any, dtype: np.dtype[Any] | None) -> Any:
    if isinstance(value, list):
        return [cast(v, dtype) for v in value]
    if dtype is None or not isinstance(value, np.ndarray) or value.dtype == dtype:
        return value
    if dtype == dtypes.STRING:
        return value.astype(object)
    if value.dtype == object:  # unbounded integers wrap
        bits = 8 * dtype.itemsize
        wrapped = [int(v) % 2**bits for v in value.reshape(-1)]
        return np.array(wrapped, np.uint64).astype(dtype).reshape(value.shape)
    with np.errstate(all="ignore"):
        return value.astype(dtype)


# --- the same node in another form ------------------------------------------------------------------------------------


def _other_versions(case: NodeCase) -> Iterator[NodeCase]:
    """Yield the case as other versions of its operator with the same meaning, newer and nearer versions first."""
    known = schemas[case.domain, case.operator]
    limit = generate.ORT_OPSET if not case.domain else max(known)
    changes = CHANGED.get(case.operator, ())
    for version in sorted(
        (v for v in known if v != case.version and 7 * (not case.domain) <= max(v, 7) <= limit),
        key=lambda v: (v < case.version, abs(v - case.version)),
    )[:3]:
        low, high = sorted((version, case.version))
        if any(low < c <= high for c in changes) and not _untouched(case, low):
            continue
        last = min((v for v in known if v > version), default=limit + 1) - 1
        opset = max(version, min(last, limit))
        if not case.domain and opset < 7:
            continue
        if (other := _as_version(case, version, opset)) is not None:
            yield other


def _untouched(case: NodeCase, low: int) -> bool:
    """Whether a node older than opset 7 has its newer meaning: equal shapes and no `broadcast`."""
    if case.operator not in _BROADCAST:
        return False
    shapes = {case.inputs[n].shape for n in case.node.input}
    return low < 7 and len(shapes) == 1 and not any(a.name == "broadcast" for a in case.node.attribute)


def _as_version(case: NodeCase, version: int, opset: int) -> NodeCase | None:
    here, there = case.schema, schemas[case.domain, case.operator][version]
    node = NodeProto()
    node.CopyFrom(case.node)
    del node.attribute[:]
    given = {a.name for a in case.node.attribute}
    for a in case.node.attribute:
        if a.name in ("consumed_inputs", "output_sequence"):
            continue
        if a.name not in there.attributes or generate.attribute_type(there.attributes[a.name]) != a.type:
            return None
        node.attribute.append(a)
    for name, declared in there.attributes.items():  # a default that differs in that version must be set
        theirs = here.attributes.get(name)
        if name in given or name in ("consumed_inputs", "output_sequence"):
            continue
        if declared.required:
            return None
        mine = theirs.default_value if theirs is not None else None
        if mine is not None and mine.name and mine != declared.default_value:
            node.attribute.append(mine)
    if len(case.node.input) > there.max_input or len(case.node.input) < there.min_input or len(node.output) > there.max_output:
        return None
    allowed = allowed_types(there)
    for i, name in enumerate(case.node.input):
        formal = there.inputs[min(i, len(there.inputs) - 1)].type_str
        value = case.inputs.get(name)
        if isinstance(value, np.ndarray) and formal in allowed and value.dtype not in allowed[formal]:
            return None
    return replace(case, version=version, opset=opset, node=node, types=dict(case.types))


def _other_dtypes(case: NodeCase) -> Iterator[NodeCase]:
    """Yield the case with halves and doubles as float32, and with narrow integers as wider ones."""
    if "empty" in case.flags and case.operator in ("ReduceMax", "ReduceMin"):
        return  # the result is the lowest or the highest value of the dtype
    maps: list[dict[Any, Any]] = [{np.dtype(np.float16): _F32, np.dtype(ml_dtypes.bfloat16): _F32, np.dtype(np.float64): _F32}]
    narrow = [np.dtype(t) for t in (np.int8, np.int16, np.uint8, np.uint16, np.uint32, np.uint64, np.int32)]
    maps += [dict.fromkeys(narrow, np.dtype(np.int64)), dict.fromkeys(narrow[:4], np.dtype(np.int32))]
    for mapping in maps:
        if any(not isinstance(v, list) and v.dtype in mapping for v in case.inputs.values()) and not (
            mapping.get(np.dtype(np.uint64)) is not None and "beyond_float" in case.flags
        ):
            other = with_dtypes(case, mapping)
            if other is not None:
                yield other
    if not case.inputs or any(a.name in ("dtype", "output_datatype") for a in case.node.attribute):
        other = with_dtypes(case, maps[0])
        if other is not None:
            yield other


def with_dtypes(case: NodeCase, mapping: dict[Any, Any]) -> NodeCase | None:
    """Return the case with other dtypes; None if a value cannot be converted."""
    inputs: dict[str, Any] = {}
    for name, value in case.inputs.items():
        if isinstance(value, list):
            return None
        target = mapping.get(value.dtype)
        with np.errstate(all="ignore"):
            inputs[name] = value if target is None else value.astype(target)
            if target == _F32 and value.dtype == np.float64:
                back = inputs[name].astype(np.float64)
                if (np.isinf(back) & np.isfinite(value)).any():
                    return None
                if tolerances.rule(case.domain, case.operator).ulps == 0 and not np.array_equal(back, value, equal_nan=True):
                    return None  # the operator compares, and rounding makes values equal
    node = NodeProto()
    node.CopyFrom(case.node)
    for a in node.attribute:
        if a.name in ("dtype", "output_datatype", "output_dtype") and a.i:
            a.i = dtypes.onnx_code(mapping.get(dtypes.numpy_dtype(a.i), dtypes.numpy_dtype(a.i)))
    types = {p: mapping.get(t, t) for p, t in case.types.items()}
    return replace(case, inputs=inputs, node=node, types=types)


def _moved(case: NodeCase) -> str | None:
    """Return the type parameter of the elements that the node moves without reading; None if it reads them."""
    if case.domain:
        return None
    given = {a.name: helper.get_attribute_value(a) for a in case.node.attribute}
    if case.operator in ("Resize", "GridSample", "Upsample"):
        weighs = given.get("mode", b"nearest" if case.operator != "GridSample" else b"linear") != b"nearest"
        fills = given.get("coordinate_transformation_mode") == b"tf_crop_and_resize"
        return None if weighs or fills else "T" if "T" in case.types else "T1"
    if case.operator == "MaxUnpool":
        return "T1"
    if case.operator not in MOVES or given.get("reduction", b"none") != b"none" or "value" in given:
        return None
    return "T3" if case.operator == "OneHot" else "V" if case.operator == "Identity" and "V" in case.types else "T"


def _numbered(case: NodeCase) -> tuple[NodeCase, dict[str, Any]] | None:
    """Return the case with its elements replaced by float32 numbers, and the elements by number (0 is the padding)."""
    schema = case.schema
    parameter = _moved(case)
    dtype = case.types.get(parameter or "")
    if dtype is None or parameter is None:
        return None
    inputs: dict[str, Any] = {}
    elements: list[Any] = [np.zeros(1, dtype) if dtype != dtypes.STRING else np.array([""], object)]
    count = 1
    for i, name in enumerate(case.node.input):
        if not name:
            continue
        formal = schema.inputs[min(i, len(schema.inputs) - 1)].type_str
        value = case.inputs[name]
        if formal == parameter or formal == "S":
            several = value if isinstance(value, list) else [value]
            numbers = []
            for v in several:
                numbers.append(np.arange(count, count + v.size, dtype=np.float32).reshape(v.shape))
                count += v.size
                elements.append(v.reshape(-1))
            inputs[name] = numbers if isinstance(value, list) else numbers[0]
        else:
            inputs[name] = value
    other = replace(case, inputs=inputs, types={**case.types, parameter: _F32})
    if case.operator == "OneHot" and case.inputs[case.node.input[0]].dtype != np.int64:
        whole = case.inputs[case.node.input[0]]
        other.inputs[case.node.input[0]] = whole.astype(np.int64)
        depth = case.node.input[1]
        other.inputs[depth] = case.inputs[depth].astype(np.int64)
        if whole.dtype.kind == "f" or case.inputs[depth].dtype.kind == "f":
            return None
    return other, {"elements": np.concatenate(elements), "dtype": dtype}


def _replace(value: Any, table: dict[str, Any], target: np.dtype[Any] | None) -> Any:
    if isinstance(value, list):
        return [_replace(v, table, target) for v in value]
    if value.dtype != np.float32:
        return cast(value, target)
    return table["elements"][value.astype(np.int64)].reshape(value.shape)


# --- the function body ------------------------------------------------------------------------------------------------


def body(case: NodeCase) -> Outputs:
    """Return the outputs of the operator's function body, run node by node; halves are widened before and rounded after.

    Raises:
        NotImplementedError: The operator has no function body.
    """
    from ...backend import SingaBackend

    if is_custom(case.domain) or has_trait(case.domain, case.operator, "random"):
        raise NotImplementedError
    halves = {np.dtype(np.float16): _F32, np.dtype(ml_dtypes.bfloat16): _F32}
    narrow = any(not isinstance(v, list) and v.dtype in halves for v in case.inputs.values())
    asked = (with_dtypes(case, halves) if narrow and case.operator not in _DTYPE_MATTERS else case) or case
    function = _function(asked)
    node = NodeProto()
    node.CopyFrom(asked.node)
    node.domain, node.op_type, node.overload = "body", case.operator, ""
    for name, attribute in case.schema.attributes.items():
        if attribute.default_value.name and name not in {a.name for a in node.attribute}:
            node.attribute.append(attribute.default_value)
    function.domain, function.name = "body", case.operator
    allowed = set(function.attribute) | {a.name for a in function.attribute_proto}
    kept = [a for a in node.attribute if a.name in allowed]
    del node.attribute[:]
    node.attribute.extend(kept)
    made = generate.model(asked, [node])
    made.functions.append(function)
    del made.graph.output[:]
    made.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in case.node.output if n)
    made.opset_import.append(helper.make_opsetid("body", 1))
    if not any(o.domain == "" for o in made.opset_import):
        made.opset_import.append(helper.make_opsetid("", 21))
    outputs = list(SingaBackend.run_model(made, asked.feeds))
    return [cast(v, t) for v, t in zip(outputs, output_dtypes(case), strict=True)]


def decomposition(case: NodeCase) -> Outputs:
    """Return the outputs of a custom operator's decomposition; halves are widened before and rounded once after.

    Raises:
        NotImplementedError: The operator is one of ONNX, which has other witnesses, or it has no decomposition.
    """
    declaration = declarations[case.domain, case.operator][case.version]
    if not is_custom(case.domain) or declaration.decomposition_rule is None or has_trait(case.domain, case.operator, "random"):
        raise NotImplementedError
    asked = with_dtypes(case, dict.fromkeys(dtypes.NARROW_FLOATS, _F32)) or case
    inputs = [asked.inputs[n] if n else None for n in asked.node.input]
    attributes = {a.name: helper.get_attribute_value(a) for a in asked.node.attribute}
    attributes = {n: _decoded(v) for n, v in attributes.items()}
    made = declaration.decompose(Eager(opset=newest("")), case.version, inputs, attributes, len(asked.node.output))
    made = [v for v, name in zip(made, asked.node.output, strict=True) if name]
    return [cast(v, t) for v, t in zip(made, output_dtypes(case), strict=True)]


def _decoded(value: Any) -> Any:
    """Return an attribute with strings in place of bytes."""
    if isinstance(value, list):
        return [_decoded(v) for v in value]
    return value.decode() if isinstance(value, bytes) else value


def _function(case: NodeCase) -> FunctionProto:
    schema: Any = case.schema
    if schema.has_function:
        known = [v for v in schema.function_opset_versions if v <= case.opset] or list(schema.function_opset_versions)
        data = schema.get_function_with_opset_version(max(known))
    elif schema.has_context_dependent_function:
        known = [v for v in schema.context_dependent_function_opset_versions if v <= case.opset]
        known = known or list(schema.context_dependent_function_opset_versions)
        types = [(generate.type_of(case.inputs[n]) if n else TypeProto()).SerializeToString() for n in case.node.input]
        data = schema.get_context_dependent_function_with_opset_version(max(known), case.node.SerializeToString(), types)
    else:
        raise NotImplementedError
    function = FunctionProto.FromString(data) if isinstance(data, bytes) else data
    if not function.node:
        raise NotImplementedError
    return function
