"""Gradients of gradients compared with PyTorch's double backward: control flow, windows, and the points at which rules have conventions."""

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


def ours(function: Callable[..., Any], xs: list[np.ndarray]) -> tuple[list[Any], list[Any]]:
    """The gradients of a weighted sum of the outputs, and those of a weighted sum of these gradients."""
    leaves = [Tensor(data=np.array(x), requires_grad=True) for x in xs]

    def gradients(ys: list[Any], create_graph: bool) -> list[Any]:
        parts = [op.ReduceSum(op.Mul(y, op.constant(weights(y.shape))), None, keepdims=0) for y in ys]
        found = {id(x): g for x, g in _walk(op.Sum(*parts), None, create_graph, {id(x) for x in leaves})}
        return [found.get(id(x)) for x in leaves]

    made = function(*leaves)
    first = gradients(list(made) if isinstance(made, tuple) else [made], True)
    kept = [g for g in first if g is not None and g.requires_grad]
    second = gradients(kept, False) if kept else [None] * len(leaves)
    return [None if g is None else g.data for g in first], [None if g is None else g.data for g in second]


def theirs(function: Callable[..., Any], xs: list[np.ndarray]) -> tuple[list[Any], list[Any]]:
    leaves = [torch.tensor(x, requires_grad=True) for x in xs]

    def gradients(ys: list[Any], create_graph: bool) -> list[Any]:
        loss = sum((y * torch.from_numpy(weights(tuple(y.shape)))).sum() for y in ys)
        return list(torch.autograd.grad(loss, leaves, create_graph=create_graph, allow_unused=True))

    made = function(*leaves)
    first = gradients(list(made) if isinstance(made, tuple) else [made], True)
    kept = [g for g in first if g is not None and g.requires_grad]
    second = gradients(kept, False) if kept else [None] * len(leaves)
    return [None if g is None else g.detach().numpy() for g in first], [None if g is None else g.numpy() for g in second]


def compare(mine: Callable[..., Any], reference: Callable[..., Any], xs: list[np.ndarray]) -> None:
    for a, b in zip(ours(mine, xs), theirs(reference, xs), strict=True):
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


# --- control flow


def looped(x: Any, w: Any, count: int, inner: int) -> Any:
    """Loops within a loop, whose states change by captured values; scan outputs too."""

    def outer_body(o: Any, i: Any, go: Any, s: Any) -> list[Any]:
        def inner_body(q: Any, j: Any, go: Any, t: Any) -> list[Any]:
            return [q.Identity(go), q.Tanh(q.Add(q.Mul(t, w), s))]

        body = o.graph(inner_body, [i_type, b_type, o.type(s)])
        r = o.Loop(o.constant(np.array(inner)), o.constant(np.array(True)), s, body=body)
        return [o.Identity(go), r, o.Mul(r, s)]

    i_type, b_type = INT, BOOL
    body = op.graph(outer_body, [i_type, b_type, op.type(x)])
    return op.Loop(op.constant(np.array(count)), op.constant(np.array(True)), x, body=body, outputs=2)


def looped_there(x: Any, w: Any, count: int, inner: int) -> Any:
    s, scans = x, []
    for _ in range(count):
        t = s
        for _ in range(inner):
            t = torch.tanh(t * w + s)
        scans.append(t * s)
        s = t
    return (s, torch.stack(scans)) if scans else (s, torch.zeros((0, *x.shape), dtype=x.dtype))


from singa_backend.interpreters.base import BOOL, INT  # noqa: E402


@pytest.mark.parametrize("count, inner", [(3, 2), (1, 1), (2, 0), (0, 2)])
def test_loops_in_a_loop(count: int, inner: int) -> None:
    compare(lambda x, w: looped(x, w, count, inner), lambda x, w: looped_there(x, w, count, inner), [draw(3), draw(3)])
