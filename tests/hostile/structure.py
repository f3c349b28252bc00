"""Models whose structure is damaged, drawn: a valid model, and one to three damages to its messages.

A damage changes one field of one message of the model: it is cleared, repeated, removed, exchanged with another of its kind,
renamed to another name of the model, or set to a value out of bounds.  A door is a call that reads a model; whatever
the damage leaves, every door must return or raise a typed error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

Rng = random.Random
SHAPED = (2, 3)

# --- valid models -----------------------------------------------------------------------------------------------------

HEAD = '<ir_version: 10, opset_import: ["" : 21, "local" : 1, "ai.onnx.ml" : 3]>'
TEXTS = {
    "if": """main (float[2,3] x, bool c) => (float[2,3] y, float[2,3] z)
        <float[3] w = {1.0, 2.0, 3.0}> {
        a = Mul(x, w)
        y, z = If(c) <
          then_branch = one () => (float[2,3] p, float[2,3] q) <float[3] v = {0.5, 0.25, 2.0}> { p = Add(a, v) q = Neg(x) },
          else_branch = two () => (float[2,3] r, float[2,3] s) { t = Sub(x, a) r = Relu(t) s = Abs(t) }>
        }""",
    "nested_if": """main (float[2,3] x, bool c, bool d) => (float[2,3] y) {
        y = If(c) <
          then_branch = one () => (float[2,3] p) {
            p = If(d) <then_branch = three () => (float[2,3] k) { k = Exp(x) },
                       else_branch = four () => (float[2,3] l) { l = Add(x, x) }> },
          else_branch = two () => (float[2,3] r) { r = Relu(x) }>
        }""",
    "loop": """main (float[2,3] x, int64 n) => (float[2,3] y, float[k,2,3] ys) <bool t = {1}, float[3] w = {1.0, 0.5, 2.0}> {
        y, ys = Loop(n, t, x) <
          body = b (int64 i, bool go, float[2,3] s) => (bool more, float[2,3] u, float[2,3] o) <float h = {0.5}> {
            m = Mul(s, w)
            u = Add(m, h)
            o = Neg(u)
            more = Identity(go)
          }>
        }""",
    "scan": """main (float[3] s, float[4,3] xs) => (float[3] y, float[4,3] ys) {
        y, ys = Scan <num_scan_inputs = 1,
          body = b (float[3] c, float[3] v) => (float[3] d, float[3] o) { d = Add(c, v) o = Mul(d, v) }> (s, xs)
        }""",
    "function": """main (float[2,3] x) => (float[2,3] y) {
        a = local.scale <alpha = 2.0> (x)
        b = local.twice (a)
        y = local.scale (b)
        }
        <domain: "local", opset_import: ["" : 21]>
        scale <alpha: float = 0.5> (u) => (v) { k = Constant <value_float: float = @alpha> () v = Mul(u, k) }
        <domain: "local", opset_import: ["" : 21, "local" : 1]>
        twice (p) => (q) { r = local.scale (p) q = Add(p, r) }""",
    "sequence": """main (float[2,3] x, int64 n) => (float[2,6] y, seq(float[2,3]) z, int64 l) <bool t = {1}> {
        e = SequenceConstruct(x)
        s = Loop(n, t, e) <
          body = b (int64 i, bool go, seq(float[2,3]) q) => (bool more, seq(float[2,3]) r) {
            k = SequenceAt(q, i) j = Neg(k) r = SequenceInsert(q, j) more = Identity(go) }>
        zero = Constant <value_int = 0> ()
        f = SequenceAt(s, zero)
        g = SequenceConstruct(f, x)
        y = ConcatFromSequence <axis = 1> (g)
        z = SequenceMap <body = m (float[2,3] w) => (float[2,3] v) { v = Abs(w) }> (s)
        l = SequenceLength(z)
        }""",
    "optional": """main (float[2,3] x) => (float[2,3] y, bool h) {
        o = Optional(x)
        h = OptionalHasElement(o)
        y = OptionalGetElement(o)
        }""",
    "network": """main (float[n,3,8,8] x) => (float[n,5] y, int64[n] k)
        <float[5,4] fc = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0,1.1,1.2,1.3,1.4,1.5,1.6,1.7,1.8,1.9,2.0},
         float[5] fb = {0.1,0.2,0.3,0.4,0.5}, float[4] g = {1.0,2.0,0.5,1.5}, float[4] b = {0.0,0.1,0.2,0.3},
         float[4] m = {0.0,0.1,0.0,0.1}, float[4] v = {1.0,1.1,1.2,1.3},
         int64[2] flat = {0, -1}> {
        w = ConstantOfShape <value = float[1] {0.125}> (ws)
        ws = Constant <value_ints = [4, 3, 3, 3]> ()
        c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
        bn = BatchNormalization (c, g, b, m, v)
        r = Relu(bn)
        p = GlobalAveragePool(r)
        q = Reshape(p, flat)
        d = Dropout(q)
        y = Gemm <transB = 1> (d, fc, fb)
        o, k0 = TopK <axis = 1> (y, one)
        one = Constant <value_ints = [1]> ()
        k = Squeeze(k0, one)
        }""",
    "shapes": """main (float[a,b] x) => (float[c,d] y, string[e] z) <string[2] names = {"red", "green"}> {
        s = Shape(x)
        i = Constant <value = int64[1] {0}> ()
        n = Gather(s, i)
        w = Constant <value = int64[1] {2}> ()
        t = Concat <axis = 0> (n, w)
        e = Expand(f, t)
        f = ReduceSum <keepdims = 1> (x, ax)
        ax = Constant <value_ints = [1]> ()
        p, q = Split <axis = 1, num_outputs = 2> (e)
        u = Where(cond, p, q)
        cond = Greater(p, q)
        y = Cast <to = 1> (u)
        z = Tile(names, w)
        }""",
    "quantized": """main (float[2,4] x) => (float[2,2] y) <float s = {0.05}, uint8 z = {128}, float ws = {0.1}, int8 wz = {0},
        int8[4,2] w = {1,2,3,4,5,6,7,8}> {
        q = QuantizeLinear(x, s, z)
        dq = DequantizeLinear(q, s, z)
        dw = DequantizeLinear(w, ws, wz)
        m = MatMul(dq, dw)
        o = QuantizeLinear(m, s, z)
        y = DequantizeLinear(o, s, z)
        }""",
    "recurrent": """main (float[4,1,3] x) => (float[4,1,1,2] y, float[1,1,2] h)
        <float[1,8,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,1,2,3,4,5,6,7,8,9,1,2,3},
        float[1,8,2] r = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}> {
        y, h, c = LSTM <hidden_size = 2> (x, w, r)
        }""",
    "capture": """main (float[2,3] x, int64 n) => (float[2,3] y) <bool t = {1}, float[2,3] one = {1,1,1,1,1,1}> {
        y = Loop(n, t, x) <
          body = b (int64 i, bool go, float[2,3] s) => (bool more, float[2,3] u) {
            z = Constant <value_int = 1> ()
            odd = Mod(i, z)
            zero = Sub(z, z)
            even = Equal(odd, zero)
            u = If(even) <then_branch = tb () => (float[2,3] p) { p = local.plus (s, one) },
                          else_branch = eb () => (float[2,3] p) { p = Scan <num_scan_inputs = 1,
                             body = sb (float[3] v) => (float[3] w) { w = Neg(v) }> (s) }>
            more = Identity(t)
          }>
        }
        <domain: "local", opset_import: ["" : 21]> plus (a, b) => (c) { c = Add(a, b) }""",
}  # fmt: skip

FEEDS: dict[str, list[Any]] = {
    "if": [SHAPED, True], "nested_if": [SHAPED, True, False], "loop": [SHAPED, 3], "scan": [(3,), (4, 3)],
    "function": [SHAPED], "sequence": [SHAPED, 2], "optional": [SHAPED], "network": [(2, 3, 8, 8)], "shapes": [(3, 4)],
    "quantized": [(2, 4)], "recurrent": [(4, 1, 3)], "capture": [SHAPED, 2], "sparse": [SHAPED],
}  # fmt: skip


def _sparse() -> ModelProto:
    """A sparse initializer, metadata, types of inner values, a quantization annotation: what the text format lacks."""
    node = helper.make_node("Mul", ["x", "s"], ["m"], name="product", doc_string="a product")
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in ("x", "y", "m")]
    values = numpy_helper.from_array(np.array([2.0, 3.0], np.float32), "s")
    places = numpy_helper.from_array(np.array([1, 4], np.int64), "places")
    sparse = helper.make_sparse_tensor(values, places, [2, 3])
    bias = numpy_helper.from_array(np.ones((2, 3), np.float32), "bias")
    bias.doc_string = "a bias"
    graph = helper.make_graph([node, helper.make_node("Add", ["m", "bias"], ["y"], name="sum")], "sparse", infos[:1], infos[1:2],
                              [bias], "text", infos[2:], [sparse])  # fmt: skip
    note = graph.quantization_annotation.add(tensor_name="m")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="bias")
    graph.metadata_props.add(key="author", value="someone")
    graph.node[0].metadata_props.add(key="k", value="v")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name="text")
    model.metadata_props.add(key="license", value="none")
    model.graph.input[0].type.denotation = "IMAGE"
    model.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    return model


def bases() -> dict[str, ModelProto]:
    """The valid models by name."""
    return {**{n: parser.parse_model(f"{HEAD} {t}") for n, t in TEXTS.items()}, "sparse": _sparse()}


BASES = bases()


def feeds(name: str) -> list[np.ndarray]:
    """Inputs of a valid model."""
    return [
        np.array(v) if isinstance(v, (bool, int)) else np.linspace(-1, 1, int(np.prod(v)), dtype=np.float32).reshape(v)
        for v in FEEDS[name]
    ]


# --- damages ----------------------------------------------------------------------------------------------------------

Site = tuple[Any, Any]
"""A message and the descriptor of one of its fields that is set, or could be."""

BAD_TEXT, NOT_UTF8 = "\x01not text\x02", b"\x01\xff\xfe\xfd text\x02"
"""A text, and the bytes that replace it in the file."""
assert len(BAD_TEXT.encode()) == 10 and len(NOT_UTF8) == 10


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def sites(message: Any) -> Iterator[Site]:
    """Every field of a message and of those within it."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.message_type is None:
            continue
        if _repeated(field):
            for inner in getattr(message, field.name):
                yield from sites(inner)
        elif message.HasField(field.name):
            yield from sites(getattr(message, field.name))


def names_of(model: ModelProto) -> list[str]:
    """The texts of a model that name something."""
    found: dict[str, None] = {}
    for message, field in sites(model):
        if field.type == field.TYPE_STRING:
            value = getattr(message, field.name)
            found.update(dict.fromkeys(value if _repeated(field) else [value]))
    return [n for n in found if n]


def _is_set(site: Site) -> bool:
    message, field = site
    return len(getattr(message, field.name)) > 0 if _repeated(field) else message.HasField(field.name)


def clear(rng: Rng, model: ModelProto, site: Site) -> None:
    site[0].ClearField(site[1].name)


def repeat(rng: Rng, model: ModelProto, site: Site) -> None:
    held = getattr(site[0], site[1].name)
    held.extend([held[rng.randrange(len(held))]])


def remove(rng: Rng, model: ModelProto, site: Site) -> None:
    held = getattr(site[0], site[1].name)
    del held[rng.randrange(len(held))]


def swap(rng: Rng, model: ModelProto, site: Site) -> None:
    held = getattr(site[0], site[1].name)
    kept = list(held)
    rng.shuffle(kept)
    kept = [type(k).FromString(k.SerializeToString()) if site[1].message_type else k for k in kept]
    del held[:]
    held.extend(kept)


def graft(rng: Rng, model: ModelProto, site: Site) -> None:
    """Another message of this kind, or None."""
    kind = site[1].message_type
    others = [
        m
        for n in rng.sample(list(BASES), 2)
        for s in sites(model if rng.random() < 0.7 else BASES[n])
        if s[1].message_type == kind and _is_set(s)
        for m in (getattr(s[0], s[1].name) if _repeated(s[1]) else [getattr(s[0], s[1].name)])
    ]
    if not others:
        return
    other = rng.choice(others)
    text = other.SerializeToString()
    if len(text) > 20_000:
        return
    held = getattr(site[0], site[1].name)
    if not _repeated(site[1]):
        held.CopyFrom(type(other).FromString(text))
    elif len(held) and rng.random() < 0.5:
        held[rng.randrange(len(held))].CopyFrom(type(other).FromString(text))
    else:
        held.extend([type(other).FromString(text)])


def rename(rng: Rng, model: ModelProto, site: Site) -> None:
    message, field = site
    new = rng.choice(["", "unknown", "x", BAD_TEXT, *names_of(model) * 2])
    if not _repeated(field):
        setattr(message, field.name, new)
        return
    held = getattr(message, field.name)
    if len(held) and rng.random() < 0.7:
        held[rng.randrange(len(held))] = new
    else:
        held.append(new)


def spoil(rng: Rng, model: ModelProto, site: Site) -> None:
    """A text that is not UTF-8."""
    message, field = site
    if _repeated(field):
        getattr(message, field.name).append(BAD_TEXT)
    else:
        setattr(message, field.name, BAD_TEXT)


def number(rng: Rng, model: ModelProto, site: Site) -> None:
    message, field = site
    held = getattr(message, field.name)
    old = rng.choice(list(held) or [0]) if _repeated(field) else held
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        new: Any = rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e30])
    else:
        low, high = (0, 2**64 - 1) if field.cpp_type == field.CPPTYPE_UINT64 else (-(2**31), 2**31 - 1)
        new = min(max(rng.choice([old + 1, old - 1, 0, 1, 2, 7, 16, -1, -2, 999, low, high]), low), high)
    if field.enum_type is not None:
        new = rng.choice([v.number for v in field.enum_type.values])
    if not _repeated(field):
        setattr(message, field.name, new)
    elif len(held) and rng.random() < 0.7:
        held[rng.randrange(len(held))] = new
    else:
        held.append(new)


def content(rng: Rng, model: ModelProto, site: Site) -> None:
    message, field = site
    new = rng.choice([b"", b"\xff\xfe", b"x", b"\0" * 8, b"\1" * 24])
    if _repeated(field):
        getattr(message, field.name).append(new)
    else:
        setattr(message, field.name, new)


def _fits(damage: Callable[..., None], site: Site) -> bool:
    field, there = site[1], _is_set(site)
    if damage is clear:
        return there
    if damage in (repeat, remove):
        return there and _repeated(field)
    if damage is swap:
        return _repeated(field) and len(getattr(site[0], field.name)) > 1
    if damage is graft:
        return field.message_type is not None
    if damage in (rename, spoil):
        return field.type == field.TYPE_STRING
    if damage is content:
        return field.type == field.TYPE_BYTES
    return field.message_type is None and field.type not in (field.TYPE_STRING, field.TYPE_BYTES)


DAMAGES: dict[str, Callable[[Rng, ModelProto, Site], None]] = {
    f.__name__: f for f in (clear, repeat, remove, swap, graft, rename, spoil, number, content)
}
STRUCTURAL = {
    ("GraphProto", "input"), ("GraphProto", "output"), ("GraphProto", "node"), ("GraphProto", "initializer"),
    ("NodeProto", "input"), ("NodeProto", "output"), ("NodeProto", "op_type"), ("NodeProto", "domain"),
    ("NodeProto", "attribute"), ("ValueInfoProto", "name"), ("ValueInfoProto", "type"),
    ("AttributeProto", "name"), ("AttributeProto", "type"),
    ("AttributeProto", "g"), ("TensorProto", "name"), ("TensorProto", "data_type"), ("TensorProto", "dims"),
    ("FunctionProto", "input"), ("FunctionProto", "output"), ("FunctionProto", "name"), ("FunctionProto", "attribute"),
    ("ModelProto", "functions"), ("ModelProto", "opset_import"), ("GraphProto", "sparse_initializer"),
}  # fmt: skip
"""The fields that are chosen more often: those of the structure."""


@dataclass(frozen=True)
class Damaged:
    """A damaged model.

    Attributes:
        base: the name of the valid model.
        damages: what was done to it, in words.
        data: the file.
    """

    base: str
    damages: tuple[str, ...]
    data: bytes

    def __str__(self) -> str:
        return f"{self.base}: {', '.join(self.damages)}"


def draw(seed: int, index: int) -> Damaged:
    """The damaged model of an index, which chooses the valid one."""
    rng = Rng(f"structure {seed} {index}")
    base = list(BASES)[index % len(BASES)]
    model = ModelProto()
    model.CopyFrom(BASES[base])
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(list(DAMAGES))
        damage = DAMAGES[name]
        places = [s for s in sites(model) if _fits(damage, s)]
        inner = [s for s in places if (s[0].DESCRIPTOR.name, s[1].name) in STRUCTURAL]
        if not places:
            continue
        site = rng.choice(inner if inner and rng.random() < 0.7 else places)
        damage(rng, model, site)
        done.append(f"{name} {site[0].DESCRIPTOR.name}.{site[1].name}")
    data = model.SerializeToString().replace(BAD_TEXT.encode(), NOT_UTF8)
    return Damaged(base, tuple(done), data)


# --- doors ------------------------------------------------------------------------------------------------------------


def _run(data: bytes, values: list[np.ndarray], optimize: int) -> None:
    from singa_backend import SingaBackend

    rep = SingaBackend.prepare(data, "CPU", optimize=optimize)
    given = [*values, *values][: len(rep.inputs)]
    for _ in range(2 if optimize else 1):
        rep.run(given)


def check(data: bytes, values: list[np.ndarray]) -> None:
    from singa_backend import inspection

    inspection.check(data, timeout=8)


def plain(data: bytes, values: list[np.ndarray]) -> None:
    _run(data, values, 0)


def planned(data: bytes, values: list[np.ndarray]) -> None:
    _run(data, values, 2)


def optimized(data: bytes, values: list[np.ndarray]) -> None:
    from singa_backend import passes
    from singa_backend.proto.load import load_model

    model, _ = load_model(data)
    passes.optimize(model)
    _run(model.SerializeToString(), values, 0)


def exported(data: bytes, values: list[np.ndarray]) -> None:
    from singa import sonnx

    model = sonnx.SONNXModel(data)
    given = [*values, *values][: len(model.imported.graph.inputs)]
    model.forward(*given)
    sonnx.export(model, check=False)
    sonnx.export(model, given, check=False)


def converted(data: bytes, values: list[np.ndarray]) -> None:
    from singa import sonnx

    sonnx.convert(data, 18, check=False)


def generated(data: bytes, values: list[np.ndarray]) -> None:
    from singa import codegen

    codegen.generate(data)


def laid_out(data: bytes, values: list[np.ndarray]) -> None:
    from singa import sonnx
    from singa_backend.proto.load import load_model

    model, _ = load_model(data)
    sonnx.change_layout(model, "channels_last")


def trained(data: bytes, values: list[np.ndarray]) -> None:
    from singa_backend import inspection

    inspection.trainable_report(data)


def recorded(data: bytes, values: list[np.ndarray]) -> None:
    """The outputs in training, and the gradients of the parameters and inputs."""
    from singa import autograd, sonnx
    from singa.tensor import Tensor

    model = sonnx.SONNXModel(data)
    given = [*values, *values][: len(model.imported.graph.inputs)]
    given = [Tensor(data=v, requires_grad=True, stores_grad=True) if v.dtype == np.float32 else v for v in given]
    model.train()
    ys = model.forward(*given)
    for y in ys[:1]:
        list(autograd.backward(autograd.reduce_sum(y)))


ALWAYS = {f.__name__: f for f in (plain, planned, check, optimized, exported)}
SOMETIMES = {f.__name__: f for f in (converted, generated, laid_out, trained, recorded)}
DOORS = {**ALWAYS, **SOMETIMES}


def doors_of(index: int) -> list[str]:
    """The doors that a damaged model passes: the main ones, and two of the others in turn."""
    others = list(SOMETIMES)
    return [*ALWAYS, others[index % len(others)], others[(index // len(others)) % len(others)]]
