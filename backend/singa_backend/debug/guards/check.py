"""Checks a runtime, or saved values, against a guard."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ... import dtypes
from ...comparison.difference import Difference, Tolerance, as_float
from ...deadline import SHORTEST
from ...engines.command import EngineCommand
from ...engines.local import Engine, FailedRun, Foreign, Planned
from ...errors import InvalidInput, SonnxError, did_you_mean
from ...io.archives import open_arrays
from ...io.junit import JUnitCase, write_suite
from ...limits import check_number
from ...proto import test_data
from ...proto.load import ModelSource
from ...proto.source import file_digest
from ..lockstep import Values, attempt
from ..model import ComparedModel, nodes_for, result_names
from ..setting import AGAINST, BUDGET, is_engine, is_saved, trusted
from .document import CODE, Guard, GuardCase, GuardedValue, read_guard
from .locate import Culprit, GuardSearch, origin_of
from .summary import judge, parts
from .write import inputs_of

PASS, WEAK, FAIL = "pass", "weak", "fail"


@dataclass
class GuardRow:
    """A value of one case that was compared.

    Attributes:
        value: its name.
        node: the name of its node.
        operator: of the node.
        case: the name of the case.
        difference: from the stored value.
    """

    value: str
    node: str
    operator: str
    case: str
    difference: Difference

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data.

        Returns:
            A dict of the attributes, with those of `difference` inline.
        """
        return {"value": self.value, "node": self.node, "operator": self.operator, "case": self.case, **self.difference.to_dict()}


@dataclass(frozen=True)
class NotChecked:
    """A stored value that was not compared in a case.

    Attributes:
        value: its name.
        case: the name of the case.
        why: the reason: the model or the file has no such value, or the runtime returned none.
    """

    value: str
    case: str
    why: str

    def to_dict(self) -> dict[str, str]:
        """Return the value as plain data.

        Returns:
            A dict of the attributes.
        """
        return dict(vars(self))


@dataclass
class GuardCheck:
    """The result of `check_guard`.

    Attributes:
        against: the name of the checked runtime or file.
        model: the file name of the checked model; "" without one.
        same_model: whether the model file is the one that the guard was written from; None if this is not known.
        stored: the number of values of the guard.
        rows: the values that were compared.
        not_compared: those that were not: the model, or the file, has no value of this name, or the runtime returned none.
        failures: the message of a runtime that did not run a case, by case.
        culprit: the first wrong node; None if nothing differs, or if no value is known whose inputs agree.
        notes: differences between the model and the guard's.
    """

    against: str
    model: str
    same_model: bool | None
    stored: int
    rows: list[GuardRow] = field(default_factory=list)
    not_compared: list[NotChecked] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    culprit: Culprit | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """The number of values that were compared in at least one case."""
        return len({r.value for r in self.rows})

    @property
    def mixed(self) -> dict[tuple[str, str], int]:
        """The numbers of values that were compared with floats of another dtype, by the two dtypes."""
        pairs = {r.value: r.difference.dtypes for r in self.rows if r.difference.mixed}
        return dict(Counter(pairs.values()))

    @property
    def differing(self) -> list[GuardRow]:
        """The rows beyond their tolerance."""
        return [r for r in self.rows if not r.difference.agrees]

    @property
    def verdict(self) -> str:
        """The word "fail" if a value differs or the runtime failed, "weak" if fewer than half of the values were compared."""
        if self.failures or self.differing:
            return FAIL
        return WEAK if 2 * self.compared < self.stored else PASS

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for ``--json``.

        Returns:
            A dict of the attributes, the verdict and the number of compared values.
        """
        return {
            "verdict": self.verdict, "against": self.against, "model": self.model, "same_model": self.same_model,
            "stored": self.stored, "compared": self.compared, "differing": len({r.value for r in self.differing}),
            "culprit": self.culprit.to_dict() if self.culprit else None, "failures": self.failures, "notes": self.notes,
            "rows": [r.to_dict() for r in self.rows], "not_compared": [n.to_dict() for n in self.not_compared],
        }  # fmt: skip

    def write_junit(self, path: str | Path) -> None:
        """Write JUnit XML: a test case for each value of each case and one for the verdict; values not compared are skipped.

        Args:
            path: the file.

        Raises:
            InvalidInput: it cannot be written (SX351).
        """
        found = [
            JUnitCase(f"guard.{r.case}", r.value, "" if r.difference.agrees else f"{r.operator} {r.node}: {r.difference}")
            for r in self.rows
        ]
        found += [JUnitCase(f"guard.{n.case}", n.value, skipped=n.why) for n in self.not_compared]
        found += [JUnitCase(f"guard.{name}", "the run", why) for name, why in self.failures.items()]
        why = str(self.culprit) if self.culprit else f"{self.compared} of {self.stored} values were compared"
        text = "" if self.verdict == PASS else f"{self.verdict}: {why}"
        failed = self.verdict == FAIL
        found.append(JUnitCase("guard", "verdict", failure=text if failed else "", skipped="" if failed else text))
        write_suite(path, f"sonnx guard {self.model}", found)


def check_guard(
    guard: str | Path | Guard,
    *,
    against: str | os.PathLike[str] | EngineCommand = "onnxruntime",
    model: ModelSource | ComparedModel | None = None,
    case: str | None = None,
    to: str | Path | None = None,
    timeout: float = 60.0,
    progress: Callable[..., None] | None = None,
) -> GuardCheck:
    """Compare what a runtime computes now with a guard.

    The runtime runs the model as it is, and again with the stored intermediate values as outputs.  If a value differs, the first
    wrong node is named and written as a model of one node.

    Args:
        guard: a file of `write_guard`, or what `read_guard` returned.
        against: "onnxruntime" (with its optimizer), "sonnx" (the plans of this package), "definition", "reference", MODULE:CLASS
            (a class or module with the functions of onnx.backend.base.Backend, whose code runs in a child process), an
            EngineCommand, or an .npz file of values by name: CASE/NAME, or NAME if there is one case.
        model: the model to run, which may be optimized or converted; None for the guard's file name in the folder of the guard.
        case: the name of one case; None for all.
        to: the folder of the one-node model; None to name it after the model and the node.
        timeout: seconds for a run of the model.
        progress: called after each run, with `note=` the case.

    Returns:
        The compared values, the verdict, and the first wrong node.

    Raises:
        InvalidInput: the file is not a guard or is damaged, or there is no model (SX990); a file of values has none of the
            guard's (SX320); the folder has other files of the names to write (SX351).
        InvalidModel: the model breaks a rule of ONNX.
        MissingDependency: onnxruntime is not installed.
        SonnxError: the engine cannot be used (SX901).
    """
    check_number("timeout", timeout, SHORTEST)
    if to is not None:
        test_data.check_folder(Path(to))
    known = guard if isinstance(guard, Guard) else read_guard(guard)
    cases = known.chosen(case)
    saved = is_saved(against)
    if not saved and not isinstance(against, EngineCommand) and not (isinstance(against, str) and is_engine(against)):
        engines = ", ".join(AGAINST)
        raise InvalidInput(f"against must be an .npz file, MODULE:CLASS or one of {engines}, got {against!r}", code="SX320")
    source = _model(known, model, needed=not saved)
    made = GuardCheck("", source.path.name if source and source.path else "", _same(known, source), len(known.values))
    made.notes = _notes(known, source)
    checker = _Checker(known, cases, source, made, progress or (lambda **_: None))
    engine: str | EngineCommand | None = None
    if saved:
        assert not isinstance(against, EngineCommand)
        made.against = Path(against).name
        checker.file(Path(against))
    else:
        assert isinstance(against, (str, EngineCommand))
        engine = against
        checker.engine(_engine(engine, timeout))
    search = GuardSearch(known, source, engine, timeout, Path(to) if to is not None else None)
    checker.locate(search)
    return made


def _engine(against: str | EngineCommand, timeout: float) -> Engine:
    if against == "sonnx":
        planned = Planned()
        planned.name = "sonnx"
        return planned
    if against == "onnxruntime":
        return Foreign("onnxruntime", optimise=True, timeout=timeout)
    return trusted(against, timeout=timeout)


def _model(guard: Guard, model: ModelSource | ComparedModel | None, needed: bool) -> ComparedModel | None:
    """The model to run."""
    if model is not None:
        return ComparedModel.of(model)
    name = guard.model["file"]
    plain = guard.folder is not None and name and name == os.path.basename(name)
    if guard.folder is not None and plain and os.path.isfile(guard.folder / name):
        return ComparedModel(guard.folder / name)
    if needed:
        where = f"{name} is not in the folder of the guard" if plain else "the guard was written from a model without a file"
        raise InvalidInput(f"a model to run must be passed: {where}", code=CODE, hint="--model MODEL, or model=")
    return None


def _same(guard: Guard, source: ComparedModel | None) -> bool | None:
    if source is None or source.path is None or not guard.model["sha256"]:
        return None
    return bool(file_digest(source.path) == guard.model["sha256"])


def _notes(guard: Guard, source: ComparedModel | None) -> list[str]:
    if source is None:
        return []
    opsets = {o.domain or "ai.onnx": o.version for o in source.proto.opset_import}
    before = guard.model["opsets"]
    return [
        f"the opset of {d} is {opsets.get(d, 'not imported')}, in the guard {before.get(d, 'not imported')}"
        for d in sorted(opsets.keys() | before.keys())
        if opsets.get(d) != before.get(d)
    ]


class _Checker:
    """Compares the values of each case."""

    def __init__(
        self, guard: Guard, cases: Sequence[GuardCase], source: ComparedModel | None, made: GuardCheck, step: Callable[..., None]
    ) -> None:
        self.guard, self.cases, self.source, self.made, self.step = guard, cases, source, made, step
        self.failed: FailedRun | None = None
        self.side: Engine | None = None

    def engine(self, engine: Engine) -> None:
        """Run every case; the engine stays open for `locate`."""
        self.side, self.made.against = engine, engine.name
        source = self.source
        assert source is not None
        done: list[tuple[GuardCase, dict[str, np.ndarray], Values]] = []
        for case in self.cases:  # first all runs of the whole model: an engine in a child process loads it once
            feeds = self._accepted(source, inputs_of(case))
            try:
                if isinstance(engine, Foreign) and source.path is not None:
                    whole = engine.run_file(source.path, feeds)
                else:
                    whole = engine.run(source.proto, source.folder, feeds)
                done.append((case, feeds, whole))
            except SonnxError as error:
                failure = FailedRun.of(engine, error)
                self.failed = self.failed or failure
                self.made.failures[case.name] = str(failure)
        for case, feeds, whole in done:
            stored = [v for v in self.guard.values if case.name in v.cases]
            inner = [v for v in stored if v.name not in whole and source.producer(v.name)]
            found: Values = {n: v for n, v in whole.items() if n in {v.name for v in stored}}
            refused = {
                v.name: "the model has no value of this name"
                for v in stored
                if v.name not in whole and source.producer(v.name) is None
            }
            for chunk in _chunks(inner, case.name):
                self._inner(engine, case.name, chunk, feeds, found, refused)
            self._judge(case, found, refused)
            self.step(note=case.name)

    def _accepted(self, source: ComparedModel, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inputs of the guard that the model has; raises InvalidInput if it needs others."""
        known = {v.name: v.dtype for v in (*source.inputs, *source.optional_inputs)}
        missing = [v.name for v in source.inputs if v.name not in feeds]
        if missing:
            raise InvalidInput(
                f"the model must have the inputs of the guard, {', '.join(map(repr, feeds))}; it needs {missing[0]!r}", code=CODE
            )
        return {n: as_float(v, known[n]) for n, v in feeds.items() if n in known}

    def _inner(
        self, engine: Engine, case: str, values: Sequence[GuardedValue], feeds: Values, found: Values, refused: dict[str, str]
    ) -> None:
        """Run the model with these values as outputs; values that the engine refuses are found by halving."""
        source = self.source
        assert source is not None
        known = {v.name: _empty(v, case, source) for v in values if "" in v.cases[case]}
        names = [v.name for v in values]
        calls = nodes_for(names, source.graph.nodes)
        made = attempt(engine, source, calls, feeds, names, known)
        if isinstance(made, dict):
            found |= made
        elif len(values) == 1:
            refused[names[0]] = str(made)[:400]
        else:
            half = len(values) // 2
            self._inner(engine, case, values[:half], feeds, found, refused)
            self._inner(engine, case, values[half:], feeds, found, refused)

    def _judge(self, case: GuardCase, found: Mapping[str, Any], refused: Mapping[str, str]) -> None:
        level = self.guard.level
        for value in self.guard.values:
            if value.name in refused:
                self.made.not_compared.append(NotChecked(value.name, case.name, refused[value.name]))
            if value.name not in found or case.name not in value.cases:
                continue
            arrays, stored = dict(parts(found[value.name])), value.cases[case.name]
            if arrays.keys() != stored.keys():
                shape = (len(arrays),), (len(stored),)
                worst = Difference("kind", ("sequence" if "" not in arrays else "tensor", "another kind or length"), shape)
            else:
                rounded = self.source.widened(Tolerance(), value.name).dtype if self.source else None
                each = [judge(arrays[e], s, level, f"{case.name}\0{value.name}{e}", rounded) for e, s in stored.items()]
                worst = max(each, key=lambda d: (not d.agrees, d.excess))
            self.made.rows.append(GuardRow(value.name, value.node, value.operator, case.name, worst))

    def file(self, path: Path) -> None:
        """Compare the values of an .npz file."""
        with open_arrays(path, "SX307") as arrays:
            names = set(arrays.names)
            prefixed = any(n.startswith(f"{c.name}/") for c in self.guard.cases for n in names)
            if not prefixed and len(self.cases) > 1:
                cases = ", ".join(c.name for c in self.cases)
                raise InvalidInput(
                    f"the names in {path.name} must be CASE/NAME with the cases {cases}", code="SX320",
                    hint="or choose one case, and names without it",
                )  # fmt: skip
            for case in self.cases:
                prefix, found = f"{case.name}/" if prefixed else "", dict[str, Any]()
                stored = [v for v in self.guard.values if case.name in v.cases]
                for value in stored:
                    keys = {e: f"{prefix}{value.name}{e}" for e in value.cases[case.name]}
                    if all(k in names for k in keys.values()):
                        read = {e: self._read(arrays, k, value.cases[case.name][e].dtype) for e, k in keys.items()}
                        found[value.name] = read[""] if "" in read else list(read.values())
                absent = "the file has no value of this name"
                self._judge(case, found, {v.name: absent for v in stored if v.name not in found})
        if not self.made.rows:
            known = [v.name for v in self.guard.values]
            name = min(names, default="")
            raise InvalidInput(f"{path.name} has no value of the guard{did_you_mean(name, known)}", code="SX320")

    def _read(self, arrays: Any, key: str, dtype: np.dtype[Any]) -> np.ndarray:
        found: np.ndarray = arrays.array(key, dtype if dtype in dtypes.NARROW_FLOATS else None)
        return found.astype(object) if found.dtype.kind in "US" else found

    def locate(self, search: GuardSearch) -> None:
        """Name the first wrong node."""
        made = self.made
        try:
            states: dict[str, dict[str, Difference]] = {}
            for row in made.rows:
                states.setdefault(row.case, {})[row.value] = row.difference
            origin = origin_of(self.guard, states) if made.differing else None
            if origin is not None:
                made.culprit = search.culprit(origin, states[origin.case][origin.value])
                self._only_whole(origin.value)
            elif self.failed is not None and self.side is not None:
                made.culprit = self._failing(self.side, self.failed)
        finally:
            if self.side is not None:
                self.side.close()

    def _only_whole(self, value: str) -> None:
        wrong = {r.value for r in self.made.differing}
        outputs = {v.name for v in self.guard.values if v.output}
        if self.side is not None and wrong <= outputs and self.made.culprit and self.made.culprit.among > 1:
            self.made.culprit.notes.append(f"{value!r} is an output of the run of the whole model")

    def _failing(self, engine: Engine, failure: FailedRun) -> Culprit | None:
        """The first node at which the engine fails, by bisection of the number of nodes."""
        source = self.source
        assert source is not None
        case = next(c for c in self.cases if c.name in self.made.failures)
        feeds, nodes = inputs_of(case), source.graph.nodes
        low, high = 0, len(nodes)
        while low + 1 < high:
            middle = (low + high) // 2
            found = attempt(engine, source, nodes[:middle], feeds, result_names(nodes[middle - 1])[:1])
            low, high = (low, middle) if isinstance(found, FailedRun) else (middle, high)
        if not nodes:
            return None
        call = nodes[high - 1]
        return Culprit(call.name, call.op_type, case.name, result_names(call)[0], str(failure), 1, "failure")


def _empty(value: GuardedValue, case: str, source: ComparedModel) -> np.ndarray:
    """An array of a value's type in the checked model, without memory of its own."""
    stored = value.cases[case][""]
    code = source.types[value.name].tensor_type.elem_type if value.name in source.types else 0
    return np.broadcast_to(np.zeros((), dtypes.numpy_dtype(code) if dtypes.is_code(code) else stored.dtype), stored.shape)


def _chunks(values: Sequence[GuardedValue], case: str) -> list[list[GuardedValue]]:
    """Values that fit into the budget of one run together."""
    found, held = list[list[GuardedValue]](), BUDGET
    for value in values:
        size = sum(s.dtype.itemsize * int(np.prod(s.shape, dtype=np.float64)) for s in value.cases[case].values())
        if held + size > BUDGET // 4:
            found.append([])
            held = 0
        found[-1].append(value)
        held += size
    return found
