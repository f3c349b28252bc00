"""Descriptions of tensors in memory, memories, and the attributes of primitives."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Hashable, Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any, Self, SupportsIndex, cast

import numpy as np

from ...dtypes import DTypeLike
from ...ir.sizes import OpenSize, is_open
from .constants import (
    BINARY,
    BLOCKED,
    DTYPE_OF,
    DTYPES,
    ELTWISE,
    FORMAT_ANY,
    FORMAT_KIND_ANY,
    FPMATH,
    QUERY_DIMS,
    QUERY_DTYPE,
    QUERY_FORMAT_KIND,
    QUERY_INNER_BLOCKS,
    QUERY_NDIMS,
    QUERY_STRIDES,
    RUNTIME_DIM,
    SCRATCHPAD_USER,
)
from .loading import OneDnnError, Unimplemented, needed

_NAMED_TAGS = {
    "nwc": "acb", "ncw": "abc", "nhwc": "acdb", "nchw": "abcd", "ndhwc": "acdeb", "ncdhw": "abcde",
    "oihw": "abcd", "hwio": "cdba", "goihw": "abcde", "hwigo": "decab", "ldigo": "abcde", "ldgoi": "abdec",
    "tnc": "abc", "ntc": "bac",
    "nCw16c": "aBc16b", "nChw16c": "aBcd16b", "nCdhw16c": "aBcde16b", "nCw8c": "aBc8b", "nChw8c": "aBcd8b", "nCdhw8c": "aBcde8b",
}  # fmt: skip


def supported(dtype: DTypeLike) -> bool:
    """Whether oneDNN has this element type; an operator may still not accept it.

    Args:
        dtype: the element type.

    Returns:
        True if descriptors can have it.
    """
    return np.dtype(dtype) in DTYPES


def number(dtype: DTypeLike) -> int:
    """OneDNN's number of an element type; raises Unimplemented if it has none."""
    try:
        return DTYPES[np.dtype(dtype)]
    except KeyError:
        raise Unimplemented(3, f"element type {np.dtype(dtype)}") from None


def code(table: dict[str, int], name: str, what: str) -> int:
    """The number of a name; raises OneDnnError if the table does not have it."""
    try:
        return table[name]
    except KeyError:
        raise OneDnnError(2, f"{what} must be one of {', '.join(table)}, got {name!r}") from None


def dims(values: Sequence[SupportsIndex], length: int | None = None) -> ctypes.Array[c_int64]:
    """An array of sizes for a call; raises OneDnnError if it does not have the length that the call reads, or exceeds int64."""
    numbers = [int(v) for v in values]
    if length is not None and len(numbers) != length:
        raise OneDnnError(2, f"{length} sizes are needed, got {numbers}")
    if numbers and not (min(numbers) >= -(2**63) and max(numbers) < 2**63):
        raise Unimplemented(2, f"sizes must be 64-bit integers, got {numbers}")
    return (c_int64 * max(len(numbers), 1))(*numbers)


SIZE, REACH = 2**31 - 1, 2**47
"""The largest size of an axis, which much code of the library keeps in 32 bits; and the bytes that a process can address."""


def sizes_of(dtype: DTypeLike, shape: Sequence[SupportsIndex], strides: Sequence[int] | None = None) -> tuple[int, ...]:
    """The sizes of a tensor; raises Unimplemented if the library cannot hold one of them, or the place of an element."""
    if is_open(shape):
        raise OpenSize("its size differs between runs")
    sizes = tuple(map(int, shape))
    if not all(0 <= d <= SIZE or d == RUNTIME_DIM for d in sizes):
        raise Unimplemented(2, f"the sizes of a tensor must be from 0 to {SIZE}, got {sizes}")
    places = [d * abs(s) for d, s in zip(sizes, strides or (), strict=False) if d > 0 and s != RUNTIME_DIM]
    if (max(places, default=0) if strides else math.prod(d for d in sizes if d > 0)) * np.dtype(dtype).itemsize >= REACH:
        raise Unimplemented(2, f"a tensor must have fewer than {REACH} bytes, got the sizes {sizes} and the strides {strides}")
    return sizes


def content(argument: Any) -> Hashable:
    """An argument of a call as a part of a key: the elements of an array, and -0.0 apart from 0.0."""
    if isinstance(argument, float):
        return repr(argument)
    if isinstance(argument, c_void_p):
        return argument.value
    if not isinstance(argument, ctypes.Array):
        return cast(Hashable, argument)
    kept: tuple[Owner, ...] | None = getattr(argument, "kept", None)  # of handles
    return type(argument), bytes(argument) if kept is None else kept


class Owned:
    """A C object of oneDNN, destroyed with the last reference to this one.

    Only `Owner` refers to it, strongly.  Python calls `__del__` before it clears weak references, and while C code destroys the
    object other threads run: a weak reference could still return what is half destroyed.
    """

    __slots__ = ("_destroy", "_handle")

    def __init__(self, handle: int, destroy: Callable[[int], Any]) -> None:
        self._handle = handle
        self._destroy = destroy

    def __del__(self) -> None:
        self._destroy(self._handle)


class Owner:
    """The owner of an object of oneDNN.  It cannot be copied, and belongs to its process.

    It has no `__del__`, and may be referred to weakly; see `Owned`.

    Attributes:
        handle: the address of the C object.
    """

    __slots__ = ("__weakref__", "_owned", "handle")

    def __init__(self, handle: int, destroy: Callable[[int], Any]) -> None:
        self._owned = Owned(handle, destroy)
        self.handle = handle

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} belongs to this process: it cannot be copied or pickled")


class MemoryDesc(Owner):
    """Element type, shape and layout of a tensor.  Immutable, and a key of dictionaries: equal content, equal descriptors.

    Build one with `of`, `any` or `tagged`, or query one from a primitive.

    Attributes:
        dtype: the element type.
        shape: the sizes; of a scalar (1,).
    """

    __slots__ = ("_nbytes", "dtype", "shape")

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __init__(self, handle: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        super().__init__(handle, needed().functions["memory_desc_destroy"])
        self.dtype = dtype
        self.shape = shape
        self._nbytes = int(needed().functions["memory_desc_get_size"](handle))

    @classmethod
    def of(cls, dtype: DTypeLike, shape: Sequence[int], strides: Sequence[int] | None = None) -> Self:
        """Describe a tensor by its strides.

        Args:
            dtype: the element type.
            shape: the sizes; () is described as (1,).
            strides: the distance of neighbours along each axis, in elements; None for C order.

        Returns:
            The description.

        Raises:
            Unimplemented: oneDNN does not have the element type, or not so many axes, or cannot hold a number.
        """
        kind = number(dtype)
        shape = sizes_of(dtype, shape, strides) or (1,)
        if strides is None:
            strides = _dense(shape, range(len(shape)))
        elif not strides and len(shape) == 1:
            strides = (1,)
        n = len(shape)
        made = needed().create("memory_desc_create_with_strides", n, dims(shape), kind, dims(strides, n))
        return cls(made, np.dtype(dtype), shape)

    @classmethod
    def any(cls, dtype: DTypeLike, shape: Sequence[int]) -> Self:
        """Describe a tensor whose layout a primitive shall choose.

        Args:
            dtype: the element type.
            shape: the sizes; () is described as (1,).

        Returns:
            The description.  Memories need the one that `Primitive.query` returns.

        Raises:
            Unimplemented: oneDNN does not have the element type, or not so many axes, or cannot hold a number.
        """
        shape = sizes_of(dtype, shape) or (1,)
        made = needed().create("memory_desc_create_with_tag", len(shape), dims(shape), number(dtype), FORMAT_ANY)
        return cls(made, np.dtype(dtype), shape)

    @classmethod
    def tagged(cls, dtype: DTypeLike, shape: Sequence[int], tag: str) -> Self:
        """Describe a tensor by the name of its layout.

        Args:
            dtype: the element type.
            shape: the sizes.
            tag: the axes as letters, outermost first ("acdb"), a blocked layout ("aBcd16b"), or a usual name ("nhwc", "nChw16c").

        Returns:
            The description.

        Raises:
            OneDnnError: the tag does not fit the number of axes.
            Unimplemented: the library does not have the layout.
        """
        shape = sizes_of(dtype, shape)
        tag = _NAMED_TAGS.get(tag, tag)
        order = [ord(letter) - ord("a") for letter in tag]
        if sorted(order) == list(range(len(shape))):
            return cls.of(dtype, shape, _dense(shape, order))
        if not re.fullmatch(r"[a-lA-L]+(\d+[a-l])+", tag):
            raise OneDnnError(2, f"a layout of {len(shape)} axes is needed, got {tag!r}")
        text = tag.encode()
        made = needed().create("memory_desc_create_with_string_tag", len(shape), dims(shape), number(dtype), text)
        return cls(made, np.dtype(dtype), shape)

    @classmethod
    def clone(cls, handle: int) -> Self:
        """A copy of a description that another object owns.

        Args:
            handle: the handle of that description.

        Returns:
            The copy.
        """
        lib = needed()
        rank, kind, sizes = c_int(), c_int(), c_void_p()
        for what, out in (QUERY_NDIMS, rank), (QUERY_DTYPE, kind), (QUERY_DIMS, sizes):
            lib.call("memory_desc_query", handle, what, ctypes.byref(out))
        shape = tuple((c_int64 * rank.value).from_address(sizes.value or 0)) if rank.value else ()
        return cls(lib.create("memory_desc_clone", handle), DTYPE_OF.get(kind.value, np.dtype(np.void)), shape)

    @property
    def is_any(self) -> bool:
        """Whether the primitive chooses the layout."""
        kind = c_int()
        needed().call("memory_desc_query", self.handle, QUERY_FORMAT_KIND, ctypes.byref(kind))
        return kind.value == FORMAT_KIND_ANY

    @property
    def nbytes(self) -> int:
        """The bytes that a buffer needs; layouts in blocks need more than the elements.  0 for `any`.

        With given strides it is the largest product of a size and its stride: a view into a larger buffer uses less.

        Raises:
            OneDnnError: a size is known only at run time.
        """
        if self._nbytes >= 2**63:
            raise OneDnnError(2, f"the bytes of sizes that are known at run time {self.shape}")
        return self._nbytes

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The distance of neighbours along each axis, in elements; None for `any` and layouts in blocks."""
        lib, kind, blocks, address = needed(), c_int(), c_int(), c_void_p()
        lib.call("memory_desc_query", self.handle, QUERY_FORMAT_KIND, ctypes.byref(kind))
        if kind.value != BLOCKED:
            return None
        lib.call("memory_desc_query", self.handle, QUERY_INNER_BLOCKS, ctypes.byref(blocks))
        if blocks.value:
            return None
        lib.call("memory_desc_query", self.handle, QUERY_STRIDES, ctypes.byref(address))
        return tuple((c_int64 * len(self.shape)).from_address(address.value or 0))

    def reshaped(self, shape: Sequence[int]) -> MemoryDesc:
        """Describe the same buffer with other sizes.

        Args:
            shape: the sizes, of the same number of elements.

        Returns:
            The description.

        Raises:
            Unimplemented: the layout does not permit it without a copy.
        """
        shape = sizes_of(self.dtype, shape)
        made = needed().create("memory_desc_reshape", self.handle, len(shape), dims(shape))
        return MemoryDesc(made, self.dtype, shape)

    def submemory(self, shape: Sequence[int], offsets: Sequence[int]) -> MemoryDesc:
        """Describe a box within the same buffer; the memory keeps the address of the whole.

        Args:
            shape: the sizes of the box.
            offsets: its first element.

        Returns:
            The description.

        Raises:
            Unimplemented: the box does not fit the blocks of the layout.
        """
        n = len(self.shape)
        box, first = dims(shape, n), dims(offsets, n)
        if not all(0 <= a <= d - b for a, b, d in zip(first, box, self.shape, strict=False)):
            raise OneDnnError(2, f"a box must be within the sizes {self.shape}, got {tuple(shape)} at {tuple(offsets)}")
        made = needed().create("memory_desc_create_submemory", self.handle, box, first)
        return MemoryDesc(made, self.dtype, tuple(map(int, shape)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MemoryDesc):
            return NotImplemented
        if (self.shape, self.dtype, self._nbytes) != (other.shape, other.dtype, other._nbytes):
            return False
        return bool(needed().functions["memory_desc_equal"](self.handle, other.handle))

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self._nbytes))

    def __repr__(self) -> str:
        return f"MemoryDesc({self.dtype}, {self.shape}, strides={self.strides}, nbytes={self._nbytes})"


def _dense(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """The strides of a tensor without gaps, its axes given from the outermost to the innermost."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step = RUNTIME_DIM if RUNTIME_DIM in (step, shape[axis]) else step * max(shape[axis], 1)
    return strides


class Memory(Owner):
    """A buffer with its description.  The buffer belongs to the caller, who keeps it alive.

    Args:
        md: the description.
        address: the address of the buffer; best a multiple of 64.

    Attributes:
        md: the description.
    """

    __slots__ = ("md",)

    def __init__(self, md: MemoryDesc, address: int) -> None:
        lib = needed()
        super().__init__(lib.create("memory_create", md.handle, lib.engine, address), lib.functions["memory_destroy"])
        self.md = md

    @property
    def address(self) -> int:
        """The address of the buffer; 0 for none."""
        out = c_void_p()
        needed().call("memory_get_data_handle", self.handle, ctypes.byref(out))
        return out.value or 0

    def move(self, address: int) -> None:
        """Use another buffer.

        Args:
            address: its address.
        """
        needed().call("memory_set_data_handle", self.handle, address)


class Attributes(Owner):
    """What a primitive does besides its operation: post-ops in their order, scales, zero points, and the mode of arithmetic.

    The scratchpad always belongs to the caller (`Primitive.scratchpad_nbytes`): primitives can then run on any thread.  A
    primitive copies the attributes; later changes do not affect it.  The `append_` and `set_` methods return the attributes.

    Args:
        fpmath: "strict", or the type to which a convolution or product may round float32: "bf16", "f16", "tf32", "any".

    Attributes:
        fpmath: the mode of arithmetic.
        operands: the tensors of binary post-ops.
        adds: whether a post-op adds the previous content of the destination.
        shifted: the arguments that have a zero point.
    """

    __slots__ = ("_content", "_post_ops", "adds", "fpmath", "operands", "shifted")

    def __init__(self, *, fpmath: str = "strict") -> None:
        lib = needed()
        super().__init__(lib.create("primitive_attr_create"), lib.functions["primitive_attr_destroy"])
        lib.call("primitive_attr_set_scratchpad_mode", self.handle, SCRATCHPAD_USER)
        self.fpmath = fpmath
        if fpmath != "strict":
            lib.call("primitive_attr_set_fpmath_mode", self.handle, code(FPMATH, fpmath, "fpmath"))
        self._post_ops: Owner | None = None
        self.operands: list[MemoryDesc] = []
        self.adds = False
        self.shifted: set[int] = set()
        self._content: list[Any] = [fpmath]

    @property
    def content(self) -> tuple[Any, ...]:
        """The mode and what was appended and set, in order: a key of dictionaries, equal for equal attributes."""
        return tuple(self._content)

    def _append(self, name: str, *arguments: Any) -> Self:
        lib = needed()
        self._content.append((name, *map(content, arguments)))
        if self._post_ops is None:
            self._post_ops = Owner(lib.create("post_ops_create"), lib.functions["post_ops_destroy"])
        plain = [a.handle if isinstance(a, Owner) else a for a in arguments]
        lib.call(f"post_ops_append_{name}", self._post_ops.handle, *plain)
        lib.call("primitive_attr_set_post_ops", self.handle, self._post_ops.handle)
        return self

    def __len__(self) -> int:
        """The number of post-ops."""
        return 0 if self._post_ops is None else int(needed().functions["post_ops_len"](self._post_ops.handle))

    def __bool__(self) -> bool:
        return True

    def append_sum(self, scale: float = 1.0, zero_point: int = 0, dtype: DTypeLike | None = None) -> Self:
        """Add the previous content of the destination: result + scale * (dst - zero_point).

        Args:
            scale: the factor.
            zero_point: the zero point of the previous content.
            dtype: the type as which the previous content is read, of the same size; None for that of the destination.

        Returns:
            These attributes.
        """
        self.adds = True
        return self._append("sum", scale, zero_point, 0 if dtype is None else number(dtype))

    def append_eltwise(self, algorithm: str, alpha: float = 0.0, beta: float = 0.0) -> Self:
        """Apply a function to each element.

        Args:
            algorithm: the name of the function, a key of `constants.ELTWISE`.
            alpha: its first parameter.
            beta: its second parameter.

        Returns:
            These attributes.
        """
        return self._append("eltwise", code(ELTWISE, algorithm, "algorithm"), alpha, beta)

    def append_binary(self, algorithm: str, md: MemoryDesc) -> Self:
        """Combine each element with one of another tensor, given at execution as `args.post_op(i)`.

        Args:
            algorithm: the name of the function, a key of `constants.BINARY`.
            md: the other tensor, of the rank of the destination; axes of size 1 are broadcast.

        Returns:
            These attributes.
        """
        self.operands.append(md)
        return self._append("binary", code(BINARY, algorithm, "algorithm"), md)

    def append_prelu(self, mask: int) -> Self:
        """Multiply negative elements with weights, given at execution as `args.post_op(i, WEIGHTS)`.

        Args:
            mask: bit k is set if the weights vary along axis k.

        Returns:
            These attributes.
        """
        return self._append("prelu", mask)

    def set_scales(self, arg: int, mask: int) -> Self:
        """Scale an argument; the scales, float32, are given at execution as `args.scales(arg)`.

        Args:
            arg: SRC, WEIGHTS or DST.
            mask: bit k is set if the scales vary along axis k.

        Returns:
            These attributes.
        """
        needed().call("primitive_attr_set_scales_mask", self.handle, arg, mask)
        self._content.append(("scales", arg, mask))
        return self

    def set_zero_points(self, arg: int, mask: int) -> Self:
        """Subtract a zero point from an argument, given at execution, int32, as `args.zero_points(arg)`.

        Args:
            arg: SRC, WEIGHTS or DST.
            mask: bit k is set if the zero points vary along axis k.

        Returns:
            These attributes.
        """
        needed().call("primitive_attr_set_zero_points_mask", self.handle, arg, mask)
        self.shifted.add(arg)
        self._content.append(("zero points", arg, mask))
        return self
