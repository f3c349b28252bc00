"""Machine code of expressions against NumPy: primitives, casts, definitions, rows, tails, threads, bits on other processors."""

from __future__ import annotations

import ctypes
import inspect
import mmap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.helpers.elementwise_bits import is_x86
from tests.helpers.elementwise_frames import Call, gomp, run, traced

import singa_backend.operators
from singa_backend.devices import namespaces
from singa_backend.elementwise.compile import LEVELS, available, target
from singa_backend.elementwise.expression import FUNCTIONS, ExpressionTrace, NotTraced, Term, order
from singa_backend.elementwise.functions import COSTLY
from singa_backend.elementwise.machine_code import emit
from singa_backend.elementwise.primitives import NotEmitted
from singa_backend.errors import SonnxError
from singa_backend.ir.declaration import Declaration, declarations

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=available()),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

assert singa_backend.operators  # declares them

REAL = [np.float32, np.float64]
WHOLE = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
DTYPES = [np.bool_, *WHOLE, *REAL]
SIZES = [0, 1, 15, 16, 17, 31, 33, 1000]
GUARD = 64


def values(dtype: Any, n: int, seed: int = 0) -> np.ndarray:
    """Values of all kinds: small, of all exponents or bits, and special ones first."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind == "f":
        word = np.dtype(f"u{dtype.itemsize}")
        found = rng.integers(0, 1 << 8 * dtype.itemsize, n, dtype=word).view(dtype)
        found[np.isnan(found)] = np.nan  # NumPy's fmax of a signaling NaN is the other number on some processors only
        found[::3] = rng.uniform(-9, 9, len(found[::3]))
        special = [0.0, np.nan, -0.0, np.inf, -np.inf, 1e-40, -2.5, 0.5, -1.0, 1.0, 3e9, -3e9, 1e19, 127.0, 255.0, 256.0]
        found[5 : 5 + len(special)] = special[: max(0, n - 5)]
        return found
    found = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, n, dtype=dtype, endpoint=True)
    found[::2] = rng.integers(0, 5, len(found[::2]))
    limits = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 1], dtype)
    found[3:6] = limits[: max(0, n - 3)]
    found[7:9] = np.array([-1 if dtype.kind == "i" else 1, 0], dtype)[: max(0, n - 7)]
    return found


def guarded(n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """An array that begins one element after a multiple of 64 bytes, in bytes that must not change."""
    itemsize = np.dtype(dtype).itemsize
    whole = np.full(2 * GUARD + (n + 1) * itemsize + 64, 0xA5, np.uint8)
    start = -whole.ctypes.data % 64 + GUARD + itemsize
    start += -(whole.ctypes.data + start) % itemsize
    return whole, whole[start : start + n * itemsize].view(dtype)


def unharmed(whole: np.ndarray, part: np.ndarray) -> bool:
    start = part.ctypes.data - whole.ctypes.data
    return bool((whole[:start] == 0xA5).all() and (whole[start + part.nbytes :] == 0xA5).all())


def computed(results: list[Term], arrays: list[np.ndarray], shape: Any = None, **options: Any) -> list[np.ndarray]:
    """The results in arrays whose neighbours are checked."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays)) if shape is None else shape
    held = [guarded(int(np.prod(shape)), t.dtype) for t in results]
    outs = run(results, arrays, [part.reshape(shape) for _, part in held], **options)
    assert all(unharmed(*h) for h in held), "bytes next to a result were written"
    return outs


def equal(y: np.ndarray, expected: np.ndarray, zeros: bool = True) -> None:
    """Equal, NaN to NaN; zeros: with the sign of 0."""
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)
    if zeros and y.dtype.kind == "f":
        number = ~np.isnan(y)
        np.testing.assert_array_equal(np.signbit(y)[number], np.signbit(expected)[number])


def primitives(dtype: Any) -> dict[str, int]:
    """The primitives that NumPy has for a dtype, and the numbers of their operands; functions have tests of their own."""
    found = {}
    for name, function in FUNCTIONS.items():
        try:
            kinds = function.resolve_dtypes((*[np.dtype(dtype)] * function.nin, None))
        except TypeError:
            continue
        if name not in COSTLY and all(k == dtype for k in kinds[:-1]):
            found[name] = function.nin
    return found


def refused(name: str, dtype: Any) -> bool:
    """What has no machine code."""
    return np.dtype(dtype).kind == "f" and name in ("fmod", "mod", "floordiv")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_primitives_equal_numpy(dtype: Any) -> None:
    """All primitives of a dtype in one function, at all sizes, one element off a multiple of 64 bytes."""
    known = {name: nin for name, nin in primitives(dtype).items() if not refused(name, dtype)}
    assert len(known) > (15 if dtype is np.bool_ else 20)

    def body(xp: Any, x: Any, y: Any) -> list[Any]:
        return [FUNCTIONS[name](*(x, y)[:nin]) for name, nin in known.items()]

    results = traced(body, (dtype, (9,)), (dtype, (9,)))
    for n in SIZES:
        (_, x), (_, y) = guarded(n, dtype), guarded(n, dtype)
        x[:], y[:] = values(dtype, n), values(dtype, n, 1)
        if np.dtype(dtype).kind in "iu" and n > 9:
            y[9] = 200 % (np.iinfo(dtype).max + 1)  # a shift by more than the width
        for name, found in zip(known, computed(results, [x, y]), strict=True):
            expected = FUNCTIONS[name](*(x, y)[: known[name]])
            try:
                equal(found, expected, zeros=name not in ("max", "min", "fmax", "fmin"))
            except AssertionError as error:
                raise AssertionError(f"{name} of {n} elements: {error}") from error


@pytest.mark.parametrize("name", ["fmod", "mod", "floordiv"])
def test_remainders_of_real_numbers_are_refused(name: str) -> None:
    results = traced(lambda xp, x, y: FUNCTIONS[name](x, y), (np.float32, (9,)), (np.float32, (9,)))
    with pytest.raises(NotEmitted, match=f"{name} of real numbers"):
        emit("kernel", results, {0: "row", 1: "row"})


@pytest.mark.parametrize("dtype", [np.float16, np.complex64])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    results = traced(lambda xp, x: x + x, (dtype, (9,)))
    with pytest.raises(NotEmitted, match=np.dtype(dtype).name):
        emit("kernel", results, {0: "row"})


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_casts_equal_numpy(dtype: Any) -> None:
    targets = [d for d in DTYPES if d is not dtype]
    results = traced(lambda xp, x: [x.astype(d) for d in targets], (dtype, (9,)))
    for n in SIZES:
        x = values(dtype, n)
        if np.dtype(dtype).kind == "f":  # NumPy's own results of what is out of range depend on its loops, and on the size
            x = np.where(np.abs(x) < 2.0**31 - 256, x, x.dtype.type(-7.5))
            limits = {d: (-1 if np.iinfo(d).min == 0 else np.iinfo(d).min, np.iinfo(d).max) for d in WHOLE}
        for new, found in zip(targets, computed(results, [x]), strict=True):
            kept = np.ones(n, bool)
            if np.dtype(dtype).kind == "f" and new in WHOLE:
                kept = (np.trunc(x) > limits[new][0]) & (np.trunc(x) < limits[new][1])
            equal(found[kept], x[kept].astype(new))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("target", WHOLE)
def test_casts_out_of_range_are_as_on_x86(dtype: Any, target: Any) -> None:
    """Through 32 or 64 bits, where out of range is the smallest number; then narrower integers wrap."""
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0**63, -(2.0**63), 2.0**31, -(2.0**31), 300, -300, -1, 2.0**64], dtype)
    (y,) = computed(traced(lambda xp, x: x.astype(target), (dtype, (9,))), [x])
    wide = 64 if np.dtype(target).itemsize == 8 or target is np.uint32 else 32

    def truncated(v: float) -> int:
        upper = target is np.uint64 and v >= 2.0**63
        v = v - 2.0**63 if upper else v
        return (int(v) if -(2.0 ** (wide - 1)) <= v < 2.0 ** (wide - 1) else -(1 << wide - 1)) ^ upper << 63

    expected = [truncated(float(v)) & (1 << 8 * np.dtype(target).itemsize) - 1 for v in x]
    np.testing.assert_array_equal(y, np.array(expected, f"u{np.dtype(target).itemsize}").view(target))


@pytest.mark.parametrize(("dtype", "other"), [(np.float32, np.int32), (np.float64, np.uint64), (np.int16, np.uint16)])
def test_bits_where_and_polynomials(dtype: Any, other: Any) -> None:
    def body(xp: Any, c: Any, x: Any, y: Any) -> list[Any]:
        found = [x.view(other), xp.where(c, x, y), xp.where(c, x, 3)]
        return [*found, xp.polynomial(x, (1.5, -2.0, 0.25))] if np.dtype(dtype).kind == "f" else found

    results = traced(body, (bool, (9,)), (dtype, (9,)), (dtype, (9,)))
    for n in SIZES:
        c, x, y = values(bool, n), values(dtype, n), values(dtype, n, 2)
        found = computed(results, [c, x, y])
        np.testing.assert_array_equal(found[0], x.view(other))
        bits = f"u{np.dtype(dtype).itemsize}"
        np.testing.assert_array_equal(found[1].view(bits), np.where(c, x, y).view(bits))
        np.testing.assert_array_equal(found[2].view(bits), np.where(c, x, np.array(3, dtype)).view(bits))
        if len(found) == 4:
            np.testing.assert_allclose(found[3], 1.5 + x * (-2.0 + 0.25 * x), rtol=1e-5)


def frames() -> Iterator[Any]:
    """Pairs of shapes and views that reach all classes of inputs and all three axes."""
    cases: dict[str, Callable[[Any], tuple[np.ndarray, np.ndarray]]] = {
        "scalar": lambda v: (v((40, 33)), v(())),
        "row": lambda v: (v((40, 33)), v((33,))),
        "column": lambda v: (v((40, 1)), v((40, 33))),
        "channel": lambda v: (v((2, 3, 49)), v((3, 1))),
        "outer": lambda v: (v((40, 1)), v((33,))),
        "transposed": lambda v: (v((33, 40)).T, v((40, 33))),
        "strided": lambda v: (v((40, 67))[:, 1::2], v((40, 33))),
        "backwards": lambda v: (v((40, 33))[:, ::-1], v((40, 33))),
        "three axes": lambda v: (v((4, 5, 1)), v((4, 1, 17))),
        "rows apart": lambda v: (v((4, 5, 40))[:, ::2, :33], v((4, 3, 33))),
    }
    return (pytest.param(case, id=name) for name, case in cases.items())


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int64, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("case", list(frames()))
def test_broadcasting(case: Any, dtype: Any) -> None:
    x, y = case(lambda shape: values(dtype, int(np.prod(shape)), len(shape)).reshape(shape))
    results = traced(lambda xp, x, y: [np.add(x, y), np.greater(x, y)], (dtype, x.shape), (dtype, y.shape))
    shape = np.broadcast_shapes(x.shape, y.shape)
    for threads, chunk in ((1, 1 << 40), (2, 16), (2, 3)):
        found = computed(results, [x, y], shape, threads=threads, chunk=chunk)
        equal(found[0], np.add(x, y))
        equal(found[1], np.greater(x, y))


@pytest.mark.parametrize(("dtype", "target"), [(np.float32, np.float32), (np.float64, np.float32), (np.int32, np.uint8)])
def test_in_place(dtype: Any, target: Any) -> None:
    """A result has the place of an input, and its elements are not larger."""
    results = traced(lambda xp, x, y: (x * y + x).astype(target), (dtype, (9,)), (dtype, (9,)))
    for n in SIZES:
        x, y = np.random.default_rng(n).integers(0, 5, (2, n)).astype(dtype)
        expected = (x * y + x).astype(target)
        place = x.view(np.uint8)[: n * np.dtype(target).itemsize].view(target)
        run(results, [x, y], [place])
        np.testing.assert_array_equal(place, expected)


def test_a_row_of_softmax_in_place_of_its_input() -> None:
    """A result of an early pass is written last: later passes read the input again."""
    x = np.random.default_rng(0).normal(size=(7, 100)).astype(np.float32)

    def body(xp: Any, x: Any) -> list[Any]:
        return [np.exp(x), x - x.max(-1, keepdims=True) + x.sum(-1, keepdims=True)]

    results, place = traced(body, (x.dtype, x.shape)), x.copy()
    first, second = run(results, [place], [np.empty_like(x), np.empty_like(x)])
    run(results, [place], [place, other := np.empty_like(x)])
    np.testing.assert_array_equal(place, first)
    np.testing.assert_array_equal(other, second)


@pytest.mark.skipif(not hasattr(mmap, "PROT_NONE") and not hasattr(ctypes.CDLL(None), "mprotect"), reason="no mprotect")
@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.float64], ids=lambda d: d.__name__)
def test_nothing_after_an_array_is_touched(dtype: Any) -> None:
    """The arrays end at a page that may not be read."""
    page, protect = mmap.PAGESIZE, ctypes.CDLL(None).mprotect
    results = traced(lambda xp, x, y: np.maximum(x, y) + x, (dtype, (9,)), (dtype, (9,)))
    maps = [mmap.mmap(-1, 2 * page) for _ in range(3)]
    views = [np.frombuffer(m, np.uint8) for m in maps]
    for v in views:
        assert protect(ctypes.c_void_p(v.ctypes.data + page), page, 0) == 0
    for n in (1, 15, 17, 33, 100):
        x, y, out = (v[page - n * np.dtype(dtype).itemsize : page].view(dtype) for v in views)
        x[:], y[:] = np.arange(n) % 7, np.arange(n) % 5
        run(results, [x, y], [out])
        np.testing.assert_array_equal(out, np.maximum(x, y) + x)
    for v in views:
        protect(ctypes.c_void_p(v.ctypes.data + page), page, 3)


# Definitions


OPTIONS: dict[str, dict[str, Any]] = {"BitShift": {"direction": "LEFT"}, "Cast": {"to": "FLOAT"}}
NAMES = [
    key
    for key, versions in declarations.items()
    if {"unary", "broadcasting"} & next(iter(versions.values())).traits and key[1] not in ("CastLike",)
]
REFUSED = {("Mod", "float32"), ("Mod", "float64")}
"""The pairs of an operator and a dtype that have no machine code."""

UNTRACED = {("Pow", "int8"), ("Pow", "int32"), ("Pow", "int64")}
"""Those whose definitions branch on a value."""

LOOSE = {"Mish": 8, "Gelu": 8}
"""The difference from the definition in units in the last place of the result, 4 if functions are used: both err, and errors
grow inside of a composition."""


def arguments(declaration: Declaration, dtype: Any, n: int) -> list[np.ndarray]:
    parameters = [p for p in list(inspect.signature(declaration.body).parameters.values())[1:] if p.kind != p.KEYWORD_ONLY]
    count = 3 if parameters[0].kind == inspect.Parameter.VAR_POSITIONAL else len(parameters)
    arrays = [values(dtype, n, 3 * i) for i in range(count)]
    if declaration.name == "Where":
        arrays[0] = values(bool, n)
    if declaration.name in ("Div", "Mod") and np.dtype(dtype).kind in "iu":
        arrays[1] = np.where(arrays[1] == 0, np.array(3, dtype), arrays[1])
    if declaration.name == "Clip":
        arrays[1:] = [np.array(v, dtype) for v in (1, 3)]
    if declaration.name == "Cast" and np.dtype(dtype).kind == "f":
        arrays = [values(np.float64, n).astype(dtype)]
    return arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_definitions(dtype: Any) -> None:
    """Arithmetic has the definition's bits; functions are near its values."""
    xp, tried = namespaces.host, 0
    for domain, name in NAMES:
        declaration = list(declarations[domain, name].values())[-1]
        options, arrays = OPTIONS.get(name, {}), arguments(declaration, dtype, 1000)
        try:
            expected = np.asarray((declaration.body if declaration.composes else declaration)(xp, *arrays, **options))
        except (SonnxError, TypeError, ValueError):
            continue  # the operator does not have the dtype
        try:
            results = traced(declaration.body, *((a.dtype, a.shape) for a in arrays), **options)
            (found,) = computed(results, arrays)
        except NotTraced:
            assert (name, np.dtype(dtype).name) in UNTRACED, name
            continue
        except NotEmitted as error:
            assert (name, np.dtype(dtype).name) in REFUSED or "float16" in str(error), f"{name}: {error}"
            continue
        tried += 1
        if any(t.op in COSTLY for t in order(results)):
            near(name, found, expected)
        else:
            with np.errstate(all="ignore"):
                equal(found, expected, zeros=name not in ("Relu", "Max", "Min", "Clip", "HardSigmoid", "HardSwish"))
    assert tried > (5 if dtype is np.bool_ else 15)


def near(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
    finite = np.isfinite(expected) & np.isfinite(found)
    np.testing.assert_array_equal(found[~finite], expected[~finite], err_msg=name)
    unit = np.spacing(np.abs(expected[finite]))
    error = np.abs(found[finite].astype(np.float64) - expected[finite]) / unit
    assert error.max(initial=0) <= LOOSE.get(name, 4), f"{name}: {error.max()} units in the last place"


# Rows


def definition(name: str) -> Callable[..., Any]:
    return list(declarations["", name].values())[-1].body


def layer_norm(xp: Any, x: Any, scale: Any, bias: Any) -> Any:
    return definition("LayerNormalization")(xp, x, scale, bias)[0]


def rms_norm(xp: Any, x: Any, scale: Any) -> Any:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / xp.count(x, (1,)) + x.dtype.type(1e-5)) * scale


def exact_rows(name: str, x: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The result in float64."""
    x, *rest = (a.astype(np.float64) for a in (x, *others))
    shifted = x - x.max(-1, keepdims=True) if x.shape[-1] else x
    if name == "Softmax":
        return np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    if name == "LogSoftmax":
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    if name == "layer_norm":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * rest[0] + rest[1]
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * rest[0]


ROWS: dict[str, tuple[Callable[..., Any], int, float]] = {
    "Softmax": (lambda xp, x: definition("Softmax")(xp, x, axis=-1), 0, 2),
    "LogSoftmax": (lambda xp, x: definition("LogSoftmax")(xp, x, axis=-1), 0, 2),
    "layer_norm": (layer_norm, 2, 3),
    "rms_norm": (rms_norm, 1, 2),
}
"""The function, the inputs of a row, and the error in units of the largest value."""


@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 63, 64, 65, 777, 5000])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, n: int) -> None:
    """Kernels for all sizes, if a size is not a number in the definition; every number of threads has the same bits."""
    body, inputs, bound = ROWS[name]
    rng = np.random.default_rng(n)
    x = (rng.normal(size=(5, n)) * 3).astype(np.float32)
    others = [rng.normal(size=n).astype(np.float32) for _ in range(inputs)]
    size = n if name == "layer_norm" else 9  # its definition counts elements in Python
    results = traced(body, (np.float32, (5, size)), *[(np.float32, (size,))] * inputs)
    (y,) = computed(results, [x, *others], (5, n))
    exact = exact_rows(name, x, *others)
    assert np.abs(y - exact).max() <= bound * np.finfo(np.float32).eps * np.abs(exact).max()
    for threads, chunk in ((2, 1), (2, 2), (3, 1), (1, 3)):
        (again,) = computed(results, [x, *others], (5, n), threads=threads, chunk=chunk)
        np.testing.assert_array_equal(again, y)


def test_rows_of_special_values() -> None:
    x = np.zeros((5, 40), np.float32)
    x[0, 3], x[1, 20], x[2, :], x[3, 30] = np.nan, np.inf, -np.inf, -np.inf
    (y,) = computed(traced(ROWS["Softmax"][0], (np.float32, (5, 9))), [x])
    expected = definition("Softmax")(namespaces.host, x, axis=-1)
    np.testing.assert_allclose(y, expected, rtol=3e-7)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int32, np.int64, np.uint8, np.float32, np.float64, np.bool_], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod", "any"])
def test_reductions(kind: str, dtype: Any) -> None:
    results = traced(lambda xp, x: getattr(x, kind)(-1), (dtype, (3, 9)))
    if kind in ("sum", "prod") and dtype is np.bool_:
        with pytest.raises(NotEmitted, match="of logical values"):
            Call(results, [np.zeros((3, 9), bool)], [np.zeros((3, 1), bool)])
        return
    real = np.dtype(dtype).kind == "f"
    for n in [1, 15, 16, 17, 63, 65, 1000, 9000]:
        x = values(dtype, 3 * n, n).reshape(3, n)
        if real and kind in ("sum", "prod"):
            x = np.random.default_rng(n).uniform(0.9, 1.1, (3, n)).astype(dtype)
        if real and kind in ("max", "min"):
            x[1] = np.where(np.isnan(x[1]), 0, x[1])
        if kind == "any":
            x[0] = 0
        (y,) = computed(results, [x], (3, 1))
        function = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply, "any": np.logical_or}[kind]
        expected = function.reduce(x, -1, dtype=bool if kind == "any" else np.longdouble if real else dtype, keepdims=True)
        if real and kind in ("sum", "prod"):
            np.testing.assert_allclose(y, expected, rtol=np.finfo(dtype).eps * (2 if kind == "sum" else 40))
        else:
            np.testing.assert_array_equal(y, expected)


def test_sums_of_long_rows_do_not_lose_more() -> None:
    x = np.random.default_rng(0).random((1, 3_000_000), np.float32)
    (y,) = computed(traced(lambda xp, x: x.sum(-1), (np.float32, (1, 9))), [x], (1, 1))
    exact = x.sum(dtype=np.float64)
    assert abs(y[0, 0] - exact) <= 4 * np.spacing(np.float32(exact))


def test_an_empty_row_is_neutral() -> None:
    (y,) = computed(traced(lambda xp, x: x.sum(-1), (np.float32, (3, 9))), [np.zeros((3, 0), np.float32)], (3, 1))
    np.testing.assert_array_equal(y, 0)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda xp, x: x.sum(0), "other axes"),
        (lambda xp, x: x.sum(), "other axes"),
        (lambda xp, x: x.sum(-1).sum(-1), "other axes"),
        (lambda xp, x: [x.sum(-1), xp.full((4, 9), 1, np.float32)], "does not depend on the rows"),
        (lambda xp, x: [x + 1, xp.full((3, 4, 9), 2, x.dtype) * x], "several sizes"),
    ],
)
def test_other_reductions_are_refused(body: Any, reason: str) -> None:
    with pytest.raises(NotEmitted, match=reason):
        emit("kernel", traced(body, (np.float32, (4, 9))), {0: "row"})


# Bits and objects of other processors


def kernels() -> dict[str, tuple[list[Term], list[np.ndarray]]]:
    """Functions, compositions and rows of float32 and float64."""
    found: dict[str, tuple[list[Term], list[np.ndarray]]] = {}
    for dtype in REAL:
        x, y = np.abs(values(dtype, 999)), values(dtype, 999, 1)
        names = sorted(COSTLY - {"poly"})
        for half in (names[::2], names[1::2]):
            body = partial(lambda half, xp, x, y: [FUNCTIONS[n](*(x, y)[: FUNCTIONS[n].nin]) for n in half], half)
            found[f"{half[0]} {dtype.__name__}"] = traced(body, (dtype, (9,)), (dtype, (9,))), [x, y]
        rows = np.random.default_rng(0).normal(size=(3, 333)).astype(dtype)
        for name in ("Softmax", "LogSoftmax"):
            found[f"{name} {dtype.__name__}"] = traced(ROWS[name][0], (dtype, (3, 9))), [rows]
        scale = rows[0] + 1
        found[f"rms_norm {dtype.__name__}"] = traced(rms_norm, (dtype, (3, 9)), (dtype, (9,))), [rows, scale]
        gelu = traced(definition("Gelu"), (dtype, (9,)))
        found[f"Gelu {dtype.__name__}"] = gelu, [y]
    return found


KERNELS = kernels() if not available() else {}


@pytest.mark.levels
@pytest.mark.parametrize("name", KERNELS)
def test_equal_bits_with_shorter_vectors(name: str) -> None:
    """AVX2 splits the vectors; NaN equals NaN."""
    results, arrays = KERNELS[name]
    if not is_x86():
        pytest.skip("AVX2 is of x86-64")
    for y, other in zip(computed(results, arrays), computed(results, arrays, features=LEVELS["avx2"][2]), strict=True):
        equal(other, y)


@pytest.mark.levels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", list(KERNELS)[:4] + list(KERNELS)[-2:])
def test_objects_of_other_processors_call_nothing(name: str, level: str) -> None:
    results, arrays = KERNELS[name]
    code = emit("kernel", results, dict.fromkeys(range(len(arrays)), "row"))
    assert target(level).object(code.text).startswith(b"\x7fELF")


def test_threads_claim_all_parts() -> None:
    if not gomp():
        pytest.skip("libgomp is not installed")
    x = values(np.float32, 100_003)
    results = traced(lambda xp, x: np.exp(x), (np.float32, (9,)))
    (expected,) = computed(results, [x])
    for threads, chunk in ((2, 1024), (4, 16), (2, 1 << 40), (3, 0), (2, 7)):
        (y,) = computed(results, [x[: 50 if chunk == 0 else None]], threads=threads, chunk=chunk)
        equal(y, expected[: len(y)])


def test_recorded_terms_of_one_element() -> None:
    """A size is an input of one element after the recorded ones."""
    trace = ExpressionTrace()
    x = trace.input(np.float32, (4, 9))
    y = x / trace.count(x, -1)
    code = emit("kernel", [y.term], {0: "row"})
    assert [t.op for t in code.inputs] == ["input", "size"]


# Random expressions


def random_body(seed: int, xp: Any, *xs: Any) -> list[Any]:
    """Up to three results of one shape, from arithmetic whose bits are NumPy's; the same for arrays and for recorded ones."""
    rng, pool = np.random.default_rng(seed), list(xs)
    one = [np.negative, np.absolute, np.sign, np.floor, np.rint, np.isfinite, np.isnan]
    two = [np.add, np.subtract, np.multiply, np.less, np.equal, np.greater_equal, np.copysign]
    for _ in range(int(rng.integers(4, 15))):
        a, b = (pool[-1 - int(i)] for i in rng.integers(0, min(6, len(pool)), 2))
        how, which = int(rng.integers(0, 10)), int(rng.integers(0, 7))
        try:
            if how < 3:
                y = one[which](a)
            elif how < 8:
                y = two[which](a, b)
            else:
                y = xp.where(np.less(a, b), a, b) if how == 8 else a.astype((np.float32, np.float64)[which % 2])
        except TypeError:
            continue  # NumPy does not have it for the dtype
        if y.dtype != np.float16:
            pool.append(y)
    whole = [p for p in pool[len(xs) :] if p.shape == xs[0].shape]
    return whole[-3:] or [np.equal(xs[0], xs[0])]


@pytest.mark.parametrize("seed", range(60))
def test_random_expressions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, outer = int(rng.choice([1, 5, 16, 17, 40, 130])), int(rng.choice([1, 3, 5]))
    shapes = [(outer, n), *([(outer, n), (n,), (outer, 1), ()][int(i)] for i in rng.integers(0, 4, 3))]
    dtypes = [(np.float32, np.float64, np.int32, np.uint8, np.int64, np.bool_)[int(i)] for i in rng.integers(0, 6, 4)]
    arrays = [values(d, int(np.prod(s)), seed + i).reshape(s) for i, (d, s) in enumerate(zip(dtypes, shapes, strict=True))]
    results = traced(partial(random_body, seed), *((a.dtype, a.shape) for a in arrays))
    threads, chunk = int(rng.integers(1, 3)), int(rng.choice([1, 16, 1 << 40]))
    expected = random_body(seed, namespaces.host, *arrays)
    for y, e in zip(computed(results, arrays, (outer, n), threads=threads, chunk=chunk), expected, strict=True):
        equal(y, np.asarray(e))
