"""Write backend/singa_backend/devices/cupy_names.json from the CuPy that is installed: python tests/helpers/cupy_names.py

No device is needed.  tests/conform/test_strict_against_cupy.py compares the file with CuPy.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).parents[2] / "backend/singa_backend/devices/cupy_names.json"

# What the signature of these hides behind *args and **kwargs.
_KEYWORDS = {
    "atleast_1d": [], "atleast_2d": [], "atleast_3d": [], "broadcast_arrays": [], "ix_": [],
    "einsum": ["dtype", "optimize"],
    "meshgrid": ["indexing", "sparse", "copy"],
    "pad": ["array", "pad_width", "mode", "constant_values", "end_values", "reflect_type", "stat_length"],
}  # fmt: skip
_METHODS = {"reshape": ["order", "copy"], "transpose": []}


def _parameters(function: Any) -> list[str] | None:
    """The names that may be given by keyword; None where neither the signature nor Cython's first line tells them."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        line = (function.__doc__ or "").partition("\n")[0]
        match = re.match(r"_ndarray_base\.\w+\(self(?:, )?(.*?)\)(?: ->|$)", line)
        return [p.split("=")[0].split()[-1] for p in match[1].split(", ") if p and p[0] != "*"] if match else None
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return [
        p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) and p.name != "self"
    ]


def _functions(module: Any, names: list[str]) -> dict[str, list[str]]:
    found = {n: _parameters(getattr(module, n)) for n in names if inspect.isroutine(getattr(module, n)) and not n.startswith("_")}
    return {n: parameters for n, parameters in found.items() if parameters is not None}


def _loops(cupy: Any) -> dict[str, list[str]]:
    """The types of each ufunc, and of the one inside `where`, in the order in which CuPy tries them."""
    from cupy._sorting.search import _where_ufunc

    loops = {n: getattr(cupy, n).types for n in dir(cupy) if isinstance(getattr(cupy, n), cupy.ufunc) and hasattr(np, n)}
    return {**loops, "where": _where_ufunc.types}


def describe() -> dict[str, Any]:
    """Return what the file holds: CuPy's names that NumPy has too, the parameters of functions, the types of ufuncs."""
    import cupy

    def shared(theirs: Any, ours: Any) -> list[str]:
        return sorted(n for n in dir(theirs) if hasattr(ours, n))

    pairs = {
        "cupy": (cupy, np),
        "ndarray": (cupy.ndarray, np.ndarray),
        "linalg": (cupy.linalg, np.linalg),
        "fft": (cupy.fft, np.fft),
    }
    names = {part: shared(*pair) for part, pair in pairs.items()}
    for part in ("cupy", "linalg", "fft"):
        names[part] = [n for n in names[part] if not n.startswith("_")]
    parameters = {part: _functions(pairs[part][0], names[part]) for part in pairs}
    parameters["cupy"].update(_KEYWORDS)
    parameters["ndarray"].update(_METHODS)
    return {"version": cupy.__version__, **names, "parameters": parameters, "loops": _loops(cupy)}


def names(part: str) -> Any:
    """Return a part of the file: the list of names, or the parameters or loops by name."""
    return json.loads(PATH.read_text())[part]


if __name__ == "__main__":
    PATH.write_text(json.dumps(describe()))
