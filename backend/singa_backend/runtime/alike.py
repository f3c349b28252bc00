"""Joined nodes that compute the same with other arrays, which a device computes by one kernel: the updates of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ..ir.graph import Node, Value
from ..ir.run_order import RunOrder
from .joined import Joined, JoinedPrograms, JoinedStep, Known, Visit, uses

_PARAMETERS = 3600
"""The bytes of the parameters of a kernel, of which CUDA allows 4096 on every device."""

_MOST = 64
"""The maximum number of parts of a node."""


@dataclass(eq=False)
class Alike(Node):
    """Joined nodes of one form, whose results no node of their graph reads.

    Attributes:
        parts: the nodes.
    """

    parts: tuple[Joined, ...] = ()

    @property
    def count(self) -> int:
        """The number of nodes."""
        return sum(part.count for part in self.parts)

    def each(self, inputs: Sequence[Any], visit: Visit) -> list[Any]:
        """Compute one part after the other.

        Args:
            inputs: the inputs.
            visit: computes a node.

        Returns:
            The outputs.
        """
        return [v for part, given in zip(self.parts, self.divided(inputs), strict=True) for v in visit(part, list(given))]

    def divided(self, inputs: Sequence[Any]) -> list[Sequence[Any]]:
        """The inputs of each part."""
        ends = list(accumulate((len(p.input_slots) for p in self.parts), initial=0))
        return [inputs[a:b] for a, b in pairwise(ends)]


def gather(program: RunOrder) -> RunOrder:
    """Return a program in which joined nodes of one form whose results are outputs only are gathered, at the place of the last.

    Args:
        program: a program with joined nodes.

    Returns:
        A program with the same slots; the same one if no nodes are gathered.
    """
    used = uses(program)
    found: dict[Any, list[int]] = {}
    for at, node in enumerate(program.nodes):
        if isinstance(node, Joined) and all(used.get(s) == {id(program.graph)} for s in node.output_slots):
            found.setdefault(_form(node), []).append(at)
    gathered: dict[int, Alike] = {}
    for places in found.values():
        for first in range(0, len(places), _MOST):
            some = places[first : first + _MOST]
            if len(some) > 1:
                made = _alike([n for at in some if isinstance(n := program.nodes[at], Joined)])
                gathered |= dict.fromkeys(some, made)
    if not gathered:
        return program
    last = {id(made): at for at, made in sorted(gathered.items())}
    nodes = [
        gathered.get(at, node) for at, node in enumerate(program.nodes) if at not in gathered or last[id(gathered[at])] == at
    ]
    return RunOrder(program.graph, nodes)


def _form(node: Joined) -> Any:
    """What a joined node computes, with its values numbered in their order."""
    number = {s: i for i, s in enumerate((*node.input_slots, *(n.output_slots[0] for n in node.members)))}
    members = tuple((n.op_type, str(n.attributes), *(number[s] for s in n.input_slots)) for n in node.members)
    return members, tuple(number[s] for s in node.output_slots)


def _alike(parts: Sequence[Joined]) -> Alike:
    first = parts[0]
    inputs: list[Value | None] = [v for p in parts for v in p.inputs]
    outputs: list[Value | None] = [v for p in parts for v in p.outputs]
    op_type = f"{len(parts)} x {first.op_type}"
    return Alike(op_type, inputs, outputs, domain=first.domain, name=first.name, opset=first.opset, parts=tuple(parts))


class AlikePrograms(JoinedPrograms):
    """The kernels of the joined and of the gathered nodes of an executor."""

    def compute(self, node: Joined | Alike, inputs: Sequence[Any], known: Known, visit: Visit) -> list[Any] | None:
        """Compute a joined node, or the parts of a gathered one; None if they must be computed one after the other."""
        if isinstance(node, Joined):
            return super().compute(node, inputs, known, visit)
        calls: list[_AlikeCall] = []
        for part, values in zip(node.parts, node.divided(inputs), strict=True):
            single = self.single(part, values, known, visit)
            if single is None or single[0].dtype is None:
                return None
            call = _AlikeCall(*single, [self._xp.isarray(v) for v in single[1]])
            if not call.fits or (calls and (call.step.text, call.dtype) != (calls[0].step.text, calls[0].dtype)):
                return None
            calls.append(call)
        made: list[Any] = []
        some: list[_AlikeCall] = []
        room = _PARAMETERS
        try:
            for call in calls:
                if some and call.bytes > room:
                    made += self._launch(some)
                    some, room = [], _PARAMETERS
                some.append(call)
                room -= call.bytes
            return made + self._launch(some)
        except MemoryError:  # the part that fails reports it
            return None

    def _launch(self, calls: Sequence[_AlikeCall]) -> list[Any]:
        """Compute some parts by one kernel; return their results."""
        takes, results, text, args, made = [], [], [], [], []
        ends = [0]
        for k, call in enumerate(calls):
            size = math.prod(call.step.shape)
            ends.append(ends[-1] + size)
            lines = [f"if (i >= b{k} && i < b{k + 1}) {{", f"const ptrdiff_t j = i - b{k};"]
            for at, (v, is_array) in enumerate(zip(call.values, call.arrays, strict=True)):
                takes.append(f"raw T x{k}_{at}" if is_array else f"T x{k}_{at}")
                args.append(v)
                place = "" if not is_array else "[j]" if v.size == size else "[0]"
                lines.append(f"const T a{at} = x{k}_{at}{place};")
            for at in range(call.step.writes):
                results.append(f"raw T z{k}_{at}")
                made.append(self._xp.module.empty(call.step.shape, call.dtype))
                lines.append(f"T y{at};")
            lines += [call.step.text, *(f"z{k}_{at}[j] = y{at};" for at in range(call.step.writes)), "}"]
            text.append("\n".join(lines))
        takes += [f"int64 b{k}" for k in range(len(ends))]
        kernel = self._xp.elementwise(", ".join(takes), ", ".join(results), "\n".join(text))
        if ends[-1]:
            kernel(*args, *ends, *(v.reshape(-1) for v in made), size=ends[-1])
        return made


class _AlikeCall:
    """One part, whose operands are arrays of the shape of its results, arrays of one element, or numbers.

    Attributes:
        step: its kernel.
        values: the operands; contiguous arrays are vectors.
        arrays: whether each is an array.
        dtype: that of the results.
        bytes: the parameters of a kernel that it needs.
        fits: whether no operand broadcasts along a part of its axes.
    """

    def __init__(self, step: JoinedStep, values: Sequence[Any], arrays: Sequence[bool]) -> None:
        self.step, self.arrays = step, arrays
        self.values = [v.reshape(-1) if a and v.flags.c_contiguous else v for v, a in zip(values, arrays, strict=True)]
        held = [v for v, a in zip(self.values, arrays, strict=True) if a]
        self.dtype = held[0].dtype
        self.fits = all(v.size in (1, math.prod(step.shape)) for v in held)
        vectors = (len(arrays) - len(held) + 1) * 8 + step.writes * 32
        self.bytes = vectors + sum(16 + 16 * v.ndim for v in held)
