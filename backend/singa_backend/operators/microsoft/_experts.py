"""What mixtures of experts share: the experts of each token and their shares, the layout of a gate, and the activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import OperatorError
from ..activation import gelu, sigmoid
from ._api import Array, Op, V, Xp
from .gates import swiglu, swiglu_in, swish_in


def top(xp: Xp, x: Array, k: int) -> Array:
    """Return the indices of the k largest values of each row, the first of equal ones first."""
    order: Array = xp.argsort(-x, axis=-1, kind="stable")[..., :k]
    return order


# --- the router -------------------------------------------------------------------------------------------------------


def routed(xp: Xp, router: Array, values: Array | None, k: int, normalize: bool) -> tuple[Array, Array]:
    """Return the k experts with the largest router value of each row, and their shares.

    The shares are `values`, or the softmax of the router's; `normalize` divides them by their sum over the k experts.
    """
    chosen = top(xp, router, k)
    if values is None:
        e = xp.exp(router - router.max(axis=1, keepdims=True))
        values = e / e.sum(axis=1, keepdims=True)
    shares = xp.take_along_axis(values, chosen, axis=1)
    return chosen, shares / shares.sum(axis=1, keepdims=True) if normalize else shares


def routed_in(op: Op, router: V, values: V | None, k: int, normalize: bool) -> V:
    """Write the shares as rows x experts, with 0 for an expert that is not chosen."""
    _, chosen = op.TopK(router, [k], axis=1, outputs=2)
    shares = op.GatherElements(op.Softmax(router, axis=1) if values is None else values, chosen, axis=1)
    if normalize:
        shares = op.Div(shares, op.ReduceSum(shares, [1], keepdims=1))
    return op.ScatterElements(op.zeros_like(router), chosen, shares, axis=1)


def combined(xp: Xp, rows: Array, experts: int, routing: tuple[Array, Array], expert: Callable[[Array, int], Array]) -> Array:
    """Sum what the chosen experts return for their rows, times their shares; an expert without rows is not computed."""
    chosen, shares = routing
    total = xp.zeros(rows.shape, dtype=rows.dtype)
    for e in range(experts):
        token, place = xp.nonzero(chosen == e)
        if token.size:
            total[token] += shares[token, place][:, None] * expert(rows[token], e)
    return total


def combined_in(op: Op, results: V, shares: V) -> V:
    """Write `combined` of experts x rows x values, where every expert has computed every row."""
    weighted = op.Mul(results, op.Unsqueeze(op.Transpose(shares, perm=[1, 0]), [2]))
    return op.ReduceSum(weighted, [0], keepdims=0)


# --- an expert --------------------------------------------------------------------------------------------------------


def halves(first: Array, fusion: int) -> tuple[Array, Array]:
    """Return gate and linear part of joined weights: in turns (fusion 1), or one behind the other (2)."""
    inner = first.shape[-1] // 2
    return (first[..., ::2], first[..., 1::2]) if fusion == 1 else (first[..., :inner], first[..., inner:])


def halves_in(op: Op, first: V, fusion: int) -> Sequence[V]:
    """`halves` of experts x rows x values, in ONNX operators."""
    if fusion == 1:
        return [op.Slice(first, [i], [2**62], [2], [2]) for i in (0, 1)]
    parts: Sequence[V] = op.Split(first, axis=2, num_outputs=2, outputs=2)
    return parts


@dataclass(frozen=True)
class ExpertActivation:
    """The activation between the two layers of an expert.

    Attributes:
        name: relu, gelu, silu, identity or relu2; swiglu and geglu are gated.
        alpha: of swiglu.
        beta: of swiglu.
        limit: of swiglu; None without one.
        late: whether the limit bounds the gate after its activation.
    """

    name: str
    alpha: float
    beta: float
    limit: float | None
    late: int

    @property
    def gated(self) -> bool:
        """Whether it has a linear part."""
        return self.name in ("swiglu", "geglu")

    @staticmethod
    def check(name: str, known: Sequence[str]) -> None:
        """Raise OperatorError for an activation that is not known."""
        if name not in known:
            raise OperatorError(f"activation_type must be one of {', '.join(known)}, got {name!r}", code="SX404")

    def __call__(self, xp: Xp, x: Array, linear: Array | None) -> Array:
        """Compute it, times the linear part; Gelu is the approximation with tanh, as in onnxruntime's kernel."""
        if self.name == "swiglu":
            return swiglu(xp, x, linear, self.alpha, self.beta, self.limit, late=bool(self.late))
        plain: dict[str, Callable[[], Array]] = {
            "gelu": lambda: gelu(xp, x, approximate="tanh"),
            "geglu": lambda: gelu(xp, x, approximate="tanh"),
            "silu": lambda: x * sigmoid(xp, x),
            "identity": lambda: x,
            "relu": lambda: xp.maximum(x, 0),
            "relu2": lambda: xp.maximum(x, 0) ** 2,
        }
        y = plain[self.name]()
        return y if linear is None else y * linear

    def body(self, op: Op, x: V, linear: V | None) -> V:
        """Write it in ONNX operators."""
        if self.name == "swiglu":
            return swiglu_in(op, x, linear, self.alpha, self.beta, self.limit, late=bool(self.late))
        plain: dict[str, Callable[[], V]] = {
            "gelu": lambda: op.Gelu(x, approximate="tanh"),
            "geglu": lambda: op.Gelu(x, approximate="tanh"),
            "silu": lambda: swish_in(op, x),
            "identity": lambda: x,
            "relu": lambda: op.Relu(x),
            "relu2": lambda: op.Mul(op.Relu(x), op.Relu(x)),
        }
        y = plain[self.name]()
        return y if linear is None else op.Mul(y, linear)
