"""The rules of operators infer all that onnx infers, for drawn nodes of every schema version with a rule, and nothing false.

onnx's inference runs in the child process of `proto.checker`, because some drawn nodes crash it.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, NodeProto, TypeProto, helper

from singa_backend import SingaBackend, dtypes
from singa_backend.conform.fuzz import generate, recipes
from singa_backend.interpreters import type_inference
from singa_backend.ir.declaration import newest_declaration
from singa_backend.ir.graph import Node, Value
from singa_backend.proto import checker
from singa_backend.proto.schemas import schemas
from singa_backend.proto.values import sizes


def has_rule(name: str) -> bool:
    declaration = newest_declaration("", name)
    return declaration is not None and declaration.shapes_inference is not None


NAMES = sorted(name for domain, name in recipes.load() if not domain and has_rule(name))
SELECT = f"^({'|'.join(NAMES)})-"
EXTREME = [-(2**63), -(2**31), -3, -2, -1, 0, 1, 2, 3, 5, 64, 2**31 - 1, 2**31, 2**63 - 1]
COUNT, BLOCKS = 150, 8


def damage(rng: random.Random, node: NodeProto, schema: Any) -> None:
    """Change one integer, list or text among the attributes, or add one."""
    numbers = [a for a in node.attribute if a.type in (AttributeProto.INT, AttributeProto.INTS, AttributeProto.STRING)]
    if numbers and rng.random() < 0.6:
        a = rng.choice(numbers)
        if a.type == AttributeProto.INT:
            a.i = rng.choice(EXTREME)
        elif a.type == AttributeProto.STRING:
            a.s = rng.choice([b"", b"-", b"VALID", b"SAME_UPPER", b"\xff"])
        elif a.ints and rng.random() < 0.5:
            a.ints[rng.randrange(len(a.ints))] = rng.choice(EXTREME)
        else:
            a.ints.append(rng.choice(EXTREME))
        return
    there = {a.name for a in node.attribute}
    lacking = [n for n, a in sorted(schema.attributes.items()) if n not in there and a.type.value in (2, 7)]
    if lacking:
        name = rng.choice(lacking)
        one = schema.attributes[name].type.value == 2
        value: Any = rng.choice(EXTREME) if one else [rng.choice(EXTREME) for _ in range(rng.randint(1, 4))]
        node.attribute.append(helper.make_attribute(name, value))


def drawn(rng: random.Random, case: Any, damaged: bool) -> tuple[dict[str, TypeProto], dict[str, np.ndarray]]:
    """The types of the inputs, some with open sizes or without shapes, and the values that are known."""
    types, values = {}, {}
    for name, v in case.inputs.items():
        shape: Any = list(v.shape)
        if rng.random() < 0.5 and v.size < 4096:
            values[name] = v
        elif rng.random() < 0.25:
            shape = None
        elif rng.random() < 0.6:
            shape = [rng.choice([d, d, d, f"n{d}", None]) for d in shape]
        if damaged and shape and rng.random() < 0.2:
            shape = shape[:-1] if rng.random() < 0.5 else [*shape, 2]
            values.pop(name, None)
        types[name] = helper.make_tensor_type_proto(dtypes.onnx_code(v.dtype), shape)
    return types, values


def of_onnx(case: Any, types: dict[str, TypeProto], values: dict[str, np.ndarray]) -> tuple[dict[str, bytes], str]:
    request = (
        case.version,
        case.node.SerializeToString(),
        {n: t.SerializeToString() for n, t in types.items()},
        {n: generate.tensor(v, n).SerializeToString() for n, v in values.items()},
        case.opset,
    )
    try:
        answer, why = checker.process.ask(30.0, "node", *request)
    except checker.ChildFailure as failure:
        return {}, str(failure)
    return answer or ({}, why)


def by_rules(node: NodeProto, version: int, types: dict[str, TypeProto], values: dict[str, np.ndarray]) -> dict[str, TypeProto]:
    inputs = [SimpleNamespace(name=n, type=types[n], value=values.get(n)) if n else None for n in node.input]
    call = Node(node.op_type, [], [*map(Value, node.output)], {a.name: a for a in node.attribute}, node.domain)
    return type_inference._by_rule(call, version, inputs)


REFUSED = (
    "ParseData type mismatch", "has inconsistent type", "shall be 3 or 4 dimensions", "input shall be 4 dimensions",
    "Pads has incorrect number", "elements of input 'sizes' (0)",
)  # fmt: skip
"""What onnx refuses although its schemas allow it.

Axes of Pad in int32, two dtypes of RMSNormalization; unknown ranks of Attention, axes of Pad and sizes of Resize.
"""


def is_wrong(case: Any, theirs: dict[str, bytes], values: dict[str, np.ndarray]) -> bool:
    """Whether onnx's inference is known to be wrong."""
    given = {a.name: a for a in case.node.attribute}
    if "ceil_mode" in given and given["ceil_mode"].i:  # it counts a window that is only padding
        return True
    if case.operator == "Attention":  # it multiplies an open size as 0
        return any(
            d.HasField("dim_value") and not d.dim_value
            for t in theirs.values()
            for d in TypeProto.FromString(t).tensor_type.shape.dim
        )
    if case.operator == "Squeeze" and case.version < 11:  # it ignores axes that are not sorted
        return "axes" in given and list(given["axes"].ints) != sorted(given["axes"].ints)
    if case.operator in ("Slice", "Pad"):  # it takes unknown axes for the first ones
        return not values.keys() >= {n for n in case.node.input[3:] if n}
    same = "auto_pad" in given and given["auto_pad"].s.startswith(b"SAME")
    if same and "pads" in given:  # it ignores auto_pad
        return True
    return case.operator == "ConvTranspose" and (
        same or "output_shape" in given
    )  # it omits cells, and axes of a small output_shape


def lacks(ours: TypeProto, theirs: TypeProto) -> bool:
    """Whether a type differs from the type that onnx infers, other than by more sizes."""
    (a, b) = ours.tensor_type, theirs.tensor_type
    if a.elem_type != b.elem_type or not b.HasField("shape"):
        return a.elem_type != b.elem_type
    return (
        not a.HasField("shape")
        or len(a.shape.dim) != len(b.shape.dim)
        or any(
            d is not None and c != d and not (isinstance(c, int) and isinstance(d, str))
            for c, d in zip(sizes(a), sizes(b), strict=True)
        )
    )


def is_false(type: TypeProto, value: np.ndarray) -> bool:
    """Whether a type contradicts a value; the name n3 is that of each size 3."""
    tensor = type.tensor_type
    shape = sizes(tensor) if tensor.HasField("shape") else [None] * value.ndim
    same = len(shape) == value.ndim and all(d in (None, n, f"n{n}") for d, n in zip(shape, value.shape, strict=True))
    return not same or tensor.elem_type != dtypes.onnx_code(value.dtype)


@pytest.mark.filterwarnings("ignore:clip=0 of")
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_rule_returns_what_onnx_returns(block: int, damaged: bool) -> None:
    wrong, seen = [], Counter[str]()
    for index in range(block * COUNT, (block + 1) * COUNT):
        case = generate.draw(23, index, SELECT)
        if case is None or case.schema.deprecated or any(isinstance(v, list) for v in case.inputs.values()):
            continue
        rng = random.Random(f"{index} {damaged}")
        if damaged:
            damage(rng, case.node, case.schema)
        types, values = drawn(rng, case, damaged)
        ours = by_rules(case.node, case.version, types, values)
        seen["covered" if ours else "unsure"] += 1
        if not ours:
            continue
        theirs, why = of_onnx(case, types, values)
        typed = {n: TypeProto.FromString(t) for n, t in theirs.items() if t}
        refused = why and not any(text in why for text in REFUSED)
        lacking = any(n in ours and lacks(ours[n], t) for n, t in typed.items()) and not is_wrong(case, theirs, values)
        if refused or lacking:
            wrong.append(f"{case.describe()}: {ours} {why or typed}")
        if not damaged:
            given = [case.inputs[n] for n in case.node.input if n]
            results = SingaBackend.run_node(case.node, given, opset_version=case.opset)
            outputs = zip([n for n in case.node.output if n], results, strict=True)
            wrong += [
                f"{case.describe()}: {n} {ours[n]}, not {v.shape}" for n, v in outputs if n in ours and is_false(ours[n], v)
            ]
    assert not wrong, "\n".join(wrong)
    assert seen["covered"] > COUNT * (0.3 if damaged else 0.6)


def test_the_rules_cover_most_operators() -> None:
    assert len(NAMES) >= 130 and {"Conv", "MatMul", "Reshape", "BatchNormalization", "Add", "ReduceSum"} <= set(NAMES)


@pytest.mark.parametrize(("op", "shapes", "attributes"), [
    ("GatherND", [(2, 3), (2, 1)], {"batch_dims": -3}), ("Transpose", [(2, 3)], {"perm": [0, -5]}),
    ("Concat", [(2, 3), (2, 3)], {"axis": -(2**63)}), ("Flatten", [(2, 3)], {"axis": 2**63 - 1}),
    ("Conv", [(1, 1, 4), (1, 1, 3)], {"strides": [0]}), ("Conv", [(1, 1, 4), (1, 1, 3)], {"strides": [2**63 - 1]}),
    ("MaxPool", [(1, 1, 4)], {"kernel_shape": [-1]}), ("Split", [(4,)], {"num_outputs": 2**31}),
])  # fmt: skip
def test_an_extreme_attribute_is_left_to_the_child(op: str, shapes: list[Any], attributes: dict[str, Any]) -> None:
    node = helper.make_node(op, [f"x{i}" for i in range(len(shapes))], ["y"])
    for name, value in attributes.items():  # onnx cannot tell the type of an empty list
        kind = AttributeProto.INTS if isinstance(value, list) and not value else None
        node.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    types = {
        n: helper.make_tensor_type_proto(7 if op == "GatherND" and i else 1, s)
        for i, (n, s) in enumerate(zip(node.input, shapes, strict=True))
    }
    assert by_rules(node, max(schemas["", op]), types, {}) == {}
