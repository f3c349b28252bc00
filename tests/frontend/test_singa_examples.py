"""Programs in the shape of SINGA's examples (tests/singa_programs), run on small data in the same formats."""

from __future__ import annotations

import gzip
import pickle
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.helpers.paths import MODELS, PROJECT, TESTS

from singa import autograd, device
from singa_backend.errors import InvalidInput, NoGradientWarning, SonnxError

Run = Callable[..., str]
PROGRAMS = TESTS / "singa_programs"
F = np.float32


PAGE = PROJECT / "docs" / "from-singa.md"
ROWS = re.findall(r"^\| [^|`]+ \| ((?:`[\w/]+\.py`[, ]*)+)\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
"""The programs that the page says run, and the change that it says they need."""
STATED = {program: change.strip() for programs, change in ROWS for program in re.findall("`([^`]+)`", programs)}
PROVED: dict[str, str] = {}
"""The test that runs a program, by the program."""


def proves(*programs: str) -> Callable[[Any], Any]:
    """Mark the test that runs these programs of the page; the fixture `run` fails if it does not."""

    def decorated(test: Any) -> Any:
        PROVED.update(dict.fromkeys(programs, test.__name__))
        return test

    return decorated


CHANGES = {
    "gan/vanilla.py": ("gan/model/gan_mlp.py", "        self.optimizer(loss)\n", "", "SX370"),
    "rnn/char_rnn.py": ("rnn/char_rnn.py", "    model.reset_states(dev)\n    outputs = model(inputs)\n",
                        "    model.initialize(inputs)\n    model.reset_states(dev)\n    outputs = model(inputs)\n", "SX404"),
}  # fmt: skip
"""For programs that do not run as they are: the file, the text to replace, the new text, and the code of the error before it."""


@pytest.fixture
def run(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Run]:
    """Runs a program in this process as `python PROGRAM ARGS` would; a UserWarning is a failure, but for one.

    A weight that `last_layers` omits gets no gradient, which the first step reports.
    """
    modules, path, dev, ran = set(sys.modules), list(sys.path), device.get_default_device(), set()

    def restore() -> None:
        autograd.training = False
        dev.SetVerbosity(0)
        dev.SetSkipIteration(5)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            place = str(getattr(sys.modules[name], "__file__", ""))
            if str(PROGRAMS) in place or str(tmp_path) in place:
                del sys.modules[name]

    def call(program: str, *args: str, changed: bool = False) -> str:
        """Run a program, with or without its change of `CHANGES`."""
        ran.add(program)
        folder = PROGRAMS
        if changed:
            file, old, new, _ = CHANGES[program]
            folder = Path(shutil.copytree(PROGRAMS, tmp_path / "programs", dirs_exist_ok=True))
            text = (PROGRAMS / file).read_text()
            assert text.count(old) == 1
            (folder / file).write_text(text.replace(old, new))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [program, *args])
        dev.SetRandSeed(0)  # for programs that set no seed
        sys.path.insert(0, str((folder / program).parent))
        capsys.readouterr()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                warnings.simplefilter("ignore", NoGradientWarning)
                runpy.run_path(str(folder / program), run_name="__main__")
        finally:
            restore()
        return capsys.readouterr().out

    yield call
    mine = {program for program, test in PROVED.items() if test == request.node.originalname}
    assert not mine or ran & mine, f"this test must run {', '.join(mine)}"


def numbers(pattern: str, text: str) -> list[float]:
    return [float(v) for v in re.findall(pattern + r"\s*([-\d.e]+)", text)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in the formats of CIFAR-10 (pickled), MNIST (idx, pickled), GloVe, and text."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (folder / "cifar").mkdir()
    colours = rng.integers(0, 256, (4, 3, 1, 1))
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        y = rng.integers(0, 4, 16)
        x = np.clip(colours[y] + rng.integers(-20, 20, (16, 3, 32, 32)), 0, 255).astype(np.uint8)
        stored = {"batch_label": name, "labels": y.tolist(), "data": x.reshape(16, -1), "filenames": ["x"] * 16}
        (folder / "cifar" / name).write_bytes(pickle.dumps(stored))
    (folder / "mnist").mkdir()
    for part, n in (("train", 32), ("t10k", 16)):
        y = rng.integers(0, 10, n).astype(np.uint8)
        x = np.zeros((n, 28, 28), np.uint8)
        for i, k in enumerate(y):
            x[i, 2 * k + 2 : 2 * k + 6] = 200
        for what, array, start in (("images-idx3", x, 16), ("labels-idx1", y, 8)):
            with gzip.open(folder / "mnist" / f"{part}-{what}-ubyte.gz", "wb") as f:
                f.write(b"\0" * start + array.tobytes())

    def flat(n: int) -> tuple[Any, Any]:
        y = rng.integers(0, 3, n)
        return np.clip(np.eye(3)[y].repeat(12, 1) * 0.8 + rng.uniform(0, 0.2, (n, 36)), 0, 1).astype(F), y

    with gzip.open(folder / "mnist.pkl.gz", "wb") as f:
        pickle.dump((flat(60), flat(20), flat(20)), f)
    (folder / "text.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 10)
    words = [f"w{i}" for i in range(16)]
    vectors = [" ".join(map(str, rng.normal(size=5).round(3))) for _ in words]
    (folder / "glove.txt").write_text("".join(f"{w} {v}\n" for w, v in zip(words, vectors, strict=True)))
    pairs = [f"{words[i]} {words[(i + 3) % 8]}\t{words[8 + i]} {words[8 + (i + 1) % 8]} {words[i]}\n" for i in range(8)]
    (folder / "pairs.txt").write_text("".join(pairs))
    y, x, lengths = rng.integers(0, 2, 32), rng.normal(size=(32, 6, 4)), rng.integers(2, 7, 32).astype(np.int32)
    for i in range(32):
        x[i, :, 0] += (2 * y[i] - 1) * 2
        x[i, lengths[i] :] = 0
    np.savez(folder / "imdb.npz", x=x.astype(F), y=y, lengths=lengths)
    (folder / "pairs_of_lines.txt").write_text("a b c\tc b a\nb c d\td c b\nc a d\td a c\nd b a\ta b d\n")
    return folder


def test_the_page_states_what_the_tests_of_this_file_run() -> None:
    """Every program in the table of the page has a test, and the changes in it are those without which the program fails."""
    mains = {str(p.relative_to(PROGRAMS)) for p in PROGRAMS.rglob("*.py") if "__main__" in p.read_text()}
    assert set(STATED) == set(PROVED) and mains < set(STATED) and len(STATED) > 15
    assert all((PROGRAMS / program).is_file() for program in STATED)
    assert all(test in globals() for test in PROVED.values())
    changed = {program: text for program, text in STATED.items() if text != "as it is"}
    assert set(changed) == {*CHANGES, "onnx/training/train.py"}
    for program, (file, old, new, code) in CHANGES.items():
        line = (old if not new else new.removesuffix(old)).strip()
        assert f"`{line}`" in changed[program] and code in changed[program], changed[program]
        assert Path(file).name in changed[program] or file == program
    assert "`last_layers`" in changed["onnx/training/train.py"]


# --- cnn, mlp ----------------------------------------------------------------------------------------------------------


@proves("cnn/train_cnn.py")
@pytest.mark.skipif(find_spec("PIL") is None, reason="the program imports Pillow")
@pytest.mark.parametrize("model", ["cnn", "resnet18", "resnet50", "xceptionnet", "mlp", "alexnet"])
def test_cnn(run: Run, model: str, data: Path, tmp_path: Path) -> None:
    lr, epochs = {"alexnet": ("0.01", 12), "resnet18": ("0.02", 6)}.get(model, ("0.005", 6))
    text = run("cnn/train_cnn.py", model, "cifar10", str(data / "cifar"), "-m", str(epochs), "-l", lr)
    losses = numbers("Training loss =", text)
    assert len(losses) == epochs and losses[-1] < 0.9 * losses[0]
    assert len(numbers("Evaluation accuracy =", text)) == epochs and "Time Profiling" in text


@pytest.mark.skipif(find_spec("PIL") is None, reason="the program imports Pillow")
def test_cnn_options(run: Run, data: Path, tmp_path: Path) -> None:
    """Graph and tape print the same losses but for rounding; half precision trains; the times of a graph are printed."""

    def losses(*options: str) -> list[float]:
        text = run("cnn/train_cnn.py", "cnn", "mnist", str(data / "mnist"), "-m", "3", *options)
        assert "-v" not in options or "Forward Propagation Time" in text
        return numbers("Training loss =", text)

    graph, tape, half = losses("-v", "1"), losses("-g"), losses("-p", "float16")
    assert len(graph) == 3
    np.testing.assert_allclose(graph, tape, rtol=1e-5)
    np.testing.assert_allclose(half, graph, rtol=0.02)


@proves("cnn/train_mpi.py")
@pytest.mark.skipif(find_spec("PIL") is None, reason="the program imports Pillow")
@pytest.mark.parametrize("option", ["plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold"])
def test_cnn_in_one_process_of_mpi(run: Run, option: str, data: Path, tmp_path: Path) -> None:
    """One rank that sends everything prints the losses of the plain program; the other options train too."""
    args = ["cnn", "cifar10", str(data / "cifar"), "-m", "4", "-b", "8"]
    losses = numbers("Training loss =", run("cnn/train_mpi.py", *args, "-d", option, "-s", "0.01"))
    assert len(losses) == 4 and losses[-1] < losses[0]
    if option in ("plain", "partialUpdate"):
        assert losses == numbers("Training loss =", run("cnn/train_cnn.py", *args))


@proves("cnn/autograd_cnn.py")
def test_cnn_without_a_model(run: Run, data: Path, tmp_path: Path) -> None:
    losses = numbers("Training loss =", run("cnn/autograd_cnn.py", str(data / "mnist")))
    assert losses[-1] < 0.95 * losses[0]


@proves("cnn/benchmark.py")
def test_benchmark(run: Run, tmp_path: Path) -> None:
    text = run("cnn/benchmark.py")
    assert numbers("Throughput =", text)[0] > 0 and "Backward Propagation Time" in text


@proves("mlp/model.py", "mlp/native.py")
@pytest.mark.parametrize("command", [("model.py",), ("model.py", "-g", "-p", "float16"), ("native.py",)], ids=" ".join)
def test_mlp(run: Run, command: tuple[str, ...], tmp_path: Path) -> None:
    losses = numbers("training loss =", run(f"mlp/{command[0]}", *command[1:]))
    assert len(losses) == 3 and losses[-1] < 0.4 * losses[0]


# --- rnn, gan, rbm, qabot, imdb, trans -----------------------------------------------------------------------------------


@proves("rnn/char_rnn.py")
def test_char_rnn(run: Run, data: Path, tmp_path: Path) -> None:
    """Tape and graph print the same; the loss falls; the sampled text has the characters of the file.

    As it is, the program samples one text with the states of a batch.
    """
    texts = []
    for options in ((), ("-g",)):
        (tmp_path / "char_rnn.zip").unlink(missing_ok=True)
        with pytest.raises(SonnxError) as refused:
            run("rnn/char_rnn.py", str(data / "text.txt"), *options)
        assert refused.value.code == CHANGES["rnn/char_rnn.py"][-1]
        (tmp_path / "char_rnn.zip").unlink()
        texts.append(run("rnn/char_rnn.py", str(data / "text.txt"), *options, changed=True))
    assert texts[0] == texts[1]
    losses = numbers("train loss is", texts[0])
    assert losses[0] > losses[1] > losses[2]
    samples = re.findall("sample: (.*)", texts[0])
    assert len(samples) == 2 and all(len(s) == 23 and set(s) <= set((data / "text.txt").read_text()) for s in samples)


def gan_learns(text: str) -> None:
    d_losses = numbers("D_LOSS:", text)
    assert len(d_losses) == 2 and d_losses[-1] < 0.7 * d_losses[0] and np.isfinite(numbers("G_LOSS:", text)).all()


@proves("gan/vanilla.py")
def test_gan(run: Run, data: Path, tmp_path: Path) -> None:
    """As it is, the program updates by a loss whose parameters the loop before it has changed."""
    with pytest.raises(SonnxError) as refused:
        run("gan/vanilla.py", str(data / "mnist.pkl.gz"))
    assert refused.value.code == CHANGES["gan/vanilla.py"][-1]
    gan_learns(run("gan/vanilla.py", str(data / "mnist.pkl.gz"), changed=True))


@proves("gan/lsgan.py")
def test_lsgan(run: Run, data: Path, tmp_path: Path) -> None:
    gan_learns(run("gan/lsgan.py", str(data / "mnist.pkl.gz")))


@proves("rbm/train.py")
def test_rbm(run: Run, data: Path, tmp_path: Path) -> None:
    text = run("rbm/train.py", str(data / "mnist.pkl.gz"))
    for part in ("training", "valid"):
        errors = numbers(f"{part} erroraverage =", text)
        assert len(errors) == 10 and errors[-1] < 0.8 * errors[0]


@proves("qabot/qabot_train.py")
@pytest.mark.parametrize("model", ["lstm", "pool", "mlp"])
def test_qabot(run: Run, model: str, data: Path, tmp_path: Path) -> None:
    text = run("qabot/qabot_train.py", str(data / "glove.txt"), str(data / "pairs.txt"), "--model", model, "--epochs", "40")
    losses = numbers("loss", text)
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])
    assert numbers("right", text)[0] >= 2


@proves("imdb/train.py")
@pytest.mark.parametrize("options", [(), ("-m", "gru", "-b", "--mask"), ("-m", "tanh", "--sequences")], ids=" ".join)
def test_imdb(run: Run, options: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    text = run("imdb/train.py", str(data / "imdb.npz"), *options)
    losses = numbers("training loss", text)
    assert losses[-1] < 0.3 * losses[0] and numbers("evaluated", text) == [1.0]


@proves("trans/train.py")
def test_trans(run: Run, data: Path, tmp_path: Path) -> None:
    text = run("trans/train.py", str(data / "pairs_of_lines.txt"))
    losses = numbers("loss", text)
    assert losses[-1] < 0.1 * losses[0] and "read back True" in text


# --- onnx ----------------------------------------------------------------------------------------------------------------


def _weights(**shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal(s) * (2 / np.prod(s[1:])) ** 0.5 for n, s in shapes.items()}
    return [numpy_helper.from_array(a.astype(F), n) for n, a in arrays.items()]


def _model(nodes: list[Any], shape: list[Any], outputs: list[str], weights: list[onnx.TensorProto], inputs: Any = ("x",)) -> Any:
    graph = helper.make_graph(nodes, "net", [helper.make_tensor_value_info(n, 1 if n == "x" else 6, shape) for n in inputs],
                              [helper.make_tensor_value_info(n, 1, None) for n in outputs], weights)  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """resnet.onnx ends with a pooling, Flatten and Gemm; vgg.onnx with Gemm, Relu, Dropout and Gemm."""
    folder = tmp_path_factory.mktemp("models")
    node = helper.make_node
    stem = [node("Conv", ["x", "w0"], ["a"], strides=[2, 2]), node("Relu", ["a"], ["b"]),
            node("GlobalAveragePool", ["b"], ["c"]), node("Flatten", ["c"], ["d"])]  # fmt: skip
    resnet = [*stem, node("Gemm", ["d", "w1"], ["y"], transB=1)]
    vgg = [*stem, node("Gemm", ["d", "w1"], ["e"], transB=1), node("Relu", ["e"], ["f"]), node("Dropout", ["f"], ["g"]),
           node("Gemm", ["g", "w2"], ["y"], transB=1)]  # fmt: skip
    onnx.save(_model(resnet, ["N", 3, 32, 32], ["y"], _weights(w0=(12, 3, 3, 3), w1=(7, 12))), folder / "resnet.onnx")
    onnx.save(_model(vgg, ["N", 3, 32, 32], ["y"], _weights(w0=(12, 3, 3, 3), w1=(10, 12), w2=(7, 10))), folder / "vgg.onnx")
    return folder


@proves("onnx/classify.py")
def test_onnx_classification(run: Run, files: Path, tmp_path: Path, oracle: Any) -> None:
    x = np.random.default_rng(2).standard_normal((1, 3, 32, 32)).astype(F)
    y = oracle.run((files / "resnet.onnx").read_bytes(), {"x": x})["y"]
    (tmp_path / "test_data_set_0").mkdir()
    for name, array in (("input_0", x), ("output_0", y)):
        (tmp_path / "test_data_set_0" / f"{name}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
    text = run("onnx/classify.py", str(files / "resnet.onnx"), str(tmp_path))
    e = np.exp(y[0] - y[0].max())
    found = [(int(c), float(p)) for c, p in re.findall(r"class=(\d+); probability=([\d.]+)", text)]
    assert [c for c, _ in found] == np.argsort(y[0])[::-1][:3].tolist()
    np.testing.assert_allclose([p for _, p in found], np.sort(e / e.sum())[::-1][:3], atol=2e-6)


@proves("onnx/generate.py")
def test_onnx_generation(run: Run, tmp_path: Path, oracle: Any) -> None:
    """An input that grows: the ids are those of onnxruntime on the whole sequence; float ids are cast to the declared dtype."""
    path = MODELS / "gpt2-script-11.onnx"
    text = run("onnx/generate.py", str(path), "6")
    ids = [3, 1]
    for _ in range(6):
        ids.append(int(oracle.run(path.read_bytes(), {"ids": np.array([ids], np.int64)})["logits"][0, -1].argmax()))
    assert f"output {ids[2:]}" in text


@proves("onnx/question.py")
def test_onnx_question(run: Run, tmp_path: Path) -> None:
    """Three inputs of ids as int32, declared otherwise or not; two outputs, computed here by hand."""
    node = helper.make_node
    table = np.random.default_rng(3).standard_normal((9, 2)).astype(F)
    nodes = [node("Gather", ["table", "ids"], ["e"], axis=0), node("Cast", ["mask"], ["m"], to=1),
             node("Unsqueeze", ["m"], ["u"], axes=[2]),
             node("Mul", ["e", "u"], ["p"]), node("Split", ["p"], ["s0", "s1"], axis=2),
             node("Squeeze", ["s0"], ["start"], axes=[2]), node("Squeeze", ["s1"], ["end"], axes=[2])]  # fmt: skip
    proto = _model(nodes, ["N", 5], ["start", "end"], [numpy_helper.from_array(table, "table")], ("ids", "mask"))
    onnx.save(proto, tmp_path / "net.onnx")
    rng = np.random.default_rng(4)
    ids, mask = rng.integers(0, 9, (3, 5)), np.ones((3, 5), np.int64)
    np.savez(tmp_path / "data.npz", ids=ids, mask=mask)
    text = run("onnx/question.py", str(tmp_path / "net.onnx"), str(tmp_path / "data.npz"))
    want = [(max(range(5), key=lambda j: table[i[j], 0]), max(range(5), key=lambda j: table[i[j], 1])) for i in ids]
    assert re.findall(r"start (\d+) end (\d+)", text) == [(str(a), str(b)) for a, b in want]


@proves("onnx/training/train.py")
@pytest.mark.parametrize(("model", "options"), [("resnet", ()), ("vgg", ()), ("vgg", ("-g",))])
def test_onnx_training(run: Run, model: str, options: tuple[str, ...], files: Path, data: Path, tmp_path: Path) -> None:
    """With `last_layers` as SINGA's documents count, the features of a net have the width in model.json, and it trains."""
    args = [model, str(files), str(data / "cifar"), "--max-epoch", "8", "--documented", *options]
    text = run("onnx/training/train.py", *args)
    losses = numbers("training loss =", text)
    assert losses[-1] < 0.7 * losses[0] and numbers("evaluation accuracy =", text)[-1] >= 0.5


def test_onnx_training_that_counts_as_the_code_of_singa(run: Run, files: Path, data: Path) -> None:
    """The -3 of model.json omits two layers here, as docs/from-singa.md states; the new layer then refuses the images."""
    with pytest.raises(InvalidInput, match=r"must have 12 features, got shape \(8, 12, 1, 1\)"):
        run("onnx/training/train.py", "resnet", str(files), str(data / "cifar"))
