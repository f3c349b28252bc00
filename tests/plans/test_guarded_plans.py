"""Whole plans on memory of exact size between guard pages, with garbage in all places before each run."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest
from tests.helpers.plan_checks import drawn, model_of
from tests.onednn_sweep import pages, plans, sweep
from tests.sizes_sweep import sweep as sizes
from tests.sizes_sweep.models import REQUESTS

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.io.processes import Child
from singa_backend.kernels import onednn as dnn
from singa_backend.kernels import values
from singa_backend.kernels.table import Options
from singa_backend.plans import arena
from singa_backend.plans.trace import place

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


SIZED = 12
"""The drawn models with open sizes; `tox -e sizes` draws 10,000."""


def test_drawn_models_of_open_sizes() -> None:
    """Each of them in eight sizes, whose places in an arena are between pages that cannot be accessed."""
    with Child(sizes.serve) as child:
        for seed in range(SIZED):
            fault, counts = child.ask(seed, sizes.SECONDS)
            assert not fault, (seed, fault)
            assert counts["requests with equal results"] + counts["requests that both refuse"] >= REQUESTS, seed


@pytest.mark.parametrize("guard", sizes.GUARDS)
def test_places_of_open_sizes_end_or_begin_at_a_page(guard: str) -> None:
    """The hooks are used for each set of sizes, and are gone afterwards."""
    before = arena.place, values.aligned, values.Value.of, place.Binder._formulas
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { y = Exp(x) }')
    with sizes.sized_plans(guard, passed=False) as memory:
        rep = SingaBackend.prepare(model, deterministic=True)
        for n in (1000, 3001, 7):
            x = np.linspace(-1, 1, n, dtype=np.float32)
            np.testing.assert_allclose(rep.run([x])[0], np.exp(x), rtol=1e-6)
        (plan,) = rep._session._planner.plans.values()
        assert plan.places
        reads = [s.reads[0].buffer.memory for s in plan.first.steps]
        held = [plan.first.arena] if guard != "each" else reads
        starts = [m.ctypes.data for m in held] if guard == "begin" else [m.ctypes.data + m.nbytes for m in held]
        assert held and all(-start % pages.PAGE < plans.STEP for start in starts)
        assert bool(memory.arenas) == (guard == "each")
    assert (arena.place, values.aligned, values.Value.of, place.Binder._formulas) == before
