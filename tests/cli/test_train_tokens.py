"""`sonnx train` of decoders and of classifiers of tokens: inputs that data lack, ignored labels, the axis of the classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser
from tests.helpers import language_models

from singa import autograd, sonnx
from singa._core.tensor import Tensor
from singa.cli import main
from singa.cli._train_loss import TrainLoss
from singa_backend.devices.strict import StrictNamespace
from singa_backend.errors import UnsupportedModel

F = np.float32
DECODERS = {
    "exported": lambda: language_models.Decoder("").model(),
    "past": lambda: language_models.Decoder("pairs").model(),
    "genai": language_models.grouped,
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 256, (6, 7))
LABELS = np.where(np.arange(7) < np.array([[7], [3], [5], [7], [2], [6]]), IDS, -100)


def run(*given: Any, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [str(a) for a in given])
    assert done.exit_code == code, done.output
    return done


def train(folder: Path, *given: Any, code: int = 0) -> Result:
    return run("train", folder / "m.onnx", "--data", folder / "d.npz", *given, code=code)


@pytest.fixture(params=DECODERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    onnx.save(DECODERS[request.param](), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", input_ids=IDS, labels=LABELS)
    return tmp_path


NEXT = ("--loss", "next_token_cross_entropy", "--target", "labels", "--lr", "1e-4", "--batch-size", "6")


def test_a_decoder_trains_by_its_tokens(folder: Path) -> None:
    """Mask, positions and empty caches follow from the tokens; the loss is that of the scores of the file."""
    told = json.loads(
        train(folder, *NEXT, "--epochs", 3, "-o", folder / "o.onnx", "--validation", folder / "d.npz", "--json").stdout
    )
    inputs = sonnx.decoder_inputs(folder / "m.onnx", IDS)
    assert set(inputs) == {v.name for v in onnx.load(folder / "m.onnx").graph.input}
    scores = sonnx.prepare(str(folder / "m.onnx")).run(inputs)[0].astype(np.float64)[:, :-1]
    log = scores - scores.max(-1, keepdims=True)
    log -= np.log(np.exp(log).sum(-1, keepdims=True))
    counted = LABELS[:, 1:] != -100
    each = -np.take_along_axis(log, np.where(counted, LABELS[:, 1:], 0)[..., None], -1)[..., 0]
    assert told["losses"][0] == pytest.approx(each[counted].mean(), rel=1e-5)
    assert told["losses"][2] < told["losses"][1] < told["losses"][0]
    assert told["validation"][1]["loss"] == pytest.approx(told["losses"][2], rel=1e-5)
    before, after = (onnx.load(folder / f"{n}.onnx") for n in "mo")
    assert before.graph.input == after.graph.input and before.graph.node == after.graph.node


def test_batches_of_one_row_are_one_large_batch_by_tokens(folder: Path) -> None:
    """The row of padding alone, too."""
    np.savez(folder / "d.npz", input_ids=IDS, labels=np.where(np.arange(6)[:, None] == 4, -100, LABELS))
    large = json.loads(train(folder, *NEXT, "-o", folder / "a.onnx", "--json").stdout)["losses"]
    small = json.loads(train(folder, *NEXT, "--batch-size", 1, "--accumulate", 6, "-o", folder / "b.onnx", "--json").stdout)[
        "losses"
    ]
    assert small == pytest.approx(large, rel=1e-5)
    a, b = ({t.name: numpy_helper.to_array(t) for t in onnx.load(folder / f"{n}.onnx").graph.initializer} for n in "ab")
    for name, value in a.items():
        np.testing.assert_allclose(b[name], value, rtol=1e-4, atol=1e-5)


def test_adapters_of_a_decoder_train(folder: Path) -> None:
    told = json.loads(train(folder, *NEXT, "--lora", 2, "--epochs", 3, "-o", folder / "a.safetensors", "--json").stdout)
    assert told["losses"][2] < told["losses"][0] and 0 < told["trained"] < told["parameters"]
    run("merge", folder / "m.onnx", folder / "a.safetensors", "-o", folder / "merged.onnx")
    done = train(folder, *NEXT, "--lora", 2, "--epochs", 3, "-o", folder / "o.onnx", "--json")
    assert json.loads(done.stdout) == told
    assert (folder / "o.onnx").read_bytes() == (folder / "merged.onnx").read_bytes()


def test_inputs_that_are_there_are_used(folder: Path) -> None:
    """A mask of the data, and batches of a function that lack the rest."""
    mask = (np.arange(7) < np.array([[7], [3], [5], [7], [2], [6]])).astype(np.int64)
    first = json.loads(train(folder, *NEXT, "-o", folder / "o.onnx", "--json").stdout)["losses"][0]
    np.savez(folder / "d.npz", input_ids=IDS, labels=LABELS, attention_mask=mask)
    same = json.loads(train(folder, *NEXT, "-o", folder / "o.onnx", "--json").stdout)["losses"][0]
    assert same == pytest.approx(first, rel=1e-5)  # padding on the right: no token with a loss sees it
    inputs = sonnx.decoder_inputs(str(folder / "m.onnx"), IDS, mask)
    np.testing.assert_array_equal(inputs["attention_mask"], mask)


def test_the_tokens_may_be_their_own_labels(folder: Path) -> None:
    run = ("--loss", "next_token_cross_entropy", "--lr", "1e-4", "-o", folder / "o.onnx", "--json")
    told = json.loads(train(folder, *run, "--target", "input_ids").stdout)
    np.savez(folder / "d.npz", input_ids=IDS, y=IDS)
    assert json.loads(train(folder, *run).stdout) == told


def test_other_inputs_are_still_required(tmp_path: Path) -> None:
    onnx.save(language_models.Decoder("pairs", cross=True).model(past=False), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", input_ids=IDS, labels=LABELS)
    done = train(tmp_path, *NEXT, "-o", tmp_path / "o.onnx", code=3)
    assert "must contain 'encoder_attention_mask', 'encoder_hidden_states'" in " ".join(done.output.split())
    with pytest.raises(UnsupportedModel, match=r"SX210.*encoder_hidden_states"):
        sonnx.decoder_inputs(tmp_path / "m.onnx", IDS)


# --- classifiers of tokens ----------------------------------------------------------------------------------------------


def tagger(folder: Path, classes: int, length: Any = "t") -> Path:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n, {length}, 5] x) => (float[n, {length}, {classes}] y)'
        "{ y = MatMul(x, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(5, classes)).astype(F), "w"))
    onnx.save(model, folder / "m.onnx")
    x = RNG.normal(size=(8, 4, 5)).astype(F)
    np.savez(folder / "d.npz", x=x, y=RNG.integers(0, classes, (8, 4)))
    return folder


@pytest.mark.parametrize("classes", [3, 4])
def test_tokens_have_classes_along_the_last_axis(tmp_path: Path, classes: int) -> None:
    """With as many classes as tokens too: the declared sizes show which axis is that of the classes."""
    tagger(tmp_path, classes)
    told = json.loads(train(tmp_path, "--epochs", 20, "--lr", "0.5", "-o", tmp_path / "o.onnx", "--json").stdout)
    stored, w = np.load(tmp_path / "d.npz"), numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[0])
    scores = Tensor(data=(stored["x"] @ w).reshape(-1, classes))
    wanted = autograd.softmax_cross_entropy(scores, Tensor(data=stored["y"].reshape(-1)))
    assert told["losses"][0] == pytest.approx(float(wanted.data[0]), rel=1e-5)
    assert told["losses"][-1] < told["losses"][0]


def test_as_many_tokens_as_classes_are_refused_if_nothing_decides(tmp_path: Path) -> None:
    tagger(tmp_path, 4, 4)
    done = train(tmp_path, "-o", tmp_path / "o.onnx", code=3)
    assert "may be along axis 1 or the last axis" in " ".join(done.output.split()) and "--class-axis" in done.output
    assert not (tmp_path / "o.onnx").exists()
    losses = [
        json.loads(train(tmp_path, "--class-axis", a, "-o", tmp_path / "o.onnx", "--json").stdout)["losses"][0]
        for a in ("1", "-1")
    ]
    assert losses[0] != losses[1]


def test_ignored_labels(tmp_path: Path) -> None:
    tagger(tmp_path, 3)
    stored = dict(np.load(tmp_path / "d.npz"))
    stored["y"][:, 2] = -1
    np.savez(tmp_path / "d.npz", **stored)
    done = train(tmp_path, "-o", tmp_path / "o.onnx", code=3)
    assert "class numbers must be in [0, 3)" in " ".join(done.output.split()) and "--ignore-index" in done.output
    flags = ("--ignore-index", -1, "--checkpoint", tmp_path / "c.ckpt")
    told = json.loads(train(tmp_path, *flags, "--epochs", 2, "--json").stdout)
    keep = [0, 1, 3]
    w = numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[0])
    scores = Tensor(data=np.ascontiguousarray(stored["x"][:, keep] @ w).reshape(-1, 3))
    wanted = autograd.softmax_cross_entropy(scores, Tensor(data=np.ascontiguousarray(stored["y"][:, keep]).reshape(-1)))
    assert told["losses"][0] == pytest.approx(float(wanted.data[0]), rel=1e-5)
    done = train(tmp_path, *flags, "--class-axis", -1, "--epochs", 3, "--resume", code=3)
    assert "--class-axis was none, got -1" in " ".join(done.output.split())
    train(tmp_path, *flags, "--epochs", 3, "--resume")


@pytest.mark.parametrize(
    "given", [("--loss", "mse_loss", "--ignore-index", 0), ("--loss", "next_token_cross_entropy", "--class-axis", "1")]
)
def test_options_without_an_effect_are_refused(tmp_path: Path, given: tuple[Any, ...]) -> None:
    assert "needs --loss" in train(tagger(tmp_path, 3), *given, "-o", tmp_path / "o.onnx", code=2).output


def test_labels_without_a_loss_are_refused(tmp_path: Path) -> None:
    tagger(tmp_path, 3)
    stored = dict(np.load(tmp_path / "d.npz"))
    np.savez(tmp_path / "none.npz", x=stored["x"], y=np.full_like(stored["y"], 7))
    for given in (("--data", tmp_path / "none.npz"), ("--data", tmp_path / "d.npz", "--validation", tmp_path / "none.npz")):
        done = run("train", tmp_path / "m.onnx", *given, "--ignore-index", 7, "-o", tmp_path / "o.onnx", code=3)
        assert f"{given[-2]}: at least one label must have a loss" in " ".join(done.output.split())
    assert not (tmp_path / "o.onnx").exists()


def test_a_mask_is_required_unless_the_loss_is_that_of_a_decoder(tmp_path: Path) -> None:
    onnx.save(DECODERS["exported"](), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", input_ids=IDS, y=IDS)
    done = train(tmp_path, "--class-axis", -1, "-o", tmp_path / "o.onnx", code=3)
    assert "must contain 'attention_mask'" in " ".join(done.output.split())


def test_the_default_of_ignored_labels_is_that_number(folder: Path) -> None:
    """A training continues whether the number is passed or not, and not with another one."""
    run = (*NEXT, "--checkpoint", folder / "c.ckpt")
    np.savez(folder / "d.npz", input_ids=IDS, labels=IDS)
    train(folder, *run)
    train(folder, *run, "--resume", "--epochs", 2, "--ignore-index", -100)
    done = train(folder, *run, "--resume", "--epochs", 3, "--ignore-index", -1, code=3)
    assert "--ignore-index" in done.output and "SX381" in done.output


def test_labels_are_counted_where_they_are() -> None:
    """An array of a device is not copied to the host; its sum is one number."""
    namespace = StrictNamespace()
    for loss, wanted in (("next_token_cross_entropy", (LABELS[:, 1:] != -100).sum()), ("softmax_cross_entropy", LABELS.size)):
        assert TrainLoss(loss).weight(namespace.asarray(LABELS)) == wanted
