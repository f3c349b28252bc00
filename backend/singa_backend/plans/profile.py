"""Profiles: where the time of a run goes, by step of a plan, by node and by operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .. import dtypes, limits, machine
from ..devices.device import Device
from ..ir.declaration import has_trait
from ..ir.gradient import GRADIENT
from ..ir.graph import Graph, Node
from ..ir.sizes import now, settled
from ..kernels.rounding import without_bf16
from ..kernels.table import Options
from ..kernels.values import PlanStep, Value
from ..kernels.work import Rates, flops, moved, rates
from ..runtime.executor import Executor, Path
from .answers import UseDefinitions
from .contention import contention
from .plan import Plan
from .planner import Planner
from .trace import Segment
from .training_profile import REORDERS, GradientProfile, Part, PartProfile, Work, gradients_of, parts_of


@dataclass(frozen=True)
class StepProfile:
    """A step of a plan, or a node that its definition computes.

    Attributes:
        index: its position in a run.
        segment: the number of its segment, from 0.
        kernel: the function that computes it; "definition" for the definition in NumPy.
        nodes: the names of the nodes that it computes.
        operators: their operators.
        seconds: the median over the runs.
        share: of the time of all steps.
        start: when it began in the run that the trace shows, in seconds.
        took: its time in that run.
        calls: the number of times that it ran in one run.
        flops: floating point operations; None if they are not known.
        bytes: the sizes of the values that it reads and writes.
        roofline: the minimum time at this machine's rates, divided by `seconds`; None if the rates do not bound it.
        inputs: types and layouts of what it reads: the axes from the outermost in memory to the innermost, "*" if there are gaps.
        outputs: the same of what it writes.
        notes: why faster kernels were not chosen, and other remarks.
        part: of a training step: "forward", "backward", "update" or "reorders"; "" for other graphs.
    """

    index: int
    segment: int
    kernel: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    seconds: float
    share: float
    start: float
    took: float
    calls: int
    flops: int | None
    bytes: int
    roofline: float | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]
    part: str = ""


@dataclass(frozen=True)
class NodeProfile:
    """A node of the model.

    Attributes:
        name: its name.
        operator: the operator.
        values: the names of its outputs.
        main: whether it is in the main graph, and not in a function or a subgraph.
        seconds: the time of the steps that compute it; 0 if it is part of another node's steps.
        share: of the time of all steps.
        flops: of these steps.
        bytes: of these steps.
        roofline: the part of this machine's rates that they reach; None if the rates do not bound one of them.
        kernels: of these steps.
        part_of: the name of the node whose steps compute this one too; "" for others.
        steps: the indices of the steps; empty if it needs none, because it is constant, or a view of its input.
        notes: of these steps.
        part: of a training step: "forward", "backward" or "update"; "" for other graphs.
    """

    name: str
    operator: str
    values: tuple[str, ...]
    main: bool
    seconds: float
    share: float
    flops: int | None
    bytes: int
    roofline: float | None
    kernels: tuple[str, ...]
    part_of: str
    steps: tuple[int, ...]
    notes: tuple[str, ...]
    part: str = ""


@dataclass(frozen=True)
class OperatorProfile:
    """All nodes of an operator.

    Attributes:
        operator: the operator.
        nodes: their number.
        seconds: the sum of their times.
        share: of the time of all steps.
        flops: the sum; None if it is not known for a node.
        bytes: the sum.
        roofline: the part of this machine's rates that they reach; None if the rates do not bound one of them.
    """

    operator: str
    nodes: int
    seconds: float
    share: float
    flops: int | None
    bytes: int
    roofline: float | None


@dataclass(frozen=True)
class Profile:
    """The result of `SingaRep.profile` and `Model.profile_step`.

    Attributes:
        by: "plan", or "definitions" where no plan runs.
        reason: why no plan runs: another device, `optimize=0`, or inputs that the plan refuses; "" if one does.
        graphs: on a GPU, the CUDA graphs that compute a run, and the steps between them, each with the reason.
        device: the device.
        options: threads, precision, level and deterministic.
        runs: the number of runs that were measured.
        seconds: of a whole run without measurements within it, the median.
        step_seconds: the sum over the steps.
        single_runs: how many of these runs used one thread, from the start or from a step on, because other programs used cores.
        waited: the seconds for which threads of this process were ready and had no core, for each second of these runs; None if
            the system does not report it.
        rates: what this machine reaches; None on a GPU.
        steps: in the order in which they run.
        nodes: in the order of the model.
        operators: the slowest first.
        segments: the number of segments of the plan, each of which ends at a value whose shape depends on data.
        folded: the number of nodes that depend on shapes and constants only, and are computed once.
        fused: the number of rewrites by each pass of fusion.
        gradients: of a training step, the number of gradients that kernels compute as one call.
        refused_gradients: the reasons why kernels declined others, by the operator and the first result of its call.
        bindings: how often plans were bound to other sizes than those of the run before.
        other_sizes: why plans did not take the sizes of a run, and how often: the assumption that does not hold.
        arena_bytes: the memory of the plan's values.
        live_bytes: the lower bound of that memory: the values that are live at the same time.
        parts: of a training step that `Model.profile_step` has measured: forward, backward, update and reorders.
        gradient_calls: what computes the gradient of each call in such a step.
        notes: remarks on the whole run, such as that this machine has no products in bfloat16.
        weight_bytes: the initializers; of a training step, the parameters and states that it reads.
        peak_bytes: the largest memory of this process so far; None if the system does not report it.
    """

    by: str
    device: str
    options: dict[str, Any]
    runs: int
    seconds: float
    step_seconds: float
    rates: Rates | None
    steps: list[StepProfile]
    nodes: list[NodeProfile]
    operators: list[OperatorProfile]
    segments: int = 0
    folded: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    gradients: int = 0
    refused_gradients: dict[str, str] = field(default_factory=dict)
    bindings: int = 0
    other_sizes: dict[str, int] = field(default_factory=dict)
    parts: list[PartProfile] = field(default_factory=list)
    gradient_calls: list[GradientProfile] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    arena_bytes: int = 0
    live_bytes: int = 0
    weight_bytes: int = 0
    peak_bytes: int | None = None
    single_runs: int = 0
    waited: float | None = None
    reason: str = ""
    graphs: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, as `--json` writes it.

        Returns:
            A dict of the attributes.
        """
        return asdict(self)

    def chrome_trace(self) -> dict[str, Any]:
        """Return one of the runs as a trace for chrome://tracing or ui.perfetto.dev.

        Returns:
            A document of the Trace Event Format, to be written as JSON.
        """
        events = [
            {
                "name": step.kernel if step.kernel != "definition" else step.operators[-1],
                "cat": step.operators[0],
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": step.start * 1e6,
                "dur": step.took * 1e6,
                "args": {n: v for n, v in asdict(step).items() if n not in ("start", "took", "seconds", "share", "index")},
            }
            for step in self.steps
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"device": self.device, "by": self.by}}


@dataclass(eq=False)
class _Piece:
    """A step of a plan or a node before the medians are known."""

    nodes: tuple[Node, ...]
    kernel: str
    segment: int = 0
    flops: int | None = 0
    bytes: int = 0
    calls: int = 1
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    group: Any = None
    start: float = 0.0
    times: list[float] = field(default_factory=list)

    @property
    def bounded(self) -> bool:
        """Whether the measured rates bound it: its work is known, and is not a product of integers, which are faster."""
        integers = has_trait(self.main.domain, self.main.op_type, "product") and any(
            i.startswith(("uint8[", "int8[")) for i in self.inputs[:1]
        )
        return self.flops is not None and not integers

    @property
    def main(self) -> Node:
        """The node that the time is counted for: the largest part of the work."""
        return next((n for n in self.nodes if has_trait(n.domain, n.op_type, "product")), self.nodes[0])


def profile(
    graph: Graph,
    executor: Executor,
    planner: Planner | UseDefinitions,
    planned: Sequence[Any],
    inputs: Sequence[Any],
    replaced: Mapping[str, Any],
    *,
    options: Options,
    runs: int,
    budget: Callable[[], limits.Budget],
    run: Callable[[], object],
    part: Part | None = None,
) -> Profile:
    """Measure runs of a model.

    Args:
        graph: the model.
        executor: its executor.
        planner: its plans, or why the definitions run.
        planned: the inputs of the plans.
        inputs: values of the device, in the order of the graph's inputs.
        replaced: values that replace initializers, by name.
        options: how plans compute.
        runs: the number of runs to measure.
        budget: creates the budget of a run.
        run: runs the model without measurements.
        part: of a node of a training step; None for other graphs.

    Returns:
        The profile.
    """
    device = executor.device
    recorder, watch, totals, single_runs = _Recorder(), _Watch(device), list[float](), 0
    waited: float | None = 0.0
    for _ in range(runs):
        waiting, singles, start = machine.waited(), contention.single_runs, time.perf_counter()
        run()
        totals.append(time.perf_counter() - start)
        waited = None if waited is None or waiting is None else waited + max(0.0, (machine.waited() or 0.0) - waiting)
        single_runs += contention.single_runs > singles
        recorder.begin()
        if isinstance(planner, Planner):
            found = planner.run(planned, budget(), recorder)
            planner = found if isinstance(found, UseDefinitions) else planner
        if isinstance(planner, UseDefinitions):
            watch.begin()
            executor.run(graph, inputs, dict(replaced), budget(), watch)
        else:
            recorder.end()
    plan = recorder.plan_of(planner) if isinstance(planner, Planner) else None
    pieces = watch.pieces() if plan is None else recorder.pieces()
    reachable = rates(options.threads, options.precision) if device.is_host or device.type == "STRICT" else None
    whole = sum(_median(p.times) for p in pieces)
    facts = _plan_facts(plan, planner, options) if plan is not None and isinstance(planner, Planner) else {}
    steps = _steps(pieces, whole, reachable)
    nodes = _nodes(graph, pieces, steps, whole)
    facts |= {"steps": steps, "nodes": nodes, "operators": _operators(nodes, whole), "rates": reachable}
    facts["graphs"] = executor.graphs_in_words(inputs)
    if part is not None:
        facts |= _of_training(graph, pieces, steps, nodes, part, planner, whole)
    return Profile(
        by="definitions" if plan is None else "plan",
        device=str(device),
        options=asdict(options),
        runs=runs,
        seconds=_median(totals),
        step_seconds=whole,
        weight_bytes=executor.resident,
        peak_bytes=machine.peak_bytes(),
        single_runs=single_runs,
        waited=None if waited is None else waited / sum(totals),
        reason=planner.reason if isinstance(planner, UseDefinitions) else "",
        **facts,
    )


def _plan_facts(plan: Plan, planner: Planner, options: Options) -> dict[str, Any]:
    """What a profile reports of a plan itself."""
    return {
        "segments": len(plan.segments),
        "folded": plan.facts.folded,
        "fused": dict(planner.fused),
        "gradients": len(planner.gradients.taken),
        "refused_gradients": planner.gradients.refused,
        "bindings": planner.bound,
        "other_sizes": dict(planner.failed),
        "arena_bytes": plan.arena_bytes,
        "live_bytes": sum(s.live_bytes for s in plan.segments),
        "notes": tuple(filter(None, [without_bf16(options)])),
    }


class _Recorder:
    """Runs the steps of segments one by one, and measures each."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], _Piece] = {}
        self.order: list[tuple[int, int]] = []
        self.segments: dict[int, tuple[int, Segment]] = {}
        self.first: Segment | None = None
        self.present: list[tuple[Segment, list[tuple[float, float]]]] = []

    def begin(self) -> None:
        self.present, self.origin = [], time.perf_counter()

    def __call__(self, segment: Segment, budget: limits.Budget | None) -> None:
        clock, at, times = time.perf_counter, 0, []
        with segment.present() as flat:
            for step in segment.steps:
                if budget is not None:
                    budget.watch()
                bound = flat[at : at + step.count]
                at += step.count
                start = clock()
                for function, arguments in bound:
                    function(*arguments)
                times.append((start, clock() - start))
        self.present.append((segment, times))

    def end(self) -> None:
        """Keep the run, unless it has made a new segment."""
        if not self.present or self.present[-1][0].check is not None:
            return
        self.first, self.order = self.present[0][0], []
        for segment, times in self.present:
            number, _ = self.segments.setdefault(id(segment), (len(self.segments), segment))
            for i, (step, (start, seconds)) in enumerate(zip(segment.steps, times, strict=True)):
                key = (number, i)
                piece = self.found.get(key) or self.found.setdefault(key, _piece(step, number))
                piece.times.append(seconds)
                piece.start = start - self.origin
                self.order.append(key)

    def plan_of(self, planner: Planner) -> Plan | None:
        return next((p for p in planner.plans.values() if p.first is self.first), None)

    def pieces(self) -> list[_Piece]:
        """The steps of the last run."""
        found = [self.found[key] for key in self.order]
        groups: dict[int, list[_Piece]] = {}
        for piece in found:
            groups.setdefault(id(piece.group), []).append(piece)
        for group in groups.values():  # a kernel of several steps: the work is counted for the longest
            work = [p.flops for p in group]
            longest = max(group, key=lambda p: _median(p.times))
            for p in group:
                p.flops = 0
            longest.flops = None if None in work else sum(w or 0 for w in work)
        return found


def _piece(step: PlanStep, segment: int) -> _Piece:
    notes = step.notes
    if step.kernel == "definition" and not notes:
        notes = (f"no kernel of {step.origins[0].op_type}",)
    return _Piece(
        nodes=step.origins,
        kernel=step.kernel,
        segment=segment,
        flops=step.work(),
        bytes=_moved(step),
        inputs=tuple(map(layout, step.reads)),
        outputs=tuple(map(layout, step.writes)),
        notes=notes,
        group=step.origins,
    )


def _median(seconds: Sequence[float]) -> float:
    from statistics import median  # 10 ms, which a run without a profile needs not

    return median(seconds)


def _moved(step: PlanStep) -> int:
    written = {id(v): now(v.nbytes) for v in step.writes}
    read = sum({id(v): now(v.nbytes) for v in step.reads if id(v) not in written}.values())
    return moved([n.op_type for n in step.origins], read, sum(written.values()))


def layout(value: Value) -> str:
    """The type of a value, and its axes from the outermost in memory to the innermost."""
    shape, strides = settled(value.shape), settled(value.strides)
    text = f"{dtypes.onnx_name(value.dtype)}{list(shape)}"
    if value.ndim < 2 or value.contiguous:
        return text
    axes = sorted(range(value.ndim), key=lambda a: (-abs(strides[a]), a))
    size, dense = value.dtype.itemsize, True
    for a in reversed(axes):
        dense = dense and (shape[a] == 1 or strides[a] == size)
        size *= shape[a]
    return f"{text} {''.join(chr(ord('a') + a) for a in axes)}{'' if dense else '*'}"


class _Watch:
    """An observer of the executor that measures the time between two nodes."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.found: dict[int, _Piece] = {}
        self.run: dict[int, tuple[float, int]] = {}

    def begin(self) -> None:
        self._keep()
        self.run = {}
        self.origin = self.last = time.perf_counter()

    def _keep(self) -> None:
        for key, (seconds, calls) in self.run.items():
            piece = self.found[key]
            piece.times.append(seconds)
            piece.calls = calls

    def __call__(self, node: Node, inputs: list[Any], outputs: list[Any], path: Path) -> None:
        with self.device.active() as active:
            if hasattr(active, "synchronize"):
                active.synchronize()
        elapsed = time.perf_counter() - self.last
        whole = next((outer for outer, _ in path if outer.domain == GRADIENT), node)  # a gradient, of whose body the node is
        seconds, calls = self.run.get(id(whole), (0.0, 0))
        piece = self.found.get(id(whole))
        if piece is None:
            piece = self.found[id(whole)] = _Piece((whole,), "definition", group=whole)
        if not calls:
            piece.start, piece.flops, piece.bytes = self.last - self.origin, 0, 0
            types = [tuple(_type(v) for v in vs if _is_array(v)) for vs in (inputs, outputs)]
            piece.inputs, piece.outputs = types if whole is node else ((), ())
        shapes = [tuple(v.shape) if _is_array(v) else None for v in inputs]
        first = next((v.shape for v in outputs if _is_array(v)), ())
        work = flops(node.domain, node.op_type, node.attributes, shapes, first)
        piece.flops = None if work is None or piece.flops is None else piece.flops + work
        read, written = (sum(int(v.nbytes) for v in values if _is_array(v)) for values in (inputs, outputs))
        piece.bytes += moved([node.op_type], read, written)
        self.run[id(whole)] = (seconds + elapsed, calls + 1 if whole is node else 1)
        self.last = time.perf_counter()

    def pieces(self) -> list[_Piece]:
        self._keep()
        self.run = {}
        return sorted((p for p in self.found.values() if p.times), key=lambda p: p.start)


def _is_array(value: Any) -> bool:
    return hasattr(value, "nbytes") and hasattr(value, "shape")


def _type(array: Any) -> str:
    return f"{dtypes.onnx_name(array.dtype)}{list(array.shape)}"


def _steps(pieces: Sequence[_Piece], whole: float, reachable: Rates | None) -> list[StepProfile]:
    made = []
    for index, piece in enumerate(pieces):
        seconds = _median(piece.times)
        reached = None if reachable is None or not piece.bounded else reachable.reached(piece.flops, piece.bytes, seconds)
        names, operators = (tuple(dict.fromkeys(n)) for n in zip(*((n.name, n.op_type) for n in piece.nodes), strict=True))
        made.append(
            StepProfile(
                index, piece.segment, piece.kernel, names, operators, seconds, seconds / whole if whole else 0.0, piece.start,
                piece.times[-1], piece.calls, piece.flops, piece.bytes, reached, piece.inputs, piece.outputs, piece.notes,
            )
        )  # fmt: skip
    return made


def _nodes(graph: Graph, pieces: Sequence[_Piece], steps: Sequence[StepProfile], whole: float) -> list[NodeProfile]:
    """The nodes of the model that compute something, in order; then those of functions and subgraphs that steps compute."""
    main = {id(n) for n in graph.nodes}
    every = {id(n): n for n in graph.nodes if n.function is None and (n.domain, n.op_type) != ("", "Constant")}
    own: dict[int, list[int]] = {}
    part_of: dict[int, Node] = {}
    for i, piece in enumerate(pieces):
        own.setdefault(id(piece.main), []).append(i)
        for node in piece.nodes:
            every.setdefault(id(node), node)
            if node is not piece.main:
                part_of[id(node)] = piece.main
    made = []
    for key, node in every.items():
        indices = own.get(key, [])
        mine = [steps[i] for i in indices]
        seconds, work, nbytes = sum(s.seconds for s in mine), _sum([s.flops for s in mine]), sum(s.bytes for s in mine)
        made.append(
            NodeProfile(
                name=node.name,
                operator=node.op_type,
                values=tuple(n for n in node.output_names if n),
                main=key in main,
                seconds=seconds,
                share=seconds / whole if whole else 0.0,
                flops=work,
                bytes=nbytes,
                roofline=_together([(s.roofline, s.seconds, bool(s.flops or s.bytes)) for s in mine]),
                kernels=tuple(dict.fromkeys(s.kernel for s in mine)),
                part_of=part_of[key].name if key in part_of and not mine else "",
                steps=tuple(indices),
                notes=tuple(dict.fromkeys(n for s in mine for n in s.notes)),
            )
        )
    return made


def _of_training(
    graph: Graph,
    pieces: Sequence[_Piece],
    steps: Sequence[StepProfile],
    nodes: Sequence[NodeProfile],
    part: Part,
    planner: Planner | UseDefinitions,
    whole: float,
) -> dict[str, Any]:
    """The rows of steps and nodes with the parts of a training step, and what a profile reports of it."""
    work = [Work(p.nodes, p.main, p.kernel, s.seconds) for p, s in zip(pieces, steps, strict=True)]
    named = {n.name: part(n) for n in graph.all_nodes()} | {n.name: part(n) for n in graph.nodes}
    used = planner if isinstance(planner, Planner) else None
    return {
        "steps": [replace(s, part=REORDERS if w.copies else w.part(part)) for s, w in zip(steps, work, strict=True)],
        "nodes": [replace(n, part=named.get(n.name, "")) for n in nodes],
        "parts": parts_of(work, part, whole),
        "gradient_calls": gradients_of(graph, work, used, whole),
    }


def _operators(nodes: Sequence[NodeProfile], whole: float) -> list[OperatorProfile]:
    groups: dict[str, list[NodeProfile]] = {}
    for node in nodes:
        groups.setdefault(node.operator, []).append(node)
    made = []
    for operator, group in groups.items():
        seconds, work, nbytes = sum(n.seconds for n in group), _sum([n.flops for n in group]), sum(n.bytes for n in group)
        reached = _together([(n.roofline, n.seconds, bool(n.flops or n.bytes)) for n in group if n.steps])
        made.append(OperatorProfile(operator, len(group), seconds, seconds / whole if whole else 0.0, work, nbytes, reached))
    return sorted(made, key=lambda o: -o.seconds)


def _together(parts: Sequence[tuple[float | None, float, bool]]) -> float | None:
    """The part of the rates that several steps reach: (their part, seconds, whether they do any work); None if one has none."""
    if any(reached is None and works for reached, _, works in parts):
        return None
    whole, minimum = sum(seconds for _, seconds, _ in parts), sum((reached or 0.0) * seconds for reached, seconds, _ in parts)
    return minimum / whole if whole and minimum else None


def _sum(work: Sequence[int | None]) -> int | None:
    return None if None in work else sum(w or 0 for w in work)
