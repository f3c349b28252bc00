"""Communication as operators of `ai.singa`, so that the graph of a training step holds it.

Each operation has a start and an end, as XLA's all-reduce-start and all-reduce-done: nodes between them run meanwhile.  The
attribute `communicator` is the number of a communicator in the running process, so that these operators have no function body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import limits
from ..collectives.communicator import Communicator, Handle, numbered, ticket_of, wait_for
from ..errors import OperatorError
from ..proto.schemas import SINGA_DOMAIN, declare_schema
from ._api import Array, Host, Xp, operator

_FLOATS = ("float16", "bfloat16", "float", "double")
_NUMBERS = (*_FLOATS, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

declare_schema(
    "AllReduceStart",
    ["x: T"],
    ["ticket: I"],
    {"communicator": int},
    types={"T": _NUMBERS, "I": ["int64"]},
    doc="Start the sum of x over all ranks of a communicator.  ticket: the operation, for AllReduceDone.",
)
declare_schema(
    "SparseAllReduceStart",
    ["indices: I", "values: T"],
    ["ticket: I"],
    {"communicator": int, "equal": 0},
    types={"T": _FLOATS, "I": ["int64"]},
    doc="Start the sum over all ranks of vectors that are zero except for values at indices, which are sent as int32.  equal: 1 "
    "if every rank has the same number of values.  ticket: the operation, for AllReduceDone.",
)
declare_schema(
    "AllReduceDone",
    ["x: T", "ticket: I"],
    ["sum: T"],
    types={"T": _NUMBERS, "I": ["int64"]},
    doc="Wait for an operation.  sum: its result, of the shape of x, the input of AllReduceStart, or the dense vector.",
)


@operator("AllReduceStart", 1, domain=SINGA_DOMAIN, widen=False, traits=("exchanges", "sends"))
def all_reduce_start(xp: Xp, x: Array, *, communicator: int) -> Array:
    """Start the sum of x over the ranks; return the ticket, int64 of shape ()."""
    comm = numbered(communicator)
    return _begun(xp, lambda: comm.all_reduce(_placed(xp, comm.on_host, x)))


@operator("SparseAllReduceStart", 1, domain=SINGA_DOMAIN, widen=False, traits=("exchanges", "sends"))
def sparse_all_reduce_start(xp: Xp, indices: Array, values: Array, *, communicator: int, equal: int = 0) -> Array:
    """Start the sum of sparse vectors over the ranks; return the ticket, int64 of shape ()."""
    comm = numbered(communicator)
    largest = int(xp.to_host(indices.max())) if len(indices) else 0
    if largest > np.iinfo(np.int32).max:
        raise OperatorError(f"indices are sent as int32, got {largest}", code="SX405", hint="use a lower threshold")

    def start() -> Handle:
        places = _placed(xp, comm.on_host, indices.astype(np.int32))
        own = _placed(xp, comm.on_host, values.copy())  # nothing keeps the memory of the inputs until the end
        if equal:
            return _Sparse(comm.all_gather(places), comm.all_gather(own))
        return _Counted(comm, comm.all_gather(np.array([len(places)], np.int32)), places, own)

    return _begun(xp, start)


@operator("AllReduceDone", 1, domain=SINGA_DOMAIN, widen=False, traits=("exchanges",))
def all_reduce_done(xp: Xp, x: Array, ticket: Host[int]) -> Array:
    """Wait for an operation; return its result, of the shape and dtype of x."""
    result = limits.current().exchanges.end(ticket, wait_for)
    if not isinstance(result, list):
        return xp.asarray(result).reshape(x.shape)
    total = xp.zeros(x.shape, dtype=x.dtype)
    for indices, values in result:  # of each rank, whose indices are distinct
        places = xp.asarray(indices).astype(np.int64)
        total[places] = total[places] + xp.asarray(values)
    return total


def _begun(xp: Xp, start: Callable[[], Handle]) -> Array:
    """The ticket of an exchange, int64 of shape (); it is begun unless the run is repeated, and has begun it before."""
    return xp.asarray(np.int64(limits.current().exchanges.begin(lambda: ticket_of(start()))))


class _Sparse:
    """The handle of indices and values of all ranks; its result is a list of pairs, by rank."""

    def __init__(self, indices: Handle, values: Handle) -> None:
        self.indices, self.values = indices, values

    def wait(self) -> list[tuple[Any, Any]]:
        return list(zip(self.indices.wait(), self.values.wait(), strict=True))


class _Counted:
    """As _Sparse, for ranks with different numbers of values: those are sent when the numbers are known."""

    def __init__(self, comm: Communicator, counts: Handle, indices: Any, values: Any) -> None:
        self.comm, self.counts, self.indices, self.values = comm, counts, indices, values

    def wait(self) -> list[tuple[Any, Any]]:
        sizes = [int(n[0]) for n in self.counts.wait()]
        return _Sparse(self.comm.all_gather(self.indices, sizes), self.comm.all_gather(self.values, sizes)).wait()


def _placed(xp: Xp, on_host: bool, x: Array) -> Array:
    """An array where the communicator reads it, contiguous."""
    if on_host:
        return np.asarray(x if isinstance(x, np.ndarray) else xp.to_host(x), order="C")
    return xp.ascontiguousarray(x)
