"""What a first run imports: the operators and kernels of the model, and nothing for training, exports, reports and passes.

The bounds are numbers of modules, not times.  A module that is new in the list should be imported in a function, or be found by a
table of families (`singa_backend.domains`), unless most runs need it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import parser, save
from tests.helpers.families import LIST

FIRST = """
import json, sys
from singa import sonnx
found = {"before": sorted(sys.modules)}
import numpy as np
rep = sonnx.prepare(sys.argv[1])
found["prepared"] = sorted(sys.modules)
y = rep.run([np.ones((3, 4), np.float32)])[0]
assert y.shape == (3, 2)
print(json.dumps({**found, "after": sorted(sys.modules)}))
"""

MLP = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 2] y)
    <float[4, 3] w = {1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1}, float[3] b = {1, 2, 3}, float[3, 2] v = {1, 2, 3, 4, 5, 6}>
    { p = MatMul(x, w)  h = Add(p, b)  r = Relu(h)  z = Gemm(r, v)  y = Softmax(z) }"""

UNUSED = (
    "singa.autograd", "singa.model", "singa.opt", "singa._core", "singa._layers", "singa._training", "singa._onnx.export",
    "singa._importers", "singa_backend._names", "singa_backend.adapters", "singa_backend.collectives", "singa_backend.comparison",
    "singa_backend.conform", "singa_backend.debug", "singa_backend.engines", "singa_backend.inspection", "singa_backend.opsets",
    "singa_backend.passes", "singa_backend.quantization", "singa_backend.sweep", "singa_backend.operators.microsoft",
    "singa_backend.plans.profile", "singa_backend.plans.training_profile", "singa_backend.plans.trained",
    "singa_backend.proto.checker", "singa_backend.runtime.origins", "singa_backend.io.archives", "singa_backend.io.documents",
    "singa_backend.kernels.onednn.backward", "singa_backend.kernels.quantized", "singa_backend.kernels.convolution",
    "difflib", "html", "multiprocessing", "tomllib",
)  # fmt: skip
"""Modules, and folders, of which a first run imports none."""

LATER = (
    "singa_backend.autodiff", "singa_backend.elementwise", "singa_backend.gemm", "singa_backend.kernels.onednn",
    "singa_backend.plans.planner", "singa_backend.rewriting", "platformdirs", "_hashlib",
)  # fmt: skip
"""Modules, and folders, of which `prepare` imports none."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The modules before the model is prepared, then, and after its run."""
    folder: Path = tmp_path_factory.mktemp("mlp")
    save(parser.parse_model(MLP), folder / "mlp.onnx")
    for _ in range(2):  # the first run also makes machine code
        done = subprocess.run(
            [sys.executable, "-c", FIRST, str(folder / "mlp.onnx")], env={**os.environ, "XDG_CACHE_HOME": str(folder)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ours(modules: list[str], folder: str = "singa") -> list[str]:
    return [m for m in modules if m.partition(".")[0] in ("singa", "singa_backend") and m.startswith(folder)]


def test_a_first_run_imports_its_operators_only(imported: dict[str, list[str]]) -> None:
    families = {m.rpartition(".")[2] for m in ours(imported["after"], "singa_backend.operators.")}
    assert {f for f in families if not f.startswith("_")} == {"activation", "arithmetic", "linalg"}


@pytest.mark.parametrize("name", UNUSED)
def test_a_first_run_does_not_import(imported: dict[str, list[str]], name: str) -> None:
    assert not [m for m in imported["after"] if m == name or m.startswith(f"{name}.")]


@pytest.mark.parametrize("name", LATER)
def test_a_model_that_is_only_prepared_does_not_import(imported: dict[str, list[str]], name: str) -> None:
    assert not [m for m in imported["prepared"] if m == name or m.startswith(f"{name}.")]


def test_a_first_run_imports_its_kernels_only(imported: dict[str, list[str]]) -> None:
    lines = (line.split("|") for line in LIST.read_text(encoding="utf-8").splitlines())
    families = {module for table, module, *_ in lines if table.endswith("kernels")}
    found = {m.removeprefix("singa_backend.") for m in imported["after"]} & families
    assert {m.removeprefix("kernels.") for m in found} == {"expressions", "products", "rows", "softmaxes"}


def test_the_numbers_of_modules(imported: dict[str, list[str]]) -> None:
    assert len(ours(imported["before"])) <= 25
    assert len(ours(imported["prepared"])) <= 90
    assert len(ours(imported["after"])) <= 200
