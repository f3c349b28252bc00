"""Run an exported file once in onnxruntime, in a child process, before the file is moved to its place."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from singa_backend.engines.oracle import EngineFailure, Oracle
from singa_backend.errors import InvalidModel

TIMEOUT = 60.0
"""Seconds for loading and running the file; more are a warning."""

LARGEST = 1 << 26
"""The maximum bytes of the example inputs; a file with larger ones is only loaded."""

_WARM = 1 << 28
"""A file of at most this many bytes may stay loaded in the child process."""

_ABSENT = (
    "NOT_IMPLEMENTED", "not a registered function/op", "No Op registered for", "Unsupported model IR version",
    "under development", "is not implemented", "NotImplemented", "No opset import for domain", "maximum supported",
)  # fmt: skip
"""What onnxruntime reports of valid models that it does not implement."""

_NODE = re.compile(r"""In Node, \("([^"]*)"|[Nn]ode with name '([^']*)'|Name:'([^']*)'|[Nn]ode:? ?\(([^)]*)\)|Node:(\S+)""")

_lock = threading.Lock()
_oracle: Oracle | None = None


def _forget() -> None:
    global _lock, _oracle
    _lock, _oracle = threading.Lock(), None  # another thread may have held the lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def run_once(path: Path, inputs: Mapping[str, np.ndarray] | None) -> str:
    """Load a file in onnxruntime, and run it if inputs are given; nothing if onnxruntime is not installed.

    Args:
        path: the file.
        inputs: the inputs by name.

    Returns:
        A warning if onnxruntime does not implement the model, or does not finish in time; "" if it ran, or is not installed.

    Raises:
        InvalidModel: onnxruntime refuses the file, or dies of it (SX111).
    """
    global _oracle
    if find_spec("onnxruntime") is None:
        return ""
    fed = inputs is not None and all(a.dtype.isbuiltin == 1 for a in inputs.values())
    small = inputs is not None and sum(a.nbytes for a in inputs.values()) <= LARGEST
    with _lock:
        _oracle = _oracle or Oracle("onnxruntime", optimise=False)
        try:
            _oracle.run(path.resolve(), dict(inputs or {}), timeout=TIMEOUT, load_only=not (fed and small))
        except EngineFailure as failure:
            return _judged(failure)
        finally:
            if sum(part.stat().st_size for part in path.parent.iterdir()) > _WARM:
                _oracle.close()
    return ""


def _judged(failure: EngineFailure) -> str:
    """The warning for a model that onnxruntime does not implement; raises InvalidModel for others."""
    found = _NODE.search(failure.reason)
    node = next((n for n in found.groups() if n), "") if found else ""
    where = f" at node {node!r}" if node else ""
    if failure.how == "timeout":
        return f"the file was not run to the end: onnxruntime returned {failure.reason}"
    if any(text in failure.reason for text in _ABSENT):
        return f"onnxruntime does not implement the model{where}: {failure.reason[:500]}"
    raise InvalidModel(
        f"onnxruntime {failure.how}{where} when it ran the file, which was not written: {failure.reason[:1000]}",
        code="SX111",
        node=node,
        hint="run=False (--no-run) writes the file without a run; sonnx.compare finds what differs",
    ) from None
