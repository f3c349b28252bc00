"""`sonnx doctor`: what this installation computes with, and what would make it faster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ._common import NO, echo, exit_codes, json_option, show, write_json
from ._tables import WHOLE, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.doctor import Diagnosis

TRUST = "docs/performance.md#implementations-that-are-not-trusted"
"""Where the conditions and the faults of these implementations are listed."""

_FOUND = Columns({"": WHOLE, "found": WORDS})
_EXTRAS = Columns({"extra": WHOLE, "package": WHOLE, "version": WORDS, "for": WORDS})


@click.command("doctor")
@json_option
@exit_codes
def command(as_json: bool) -> None:
    """Show the libraries, threads, extras and GPUs that sonnx finds, and what would make it faster.

    The exit code is 1 if there is a problem: oneDNN is missing although its wheel exists for this platform, or a setting is
    invalid.  Hints do not change it.
    """
    from singa_backend.doctor import diagnose

    found = diagnose()
    if as_json:
        write_json(found.to_dict())
    else:
        _show(found)
    if not found.well:
        sys.exit(NO)


def _show(found: Diagnosis) -> None:
    library, threads = found.onednn, found.threads
    quota = "no quota" if threads.quota is None else f"a quota of {threads.quota:g}"
    environment = ", ".join(f"{n}={v}" for n, v in threads.environment.items())
    rows = [
        ("oneDNN", f"{library.version} ({library.runtime}, {library.isa})" if library.path else f"missing: {library.reason}"),
        ("", f"{library.path}, commit {library.hash[:12]}" if library.path else ""),
        ("", f"{library.not_trusted} implementations are not trusted under some condition ({TRUST})" if library.path else ""),
        ("threads", str(threads.used) if threads.used else threads.reason),
        ("cores", f"{threads.cores} in the machine, {threads.affinity} allowed, {quota}"),
        ("environment", environment),
        ("BLAS of NumPy", found.blas),
        ("GPUs", f"{found.gpus}" + (f" ({found.gpu_reason})" if found.gpu_reason else "")),
        ("system", found.system),
        *((name, version or "missing") for name, version in found.versions.items()),
    ]
    _table(_FOUND, [r for r in rows if r[1]])
    _table(
        _EXTRAS,
        [(e.name, e.package, e.version or f"missing: {e.command}", e.use) for e in found.extras],
    )
    for one in found.findings:
        style = "red" if one.level == "problem" else "yellow"
        echo(f"{one.level}: {one.text}" + (f"  ->  {one.command}" if one.command else ""), style=style)
    if found.well:
        echo("no problems", style="green")


def _table(columns: Columns, rows: list[tuple[str, ...]]) -> None:
    table = columns.table()
    for row in rows:
        table.add(*row)
    show(table)
