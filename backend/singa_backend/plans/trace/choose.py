"""The choice of kernels: the first that accepts a call computes it, with as many of the calls that follow as it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from ... import limits
from ...elementwise.later import QUEUE
from ...errors import SonnxError
from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...ir.gradient import GRADIENT
from ...ir.sizes import OpenSize
from ...kernels import onednn
from ...kernels.onednn import OneDnnError
from ...kernels.table import Follower, Kernel, Refused, kernels_of
from ...kernels.values import FINITE, OpaqueValue, Value
from ..contention import single_step
from ..flat import has_kernel_only, model_node, origins_of
from ..gradients import RefusedGradient
from .bodies import BodyTraces
from .by_name import contents_of, dtype_of, has_names, opens
from .definitions import flops_of
from .exact import ExactCall
from .segment import Entry
from .site import TraceSite

FAILED = "failed with"
"""Begins the reason of a kernel that raised an unexpected error; such a call must be invalid."""


class Chooser(BodyTraces):
    """Chooses what computes each call of a trace."""

    _needs_numbers = False

    def _group(self, group: tuple[ir.Node, ...]) -> None:
        """Compute a chain of calls, with as few kernels as possible."""
        while group:
            taken = self._with_kernel(group)
            if not taken:
                if has_kernel_only(group[0]):
                    raise RefusedGradient(group[0], self._reasons)
                taken = 1 if self._by_body(group[0]) else self._by_definition(group[0])
            group, self.ahead = group[taken:], max(self.ahead - taken, 0)

    def _with_kernel(self, group: tuple[ir.Node, ...]) -> int:
        """Compute a prefix of the chain with the first kernel that accepts it; return its length, 0 if there is none."""
        call = group[0]
        found = self._values(call)
        self._reasons, self.refuses_numbers = [], False
        if self.options.level == 0 or call.operator is None:
            return 0
        opaque = any(isinstance(v, OpaqueValue) for v in found)
        inputs: list[Any] = list(found)
        if self.space is not None:
            self.space.reason = f"{call.op_type} {call.name}".strip()
        folded = not opaque and self._is_folded(call, inputs)
        if folded and self.space is not None:
            if self._by_name(call, inputs):
                return 1
            folded = not has_names(inputs)
        self.preferred = self._replaced_by(group) if self.updates is not None else set()
        followers = self._followers(group)
        kernels = kernels_of(call.domain, call.op_type, call.operator.version)
        for one, exact in self._forms(kernels, inputs, opaque or folded):
            if folded and one.on != "view":
                break
            if opaque and one.takes != "opaque":
                continue
            if has_names(inputs) and not one.sees_sizes:  # they are data of a run
                inputs = [v.unnamed() if isinstance(v, Value) else v for v in inputs]
            site = TraceSite(self, call, inputs, followers)
            first_buffer, first_step = len(self.buffers), len(self.segment.steps)
            try:
                with np.errstate(all="ignore"):
                    number = ExactCall(site, one, inputs) if exact else None
                    result = one.body(site, *inputs) if number is None else number.emit()
                    taken = site.absorbed + 1
                    if call.domain == GRADIENT:  # of a file, whose functions may return what no rule does
                        returned = zip_longest(call.outputs, result if isinstance(result, tuple) else (result,))
                        site.require(all(o is None or v is not None for o, v in returned), "it does not return a gradient")
                    site.require(not (folded and site.steps), "a constant is not copied in every run")
                    self._run_steps(site, one, group[:taken])
                    if number is not None:
                        self.exact.append(number)
                        for b in number.buffers:
                            b.touch(first_step)
                            b.touch(len(self.segment.steps) - 1)
            except SonnxError:
                raise
            except (Refused, OneDnnError, OpenSize) as refusal:
                self._needs_numbers = isinstance(refusal, OpenSize)
                self.refuses_numbers |= exact
                self._reasons.append(f"{one.name}: {refusal}")
                if self._want(site):
                    self.ahead = site.absorbed + 1
                self._forget(first_buffer, first_step)
                continue
            except Exception as error:  # an invalid call that the kernel did not expect: the definition reports it
                self._needs_numbers = not exact
                self._reasons.append(f"{one.name}: {FAILED} {type(error).__name__}: {error}")
                self._forget(first_buffer, first_step)
                continue
            self._want(site)
            for v in site.checked:
                v.finiteness = FINITE
            made = result if isinstance(result, tuple) else (result,)
            if folded and all(v is None or v.key is not None for v in inputs):
                for n, v in enumerate(made):
                    if v is not None:
                        v.key = (id(call), n)
            for value, what, copy in site.made:
                self.copies.setdefault(id(value), (value, {}))[1][what] = copy
                copy.buffer.users += 1
            self._accept(group[:taken], made)
            for buffer in self.buffers[first_buffer:]:
                self._release(buffer)
            return taken
        return self._fold(call) if folded else 0

    def _forms(self, kernels: Sequence[Kernel], inputs: Sequence[Any], plain: bool) -> Iterator[tuple[Kernel, bool]]:
        """The kernels in order, each with whether it sees numbers: after an attempt with sizes by name that needs them."""
        opens = not plain and any(v is not None and (v.is_open or v.contents is not None) for v in inputs)
        for one in kernels:
            self._needs_numbers = False
            yield one, False
            if opens and self._needs_numbers:
                yield one, True

    def _want(self, site: TraceSite) -> bool:
        """Let the code that a kernel would use be made, unless other code will compute the calls; return whether it is."""
        if self.ahead or not site.wanted:
            return False
        for key, make in site.wanted.items():
            QUEUE.add(key, make)
            self.facts.wants.add(key)
        return True

    def _replaced_by(self, group: Sequence[ir.Node]) -> set[ir.Value]:
        """The values that these calls read last, in the memory of an input that a result replaces."""
        self.preferred = set()
        times = Counter(i for c in group for i in c.reads)
        entries = {i: self.env.get(i) for i in times}
        held = {i for i, e in entries.items() if isinstance(e, Value) and id(e.buffer) in self.replaced}
        return {i for i in held if self.reusable(i, times[i])}

    def _forget(self, first_buffer: int, first_step: int) -> None:
        """Release the buffers and the steps of a kernel that has declined."""
        for b in self.buffers[first_buffer:]:
            self.live.pop(id(b), None)
        del self.buffers[first_buffer:], self.segment.steps[first_step:]

    def _run_steps(self, site: TraceSite, one: Kernel, calls: Sequence[ir.Node]) -> None:
        origins = origins_of(calls)
        with self.settling():
            bound = [step.bind() for step in site.steps]  # before any runs: a kernel may still decline
        with onednn.using_threads(1) if self.single else nullcontext(), self.budget.clock(runs=True), self.settling():
            for step, pieces in zip(site.steps, bound, strict=True):
                step.origins = origins
                step.kernel = step.kernel or one.name
                step.notes = (*step.notes, *self._reasons)
                for function, arguments in [single_step(*p) for p in pieces] if self.single else pieces:
                    status = function(*arguments)
                    if type(status) is int and status:  # of a primitive; later runs do not look at it
                        raise OneDnnError(status, f"execute {step.kernel}")
                self._record(step)
        if site.steps and site.steps[-1].writes:
            site.steps[-1].work = partial(flops_of, calls, site.inputs, site.steps[-1].writes[0])
        if site.finite:
            self.facts.finite = True
            self.needs_finite |= self.updates is not None

    def _accept(self, calls: Sequence[ir.Node], made: Sequence[Entry | None]) -> None:
        """Set the outputs of the last call, and count the uses of all."""
        for v in made:
            if isinstance(v, OpaqueValue):
                self.live[id(v)] = v.value
                self.budget.count_tensor(limits.size_of(v.value))
            elif v is not None:
                v.buffer.touch(max(len(self.segment.steps) - 1, 0))
                self._admit(v.shape, v.dtype)
        for i, v in zip(calls[-1].outputs, made, strict=False):
            if i is not None and v is not None:
                self._set(i, v)
        inner = {o for c in calls[:-1] for o in c.outputs}
        for c in calls:
            self._used([i for i in c.reads if i not in inner])
            self._count(c)

    def _followers(self, group: tuple[ir.Node, ...]) -> list[Follower]:
        made: list[Follower] = []
        if self.options.level < 2:
            return made
        before, sides = group[0], dict[ir.Value | None, Follower]()
        for call in group[1:]:
            operator = call.operator
            inputs: list[Value | None] = []
            place = -1
            for p, i in enumerate(call.inputs):
                if i in before.outputs and i is not None:
                    place = p
                    inputs.append(None)
                    continue
                entry = None if i is None or i in sides else self._get(i)
                if isinstance(entry, OpaqueValue):
                    return made
                inputs.append(None if entry is None else entry.unnamed())
            assert operator is not None
            others = ((p, i) for p, i in enumerate(call.inputs) if p != place and i is not None)
            free = frozenset(p for p, i in others if i not in sides and self.reusable(i, 1))
            one = Follower(call.op_type, call.attributes, inputs, place, operator.version, free)
            one.sides = {p: sides[i] for p, i in enumerate(call.inputs) if i in sides}
            made.append(one)
            if place < 0:
                sides[call.outputs[0]] = one
            else:
                before = call
        return made

    def _is_folded(self, call: ir.Node, inputs: Sequence[Value | None]) -> bool:
        if call.bodies or _draws(call) or has_kernel_only(call):
            return False
        if call.is_("Shape", "Size"):
            return True
        needed = inputs[:1] if call.is_("CastLike") else inputs  # of the other one only the dtype is read
        return all(v is None or v.constant for v in needed)

    def _fold(self, call: ir.Node) -> int:
        operator = call.operator
        assert operator is not None
        key = call if all(i is None or i.constant is not None for i in call.inputs) else None
        outputs = self.shared.folded.get(key) if key is not None else None
        if outputs is None:
            arrays = [v.array if isinstance(v, Value) else v for v in self._values(call)]
            with self.budget.clock(runs=True):
                outputs = self.state.visitor.visit(model_node(call), arrays, [])
            self.budget.left += 1  # counted below
            if any(not isinstance(o, np.ndarray) for i, o in zip(call.outputs, outputs, strict=False) if i is not None):
                return self._loose(call, outputs)
            if key is not None:
                self.shared.folded[key] = outputs
        for n, (i, o) in enumerate(zip(call.outputs, outputs, strict=False)):
            if i is not None and o is not None:
                self._set(i, self._constant(o, None if key is None else (id(call), n)))
        self._used(call.reads)
        self._count(call)
        self.facts.folded += 1
        return 1

    def _by_name(self, call: ir.Node, inputs: Sequence[Value | None]) -> bool:
        """Compute a call of sizes by name; False if it is not one, or has no rule."""
        if not has_names(inputs) and not (call.is_("Shape", "Size") and inputs[0] is not None and inputs[0].is_open):
            return False
        found = contents_of(call, inputs)
        first, output = inputs[0], call.outputs[0]
        if found is None or first is None or output is None:
            return False
        with self.settling():
            made = Value.of(np.array([int(n) for n in found.reshape(-1)], dtype_of(call, first)).reshape(found.shape))
        if opens(found):
            made.contents = found.reshape(-1).tolist()
            self.named.append(made)
        self._set(output, made)
        self._used(call.reads)
        self._count(call)
        self.facts.folded += 1
        return True

    def _loose(self, call: ir.Node, outputs: Sequence[Any]) -> int:
        for i, o in zip(call.outputs, outputs, strict=False):
            if i is not None:
                self._set(i, self._constant(o))
        self._used(call.reads)
        self._count(call)
        return 1


def _draws(node: ir.Node) -> bool:
    return has_trait(node.domain, node.op_type, "random") or has_trait(node.domain, node.op_type, "random_in_training")


__all__ = ["FAILED", "Chooser"]
