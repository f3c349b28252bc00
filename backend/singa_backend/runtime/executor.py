"""The executor: visits a graph's nodes in order and computes each with its operator's declaration."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .. import limits
from ..devices import checks
from ..devices.device import Device
from ..devices.graphs import NotCapturable, is_capturing, keeping
from ..errors import OperatorError, ResourceExhausted, SonnxError
from ..ir.graph import Graph, Node
from ..ir.run_order import RunOrder, run_order
from ..ir.versioned import VersionedOperator
from ..proto.tensor_data import ModelFile, copied, is_mapped
from .failures import typed_error, types_of
from .placement import Placed, Placement
from .recorded import BodyCall, RunRecord, RunRecorder, RunRecords, signature

if TYPE_CHECKING:
    from .alike import Alike, AlikePrograms
    from .captured import CapturedRun
    from .joined import Joined

_SHORTAGES = frozenset({"SX604", "SX613"})
"""The errors of a run that needs more memory than the limits allow, or than the device has."""

Path = Sequence[tuple[Node, int]]
"""The nodes whose graphs contain a node, outermost first, each with the number of the run of its graph, from 0."""

Observer = Callable[[Node, list[Any], list[Any], Path], None]
"""Called after each operator with its inputs, its outputs and its path, also in subgraphs and functions."""


class Executor:
    """Computes a graph on a device, which holds the initializers.  Re-entrant: runs share no values that change.

    Attributes:
        graph: the graph.
        device: the device.
        observer: is called after each operator; None for none.
        file: the model file that initializers are read from when they are used; None if they are in memory.
        placement: which values are on the host; None if the device is the host.
        programs: the kernels of joined and of gathered nodes; None if the device has none.
        replaced: the place of the input that a result replaces, by the place of the result.
    """

    def __init__(self, graph: Graph, device: Device) -> None:
        self.graph = graph
        self.device = device
        self.observer: Observer | None = None
        self.replaced: Mapping[int, int] | None = None
        self.file: ModelFile | None = None
        self._loaded = self._has_bodies = False
        self._changing = threading.Lock()  # is held while initializers are replaced
        self._states: dict[int, list[tuple[int, Any]]] = {}
        self._keep: list[Graph] = []  # the keys of _states are ids, so their graphs must stay alive
        self.placement = None if device.is_host else Placement(device, graph)
        self.programs: AlikePrograms | None = None
        if device.xp.joins:
            from .alike import AlikePrograms  # the CPU joins no nodes

            self.programs = AlikePrograms(device)
        self._capturing = threading.Lock()
        self._forms: dict[int, RunOrder] = {}  # id of a graph of _keep -> its program with joined nodes
        self.forget_records()
        with device.active():
            self.place(graph)
            device.synchronize()  # a run may be on another stream
        self._resident = limits.size_of([a for states in self._states.values() for _, a in states])

    @property
    def states(self) -> dict[int, list[tuple[int, Any]]]:
        """(slot, device value) of each initializer, by the id of its graph."""
        return self._states

    @property
    def graphs(self) -> Sequence[Graph]:
        """The graph and the graphs in it."""
        return self._keep

    def owned(self) -> set[int]:
        """Return the ids of the model's arrays, which a run may return: initializers, and on a device constants and records."""
        kept = {id(a) for states in self._states.values() for _, a in states}
        return kept if self.placement is None else kept | self.placement.owned() | self._records.owned

    @property
    def resident(self) -> int:
        """The bytes of all initializers."""
        return self._resident

    def place(self, graph: Graph) -> None:
        """Prepare a graph, and the graphs in it: put initializers on the device, and number the values."""
        if id(graph) not in self._states:
            self._keep.append(graph)
            run_order(graph)  # numbers the values
            states = [(v.slot, self._put(graph, v.slot, v.constant)) for v in graph.initializers.values()]
            for node in graph.nodes:
                for inner in node.graphs:
                    self.place(inner)
            self._states[id(graph)] = states  # at last: another thread may run it from now on

    def _put(self, graph: Graph, slot: int, value: Any) -> Any:
        return value if self.placement is None else self.placement.state(graph, slot, value)

    def joined(self, graph: Graph) -> RunOrder:
        """The program of a graph, of which every node is computed, that the device computes by fewer kernels."""
        if self.programs is None or id(graph) not in self._states:
            return run_order(graph)
        found = self._forms.get(id(graph))
        if found is None:
            from .alike import gather
            from .joined import join

            found = self._forms.setdefault(id(graph), gather(join(run_order(graph))))
        return found

    def forget_records(self) -> None:
        """Forget how runs on a device computed: initializers have changed."""
        self._records = RunRecords()  # runs that have begun keep theirs

    def forget_graphs(self) -> None:
        """Free the graphs of the device that compute recorded runs; they are captured again when they are needed."""
        self._records.forget_graphs()

    @property
    def graph_bytes(self) -> int:
        """The bytes that graphs of the device keep between runs."""
        return self._records.graph_bytes

    def graphs_in_words(self, inputs: Sequence[Any] | None = None) -> tuple[str, ...]:
        """The graphs of the device that compute runs with these inputs, or the newest ones, and what is outside of them."""
        return self._records.described(None if inputs is None else signature(self.device.xp, inputs))

    @property
    def repeats(self) -> bool:
        """Whether `steady` may compute a run."""
        return self._records.latest is not None

    def steady(self, inputs: Sequence[Any], limits: limits.Limits, to_host: bool) -> list[Any] | None:
        """Compute a run of the main graph as the last one that graphs of the device have computed.

        Args:
            inputs: arrays of the host or of the device, in the order of the graph's inputs.
            limits: the bounds of the run.
            to_host: as for `run`.

        Returns:
            The outputs, which belong to the caller; None if another way is needed.
        """
        record = self._records.latest
        captured: CapturedRun | str | None = None if record is None else record.captured
        if record is None or captured is None or isinstance(captured, str):
            return None
        if captured.admitted is not limits or captured.is_nested or not captured.accepts(inputs):
            return None
        with self.device.active():
            return None if is_capturing(self.device.xp.module) else captured.run(record, None, inputs, to_host)

    def _inner_run(self, budget: limits.Budget, frame: list[Any]) -> Visitor:
        """Begin a run within a run."""
        budget.begin(self._resident, frame, self._states)
        return Visitor(self, budget)

    def feed(self, slot: int, value: Any) -> Any:
        """Put an input of a run on the device; one that operators read on the host stays there.

        Args:
            slot: the slot of the input in the main graph.
            value: a value of the host or of the device.

        Returns:
            The value to pass to `run`.
        """
        return value if self.placement is None else self.placement.feed(self.graph, slot, value)

    def check_file(self) -> None:
        """Raise InvalidModel if initializers are in a model file that was overwritten: they can no longer be read."""
        if self.file is not None:
            self.file.check()

    def load(self) -> None:
        """Prepare what only definitions need: the bodies of gradients, and copies of initializers that are in a model file."""
        for graph in () if self._has_bodies else self._keep:  # which grows meanwhile
            for node in graph.nodes:
                if node.gradient is not None and (body := node.body()) is not None:
                    self.place(body)
        self._has_bodies = True
        if self.file is not None and not self._loaded:
            with self._changing:
                self.file.check()
                self._states = {
                    key: [(slot, copied(a) if isinstance(a, np.ndarray) and is_mapped(a) else a) for slot, a in held]
                    for key, held in self._states.items()
                }
                self._loaded = True

    def replace(self, slot: int, value: Any) -> None:
        """Compute with another value of an initializer of the main graph from now on."""
        with self._changing:
            held = self._states[id(self.graph)]
            held[[s for s, _ in held].index(slot)] = (slot, value)
        self.forget_records()

    def with_states(self, values: dict[str, Any]) -> Executor:
        """An executor of the same graph with these device values, by name, as initializers of the main graph."""
        made = copy.copy(self)
        made.observer = None
        names = dict(run_order(self.graph).state_slots)
        mine = self._states[id(self.graph)]
        made._states = {**self._states, id(self.graph): [(slot, values.get(names[slot], array)) for slot, array in mine]}
        made.forget_records()
        return made

    def with_graph(self, graph: Graph) -> Executor:
        """An executor on the host of the same graph, some initializers of which are inputs."""
        assert self.placement is None
        made = copy.copy(self)
        made.graph, made.observer = graph, None
        names, slots = dict(run_order(self.graph).state_slots), {n: slot for slot, n in run_order(graph).state_slots}
        mine = [(slots[names[slot]], a) for slot, a in self._states[id(self.graph)] if names[slot] in slots]
        made._states = {**self._states, id(graph): mine}
        made._keep = [*self._keep, graph]
        return made

    def run(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        overrides: dict[str, Any] | None = None,
        budget: limits.Budget | None = None,
        observer: Observer | None = None,
        to_host: bool = False,
        capture: bool = False,
    ) -> list[Any]:
        """Run a graph; every error that it raises is a SonnxError.

        Args:
            graph: this executor's graph, or a selection of it.
            inputs: values of `feed`, or of the device, in the order of the graph's inputs.
            overrides: values by name that replace initializers.
            budget: the budget of this run; None for one with the default limits.
            observer: the observer of this run; None for that of the executor.
            to_host: whether the outputs are copied to the host, all of them and the flags of checks at once.
            capture: whether a run that repeats an earlier one may be computed by graphs of the device.

        Returns:
            The outputs in order.
        """
        self.load()
        budget = budget or limits.Budget(limits.Limits(), memory=self.device.memory)
        arguments = (graph, inputs, overrides or {}, budget, observer or self.observer, to_host, capture)
        try:
            return self._run(*arguments)
        except ResourceExhausted as error:
            if error.code not in _SHORTAGES or not self._records.graph_bytes:
                raise
        self._records.forget_graphs("needs memory that graphs would keep")
        budget.restart()
        budget.exchanges.at = 0
        return self._run(*arguments)

    def _run(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        overrides: dict[str, Any],
        budget: limits.Budget,
        observer: Observer | None,
        to_host: bool,
        capture: bool,
    ) -> list[Any]:
        """As `run`, once."""
        repeats = observer is None and not overrides and graph is self.graph and self.placement is not None
        key, kept = signature(self.device.xp, inputs) if repeats else None, self._records
        record, records = (None, False) if key is None else kept.find(key)
        visitor: Visitor
        if observer is not None:
            visitor = ObservedVisitor(self, budget, observer)
        else:
            visitor = RecordingVisitor(self, budget, key, kept) if records else Visitor(self, budget)
        if record is not None:
            frame = record.start(inputs)
        else:
            frame = _frame(graph, self._states[id(self.graph)], inputs)
            for name, value in overrides.items():
                frame[graph.initializers[name].slot] = value
        budget.begin(self._resident + limits.size_of([inputs, overrides]), frame, self._states)
        graphs = kept.graph_bytes
        if graphs and record is not None and record.is_like(budget) and budget.room - graphs < record.needed[1]:
            kept.forget_graphs("needs memory that graphs would keep")
            graphs = 0
        budget.keep(graphs)
        with limits.spend(budget), self.device.active(), np.errstate(all="ignore"), checks.collected(visitor.checks):
            try:
                if record is None or not record.fits(budget):
                    visitor.walk(graph, frame, inputs)
                else:
                    outputs = self._by_graphs(kept, record, visitor, inputs, to_host) if capture else None
                    if outputs is None:
                        visitor.repeat(record, frame)
                    if record.differs:
                        kept.keep(key, None)
                    if outputs is not None:
                        return outputs
            except SonnxError:
                visitor.settle_after_error()
                raise
            return visitor.finish([frame[s] for s in run_order(graph).output_slots], to_host)

    def _by_graphs(
        self, kept: RunRecords, record: RunRecord, visitor: Visitor, inputs: Sequence[Any], to_host: bool
    ) -> list[Any] | None:
        """Compute a run that repeats a record by graphs of the device; None if there are none."""
        captured: CapturedRun | str | None = record.captured
        if isinstance(captured, str) or not self.device.captures or is_capturing(self.device.xp.module):
            return None
        if captured is not None and captured.is_nested:
            return None
        if captured is not None and captured.fits(inputs):
            record.count(visitor.budget)
            record.moves, captured.admitted = 0, visitor.budget.limits
            kept.latest = record if captured.is_steady else None
            return captured.run(record, visitor, inputs, to_host)
        if not self._capturing.acquire(blocking=False):
            return None
        from .captured import MOVES, CapturedRun  # the CPU has no graphs

        try:
            record.captured = None
            if captured is not None:
                record.moves += 1
                if record.moves > MOVES:
                    record.captured = "the inputs that results replace are other arrays in each run"
                    return None
            try:
                if not record.is_plain:
                    raise NotCapturable("returns a map")
                captured = CapturedRun(self.device, record, inputs, self.replaced or {})
            except (NotCapturable, MemoryError) as error:
                record.captured = str(error)
                return None
            record.count(visitor.budget)
            outputs = captured.capture(record, visitor, inputs, to_host, self._inner_run)
            record.captured = captured.reason or captured
            return outputs
        finally:
            self._capturing.release()


def _frame(graph: Graph, states: list[tuple[int, Any]], inputs: Sequence[Any]) -> list[Any]:
    program = run_order(graph)
    frame: list[Any] = [None] * program.size
    for slot, value in states:
        frame[slot] = value
    for slot, value in zip(program.input_slots, inputs, strict=False):
        frame[slot] = value
    return frame


class Visitor:
    """One run of an executor, with its budget.

    Attributes:
        xp: the namespace on which the definitions compute, unless values are on several devices.
    """

    waits = False
    """Whether each node is complete before the next one starts, so that an error of a device is that of its node."""

    def __init__(self, executor: Executor, budget: limits.Budget) -> None:
        self.executor = executor
        self.states = executor._states
        self.device = executor.device
        self.xp = executor.device.xp
        self.placed = None if executor.placement is None else Placed(executor.placement)
        self.checks = executor.device.checks()
        self.budget = budget

    def form(self, graph: Graph) -> RunOrder:
        """The program of a graph that is walked."""
        return self.executor.joined(graph)

    def walk(self, graph: Graph, frame: list[Any], inputs: Sequence[Any]) -> None:
        """Compute the nodes of the main graph."""
        self.form(graph).walk(frame, self.visit)

    def repeat(self, record: RunRecord, frame: list[Any]) -> None:
        """Compute the main graph as before."""
        record.repeat(frame, self.visit, self.budget, self.locate_checks)

    def locate_checks(self, node: Node, inputs: list[Any]) -> None:
        """Note that the checks since the last call are those of a node."""
        if self.checks is not None:
            self.checks.locate(lambda: _where(node, inputs))

    def visit(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        """Compute one node; errors carry its name, operator, dtypes and shapes."""
        try:
            if node.function is not None:
                return self._inner(node, node.function, inputs, frame)
            if node.operator is None:
                return self._together(cast("Joined | Alike", node), inputs, frame)
            try:
                outputs = self._compute(node, inputs, frame)
            finally:  # also if it failed: an earlier check of this node may be the cause
                self.locate_checks(node, inputs)
            self.budget.account(outputs)
            return outputs
        except SonnxError as error:
            raise _located(error, node, inputs) from error.__cause__
        except Exception as error:
            waited = self.waits and not isinstance(error, MemoryError)
            failure = None if isinstance(error, RecursionError) else self.device.failure(error, waited=waited)
            raise _located(failure or typed_error(error, node.op_type), node, inputs) from error

    def _together(self, node: Joined | Alike, inputs: list[Any], frame: list[Any]) -> list[Any]:
        """Compute joined nodes by kernels if their values allow it; otherwise, or if that fails, one after the other."""
        programs = self.executor.programs
        assert programs is not None and self.placed is not None
        visit = partial(self.visit, frame=frame)
        made = programs.compute(node, inputs, self.placed.placement.is_known, visit)
        if made is None:
            return node.each(inputs, visit)
        self.budget.steps(node.count - 1)
        self.budget.account(made)
        return made

    def _compute(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        operator = node.operator
        assert operator is not None
        attributes = self._attributes(node, operator, frame)
        if self.placed is None:
            return operator.compute(self.xp, inputs, attributes, len(node.outputs))
        return self.placed.compute(node, operator, inputs, attributes)

    def _attributes(self, node: Node, operator: VersionedOperator, frame: list[Any]) -> dict[str, Any]:
        """The keyword arguments of a node's body."""
        if not operator.declaration.services:
            return node.attributes
        return operator.with_services(
            node.attributes,
            [o is not None for o in node.outputs],
            run=lambda graph, *values, dry=False: self._body(node, graph, values, frame, dry),
            derived=operator.derived,
            forward_graph=node.forward_graph,
        )

    def finish(self, outputs: list[Any], to_host: bool) -> list[Any]:
        """The outputs of the main graph, on the host or on the device; raises OperatorError if a check of the run failed."""
        if self.placed is None:
            return outputs
        pending = None if self.checks is None else self.checks.pending
        if self.checks is None or pending is None or not to_host:
            if self.checks is not None:
                self.checks.settle()
            return self.device.get_all(outputs) if to_host else [self.on_device(v) for v in outputs]
        *outputs, flags = self.device.get_all([*outputs, pending])
        self.checks.verify(flags)
        return outputs

    def on_device(self, value: Any) -> Any:
        """A value as an output that stays on the device."""
        return value if self.placed is None else self.placed.on_device(value)

    def settle_after_error(self) -> None:
        """Raise the error of an earlier node whose check failed: the present one may be its consequence."""
        if self.checks is None:
            return
        try:
            self.checks.settle()
        except OperatorError:
            raise
        except Exception:  # the device has failed, which the present error reports
            return

    def _body(self, node: Node, graph: Graph, inputs: Sequence[Any], outer: list[Any], dry: bool) -> list[Any]:
        """The `run` service of an operator's body: the number of inputs must be that of the subgraph.

        With `dry`, the inputs are not values of the model, and only the types of the outputs are used.
        """
        if len(inputs) != len(graph.inputs):
            raise OperatorError(f"the graph {graph.name!r} takes {len(graph.inputs)} inputs, got {len(inputs)}", code="SX407")
        made = self._inner(node, graph, inputs, outer)
        return made if self.placed is None else [self.placed.on_device(v) for v in made]

    def _inner(self, node: Node, graph: Graph, inputs: Sequence[Any], outer: list[Any]) -> list[Any]:
        """Run a body of a node, or its function, on these inputs; `outer` is the frame of the node."""
        frame = _frame(graph, self.states[id(graph)], inputs)
        for value in graph.captured:
            frame[value.slot] = outer[node.captures[value].slot]
        self.budget.step()
        with self.budget.holding(frame, inputs):
            self.form(graph).walk(frame, self.visit)
        return [frame[s] for s in run_order(graph).output_slots]


class RecordingVisitor(Visitor):
    """A run that is recorded, so that later ones repeat it."""

    def __init__(self, executor: Executor, budget: limits.Budget, key: Any, records: RunRecords) -> None:
        super().__init__(executor, budget)
        self.key, self.records = key, records
        self.recorder: RunRecorder | None = None
        self.node: Node | None = None  # the node of the main graph that is computed

    def walk(self, graph: Graph, frame: list[Any], inputs: Sequence[Any]) -> None:
        form, budget = self.form(graph), self.budget
        room, before = budget.room, (budget.left, budget.made)
        self.recorder = RunRecorder(self.device, form, frame, len(inputs))
        with keeping(self.recorder.tables):
            form.walk(frame, self.visit)
        record = None
        if budget.room == room:  # otherwise live bytes were counted during the run, and may be too many in another one
            is_plain = not any(isinstance(frame[s], dict) for s in form.output_slots)
            needed = before[0] - budget.left, budget.made - before[1]
            record = RunRecord(form, self.recorder, budget, needed, is_plain=is_plain)
        if self.recorder.copies or self.recorder.tables.bytes:
            self.device.synchronize()  # another run may be on another stream
        self.records.keep(self.key, record)

    def visit(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        if self.node is not None:  # within a node of the main graph
            return super().visit(node, inputs, frame)
        assert self.recorder is not None
        left, added = self.budget.left, 0 if self.checks is None else self.checks.added
        self.node = node
        try:
            outputs = super().visit(node, inputs, frame)
        finally:
            self.node = None
        checks = self.checks is not None and self.checks.added > added
        self.recorder.done(node, outputs, left - self.budget.left, checks=checks)
        return outputs

    def _together(self, node: Joined | Alike, inputs: list[Any], frame: list[Any]) -> list[Any]:
        from .joined import Joined

        made = super()._together(node, inputs, frame)
        programs = self.executor.programs
        if node is self.node and isinstance(node, Joined):
            assert programs is not None and self.placed is not None and self.recorder is not None
            known = self.placed.placement.is_known
            found = programs.found_for(node, inputs, known)
            if found is not None:
                left, bytes_made = self.budget.left, self.budget.made
                self.budget.left += node.count  # what is computed on the host was counted
                values = found.values(inputs, partial(self.visit, frame=frame))
                self.budget.left, self.budget.made = left, bytes_made
                self.recorder.kernels(node, inputs, found, values, known)
        return made

    def _compute(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        operator = node.operator
        assert operator is not None
        if node is not self.node or "run" in operator.declaration.services.values():
            return super()._compute(node, inputs, frame)
        assert self.placed is not None and self.recorder is not None
        attributes = self._attributes(node, operator, frame)
        args = self.placed.arguments(node, operator, inputs, attributes)
        if args is None:
            outputs = self.placed.compute_on_host(node, operator, inputs, attributes)
            if self.placed.repeats(node, inputs, fixed=all(map(self.recorder.is_fixed, node.input_slots))):
                self.recorder.fix(node, outputs)
            return outputs
        call = BodyCall(operator, args)
        call.outputs = outputs = operator.compute(self.device.xp, args, attributes, len(node.outputs), call)
        self.recorder.call(node, operator, inputs, attributes, call)
        return outputs


class ObservedVisitor(Visitor):
    """A run whose operators are shown to an observer."""

    waits = True

    def __init__(self, executor: Executor, budget: limits.Budget, observer: Observer) -> None:
        super().__init__(executor, budget)
        self.checks = None  # what is observed was checked before
        self.observer = observer
        self.path: list[tuple[Node, int]] = []
        self.dry = 0

    def form(self, graph: Graph) -> RunOrder:
        return run_order(graph)

    def visit(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        depth = len(self.path)
        if node.graphs:
            self.path.append((node, -1))
        try:
            outputs = super().visit(node, inputs, frame)
        finally:
            del self.path[depth:]
        if node.function is None and not self.dry:
            self.observer(node, inputs, outputs, self.path)
        return outputs

    def _compute(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        outputs = super()._compute(node, inputs, frame)
        self.device.synchronize()
        return outputs

    def _body(self, node: Node, graph: Graph, inputs: Sequence[Any], outer: list[Any], dry: bool) -> list[Any]:
        self.dry += dry
        try:
            return super()._body(node, graph, inputs, outer, dry)
        finally:
            self.dry -= dry

    def _inner(self, node: Node, graph: Graph, inputs: Sequence[Any], outer: list[Any]) -> list[Any]:
        around, number = self.path[-1]
        self.path[-1] = (around, number + 1)
        return super()._inner(node, graph, inputs, outer)


def _located(error: SonnxError, node: Node, inputs: Sequence[Any]) -> SonnxError:
    return error.locate(**_where(node, inputs))


def _where(node: Node, inputs: Sequence[Any]) -> dict[str, Any]:
    """The fields of an error that a node raises."""
    return {"node": node.name, "operator": node.op_type, "opset": node.opset, "version": node.version, **types_of(inputs)}
