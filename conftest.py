"""Fixtures that test an operator in one line: `check("Add", [a, b], [c], opset=1, broadcast=1)`.

It also adds the options of the acceptance table, and limits what `-m fakecuda` imports.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

# A thread that waits leaves its core to the other processes. OpenMP reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
from conformance.acceptance import Acceptance
from onnx import helper

from singa_backend import OperatorError, SingaBackend, SonnxError, dtypes


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("acceptance", "the table of conformance/acceptance.toml; needs a run of all tests")
    group.addoption("--rows", metavar="FOLDER", help="write FOLDER/acceptance.md from this run")
    group.addoption("--rows-check", metavar="FOLDER", help="fail if FOLDER/acceptance.md differs from what this run would write")

    group = parser.getgroup("plans", "what runs recorded steps and imported models")
    group.addoption("--without-plans", action="store_true", help="run them by the definitions only")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Acceptance(), "sonnx-acceptance")


NARROW_RTOL = {"float16": 2e-3, "bfloat16": 2e-2}
"""The lowest relative tolerance for results of these dtypes."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m fakecuda`, import only the files that name the marker: all of them take half a minute, in each process."""
    if config.option.markexpr != "fakecuda" or collection_path.suffix != ".py" or "fakecuda" in collection_path.read_text():
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one case, to be skipped with its reason, of each function that needs an absent device; the suite of ONNX has 2,033."""
    present = {"fakecuda": config.option.markexpr == "fakecuda", "gpu": SingaBackend.supports_device("CUDA")}
    kept: dict[str, pytest.Item] = {}
    left = []
    for item in items:
        absent = any(not there and item.get_closest_marker(name) for name, there in present.items())
        if kept.setdefault(item.nodeid.partition("[")[0] if absent else item.nodeid, item) is not item:
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept.values()


def same(actual: Any, expected: Any, rtol: float, atol: float, where: str = "output") -> None:
    """Assert equal kind, length, dtype, shape and values: floats within tolerance, everything else exactly."""
    if isinstance(expected, (list, tuple)):
        assert isinstance(actual, list), f"{where}: must be a list, got {type(actual)}"
        assert len(actual) == len(expected), f"{where}: length {len(actual)} != {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            same(a, e, rtol, atol, f"{where}[{i}]")
    elif isinstance(expected, dict):
        assert isinstance(actual, dict) and list(actual) == list(expected), f"{where}: {actual} != {expected}"
        for key in expected:
            a, e = (np.asarray(v[key], object if isinstance(v[key], str) else None) for v in (actual, expected))
            same(a, e, rtol, atol, f"{where}[{key!r}]")
    elif expected is None:
        assert actual is None, f"{where}: {actual!r} is not None"
    else:
        expected = np.asarray(expected)
        if expected.dtype.kind in "US":
            expected = expected.astype(object)
        assert isinstance(actual, np.ndarray), f"{where}: must be an array, got {type(actual)}"
        assert actual.dtype == expected.dtype, f"{where}: dtype {actual.dtype} != {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: shape {actual.shape} != {expected.shape}"
        if expected.dtype.kind in "fc" or expected.dtype in dtypes.NARROW_FLOATS:
            rtol = max(rtol, NARROW_RTOL.get(expected.dtype.name, 0))
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=rtol, atol=atol, err_msg=where)
        else:
            np.testing.assert_array_equal(actual, expected, err_msg=where)


def run_op(
    op: str, inputs: list[Any], opset: int, domain: str, outputs: int | list[str], device: str, attributes: dict[str, Any]
) -> Any:
    """Run one node through the backend's public interface; None is an absent input."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else outputs
    node = helper.make_node(op, names, results, domain=domain, **attributes)
    given = [x for x in inputs if x is not None]
    before = copy.deepcopy(given)
    found = SingaBackend.run_node(node, given, device, opset_version=opset)
    for now, then in zip(given, before, strict=True):
        same(now if isinstance(now, (list, dict)) else np.asarray(now), then, 0, 0, f"{op}: an input changed")
    return found


@pytest.fixture(params=["CPU", "STRICT"])
def on_device(request: pytest.FixtureRequest) -> str:
    """Return a device that needs no GPU."""
    return str(request.param)


@pytest.fixture
def check(on_device: str) -> Any:
    """Return a function that runs an operator and compares its outputs with the expected ones.

    check(op, inputs, expected, *, opset, domain="", outputs=None, rtol=1e-6, atol=1e-7, **attributes) -> outputs

    expected: one value per output; None skips an output only if `outputs` names it "".
    It runs on NumPy and on the strict namespace, which is restricted to what CuPy provides.
    """

    def run(op: str, inputs: list[Any], expected: list[Any], *, opset: int, domain: str = "", outputs: Any = None,
            rtol: float = 1e-6, atol: float = 1e-7, **attributes: Any) -> Any:  # fmt: skip
        actual = run_op(op, inputs, opset, domain, outputs or len(expected), on_device, attributes)
        assert len(actual) == len(expected), f"{len(actual)} outputs, {len(expected)} expected"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            same(a, e, rtol, atol, f"{op}-{opset} output {i}")
        return actual

    return run


@pytest.fixture
def fails(on_device: str) -> Any:
    """Return a function that expects a typed error whose message matches.

    fails(op, inputs, match, *, opset, error=OperatorError, **attributes)
    """

    def run(op: str, inputs: list[Any], match: str, *, opset: int, domain: str = "", outputs: Any = 1,
            error: type[SonnxError] = OperatorError, **attributes: Any) -> None:  # fmt: skip
        with pytest.raises(error, match=match):
            run_op(op, inputs, opset, domain, outputs, on_device, attributes)

    return run
