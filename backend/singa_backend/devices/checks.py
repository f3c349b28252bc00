"""Checks of values on a CUDA device whose results are read once for many calls.

A check that reads its result at once makes the host wait for the device.  A run collects its checks instead: each has a flag in
the device's memory, and all flags are read with the outputs.  Until then a call computes with values that are safe, such as
indices that are in range; if a flag is set, the outputs are dropped and the error of the first check that failed is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from ..errors import OperatorError

_COUNT = 256
"""The number of flags.  A run with more checks, such as one of a long loop, reads them before it goes on."""

CLEAR = np.iinfo(np.uint64).max
"""The value of a flag whose check did not fail; that of another has the smallest wrong value, see `_wrong_value`."""


class Checks:
    """The checks of one run.

    Args:
        module: CuPy.

    Attributes:
        added: the number of checks of the run.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._flags: Any = None
        self._errors: list[Callable[[int], OperatorError]] = []
        self._places: list[dict[str, Any]] = []
        self.added = 0

    @property
    def pending(self) -> Any:
        """The flags of the checks that were not read, an array of the device; None if there are none."""
        return self._flags[: len(self._errors)] if self._errors else None

    def locate(self, where: Callable[[], dict[str, Any]]) -> None:
        """Keep the node of the new checks.

        Args:
            where: returns the fields of `SonnxError.locate`; called only if there are new checks.
        """
        if len(self._places) < len(self._errors):
            self._places += [where()] * (len(self._errors) - len(self._places))

    def indices(self, i: Any, size: int, low: int) -> Any:
        """Return indices in [0, size), counted from the end if they are negative; wrong ones become 0."""

        def wrong(value: int) -> OperatorError:
            return OperatorError(f"an index must be in [{low}, {size}), got {value}", code="SX401")

        if not size:
            raise wrong(int(i.reshape(-1)[:1].get()[0]))
        return _wrap(self._module)(i, low, size, self._add(wrong), self._flags)

    def refuse(self, bad: Any, error: Callable[[], OperatorError]) -> None:
        """Fail if an element of a bool array is true."""
        _mark(self._module)(bad, self._add(lambda _: error()), self._flags)

    def _add(self, error: Callable[[int], OperatorError]) -> int:
        """Return the number of a new check."""
        if len(self._errors) == _COUNT:
            self.settle()
        if self._flags is None:
            self._flags = self._module.full(_COUNT, CLEAR, np.uint64)
        self._errors.append(error)
        self.added += 1
        return len(self._errors) - 1

    def settle(self) -> None:
        """Read the flags; raise OperatorError if a check failed."""
        if self._errors:
            self.verify(self._module.asnumpy(self.pending))
            self._errors, self._places = [], []

    def verify(self, values: np.ndarray) -> None:
        """Raise the OperatorError of the first check that failed.

        Args:
            values: `pending`, on the host.
        """
        for k, value in enumerate(values.tolist()):
            if value != CLEAR:
                raise self._errors[k](_wrong_value(value)).locate(**(self._places[k] if k < len(self._places) else {}))


def _wrong_value(flag: int) -> int:
    """The wrong value of a flag; flags have the order of the values, and none is `CLEAR`, because 0 is never wrong."""
    value = flag - 2**63
    return value + (value >= 0)


_current: ContextVar[Checks | None] = ContextVar("checks", default=None)


@contextmanager
def collected(checks: Checks | None) -> Iterator[None]:
    """A context whose checks are collected in `checks`; with None, each is read at once."""
    token = _current.set(checks)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def checking(module: Any) -> Iterator[Checks]:
    """The checks of the present run; outside a run, checks that are read when the context ends."""
    checks = _current.get()
    if checks is not None:
        yield checks
        return
    checks = Checks(module)
    yield checks
    checks.settle()


# The smallest wrong index is kept: the order of the threads must not decide which one an error names.
@cache
def _wrap(module: Any) -> Any:
    return module.ElementwiseKernel(
        "T index, int64 low, int64 size, int32 number, raw uint64 flags",
        "T y",
        """
        long long v = static_cast<long long>(index);
        if (v < low || v >= size) {
            unsigned long long flag = (static_cast<unsigned long long>(v) ^ (1ULL << 63)) - (v > 0);
            atomicMin(const_cast<unsigned long long*>(reinterpret_cast<const unsigned long long*>(&flags[number])), flag);
            v = 0;
        }
        y = static_cast<T>(v < 0 ? v + size : v);
        """,
        "sonnx_indices",
    )


@cache
def _mark(module: Any) -> Any:
    return module.ElementwiseKernel("bool bad, int32 number", "raw uint64 flags", "if (bad) flags[number] = 0;", "sonnx_refuse")
