"""Pairs the values of two models for `compare` and `bisect`: by name where the names are the same, otherwise by alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..comparison.difference import Tolerance
from ..engines.local import Ours
from ..errors import SonnxError
from ..ir.graph import Node
from .align import DRAWS, Aligner, ModelSide, Side
from .alignment import Alignment, Gap, ValuePair
from .constants import confirmed, used
from .lockstep import Values, check_fed, fed_to, refusal
from .model import ComparedModel, inner_names, read_names, result_names
from .repair import Repair
from .sketch import further
from .torch_module import TorchSide

_SEEDS = 6
"""The most draws of further inputs that are tried: a model may refuse some."""


def named(names: Mapping[str, str]) -> dict[str, ValuePair]:
    """The pairs by name and position as they are without an alignment."""
    return {a: ValuePair(b, how="name" if a == b else "position") for a, b in names.items()}


def needed(source: ComparedModel, other: ComparedModel, names: Mapping[str, str]) -> bool:
    """Whether some value has no partner by name, or one that another operator computes."""
    for node in source.graph.nodes:
        for name in result_names(node):
            maker = other.producer(names.get(name, ""))
            if maker is None or (maker.op_type != node.op_type and name not in source.outputs):
                return True
    return False


def align_models(
    source: ComparedModel, other: ComparedModel, names: Mapping[str, str], given: Mapping[str, str], inputs: Values,
    tolerance: Tolerance, budget: int,
) -> Alignment:  # fmt: skip
    """Align two models by the values that they compute.

    Args:
        source: the judged model.
        other: the trusted model.
        names: the pairs by name, and of inputs and outputs by position.
        given: the pairs that the user gave, among them.
        inputs: of `source`, checked, by name.
        tolerance: the user's tolerances.
        budget: the maximum bytes of stored values in memory.
    """
    check_fed(other, fed_to(other, inputs, names))
    draws = drawn(source, inputs, lambda values: not refusal(source, values) and not refusal(other, fed_to(other, values, names)))
    mine = ModelSide(source, Ours(), draws, budget // 4)
    theirs = ModelSide(other, Ours(), [fed_to(other, values, names) for values in draws], budget // 4)
    return aligned(mine, theirs, names, given, tolerance, len(draws), budget)


def align_module(source: ComparedModel, side: TorchSide, inputs: Values, tolerance: Tolerance, budget: int) -> Alignment:
    """Align a model with a PyTorch module.

    Args:
        source: the judged model.
        side: the module, which has not run yet.
        inputs: of `source`, checked, by name.
        tolerance: the user's tolerances.
        budget: the maximum bytes of stored values in memory.
    """
    side.run(inputs)

    def runs(values: Values) -> bool:
        try:
            side.run(values)
        except SonnxError:
            return False
        return True

    draws = drawn(source, inputs, lambda values: not refusal(source, values) and runs(values))
    names = dict(zip(source.outputs, side.outputs, strict=False)) if len(source.outputs) == len(side.outputs) else {}
    names = {a: b for a, b in names.items() if b in side.made and source.producer(a)}
    found = aligned(ModelSide(source, Ours(), draws, budget // 4), side, names, {}, tolerance, len(draws), budget)
    found.unit = "values"
    return found


def aligned(
    mine: ModelSide, theirs: Side, names: Mapping[str, str], given: Mapping[str, str], tolerance: Tolerance, draws: int,
    budget: int,
) -> Alignment:  # fmt: skip
    """Align a model and another side, and continue after faults."""
    aligner = Aligner(mine, theirs, names, given, tolerance, draws, budget)
    aligner.run()
    with Repair(aligner, mine, budget) as repair:
        repair.run()
        _keep_names(aligner, repair)
        return _result(aligner, repair, draws)


def drawn(source: ComparedModel, inputs: Values, runs: Any) -> list[Values]:
    """The inputs, and further ones of the same shapes on which the sides run."""
    draws = [inputs]
    for seed in range(1, _SEEDS):
        if len(draws) == DRAWS:
            break
        values = further(inputs, seed)
        if runs(values):
            draws.append(values)
    return draws


def _keep_names(aligner: Aligner, repair: Repair) -> None:
    """Pair further values where an output differs: by name, or, with another dtype or size, by operator and inputs."""
    pairs, theirs = aligner.pairs, aligner.theirs.made
    taken = {p.other for p in pairs.values()}
    readers: dict[str, list[str]] = {}
    for b, made in theirs.items():
        for name in made.uses:
            readers.setdefault(name, []).append(b)
    for call in repair.region():
        read = {pairs[n].other for n in read_names(call) if n in pairs}
        for a in result_names(call):
            b = aligner.names.get(a, "")
            other = theirs.get(b)
            if a in pairs or a not in aligner.mine.made:
                continue
            if b and other and not aligner.same_kind(a, b):
                continue
            if b and other and b not in taken and (other.operator == call.op_type or (read and read <= set(other.uses))):
                pairs[a] = ValuePair(b, how="name")
            elif read:
                near = {r for n in read for r in readers.get(n, ()) if r not in taken and theirs[r].operator == call.op_type}
                near = {
                    r for r in near
                    if aligner.left.sizes.get(a) != aligner.right.sizes.get(r) and aligner.same_kind(a, r)
                    and read <= set(theirs[r].uses)
                }  # fmt: skip
                if len(near) == 1:
                    pairs[a] = ValuePair(near.pop(), how="structure")
            taken |= {pairs[a].other} if a in pairs else set()


def _result(aligner: Aligner, repair: Repair, draws: int) -> Alignment:
    """The pairs, how much they are of both sides, and what is between them."""
    source, still = repair.source, aligner.left.still
    pairs = named({n: b for n, b in aligner.names.items() if source.producer(n) is None})
    pairs |= aligner.pairs
    moving = [c for c in source.graph.nodes if not all(n in still for n in result_names(c))]
    alone = [c for c in moving if not any(n in aligner.pairs for n in result_names(c))]
    there = aligner.right.still
    places = {m.at for n, m in aligner.theirs.made.items() if n not in there}
    covered = {p.other for p in aligner.pairs.values()} | {b for bs in aligner.verified.values() for b in bs}
    found = {m.at for n, m in aligner.theirs.made.items() if n in covered} & places
    structured = bool(repair.culprits or repair.inserted or repair.wrong) and any(m.uses for m in aligner.theirs.made.values())
    sure = confirmed(source, still, repair.equal, aligner.pairs, repair.culprits, repair.reads) if structured else set()
    constants = {n for n, p in aligner.pairs.items() if p.how == "constant"} if structured else set()
    raw = {n for n, p in aligner.pairs.items() if p.other in aligner.verified.get(n, ()) and n in repair.equal}
    return Alignment(
        pairs, (len(moving) - len(alone), len(found)), (len(moving), len(places)), gaps(source, alone, pairs), draws,
        neutral=dict(repair.neutral), culprits=dict(repair.culprits), inserted=dict(repair.inserted),
        confirmed=sure, doubtful=constants - sure - aligner.left.distinct,
        used=used(source, still, raw, aligner.pairs) if structured else set(),
        alike={n: tuple(bs) for n, bs in aligner.verified.items() if len(bs) > 1} if structured else {},
    )  # fmt: skip


def gaps(source: ComparedModel, alone: Sequence[Node], pairs: Mapping[str, ValuePair]) -> list[Gap]:
    """The connected parts of nodes without a partner, and the matched values around them."""
    inside = set(alone)
    order = {n: i for i, n in enumerate(inner_names(source.graph.nodes))}
    found, seen = [], set[Node]()
    for first in alone:
        if first in seen:
            continue
        part, waiting = set[Node](), [first]
        before, after = dict[str, None](), dict[str, None]()
        while waiting:
            node = waiting.pop()
            if node in part:
                continue
            part.add(node)
            for read in node.reads:
                if read.producer in inside:
                    waiting.append(read.producer)
                elif read.name in pairs and read.name not in source.weights:
                    before[read.name] = None
            for value in node.results:
                after |= {value.name: None} if value.name in source.outputs else {}
                for reader in value.users:
                    if reader in inside:
                        waiting.append(reader)
                    else:
                        after |= dict.fromkeys(n for n in result_names(reader) if n in pairs)
        seen |= part
        start, end = (tuple(sorted(names, key=lambda n: order.get(n, -1))) for names in (before, after))
        found.append(Gap(start, end, tuple(n.name for n in sorted(part, key=source.indices.__getitem__))))
    return found
