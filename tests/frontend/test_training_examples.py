"""The programs of examples/training, on tiny files in the formats of CIFAR-10 and on sentences."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import re
import runpy
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.helpers.paths import MODELS, PROJECT

from singa import autograd

PROGRAMS = PROJECT / "examples" / "training"
F = np.float32
MEAN, STD = np.array([0.485, 0.456, 0.406]).reshape(3, 1, 1), np.array([0.229, 0.224, 0.225]).reshape(3, 1, 1)


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"training_{name}", PROGRAMS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


data, drawing = module("data"), module("drawing")


def run(program: str, *args: Any, folder: Path, fails: bool = False, child: bool = False) -> str:
    """The output of `python PROGRAM ARGS`, or its last words if it fails; in a child process, or faster in this one."""
    words = [str(PROGRAMS / program), *map(str, args)]
    if child:
        command, env = [sys.executable, "-W", "error::UserWarning", *words], {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=env)
        assert bool(done.returncode) == fails, done.stderr[-2000:]
        return done.stderr if fails else done.stdout
    modules, out = set(sys.modules), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("error", UserWarning)
        patch.chdir(folder)
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
        try:
            runpy.run_path(words[0], run_name="__main__")
            assert not fails
        except SystemExit as error:
            assert fails, error.code
            return str(error.code)
        finally:
            autograd.training = False
            for name in set(sys.modules) - modules:
                if str(PROGRAMS) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
    return out.getvalue()


def losses(text: str) -> list[float]:
    return [float(v) for v in re.findall(r"epoch \d+: loss ([\d.]+)", text)]


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise on one of four colours, which are the classes 0, 3, 5 and 9."""
    rng = np.random.default_rng(seed)
    y = rng.choice([0, 3, 5, 9], count).astype(np.uint8)
    colour = np.random.default_rng(7).integers(40, 216, (10, 3, 1, 1))
    return np.clip(colour[y] + rng.integers(-30, 30, (count, 3, 32, 32)), 0, 255).astype(np.uint8), y


BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    for i, name in enumerate(BATCHES):
        x, y = drawn(16, i)
        (folder / f"{name}.bin").write_bytes(np.concatenate([y[:, None], x.reshape(16, -1)], axis=1).tobytes())
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with batch normalization and dropout, and a last product of six features."""
    rng = np.random.default_rng(0)
    shapes: dict[str, Any] = {"w": (6, 3, 3, 3), "s": 6, "b": 6, "m": 6, "v": 6, "fc": (9, 6)}
    arrays = {n: rng.uniform(0.5, 1, s) if n in "sv" else rng.normal(0, 0.4, s) for n, s in shapes.items()}
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "w"], ["c"], strides=[4, 4]), node("BatchNormalization", ["c", *"sbmv"], ["n"]),
        node("Relu", ["n"], ["r"]), node("GlobalAveragePool", ["r"], ["g"]), node("Flatten", ["g"], ["f"]),
        node("Dropout", ["f"], ["d"], ratio=0.3), node("Gemm", ["d", "fc"], ["y"], transB=1),
        node("Softmax", ["y"], ["p"], axis=1),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "small",
        [helper.make_tensor_value_info("image", 1, ["N", 3, 32, 32])], [helper.make_tensor_value_info("p", 1, ["N", 9])],
        [numpy_helper.from_array(a.astype(F), n) for n, a in arrays.items()],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6), path)
    return path


def stored(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as pack, pack.open("tensor_dict.npz") as f, np.load(f) as arrays:
        return dict(arrays)


# --- the programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [
    "resnet.py --width 0.0625 --lr 0.02", "resnet.py --width 0.03 --depth 50 --version 2 --lr 0.01 --no-graph",
    "mobilenet.py --lr 0.02 --width 0.0625", "vgg.py --width 0.0625 --lr 0.01 --depth 19 --bn",
])  # fmt: skip
def test_a_random_net_trains(command: str, cifar: Path, tmp_path: Path) -> None:
    program, *args = command.split()
    text = run(program, *args, "--data", cifar, "--batch-size", "16", "--epochs", "4", "--output", "new.onnx", folder=tmp_path,
               child="mobilenet" in program)  # fmt: skip
    found = losses(text)
    assert len(found) == 4 and found[-1] < 0.8 * found[0]
    assert float(re.findall(r"largest difference from onnxruntime (\S+)", text)[0]) < 1e-4
    proto = onnx.load(tmp_path / "new.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert {"head.W", "head.b"} <= {t.name for t in proto.graph.initializer}
    assert proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 10


def test_a_classifier_of_texts_trains(tmp_path: Path) -> None:
    text = run("bert.py", "--epochs", "5", "--patience", "3", "--output", "new.onnx", folder=tmp_path, child=True)
    found = losses(text)
    assert found[-1] < 0.3 * found[0] and float(re.findall(r"test accuracy ([\d.]+)", text)[0]) > 0.9
    assert [v.name for v in onnx.load(tmp_path / "new.onnx").graph.input] == ["input_ids", "attention_mask", "token_type_ids"]


def test_digits_and_a_file_of_texts(tmp_path: Path) -> None:
    """The set that needs no download has its ten classes; labels of a file are the classes, sorted."""
    run("vgg.py", "--samples", "32", "--epochs", "1", "--width", "0.02", "--confusion", "c.svg", folder=tmp_path)
    picture = (tmp_path / "c.svg").read_text()
    assert sum(map(int, re.findall(r'class="count"[^>]*>(\d+)<', picture))) == 360
    (tmp_path / "t.tsv").write_text(
        "".join(f"{'b' if i % 2 else 'a'}\tword{i % 7} {'yes' if i % 2 else 'no'}\n" for i in range(40))
    )
    run("bert.py", "--data", "t.tsv", "--length", "5", "--epochs", "1", "--confusion", "t.svg", folder=tmp_path)
    assert re.findall(r'text-anchor="end">(\w+)<', (tmp_path / "t.svg").read_text()) == ["a", "b"]


def test_the_confusion_matrix_is_that_of_the_written_file(small: Path, cifar: Path, tmp_path: Path, oracle: Any) -> None:
    """The written file runs in onnxruntime on the test images, prepared here by hand; the picture has the same counts."""
    args = [small, "--data", cifar, "--epochs", "3", "--batch-size", "16", "--lr", "0.05"]
    pictures = ["--confusion", "c.svg", "--plot", "curves.svg"]
    text = run("resnet.py", *args, *pictures, "--output", "new.onnx", folder=tmp_path)
    x, y = drawn(16, 5)
    scores = oracle.run((tmp_path / "new.onnx").read_bytes(), {"image": ((x / 255.0 - MEAN) / STD).astype(F)})
    (found,) = scores.values()
    want = [[sum(int(t == i and p == j) for t, p in zip(y, found.argmax(1), strict=True)) for j in range(10)] for i in range(10)]
    picture = (tmp_path / "c.svg").read_text()
    counts = [int(v) for v in re.findall(r'class="count"[^>]*>(\d+)<', picture)]
    assert counts == [v for row in want for v in row] and sum(counts) == 16
    assert re.findall(r'text-anchor="end">(\w+)<', picture) == list(data.CIFAR10)
    assert f"test accuracy {sum(want[i][i] for i in range(10)) / 16:.4f}" in text
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 4


@pytest.mark.parametrize("options", [[], ["--optimizer", "adam", "--no-graph", "--freeze"]], ids=["sgd", "adam"])
def test_a_resumed_training_has_the_bits_of_an_unbroken_one(options: list[str], small: Path, cifar: Path, tmp_path: Path) -> None:
    args = [small, "--data", cifar, "--batch-size", "12", "--lr", "0.01", *options]
    whole = run("resnet.py", *args, "--epochs", "4", "--checkpoint", "a.ckpt", "--output", "a.onnx", folder=tmp_path)
    first = run("resnet.py", *args, "--epochs", "2", "--checkpoint", "b.ckpt", folder=tmp_path)
    second = run("resnet.py", *args, "--epochs", "4", "--checkpoint", "b.ckpt", "--resume", "--output", "b.onnx", folder=tmp_path)
    assert losses(first) + losses(second) == losses(whole) and len(losses(second)) == 2
    a, b = stored(tmp_path / "a.ckpt"), stored(tmp_path / "b.ckpt")
    assert a.keys() == b.keys() and {"head.W", "fc", "v", "run.history", "best.w"} <= a.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    start = {t.name: numpy_helper.to_array(t) for t in onnx.load(small).graph.initializer}
    same = np.array_equal(a["w"], start["w"])
    assert same == ("--freeze" in options) and not np.array_equal(a["m"], start["m"])
    refused = run("resnet.py", *args, "--seed", "1", "--checkpoint", "b.ckpt", "--resume", folder=tmp_path, fails=True)
    assert "b.ckpt is the checkpoint of another training: seed differ" in refused


def test_early_stopping_restores_the_best_weights(small: Path, cifar: Path, tmp_path: Path) -> None:
    """The written weights are those of a training that ends after the best epoch."""
    args = [small, "--data", cifar, "--batch-size", "16", "--lr", "0.8"]
    text = run("resnet.py", *args, "--epochs", "40", "--patience", "2", "--output", "a.onnx", folder=tmp_path)
    held = [float(v) for v in re.findall(r"validation loss ([\d.]+)", text)]
    epochs, best = map(int, re.findall(r"stopped after epoch (\d+), restored the weights of epoch (\d+)", text)[0])
    assert len(held) == epochs == best + 2 < 40 and held[best - 1] == min(held)
    run("resnet.py", *args, "--epochs", best, "--output", "b.onnx", folder=tmp_path)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize(("args", "message"), [
    (["--dist-option", "half"], "--dist-option half needs several workers"), (["--plot", "x.bmp"], "must be .svg or .png"),
    (["--resume"], "--resume needs a --checkpoint that exists"), (["missing.onnx"], "missing.onnx cannot be read"),
    (["--data", "."], "must have the files of CIFAR-10"),
])  # fmt: skip
def test_what_is_refused(args: list[str], message: str, tmp_path: Path) -> None:
    assert message in run("vgg.py", *args, folder=tmp_path, fails=True)


# --- the parts -----------------------------------------------------------------------------------------------------------


def write_pickled(folder: Path, change: Callable[[dict[Any, Any]], Any] = lambda d: d, protocol: int = 2) -> None:
    for i, name in enumerate(BATCHES):
        x, y = drawn(16, i)
        kept: dict[Any, Any] = {
            b"data": x.reshape(16, -1),
            b"labels": y.tolist(),
            b"batch_label": b"1",
            b"filenames": [b"a"] * 16,
        }
        (folder / name).write_bytes(pickle.dumps(change(kept), protocol=protocol))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_both_versions_of_cifar_have_the_same_images(protocol: int, cifar: Path, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    as_text = lambda d: {k.decode(): v for k, v in d.items()} if protocol % 2 else d  # noqa: E731
    write_pickled(tmp_path / "cifar-10-batches-py", as_text, protocol)
    for a, b in zip(data.cifar10(cifar), data.cifar10(tmp_path), strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])
    (x, y), _ = data.cifar10(cifar)
    wanted = [drawn(16, i) for i in range(5)]
    np.testing.assert_array_equal(x, np.concatenate([w[0] for w in wanted]))
    np.testing.assert_array_equal(y, np.concatenate([w[1] for w in wanted]))


class Harmful:
    def __reduce__(self) -> Any:
        return (os.system, ("touch harmed",))


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: {**d, b"extra": Harmful()}, "refers to"), (lambda d: {b"labels": [1]}, "data"), (lambda d: [d], "list"),
    (lambda d: {**d, b"labels": [10] * 16}, "labels 0 to 9"),
    (lambda d: {**d, b"data": d[b"data"].astype(F)}, "rows of 3072 bytes"),
    (lambda d: {**d, b"data": np.array([print] * 16, object)}, "refers to .*print"),
])  # fmt: skip
def test_a_pickle_that_is_not_a_batch_is_refused(
    change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pickled(tmp_path, change)
    with pytest.raises(SystemExit, match=message):
        data.cifar10(tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    for name in BATCHES:
        (tmp_path / f"{name}.bin").write_bytes(bytes(3073))
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3072))
    with pytest.raises(SystemExit, match=r"data_batch_3\.bin must be records of 3073 bytes, got 3072"):
        data.cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(SystemExit, match=r"lacks data_batch_3\.bin"):
        data.cifar10(tmp_path)


def test_augmentation_moves_and_flips() -> None:
    """Every result is the image, moved by at most an eighth with zeros at the border, flipped or not; all of these occur."""
    image = np.arange(1, 1 + 3 * 16 * 16).reshape(1, 3, 16, 16) % 251 + 1
    possible = {}
    for dy in range(-2, 3):
        for dx in range(-2, 3):
            moved = np.zeros_like(image[0])
            for i in range(16):
                for j in range(16):
                    if 0 <= i + dy < 16 and 0 <= j + dx < 16:
                        moved[:, i, j] = image[0, :, i + dy, j + dx]
            possible[moved.tobytes()], possible[moved[..., ::-1].tobytes()] = (dy, dx, False), (dy, dx, True)
    x = np.repeat(image, 600, axis=0)
    seen = {possible[m.tobytes()] for m in data.augmented(x, np.random.default_rng(0), flip=True)}
    assert len(seen) == 50
    assert not any(f for *_, f in {possible[m.tobytes()] for m in data.augmented(x, np.random.default_rng(0), flip=False)})


@pytest.mark.parametrize(("n", "size"), [(4, 8), (8, 12), (5, 3), (6, 6)])
def test_resizing(n: int, size: int) -> None:
    """As linear interpolation between centres, one axis after the other."""
    x = np.random.default_rng(0).uniform(0, 255, (2, 3, n, n)).astype(F)
    place = (np.arange(size) + 0.5) * n / size - 0.5
    rows = np.apply_along_axis(lambda v: np.interp(place, np.arange(n), v), 2, x.astype(np.float64))
    want = np.apply_along_axis(lambda v: np.interp(place, np.arange(n), v), 3, rows)
    np.testing.assert_allclose(data.resized(x, size), want, rtol=1e-5, atol=1e-3)


def test_sentences_are_labelled_by_their_words() -> None:
    lines, y = data.sentences()
    assert len(set(lines)) == len(lines) == 800 and y.mean() == 0.5
    good = {"good", "great", "lovely", "fine", "superb"}
    assert [int((s.split()[-1] in good) != ("not" in s.split())) for s in lines] == y.tolist()
    ids, mask, words = data.encoded(["a b", "b"], None, 5)
    assert (
        ids.tolist() == [[2, 4, 5, 3, 0], [2, 5, 3, 0, 0]] and mask.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]] and words == 6
    )
    with pytest.raises(SystemExit, match="a text has 4 tokens, and --length is 3"):
        data.encoded(["a b"], None, 3)


def test_pictures_by_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing.confusion(tmp_path / "c.png", np.array([[3, 1], [0, 5]]), ["a", "b"])
    drawing.curves(tmp_path / "l.png", np.array([[2, 0.1, 2.1, 0.2], [1, 0.5, np.nan, 0.4]]))
    for name in ("c.png", "l.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["mobilenetv2-script-11", "mobilenetv2-dynamo-18"])
def test_a_file_of_another_framework_trains(name: str, tmp_path: Path) -> None:
    """The bounds of Relu6, which an exporter writes as initializers, and the old head are not trained."""
    path = MODELS / f"{name}.onnx"
    text = run("mobilenet.py", path, "--samples", "32", "--epochs", "1", "--output", "new.onnx", folder=tmp_path)
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer} for p in (path, tmp_path / "new.onnx")
    )
    frozen = re.findall("not trained: (.*)", text)[0].split(", ")
    assert "classify.weight" in frozen and "classify.weight" not in after and {"head.W", "head.b"} <= after.keys()
    kept = [n for n in before.keys() & after.keys() if before[n].ndim == 4]
    assert len(kept) > 10 and not any(np.array_equal(before[n], after[n]) for n in kept)
    assert all(np.array_equal(before[n], after[n]) for n in set(frozen) & after.keys())


@pytest.mark.parametrize(("name", "cut"), [("bert-script-17", None), ("bert-dynamo-18", "-2")])
def test_a_bert_file_trains_with_its_vocabulary(name: str, cut: str | None, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "was", "not", "very", *data.GOOD, *data.BAD, *data.THINGS]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    args = ["--vocab", "vocab.txt", "--length", "9", "--epochs", "1", "--samples", "64", *(["--last-layers", cut] if cut else [])]
    text = run("bert.py", MODELS / f"{name}.onnx", *args, "--output", "new.onnx", folder=tmp_path)
    assert "epoch 1" in text and [v.name for v in onnx.load(tmp_path / "new.onnx").graph.input] == ["ids", "kinds", "mask"]
    assert ("pool.weight" in re.findall("not trained: (.*)", text)[0]) == (cut is None)
