"""Primitives of oneDNN: one function creates each kind, `bind` makes a call of one.

Numbers are oneDNN's: a dilation of 0 is a dense window (ONNX's dilation minus 1); paddings are of the spatial axes, in elements;
the weights of a convolution with groups have the shape (groups, outputs / groups, inputs / groups, *window).

Every function has the parameters `attributes` (None for none) and `allow_reference`, and raises `Unimplemented` if oneDNN refuses
the descriptors, if it has only its slow reference code for them (unless `allow_reference`), or if it would compute a product of
int8 values without the instructions that make it exact (VNNI, AMX): other code saturates sums of pairs in 16 bits.  The recurrent
primitives have no `allow_reference`: what oneDNN 3.2 names "ref" there are its fast products and generated gates.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from ctypes import c_char_p, c_float, c_int, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .constants import (
    BINARY,
    CONVOLUTION,
    DECONVOLUTION,
    DIRECTION,
    DST,
    ELTWISE,
    FROM,
    LRN,
    POOLING,
    PROP,
    QUERY,
    QUERY_IMPLEMENTATION,
    REDUCTION,
    RESAMPLING,
    SCRATCHPAD,
    SOFTMAX,
    TO,
    WEIGHTS,
    WORKSPACE,
)
from .loading import OneDnnError, Unimplemented, needed, threads, using_threads
from .memory import Attributes, Memory, MemoryDesc, Owner, code, dims

_INT8 = (np.dtype(np.int8), np.dtype(np.uint8))
_EXACT_INT8 = ("vnni", "amx")


class Primitive(Owner):
    """A compiled operation for fixed descriptors.

    Args:
        kind: the operation.
        pd: the handle of its descriptor, which the primitive takes over.

    Attributes:
        kind: the operation, "convolution_forward".
        implementation: the name of the chosen code, "brgconv:avx512_core".
        scratchpad_nbytes: the bytes that each run needs as argument SCRATCHPAD.
        workspace_nbytes: the bytes that a forward primitive passes to its backward one as argument WORKSPACE.
        threads: the number of threads at the creation; runs with another number are slow.
        executable: the handle for `Library.execute`.
    """

    __slots__ = (
        "_destroy_executable",
        "_recipe",
        "_single",
        "executable",
        "implementation",
        "kind",
        "scratchpad_nbytes",
        "threads",
        "workspace_nbytes",
    )

    def __init__(self, kind: str, pd: int) -> None:
        lib = needed()
        super().__init__(pd, lib.functions["primitive_desc_destroy"])
        self.kind = kind
        name = c_char_p()
        lib.call("primitive_desc_query", pd, QUERY_IMPLEMENTATION, 0, ctypes.byref(name))
        self.implementation = (name.value or b"").decode()
        self.scratchpad_nbytes = self._nbytes("scratchpad")
        self.workspace_nbytes = self._nbytes("workspace")
        self.threads = threads()
        self.executable = 0  # see `_compile`
        self._recipe: _Recipe | None = None
        self._single: Primitive | None = None

    def _nbytes(self, what: str) -> int:
        functions = needed().functions
        md = functions["primitive_desc_query_md"](self.handle, QUERY[what], 0)
        return int(functions["memory_desc_get_size"](md)) if md else 0

    def _compile(self) -> None:
        lib = needed()
        self.executable = lib.create("primitive_create", self.handle)
        self._destroy_executable = lib.functions["primitive_destroy"]

    def __del__(self) -> None:
        if getattr(self, "executable", 0):
            self._destroy_executable(self.executable)
        super().__del__()

    def single(self, memories: Mapping[int, Memory]) -> Primitive | None:
        """This operation for one thread, on memories of the same layouts, except that the weights may need another one.

        Args:
            memories: the memory of each argument.

        Returns:
            The primitive, which is created once; None if oneDNN has none for these layouts.
        """
        if self.threads == 1:
            return self
        if self._single is None and self._recipe is not None:
            recipe, self._recipe = self._recipe, None
            for arguments in (recipe.arguments, self._settled(recipe.arguments, memories)):
                try:
                    with using_threads(1):
                        made = create(
                            self.kind, *arguments, attributes=recipe.attributes, allow_reference=recipe.allow_reference,
                            inputs=recipe.inputs,
                        )  # fmt: skip
                except OneDnnError:
                    continue
                others = self._other_layouts(made, memories)
                if not others or (others == [WEIGHTS] and self._single is None):
                    self._single = made
                if not others:
                    break
        return self._single

    def _layout(self, arg: int) -> int:
        """The handle of the description that the primitive has for an argument; 0 for none.  It belongs to the primitive."""
        return int(needed().functions["primitive_desc_query_md"](self.handle, QUERY["argument"], arg) or 0)

    def _other_layouts(self, other: Primitive, memories: Mapping[int, Memory]) -> list[int]:
        """The arguments of which another primitive needs another layout."""
        equal = needed().functions["memory_desc_equal"]
        pairs = [(arg, self._layout(arg), other._layout(arg)) for arg in memories if arg != SCRATCHPAD]
        return [arg for arg, a, b in pairs if a != b and not (a and b and equal(a, b))]

    def _settled(self, arguments: Sequence[Any], memories: Mapping[int, Memory]) -> list[Any]:
        """Arguments in which the layouts that oneDNN has chosen replace those that were left to it."""
        places = sorted((arg for arg in memories if arg != SCRATCHPAD), key=lambda arg: (arg == DST, arg))
        chosen: dict[Any, list[MemoryDesc]] = {}
        for handle in filter(None, map(self._layout, places)):
            md = MemoryDesc.clone(handle)
            chosen.setdefault((md.shape, md.dtype), []).append(md)
        made = []
        for a in arguments:
            found = chosen.get((a.shape, a.dtype)) if isinstance(a, MemoryDesc) else None
            md = found.pop(0) if found else a
            made.append(md if isinstance(a, MemoryDesc) and a.is_any else a)
        return made

    def query(self, what: str, index: int = 0) -> MemoryDesc:
        """The descriptor of an argument, with the layout that the primitive chose.

        Args:
            what: "src", "weights", "dst", "workspace", "scratchpad", "diff_src", "diff_weights", "diff_dst", or "argument".
            index: which of several; the bias is weights 1.  Of "argument", the number of the argument.

        Returns:
            The descriptor.

        Raises:
            OneDnnError: the primitive does not have the argument.
        """
        lib = needed()
        md = lib.functions["primitive_desc_query_md"](self.handle, code(QUERY, what, "what"), index)
        found = MemoryDesc.clone(md) if md else None
        if found is None or not found.shape:
            raise OneDnnError(2, f"{self.kind} has no {what} {index}")
        return found

    def __repr__(self) -> str:
        return f"<{self.kind} {self.implementation}>"


@dataclass(frozen=True, eq=False)
class _Recipe:
    """What a primitive was created from."""

    arguments: tuple[Any, ...]
    attributes: Attributes
    allow_reference: bool
    inputs: tuple[MemoryDesc, ...]


class _Kept(NamedTuple):
    """What the arguments of a call keep."""

    primitive: Primitive
    memories: dict[int, Memory]
    constants: frozenset[int]


class Bound:
    """A primitive with its memories, ready to run.

    Args:
        primitive: the primitive.
        memories: the memory of each argument.
        constants: the arguments whose contents no run changes.

    Attributes:
        primitive: the primitive.
        memories: the memory of each argument.
        args: the arguments for `Library.execute`; they keep everything alive but the buffers.
    """

    __slots__ = ("args", "memories", "primitive")

    def __init__(self, primitive: Primitive, memories: Mapping[int, Memory], constants: Collection[int] = ()) -> None:
        self.primitive = primitive
        self.memories = dict(memories)
        array = (_Argument * len(self.memories))(*[_Argument(arg, memory.handle) for arg, memory in self.memories.items()])
        array.kept = _Kept(primitive, self.memories, frozenset(constants))  # type: ignore[attr-defined]  # ctypes arrays take attributes
        self.args = (c_void_p(primitive.executable), needed().stream, c_int(len(self.memories)), array)

    def run(self) -> None:
        """Run the primitive once, in this thread, and wait for the result.

        Raises:
            OneDnnError: the library reported a failure.
        """
        lib = needed()
        status = lib.execute(*self.args)
        if status:
            raise OneDnnError(status, f"execute {self.primitive.kind}")


class _Argument(ctypes.Structure):
    _fields_ = [("arg", c_int), ("memory", c_void_p)]


def threads_of(arguments: Sequence[Any]) -> int:
    """The number of threads that a call needs: that for which its primitive was created.

    Args:
        arguments: the arguments of the call.

    Returns:
        The number; 0 if any will do: the call is not one of a `Bound`, or its code keeps to the one thread of its creation, as
        that of products and convolutions does.
    """
    kept: _Kept | None = getattr(arguments[-1], "kept", None) if arguments else None
    if kept is None:
        return 0
    primitive = kept.primitive
    return 0 if primitive.threads == 1 and primitive.implementation.startswith("brg") else primitive.threads


def single_threaded(arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """The arguments of a call on one thread, with the same memories as those of a call on several.

    Args:
        arguments: the arguments of the call.

    Returns:
        The arguments, made once; the same ones if they need one thread or are not those of a `Bound`; None if oneDNN has no
        code for one thread with these layouts.
    """
    array = arguments[-1] if arguments else None
    kept: _Kept | None = getattr(array, "kept", None)
    if kept is None or kept.primitive.threads == 1:
        return tuple(arguments)
    cache = vars(array)
    if "single" not in cache:
        cache["single"] = None
        made = kept.primitive.single(kept.memories)
        with suppress(OneDnnError):  # no copy into the other layout
            cache["single"] = None if made is None else _narrowed(made, kept, tuple(arguments))
    found: tuple[Any, ...] | None = cache["single"]
    return found


def _narrowed(made: Primitive, kept: _Kept, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments for `made`, with the memories of a call; with a scratchpad of its own if that one is too small.

    Weights that `made` needs in another layout are copied now; None if they differ between runs.
    """
    others = kept.primitive._other_layouts(made, kept.memories)
    if not others and made.scratchpad_nbytes <= kept.primitive.scratchpad_nbytes:
        return (_Handle.of(made), *arguments[1:])
    if not kept.constants.issuperset(others):
        return None
    own = {arg: _Scratch(made.query("argument", arg)) for arg in others}
    for arg, memory in own.items():
        with using_threads(1):
            copy = reorder(kept.memories[arg].md, memory.md)
        need = {SCRATCHPAD: _Scratch(copy.query("scratchpad"))} if copy.scratchpad_nbytes else {}
        bind(copy, {FROM: kept.memories[arg], TO: memory, **need}).run()
    if made.scratchpad_nbytes:
        own[SCRATCHPAD] = _Scratch(made.query("scratchpad"))
    return Bound(made, {**kept.memories, **own}).args


class _Scratch(Memory):
    """A memory with a buffer of its own."""

    def __init__(self, md: MemoryDesc) -> None:
        self.buffer = np.empty(md.nbytes + 64, np.uint8)
        super().__init__(md, (int(self.buffer.ctypes.data) + 63) & ~63)


class _Handle(c_void_p):
    """A handle that keeps its primitive."""

    kept: Primitive

    @classmethod
    def of(cls, primitive: Primitive) -> _Handle:
        made = cls(primitive.executable)
        made.kept = primitive
        return made


def bind(
    primitive: Primitive, arguments: Mapping[int, tuple[MemoryDesc, int] | Memory], constants: Collection[int] = ()
) -> Bound:
    """Give a primitive its memories.

    Args:
        primitive: the primitive.
        arguments: for each argument (SRC, WEIGHTS, ...) its descriptor and the address of its buffer, or a memory.  The
            descriptors must be those of the primitive.
        constants: the arguments whose contents no run changes.

    Returns:
        The call; keep it, and the buffers, as long as it may run.

    Raises:
        OneDnnError: the scratchpad or the workspace that the primitive needs is absent.
    """
    for arg, nbytes in (SCRATCHPAD, primitive.scratchpad_nbytes), (WORKSPACE, primitive.workspace_nbytes):
        if nbytes and arg not in arguments:
            raise OneDnnError(2, f"bind {primitive.kind} without argument {arg} of {nbytes} bytes")
    memories = {arg: m if isinstance(m, Memory) else Memory(*m) for arg, m in arguments.items()}
    return Bound(primitive, memories, constants)


def create(
    kind: str, *arguments: Any, attributes: Attributes | None, allow_reference: bool, inputs: Sequence[MemoryDesc] = ()
) -> Primitive:
    """Create a primitive, unless its code is slow or not exact.  `inputs` are the factors of a product."""
    lib = needed()
    attributes = attributes or Attributes()
    pd = lib.create(f"{kind}_primitive_desc_create", *[_plain(a) for a in arguments], attributes.handle)
    made = Primitive(kind, pd)
    if made.implementation.startswith("ref") and not allow_reference:
        raise Unimplemented(3, f"{kind} only as slow reference code ({made.implementation})")
    exact = any(text in made.implementation for text in _EXACT_INT8)
    if inputs and not exact and any(md.dtype in _INT8 for md in inputs):
        raise Unimplemented(3, f"{kind} of int8 values exactly ({made.implementation}, on {lib.isa})")
    made._compile()
    if made.threads > 1:
        made._recipe = _Recipe(arguments, attributes, allow_reference, tuple(inputs))
    return made


def _plain(value: Any) -> Any:
    return value.handle if isinstance(value, Owner) else value


def _mds(descriptors: Sequence[MemoryDesc]) -> ctypes.Array[c_void_p]:
    made = (c_void_p * len(descriptors))(*[d.handle for d in descriptors])
    made.kept = tuple(descriptors)  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return made


def _floats(values: Sequence[float] | None, length: int) -> ctypes.Array[c_float] | None:
    """An array of numbers for a call; raises OneDnnError if it does not have the length that the call reads."""
    if values is None:
        return None
    if len(values) != length:
        raise OneDnnError(2, f"{length} numbers are needed, got {list(values)}")
    return (c_float * length)(*values)


def window(src: MemoryDesc, *sizes: Sequence[int]) -> list[Any]:
    """The sizes of a window, one for each spatial axis."""
    return [dims(s, len(src.shape) - 2) for s in sizes]


def convolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    attributes: Attributes | None = None,
    prop: str = "inference",
    algorithm: str = "direct",
    allow_reference: bool = False,
) -> Primitive:
    """A convolution (ONNX's Conv).

    Args:
        src: (batch, channels, *sizes).
        weights: (outputs, channels, *window), or with groups (groups, outputs / groups, channels / groups, *window).
        bias: (outputs,), or None.
        dst: (batch, outputs, *sizes).
        strides: the steps of the window.
        dilations: the gaps within the window; 0 for a dense one.
        pads_begin: the padding before each axis.
        pads_end: the padding after each axis.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        algorithm: "direct", "winograd" or "auto".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast and exact code for it.
    """
    return create(
        "convolution_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(CONVOLUTION, algorithm, "algorithm"),
        src,
        weights,
        bias,
        dst,
        *window(src, strides, dilations, pads_begin, pads_end),
        attributes=attributes,
        allow_reference=allow_reference,
        inputs=(src, weights),
    )


def matmul(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    attributes: Attributes | None = None,
    *,
    allow_reference: bool = False,
) -> Primitive:
    """A product of matrices, or of batches of them (ONNX's MatMul).

    Args:
        src: (*batch, m, k).
        weights: (*batch, k, n); axes of the batch have size 1 where they are broadcast.
        bias: of the rank of dst, (1, n), or None.
        dst: (*batch, m, n).
        attributes: post-ops, scales and mode.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast and exact code for it.
    """
    return create(
        "matmul",
        needed().engine,
        src,
        weights,
        bias,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
        inputs=(src, weights),
    )


def pooling(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A pooling.  The maximum skips NaN, where NumPy propagates it.

    Args:
        src: (batch, channels, *sizes).
        dst: (batch, channels, *sizes).
        algorithm: "max", "avg_include_padding" or "avg_exclude_padding".
        kernel: the sizes of the window.
        strides: the steps of the window.
        dilations: the gaps within the window; 0 for a dense one.
        pads_begin: the padding before each axis.
        pads_end: the padding after each axis.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "pooling_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(POOLING, algorithm, "algorithm"),
        src,
        dst,
        *window(src, strides, kernel, dilations, pads_begin, pads_end),
        attributes=attributes,
        allow_reference=allow_reference,
    )


def layer_normalization(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    epsilon: float,
    flags: int = 0,
    stat: MemoryDesc | None = None,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A normalization over the last axis.

    Args:
        src: (*batch, features).
        dst: (*batch, features).
        epsilon: is added to the variance.
        flags: USE_SCALE, USE_SHIFT, USE_GLOBAL_STATS.
        stat: (*batch), mean and variance; None for C order.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training"; the latter writes mean and variance.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it, or there are gaps between the features, which its code reads and writes.
    """
    for md in (src, dst):
        if md.nbytes and md.nbytes != math.prod(md.shape) * md.dtype.itemsize:
            raise Unimplemented(3, f"layer_normalization with gaps ({md})")
    return create(
        "layer_normalization_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        dst,
        stat,
        epsilon,
        flags,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def softmax(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    axis: int,
    log: bool = False,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A softmax along one axis, which should be the innermost in memory.

    Args:
        src: the logits.
        dst: the probabilities, of the same shape.
        axis: the axis.
        log: return the logarithm.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "softmax_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        SOFTMAX["log" if log else "accurate"],
        src,
        dst,
        axis,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def eltwise(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    alpha: float = 0.0,
    beta: float = 0.0,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A function of each element.  "relu" turns NaN into 0.

    Args:
        src: the input.
        dst: the output, of the same shape; it may be the same memory.
        algorithm: the name of the function, a key of `constants.ELTWISE`.
        alpha: its first parameter.
        beta: its second parameter.
        attributes: post-ops, scales and mode; a binary post-op makes it slow: begin such a chain with `binary`.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "eltwise_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(ELTWISE, algorithm, "algorithm"),
        src,
        dst,
        alpha,
        beta,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def binary(
    a: MemoryDesc,
    b: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """A function of two tensors.

    Args:
        a: the first tensor.
        b: the second tensor, of the same rank; axes of size 1 are broadcast.
        dst: the output.
        algorithm: the name of the function, a key of `constants.BINARY`.
        attributes: post-ops, scales and mode.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it, or only code that is wrong: version 3.2 reads the operand of a post-op
            with one value for each channel at wrong places if there are several samples, and all other axes have size 1.
    """
    shape, operands = dst.shape, attributes.operands if attributes is not None else []
    flat = len(shape) > 2 and shape[0] > 1 < shape[1] and set(shape[2:]) == {1}
    if flat and any(o[0] == 1 < o[1] for o in operands):
        raise Unimplemented(3, "binary with a post-op of one value for each channel of samples without further axes")
    return create(
        "binary",
        needed().engine,
        code(BINARY, algorithm, "algorithm"),
        a,
        b,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def reorder(
    src: MemoryDesc, dst: MemoryDesc, *, attributes: Attributes | None = None, allow_reference: bool = False
) -> Primitive:
    """A copy into another layout or element type.

    Args:
        src: the source, argument FROM.
        dst: the destination, argument TO.
        attributes: post-ops, scales and mode.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    engine = needed().engine
    return create("reorder", src, engine, dst, engine, attributes=attributes, allow_reference=allow_reference)


def deconvolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    algorithm: str = "direct",
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A transposed convolution (ONNX's ConvTranspose, whose weights have their first two axes exchanged).

    Args:
        src: (batch, channels, *sizes).
        weights: (outputs, channels, *window), or with groups (groups, outputs / groups, channels / groups, *window).
        bias: (outputs,), or None.
        dst: (batch, outputs, *sizes).
        strides: the steps of the window.
        dilations: the gaps within the window; 0 for a dense one.
        pads_begin: the padding before each axis.
        pads_end: the padding after each axis.
        algorithm: "direct" or "winograd".
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast and exact code for it.
    """
    return create(
        "deconvolution_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(DECONVOLUTION, algorithm, "algorithm"),
        src,
        weights,
        bias,
        dst,
        *window(src, strides, dilations, pads_begin, pads_end),
        attributes=attributes,
        allow_reference=allow_reference,
        inputs=(src, weights),
    )


def inner_product(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A product with transposed weights (ONNX's Gemm with transB).

    Args:
        src: (batch, *features).
        weights: (outputs, *features).
        bias: (outputs,), or None.
        dst: (batch, outputs).
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast and exact code for it.
    """
    return create(
        "inner_product_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        weights,
        bias,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
        inputs=(src, weights),
    )


def batch_normalization(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    epsilon: float,
    flags: int = 0,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A normalization of each channel, over all other axes.

    Args:
        src: (batch, channels, *sizes).
        dst: (batch, channels, *sizes).
        epsilon: is added to the variance.
        flags: USE_GLOBAL_STATS (mean and variance are inputs), USE_SCALE, USE_SHIFT, FUSE_NORM_RELU, FUSE_NORM_ADD_RELU.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "batch_normalization_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        dst,
        epsilon,
        flags,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def lrn(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    size: int,
    alpha: float,
    beta: float,
    k: float,
    algorithm: str = "across_channels",
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A local response normalization, with ONNX's alpha.

    Args:
        src: (batch, channels, *sizes).
        dst: (batch, channels, *sizes).
        size: the number of elements that are summed.
        alpha: the factor of the sum of squares.
        beta: the exponent.
        k: is added to the sum.
        algorithm: "across_channels" or "within_channel".
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "lrn_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(LRN, algorithm, "algorithm"),
        src,
        dst,
        size,
        alpha,
        beta,
        k,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def reduction(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    p: float = 0.0,
    epsilon: float = 0.0,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """A reduction of some axes.

    Args:
        src: the input.
        dst: the output, of the same rank; reduced axes have size 1.
        algorithm: the name of the function, a key of `constants.REDUCTION`.
        p: the order of a norm.
        epsilon: the term or the bound of a norm.
        attributes: post-ops, scales and mode.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "reduction",
        needed().engine,
        code(REDUCTION, algorithm, "algorithm"),
        src,
        dst,
        p,
        epsilon,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def resampling(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    factors: Sequence[float] | None = None,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A resize with half pixels.

    Args:
        src: (batch, channels, *sizes).
        dst: (batch, channels, *sizes).
        algorithm: "nearest" or "linear".
        factors: the ratio of the sizes for each spatial axis; None to compute it from the sizes.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "resampling_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(RESAMPLING, algorithm, "algorithm"),
        _floats(factors, len(src.shape) - 2),
        src,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def prelu(
    src: MemoryDesc,
    weights: MemoryDesc,
    dst: MemoryDesc,
    *,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """Negative elements multiplied with weights (ONNX's PRelu).

    Args:
        src: the input.
        weights: the slopes, of the same rank; axes of size 1 are broadcast.
        dst: the output.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "prelu_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        weights,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def concat(
    dst: MemoryDesc | None,
    axis: int,
    srcs: Sequence[MemoryDesc],
    *,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """Tensors joined along an axis; source i is argument MULTIPLE_SRC + i.

    Args:
        dst: the output; None to choose its layout (`query`).
        axis: the axis.
        srcs: the inputs.
        attributes: post-ops, scales and mode.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "concat",
        needed().engine,
        dst,
        len(srcs),
        axis,
        _mds(srcs),
        attributes=attributes,
        allow_reference=allow_reference,
    )


def sum_(
    dst: MemoryDesc | None,
    scales: Sequence[float],
    srcs: Sequence[MemoryDesc],
    *,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """A weighted sum of tensors of one shape; source i is argument MULTIPLE_SRC + i.

    Args:
        dst: the output, which may be the memory of source 0; None to choose its layout (`query`).
        scales: the factor of each input.
        srcs: the inputs.
        attributes: post-ops, scales and mode.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "sum",
        needed().engine,
        dst,
        len(srcs),
        _floats(scales, len(srcs)),
        _mds(srcs),
        attributes=attributes,
        allow_reference=allow_reference,
    )


def shuffle(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    axis: int,
    group_size: int,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """An axis split into (group_size, rest) and transposed: a shuffle of channels.

    Args:
        src: the input.
        dst: the output, of the same shape.
        axis: the axis.
        group_size: the size of the first part; it divides that of the axis.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
    """
    return create(
        "shuffle_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        dst,
        axis,
        group_size,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def lstm(
    src_layer: MemoryDesc,
    src_iter: MemoryDesc | None,
    src_iter_c: MemoryDesc | None,
    weights_layer: MemoryDesc,
    weights_iter: MemoryDesc,
    bias: MemoryDesc | None,
    dst_layer: MemoryDesc,
    dst_iter: MemoryDesc | None,
    dst_iter_c: MemoryDesc | None,
    *,
    direction: str = "left2right",
    peephole: MemoryDesc | None = None,
    projection: MemoryDesc | None = None,
    attributes: Attributes | None = None,
    prop: str = "inference",
) -> Primitive:
    """An LSTM; its gates have the order input, forget, cell, output (ONNX's: input, output, forget, cell).

    Args:
        src_layer: (time, batch, inputs).
        src_iter: the first state, (1, directions, batch, hidden), or None for 0.
        src_iter_c: the first cells, (1, directions, batch, hidden), or None for 0.
        weights_layer: (1, directions, inputs, 4, hidden).
        weights_iter: (1, directions, hidden, 4, hidden).
        bias: (1, directions, 4, hidden), or None.
        dst_layer: (time, batch, hidden), or twice hidden if both directions are concatenated.
        dst_iter: the last state, or None.
        dst_iter_c: the last cells, or None.
        direction: "left2right", "right2left", "bidirectional_concat" or "bidirectional_sum".
        peephole: (1, directions, 3, hidden), or None.
        projection: (1, directions, hidden, outputs), or None.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast and exact code for it.
    """
    return create(
        "lstm_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(DIRECTION, direction, "direction"),
        src_layer,
        src_iter,
        src_iter_c,
        weights_layer,
        weights_iter,
        peephole,
        projection,
        bias,
        dst_layer,
        dst_iter,
        dst_iter_c,
        0,
        attributes=attributes,
        allow_reference=True,
        inputs=(src_layer, weights_layer),
    )


def gru(
    src_layer: MemoryDesc,
    src_iter: MemoryDesc | None,
    weights_layer: MemoryDesc,
    weights_iter: MemoryDesc,
    bias: MemoryDesc | None,
    dst_layer: MemoryDesc,
    dst_iter: MemoryDesc | None,
    *,
    linear_before_reset: bool = False,
    direction: str = "left2right",
    attributes: Attributes | None = None,
    prop: str = "inference",
) -> Primitive:
    """A GRU; its gates have the order update, reset, output (ONNX's z, r, h).

    Args:
        src_layer: (time, batch, inputs).
        src_iter: the first state, (1, directions, batch, hidden), or None for 0.
        weights_layer: (1, directions, inputs, 3, hidden).
        weights_iter: (1, directions, hidden, 3, hidden).
        bias: (1, directions, 3, hidden), with `linear_before_reset` 4 (the last is that of the recurrent output gate), or None.
        dst_layer: (time, batch, hidden), or twice hidden if both directions are concatenated.
        dst_iter: the last state, or None.
        linear_before_reset: apply the reset gate after the product, as in ONNX.
        direction: "left2right", "right2left", "bidirectional_concat" or "bidirectional_sum".
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast and exact code for it.
    """
    return create(
        "lbr_gru_forward" if linear_before_reset else "gru_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(DIRECTION, direction, "direction"),
        src_layer,
        src_iter,
        weights_layer,
        weights_iter,
        bias,
        dst_layer,
        dst_iter,
        0,
        attributes=attributes,
        allow_reference=True,
        inputs=(src_layer, weights_layer),
    )


def rnn(
    src_layer: MemoryDesc,
    src_iter: MemoryDesc | None,
    weights_layer: MemoryDesc,
    weights_iter: MemoryDesc,
    bias: MemoryDesc | None,
    dst_layer: MemoryDesc,
    dst_iter: MemoryDesc | None,
    *,
    activation: str,
    direction: str = "left2right",
    alpha: float = 0.0,
    beta: float = 0.0,
    attributes: Attributes | None = None,
    prop: str = "inference",
) -> Primitive:
    """A simple recurrent network.

    Args:
        src_layer: (time, batch, inputs).
        src_iter: the first state, (1, directions, batch, hidden), or None for 0.
        weights_layer: (1, directions, inputs, 1, hidden).
        weights_iter: (1, directions, hidden, 1, hidden).
        bias: (1, directions, 1, hidden), or None.
        dst_layer: (time, batch, hidden), or twice hidden if both directions are concatenated.
        dst_iter: the last state, or None.
        activation: "relu", "tanh" or "logistic".
        direction: "left2right", "right2left", "bidirectional_concat" or "bidirectional_sum".
        alpha: the slope of relu for negative values.
        beta: the second parameter of the activation.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast and exact code for it.
    """
    return create(
        "vanilla_rnn_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(ELTWISE, activation, "activation"),
        code(DIRECTION, direction, "direction"),
        src_layer,
        src_iter,
        weights_layer,
        weights_iter,
        bias,
        dst_layer,
        dst_iter,
        0,
        alpha,
        beta,
        attributes=attributes,
        allow_reference=True,
        inputs=(src_layer, weights_layer),
    )
