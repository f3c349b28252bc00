"""Steps of machine code for products; see gemm/frame.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..elementwise.compile import NotCompiled
from ..gemm.frame import FrameFunction
from ..gemm.tiles import HEIGHT, TILES
from ..ir.sizes import late
from .frames import ALL, FrameStep, InnerFrame
from .table import Site
from .values import Value

PARALLEL = 1 << 20
"""The products of two numbers from which several threads compute a step."""

CLAIM = 1 << 18
"""The products of two numbers that a thread claims at a time, at least."""

GAP = 64
"""The bytes after a row of A that keep rows apart in the first cache."""


def bound_product(
    site: Site,
    function: FrameFunction,
    sizes: Mapping[str, Any],
    values: Mapping[str, Value],
    work: Any,
    units: Any = None,
    inner: Sequence[InnerFrame] = (),
) -> FrameStep:
    """What binds a call of a function; see `emit_product`."""
    try:
        compiled = function.compiled()
    except NotCompiled as reason:
        site.refuse(str(reason))
    if units is None:
        has_groups = "groups" in function.layout.numbers
        units = late(_units, *(sizes[n] for n in ("rows", "height", "groups"))) if has_groups else sizes["rows"]
    threads, chunk = 1, ALL
    if site.options.threads > 1:
        threads = late(_threads, work, units, site.options.threads)
        chunk = late(_chunk, work, units, threads)
    first = next(iter(values.values()))
    given = [values.get(p, first) for p in function.layout.pointers]
    return FrameStep(compiled, threads, [chunk, *(sizes[n] for n in function.layout.numbers)], given, inner=inner)


def _units(rows: int, height: int, groups: int) -> int:
    return -(-rows // height) * groups


def _threads(work: int, units: int, most: int) -> int:
    return most if work > PARALLEL and units > 1 else 1


def _chunk(work: int, units: int, threads: int) -> int:
    return max(1, min(CLAIM * units // max(work, 1), units // threads))


def emit_product(
    site: Site, function: FrameFunction, sizes: Mapping[str, Any], values: Mapping[str, Value], writes: Sequence[str], work: Any,
    name: str, units: Any = None, inner: Sequence[InnerFrame] = (), keeps: Sequence[object] = (),
) -> None:  # fmt: skip
    """Add the step of a function; declines if it has no machine code.

    Args:
        site: the place.
        function: the function.
        sizes: its numbers, by name.
        values: the values, by the names of its pointers; others are not read.
        writes: the names of those that it writes.
        work: the products of two numbers in all.
        name: of the step, for reports.
        units: of work; by default groups of tiles for each part of the rows, or rows.
        inner: the frames of functions that it calls.
        keeps: what the step needs besides.
    """
    bind = bound_product(site, function, sizes, values, work, units, inner)
    written = tuple(values[w] for w in writes)
    reads = [v for v in values.values() if v not in written]
    site.emit(bind, reads=reads, writes=written, kernel=f"machine.{name}", keeps=keeps)


def tile_sizes(rows: Any, n: Any) -> dict[str, Any]:
    """The sizes of a product of so many rows and columns."""
    return {"rows": rows, "n": n, "groups": -(-n // (LANES * TILES)), "height": late(lambda r: min(r, HEIGHT), rows)}


def spread_lanes(tiles: np.ndarray, rows: np.ndarray) -> None:
    """Write the elements of rows to tiles whose lanes are the rows; other lanes are zero."""
    whole = len(rows) // LANES
    tiles[:whole] = rows[: whole * LANES].reshape(whole, LANES, rows.shape[1]).swapaxes(1, 2)
    tiles[whole:] = 0
    if rest := len(rows) - whole * LANES:
        tiles[whole, :, :rest] = rows[whole * LANES :].T
