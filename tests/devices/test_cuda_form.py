"""The text of each primitive, and of each operator that is elementwise, on an emulated device: the bits of CuPy's functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_backend.devices.device import resolve
from singa_backend.domains import load_domain
from singa_backend.elementwise.cuda_form import NotWritten, cuda_form
from singa_backend.elementwise.expression import FUNCTIONS, ExpressionTrace, Term, order
from singa_backend.elementwise.trace import InputKind, traced
from singa_backend.ir.declaration import declarations, has_trait
from singa_backend.ir.versioned import VersionedOperator, versioned

pytestmark = pytest.mark.fakecuda
RNG = np.random.default_rng(0)
SPECIAL = [np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1, -1, 0.5, -0.5, 2, 1e-3, 88, -104]
EXTREMES = {"max", "min", "fmax", "fmin"}
"""Of 0 and -0 the compiler of the emulation returns either."""
DTYPES = [np.dtype(kind) for kind in "fdqbB?"]


@pytest.fixture(scope="module")
def xp() -> Any:
    pytest.importorskip("cupy")
    return resolve("CUDA").xp


def elements(dtype: np.dtype[Any]) -> np.ndarray:
    """Elements in which every special one meets others, in another order in each call."""
    with np.errstate(all="ignore"):
        return RNG.permutation(np.concatenate([SPECIAL, SPECIAL, 3 * RNG.standard_normal(40)])).astype(dtype)


def computed(xp: Any, term: Term, arrays: list[Any]) -> Any:
    """A term by a kernel of its own."""
    form = cuda_form([term])
    takes = ", ".join(f"{leaf.dtype.name} a{i}" for i, leaf in enumerate(form.leaves))
    kernel = xp.elementwise(takes, f"{term.dtype.name} y0", form.text)
    places = {id(leaf): leaf.args[0] if leaf.op == "reshape" else leaf for leaf in form.leaves}
    return kernel(
        *[t.number.item() if t.op == "const" else arrays[places[id(t)].extra].reshape(t.shape) for t in form.leaves]
    ).get()


def check_bits(found: np.ndarray, wanted: np.ndarray, zeros: bool = True) -> None:
    """Equal bits, but for the sign and the payload of a NaN, and for the signs of zeros if they are free."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found, wanted)
    if wanted.dtype.kind == "f" and zeros:
        there = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found)[there], np.signbit(wanted)[there])


UNWRITTEN = {
    "floordiv": "fdqbB?", "mod": "fdqbB?", "fmod": "qbB?", "pow": "qbB?", "shl": "qbB?", "shr": "qbB?",
    "sub": "?", "neg": "?", "sign": "?",
}  # fmt: skip
"""The dtypes for which a function has no text."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_bits_of_cupys(xp: Any, name: str, dtype: np.dtype[Any]) -> None:
    ufunc, trace = FUNCTIONS[name], ExpressionTrace(device=True)
    arrays = [elements(dtype) for _ in range(ufunc.nin)]
    try:
        term = ufunc(*(trace.input(dtype, a.shape) for a in arrays)).term
    except TypeError:  # NumPy has no such function of these elements
        return
    if any(a.dtype == np.float16 for a in (term, *term.args)) or dtype.char in UNWRITTEN.get(name, ""):
        with pytest.raises(NotWritten, match=f"{name} of|float16"):
            cuda_form([term])
        return
    there = [xp.from_host(a) for a in arrays]
    check_bits(computed(xp, term, there), getattr(xp.module, ufunc.__name__)(*there).get(), name not in EXTREMES)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_of_the_namespace_have_its_bits(xp: Any, dtype: Any) -> None:
    calls = {
        "erf": lambda xp, x, y, c: xp.erf(x),
        "erfc": lambda xp, x, y, c: xp.erfc(x),
        "clip": lambda xp, x, y, c: xp.clip(x, y, xp.where(c, y, x)),
        "clip by numbers": lambda xp, x, y, c: xp.clip(x, -0.0, 1.5),
        "one bound": lambda xp, x, y, c: xp.maximum(xp.clip(x, None, y), 0),
        "polynomial": lambda xp, x, y, c: xp.polynomial(x, (0.1, -0.3, 1e30, 0.7)),
        "polynomial of degree 1": lambda xp, x, y, c: xp.polynomial(x, (0.1, -0.3)),
        "where": lambda xp, x, y, c: xp.where(c, x, 0),
        "standardized": lambda xp, x, y, c: xp.standardized(x, y, abs(y), 1e-5, y, x),
        "products and sums": lambda xp, x, y, c: x * y + x - y * x,
        "x * 1": lambda xp, x, y, c: x * 1,
        "x / -1": lambda xp, x, y, c: x / -1,
        "x - 0": lambda xp, x, y, c: x - 0.0,
        "x + -0": lambda xp, x, y, c: x + -0.0,
        "infinities and NaN": lambda xp, x, y, c: xp.where(c, xp.where(x > 0, np.inf, -np.inf), xp.where(x > y, np.nan, x)),
        "a power": lambda xp, x, y, c: x**2 + abs(x) ** 1.5,
        "casts": lambda xp, x, y, c: (
            (x > y).astype(np.int8) - (x.astype(np.bool_)).astype(np.int64) * 2**40 + c.astype(x.dtype) + x.astype(np.float32)
        ),
    }
    arrays = [elements(np.dtype(dtype)), elements(np.dtype(dtype)), RNG.random(74) < 0.5]
    there = [xp.from_host(a) for a in arrays]
    for name, call in calls.items():
        trace = ExpressionTrace(device=True)
        term = call(trace.xp, *(trace.input(a.dtype, a.shape) for a in arrays)).term
        try:
            check_bits(computed(xp, term, there), call(xp, *there).get())
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x.sum(axis=1), "reduce"),
        (lambda x: x.mean(axis=0), "reduce|size"),
        (lambda x: x.astype(np.int32), "cast of float32 as int32"),
        (lambda x: x.view(np.int32), "bits"),
        (lambda x: x.astype(np.float16), "float16"),
        (lambda x: (x + 1).reshape(2, 3, 1), "reshape of"),
    ],
)
def test_what_has_no_text(call: Any, reason: str) -> None:
    trace = ExpressionTrace(device=True)
    with pytest.raises(NotWritten, match=reason):
        cuda_form([call(trace.input(np.float32, (2, 3))).term])


def test_an_input_in_another_shape_is_an_operand() -> None:
    """Axes of 1 in front change nothing; a value in two shapes is two operands."""
    trace = ExpressionTrace(device=True)
    x, y = trace.input(np.float32, (2, 3)), trace.input(np.float32, (3,))
    form = cuda_form([(x * y.reshape(1, 3)).term])
    assert [t.shape for t in form.leaves] == [(2, 3), (3,)]
    z = trace.input(np.float32, (3, 1))
    form = cuda_form([(y.reshape(3, 1) * z + y).term])
    assert [(t.op, t.shape) for t in form.leaves] == [("reshape", (3, 1)), ("input", (3, 1)), ("input", (3,))]


def test_equal_expressions_have_one_text() -> None:
    """Kernels are compiled by their text: it has no trace of the shapes or of the order in which inputs were made."""
    texts = set()
    for shape in ((4,), (2, 3)):
        trace = ExpressionTrace(device=True)
        _, x, y = (trace.input(np.float32, shape) for _ in range(3))
        texts.add(cuda_form([(np.tanh(x * y) + 1).term, (x * y).term]).text)
    (text,) = texts
    assert text.splitlines() == [
        "const float t0 = a0 * a1;", "const float t1 = tanh(t0);", "const float t2 = t1 + float(1.0);", "y0 = t2;", "y1 = t0;",
    ]  # fmt: skip


ATTRIBUTES: dict[str, list[dict[str, Any]]] = {
    "Cast": [{"to": to} for to in (1, 6, 7, 9, 11)],
    "Celu": [{"alpha": 0.7}],
    "Elu": [{"alpha": 0.7}],
    "Gelu": [{"approximate": "tanh"}],
    "HardSigmoid": [{"alpha": 0.3, "beta": 0.4}],
    "IsInf": [{"detect_negative": 0}, {"detect_positive": 0}],
    "LeakyRelu": [{"alpha": -0.3}],
    "Mod": [{"fmod": 1}],
    "Shrink": [{"bias": 0.3, "lambd": 0.7}],
    "Swish": [{"alpha": 1.7}],
    "ThresholdedRelu": [{"alpha": -0.5}],
}
"""Attributes besides the defaults."""

load_domain("com.microsoft")
OPERATORS = sorted(
    (domain, name, version)
    for (domain, name), versions in declarations.items()
    for version in versions
    if domain in ("", "com.microsoft") and any(has_trait(domain, name, t) for t in ("unary", "broadcasting", "norm"))
)
JOINED = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BatchNormalization BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast "
    "CastLike Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish "
    "Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow QuickGelu "
    "Reciprocal Relu Round SampleOp Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh "
    "ThresholdedRelu Where Xor"
)
"""The operators of which a version has a text."""


def operands(operator: VersionedOperator, wide: bool) -> list[np.ndarray]:
    """Inputs of floats, if the operator takes them."""
    name, arrays = operator.declaration.name, []
    for i, taken in enumerate(operator.schema.inputs):
        real = "double" if wide else "float"
        kind = real if f"tensor({real})" in taken.types else "bool" if "tensor(bool)" in taken.types else "int64"
        x = elements(np.dtype({"float": "f", "double": "d", "bool": "?", "int64": "q"}[kind]))
        arrays.append(x[:1].reshape(()) if name == "Clip" and i else x)
    if name == "BatchNormalization":
        arrays = [x.reshape(2, 37) if not i else x[:37] for i, x in enumerate(arrays)]
    return arrays


def checked(xp: Any, operator: VersionedOperator, attributes: dict[str, Any], arrays: list[np.ndarray]) -> bool:
    """Compare an operator with its text; False if it has none."""
    found = traced(operator, attributes, tuple(InputKind(a.dtype, a.shape) for a in arrays), device=True)
    if isinstance(found, str) or found.checks:
        return False
    there = [xp.from_host(a) for a in arrays]
    try:
        y = computed(xp, found.results[0], there)
    except NotWritten:
        return False
    zeros = not EXTREMES.intersection(t.op for t in order(found.results))
    check_bits(y, operator.run(xp, there, dict(attributes), (True,))[0].get(), zeros)
    return True


def test_operators_have_their_bits(xp: Any) -> None:
    names = set()
    for domain, name, version in OPERATORS:
        operator = versioned(domain, name, version)
        for given in [{}, *ATTRIBUTES.get(name, [])]:
            if (name == "Cast" and (version < 6 or not given)) or name == "BitShift":  # an attribute is required, or a text
                continue
            for wide in (False, True):
                try:
                    if checked(xp, operator, operator.arguments(given), operands(operator, wide)):
                        names.add(name)
                except AssertionError as error:
                    raise AssertionError(f"{name}-{version} {given}: {error}") from None
    assert names == set(JOINED.split())
