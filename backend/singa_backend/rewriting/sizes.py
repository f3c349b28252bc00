"""Values that are sizes: what is known of them before a graph runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from .view import C, Dim, GraphView, Shape, V

Known = Dim | tuple[Dim, ...]
"""A computed size, or a vector of sizes."""
MOST = 64
"""Elements of a vector of sizes."""
FIRST = (0, -1)
"""The axis of a vector."""
LIMIT = 1 << 31
"""The magnitude of sizes that are computed here: larger ones may be taken modulo 2^n."""


class Reader(Protocol[V]):
    """What is known of the values before a call."""

    def shape(self, value: V) -> Shape | None:
        """The shape of a value; None if its rank is not known."""

    def sizes(self, value: V) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""

    def fresh(self) -> str:
        """A name for an unknown size."""

    def attribute(self, call: Any, name: str, default: Any = None) -> Any:
        """An attribute; `default` if the call and its schema have none."""

    def input(self, call: Any, index: int) -> V | None:
        """An input of a call; None for an absent one."""


def sizes(view: GraphView[V, C]) -> int:
    """For any call whose result consists of known sizes, such as Shape and Gather of it, replace the result by a constant."""
    count = 0
    for value, array in view.known_sizes():
        call = view.producer(value)
        if call is not None and view.has_one_output(call):
            count += view.fold(call, {value: array})
    return count


def followed(reader: Reader[V], name: str, call: C) -> Known | None:
    """The sizes that a call of an operator in RULES returns; None if they are not known."""
    found = RULES[name](reader, call)
    return None if isinstance(found, tuple) and len(found) > MOST else found


def is_known(sizes: Known) -> bool:
    """Whether sizes are known as numbers."""
    return all(isinstance(n, int) for n in sizes) if isinstance(sizes, tuple) else isinstance(sizes, int)


def total(shape: Sequence[Dim], fresh: Callable[[], str]) -> Dim:
    """The number of elements of a shape."""
    known, names = math.prod(d for d in shape if isinstance(d, int)), [d for d in shape if isinstance(d, str)]
    return known if not names else names[0] if len(names) == 1 and known == 1 else fresh()


def places(size: int, start: int, end: int, step: int) -> range:
    """The places of an axis that a Slice takes: its ends are clamped, those of Python's slices are not with a negative step."""
    start, end = (i + size if i < 0 else i for i in (start, end))
    if step > 0:
        return range(min(max(start, 0), size), min(max(end, 0), size), step)
    return range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), step)


def _ints(reader: Reader[V], call: C, name: str, index: int) -> tuple[bool, tuple[int, ...] | None]:
    """A list of numbers, an attribute or an input: (whether it is given, its value)."""
    given, source = reader.attribute(call, name), reader.input(call, index)
    if given is not None or source is None:
        return given is not None, None if given is None else tuple(int(n) for n in given)
    found = reader.sizes(source)
    return True, tuple(int(n) for n in found) if isinstance(found, tuple) and is_known(found) else None


def _shape(reader: Reader[V], call: C) -> Known | None:
    shape = reader.shape(call.inputs[0])
    return None if shape is None else shape[slice(reader.attribute(call, "start") or 0, reader.attribute(call, "end"))]


def _size(reader: Reader[V], call: C) -> Known | None:
    shape = reader.shape(call.inputs[0])
    return None if shape is None else total(shape, reader.fresh)


def _same(reader: Reader[V], call: C) -> Known | None:
    return reader.sizes(call.inputs[0])


def _cast(reader: Reader[V], call: C) -> Known | None:
    found = reader.sizes(call.inputs[0])
    numbers = found if isinstance(found, tuple) else () if found is None else (found,)
    fits = all(isinstance(n, str) or abs(n) < LIMIT for n in numbers)
    return found if fits and reader.attribute(call, "to") in (6, 7) else None


def _gather(reader: Reader[V], call: C) -> Known | None:
    known, at = reader.sizes(call.inputs[0]), reader.sizes(call.inputs[1])
    if not isinstance(known, tuple) or at is None or not is_known(at) or reader.attribute(call, "axis", 0) not in FIRST:
        return None
    wanted = [int(i) for i in at] if isinstance(at, tuple) else [int(at)]
    if not all(-len(known) <= i < len(known) for i in wanted):
        return None
    return tuple(known[i] for i in wanted) if isinstance(at, tuple) else known[wanted[0]]


def _slice(reader: Reader[V], call: C) -> Known | None:
    known = reader.sizes(call.inputs[0])
    (_, starts), (_, ends), (placed, axes), (stepped, steps) = (
        _ints(reader, call, name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    steps = (1,) if not stepped else steps
    if not isinstance(known, tuple) or starts is None or ends is None or steps is None:
        return None
    if len(starts) != 1 or len(ends) != 1 or len(steps) != 1 or not steps[0] or (placed and axes not in ((0,), (-1,))):
        return None
    return tuple(known[i] for i in places(len(known), starts[0], ends[0], steps[0]))


def _concat(reader: Reader[V], call: C) -> Known | None:
    parts = [reader.sizes(i) for i in call.inputs]
    if reader.attribute(call, "axis") not in (0, -1) or not all(isinstance(p, tuple) for p in parts):
        return None
    return tuple(d for p in parts if isinstance(p, tuple) for d in p)


def _squeeze(reader: Reader[V], call: C) -> Known | None:
    known, (given, axes) = reader.sizes(call.inputs[0]), _ints(reader, call, "axes", 1)
    return known[0] if isinstance(known, tuple) and len(known) == 1 and (not given or axes in ((0,), (-1,))) else None


def _unsqueeze(reader: Reader[V], call: C) -> Known | None:
    known = reader.sizes(call.inputs[0])
    return (known,) if isinstance(known, (int, str)) and _ints(reader, call, "axes", 1)[1] in ((0,), (-1,)) else None


def _reshape(reader: Reader[V], call: C) -> Known | None:
    known, shape = reader.sizes(call.inputs[0]), reader.shape(call.outputs[0])
    if known is None:
        return None
    flat = known if isinstance(known, tuple) else (known,)
    return flat if shape == (len(flat),) else flat[0] if shape == () and len(flat) == 1 else None


def _arithmetic(compute: Callable[[int, int], int | None]) -> Callable[[Reader[V], C], Known | None]:
    def rule(reader: Reader[V], call: C) -> Known | None:
        a, b = (reader.sizes(i) for i in call.inputs)
        if a is None or b is None or reader.shape(call.outputs[0]) is None:
            return None
        count = max(len(k) if isinstance(k, tuple) else 1 for k in (a, b))
        left, right = ((k * count if len(k) == 1 else k) if isinstance(k, tuple) else (k,) * count for k in (a, b))
        made: list[Dim] = []
        for x, y in zip(left, right, strict=False):
            found = compute(x, y) if isinstance(x, int) and isinstance(y, int) else None
            made.append(reader.fresh() if found is None or abs(found) >= LIMIT else found)
        return tuple(made) if isinstance(a, tuple) or isinstance(b, tuple) else made[0]

    return rule


_Rule: TypeAlias = Callable[[Reader[Any], Any], Known | None]
RULES: dict[str, _Rule] = {
    "Shape": _shape, "Size": _size, "Identity": _same, "Cast": _cast, "Gather": _gather, "Slice": _slice, "Concat": _concat,
    "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Reshape": _reshape, "Add": _arithmetic(lambda x, y: x + y),
    "Sub": _arithmetic(lambda x, y: x - y), "Mul": _arithmetic(lambda x, y: x * y),
    "Div": _arithmetic(lambda x, y: x // y if y > 0 and x >= 0 else None),
}  # fmt: skip
