"""Shrinks a failing model to the few nodes, outputs and rows that still fail, and writes it with its inputs.

    found = reduce("model.onnx", {"x": x}, differs("onnxruntime"), to="small")
    print(found)          # 2 of 113 nodes, ...

Nodes are cut from the end and from the front, then by delta debugging; a cut input is fed what it was in the whole model.
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
import onnx
from onnx import ModelProto, TensorProto, helper

from ..comparison.difference import Tolerance, difference
from ..engines.local import Engine, Failure, Foreign, Ours
from ..errors import InvalidInput, SonnxError
from ..proto.load import ModelSource
from . import repro
from .compare import BUDGET
from .lockstep import Values, walk
from .spill import SpillStore
from .submodel import Call, Source


class Predicate(AbstractContextManager["Predicate"], ABC):
    """What it means that a model fails.

    trusted: the engine whose values stand in where the model is cut; None for ours.
    inferred: candidates must pass ONNX's shape inference too, where the whole model does: nothing else holds them valid.
    fewer_rows: whether to try with fewer rows.
    """

    trusted: Engine | None = None
    inferred = False
    fewer_rows = True

    @abstractmethod
    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        """The outputs that the model should have (empty where nobody knows) if it fails, None if it does not."""

    def __exit__(self, *_: object) -> None:
        if self.trusted is not None:
            self.trusted.close()


class raises(Predicate):
    """This package raises a SonnxError of this code, always at the same operator, when it prepares or runs the model."""

    fewer_rows = False  # another shape may be wrong for another reason
    operator: str | None = None

    def __init__(self, code: str, device: str = "CPU") -> None:
        self.code = code
        self.engine = Ours(device)

    def __str__(self) -> str:
        return f"{self.engine.name} raises {self.code}"

    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        try:
            self.engine.run(model, folder, inputs)
        except SonnxError as error:
            if error.code == self.code and self.operator in (None, error.operator):
                self.operator = error.operator
                return {}
        return None


class differs(Predicate):
    """The outputs of this package on `device` differ from those of another engine, which runs the model.

    against: "onnxruntime", "reference" or "sonnx" (the CPU).  rtol, atol, timeout: as for `compare`.
    """

    def __init__(
        self,
        against: str = "onnxruntime",
        *,
        device: str = "CPU",
        rtol: float | None = None,
        atol: float | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.engine = Ours(device)
        self.trusted: Engine = Ours() if against == "sonnx" else Foreign(against, timeout=timeout)
        self.tolerance = Tolerance(rtol, atol)

    def __str__(self) -> str:
        return f"the outputs of {self.engine.name} differ from those of {self.trusted.name}"

    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        try:
            mine = self.engine.run(model, folder, inputs)
            theirs = self.trusted.run(model, folder, inputs)
        except SonnxError:
            return None
        return None if all(difference(mine[n], v, self.tolerance).agrees for n, v in theirs.items()) else theirs


class command(Predicate):
    """A shell command exits with another code than 0.

    text: the command; {model} becomes the path of the candidate's model.onnx, {data} that of its test_data_set_0.
    timeout: seconds; a command that takes longer does not count as failing.
    """

    inferred = True

    def __init__(self, text: str, timeout: float = 60.0) -> None:
        self.text, self.timeout = text, timeout

    def __str__(self) -> str:
        return f"{self.text!r} exits with another code than 0"

    def fails(self, model: ModelProto, folder: Path | None, inputs: Values) -> Values | None:
        with tempfile.TemporaryDirectory(prefix="sonnx-") as name:
            path = Path(name)
            whole = _source(model, folder)
            repro.write(path, whole, whole.calls, inputs, whole.outputs, {})
            line = self.text.replace("{model}", str(path / "model.onnx")).replace("{data}", str(path / "test_data_set_0"))
            try:
                done = subprocess.run(line, shell=True, capture_output=True, timeout=self.timeout, check=False)
            except subprocess.TimeoutExpired:
                return None
        return {} if done.returncode else None


@dataclass
class Reduction:
    """What is left of a failing model.

    folder: model.onnx and test_data_set_0.  nodes: (before, after), and operators, what is left.  outputs: (before, after).
    tried: how many candidates were run.
    """

    folder: Path
    predicate: str
    nodes: tuple[int, int]
    outputs: tuple[int, int]
    operators: list[str]
    shapes: dict[str, list[int]] = field(default_factory=dict)
    tried: int = 0

    def __str__(self) -> str:
        shown = ", ".join(self.operators[:6]) + (", ..." if len(self.operators) > 6 else "")
        return f"{self.nodes[1]} of {self.nodes[0]} nodes ({shown}), {self.outputs[1]} of {self.outputs[0]} outputs"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for ``--json``."""
        return vars(self) | {"folder": str(self.folder)}


def reduce(
    model: ModelSource | Source,
    inputs: Any,
    predicate: Predicate,
    *,
    to: str | Path | None = None,
    tries: int = 1000,
    budget: int = BUDGET,
    progress: Callable[..., None] | None = None,
) -> Reduction:
    """The smallest model found that still fails, written to the folder `to` (by default the model's name and "-reduced").

    model, inputs: as for `compare`.  predicate: `raises(code)`, `differs(engine)` or `command(text)`.
    tries: how many candidates may be run.  budget: bytes of recorded values that stay in memory; the rest lies on disk.
    Raises InvalidInput when the whole model does not fail.
    """
    source = Source.of(model)
    with predicate, SpillStore(budget) as shelf:
        fed = source.feeds(inputs)
        search = _Search(source, predicate, shelf, fed, tries, progress)
        search.record(budget)
        found = search.search()
        stem = source.path.stem if source.path else "model"
        folder = Path(to) if to is not None else Path(f"{stem}-reduced")
        small = repro.write(folder, found.source, found.calls, found.inputs, found.outputs, found.results)
    shapes = {n: list(v.shape) for n, v in found.inputs.items() if isinstance(v, np.ndarray)}
    nodes, outputs = (len(source.calls), len(small.graph.node)), (len(source.outputs), len(found.outputs))
    return Reduction(folder, str(predicate), nodes, outputs, [c.operator for c in found.calls], shapes, search.tried)


@dataclass
class _Candidate:
    """A part of the model that fails: its calls, what it is fed, what it gives, and what it should have given."""

    source: Source
    calls: tuple[Call, ...]
    inputs: Values
    outputs: tuple[str, ...]
    results: Values


class _Search:
    def __init__(self, source: Source, predicate: Predicate, shelf: SpillStore, fed: Values, tries: int, progress: Any) -> None:
        self.source, self.predicate, self.shelf, self.fed = source, predicate, shelf, fed
        self.tries, self.tried, self.progress = tries, 0, progress
        self.known: dict[tuple[int, ...], _Candidate | None] = {}
        whole = source.part(source.calls, fed, [n for n in source.outputs if n in source.makers])
        self.inferred = predicate.inferred and _legal(whole, True)
        self.legal = self.inferred or _legal(whole, False)

    def record(self, budget: int) -> None:
        """Put what every node makes on the shelf: the trusted side's values, else this side's."""
        for name, value in self.fed.items():
            self.shelf.put(name, value)
        for visit in walk(self.source, Ours(), self.predicate.trusted, self.fed, budget):
            values = visit.theirs if isinstance(visit.theirs, dict) else visit.mine
            if not isinstance(values, Failure):
                for name, value in values.items():
                    self.shelf.put(name, value)

    def search(self) -> _Candidate:
        calls = self.source.calls
        found = self._try(calls, tuple(n for n in self.source.outputs if n in self.source.makers))
        if found is None:
            raise InvalidInput(
                f"there is nothing to reduce: it is not so that {self.predicate}",
                code="SX321",
                hint="give the inputs and the tolerance with which the whole model fails",
            )
        found = self._cut(found)
        found = self._delta(found)
        found = self._drop_outputs(found)
        return self._fewer_rows(found) if self.predicate.fewer_rows else found

    # --- nodes

    def _cut(self, found: _Candidate) -> _Candidate:
        """From the end, then from the front, by halves: the shortest run of nodes that fails, if failing is monotone."""
        for end in (True, False):
            low, high = 0, len(found.calls)  # keeping `high` nodes fails
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
        """Delta debugging: leave out ever smaller groups of nodes as long as it goes on failing."""
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
        for name in found.outputs:
            rest = tuple(n for n in found.outputs if n != name)
            smaller = self._try(found.calls, rest) if rest else None
            found = smaller or found
        return found

    def _try(self, calls: Sequence[Call], outputs: tuple[str, ...] | None = None) -> _Candidate | None:
        """This run of nodes as a model, if it is one and fails.  outputs: by default what no node of it reads."""
        calls = tuple(calls)
        key = tuple(c.index for c in calls)
        if outputs is None and key in self.known:
            return self.known[key]
        made = {n for c in calls for n in c.outputs}
        needed = {n for c in calls for n in c.uses if n not in made}
        outer = [n for n in needed if n in self.shelf or n not in self.source.weights]
        found = None
        if calls and all(n in self.shelf for n in outer):
            read = {n for c in calls for n in c.uses}
            ends = outputs or tuple(n for c in calls for n in c.outputs if n not in read or n in self.source.outputs)
            found = self._candidate(self.source, calls, {n: self.shelf.get(n) for n in outer}, ends)
        if outputs is None:
            self.known[key] = found
        return found

    def _candidate(self, source: Source, calls: tuple[Call, ...], inputs: Values, outputs: tuple[str, ...]) -> _Candidate | None:
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
        """Keep the first index only, along each axis that the inputs share, where it goes on failing."""
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
    """Whether ONNX's checker, and its shape inference where `inferred`, take the model, weights in other files aside."""
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for tensor in [t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL]:
        if tensor.name not in {i.name for i in graph.input}:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        graph.initializer.remove(tensor)
    try:
        if inferred:
            onnx.shape_inference.infer_shapes(copy, strict_mode=True)
        for value in graph.output:  # the checker wants a type and a shape, which only a run could tell
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
        onnx.checker.check_model(copy)
    except Exception:  # whatever it raises means no
        return False
    return True


def _source(model: ModelProto, folder: Path | None) -> Source:
    source = Source(model)
    source.folder = folder
    return source
