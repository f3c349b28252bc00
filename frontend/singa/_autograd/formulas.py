"""The operators of SINGA's API that are one operator of ONNX, or nearly; `autograd` offers them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core import random, tape
from .._core.tape import Operator
from .._core.tensor import Tensor, dtype_of
from .._core.tensor import op as recorder
from .formula import TensorOp, formula, known_shape, true, whole

__all__: list[str] = ["Dropout", "add_all", "cat", "dropout"]

# --- one tensor in, one out -------------------------------------------------------------------------------------------

_UNARY = {
    "ReLU": ("relu", "Relu"), "Sigmoid": ("sigmoid", "Sigmoid"), "Tanh": ("tanh", "Tanh"), "Sin": ("sin", "Sin"),
    "Sinh": ("sinh", "Sinh"), "Cos": ("cos", "Cos"), "Cosh": ("cosh", "Cosh"), "Tan": ("tan", "Tan"), "Asin": ("asin", "Asin"),
    "Asinh": ("asinh", "Asinh"), "Acos": ("acos", "Acos"), "Acosh": ("acosh", "Acosh"), "Atan": ("atan", "Atan"),
    "Atanh": ("atanh", "Atanh"), "Abs": ("abs", "Abs"), "Exp": ("exp", "Exp"), "Log": ("log", "Log"), "Sqrt": ("sqrt", "Sqrt"),
    "Sign": ("sign", "Sign"), "Ceil": ("ceil", "Ceil"), "Floor": ("floor", "Floor"), "Reciprocal": ("reciprocal", "Reciprocal"),
    "Negative": ("negative", "Neg"), "Erf": ("erf", "Erf"), "SoftPlus": ("softplus", "Softplus"),
    "SoftSign": ("softsign", "Softsign"), "Identity": ("identity", "Identity"), "Rounde": ("rounde", "Round"),
    "NonZero": ("nonzero", "NonZero"), "Shape": ("shape", "Shape"),
}  # fmt: skip
_BINARY = {
    "Add": ("add", "Add"), "Sub": ("sub", "Sub"), "Mul": ("mul", "Mul"), "Div": ("div", "Div"), "Pow": ("pow", "Pow"),
    "Less": ("less", "Less"), "Greater": ("greater", "Greater"), "Equal": ("equal", "Equal"), "Matmul": ("matmul", "MatMul"),
}  # fmt: skip
_LOGICAL = {"And": ("_and", "And"), "Or": ("_or", "Or"), "Xor": ("_xor", "Xor")}


def _declare_plain() -> None:
    """The operators that are one ONNX operator without attributes."""
    for name, (function, onnx) in _UNARY.items():
        _plain(name, function, onnx, lambda onnx: lambda op, x: op.call(onnx, (x,), {}, 1)[0])
    for name, (function, onnx) in _BINARY.items():
        _plain(name, function, onnx, lambda onnx: lambda op, a, b: op.call(onnx, (a, b), {}, 1)[0])
    for name, (function, onnx) in _LOGICAL.items():
        _plain(name, function, onnx, lambda onnx: lambda op, a, b: op.call(onnx, (true(op, a), true(op, b)), {}, 1)[0])
    _plain("Not", "_not", "Not", lambda onnx: lambda op, x: op.Not(true(op, x)))


def _plain(name: str, function: str, onnx: str, make: Callable[[str], Callable[..., Any]]) -> None:
    body = make(onnx)
    body.__name__, body.__doc__ = (
        function,
        f"ONNX's {onnx}, element by element." if onnx != "MatMul" else "ONNX's MatMul: NumPy's product of matrices.",
    )
    globals()[function] = formula(name)(body)


_declare_plain()


@formula("Round")
def round(op: TensorOp, x: Any) -> Tensor:
    """To the nearest integer, halves away from zero; `rounde` takes halves to the even neighbour."""
    return op.Mul(op.Sign(x), op.Floor(op.Add(op.Abs(x), 0.5)))


# --- activations ------------------------------------------------------------------------------------------------------


@formula("Elu")
def elu(op: TensorOp, x: Any, *, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1)."""
    return op.Elu(x, alpha=alpha)


@formula("SeLU")
def selu(op: TensorOp, x: Any, *, alpha: float = 1.67326, gamma: float = 1.0507) -> Tensor:
    """gamma x where x > 0, else gamma alpha (exp(x) - 1)."""
    return op.Selu(x, alpha=alpha, gamma=gamma)


@formula("LeakyRelu")
def leakyrelu(op: TensorOp, x: Any, *, a: float = 0.01) -> Tensor:
    """x where x >= 0, else a x."""
    return op.LeakyRelu(x, alpha=a)


@formula("HardSigmoid")
def hardsigmoid(op: TensorOp, x: Any, *, alpha: float = 0.2, gamma: float = 0.5) -> Tensor:
    """max(0, min(1, alpha x + gamma))"""
    return op.HardSigmoid(x, alpha=alpha, beta=gamma)


@formula("PRelu")
def prelu(op: TensorOp, x: Any, slope: Any) -> Tensor:
    """x where x >= 0, else slope x; the slope broadcasts to x."""
    return op.PRelu(x, slope)


@formula("Clip")
def clip(op: TensorOp, x: Any, *, min: float | None = None, max: float | None = None) -> Tensor:
    """x within [min, max]."""
    return op.Clip(x, min, max)


@formula("SoftMax")
def softmax(op: TensorOp, x: Any, *, axis: int = 1) -> Tensor:
    """Over all axes from `axis` on, as in opsets before 13: the rows of a matrix (product before the axis, product behind)."""
    return op.Reshape(op.Softmax(op.Flatten(x, axis=axis), axis=-1), op.Shape(x), allowzero=1)


# --- several tensors --------------------------------------------------------------------------------------------------


@formula("Sum")
def sum(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The sum of tensors, broadcast."""
    return op.Sum(*l)


@formula("Mean")
def mean(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The mean of tensors, element by element."""
    return op.Mean(*l)


@formula("Max")
def max(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The largest of tensors, element by element; those that are equal share the gradient."""
    return op.Max(*l)


@formula("Min")
def min(op: TensorOp, *l: Any) -> Tensor:  # noqa: E741
    """The least of tensors, element by element; those that are equal share the gradient."""
    return op.Min(*l)


def add_all(*xs: Tensor) -> Tensor:
    """The sum of tensors."""
    return sum(*xs)


@formula("Gemm")
def gemm(
    op: TensorOp, A: Any, B: Any, C: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Tensor:
    """alpha A' B' + beta C"""
    return op.Gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)


@formula("AddBias")
def add_bias(op: TensorOp, x: Any, b: Any, *, axis: int = 0) -> Tensor:
    """A matrix plus a vector: to each row (axis 0), or to each column (axis 1)."""
    if axis not in (0, 1):
        raise InvalidInput(f"add_bias adds to rows (axis 0) or columns (axis 1), not along {axis}", code="SX333")
    return op.Add(x, b if axis == 0 else op.Unsqueeze(b, [1]))


@formula("CosSim")
def cossim(op: TensorOp, a: Any, b: Any) -> Tensor:
    """The cosine of the angle between the rows of two matrices, of shape (N,)."""
    dot = op.ReduceSum(op.Mul(a, b), [1], keepdims=0)
    return op.Div(dot, op.Mul(op.ReduceL2(a, [1], keepdims=0), op.ReduceL2(b, [1], keepdims=0)))


# --- shapes -----------------------------------------------------------------------------------------------------------


@formula("Reshape")
def reshape(op: TensorOp, x: Any, *, shape: Sequence[int]) -> Tensor:
    """The same values in another shape: 0 keeps a size, one -1 is worked out."""
    return op.Reshape(x, shape if op.is_value(shape) else list(shape))


@formula("Flatten")
def flatten(op: TensorOp, x: Any, *, axis: int = 1, end_axis: int | None = None) -> Tensor:
    """A matrix: the axes before `axis` are its rows.  With `end_axis` the axes from `axis` to it become one, the others stay.

    Raises InvalidInput for axes that are not there, or in the other order.
    """
    if end_axis is None:
        return op.Flatten(x, axis=axis)
    rank = op.rank(x)
    first, last = (a + rank if a < 0 else a for a in (axis, end_axis))
    if not rank and axis in (0, -1) and end_axis in (0, -1):
        return op.Reshape(x, [1])
    if not 0 <= first <= last < rank:
        raise InvalidInput(f"axes {axis} to {end_axis} of a tensor of shape {op.shape(x)} are none", code="SX333")
    sizes = known_shape(op, x)
    if 0 not in sizes and all(isinstance(n, int) for n in sizes[last + 1 :]):
        return op.Reshape(x, [*[0] * first, -1, *sizes[last + 1 :]])
    whole = op.ReduceProd(op.Shape(x, start=first, end=last + 1), [0], keepdims=1)
    parts = [op.Shape(x, start=0, end=first), whole, op.Shape(x, start=last + 1)]
    return op.Reshape(x, op.Concat(*parts, axis=0), allowzero=1)


@formula("Transpose")
def transpose(op: TensorOp, x: Any, *, shape: Sequence[int] | None = None) -> Tensor:
    """The axes in another order; backwards where none is given."""
    return op.Transpose(x, perm=None if shape is None else list(shape))


@formula("Squeeze")
def squeeze(op: TensorOp, x: Any, *, axis: Any = ()) -> Tensor:
    """Without these axes of size 1; without all such axes where none is named."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    return op.Squeeze(x, axes or None)


@formula("Unsqueeze")
def unsqueeze(op: TensorOp, x: Any, *, axis: Any) -> Tensor:
    """With axes of size 1 at these places of the result."""
    return op.Unsqueeze(x, [axis] if isinstance(axis, int) else list(axis))


@formula("Concat")
def _cat(op: TensorOp, *xs: Any, axis: int = 0) -> Tensor:
    return op.Concat(*xs, axis=axis)


def cat(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors side by side along an axis."""
    return _cat(*xs, axis=axis)


@formula("Split")
def split(
    op: TensorOp, x: Any, *, axis: int, parts: Sequence[int] | None = None, num_output: int | None = None
) -> tuple[Tensor, ...]:
    """Pieces of these sizes along an axis, or `num_output` equal ones; a tuple."""
    count = len(parts) if parts is not None else num_output
    if not count:
        raise InvalidInput("split needs the sizes of the parts, or how many there are", code="SX333")
    made = op.call(
        "Split",
        [x, None if parts is None else list(parts)],
        {"axis": axis, "num_outputs": None if parts is not None else count},
        count,
    )
    return tuple(made)


@formula("Slice")
def slice(
    op: TensorOp,
    x: Any,
    *,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """A part of x, as ONNX's Slice."""
    return op.Slice(x, list(starts), list(ends), None if axes is None else list(axes), None if steps is None else list(steps))


@formula("Tile")
def tile(op: TensorOp, x: Any, *, repeats: Any) -> Tensor:
    """x repeated so often along each axis; fewer numbers than axes count for the last ones."""
    times = [repeats] if isinstance(repeats, int) else list(repeats)
    rank = op.rank(x)
    if len(times) > rank:
        x = op.Unsqueeze(x, list(range(len(times) - rank)))
    return op.Tile(x, [1] * (rank - len(times)) + times)


@formula("Expand")
def expand(op: TensorOp, x: Any, *, shape: Sequence[int]) -> Tensor:
    """x broadcast to a shape."""
    return op.Expand(x, shape if op.is_value(shape) else list(shape))


@formula("Pad")
def pad(op: TensorOp, x: Any, *, mode: str = "constant", pads: Sequence[int], constant: float = 0.0) -> Tensor:
    """A frame around x: first the sizes before each axis, then those behind; "constant", "reflect" or "edge"."""
    return op.Pad(x, list(pads), constant if mode == "constant" else None, mode=mode)


@formula("UpSample")
def upsample(op: TensorOp, x: Any, *, mode: str, scales: Sequence[float]) -> Tensor:
    """x scaled along each axis, "nearest" or "linear", as ONNX's Upsample."""
    factors = op.constant([float(s) for s in scales], np.float32)
    return op.Resize(x, None, factors, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@formula("DepthToSpace")
def depth_to_space(op: TensorOp, x: Any, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Channels to blocks of space."""
    return op.DepthToSpace(x, blocksize=blocksize, mode=mode)


@formula("SpaceToDepth")
def space_to_depth(op: TensorOp, x: Any, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks of space to channels: the inverse of `depth_to_space` in the same mode."""
    if mode == "DCR":
        return op.SpaceToDepth(x, blocksize=blocksize)
    n, c, h, w = (op.Shape(x, start=i, end=i + 1) for i in range(4))
    b = [blocksize]
    parts = op.Reshape(x, op.Concat(n, c, op.Div(h, blocksize), b, op.Div(w, blocksize), b, axis=0), allowzero=1)
    moved = op.Transpose(parts, perm=[0, 1, 3, 5, 2, 4])
    return op.Reshape(
        moved, op.Concat(n, op.Mul(c, blocksize**2), op.Div(h, blocksize), op.Div(w, blocksize), axis=0), allowzero=1
    )


# --- places -----------------------------------------------------------------------------------------------------------


@formula("Gather")
def gather(op: TensorOp, x: Any, *, axis: int, indices: Any) -> Tensor:
    """What stands at these places along an axis; negative ones count from the end, others beyond it are an error."""
    return op.Gather(x, whole(op, indices), axis=axis)


@formula("ScatterElements")
def scatter_elements(op: TensorOp, x: Any, indices: Any, updates: Any, *, axis: int = 0) -> Tensor:
    """x with updates written at places along an axis."""
    return op.ScatterElements(x, whole(op, indices), updates, axis=axis)


@formula("Where", "x", "y", "condition")
def where(op: TensorOp, x: Any, y: Any, *, condition: Any) -> Tensor:
    """x where the condition holds, else y."""
    condition = condition if op.is_value(condition) else op.constant(condition)
    return op.Where(true(op, condition), x, y)


@formula("OneHot", "axis", "indices", "depth", "values")
def onehot(op: TensorOp, indices: Any, *, axis: int, depth: int, values: Any = (0.0, 1.0)) -> Tensor:
    """values[1] at the class of each index along a new axis, values[0] elsewhere."""
    values = values if op.is_value(values) else op.constant(values, np.float32)
    return op.OneHot(whole(op, indices), op.constant(int(depth), np.int64), values, axis=axis)


@formula("Embedding")
def embedding(op: TensorOp, x: Any, w: Any) -> Tensor:
    """The rows of w that x names."""
    return op.Gather(w, whole(op, x), axis=0)


# --- conversion, reduction --------------------------------------------------------------------------------------------


@formula("Cast")
def cast(op: TensorOp, x: Any, *, to: Any) -> Tensor:
    """x in another dtype: a constant of `tensor`, or a NumPy dtype."""
    return op.Cast(x, to=dtypes.onnx_code(dtype_of(to)))


@formula("ConstantOfShape")
def constant_of_shape(op: TensorOp, x: Any, *, value: float = 0) -> Tensor:
    """An array of the shape that x holds, filled; float32 for a float, int64 for an integer."""
    return op.ConstantOfShape(whole(op, x), value=np.array([value], np.float32 if isinstance(value, float) else np.int64))


@formula("ReduceSum")
def reduce_sum(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
    """The sum over axes, or over all."""
    return op.ReduceSum(x, None if axes is None else list(axes), keepdims=keepdims)


@formula("ReduceMean")
def reduce_mean(op: TensorOp, x: Any, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
    """The mean over axes, or over all."""
    return op.ReduceMean(x, None if axes is None else list(axes), keepdims=keepdims)


@formula("GlobalAveragePool")
def globalaveragepool(op: TensorOp, x: Any, *, data_format: str = "channels_first") -> Tensor:
    """The mean over the spatial axes, which stay as ones."""
    if data_format not in ("channels_first", "channels_last"):
        raise InvalidInput(f"data_format is 'channels_first' or 'channels_last', not {data_format!r}", code="SX333")
    rank = op.rank(x)
    return op.ReduceMean(x, list(range(2, rank) if data_format == "channels_first" else range(1, rank - 1)), keepdims=1)


# --- dropout ----------------------------------------------------------------------------------------------------------


class Dropout(Operator):
    """In training, a share `ratio` of x is dropped and the rest divided by 1 - ratio; else x."""

    def __init__(self, seed: int = 0, ratio: float = 0.5) -> None:
        super().__init__()
        self.ratio = ratio

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return (recorder.Identity(xs[0]) if not tape.training else random.dropout(xs[0], self.ratio)[0],)


def dropout(x: Tensor, seed: int = 0, ratio: float = 0.5) -> Tensor:
    """x in inference; in training x mask / (1 - ratio), the mask from the stream of x's device.

    seed: kept for old programs, whose second argument it is; the stream is seeded by `device.SetRandSeed`.
    """
    if isinstance(seed, float) and 0 < seed < 1:
        warnings.warn(f"the second argument of dropout is its seed; write ratio={seed}", UserWarning, stacklevel=2)
    if not 0 <= ratio < 1:
        raise InvalidInput(f"the ratio of dropout lies in [0, 1); it is {ratio}", code="SX333")
    return Dropout(seed, ratio)(x)[0]
