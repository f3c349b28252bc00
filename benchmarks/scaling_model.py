"""What data-parallel training sends, and how long that takes on a network: formulas, without measurements.

A message of n bytes takes latency + n / bandwidth (the alpha-beta model).  Links are full duplex, and no two messages share one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MODES = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")
THRESHOLD = 2097152
"""Elements above which a gradient is sent alone, and a bucket is full: the default of DistOpt."""
ALGORITHMS = ("ring", "tree")
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
LIMIT = 0.5
"""A mode scales as long as its efficiency is at least this."""

REDUCE, GATHER = "all-reduce", "all-gather"


@dataclass(frozen=True)
class Network:
    """A network between workers.

    Args:
        name: Its name.
        latency: Seconds that a message takes without its bytes.
        bandwidth: Bytes per second of a link, in each direction.
    """

    name: str
    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth


NETWORKS = (
    Network("Ethernet 10 Gbit/s, 50 us", 50e-6, 10e9 / 8),
    Network("Ethernet 100 Gbit/s, 5 us", 5e-6, 100e9 / 8),
    Network("InfiniBand 400 Gbit/s, 2 us", 2e-6, 400e9 / 8),
)
"""Assumed: nominal rates, not measured."""


# --- what a mode sends


def buckets(sizes: Sequence[int], threshold: int = THRESHOLD) -> list[int]:
    """Return the elements of each bucket, in the order in which they are sent.

    Args:
        sizes: The elements of each gradient, in the order of the backward pass.
        threshold: A larger gradient is sent alone; the others are collected until they have more.
    """
    made, collected = [], 0
    for size in sizes:
        if size > threshold:
            made.append(size)
            continue
        collected += size
        if collected > threshold:
            made.append(collected)
            collected = 0
    return made + [collected] * (collected > 0)


def groups(mode: str, sizes: Sequence[int]) -> list[int]:
    """Return the elements of each bucket of a mode by default: partialUpdate has at least two partitions.

    Args:
        mode: The name of the mode.
        sizes: The elements of each gradient, in the order of the backward pass.
    """
    return buckets(sizes, min(THRESHOLD, (sum(sizes) - 1) // 2) if mode == "partialUpdate" else THRESHOLD)


def largest(share: float, size: int) -> int:
    """Return how many of `size` values topK sends: the share as its decimal digits specify it, rounded up."""
    return math.ceil(Fraction(repr(share)) * size)


def bytes_of(mode: str, full: Sequence[int], step: int = 0, share: float = 0.05, chosen: int = 0) -> int:
    """Return the bytes that a rank passes to the collectives in one step, for float32 parameters.

    Args:
        mode: The name of the mode.
        full: The elements of each bucket.
        step: The number of the step from 0, by which partialUpdate chooses its partition.
        share: The share of values of sparseTopK.
        chosen: The values of all buckets that reach the bound of sparseThreshold.
    """
    if mode == "plain":
        return 4 * sum(full)
    if mode == "half":
        return 2 * sum(full)
    if mode == "partialUpdate":
        return 4 * full[step % len(full)]
    if mode == "sparseTopK":
        return sum(8 * largest(share, n) for n in full)
    return 4 * len(full) + 8 * chosen


def messages(mode: str, full: Sequence[int], share: float = 0.05) -> list[list[tuple[str, float]]]:
    """Return the collectives of a step with their bytes, a list for each bucket; of partialUpdate, those of a mean partition.

    Args:
        mode: The name of the mode.
        full: The elements of each bucket.
        share: The share of values that a sparse mode sends.
    """
    if mode in ("plain", "half"):
        return [[(REDUCE, (4.0 if mode == "plain" else 2.0) * n)] for n in full]
    if mode == "partialUpdate":
        return [[(REDUCE, 4.0 * sum(full) / len(full))]]
    count = [(GATHER, 4.0)] if mode == "sparseThreshold" else []
    return [[*count, *[(GATHER, 4.0 * share * n)] * 2] for n in full]  # indices and values


# --- how long it takes


def ring_all_reduce(workers: int, size: float, net: Network) -> float:
    """Return the seconds of an all-reduce by a ring: W - 1 rounds sum the parts, W - 1 rounds distribute them."""
    return 2 * (workers - 1) * net.message(size / workers)


def tree_all_reduce(workers: int, size: float, net: Network) -> float:
    """Return the seconds of an all-reduce by a binomial tree: all bytes up to the root, and down again."""
    return 2 * rounds(workers) * net.message(size)


def ring_all_gather(workers: int, size: float, net: Network) -> float:
    """Return the seconds of an all-gather by a ring of `size` bytes from each worker."""
    return (workers - 1) * net.message(size)


def tree_all_gather(workers: int, size: float, net: Network) -> float:
    """Return the seconds of an all-gather in log2 W rounds, each of which doubles what a worker has."""
    return rounds(workers) * net.latency + (workers - 1) * size / net.bandwidth


def rounds(workers: int) -> int:
    """Return log2 of the workers, rounded up."""
    return (workers - 1).bit_length()


COLLECTIVES = {
    (REDUCE, "ring"): ring_all_reduce, (REDUCE, "tree"): tree_all_reduce,
    (GATHER, "ring"): ring_all_gather, (GATHER, "tree"): tree_all_gather,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a worker computes in a step.

    Args:
        plain: Seconds of a step without an exchange, by the optimizer alone.
        step: Seconds of a step in this mode on one rank.
        forward: The share of `step` before the backward pass.
        backward: The share of `step` in the backward pass.
        value: Seconds that adding one received value of a sparse mode takes.
    """

    plain: float
    step: float
    forward: float = 1 / 3
    backward: float = 2 / 3
    value: float = 0.0


def exchange_times(
    mode: str, full: Sequence[int], workers: int, net: Network, algorithm: str, share: float = 0.05
) -> list[float]:
    """Return the seconds of the exchange of each bucket."""
    found = messages(mode, full, share)
    return [sum(COLLECTIVES[kind, algorithm](workers, size, net) for kind, size in bucket) for bucket in found]


def step_time(
    mode: str, full: Sequence[int], workers: int, net: Network, algorithm: str, work: Work, overlap: bool, share: float = 0.05
) -> float:
    """Return the seconds of a step of `workers` workers.

    With overlap, the buckets become complete at equal intervals of the backward pass, the last at its end; each is sent when it
    is complete and the one before has been sent.  partialUpdate averages parameters after the update: it never overlaps.  The
    values of the other workers of a sparse mode are added at the end.

    Args:
        mode: The name of the mode.
        full: The elements of each bucket.
        workers: The number of workers, at least 2.
        net: The network.
        algorithm: "ring" or "tree".
        work: What a worker computes.
        overlap: Whether buckets are sent during the backward pass.
        share: The share of values that a sparse mode sends.
    """
    times = exchange_times(mode, full, workers, net, algorithm, share)
    added = work.value * (workers - 1) * share * sum(full) if mode.startswith("sparse") else 0.0
    if not overlap or mode == "partialUpdate":
        return work.step + sum(times) + added
    start, whole = work.forward * work.step, work.backward * work.step
    end = start
    for i, seconds in enumerate(times):
        end = max(end, start + whole * (i + 1) / len(times)) + seconds
    return work.step - start - whole + end + added


def efficiency(
    mode: str, full: Sequence[int], workers: int, net: Network, algorithm: str, work: Work, overlap: bool, share: float = 0.05
) -> float:
    """Return the samples per second of each worker over those of a worker that trains alone; arguments as of `step_time`."""
    return work.plain / step_time(mode, full, workers, net, algorithm, work, overlap, share)


def stops(curve: Sequence[float]) -> int | None:
    """Return the first of WORKERS from which the efficiency stays below LIMIT; None if it is at least LIMIT at the last."""
    last = max((i for i, e in enumerate(curve) if e >= LIMIT), default=-1)
    return None if last == len(curve) - 1 else WORKERS[last + 1]


def fitted(small: float, large: float, size: float, ranks: int = 2) -> tuple[float, float]:
    """Return the latency and the bandwidth of a ring all-reduce that takes `small` s for no bytes and `large` s for `size`."""
    latency = small / (2 * (ranks - 1))
    return latency, 2 * (ranks - 1) / ranks * size / max(large - small, 1e-12)
