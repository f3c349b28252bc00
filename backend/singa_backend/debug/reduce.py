"""Reduces a failing model to few nodes, outputs and rows that still fail, and writes it with its inputs.

    found = reduce("model.onnx", {"x": x}, differs("onnxruntime"), to="small")
    print(found)          # 2 of 113 nodes, ...

Nodes are cut from the end and from the front, then by delta debugging; new inputs get their values in the whole model.
"""

from __future__ import annotations

import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from ..comparison.difference import Tolerance, difference
from ..engines.command import EngineCommand
from ..engines.local import Engine, FailedRun, Ours, Planned
from ..errors import InvalidInput, SonnxError
from ..ir.graph import Node
from ..limits import check_number
from ..proto import test_data
from ..proto.checker import check_model, infer_shapes
from ..proto.load import ModelSource
from . import repro
from .lockstep import Values, walk
from .model import ComparedModel, inner_names, outer_names
from .setting import BUDGET, DEFINITION, trusted
from .spill import SpillStore


class Predicate(AbstractContextManager["Predicate"], ABC):
    """The condition that a model fails.

    Attributes:
        trusted: the engine whose values are the inputs of a cut model; None for this package.
        inferred: whether candidates must pass ONNX's shape inference if the whole model does, because no engine checks them.
        fewer_rows: whether to try fewer rows.
    """

    trusted: Engine | None = None
    inferred = False
    fewer_rows = True

    @abstractmethod
    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        """Test whether a model fails.

        Args:
            model: a candidate.
            folder: the folder of its external data.
            inputs: values by name.

        Returns:
            If it fails, the expected outputs by name (empty if they are not known); None if it does not fail.
        """

    def __exit__(self, *_: object) -> None:
        """Close the trusted engine."""
        if self.trusted is not None:
            self.trusted.close()


class raises(Predicate):
    """The model fails if this package raises an error of this code, always at the same operator.

    Attributes:
        code: of the error.
        engine: this package.
        operator: at which the error is raised; None before the first failure.
    """

    fewer_rows = False  # another shape may be wrong for another reason
    operator: str | None = None

    def __init__(self, code: str, device: str = "CPU") -> None:
        """Create the condition.

        Args:
            code: of a SonnxError, such as "SX404".
            device: the device that runs the model.

        Raises:
            DeviceUnavailable: the device cannot be used.
        """
        self.code = code
        self.engine = Ours(device, level=2)

    def __str__(self) -> str:
        """Return the condition as a sentence."""
        return f"{self.engine.name} raises {self.code}"

    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        """Test whether a model fails.

        Args:
            model: a candidate.
            folder: the folder of its external data.
            inputs: values by name.

        Returns:
            An empty dict if it fails, None if it does not.
        """
        try:
            self.engine.run(model, folder, inputs)
        except SonnxError as error:
            if error.code == self.code and self.operator in (None, error.operator):
                self.operator = error.operator
                return {}
        return None


class differs(Predicate):
    """The model fails if its outputs differ from those of another engine that can run it.

    Attributes:
        engine: this package.
        trusted: the other engine.
        tolerance: of the comparison.
    """

    def __init__(
        self,
        against: str | EngineCommand = "onnxruntime",
        *,
        device: str = "CPU",
        rtol: float | None = None,
        atol: float | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Create the condition.

        Args:
            against: "onnxruntime", "reference", "sonnx" (the CPU), "definition" (for the plans of the CPU), MODULE:CLASS or an
                EngineCommand, as for `compare`.
            device: the device of this package.
            rtol: the relative tolerance; by default by dtype and operator.
            atol: the absolute tolerance; by default by dtype and magnitude.
            timeout: the maximum seconds for one run on the other engine.

        Raises:
            SonnxError: the engine is unknown or cannot be used (SX901).
            DeviceUnavailable: the device cannot be used.
            MissingDependency: onnxruntime is not installed.
        """
        self.engine: Ours = Planned() if against == DEFINITION else Ours(device)
        self.trusted: Engine = trusted(against, timeout=timeout)
        self.tolerance = Tolerance(rtol, atol)

    def __str__(self) -> str:
        """Return the condition as a sentence."""
        return f"the outputs of {self.engine.name} differ from those of {self.trusted.name}"

    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        """Test whether a model fails.

        Args:
            model: a candidate.
            folder: the folder of its external data.
            inputs: values by name.

        Returns:
            The outputs of the other engine if they differ, None if they agree or an engine refuses the model.
        """
        try:
            whole = _source(model, folder)
            mine = self.engine.run(model, folder, inputs)
            if self.trusted.typed:
                model = whole.part(whole.graph.nodes, inputs, whole.outputs, mine)
            theirs = self.trusted.run(model, folder, inputs)
        except SonnxError:
            return None
        of = {n: whole.widened(self.tolerance, n) for n in theirs}
        return None if all(difference(mine[n], v, of[n]).agrees for n, v in theirs.items()) else theirs


class command(Predicate):
    """The model fails if a shell command exits with a code other than 0.

    Attributes:
        text: the command.
        timeout: in seconds.
        printed: the last line that it printed when it last failed.
    """

    inferred = True
    printed = ""

    def __init__(self, text: str, timeout: float = 60.0) -> None:
        """Create the condition.

        Args:
            text: the command; {model} is replaced by the path of the candidate's model.onnx, {data} by that of its
                test_data_set_0.
            timeout: the maximum seconds; a command that takes longer does not count as failing.
        """
        self.text, self.timeout = text, timeout

    def __str__(self) -> str:
        """Return the condition as a sentence."""
        return f"{self.text!r} exits with a code other than 0"

    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        """Test whether a model fails.

        Args:
            model: a candidate.
            folder: the folder of its external data.
            inputs: values by name.

        Returns:
            An empty dict if it fails, None if it does not.
        """
        with tempfile.TemporaryDirectory(prefix="sonnx-") as name:
            path = Path(name)
            whole = _source(model, folder)
            repro.write(path, whole, whole.graph.nodes, inputs, whole.outputs, {})
            line = self.text.replace("{model}", str(path / "model.onnx")).replace("{data}", str(path / "test_data_set_0"))
            try:
                done = subprocess.run(
                    line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=self.timeout, check=False
                )
            except subprocess.TimeoutExpired:
                return None
        if not done.returncode:
            return None
        self.printed = (done.stdout.decode(errors="replace").strip().splitlines() or [""])[-1]
        return {}


@dataclass
class Reduction:
    """The result of `reduce`.

    Attributes:
        folder: of model.onnx and test_data_set_0.
        predicate: the condition as a sentence.
        nodes: their number (before, after).
        outputs: their number (before, after).
        operators: of the remaining nodes.
        shapes: of the remaining inputs.
        tried: the number of candidates that were run.
    """

    folder: Path
    predicate: str
    nodes: tuple[int, int]
    outputs: tuple[int, int]
    operators: list[str]
    shapes: dict[str, list[int]] = field(default_factory=dict)
    tried: int = 0

    def __str__(self) -> str:
        """Return the numbers of nodes and outputs in one line."""
        shown = ", ".join(self.operators[:6]) + (", ..." if len(self.operators) > 6 else "")
        return f"{self.nodes[1]} of {self.nodes[0]} nodes ({shown}), {self.outputs[1]} of {self.outputs[0]} outputs"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for ``--json``.

        Returns:
            A dict of the attributes.
        """
        return vars(self) | {"folder": str(self.folder)}


def reduce(
    model: ModelSource | ComparedModel,
    inputs: Any,
    predicate: Predicate,
    *,
    to: str | Path | None = None,
    tries: int = 1000,
    budget: int = BUDGET,
    progress: Callable[..., None] | None = None,
) -> Reduction:
    """Find a small part of a model that still fails, and write it with its inputs.

    Args:
        model: a path, a ModelProto, bytes, or a ComparedModel.
        inputs: as for `SingaRep.run`.
        predicate: the failure: `raises(code)`, `differs(engine)` or `command(text)`.
        to: the folder to write; by default the model's name and "-reduced".
        tries: the maximum number of candidates to run.
        budget: the maximum bytes of recorded values in memory; others are on disk.
        progress: called before each candidate, with `note=` its number of nodes.

    Returns:
        What is left of the model, and its files.

    Raises:
        InvalidInput: the whole model does not fail (SX321), or the inputs do not match it; or the folder has other files of the
            names to write (SX351).
        InvalidModel: the model breaks a rule of ONNX.

    Example:
        >>> reduce("model.onnx", {"x": x}, differs("onnxruntime"), to="small")
    """
    check_number("tries", tries, 1, whole=True)
    check_number("budget", budget, 1, whole=True)
    if not isinstance(predicate, Predicate):
        raise InvalidInput(f"predicate must be a Predicate, such as differs(...), got a {type(predicate).__name__}", code="SX309")
    if to is not None:
        test_data.check_folder(Path(to))
    source = ComparedModel.of(model)
    with predicate, SpillStore(budget) as store:
        fed = source.feeds(inputs)
        search = _Search(source, predicate, store, fed, tries, progress)
        search.record(budget)
        found = search.search()
        folder = repro.folder_for(to, source, "reduced")
        small = repro.write(folder, found.source, found.calls, found.inputs, found.outputs, found.results)
    shapes = {n: list(v.shape) for n, v in found.inputs.items() if isinstance(v, np.ndarray)}
    nodes, outputs = (len(source.graph), len(small.graph.node)), (len(source.outputs), len(found.outputs))
    return Reduction(folder, str(predicate), nodes, outputs, [c.op_type for c in found.calls], shapes, search.tried)


@dataclass
class _Candidate:
    """A part of the model that fails: its calls, inputs, outputs and expected results."""

    source: ComparedModel
    calls: tuple[Node, ...]
    inputs: Values
    outputs: tuple[str, ...]
    results: Values


class _Search:
    """The search for a smaller model that fails: the values of the whole model, and the candidates that were tried."""

    def __init__(
        self, source: ComparedModel, predicate: Predicate, store: SpillStore, fed: Values, tries: int, progress: Any
    ) -> None:
        self.source, self.predicate, self.store, self.fed = source, predicate, store, fed
        self.tries, self.tried, self.progress = tries, 0, progress
        self.known: dict[tuple[Node, ...], _Candidate | None] = {}
        whole = source.part(source.graph.nodes, fed, source.results)
        self.inferred = predicate.inferred and _legal(whole, True)
        self.legal = self.inferred or _legal(whole, False)

    def record(self, budget: int) -> None:
        """Store the outputs of every node: the trusted side's if it has them, otherwise this side's."""
        for name, value in self.fed.items():
            self.store.put(name, value)
        for visit in walk(self.source, Ours(), self.predicate.trusted, self.fed, budget):
            values = visit.theirs if isinstance(visit.theirs, dict) else visit.mine
            if not isinstance(values, FailedRun):
                for name, value in values.items():
                    self.store.put(name, value)

    def search(self) -> _Candidate:
        calls = self.source.graph.nodes
        found = self._try(calls, self.source.results)
        if found is None:
            raise InvalidInput(
                f"there is nothing to reduce: the whole model does not fail ({self.predicate})",
                code="SX321",
                hint="pass the inputs and the tolerance with which the whole model fails",
            )
        found = self._cut(found)
        found = self._delta(found)
        found = self._drop_outputs(found)
        return self._fewer_rows(found) if self.predicate.fewer_rows else found

    # --- nodes

    def _cut(self, found: _Candidate) -> _Candidate:
        """Bisect from the end, then from the front: the shortest run of nodes that fails, if failing is monotone."""
        for end in (True, False):
            low, high = 0, len(found.calls)  # a model of the first (or last) `high` nodes fails
            calls = found.calls
            while high - low > 1:
                middle = (low + high) // 2
                smaller = self._try(calls[:middle] if end else calls[-middle:])
                if smaller is None:
                    low = middle
                else:
                    found, high = smaller, middle
        return found

    def _delta(self, found: _Candidate) -> _Candidate:
        """Delta debugging: remove ever smaller groups of nodes while the rest still fails."""
        groups = 2
        while len(found.calls) > 1 and groups <= len(found.calls):
            size = -(-len(found.calls) // groups)
            for start in range(0, len(found.calls), size):
                smaller = self._try(found.calls[:start] + found.calls[start + size :])
                if smaller is not None:
                    found, groups = smaller, max(2, groups - 1)
                    break
            else:
                if groups == len(found.calls):
                    break
                groups = min(len(found.calls), groups * 2)
        return found

    def _drop_outputs(self, found: _Candidate) -> _Candidate:
        """Remove outputs without which the model still fails, one after the other."""
        for name in found.outputs:
            rest = tuple(n for n in found.outputs if n != name)
            smaller = self._try(found.calls, rest) if rest else None
            found = smaller or found
        return found

    def _try(self, calls: Sequence[Node], outputs: tuple[str, ...] | None = None) -> _Candidate | None:
        """The model of these nodes, if it is valid and fails.  outputs: by default the values that none of them reads."""
        calls = tuple(calls)
        if outputs is None and calls in self.known:
            return self.known[calls]
        outer = [n for n in outer_names(calls) if n in self.store or n not in self.source.weights]
        found = None
        if calls and all(n in self.store for n in outer):
            read = {v.name for c in calls for v in c.reads}
            ends = outputs or tuple(n for n in inner_names(calls) if n not in read or n in self.source.outputs)
            found = self._candidate(self.source, calls, {n: self.store.get(n) for n in outer}, ends)
        if outputs is None:
            self.known[calls] = found
        return found

    def _candidate(
        self, source: ComparedModel, calls: tuple[Node, ...], inputs: Values, outputs: tuple[str, ...]
    ) -> _Candidate | None:
        if self.tried >= self.tries:
            return None
        self.tried += 1
        if self.progress:
            self.progress(note=f"{len(calls)} nodes")
        model = source.part(calls, inputs, outputs)
        if self.legal and not _legal(model, self.inferred):
            return None
        expected = self.predicate.fails(model, source.folder, inputs)
        return None if expected is None else _Candidate(source, calls, inputs, outputs, expected)

    # --- rows

    def _fewer_rows(self, found: _Candidate) -> _Candidate:
        """Keep only the first index along each axis that the inputs share, if the model still fails."""
        for axis in range(max((v.ndim for v in found.inputs.values() if isinstance(v, np.ndarray)), default=0)):
            sizes = sorted({v.shape[axis] for v in found.inputs.values() if _reaches(v, axis) and v.shape[axis] > 1})
            for size in sizes:
                fewer = {
                    n: np.ascontiguousarray(v.take([0], axis)) if _reaches(v, axis) and v.shape[axis] == size else v
                    for n, v in found.inputs.items()
                }
                smaller = self._candidate(found.source, found.calls, fewer, found.outputs)
                found = smaller or found
        return found


def _reaches(value: Any, axis: int) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > axis


def _legal(model: ModelProto, inferred: bool) -> bool:
    """Whether ONNX's checker, and if `inferred` its shape inference, accept the model without its external data."""
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for tensor in [t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL]:
        if tensor.name not in {i.name for i in graph.input}:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        graph.initializer.remove(tensor)
    if inferred and infer_shapes(copy, strict=True).failure:
        return False
    for value in graph.output:  # the checker requires a type and shape, which only a run determines
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        value.type.tensor_type.shape.SetInParent()
    return bool(check_model(copy, types=False).structure)


def _source(model: ModelProto, folder: Path | None) -> ComparedModel:
    source = ComparedModel(model)
    source.folder = folder
    return source
