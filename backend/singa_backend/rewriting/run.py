"""Rules in rounds, until none of them changes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class Rounds:
    """What the rules of a run changed.

    Attributes:
        counts: the number of changes of each rule, in order.
        rounds: how many times all rules ran.
        settled: whether the last round changed nothing.
    """

    counts: list[int]
    rounds: int = 0
    settled: bool = False


def run(rules: Sequence[Callable[[], int]], most: int) -> Rounds:
    """Run rules, which return the number of their changes, in rounds; at most so many rounds."""
    done = Rounds([0] * len(rules))
    while done.rounds < most and not done.settled:
        done.rounds += 1
        done.settled = True
        for i, rule in enumerate(rules):
            changes = rule()
            done.counts[i] += changes
            done.settled = done.settled and not changes
    return done
