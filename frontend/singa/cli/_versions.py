"""`sonnx --version`: the versions of sonnx and of the libraries that it computes with, without loading them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = {
    "sonnx": ("sonnx",),
    "onnx": ("onnx",),
    "NumPy": ("numpy",),
    "oneDNN": ("onednn-cpu-gomp",),
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
}
"""The distributions of each library; the first that is installed counts."""


def versions() -> dict[str, str | None]:
    """Return the version of each library, and of Python; None if it is not installed.

    A distribution of another name than the library has its own numbers, so it is named.
    """
    found = {name: _version(names) for name, names in PACKAGES.items()}
    if chosen := os.environ.get("SONNX_ONEDNN"):
        found["oneDNN"] = f"SONNX_ONEDNN={chosen}"
    return {**found, "Python": platform.python_version()}


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return version(name) + (f" ({name})" if "-" in name else "")
        except PackageNotFoundError:
            continue
    return None
