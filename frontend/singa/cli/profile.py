"""`sonnx profile`: where the time of a run goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from onnx import ModelProto

from singa_backend import Limits, SingaBackend
from singa_backend.inspection import inspect
from singa_backend.io.files import check, write_text
from singa_backend.limits import Budget, format_bytes, spend
from singa_backend.plans.profile import NodeProfile, OperatorProfile, Profile, StepProfile
from singa_backend.proto.load import load_model
from singa_backend.rendering import printable

from ._common import OUTPUT, device_option, echo, exit_codes, json_option, limit_option, plan_options, show, write_json
from ._inputs import InputOptions, model_options
from ._tables import NAME, NUMBER, WORDS, Columns

WAITED = 0.1
"""The part of the time of the runs for which threads may wait for a core without a line."""

_WORK = dict.fromkeys(("share", "ms", "GFLOP", "MB", "of roofline"), NUMBER)
_STEPS = Columns({"step": NUMBER, **_WORK, "kernel": WORDS, "nodes": NAME, "operators": WORDS, "layout": WORDS, "notes": WORDS})
_NODES = Columns({"node": NAME, "operator": WORDS, **_WORK, "kernels": WORDS})
_OPERATORS = Columns({"operator": NAME, "nodes": NUMBER, **_WORK})


@click.command("profile")
@model_options
@click.option("--runs", default=10, show_default=True, type=click.IntRange(1, 10**6), help="The runs to measure.")
@click.option("--top", default=20, show_default=True, type=click.IntRange(0), metavar="N", help="Show the N slowest steps.")
@click.option("--nodes", is_flag=True, help="Show every node of the model, in order.")
@click.option("--trace", type=OUTPUT, help="Write one run for chrome://tracing or ui.perfetto.dev.")
@click.option("--html", "page", type=OUTPUT, help="Write a picture of the graph with the times.")
@device_option
@plan_options
@limit_option
@json_option
@exit_codes
def command(
    model: Path,
    inputs: InputOptions,
    runs: int,
    top: int,
    nodes: bool,
    trace: Path | None,
    page: Path | None,
    device: str,
    threads: int | None,
    precision: str,
    optimize: int,
    limits: Limits,
    as_json: bool,
) -> None:
    """Run MODEL several times and show where the time goes: by step, by node and by operator.

    Without inputs, random ones with seed 0 are used.
    """
    for path in filter(None, (trace, page)):
        check(path, parents=True, keeps=(model, inputs.archive))
    rep = SingaBackend.prepare(model, device, limits=limits, threads=threads, precision=precision, optimize=optimize)
    with spend(Budget(limits)):
        proto = load_model(model)[0] if inputs.data else ModelProto()
        feeds = inputs.gather(proto, rep.inputs, optional=rep.graph.optional_inputs)
    found = rep.profile(feeds, runs=runs)
    if trace:
        write_text(trace, json.dumps(found.chrome_trace()))
    if page:
        write_text(page, inspect(model).html(found))
    if as_json:
        write_json(found.to_dict())
        return
    _show(found, top, nodes)
    for path in filter(None, (trace, page)):
        echo(f"wrote {path}")


def _show(found: Profile, top: int, nodes: bool) -> None:
    steps = sorted(found.steps, key=lambda s: -s.seconds)[:top]
    if steps:
        _table(_STEPS, [_step(s) for s in steps])
        if len(steps) < len(found.steps):
            echo(f"{len(steps)} of {len(found.steps)} steps, the slowest; --top shows more", style="dim")
    if nodes:
        _table(_NODES, [_node(n) for n in found.nodes])
    _table(_OPERATORS, [(o.operator, o.nodes, *_work(o)) for o in found.operators])
    options = ", ".join(f"{n} {v}" for n, v in found.options.items())
    echo(f"{found.seconds * 1e3:.4g} ms a run, {found.step_seconds * 1e3:.4g} ms in its steps")
    if found.waited is not None and found.waited > WAITED:
        echo(f"other programs use the cores: threads of this process waited {found.waited:.0%} of the time of these runs for one")
    if found.single_runs:
        echo(f"{found.single_runs} of {found.runs} runs used one thread because of it (docs/performance.md)")
    echo(f"by {found.by} on {found.device}: {options}")
    if found.reason:
        echo(f"no plan: {found.reason}")
    if found.by == "plan":
        fused = "".join(f"; fused: {n} {c}" for n, c in found.fused.items() if c)
        echo(f"{found.segments} segment{'s' * (found.segments != 1)}, {found.folded} nodes computed once{fused}")
        if found.gradients or found.refused_gradients:
            echo(f"{found.gradients} gradients computed by one kernel each, {len(found.refused_gradients)} declined")
        for call, reason in found.refused_gradients.items():
            echo(f"  {printable(call)}: {printable(reason)}")
    sizes = {"arena": found.arena_bytes, "lower bound": found.live_bytes, "weights": found.weight_bytes}
    sizes |= {} if found.peak_bytes is None else {"peak of the process": found.peak_bytes}
    echo("memory: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()))
    if found.rates is not None:
        r = found.rates
        cached = f" (up to {max(rate for _, rate in r.caches):.0f} in caches)" if r.caches else ""
        products = f"{r.gflops:.0f} GFLOP/s in products by {r.by}"
        echo(f"this machine: {products}, {r.gbytes:.0f} GB/s in copies of memory{cached}, {r.threads} threads")


def _step(s: StepProfile) -> tuple[Any, ...]:
    more = f" and {len(s.nodes) - 1} more" * (len(s.nodes) > 1)
    layout = " -> ".join((*s.inputs[:1], *s.outputs[:1]))
    return (s.index, *_work(s), s.kernel, f"{s.nodes[0]}{more}", ", ".join(s.operators), layout, "\n".join(s.notes))


def _node(n: NodeProfile) -> tuple[Any, ...]:
    how = "\n".join(n.kernels) or (f"part of {n.part_of}" if n.part_of else "none in a run")
    return (n.name, n.operator, *_work(n), how)


def _work(row: StepProfile | NodeProfile | OperatorProfile) -> tuple[Any, ...]:
    return (
        f"{row.share:.1%}",
        row.seconds * 1e3,
        None if row.flops is None else row.flops / 1e9,
        row.bytes / 1e6,
        None if row.roofline is None else f"{row.roofline:.0%}",
    )


def _table(columns: Columns, rows: Sequence[tuple[Any, ...]]) -> None:
    table = columns.table()
    for row in rows:
        table.add(*row)
    show(table)
