"""Finds the first diverging node and writes it as a model of one node, which is run again before it is reported.

found = bisect("model.onnx", {"x": x}, against="onnxruntime", to="repro")
if found:
    print(found)          # Conv 'conv3': ...; reproduces alone: yes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..comparison.difference import Difference, difference
from ..devices.device import DeviceLike
from ..engines.command import EngineCommand
from ..engines.local import FailedRun
from ..errors import InvalidInput, SonnxError
from ..ir.graph import Node
from ..proto import test_data
from ..proto.load import ModelSource
from . import repro
from .comparison import Comparison, Divergence
from .judge import Judge
from .lockstep import Values, Visit, attempt
from .model import ComparedModel, inner_names, nodes_for, outer_names, read_names, result_names
from .setting import BUDGET, Setting, is_saved
from .torch_module import is_torch


@dataclass
class Reproduction:
    """A diverging node, written as files.

    Attributes:
        node: the node.
        folder: of model.onnx and test_data_set_0, with the outputs of the trusted side.
        alone: whether the node alone, read from these files, diverges again.
        accumulated: whether no node diverges alone; then `node` added most to the error, and `first` is the first to diverge.
        first: the first diverging node, if the error accumulated.
        differences: of the node alone, by output.
        failure: the message of an engine that returned no values.
    """

    node: Divergence
    folder: Path
    alone: bool
    accumulated: bool = False
    first: Divergence | None = None
    differences: dict[str, Difference] = field(default_factory=dict)
    failure: FailedRun | None = None

    def __str__(self) -> str:
        """Return the node, and whether it reproduces alone, in one line."""
        return f"{self.node}; reproduces alone: {'yes' if self.alone else 'no'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the reproduction as plain data, for ``--json``.

        Returns:
            A dict of the attributes.
        """
        return {
            "node": self.node.to_dict(), "folder": str(self.folder), "alone": self.alone, "accumulated": self.accumulated,
            "first": self.first.to_dict() if self.first else None,
            "differences": {n: d.to_dict() for n, d in self.differences.items()},
            "failure": self.failure.to_dict() if self.failure else None,
        }  # fmt: skip


def bisect(
    model: ModelSource | ComparedModel,
    inputs: Any,
    *,
    against: ModelSource | ComparedModel | EngineCommand = "onnxruntime",
    device: DeviceLike = "CPU",
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    local: bool = False,
    align: bool = True,
    to: str | Path | None = None,
    budget: int = BUDGET,
    timeout: float = 60.0,
    progress: Callable[..., None] | None = None,
) -> Reproduction | None:
    """Find the first diverging node and write it as a model of one node.

    Without `local` both sides run freely to the first node that diverges.  A node that agrees if it reads the trusted side's
    inputs does not: errors have accumulated.  If no node diverges and an output differs, the node that added most is returned.
    Against the definition, where only a plan of several nodes diverges, these nodes are written together.  With `local` each
    node receives the trusted side's inputs, and the first that diverges alone is returned.  A node that this side refuses is a
    divergence; one that the trusted side refuses is returned only if nothing diverges.

    Args:
        model: a path, a ModelProto, bytes, or a ComparedModel.
        inputs: as for `SingaRep.run`.
        against: the trusted side, as for `compare`.  With saved values, and with a PyTorch module, the nodes between the last
            values that agree and the first that differs are written together.
        device: the device of this side.
        names: names of values in `model` and their names in the other model, as for `compare`.
        rtol: the relative tolerance; by default by dtype and operator.
        atol: the absolute tolerance; by default by dtype and magnitude.
        local: pass the trusted side's inputs to every node.
        align: pair the values of two models by what they compute where names do not; otherwise only by name.
        to: the folder to write; by default named after the model and the node.
        budget: the maximum bytes of the results of a chunk.
        timeout: the maximum seconds for one chunk on another engine.
        progress: called after each node, with `note=` its name.

    Returns:
        The node and its files; None if both sides agree.

    Raises:
        InvalidModel: a model breaks a rule of ONNX.
        UnsupportedModel: a model has an operator that is not implemented.
        InvalidInput: the inputs or names do not match the model, or no value of both sides could be compared (SX320); or the
            folder has other files of the names to write (SX351).
        DeviceUnavailable: the device cannot be used.
        MissingDependency: onnxruntime is not installed.
        SonnxError: the engine cannot be imported, or its command cannot be run (SX901).
    """
    if local and (is_saved(against) or is_torch(against)):
        raise InvalidInput(
            "local passes the trusted side's inputs to every node, but saved values cannot be computed", code="SX320"
        )
    if to is not None:
        test_data.check_folder(Path(to))
    with Setting(
        model, inputs, against=against, device=device, names=names, rtol=rtol, atol=atol, budget=budget, timeout=timeout,
        align=align,
    ) as setting:  # fmt: skip
        return _reproduction(setting, local, to, progress)


def _reproduction(
    setting: Setting, local: bool, to: str | Path | None, progress: Callable[..., None] | None
) -> Reproduction | None:
    """The first diverging node; the nodes of the plan that diverges with it; or the node that added most to the error."""
    found = _first(setting, local, progress)
    if found is None:
        return None
    visit, node, judge = found
    if judge.result.accumulated is not None and judge.result.first is None:
        return _accumulated(setting, visit, node, to, progress)
    if node.inputs_agreed is None or node.like or (setting.saved is not None and isinstance(visit.mine, dict)):
        part = _between(setting, visit, node, judge, to)
        if part is not None:
            return part
    result = _written(setting, visit, node, to)
    if result.alone or isinstance(visit.mine, FailedRun) or isinstance(visit.theirs, FailedRun):
        return result
    if setting.plans:
        together = _window(setting, to)
        if together is not None:
            if together.folder != result.folder:
                test_data.remove(result.folder)
            return together
    grown = _grew_most(setting, visit.call, progress)
    if grown is None:
        return result
    again = _written(setting, *grown, to)
    again.accumulated, again.first = not again.alone, node
    if again.folder != result.folder:
        test_data.remove(result.folder)
    return again


def _accumulated(
    setting: Setting, visit: Visit, node: Divergence, to: str | Path | None, progress: Callable[..., None] | None
) -> Reproduction:
    """The node that added most to the error, up to the first that is beyond the tolerance."""
    written = _written(setting, *(_grew_most(setting, visit.call, progress) or (visit, node)), to)
    written.accumulated, written.first = not written.alone, node
    return written


def _first(setting: Setting, local: bool, progress: Callable[..., None] | None) -> tuple[Visit, Divergence, Judge] | None:
    """The first visit that diverges; otherwise the first that the trusted side did not compute."""
    judge = Judge(setting, local)
    refused: tuple[Visit, Divergence, Judge] | None = None
    for visit in setting.visits():
        node = judge.judge(visit)
        if node is not None:
            return visit, node, judge
        theirs, call = visit.theirs, visit.call
        if refused is None and isinstance(theirs, FailedRun) and theirs.how not in ("absent", "not reached"):
            values, index = list(result_names(call)), setting.source.indices[call]
            refused = visit, Divergence(call.name, call.op_type, index, values, str(theirs), True), judge
        if progress:
            progress(note=call.name)
    if refused is None:
        _check_reached(setting, judge.result)
        if judge.result.accumulated is not None and judge.added_up is not None:
            return *judge.added_up, judge
    return refused


def _check_reached(setting: Setting, found: Comparison) -> None:
    """Raise InvalidInput (SX320) if nothing was compared, or if the other model cannot compute the values up to an output."""
    refusal = setting.refusal(found)
    if refusal is None and found.rows and found.is_empty:
        what = f"{setting.theirs.name}: nothing could be compared: all {len(found.rows)} values are empty"
        raise InvalidInput(what, code="SX320", hint="pass inputs without a size of 0")
    if refusal is None and (found.rows or not found.not_compared):
        return
    why, hint = str(found.not_compared[0].failure), ""
    if refusal is not None:
        why, hint = next((p.message for p in refusal.problems), refusal.message), refusal.hint
    count = len(found.rows)
    what = (
        f"all {count} values that could be compared agree, but it cannot compute all others"
        if count
        else "nothing could be compared"
    )
    raise InvalidInput(f"{setting.theirs.name}: {what}: {why}", code="SX320", hint=hint)


def _grew_most(setting: Setting, last: Node, progress: Callable[..., None] | None) -> tuple[Visit, Divergence] | None:
    """The node, up to this one, that adds the largest error to the trusted side's inputs."""
    judge = Judge(setting, local=True)
    best: tuple[Visit, Divergence] | None = None
    most = 0.0
    for visit in setting.visits():
        before = len(judge.result.rows)
        judge.judge(visit)
        used = [n for n in read_names(visit.call) if n not in setting.source.weights]
        rows = judge.result.rows[before:] if all(n in visit.their_inputs for n in used) else []
        worst = max(rows, key=lambda r: r.difference.excess, default=None)
        if worst is not None and worst.judged and worst.difference.excess > most:
            most = worst.difference.excess
            d = worst.difference
            why = f"max absolute error {d.max_abs:.3g}, {d.excess:.3g} of the tolerance" if d.agrees else str(d)
            call, name = visit.call, worst.value
            best = visit, Divergence(call.name, call.op_type, setting.source.indices[call], [name], f"{name!r}: {why}", True)
        if progress:
            progress(note=visit.call.name)
        if visit.call is last:
            break
    return best


def _written(setting: Setting, visit: Visit, node: Divergence, to: str | Path | None) -> Reproduction:
    """Write the visit's node, read it back, and run it on the side that failed."""
    source, call = setting.source, visit.call
    folder = repro.folder_for(to, source, call.name)
    values = visit.my_inputs | visit.their_inputs
    results: Values = visit.theirs if isinstance(visit.theirs, dict) else {}
    repro.write(folder, source, [call], values, result_names(call), results)
    again, inputs, expected = repro.read(folder)
    blamed = setting.theirs if isinstance(visit.theirs, FailedRun) and isinstance(visit.mine, dict) else setting.mine
    try:
        outputs = blamed.run(again.proto, again.folder, inputs)
    except SonnxError as error:
        return Reproduction(node, folder, True, failure=FailedRun.of(blamed, error))
    tolerance = setting.tolerance_alone([call])
    apart = {n: difference(outputs[n], e, tolerance) for n, e in expected.items()}
    alone = not source.draws(call) and any(not d.agrees for d in apart.values())
    return Reproduction(node, folder, alone, differences=apart)


def _between(setting: Setting, visit: Visit, node: Divergence, judge: Judge, to: str | Path | None) -> Reproduction | None:
    """Write the nodes between values that were compared and one that differs; None if the values cannot be computed again."""
    source, calls = setting.source, judge.between(visit.call)
    names = [n for n in outer_names(calls) if source.producer(n)]
    before = source.graph.nodes[: source.graph.nodes.index(visit.call)]
    values = attempt(setting.alone, source, before, dict(setting.inputs), names) if names else {}
    if not isinstance(values, dict) or not isinstance(visit.theirs, dict):
        return None
    if setting.saved is not None:
        values |= {n: setting.saved[n] for n in names if n in setting.saved}
    if len(calls) > 1:
        how = (
            "more values in the file narrow them down" if setting.saved is not None else "--map A=B pairs the values between them"
        )
        how = "the module has no values between them" if setting.owners else how
        how = f"{node.operator} {node.node!r} is the wrong one" if node.like else how
        node.notes.append(f"the model that is written has these {len(calls)} nodes; {how}")
    ends = node.values if node.index == source.indices[visit.call] else [n for n in result_names(visit.call) if n in visit.theirs]
    return _again(setting, calls, dict(setting.inputs) | values, node, ends, visit.theirs, to)


def _again(
    setting: Setting, calls: Sequence[Node], values: Values, node: Divergence, ends: Sequence[str], results: Values,
    to: str | Path | None,
) -> Reproduction:  # fmt: skip
    """Write several nodes as one model with these outputs, read it back, and run it on this side."""
    source = setting.source
    folder = repro.folder_for(to, source, node.node)
    used = {v.name for call in calls for v in call.reads}
    repro.write(folder, source, calls, {n: v for n, v in values.items() if n in used}, ends, results)
    again, feeds, expected = repro.read(folder)
    outputs = setting.mine.run(again.proto, again.folder, feeds)
    tolerance = setting.tolerance_alone(calls)
    apart = {n: difference(outputs[n], e, tolerance) for n, e in expected.items()}
    return Reproduction(node, folder, any(not d.agrees for d in apart.values()), differences=apart)


def _window(setting: Setting, to: str | Path | None) -> Reproduction | None:
    """The smallest run of nodes whose plan diverges for inputs of the definition, by bisection of its end, then of its begin."""
    search = _NodeRuns(setting)
    if not search.wrong(0, len(search.calls)):
        return None
    low, high = 0, len(search.calls)  # the first `low` nodes agree, the first `high` nodes do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search.wrong(0, middle) else (middle, high)
    end, first, last = high, 0, high  # from `first` on they diverge, from `last` on there are none
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if search.wrong(middle, end) else (first, middle)
    return search.written(first, end, to)


class _NodeRuns:
    """Runs of nodes, computed by a plan and by definitions from the same inputs."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        source = setting.source
        drawn = [call for call in source.graph.nodes if source.draws(call)]
        self.calls = [call for call in source.graph.nodes if not source.draws(call)]
        self.inputs: Values = dict(setting.inputs)
        names = inner_names(drawn)
        values = attempt(setting.theirs, source, source.graph.nodes, self.inputs, names) if names else {}
        self.inputs |= values if isinstance(values, dict) else {}

    def _ends(self, calls: Sequence[Node], after: Sequence[Node]) -> list[str]:
        """The values that later nodes or the graph's outputs need."""
        needed = {v.name for node in after for v in node.reads} | set(self.setting.source.outputs)
        return [n for n in inner_names(calls) if n in needed]

    def values(self, start: int, end: int) -> Values | None:
        """The inputs of nodes `start` to `end`, computed by definitions; None if they cannot be."""
        source, before = self.setting.source, self.calls[:start]
        used = {v.name for call in self.calls[start:end] for v in call.reads}
        names = [n for n in inner_names(before) if n in used]
        found = attempt(self.setting.theirs, source, before, self.inputs, names) if names else {}
        return None if isinstance(found, FailedRun) else {n: v for n, v in (self.inputs | found).items() if n in used}

    def wrong(self, start: int, end: int) -> dict[str, Difference]:
        """The differences of the values of these nodes that do not agree."""
        source, calls = self.setting.source, self.calls[start:end]
        names, inputs = self._ends(calls, self.calls[end:]), self.values(start, end)
        if not names or inputs is None:
            return {}
        mine, theirs = (attempt(e, source, calls, inputs, names) for e in (self.setting.mine, self.setting.theirs))
        if isinstance(mine, FailedRun) or isinstance(theirs, FailedRun):
            return {}
        tolerance = self.setting.tolerance_alone(calls)
        apart = {n: difference(mine[n], theirs[n], tolerance) for n in names}
        return {n: d for n, d in apart.items() if not d.agrees}

    def written(self, start: int, end: int, to: str | Path | None) -> Reproduction:
        """Write the nodes that the diverging values depend on, read them back, and run them again."""
        setting, source = self.setting, self.setting.source
        wrong, inputs = self.wrong(start, end), self.values(start, end) or {}
        calls = nodes_for(wrong, self.calls[start:end])
        last = calls[-1]
        worst = max(wrong, key=lambda n: wrong[n].excess)
        notes = [f"its plan also computes {', '.join(map(str, calls[:-1]))}"] if len(calls) > 1 else []
        why, index = f"{worst!r}: {wrong[worst]}", source.indices[last]
        node = Divergence(last.name, last.op_type, index, list(wrong), why, True, notes, among=len(calls))
        results = attempt(setting.theirs, source, calls, inputs, list(wrong))
        return _again(setting, calls, inputs, node, node.values, results if isinstance(results, dict) else {}, to)
