"""Whole plans on memory of exact size between guard pages, with garbage in all places before each run."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tests.helpers.plan_checks import drawn, model_of
from tests.onednn_sweep import plans, sweep

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.kernels import onednn as dnn
from singa_backend.kernels import values
from singa_backend.kernels.table import Options
from singa_backend.plans import arena

pytestmark = pytest.mark.skipif(
    dnn.library() is None or not sys.platform.startswith("linux"), reason="there is no oneDNN, or no guard pages of Linux"
)

DRAWN = 44
"""The drawn models; `tox -e onednn-sweep` draws 400."""


@pytest.mark.parametrize("level", sweep.ends())
def test_drawn_models_need_no_memory_but_their_own(level: str) -> None:
    with sweep.Sweep(level) as one:
        for index in range(DRAWN):
            one.examine(plans.drawn(1, index))
    assert [fault.line() for fault in one.tally.faults] == []
    assert one.tally.models > 0.7 * DRAWN and len(one.tally.kernels) > 20


def test_places_hold_garbage_before_a_run() -> None:
    """The hooks are used, and are gone afterwards."""
    before = arena.place, values.aligned, values.Value.of
    net = plans.images(plans.Draw([3, 1]))
    whole = SingaBackend.prepare(net.model(net.last))
    with plans.guarded_plans() as memory:
        rep = SingaRep(whole.graph, whole.device, options=Options())
        first = rep.run([net.inputs["x"]])
        assert memory.arenas
        memory.fill("nan")
        held, spans = memory.arenas[0]
        assert all((held[start:end] == 255).all() for start, end in spans)
        assert plans.alike(rep.run([net.inputs["x"]]), first)
    assert (arena.place, values.aligned, values.Value.of) == before


def test_a_place_that_is_not_written_is_found() -> None:
    """A step that leaves a part of its result, as a fault of oneDNN would, changes the bits of runs."""
    x = drawn(0, x=(64, 64))
    model = model_of([plans.helper.make_node("Exp", ["x"], ["y"])], x, ["y"])
    whole = SingaBackend.prepare(model)
    with plans.guarded_plans() as memory:
        rep = SingaRep(whole.graph, whole.device, options=Options())
        first = rep.run([x["x"]])
        segment = next(iter(rep._session._planner.plans.values())).first
        segment.flat.clear()
        memory.fill("nan")
        assert not plans.alike(rep.run([x["x"]]), first)
    assert np.isfinite(first[0]).all()
