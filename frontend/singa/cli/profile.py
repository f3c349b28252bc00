"""`sonnx profile`: where the time of a run goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.io.places import check
from singa_backend.rendering import printable

from ._common import (
    OUTPUT,
    collected,
    device_option,
    echo,
    exit_codes,
    json_option,
    limit_option,
    plan_options,
    show,
    write_json,
)
from ._inputs import InputOptions, model_options
from ._tables import NAME, NUMBER, WORDS, Columns
from ._train_loss import loss_option
from ._train_setup import freeze_option, optimizer_option, target_option
from ._training_steps import StepOptions, check_step, profiled_training

if TYPE_CHECKING:
    from onnx import ModelProto

    from singa_backend import Limits
    from singa_backend.plans.profile import NodeProfile, OperatorProfile, Profile, StepProfile
    from singa_backend.plans.training_profile import GradientProfile

WAITED = 0.1
"""The part of the time of the runs for which threads may wait for a core without a line."""

_WORK = dict.fromkeys(("share", "ms", "GFLOP", "MB", "of roofline"), NUMBER)
_STEPS = Columns({"step": NUMBER, **_WORK, "kernel": WORDS, "nodes": NAME, "operators": WORDS, "layout": WORDS, "notes": WORDS})
_NODES = Columns({"node": NAME, "operator": WORDS, **_WORK, "kernels": WORDS})
_PART_STEPS = Columns({**_STEPS.kinds, "part": WORDS})
_PART_NODES = Columns({**_NODES.kinds, "part": WORDS})
_OPERATORS = Columns({"operator": NAME, "nodes": NUMBER, **_WORK})
_PARTS = Columns({"part": NAME, "steps": NUMBER, "share": NUMBER, "ms": NUMBER, "in kernels": NUMBER})
_GRADIENTS = Columns(
    {"gradient of": NAME, "calls": NUMBER, "share": NUMBER, "ms": NUMBER, "computed by": WORDS, "kernels": WORDS, "reason": WORDS}
)

_BY = {"kernel": "one kernel", "rule": "its rule", "refused": "its rule"}


@click.command("profile")
@model_options
@click.option("--runs", default=10, show_default=True, type=click.IntRange(1, 10**6), help="The runs to measure.")
@click.option("--top", default=20, show_default=True, type=click.IntRange(0), metavar="N", help="Show the N slowest steps.")
@click.option("--train", is_flag=True, help="Profile a training step: forward, loss, backward and update.")
@collected("step", StepOptions, (loss_option, optimizer_option, target_option, freeze_option))
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
    train: bool,
    step: StepOptions,
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

    With --train it runs training steps, and also shows the parts of a step and what computes each gradient.  The targets are the
    array --target of --inputs, or of -i; without it, random ones.
    """
    from onnx import ModelProto

    from singa_backend import SingaBackend, Value
    from singa_backend.inspection import inspect
    from singa_backend.io.files import write_text
    from singa_backend.limits import Budget, spend
    from singa_backend.proto.load import load_model

    check_step(train, step)
    for path in filter(None, (trace, page)):
        check(path, parents=True, keeps=(model, inputs.archive))
    rep = SingaBackend.prepare(model, device, limits=limits, threads=threads, precision=precision, optimize=optimize)
    optional = [Value(step.target)] if train else rep.graph.declared_optional_inputs
    with spend(Budget(limits)):
        proto = load_model(model)[0] if inputs.data else ModelProto()
        feeds = inputs.gather(proto, rep.inputs, optional=optional)
    pictured: Path | ModelProto = model
    if train:
        found, pictured = profiled_training(model, step, feeds, [v.name for v in rep.inputs], runs, device, rep.options, limits)
    else:
        found = rep.profile(feeds, runs=runs)
    if trace:
        write_text(trace, json.dumps(found.chrome_trace()))
    if page:
        write_text(page, inspect(pictured).html(found))
    if as_json:
        write_json(found.to_dict())
        return
    _show(found, top, nodes)
    for path in filter(None, (trace, page)):
        echo(f"wrote {path}")


def _show(found: Profile, top: int, nodes: bool) -> None:
    from singa_backend.limits import format_bytes

    _show_parts(found)
    steps = sorted(found.steps, key=lambda s: -s.seconds)[:top]
    if steps:
        columns = _PART_STEPS if found.parts else _STEPS
        _table(columns, [(*_step(s), *([s.part] if found.parts else [])) for s in steps])
        if len(steps) < len(found.steps):
            echo(f"{len(steps)} of {len(found.steps)} steps, the slowest; --top shows more", style="dim")
    if nodes:
        columns = _PART_NODES if found.parts else _NODES
        _table(columns, [(*_node(n), *([n.part] if found.parts else [])) for n in found.nodes])
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
    for text in found.graphs:
        echo(f"CUDA graphs: {printable(text)}")
    if found.by == "plan":
        fused = "".join(f"; fused: {n} {c}" for n, c in found.fused.items() if c)
        echo(f"{found.segments} segment{'s' * (found.segments != 1)}, {found.folded} nodes computed once{fused}")
        if found.gradients or found.refused_gradients:
            echo(f"{found.gradients} gradients computed by one kernel each, {len(found.refused_gradients)} declined")
        for call, reason in {} if found.parts else found.refused_gradients.items():
            echo(f"  {printable(call)}: {printable(reason)}")
    if found.bindings or found.other_sizes:
        echo(f"bound {found.bindings} times to other sizes; {sum(found.other_sizes.values())} times a plan did not take them")
        for reason, times in found.other_sizes.items():
            echo(f"  {times}: {printable(reason)}")
    for note in found.notes:
        echo(note)
    held = "parameters and states" if found.parts else "weights"
    sizes = {"arena": found.arena_bytes, "lower bound": found.live_bytes, held: found.weight_bytes}
    sizes |= {} if found.peak_bytes is None else {"peak of the process": found.peak_bytes}
    echo("memory: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()))
    if found.rates is not None:
        r = found.rates
        cached = f" (up to {max(rate for _, rate in r.caches):.0f} in caches)" if r.caches else ""
        products = f"{r.gflops:.0f} GFLOP/s in products by {r.by}"
        echo(f"this machine: {products}, {r.gbytes:.0f} GB/s in copies of memory{cached}, {r.threads} threads")


def _show_parts(found: Profile) -> None:
    """Print the parts of a training step, and what computes its gradients, those of equal calls in one row."""
    if not found.parts:
        return
    _table(_PARTS, [(p.part, p.steps, f"{p.share:.1%}", p.seconds * 1e3, f"{p.kernels:.0%}") for p in found.parts])
    groups: dict[tuple[str, str, str], list[GradientProfile]] = {}
    for g in found.gradient_calls:
        groups.setdefault((g.operator, g.by, g.reason if g.by != "kernel" else ""), []).append(g)
    rows = []
    for (operator, by, reason), group in sorted(groups.items(), key=lambda item: -sum(g.seconds for g in item[1])):
        kernels = dict.fromkeys(k for g in group for k in g.kernels)
        reason = f"declined: {reason}" if by == "refused" else reason
        share, seconds = sum(g.share for g in group), sum(g.seconds for g in group)
        rows.append((operator, len(group), f"{share:.1%}", seconds * 1e3, _BY[by], "\n".join(kernels), reason))
    if rows:
        _table(_GRADIENTS, rows)


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
