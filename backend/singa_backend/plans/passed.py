"""Large inputs and outputs of a plan that are not copied."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import numpy as np

from ..ir.sizes import now
from ..kernels.table import require_finite
from ..kernels.values import ALIGNMENT, Value, aligned_start, order_of

PASSED = 1 << 17
"""Bytes from which an input is read where it is, and an output computed where it stays: copies take longer than binding steps."""

Receivers = Sequence[np.ndarray | None]
"""The arrays of a caller for the outputs; None where it has none."""

PASSED_STEPS = 8
"""The highest number of steps that are bound in each run for such an array."""

UNSHARED = 2
"""What `sys.getrefcount` returns for memory that only a `ZeroCopy` refers to."""


def unbound() -> None:
    """Take the place of a call that is bound in each run, between the runs."""


@dataclass(eq=False)
class ZeroCopy:
    """A large input or output of a run that is not copied.

    Attributes:
        value: what the steps read or write.
        index: of the input; -1 for an output.
        array: that of the present run; None between runs.
        place: of the output.
        checked: whether a step checks that an input is finite, if the plan needs that.
        is_in_table: whether the machine code of a plan for open sizes finds its address in a table.
        memory: of the last output: the next one uses it again if no array shows it any more, because the system takes longer to
            provide new pages than the step to write them.
    """

    value: Value
    index: int = -1
    array: np.ndarray | None = None
    memory: np.ndarray | None = None
    checked: bool = True
    place: int = -1
    is_in_table: ClassVar[bool] = False

    def attach(self, inputs: Sequence[Any], receivers: Receivers = ()) -> None:
        """Let the steps that are bound next use the array of this run, for an output that of `receivers` if it can be written."""
        value = self.value
        if self.index >= 0:
            given = inputs[self.index]
            moved = np.ascontiguousarray(given if value.contiguous else np.transpose(given, order_of(value.strides)))
            self.array = np.ndarray(value.shape, value.dtype, moved, 0, value.strides)
            value.buffer.memory = moved.reshape(-1).view(np.uint8)
        elif receivers and self._receives(receiver := receivers[self.place]):
            self.array, value.buffer.memory = receiver, receiver.reshape(-1).view(np.uint8)
        else:
            needed = now(value.nbytes) + ALIGNMENT
            held = 0 if self.memory is None else self.memory.nbytes
            if not needed <= held <= 2 * needed or sys.getrefcount(self.memory) > UNSHARED:
                self.memory = np.empty(needed, np.uint8)
            assert self.memory is not None
            start = aligned_start(self.memory)
            self.array = np.ndarray(value.shape, value.dtype, self.memory, start, value.strides)
            value.buffer.memory = self.memory[start : start + needed - ALIGNMENT]

    def _receives(self, array: np.ndarray | None) -> TypeGuard[np.ndarray]:
        """Whether steps may write an array of the caller, which has the shape and dtype of the output."""
        return array is not None and self.value.contiguous and array.flags.c_contiguous and array.flags.aligned

    def require_finite(self) -> None:
        """Raise Invalid unless the input of this run is finite."""
        assert self.array is not None
        require_finite(self.array)

    def detach(self) -> None:
        """Keep nothing of the arrays of a run."""
        self.array = self.value.buffer.memory = None

    def take(self, output: Value, once: bool = True) -> np.ndarray:
        """The output of this run.  That of a trace is in memory which nothing else uses after it.

        Args:
            output: the output.
            once: whether this is the only output with the value; those of a trace are otherwise copies.
        """
        if self.array is not None:
            return self.array
        return output.array if once else output.array.copy("K")


@dataclass(eq=False)
class Replaced(ZeroCopy):
    """An input that a result replaces in place.  The steps stay bound to its array, which is usually the same in each run."""

    def moves(self, inputs: Sequence[Any]) -> bool:
        """Whether the array of this run is not that of the run before; the steps that are bound next use it."""
        given = inputs[self.index]
        if given is self.array:
            return False
        self.array = given
        self.value.buffer.memory = given.reshape(-1).view(np.uint8)
        return True


__all__ = ["PASSED", "PASSED_STEPS", "Receivers", "Replaced", "ZeroCopy", "unbound"]
