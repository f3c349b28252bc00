"""Trainings of drawn nets at each level of instructions: equal bits from run to run, and what the definitions compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.helpers import drawn_trainings as drawn
from tests.helpers.drawn_trainings import Trained, bound, different, draw, move_error

from singa_backend.kernels import onednn

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

SEEDS = [0, 2, 9, 13, 14, 16, 19, 20, 21, 23, 26, 27]
"""Nets of all families; oneDNN prefers implementations that are not trusted for 0, 9, 13, 19 and 27."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A process that trains all nets at a level, by two threads."""
    done: dict[str, Trained] = {}

    def run(limit: str) -> Trained:
        if limit not in done:
            done[limit] = drawn.trained(SEEDS, tmp_path_factory.mktemp("states"), limit=limit, threads=2)
        return done[limit]

    return run


@pytest.mark.parametrize("limit", drawn.levels(), ids=lambda limit: limit or "own")
@pytest.mark.parametrize("seed", SEEDS)
def test_training(seed: int, limit: str, runs: Callable[[str], Trained], by_definitions: None) -> None:
    run, net = runs(limit), draw(seed)
    assert run.ends.get(seed, "") == ""
    first, second = run.states[seed]
    assert different(first, second) == []
    assert run.reasons[seed] == []  # plans computed all recorded steps
    assert move_error(first, drawn.train(net, np.float64)[0], net) <= bound(net), (net.name, run.level)
