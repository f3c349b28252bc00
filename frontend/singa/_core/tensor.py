"""Tensors: arrays on a device, each with the operator that produced it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .. import device as devices
from ..device import DeviceLike
from . import tape, trace
from .conversions import (
    DTypeLike,
    array_of,
    bool_,
    dtype_of,
    exchange,
    float32,
)
from .ops import TensorInterpreter
from .ops import op as _op
from .storage import StorageMethods, element_count
from .tape import Operator
from .variable import Counter, made_by_operators, required

op: TensorInterpreter[Tensor] = _op
"""ONNX's operators on tensors, at the newest opset: `op.Mul(x, y)`."""

_dummies = Counter()


_Made = TypeVar("_Made")


def _deferring(method: Callable[[Tensor, Any], _Made]) -> Callable[[Tensor, Any], _Made]:
    """A method of a Python operator that leaves operands with `_takes_tensors`, values of a graph, to their own class."""

    @functools.wraps(method)
    def deferring(self: Tensor, x: Any) -> Any:
        return NotImplemented if hasattr(type(x), "_takes_tensors") else method(self, x)

    return deferring


@made_by_operators
class Tensor(StorageMethods):
    """An array on a device, and the operator that produced it.

    Operators of Python (`+`, `@`, `<`, ...) compute element by element with broadcasting and promote dtypes; comparisons return
    1 and 0 in the dtype of the left tensor. `+=` and the other assignments change the tensor in place. A Tensor converts to
    NumPy with `tensor.to_numpy`, and to a number with `float`, `int` and `bool` if it has one element.

    Args:
        shape: The sizes, or one int; ignored if `data` is passed.
        device: The device, or a name such as "CUDA"; None for the CPU.
        dtype: A constant of `singa.tensor`, "int" (int32), "float" (float32), or a NumPy dtype; ignored if `data` is passed.
        data: The values, used in their own shape and dtype: an array (shared, not copied, if it is on the device already; also
            one of another library, by DLPack or the CUDA array interface), a Tensor, a number or nested lists of numbers
            (floats become float32, integers int32), or a list of arrays, which is an ONNX sequence. A read-only array is copied.
            None for zeros.
        requires_grad: Whether gradients flow through this tensor.
        stores_grad: Whether `autograd.backward` returns the gradient of this tensor, as for a parameter.
        creator: The operator that produced it; None for a leaf.
        name: Its name; None for "Dummy#" and a number.

    Raises:
        InvalidInput: The dtype is unknown, or ONNX does not have it (SX316); `data` have such a dtype, are lists of several
            lengths, or numbers that float32 or int32 cannot represent (SX315).
        DeviceUnavailable: This machine does not have the device.
        ValueError: A size is negative.
    """

    _is_comparison = False

    __array_priority__ = 1000
    """Makes NumPy leave `array * tensor` to the tensor; otherwise it would return an array that the tape does not know."""

    def __init__(
        self,
        shape: Any = (),
        device: DeviceLike | None = None,
        dtype: DTypeLike = float32,
        data: Any = None,
        requires_grad: bool = True,
        stores_grad: bool = False,
        creator: Operator | None = None,
        name: str | None = None,
    ) -> None:
        self.device = devices.resolve(device)
        self.requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.name = name if name is not None else f"Dummy#{_dummies.next()}"
        self._creator = creator
        self._data: Any = None
        if data is None:
            shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
            self._data = self.device.backend.put(np.zeros(shape, dtype_of(dtype)))
        else:
            self._data = self._owned(data)

    __hash__ = None  # type: ignore[assignment]  # tensors compare element by element

    # --- NumPy, DLPack

    def __array__(self, dtype: dtypes.DTypeLike | None = None, copy: bool | None = None) -> Any:
        array = self.device.backend.get(self.data)
        return np.array(array, dtype) if copy or dtype is not None else array

    def __dlpack__(self, **kwargs: Any) -> Any:
        with exchange(f"a tensor of {op.dtype(self)}"):
            return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        with exchange("a tensor"):
            return self.data.__dlpack_device__()

    def __float__(self) -> float:
        return float(self._single())

    def __int__(self) -> int:
        return int(self._single())

    def __bool__(self) -> bool:
        """The value of a tensor of one element; True for more, with a warning, because SINGA's programs write `if labels:`.

        Raises InvalidInput for a comparison of more elements, which has no truth value.
        """
        if self.size() == 1:
            return bool(self._single())
        if self.dtype == bool_ or self._is_comparison or self.size() == 0:
            what = "a comparison" if self.size() else "an empty tensor"
            text = f"{what} of shape {self.shape} has no truth value"
            raise InvalidInput(text, code="SX336", hint="index one element, or reduce it: float(tensor.sum(a == b)) > 0")
        text = f"a tensor of shape {self.shape} is True whatever its values: write `is not None` to test whether there is one"
        warnings.warn(text, UserWarning, stacklevel=2)
        return True

    def _single(self) -> Any:
        if self.size() != 1:
            raise InvalidInput(f"a tensor must have one element to become a number, got shape {self.shape}", code="SX336")
        return self.device.backend.get(self.data).reshape(())[()]

    # --- new tensors

    def reshape(self, shape: Any) -> Tensor:
        """Reshape to other sizes.

        Source: ONNX Reshape.

        Args:
            shape: The new sizes, or one int; 0 keeps the size at that axis, and one -1 is inferred.

        Returns:
            Tensor of the new shape, of the same dtype.

        Raises:
            OperatorError: The numbers of elements differ.
        """
        return op.Reshape(self, [shape] if isinstance(shape, int) else list(shape))

    def transpose(self, axes: Sequence[int] | None = None) -> Tensor:
        """Permute the axes.

        Source: ONNX Transpose.

        Args:
            axes: The axes of this tensor in the order of the result; None to reverse them.

        Returns:
            Tensor of the same dtype; its axis i is axis axes[i] of this tensor.

        Raises:
            OperatorError: `axes` is not a permutation of the axes.
        """
        return op.Transpose(self, perm=None if axes is None else list(axes))

    def T(self) -> Tensor:
        """Reverse the axes.

        Returns:
            Tensor of the same dtype, with the sizes in reverse order.
        """
        return self.transpose()

    def contiguous(self) -> Tensor:
        """Copy to contiguous storage; gradients flow through the copy.

        Returns:
            Tensor with the same values, stored in row-major order.
        """
        if self._on_tape():
            return self.clone()
        made = Tensor(data=self.device.backend.copy(self.data), device=self.device, requires_grad=self.requires_grad)
        made._origin, made._without_graph = self._origin, self._without_graph
        return made

    def repeat(self, repeats: Any, axis: int | None = None) -> Tensor:
        """Repeat each element, or each slice along an axis.

        Source: NumPy's `repeat`, as ONNX Gather.

        Args:
            repeats: The number of repetitions, one for all or one for each.
            axis: The axis, in [-rank, rank); None to flatten the tensor first.

        Returns:
            Tensor of the same dtype; of rank 1 if `axis` is None.

        Raises:
            IndexError: `axis` is out of range.
            ValueError: `repeats` is negative or has another length than the axis.
        """
        t, axis = (self.reshape([-1]), 0) if axis is None else (self, axis)
        places = np.repeat(np.arange(t.shape[axis]), repeats)
        return op.Gather(t, places, axis=axis)

    def clone(self) -> Tensor:
        """Copy to new storage; gradients flow through the copy. Also called `deepcopy`.

        Source: ONNX Identity if an operator on the tape produced this tensor.

        Returns:
            Tensor with the same values, on the same device.
        """
        if self._on_tape():
            same = op.Identity(self)
            if trace.current() is None:
                same._data = same.device.backend.copy(same._data)
            return same
        made = Tensor(
            data=self.device.backend.copy(self.data),
            device=self.device,
            requires_grad=self.requires_grad,
            stores_grad=self.stores_grad,
        )
        made.name, made._origin, made._without_graph = self.name, self._origin, self._without_graph
        return made

    deepcopy = clone

    def detach(self) -> Tensor:
        """Return the same values as a constant: no gradient flows through it.

        Source: ONNX Identity.

        Returns:
            Tensor that does not require a gradient, on the same device.
        """
        before = tape.training
        tape.set_training(False)
        try:
            return op.Identity(self)
        finally:
            tape.set_training(before)

    def copy(self) -> Tensor:
        """Make a tensor that shares the storage of this one; gradients flow through it.

        Source: ONNX Identity if an operator on the tape produced this tensor.

        Returns:
            Tensor with the same storage: a change of one in place changes the other.
        """
        if self._on_tape():
            return op.Identity(self)
        made = Tensor._of(self.data, self.device, self.requires_grad)
        made.stores_grad, made.name, made._origin = self.stores_grad, self.name, self._origin
        made._without_graph = self._without_graph
        return made

    def as_type(self, dtype: DTypeLike) -> Tensor:
        """Cast to another dtype.

        Source: ONNX Cast.

        Args:
            dtype: A constant of `singa.tensor`, "int" (int32), "float" (float32), or a NumPy dtype.

        Returns:
            Tensor of the same shape, of this dtype.

        Raises:
            InvalidInput: `dtype` is not a dtype, or ONNX does not have it (SX316).
            OperatorError: The values cannot be cast.
        """
        return op.Cast(self, to=dtypes.onnx_code(dtype_of(dtype)))

    def l1(self) -> float:
        """The mean of the absolute values, sum |x| / n.

        Returns:
            A Python float, which is not recorded on the tape; NaN if the tensor is empty.
        """
        return float(np.abs(to_numpy(self)).mean())

    def l2(self) -> float:
        """The L2 norm divided by the number of elements, sqrt(sum x^2) / n, computed in float64.

        Returns:
            A Python float, which is not recorded on the tape; 0 if the tensor is empty.
        """
        return float(np.sqrt(np.square(to_numpy(self).astype(np.float64)).sum()) / max(1, self.size()))

    def numpy(self) -> Any:
        """Copy the values to the host.

        Returns:
            A NumPy array of the shape and dtype of this tensor.

        Raises:
            NotTraceable: A step is being recorded as a graph, and the values are not known.
        """
        return to_numpy(self)

    def item(self) -> Any:
        """Read the value of a tensor of one element.

        Returns:
            A number of Python, a bool or a str.

        Raises:
            InvalidInput: The tensor does not have one element (SX336).
            NotTraceable: A step is being recorded as a graph, and the value is not known.
        """
        value = self._single()
        return value.item() if isinstance(value, np.generic) else value

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """Compute the sum along axes.

        Source: ONNX ReduceSum.

        Args:
            axis: The axis, or several; None for all.
            keepdims: Whether the axes stay, with size 1.

        Returns:
            Tensor of the dtype of this one.

        Raises:
            OperatorError: An axis does not exist, or the operator does not take the dtype.
        """
        return _reduced("ReduceSum", self, axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """Compute the mean along axes.

        Source: ONNX ReduceMean.

        Args:
            axis: The axis, or several; None for all.
            keepdims: Whether the axes stay, with size 1.

        Returns:
            Tensor of the dtype of this one.

        Raises:
            OperatorError: An axis does not exist, or the operator does not take the dtype.
        """
        return _reduced("ReduceMean", self, axis, keepdims)

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """Compute the maximum along axes.

        Source: ONNX ReduceMax.

        Args:
            axis: The axis, or several; None for all.
            keepdims: Whether the axes stay, with size 1.

        Returns:
            Tensor of the dtype of this one.

        Raises:
            OperatorError: An axis does not exist, or the operator does not take the dtype.
        """
        return _reduced("ReduceMax", self, axis, keepdims)

    def min(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """Compute the minimum along axes.

        Source: ONNX ReduceMin.

        Args:
            axis: The axis, or several; None for all.
            keepdims: Whether the axes stay, with size 1.

        Returns:
            Tensor of the dtype of this one.

        Raises:
            OperatorError: An axis does not exist, or the operator does not take the dtype.
        """
        return _reduced("ReduceMin", self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Compute the index of the maximum along an axis; of several maxima, the first.

        Source: ONNX ArgMax.

        Args:
            axis: The axis; None for the index in the flattened tensor.
            keepdims: Whether the axis stays, with size 1; not used without an axis.

        Returns:
            Tensor of int64, without the axis, or with shape () if there is none.

        Raises:
            OperatorError: The axis does not exist, or the operator does not take the dtype.
        """
        if axis is None:
            return op.ArgMax(op.Reshape(self, [-1]), axis=0, keepdims=0)
        return op.ArgMax(self, axis=axis, keepdims=int(keepdims))

    # --- in place

    def reset_like(self, t: Tensor) -> Tensor:
        """Replace the values in place by zeros of the shape, dtype and device of another tensor.

        Args:
            t: Tensor of any dtype and shape.

        Returns:
            This tensor.

        Raises:
            NotTraceable: A step is being recorded as a graph.
        """
        self.device = t.device
        self.data = t.device.backend.put(np.zeros(t.shape, op.dtype(t)))
        return self

    def copy_data(self, t: Tensor) -> None:
        """Write the values of another tensor, in row-major order; this tensor becomes a leaf.

        No gradient flows through the copy. A step that is recorded as a graph contains it: every step repeats it.

        Args:
            t: Tensor with as many elements, on any device; values are cast to the dtype of this tensor.

        Raises:
            InvalidInput: The numbers of elements differ (SX337).
            OperatorError: A value cannot be cast to the dtype of this tensor.
        """
        self.copy_from(t)

    def copy_from(self, t: Any, offset: int = 0) -> None:
        """Write the values of a tensor or an array, in row-major order; a tensor whose values are all written becomes a leaf.

        No gradient flows through the copy. A step that is recorded as a graph contains it: every step repeats it.

        Args:
            t: Tensor on any device, or an array; values are cast to the dtype of this tensor. Its shape may differ.
            offset: The index of the first element to write.

        Raises:
            InvalidInput: The values are beyond the end, or without an offset, they are fewer than the elements (SX337); or some
                elements of a tensor that an operator on the tape produced would be written (SX370); or the values are not of
                the kind of this tensor, or lists of several lengths (SX315).
            OperatorError: A value of a tensor cannot be cast to the dtype of this tensor.
        """
        if not isinstance(t, Tensor):
            self.copy_from_numpy(t, offset)
            return
        self._check_count(element_count(t.shape), offset)
        self._write(self._vector(t), offset)

    def _vector(self, t: Tensor) -> Tensor:
        """The values of a tensor as a vector with the dtype of this tensor, and on its device."""
        if trace.current() is None:
            t = Tensor._of(self._here(t), self.device, False)
        with tape.no_tape():
            return op.Reshape(op.cast(t, self), [-1])

    def add_column(self, v: Tensor) -> Tensor:
        """Add a vector to each column of this matrix in place: x[i, j] += v[i].

        Args:
            v: Tensor of the dtype of this matrix, with one element for each row.

        Returns:
            This tensor.

        Raises:
            OperatorError: The dtypes differ.
            ValueError: The shapes cannot be broadcast.
            InvalidInput: An operator on the tape produced this tensor (SX370).
        """
        return self._with(op.Add(self, op.Unsqueeze(v, [1])))

    def add_row(self, v: Tensor) -> Tensor:
        """Add a vector to each row of this matrix in place: x[i, j] += v[j].

        Args:
            v: Tensor of the dtype of this matrix, with one element for each column.

        Returns:
            This tensor.

        Raises:
            OperatorError: The dtypes differ.
            ValueError: The shapes cannot be broadcast.
            InvalidInput: An operator on the tape produced this tensor (SX370).
        """
        return self._with(op.Add(self, v))

    def div_column(self, v: Tensor) -> Tensor:
        """Divide each column of this matrix by a vector in place: x[i, j] /= v[i].

        Args:
            v: Tensor of the dtype of this matrix, with one element for each row.

        Returns:
            This tensor.

        Raises:
            OperatorError: The dtypes differ, or an integer is divided by zero.
            ValueError: The shapes cannot be broadcast.
            InvalidInput: An operator on the tape produced this tensor (SX370).
        """
        return self._with(op.Div(self, op.Unsqueeze(v, [1])))

    def div_row(self, v: Tensor) -> Tensor:
        """Divide each row of this matrix by a vector in place: x[i, j] /= v[j].

        Args:
            v: Tensor of the dtype of this matrix, with one element for each column.

        Returns:
            This tensor.

        Raises:
            OperatorError: The dtypes differ, or an integer is divided by zero.
            ValueError: The shapes cannot be broadcast.
            InvalidInput: An operator on the tape produced this tensor (SX370).
        """
        return self._with(op.Div(self, v))

    def mult_column(self, v: Tensor) -> Tensor:
        """Multiply each column of this matrix by a vector in place: x[i, j] *= v[i].

        Args:
            v: Tensor of the dtype of this matrix, with one element for each row.

        Returns:
            This tensor.

        Raises:
            OperatorError: The dtypes differ.
            ValueError: The shapes cannot be broadcast.
            InvalidInput: An operator on the tape produced this tensor (SX370).
        """
        return self._with(op.Mul(self, op.Unsqueeze(v, [1])))

    def mult_row(self, v: Tensor) -> Tensor:
        """Multiply each row of this matrix by a vector in place: x[i, j] *= v[j].

        Args:
            v: Tensor of the dtype of this matrix, with one element for each column.

        Returns:
            This tensor.

        Raises:
            OperatorError: The dtypes differ.
            ValueError: The shapes cannot be broadcast.
            InvalidInput: An operator on the tape produced this tensor (SX370).
        """
        return self._with(op.Mul(self, v))

    # --- operators

    def __getitem__(self, keys: Any) -> Tensor:
        """Index with integers and slices; an integer keeps its axis, with size 1: t[-1, :] of shape (5, 7) has shape (1, 7)."""
        keys = keys if isinstance(keys, tuple) else (keys,)
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys = (*keys[:at], *[slice(None)] * (self.ndim() - len(keys) + 1), *keys[at + 1 :])
        if len(keys) > self.ndim():
            raise InvalidInput(
                f"a tensor of shape {self.shape} takes at most {self.ndim()} indices, got {len(keys)}", code="SX338"
            )
        starts, ends, axes, steps = [], [], [], []
        for axis, (key, n) in enumerate(zip(keys, self.shape, strict=False)):
            if isinstance(key, slice) and key == slice(None):
                continue
            if isinstance(key, (int, np.integer)):
                if not -n <= key < n:
                    rule = f"the index of axis {axis} of a tensor of shape {self.shape} must be in [{-n}, {n})"
                    raise InvalidInput(f"{rule}, got {key}", code="SX338")
                key = slice(int(key), int(key) + 1 or None)
            if not isinstance(key, slice):
                rule = f"an index of a tensor of shape {self.shape} must be an integer or a slice"
                raise InvalidInput(f"{rule}, got a {type(key).__name__}", code="SX338")
            start, stop, step = key.indices(n)
            starts.append(start)
            ends.append(stop if stop >= 0 else -n - 1)
            axes.append(axis)
            steps.append(step)
        return op.Slice(self, starts, ends, axes, steps) if axes else op.Identity(self)

    @_deferring
    def __add__(self, x: Any) -> Tensor:
        return binary("Add", self, x)

    @_deferring
    def __sub__(self, x: Any) -> Tensor:
        return binary("Sub", self, x)

    @_deferring
    def __mul__(self, x: Any) -> Tensor:
        return binary("Mul", self, x)

    @_deferring
    def __truediv__(self, x: Any) -> Tensor:
        return binary("Div", as_float(self), as_float(x))

    @_deferring
    def __floordiv__(self, x: Any) -> Tensor:
        return op.Cast(op.Floor(self.__truediv__(x)), to=dtypes.onnx_code(op.dtype(self)))

    @_deferring
    def __pow__(self, x: Any) -> Tensor:
        return op.Pow(self, x)

    @_deferring
    def __matmul__(self, x: Any) -> Tensor:
        return op.MatMul(self, x)

    def __neg__(self) -> Tensor:
        return op.Neg(self)

    def __abs__(self) -> Tensor:
        return op.Abs(self)

    def __radd__(self, x: Any) -> Tensor:
        return binary("Add", x, self)

    def __rsub__(self, x: Any) -> Tensor:
        return binary("Sub", x, self)

    def __rmul__(self, x: Any) -> Tensor:
        return binary("Mul", x, self)

    def __rtruediv__(self, x: Any) -> Tensor:
        return binary("Div", as_float(x), as_float(self))

    def __iadd__(self, x: Any) -> Tensor:
        return self._in_place("Add", x)

    def __isub__(self, x: Any) -> Tensor:
        return self._in_place("Sub", x)

    def __imul__(self, x: Any) -> Tensor:
        return self._in_place("Mul", x)

    def __itruediv__(self, x: Any) -> Tensor:
        return self._in_place("Div", x)

    def _in_place(self, name: str, x: Any) -> Tensor:
        with tape.no_tape():
            value = binary(name, self, x)
        return self._with(value, x)

    @_deferring
    def __lt__(self, x: Any) -> Tensor:
        return _compared("Less", self, x)

    @_deferring
    def __le__(self, x: Any) -> Tensor:
        return _compared("LessOrEqual", self, x)

    @_deferring
    def __gt__(self, x: Any) -> Tensor:
        return _compared("Greater", self, x)

    @_deferring
    def __ge__(self, x: Any) -> Tensor:
        return _compared("GreaterOrEqual", self, x)

    @_deferring
    def __eq__(self, x: Any) -> Any:
        return False if x is None else _compared("Equal", self, x)


def _reduced(name: str, t: Tensor, axis: int | Sequence[int] | None, keepdims: bool) -> Tensor:
    axes = None if axis is None else [axis] if isinstance(axis, (int, np.integer)) else list(axis)
    if axes == []:
        return op.Identity(t)
    made: Tensor = getattr(op, name)(t, axes, keepdims=int(keepdims))
    return made


def as_float(x: Any) -> Any:
    """Cast integers to float32, for quotients."""
    if isinstance(x, Tensor):
        return x if dtypes.is_float(op.dtype(x)) else op.Cast(x, to=dtypes.onnx_code(np.float32))
    return float(x) if isinstance(x, (int, np.integer)) else x


def binary(name: str, a: Any, b: Any) -> Tensor:
    """Apply an operator to two tensors, or a tensor and a number or array; with a float, an integer tensor becomes float32."""
    a, b = _operand(a), _operand(b)
    if isinstance(b, float) and isinstance(a, Tensor) and not dtypes.is_float(op.dtype(a)):
        a = as_float(a)
    if isinstance(a, float) and isinstance(b, Tensor) and not dtypes.is_float(op.dtype(b)):
        b = as_float(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and op.dtype(a) != op.dtype(b):
        common = np.promote_types(op.dtype(a), op.dtype(b))
        common = np.dtype(np.float32) if common == np.float64 and np.float64 not in (op.dtype(a), op.dtype(b)) else common
        a, b = (t if op.dtype(t) == common else op.Cast(t, to=dtypes.onnx_code(common)) for t in (a, b))
    result: Tensor = op.call(name, (a, b), {}, 1)[0]
    return result


def _operand(x: Any) -> Any:
    """Convert NumPy scalars to Python numbers, which adopt the dtype of the tensor, and arrays to constants of their dtype."""
    if isinstance(x, np.generic):
        return x.item()
    return op.constant(array_of(x)) if isinstance(x, np.ndarray) else x


def _compared(name: str, a: Tensor, b: Any) -> Tensor:
    """Compare: 1 or 0 for each element, in the dtype of the first tensor; the result has no gradient."""
    made = op.Cast(binary(name, a, b), to=dtypes.onnx_code(op.dtype(a)))
    made._is_comparison = True
    return made


def to_numpy(t: Tensor) -> Any:
    """Copy the values to a NumPy array.

    Args:
        t: Tensor on any device.

    Returns:
        Array of the shape and dtype of t; changing it does not change t.

    Raises:
        NotTraceable: A step is being recorded as a graph, and the values are not known.
    """
    return np.array(required(t).device.backend.get(t.data))
