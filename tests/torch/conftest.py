"""Prints the tables of the measured errors against PyTorch after the tests."""

from __future__ import annotations

from typing import Any

from singa_backend import machine

HEAD = ("net", "dtype", "runs as", "loss, 10 steps", "loss, 50 steps", "gradient", "loss")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    properties = [p for r in reports if r.when == "call" for p in r.user_properties]
    rows = [tuple(v) for k, v in properties if k == "row"]
    nets = [tuple(v) for k, v in properties if k == "level"]
    for level, threads in sorted({n[:2] for n in nets}):
        errors = [(error, name) for *run, name, error in nets if run == [level, threads]]
        worst, name = max(errors)
        where = f"{machine.processor()} at {level}, threads: {threads}"
        terminalreporter.write_line(f"{where}: {len(errors)} nets, largest error {worst:.1e} ({name})")
    if rows:
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        terminalreporter.write_line("\nlargest relative errors against PyTorch")
        for row in (HEAD, *rows):
            terminalreporter.write_line("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
