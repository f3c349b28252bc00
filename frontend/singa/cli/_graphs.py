"""`sonnx fuzz --graphs`: generated models of many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from singa_backend import debug
from singa_backend.conform import results
from singa_backend.conform.cases import data_file
from singa_backend.conform.fuzz import ledger as operators
from singa_backend.conform.fuzz.graphs import generate, judge, ledger, summary
from singa_backend.conform.fuzz.graphs.judge import GraphJudge, JudgedGraph
from singa_backend.debug.repro import serialized
from singa_backend.errors import InvalidInput, first_line
from singa_backend.proto import test_data

from ._common import echo, err, show, write_json, wrote
from ._graph_forms import forms
from ._progress import progress
from ._tables import NUMBER, WHOLE, Columns

_VERDICTS = Columns({"verdict": WHOLE, "graphs": NUMBER})


def many(
    count: int,
    seed: int,
    known: Sequence[operators.KnownDifference],
    processes: int | None,
    target: Path | None,
    reports: Path | None,
    as_json: bool,
) -> bool:
    """Judge graphs and show the result; returns whether every difference is explained."""
    with progress(count, "generated graphs", unit="graphs", quiet=as_json) as step:
        bad = 0

        def note(judged: JudgedGraph) -> None:
            nonlocal bad
            bad += not judged.good
            step(note=f"{bad} unexplained or worse")

        entries = ledger.read(data_file("graphs.toml"))
        found = judge.run(range(count), seed, entries, known, forms=forms, processes=processes, progress=note)
    document = summary.to_json(found, seed)
    if target:
        results.save(document, target)
    pages = summary.write(document, reports) if reports else []
    if as_json:
        write_json(
            {k: document[k] for k in ("count", "seed", "totals", "forms", "ledger", "bad", "environment")}, name="fuzz.graphs"
        )
    else:
        _show(document)
        wrote(target, *pages)
    return all(r.good for r in found)


def _show(document: dict[str, Any]) -> None:
    t = document["totals"]
    table = _VERDICTS.table("generated graphs")
    for state in summary.STATES:
        table.add(state, f"{t[state]:,}")
    show(table)
    echo(f"{t['nodes']:,} nodes of {len(document['operators'])} operators; onnxruntime judged {t['nodes_judged']:,} nodes")
    if document["environment"]["onnxruntime"] == "absent":
        echo("onnxruntime is not installed, so only the forms were compared: pip install 'sonnx[oracle]'", style="yellow")
    for b in document["bad"][:30]:
        echo(f"{b['status']}: graph {b['index']}: {b['graph']}", style="red")
        for d in b["differences"]:
            echo(f"    {d['form']}: {d['operator']}: {first_line(d['says'])[:300]}")
        if b["says"]:
            echo("    " + first_line(b["says"])[:300])
    if document["bad"]:
        echo(f"one graph in detail, reduced: sonnx fuzz --graphs 1 --seed {document['seed']} --only INDEX --write FOLDER")


def detail(index: int, seed: int, known: Sequence[operators.KnownDifference], folder: Path | None, as_json: bool) -> bool:
    """Judge one graph, show it, and write it, reduced to what still fails."""
    with judge.session(seed, ledger.read(data_file("graphs.toml")), known, forms) as session:
        answer = session.ask(index)
        judged = session.judge(index, answer)
        written = None
        if folder is not None:
            case = generate.draw(seed, index) if isinstance(answer, str) else answer.case
            written = _write(case, judged, session, folder)
    differences = [
        {
            "form": d.form,
            "operator": d.operator,
            "kind": d.kind,
            "says": d.says,
            "class": d.entry.blame if d.entry else None,
            "why": d.entry.why if d.entry else None,
        }
        for d in judged.differences
    ]
    if as_json:
        facts = {"index": index, "seed": seed, "status": judged.status, "graph": judged.describe, "says": judged.says}
        write_json(facts | {"differences": differences, "forms": judged.forms, "written": written}, name="fuzz.graph")
        return judged.good
    echo(f"{judged.status}: {judged.describe}")
    if judged.says:
        echo(judged.says)
    echo(f"forms that agree: {', '.join(judged.forms) or 'none'}")
    for operator, reason in judged.removed:
        echo(f"  onnxruntime does not run {operator}: {reason}")
    for d in differences:
        echo(f"  {d['form']}, {d['operator']} differs: {d['says']}")
        echo(f"    {d['class']}: {d['why']}" if d["class"] else "    not in a ledger")
    if written:
        echo(f"wrote {written}")
    return judged.good


def _write(case: generate.GraphCase, judged: JudgedGraph, session: GraphJudge, folder: Path) -> str:
    """Write a graph, and if it fails the smallest part that still does; returns what was written."""
    predicate = _Fails(case, session, _failures(judged))
    if not judged.good:
        try:
            found = debug.reduce(case.model, case.feeds, predicate, to=folder, tries=200)
            return f"{found.folder}: {found}"
        except InvalidInput as error:  # the part that fails is the whole graph
            err.print(f"not reduced: {error}", style="yellow", highlight=False, soft_wrap=True)
    inputs = [i.name for i in case.model.graph.input]
    parts = {f"input_{i}.pb": serialized(case.feeds[name], name) for i, name in enumerate(inputs) if name in case.feeds}
    test_data.write(folder, case.model, parts)
    return f"{folder / 'model.onnx'} and {folder / 'test_data_set_0'}"


def _failures(judged: JudgedGraph) -> set[tuple[str, str]]:
    """Return what failed: the forms, without opsets, and the kinds of difference."""
    return {(d.form.partition(" to ")[0], d.kind) for d in judged.differences if d.entry is None} or {(judged.status, "")}


class _Fails(debug.Predicate):
    """A graph fails as the whole one did: in one of the same forms, with the same kind of difference."""

    def __init__(self, case: generate.GraphCase, session: GraphJudge, wanted: set[tuple[str, str]]) -> None:
        self.case, self.session, self.wanted = case, session, wanted

    def __str__(self) -> str:
        return "a form of the graph differs"

    def fails(self, model: ModelProto, folder: Path | None, inputs: Any) -> Any:
        case = replace(self.case, model=model, feeds=dict(inputs))
        judged = self.session.judge(self.case.index, self.session.ask(case))
        return {} if not judged.good and _failures(judged) & self.wanted else None
