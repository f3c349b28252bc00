"""Calls whose kernels need numbers for sizes: they emit their steps again for each set of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...ir.gradient import GRADIENT
from ...ir.sizes import LOWEST, Late, SizeSpace, is_open, now, settled
from ...kernels.table import Follower, Kernel, Site
from ...kernels.values import Bound, Buffer, OpaqueValue, PlanStep, Value, order_of, strides_of
from .by_name import inferred_shapes
from .segment import Entry
from .site import TraceSite

NOTE = "its steps are made for each set of sizes"
"""For reports."""


class OtherSteps(Exception):
    """For other sizes a kernel declines, or emits results in another layout: another plan computes them."""


class ExactCall:
    """A call, with those that follow it, whose kernel sees numbers.

    Args:
        site: of the call; its steps are for these sizes.
        kernel: the kernel.
        inputs: the inputs of the call.

    Attributes:
        buffers: what the kernel has allocated, in order.
        outputs: the results, with sizes by name.
    """

    def __init__(self, site: TraceSite, kernel: Kernel, inputs: Sequence[Value | None]) -> None:
        self._site, self._kernel, self._inputs = site, kernel, inputs
        self._followers, self._absorbed = site.followers, 0
        self._reusable: list[bool] = []
        self._nbytes: list[int] = []
        self._steps: list[PlanStep] = []
        assert site.tracer.space is not None
        self._space: SizeSpace = site.tracer.space
        self._symbols: list[tuple[int, int, int]] = []
        self.buffers: list[Buffer] = []
        self.outputs: tuple[Entry | None, ...] = ()
        self._results: tuple[Entry | None, ...] = ()

    def emit(self) -> tuple[Entry | None, ...]:
        """Emit the steps for the first time; raises Refused if the results have no sizes by name."""
        site, tracer = self._site, self._site.tracer
        with tracer.settling():
            made = self._run(_FirstSite(self, site))
            self._absorbed = site.absorbed
            shapes = inferred_shapes(site.call, list(self._inputs))
            self.outputs = tuple(
                self._named(i, y, s) if isinstance(y, Value) else y for i, (y, s) in enumerate(zip(made, shapes, strict=False))
            )
        reads = [
            v for v in (*self._inputs, *(v for f in self._followers[: self._absorbed] for v in _all_inputs(f))) if v is not None
        ]
        writes = tuple(v for v in self.outputs if isinstance(v, Value))
        site.steps = [
            PlanStep(partial(self._bound, i), tuple(reads), writes, s.kernel or self._kernel.name, (), (NOTE, *s.notes))
            for i, s in enumerate(self._steps)
        ]
        if any(isinstance(y, OpaqueValue) for y in self.outputs):
            site.steps.append(PlanStep(self._bound_passing, (), (), "copy"))
        return self.outputs

    def emit_again(self) -> None:
        """Emit the steps for the present sizes; raises OtherSteps if they are not alike."""
        try:
            made = self._run(_NextSite(self, self._site))
        except OtherSteps:
            raise
        except Exception as error:  # of a kernel that declines: the steps of the plan do not compute these sizes
            raise OtherSteps(str(error)) from None
        if self._symbols:
            values = list(self._space.values)
            for i, axis, place in self._symbols:
                y = made[i]
                if not isinstance(y, Value) or y.ndim <= axis or y.shape[axis] < LOWEST:
                    raise OtherSteps("a result is absent, or an axis has no or one element")
                values[place] = y.shape[axis]
            self._space.set(values)
        for y, known in zip(made, self.outputs, strict=False):  # a kernel may return more than the call does
            if type(y) is not type(known):
                raise OtherSteps("another result is absent")
            if isinstance(y, Value) and isinstance(known, Value) and not _fits(y, known):
                raise OtherSteps("a result is in another layout")

    def _bound(self, i: int) -> Bound:
        """The calls of a step."""
        return self._steps[i].bind()

    def _bound_passing(self) -> Bound:
        """What hands on results that are not arrays: the steps write to values of the present sizes."""
        pairs = zip(self._results, self.outputs, strict=False)
        return [(_hand_on, (y, known)) for y, known in pairs if isinstance(y, OpaqueValue)]

    def _run(self, site: _NumberSite) -> tuple[Entry | None, ...]:
        site.followers = [_numbers_of(f) for f in self._followers]
        with np.errstate(all="ignore"):
            result = self._kernel.body(site, *map(_number_of, self._inputs))
        site.end()
        if self._steps and len(self._steps) != len(site.steps):
            raise OtherSteps("there is another number of steps")
        self._steps = site.steps
        self._results = result if isinstance(result, tuple) else (result,)
        return self._results

    def _named(self, i: int, y: Value, shape: Sequence[Any] | None) -> Value:
        """A result with sizes by name; those that do not follow from the sizes of the inputs have names of their own."""
        site = self._site
        if shape is None or settled(shape) != y.shape:
            if site.call.domain == GRADIENT:  # of a parameter; that of anything else would be refused for other sizes
                return y
            site.require(y.buffer in self.buffers, "the shape of a result does not follow from those of the inputs")
            shape = [
                self._size(f"{site.name} {len(site.tracer.exact)}.{i}[{axis}]", i, axis, d) for axis, d in enumerate(y.shape)
            ]
        if not is_open(shape):
            return y
        order = order_of(y.strides)
        strides = strides_of(shape, y.dtype.itemsize, order)
        offset: Any = 0
        for v in self._inputs:
            if v is not None and v.buffer is y.buffer:
                offset = v.offset
        named = Value(y.buffer, tuple(shape), strides, y.dtype, offset, False, y.finiteness, None, y.low)
        site.require(_fits(y, named), "a result is a part of other values")
        return named

    def _size(self, name: str, i: int, axis: int, value: int) -> Any:
        """The size of an axis of a result: a number if it is 0 or 1, or if the plan assumes one."""
        if value < LOWEST or self._space.pins.get(name) == value:
            return value
        self._symbols.append((i, axis, len(self._space.values)))
        return self._space.symbol(name, value)


class _NumberSite(Site):
    """What a kernel sees that needs numbers: the site of the call, but for what it allocates and asks."""

    def __init__(self, call: ExactCall, site: TraceSite) -> None:
        super().__init__()
        self.exact, self.site = call, site
        self.operator, self.name, self.version, self.attributes = site.operator, site.name, site.version, site.attributes
        self.outputs, self.options, self.shared, self.is_open = site.outputs, site.options, site.shared, site.is_open
        self.trains = site.trains
        self._allocated = self._asked = 0

    def new(self, shape: Sequence[int], dtype: Any, order: Sequence[int] | None = None, finiteness: int | None = None) -> Value:
        kind = np.dtype(dtype)
        shape = tuple(map(int, shape))
        nbytes = max(int(np.prod(shape, dtype=np.int64)) * kind.itemsize, 1)
        self.site.absorbed = self.absorbed
        known = self.site.known_finiteness() if finiteness is None else finiteness
        return Value(self.scratch(nbytes), shape, strides_of(shape, kind.itemsize, order), kind, 0, False, known)

    def kept(self, value: Value, what: Any, make: Any) -> Value:
        made: Value = make()
        return made

    def needs_finite(self) -> None:
        """As of the site."""
        self.site.needs_finite()

    def constant(self, array: np.ndarray, key: Any = None) -> Value:
        return self.site.constant(array, key)

    def body(self) -> Any:
        return self.site.body()

    def once(self, what: Any, make: Any) -> Any:
        return self.site.once(what, make)

    def end(self) -> None:
        """The kernel has returned."""


class _FirstSite(_NumberSite):
    def scratch(self, nbytes: int) -> Buffer:
        call = self.exact
        made = self.site.tracer.buffer(nbytes)
        made.nbytes = Late(call._nbytes.__getitem__, [len(call._nbytes)])  # type: ignore[assignment]  # of any run
        call._nbytes.append(nbytes)
        call.buffers.append(made)
        return made

    def reusable(self, place: int) -> bool:
        self.exact._reusable.append(self.site.reusable(place))
        return self.exact._reusable[-1]

    def end(self) -> None:
        self.site.absorbed, self.site.wanted, self.site.checked = self.absorbed, self.wanted, []


class _NextSite(_NumberSite):
    def scratch(self, nbytes: int) -> Buffer:
        call, at = self.exact, self._allocated
        if at >= len(call.buffers):
            raise OtherSteps("more memory is needed")
        self._allocated += 1
        call._nbytes[at] = nbytes
        return call.buffers[at]

    def is_finite(self, value: Value) -> bool:
        return True  # a step checks it

    def reusable(self, place: int) -> bool:
        self._asked += 1
        if self._asked > len(self.exact._reusable):
            raise OtherSteps("another input may be overwritten")
        return self.exact._reusable[self._asked - 1]

    def end(self) -> None:
        if self.absorbed != self.exact._absorbed or self._allocated != len(self.exact.buffers):
            raise OtherSteps("other calls are computed")


def _hand_on(y: OpaqueValue, known: OpaqueValue) -> None:
    known.value, known.fresh = y.value, y.fresh


def _number_of(v: Value | None) -> Value | None:
    """A value with the present sizes."""
    if v is None or not (v.contents is not None or is_open((*v.shape, *v.strides, v.offset))):
        return v
    if v.contents is not None:
        return Value.of(v.array)
    return Value(
        v.buffer, settled(v.shape), settled(v.strides), v.dtype, now(v.offset), v.constant, v.finiteness, v.key, v.low
    )  # fmt: skip


def _numbers_of(f: Follower) -> Follower:
    return replace(f, inputs=[_number_of(v) for v in f.inputs], sides={i: _numbers_of(s) for i, s in f.sides.items()})


def _all_inputs(f: Follower) -> list[Value | None]:
    return [*f.inputs, *(v for s in f.sides.values() for v in _all_inputs(s))]


def _fits(y: Value, named: Value) -> bool:
    """Whether a result has the layout of one with sizes by name."""
    steps = zip(y.shape, y.strides, settled(named.strides), strict=True)
    alike = y.buffer is named.buffer and y.shape == settled(named.shape) and y.dtype == named.dtype
    return alike and y.offset == now(named.offset) and all(d == 1 or s == t for d, s, t in steps)


__all__ = ["ExactCall", "OtherSteps"]
