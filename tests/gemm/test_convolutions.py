"""Exact convolutions of 8-bit integers by machine code: functions against integers of 64 bits, operators against definitions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.gemm.test_integers import DRAWS, drawn
from tests.helpers.gemm_frames import Frame
from tests.helpers.plan_checks import check, model_of

from singa_backend.elementwise.compile import available, target
from singa_backend.gemm.dots import WEIGHT_DOTS
from singa_backend.gemm.integers import IntegersKind, integers
from singa_backend.gemm.windows import depthwise, windows
from singa_backend.ir.windows import Windows
from singa_backend.ir.windows import windows as windows_of
from singa_backend.kernels import integer_convolutions, onednn
from singa_backend.kernels.integer_convolutions import WindowRows, window_sizes
from singa_backend.kernels.integer_products import packed_tiles
from singa_backend.kernels.machine_steps import tile_sizes
from singa_backend.kernels.quantized import exact_int8
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

U8, S8 = np.uint8, np.int8
STEP = "machine.convolution of 8-bit integers"


def convolved(x: np.ndarray, w: np.ndarray, zero: int, at: Windows, group: int) -> np.ndarray:
    """The sums of a convolution in integers of 64 bits, with the channels last."""
    wide = np.pad(x.astype(np.int64) - zero, [(0, 0), (0, 0), *zip(at.begins, at.ends, strict=True)])
    split = wide.reshape(x.shape[0], group, -1, *wide.shape[2:])
    filters = w.astype(np.int64).reshape(group, w.shape[0] // group, *w.shape[1:])
    sums = np.zeros((x.shape[0], *at.counts, group, w.shape[0] // group), np.int64)
    for tap in product(*map(range, at.kernel)):
        axes = zip(tap, at.counts, at.strides, at.dilations, strict=True)
        cells = tuple(slice(i * d, i * d + (n - 1) * s + 1, s) for i, n, s, d in axes)
        sums += np.einsum("ngc...,gmc->n...gm", split[(..., *cells)], filters[(..., *tap)])
    return sums.reshape(x.shape[0], -1, w.shape[0])


def kinds_of(level: str) -> Iterator[IntegersKind]:
    """Kinds of code of a level: both types of x, and each result."""
    for signed, (result, bias) in product((False, True), (("sums", False), ("uint8", True), ("int8", False))):
        yield IntegersKind(level, signed, result, bias)


GEOMETRIES: list[tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = [
    ((2, 3, 7, 6), (5, 3, 3, 3), 1, {"pads": [1, 0, 2, 1]}),
    ((1, 20, 5, 9), (33, 20, 1, 1), 1, {"strides": [2, 2]}),
    ((1, 17, 9, 8), (16, 17, 3, 2), 1, {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    ((1, 12, 6, 6), (8, 3, 3, 3), 4, {"pads": [1, 1, 1, 1]}),
    ((1, 66, 4, 5), (70, 33, 2, 2), 2, {"pads": [0, 1, 1, 0], "strides": [1, 2]}),
    ((2, 4, 30), (6, 4, 5), 1, {"pads": [4, 3], "strides": [3], "dilations": [2]}),
    ((1, 4, 5, 4, 3), (3, 4, 2, 3, 2), 1, {"pads": [1, 1, 1, 0, 0, 0]}),
    ((1, 1, 2, 2), (1, 1, 5, 5), 1, {"pads": [4, 4, 4, 4]}),
]
"""Shapes of x and w, groups and attributes."""

CHANNELS: list[tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = [
    ((2, channels, 6, 5), (channels, 1, 3, 3), channels, {"pads": [1, 1, 1, 1], "strides": strides})
    for channels, strides in ((3, [1, 1]), (16, [2, 1]), (70, [1, 2]), (131, [2, 2]))
]


def geometry(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> Windows:
    """The windows of a convolution."""
    found = (attributes.get(name) for name in ("strides", "pads", "dilations"))
    return windows_of(x[2:], w[2:], *found)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.parametrize(("shape", "filters", "group", "attributes"), GEOMETRIES + CHANNELS)
def test_functions_are_exact_and_stay_in_their_arrays(
    limited: str, ended: Any, shape: Any, filters: Any, group: int, attributes: Any, how: str, threads: int
) -> None:
    at, outputs, whole = geometry(shape, filters, attributes), filters[0], group == filters[0] == shape[1]
    form, sizes = WindowRows.of(at, filters, group), window_sizes(at, shape[0], shape[1])
    rows, w, zero = sizes["rows"], drawn(how, S8, filters, 1), -3 if how == "drawn" else 100
    bias, factors = drawn("drawn", np.int16, (outputs,)).astype(np.int32), np.linspace(1e-5, 1e-3, outputs).astype(np.float32)
    for kind in kinds_of(limited):
        x, point = drawn(how, kind.dtype, shape), np.array([zero if kind.signed else abs(zero)], kind.dtype)
        columns = -(-outputs // 16) * 16 if whole else form.columns

        def by_column(v: np.ndarray, columns: int = columns, blocks: int = 1 if whole else form.blocks) -> np.ndarray:
            return np.pad(v.reshape(blocks, -1), ((0, 0), (0, columns - outputs // blocks)))

        arrays = {
            "x": np.moveaxis(x, 1, -1), "zero": point, "bias": by_column(bias), "factors": by_column(factors),
            "shift": np.full(1, 3, np.float32), "sums": by_column(w.reshape(outputs, -1).sum(1, dtype=np.int32)),
        }  # fmt: skip
        if whole:
            arrays["w"] = np.pad(w.reshape(outputs, -1).T.astype(np.int16), ((0, 0), (0, columns - outputs)))
        else:
            arrays["w"] = packed_tiles(form.matrices(w), form.depth, form.columns).array
            sizes = form.sizes(kind, window_sizes(at, shape[0], shape[1]))
            arrays["left"] = np.zeros((rows, sizes["stride"]), np.uint8)
        arrays["y"] = np.zeros((rows, outputs), np.int32 if kind.result == "sums" else kind.result)
        held = {name: ended(np.ascontiguousarray(a)) for name, a in arrays.items()}
        for block in range(1 if whole else form.blocks):
            if whole:
                Frame(depthwise(kind), sizes, held, threads)()
                continue
            skipped = block * form.joined * filters[1]
            part = {**sizes, **tile_sizes(rows, form.outputs), "first": 0, "pitch": outputs, "total": x.size - skipped}
            here = {**held, **{name: held[name][block] for name in ("w", "sums", "bias", "factors")}}
            here |= {"x": held["x"].reshape(-1)[skipped:], "y": held["y"].reshape(-1)[block * form.outputs :]}
            for function in windows(kind), integers(kind):
                Frame(function, part, here, threads)()
        exact = convolved(x, w, int(point[0]), at, group).reshape(rows, outputs) + (bias if kind.bias else 0)
        if kind.result != "sums":
            info = np.iinfo(kind.result)
            exact = np.clip(np.rint(exact.astype(np.float32) * factors) + 3, info.min, info.max)
        np.testing.assert_array_equal(held["y"], exact)


@pytest.mark.levels
@pytest.mark.parametrize("name", WEIGHT_DOTS)
def test_every_level_has_objects(name: str) -> None:
    """They refer to nothing but themselves."""
    for kind in kinds_of(name):
        added = [integers(kind)] if kind.bias else []
        assert all(target(name).object(f.text("f")) for f in (windows(kind), depthwise(kind), *added))


# Operators


def qlinear(w: np.ndarray, types: tuple[Any, Any], bias: bool, channels: bool, x: int = 9) -> tuple[list[str], dict[str, Any]]:
    """The inputs of a QLinearConv, and its constants."""
    outputs = w.shape[0]
    scale = np.linspace(1e-3, 3e-3, outputs) if channels else np.array(2e-3)
    constants = {
        "sx": np.float32(0.1), "zx": np.array(x, types[0]), "w": w, "sw": scale.astype(np.float32),
        "zw": np.zeros(scale.shape, S8), "sy": np.float32(0.1), "zy": np.array(3, types[1]),
    }  # fmt: skip
    if bias:
        constants["b"] = np.random.default_rng(2).integers(-9999, 9999, outputs).astype(np.int32)
    return ["x", *constants], constants


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("types", [(U8, U8), (S8, S8), (U8, S8)])
@pytest.mark.parametrize(("shape", "filters", "group", "attributes"), GEOMETRIES + CHANNELS)
def test_qlinear_conv(
    inexact: None, monkeypatch: Any, shape: Any, filters: Any, group: int, attributes: Any, types: Any, threads: int
) -> None:
    monkeypatch.setattr(integer_convolutions, "PART", 1 << 11)  # several parts
    inputs, constants = qlinear(drawn("drawn", S8, filters), types, threads == 1, types[1] is S8)
    nodes = [helper.make_node("QLinearConv", inputs, ["y"], group=group, **attributes)]
    feeds = [{"x": drawn(how, types[0], shape, 4)} for how in DRAWS]
    assert STEP in check(model_of(nodes, feeds[0], ["y"], constants), feeds, options=Options(threads=threads))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize(("shape", "filters", "group", "attributes"), [GEOMETRIES[0], GEOMETRIES[4], CHANNELS[0]])
def test_conv_integer(
    inexact: None, limited: str, shape: Any, filters: Any, group: int, attributes: Any, dtype: Any, zero: bool
) -> None:
    """The zero point of x is an input of the model."""
    constants = {"w": drawn("drawn", S8, filters)}
    nodes = [helper.make_node("ConvInteger", ["x", "w", "z"][: 2 + zero], ["y"], group=group, **attributes)]
    feeds: list[dict[str, np.ndarray]] = [{"x": drawn(how, dtype, shape)} for how in DRAWS]
    for feed, z in zip(feeds, (5, 100) if zero else (), strict=zero):
        feed["z"] = np.array(z, dtype)
    assert STEP in check(model_of(nodes, feeds[0], ["y"], constants), feeds, options=Options(threads=1))


@pytest.mark.parametrize("bias", ["", "large", "input"])
@pytest.mark.parametrize("weights", ["", "unsigned", "input"])
def test_others_are_declined(inexact: None, bias: str, weights: str) -> None:
    """Weights or a bias that are inputs, sums that may exceed int32, and weights whose zero point exceeds int8."""
    w = drawn("drawn", U8 if weights == "unsigned" else S8, (4, 3, 2, 2))
    inputs, constants = qlinear(w, (U8, U8), True, False)
    constants["zw"] = np.array(0, w.dtype)
    if bias == "large":
        constants["b"][0] = -(2**31) + 1
    feed = {"x": drawn("drawn", U8, (1, 3, 5, 5))}
    feed |= {name: constants.pop(name) for name, how in (("w", weights), ("b", bias)) if how == "input"}
    nodes = [helper.make_node("QLinearConv", inputs, ["y"])]
    kernels = check(model_of(nodes, feed, ["y"], constants), [feed], options=Options(threads=1))
    assert (STEP in kernels) == (bias == weights == "")


@pytest.mark.skipif(not exact_int8(), reason="oneDNN has no exact products of 8-bit integers here")
def test_onednn_computes_what_it_computes_exactly() -> None:
    inputs, constants = qlinear(drawn("drawn", S8, (4, 3, 2, 2)), (U8, U8), True, False)
    feed = {"x": drawn("drawn", U8, (1, 3, 5, 5))}
    nodes = [helper.make_node("QLinearConv", inputs, ["y"])]
    assert STEP not in check(model_of(nodes, feed, ["y"], constants), [feed], options=Options(threads=1))


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "library", lambda: None)
    inputs, constants = qlinear(drawn("drawn", S8, (4, 3, 2, 2)), (U8, U8), True, False)
    feed = {"x": drawn("drawn", U8, (1, 3, 5, 5))}
    nodes = [helper.make_node("QLinearConv", inputs, ["y"])]
    assert STEP in check(model_of(nodes, feed, ["y"], constants), [feed], options=Options(threads=1))


def test_dequantized_values_are_convolved_as_integers(inexact: None) -> None:
    """DequantizeLinear, Conv, Relu, QuantizeLinear, twice: no float32 is left between.  The scales make float32 exact too."""
    w, node = drawn("drawn", S8, (8, 8, 3, 3)), helper.make_node
    constants = {
        "w": w, "sw": np.float32(2**-10), "zw": S8(0), "s": np.float32(2**-3), "z": U8(0),
        "b": np.arange(8, dtype=np.int32), "sb": np.float32(2**-13), "zb": np.int32(0),
    }  # fmt: skip
    nodes = [node("DequantizeLinear", ["w", "sw", "zw"], ["v"]), node("DequantizeLinear", ["b", "sb", "zb"], ["c"])]
    for i in range(2):
        nodes += [
            node("DequantizeLinear", [f"q{i}", "s", "z"], [f"x{i}"]), node("Conv", [f"x{i}", "v", "c"], [f"p{i}"], pads=[1] * 4),
            node("Relu", [f"p{i}"], [f"r{i}"]), node("QuantizeLinear", [f"r{i}", "s", "z"], [f"q{i + 1}"]),
        ]  # fmt: skip
    feed = {"q0": drawn("drawn", U8, (1, 8, 7, 7))}
    made = model_of(nodes, feed, ["q2"], constants)
    kernels = check(made, [feed], options=Options(threads=1), tolerance=0)
    assert [k for k in kernels if "reorder" not in k] == [STEP, STEP]
