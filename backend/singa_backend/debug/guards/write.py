"""Writes a guard: draws inputs, computes the values by definitions, and finds out which of them depend on rounding."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, helper

from ... import dtypes
from ...comparison.difference import Tolerance
from ...comparison.tolerances import rule
from ...engines.local import Engine, FailedRun, Ours
from ...errors import InvalidInput, ResourceExhausted, SonnxError
from ...io.files import write_text
from ...io.installation import version
from ...ir.graph import Node
from ...kernels.work import flops
from ...limits import check_number
from ...proto.load import ModelSource
from ...proto.source import file_digest
from ..lockstep import Values, walk
from ..model import ComparedModel
from ..setting import BUDGET, trusted
from .choose import Types, between, index_bounds, makers, node_of, select, stable_values, weight_hash
from .document import Guard, GuardCase, GuardedValue, GuardInput
from .draws import EDGES, NORMAL, check_inputs, check_sizes, digest, draw, key_of, words
from .summary import Level, Summary, exact, judge, parts, summarize

SIZE = 512 << 10
"""Maximum bytes of a guard, by default."""

_LADDER = (2, 4, 8, 32, 64, 224)
"""Sizes of open axes other than the first, tried in this order until the model accepts them."""

_NEAR = 0.25
"""A value that rounding moves by more than this part of its tolerance gets a wider one."""

_FAR = 1000.0
"""A value whose tolerance would have to be wider by more than this is not stored."""


class _Noisy(Ours):
    """The definitions, with errors of the size that other correct implementations have: a quarter of what the registry allows."""

    def run(self, model: ModelProto, folder: Path | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = super().run(model, folder, inputs)
        node = model.graph.node[0]
        allowed = rule(node.domain, node.op_type)
        norm = max(allowed.norm / 64, math.sqrt(3 * _summands(model, inputs, outputs))) if allowed.norm else 0.0
        return {n: _noise(n, v, allowed.ulps / 4, norm, allowed.single) for n, v in outputs.items()}


def _summands(model: ModelProto, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    """The operations for each element of a node's first output: of sums in another order, errors are a random walk."""
    node = model.graph.node[0]
    sizes = {t.name: tuple(t.dims) for t in model.graph.initializer} | {n: np.shape(v) for n, v in inputs.items()}
    shape = np.shape(next(iter(outputs.values()), ()))
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    work = flops(node.domain, node.op_type, attributes, [sizes.get(n) for n in node.input], shape)
    return (work or 0) / max(1, math.prod(shape))


def _noise(name: str, value: Any, ulps: float, norm: float, single: bool) -> Any:
    """A value with drawn errors: steps of each element, and steps of the largest one."""
    if not isinstance(value, np.ndarray) or exact(value.dtype) or value.dtype.kind == "c" or not (ulps or norm):
        return value
    wide = value.astype(np.float64)
    flat = wide.reshape(-1)
    finite = np.isfinite(flat)
    step = float(dtypes.float_info(np.float32 if single and value.dtype == np.float64 else value.dtype).eps) / 2
    largest = float(np.abs(flat[finite]).max(initial=0.0))
    signs = words(key_of(name), np.arange(flat.size, dtype=np.uint64)).astype(np.float64) / 2.0**63 - 1.0
    flat[finite] += (signs * (step * (ulps * np.abs(flat) + norm * largest)))[finite]
    with np.errstate(over="ignore"):
        return wide.reshape(value.shape).astype(value.dtype)


def write_guard(
    model: ModelSource | ComparedModel,
    path: str | Path,
    *,
    inputs: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    engine: str = "sonnx",
    size: int = SIZE,
    progress: Callable[..., None] | None = None,
) -> Guard:
    """Write the behaviour of a model to a small file, without its weights.

    Inputs are drawn: values near a normal distribution and boundary values; if axes are open, of sizes 1, a small one and an odd
    one.  A set of inputs that the model refuses is left out, with the reason.  All values that depend on the inputs are
    stored if they fit in `size`; otherwise the outputs and ends of blocks.

    Args:
        model: a path (then long weights stay in the file), a ModelProto, bytes, or a ComparedModel.
        path: the file to write.
        inputs: arrays by name, as for `SingaRep.run`, which are stored in the file; None to draw inputs.
        sizes: symbolic sizes by name, for drawn inputs.
        seed: of drawn inputs.
        engine: what computes the values: "sonnx" (the definitions) or another engine of `compare`.
        size: maximum bytes of the file.
        progress: called after each node of a case, with `note=` its name.

    Returns:
        The guard.

    Raises:
        InvalidModel: the model breaks a rule of ONNX.
        UnsupportedModel: the model has an operator that is not implemented.
        InvalidInput: the inputs do not match the model; or no inputs can be drawn that it accepts, or the guard does not fit
            (SX991).
    """
    check_number("size", size, 4096, whole=True)
    source = ComparedModel.of(model)
    step = progress or (lambda **_: None)
    side: Engine = Ours() if engine == "sonnx" else trusted(engine)
    try:
        return _GuardWriter(source, side, size, step).guard(Path(path), inputs, dict(sizes or {}), seed)
    finally:
        side.close()


def inputs_of(case: GuardCase) -> dict[str, np.ndarray]:
    """Return the inputs of a case.

    Args:
        case: of a guard.

    Returns:
        Arrays by name.

    Raises:
        InvalidInput: an input does not have the stored hash (SX990).
    """
    return {name: given.array() for name, given in case.inputs.items()}


def drawn_inputs(source: ComparedModel, seed: int = 0, run: Callable[[Values], object] | None = None) -> dict[str, np.ndarray]:
    """Draw one set of inputs that a model accepts, values near a normal distribution.

    Args:
        source: the model.
        seed: of the inputs.
        run: runs the model; None for the definitions of this package, whose outputs must not all be empty or NaN.

    Returns:
        Arrays by name.

    Raises:
        InvalidInput: an input is not a tensor of a declared dtype and shape (SX308), or the model accepts none (SX991).
        ResourceExhausted: a run exceeds a limit.
    """
    writer = _GuardWriter(source, Ours(), SIZE, lambda **_: None, run)
    return inputs_of(writer.normal({}, seed)[0])


class _GuardWriter:
    """The steps of `write_guard`."""

    def __init__(
        self,
        source: ComparedModel,
        engine: Engine,
        size: int,
        step: Callable[..., None],
        run: Callable[[Values], object] | None = None,
    ) -> None:
        self.source, self.engine, self.size, self.step, self.run = source, engine, size, step, run
        self.notes: list[str] = []
        self.types: list[Types] = []
        self.bounds = index_bounds(source)
        self.values, self.left_out = stable_values(source)

    def guard(self, path: Path, inputs: Mapping[str, Any] | None, sizes: dict[str, int], seed: int) -> Guard:
        source = self.source
        if inputs is None:
            cases = self.drawn(sizes, seed)
        else:
            cases = [self.given(inputs)]
        check_inputs([(i.dtype, i.shape) for c in cases for i in c.inputs.values()])
        nodes = [node_of(source, c) for c in source.graph.nodes]
        weights = {n: weight_hash(source, n) for n in source.weights if source.values[n].users}
        found = Guard(self.facts(nodes, weights), self.versions(), Level(1, 1), cases, [], nodes, weights, [])
        fixed = len(found.text(self.size).encode()) + 2048
        chosen, found.level = select(source, self.values, self.types, (self.size - fixed) * 19 // 20)
        if len(chosen) < len(self.values):
            self.notes.append(f"{len(chosen)} of {len(self.values)} values are stored, so that the file fits")
        found.values = self.stored(chosen, found.level, cases)
        by_value, names = makers(nodes), {v.name for v in found.values}
        for value in found.values:
            value.covers = len(between(by_value, value.name, names - {value.name}))
        found.notes = self.left_out + self.notes
        if not found.values:
            raise InvalidInput(
                "no value of the model can be stored: " + "; ".join(found.notes or ["it has no nodes"]), code="SX991"
            )
        text = found.text(self.size)
        while (count := len(text.encode())) > self.size and any(not v.output for v in found.values):
            found.values = _fewer(found.values, self.size / count)
            found.notes = [*self.left_out, *self.notes, f"{len(found.values)} values are left, so that the file fits"]
            names = {v.name for v in found.values}
            for value in found.values:
                value.covers = len(between(by_value, value.name, names - {value.name}))
            text = found.text(self.size)
        if count > self.size:
            what = f"the guard must be at most {self.size} bytes, got {count}"
            raise InvalidInput(what, code="SX991", hint="pass a larger size, or smaller inputs")
        write_text(path, text)
        return found

    def facts(self, nodes: Sequence[Any], weights: Mapping[str, str]) -> dict[str, Any]:
        source = self.source
        opsets = {o.domain or "ai.onnx": o.version for o in source.proto.opset_import}
        name, sha = (source.path.name, file_digest(source.path)) if source.path else ("", "")
        return {"file": name, "sha256": sha, "opsets": opsets, "nodes": len(nodes), "weights": len(weights)}

    def versions(self) -> dict[str, str]:
        found = {"engine": self.engine.name, "sonnx": version(), "onnx": onnx.__version__, "numpy": np.__version__}
        if self.engine.name == "onnxruntime":
            found["onnxruntime"] = importlib.metadata.version("onnxruntime")
        return found

    def trial(self, feeds: Values) -> Types | str:
        """The types of all arrays of a run; or the reason why the model cannot run, or has nothing to compare."""
        found: dict[str, Any] = {}
        if self.run:
            self.run(feeds)
            return found
        ends = self.source.results
        useful = not ends
        for visit in walk(self.source, self.engine, None, feeds, BUDGET):
            if isinstance(visit.mine, FailedRun):
                return f"{visit.call}: {visit.mine.message}"
            for name, value in visit.mine.items():
                arrays = dict(parts(value))
                found |= {name + end: (a.dtype, a.shape) for end, a in arrays.items()}
                useful = useful or (name in ends and any(a.size and not _all_nan(a) for a in arrays.values()))
            self.step(note=visit.call.name)
        return found if useful else "all outputs are empty or NaN"

    def given(self, inputs: Mapping[str, Any]) -> GuardCase:
        feeds = self.source.feeds(inputs)
        for name, value in feeds.items():
            if not isinstance(value, np.ndarray):
                raise InvalidInput(f"a guard stores tensors; the input {name!r} is a {type(value).__name__}", code="SX991")
        types = self.trial(feeds)
        if isinstance(types, str):
            raise InvalidInput(f"the model cannot run with these inputs: {types}", code="SX991")
        self.types.append(types)
        return GuardCase("given", {n: GuardInput(v.dtype, v.shape, "", 1, 0, v, digest(v)) for n, v in feeds.items()})

    def drawn(self, sizes: dict[str, int], seed: int) -> list[GuardCase]:
        """Sets of inputs that the model accepts."""
        symbols = self.symbols()
        first, chosen, base = self.normal(sizes, seed)
        cases = [first]
        plans = [("edges", EDGES, chosen)]
        if len(sizes) < len(symbols):
            plans.append(("one", NORMAL, self.sized(symbols, sizes, 1, 1, True)))
            plans.append(("odd", NORMAL, self.sized(symbols, sizes, 3, 17 if base < 17 else 2 * base, True)))
        for name, kind, size in plans:
            case, reason = self.attempt(name, kind, size, seed)
            if case:
                cases.append(case)
            else:
                self.notes.append(f"the case {name!r} is left out, because the model refuses its inputs: {reason}"[:400])
        return cases

    def normal(self, sizes: dict[str, int], seed: int) -> tuple[GuardCase, dict[str, int], int]:
        """The first set of inputs that the model accepts, its open sizes, and the size from which those of inner axes start."""
        symbols = self.symbols()
        check_sizes(sizes, symbols)
        inner = [s for s in symbols if s not in sizes and not self.leads(s)]
        reason = ""
        for base in _LADDER if inner else (2,):
            for even in (False, True) if len(inner) > 1 else (True,):
                chosen = self.sized(symbols, sizes, 2, base, even)
                case, reason = self.attempt("normal", NORMAL, chosen, seed)
                if case:
                    return case, chosen, base
        raise InvalidInput(
            f"no inputs could be drawn that the model accepts: {reason}", code="SX991",
            hint="pass inputs, by --inputs FILE.npz or --data FOLDER, or sizes, by --size NAME=SIZE",
        )  # fmt: skip

    def symbols(self) -> list[str]:
        """The open sizes of the inputs; one without a name has that of its input and axis."""
        return list(dict.fromkeys(s for v in self.source.inputs for s in self.open_axes(v).values()))

    def open_axes(self, value: Any) -> dict[int, str]:
        return {i: d if d else f"{value.name}/{i}" for i, d in enumerate(value.shape or ()) if not isinstance(d, int)}

    def leads(self, symbol: str) -> bool:
        """Whether a size is that of a first axis of several: a batch."""
        at = [(v, i) for v in self.source.inputs for i, s in self.open_axes(v).items() if s == symbol]
        return all(i == 0 and len(v.shape or ()) > 1 for v, i in at)

    def sized(self, symbols: Sequence[str], given: Mapping[str, int], first: int, base: int, even: bool) -> dict[str, int]:
        rest = [s for s in symbols if s not in given and not self.leads(s)]
        found = {s: base if even else base + i for i, s in enumerate(rest)}
        return dict.fromkeys(symbols, first) | found | dict(given)

    def attempt(self, name: str, kind: str, sizes: Mapping[str, int], seed: int) -> tuple[GuardCase | None, str]:
        """A case and ""; or None and the reason why the model does not accept it."""
        inputs: dict[str, GuardInput] = {}
        arrays: dict[str, np.ndarray] = {}
        for value in self.source.inputs:
            if value.kind != "tensor" or value.dtype is None or value.shape is None:
                raise InvalidInput(
                    f"input {value} has no declared dtype and shape for drawn values", code="SX308",
                    hint="pass inputs, by --inputs FILE.npz or --data FOLDER",
                )  # fmt: skip
            symbols = self.open_axes(value)
            shape = tuple(d if isinstance(d, int) else sizes[symbols[i]] for i, d in enumerate(value.shape))
            high, key = self.bounds.get(value.name, 2), key_of(seed, name, value.name)
            array = arrays[value.name] = draw(kind, value.dtype, shape, high, key)
            inputs[value.name] = GuardInput(value.dtype, shape, kind, high, key, None, digest(array))
        case = GuardCase(name, inputs)
        try:
            types = self.trial(arrays)
        except ResourceExhausted:  # larger sizes need more
            raise
        except SonnxError as error:
            types = error.message
        if isinstance(types, str):
            return None, types
        self.types.append(types)
        return case, ""

    def stored(self, chosen: Sequence[tuple[Node, str]], level: Level, cases: Sequence[GuardCase]) -> list[GuardedValue]:
        """The values with their summaries, and with tolerances that rounding errors do not exceed."""
        source, found = self.source, dict[str, GuardedValue]()
        for call, name in chosen:
            found[name] = GuardedValue(name, call.name, call.op_type, 1, name in source.outputs)
        for case in cases:
            feeds = inputs_of(case)
            for visit in walk(source, self.engine, None, feeds, BUDGET):
                for name, value in visit.mine.items() if isinstance(visit.mine, dict) else ():
                    if name in found and (arrays := dict(parts(value))):
                        tolerance = source.widened(Tolerance(), name)
                        summaries = {e: summarize(a, level, tolerance, f"{case.name}\0{name}{e}") for e, a in arrays.items()}
                        found[name].cases[case.name] = summaries
                self.step(note=visit.call.name)
            self.keep(found, case.name, self.errors(found, case, feeds, level))
        return [v for v in found.values() if v.cases]

    def errors(
        self, found: Mapping[str, GuardedValue], case: GuardCase, feeds: Values, level: Level
    ) -> dict[str, dict[str, float]]:
        """By how many tolerances rounding moves each part of each value."""
        moved: dict[str, dict[str, float]] = {}
        for visit in walk(self.source, _Noisy(), None, feeds, BUDGET):
            for name, value in visit.mine.items() if isinstance(visit.mine, dict) else ():
                if name in found and case.name in found[name].cases:
                    moved[name] = excess(value, found[name].cases[case.name], level, f"{case.name}\0{name}")
            self.step(note=visit.call.name)
        return moved

    def keep(self, found: Mapping[str, GuardedValue], case: str, moved: Mapping[str, Mapping[str, float]]) -> None:
        """Remove the values of a case that rounding changes, and widen the tolerances of those that it moves."""
        lost = []
        for name, value in found.items():
            factors = {end: far / _NEAR for end, far in moved.get(name, {}).items()}
            factor = max(factors.values(), default=0.0)
            if factor <= 1 or case not in value.cases:
                continue
            if factor > _FAR or any(factors[end] > 1 and exact(s.dtype) for end, s in value.cases[case].items()):
                lost.append(name)
                del value.cases[case]
                continue
            rounded = float(f"{factor:.2g}")
            value.widened = max(value.widened, rounded)
            value.cases[case] = {e: _wider(s, rounded) for e, s in value.cases[case].items()}
        if lost:
            shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if lost[4:] else "")
            why = f"{len(lost)} values of the case {case!r} are left out, because they change with the rounding of earlier nodes"
            self.notes.append(f"{why}: {shown}"[:400])


def _fewer(values: Sequence[GuardedValue], share: float) -> list[GuardedValue]:
    """This share of the values, evenly spread, with all outputs, and at least one other less."""
    inner = [v for v in values if not v.output]
    count = min(len(inner) - 1, int(len(inner) * share * 0.9))
    kept = {inner[i * len(inner) // count].name for i in range(count)}
    return [v for v in values if v.output or v.name in kept]


def excess(value: Any, summaries: Mapping[str, Summary], level: Level, key: str) -> dict[str, float]:
    """By how many tolerances each part of a value differs from its summary; infinite if it has other parts."""
    arrays = dict(parts(value))
    if arrays.keys() != summaries.keys():
        return dict.fromkeys(summaries, math.inf)
    return {e: judge(arrays[e], s, level, key + e).excess for e, s in summaries.items()}


def _wider(s: Summary, factor: float) -> Summary:
    return replace(s, rtol=float(f"{s.rtol * factor:.6g}"), atol=float(f"{s.atol * factor:.6g}"))


def _all_nan(a: np.ndarray) -> bool:
    return not exact(a.dtype) and bool(np.isnan(a).all())
