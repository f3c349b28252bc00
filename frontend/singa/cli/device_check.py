"""`sonnx device-check`: prove on a new machine that a CUDA device computes correctly."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from singa_backend.conform import device_check
from singa_backend.conform.device_check_page import page
from singa_backend.io.files import write_text

from ._common import NO, OUTPUT_FOLDER, SECONDS, echo, exit_codes, json_option, processes_option, show, write_json, wrote
from ._device_stages import STAGES, VERSIONS
from ._tables import NUMBER, WHOLE, WORDS, Columns

_ROWS = Columns({"stage": WHOLE, "status": WHOLE, "seconds": NUMBER, "reason": WORDS})
_STYLES = {device_check.PASSED: "green", device_check.ONE_DEVICE: "yellow"}


def _cuda(context: click.Context, parameter: click.Parameter, name: str) -> str:
    """Check the name of the device; a callback of click."""
    if not re.fullmatch(r"CUDA(:\d+)?", name, re.IGNORECASE | re.ASCII):
        raise click.BadParameter(f"must be CUDA or CUDA and an ordinal, such as CUDA:1, got {name!r}")
    return name.upper()


@click.command("device-check")
@click.option("--device", default="CUDA", show_default=True, callback=_cuda, help="CUDA, or CUDA:1.")
@click.option(
    "--to",
    "folder",
    type=OUTPUT_FOLDER,
    help="Write results.jsonl into this folder, a line for each stage as soon as it ends, and at the end a page, results.md.",
)
@click.option(
    "--stage",
    "names",
    multiple=True,
    type=click.Choice([s.name for s in STAGES]),
    help="Only `versions` and this stage (repeatable; default: all).",
)
@click.option(
    "--every", default=1, show_default=True, type=click.IntRange(1), help="Run every n-th case of ONNX's suite and n-th gradient."
)
@processes_option("--processes", "-n", help="Child processes of a stage (default: one per core).")
@click.option(
    "--deadline",
    default=device_check.TOTAL,
    show_default=True,
    type=SECONDS,
    help="Seconds that all stages together may take; with more, each stage has more in proportion.",
)
@json_option
@exit_codes
def command(
    device: str,
    folder: Path | None,
    names: tuple[str, ...],
    every: int,
    processes: int | None,
    deadline: float,
    as_json: bool,
) -> None:
    """Test a CUDA device in stages, each in a process with a deadline.

    It records the versions of everything, compiles the kernels in several processes, and compares products, integer and NaN
    traps, ONNX's suite, gradients, training programs and tensors with the CPU. It checks that two runs have equal bits, that
    1,000 steps do not take more memory, and that the device is usable after a model that does not fit.

    The exit code is 0 only if every stage passed: without a device the first stage fails, and the others are not run. On a
    machine with one device, the stage that needs two reports "one device", which is not a failure.
    """
    chosen = [s for s in STAGES if not names or s.name in (*names, VERSIONS)]
    setup = device_check.CheckSetup(device, every, processes, deadline)
    found: list[device_check.StageResult] = []
    target = folder / "results.jsonl" if folder else None
    if target:
        write_text(target, "")  # a folder that cannot be written is refused now; lines of an earlier run go
    for outcome in device_check.run(chosen, setup):
        found.append(outcome)
        if target:
            write_text(target, "".join(json.dumps(o.to_dict()) + "\n" for o in found))
        if not as_json:
            echo(f"{outcome.stage}: {outcome.status}", style=_STYLES.get(outcome.status, "red"))
    if target:
        write_text(target.with_suffix(".md"), page([o.to_dict() for o in found]))
    passed = all(o.status in (device_check.PASSED, device_check.ONE_DEVICE) for o in found)
    facts = next((o.details for o in found if o.stage == VERSIONS), {})
    name = facts.get("name", "")
    if as_json:
        document: dict[str, Any] = {"passed": passed, "device": device, "name": name, "emulated": facts.get("emulated")}
        write_json(document | {"every": every, "stages": [o.to_dict() for o in found]})
    else:
        _show(found, name)
        wrote(target, target and target.with_suffix(".md"))
    sys.exit(0 if passed else NO)


def _show(found: list[device_check.StageResult], name: str) -> None:
    table = _ROWS.table(f"device check of {name}" if name else "device check")
    for o in found:
        reason = o.reason.partition("\nTraceback (most recent call last):")[0]
        table.add(o.stage, o.status, o.seconds, reason, style=_STYLES.get(o.status, "red"))
    show(table)
    wrong = [o.stage for o in found if o.status not in _STYLES]
    single = [o.stage for o in found if o.status == device_check.ONE_DEVICE]
    if wrong:
        echo(f"did not pass: {', '.join(wrong)}", style="red")
    elif single:
        echo(f"every stage passed, except that no second device was tested: {', '.join(single)}", style="yellow")
    else:
        echo("every stage passed", style="green")
