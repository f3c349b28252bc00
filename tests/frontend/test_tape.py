"""The tape: gradients of programs on tensors, by hand-written values and by differences; and what goes wrong."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
from tests.helpers import other_device

from singa import autograd, device, opt
from singa._core import node, ops, tape, trace
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa.tape import Operator
from singa_backend.errors import InvalidInput, NoGradientWarning, SonnxError
from singa_backend.ir.reader import read
from singa_backend.opsets.model import to_model
from singa_backend.runtime.executor import Executor


@pytest.fixture(autouse=True)
def training() -> Any:
    tape.training = True
    yield
    tape.training = False


def leaf(value: Any, name: str = "w") -> Tensor:
    return Tensor(data=np.asarray(value, np.float64), stores_grad=True, name=name)


def grads(loss: Tensor) -> dict[str, Any]:
    return {p.name: g.data for p, g in autograd.backward(loss)}


def test_a_product_has_the_gradients_of_a_product() -> None:
    a, b = leaf(3.0, "a"), leaf(4.0, "b")
    assert grads(op.Mul(a, b)) == {"a": 4.0, "b": 3.0}


def test_a_value_that_is_used_twice_gets_the_sum() -> None:
    x = leaf(3.0)
    y = op.Mul(x, x)
    assert grads(op.Add(op.Mul(y, x), y)) == {"w": 3 * 9.0 + 2 * 3.0}


def test_a_diamond_of_many_layers_is_walked_once() -> None:
    """Doubling 60 times: a walk along every path would take 2**60 steps."""
    x = leaf(1.0)
    y = x
    for _ in range(60):
        y = op.Add(y, y)
    assert grads(y) == {"w": 2.0**60}


def test_deep_tapes_do_not_meet_pythons_stack() -> None:
    x = leaf(1.0)
    y = x
    for _ in range(5000):
        y = op.Add(y, 0.0)
    assert grads(y) == {"w": 1.0}


def test_broadcasting_is_undone() -> None:
    x, b = leaf(np.ones((2, 3)), "x"), leaf(np.ones(3), "b")
    found = grads(op.Reshape(op.ReduceSum(op.Mul(x, b)), [1]))
    np.testing.assert_array_equal(found["b"], np.full(3, 2.0))
    assert found["x"].shape == (2, 3)


def test_what_stores_no_gradient_gets_none_and_costs_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []
    real = node.rule_gradients

    def spy(*args: Any) -> Any:
        asked.append(tuple(args[6]))
        return real(*args)

    monkeypatch.setattr(node, "rule_gradients", spy)
    x, w = Tensor(data=np.ones((1, 2))), leaf(np.ones((2, 1)))
    assert list(grads(op.MatMul(x, w))) == ["w"]
    assert asked == [(False, True)]


def test_each_parameter_comes_once_and_always_in_the_same_order() -> None:
    def order() -> list[str]:
        ws = [leaf(np.full((2, 2), i + 1.0), f"w{i}") for i in range(4)]
        y = Tensor(data=np.ones((1, 2)))
        for w in ws:
            y = op.MatMul(y, w)
        return [p.name for p, _ in autograd.backward(op.Reshape(op.ReduceSum(y), [1]))]

    assert order() == order() == ["w3", "w2", "w1", "w0"]


def test_a_start_gradient_scales_everything() -> None:
    w = leaf([2.0])
    loss = op.Mul(w, w)
    assert [g.data.tolist() for _, g in autograd.backward(loss, 3.0)] == [[12.0]]
    assert autograd.gradients(loss, np.array([2.0]))[id(w)].data.tolist() == [8.0]


def test_no_tape_where_nobody_trains() -> None:
    tape.training = False
    y = op.Mul(leaf(2.0), 3.0)
    with pytest.raises(InvalidInput, match="was not recorded: training mode was off") as caught:
        list(autograd.backward(y))
    assert caught.value.code == "SX313"


def test_backward_starts_at_one_element() -> None:
    with pytest.raises(InvalidInput, match=r"shape \(2,\)") as caught:
        list(autograd.backward(op.Neg(leaf([1.0, 2.0]))))
    assert caught.value.code == "SX314"


def test_integers_end_the_tape() -> None:
    w = leaf([1.0, 3.0])
    assert not op.ArgMax(w, axis=0).requires_grad
    assert op.TopK(w, [1], outputs=2)[0].requires_grad
    assert not op.TopK(w, [1], outputs=2)[1].requires_grad


class Cube(Operator):
    """A user's own operator."""

    def forward(self, x: Any) -> Any:
        self.x = x
        return x**3

    def backward(self, dy: Any) -> Any:
        return dy * 3 * self.x**2


def test_a_users_operator_stands_on_the_tape() -> None:
    w = leaf([2.0])
    y = Cube()(op.Mul(w, 2.0))[0]
    assert grads(y)["w"].tolist() == [2 * 3 * 16.0]


def test_a_users_operator_cannot_be_recorded_and_says_so() -> None:
    with trace.recording(trace.Trace(ops.op.opset)), pytest.raises(trace.NotTraceable, match="written in Python"):
        Cube()(leaf([2.0]))


def test_a_users_operator_with_a_wrong_number_of_gradients_is_refused() -> None:
    class Bad(Cube):
        def backward(self, dy: Any) -> Any:
            return dy, dy

    with pytest.raises(InvalidInput, match="must return 1 gradients, got 2"):
        list(autograd.backward(Bad()(leaf([2.0]))[0]))


def test_an_operator_takes_tensors() -> None:
    with pytest.raises(InvalidInput, match="must be tensors, got a ndarray"):
        Cube()(np.ones(2))  # type: ignore[arg-type]


def test_a_step_leaves_nothing_behind_without_the_collector() -> None:
    gc.disable()
    try:
        w, x = leaf(np.ones((2, 2))), Tensor(data=np.ones((1, 2)))
        y = op.MatMul(x, w)
        loss = op.Reshape(op.ReduceSum(y), [1])
        grads(loss)
        gone = [weakref.ref(y.creator), weakref.ref(loss.creator)]
        del y, loss
        assert [r() for r in gone] == [None, None]
    finally:
        gc.enable()


def program(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    y = op.Tanh(op.Add(op.MatMul(x, w), b))
    return op.Reshape(op.ReduceMean(op.Mul(y, y)), [1])  # type: ignore[no-any-return]


def test_a_recorded_step_is_the_tapes_step_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    w, b, x = leaf(rng.standard_normal((3, 2)), "w"), leaf(np.zeros(2), "b"), Tensor(data=rng.standard_normal((4, 3)), name="x")

    def step() -> Tensor:
        loss = program(w, b, x)
        with tape.no_tape():
            for p, g in list(autograd.backward(loss)):
                trace.assign(p, op.Sub(p, op.Mul(g, 0.1)).raw)
        return loss

    record = trace.Trace(ops.op.opset)
    with trace.recording(record):
        loss = step()
        ends = [loss.raw, record.value(w), record.value(b)]
    assert [t.name for t in record.assigned.values()] == ["b", "w"]
    graph = read(to_model(record.writer, "step", ends))
    feeds = [t._data.copy() for t, _ in record.inputs]
    made = Executor(graph, w.device.backend).run(graph, feeds)
    assert np.array_equal(made[0], step().data)
    assert np.array_equal(made[1], w.data)
    assert np.array_equal(made[2], b.data)


def test_a_recorded_step_takes_no_tensor_for_one_that_is_gone() -> None:
    """Python reuses the id of a tensor that is gone for the next one: constants, results that are assigned, and settings."""
    host = leaf(np.zeros(1)).device
    record = trace.Trace(ops.op.opset)
    with trace.recording(record):
        found = []
        for n in range(20):
            constant = Tensor._of(np.full(n + 1, n, np.float32), host, False)
            constant._is_constant, constant.name = True, f"c{n}"
            found.append(trace.value(constant))
            del constant
            made = op.Neg(leaf(np.zeros(n + 1)))
            trace.assign(made, op.Neg(made).raw)
            found.append(trace.value(made))
            del made
            trace.depends([n], lambda n=n: n)
    assert [record.writer.shape(s) for s in found] == [(n // 2 + 1,) for n in range(40)]
    assert [value for _, value in record.settings.values()] == list(range(20))


def test_values_cannot_be_read_while_a_step_is_recorded() -> None:
    from singa import tensor

    with trace.recording(trace.Trace(ops.op.opset)), pytest.raises(trace.NotTraceable) as caught:
        tensor.to_numpy(op.Neg(leaf([1.0])))
    assert caught.value.code == "SX330"


@pytest.mark.parametrize("branch", [True, False])
def test_control_flow_on_tensors(branch: bool) -> None:
    from onnx import helper

    from singa_backend.autodiff.replay import replay

    w = leaf([2.0, 3.0])
    info = [helper.make_tensor_value_info(n, 11, [2]) for n in ("y", "z")]
    then = helper.make_graph([helper.make_node("Mul", ["w", "w"], ["y"])], "then", [], info[:1])
    other = helper.make_graph([helper.make_node("Neg", ["w"], ["z"])], "else", [], info[1:])
    node = helper.make_node("If", ["c"], ["out"], then_branch=then, else_branch=other)
    feeds = [helper.make_tensor_value_info("c", 9, []), helper.make_tensor_value_info("w", 11, [2])]
    proto = helper.make_graph([node], "g", feeds, [helper.make_tensor_value_info("out", 11, [2])])
    graph = read(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 21)]))
    (y,) = replay(op, graph, [Tensor(data=np.array(branch), requires_grad=False), w])
    found = grads(op.Reshape(op.ReduceSum(y), [1]))["w"].tolist()
    assert found == ([4.0, 6.0] if branch else [-1.0, -1.0])


def test_a_loop_that_counts_by_itself_and_carries_its_weight() -> None:
    """As recurrent layers are exported: a state counts the rows, another is the weight; against the rounds one by one."""
    from onnx import parser

    from singa_backend.autodiff.replay import replay

    text = """g (double[3, 2] x, double[1, 2] h, double[2, 2] w) => (double[a, b] y) {
        m = Constant<value_int = 3>()
        k = Constant<value = int32 {0}>()
        one = Constant<value = int32 {1}>()
        k1, y, w1 = Loop (m, , k, h, w) <body = b (int64 i, bool c, int32 n, double[p, 2] s, double[2, 2] v)
            => (bool d, int32 n1, double[q, 2] t, double[2, 2] v1)
            { d = Identity(c) n1 = Add(n, one) r = Gather(x, n) z = MatMul(s, v) t = Add(z, r) v1 = Identity(v) }>
    }"""
    graph = read(parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}'))
    x, h, w = leaf([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]], "x"), leaf([[1.0, -2.0]], "h"), leaf([[0.5, 1.0], [-1.0, 2.0]], "w")
    (made,) = replay(op, graph, [x, h, w])
    found = grads(op.Reshape(op.ReduceSum(made), [1]))
    y = h
    for row in range(3):
        y = op.Add(op.MatMul(y, w), op.Gather(x, row))
    for name, g in grads(op.Reshape(op.ReduceSum(y), [1])).items():
        np.testing.assert_allclose(found[name], g, rtol=1e-12, err_msg=name)


def test_an_operator_without_gradient_is_named() -> None:
    """The gradient of Floor is zero, with a warning if it is the only one; the gradient of ArgMax is an error."""
    w = leaf([1.5])
    assert grads(op.Add(op.Floor(w), op.Mul(w, 2.0)))["w"].tolist() == [2.0]
    with pytest.warns(NoGradientWarning):
        assert grads(op.Floor(w))["w"].tolist() == [0.0]
    with pytest.raises(SonnxError):
        list(autograd.backward(op.Cast(op.ArgMax(w), to=1)))


# --- tensors that are changed in place, used again, or store a gradient on the way --------------------------------------


def test_what_an_operator_has_read_must_stay_until_its_gradient_is_taken() -> None:
    """With the new values the gradients would be those of another loss."""
    w, v = leaf([3.0], "w"), leaf([2.0], "v")
    first, second, apart = op.Mul(w, v), op.Mul(op.Mul(w, v), v), op.Add(op.Neg(w), v)
    for p, g in autograd.backward(first):
        p -= op.Mul(g, 0.1)
    with pytest.raises(InvalidInput, match=r"[wv] was changed after Mul#\d+ had read it") as caught:
        list(autograd.backward(second))
    assert caught.value.code == "SX370"
    assert grads(apart) == {"w": [-1.0], "v": [1.0]}  # the gradient of a sum needs the shapes only


def test_a_batch_that_is_written_over_is_named() -> None:
    w, x = leaf([3.0]), Tensor(data=np.array([5.0]), name="x")
    y = op.Mul(w, x)
    x.copy_from_numpy(np.array([7.0]))
    with pytest.raises(InvalidInput, match="x was changed"):
        list(autograd.backward(y))


def test_what_the_tape_made_is_not_changed_in_place() -> None:
    w = leaf([3.0])
    loss = op.Mul(w, w)
    with pytest.raises(InvalidInput, match=r", which Mul#\d+ produced, must not be changed in place") as caught:
        loss += op.Mul(w, 2.0)
    assert caught.value.code == "SX370"
    assert grads(loss) == {"w": [6.0]}
    total = Tensor(data=np.zeros(1))
    total += loss  # a leaf gathers values, as metrics do
    assert total.data.tolist() == [9.0]


def test_a_state_that_is_filled_anew_is_a_leaf() -> None:
    """Nothing flows into the steps before, and what read the old state has its gradient."""
    w = leaf([3.0])
    h = op.Mul(w, 2.0)
    before = op.Add(h, 1.0)
    h.set_value(5.0)
    assert h.is_dummy()
    assert grads(op.Mul(h, w)) == {"w": [5.0]}
    assert grads(before) == {"w": [2.0]}


def test_a_tensor_on_the_way_that_stores_its_gradient_is_given() -> None:
    w = leaf([3.0])
    y = op.Mul(w, 2.0)
    y.name, y.stores_grad = "y", True
    loss = op.Add(op.Mul(y, y), y)
    assert grads(loss) == {"y": [13.0], "w": [26.0]}
    opt.SGD(lr=0.1)(loss)  # only leaves are parameters
    assert (y.data.tolist(), w.data.tolist()) == ([6.0], [pytest.approx(0.4)])


def test_copies_of_what_the_tape_made_stay_on_it() -> None:
    w = leaf([[3.0, 2.0]])
    y = op.Mul(w, 2.0)
    copies = [y.clone(), y.copy(), y.contiguous(), op.Transpose(op.Transpose(y)).contiguous()]
    for z in copies:
        assert grads(op.Reshape(op.ReduceSum(z), [1]))["w"].tolist() == [[2.0, 2.0]]
    assert [np.shares_memory(z.data, y.data) for z in copies] == [False, True, False, False]


def test_an_operator_of_a_user_serves_one_call_at_a_time() -> None:
    cube = Cube()
    w, v = leaf([2.0], "w"), leaf([3.0], "v")
    for _ in range(3):  # one call a step is what a model does that keeps its operator
        assert grads(cube(w)[0]) == {"w": [12.0]}
    with pytest.raises(InvalidInput, match="must not be its own output") as caught:
        cube(cube(w)[0])
    assert caught.value.code == "SX371"
    cube = Cube()
    with pytest.raises(InvalidInput, match="was called again") as caught:
        list(autograd.backward(op.Add(cube(w)[0], cube(v)[0])))
    assert caught.value.code == "SX371"


def test_a_wide_tape_is_played_in_time_that_grows_with_it() -> None:
    """10,000 branches that are ready at once: sorting them again for each one took 31 s instead of 2."""
    w = leaf([1.0])
    loss = op.Sum(*[op.Mul(w, float(i)) for i in range(10_000)])
    start = time.process_time()
    found = grads(loss)
    assert found["w"].tolist() == [sum(range(10_000))]
    assert time.process_time() - start < 10


# --- graphs among the attributes --------------------------------------------------------------------------------------


@other_device.runs
@pytest.mark.parametrize("place", ["CPU", other_device.NAME])
def test_a_graph_takes_in_tensors_of_any_device(place: str) -> None:
    """The graph is written before it meets the device of what it takes from outside."""
    dev = device.resolve(place)
    w = Tensor(data=dev.backend.put(np.array([2.0, 3.0])), device=dev, stores_grad=True, name="w")
    y = op.If(True, then_branch=op.graph(lambda op: [op.Mul(w, w)], []), else_branch=op.graph(lambda op: [op.Neg(w)], []))
    found = grads(op.ReduceSum(y, keepdims=0))
    np.testing.assert_array_equal(dev.backend.get(found["w"]), [4.0, 6.0])


@other_device.runs
@pytest.mark.parametrize("place", ["CPU", other_device.NAME])
def test_a_sequence_of_any_device(place: str) -> None:
    dev = device.resolve(place)
    xs = Tensor(data=dev.backend.put([np.ones(2), np.zeros(3)]), device=dev, requires_grad=False)
    y = op.ConcatFromSequence(op.SequenceInsert(xs, Tensor(data=dev.backend.put(np.full(1, 7.0)), device=dev)), axis=0)
    np.testing.assert_array_equal(dev.backend.get(y.data), [1, 1, 0, 0, 0, 7])


def test_a_scan_of_which_no_slice_takes_a_gradient() -> None:
    """Then the Scan that goes backward has no scan outputs, and an empty list of their axes."""
    w, state = leaf([2.0, 0.5]), Tensor(data=np.array([1.0, 1.0]), requires_grad=False)
    xs = Tensor(data=np.array([[1.0, 2.0], [3.0, 4.0]]), requires_grad=False)
    body = op.graph(lambda op, h, x: [op.Add(op.Mul(h, w), x)], [op.type(state), op.type(state)])
    y = op.Scan(state, xs, body=body, num_scan_inputs=1)
    np.testing.assert_array_equal(y.data, [9.0, 5.25])  # (1 w + x1) w + x2
    np.testing.assert_array_equal(grads(op.ReduceSum(y, keepdims=0))["w"], [2 * 2 + 1, 2 * 0.5 + 2])


@pytest.mark.parametrize(("dtype", "number"), [(np.int64, 0.5), (np.int32, float("nan")), (np.int64, 2**70), (np.uint8, -1),
                                               (np.uint8, 300), (np.int8, [1, 200]), (bool, 0.5)])  # fmt: skip
def test_a_number_that_integers_cannot_hold_is_refused(dtype: Any, number: Any) -> None:
    x = Tensor(data=np.zeros(2, dtype), requires_grad=False)
    with pytest.raises(InvalidInput, match=r"SX372.*numbers passed to (Add|And) must be "):
        (op.And if dtype is bool else op.Add)(x, number)


def test_a_whole_number_of_another_kind_is_held() -> None:
    x = Tensor(data=np.arange(3, dtype=np.int32), requires_grad=False)
    for one in (1.0, True, np.int64(1), np.float32(1)):
        y = op.Add(x, one)
        assert y.data.dtype == np.int32
        np.testing.assert_array_equal(y.data, [1, 2, 3])
