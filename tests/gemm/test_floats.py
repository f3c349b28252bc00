"""Products, convolutions and recurrent layers of float32 by machine code: against float64, definitions and other processors."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from tests.helpers.deterministic_nets import NETS, computed, inference, model
from tests.helpers.gemm_frames import Frame, assembly
from tests.helpers.paths import PROJECT
from tests.helpers.plan_checks import kernels_used

from singa_backend import SingaBackend
from singa_backend.elementwise.compile import available, level
from singa_backend.gemm.copies import COPY, MARGINS, copies, margins
from singa_backend.gemm.floats import PACKED, PRODUCTS, SHORT, FloatsKind, floats, packing
from singa_backend.gemm.images import DEPTHWISE, depthwise
from singa_backend.gemm.repeat import repeat
from singa_backend.gemm.tiles import HEIGHT
from singa_backend.kernels import float_products, frames, machine_steps

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

F = np.float32
Copy = Callable[[np.ndarray], np.ndarray]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def close(y: np.ndarray, exact: np.ndarray, within: float = 3e-6) -> None:
    assert y.shape == exact.shape
    assert abs(y - exact).max() <= within * abs(exact).max()


def tiled(w: np.ndarray, ended: Copy) -> np.ndarray:
    """A matrix in tiles, by the function that packs it; columns that are adjacent, or not."""
    k, n = w.shape
    out = ended(np.zeros((-(-n // 16), k, 16), F))
    sizes = dict.fromkeys(PACKED.numbers, 0) | {
        "batches": 1, "batch1": 1, "n": n, "tiles": len(out), "taps": 1, "tap1": 1, "depth": k, "w_depth": w.strides[0],
        "w_column": w.strides[1],
    }  # fmt: skip
    held = w if w.strides[1] != 4 else ended(w)
    Frame(packing(w.strides[1] == 4), sizes, {"w": held, "tiled": out})()
    for t, tile in enumerate(out):
        part = w[:, 16 * t : 16 * t + 16]
        assert (tile[:, : part.shape[1]] == part).all()
    return out


@pytest.mark.parametrize("threads", [1, 3])
def test_products_stay_in_their_arrays(limited: str, ended: Copy, threads: int) -> None:
    wide = limited != "avx2"
    for m, n, k in (1, 1, 1), (2, 17, 33), (3, 64, 16), (5, 70, 301), (11, 33, 9), (HEIGHT + 7, 40, 48):
        x, w, bias = drawn(m, k), drawn(k, n, seed=1), drawn(n, seed=2)
        for given in (w, np.asfortranarray(w)):
            for adds, relu, taps in itertools.product((0, 1), (0, 1), [(), (1, 1)] if k <= SHORT else [()]):
                y = ended(drawn(m, n, seed=3))
                exact = x.astype(float) @ w + (y if adds else bias)
                exact = np.maximum(exact, 0) if relu else exact
                sizes = dict.fromkeys(PRODUCTS.numbers, 0) | {
                    "rows": m, "row1": 1, "row2": m, "x_row2": 4 * k, "taps": 1, "tap1": 1, "depth": k, "x_depth": 4, "n": n,
                    "pitch": 4 * n, "batches": 1, "batch1": 1, "groups": -(-n // 32), "span": 2, "height": min(m, HEIGHT),
                    "tap_block": 1, "depth_block": 32 if taps else 20, "adds": adds, "relu": relu,
                }  # fmt: skip
                held = {"x": ended(x), "w": tiled(given, ended), "bias": ended(np.pad(bias, (0, -n % 16))), "y": y}
                Frame(floats(FloatsKind(wide, taps, k if taps else 0)), sizes, held, threads)()
                close(y, exact)


def test_images_stay_in_their_arrays(limited: str, ended: Copy) -> None:
    for c, h, w, every, gap in (3, 5, 4, 1, 0), (17, 2, 3, 2, 1), (1, 1, 1, 3, 2), (3, 2, 37, 1, 0):
        x = drawn(2, h, w, c)
        high, wide = (h - 1) * every + 1 + 3, (w - 1) * (gap + 1) + 1 + 4
        y, exact = ended(drawn(2, high, wide, c)), np.zeros((2, high, wide, c), F)
        exact[:, 1 : high - 2 : every, 3 : wide - 1 : gap + 1] = x
        for planes in (False, True):
            held = ended(np.moveaxis(x, 3, 1)) if planes else ended(x)
            image, row, pixel, channel = (np.moveaxis(held, 1, 3) if planes else held).strides
            sizes = {
                "rows": 2 * high, "height": high, "top": 1, "within": h, "every": every, "left": 3 * c, "count": w, "width": c,
                "gap": gap * c, "right": c, "x_image": image, "x_row": row, "x_pixel": pixel, "x_width": channel,
            }  # fmt: skip
            assert set(sizes) == set(MARGINS.numbers)
            y[...] = -1
            Frame(margins(), sizes, {"x": held, "y": y}, 1)()
            assert (y == exact).all()
        taps = drawn(1, 2, c, seed=1)
        z = ended(np.zeros((2, high, wide - 1, c), F))
        sizes = {
            "rows": 2 * high, "row1": high, "count": wide - 1, "channels": c, "tap0": 1, "tap1": 2, "x_row0": exact.strides[0],
            "x_row1": exact.strides[1], "x_pixel": exact.strides[2], "x_tap0": 0, "x_tap1": exact.strides[2],
            "y_row": z.strides[1], "y_pixel": z.strides[2], "top": 0, "stride0": 0, "size0": 1, "left": 0, "stride1": 0,
            "size1": 2, "first": 0, "last": wide - 1,
        }  # fmt: skip
        assert set(sizes) == set(DEPTHWISE.numbers)
        Frame(depthwise(), sizes, {"x": ended(exact), "w": ended(taps), "bias": ended(drawn(c, seed=2)), "y": z}, 1)()
        close(z, drawn(c, seed=2) + exact[:, :, :-1] * taps[0, 0].astype(float) + exact[:, :, 1:] * taps[0, 1].astype(float))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (3, 0, 1, 2), (2, 3, 1, 0)])
def test_copies_stay_in_their_arrays(limited: str, ended: Copy, order: tuple[int, ...]) -> None:
    """Of all orders in memory, and repeated."""
    for shape in (1, 1, 1, 1), (2, 3, 16, 3), (3, 2, 37, 17):
        held = ended(drawn(*(shape[i] for i in order)))
        for x in held.transpose(np.argsort(order)), np.broadcast_to(held[:1, :1, :1, :1], shape):
            y = ended(np.zeros(shape, F))
            sizes = {
                "rows": shape[0] * shape[1], "row1": shape[1], "count": shape[2], "width": shape[3], "x_row0": x.strides[0],
                "x_row1": x.strides[1], "x_count": x.strides[2], "x_width": x.strides[3], "y_row0": y.strides[0],
                "y_row1": y.strides[1], "y_count": y.strides[2],
            }  # fmt: skip
            assert set(sizes) == set(COPY.numbers)
            Frame(copies(), sizes, {"x": held, "y": y}, 1)()
            assert (y == x).all()


@pytest.mark.levels
@pytest.mark.parametrize(
    ("name", "instruction"),
    [("avx2", "vfmadd231ps"), ("avx512", "%zmm"), ("aarch64", "fmla"), ("macos", "fmla"), ("windows", "vfmadd231ps")],
)
def test_instructions(name: str, instruction: str) -> None:
    """No function calls another one, aside from the one of Windows that touches the pages of a large frame."""
    wide = name == "avx512"
    for function in (
        floats(FloatsKind(wide)),
        floats(FloatsKind(wide, (3, 3), 3)),
        packing(True),
        copies(),
        margins(),
        depthwise(),
        repeat(),
    ):
        text = assembly(function, name)
        assert "@PLT" not in text and not re.search(r"\b(callq?|bl)\s+_?(mem|str|fma)", text)
        if function.what.startswith(("floats", "depthwise")):
            assert instruction in text


# operators

AFTER = {
    "": ("y = Identity(t)", lambda t, b, r: t),
    "bias": ("y = Add(t, b)", lambda t, b, r: t + b),
    "relu": ("u = Add(b, t)\n y = Relu(u)", lambda t, b, r: np.maximum(t + b, 0)),
    "residual": ("u = Add(t, b)\n y = Sub(r, u)", lambda t, b, r: r - t - b),
    "sigmoid": ("u = Sigmoid(t)\n v = Mul(t, u)\n y = Add(v, r)", lambda t, b, r: t / (1 + np.exp(-t)) + r),
}


@pytest.fixture(params=[1, 2])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Divide all work among threads."""
    monkeypatch.setattr(machine_steps, "PARALLEL", 0)
    monkeypatch.setattr(frames, "PARALLEL", 0)
    monkeypatch.setattr(float_products, "declined", available_only)
    return int(request.param)


def available_only(site: Any) -> str:
    return available()


def by_code(made: onnx.ModelProto, feeds: Sequence[np.ndarray], threads: int = 1, **options: Any) -> list[np.ndarray]:
    """The outputs of a session, in which machine code computes the products."""
    rep = SingaBackend.prepare(made, **({"threads": threads} | options))
    first, second = ([np.asarray(y) for y in rep.run(list(feeds))] for _ in range(2))
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True))
    used = kernels_used(rep)
    assert any(s.startswith(("machine.product", "machine.depthwise")) for s in used), used
    assert not any(s.split()[0] in ("matmul", "conv", "lstm", "gru", "rnn", "pooling") for s in used), used
    return first


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 130, 100), (4, 64, 64), (7, 33, 130)])
def test_matrix_products(after: str, m: int, k: int, n: int, small_parts: int) -> None:
    body, exact = AFTER[after]
    w, b, x, r = drawn(k, n, seed=1), drawn(n, seed=2), drawn(m, k), drawn(m, n, seed=3)
    made = model(f"t = MatMul(x, w)\n {body}", f"float[{m}, {k}] x, float[{m}, {n}] r", f"float[{m}, {n}] y", {"w": w, "b": b})
    (y,) = by_code(made, [x, r], small_parts)
    close(y, exact(x.astype(float) @ w, b, r))


@pytest.mark.parametrize(
    "shapes", [((2, 3, 5, 20), (2, 3, 20, 18)), ((4, 5, 20), (20, 18)), ((3, 5, 20), (1, 20, 16)), ((2, 1, 5, 8), (3, 8, 4))]
)
def test_batches_of_products(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, w = drawn(*shapes[0]), drawn(*shapes[1], seed=1)
    exact = x.astype(float) @ w
    inputs = f"float{list(x.shape)} x, float{list(w.shape)} w"
    made = model(
        "t = MatMul(x, w)\n s = Mul(t, c)\n y = Relu(s)", inputs, f"float{list(exact.shape)} y", {"c": np.full((), 0.5, F)}
    )
    (y,) = by_code(made, [x, w], deterministic=True, threads=None)
    close(y, np.maximum(exact / 2, 0))


@pytest.mark.parametrize(
    "text", ["1,3 5,3 ak,kd->ad", "5,1 5,3 ak,kd->ad", "3 5,3 ak,dk->ad", "1,3 3,1,3 abk,khd->abhd", "4,1 4,5 da,kd->ak"]
)
def test_einsum_of_what_is_repeated(text: str) -> None:
    """An Expand copies nothing: the steps from a row to the next, or within it, are 0."""
    shape, repeated, equation = text.split()
    to = np.array([int(d) for d in repeated.split(",")])
    sizes = dict(zip(equation.split(",")[0], to, strict=True))
    x = drawn(*map(int, shape.split(",")))
    w = drawn(*(int(sizes.get(c, 7)) for c in equation.partition("->")[0].split(",")[1]), seed=1)
    exact = np.einsum(equation, np.broadcast_to(x.astype(float), to), w)
    body = f'v = Expand(x, to)\n y = Einsum <equation = "{equation}"> (v, w)'
    made = model(body, f"float[{shape}] x", f"float{list(exact.shape)} y", {"w": w, "to": to})
    (y,) = by_code(made, [x], deterministic=True, threads=None)
    close(y, exact)


def test_gemm_with_factors_and_every_order() -> None:
    for a, b in (0, 0), (0, 1), (1, 0), (1, 1):
        x, w, c = drawn(*((9, 5) if a else (5, 9))), drawn(*((12, 9) if b else (9, 12)), seed=1), drawn(5, 12, seed=2)
        text = f"y = Gemm<transA = {a}, transB = {b}, alpha = 0.5, beta = 2.0>(x, w, c)"
        inputs = f"float{list(x.shape)} x, float{list(w.shape)} w, float[5, 12] c"
        (y,) = by_code(model(text, inputs, "float[5, 12] y", {}), [x, w, c], deterministic=True, threads=None)
        close(y, 0.5 * (x.T if a else x).astype(float) @ (w.T if b else w) + 2 * c)


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
    ((2, 3, 9, 11), (8, 3, 3, 3), ""),
    ((2, 3, 9, 11), (20, 3, 3, 3), "pads = [1, 0, 2, 1], strides = [2, 1]"),
    ((1, 32, 7, 7), (70, 32, 1, 1), ""),
    ((1, 32, 9, 9), (7, 32, 1, 1), "strides = [2, 2]"),
    ((1, 16, 9, 9), (6, 8, 3, 3), "group = 2, pads = [1, 1, 1, 1]"),
    ((1, 20, 9, 9), (20, 1, 3, 3), "group = 20, pads = [1, 1, 1, 1]"),
    ((2, 35, 9, 9), (35, 1, 3, 3), "group = 35, strides = [2, 2]"),
    ((2, 16, 20), (32, 1, 3), "group = 16, pads = [1, 1]"),
    ((2, 17, 20), (17, 1, 3), "group = 17, pads = [1, 1]"),
    ((1, 5, 2, 3), (5, 1, 4, 3), "group = 5, pads = [6, 4, 3, 7]"),
    ((2, 18, 9, 14), (18, 1, 5, 2), "group = 18, pads = [2, 1, 4, 0], strides = [3, 2]"),
    ((2, 18, 9, 14), (18, 1, 3, 3), "group = 18, pads = [2, 2, 2, 2], dilations = [2, 2]"),
    ((2, 2, 9, 8), (35, 2, 3, 4), "dilations = [2, 1], pads = [1, 0, 2, 3], strides = [1, 2]"),
    ((2, 2, 9, 8), (17, 2, 2, 3), "dilations = [1, 2]"),
    ((2, 1, 7, 9), (17, 1, 3, 3), "strides = [2, 2]"),
    ((2, 3, 1, 9), (9, 3, 1, 1), ""),
    ((2, 3, 40), (7, 3, 5), "pads = [2, 2]"),
    ((2, 5, 40), (7, 5, 4), "pads = [3, 0]"),
    ((2, 5, 40), (7, 5, 4), 'dilations = [2], auto_pad = "SAME_UPPER"'),
    ((2, 5, 20, 20), (7, 5, 3, 2), "dilations = [2, 3], pads = [1, 1, 0, 3]"),
]


@pytest.mark.parametrize("k", [7, 40])
def test_a_relu_keeps_what_is_not_a_number(k: int) -> None:
    x, w = np.ones((1, k, 3, 3), F), np.full((5, k, 1, 1), -1, F)
    x[0, 0, 0], x[0, 0, 1] = [np.nan, np.inf, -np.inf], [0, -np.inf, -100]
    made = model("t = Conv(x, w)\n y = Relu(t)", f"float[1, {k}, 3, 3] x", "float[a, b, c, d] y", {"w": w})
    (y,) = by_code(made, [x], deterministic=True, threads=None)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y[:, 0], np.maximum(-x.sum(axis=1), 0))


def against_definition(made: onnx.ModelProto, feeds: list[np.ndarray], within: float = 3e-6) -> None:
    exact = SingaBackend.prepare(made, optimize=0).run(feeds)
    for y, e in zip(by_code(made, feeds, deterministic=True, threads=None), exact, strict=True):
        close(y, np.asarray(e), within)


def rank(x: tuple[int, ...]) -> str:
    return ", ".join("abcd"[: len(x)])


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("x", "w", "attributes"), CONVOLUTIONS)
def test_convolutions(x: tuple[int, ...], w: tuple[int, ...], attributes: str, constant: bool) -> None:
    text = f"t = Conv{f'<{attributes}>' if attributes else ''}(x, w, b)\n y = Relu(t)"
    held = {"b": drawn(w[0], seed=2)} | ({"w": drawn(*w, seed=1)} if constant else {})
    inputs = f"float{list(x)} x" + ("" if constant else f", float{list(w)} w")
    feeds = [drawn(*x)] + ([] if constant else [drawn(*w, seed=1)])
    against_definition(model(text, inputs, f"float[{rank(x)}] y", held), feeds)


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 5, 7, 6), (5, 8, 3, 3), "strides = [2, 3], pads = [1, 1, 1, 1], output_padding = [1, 1]"),
        ((2, 6, 7, 6), (6, 4, 2, 2), "strides = [2, 2], group = 2"),
        ((2, 6, 7, 6), (6, 1, 4, 4), "strides = [2, 2], group = 6, pads = [1, 1, 1, 1]"),
        ((2, 6, 17), (6, 9, 4), "strides = [2]"),
        ((2, 6, 9, 9), (6, 9, 3, 3), "dilations = [2, 2], strides = [2, 1]"),
    ],
)
def test_transposed_convolutions(x: tuple[int, ...], w: tuple[int, ...], attributes: str) -> None:
    groups = x[1] // w[0] * (2 if "group = 2" in attributes else 6 if "group = 6" in attributes else 1)
    held = {"w": drawn(*w, seed=1), "b": drawn(w[1] * groups, seed=2)}
    text = f"t = ConvTranspose<{attributes}>(x, w, b)\n y = Relu(t)"
    against_definition(model(text, f"float{list(x)} x", f"float[{rank(x)}] y", held), [drawn(*x)])


@pytest.mark.parametrize(
    "attributes",
    [
        "kernel_shape = [3, 2], strides = [2, 1]",
        "kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]",
        "kernel_shape = [2, 5], pads = [1, 3, 0, 4]",
        "kernel_shape = [3, 3], pads = [0, 2, 2, 0], strides = [2, 3], ceil_mode = 1",
        "kernel_shape = [3, 3], pads = [2, 2, 2, 2], dilations = [2, 1]",
    ],
)
def test_maxima_of_changing_sizes(attributes: str) -> None:
    """Also of values that are not finite, and of windows that extend beyond the image."""
    made = model(f"y = MaxPool<{attributes}>(x)", "float[n, 18, h, w] x", "float[a, b, c, d] y", {})
    plans, definitions = SingaBackend.prepare(made, threads=1), SingaBackend.prepare(made, optimize=0)
    for n, (h, w) in enumerate([(9, 12), (5, 6), (20, 31)], 2):
        x = drawn(n, 18, h, w)
        x[0, :2, :3] = [[[np.nan]], [[-np.inf]]]
        for _ in range(2):
            np.testing.assert_array_equal(plans.run([x])[0], definitions.run([x])[0])
    assert plans._session._planner is not None
    traced = plans._session._planner.plans.values()
    assert all("machine.maxima" in [step.kernel for step in plan.first.steps] for plan in traced)


@pytest.mark.parametrize(
    "attributes",
    [
        "kernel_shape = [3, 2], strides = [2, 1]",
        "kernel_shape = [3, 3], pads = [1, 1, 1, 1]",
        "kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1",
        "kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1",
    ],
)
def test_average_pools(attributes: str) -> None:
    against_definition(
        model(f"y = AveragePool<{attributes}>(x)", "float[2, 5, 9, 12] x", "float[a, b, c, d] y", {}), [drawn(2, 5, 9, 12)]
    )


LAYERS = [
    ("forward", False, "", ("LSTM", "GRU", "RNN")),
    ("bidirectional", True, "", ("LSTM", "GRU", "RNN")),
    ("reverse", True, ", layout = 1", ("LSTM", "GRU", "RNN")),
    ("bidirectional", False, ", linear_before_reset = 1", ("GRU",)),
    ("forward", True, ", peepholes", ("LSTM",)),
]


@pytest.mark.parametrize("time", [1, 2, 5])
@pytest.mark.parametrize(("direction", "first", "options", "operator"), [(*layer, op) for *layer, ops in LAYERS for op in ops])
def test_recurrent_layers(operator: str, time: int, direction: str, first: bool, options: str) -> None:
    batch, width, hidden, gates, d = 3, 7, 9, {"LSTM": 4, "GRU": 3, "RNN": 1}[operator], 1 + (direction == "bidirectional")
    held = {"w": drawn(d, gates * hidden, width, seed=1), "r": drawn(d, gates * hidden, hidden, seed=2) / 3}
    held |= {"b": drawn(d, 2 * gates * hidden, seed=3), "p": drawn(d, 3 * hidden, seed=4)}
    swapped = [1, 0] if "layout" in options else [0, 1]
    x, h = (drawn(*(shape[i] for i in swapped), shape[2]) for shape in ((time, batch, width), (d, batch, hidden)))
    states = ["h0", "c0"][: 2 if operator == "LSTM" else 1] if first else []
    given = ["x", "w", "r", "b", "", *(states or [""]), *(["p"] if "peepholes" in options else [])]
    names = ["y", "h", "c"][: 3 if operator == "LSTM" else 2]
    attributes = f'hidden_size = {hidden}, direction = "{direction}"{options.replace(", peepholes", "")}'
    text = f"{', '.join(names)} = {operator}<{attributes}>({', '.join(given)})"
    inputs = ", ".join([f"float{list(x.shape)} x", *(f"float{list(h.shape)} {s}" for s in states)])
    outputs = ", ".join(f"float[{'a, b, c, d' if n == 'y' else 'e, f, g'}] {n}" for n in names)
    against_definition(model(text, inputs, outputs, {k: v for k, v in held.items() if k in given}), [x, *[h] * len(states)], 1e-5)


# bits


def test_what_follows_has_the_level_of_the_run(limited: str) -> None:
    """A process that lowers the level uses no code of before, also where another level has compiled the same expression."""
    text = "t = MatMul(x, w)\n u = Sigmoid(t)\n y = Mul(t, u)"
    made = model(text, "float[4, 64] x", "float[4, 64] y", {"w": drawn(64, 64, seed=1)})
    by_code(made, [drawn(4, 64)], 1)
    assert sum(key.endswith(f" {limited}") for key in frames._KNOWN)


@pytest.mark.levels
def test_deterministic_nets_have_equal_bits() -> None:
    """Of AVX2, this processor and two threads; inference by machine code only, aside from copies and maxima."""
    found = computed()
    for name in NETS:
        others = [s for s in found[name]["steps"] if not s.startswith("machine.")]
        assert all(s.split()[0] in ("reorder", "pooling") or s.startswith("numpy.copyto") for s in others), others
        assert inference(name, 2)["digest"] == found[name]["digest"]
    if level() in ("avx512", "vnni"):
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "tests.helpers.deterministic_nets"]
        made = subprocess.run(command, cwd=PROJECT, env=environment, check=True, capture_output=True, text=True)
        other = json.loads(made.stdout)
        assert {k: v["digest"] for k, v in other.items()} == {k: v["digest"] for k, v in found.items()}
