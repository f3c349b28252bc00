"""Draws If, Loop, Scan, SequenceMap and model-local functions, with bodies of several nodes that read outer values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from onnx import GraphProto, ValueInfoProto, helper

from ..strategies import Skip
from . import nodes
from .scope import LOCAL, DrawnScope
from .values import PERTURBED, Known, type_proto

TRIES = 6
"""How often a node is drawn before a body remains shorter."""


def fill(scope: DrawnScope, count: int, depth: int) -> None:
    """Draw nodes into a scope, as the budget allows."""
    program = scope.program
    for _ in range(count):
        if program.budget <= 0:
            return
        for _ in range(TRIES):
            try:
                node(scope, depth)
                break
            except Skip:
                continue


def node(scope: DrawnScope, depth: int) -> None:
    """Draw one node: of a recipe, or one with graphs."""
    program = scope.program
    options = [make for make, since, p in INNER if depth and since <= program.opset and program.budget > 4 and program.chance(p)]
    if not options:
        nodes.draw(scope)
        return
    budget = program.budget
    try:
        options[int(program.rng.integers(len(options)))](scope, depth - 1)
    except Skip:
        program.budget = budget
        raise


def _info(known: Known, name: str = "", shape: bool = True) -> ValueInfoProto:
    declared: Any = () if shape else None
    return ValueInfoProto(name=name or known.name, type=type_proto(known, declared))


def _graph(scope: DrawnScope, name: str, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> GraphProto:
    return helper.make_graph(scope.nodes, name, inputs, outputs, scope.initializers)


def _own(scope: DrawnScope, known: Known) -> Known:
    """Return the value, or a copy of it if it belongs to another scope, or to nothing that this scope computes."""
    produced = {o for n in scope.nodes for o in n.output} | {t.name for t in scope.initializers}
    if known.name in produced and any(k is known for k in scope.known):
        return known
    return scope.add("Identity", [known.name])[0]


def _result(scope: DrawnScope, good: Callable[[Known], bool]) -> Known:
    """Choose a result of a body, mostly one that its last nodes compute; raises Skip if there is none."""
    program = scope.program
    produced = {o for n in scope.nodes for o in n.output}
    mine = [k for k in scope.known if k.kind == "tensor" and good(k)]
    computed = [k for k in mine if k.name in produced and not k.constant]
    if computed and program.chance(0.9):
        return computed[-1] if program.chance(0.6) else computed[int(program.rng.integers(len(computed)))]
    found = mine[int(program.rng.integers(len(mine)))] if mine else scope.find(lambda k: k.kind == "tensor" and good(k))
    if found is None:
        raise Skip
    return _own(scope, found)


def _names(inner: DrawnScope, outer: DrawnScope, count: int) -> None:
    """Continue the outer names, except those that bodies may reuse."""
    outer.count = max(outer.count, count, inner.count)


def if_(scope: DrawnScope, depth: int) -> None:
    program = scope.program
    condition = scope.tensor(np.dtype(bool), ())
    if condition is None:
        condition = scope.constant(np.array(program.chance()))
    then, other = scope.inner(), scope.inner()
    fill(then, program.whole(1, 4), depth)
    fill(other, program.whole(1, 4), depth)
    pairs: list[tuple[Known, Known]] = []
    for _ in range(program.whole(1, 2)):
        first = _result(then, lambda k: not any(k is p for p, _ in pairs))
        same = program.opset < 11 or program.chance(0.8)  # before opset 11 the branches return equal shapes
        pairs.append((first, _result(other, _alike(first, same, [p for _, p in pairs]))))
    shape = program.chance(0.7)
    branches = [
        _graph(s, label, [], [_info(k, shape=shape) for k in row])
        for s, label, row in zip((then, other), ("then", "else"), zip(*pairs, strict=True), strict=True)
    ]
    _names(then, scope, other.count)
    scope.add("If", [condition.name], len(pairs), then_branch=branches[0], else_branch=branches[1])


def _alike(first: Known, same: bool, taken: list[Known]) -> Callable[[Known], bool]:
    def good(k: Known) -> bool:
        fits = k.shape == first.shape if same else len(k.shape) == len(first.shape)
        return k.dtype == first.dtype and fits and not any(k is t for t in taken)

    return good


def _state(scope: DrawnScope) -> Known:
    found = scope.find(lambda k: k.kind == "tensor" and k.dtype.kind in "fib" and k.value.size <= 64)
    if found is None:
        raise Skip
    return found


def _next(scope: DrawnScope, state: Known) -> Known:
    """Choose the next value of a state, of its dtype and shape: one that the body computed, or a function of the state."""

    def fits(k: Known) -> bool:
        return k.dtype == state.dtype and k.shape == state.shape

    produced = {o for n in scope.nodes for o in n.output}
    if not any(k.kind == "tensor" and fits(k) and k.name in produced and not k.constant for k in scope.known):
        kind = "float" if state.dtype.kind == "f" else "bool" if state.dtype == np.bool_ else "int"
        options = {"float": ["Tanh", "Sigmoid", "Neg", "Relu"], "bool": ["Not"], "int": ["Identity"]}[kind]
        with suppress(Skip):
            return scope.add(options[int(scope.program.rng.integers(len(options)))], [state.name])[0]
    return _result(scope, fits)


def loop(scope: DrawnScope, depth: int) -> None:
    program = scope.program
    states = [_state(scope) for _ in range(program.whole(1, 2))]
    count, go = program.whole(0, 4), program.chance(0.9)
    most = scope.constant(np.array(count, np.int64))
    first = scope.constant(np.array(go)) if not go or program.chance(0.7) else None
    body = scope.inner()
    i = body.define([np.array(0, np.int64)] * (PERTURBED + 1))
    c = body.define([np.array(True)] * (PERTURBED + 1))
    inside = [body.define(s.runs) for s in states]
    fill(body, program.whole(1, 5), depth)
    again = body.tensor(np.dtype(bool), ()) if program.chance(0.3) else c
    again = _own(body, again or c)
    after = [_next(body, s) for s in inside]
    scanned = [_result(body, lambda k: True)] if program.chance(0.6) else []
    shape = program.chance(0.7) or not count or not go  # without an iteration the declaration determines the shape
    graph = _graph(body, "body", [_info(i), _info(c), *(_info(s, shape=shape) for s in inside)],
                   _distinct(body, [again, *after, *scanned], shape))  # fmt: skip
    _names(body, scope, 0)
    inputs = [most.name, first.name if first else "", *(s.name for s in states)]
    scope.add("Loop", inputs, len(after) + len(scanned), body=graph)


def _distinct(scope: DrawnScope, results: list[Known], shape: bool) -> list[ValueInfoProto]:
    """Return the outputs of a body; a value that is returned twice is copied."""
    seen: set[str] = set()
    infos = []
    for known in results:
        one = scope.add("Identity", [known.name])[0] if known.name in seen else known
        seen.add(one.name)
        infos.append(_info(one, shape=shape))
    return infos


def scan(scope: DrawnScope, depth: int) -> None:
    program = scope.program
    states = [_state(scope) for _ in range(program.whole(0, 2))]
    first = scope.find(lambda k: k.kind == "tensor" and len(k.shape) > 0 and 0 < k.shape[0] <= 4 and k.value.size <= 64)
    if first is None:
        raise Skip
    n = first.shape[0]
    other = scope.find(lambda k: k.kind == "tensor" and len(k.shape) > 0 and k.shape[0] == n and k.value.size <= 64)
    rows = [first, other] if other is not None and program.chance() else [first]
    backwards = [int(program.chance(0.3)) for _ in rows]
    body = scope.inner()
    inside = [body.define(s.runs) for s in states]
    parts = [body.define([v[-1 if b else 0] for v in map(np.asarray, r.runs)]) for r, b in zip(rows, backwards, strict=True)]
    for part in parts:
        part.runs = [np.asarray(v) if np.asarray(v).dtype == part.dtype else np.array(v, object) for v in part.runs]
    fill(body, program.whole(1, 4), depth)
    after = [_next(body, s) for s in inside]
    scanned = [_result(body, lambda k: True) for _ in range(program.whole(0 if states else 1, 2))]
    shape = program.chance(0.7)
    graph = _graph(body, "body", [_info(k, shape=shape) for k in (*inside, *parts)],
                   _distinct(body, [*after, *scanned], shape))  # fmt: skip
    _names(body, scope, 0)
    attributes: dict[str, Any] = {"scan_input_directions": backwards} if any(backwards) else {}
    if scanned and program.chance(0.3):
        attributes["scan_output_directions"] = [1] * len(scanned)
    inputs = [k.name for k in (*states, *rows)]
    scope.add("Scan", inputs, len(after) + len(scanned), body=graph, num_scan_inputs=len(rows), **attributes)


def sequence_map(scope: DrawnScope, depth: int) -> None:
    program = scope.program
    source = scope.find(lambda k: k.kind == "sequence" and bool(k.value))
    if source is None:
        raise Skip
    body = scope.inner()
    element = body.define([v[0] for v in source.runs])
    fill(body, program.whole(1, 3), depth)
    made = _result(body, lambda k: True)
    graph = _graph(body, "body", [_info(element, shape=False)], [_info(made, shape=False)])
    _names(body, scope, 0)
    scope.add("SequenceMap", [source.name], kinds=["sequence"], body=graph)


def function(scope: DrawnScope, depth: int) -> None:
    """Define a function, and call it once or twice."""
    program = scope.program
    given = [_state(scope) for _ in range(program.whole(1, 3))]
    body = DrawnScope(program, function=True)
    for k in given:
        body.define(k.runs)
    formals = [k.name for k in body.known]
    fill(body, program.whole(2, 5), depth)
    count = program.whole(1, 2)
    results: list[str] = []
    for _ in range(count):
        results.append(_result(body, lambda k: k.name not in results).name)
    name = f"F{len(program.functions)}"
    imports = [helper.make_opsetid(d, v) for d, v in program.opsets.items()] + [helper.make_opsetid(LOCAL, 1)]
    program.functions.append(helper.make_function(LOCAL, name, formals, results, body.nodes, imports))
    try:
        scope.add(name, [k.name for k in given], count, domain=LOCAL)
    except Skip:
        program.functions.pop()
        raise
    if program.chance():
        other = [scope.tensor(k.dtype, k.shape) or k for k in given]
        scope.add(name, [k.name for k in other], count, domain=LOCAL)


INNER: tuple[tuple[Callable[[DrawnScope, int], None], int, float], ...] = (
    (if_, 8, 0.07), (loop, 11, 0.06), (scan, 9, 0.06), (sequence_map, 17, 0.06), (function, 8, 0.04),
)  # fmt: skip
"""The nodes with graphs: the first opset, and the probability at each draw."""
