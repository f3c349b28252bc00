"""Tensors, and SINGA's functions on them.

y = tensor.mult(tensor.from_numpy(array), w)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

from ._core import tape
from ._core.tensor import (
    DTypeLike,
    Tensor,
    _binary,
    _float,
    bool_,
    char,
    code_of,
    double,
    dtype_of,
    float16,
    float32,
    int32,
    int64,
    op,
    to_numpy,
    uchar,
)
from .device import DeviceLike

__all__ = [
    "PlaceHolder", "Tensor", "abs", "add", "add_column", "add_row", "average", "axpy", "bernoulli", "bool_", "ceil", "char",
    "code_of", "concatenate", "contiguous", "copy_data_to_from", "copy_from_numpy", "div", "double", "dtype_of", "einsum",
    "eltwise_mult", "eq", "exp", "float16", "float32", "from_dlpack", "from_numpy", "gaussian", "ge", "gt", "int32", "int64",
    "le", "log", "lt", "mult", "ones", "ones_like", "pow", "product", "random", "repeat", "reshape", "sigmoid", "sign", "sizeof",
    "softmax", "sqrt", "square", "sub", "sum", "sum_columns", "sum_rows", "tanh", "tensordot", "to_host", "to_numpy", "transpose",
    "uchar", "uniform", "zeros", "zeros_like",
]  # fmt: skip

PlaceHolder = Tensor


def from_numpy(array: Any, dev: DeviceLike | None = None) -> Tensor:
    """A tensor that holds a copy of an array, in its dtype."""
    return Tensor(data=np.array(array), device=dev)


def from_dlpack(x: Any) -> Tensor:
    """A tensor on the storage of whatever speaks DLPack on the host."""
    return Tensor(data=np.from_dlpack(x))


def to_host(t: Tensor) -> Tensor:
    """A copy on the CPU."""
    return Tensor(data=to_numpy(t), requires_grad=t.requires_grad)


def zeros(shape: Any, device: DeviceLike | None = None, dtype: DTypeLike = float32) -> Tensor:
    return Tensor(shape, device, dtype)


def ones(shape: Any, device: DeviceLike | None = None, dtype: DTypeLike = float32) -> Tensor:
    return Tensor(shape, device, dtype).set_value(1)


def zeros_like(t: Tensor) -> Tensor:
    return _filled_like(t, 0)


def ones_like(t: Tensor) -> Tensor:
    return _filled_like(t, 1)


def _filled_like(t: Tensor, value: float) -> Tensor:
    filled = op.full_like(t, value)
    made = Tensor._of(filled.raw, t.device, True)
    made._origin = filled._origin
    return made


def random(shape: Any, device: DeviceLike | None = None) -> Tensor:
    """float32 numbers of [0, 1)."""
    return Tensor(shape, device).uniform(0.0, 1.0)


def product(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    return int(np.prod(shape, dtype=np.int64))


def sizeof(dtype: DTypeLike) -> int:
    """Bytes of an element."""
    return int(dtype_of(dtype).itemsize)


def contiguous(t: Tensor) -> Tensor:
    return t.contiguous()


def reshape(t: Tensor, shape: Any) -> Tensor:
    return t.reshape(shape)


def transpose(t: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    return t.transpose(axes)


def copy_data_to_from(dst: Tensor, src: Tensor, size: int, dst_offset: int = 0, src_offset: int = 0) -> None:
    """Write `size` values of one tensor into another, both from an offset on; raises InvalidInput beyond either's end."""
    if dst_offset + size > dst.size() or src_offset + size > src.size():
        raise InvalidInput(f"{size} values do not lie in tensors of {dst.size()} and {src.size()} elements", code="SX337")
    dst._refuse_on_tape()
    dst._write(src.data.reshape(-1)[src_offset : src_offset + size], dst_offset)


def copy_from_numpy(data: Any, array: Any) -> None:
    """Write an array's values into a tensor, or into the storage of one, `t.data`."""
    if isinstance(data, Tensor):
        data.copy_from_numpy(array)
        return
    if data.size != np.asarray(array).size:
        raise InvalidInput(f"{np.asarray(array).size} values do not fill {data.size} elements", code="SX337")
    data[...] = np.asarray(array).reshape(data.shape)


def _unary(onnx: str, doc: str) -> Any:
    def function(t: Tensor) -> Tensor:
        result: Tensor = op.call(onnx, (t,), {}, 1)[0]
        return result

    function.__doc__ = doc
    return function


abs = _unary("Abs", "The absolute values.")
exp = _unary("Exp", "e to the power of each element.")
ceil = _unary("Ceil", "Rounded up.")
log = _unary("Log", "The natural logarithm.")
sigmoid = _unary("Sigmoid", "1 / (1 + exp(-t))")
sign = _unary("Sign", "-1, 0 or 1.")
sqrt = _unary("Sqrt", "The square root.")
tanh = _unary("Tanh", "The hyperbolic tangent.")


def square(t: Tensor) -> Tensor:
    """Each element times itself."""
    return op.Mul(t, t)


def _into(value: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return value
    return out._with(value)


def sum(t: Tensor, axis: int | None = None, out: Tensor | None = None) -> Any:
    """The sum along an axis, or of all elements, then as a Python float."""
    if axis is None and out is None:
        return float(to_numpy(t).sum())
    return _into(op.ReduceSum(t, None if axis is None else [axis], keepdims=0), out)


def pow(t: Tensor, x: Any, out: Tensor | None = None) -> Tensor:
    """Each element to the power of a number or of another tensor's element."""
    return _into(op.Pow(t, x), out)


def average(t: Tensor, axis: int | None = None) -> Any:
    """The mean along an axis; of all elements, as a Python float."""
    if axis is None:
        return float(to_numpy(t).mean())
    return op.ReduceMean(t, [axis], keepdims=0)


def softmax(t: Tensor, out: Tensor | None = None) -> Tensor:
    """Of each row."""
    return _into(op.Softmax(t, axis=-1), out)


def lt(t: Tensor, x: Any) -> Any:
    return t < x


def le(t: Tensor, x: Any) -> Any:
    return t <= x


def gt(t: Tensor, x: Any) -> Any:
    return t > x


def ge(t: Tensor, x: Any) -> Any:
    return t >= x


def eq(t: Tensor, x: Any) -> Any:
    return t == x


def add(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    return _into(_binary("Add", lhs, rhs), ret)


def sub(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    return _into(_binary("Sub", lhs, rhs), ret)


def eltwise_mult(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    return _into(_binary("Mul", lhs, rhs), ret)


def div(lhs: Any, rhs: Any, ret: Tensor | None = None) -> Tensor:
    return _into(_binary("Div", _float(lhs), _float(rhs)), ret)


def mult(A: Tensor, B: Tensor, C: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """A B; with C, alpha A B + beta C is written into C."""
    product_ = op.MatMul(A, B)
    if alpha != 1.0:
        product_ = op.Mul(product_, alpha)
    if C is None:
        return product_
    return C._with(op.Add(product_, op.Mul(C, beta)) if beta else product_)


def einsum(ops: str, *args: Tensor) -> Tensor:
    """An Einstein sum, as NumPy's."""
    return op.Einsum(*args, equation=ops)


def tensordot(A: Tensor, B: Tensor, axes: Any = 2) -> Tensor:
    """The sum of products over the last `axes` axes of A and the first of B, or over the axes listed for each."""
    a, b = (
        (list(range(A.ndim() - axes, A.ndim())), list(range(axes)))
        if isinstance(axes, int)
        else ([v] if isinstance(v, int) else list(v) for v in axes)
    )
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    first = [next(letters) for _ in range(A.ndim())]
    second = [next(letters) for _ in range(B.ndim())]
    for i, j in zip(a, b, strict=True):
        second[j] = first[i]
    summed = {first[i] for i in a}
    kept = [c for c in (*first, *second) if c not in summed]
    return einsum(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", A, B)


def repeat(t: Tensor, repeats: Any, axis: int | None = None) -> Tensor:
    return t.repeat(repeats, axis)


def axpy(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    """y += alpha x"""
    with tape.no_tape():
        value = op.Add(y, op.Mul(x, alpha))
    return y._with(value)


def concatenate(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors side by side along an axis."""
    return op.Concat(*tensors, axis=axis)


def bernoulli(p: float, t: Tensor) -> Tensor:
    return t.bernoulli(p)


def gaussian(mean: float, std: float, t: Tensor) -> Tensor:
    return t.gaussian(mean, std)


def uniform(low: float, high: float, t: Tensor) -> Tensor:
    return t.uniform(low, high)


def add_column(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """M = alpha v + beta M, v added to each column."""
    return M._with(op.Add(op.Mul(op.Unsqueeze(v, [1]), alpha), op.Mul(M, beta)))


def add_row(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """M = alpha v + beta M, v added to each row."""
    return M._with(op.Add(op.Mul(v, alpha), op.Mul(M, beta)))


def sum_columns(M: Tensor) -> Tensor:
    """The sum of the columns: one value a row."""
    return op.ReduceSum(M, [1], keepdims=0)


def sum_rows(M: Tensor) -> Tensor:
    """The sum of the rows: one value a column."""
    return op.ReduceSum(M, [0], keepdims=0)
