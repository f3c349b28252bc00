"""The rules of ONNX's IR that hold whatever a model computes: graphs in nodes, names, text, attributes, lengths of lists."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, parser

from singa import codegen, sonnx
from singa_backend import InvalidInput, InvalidModel, Limits, OperatorError, ResourceExhausted, SingaBackend, SonnxError
from singa_backend.inspection import check
from singa_backend.passes import optimize
from singa_backend.passes.change_layout import change_layout

F = np.float32
HEAD = '<ir_version: 10, opset_import: ["" : 21, "local" : 1]>'


def model(text: str) -> ModelProto:
    return parser.parse_model(f"{HEAD} {text}")


def refused(proto: ModelProto, code: str) -> str:
    """The message with which both `prepare` and `check` refuse a model."""
    with pytest.raises(InvalidModel) as caught:
        SingaBackend.prepare(proto)
    assert caught.value.code == code, caught.value
    report = check(proto)
    assert not report.valid and code in {p.code for p in report.problems}
    return str(caught.value)


# --- graphs in nodes --------------------------------------------------------------------------------------------------

IF = """g (bool c, float[2] x) => (float[2] y) { y = If(c) <then_branch = t (%s) => (float[2] p%s) { p = Neg(x) },
    else_branch = e () => (float[2] q) { q = Abs(x) }> }"""
LOOP = """g (int64 n, bool t, float[2] x) => (float[2] y%s) { y%s = Loop(n, t, x) <body = b (int64 i, bool c, float[2] s%s) =>
    (bool d, float[2] u%s) { d = Identity(c) u = Neg(s) }> }"""
SCAN = """g (float[2] x, float[3,2] xs) => (float[2] y, float[3,2] ys) { y, ys = Scan<num_scan_inputs = 1,
    body = b (float[2] s%s) => (float[2] u%s) { u = Neg(s)%s }>(x, xs) }"""
MAP = """g (float[2] x) => (seq(float[2]) z) { q = SequenceConstruct(x)
    z = SequenceMap<body = b (float[2] a%s) => (float[2] u%s) { u = Neg(a) }>(q) }"""


@pytest.mark.parametrize(("text", "holes", "message"), [
    (IF, ("float[2] k", ""), "'then_branch' of If must have 0 inputs"),
    (IF, ("", ", float[2] p"), "'then_branch' of If must have 1 outputs"),
    (LOOP, ("", "", ", float[2] k", ""), "'body' of Loop must have 3 inputs"),
    (LOOP, ("", "", "", ", float[2] u"), "'body' of Loop must have 2 outputs"),
    (LOOP, (", float[k,2] z", ", z", "", ""), "'body' of Loop must have 3 outputs"),
    (SCAN, ("", ", float[2] v", " v = Abs(s)"), "'body' of Scan must have 2 inputs"),
    (SCAN, (", float[2] e", "", ""), "'body' of Scan must have 2 outputs"),
    (MAP, (", float[2] k", ""), "'body' of SequenceMap must have 1 inputs"),
    (MAP, ("", ", float[2] u"), "'body' of SequenceMap must have 1 outputs"),
])  # fmt: skip
def test_the_graphs_of_a_node_take_and_return_what_it_does(text: str, holes: tuple[str, ...], message: str) -> None:
    assert message in refused(model(text % holes), "SX107")


@pytest.mark.parametrize(("text", "holes"), [
    (IF, ("", "")), (LOOP, ("",) * 4), (SCAN, (", float[2] e", ", float[2] v", " v = Abs(e)")), (MAP, ("", "")),
])  # fmt: skip
def test_graphs_of_the_right_numbers_are_accepted(text: str, holes: tuple[str, ...]) -> None:
    assert check(model(text % holes)).valid


# --- fields -----------------------------------------------------------------------------------------------------------

PLAIN = "g (float[2] x) => (float[2] y) { y = LeakyRelu<alpha = 0.5>(x) }"
CALLS = (
    f'{PLAIN.replace("LeakyRelu", "local.f")} <domain: "local", opset_import: ["" : 21]> f <alpha> (a) => (b) {{ b = Neg(a) }}'
)


def _cleared(field: str) -> Callable[[ModelProto], None]:
    return lambda m: m.graph.node[0].attribute[0].ClearField(field)


def _second_value(m: ModelProto) -> None:
    m.graph.node[0].attribute[0].i = 3


def _other_value(m: ModelProto) -> None:
    m.graph.node[0].attribute[0].type = AttributeProto.INT


def _no_operator(m: ModelProto) -> None:
    m.graph.node[0].op_type = ""


def _function(field: str, *names: str) -> Callable[[ModelProto], None]:
    return lambda m: getattr(m.functions[0], field).extend(names)


def _unnamed(m: ModelProto) -> None:
    m.functions.add(domain="local")


@pytest.mark.parametrize(("text", "damage", "code", "message"), [
    (PLAIN, _cleared("name"), "SX107", "an attribute must have a name"),
    (PLAIN, _cleared("type"), "SX107", "attribute 'alpha' must have a type"),
    (PLAIN, _second_value, "SX107", "attribute 'alpha' must have one value, got f and i"),
    (PLAIN, _other_value, "SX107", "attribute 'alpha' must have a value of its type INT, got FLOAT"),
    (PLAIN, _no_operator, "SX107", "a node must have an op_type"),
    (CALLS, _function("input", "a"), "SX102", "input 'a' of function 'f' is declared more than once"),
    (CALLS, _function("attribute", "alpha"), "SX102", "attribute 'alpha' of function 'f' is declared more than once"),
    (CALLS, _function("output", ""), "SX101", "each output of function 'f' must have a name"),
    (CALLS, _unnamed, "SX103", "a function must have a name"),
])  # fmt: skip
def test_missing_and_contradicting_fields(text: str, damage: Callable[[ModelProto], None], code: str, message: str) -> None:
    proto = model(text)
    assert check(proto).valid
    damage(proto)
    assert message in refused(proto, code)


def test_an_attribute_of_ir_version_1_has_the_type_of_its_value() -> None:
    proto = model(PLAIN)
    proto.ir_version = 1
    proto.graph.node[0].attribute[0].ClearField("type")
    (y,) = SingaBackend.run_model(proto, [F([-2, 2])])
    assert y.tolist() == [-1, 2]


# --- text -------------------------------------------------------------------------------------------------------------

GOOD, BAD = b"ZZtextZZ", b"\xffZtextZZ"
Path = tuple[str, ...]


def _text_fields() -> Iterator[Path]:
    """The shortest path from a model to each text field of each kind of message in it."""
    seen, pending = {"ModelProto"}, [(ModelProto.DESCRIPTOR, ())]
    while pending:
        kind, path = pending.pop(0)
        for field in kind.fields:
            here: Path = (*path, field.name)
            if field.type == field.TYPE_STRING:
                yield here
            elif field.message_type is not None and field.message_type.name not in seen:
                seen.add(field.message_type.name)
                pending.append((field.message_type, here))


FIELDS = list(_text_fields())


def spoiled(path: Path) -> ModelProto:
    """A model with a text at this path that is not UTF-8."""
    proto = model(PLAIN)
    message: Any = proto
    for name in path[:-1]:
        field = message.DESCRIPTOR.fields_by_name[name]
        value = getattr(message, name)
        if not field.is_repeated:
            value.SetInParent()
        message = (value[0] if len(value) else value.add()) if field.is_repeated else value
    field = message.DESCRIPTOR.fields_by_name[path[-1]]
    if field.is_repeated:
        getattr(message, path[-1]).append(GOOD.decode())
    else:
        setattr(message, path[-1], GOOD.decode())
    data = proto.SerializeToString()
    assert data.count(GOOD) == 1
    return ModelProto.FromString(data.replace(GOOD, BAD))


def test_the_fields_cover_the_messages_of_a_model() -> None:
    assert len(FIELDS) >= 40
    assert {("graph", "name"), ("functions", "input"), ("graph", "node", "op_type"), ("metadata_props", "key")} <= set(FIELDS)
    assert any(path[-1] == "dim_param" for path in FIELDS) and any(path[-1] == "denotation" for path in FIELDS)


DOORS: dict[str, Callable[[ModelProto], Any]] = {
    "prepare": SingaBackend.prepare, "optimize": optimize, "change_layout": lambda m: change_layout(m, "channels_last"),
    "convert": lambda m: sonnx.convert(m, 21), "codegen": codegen.generate, "SONNXModel": sonnx.SONNXModel,
}  # fmt: skip


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_every_text_is_checked_on_reading(path: Path) -> None:
    for name, door in DOORS.items():
        with pytest.raises(InvalidModel, match="not UTF-8") as caught:
            door(spoiled(path))
        assert caught.value.code in ("SX107", "SX105"), name


# --- lengths ----------------------------------------------------------------------------------------------------------


def _wide() -> ModelProto:
    node = helper.make_node("Sum", ["x"] * 70_000, ["y"])
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy"]
    return helper.make_model(helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 21)])


def _long() -> ModelProto:
    proto = model("g (float[2] x) => (float[2] y) { y = Transpose<perm = [0]>(x) }")
    proto.graph.node[0].attribute[0].ints.extend(range(1_000_000))
    return proto


@pytest.mark.parametrize(("build", "message"), [
    (_wide, "70000 inputs or outputs of the node 'Sum'"), (_long, "1000001 values in the attribute 'perm' of Transpose"),
])  # fmt: skip
@pytest.mark.parametrize("door", ["prepare", "optimize", "convert"])
def test_long_lists_are_refused_before_they_cost_memory(build: Callable[[], ModelProto], message: str, door: str) -> None:
    proto = build()
    tracemalloc.start()
    try:
        with pytest.raises(ResourceExhausted, match=message) as caught:
            DOORS[door](proto)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == "SX614" and "Limits(entries=" in caught.value.hint
    assert peak < 8 << 20


def test_the_limit_can_be_raised_and_data_are_not_counted() -> None:
    x = F([1.0])
    (y,) = SingaBackend.prepare(_wide(), limits=Limits(entries=70_000)).run([x])
    assert y.tolist() == [70_000.0]
    data = model("g () => (int64[n] y) { y = Constant<value_ints = [0]>() }")
    data.graph.node[0].attribute[0].ints.extend(range(100_000))
    assert SingaBackend.run_model(data, [])[0].shape == (100_001,)
    with pytest.raises(InvalidInput):
        Limits(entries=0)


# --- strings ----------------------------------------------------------------------------------------------------------


def _peak(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_repeated_strings_of_an_input_are_not_copied() -> None:
    rep = SingaBackend.prepare(model("g (string[n] x) => (string[n] y) { y = Identity(x) }"))
    rep.run([["a", "b"]])
    long = "ab " * (1 << 22)
    assert _peak(lambda: rep.run([[long] * 8])) < 1 << 20


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u20ac", "\U0001f600"])
def test_the_bytes_of_strings_count_before_they_are_made(letter: str) -> None:
    """The limit is that of the bytes in memory, 1 to 4 for a character, and the last doubling is not made."""
    nodes = "".join(f"x{i + 1} = StringConcat(x{i}, x{i}) " for i in range(30))
    doubled = model(f"g (string[1] x0) => (string[1] x30) {{ {nodes} }}")
    rep = SingaBackend.prepare(doubled, limits=Limits(tensor_bytes=4 << 20))

    def run() -> None:
        with pytest.raises(ResourceExhausted) as caught:
            rep.run([np.array([letter], object)])
        assert caught.value.code == "SX603"

    run()
    assert _peak(run) < 12 << 20


@pytest.mark.parametrize(("node", "inputs"), [
    ("y, n = StringSplit(x)", "a " * (1 << 19)), ('y, n = StringSplit<delimiter = ",">(x)', "," * (1 << 19)),
    ('y = StringNormalizer<case_change_action = "UPPER">(x)', "a" * (5 << 20)),
])  # fmt: skip
def test_parts_of_strings_count_before_they_are_made(node: str, inputs: str) -> None:
    outputs = "string[m] y, int64[k] n" if "y, n" in node else "string[m] y"
    text = f"g (string[k] x) => ({outputs}) {{ {node} }}"
    x = np.array([inputs], object)

    def run(limit: int) -> Any:
        return SingaBackend.run_model(model(text), [x], limits=Limits(tensor_bytes=limit))

    def fails() -> None:
        with pytest.raises(ResourceExhausted) as caught:
            run(4 << 20)
        assert caught.value.code == "SX603"

    fails()
    assert _peak(fails) < 12 << 20
    assert run(1 << 30)[0].size


@pytest.mark.parametrize(("text", "options", "parts"), [
    ("a b  c ", "", ["a", "b", "c"]), ("", "", []), ("a,b,,c", '<delimiter = ",">', ["a", "b", "", "c"]),
    ("a b c", "<maxsplit = 1>", ["a", "b c"]), ("a\x1cb", "", ["a", "b"]),
])  # fmt: skip
def test_parts_are_counted_exactly(text: str, options: str, parts: list[str]) -> None:
    split = model(f"g (string[1] x) => (string[1,m] y, int64[1] n) {{ y, n = StringSplit{options}(x) }}")
    y, n = SingaBackend.run_model(split, [np.array([text], object)])
    assert y.reshape(-1).tolist() == parts and n.tolist() == [len(parts)]


def test_long_strings_are_not_folded() -> None:
    text = 'g () => (string[1] y) <string[1] a = {"b"}> { %s y = Identity(v24) }'
    nodes = "v0 = StringConcat(a, a) " + " ".join(f"v{i + 1} = StringConcat(v{i}, v{i})" for i in range(24))
    made = sonnx.convert(model(text % nodes), 22, check=False)
    assert len(made.SerializeToString()) < 8 << 20


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(20, 16), (20, 13), (22, 18)])
def test_a_rule_that_fails_is_a_typed_error(source: int, target: int) -> None:
    """The grid has a rank that the values do not have: the rule reads sizes that are not there."""
    head = f'<ir_version: 10, opset_import: ["" : {source}]>'
    sample = parser.parse_model(f"{head} g (float[1,1] x, float[1,2,2,2] grid) => (float y) {{ y = GridSample(x, grid) }}")
    with pytest.raises(OperatorError) as caught:
        sonnx.convert(sample, target, check=False)
    assert (caught.value.code, caught.value.operator) == ("SX401", "GridSample")


@pytest.mark.parametrize("raised", [IndexError, KeyError, TypeError, AttributeError, ZeroDivisionError, AssertionError])
def test_whatever_an_adapter_raises_is_typed(raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    from singa_backend.ir.declaration import OperatorRule
    from singa_backend.opsets import writer

    def rule(op: Any, x: Any, axes: Any) -> Any:
        raise raised("broken")

    monkeypatch.setitem(writer.ADAPTERS, ("Squeeze", 11), OperatorRule(rule))
    squeeze = model("g (float[1,2] x) => (float[2] y) <int64[1] a = {0}> { y = Squeeze(x, a) }")
    with pytest.raises(OperatorError, match=r"Squeeze cannot compute with its inputs: .*broken") as caught:
        sonnx.convert(squeeze, 11, check=False)
    assert caught.value.operator == "Squeeze" and isinstance(caught.value.__cause__, raised)


def test_an_imported_model_fails_as_the_executor_does() -> None:
    proto = model("g (float[n] x, float[m] z) => (float[k] y) { y = Add(x, z) }")
    net = sonnx.SONNXModel(proto)
    xs = [np.ones(2, F), np.ones(3, F)]
    codes = []
    for call in (lambda: SingaBackend.run_model(proto, xs, optimize=0), lambda: net.train() or net.forward(*map(_leaf, xs))):
        with pytest.raises(OperatorError) as caught:
            call()
        codes.append((caught.value.code, caught.value.operator, caught.value.node))
    assert codes[0] == codes[1] and codes[0][0] == "SX404"


def _leaf(array: np.ndarray) -> Any:
    from singa.tensor import Tensor

    return Tensor(data=array, requires_grad=True, stores_grad=True)


def test_a_constant_without_a_value_is_written_or_refused() -> None:
    proto = model(LOOP % ("", "", "", ""))
    body = proto.graph.node[0].attribute[0].g
    body.node.append(helper.make_node("Constant", [], ["k"]))
    body.node[1].CopyFrom(helper.make_node("Add", ["s", "k"], ["u"]))
    with pytest.raises(SonnxError):
        SingaBackend.run_model(proto, [np.int64(1), np.bool_(True), np.ones(2, F)])
    assert "Constant" in codegen.generate(proto).text
