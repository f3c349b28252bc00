"""What a tensor is: an array on a device that remembers which operator made it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.builder import Symbol

from .. import device as devices
from ..device import DeviceLike
from . import provenance, random, tape, trace
from .ops import TensorInterpreter
from .ops import op as _op
from .tape import Dummy, Operator, creator_of
from .variable import Counter, Variable, made_by_operators

op: TensorInterpreter[Tensor] = _op
"""ONNX's operators on tensors, at the newest opset: `op.Mul(x, y)`."""

float32, float16, int32, char, double, uchar, int64, bool_ = 0, 1, 2, 3, 4, 5, 6, 7

DTypeLike: TypeAlias = dtypes.DTypeLike | int
"""One of the constants above, "int" or "float", or what NumPy makes a dtype of."""

_dummies = Counter()


@made_by_operators
class Tensor(Variable):
    """An array on a device.

    shape: sizes.  device: a Device, None for the CPU.  dtype: one of this module's constants, or a NumPy dtype.
    data: an array to take over, in its own dtype; zeros where absent.
    requires_grad: whether gradients may be asked for.  stores_grad: whether `backward` gives this tensor's gradient.
    creator: the operator that made it; a leaf's is a Dummy.
    Raises InvalidInput for data that is no array, or that contradicts the shape.
    """

    __array_priority__ = 1000
    """NumPy leaves `array * tensor` to the tensor, where it would make an array that no tape knows."""

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

    def _owned(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            data = data._data
        if isinstance(data, (Symbol, list)) or self.device.backend.xp.isarray(data):
            return data
        array = np.asarray(data)
        if not dtypes.known(array.dtype):
            raise InvalidInput(f"a tensor holds numbers or strings, not {array.dtype}", code="SX315")
        return self.device.backend.put(array)

    # --- what it is

    @property
    def data(self) -> Any:
        """The live storage: a NumPy array on the CPU, a CuPy array on a GPU.  Writing into it changes the tensor."""
        self._known()
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        if trace.current() is not None:
            raise trace.NotTraceable("the data of a tensor are replaced while the step is recorded as a graph")
        self._data = self._owned(value)
        provenance.forget(self)

    @property
    def raw(self) -> Any:
        """What operators compute with: the array, or the symbol of a step that is being recorded."""
        return trace.value(self)

    @property
    def creator(self) -> Operator:
        return creator_of(self)

    @creator.setter
    def creator(self, operator: Operator | None) -> None:
        self._creator = operator

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes; where a step is recorded with open sizes, names or None stand in their place."""
        return op.shape(self) or ()

    @property
    def dtype(self) -> Any:
        """One of this module's constants."""
        return code_of(op.dtype(self))

    def _known(self) -> None:
        current = trace.current()
        if isinstance(self._data, Symbol) or (current is not None and id(self) in current.assigned):
            raise trace.NotTraceable("the values of a tensor are not known while its step is recorded as a graph")

    def is_dummy(self) -> bool:
        """Whether no operator made it."""
        return self._creator is None or isinstance(self._creator, Dummy)

    def ndim(self) -> int:
        return op.rank(self)

    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def is_empty(self) -> bool:
        return 0 in self.shape

    def is_transpose(self) -> bool:
        """Whether the storage is not in the order of the axes."""
        return not self.data.flags.c_contiguous

    def memsize(self) -> int:
        """Bytes of the elements."""
        return self.size() * int(op.dtype(self).itemsize)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {op.dtype(self)}{list(self.shape)} on {self.device.backend}>"

    __hash__ = None  # type: ignore[assignment]  # tensors compare element by element

    # --- copies and pickles: the values and what is said of them, never the tape

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A leaf with a storage of its own on the same device; tensors that share one share it in the copy too."""
        self._known()
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        if id(self._data) not in memo:
            memo[id(self._data)] = [v.copy() for v in self._data] if isinstance(self._data, list) else self._data.copy()
        made.__dict__.update(
            {n: copy.deepcopy(v, memo) for n, v in self.__dict__.items() if n not in ("_data", "_creator", "_origin")}
        )
        made._data, made._creator = memo[id(self._data)], None
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": self.device.backend.get(self.data), "_creator": None, "_origin": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises DeviceUnavailable where the tensor lay on a device that this machine has not."""
        self.__dict__.update(state, _data=state["device"].backend.put(state["_data"]))

    # --- NumPy, DLPack

    def __array__(self, dtype: dtypes.DTypeLike | None = None, copy: bool | None = None) -> Any:
        array = self.device.backend.get(self.data)
        return np.array(array, dtype) if copy or dtype is not None else array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __float__(self) -> float:
        return float(self._single())

    def __int__(self) -> int:
        return int(self._single())

    def __bool__(self) -> bool:
        return bool(self._single())

    def _single(self) -> Any:
        if self.size() != 1:
            raise InvalidInput(f"a tensor of shape {self.shape} is no single number", code="SX336")
        return self.device.backend.get(self.data).reshape(())[()]

    # --- new tensors

    def reshape(self, shape: Any) -> Tensor:
        return op.Reshape(self, [shape] if isinstance(shape, int) else list(shape))

    def transpose(self, axes: Sequence[int] | None = None) -> Tensor:
        """The axes in another order; backwards where none is given."""
        return op.Transpose(self, perm=None if axes is None else list(axes))

    def T(self) -> Tensor:
        """The transpose."""
        return self.transpose()

    def contiguous(self) -> Tensor:
        """The same values, stored in the order of the axes."""
        if self._on_tape():
            return self.clone()
        made = Tensor(data=self.data.copy(order="C"), device=self.device, requires_grad=self.requires_grad)
        made._origin = self._origin
        return made

    def repeat(self, repeats: Any, axis: int | None = None) -> Tensor:
        """Each element (or each slice along an axis) so many times, as NumPy's repeat."""
        t, axis = (self.reshape([-1]), 0) if axis is None else (self, axis)
        places = np.repeat(np.arange(t.shape[axis]), repeats)
        return op.Gather(t, places, axis=axis)

    def _on_tape(self) -> bool:
        """Whether gradients flow through this tensor to what made it."""
        return tape.training and self.requires_grad and not self.is_dummy()

    def clone(self) -> Tensor:
        """A tensor with storage of its own; gradients flow back through it."""
        if self._on_tape():
            same = op.Identity(self)
            if trace.current() is None:
                same._data = same._data.copy(order="C")
            return same
        made = Tensor(data=self.data.copy(), device=self.device, requires_grad=self.requires_grad, stores_grad=self.stores_grad)
        made.name, made._origin = self.name, self._origin
        return made

    deepcopy = clone

    def copy(self) -> Tensor:
        """A tensor that shares this one's storage; gradients flow back through it."""
        if self._on_tape():
            return op.Identity(self)
        made = Tensor._of(self.data, self.device, self.requires_grad)
        made.stores_grad, made.name, made._origin = self.stores_grad, self.name, self._origin
        return made

    def as_type(self, dtype: DTypeLike) -> Tensor:
        """The values in another dtype."""
        return op.Cast(self, to=dtypes.onnx_code(dtype_of(dtype)))

    def l1(self) -> float:
        """The mean of the absolute values."""
        return float(np.abs(to_numpy(self)).mean())

    def l2(self) -> float:
        """The root of the sum of the squares, over the number of elements."""
        return float(np.sqrt(np.square(to_numpy(self).astype(np.float64)).sum()) / max(1, self.size()))

    # --- in place

    def to_type(self, dtype: DTypeLike) -> Tensor:
        """Change the dtype of this tensor."""
        self.data = self.device.backend.put(self.device.backend.get(self.data).astype(dtype_of(dtype)))
        return self

    def to_device(self, device: DeviceLike) -> Tensor:
        """Move this tensor to a device."""
        value = self.device.backend.get(self.data)
        self.device = devices.resolve(device)
        self._data = self.device.backend.put(value)
        return self

    def to_host(self) -> Tensor:
        """Move this tensor to the CPU."""
        return self.to_device(devices.default_device)

    def set_value(self, x: Any, inplace: bool = True) -> Tensor:
        """Fill with a number."""
        target = self if inplace else self.clone()
        with tape.no_tape():
            trace.assign(target, op.Expand(op.constant(x, op.dtype(target)), op.Shape(target)).raw)
        target._begins_anew()
        return target

    def _begins_anew(self) -> None:
        """All its values came from outside: it is a leaf from here on, whatever made it before."""
        provenance.forget(self)
        self._creator = None

    def reset_like(self, t: Tensor) -> Tensor:
        """Zeros of the shape, dtype and device of another tensor."""
        self.device = t.device
        self.data = t.device.backend.put(np.zeros(t.shape, op.dtype(t)))
        return self

    def copy_from_numpy(self, array: Any, offset: int = 0) -> None:
        """Write an array's values, in order, from an offset on; its shape need not be this one's.

        Raises InvalidInput where there are more than fit, or fewer without an offset.
        """
        array = np.asarray(array)
        if offset + array.size > self.size() or (not offset and array.size != self.size()):
            raise InvalidInput(f"{array.size} values at {offset} do not fill a tensor of shape {self.shape}", code="SX337")
        self._write(self.device.backend.put(np.ascontiguousarray(array.reshape(-1), op.dtype(self))), offset)

    def _write(self, values: Any, offset: int) -> None:
        """Write values from outside, one after the other, on the tensor's device."""
        data = self.data
        if values.size == self.size():
            self._begins_anew()
        else:
            self._refuse_on_tape()
            provenance.forget(self)
        self._version += 1
        flat = data.reshape(-1)
        flat[offset : offset + values.size] = values
        if not data.flags.c_contiguous:  # then `flat` is a copy
            data[...] = flat.reshape(data.shape)

    def copy_data(self, t: Tensor) -> None:
        """Write another tensor's values."""
        self.copy_from_numpy(to_numpy(t))

    def copy_from(self, t: Any, offset: int = 0) -> None:
        """Write the values of a tensor or an array."""
        self.copy_from_numpy(to_numpy(t) if isinstance(t, Tensor) else t, offset)

    def bernoulli(self, p: float, inplace: bool = True) -> Tensor:
        """Fill with ones, with probability p, and zeros."""
        return self._filled("bernoulli", (p,), inplace)

    def gaussian(self, mean: float, std: float, inplace: bool = True) -> Tensor:
        """Fill with normally distributed numbers."""
        return self._filled("normal", (mean, std), inplace)

    def uniform(self, low: float, high: float, inplace: bool = True) -> Tensor:
        """Fill with numbers of [low, high)."""
        return self._filled("uniform", (low, high), inplace)

    def _filled(self, how: str, numbers: tuple[float, ...], inplace: bool) -> Tensor:
        target = self if inplace else self.clone()
        dtype, a, b = op.dtype(target), numbers[0], numbers[-1]
        with tape.no_tape():
            if how == "uniform":
                drawn = random.uniform(target.shape, target.device, np.float64 if dtype == np.float64 else np.float32)
                value = op.Cast(op.Add(op.Mul(drawn, float(b - a)), float(a)), to=dtypes.onnx_code(dtype))
            elif how == "normal":
                value = random.normal(a, b, target.shape, target.device, dtype)
            else:
                value = random.bernoulli(a, target.shape, target.device, dtype)
            trace.assign(target, value.raw)
        target._begins_anew()
        return target

    def add_column(self, v: Tensor) -> Tensor:
        return self._with(op.Add(self, op.Unsqueeze(v, [1])))

    def add_row(self, v: Tensor) -> Tensor:
        return self._with(op.Add(self, v))

    def div_column(self, v: Tensor) -> Tensor:
        return self._with(op.Div(self, op.Unsqueeze(v, [1])))

    def div_row(self, v: Tensor) -> Tensor:
        return self._with(op.Div(self, v))

    def mult_column(self, v: Tensor) -> Tensor:
        return self._with(op.Mul(self, op.Unsqueeze(v, [1])))

    def mult_row(self, v: Tensor) -> Tensor:
        return self._with(op.Mul(self, v))

    def _refuse_on_tape(self) -> None:
        if self._on_tape():
            what = f"{self.name or 'a tensor'} that {self.creator.name} made would be changed in place"
            hint = "write `y = y + x` in place of `y += x`"
            raise InvalidInput(f"{what}: no gradient would know of it", code="SX370", hint=hint)

    def _with(self, value: Tensor, *others: Any) -> Tensor:
        self._refuse_on_tape()
        link = provenance.changed(self, value, *others)
        trace.assign(self, op.cast(value, self).raw)
        self._origin = link
        return self

    # --- operators

    def __getitem__(self, keys: Any) -> Tensor:
        """Integers and slices; an integer keeps its axis, with size 1: t[-1, :] of a (5, 7) is (1, 7)."""
        keys = keys if isinstance(keys, tuple) else (keys,)
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys = (*keys[:at], *[slice(None)] * (self.ndim() - len(keys) + 1), *keys[at + 1 :])
        if len(keys) > self.ndim():
            raise InvalidInput(f"{len(keys)} indices for a tensor of shape {self.shape}", code="SX338")
        starts, ends, axes, steps = [], [], [], []
        for axis, (key, n) in enumerate(zip(keys, self.shape, strict=False)):
            if isinstance(key, slice) and key == slice(None):
                continue
            if isinstance(key, (int, np.integer)):
                if not -n <= key < n:
                    raise InvalidInput(f"index {key} is outside axis {axis} of a tensor of shape {self.shape}", code="SX338")
                key = slice(int(key), int(key) + 1 or None)
            if not isinstance(key, slice):
                raise InvalidInput(f"a tensor is indexed by integers and slices, not by a {type(key).__name__}", code="SX338")
            start, stop, step = key.indices(n)
            starts.append(start)
            ends.append(stop if stop >= 0 else -n - 1)
            axes.append(axis)
            steps.append(step)
        return op.Slice(self, starts, ends, axes, steps) if axes else op.Identity(self)

    def __add__(self, x: Any) -> Tensor:
        return _binary("Add", self, x)

    def __sub__(self, x: Any) -> Tensor:
        return _binary("Sub", self, x)

    def __mul__(self, x: Any) -> Tensor:
        return _binary("Mul", self, x)

    def __truediv__(self, x: Any) -> Tensor:
        return _binary("Div", _float(self), _float(x))

    def __floordiv__(self, x: Any) -> Tensor:
        return op.Cast(op.Floor(self.__truediv__(x)), to=dtypes.onnx_code(op.dtype(self)))

    def __pow__(self, x: Any) -> Tensor:
        return op.Pow(self, x)

    def __matmul__(self, x: Any) -> Tensor:
        return op.MatMul(self, x)

    def __neg__(self) -> Tensor:
        return op.Neg(self)

    def __abs__(self) -> Tensor:
        return op.Abs(self)

    def __radd__(self, x: Any) -> Tensor:
        return _binary("Add", x, self)

    def __rsub__(self, x: Any) -> Tensor:
        return _binary("Sub", x, self)

    def __rmul__(self, x: Any) -> Tensor:
        return _binary("Mul", x, self)

    def __rtruediv__(self, x: Any) -> Tensor:
        return _binary("Div", _float(x), _float(self))

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
            value = _binary(name, self, x)
        return self._with(value, x)

    def __lt__(self, x: Any) -> Tensor:
        return _compared("Less", self, x)

    def __le__(self, x: Any) -> Tensor:
        return _compared("LessOrEqual", self, x)

    def __gt__(self, x: Any) -> Tensor:
        return _compared("Greater", self, x)

    def __ge__(self, x: Any) -> Tensor:
        return _compared("GreaterOrEqual", self, x)

    def __eq__(self, x: Any) -> Any:
        return False if x is None else _compared("Equal", self, x)


def _float(x: Any) -> Any:
    """Integers as float32: a quotient is no integer."""
    if isinstance(x, Tensor):
        return x if dtypes.is_float(op.dtype(x)) else op.Cast(x, to=dtypes.onnx_code(np.float32))
    return float(x) if isinstance(x, (int, np.integer)) else x


def _binary(name: str, a: Any, b: Any) -> Tensor:
    """An operator of two tensors, or of a tensor and a number or array; an int32 tensor with a float becomes float32."""
    a, b = _operand(a), _operand(b)
    if isinstance(b, float) and isinstance(a, Tensor) and not dtypes.is_float(op.dtype(a)):
        a = _float(a)
    if isinstance(a, float) and isinstance(b, Tensor) and not dtypes.is_float(op.dtype(b)):
        b = _float(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and op.dtype(a) != op.dtype(b):
        common = np.promote_types(op.dtype(a), op.dtype(b))
        common = np.dtype(np.float32) if common == np.float64 and np.float64 not in (op.dtype(a), op.dtype(b)) else common
        a, b = (t if op.dtype(t) == common else op.Cast(t, to=dtypes.onnx_code(common)) for t in (a, b))
    result: Tensor = op.call(name, (a, b), {}, 1)[0]
    return result


def _operand(x: Any) -> Any:
    """NumPy's numbers as Python's, which take the tensor's dtype; its arrays as constants in their own."""
    if isinstance(x, np.generic):
        return x.item()
    return op.constant(x) if isinstance(x, np.ndarray) else x


def _compared(name: str, a: Tensor, b: Any) -> Tensor:
    """1 where it holds, 0 elsewhere, in the dtype of the first tensor; nothing flows back."""
    return op.Cast(_binary(name, a, b), to=dtypes.onnx_code(op.dtype(a)))


_CODES: dict[int, Any] = {
    float32: np.float32, float16: np.float16, int32: np.int32, char: np.int8, double: np.float64, uchar: np.uint8,
    int64: np.int64, bool_: np.bool_,
}  # fmt: skip


def dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """The NumPy dtype of a constant of this module, of 'int' or 'float', or of a NumPy dtype.

    Raises InvalidInput for what is none of these.
    """
    if isinstance(dtype, int) and not isinstance(dtype, bool) and dtype in _CODES:
        found: np.dtype[Any] = np.dtype(_CODES[dtype])
        return found
    kind: Any = dtype
    if isinstance(dtype, str) and dtype in ("int", "float"):
        kind = np.int32 if dtype == "int" else np.float32
    try:
        found = np.dtype(kind)
    except TypeError:
        raise InvalidInput(f"{dtype!r} is no dtype", code="SX316", hint="write tensor.float32, or a NumPy dtype") from None
    if not dtypes.known(found):
        raise InvalidInput(f"ONNX has no element type {found}", code="SX316")
    return found


def code_of(dtype: np.dtype[Any]) -> Any:
    """The constant of a NumPy dtype; the dtype itself where SINGA has no number for it."""
    return next((code for code, known in _CODES.items() if np.dtype(known) == dtype), dtype)


def to_numpy(t: Tensor) -> Any:
    """A copy of the values as a NumPy array."""
    return np.array(t.device.backend.get(t.data))
