"""Gradients of gradients compared with PyTorch's: control flow, windows, normalizations, and the points of conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from singa import autograd
from singa._core import tape
from singa._core.backward import _walk
from singa._core.tensor import Tensor, op
from singa_backend.interpreters.base import BOOL, INT

RTOL, ATOL = 1e-9, 1e-11
KINKS = np.array([-3.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0])
"""Bounds and bends of the activations, and points between them."""


@pytest.fixture(autouse=True)
def training() -> Iterator[None]:
    with tape.restored():
        autograd.training = True
        yield


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def weights(shape: Any) -> np.ndarray:
    """Different numbers, the same for both engines."""
    return np.cos(1.0 + np.arange(int(np.prod(shape)), dtype=np.float64)).reshape(shape)


def ours(function: Callable[..., Any], xs: list[np.ndarray], order: int) -> list[list[Any]]:
    """The gradients of a weighted sum of the outputs, those of a weighted sum of these gradients, and so on."""
    leaves = [Tensor(data=np.array(x), requires_grad=True) for x in xs]
    made = function(*leaves)
    ys, found = list(made) if isinstance(made, tuple) else [made], []
    for left in range(order, 0, -1):
        parts = [op.ReduceSum(op.Mul(y, op.constant(weights(y.shape))), None, keepdims=0) for y in ys]
        grads = {id(x): g for x, g in _walk(op.Sum(*parts), None, left > 1, {id(x) for x in leaves})} if parts else {}
        found.append([grads.get(id(x)) for x in leaves])
        ys = [g for g in found[-1] if g is not None and g.requires_grad]
    return [[None if g is None else g.data for g in grads] for grads in found]


def theirs(function: Callable[..., Any], xs: list[np.ndarray], order: int) -> list[list[Any]]:
    leaves = [torch.tensor(x, requires_grad=True) for x in xs]
    made = function(*leaves)
    ys, found = list(made) if isinstance(made, tuple) else [made], []
    for _ in range(order):
        loss = sum((y * torch.from_numpy(weights(tuple(y.shape)))).sum() for y in ys)
        grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True) if ys else [None] * len(xs)
        found.append(list(grads))
        ys = [g for g in grads if g is not None and g.requires_grad]
    return [[None if g is None else g.detach().numpy() for g in grads] for grads in found]


def compare(mine: Callable[..., Any], reference: Callable[..., Any], xs: list[np.ndarray], order: int = 2) -> None:
    for a, b in zip(ours(mine, xs, order), theirs(reference, xs, order), strict=True):
        for x, g, h in zip(xs, a, b, strict=True):
            zero = np.zeros_like(x)
            np.testing.assert_allclose(zero if g is None else g, zero if h is None else h, rtol=RTOL, atol=ATOL)


# --- activations, at their kinks too

ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Relu": (lambda x: op.Relu(x), torch.relu),
    "LeakyRelu": (lambda x: op.LeakyRelu(x, alpha=0.25), lambda x: functional.leaky_relu(x, 0.25)),
    "Elu": (lambda x: op.Elu(x, alpha=0.75), lambda x: functional.elu(x, 0.75)),
    "Celu": (lambda x: op.Celu(x, alpha=0.75), lambda x: functional.celu(x, 0.75)),
    "Selu": (lambda x: op.Selu(x, alpha=1.5, gamma=1.25), lambda x: 1.25 * functional.elu(x, 1.5)),
    "Softplus": (lambda x: op.Softplus(x), functional.softplus),
    "Softsign": (lambda x: op.Softsign(x), functional.softsign),
    "Sigmoid": (lambda x: op.Sigmoid(x), torch.sigmoid),
    "Tanh": (lambda x: op.Tanh(x), torch.tanh),
    "Gelu": (lambda x: op.Gelu(x), functional.gelu),
    "Gelu-tanh": (lambda x: op.Gelu(x, approximate="tanh"), lambda x: functional.gelu(x, approximate="tanh")),
    "Mish": (lambda x: op.Mish(x), functional.mish),
    "HardSigmoid": (lambda x: op.HardSigmoid(x, alpha=0.25, beta=0.5), lambda x: (0.25 * x + 0.5).clamp(0, 1)),
    "HardSwish": (lambda x: op.HardSwish(x), functional.hardswish),
    "Shrink": (lambda x: op.Shrink(x, lambd=0.5, bias=0.5), lambda x: functional.softshrink(x, 0.5)),
    "ThresholdedRelu": (lambda x: op.ThresholdedRelu(x, alpha=0.5), lambda x: functional.threshold(x, 0.5, 0.0)),
    "Clip": (lambda x: op.Clip(x, -1.0, 1.0), lambda x: x.clamp(-1, 1)),
    "Abs": (lambda x: op.Abs(x), torch.abs),
    "Exp of Abs": (lambda x: op.Exp(op.Abs(x)), lambda x: torch.exp(torch.abs(x))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation(name: str) -> None:
    mine, reference = ACTIVATIONS[name]
    compare(lambda x: op.Mul(mine(x), op.Add(x, 2.0)), lambda x: reference(x) * (x + 2.0), [KINKS])


# --- points at which a rule divides by what may be 0


def with_zeros(*zeros: tuple[int, int]) -> np.ndarray:
    x = draw(4, 5)
    for at in zeros:
        x[at] = 0.0
    return x


ZEROS = with_zeros((1, 2), (2, 0), (2, 3), (3, 0), (3, 2), (3, 4))
"""Rows without a zero, with one, two and three."""

SPECIAL: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]] = {
    "ReduceProd": (lambda x: op.ReduceProd(x, [1]), lambda x: x.prod(1), [ZEROS]),
    "ReduceProd of all": (lambda x: op.ReduceProd(x, [0, 1], keepdims=0), lambda x: x.prod(), [with_zeros((1, 1))]),
    "CumProd": (lambda x: op.CumProd(x, 1), lambda x: x.cumprod(1), [ZEROS]),
    "CumProd, reversed": (lambda x: op.CumProd(x, 1, reverse=1), lambda x: x.flip(1).cumprod(1).flip(1), [ZEROS]),
    "ScatterElements mul": (
        lambda x, u: op.ScatterElements(x, op.constant(np.array([0, 1, 1, 1, 2, 2])), u, reduction="mul"),
        lambda x, u: x * torch.stack([u[0], u[1] * u[2] * u[3], u[4] * u[5], torch.ones((), dtype=u.dtype)]),
        [np.array([0.0, 2.0, 0.0, 3.0]), np.array([1.5, 0.0, 0.5, 2.0, 0.0, 4.0])],
    ),
    "ReduceL2": (lambda x: op.ReduceL2(x, [1]), lambda x: torch.linalg.vector_norm(x, dim=1), [draw(3, 4)]),
    "LpNormalization": (lambda x: op.LpNormalization(x, axis=1), lambda x: functional.normalize(x, dim=1), [draw(3, 4)]),
    "ReduceMax": (lambda x: op.ReduceMax(x, [1]), lambda x: x.amax(1), [np.round(draw(4, 5))]),
    "Max": (lambda x, y: op.Max(x, y), torch.maximum, [np.round(draw(4, 5)), np.round(draw(5, 4).T)]),
    "Pow, by 0": (lambda x: op.Pow(x, 0.0), lambda x: x**0.0, [KINKS]),
    "Pow, by 1": (lambda x: op.Pow(x, 1.0), lambda x: x**1.0, [KINKS]),
    "Pow, by 2": (lambda x: op.Pow(x, 2.0), lambda x: x**2.0, [KINKS]),
    "Pow, by 3": (lambda x: op.Pow(x, 3.0), lambda x: x**3.0, [KINKS]),
    "Det": (lambda x: op.Det(x), torch.linalg.det, [draw(2, 3, 3)]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_point(name: str) -> None:
    mine, reference, xs = SPECIAL[name]
    compare(lambda *v: op.Mul(mine(*v), mine(*v)) if "Pow" in name else mine(*v),
            lambda *v: reference(*v) ** 2 if "Pow" in name else reference(*v), xs)  # fmt: skip


# --- windows


@dataclass(frozen=True)
class Window:
    x: tuple[int, ...]
    w: tuple[int, ...]
    options: dict[str, Any]


TRANSPOSED = {
    "plain": Window((2, 3, 4), (3, 2, 3), {}),
    "strides, padding": Window((2, 3, 4, 5), (3, 2, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    "output padding": Window((1, 2, 3, 3), (2, 2, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "dilations": Window((2, 2, 4, 4), (2, 3, 2, 2), {"dilation": (2, 3), "stride": (1, 2)}),
    "groups": Window((2, 4, 3, 3), (4, 2, 2, 2), {"groups": 2, "stride": 2, "dilation": 2, "padding": 1}),
    "no sample": Window((0, 2, 3, 3), (2, 2, 2, 2), {"stride": 2}),
    "three axes": Window((1, 2, 2, 3, 2), (2, 1, 2, 2, 2), {"stride": (2, 1, 2), "padding": (0, 1, 0)}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution(name: str, transposed: bool) -> None:
    case = TRANSPOSED[name]
    rank, options = len(case.x) - 2, dict(case.options)
    wide = {n: (v,) * rank if isinstance(v, int) else v for n, v in options.items() if n != "groups"}
    given = {"strides": wide.get("stride"), "dilations": wide.get("dilation"), "group": options.get("groups", 1)}
    given["pads"] = [*wide.get("padding", (0,) * rank)] * 2
    if transposed:
        given["output_padding"] = wide.get("output_padding")
        function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
        xs, mine = [draw(*case.x), draw(*case.w), draw(case.w[1] * given["group"])], op.ConvTranspose
    else:
        options.pop("output_padding", None)
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
        size = tuple(n + 4 for n in case.x[2:])
        filters = (case.w[0], case.x[1] // given["group"], *case.w[2:])
        xs, mine = [draw(*case.x[:2], *size), draw(*filters), draw(filters[0])], op.Conv
    given = {n: v if v is None or isinstance(v, int) else list(v) for n, v in given.items()}
    compare(lambda *v: op.Tanh(mine(*v, **given)), lambda *v: torch.tanh(function(*v, **options)), xs)


# --- normalizations and losses

TARGET = np.array([0, 2, 1, 2])
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]] = {
    "BatchNormalization": (
        lambda x, s, b: op.BatchNormalization(
            x, s, b, op.constant(np.zeros(3)), op.constant(np.ones(3)), epsilon=2**-10, training_mode=1, outputs=3
        )[0],
        lambda x, s, b: functional.batch_norm(x, None, None, s, b, training=True, eps=2**-10),
        [draw(4, 3, 2), draw(3), draw(3)],
    ),
    "LayerNormalization": (
        lambda x, s, b: op.LayerNormalization(x, s, b, epsilon=2**-10),
        lambda x, s, b: functional.layer_norm(x, (4,), s, b, 2**-10),
        [draw(3, 4), draw(4), draw(4)],
    ),
    "RMSNormalization": (
        lambda x, s: op.RMSNormalization(x, s, epsilon=2**-10),
        lambda x, s: functional.rms_norm(x, (4,), s, 2**-10),
        [draw(3, 4), draw(4)],
    ),
    "InstanceNormalization": (
        lambda x, s, b: op.InstanceNormalization(x, s, b, epsilon=2**-10),
        lambda x, s, b: functional.instance_norm(x, None, None, s, b, eps=2**-10),
        [draw(2, 3, 4), draw(3), draw(3)],
    ),
    "GroupNormalization": (
        lambda x, s, b: op.GroupNormalization(x, s, b, num_groups=2, epsilon=2**-10),
        lambda x, s, b: functional.group_norm(x, 2, s, b, 2**-10),
        [draw(2, 4, 3), draw(4), draw(4)],
    ),
    "SoftmaxCrossEntropyLoss": (
        lambda x: op.SoftmaxCrossEntropyLoss(x, op.constant(TARGET), reduction="mean", ignore_index=1),
        lambda x: functional.cross_entropy(x, torch.from_numpy(TARGET), ignore_index=1),
        [draw(4, 3)],
    ),
    "LogSoftmax": (lambda x: op.LogSoftmax(x, axis=1), lambda x: functional.log_softmax(x, 1), [draw(4, 3)]),
    "ReduceLogSumExp": (lambda x: op.ReduceLogSumExp(x, [1]), lambda x: torch.logsumexp(x, 1), [draw(4, 3)]),
    "CumSum": (lambda x: op.Exp(op.CumSum(x, 1)), lambda x: torch.exp(x.cumsum(1)), [draw(4, 3)]),
    "Attention": (
        lambda q, k, v: op.Attention(q, k, v, is_causal=1),
        lambda q, k, v: torch.softmax((q @ k.mT / 2).masked_fill(torch.ones(3, 3).triu(1) > 0, -torch.inf), -1) @ v,
        [draw(1, 2, 3, 4), draw(1, 2, 3, 4) + 1, draw(1, 2, 3, 4) - 1],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_normalization_or_loss(name: str) -> None:
    mine, reference, xs = LOSSES[name]
    compare(lambda *v: op.Tanh(mine(*v)), lambda *v: torch.tanh(reference(*v)), xs)


# --- control flow


def times(body: Callable[..., list[Any]], count: int, *states: Any, outputs: int = 0) -> Any:
    """A Loop of `count` iterations; the body takes (op, i, states...)."""

    def step(o: Any, i: Any, go: Any, *inner: Any) -> list[Any]:
        return [o.Identity(go), *body(o, i, *inner)]

    here = op.graph(step, [INT, BOOL, *map(op.type, states)])
    return op.Loop(op.constant(np.array(count)), op.constant(np.array(True)), *states, body=here, outputs=outputs or len(states))


def nested(x: Any, w: Any, count: int, inner: int) -> Any:
    """A loop in a loop, whose states change by captured values; the outer one has scan outputs."""

    def outer_body(o: Any, i: Any, s: Any) -> list[Any]:
        def inner_body(q: Any, j: Any, go: Any, t: Any) -> list[Any]:
            return [q.Identity(go), q.Tanh(q.Add(q.Mul(t, w), s))]

        body = o.graph(inner_body, [INT, BOOL, o.type(s)])
        r = o.Loop(o.constant(np.array(inner)), o.constant(np.array(True)), s, body=body)
        return [r, o.Mul(r, s)]

    return times(outer_body, count, x, outputs=2)


def nested_there(x: Any, w: Any, count: int, inner: int) -> Any:
    s, scans = x, []
    for _ in range(count):
        t = s
        for _ in range(inner):
            t = torch.tanh(t * w + s)
        scans.append(t * s)
        s = t
    return s, torch.stack(scans) if scans else torch.zeros((0, *x.shape), dtype=x.dtype)


@pytest.mark.parametrize("count, inner", [(3, 2), (1, 1), (2, 0), (0, 2)])
def test_loops_in_a_loop(count: int, inner: int) -> None:
    compare(lambda x, w: nested(x, w, count, inner), lambda x, w: nested_there(x, w, count, inner), [draw(3), draw(3)], 3)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_branch_in_a_loop(count: int) -> None:
    """Even iterations multiply by w, odd ones add it, in branches that capture values of all levels."""

    def body(o: Any, i: Any, s: Any) -> list[Any]:
        even = o.Equal(o.Mod(i, 2), 0)
        product = o.graph(lambda q: [q.Mul(q.Exp(s), leaf[0])], [])
        total = o.graph(lambda q: [q.Tanh(q.Add(s, leaf[0]))], [])
        return [o.If(even, then_branch=product, else_branch=total)]

    leaf: list[Any] = []

    def mine(x: Any, w: Any) -> Any:
        leaf[:] = [w]
        return times(body, count, x)

    def reference(x: Any, w: Any) -> Any:
        for i in range(count):
            x = torch.tanh(x + w) if i % 2 else torch.exp(x) * w
        return x * 1.0

    compare(mine, reference, [draw(3) / 4, draw(3) / 4], 3)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_loop_in_a_scan(length: int) -> None:
    def mine(h: Any, x: Any, w: Any) -> Any:
        def body(o: Any, s: Any, e: Any) -> list[Any]:
            inner = o.graph(lambda q, i, go, t: [q.Identity(go), q.Tanh(q.Add(q.Mul(t, w), e))], [INT, BOOL, o.type(s)])
            t = o.Loop(o.constant(np.array(2)), o.constant(np.array(True)), s, body=inner)
            return [t, o.Mul(t, e)]

        here = op.graph(body, [op.type(h), op.type(x, drop=[0])])
        return op.Scan(h, x, body=here, num_scan_inputs=1, outputs=2)

    def reference(h: Any, x: Any, w: Any) -> Any:
        scans = []
        for e in x:
            for _ in range(2):
                h = torch.tanh(h * w + e)
            scans.append(h * e)
        return h * 1.0, torch.stack(scans) if scans else x * 1.0

    compare(mine, reference, [draw(3), draw(length, 3), draw(3) / 2])


def test_a_sequence_as_a_state() -> None:
    """Each iteration reads the last element of a sequence and inserts another one; an element is erased after the loop."""

    def mine(x: Any, w: Any) -> Any:
        def body(o: Any, i: Any, s: Any) -> list[Any]:
            return [o.SequenceInsert(s, o.Tanh(o.Mul(o.SequenceAt(s, -1), w)))]

        made = times(body, 3, op.SequenceConstruct(x))
        return op.ConcatFromSequence(op.SequenceErase(made, 1), axis=0)

    def reference(x: Any, w: Any) -> Any:
        made = [x]
        for _ in range(3):
            made.append(torch.tanh(made[-1] * w))
        return torch.cat([made[0], *made[2:]])

    compare(mine, reference, [draw(3), draw(3)])


def test_a_sequence_map() -> None:
    def mine(x: Any, w: Any) -> Any:
        parts = op.SplitToSequence(x, op.constant(np.array([1, 2, 1])))
        body = op.graph(lambda o, v: [o.Mul(o.Exp(v), o.Mul(v, w))], [op.type(x)])
        return op.ConcatFromSequence(op.SequenceMap(parts, body=body), axis=0)

    compare(mine, lambda x, w: torch.exp(x) * (x * w), [draw(4, 2), draw(2)])
