"""ONNX's own runner, unchanged, with SingaBackend; the gaps are expected failures, and a gap that passes is an error."""

from __future__ import annotations

import os
import re
import tempfile

import onnx.backend.test
import pytest

from singa_backend import SingaBackend
from singa_backend.conform import cases, gaps

pytestmark = pytest.mark.row("I18")

_home = tempfile.TemporaryDirectory(prefix="onnx-home-")  # the runner writes the light models' data there
os.environ.setdefault("ONNX_HOME", _home.name)

_runner = onnx.backend.test.BackendTest(SingaBackend, __name__)
for _name in gaps.read(cases.data_file("gaps.txt")):
    _runner.xfail(f"^{re.escape(_name.removeprefix('official:'))}_(cpu|cuda)$")

if not SingaBackend.supports_device("CUDA"):
    _runner.exclude("_cuda$")  # all of them would be skipped

globals().update(_runner.test_cases)
