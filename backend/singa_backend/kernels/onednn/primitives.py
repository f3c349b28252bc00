"""Primitives of oneDNN: one function creates each kind (here and in the other files of families), `bind` makes a call of one.

Numbers are oneDNN's: a dilation of 0 is a dense window (ONNX's dilation minus 1); paddings are of the spatial axes, in elements;
the weights of a convolution with groups have the shape (groups, outputs / groups, inputs / groups, *window).

Each function returns the primitive.  It raises `Unimplemented` if oneDNN refuses the descriptors, if it has only its slow
reference code for them (unless `allow_reference`), or if it would compute a product of int8 values without the instructions that
make it exact (VNNI, AMX): other code saturates sums of pairs in 16 bits (`matmul` takes a bound of these).  The recurrent
primitives have no `allow_reference`: what oneDNN 3.2 names "ref" there are its fast products and generated gates.

Their parameters are descriptors and numbers.  The functions document only what differs from this list:

* src, srcs, weights, dst: the descriptors of the inputs and of the output.
* diff_src, diff_weights, diff_bias, diff_dst: the descriptors of the gradients of these.
* attributes: post-ops, scales and mode; None for none.
* prop: "inference" or "training".
* algorithm: a key of the table of `constants` for this kind; in `backward`, that of the forward primitive.
* allow_reference: accept slow reference code.
* kernel, strides: the sizes and the steps of a window.
* dilations: the gaps within the window; 0 for a dense one.
* pads_begin, pads_end: the padding before and after each spatial axis.
* epsilon: is added to a variance.  flags: of a normalization.  alpha, beta: the parameters of an activation.
* hint: the forward primitive, created with prop "training".
* src_layer: (time, batch, inputs).  dst_layer: (time, batch, hidden), or twice hidden if both directions are concatenated.
* src_iter: the first state, (1, directions, batch, hidden), or None for 0.  dst_iter: the last state, or None.
* direction: "left2right", "right2left", "bidirectional_concat" or "bidirectional_sum".
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_char_p, c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .args import BIAS, DST, FROM, SCRATCHPAD, TO, WEIGHTS, WORKSPACE
from .constants import QUERY, QUERY_IMPLEMENTATION
from .loading import Library, NotTrusted, OneDnnError, Unimplemented, needed, threads, using_threads
from .memory import Attributes, Memory, MemoryDesc, Owned, Owner, code, content, dims
from .signals import moves_stack
from .trust import Candidate, Skipped, refusal

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
        refused: the implementations that oneDNN prefers and that are not trusted.
        scratchpad_nbytes: the bytes that each run needs as argument SCRATCHPAD.
        workspace_nbytes: the bytes that a forward primitive passes to its backward one as argument WORKSPACE.
        threads: the number of threads at the creation; runs with another number are slow.
        executable: the handle for `Library.execute`.
    """

    __slots__ = (
        "_compiled",
        "_recipe",
        "_single",
        "executable",
        "implementation",
        "kind",
        "refused",
        "scratchpad_nbytes",
        "threads",
        "workspace_nbytes",
    )

    def __init__(self, kind: str, pd: int) -> None:
        lib = needed()
        super().__init__(pd, lib.functions["primitive_desc_destroy"])
        self.kind = kind
        self.refused: tuple[Skipped, ...] = ()
        self.describe()
        self.threads = threads()
        self.executable = 0  # see `_compile`
        self._recipe: _Recipe | None = None
        self._single: Primitive | None = None

    @property
    def execute(self) -> Callable[..., int]:
        """The function of the library that executes the primitive, with `BoundPrimitive.args`."""
        lib = needed()
        if lib.execute_blocking is None or not moves_stack(self.kind, self.implementation, lib.version):
            return lib.execute
        return partial(lib.execute_blocking, self.threads)

    @property
    def notes(self) -> tuple[str, ...]:
        """For reports: which implementations that oneDNN prefers are not trusted, and why."""
        return tuple(f"not trusted: {one}" for one in self.refused)

    def describe(self) -> None:
        """Read the implementation, and the bytes that it needs, from the descriptor."""
        name = c_char_p()
        needed().call("primitive_desc_query", self.handle, QUERY_IMPLEMENTATION, 0, ctypes.byref(name))
        self.implementation = (name.value or b"").decode()
        self.scratchpad_nbytes = self._nbytes("scratchpad")
        self.workspace_nbytes = self._nbytes("workspace")

    def _nbytes(self, what: str, index: int = 0) -> int:
        functions = needed().functions
        md = functions["primitive_desc_query_md"](self.handle, QUERY[what], index)
        return int(functions["memory_desc_get_size"](md)) if md else 0

    def _compile(self) -> None:
        lib = needed()
        self.executable = lib.create("primitive_create", self.handle)
        self._compiled = Owned(self.executable, lib.functions["primitive_destroy"])

    def single(self, memories: Mapping[int, Memory]) -> Primitive | None:
        """This operation for one thread, on memories of the same layouts, except that the weights may need another one.

        Args:
            memories: the memory of each argument.

        Returns:
            The primitive, which is created once; None if oneDNN has none for these layouts.
        """
        if self.threads == 1:
            return self
        recipe, found = self._recipe, None
        if self._single is None and recipe is not None:
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
                if not others or (others == [WEIGHTS] and found is None):
                    found = made
                if not others:
                    break
            self._single, self._recipe = found, None  # last: plans that share the primitive run in several threads
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


class BoundPrimitive:
    """A primitive with its memories, ready to run.

    Args:
        primitive: the primitive.
        memories: the memory of each argument.
        constants: the arguments whose contents no run changes.

    Attributes:
        primitive: the primitive.
        memories: the memory of each argument.
        args: the arguments for `execute`; they keep everything alive but the buffers.
        execute: the function of the library that executes the primitive.
    """

    __slots__ = ("args", "execute", "memories", "primitive")

    def __init__(self, primitive: Primitive, memories: Mapping[int, Memory], constants: Collection[int] = ()) -> None:
        self.primitive = primitive
        self.memories = dict(memories)
        array = (_Argument * len(self.memories))(*[_Argument(arg, memory.handle) for arg, memory in self.memories.items()])
        array.kept = _Kept(primitive, self.memories, frozenset(constants))  # type: ignore[attr-defined]  # ctypes arrays take attributes
        self.args = (c_void_p(primitive.executable), needed().stream, c_int(len(self.memories)), array)
        self.execute = primitive.execute

    def run(self) -> None:
        """Run the primitive once, in this thread, and wait for the result.

        Raises:
            OneDnnError: the library reported a failure.
        """
        status = self.execute(*self.args)
        if status:
            raise OneDnnError(status, f"execute {self.primitive.kind}")


class _Argument(ctypes.Structure):
    _fields_ = [("arg", c_int), ("memory", c_void_p)]


def threads_of(arguments: Sequence[Any]) -> int:
    """The number of threads that a call needs: that for which its primitive was created.

    Args:
        arguments: the arguments of the call.

    Returns:
        The number; 0 if any will do: the call is not one of a `BoundPrimitive`, or its code keeps to the one thread of its
        creation, as that of products and convolutions does.
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
        The arguments, made once; the same ones if they need one thread or are not those of a `BoundPrimitive`; None if oneDNN has
        no code for one thread with these layouts.
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


def execution(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """The function for the arguments that `single_threaded` has returned; the given one if they are not those of a primitive."""
    if arguments and isinstance(arguments[0], _Handle):
        return arguments[0].kept.execute
    kept: _Kept | None = getattr(arguments[-1], "kept", None) if arguments else None
    return function if kept is None else kept.primitive.execute


def _narrowed(made: Primitive, kept: _Kept, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments for `made`, with the memories of a call; with a new scratchpad if that one is too small.

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
    return BoundPrimitive(made, {**kept.memories, **own}).args


class _Scratch(Memory):
    """A memory that owns its buffer."""

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
) -> BoundPrimitive:
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
    return BoundPrimitive(primitive, memories, constants)


def create(
    kind: str, *arguments: Any, attributes: Attributes | None, allow_reference: bool, inputs: Sequence[MemoryDesc] = ()
) -> Primitive:
    """A primitive, unless its code is slow or not exact.  `inputs` are the factors of a product whose pairs may exceed 16 bits.

    It is one that exists already if there is one for equal arguments: primitives have no state, and steps of other plans, and
    repeated blocks of a model, have equal ones.
    """
    lib = needed()
    added = attributes and attributes.content
    key = (lib, threads(), kind, tuple(map(content, arguments)), added, allow_reference, bool(inputs))
    found = _existing.get(key)
    if found is None:
        found = _existing[key] = _created(lib, kind, arguments, attributes or Attributes(), allow_reference, inputs)
    return found


_existing: weakref.WeakValueDictionary[Hashable, Primitive] = weakref.WeakValueDictionary()
"""The primitives that somebody uses, by what they were created from."""


def _created(
    lib: Library,
    kind: str,
    arguments: tuple[Any, ...],
    attributes: Attributes,
    allow_reference: bool,
    inputs: Sequence[MemoryDesc],
) -> Primitive:
    """A new primitive, as for `create`."""
    pd = lib.create(f"{kind}_primitive_desc_create", *map(_plain, arguments), attributes.handle)
    made = _trusted(lib, kind, pd, attributes)
    if _has_reference_code(made, attributes) and not allow_reference:
        text = "; ".join((f"{kind} only as slow reference code ({made.implementation})", *made.notes))
        raise (NotTrusted if made.refused else Unimplemented)(3, text)
    exact = any(text in made.implementation for text in _EXACT_INT8)
    if inputs and not exact and any(md.dtype in _INT8 for md in inputs):
        raise Unimplemented(3, f"{kind} of int8 values exactly ({made.implementation}, on {lib.isa})")
    made._compile()
    if made.threads > 1:
        made._recipe = _Recipe(arguments, attributes, allow_reference, tuple(inputs))
    return made


def _has_reference_code(primitive: Primitive, attributes: Attributes) -> bool:
    """Whether slow code computes all, or adds what follows the sums of a transposed convolution by way of a convolution."""
    name = primitive.implementation
    if primitive.kind == "deconvolution_forward" and name.startswith("conv:any+") and "+ref" not in name:
        return bool(len(attributes) or primitive._nbytes("argument", BIAS))
    return name.startswith(("ref", "conv:any+ref"))


def _trusted(lib: Library, kind: str, pd: int, attributes: Attributes) -> Primitive:
    """The first implementation of a descriptor that `trust` does not refuse.  Those that it refuses are not compiled."""
    made, skipped = Primitive(kind, pd), []
    while (reason := refusal(Candidate(kind, made.implementation, pd, attributes, made.threads))) is not None:
        skipped.append(reason)
        if lib.functions["primitive_desc_next_impl"](pd):
            raise NotTrusted(3, f"{kind}: no implementation is trusted ({'; '.join(map(str, skipped))})")
        made.describe()
    made.refused = tuple(dict.fromkeys(skipped))  # what is in oneDNN's cache is offered twice
    return made


def _plain(value: Any) -> Any:
    return value.handle if isinstance(value, Owner) else value


def descriptors(given: Sequence[MemoryDesc]) -> ctypes.Array[c_void_p]:
    made = (c_void_p * len(given))(*[d.handle for d in given])
    made.kept = tuple(given)  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return made


def floats(values: Sequence[float] | None, length: int) -> ctypes.Array[c_float] | None:
    """An array of numbers for a call; raises OneDnnError if it does not have the length that the call reads."""
    if values is None:
        return None
    if len(values) != length:
        raise OneDnnError(2, f"{length} numbers are needed, got {list(values)}")
    return (c_float * length)(*values)


BYTES, CELLS, PIECES = 2**28, 2**14, 2**23
"""The bytes and the cells that a step of a window, or its padding, may skip: the library computes places in 32 bits, also those
outside of a tensor, and generates code for each cell of padding.  And the pieces of code for windows that are partly outside."""


def window(
    src: MemoryDesc,
    dst: MemoryDesc,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    *,
    kernel: Sequence[int] = (),
    inverse: bool = False,
) -> list[Any]:
    """The steps and the padding of a window, one for each spatial axis; raises Unimplemented if the library cannot hold them.

    `kernel` are the sizes of the window if code is generated for each cell of one that is partly outside; with `inverse`, as in a
    deconvolution, this may be any.
    """
    rank = len(src.shape) - 2
    steps = [dims(values, rank) for values in (strides, dilations, pads_begin, pads_end)]
    cells = dims(kernel, rank) if kernel else None
    nbytes = max(md.dtype.itemsize * md.shape[1] for md in (src, dst))
    for axis in reversed(range(rank)):
        most = min(CELLS, max(1, BYTES // max(nbytes, 1)))
        skipped = [values[axis] for values in steps]
        if not 0 <= min(skipped) <= max(skipped) <= most:
            raise Unimplemented(2, f"the steps and the padding of a window must skip from 0 to {most} cells, got {skipped}")
        stride, _, begin, end = skipped
        size = max(md.shape[axis + 2] for md in (src, dst) if len(md.shape) == rank + 2)
        if cells and cells[axis] * (size if inverse else begin + end) > PIECES * stride:
            raise Unimplemented(2, f"code for windows of {cells[axis]} cells, of which too many are partly outside")
        nbytes *= max(1, size)
    return steps


def reorder(
    src: MemoryDesc, dst: MemoryDesc, *, attributes: Attributes | None = None, allow_reference: bool = False
) -> Primitive:
    """A copy into another layout or element type.

    * src: the source, argument FROM.
    * dst: the destination, argument TO.
    """
    engine = needed().engine
    return create("reorder", src, engine, dst, engine, attributes=attributes, allow_reference=allow_reference)
