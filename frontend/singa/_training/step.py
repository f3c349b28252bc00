"""A training step that is recorded as one ONNX graph, and its run on the tensors of a model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto

from singa_backend import limits
from singa_backend.ir.equality import same_graphs
from singa_backend.ir.graph import Node
from singa_backend.ir.reader import resolve
from singa_backend.ir.sizes import LOWEST
from singa_backend.kernels.options import options as plan_options
from singa_backend.kernels.table import Options
from singa_backend.machine import release_freed_memory, without_collections
from singa_backend.opsets.model import model_of
from singa_backend.plans.gradients import may_compute
from singa_backend.plans.profile import Profile
from singa_backend.plans.training_profile import BACKWARD, FORWARD, UPDATE, before
from singa_backend.runtime.executor import Observer
from singa_backend.runtime.executor import Path as NodePath
from singa_backend.session import Session

from .._core import provenance, trace
from .._core.tensor import Tensor, op
from .._core.trace import Trace
from .._core.variable import Variable
from ..device import default_device
from .interrupts import deferred

EARLY = 3
"""The first runs of a step, after which freed memory returns to the system: recording and making a plan use more than a run."""


Sizes = tuple[tuple[int | str, ...], ...]
"""The shape of each tensor that is an argument of a step, in order; a name stands for any size of at least `LOWEST`."""


def step_form(x: Any, seen: dict[int, tuple[int, ...]]) -> Any:
    """The key of an argument that selects the graph: dtype, rank and kind of a tensor, the value of anything else.

    Args:
        x: The argument.
        seen: The shapes of the tensors so far, by id: a step whose target is its input differs from a step with two tensors.
    """
    if isinstance(x, Tensor):
        kind = (x.requires_grad, x.stores_grad, x._without_graph)
        seen.setdefault(id(x), x._data.shape)
        return (Tensor, x._data.dtype, len(x._data.shape), kind, [*seen].index(id(x)))
    if isinstance(x, (list, tuple)):
        return (type(x), tuple(step_form(v, seen) for v in x))
    if isinstance(x, dict):
        return (type(x), tuple((n, step_form(v, seen)) for n, v in x.items()))
    if isinstance(x, np.ndarray):  # its repr omits the middle
        return (np.ndarray, x.dtype, x.shape, x.tobytes())
    return (type(x), repr(x))


def has_names(sizes: Sizes) -> bool:
    """Whether some sizes are names."""
    return any(isinstance(d, str) for shape in sizes for d in shape)


def batched(shapes: Sizes) -> Sizes:
    """The shapes with one name for the size of the batch: the first axis of the first tensor, and of others of the same size.

    Args:
        shapes: The shapes of the arguments; a batch below `LOWEST` keeps its number.
    """
    batch = shapes[0][0] if shapes and shapes[0] else 0
    if not isinstance(batch, int) or batch < LOWEST:
        return shapes
    return tuple(("batch", *shape[1:]) if shape[:1] == (batch,) else shape for shape in shapes)


class Step:
    """A training step as one ONNX graph, bound to the tensors that it reads and writes.

    Args:
        step: The function to record.
        args: Its positional arguments; the Tensors in them become inputs of the graph.
        kwargs: Its keyword arguments; the Tensors in them become inputs of the graph.
        options: How its plans compute; None for the defaults.
        bounds: The bounds of each run; None for the defaults.
        sizes: The shapes of the tensors in the arguments, of which some sizes may be names; None for the present shapes.

    Attributes:
        device: The device on which it runs.
        graph: The step as a Graph of `singa_backend`.

    Raises:
        NotTraceable: The step reads values of tensors or sizes with names in Python, or calls an operator that is written in
            Python.
    """

    def __init__(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options | None = None,
        bounds: limits.Limits | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        tensors = _tensors((args, kwargs))
        is_open = sizes is not None and has_names(sizes)
        self.device = next((t.device for t in tensors if not t._follows_device), default_device)
        chosen = options or plan_options()
        by_kernel = may_compute if self.device.backend.is_host and chosen.level > 1 else None
        record = Trace(op.opset, by_kernel=by_kernel, is_open=is_open)
        shadows: dict[int, Tensor] = {}
        for i, t in enumerate(tensors):
            shape = None if sizes is None else sizes[i]
            example = None if is_open else trace.value_of(t)  # a value of one size says nothing about those of others
            symbol = record.input(f"input_{i}", trace.type_of(t, shape), example)
            shadow = Tensor._of(symbol, t.device, t.requires_grad)
            shadow.stores_grad, shadow._without_graph = t.stores_grad, t._without_graph
            shadows[id(t)] = shadow
        with trace.recording(record):
            result = step(*_replaced(args, shadows), **_replaced(kwargs, shadows))
            self._result = result
            made = [trace.value(t) for t in _tensors(result)]
        record.check_sizes()
        self._settings = list(record.settings.values())
        self._completions = list(record.completions.values())
        self._shadows = list(shadows.values())
        self._writes, self._invalidated = list(record.assigned.values()), record.invalidated
        self._reads = [t for t, _ in record.inputs]
        outputs = [*made, *(record.value(t) for t in self._writes)]
        places = {id(t): len(tensors) + n for n, t in enumerate(self._reads)}
        replaced = {
            len(made) + n: places[id(t)] for n, t in enumerate(self._writes) if id(t) in places and t.device is self.device
        }
        self._early = EARLY
        self._shapes = None if not is_open else [t._data.shape for t in tensors]
        self._writer, builder = record.writer, record.writer.builder
        self.graph = builder.finish(record.writer.own(outputs), title="step")
        for name in builder.arrays.keys() & self.graph.initializers.keys():  # a tensor may be written to after the recording
            self.graph.initializers[name].constant = builder.arrays[name] = builder.arrays[name].copy()
        resolve(self.graph)
        self.graph.is_step = True
        self._session = Session(self.graph, self.device.backend, chosen, bounds or limits.Limits(), replaced=replaced)
        self._forward = record.forward
        self._gradients = [g.name for g in record.gradients]
        record.writer.builder.forget_examples()  # the results keep the builder
        record.end()

    @property
    def onnx(self) -> ModelProto:
        """The step as a ModelProto."""
        return model_of(self._writer, self.graph)

    def forget_plan(self) -> None:
        """Free the memory of the plan; the next run makes it again."""
        self._session.forget_plans()
        self._early = EARLY

    def holds(self) -> bool:
        """Whether the settings that the step has read in Python, such as the momentum of an optimizer, are unchanged.

        Returns:
            False if the step must be recorded again.
        """
        return all(ask() == was for ask, was in self._settings)

    def is_recorded_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the step was recorded for the shapes of these arguments, or is known to be the same for all sizes.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.

        Returns:
            False if a step that is recorded for these arguments must be compared with this one.
        """
        return self._shapes is None or self._shapes == [t._data.shape for t in _tensors((args, kwargs))]

    def agrees(self, other: Step) -> bool:
        """Whether a step that was recorded for other sizes is the same: it is then known to be so for all sizes.

        Python may follow the size without reading it from a tensor, and write another constant or other operators.

        Args:
            other: The other step.

        Returns:
            False if they differ.
        """
        ours, theirs = ([[id(t) for t in (*s._reads, None, *s._writes)], s._invalidated] for s in (self, other))
        if ours != theirs or len(self._completions) != len(other._completions) or not same_graphs(self.graph, other.graph):
            return False
        own, its = (step_form(_rebuilt(s._result, lambda t: None), {}) for s in (self, other))  # what is not a tensor
        if own != its:
            return False
        self._shapes = None
        return True

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph, and write the values that the step assigns to tensors.

        Args:
            args: The positional arguments of the step, with Tensors of the recorded shapes and dtypes.
            kwargs: The keyword arguments of the step.

        Returns:
            The results of the step, with new Tensors.

        Raises:
            OperatorError: A node cannot compute with its inputs.
            ResourceExhausted: A limit was exceeded.
        """
        inputs = {id(t): t for t in _tensors((args, kwargs))}
        stream = self.device._stream
        draws = any(t is stream.state for t in self._reads)
        with stream.lock if draws else contextlib.nullcontext():  # another thread may draw from the same stream
            values = [self._here(t) for t in (*inputs.values(), *self._reads)]
            watch = self._watch() if self.device.verbosity and self.device._times.measures else None
            with deferred():  # all states are those of before the step, or those after it
                with without_collections() if self._early else contextlib.nullcontext():
                    made = self._session.run(values, observer=watch)
                n = len(made) - len(self._writes)
                for t, new in zip(self._writes, made[n:], strict=True):
                    self._assign(t, new)
                for done in self._completions:
                    done(self._session.options)
        if self._early:
            self._early -= 1
            release_freed_memory()
        results: dict[int, Tensor] = {}
        for t, v in zip(_tensors(self._result), made, strict=False):
            results[id(t)] = Tensor._of(v, self.device, t.requires_grad)
            results[id(t)]._without_graph = t._without_graph
        provenance.record(list(results.values()), "a step", self._again, list(inputs.values()))
        return _replaced(self._result, results)

    def _assign(self, t: Variable, new: Any) -> None:
        """Write the new value of a tensor, unless a plan has done so."""
        invalidated = id(t) in self._invalidated
        if new is t._data:
            trace.note_write(t, invalidated)
        else:
            trace.assign(t, new if t.device is self.device else self.device.backend.get(new), invalidated)

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: int) -> Profile:
        """Measure runs of the step: by part, by node, and what computes each gradient.

        Args:
            args: As for `run`.
            kwargs: As for `run`.
            runs: The number of whole runs, and of measured ones; both write to tensors.

        Returns:
            The profile, with the parts of the step and what computes each gradient.

        Raises:
            OperatorError: A node cannot compute with its inputs.
            ResourceExhausted: A limit was exceeded.
        """

        def run() -> None:
            self.run(args, kwargs)

        run()  # makes the plan
        values = [self._here(t) for t in (*_tensors((args, kwargs)), *self._reads)]
        session = self._session
        found = session.profile(
            values, {}, runs=runs, budget=lambda: limits.Budget(session.limits), run=run, part=self._part()
        )  # fmt: skip
        return replace(found, weight_bytes=sum(int(t._data.nbytes) for t in self._reads))

    def _part(self) -> Callable[[Node], str]:
        """The part of a step that a node computes.

        Backward is what only gradients need, and update what is written to tensors, after the backward pass has begun.
        """
        nodes = self.graph.nodes
        makers = {name: node for node in nodes for name in node.output_names if name}
        written = [v.name for v in self.graph.outputs[len(self.graph.outputs) - len(self._writes) :]]
        ahead = {id(n) for n in nodes if self._forward is None or n.name in self._forward}
        backward = before(makers, self._gradients, lambda n: id(n) in ahead)
        update = before(makers, written, lambda n: id(n) in ahead or id(n) in backward)
        found: dict[int, str] = {}
        for node in nodes:
            node.body()
            part = BACKWARD if id(node) in backward else UPDATE if id(node) in update else FORWARD
            found |= dict.fromkeys([id(node), *(id(n) for g in node.graphs for n in g.all_nodes())], part)
        return lambda node: found.get(id(node), FORWARD)

    def _watch(self) -> Observer:
        """An observer that measures the nodes of the step."""
        device, forward = self.device, self._forward
        last = time.perf_counter()

        def see(node: Node, inputs: list[Any], outputs: list[Any], path: NodePath) -> None:
            nonlocal last
            if any(outer.function is None for outer, _ in path):  # of a subgraph: part of the node that has it
                return
            device.Sync()
            now = time.perf_counter()
            name = path[0][0].name if path else node.name
            device._times.add(node.op_type, now - last, forward is not None and name not in forward)
            last = time.perf_counter()

        return see

    def _here(self, t: Variable) -> Any:
        """The value of a tensor on the device of the step; the random state and tensors made of constants are on the host."""
        return t._data if t.device is self.device else self.device.backend.put(t.device.backend.get(t._data))

    def _again(self, xs: list[Any], training: bool) -> list[Any]:
        """The results of the step, replayed from the provenance of its recording; for `to_onnx`."""
        given = {id(shadow): x for shadow, x in zip(self._shadows, xs, strict=True)}
        return provenance.replay(_tensors(self._result), given, {}, lambda call, args: call.replay(args, training))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts, each once, in order."""
    found: dict[int, Tensor] = {}

    def look(v: Any) -> None:
        if isinstance(v, Tensor):
            found.setdefault(id(v), v)
        elif isinstance(v, dict):
            for x in v.values():
                look(x)
        elif isinstance(v, (list, tuple)):
            for x in v:
                look(x)

    look(value)
    return list(found.values())


def _rebuilt(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _rebuilt(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(v, change) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _replaced(value: Any, by: dict[int, Tensor]) -> Any:
    return _rebuilt(value, lambda t: by.get(id(t), t))
