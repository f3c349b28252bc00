"""The types that `interpreters.shape_rules` infers are those of onnx, for drawn nodes of every schema version with a rule.

onnx's inference runs in the child process of `proto.checker`, because some drawn nodes crash it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, NodeProto, TypeProto, helper

from singa_backend import dtypes
from singa_backend.conform.fuzz import generate, recipes
from singa_backend.interpreters import shape_rules
from singa_backend.proto import checker

NAMES = sorted(name for domain, name in recipes.load() if not domain and shape_rules.rule_of(name))
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
            shape = [rng.choice([d, d, d, "n", "m", None, 1]) for d in shape]
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


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_rule_returns_what_onnx_returns(block: int, damaged: bool) -> None:
    wrong, seen = [], Counter[str]()
    for index in range(block * COUNT, (block + 1) * COUNT):
        case = generate.draw(23, index, SELECT)
        if case is None or any(isinstance(v, list) for v in case.inputs.values()):
            continue
        rng = random.Random(f"{index} {damaged}")
        if damaged:
            damage(rng, case.node, case.schema)
        types, values = drawn(rng, case, damaged)
        ours = shape_rules.infer(
            case.schema, case.node, [types.get(n) for n in case.node.input], [values.get(n) for n in case.node.input]
        )
        if ours is None or not case.schema.has_type_and_shape_inference_function:
            seen["unsure"] += 1
            continue
        seen["covered"] += 1
        theirs, why = of_onnx(case, types, values)
        if "ParseData type mismatch" in why:  # onnx refuses axes of Pad in int32, which its schema allows
            continue
        if why or {n: t.SerializeToString() for n, t in ours.items()} != {n: t for n, t in theirs.items() if t}:
            wrong.append(f"{case.describe()}: {ours} {why or {n: TypeProto.FromString(t) for n, t in theirs.items()}}")
    assert not wrong, "\n".join(wrong)
    assert seen["covered"] > COUNT * (0.3 if damaged else 0.6)


def test_the_rules_cover_most_operators() -> None:
    assert len(NAMES) >= 120 and {"Conv", "MatMul", "Reshape", "BatchNormalization", "Add", "ReduceSum"} <= set(NAMES)


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
    schema = checker_schema(op)
    types = [helper.make_tensor_type_proto(7 if op == "GatherND" and i else 1, s) for i, s in enumerate(shapes)]
    assert shape_rules.infer(schema, node, types, [None] * len(types)) is None


def checker_schema(op: str) -> Any:
    from singa_backend.proto.schemas import schemas

    versions = schemas["", op]
    return versions[max(versions)]
