"""Pictures of a training run: curves and a confusion matrix, as .svg, or as .png by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from singa_backend.io.files import write_text, writing


def check(path: Path | None) -> None:
    """End the program before the training if this picture cannot be drawn."""
    if path is None:
        return
    if path.suffix not in (".svg", ".png"):
        raise SystemExit(f"a picture must be .svg or .png, got {path}")
    if not path.parent.is_dir():
        raise SystemExit(f"{path} cannot be written: there is no folder {path.parent}")
    if path.suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise SystemExit("a .png needs matplotlib: pip install 'sonnx[plot]', or use an .svg file") from None


def curves(path: Path, history: np.ndarray) -> None:
    """Loss and accuracy by epoch; the columns are training loss and accuracy, validation loss and accuracy."""
    panels = (("loss", history[:, 0::2]), ("accuracy", history[:, 1::2]))
    if path.suffix == ".png":
        figure, axes = _figure((9, 4), 2)
        for (title, values), ax in zip(panels, axes, strict=True):
            for column, name in zip(values.T, ("training", "validation"), strict=True):
                ax.plot(range(1, len(column) + 1), column, marker="o", label=name)
            ax.set(title=title, xlabel="epoch")
            ax.legend()
        with writing(path) as out:
            figure.savefig(out, format="png")
        return
    parts = []
    for i, (title, values) in enumerate(panels):
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        span, left = (high - low) or 1.0, 40 + 380 * i
        parts.append(f'<text x="{left}" y="24">{title}, {low:.4g} to {high:.4g}; epochs 1 to {len(values)}</text>')
        for column, name, color in zip(values.T, ("training", "validation"), ("#1f5fa8", "#c2571a"), strict=True):
            xs = left + 320 * np.arange(len(column)) / max(len(column) - 1, 1)
            ys = 240 - 200 * (column - low) / span
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True) if np.isfinite(y))
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"><title>{name}</title></polyline>'
            )
    legend = '<text x="40" y="275" fill="#1f5fa8">training</text><text x="120" y="275" fill="#c2571a">validation</text>'
    _svg(path, 800, 290, "".join(parts) + legend)


def confusion(path: Path, counts: np.ndarray, names: Sequence[str]) -> None:
    """A square for each pair of classes: rows are the true ones, columns the predicted ones; shades are shares of the row."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if path.suffix == ".png":
        figure, (ax,) = _figure((2 + 0.6 * len(names), 1.5 + 0.6 * len(names)), 1)
        ax.imshow(share, cmap="Blues", vmin=0, vmax=1)
        ax.set(xlabel="predicted", ylabel="true")
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
        ax.set_yticks(range(len(names)), names)
        for i, j in np.ndindex(counts.shape):
            ax.text(j, i, str(counts[i, j]), ha="center", va="center", color="white" if share[i, j] > 0.5 else "black")
        with writing(path) as out:
            figure.savefig(out, format="png")
        return
    cell, left, top = 44, 110, 90
    size = cell * len(names)
    parts = [f'<text x="{left}" y="20">rows: true class, columns: predicted class</text>']
    for i, name in enumerate(names):
        middle = cell * i + cell / 2
        parts.append(f'<text x="{left - 6}" y="{top + middle + 5}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<text transform="translate({left + middle},{top - 6}) rotate(-40)">{escape(name)}</text>')
        for j in range(len(names)):
            shade = int(255 - 190 * share[i, j])
            x, y, color = left + cell * j, top + cell * i, "#fff" if share[i, j] > 0.5 else "#222"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="rgb({shade},{shade},255)" stroke="#ddd"/>'
                f'<text class="count" x="{x + cell / 2}" y="{y + cell / 2 + 5}" text-anchor="middle" fill="{color}">'
                f"{counts[i, j]}</text>"
            )
    _svg(path, left + size + 60, top + size + 10, "".join(parts))


def _figure(size: tuple[float, float], panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, panels))


def _svg(path: Path, width: float, height: float, content: str) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="13">'
    write_text(path, f'{head}<rect width="100%" height="100%" fill="#fff"/>{content}</svg>\n')
