"""`sonnx train -o` and `sonnx.save`: a file is written whole or not at all, next to the data that it refers to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import parser

from singa import sonnx
from singa.cli import main
from singa_backend import InvalidInput

MODEL = (
    '<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 300] y)'
    "{ p = MatMul(x, w) \n y = Gather<axis = 1>(p, order) }"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose initializers, one of them of integers, are in a file of external data."""
    made = parser.parse_model(MODEL)
    rng = np.random.default_rng(0)
    made.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(4, 300)).astype(np.float32), "w"))
    made.graph.initializer.append(onnx.numpy_helper.from_array(rng.permutation(300), "order"))
    folder = tmp_path / "source"
    folder.mkdir()
    onnx.save(made, folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    np.savez(
        tmp_path / "data.npz", x=rng.normal(size=(16, 4)).astype(np.float32), y=rng.normal(size=(16, 300)).astype(np.float32)
    )
    return folder / "m.onnx"


def train(model: Path, target: Path) -> Result:
    data = model.parents[1] / "data.npz"
    arguments = [
        "train",
        str(model),
        "--data",
        str(data),
        "--target",
        "y",
        "--loss",
        "mse_loss",
        "--epochs",
        "2",
        "-o",
        str(target),
    ]
    return CliRunner().invoke(main, arguments)


def test_external_data_of_every_dtype_go_along(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "tuned.onnx"
    target.parent.mkdir()
    assert train(model, target).exit_code == 0
    for p in model.parent.iterdir():
        p.unlink()  # the result does not need them
    before = onnx.load_model(target).graph
    assert {t.name for t in before.initializer} == {"w", "order"}
    assert sonnx.prepare(target).run([np.ones((2, 4), np.float32)])[0].shape == (2, 300)


def test_the_model_itself_can_be_the_target(model: Path) -> None:
    before = sonnx.prepare(model).states
    assert train(model, model).exit_code == 0
    after = sonnx.prepare(model).states
    assert (after["order"] == before["order"]).all() and (after["w"] != before["w"]).any()


def test_a_write_that_fails_leaves_the_old_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "tuned.onnx"
    assert train(model, target).exit_code == 0
    there = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    failed = train(model, target)
    assert failed.exit_code == 3
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == there


def test_a_link_keeps_its_target(model: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real.onnx", tmp_path / "link.onnx"
    real.write_bytes(b"old")
    link.symlink_to(real)
    assert train(model, link).exit_code == 0
    assert link.is_symlink() and sonnx.prepare(real).inputs[0].name == "x"


def test_a_target_that_cannot_be_written_is_refused_before_the_training(model: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "missing" / "t.onnx", tmp_path):
        refused = train(model, target)
        assert refused.exit_code in (2, 3) and "training" not in refused.output


def test_save_leaves_the_old_file_if_it_fails(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.onnx"
    for _ in range(2):
        sonnx.save(onnx.load(model), target, save_as_external_data=True, location="out.bin", size_threshold=0)
    assert (tmp_path / "out.bin").stat().st_size < 2 * (model.parent / "m.bin").stat().st_size  # replaced, not appended to
    there = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert {"out.onnx", "out.bin"} <= there.keys()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidInput, match=r"SX351.*No space left"):
        sonnx.save(onnx.load(model), target)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == there
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")]


def test_save_writes_through_what_is_not_a_file(model: Path) -> None:
    sonnx.save(onnx.load(model), "/dev/null")
    assert not Path("/dev/null").is_file()
