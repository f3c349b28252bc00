"""A session: a graph on a device, and the only place that chooses between its plans and the definitions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .devices.device import Device
from .ir.graph import Graph, Node
from .ir.variants import with_inputs
from .kernels.table import Invalid, Options
from .limits import Budget, Limits
from .plans.answers import Mismatch, UseDefinitions
from .plans.passed import Receivers
from .proto.tensor_data import ModelFile
from .runtime.executor import Executor, Observer
from .runtime.feeds import holds_strings, ids_of, owned_copy

if TYPE_CHECKING:
    from .plans.planner import Planner
    from .plans.profile import Profile

REPLACEMENTS = 4
"""The number of sets of replaced initializers that have separate plans at the same time."""

NO_PLANS = UseDefinitions("optimize=0 was requested")
NOT_CPU = UseDefinitions("plans run on the CPU only")
OBSERVED = UseDefinitions("each node is observed, or only a part of the graph runs")
LARGE = UseDefinitions("functions and subgraphs have too many calls for a plan")
CHANGED = UseDefinitions("initializers have changed: the next run with these makes a plan")

Weights = Callable[[], Any]


def _unchanged() -> None:
    """The value for initializers that never change."""


class Session:
    """A graph on a device with options, ready to run any number of times, from any thread.

    Attributes:
        graph: the graph.
        device: the device, which holds the initializers.
        options: how plans compute.
        limits: the bounds of a run that does not set its own.
        constants: the arrays in attributes of nodes, which a run may read.
        reason: why the last run used the definitions; None if it used a plan.
    """

    def __init__(
        self,
        graph: Graph,
        device: Device,
        options: Options,
        limits: Limits,
        *,
        file: ModelFile | None = None,
        replaced: Mapping[int, int] | None = None,
    ) -> None:
        """Place the initializers of a graph on a device.

        Args:
            graph: the graph.
            device: the device.
            options: how plans compute.
            limits: the bounds of a run that does not set its own.
            file: the model file that initializers are read from when they are used; None if they are in memory.
            replaced: the place of the input that a result replaces, by the place of the result.  A plan writes the result into
                the array of the input and returns that array, if nothing else needs the values of before.
        """
        self.graph, self.device = graph, device
        self.options, self.limits, self.replaced = options, limits, replaced
        self._executor = Executor(graph, device)
        self._executor.file, self._executor.replaced = file, replaced
        self._names = tuple(v.name for v in graph.inputs)
        self._slots = {v.name: v.slot for v in (*graph.inputs, *graph.initializers.values())}
        self.constants = [v for n in graph.all_nodes() for v in n.attributes.values() if isinstance(v, np.ndarray)]
        self._fixed = ids_of(self.constants) | {id(a) for states in self._executor.states.values() for _, a in states}
        self._large = False
        self.forget_plans()

    def forget_plans(self) -> None:
        """Free the memory of plans; they are made again when they are needed."""
        self.reason: UseDefinitions | None = None
        self._planner: Planner | None = None
        self._planned: Any = None
        self._executor.forget_graphs()
        self._replacing: dict[tuple[str, ...], Session] = {}

    @property
    def observer(self) -> Observer | None:
        """Is called after each node of every run, which definitions then compute; None for none."""
        return self._executor.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._executor.observer = observer

    # --- initializers

    @property
    def file(self) -> ModelFile | None:
        """The model file that initializers are read from when they are used."""
        return self._executor.file

    @property
    def states(self) -> dict[int, list[tuple[int, Any]]]:
        """(slot, device value) of each initializer, by the id of its graph."""
        return self._executor.states

    @property
    def graphs(self) -> Sequence[Graph]:
        """The graph and the graphs in it."""
        return self._executor.graphs

    def load(self) -> None:
        """Copy initializers that are in a model file, before definitions read them."""
        self._executor.load()

    def check_file(self) -> None:
        """Raise InvalidModel if initializers are in a model file that was overwritten: they can no longer be read (SX110)."""
        self._executor.check_file()

    def replace(self, name: str, value: Any) -> None:
        """Compute with another value of an initializer of the main graph from now on.

        Args:
            name: its name.
            value: a value of the device.
        """
        self._executor.replace(self.graph.initializers[name].slot, value)
        self._fixed.add(id(value))
        self.forget_plans()

    def with_states(self, values: Mapping[str, Any]) -> Session:
        """A session of the same graph with other initializers and separate plans.

        Args:
            values: values of the device by the name of the initializer; the others are shared.
        """
        made = copy.copy(self)
        made._executor = self._executor.with_states(dict(values))
        made._fixed = self._fixed | {id(a) for a in values.values()}
        made.forget_plans()
        return made

    # --- runs

    def feed(self, name: str, value: Any) -> Any:
        """Put a value for an input or an initializer on the device; one that operators read on the host stays there."""
        return self._executor.feed(self._slots[name], value)

    def steady(
        self, inputs: Any, limits: Limits, weights: Weights, to_host: bool = True, receivers: Receivers = ()
    ) -> list[Any] | None:
        """Run by a plan, or by a graph of the device, on inputs whose checks can only succeed, as they did before.

        Args:
            inputs: as a user passes them: a dict, a list or one array.
            limits: the bounds of the run.
            weights: as for `run`.
            to_host: whether the outputs are copied to the host.
            receivers: as of `Plan.run`.

        Returns:
            The outputs, which belong to the caller; None if `run` must decide.
        """
        planner = self._planner
        if limits.deadline is not None or self._executor.observer is not None:
            return None
        if planner is None:
            if not self._executor.repeats:
                return None
        elif planner.limits is not limits or planner.weights != weights():
            return None
        kind = type(inputs)
        given = inputs
        if kind is dict:
            if len(inputs) != len(self._names):
                return None
            given = []
            for name in self._names:
                if name not in inputs:
                    return None
                given.append(inputs[name])
        elif kind is np.ndarray or kind is self.device.xp.ndarray:
            given = (inputs,)
        elif kind is not list and kind is not tuple:
            return None
        if planner is None:
            return self._repeated(given, limits, to_host)
        key = []
        for x in given:
            if type(x) is not np.ndarray:
                return None
            dtype = x.dtype
            if dtype.hasobject and not holds_strings(x):
                return None
            key.append((np.ndarray, x.shape, dtype))
        plan = planner.latest
        if plan is None or key != plan.signature or plan.admitted is not limits:
            plan = planner.find(key)
            if plan is None:
                return None
        try:
            found = plan.run(given, receivers=receivers)
        except (Invalid, Mismatch):
            return None
        if isinstance(found, UseDefinitions):
            return None
        self.reason = None
        return found

    def _repeated(self, inputs: Sequence[Any], limits: Limits, to_host: bool) -> list[Any] | None:
        """Run by the graph of the device that has computed the last run; None if that is not possible."""
        executor = self._executor
        if not (executor.repeats and self.options.level) or limits.deadline is not None or executor.observer is not None:
            return None
        return executor.steady(inputs, limits, to_host)

    @property
    def graph_bytes(self) -> int:
        """The bytes that graphs of the device keep between runs."""
        return self._executor.graph_bytes

    def run(
        self,
        inputs: Sequence[Any],
        replaced: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
        *,
        graph: Graph | None = None,
        observer: Observer | None = None,
        weights: Weights = _unchanged,
        to_host: bool = False,
        kept: Sequence[Any] = (),
    ) -> list[Any]:
        """Run the graph by a plan, or by the definitions if there is a reason for them.

        Args:
            inputs: values of `feed` in the order of the graph's inputs.
            replaced: values of `feed` by the names of initializers that they replace in this run.
            budget: of this run; None for one with the session's limits.
            graph: a selection of the graph; definitions compute it.
            observer: is called after each node, which its definition computes.
            weights: returns a value that changes whenever an initializer does; plans hold copies of initializers.
            to_host: whether the outputs are copied to the host.
            kept: further arrays that no output may be.

        Returns:
            The outputs in order.  They share no memory with the inputs, the initializers or `kept`.

        Raises:
            OperatorError: a node cannot compute with its inputs.
            ResourceExhausted: a limit was reached, or the flag was set.
        """
        if self.device.captures and budget is None and not replaced and graph is None and observer is None and not kept:
            outputs = self._repeated(inputs, self.limits, to_host)
            if outputs is not None:
                return outputs
        budget = budget or Budget(self.limits, memory=self.device.memory)
        found = self._planned_run(inputs, replaced or {}, budget, weights) if graph is None and observer is None else OBSERVED
        if not isinstance(found, UseDefinitions):
            self.reason = None
            return found
        self.reason = found
        budget.count_spared()
        budget.exchanges.at = 0
        executor, values = self._executor, dict(replaced or {})
        made = executor.run(graph or self.graph, inputs, values, budget, observer, to_host, bool(self.options.level))
        written = {o for o, i in (self.replaced or {}).items() if made[o] is inputs[i]}
        taken = self._fixed | executor.owned() | ids_of((*inputs, *values.values(), *kept))
        with self.device.active():
            return [v if o in written else owned_copy(v, taken) for o, v in enumerate(made)]

    def by_plan(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Run by a plan.

        Args:
            inputs: arrays in the order of the graph's inputs.

        Returns:
            The outputs, which belong to the caller; None if there is a reason for the definitions: it is in `reason`.
        """
        made = self.steady(inputs, self.limits, _unchanged)
        if made is None:
            found = self._planned_run(inputs, {}, Budget(self.limits, memory=self.device.memory), _unchanged)
            if isinstance(found, UseDefinitions):
                self.reason = found
                return None
            self.reason, made = None, found
        return made

    @property
    def kept_bytes(self) -> tuple[int, int]:
        """The bytes that plans keep between runs: those of arenas and graphs, and those of memory for their next results."""
        plans = [] if self._planner is None else list(self._planner.plans.values())
        return self._executor.graph_bytes + sum(p.arena_bytes for p in plans), sum(p.results_bytes for p in plans)

    def forget_results(self) -> None:
        """Free the memory that plans keep for their next results, unless somebody holds the last ones."""
        for plan in [] if self._planner is None else list(self._planner.plans.values()):
            plan.forget_results()

    def _planned_run(
        self, inputs: Sequence[Any], replaced: Mapping[str, Any], budget: Budget, weights: Weights
    ) -> list[Any] | UseDefinitions:
        if replaced:
            names = tuple(sorted(replaced))
            other = self._with_inputs(names)
            if isinstance(other, UseDefinitions):
                return other
            return other._planned_run([*inputs, *(replaced[n] for n in names)], {}, budget, weights)
        with budget.clock(runs=False):
            planner = self._current(weights)
        return planner if isinstance(planner, UseDefinitions) else planner.run(inputs, budget)

    def _with_inputs(self, names: tuple[str, ...]) -> Session | UseDefinitions:
        """The session of this graph in which these initializers are inputs."""
        refused = self._refusal()
        if refused is not None:
            return refused
        held = dict(self._replacing)  # a copy: runs of other threads read and replace it too
        made = held.pop(names, None)
        if made is None:
            made = copy.copy(self)
            made.graph = with_inputs(self.graph, names)
            made._executor = self._executor.with_graph(made.graph)
            made.forget_plans()
        held[names] = made
        while len(held) > REPLACEMENTS:
            del held[next(iter(held))]
        self._replacing = held
        return made

    def _refusal(self) -> UseDefinitions | None:
        """Why no plan can run."""
        if not self.options.level:
            return NO_PLANS
        if self._large:
            return LARGE
        if self.device.type != "CPU":
            return NOT_CPU
        return OBSERVED if self._executor.observer is not None else None

    def _current(self, weights: Weights) -> Planner | UseDefinitions:
        """The plans for the present initializers; definitions run at the first run after a change."""
        refused = self._refusal()
        if refused is not None:
            return refused
        now, planner = weights(), self._planner
        if planner is not None and planner.weights == now:
            return planner
        before, self._planned = self._planned, now
        if before not in (None, now) and not self.options.deterministic:
            self._planner = None
            return CHANGED
        from .plans.flat import NotFlat  # 50 ms, which a model that is only prepared does not need
        from .plans.planner import Planner

        try:
            planner = self._planner = Planner(
                self.graph, self._executor, self.options, allowed=self.limits, weights=now, replaced=self.replaced
            )
        except NotFlat:
            self._large = True
            return LARGE
        return planner

    def profile(
        self,
        inputs: Sequence[Any],
        replaced: Mapping[str, Any],
        *,
        runs: int,
        budget: Callable[[], Budget],
        run: Callable[[], object],
        weights: Weights = _unchanged,
        part: Callable[[Node], str] | None = None,
    ) -> Profile:
        """Measure runs of the graph.

        Args:
            inputs: as for `run`.
            replaced: as for `run`.
            runs: the number of runs to measure.
            budget: creates the budget of a run.
            run: runs the model without measurements.
            weights: as for `run`.
            part: of a node of a training step: "forward", "backward" or "update"; None for other graphs.

        Returns:
            The profile.
        """
        session: Session | UseDefinitions = self._with_inputs(tuple(sorted(replaced))) if replaced else self
        values = [*inputs, *(replaced[n] for n in sorted(replaced))]
        if isinstance(session, UseDefinitions):
            planner: Planner | UseDefinitions = session
        else:
            planner = session._current(weights)
        from .plans.profile import profile  # 10 ms, which a run without a profile does not need

        return profile(
            self.graph, self._executor, planner, values, inputs, replaced, options=self.options, runs=runs, budget=budget,
            run=run, part=part,
        )  # fmt: skip
