"""Modules of an adapter matched to the parameters of a model, whose paths may have another beginning."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..errors import InvalidInput, Problem
from ..limits import check_rounds
from .modules import ModuleParameter, Modules

MATCHING = "SX981"
"""The code of an error in the names or shapes of an adapter."""

_LISTED = 8
"""The number of modules that a message lists."""

_TRIED = 8
"""The number of modules from which beginnings of paths are derived."""

_QUICK = 10
"""How many look-ups of a path count as an iteration."""

_COMPARED = 1000
"""The maximum length of names that are compared character by character, and the number of them."""

_HINT = "pass the model that was exported from the network of the adapter, with the names of its modules"


class Wanted(NamedTuple):
    """A parameter that an adapter changes: the path of the module, the name of the parameter, and its kind ("" for any)."""

    path: str
    name: str
    kind: str


class _Renaming(NamedTuple):
    """Replaces the beginning of a path; `short` also writes `self_attn` as `attn`, as onnxruntime-genai's builder does."""

    old: str = ""
    new: str = ""
    short: bool = False

    @property
    def cost(self) -> int:
        """How much it changes: nothing, one side, or both."""
        return bool(self.old) + bool(self.new)

    def of(self, path: str) -> str:
        path = path.replace(".self_attn.", ".attn.") if self.short else path
        return self.new + path.removeprefix(self.old) if path.startswith(self.old) else path


def match(modules: Modules, wanted: Sequence[Wanted], source: str) -> dict[Wanted, ModuleParameter]:
    """Find the parameter of the model for each that an adapter changes.

    The paths of the model may have a part in front that those of the adapter lack, or lack one that they have, as a wrapper of
    the network adds or removes it; the same for all modules.

    Args:
        modules: the parameters of the model.
        wanted: those of the adapter.
        source: the name of the adapter, for messages.

    Returns:
        The parameter of the model for each.

    Raises:
        InvalidInput: some have no counterpart, or several (SX981); the message lists them with candidates.
    """
    best = _found(modules, wanted, _Renaming())
    if not all(best.values()):
        renamings = list(_renamings(modules, wanted))
        check_rounds(len(renamings) * len(wanted) // _QUICK)
        tried = [(r.cost, _found(modules, wanted, r)) for r in renamings]
        ranks = [(-_count(f), _shared(f), cost) for cost, f in tried]
        least = min(ranks, default=(0, 0, 0))
        if -least[0] > _count(best):  # of those that match most, and join least, those that change least
            rivals = [f for rank, (_, f) in zip(ranks, tried, strict=True) if rank == least]
            best = {w: list(dict.fromkeys(p for f in rivals for p in f[w])) for w in wanted}
    _check(modules, best, source)
    return {w: found[0] for w, found in best.items()}


def _count(found: dict[Wanted, list[ModuleParameter]]) -> int:
    return sum(map(bool, found.values()))


def _shared(found: dict[Wanted, list[ModuleParameter]]) -> int:
    """The number of parameters that have the tensor of another one."""
    first = [(f[0].tensor, f[0].rows, w.name) for w, f in found.items() if f]
    return len(first) - len(set(first))


def _found(modules: Modules, wanted: Sequence[Wanted], renaming: _Renaming) -> dict[Wanted, list[ModuleParameter]]:
    """The parameters under the renamed paths: of a kind, if one is wanted, otherwise each tensor once."""
    found: dict[Wanted, list[ModuleParameter]] = {}
    for w in wanted:
        every = _closest(modules.parameters.get((renaming.of(w.path), w.name), ()), w)
        once = {(p.tensor, p.rows): p for p in reversed(every)}
        found[w] = every if w.kind else list(once.values())
    return found


def _closest(parameters: Sequence[ModuleParameter], w: Wanted) -> list[ModuleParameter]:
    """Those of the wanted kind that the module uses and that have its name; of one condition less, if there are none."""
    fitting = [p for p in parameters if w.kind in ("", p.kind)]
    ranks = [(p.scoped, p.tensor == f"{p.path}.{w.name}") for p in fitting]
    return [p for p, rank in zip(fitting, ranks, strict=True) if rank == max(ranks)]


def _renamings(modules: Modules, wanted: Sequence[Wanted]) -> Iterator[_Renaming]:
    """The renamings by which one of the first paths is one of the model."""
    known, seen = {path for path, _ in modules.parameters}, {_Renaming()}
    for w in wanted[:_TRIED]:
        for short in (False, True):
            mine = _Renaming(short=short).of(w.path).split(".")
            for path in known:
                theirs = path.split(".")
                same = next((i for i, (a, b) in enumerate(zip(mine[::-1], theirs[::-1], strict=False)) if a != b), None)
                same = min(len(mine), len(theirs)) if same is None else same
                if same == 0 or (same == 1 and same not in (len(mine), len(theirs))):
                    continue
                old, new = (".".join([*parts[: len(parts) - same], ""]) for parts in (mine, theirs))
                made = _Renaming(old, new, short)
                if made not in seen:
                    seen.add(made)
                    yield made


def _check(modules: Modules, found: dict[Wanted, list[ModuleParameter]], source: str) -> None:
    """Raise InvalidInput unless each has one parameter, and each changed parameter is that of one."""
    problems: list[str] = []
    for w, parameters in found.items():
        if not parameters:
            near = _candidates(modules, w) if len(problems) < _LISTED else ""
            problems.append(f"{w.path}.{w.name} is not in the model{near}")
        elif len(parameters) > 1:
            problems.append(f"{w.path}.{w.name} may be {' or '.join(repr(p.tensor) for p in parameters[:4])}")
    owners: dict[tuple[str, str, object], str] = {}
    for w, parameters in found.items():
        if len(parameters) == 1 and w.kind:  # one value may be that of several modules
            other = owners.setdefault((parameters[0].tensor, parameters[0].path, parameters[0].rows), w.path)
            if other != w.path:
                problems.append(f"{other} and {w.path} are one tensor of the model, {parameters[0].tensor!r}")
    if problems:
        many = f"{len(problems)} names of the adapter have no tensor of their own in the model"
        listed = [Problem(text, MATCHING) for text in problems]
        what = problems[0] if len(problems) == 1 else many
        raise InvalidInput(f"{source}: {what}", code=MATCHING, hint=_HINT, problems=listed)


def _candidates(modules: Modules, w: Wanted) -> str:
    """The modules of the model whose paths are closest."""
    paths = [
        path for (path, name), of in modules.parameters.items() if name == w.name and any(w.kind in ("", p.kind) for p in of)
    ]
    last = w.path.rpartition(".")[2]
    near = [p for p in paths if p.rpartition(".")[2] == last]
    if not near and len(w.path) <= _COMPARED:
        near = difflib.get_close_matches(w.path, [p for p in paths[:_COMPARED] if len(p) <= _COMPARED], 3, 0.3)
    near = sorted(near, key=lambda p: -difflib.SequenceMatcher(None, p, w.path).quick_ratio())[:3]
    return f" (candidates: {', '.join(near)})" if near else " (no module has such a parameter)"
