"""Patterns: which expressions match which calls, and what a match names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser
from singa_backend.plans.fusion.view import RegionView
from singa_backend.plans.region import region_of

from singa_backend.ir.reader import read
from singa_backend.rewriting.match import (
    Anything,
    ConstantValue,
    Match,
    Multiple,
    Number,
    Pattern,
    Rule,
    Rules,
    View,
    factor,
    inverse_root,
    matches,
    op,
    over_root,
    squared,
)

F = np.float32
X, Y, N, C = Anything(), Anything(), Number(), ConstantValue()


def view_of(body: str, outputs: str = "float y", opset: int = 18, **weights: Any) -> RegionView:
    """A graph of ONNX's text with the float inputs x and z, of shapes (2, 5) and (5); Python floats are float32."""
    text = f"g (float[2,5] x, float[5] z) => ({outputs}) {{ {body} }}"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    for name, value in weights.items():
        array = np.asarray(value, F if isinstance(value, float) else None)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    graph = read(model)
    region = region_of(graph)
    return RegionView(region, {i: (v.dtype, v.shape) for i, v in zip(region.inputs, graph.inputs, strict=True)})


def found(pattern: Pattern, view: RegionView, *parts: Pattern) -> list[Any]:
    """The names of values, and the numbers, that parts of a pattern find in every match that a rule may rewrite."""
    made = []

    def note(view: View, match: Match) -> bool:
        made.append(tuple(names.get(match[p], match[p]) if isinstance(match[p], int) else match[p] for p in parts))
        return False

    names, before = view.region.names, view.calls()
    Rules(Rule(pattern, note)).run(view)
    assert view.calls() == before
    return made


def test_an_expression_is_its_calls() -> None:
    assert found(op.Relu(X) - Y, view_of("r = Relu(x) y = Sub(r, z)"), X, Y) == [("x", "z")]
    assert found(-X, view_of("y = Neg(z)"), X) == [("z",)]
    assert found(X / 2, view_of("y = Div(x, k)", k=2.0), X) == [("x",)]
    assert found(1 / X, view_of("y = Div(k, x)", k=1.0), X) == [("x",)]
    assert found(op.Relu(X) - Y, view_of("r = Relu(x) y = Sub(z, r)")) == []
    assert found(op.Add(X, Y), view_of("y = Add<axis = 0, broadcast = 1>(x, z)", opset=6)) == []  # its old meaning


@pytest.mark.parametrize("body", ["y = {}(r, z)", "y = {}(z, r)"])
@pytest.mark.parametrize("name", ["Add", "Mul", "Max", "Min"])
def test_both_orders_of_a_commutative_operator_match(name: str, body: str) -> None:
    view = view_of("r = Relu(x) " + body.format(name))
    assert found(getattr(op, name)(op.Relu(X), Y), view, X, Y) == [("x", "z")]
    assert found(getattr(op, name)(Y, op.Relu(X)), view, X, Y) == [("x", "z")]


def test_what_is_named_twice_is_one_value_or_computed_alike() -> None:
    relu = op.Relu(X)
    twice = op.Sub(relu, op.Neg(relu))
    assert found(twice, view_of("r = Relu(x) n = Neg(r) y = Sub(r, n)"), X) == [("x",)]
    assert found(twice, view_of("r = Relu(x) s = Relu(x) n = Neg(s) y = Sub(r, n)"), X) == [("x",)]
    assert found(twice, view_of("r = Relu(x) s = Relu(z) n = Neg(s) y = Sub(r, n)")) == []
    assert found(op.Mul(X, X), view_of("y = Mul(x, z)")) == []


def test_values_in_the_middle_are_not_used_elsewhere() -> None:
    pattern, shared = op.Neg(op.Relu(X)), op.Neg(op.Relu(X).shared())
    for body, outputs in (
        ("r = Relu(x) y = Neg(r) s = Abs(r)", "float y, float s"),
        ("r = Relu(x) y = Neg(r)", "float y, float r"),
    ):
        assert found(pattern, view_of(body, outputs)) == []
        assert found(shared, view_of(body, outputs), X) == [("x",)]
    both = op.Mul(op.Relu(X), op.Neg(op.Relu(X)))
    assert found(both, view_of("r = Relu(x) n = Neg(r) y = Mul(n, r)"), X) == [("x",)]  # only by calls of the pattern


def test_numbers_have_one_element_and_add_no_axis() -> None:
    wide = (np.full(1, 3, F), np.full((1, 1, 1), 3, F), np.full(5, 3, F))
    for value, wanted in zip((3.0, *wide), ([(3.0,)], [(3.0,)], [], []), strict=True):
        assert found(X + N, view_of("y = Add(k, x)", k=value), N) == wanted
    assert found(X + N, view_of("y = Add(k, x)", k=3.0), X) == [("x",)]
    assert found(X + N, view_of("y = Add(x, z)")) == []
    assert found(X + 3, view_of("y = Add(x, k)", k=3.0), X) == [("x",)]
    assert found(X + 3, view_of("y = Add(x, k)", k=3.001)) == []
    assert found(X + Number(3, 1e-2), view_of("y = Add(x, k)", k=3.001), X) == [("x",)]
    twice = (X + N) * N
    assert found(twice, view_of("a = Add(x, k) y = Mul(a, k)", k=3.0), N) == [(3.0,)]
    assert found(twice, view_of("a = Add(x, k) y = Mul(a, l)", k=3.0, l=2.0)) == []


def test_constants() -> None:
    assert found(X * C, view_of("y = Mul(w, x)", w=np.ones(5, F)), X, C) == [("x", "w")]
    assert found(X * C, view_of("y = Mul(x, z)")) == []


ROOTS = [
    "r = Sqrt(x) y = Div(z, r)", "r = Pow(x, half) y = Div(z, r)", "r = Sqrt(x) i = Reciprocal(r) y = Mul(i, z)",
    "r = Sqrt(x) i = Div(one, r) y = Mul(z, i)", "i = Pow(x, minus) y = Mul(z, i)",
    "r = Pow(x, half) i = Reciprocal(r) y = Mul(z, i)",
]  # fmt: skip


@pytest.mark.parametrize("body", ROOTS)
def test_division_by_a_root(body: str) -> None:
    used = {n: w for n, w in {"half": 0.5, "one": 1.0, "minus": -0.5}.items() if n in body}
    assert found(over_root(Y, X), view_of(body, **used), X, Y)[-1] == ("x", "z")
    other = view_of(body.replace("Div(z, r)", "Div(r, z)").replace("Mul", "Add"), **used)
    assert ("x", "z") not in found(over_root(Y, X), other, X, Y)
    inverse = inverse_root(X)
    assert len(found(inverse, view_of(body, **used), X)) == ("i =" in body)


def test_squares() -> None:
    for body, two in (("y = Mul(x, x)", None), ("y = Pow(x, two)", 2.0), ("y = Pow(x, two)", np.array([2]))):
        assert found(squared(X), view_of(body, **({} if two is None else {"two": two})), X) == [("x",)]
    for two in (3.0, np.array([[[2]]]), np.array([2.0, 2.0], F)):
        assert found(squared(X), view_of("y = Pow(x, two)", two=two)) == []


def test_multiples_have_a_factor() -> None:
    many, one = Multiple(op.Relu(X)), Multiple(X, least=1, most=1)
    body = "r = Relu(x) a = Mul(r, k) b = Div(a, l) c = Mul(l, b) y = Neg(c)"
    view = view_of(body, k=3.0, l=2.0)
    assert found(-many, view, X, many) == [("x", 3.0)]
    assert found(-one, view, X, one) == [("b", 2.0)]
    assert found(-Multiple(op.Relu(X), most=2), view) == []
    assert found(-many, view_of("r = Relu(x) y = Neg(r)"), X, many) == [("x", 1.0)]
    assert found(-one, view_of("r = Relu(x) y = Neg(r)")) == []
    assert found(-many, view_of(body.replace("Div(a, l)", "Div(l, a)"), k=3.0, l=2.0)) == []
    assert found(-many, view_of(body, k=3.0, l=0.0)) == []  # a division by 0
    free = Multiple(X)
    assert [m for _, m in found(-free, view_of("a = Mul(x, k) b = Mul(a, k) y = Neg(b)", k=3.0), X, free)] == [9.0, 3.0, 1.0]


def test_the_factor_of_a_call() -> None:
    view = view_of("a = Mul(k, x) b = Div(a, l) y = Div(l, b)", k=3.0, l=2.0)
    mul, first, last = view.calls()
    assert factor(view, mul) == (mul.inputs[1], 3.0)
    assert factor(view, first) == (mul.outputs[0], 0.5)
    assert factor(view, last) is None
    assert factor(view, mul, mul.inputs[0]) is None


def test_alternatives_outputs_attributes_and_further_inputs() -> None:
    either = op.Relu(X) | op.Abs(X) | op.Tanh(X)
    assert found(-either, view_of("r = Abs(x) y = Neg(r)"), X) == [("x",)]
    second = op.Split(X, ..., output=1)
    body = "a, b = Split <axis = 1, num_outputs = 2> (x) y = Neg({})"
    assert found(-second, view_of(body.format("b")), X) == [("x",)]
    assert found(-second, view_of(body.format("a"))) == []
    mean = "y = ReduceMean <keepdims = {}> (x{})"
    kept = op.ReduceMean(X, ..., keepdims=1)
    assert found(kept, view_of(mean.format(1, ", k"), k=np.array([1])), X) == [("x",)]
    assert found(kept, view_of(mean.format(1, "")), X) == [("x",)]
    assert found(kept, view_of(mean.format(0, ""))) == []
    assert found(op.ReduceMean(X), view_of(mean.format(1, ", k"), k=np.array([1]))) == []
    assert found(op.Clip(X, 0, 6), view_of("y = Clip(x, , k)", k=6.0)) == []  # an absent input


def test_a_pattern_tries_all_ways() -> None:
    """The first product of numbers fits one way only, which the second one rules out."""
    pattern = (X * Y) - X
    assert found(pattern, view_of("a = Mul(x, z) y = Sub(a, z)"), X, Y) == [("z", "x")]
    assert found(pattern, view_of("a = Mul(x, z) y = Sub(a, x)"), X, Y) == [("x", "z")]


def test_a_match_names_its_calls_the_last_one_last() -> None:
    view = view_of("r = Relu(x) n = Neg(z) y = Mul(r, n)")
    (match,) = matches(view, op.Neg(Y) * op.Relu(X), view.named("Mul")[0])
    assert match.root is view.named("Mul")[0] and match.origins[-1] is match.root
    assert {c.name for c in match.origins} == {"Relu", "Neg", "Mul"}
    assert X in match and C not in match


def test_rules_run_in_order_and_add_up() -> None:
    def to(name: str) -> Any:
        return lambda view, match: view.put(match.root, view.call(name, (match[X],), match.origins, match.root.outputs))

    body = "r = Relu(x) a = Neg(r) b = Neg(z) y = Add(a, b)"
    short, long = Rules(Rule(op.Neg(X), to("Abs"))), Rules(Rule(op.Neg(op.Relu(X)), to("Tanh")))
    for rules, wanted in ((long + short, ["Tanh", "Abs", "Add"]), (short + long, ["Relu", "Abs", "Abs", "Add"])):
        view = view_of(body)
        assert rules.run(view) == 2
        assert [c.name for c in view.calls()] == wanted
        assert rules.run(view) == 0


def test_a_pattern_whose_operators_are_absent_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = over_root(X - op.ReduceMean(X, ...), op.ReduceMean(squared(X), ...) + N)
    assert frozenset({"ReduceMean"}) in norm.needs and frozenset({"Sqrt", "Pow"}) in norm.needs
    view = view_of("a = Div(x, z) b = Sub(a, z) y = Add(b, z)")
    monkeypatch.setattr(RegionView, "producer", lambda self, value: pytest.fail("looked for a producer"))
    assert found(norm, view) == []
