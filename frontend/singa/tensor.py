"""Tensors: arrays on a device that remember which operator made them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.builder import Symbol
from singa_backend.errors import InvalidInput

from . import device as devices
from . import trace
from .device import Device
from .tape import Dummy, Operator, op

float32, float16, int32, char, double, uchar, int64, bool_ = 0, 1, 2, 3, 4, 5, 6, 7

_dummies = itertools.count()


class Tensor:
    """An array on a device.

    shape: sizes.  device: a Device, None for the CPU.  dtype: one of this module's constants, or a NumPy dtype.
    data: an array to take over, in its own dtype; zeros where absent.
    requires_grad: whether gradients may be asked for.  stores_grad: whether `backward` gives this tensor's gradient.
    creator: the operator that made it; a leaf's is a Dummy.
    Raises InvalidInput for data that is no array, or that contradicts the shape.
    """

    _fixed = False
    """Whether this is a constant of a model: part of a graph that is recorded, never an input of it."""

    def __init__(self, shape: Any = (), device: Device | None = None, dtype: Any = float32, data: Any = None,
                 requires_grad: bool = True, stores_grad: bool = False, creator: Operator | None = None,
                 name: str | None = None) -> None:  # fmt: skip
        self.device = devices.resolve(device)
        self.requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.name = name if name is not None else f"Dummy#{next(_dummies)}"
        self._creator = creator
        self._data: Any = None
        if data is None:
            shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
            self._data = self.device.backend.put(np.zeros(shape, dtype_of(dtype)))
        else:
            self._data = self._owned(data)

    @classmethod
    def _of(cls, value: Any, device: Device, requires_grad: bool) -> Tensor:
        """A tensor around a value that an operator has made."""
        tensor = cls.__new__(cls)
        tensor.device = device
        tensor.requires_grad = requires_grad
        tensor.stores_grad = False
        tensor.name = ""
        tensor._creator = None
        tensor._data = value
        return tensor

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

    @property
    def raw(self) -> Any:
        """What operators compute with: the array, or the symbol of a step that is being recorded."""
        return trace.value(self)

    @property
    def creator(self) -> Operator:
        if self._creator is None:
            self._creator = Dummy(self, self.name or None)
        return self._creator

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

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {op.dtype(self)}{list(self.shape)} on {self.device.backend}>"


PlaceHolder = Tensor

_CODES: dict[int, Any] = {
    float32: np.float32, float16: np.float16, int32: np.int32, char: np.int8, double: np.float64, uchar: np.uint8,
    int64: np.int64, bool_: np.bool_,
}  # fmt: skip


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of a constant of this module, of 'int' or 'float', or of a NumPy dtype.

    Raises InvalidInput for what is none of these.
    """
    if isinstance(dtype, int) and not isinstance(dtype, bool) and dtype in _CODES:
        return np.dtype(_CODES[dtype])
    if isinstance(dtype, str) and dtype in ("int", "float"):
        return np.dtype(np.int32 if dtype == "int" else np.float32)
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise InvalidInput(f"{dtype!r} is no dtype", code="SX316", hint="write tensor.float32, or a NumPy dtype") from None
    if not dtypes.known(found):
        raise InvalidInput(f"ONNX has no element type {found}", code="SX316")
    return found


def code_of(dtype: np.dtype[Any]) -> Any:
    """The constant of a NumPy dtype; the dtype itself where SINGA has no number for it."""
    return next((code for code, known in _CODES.items() if np.dtype(known) == dtype), dtype)


def from_numpy(array: Any, dev: Device | None = None) -> Tensor:
    """A tensor that holds a copy of an array, in its dtype."""
    return Tensor(data=np.array(array), device=dev)


def to_numpy(t: Tensor) -> Any:
    """A copy of the values as a NumPy array."""
    return np.array(t.device.backend.get(t.data))


__all__ = [name for name in dir() if not name.startswith("_") and name not in ("annotations", "Any", "itertools", "np", "tape")]
