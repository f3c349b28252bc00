"""Adapters that several workers train, against one process on the same batches: the losses, and every tensor of the adapter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser
from tests.frontend.test_mpi import ENVIRONMENT, LONGEST, job
from tests.helpers.paths import MPIEXEC

from singa.cli import main
from singa_backend.adapters import Adapter, base_digest

pytestmark = pytest.mark.skipif(not MPIEXEC, reason="mpi4py and mpiexec are not installed: pip install 'sonnx[mpi]'")
pytest.importorskip("safetensors")

TEXT = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 2, 16] x) => (float[n, 3] y) {
    c = Conv <pads = [1, 1]> (x, kernel, kernel_bias)
    b = BatchNormalization(c, scale, bias, mean, var)
    r = Tanh(b)
    f = Flatten(r)
    h = MatMul(f, wide)
    t = Tanh(h)
    m = MatMul(t, middle)
    u = Tanh(m)
    y = Gemm(u, last, last_bias)
}"""
SHAPES = {"kernel": (4, 2, 3), "kernel_bias": (4,), "scale": (4,), "bias": (4,), "mean": (4,), "var": (4,), "wide": (64, 32),
          "middle": (32, 32), "last": (32, 3), "last_bias": (3,)}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, rng = tmp_path_factory.mktemp("adapters"), np.random.default_rng(0)
    model = parser.parse_model(TEXT)
    for name, shape in SHAPES.items():
        array = np.ones(shape) if name in ("scale", "var") else rng.normal(0, 0.3, shape)
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(model, made / "m.onnx")
    np.savez(made / "data.npz", x=rng.normal(size=(22, 2, 16)).astype(np.float32), y=rng.integers(0, 3, 22))
    return made


def arguments(folder: Path, *more: str) -> list[str]:
    """Batches of 5 that the workers share unequally, with a last batch of 2."""
    fixed = ["train", str(folder / "m.onnx"), "--data", str(folder / "data.npz"), "--batch-size", "5", "--epochs", "3"]
    return [*fixed, "--lr", "0.05", "--sync-batch-norm", "--lora", "4", *more]


def train(*line: str) -> str:
    if "--workers" not in line:
        found = CliRunner().invoke(main, line)
        assert found.exit_code == 0, found.output
        return found.stdout
    command = [sys.executable, "-m", "singa.cli", *line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tensors(adapter: Adapter) -> dict[str, np.ndarray]:
    pairs = {f"{n}.{part}": x for n, c in adapter.changes.items() for part, x in (("A", c.a), ("B", c.b))}
    return pairs | {n: np.asarray(x) for n, x in adapter.values.items()}


@pytest.mark.parametrize(("options", "values"), [
    (("--accumulate", "2", "--clip-norm", "1", "--lora-bias", "all", "--rslora"),
     {"mean", "var", "bias", "kernel_bias", "last_bias"}),
    (("--optimizer", "adamw", "--lora-alpha", "8"), {"mean", "var"}),
    (("--qlora", "nf4"), {"mean", "var"}),
    (("--head", "5"), {"mean", "var", "last", "last_bias"}),
    (("--head", "5", "--qlora", "int8", "--lora-target", "middle*"), {"mean", "var", "last", "last_bias"}),
], ids=["options", "adamw", "qlora", "head", "all"])  # fmt: skip
def test_workers_equal_one_process(options: tuple[str, ...], values: set[str], folder: Path, tmp_path: Path) -> None:
    before = (folder / "m.onnx").read_bytes()
    found = []
    for workers in (1, 2):
        target = tmp_path / f"{workers}.safetensors"
        split = ("--workers", str(workers)) if workers > 1 else ()
        told = json.loads(train(*arguments(folder, *options, *split, "-o", str(target), "--json")))
        found.append((np.array(told["losses"]), told["trained"], Adapter.load(target)))
    (losses, count, one), (others, other_count, two) = found
    assert (folder / "m.onnx").read_bytes() == before
    assert one.base == two.base and one.settings == two.settings and count == other_count
    assert ("--qlora" in options) != (one.base == base_digest(onnx.load(folder / "m.onnx")))
    np.testing.assert_allclose(others, losses, rtol=1e-5, atol=1e-5)  # losses are up to 5
    mine, theirs = tensors(one), tensors(two)
    assert mine.keys() == theirs.keys() and set(one.values) == values
    assert all(np.abs(c.b).max() > 1e-3 for c in one.changes.values()), "every change has trained"
    for name, array in mine.items():
        np.testing.assert_allclose(theirs[name], array, rtol=0, atol=1e-5, err_msg=name)


def test_a_killed_worker_loses_no_bit_of_the_adapter(folder: Path, tmp_path: Path) -> None:
    """With dropout, a quantized base and a new head: the resumed training writes the file of the unbroken one."""
    options = ("--qlora", "int4", "--head", "5", "--lora-dropout", "0.2", "--optimizer", "adamw", "--every", "1", "--epochs", "1")

    def line(name: str, *more: str) -> list[str]:
        files = ("--checkpoint", str(tmp_path / f"{name}.ckpt"), "-o", str(tmp_path / f"{name}.safetensors"))
        return arguments(folder, *options, *files, *more)

    train(*line("whole"), "--workers", "2")
    assert job(2, "sonnx", "save", "6", *line("run")).returncode == 9 and (tmp_path / "run.ckpt").exists()
    train(*line("run"), "--workers", "2", "--resume")
    assert (tmp_path / "run.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
