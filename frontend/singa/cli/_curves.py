"""The curves of a training: as an HTML page, as a PNG file, and as a line of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.io.places import STANDARD_OUTPUT, check
from singa_backend.rendering import html, printable

Curve = Sequence[tuple[int, float]]
"""Pairs of the number of steps and the loss."""

_COLORS = ("#1f5fa8", "#c2571a")
_BLOCKS, _PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"


def check_plot(plot: Path | None) -> None:
    """Raise before the training, not after it."""
    if plot is None:
        return
    if plot == STANDARD_OUTPUT:
        return
    if plot.suffix not in (".html", ".png"):
        raise InvalidInput(f"a plot must be .html or .png, got {plot.suffix or plot.name!r}", code="SX332")
    check(plot)
    if plot.suffix == ".html":
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependency("a .png needs matplotlib", hint="pip install 'sonnx[plot]', or use an .html file") from None


def write_plot(path: Path, curves: dict[str, Curve], title: str) -> None:
    """Write the curves to a file of either format, completely or not at all; raises InvalidInput if that fails."""
    from singa_backend.io.files import write_text, writing

    if path == STANDARD_OUTPUT or path.suffix == ".html":
        write_text(path, page(curves, title), parents=False)
    else:
        with writing(path) as out:
            _picture(out, curves, title)


def _picture(out: BinaryIO, curves: dict[str, Curve], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, curve), color in zip(curves.items(), _COLORS, strict=False):
        axes.plot([i for i, _ in curve], [v for _, v in curve], color=color, label=name, marker="o" if len(curve) < 50 else None)
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(printable(title), parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, format="png", dpi=120)


def page(curves: dict[str, Curve], title: str) -> str:
    """Return the curves as a self-contained page with one drawing; values that are not finite are left out."""
    curves = {name: [(i, v) for i, v in curve if math.isfinite(v)] for name, curve in curves.items()}
    width, height, left, bottom = 800, 360, 64, 40
    values = [v for curve in curves.values() for _, v in curve] or [0.0]
    last = max((i for curve in curves.values() for i, _ in curve), default=1)
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def at(step: int, value: float) -> tuple[str, str]:
        x = left + (width - left - 12) * ((step - 1) / max(last - 1, 1))
        return f"{x:.1f}", f"{12 + (height - bottom - 12) * (1 - (value - low) / span):.1f}"

    marks = "".join(
        f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{v:.4g}</text>'
        f'<line x1="{left}" x2="{width - 12}" y1="{y}" y2="{y}" class="grid"/>'
        for v in (low + span * k / 4 for k in range(5))
        for y in [at(1, v)[1]]
    )
    drawn, told = [], []
    for (name, curve), color in zip(curves.items(), _COLORS, strict=False):
        points = " ".join(",".join(at(i, v)) for i, v in curve)
        dots = "".join('<circle cx="{}" cy="{}" r="3"/>'.format(*at(i, v)) for i, v in curve) if len(curve) < 50 else ""
        drawn.append(f'<g stroke="{color}" fill="{color}"><title>{html(name)}</title><polyline points="{points}"/>{dots}</g>')
        if curve:
            best = min(v for _, v in curve)
            told.append(
                f'<p><span style="color: {color}">&#9632;</span> {html(name)}: {len(curve)} values, first {curve[0][1]:.6g}, '
                f"last {curve[-1][1]:.6g}, lowest {best:.6g}.</p>"
            )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html(title)}</title>
<style>body {{ font: 15px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 52rem; padding: 0 1rem }}
svg {{ width: 100%; height: auto }} text {{ font-size: 13px; fill: #444 }}
.grid {{ stroke: #ddd }} polyline {{ fill: none; stroke-width: 2 }}</style></head>
<body><h1>{html(title)}</h1>
<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss by step">{marks}
{"".join(drawn)}<text x="{left}" y="{height - 12}">step 1</text>
<text x="{width - 12}" y="{height - 12}" text-anchor="end">step {last}</text></svg>
{"".join(told)}</body></html>
"""


def line(curve: Curve, encoding: str, width: int = 48) -> str:
    """Return a curve as one line of blocks, each the mean of some steps; values that are not finite are left out."""
    values = [v for _, v in curve if math.isfinite(v)]
    if not values:
        return ""
    marks = _BLOCKS if encoding.lower().startswith("utf") else _PLAIN
    n = min(width, len(values))
    parts = [values[len(values) * k // n : len(values) * (k + 1) // n] for k in range(n)]
    means = [math.fsum(p) / len(p) for p in parts]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(marks[min(int((v - low) / span * len(marks)), len(marks) - 1)] for v in means)
