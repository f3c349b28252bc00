"""Sizes by name: what is decided about them, and plans for all sizes that a model leaves open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from tests.helpers import open_models, open_nodes

from singa_backend import Limits, SingaBackend
from singa_backend.elementwise.compile import available
from singa_backend.errors import InvalidInput, ResourceExhausted
from singa_backend.ir.sizes import (
    Formulas,
    OpenSize,
    Scope,
    Size,
    SizeSpace,
    at_least_zero,
    broadcast_sizes,
    late,
    now,
    settled,
    typical,
)
from singa_backend.kernels import onednn
from singa_backend.kernels.views import reshaped_strides
from singa_backend.plans.trace.place import RECENT

# --- sizes


def space_of(**values: int) -> tuple[SizeSpace, list[Size]]:
    space = SizeSpace()
    return space, [space.symbol(k, v) for k, v in values.items()]


def test_equal_polynomials_are_equal_and_nothing_is_assumed() -> None:
    space, (n, m) = space_of(n=5, m=7)
    assert (n + 1) * (m - 1) == n * m - n + m - 1
    assert (n * 6) // 3 == 2 * n and (n * 12 + 8) % 4 == 0 and (6 * n) // 4 == (3 * n) // 2
    assert (n * m * 32) // (m * 8) == 4 * n and n - n == 0 and -(-n // 16) == (n + 15) // 16
    assert hash(n + m) == hash(m + n) and {n * 2: 1}[n + n] == 1
    assert not space.scope.guards


@pytest.mark.parametrize("seed", range(40))
def test_arithmetic_agrees_with_integers(seed: int) -> None:
    """Drawn expressions have the values that integers have, now and for other values of the symbols."""
    draw = np.random.default_rng(seed)
    space, (n, m) = space_of(n=int(draw.integers(2, 60)), m=int(draw.integers(2, 60)))

    def expression() -> Any:
        kinds = [(int(draw.integers(4)), int(draw.integers(-3, 9)), int(draw.integers(1, 9))) for _ in range(5)]

        def compute(a: Any, b: Any) -> Any:
            for kind, c, d in kinds:
                a, b = (
                    (a * c + b, a) if kind == 0 else (a - b * c, b) if kind == 1 else (a // d, b + c) if kind == 2 else (a % d, a)
                )
            return a

        return compute

    computed = [expression() for _ in range(6)]
    sizes = [f(n, m) for f in computed]
    formulas = Formulas(space)
    made = formulas.made([formulas.name(s) for s in sizes])
    for values in [space.values, *draw.integers(2, 100, (5, 2)).tolist()]:
        space.set(values)
        expected = [f(*values) for f in computed]
        assert [now(s) for s in sizes] == expected == list(made(values))
        for s, e in zip(sizes, expected, strict=True):
            low = space.lowest(s.terms) if isinstance(s, Size) else e
            assert low is None or low <= e


@pytest.mark.parametrize("seed", range(40))
def test_what_is_decided_without_an_assumption_always_holds(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def drawn() -> tuple[SizeSpace, list[Any]]:
        space, (n, m) = space_of(n=9, m=14)
        halves = [n // 2, (m + 1) // 2, n // 2 // 3, (n // 2) * (m // 3), n - 2 * (n // 2)]
        return space, [n, m, n * m, n * 4 + 1, m - n, *halves, 5, 0, 1]

    space, sizes = drawn()
    for _ in range(60):
        a, b = (sizes[int(i)] for i in draw.integers(len(sizes), size=2))
        before = len(space.scope.guards)
        decided = [a < b, a == b, a >= b]
        if len(space.scope.guards) > before:
            space, sizes = drawn()  # an assumption may decide what follows
            continue
        values = space.values
        for other in draw.integers(2, 40, (8, 2)).tolist():
            space.set(other)
            x, y = now(a), now(b)
            assert decided == [x < y, x == y, x >= y]
        space.set(values)


def test_assumptions_are_tested_for_other_values() -> None:
    space, (n, m) = space_of(n=5, m=7)
    assert n < m and n != 4 and n * 2 > 8
    space.scope.seal()
    assert space.scope.failing() is None
    for values, holds in (((6, 7), True), ((7, 7), False), ((4, 9), False), ((2, 9), False)):
        space.set(values)
        assert (space.scope.failing() is None) == holds


def test_a_size_is_no_number_before_it_is_settled() -> None:
    space, (n,) = space_of(n=5)
    for use in (int, float, range, lambda v: np.zeros((v, 2)), lambda v: np.array([v], np.int64), math.sqrt, lambda v: [0] * v):
        with pytest.raises((OpenSize, TypeError)):
            use(n)
    with space.settling():
        assert np.zeros((n, 2)).shape == (5, 2) and int(n * 3) == 15
    with pytest.raises(OpenSize):
        int(n)
    assert not space.scope.guards and settled((n, 3)) == (5, 3)


def test_sizes_of_two_spaces_do_not_meet() -> None:
    (_, (n,)), (_, (m,)) = space_of(n=5), space_of(n=5)
    assert n != m
    with pytest.raises(ValueError, match="two plans"):
        n + m


def test_a_pin_is_a_number_in_the_next_trace() -> None:
    space, (n,) = space_of(n=5)
    assert n // 2 == 2
    assert space.found == {"(n) // 2": 2}
    again = SizeSpace(space.found)
    m = again.symbol("n", 4)
    assert m // 2 == 2 and isinstance(m // 2, int)
    again.scope.seal()
    for value, holds in ((4, True), (5, True), (6, False), (3, False)):
        again.set([value])
        assert (again.scope.failing() is None) == holds


def test_each_segment_has_its_own_assumptions() -> None:
    space, (n,) = space_of(n=5)
    assert n > 4 and n > 4 and n != 9 and len(space.scope.guards) == 2
    space.enter(Scope(space))
    space.scope.lowest[0] = 2
    assert n > 4 and len(space.scope.guards) == 1


def test_numbers_that_depend_on_no_result() -> None:
    space, (n,) = space_of(n=5)
    assert late(min, 3, 4) == 3 and now(late(min, n, 4)) == 4
    assert typical(n) == 64 and typical(n - 64) == 1
    space.set([3])
    assert now(late(min, n, 4)) == 3
    assert at_least_zero(n - 2) is not 0 and at_least_zero(1 - n) == 0 and not space.scope.guards  # noqa: F632  it is a Size


def test_shapes_broadcast() -> None:
    space, (n, m) = space_of(n=5, m=7)
    assert broadcast_sizes((n, 1), (1, m), ()) == (n, m)
    assert broadcast_sizes((2, n), (n,)) == (2, n) and not space.scope.guards
    with pytest.raises(ValueError, match="broadcast"):
        broadcast_sizes((n,), (m,))


@pytest.mark.parametrize("seed", range(60))
def test_views_of_other_shapes_are_those_of_numpy(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shape = [int(d) for d in draw.choice([1, 2, 3, 4, 6], 4)]
    x = np.empty(shape).transpose(draw.permutation(4))
    if draw.random() < 0.3:
        x = x[:, ::2]
    size, wanted = x.size, []
    while size > 1:
        d = int(draw.choice([k for k in range(2, size + 1) if size % k == 0]))
        wanted += [d, *[1] * int(draw.random() < 0.2)]
        size //= d
    found = reshaped_strides(x.shape, x.strides, wanted, 8)
    try:
        expected = x.reshape(wanted, copy=False)
    except ValueError:
        assert found is None
        return
    assert found is not None
    assert all(a == b for a, b, d in zip(found, expected.strides, wanted, strict=True) if d != 1)


# --- plans


@pytest.mark.parametrize("seed", range(120))
def test_drawn_models(seed: int) -> None:
    """In eight sizes plans return what the definitions return, and the same bits when the sizes come again."""
    assert not open_models.difference(open_models.drawn_model(seed), seed)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_models_in_deterministic_sessions_have_the_bits_of_a_new_session(seed: int) -> None:
    """The bits of a run depend on its inputs, not on the sizes that came before."""
    model = open_models.drawn_model(1000 + seed)
    draw = np.random.default_rng(seed)
    inputs = [draw.standard_normal((*s, 8)).astype(np.float32) for s in open_models.drawn_sizes(seed) if min(s) > 1]
    rep = SingaBackend.prepare(model, deterministic=True)
    for x in inputs:
        alone = SingaBackend.prepare(model, deterministic=True).run([x])
        assert all(a.tobytes() == b.tobytes() for a, b in zip(rep.run([x]), alone, strict=True))


@pytest.mark.parametrize("first", range(20))
def test_cases_of_onnx_with_open_sizes(first: int) -> None:
    """A quarter of them; `python -m tests.helpers.open_nodes` runs all."""
    for name, model, inputs in open_nodes.open_cases()[first::80]:
        assert not (reason := open_nodes.open_difference(model, inputs)), (name, reason)


def rep_of(text: str, **options: Any) -> Any:
    return SingaBackend.prepare(parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'), **options)


def planner_of(rep: Any) -> Any:
    assert rep._session._planner is not None
    return rep._session._planner


def test_inputs_that_disagree_on_a_size_of_one_name_are_refused() -> None:
    rep = rep_of("g (float[n] a, float[n] b) => (float[n] y) { y = Add(a, b) }")
    for _ in range(2):
        assert rep.run([np.ones(4, np.float32)] * 2)[0].tolist() == [2.0] * 4
        with pytest.raises(InvalidInput, match="'n' is 3 in input 'a'"):
            rep.run([np.ones(3, np.float32), np.ones(5, np.float32)])


def test_a_body_may_disagree_on_a_size_of_one_name() -> None:
    """The names of a body are not those of its callers; its inputs may have any sizes."""
    rep = rep_of("""g (float[k] a, float[m] b, int64 count) => (float y, float z) {
        go = Constant<value: tensor = bool {1}>()
        c, d = Loop(count, go, a, b) <body = f (int64 i, bool on, float[n] v, float[n] w) => (bool more, float[n] s, float[n] t) {
            more = Identity(on)
            s = Concat<axis = 0>(v, v)
            t = Neg(w)
        }>
        y = ReduceSum<keepdims = 0>(c)
        z = ReduceSum<keepdims = 0>(d)
    }""")
    for k, m in ((2, 3), (3, 3), (2, 5), (4, 2)):
        y, z = rep.run([np.ones(k, np.float32), np.ones(m, np.float32), np.array(3)])
        assert (float(y), float(z)) == (8 * k, -m)


def test_branches_that_need_other_sizes_are_computed_by_few_plans() -> None:
    """A branch that fixes a size, one that is taken for large sizes only, and a condition that is computed from sizes."""
    text = """g (float[n, s, 8] x, bool c, float[5, 8] w) => (float[n, s, 8] y) {
        z = If(c) <then_branch = t () => (float a) { a = ReduceSum<keepdims = 0>(x) },
                   else_branch = e () => (float b) { q = Add(x, w) b = ReduceSum<keepdims = 0>(q) }>
        y = Add(x, z)
    }"""
    rep, definitions = rep_of(text), rep_of(text, optimize=0)
    for n, s, c in ((2, 5, 1), (2, 5, 0), (2, 5, 0), (3, 7, 1), (3, 5, 0), (3, 5, 0), (4, 9, 1), (4, 5, 0)):
        given = [np.full((n, s, 8), 0.5, np.float32), np.array(bool(c)), np.ones((5, 8), np.float32)]
        np.testing.assert_allclose(rep.run(given)[0], definitions.run(given)[0], rtol=1e-5)
    assert planner_of(rep).forms <= 4
    text = """g (float[n, s] x) => (float[n, t] y) <int64[1] zero = {0}, int64[1] six = {6}, int64[1] one = {1}> {
        shape = Shape<start = 1>(x)
        larger = Greater(shape, six)
        c = Squeeze(larger)
        y = If(c) <then_branch = t () => (float[a, b] p) { p = Slice(x, zero, six, one) },
                   else_branch = e () => (float[d, f] q) { q = Relu(x) }>
    }"""
    rep = rep_of(text)
    for s in (3, 20, 4, 11, 5) * 8:
        x = np.arange(2 * s, dtype=np.float32).reshape(2, s)
        np.testing.assert_array_equal(rep.run([x])[0], x[:, :6])
    assert planner_of(rep).forms == 2


@pytest.mark.parametrize("nodes", ["a = Neg(x) y = Add(a, n)", "a = Abs(x) b = Sub(n, a) c = Max(b, n) y = Min(c, x)"])
def test_sizes_that_are_operands_need_no_further_plan(nodes: str) -> None:
    net = "g (int64[n, s] x) => (int64[n, s] y) { shape = Shape<start = 1>(x) n = Squeeze(shape) " + nodes + " }"
    rep, definitions = rep_of(net), rep_of(net, optimize=0)
    for s in range(3, 30):
        x = np.arange(2 * s).reshape(2, s)
        np.testing.assert_array_equal(rep.run([x])[0], definitions.run([x])[0])
    assert planner_of(rep).forms == 1


@pytest.mark.parametrize(("to", "dtype"), [(1, "float"), (11, "double"), (6, "int32"), (7, "int64")])
def test_sizes_that_are_cast(to: int, dtype: str) -> None:
    """Also for the limit of a Range, as positions are exported."""
    net = f"g ({dtype}[7, s] x) => ({dtype} size, {dtype}[7, s] y) <{dtype} zero = {{0}}, {dtype} one = {{1}}> "
    net += "{ shape = Shape<start = 1>(x) n = Squeeze(shape) "
    net += f"size = Cast<to = {to}>(n) places = Range(zero, size, one) y = Add(x, places) }}"
    rep, definitions = rep_of(net), rep_of(net, optimize=0)
    for s in (3, 9, 4, 30):
        x = np.ones((7, s), {"float": "float32", "double": "float64"}.get(dtype, dtype))
        for found, expected in zip(rep.run([x]), definitions.run([x]), strict=True):
            assert found.dtype == expected.dtype and np.array_equal(found, expected)
    assert planner_of(rep).forms == 1


def test_what_follows_a_product_reads_it_if_its_rows_are_assumed_to_be_one() -> None:
    """A part of an expression that is much smaller than the whole is computed before: not what reads the product."""
    weights = np.arange(16, dtype=np.float32).reshape(16, 1)
    net = f"g (float[n, 16] x) => (float[m, 1] y) <float[16, 1] w = {{{', '.join(map(str, range(16)))}}}, float[1] b = {{0.5}}> "
    rep = rep_of(
        net + "{ p, q, last = Split<axis = 0, num_outputs = 3>(x) v = MatMul(last, w) y = Add(v, b) }", deterministic=True
    )
    for n in (5, 3, 8, 5, 2003):
        x = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
        y = x[2 * -(-n // 3) :] @ weights + np.float32(0.5)
        np.testing.assert_allclose(rep.run([x])[0], y, rtol=1e-5, atol=1e-4)


def test_the_limit_of_a_run_counts_tensors_without_open_sizes() -> None:
    rep = rep_of("g (float[n] x, float[200, 200] s) => (float[n] y, float[200, 200] q) { y = Neg(x) q = MatMul(s, s) }")
    s = np.ones((200, 200), np.float32)
    for n in (3, 4, 3):
        rep.run([np.ones(n, np.float32), s])
        with pytest.raises(ResourceExhausted):
            rep.run([np.ones(n, np.float32), s], limits=Limits(tensor_bytes=100_000))


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (1, 1), (1, 400), (400, 1)])
def test_empty_and_single_axes(sizes: tuple[int, int]) -> None:
    net = "g (float[n, m] x) => (float[m, n] y, float[n, 1] z) <int64[1] axes = {1}> "
    rep = rep_of(net + "{ y = Transpose(x) a = Exp(x) z = ReduceSum(a, axes) }")
    draw = np.random.default_rng(0)
    for shape in ((5, 6), sizes, (2, 9), sizes):
        x = draw.standard_normal(shape).astype(np.float32)
        y, z = rep.run([x])
        np.testing.assert_array_equal(y, x.T)
        np.testing.assert_allclose(z, np.exp(x).sum(1, keepdims=True), rtol=1e-5)


def test_a_large_size_is_refused_before_its_memory_is_taken() -> None:
    net = "g (float[n] x, float[m] y) => (float[n, m] z) <int64[1] one = {1}, int64[1] zero = {0}> "
    net += "{ a = Unsqueeze(x, one) b = Unsqueeze(y, zero) z = Mul(a, b) }"
    rep = rep_of(net, limits=Limits(tensor_bytes=1 << 20))
    for _ in range(2):
        assert rep.run([np.ones(3, np.float32), np.ones(4, np.float32)])[0].shape == (3, 4)
        with pytest.raises(ResourceExhausted) as caught:
            rep.run([np.ones(3000, np.float32), np.ones(4000, np.float32)])
        assert caught.value.code == "SX603"
    live = rep_of(net, limits=Limits(live_bytes=1 << 20))
    live.run([np.ones(3, np.float32), np.ones(4, np.float32)])
    with pytest.raises(ResourceExhausted):
        live.run([np.ones(3000, np.float32), np.ones(4000, np.float32)])
    assert live.run([np.ones(3, np.float32), np.ones(4, np.float32)])[0].shape == (3, 4)


def test_memory_of_a_large_size_is_given_back() -> None:
    """An arena that recent sizes need less than half of is replaced."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Tanh", ["m"], ["y"])]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [*nodes, helper.make_node("ReduceSum", ["y"], ["z"])], "g", [value("x", TensorProto.FLOAT, ["n", 16])],
        [value("z", TensorProto.FLOAT, None)], [numpy_helper.from_array(np.ones((16, 16), np.float32), "w")],
    )  # fmt: skip
    rep = SingaBackend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))

    def arena(rows: int) -> int:
        x = np.full((rows, 16), 1 / 16, np.float32)
        np.testing.assert_allclose(rep.run([x])[0], [[16 * rows * np.tanh(1)]], rtol=1e-5)
        planner = rep._session._planner
        assert planner is not None and planner.latest is not None and planner.latest.first.arena is not None
        return int(planner.latest.first.arena.nbytes)

    arena(40)
    large = arena(20000)
    assert large >= 20000 * 16 * 4
    assert all(arena(n) == large for n in range(10, 10 + RECENT - 1))
    assert [arena(n) for n in (80, 90)][-1] < large / 100
    assert arena(20001) >= 20001 * 16 * 4


def test_memory_does_not_grow_with_the_number_of_sizes() -> None:
    rep = SingaBackend.prepare(open_models.drawn_model(7))
    draw = np.random.default_rng(0)
    for s in range(2, 80):
        rep.run([draw.standard_normal((2, s, 8)).astype(np.float32)])
    planner = planner_of(rep)
    sizes = [len(c) for c in planner.shared.containers()], len(planner.plans)
    for s in range(3, 79):
        rep.run([draw.standard_normal((2, s, 8)).astype(np.float32)])
    assert ([len(c) for c in planner.shared.containers()], len(planner.plans)) == sizes


@pytest.mark.parametrize("op", ["MaxPool", "Conv", "ConvTranspose", "AveragePool"])
def test_images_of_changing_sizes_have_one_plan(op: str) -> None:
    draw = np.random.default_rng(0)
    attributes: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    inputs, weights = ["x"], []
    if "Conv" in op:
        inputs, weights = ["x", "w"], [numpy_helper.from_array(draw.standard_normal((4, 4, 3, 3)).astype(np.float32), "w")]
    shape = ["n", 4, "h", "w"]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node(op, inputs, ["y"], **attributes)], "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    plans, definitions = SingaBackend.prepare(model, threads=1), SingaBackend.prepare(model, optimize=0)
    for n, h, w in ((2, 9, 12), (3, 10, 9), (2, 40, 7), (2, 9, 12), (5, 8, 8)):
        image = draw.standard_normal((n, 4, h, w)).astype(np.float32)
        np.testing.assert_allclose(plans.run([image])[0], definitions.run([image])[0], rtol=1e-4, atol=1e-4)
    assert len(planner_of(plans).plans) == 1


def test_primitives_of_several_threads_and_of_one() -> None:
    """A small product has a primitive for one thread, a large one for two; with the wrong number oneDNN corrupts memory."""
    draw = np.random.default_rng(0)
    weights = [numpy_helper.from_array(draw.standard_normal(s).astype(np.float32), n) for n, s in (("w", (64, 32)), ("b", (32,)))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    plans, definitions = SingaBackend.prepare(model, threads=2), SingaBackend.prepare(model, optimize=0)
    for n in (64, 44, 300, 44, 1000, 12, 300, 2, 5000, 44):
        image = draw.standard_normal((n, 64)).astype(np.float32)
        np.testing.assert_allclose(plans.run([image])[0], definitions.run([image])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_drawn_models_on_two_threads(seed: int) -> None:
    """Also by default, where a run may continue on one thread while other programs use the cores."""
    assert not open_models.difference(open_models.drawn_model(2000 + seed), 2000 + seed, threads=2 if seed % 2 else None)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("coordinates", ["asymmetric", "half_pixel", "align_corners"])
def test_nearest_places_of_changing_sizes(coordinates: str, rounding: str) -> None:
    """Places that are repeated equally are copied by machine code, others are taken by their numbers."""
    resize = f'coordinate_transformation_mode = "{coordinates}", nearest_mode = "{rounding}", mode = "nearest"'
    text = f"""g (float[1, 3, h, w] x) => (float[n, c, a, b] y)
        <float[4] scales = {{1.0, 1.0, 3.0, 3.0}}>
        {{ u = Relu(x) r = Resize <{resize}> (u, , scales) y = Concat <axis = 1> (r, r) }}"""
    rep, definitions = rep_of(text, threads=1), rep_of(text, optimize=0)
    draw = np.random.default_rng(0)
    for h, w in (4, 5), (2, 19), (9, 3):
        x = draw.standard_normal((1, 3, h, w)).astype(np.float32)
        for found, expected in zip(rep.run([x]), definitions.run([x]), strict=True):
            np.testing.assert_array_equal(found, expected)
    (plan,) = planner_of(rep).plans.values()
    kernels = [s.kernel for s in plan.first.steps]
    repeated = {"asymmetric": rounding == "floor", "half_pixel": rounding.startswith("round")}.get(coordinates, False)
    assert available() or kernels.count("numpy.take") == 2 * (not repeated)
    assert "numpy.copy" not in kernels or available()


@pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
def test_an_empty_result_leaves_other_sizes_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sees numbers declines an empty result; the plan by the definition is for these sizes only."""
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")
    weights = ", ".join(f"{w:.3f}" for w in np.random.default_rng(0).standard_normal(288))
    net = f"g (float[n, 8, h, w] x) => (float[a, b, c, d] y) <float[4, 8, 3, 3] k = {{{weights}}}> {{ y = Conv(x, k) }}"
    rep, definitions = rep_of(net, deterministic=True), rep_of(net, optimize=0)
    for shape in ((2, 8, 2, 7), (3, 8, 6, 7), (2, 8, 2, 5), (2, 8, 9, 5), (3, 8, 6, 7)):
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        (y,), (alone,) = rep.run([x]), rep_of(net, deterministic=True).run([x])
        assert y.tobytes() == alone.tobytes()
        np.testing.assert_allclose(y, definitions.run([x])[0], rtol=1e-4, atol=1e-4)
    steps = [s.kernel for segment in planner_of(rep).latest.segments for s in segment.steps]
    assert any(s.startswith("conv") for s in steps) and "definition" not in steps


def test_a_profile_reports_the_present_sizes() -> None:
    rep = SingaBackend.prepare(open_models.drawn_model(3))
    for s in (5, 30, 9):
        x = np.ones((2, s, 8), np.float32)
        found = rep.profile([x], runs=1)
        assert any(f", {s}, 8]" in i for step in found.steps for i in step.inputs)


# --- sizes that data decide


def test_what_a_cache_holds_for_sizes_belongs_to_one_scope() -> None:
    """A decision of one segment is an assumption that another one does not test."""
    space, (n, m) = space_of(n=5, m=5)
    first = space.scope
    held = {(n, m): n == m}
    space.enter(Scope(space, first))
    assert (n, m) not in held and n == m and len(space.scope.guards) == 1
    space.enter(first)
    assert (n, m) in held and len(first.guards) == 1


def test_only_what_a_segment_assumes_is_tested_for_it() -> None:
    space, (n,) = space_of(n=9)
    first = space.scope
    space.enter(Scope(space, first))
    assert n > 8 and n // 2 == 4
    second = space.scope
    space.enter(Scope(space, first))
    assert n > 3
    for scope in (first, second, space.scope):
        scope.seal()
    space.seal()
    space.set([5])
    assert first.failing() is None and space.scope.failing() is None and second.failing() is not None
    assert not space.found  # they are pins of the first segment only


CHOSEN = """g (float[{0}, {1}] x) => (float[n, m] y, int64[r] s) <int64[1] axis = {{1}}, float[1, 4] w = {{1, 2, 3, 4}}> {{
    p = NonZero(x)
    t = Transpose<perm = [1, 0]>(p)
    v = GatherND(x, t)
    e = Exp(v)
    u = Unsqueeze(e, axis)
    q = MatMul(u, w)
    y = Softmax(q)
    s = Shape(p)
}}"""


@pytest.mark.parametrize("shape", [("4", "6"), ("a", "b"), ("a", "6")])
def test_results_of_any_length_have_one_continuation(shape: tuple[str, str]) -> None:
    """What follows a NonZero is traced for no, one and several places, also if the sizes of the input are fixed."""
    rep, definitions = rep_of(CHOSEN.format(*shape)), rep_of(CHOSEN.format(*shape), optimize=0)
    draw = np.random.default_rng(1)
    for _ in range(40):
        sizes = [int(d) if d.isdigit() else int(draw.integers(2, 9)) for d in shape]
        x = (draw.standard_normal(sizes) * (draw.random(sizes) < draw.random())).astype(np.float32)
        for found, expected in zip(rep.run([x]), definitions.run([x]), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-30)
    (plan,) = planner_of(rep).plans.values()
    assert sum(len(several) for several in plan.first.next.values()) <= 3


def test_what_is_computed_together_ends_with_a_call_whose_sizes_do_not_follow() -> None:
    """A Slice against the order of its axis, and what follows it alone: machine code, of equal bits in each session."""
    net = "g (float[n] x) => (float[m] y) <int64[1] from = {-1}, int64[1] to = {-1000}, int64[1] axis = {0}, int64[1] by = {-2}> "
    net += "{ a = Slice(x, from, to, axis, by) b = HardSwish(a) c = Tanh(b) d = Exp(c) y = HardSigmoid(d) }"
    rep = rep_of(net, deterministic=True)
    for n in (31, 13, 50, 2, 31, 97):
        x = np.linspace(-3, 3, n, dtype=np.float32)
        alone = rep_of(net, deterministic=True)
        for _ in range(2):
            assert rep.run([x])[0].tobytes() == alone.run([x])[0].tobytes()
    assert planner_of(rep).forms == 1


def test_a_limit_holds_for_what_follows_a_length_that_data_decide() -> None:
    rep = rep_of(CHOSEN.format("4", "6"))
    few, many = np.zeros((2, 4, 6), np.float32)
    few[0, :3], many[:] = 1, 1
    for _ in range(3):
        rep.run([few])
        rep.run([many])
    for _ in range(2):
        assert rep.run([few], limits=Limits(tensor_bytes=300))[0].shape == (3, 4)
        with pytest.raises(ResourceExhausted):
            rep.run([many], limits=Limits(tensor_bytes=300))


def test_what_follows_a_length_that_data_decide_may_need_numbers() -> None:
    """A kernel without sizes by name computes it for each length."""
    text = """g (float[n] x) => (float[1, 1, m] y) <int64[3] target = {1, 1, -1}, float[3] scales = {1, 1, 1.5}> {
        p = NonZero(x)
        f = Cast<to = 1>(p)
        t = Reshape(f, target)
        y = Resize<mode = "cubic">(t, , scales)
    }"""
    rep, definitions = rep_of(text), rep_of(text, optimize=0)
    draw = np.random.default_rng(2)
    for n in (9, 12, 9, 30, 7, 30, 12, 9):
        x = draw.integers(0, 2, n).astype(np.float32)
        x[:2] = 1
        np.testing.assert_allclose(rep.run([x])[0], definitions.run([x])[0], rtol=1e-4, atol=1e-4)


def test_lengths_of_which_one_follows_the_other_leave_little() -> None:
    """A plan assumes that two lengths are equal, or one of them a number; it does not grow with their number."""
    rep = rep_of("""g (float[4, 30] x) => (float[k] e) {
        p = NonZero(x)
        q = Transpose<perm = [1, 0]>(p)
        v = GatherND(x, q)
        a = Abs(x)
        r = NonZero(a)
        s = Transpose<perm = [1, 0]>(r)
        w = GatherND(x, s)
        e = Add(v, w)
    }""")
    draw = np.random.default_rng(4)
    for _ in range(150):
        x = (draw.standard_normal((4, 30)) * (draw.random((4, 30)) < draw.random())).astype(np.float32)
        np.testing.assert_array_equal(rep.run([x])[0], 2 * x[x != 0])
    planner = planner_of(rep)
    assert all(len(plan.space.values) < 40 for plan in planner.plans.values()) and len(planner.failed) < 40


def test_comparisons_of_sizes_are_decided_by_name() -> None:
    """As gradients of broadcast inputs find the axes to sum: what is true of all sizes needs no further segment."""
    rep = rep_of("""g (float[n, 4] x) => (float[n, 4] y) <int64[2] ones = {1, 1}> {
        shape = Shape(x)
        single = Equal(shape, ones)
        places = NonZero(single)
        axes = Squeeze(places)
        y = ReduceSum<keepdims = 1, noop_with_empty_axes = 1>(x, axes)
    }""")
    for n in (3, 9, 4):
        x = np.full((n, 4), 2, np.float32)
        np.testing.assert_array_equal(rep.run([x])[0], x)
    (plan,) = planner_of(rep).plans.values()
    assert plan.first.check is None and planner_of(rep).forms == 1
