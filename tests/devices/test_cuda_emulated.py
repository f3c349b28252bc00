"""Where CuPy differs from NumPy: models on an emulated device return what they return on the CPU, and STRICT refuses the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper
from tests.helpers.paths import PROJECT

from singa_backend import OperatorError, SingaBackend
from singa_backend.comparison import verdict
from singa_backend.conform import results
from singa_backend.devices import strict


def _run(op: str, inputs: list[Any], outputs: int = 1, opset: int = 21, **attributes: Any) -> Any:
    node = helper.make_node(op, [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(outputs)], **attributes)
    here = SingaBackend.run_node(node, inputs, opset_version=opset)
    there = SingaBackend.run_node(node, inputs, "CUDA:1", opset_version=opset)
    for a, b in zip(here, there, strict=True):
        assert verdict.strict(b, a, 0, 0) == ""
    return there


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 4)])
def test_a_requirement_of_the_emulation_that_is_absent_is_named(required: str, code: int) -> None:
    """The tests are skipped by its name, or refused by it."""
    start = "import sys; sys.modules['elftools'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-q", "-rs", "-m", "fakecuda", "-p", "no:cacheprovider", "-k", "wrap", __file__]
    environment = {**os.environ, "SONNX_REQUIRE_FAKECUDA": required}
    done = subprocess.run(
        [sys.executable, "-c", start, *arguments],
        env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code and "elftools" in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.fakecuda
def test_indices_do_not_wrap_silently() -> None:
    for index in (4, -5):
        with pytest.raises(OperatorError, match=rf"an index must be in \[.*\), got {index}"):
            SingaBackend.run_node(helper.make_node("Gather", ["x", "i"], ["y"]), [np.arange(4.0), np.array([index])], "CUDA")


@pytest.mark.fakecuda
@pytest.mark.parametrize("name", ["CUDA:1", "cuda:1"])
def test_results_are_marked_emulated(name: str) -> None:
    about = results.environment(name)
    assert (about["device"], about["emulated"], about["gpu"]) == ("CUDA:1", True, "emulated device 1")


@pytest.mark.fakecuda
def test_casts_agree_with_numpy() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 1e20, -0.5, 300.7], np.float32)
    for to in (1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 16):
        _run("Cast", [x], to=to)


@pytest.mark.fakecuda
def test_what_cupy_cannot_hold_stays_on_the_host() -> None:
    x = np.array([0.1, 1.0, 500.0], np.float32)
    eighth = _run("Cast", [x], to=17)[0]
    assert eighth.dtype == ml_dtypes.float8_e4m3fn
    _run("Cast", [eighth], to=1)
    _run("Reshape", [eighth, np.array([3, 1])])
    _run("StringConcat", [np.array(["a", "b"], object), np.array(["c", "d"], object)])
    _run("Concat", [np.array(["a"], object), np.array(["c"], object)], axis=0)


@pytest.mark.parametrize(
    "use",
    [
        lambda xp, x: xp.take(x, xp.asarray([0]), mode="clip"),
        lambda xp, x: x.max(initial=0),
        lambda xp, x: xp.add(x, x, where=x > 0),
        lambda xp, x: xp.maximum.reduce(x),
        lambda xp, x: x.astype(ml_dtypes.float8_e5m2),
        lambda xp, x: xp.zeros(3, object),
    ],
)
def test_the_strict_namespace_refuses_what_cupy_lacks(use: Any) -> None:
    xp = strict.StrictNamespace()
    with pytest.raises((TypeError, AttributeError), match="cupy"):
        use(xp, xp.asarray([1.0, 2.0]))
