"""The implementations of oneDNN that are not trusted: each row of the table on a case in which it refuses, and on another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.helpers.paths import PROJECT
from tests.kernels.test_onednn import channels_last, close, convolved, described, run, transposed_convolution, values

from singa_backend.kernels import onednn as dnn
from singa_backend.kernels.onednn import Attributes, MemoryDesc, NotTrusted, Primitive, backward, constants, primitives, trust
from singa_backend.kernels.onednn.memory import dims
from singa_backend.kernels.onednn.trust import ROWS, SEEN, Candidate, Untrusted, refusal

pytestmark = pytest.mark.skipif(dnn.library() is None, reason=f"oneDNN is not available: {dnn.missing()}")

f32, u8, s8, s32 = (np.dtype(t) for t in (np.float32, np.uint8, np.int8, np.int32))
VALID = {"dilations": (0, 0), "pads_begin": (0, 0), "pads_end": (0, 0)}


# --- candidates


def last(*shape: int, dtype: Any = f32) -> MemoryDesc:
    """A description with the channels innermost in memory."""
    return described(channels_last(np.empty(shape, dtype)))


class StandIn(Candidate):
    """A candidate of another machine: what a condition asks for, without a descriptor of oneDNN."""

    def __init__(
        self,
        kind: str,
        implementation: str,
        mds: Mapping[int, MemoryDesc],
        window: Sequence[Sequence[int]] = (),
        attributes: Attributes | None = None,
        threads: int = 2,
    ) -> None:
        super().__init__(kind, implementation, 0, attributes or Attributes(), threads)
        self._mds, self._window = dict(mds), dict(zip(constants.QUERY_SIZES, window, strict=False))

    def md(self, arg: int) -> MemoryDesc | None:
        return self._mds.get(arg)

    def mds(self) -> list[MemoryDesc]:
        return [md for arg, md in self._mds.items() if arg != dnn.args.BIAS]

    @property
    def nbytes(self) -> int:
        return max(md.nbytes for md in self.mds())

    def sizes(self, what: str) -> tuple[int, ...]:
        return tuple(self._window[what])


def conv(
    implementation: str,
    src: Sequence[int],
    filters: Sequence[int],
    *window: Sequence[int],
    dtype: Any = f32,
    kind: str = "convolution_forward",
    attributes: Attributes | None = None,
) -> StandIn:
    """A convolution; `window` are the strides, dilations minus 1, and the padding before and after, 1, 0, 0 and 0 by default."""
    axes = len(src) - 2
    given = [*window, *[(1,) * axes, *[(0,) * axes] * 3][len(window) :]]
    reach = [(k - 1) * (d + 1) + 1 for k, d in zip(filters[-axes:], given[1], strict=True)]
    sizes = [(n + a + b - r) // s + 1 for n, r, s, a, b in zip(src[2:], reach, given[0], given[2], given[3], strict=True)]
    mds = {
        dnn.args.SRC: MemoryDesc.of(dtype, src),
        dnn.args.WEIGHTS: MemoryDesc.of(s8 if np.dtype(dtype).itemsize == 1 else dtype, filters),
        dnn.args.DST: MemoryDesc.of(f32, (src[0], filters[0], *sizes)),
    }
    return StandIn(kind, implementation, mds, given, attributes)


def product(implementation: str, src: Sequence[int], columns: int, steps: Sequence[int] | None = None, **further: Any) -> StandIn:
    """A product of matrices whose left factor has these steps."""
    mds = {
        dnn.args.SRC: MemoryDesc.of(f32, src, steps),
        dnn.args.WEIGHTS: MemoryDesc.of(f32, (*src[:-2], src[-1], columns)),
        dnn.args.DST: MemoryDesc.of(f32, (*src[:-1], columns)),
    }
    return StandIn("matmul", implementation, mds, **further)


def offered(row: Untrusted, make: Callable[[], Candidate | Primitive]) -> tuple[Candidate, Any]:
    """A stand-in, or the implementation of a row among those that oneDNN offers for a primitive; and what keeps it."""
    recorded: list[Candidate] = []
    existing: dict[Hashable, Primitive] = {}  # oneDNN reads the forward primitive at each step to the next implementation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "_existing", existing)
        patch.setattr(primitives, "refusal", recorded.append)  # all are trusted
        made = make()
    if isinstance(made, Candidate):
        return made, made
    lib = dnn.library()
    assert lib is not None
    while not re.search(row.implementation, made.implementation):
        assert lib.functions["primitive_desc_next_impl"](made.handle) == 0, f"oneDNN has no {row.implementation} for this case"
        made.describe()
    return Candidate(made.kind, made.implementation, made.handle, recorded[-1].attributes, made.threads), (made, existing)


# --- cases


@dataclass
class Case:
    """A row of the table.

    Attributes:
        drawn: a call in which the fault can occur: a primitive, or a stand-in.
        ordinary: one in which it cannot; None if the implementation is never trusted.
        inputs: of the primitive.
        outputs: of the primitive, with what they contain before the run.
        expected: its first output; None if there is no other implementation.
        preferred: whether oneDNN prefers the faulty implementation at level AVX2.
    """

    drawn: Callable[[], Candidate | Primitive]
    ordinary: Callable[[], Candidate | Primitive] | None
    inputs: dict[int, np.ndarray] = field(default_factory=dict)
    outputs: dict[int, np.ndarray] = field(default_factory=dict)
    expected: np.ndarray | None = None
    preferred: bool = True


def _strided_weights() -> Case:
    x, dy = (channels_last(values(2, c, n, n)) for c, n in ((4, 16), (8, 8)))
    expected = np.einsum("ncij,nkij->kc", x[:, :, ::2, ::2], dy, dtype=np.float64)[..., None, None]

    def make(stride: int) -> Primitive:
        src, dst, filters = last(2, 4, 8 * stride, 8 * stride), last(2, 8, 8, 8), MemoryDesc.any(f32, (8, 4, 1, 1))
        window = {"strides": (stride, stride), **VALID}
        hint = dnn.convolution(src, filters, None, dst, prop="training", **window)
        return backward.convolution_backward_weights(src, filters, None, dst, hint=hint, **window)

    inputs = {dnn.args.SRC: x, dnn.args.DIFF_DST: dy}
    outputs = {dnn.args.DIFF_WEIGHTS: np.zeros(expected.shape, f32)}
    return Case(partial(make, 2), partial(make, 1), inputs, outputs, expected)


def _sse41() -> Case:
    x, w, before = channels_last(values(1, 5, 6, 6)), values(5, 1, 3, 3), channels_last(values(1, 5, 6, 6, seed=1))
    pads = {"pads_begin": (1, 1), "pads_end": (1, 1)}

    def make() -> Primitive:
        filters = MemoryDesc.any(f32, (5, 1, 1, 3, 3))
        window = {"strides": (1, 1), "dilations": (0, 0), **pads}
        return dnn.convolution(last(1, 5, 6, 6), filters, None, last(1, 5, 6, 6), attributes=Attributes().append_sum(), **window)

    expected = convolved(x, w, (1, 1), (1, 1), (1, 1), (1, 1), 5) + before
    inputs = {dnn.args.SRC: x, dnn.args.WEIGHTS: w.reshape(5, 1, 1, 3, 3)}
    return Case(make, None, inputs, {dnn.args.DST: before}, expected, preferred=False)


def _without_first_state() -> Case:
    def make(state: bool) -> Primitive:
        t, n, i, h = 3, 2, 4, 5
        first = MemoryDesc.of(f32, (1, 1, n, h)) if state else None
        layer, back = MemoryDesc.of(f32, (t, n, i)), MemoryDesc.of(f32, (t, n, h))
        weights = [MemoryDesc.any(f32, (1, 1, k, 4, h)) for k in (i, h)]
        bias = MemoryDesc.of(f32, (1, 1, 4, h))
        given = [layer, first, first, *weights, bias, back, None, None]
        hint = dnn.lstm(*given, prop="training")
        plain = [layer, first, first, *[MemoryDesc.any(f32, md.shape) for md in weights], bias, back, None, None]
        return backward.lstm_backward(given, plain, hint=hint)

    return Case(partial(make, False), partial(make, True))


def _operand_gaps() -> Case:
    a, b, term = values(5, 7), values(7, 8), values(1, 16)[:, ::2]

    def make(gap: int) -> Primitive:
        attributes = Attributes().append_binary("add", MemoryDesc.of(f32, (1, 8), (8 * gap, gap)))
        shapes = (MemoryDesc.of(f32, s) for s in ((5, 7), (7, 8), (5, 8)))
        src, weights, dst = shapes
        return dnn.matmul(src, weights, None, dst, attributes, allow_reference=gap > 1)

    inputs = {dnn.args.SRC: a, dnn.args.WEIGHTS: b, dnn.args.post_op(0): term}
    return Case(partial(make, 2), partial(make, 1), inputs, {dnn.args.DST: np.zeros((5, 8), f32)}, a @ b + term)


def _operand_of_samples() -> Case:
    a, b, factor = values(4, 6, 1), values(4, 6, 1, seed=1), values(1, 6, 1)

    def make(length: int) -> Primitive:
        attributes = Attributes().append_binary("mul", MemoryDesc.of(f32, (1, 6, 1)))
        md = MemoryDesc.of(f32, (4, 6, length))
        return dnn.binary(md, md, md, algorithm="add", attributes=attributes, allow_reference=length == 1)

    inputs = {dnn.args.SRC: a, dnn.args.SRC_1: b, dnn.args.post_op(0): factor}
    return Case(partial(make, 1), partial(make, 2), inputs, {dnn.args.DST: np.zeros((4, 6, 1), f32)}, (a + b) * factor)


def _normalized_gaps() -> Case:
    x = values(3, 16)[:, :10]
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)

    def make(step: int) -> Primitive:
        md = MemoryDesc.of(f32, (3, 10), (step, 1))
        return dnn.layer_normalization(md, md, epsilon=1e-5, allow_reference=step > 10)

    return Case(partial(make, 16), partial(make, 10), {dnn.args.SRC: x}, {dnn.args.DST: np.zeros((3, 16), f32)[:, :10]}, expected)


def _one_channel() -> Case:
    def make(channels: int) -> Primitive:
        md = MemoryDesc.of(f32, (4, channels, 8), (8 * channels, 1, channels))
        return dnn.softmax(md, md, axis=2, allow_reference=channels > 1)

    x = values(4, 1, 8)
    e = np.exp(x.astype(np.float64))
    inputs, outputs = {dnn.args.SRC: x}, {dnn.args.DST: np.zeros_like(x)}
    return Case(partial(make, 1), partial(make, 2), inputs, outputs, e / e.sum(2, keepdims=True), preferred=False)


def _resampled_sum() -> Case:
    x, before = values(2, 3, 4, 4), values(2, 3, 8, 8)

    def make(adds: bool) -> Primitive:
        attributes = Attributes().append_sum() if adds else Attributes().append_eltwise("relu")
        return dnn.resampling(described(x), described(before), algorithm="nearest", attributes=attributes)

    expected = x.repeat(2, 2).repeat(2, 3) + before
    inputs, outputs = {dnn.args.SRC: x}, {dnn.args.DST: before}
    return Case(partial(make, True), partial(make, False), inputs, outputs, expected, preferred=False)


def _shifted_rows() -> Case:
    x, rows = np.array([[7, 8], [9, 10]], s8), np.zeros((2, 3), f32)[:, :2]

    def make(gap: bool) -> Primitive:
        attributes = Attributes().set_zero_points(dnn.args.FROM, 0)
        return dnn.reorder(described(x), described(rows if gap else rows.copy()), attributes=attributes)

    inputs = {dnn.args.FROM: x, dnn.args.zero_points(dnn.args.FROM): np.ones(1, s32)}
    return Case(partial(make, True), partial(make, False), inputs, {dnn.args.TO: rows})


def _pooled_gaps() -> Case:
    def make(step: int) -> Primitive:
        src, dst = MemoryDesc.of(f32, (1, 2, 4, 4), (8 * step, 4 * step, step, 1)), MemoryDesc.of(f32, (1, 2, 2, 2))
        window = {"algorithm": "avg_include_padding", "kernel": (2, 2), "strides": (2, 2), **VALID}
        hint = dnn.pooling(src, dst, prop="training", allow_reference=True, **window)
        return backward.pooling_backward(src, dst, hint=hint, allow_reference=True, **window)

    return Case(partial(make, 6), partial(make, 4))


def _transposed_gaps() -> Case:
    def make(step: int) -> Primitive:
        strides = [(c * n * (n + step), n * (n + step), n + step, 1) for c, n in ((3, 4), (2, 6))]
        src, dst = (MemoryDesc.of(f32, s, t) for s, t in zip(((1, 3, 4, 4), (1, 2, 6, 6)), strides, strict=True))
        filters, bias = MemoryDesc.any(f32, (2, 3, 3, 3)), MemoryDesc.of(f32, (2,))
        return dnn.deconvolution(src, filters, bias, dst, strides=(1, 1), allow_reference=True, **VALID)

    dense = conv("conv:any+ref:any", (1, 3, 4, 4), (2, 3, 3, 3), kind="deconvolution_forward")
    return Case(partial(make, 2), lambda: dense)


def _divided_rows() -> Case:
    x, w, b = (values(*s, seed=3) for s in ((1, 32, 8, 17), (32, 8, 31, 31), (8,)))
    x = channels_last(x)
    expected = transposed_convolution(x, w, (2, 2), (15, 15), (14, 14), 1) + b[:, None, None]

    def make(size: int, reference: bool) -> Primitive:
        pad = size // 2
        src, dst, filters = last(1, 32, 8, 17), last(1, 8, 16, 34), MemoryDesc.any(f32, (8, 32, size, size))
        window = {"strides": (2, 2), "dilations": (0, 0), "pads_begin": (pad, pad), "pads_end": (pad - 1, pad - 1)}
        return dnn.deconvolution(src, filters, MemoryDesc.of(f32, (8,)), dst, allow_reference=reference, **window)

    inputs = {dnn.args.SRC: x, dnn.args.WEIGHTS: w.swapaxes(0, 1), dnn.args.BIAS: b}
    outputs = {dnn.args.DST: channels_last(np.zeros(expected.shape, f32))}
    return Case(partial(make, 31, True), partial(make, 3, False), inputs, outputs, expected)


def _depthwise_integers() -> Case:
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 9, (1, 16, 6, 6)).astype(u8), rng.integers(-4, 5, (16, 1, 3, 3)).astype(s8)
    factor = np.arange(1, 17, dtype=f32).reshape(1, 16, 1, 1)

    def make(post: bool) -> Primitive:
        attributes = Attributes().append_binary("mul", described(factor)) if post else Attributes().append_eltwise("relu")
        src, dst = last(1, 16, 6, 6, dtype=u8), last(1, 16, 6, 6)
        sizes = [dims(s) for s in ((1, 1), (0, 0), (1, 1), (1, 1))]
        lib, filters = dnn.library(), MemoryDesc.any(s8, (16, 1, 1, 3, 3))
        assert lib is not None
        return primitives.create(  # these sums do not saturate: any level may compute them
            "convolution_forward", lib.engine, constants.PROP["inference"], constants.CONVOLUTION["direct"], src, filters, None,
            dst, *sizes, attributes=attributes, allow_reference=True,
        )  # fmt: skip

    expected = convolved(x, w, (1, 1), (1, 1), (1, 1), (1, 1), 16) * factor
    inputs = {dnn.args.SRC: channels_last(x), dnn.args.WEIGHTS: w.reshape(16, 1, 1, 3, 3), dnn.args.post_op(0): factor}
    outputs = {dnn.args.DST: channels_last(np.zeros(expected.shape, f32))}
    return Case(partial(make, True), partial(make, False), inputs, outputs, expected)


def _degenerate_row() -> Case:
    a, b = values(1, 16), values(16, 8)

    def make(columns: int, step: int) -> Primitive:  # for oneDNN's cache, descriptions with other steps of one row are equal
        weights, dst = MemoryDesc.of(f32, (16, columns)), MemoryDesc.of(f32, (1, columns), (step, 1))
        return dnn.matmul(described(a), weights, None, dst, allow_reference=step == 1)

    out = np.lib.stride_tricks.as_strided(np.zeros(8, f32), (1, 8), (4, 4))
    return Case(partial(make, 8, 1), partial(make, 9, 9), {dnn.args.SRC: a, dnn.args.WEIGHTS: b}, {dnn.args.DST: out}, a @ b)


CASES: dict[tuple[str, str], Callable[[], Case]] = {
    ("jit_1x1", "(de)?convolution_backward_weights"): _strided_weights,
    ("sse41", ""): _sse41,
    ("^ref", "(lstm|vanilla_rnn)_backward"): _without_first_state,
    ("brg|jit", ""): _operand_gaps,
    ("^jit:uni", "binary"): _operand_of_samples,
    ("^(jit:uni|simple)", "layer_normalization"): _normalized_gaps,
    ("^ref", "softmax"): _one_channel,
    ("^ref", "(eltwise|resampling)_forward"): _resampled_sum,
    ("^jit", "reorder"): _shifted_rows,
    ("^ref", "(pooling|batch_normalization)_backward"): _pooled_gaps,
    (r"^conv:any\+ref", "deconvolution_forward"): _transposed_gaps,
    (r"^brg_conv:.*\+brgconv_strided", "deconvolution_forward"): _divided_rows,
    ("^jit_uni_int8", "convolution_forward"): _depthwise_integers,
    ("^gemm", "matmul"): _degenerate_row,
    ("(?<!gemm:)jit", "(de)?convolution|pooling"): lambda: Case(
        partial(conv, "jit:avx2", (140, 64, 250, 250), (3, 64, 1, 1)), partial(conv, "jit:avx2", (1, 64, 250, 250), (3, 64, 1, 1))
    ),
    ("brg", "(de)?convolution"): lambda: Case(
        partial(conv, "brgconv:avx2", (560, 64, 250, 250), (3, 64, 3, 3)),
        partial(conv, "brgconv:avx2", (140, 64, 250, 250), (3, 64, 3, 3)),
    ),
    ("brg_?conv(_fwd)?:", "convolution_forward"): lambda: Case(
        partial(conv, "brgconv:avx2", (1, 64, 1, 1), (1, 64, 125, 1), (2, 2), (0, 0), (63, 63), (63, 63)),
        partial(conv, "brgconv:avx2", (1, 64, 7, 7), (8, 64, 3, 3), (2, 2), (1, 1), (2, 2), (2, 2)),
    ),
    ("^brg_?conv(_fwd)?:.*amx", "convolution_forward"): lambda: Case(
        partial(conv, "brgconv:avx512_core_amx", (1, 64, 67, 9), (8, 64, 1, 3), (3, 1), dtype=u8),
        partial(conv, "brgconv:avx512_core_amx", (1, 3, 224, 224), (8, 3, 16, 16), (16, 16), dtype=u8),
    ),
    ("^brg_?conv(_fwd)?:.*vnni", "convolution_forward"): lambda: Case(
        partial(conv, "brgconv:avx512_core_vnni", (1, 512, 9, 9), (512, 512, 3, 3), (1, 1), (0, 0), (1, 1), (1, 1), dtype=s8),
        partial(conv, "brgconv:avx512_core_vnni", (1, 64, 9, 9), (64, 64, 3, 3), (1, 1), (0, 0), (1, 1), (1, 1), dtype=s8),
    ),
    ("^brg_conv_fwd:avx512_core_(vnni|bf16|fp16)", "convolution_forward"): lambda: Case(
        partial(conv, "brg_conv_fwd:avx512_core_vnni", (1, 3, 9, 9), (64, 3, 3, 3), (1, 1), (0, 0), (1, 1), (1, 2), dtype=s8),
        partial(conv, "brg_conv_fwd:avx512_core_vnni", (1, 3, 9, 9), (64, 3, 3, 3), (1, 1), (0, 0), (1, 1), (1, 2), dtype=u8),
    ),
    ("^brgconv_1x1:.*amx", "convolution_forward"): lambda: Case(
        partial(conv, "brgconv_1x1:avx512_core_amx", (1, 65, 3, 9, 9), (64, 65, 1, 1, 1), dtype=u8),
        partial(conv, "brgconv_1x1:avx512_core_amx", (1, 65, 9, 9), (64, 65, 1, 1), dtype=u8),
    ),
    ("^jit_1x1:.*amx", "convolution_forward"): lambda: Case(
        partial(conv, "jit_1x1:avx512_core_amx", (1, 64, 9, 9), (64, 64, 1, 1), dtype=u8), None
    ),
    ("^brg:avx2_vnni", "matmul"): lambda: Case(
        lambda: product("brg:avx2_vnni", (14, 64), 32, attributes=Attributes().set_zero_points(dnn.args.WEIGHTS, 0)),
        lambda: product("brg:avx2_vnni", (14, 64), 32, attributes=Attributes().set_zero_points(dnn.args.SRC, 0)),
    ),
    ("^brg:", "matmul"): lambda: Case(
        lambda: product("brg:avx512_core", (2, 8, 4096), 32, (8 * 4096, 1, 8), threads=8),
        lambda: product("brg:avx512_core", (1, 8, 4096), 32, (8 * 4096, 1, 8), threads=8),
    ),
    ("^brgemm:avx512", "lbr_gru_forward"): lambda: Case(partial(_gru, 5), partial(_gru, 6)),
}  # fmt: skip
"""A case for each row, by its implementation and kind."""


def _gru(hidden: int) -> Candidate:
    return StandIn("lbr_gru_forward", "brgemm:avx512_core", {dnn.args.WEIGHTS: MemoryDesc.of(f32, (1, 1, 5, 3, hidden))})


def case_of(row: Untrusted) -> Case:
    return CASES[row.implementation, row.kind]()


def names(rows: Sequence[Untrusted]) -> list[str]:
    return [f"{r.implementation} {r.kind}" for r in rows]


# --- the table


def test_each_row_has_a_case() -> None:
    assert CASES.keys() == {(r.implementation, r.kind) for r in ROWS} and len(CASES) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_the_condition_holds_on_a_drawn_case_and_not_on_an_ordinary_one(row: Untrusted) -> None:
    case = case_of(row)
    faulty, kept = offered(row, case.drawn)
    assert re.search(row.implementation, faulty.implementation) and re.match(row.kind, faulty.kind)
    assert row.condition(faulty) and refusal(faulty) is not None and kept
    if case.ordinary is None:
        assert row.condition is trust._always
        return
    ordinary, kept = offered(row, case.ordinary)
    assert re.search(row.implementation, ordinary.implementation) and re.match(row.kind, ordinary.kind)
    assert not row.condition(ordinary) and refusal(ordinary) is None and kept


SHOWN = [row for row in ROWS if row.source.startswith(SEEN)]


@pytest.mark.parametrize("row", SHOWN, ids=names(SHOWN))
def test_what_replaces_a_faulty_implementation_is_right(row: Untrusted) -> None:
    case, lib = case_of(row), dnn.library()
    try:
        primitive = case.drawn()
    except NotTrusted as error:
        assert row.reason in str(error) and case.expected is None
        return
    assert isinstance(primitive, Primitive) and lib is not None and case.expected is not None
    if lib.isa == "avx2":
        assert case.preferred == (row.reason in {one.reason for one in primitive.refused})
    results = run(primitive, case.inputs, {arg: array.copy(order="K") for arg, array in case.outputs.items()})
    close(results[0], case.expected)


def test_rows_concern_levels() -> None:
    counts = [len(trust.rows_of(isa)) for isa in ("avx2", "avx512_core", "avx512_core_vnni", "avx512_core_amx")]
    assert counts == sorted(set(counts)) and counts[-1] == len(ROWS)
    assert {level for row in ROWS for level in row.levels} <= set(constants.ISA.values())
    assert len(trust.rows_of("generic")) == len([row for row in ROWS if not row.levels])


def test_the_page_has_the_table() -> None:
    page = (PROJECT / "docs" / "performance.md").read_text()
    lines = ["| implementation | kind | levels | what goes wrong | source |", "|---|---|---|---|---|"]
    for row in ROWS:
        code = [f"`{text}`".replace("|", "\\|") if text else "all" for text in (row.implementation, row.kind)]
        lines.append(f"| {' | '.join(code)} | {', '.join(row.levels) or 'all'} | {row.reason} | {row.source} |")
    assert "\n".join(lines) in page


# --- the walk


@pytest.mark.parametrize("row", [ROWS[0], ROWS[3], ROWS[10]], ids=["gradient", "product", "nested convolution"])
def test_the_walk_ends_at_the_same_implementation_if_the_cache_is_full(row: Untrusted) -> None:
    """oneDNN repeats implementations for a descriptor that begins with one that was compiled."""
    case = case_of(row)
    seen = []
    for fill in False, False, True, True:
        kept = offered(row, case.drawn) if fill else None  # the faulty one is compiled too
        primitive = case.drawn()
        assert isinstance(primitive, Primitive)
        seen.append((primitive.implementation, primitive.refused))
        del primitive, kept
    assert len(set(seen)) == 1 and len(seen[0][1]) == len(set(seen[0][1]))


def test_a_gradient_of_a_transposed_convolution_is_judged_by_the_convolution_in_it() -> None:
    window: dict[str, Any] = {"strides": (2, 2), **VALID}
    direct = case_of(ROWS[0]).drawn()
    src, dst, filters = last(2, 8, 4, 4), last(2, 4, 7, 7), MemoryDesc.any(f32, (4, 8, 1, 1))
    for _ in range(2):
        hint = dnn.deconvolution(src, filters, None, dst, prop="training", **window)
        try:
            made = backward.deconvolution_backward_weights(src, filters, None, dst, hint=hint, **window)
            assert "jit_1x1" not in made.implementation
        except NotTrusted as error:
            assert ROWS[0].reason in str(error)
    assert isinstance(direct, Primitive)


@pytest.mark.parametrize("follows", [False, True])
def test_sums_are_added_by_products_whose_columns_are_counted_at_run_time(follows: bool) -> None:
    """Their fault e9bc9b0b65 is not in 3.2: there is no row for it."""
    free, a, b, before = constants.RUNTIME_DIM, values(3, 1, 64), values(3, 100, 64).swapaxes(1, 2), values(3, 1, 100)
    attributes = Attributes().append_sum()
    attributes = attributes.append_eltwise("relu") if follows else attributes
    weights = MemoryDesc.of(f32, (3, 64, free), (free, 1, 64))
    primitive = dnn.matmul(described(a), weights, None, MemoryDesc.of(f32, (3, 1, free), (free, free, 1)), attributes)
    y = before.copy()
    given = {dnn.args.SRC: a, dnn.args.WEIGHTS: b, dnn.args.DST: y}
    dnn.bind(primitive, {arg: (described(v), v.ctypes.data) for arg, v in given.items()}).run()
    expected = a @ b + before
    close(y, np.maximum(expected, 0) if follows else expected)


# --- levels


OLD = """
import numpy as np
from onnx import parser
from singa_backend import SingaBackend
from singa_backend.kernels import onednn
text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,3,9,9] x, float[4,3,3,3] w, float[4] b) => (float[1,4,7,7] z)'
rep = SingaBackend.prepare(parser.parse_model(text + ' { y = Conv(x, w, b) z = Relu(y) }'))
rng = np.random.default_rng(0)
x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((1, 3, 9, 9), (4, 3, 3, 3), (4,)))
for _ in range(2):
    z = rep.run([x, w, b])[0]
expected = sum(np.einsum("nchw,kc->nkhw", x[:, :, i:i+7, j:j+7], w[:, :, i, j]) for i in range(3) for j in range(3))
np.testing.assert_allclose(z, np.maximum(expected + b[:, None, None], 0), rtol=0, atol=1e-5)
print(onednn.library() is None, onednn.missing())
"""


@pytest.mark.parametrize("level", ["SSE41", "AVX"])
def test_below_avx2_definitions_run(level: str) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": level}
    done = subprocess.run([sys.executable, "-c", OLD], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == f"True the processor's level is {level.lower()}; AVX2 is needed", done.stderr
