"""Every primitive of a plan runs with the number of threads that it was created for."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import drawn, model_of

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.errors import ResourceExhausted
from singa_backend.kernels import onednn

library = onednn.library()
pytestmark = pytest.mark.skipif(library is None or library.runtime != "OpenMP", reason="only OpenMP has a number of threads")
X = drawn(1, x=(300, 256))["x"]


def prepared(threads: int) -> SingaRep:
    """A model with large and small products in turns, a definition, and an If."""
    node = helper.make_node
    weights = drawn(2, w=(256, 256), v=(4, 4))
    branch = helper.make_graph([node("MatMul", ["small", "v"], ["b"])], "b", [], [helper.make_tensor_value_info("b", 1, (4, 4))])
    nodes = [
        node("MatMul", ["x", "w"], ["large"]),
        node("Slice", ["large", "zeros", "fours"], ["corner"]),
        node("MatMul", ["corner", "v"], ["small"]),
        node("Det", ["small"], ["det"]),
        node("Less", ["det", "nought"], ["negative"]),
        node("If", ["negative"], ["c"], then_branch=branch, else_branch=branch),
        node("Sigmoid", ["c"], ["y"]),
        node("MatMul", ["large", "w"], ["z"]),
    ]
    constants = {**weights, "zeros": np.zeros(2, np.int64), "fours": np.full(2, 4), "nought": np.float32(0)}
    rep = SingaBackend.prepare(model_of(nodes, {"x": X}, ["y", "z"], constants), threads=threads)
    for _ in range(2):
        rep.run([X])
    return rep


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_primitive_has_its_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")  # a function is a primitive for one thread
    rep = prepared(threads)
    ((setter, _),) = onednn.thread_switch(1)
    assert rep._session._planner is not None
    (plan,) = rep._session._planner.plans.values()
    created = []
    for segment in plan.segments:
        at = threads  # a segment begins and ends with the number of the run
        for function, arguments in segment.flat:
            if function is setter:
                (at,) = arguments
            elif needed := onednn.threads_of(arguments):
                assert needed == at
                created.append(needed)
        assert at == threads
        assert sum(step.count for step in segment.steps) == len(segment.flat)
    assert set(created) == {1, threads} and len(created) >= (3 if threads > 1 else 1)  # one thread: NumPy's products


def test_the_caller_has_its_threads_after_a_run_that_is_stopped_at_any_step() -> None:
    class Stop:
        """A flag that is set when it has been read so many times."""

        left = 0

        def is_set(self) -> bool:
            self.left -= 1
            return self.left < 0

    rep, stop, stopped = prepared(3), Stop(), 0
    for before in (2, 3):
        with onednn.using_threads(before):
            for count in range(100):
                stop.left = count
                try:
                    rep.run([X], cancel=stop)
                except ResourceExhausted:
                    stopped += 1
                else:
                    break
                assert onednn.threads() == before
            assert onednn.threads() == before
    assert stopped > 10
