"""The pytest plugin from outside: small projects that hold good and bad backends to test data and to ONNX's suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import singa_backend.conform.pytest_plugin  # noqa: F401

pytest_plugins = ["pytester"]

BACKENDS = """
import numpy as np
from onnx.backend.base import Backend

class Rep:
    def run(self, inputs, **kwargs):
        return [np.maximum(inputs[0], 0)]

class Right(Backend):
    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        return Rep()
    @classmethod
    def supports_device(cls, device):
        return device == "CPU"

class Lazy(Right):
    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        import unittest
        raise unittest.SkipTest("not today")
"""
X = np.array([-1, 2], np.float32)


def _data(folder: Path, expected: np.ndarray) -> None:
    (folder / "test_data_set_0").mkdir(parents=True)
    text = '<ir_version: 10, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    onnx.save(parser.parse_model(text), folder / "model.onnx")
    for name, array in (("input_0", X), ("output_0", expected)):
        (folder / "test_data_set_0" / f"{name}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(backends=BACKENDS)
    _data(pytester.path / "data" / "good", np.maximum(X, 0))
    _data(pytester.path / "data" / "deep" / "bad", X)
    pytester.makepyfile(test_other="def test_other(): pass")
    return pytester


def _run(project: pytest.Pytester, *args: str, backend: str = "backends:Right") -> pytest.RunResult:
    return project.runpytest("-p", "no:cacheprovider", "--onnx-backend", backend, *args)


def test_a_folder_of_test_data(project: pytest.Pytester) -> None:
    found = _run(project, "--onnx-data", "data", "-v")
    found.assert_outcomes(passed=1, failed=1)  # and not test_other: no file was named
    text = found.stdout.str()
    assert "onnx::data::good PASSED" in text and "onnx::data::deep/bad FAILED" in text
    assert "failed: outputs[0][0]: 0.0, expected -1.0 (1 of 2 differ)" in text and "Traceback" not in text


def test_files_that_are_named_run_too(project: pytest.Pytester) -> None:
    _run(project, "--onnx-data", "data/good", "test_other.py").assert_outcomes(passed=2)


def test_an_item_by_its_name_and_by_keyword(project: pytest.Pytester) -> None:
    _run(project, "--onnx-data", "data", "onnx::data::good").assert_outcomes(passed=1)
    _run(project, "--onnx-data", "data", "-k", "bad").assert_outcomes(failed=1, deselected=1)


def test_gaps_are_strict_in_both_directions(project: pytest.Pytester) -> None:
    gaps = project.path / "gaps.txt"
    gaps.write_text("The data are wrong.\n    deep/bad\n")
    found = _run(project, "--onnx-data", "data", "--onnx-gaps", "gaps.txt", "-rx")
    found.assert_outcomes(passed=1, xfailed=1)
    assert "The data are wrong." in found.stdout.str()
    gaps.write_text("This has closed.\n    deep/bad\n    good\n")
    found = _run(project, "--onnx-data", "data", "--onnx-gaps", "gaps.txt")
    found.assert_outcomes(failed=1, xfailed=1)
    assert "XPASS(strict)" in found.stdout.str()


def test_an_opt_out_is_a_skip(project: pytest.Pytester) -> None:
    found = _run(project, "--onnx-data", "data/good", backend="backends:Lazy")
    found.assert_outcomes(skipped=1)
    assert found.ret == 0


def test_the_suite(project: pytest.Pytester) -> None:
    _run(project, "--onnx-suite=simple", "-k", "relu or sign").assert_outcomes(passed=1, failed=1, deselected=21)


def test_our_own_backend_has_its_own_gaps(project: pytest.Pytester) -> None:
    found = project.runpytest("-p", "no:cacheprovider", "--onnx-suite=simple", "-k", "shrink or gradient_of_add")
    assert found.parseoutcomes()["passed"] >= 1 and found.ret == 0


def test_xdist(project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    found = _run(project, "--onnx-data", "data", "onnx::data::good", "-n", "1")
    found.assert_outcomes(passed=1)


@pytest.mark.parametrize(("args", "says"), [
    (["--onnx-suite=pony"], "unknown kind pony"), (["--onnx-data", "nowhere"], "contains no folder"),
    (["--onnx-data", "data", "--onnx-backend", "nothing:X"], "No module named 'nothing'"),
    (["--onnx-data", "data", "--onnx-device", "CUDA"], "does not support the device 'CUDA'"),
    (["--onnx-data", "data", "--onnx-gaps", "none.txt"], "none.txt"),
])  # fmt: skip
def test_wrong_usage(project: pytest.Pytester, args: list[str], says: str) -> None:
    found = _run(project, *args)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    assert says in found.stderr.str()


def test_a_run_that_does_not_ask_imports_nothing() -> None:
    code = "import sys, sonnx_pytest.plugin; print([m for m in ('onnx', 'numpy', 'singa_backend') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
