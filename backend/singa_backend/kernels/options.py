"""The options of a plan, as a user passes them: checked, with their defaults."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..errors import InvalidInput
from ..machine import usable_cores
from .table import Options

VARIABLE = "SONNX_NUM_THREADS"
"""The environment variable that sets the number of threads."""

MOST_THREADS = 1024
"""The highest number of threads: a machine that cannot start them ends the process."""

PRECISIONS = ("float32", "bf16")

MEMORIES = ("compact", "speed")

LEVELS = (0, 1, 2)


def options(
    threads: int | None = None,
    precision: str = "float32",
    optimize: int = 2,
    deterministic: bool = False,
    *,
    ordered: bool = False,
    activation_memory: int | None = None,
    memory: str = "compact",
) -> Options:
    """Check options of `prepare`.

    Args:
        threads: the number of threads; None for `default_threads`.
        precision: "float32" or "bf16".
        optimize: 0, 1 or 2.
        deterministic: whether equal inputs must return equal bits at any number of cores: one thread is used.
        ordered: whether inputs and outputs keep their order of axes in memory.
        activation_memory: the bytes that the values between the inputs and the outputs may take; None for as many as they need.
        memory: "compact" or "speed": whether weights may be kept in a second form.

    Returns:
        The options.

    Raises:
        InvalidInput: a value is not one of these, or SONNX_NUM_THREADS is not a number of threads (SX384).
    """
    if threads is not None and not _is_count(threads):
        raise _invalid("threads", f"an integer from 1 to {MOST_THREADS}", threads)
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise _invalid("precision", "'float32' or 'bf16'", precision)
    if not _is_integer(optimize) or optimize not in LEVELS:
        raise _invalid("optimize", "0, 1 or 2", optimize)
    if not isinstance(deterministic, bool):
        raise _invalid("deterministic", "True or False", deterministic)
    if deterministic and threads not in (None, 1):
        raise _invalid("threads", "1 or None with deterministic=True", threads)
    if activation_memory is not None and not (_is_integer(activation_memory) and activation_memory > 0):
        raise _invalid("activation_memory", "a positive number of bytes or None", activation_memory)
    if not isinstance(memory, str) or memory not in MEMORIES:
        raise _invalid("memory", "'compact' or 'speed'", memory)
    adaptive = threads is None and not deterministic and not os.environ.get(VARIABLE)
    if threads is None:
        threads = 1 if deterministic else default_threads()
    adaptive = adaptive and threads > 1
    return Options(int(threads), precision, int(optimize), deterministic, adaptive, ordered, activation_memory, memory)


def default_threads() -> int:
    """The number of threads of a plan for which none is set.

    Returns:
        SONNX_NUM_THREADS if it is set; otherwise the number of usable cores, shared among the workers of pytest-xdist, or
        OMP_NUM_THREADS if that is lower.

    Raises:
        InvalidInput: SONNX_NUM_THREADS is not a number of threads (SX384).
    """
    text = os.environ.get(VARIABLE, "")
    if text:
        if not _is_count(_number(text)):
            raise _invalid(f"the environment variable {VARIABLE}", f"an integer from 1 to {MOST_THREADS}", text)
        return _number(text)
    bound = _number(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip())  # one number for each level of nesting
    workers = _number(os.environ.get("PYTEST_XDIST_WORKER_COUNT", ""))
    return max(1, min(usable_cores() // max(workers, 1), bound or MOST_THREADS, MOST_THREADS))


def _number(text: str) -> int:
    """The positive integer that a variable holds; 0 for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and 1 <= value <= MOST_THREADS


def _invalid(name: str, rule: str, value: object) -> InvalidInput:
    return InvalidInput(f"{name} must be {rule}, got {value!r}", code="SX384")
