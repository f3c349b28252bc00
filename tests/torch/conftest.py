"""Prints the table of the measured errors against PyTorch after the tests."""

from __future__ import annotations

from typing import Any

HEAD = ("net", "dtype", "runs as", "loss, 10 steps", "loss, 50 steps", "gradient", "loss")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [tuple(v) for r in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
            for k, v in getattr(r, "user_properties", []) if k == "row" and r.when == "call"]  # fmt: skip
    if rows:
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        terminalreporter.write_line("\nlargest relative errors against PyTorch")
        for row in (HEAD, *rows):
            terminalreporter.write_line("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
