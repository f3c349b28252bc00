"""The values of a tensor: where they are stored, and how they are read, copied and replaced; `tensor.py` adds the operators."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.builder import Symbol
from singa_backend.rendering import printable

from .. import device as devices
from ..device import DeviceLike
from . import provenance, random, tape, trace
from .conversions import DTypeLike, array_of, code_of, dtype_of, from_device, is_array, values_for
from .ops import op
from .tape import Operator, creator_of
from .variable import Variable


class StorageMethods(Variable):
    """The methods of a Tensor that read and replace its values."""

    if TYPE_CHECKING:

        def clone(self) -> Self: ...

    # --- properties

    @property
    def data(self) -> Any:
        """The storage: a NumPy array on the CPU, a CuPy array on a GPU. Writing to it changes the tensor.

        Assigning to `data` replaces the storage; the provenance of the tensor is dropped.

        Raises:
            NotTraceable: A step is being recorded as a graph, and the values are not known.
        """
        self._known()
        self._is_shared = True
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        if trace.current() is not None:
            raise trace.NotTraceable("the data of a tensor must not be replaced while the step is recorded as a graph")
        self._data = self._owned(value)
        provenance.forget(self)

    @property
    def raw(self) -> Any:
        """The value that operators compute with: the array, or a symbol while a step is recorded as a graph."""
        return trace.value(self)

    @property
    def creator(self) -> Operator:
        """The operator that produced this tensor; a Dummy for a leaf."""
        return creator_of(self)

    @creator.setter
    def creator(self, operator: Operator | None) -> None:
        self._creator = operator

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes; in an export with dynamic sizes, a dynamic size is a name or None.

        Raises:
            NotTraceable: The rank is not known in a step that is recorded for several sizes.
        """
        current, sizes = trace.current(), op.shape(self)
        return current.shape(sizes) if current is not None else sizes or ()

    @property
    def dtype(self) -> Any:
        """The dtype, as a constant of `singa.tensor`; as a NumPy dtype if SINGA has no constant for it."""
        return code_of(op.dtype(self))

    def _known(self) -> None:
        """Note that a recorded step depends on these values; raises NotTraceable if they are unknown."""
        current = trace.current()
        if isinstance(self._data, Symbol) or (current is not None and id(self) in current.assigned):
            raise trace.NotTraceable("the values of a tensor are unknown while its step is recorded as a graph")
        if current is not None:
            current.known[id(self)] = self
            trace.depends(self, lambda: (self._version, id(self._data)))

    def _owned(self, data: Any) -> Any:
        """Convert a value to storage on the device of this tensor."""
        backend = self.device.backend
        if isinstance(data, Variable):
            data = data._data if data.device is self.device else data.device.backend.get(data._data)
        if isinstance(data, Symbol) or (isinstance(data, list) and type(data) is not list):  # an empty sequence with its dtype
            return data
        if isinstance(data, list) and data and all(isinstance(v, Variable) or is_array(v) for v in data):
            return [self._owned(v) for v in data]
        if not isinstance(data, np.ndarray) and (hasattr(data, "__dlpack__") or hasattr(data, "__cuda_array_interface__")):
            data = from_device(data, backend)
        if isinstance(data, np.ndarray) or not backend.xp.isarray(data):
            data = array_of(data)
            if not data.flags.writeable:
                data = data.copy()
        return data if backend.xp.isarray(data) else backend.put(data)

    def is_dummy(self) -> bool:
        """Whether this tensor is a leaf.

        Returns:
            False if an operator on the tape produced it, otherwise True.
        """
        return tape.is_leaf(self)

    def _on_tape(self) -> bool:
        """Whether gradients flow through this tensor to the operator that produced it."""
        return tape.training and self.requires_grad and not self.is_dummy()

    def ndim(self) -> int:
        """The rank.

        Returns:
            The number of axes.
        """
        return op.rank(self)

    def size(self) -> int:
        """The number of elements.

        Returns:
            The product of the sizes; 1 for a scalar.

        Raises:
            NotTraceable: A step is being recorded with dynamic sizes.
        """
        count = element_count(self.shape)
        if count is None:
            raise trace.NotTraceable(f"the number of elements of a tensor of shape {self.shape} is dynamic")
        return count

    def is_empty(self) -> bool:
        """Whether the tensor has no elements.

        Returns:
            True if a size is 0.
        """
        return 0 in self.shape

    def is_transpose(self) -> bool:
        """Whether the storage is not in row-major order, as that of a transposed array.

        Returns:
            True if the storage is not C-contiguous.
        """
        return not self.data.flags.c_contiguous

    def memsize(self) -> int:
        """The memory of the elements.

        Returns:
            The number of elements times the size of one, in bytes.
        """
        return self.size() * int(op.dtype(self).itemsize)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        """Return the values, shortened as NumPy does, the shape, the dtype, the device, and the name if there is one."""
        where = self.device.backend
        if isinstance(self._data, list):
            return f"<Tensor {printable(repr(self.name))}, a sequence of {len(self._data)} on {where}>"
        if isinstance(self._data, Symbol) or trace.current() is not None:  # a step that is recorded must not depend on values
            return f"<Tensor {printable(repr(self.name))} {op.dtype(self)}{list(self.shape)} on {where}>"
        called = f", name={printable(repr(self.name))}" if self.name else ""
        values = np.array2string(where.get(self._data), separator=", ", prefix="Tensor(")
        shown = printable(values, len(values), lines=True)
        return f"Tensor({shown}, shape={self.shape}, dtype={op.dtype(self)}, device={where}{called})"

    # --- copies and pickles: they contain the values and the fields, never the tape

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A leaf with separate storage on the same device; tensors that share storage share it in the copy too."""
        self._known()
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        if id(self._data) not in memo:
            memo[id(self._data)] = self.device.backend.copy(self._data)
        made.__dict__.update(
            {n: copy.deepcopy(v, memo) for n, v in self.__dict__.items() if n not in ("_data", "_creator", "_origin", "_member")}
        )
        made._data, made._creator = memo[id(self._data)], None
        return made

    def __getstate__(self) -> dict[str, Any]:
        self._known()
        fields = {n: v for n, v in self.__dict__.items() if n != "_member"}
        return {**fields, "_data": self.device.backend.get(self._data), "_creator": None, "_origin": None, "_is_shared": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled tensor; raises DeviceUnavailable if this machine does not have its device."""
        self.__dict__.update(state, _data=state["device"].backend.put(state["_data"]))

    # --- in place

    def to_type(self, dtype: DTypeLike) -> Self:
        """Cast this tensor in place; the cast is not recorded on the tape.

        Args:
            dtype: A constant of `singa.tensor`, "int" (int32), "float" (float32), or a NumPy dtype.

        Returns:
            This tensor.

        Raises:
            InvalidInput: `dtype` is not a dtype, or ONNX does not have it (SX316).
            NotTraceable: A step is being recorded as a graph.
            ValueError: A string does not contain a number.
        """
        self.data = self.device.backend.put(self.device.backend.get(self.data).astype(dtype_of(dtype)))
        return self

    def to_device(self, device: DeviceLike) -> Self:
        """Move this tensor to a device, in place.

        Args:
            device: The device, or a name such as "CPU" or "CUDA"; None for the CPU.

        Returns:
            This tensor.

        Raises:
            DeviceUnavailable: The name is unknown, or this machine does not have the device.
            NotTraceable: A step is being recorded as a graph, and the values are not known.
        """
        there = devices.resolve(device)
        self._data = there.backend.put(self.device.backend.get(self.data))
        self.device = there
        return self

    def to_host(self) -> Self:
        """Move this tensor to the CPU, in place.

        Returns:
            This tensor.

        Raises:
            NotTraceable: A step is being recorded as a graph, and the values are not known.
        """
        return self.to_device(devices.default_device)

    def set_value(self, x: Any, inplace: bool = True) -> Self:
        """Fill with a number or an array; the tensor becomes a leaf.

        Args:
            x: A number, or an array whose shape broadcasts to that of this tensor; it is cast to the dtype.
            inplace: Whether to fill this tensor; False to fill a copy.

        Returns:
            The tensor that was filled.

        Raises:
            InvalidInput: `x` is not of the kind of this tensor, or lists of several lengths (SX315).
            OperatorError: The shape of `x` does not broadcast.
        """
        target = self if inplace else self.clone()
        target._separate()
        with tape.no_tape():
            value = op.constant(values_for(op.dtype(target), x), op.dtype(target))
            trace.assign(target, op.Expand(value, op.Shape(target)).raw)
        target._become_leaf()
        return target

    def copy_from_numpy(self, array: Any, offset: int = 0) -> None:
        """Write the values of an array, in row-major order; a tensor whose values are all written becomes a leaf.

        A step that is recorded as a graph contains the values: every step writes them.

        Args:
            array: An array, or what NumPy converts to one; values are cast to the dtype of this tensor. Its shape may differ.
            offset: The index of the first element to write.

        Raises:
            InvalidInput: The values are beyond the end, or without an offset, they are fewer than the elements (SX337); or some
                elements of a tensor that an operator on the tape produced would be written (SX370); or the values are not of
                the kind of this tensor, or lists of several lengths (SX315).
        """
        values = values_for(op.dtype(self), array)
        self._check_count(values.size, offset)
        self._write(op.constant(np.ascontiguousarray(values.reshape(-1), op.dtype(self))), offset)

    def bernoulli(self, p: float, inplace: bool = True) -> Self:
        """Fill with ones, with probability p, and zeros; the tensor becomes a leaf.

        Args:
            p: The probability of a one, in [0, 1].
            inplace: Whether to fill this tensor; False to fill a copy. Numbers come from the random stream of its device.

        Returns:
            The tensor that was filled.
        """
        return self._filled("bernoulli", (p,), inplace)

    def gaussian(self, mean: float, std: float, inplace: bool = True) -> Self:
        """Fill with normally distributed random numbers, by the Box-Muller method; the tensor becomes a leaf.

        Args:
            mean: The mean of the distribution.
            std: The standard deviation of the distribution.
            inplace: Whether to fill this tensor; False to fill a copy. Numbers come from the random stream of its device.

        Returns:
            The tensor that was filled.
        """
        return self._filled("normal", (mean, std), inplace)

    def uniform(self, low: float, high: float, inplace: bool = True) -> Self:
        """Fill with uniformly distributed random numbers in [low, high); the tensor becomes a leaf.

        Args:
            low: The lower bound.
            high: The upper bound.
            inplace: Whether to fill this tensor; False to fill a copy. Numbers come from the random stream of its device.

        Returns:
            The tensor that was filled.
        """
        return self._filled("uniform", (low, high), inplace)

    def _filled(self, how: str, numbers: tuple[float, ...], inplace: bool) -> Self:
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
            target._separate()
            trace.assign(target, value.raw)
        target._become_leaf()
        return target

    def _refuse_on_tape(self) -> None:
        if self._on_tape():
            what = f"{self.name or 'a tensor'}, which {self.creator.name} produced, must not be changed in place"
            hint = "write `y = y + x` instead of `y += x`"
            raise InvalidInput(f"{what}: its gradient would be wrong", code="SX370", hint=hint)

    def _with(self, value: Any, *others: Any) -> Self:
        """Replace all values in place by those of a tensor, which was computed from this one and `others`."""
        self._refuse_on_tape()
        link = provenance.changed(self, value, *others)
        trace.assign(self, op.cast(value, self).raw)
        self._origin = link
        return self

    def _check_count(self, count: int | None, offset: int) -> None:
        size = element_count(self.shape)
        if count is None or size is None:  # in a step that is recorded with dynamic sizes
            return
        if offset + count > size or (not offset and count != size):
            rule = f"at most {max(0, size - offset)}" if offset else str(size)
            where = f"to write at {offset} of a tensor of shape {self.shape}"
            raise InvalidInput(f"the number of values {where} must be {rule}, got {count}", code="SX337")

    def _here(self, t: Variable) -> Any:
        """The array of a tensor on the device of this one."""
        return t._data if t.device is self.device else self.device.backend.put(t.device.backend.get(t._data))

    def _write(self, values: Any, offset: int) -> None:
        """Write a vector of this dtype to consecutive elements; a step that is recorded as a graph contains the write."""
        count = element_count(values.shape)
        whole = count == element_count(self.shape) or (count is None and not offset)
        if not whole:
            self._refuse_on_tape()
        if trace.current() is not None:
            with tape.no_tape():
                if not whole:
                    if count is None:
                        raise trace.NotTraceable("a part of a tensor is replaced by values whose number is dynamic")
                    flat, end = op.Reshape(self, [-1]), offset + count
                    first, last = op.Slice(flat, [0], [offset], [0]), op.Slice(flat, [end], [self.size()], [0])
                    values = op.Concat(first, values, last, axis=0)
                trace.assign(self, op.Reshape(values, op.Shape(self)).raw)
        else:
            self._separate()
            data, backend = self._data, self.device.backend
            with backend.active():
                flat = data.reshape(-1)
            backend.write(flat, self._here(values), slice(offset, offset + values.size()))
            if not data.flags.c_contiguous:  # then `flat` is a copy
                backend.write(data, flat.reshape(data.shape))
            self._version += 1
            self._writes += 1
            self._is_constant = False
            provenance.forget(self)
        if whole:
            self._become_leaf()

    def _separate(self) -> None:
        """Copy the storage of a result before all its values are replaced, so that the tape and views keep the old values."""
        if trace.current() is None and not self.is_dummy():
            self._data = self.device.backend.copy(self._data)

    def _become_leaf(self) -> None:
        """Make it a leaf, because all its values were replaced."""
        provenance.forget(self)
        self._creator = None


def element_count(shape: Sequence[Any]) -> int | None:
    """The number of elements; None if a size is dynamic."""
    return math.prod(shape) if all(isinstance(d, int) for d in shape) else None
