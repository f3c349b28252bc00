"""Damaged models through conversion: the same case on every machine for a seed and an index.

    python tests/hostile/conversion.py --count 100000 --seed 1    # tox -e fuzz-conversion
    python tests/hostile/conversion.py --seed 1 --only 4711       # one case in this process, with its traceback

A case is a valid node of a drawn schema version (the recipes of `conform.fuzz`) with one damage: its bytes, an attribute, the
rank of an input, a constant.  It is converted to a drawn opset, exported, written as a program or as a training step, optimized
or checked.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from workers import main

from singa_backend.conform.fuzz import generate

LIMITS = {"tensor_bytes": 64 << 20, "live_bytes": 256 << 20, "executions": 10**5, "iterations": 10**4, "deadline": 10.0}

INTEGERS = [
    -(2**63),
    -(2**31) - 1,
    -(2**31),
    -100,
    -5,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    5,
    7,
    64,
    100,
    2**20,
    2**31 - 1,
    2**31,
    2**62,
    2**63 - 1,
]
FLOATS = [float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e30, -1e30, 1e-30]
TEXTS = [b"", b"-", b"->", b"\xff\xfe", b"\0", b"nonsense", b"a" * 5000, b"ij,jk->ik", b"NOTSET", b"SAME_UPPER", b"linear"]
DOORS = ["convert", "convert", "convert", "export", "export fed", "codegen", "train", "optimize", "check"]
"""The calls that a case is passed to; those that are listed several times are drawn more often."""


@dataclass
class Drawn:
    """A case: the model's bytes, where it goes, and the damage in words."""

    data: bytes
    door: str
    opset: int
    check: bool
    feeds: list[Any]
    text: str


def draw(seed: int, index: int) -> Drawn | None:
    """The case; None if the operator has no valid node of the drawn types."""
    case = generate.draw(seed, index)
    if case is None:
        return None
    rng = random.Random(f"{seed} {index} conversion")
    model = ModelProto.FromString(case.model.SerializeToString())
    if case.constants and rng.random() < 0.3:  # a weight, so that there is something to train
        for t in model.graph.initializer:
            t.name, old = f"weight_{t.name}", t.name
            model.graph.node[0].input[:] = [t.name if n == old else n for n in model.graph.node[0].input]
    words = [rng.choice(list(DAMAGES))]
    done = [DAMAGES[w](rng, model) for w in words]
    data = model.SerializeToString()
    if rng.random() < 0.25:
        words, done = [*words, "bytes"], [*done, ""]
        data = _mutated(rng, data)
    feeds = list(case.feeds.values())
    door, opset = rng.choice(DOORS), rng.randint(7, 27)
    damage = ", ".join(f"{w} {d}" for w, d in zip(words, done, strict=True))
    return Drawn(data, door, opset, rng.random() < 0.25, feeds, f"{door} {opset}: {case.describe()[:200]} | {damage}")


def _mutated(rng: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(max(1, len(made)))
        kind = rng.randrange(4)
        if kind == 0 and made:
            made[at] = rng.randrange(256)
        elif kind == 1:
            made[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
        elif kind == 2:
            del made[at : at + rng.randint(1, 16)]
        elif made:
            made[at] ^= 1 << rng.randrange(8)
    return bytes(made)


def _attribute(rng: random.Random, model: ModelProto) -> str:
    """Change an attribute of the first node, or add one of its schema."""
    node = model.graph.node[0]
    opset = next((o.version for o in model.opset_import if o.domain == node.domain), 1)
    known = [s for s in generate.schemas.get((node.domain, node.op_type), {}).values() if s.since_version <= opset]
    schema = max(known, key=lambda s: s.since_version, default=None)
    lacking = [a for n, a in sorted(schema.attributes.items()) if n not in {a.name for a in node.attribute}] if schema else []
    usable = [a for a in node.attribute if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS)]
    if not usable or (lacking and rng.random() < 0.4):
        if not lacking:
            return "none"
        new = rng.choice(lacking)
        usable = [node.attribute.add(name=new.name, type=int(new.type.value))]
    a = rng.choice(usable)
    kind = a.type
    if rng.random() < 0.07:
        a.type = rng.choice([0, 1, 2, 3, 4, 6, 7, 8])
    elif kind == AttributeProto.INT:
        a.i = rng.choice(INTEGERS)
    elif kind == AttributeProto.FLOAT:
        a.f = rng.choice(FLOATS)
    elif kind == AttributeProto.STRING:
        a.s = rng.choice(TEXTS)
    elif kind == AttributeProto.TENSOR:
        _spoil(rng, a.t)
    else:
        lists: dict[int, tuple[Any, list[Any]]] = {7: (a.ints, INTEGERS), 6: (a.floats, FLOATS), 8: (a.strings, TEXTS)}
        if kind in lists:
            values, choices = lists[kind]
            turn = rng.randrange(4)
            if turn == 0 and values:
                values[rng.randrange(len(values))] = rng.choice(choices)
            elif turn == 1:
                values.extend(rng.choice(choices) for _ in range(rng.randint(1, 5)))
            elif turn == 2:
                del values[rng.randrange(len(values) + 1) :]
            else:
                values[:] = [rng.choice(choices) for _ in range(rng.choice([0, 1, 2, 3, 70]))]
    return f"{a.name}={str(helper.get_attribute_value(a) if 0 < a.type < 15 else a.type)[:80]}"


def _rank(rng: random.Random, model: ModelProto) -> str:
    """Change the declared shape of an input."""
    tensors = [v for v in model.graph.input if v.type.HasField("tensor_type")]
    if not tensors:
        return "none"
    tensor = rng.choice(tensors).type.tensor_type
    turn = rng.randrange(5)
    if turn == 0:
        tensor.ClearField("shape")
    elif turn == 1:
        tensor.shape.dim.add(dim_value=rng.choice([0, 1, 2, 3, 1 << 20]))
    elif turn == 2 and tensor.shape.dim:
        del tensor.shape.dim[-1]
    elif turn == 3 and tensor.shape.dim:
        rng.choice(tensor.shape.dim).dim_value = rng.choice([-1, 0, 1, 5, 1 << 31, 2**62])
    elif tensor.shape.dim:
        rng.choice(tensor.shape.dim).dim_param = rng.choice(["n", "?", ""])
    return str([d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim])


def _constant(rng: random.Random, model: ModelProto) -> str:
    """Change an initializer, or make one of an input."""
    if not model.graph.initializer and model.graph.input:
        chosen = rng.choice(model.graph.input)
        tensor = chosen.type.tensor_type
        shape = [d.dim_value for d in tensor.shape.dim]
        if tensor.elem_type in (TensorProto.INT64, TensorProto.FLOAT, TensorProto.INT32) and len(shape) < 4:
            code = {7: np.int64, 1: np.float32, 6: np.int32}[tensor.elem_type]
            model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, code), chosen.name))
            model.graph.input.remove(chosen)
    if not model.graph.initializer:
        return "none"
    return _spoil(rng, rng.choice(model.graph.initializer))


def _spoil(rng: random.Random, tensor: TensorProto) -> str:
    turn = rng.randrange(4)
    try:
        value = np.array(numpy_helper.to_array(tensor))
    except Exception:
        return "unreadable"
    if turn == 0 and value.dtype in (np.int64, np.int32, np.float32):
        choices = FLOATS if value.dtype == np.float32 else [i for i in INTEGERS if abs(i) < 2**31 or value.dtype == np.int64]
        with np.errstate(all="ignore"):
            value = np.array([rng.choice(choices) for _ in range(value.size)]).astype(value.dtype).reshape(value.shape)
    elif turn == 1:
        value = value.reshape(-1)[: rng.randrange(value.size + 1)]
    elif turn == 2:
        value = value.reshape((*value.shape, 1)) if rng.random() < 0.5 else value.reshape(-1)
    else:
        tensor.dims[:] = [rng.choice([-1, 0, 1, 3, 1 << 31]) for _ in range(rng.randint(0, 3))]
        return f"dims {list(tensor.dims)}"
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return f"{value.dtype}{list(value.shape)}"


DAMAGES: dict[str, Callable[[random.Random, ModelProto], str]] = {
    "attribute": _attribute, "attribute too": _attribute, "rank": _rank, "constant": _constant, "whole": lambda rng, model: "",
}  # fmt: skip
"""Damages by name; "attribute too" draws attributes twice as often, and "whole" damages nothing."""


# --- one case ---------------------------------------------------------------------------------------------------------


def enter(drawn: Drawn) -> None:
    """Pass the model through its door; raises what the door raises."""
    from singa import codegen, sonnx
    from singa.tensor import Tensor
    from singa_backend import inspection, passes
    from singa_backend.proto.load import load_model

    data = drawn.data
    if drawn.door == "convert":
        sonnx.convert(data, drawn.opset, check=drawn.check)
    elif drawn.door == "export":
        sonnx.export(sonnx.SONNXModel(data), opset=drawn.opset, check=drawn.check)
    elif drawn.door == "export fed":
        feeds = [Tensor(data=v, requires_grad=False) for v in drawn.feeds if isinstance(v, np.ndarray)]
        sonnx.export(sonnx.SONNXModel(data), feeds, opset=drawn.opset, check=drawn.check)
    elif drawn.door == "codegen":
        codegen.generate(data)
    elif drawn.door == "train":
        sonnx.to_training_onnx(data, "mse_loss")
    elif drawn.door == "optimize":
        passes.optimize(load_model(data)[0])
    else:
        inspection.trainable_report(data)


if __name__ == "__main__":
    sys.exit(main("conversion", "Convert damaged models."))
