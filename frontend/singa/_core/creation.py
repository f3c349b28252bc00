"""Functions of `singa.tensor` that make tensors, copy them and arrange their elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from singa_backend.devices.device import device_of
from singa_backend.errors import InvalidInput

from .. import device as devices
from ..device import DeviceLike
from . import tape
from .conversions import (
    DTypeLike,
    array_of,
    dtype_of,
    exchange,
    float32,
    values_for,
)
from .tensor import Tensor, op, to_numpy
from .variable import required


def from_numpy(array: Any, dev: DeviceLike | None = None) -> Tensor:
    """Make a tensor with a copy of an array.

    Args:
        array: A NumPy array of numbers, bool or strings; or nested lists of numbers: floats become float32, integers int32.
        dev: The device, or a name such as "CUDA"; None for the CPU.

    Returns:
        Tensor of the shape and dtype of the array.

    Raises:
        InvalidInput: ONNX does not have the dtype of the array, the lists have several lengths, or float32 or int32 cannot
            represent a number (SX315).
        DeviceUnavailable: This machine does not have the device.
    """
    return Tensor(data=array_of(array).copy(), device=dev)


def from_dlpack(x: Any) -> Tensor:
    """Make a tensor that shares the memory of a DLPack array; read-only memory on the host is copied.

    Args:
        x: An object with `__dlpack__` and `__dlpack_device__`, such as an array of NumPy, CuPy or PyTorch.

    Returns:
        Tensor of the shape and dtype of x, on the CPU or on the GPU that holds x.

    Raises:
        NotExchangeable: x does not support DLPack, its memory is neither on the host nor on a CUDA device, or NumPy or CuPy
            lacks its dtype, or CuPy cannot use the GPU (SX367).
    """
    with exchange(f"a {type(x).__name__}"):
        kind, ordinal = x.__dlpack_device__()
        if int(kind) not in (1, 2, 3):  # kDLCPU, kDLCUDA, kDLCUDAHost
            raise BufferError(f"its memory must be on the host or on a CUDA device, got the device type {kind!r}")
        data, where = (x, devices.resolve(f"CUDA:{ordinal}")) if int(kind) == 2 else (np.from_dlpack(x), None)
    return Tensor(data=data, device=where)


def from_raw_tensor(t: Any) -> Tensor:
    """Make a tensor that shares the storage of an array, such as the `.data` of a tensor or a result of `creator.backward`.

    Args:
        t: An array of NumPy or of a device.

    Returns:
        Tensor of the shape and dtype of t, on its device.

    Raises:
        InvalidInput: ONNX does not have the dtype of the array.
    """
    return Tensor(data=t, device=devices.resolve(device_of(t)))


def from_raw_tensors(tt: Iterable[Any]) -> list[Tensor]:
    """Make tensors that share the storage of arrays.

    Args:
        tt: The arrays.

    Returns:
        A list with the Tensor of each, as `from_raw_tensor` makes it.

    Raises:
        InvalidInput: ONNX does not have the dtype of an array.
    """
    return [from_raw_tensor(t) for t in tt]


def to_host(t: Tensor) -> Tensor:
    """Copy a tensor to the CPU.

    Args:
        t: Tensor on any device.

    Returns:
        Tensor on the CPU, of the shape, dtype and `requires_grad` of t; it is not recorded on the tape.
    """
    return Tensor(data=to_numpy(t), requires_grad=t.requires_grad)


def zeros(shape: Any, device: DeviceLike | None = None, dtype: DTypeLike = float32) -> Tensor:
    """Make a tensor of zeros.

    Args:
        shape: The sizes, or one int.
        device: The device, or a name such as "CUDA"; None for the CPU.
        dtype: A constant of this module, "int" (int32), "float" (float32), or a NumPy dtype.

    Returns:
        Tensor of this shape and dtype, in which every element is 0.

    Raises:
        InvalidInput: `dtype` is not a dtype, or ONNX does not have it.
        DeviceUnavailable: This machine does not have the device.
        ValueError: A size is negative.
    """
    return Tensor(shape, device, dtype)


def ones(shape: Any, device: DeviceLike | None = None, dtype: DTypeLike = float32) -> Tensor:
    """Make a tensor of ones.

    Args:
        shape: The sizes, or one int.
        device: The device, or a name such as "CUDA"; None for the CPU.
        dtype: A constant of this module, "int" (int32), "float" (float32), or a NumPy dtype.

    Returns:
        Tensor of this shape and dtype, in which every element is 1.

    Raises:
        InvalidInput: `dtype` is not a dtype, or ONNX does not have it.
        DeviceUnavailable: This machine does not have the device.
        ValueError: A size is negative.
    """
    return Tensor(shape, device, dtype).set_value(1)


def zeros_like(t: Tensor) -> Tensor:
    """Make a tensor of zeros that has the shape of another.

    Args:
        t: Tensor of any dtype and shape.

    Returns:
        Tensor of the shape, dtype and device of t.
    """
    return _filled_like(t, 0)


def ones_like(t: Tensor) -> Tensor:
    """Make a tensor of ones that has the shape of another.

    Args:
        t: Tensor of any dtype and shape.

    Returns:
        Tensor of the shape, dtype and device of t.
    """
    return _filled_like(t, 1)


def _filled_like(t: Tensor, value: float) -> Tensor:
    filled = op.full_like(t, value)
    made = Tensor._of(filled.raw, t.device, True)
    made._origin = filled._origin
    return made


def random(shape: Any, device: DeviceLike | None = None) -> Tensor:
    """Make a tensor of uniformly distributed random numbers in [0, 1).

    Args:
        shape: The sizes, or one int.
        device: The device whose random stream is used, or a name such as "CUDA"; None for the CPU.

    Returns:
        float32 Tensor of this shape.

    Raises:
        DeviceUnavailable: This machine does not have the device.
        ValueError: A size is negative.
    """
    return Tensor(shape, device).uniform(0.0, 1.0)


def product(shape: Sequence[int]) -> int:
    """The number of elements of a shape.

    Args:
        shape: The sizes.

    Returns:
        The product of the sizes; 1 for ().
    """
    return int(np.prod(shape, dtype=np.int64))


def sizeof(dtype: DTypeLike) -> int:
    """The size of an element of a dtype.

    Args:
        dtype: A constant of this module, "int" (int32), "float" (float32), or a NumPy dtype.

    Returns:
        The number of bytes.

    Raises:
        InvalidInput: `dtype` is not a dtype, or ONNX does not have it.
    """
    return int(dtype_of(dtype).itemsize)


def contiguous(t: Tensor) -> Tensor:
    """Copy a tensor to contiguous storage.

    Args:
        t: Tensor of any dtype and shape.

    Returns:
        Tensor with the values of t, stored in row-major order.
    """
    return t.contiguous()


def reshape(t: Tensor, shape: Any) -> Tensor:
    """Reshape a tensor.

    Source: ONNX Reshape.

    Args:
        t: Tensor of any dtype and shape.
        shape: The new sizes, or one int; 0 keeps the size of t at that axis, and one -1 is inferred.

    Returns:
        Tensor of the new shape, of the dtype of t.

    Raises:
        OperatorError: The numbers of elements differ.
    """
    return t.reshape(shape)


def transpose(t: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Permute the axes of a tensor.

    Source: ONNX Transpose.

    Args:
        t: Tensor of any dtype and shape.
        axes: The axes of t in the order of the result; None to reverse them.

    Returns:
        Tensor of the dtype of t; its axis i is axis axes[i] of t.

    Raises:
        OperatorError: `axes` is not a permutation of the axes of t.
    """
    return t.transpose(axes)


def copy_data_to_from(dst: Tensor, src: Tensor, size: int, dst_offset: int = 0, src_offset: int = 0) -> None:
    """Copy consecutive elements of one tensor into another, in row-major order.

    Args:
        dst: The Tensor to write into; values are cast to its dtype.
        src: The Tensor to read.
        size: The number of elements.
        dst_offset: The index of the first element to write.
        src_offset: The index of the first element to read.

    Raises:
        InvalidInput: The elements are beyond the end of a tensor (SX337), or an operator on the tape produced `dst` (SX370).
    """
    required(dst), required(src)
    if dst_offset + size > dst.size() or src_offset + size > src.size():
        ends = f"an end at {src_offset + size} of {src.size()} in src and at {dst_offset + size} of {dst.size()} in dst"
        raise InvalidInput(f"the elements to copy must be within both tensors, got {ends}", code="SX337")
    dst._refuse_on_tape()
    with tape.no_tape():
        values = op.Slice(dst._vector(src), [src_offset], [src_offset + size], [0])
    dst._write(values, dst_offset)


def copy_from_numpy(data: Any, array: Any) -> None:
    """Write the values of an array into a tensor, in row-major order.

    Args:
        data: The Tensor to write into, or its storage `t.data`; values are cast to its dtype.
        array: An array with as many elements; its shape may differ.

    Raises:
        InvalidInput: The numbers of elements differ (SX337).
    """
    if isinstance(data, Tensor):
        data.copy_from_numpy(array)
        return
    array = values_for(np.dtype(data.dtype), array)
    if data.size != array.size:
        raise InvalidInput(f"array must have {data.size} elements, got {array.size}", code="SX337")
    device_of(data).write(data, array.reshape(data.shape))


def repeat(t: Tensor, repeats: Any, axis: int | None = None) -> Tensor:
    """Repeat each element, or each slice along an axis.

    Source: NumPy's `repeat`, as ONNX Gather.

    Args:
        t: Tensor of any dtype and shape.
        repeats: The number of repetitions, one for all or one for each.
        axis: The axis, in [-rank, rank); None to flatten t first.

    Returns:
        Tensor of the dtype of t; of rank 1 if `axis` is None.

    Raises:
        IndexError: `axis` is out of range.
        ValueError: `repeats` has another length than the axis.
    """
    return t.repeat(repeats, axis)


def concatenate(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate tensors along an axis.

    Source: ONNX Concat.

    Args:
        tensors: One or more Tensors of one dtype, whose shapes differ at `axis` at most.
        axis: The axis, in [-rank, rank).

    Returns:
        Tensor whose size at `axis` is the sum of those of the inputs, of their dtype.

    Raises:
        InvalidInput: `tensors` is not a list of Tensors (SX311).
        OperatorError: The dtypes differ, the shapes differ at another axis, or `axis` is out of range.
    """
    if not isinstance(tensors, (list, tuple)) or any(t is None for t in tensors):
        raise InvalidInput(f"tensors must be a list of Tensors, got a {type(tensors).__name__}", code="SX311")
    return op.Concat(*tensors, axis=axis)
