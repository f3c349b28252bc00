"""Mixtures of experts whose weights have few bits (QMoE), by the machine code of products with such weights.

Pairs of a row and one of its k experts are in the order of the experts, so that an expert computes adjacent rows.  There are as
many pairs in every run: only where the rows of an expert begin depends on the router.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..elementwise.compile import available, level
from ..gemm import few_bits as code
from ..gemm.few_bits import FewBitsKind
from ..gemm.frame import FIELDS, FrameFunction
from ..gemm.tiles import TILES
from ..ir.versioned import versioned
from .expressions import ExpressionCall, compute, trace
from .few_bits import DOMAIN, Product, packed_weights, value_table
from .few_bits_packing import LARGEST, UINT8, Blocks, pack, signed, unpacked
from .lowering import F32, derived, ordered
from .machine_steps import bound_product
from .table import Site, kernel
from .values import FINITE, Bound, Value

INT64 = np.dtype(np.int64)


# --- the router


@dataclass(frozen=True, eq=False)
class RoutedPairs:
    """The pairs of a run.

    Attributes:
        rows: int64, the row of each pair.
        places: int64, (rows, k): the pairs of each row, in the order of their experts.
        shares: float32, (rows, k): of these.
        groups: int64, (experts that may be chosen, 3): the number of an expert, its first pair, and their number; then zeros.
    """

    rows: Value
    places: Value
    shares: Value
    groups: Value

    def all(self) -> tuple[Value, ...]:
        """All values."""
        return self.rows, self.places, self.shares, self.groups


def routed(site: Site, router: Value, values: Value | None, k: int) -> RoutedPairs:
    """The experts with the largest values of the router, the first of equal ones, and their shares, as in the definition."""
    (rows, experts), count = router.shape, router.shape[0] * k
    pairs = RoutedPairs(
        site.new((count,), INT64), site.new((rows, k), INT64), site.new((rows, k), F32), site.new((min(experts, count), 3), INT64)
    )
    normal = values is None or bool(site.attributes["normalize_routing_weights"])
    starts = np.arange(rows)[:, None] * experts

    def bind() -> Bound:
        shares = None if values is None else values.array
        return [(_route, (router.array, shares, normal, starts, [v.array for v in pairs.all()]))]

    site.emit(bind, reads=(router, values), writes=pairs.all(), kernel="numpy.router")
    return pairs


def _route(
    router: np.ndarray, values: np.ndarray | None, normal: bool, starts: np.ndarray, results: Sequence[np.ndarray]
) -> None:
    """Write the arrays of `RoutedPairs`."""
    rows, places, shares, groups = results
    k = shares.shape[1]
    chosen = np.negative(router).argsort(-1, "stable")[:, :k].copy()
    chosen.sort(1)
    if values is None:
        values = router - np.maximum.reduce(router, 1, keepdims=True)
        np.exp(values, values)
        values /= np.add.reduce(values, 1, keepdims=True)
    values.reshape(-1).take(chosen + starts, None, shares, "clip")
    if normal:
        shares /= np.add.reduce(shares, 1, keepdims=True)
    if len(shares) == 1:
        rows.fill(0)
        places[0] = groups[:, 1] = range(k)
        groups[:, 0], groups[:, 2] = chosen[0], 1
        return
    flat = chosen.reshape(-1)
    order = flat.argsort(kind="stable")
    np.floor_divide(order, k, rows)
    places.reshape(-1)[order] = np.arange(len(order))
    counts = np.bincount(flat)
    (present,) = counts.nonzero()
    number = len(present)
    groups[:number, 0], groups[:number, 2], groups[number:] = present, counts[present], 0
    np.cumsum(groups[: number - 1, 2], out=groups[1:number, 1])
    groups[0, 1] = 0


def combined(site: Site, z: Value, pairs: RoutedPairs, y: Value) -> None:
    """Emit the sum of the results of each row, times their shares."""
    room = site.new(y.shape, F32)
    values = (z, pairs.places, pairs.shares, room, y)
    site.emit(
        lambda: [(_combine, tuple(v.array for v in values))], reads=values[:3], writes=(room, y), kernel="numpy.sum of experts"
    )


def _combine(z: np.ndarray, places: np.ndarray, shares: np.ndarray, room: np.ndarray, y: np.ndarray) -> None:
    for i in range(places.shape[1]):
        target = room if i else y
        z.take(places[:, i], 0, target, "clip")
        target *= shares[:, i : i + 1]
        if i:
            y += room


# --- products


@dataclass(frozen=True, eq=False)
class ExpertProduct(Product):
    """The product of the rows of each expert and its weights: `weights` are those of all experts, one after the other.

    Attributes:
        experts: their number.
        bias: (experts, columns of the tiles of one), or None.
    """

    experts: int
    bias: Value | None

    def rows(self) -> dict[str, Value]:
        """Emit the step that writes the rows in the form that the code reads."""
        return self.copied(code.copying(), np.float32, "copy of rows")

    def emit_groups(self, pairs: RoutedPairs, left: dict[str, Value]) -> Value:
        """Emit the step that computes the products of all pairs."""
        site, weights, (rows, k) = self.site, self.weights, self.matrix.shape
        columns = weights.tiles // self.experts * LANES
        y = site.new((rows, self.n), F32, finiteness=FINITE)
        values = {**left, "w": weights.words, "factors": weights.scales, "y": y, "table": value_table(site)}
        values["bias"] = self.bias or site.shared_constant(("zeros", columns), lambda: np.zeros(columns, np.float32))
        if weights.zeros is not None:
            values["zeros"] = weights.zeros
        by_row: dict[str, int] = {name: values[name].strides[0] for name in ("left", "sums", "y")}
        by_expert: dict[str, int] = {
            name: values[name].nbytes // self.experts for name in ("w", "factors", "zeros") if name in values
        }
        if self.bias is not None:
            by_expert["bias"] = columns * F32.itemsize
        sizes = {**self.sizes, "stride": by_row["left"]}
        work = rows * k * self.n // pairs.groups.shape[0]
        parts = []
        for function in [code.floats(self.kind), code.panels(self.kind)][: 1 if pairs.places.shape[0] == 1 else 2]:
            bound = bound_product(site, function, sizes, values, work, sizes["groups"])
            parts.append((bound, _growth(function, [by_expert, by_row, {"rows": 1}])))

        def bind() -> Bound:
            groups = pairs.groups.array
            return [(_multiply, (groups, [GroupFrames(bound, growth, len(groups)) for bound, growth in parts]))]

        reads = [*(v for v in values.values() if v is not y), pairs.groups]
        site.emit(bind, reads=reads, writes=(y,), kernel="machine.product of experts")
        return y


def _growth(function: FrameFunction, steps: Sequence[dict[str, int]]) -> np.ndarray:
    """By how much each word of a frame grows with the number of the expert, its first row, and the number of its rows."""
    names = [*function.layout.numbers, *function.layout.pointers]
    return np.array([[0] * FIELDS + [step.get(name, 0) for name in names] for step in steps], np.int64)


class GroupFrames:
    """The frames of a function for the groups of a run.

    Attributes:
        call: calls the function with the address of a frame.
        places: the address of the frame of each group.
    """

    def __init__(self, bound: Callable[[], Bound], growth: np.ndarray, count: int) -> None:
        ((self.call, (address,)),) = bound()
        self._growth, self._base = growth, address.frames[0] - growth[2] * address.frames[0]
        self._frames = np.empty((count, growth.shape[1]), np.int64)
        self.places = [int(self._frames.ctypes.data) + i * self._frames.strides[0] for i in range(count)]
        self.keeps = address

    def write(self, groups: np.ndarray) -> None:
        """Write the frames."""
        np.matmul(groups, self._growth, self._frames)
        self._frames += self._base


def _multiply(groups: np.ndarray, parts: Sequence[GroupFrames]) -> None:
    """Call the first function for a group of one row, and the last one for others."""
    for part in parts:
        part.write(groups)
    for i, count in enumerate(groups[:, 2].tolist()):
        if not count:
            break
        part = parts[0 if count == 1 else -1]
        part.call(part.places[i])


def _packed(b: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, grain: int) -> Blocks:
    """The weights of all experts, each with whole groups of tiles; the last axes are bytes, scales, zero points."""
    room = [(0, 0), (0, -b.shape[1] % (LANES * TILES)), (0, 0)]

    def rows(v: np.ndarray) -> np.ndarray:
        return (np.pad(v, room) if room[1][1] else v).reshape(-1, v.shape[2])

    blocks = scales.shape[2]
    points = None if zeros is None else rows(zeros)
    return pack(rows(b).reshape(-1, blocks, b.shape[2] // blocks), rows(scales), points, bits, grain, signed(bits))


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The inputs of a layer of all experts.

    Attributes:
        b: bytes, (experts, n, bytes of a row).
        scales: float32.
        bias: float32, or None.
        zeros: the zero points, or None.
        bits: of a weight.
    """

    b: Value
    scales: Value | None
    bias: Value | None
    zeros: Value | None
    bits: int

    def product(self, site: Site, x: Value, block: int) -> ExpertProduct:
        """The products of the rows of a matrix; declines what the definition refuses, and what the code does not compute."""
        b, scales, bias, zeros, bits, k = self.b, self.scales, self.bias, self.zeros, self.bits, x.shape[1]
        if scales is None:
            site.refuse("there are no scales")
        self._require(site, k, block)
        experts, n, _ = b.shape
        size = block or k
        grain, count = math.gcd(size, LARGEST), k // size
        parts = [v for v in (b, scales, bias, zeros) if v is not None]
        site.require(all(v.constant and v.finiteness == FINITE for v in parts), "the weights are not constant, or not finite")
        arrays = b.read(), scales.read(), None if zeros is None else zeros.read()

        def make() -> Blocks:
            bytes_, factors, middle = arrays
            if middle is not None:
                middle = unpacked(middle.reshape(experts, n if block else 1, -1), bits)
                middle = middle[..., :count] if block else middle[:, 0, :n, None]
                middle = middle.astype(np.float32).repeat(size // grain, 2)
            return _packed(bytes_, factors.reshape(experts, n, count).repeat(size // grain, 2), middle, bits, grain)

        what = ("experts", scales.key, None if zeros is None else zeros.key, bits, block)
        kind = FewBitsKind(bits, min(grain, 32), "" if zeros is None else "floats", level())
        weights, columns = packed_weights(site, b, what, arrays, make), n + -n % (LANES * TILES)

        def padded(v: Value) -> Value:
            room = [(0, 0), (0, columns - n)]
            return derived(site, v, ("padded", columns), lambda: np.pad(v.read().reshape(experts, n), room))

        wide = None if bias is None else padded(bias)
        return ExpertProduct(site, x, x, weights, n, grain, kind, experts, wide)

    def _require(self, site: Site, k: int, block: int) -> None:
        """Decline other forms of weights for rows of k values."""
        b, scales, bias, zeros, bits = self.b, self.scales, self.bias, self.zeros, self.bits
        site.require(bits in (2, 4, 8) and b.ndim == 3 and b.dtype == UINT8 and b.size, "the definition reports the form")
        (experts, n, _), size = b.shape, block or k
        whole = b.shape[2] * 8 == k * bits and k % size == 0 and math.gcd(size, LARGEST) >= 16
        site.require(whole, "the rows do not have whole blocks")
        points = experts * n * -(-(k // size) * bits // 8) if block else experts * -(-n * bits // 8)
        sizes = (scales, F32, experts * n * k // size), (bias, F32, experts * n), (zeros, UINT8, points)
        site.require(all(v is None or (v.dtype, v.size) == (t, m) for v, t, m in sizes), "the shapes or dtypes do not match")


# --- activations


class _Activation:
    """The calls of an activation, each of which reads values or results of earlier ones."""

    def __init__(self, site: Site) -> None:
        self.site, self.calls = site, list[ExpressionCall]()

    def call(self, name: str, version: int, *operands: Value | int | float | None, **attributes: Any) -> int:
        """Add a call, of which floats are constants; returns the number of its result."""
        values = tuple(Value.of(np.array(v, F32)) if isinstance(v, float) else v for v in operands)
        self.calls.append(ExpressionCall(versioned("", name, version), attributes, values))
        return len(self.calls) - 1

    def swiglu(self, gate: Value, linear: Value) -> int:
        """The gate, as in the definition."""
        a = self.site.attributes
        limit, late = a.get("swiglu_limit"), a["swiglu_limit_after_activation"]
        up: Value | int = linear
        if limit is not None:
            up = self.call("Clip", 13, linear, -float(limit), float(limit))
        x: Value | int = gate if late or limit is None else self.call("Min", 13, gate, float(limit))
        active = self.call("Mul", 14, x, self.call("Sigmoid", 13, self.call("Mul", 14, x, float(a["activation_alpha"]))))
        active = self.call("Min", 13, active, float(limit)) if late and limit is not None else active
        if a["activation_beta"]:
            up = self.call("Add", 14, up, float(a["activation_beta"]))
        return self.call("Mul", 14, active, up)

    def plain(self, name: str, x: Value) -> Value | int:
        """An activation without a gate."""
        if name == "gelu":
            return self.call("Gelu", 20, x, approximate="tanh")
        if name == "silu":
            return self.call("Mul", 14, x, self.call("Sigmoid", 13, x))
        return self.call("Relu", 14, x) if name == "relu" else x

    def emit(self, x: Value, linear: Value | None) -> Value:
        """Emit the step that computes an activation, times the linear part."""
        name = self.site.attributes["activation_type"]
        y = self.swiglu(x, linear) if name == "swiglu" and linear is not None else self.plain(name, x)
        if name != "swiglu" and linear is not None:
            y = self.call("Mul", 14, y, linear)
        if isinstance(y, Value):
            return y
        terms, inputs = trace(self.site, self.calls)
        (active,) = compute(self.site, [terms[y]], inputs, "activation")
        self.site.require(active.contiguous, "the activations are in another order")
        return active


def _require_form(site: Site, further: Sequence[Value | None], has_third: bool) -> None:
    """Decline attributes that the definition refuses, and weights that are not integers."""
    a = site.attributes
    fusion, block, name = a["swiglu_fusion"], a.get("block_size") or 0, a["activation_type"]
    plain = a["quant_type"] == "int" and a["weights_prepacked"] != 1 and all(v is None for v in further)
    site.require(plain and not block & (block - 1) and (not block or block >= 16), "the definition reports the form")
    gated = name == "swiglu"
    site.require(gated or (name in ("relu", "gelu", "silu", "identity") and not fusion), "the activation is another one")
    site.require(fusion in (0, 1, 2) and (not has_third if fusion else has_third or not gated), "the gate is elsewhere")


def _require_sizes(site: Site, x: Value, of_rows: Sequence[Value], layers: Sequence[ExpertWeights]) -> None:
    """Decline inputs that are not float32, or do not match."""
    site.require(all(v.dtype == F32 for v in (x, *of_rows)) and x.size and x.ndim, "the inputs are not float32, or empty")
    site.require(all(w.b.ndim == 3 for w in layers), "the shapes do not match")
    rows, experts, fusion = math.prod(x.shape[:-1]), layers[0].b.shape[0], site.attributes["swiglu_fusion"]
    fits = all(v.shape == (rows, experts) for v in of_rows) and all(w.b.shape[0] == experts for w in layers)
    fits = fits and 0 < site.attributes["k"] <= experts and layers[1].b.shape[1] == x.shape[-1]
    site.require(fits and not (fusion and layers[0].b.shape[1] % 2), "the shapes do not match")


@kernel("QMoE", 1, on="machine", domain=DOMAIN)
def qmoe(site: Site, x: Value, router: Value, *rest: Value | None) -> Value:
    """Only the experts that are chosen compute, and only their rows."""
    site.require(not available(), available())
    a, inputs = site.attributes, [*rest, *[None] * (13 - len(rest))]
    layers, shares = [], inputs[12]
    for i in range(3):
        b, scales, bias = inputs[3 * i : 3 * i + 3]
        if b is not None:
            bits = a.get(f"fc{i + 1}_expert_weight_bits") or a["expert_weight_bits"]
            layers.append(ExpertWeights(b, scales, bias, inputs[9 + i], bits))
    _require_form(site, inputs[13:], len(layers) > 2)
    _require_sizes(site, x, [router] if shares is None else [router, shares], layers)
    site.require_finite(x)
    k, fusion, block, hidden = a["k"], a["swiglu_fusion"], a.get("block_size") or 0, x.shape[-1]
    rows = x.size // hidden
    pairs = routed(site, router, None if shares is None else ordered(site, shares, (0, 1)), k)
    matrix = ordered(site, x, range(x.ndim)).view((rows, hidden), (hidden * 4, 4))
    seen = site.new((rows * k, hidden), F32, finiteness=FINITE)
    site.emit(
        lambda: [(matrix.array.take, (pairs.rows.array, 0, seen.array, "clip"))],
        reads=(matrix, pairs.rows), writes=(seen,), kernel="numpy.take",
    )  # fmt: skip
    first = layers[0].product(site, seen, block)
    left = first.rows()
    h, linear = first.emit_groups(pairs, left), None
    inner, (step, size) = h.shape[1] // (2 if fusion else 1), h.strides
    if fusion:
        linear = h.view((rows * k, inner), (step, 2 * size if fusion == 1 else size), size if fusion == 1 else inner * size)
        h = h.view(linear.shape, linear.strides)
    elif len(layers) > 2:
        linear = layers[2].product(site, seen, block).emit_groups(pairs, left)
        site.require(linear.shape == h.shape, "the shapes do not match")
    y = site.new(x.shape, F32)
    last = layers[1].product(site, _Activation(site).emit(h, linear), block)
    combined(site, last.emit_groups(pairs, last.rows()), pairs, y.view((rows, hidden), (hidden * 4, 4)))
    return y
