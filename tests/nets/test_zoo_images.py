"""The image programs of examples/zoo on nets of the published structure and reduced width, at the published size and opset.

Pictures are prepared, and outputs interpreted, once more here with loops; onnxruntime computes the network in between.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from tests.helpers import zoo_programs
from tests.zoo import classic, dense, mobile, residual, seeded, yolo

from singa import sonnx, tensor
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.conform.cases import light_inputs
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput, InvalidModel

pytest.importorskip("PIL")
from PIL import Image  # after the check that it is installed

F = np.float32
CLASSES = 1000
IMAGENET = (1, 3, 224, 224)
NETS: dict[str, tuple[Callable[[], Model], tuple[int, ...], int, float]] = {
    "mobilenetv2": (lambda: mobile.MobileNetV2(1 / 8, CLASSES, divisor=2), IMAGENET, 7, 1),
    "resnet18": (lambda: residual.ResNet18(1 / 16, CLASSES), IMAGENET, 7, 1),
    "vgg16": (lambda: classic.VGG16(1 / 32, CLASSES, 64), IMAGENET, 7, 1),
    "vgg19": (lambda: classic.VGG19(1 / 32, CLASSES, 64), IMAGENET, 7, 1),
    "densenet121": (lambda: dense.DenseNet121(1 / 16, CLASSES), IMAGENET, 9, 1),
    "shufflenetv1": (lambda: mobile.ShuffleNetV1(1 / 4, CLASSES), IMAGENET, 9, 1),
    "shufflenetv2": (lambda: mobile.ShuffleNetV2(1 / 8, CLASSES), IMAGENET, 10, 1),
    "squeezenet": (lambda: classic.SqueezeNet(1 / 4, CLASSES, ceil_mode=False), IMAGENET, 7, 1),
    "tiny_yolov2": (lambda: yolo.TinyYOLOv2(1 / 16), (1, 3, 416, 416), 8, 255),
    "arcface": (lambda: residual.ArcFace(1 / 32), (1, 3, 112, 112), 8, 255),
    "ferplus": (lambda: classic.FERPlus(1 / 16, 64), (1, 1, 64, 64), 8, 255),
    "super_resolution": (lambda: classic.SubPixel(1 / 8), (1, 1, 224, 224), 10, 1),
}
"""The net of each program, its input, the opset of the published file, and the largest value of its input."""
SIZES = ((300, 260), (250, 340))
"""Width and height of the pictures one.png and two.png."""
CLASSIFIERS = list(NETS)[:8]


@cache
def built(name: str) -> Model:
    """A net with seeded weights, and the statistics of random inputs."""
    make, (_, *shape), _, most = NETS[name]
    net = make()
    rng = np.random.default_rng(3)
    some = [Tensor(data=rng.uniform(0, most, (n, *shape)).astype(F), requires_grad=False) for n in (1, 4)]
    net.compile(some[:1], is_train=False)
    seeded(net, 5)
    if any("running_mean" in n for n in net.get_states()):
        net.train()
        net.forward(some[1])
    net.eval()
    return net


@cache
def written(name: str) -> bytes:
    """The net in the opset of the published file, for one picture."""
    _, shape, opset, _ = NETS[name]
    proto = sonnx.export(built(name), [Tensor(data=np.zeros(shape, F), requires_grad=False, name="data")], opset=opset)
    assert proto.opset_import[0].version == opset
    return proto.SerializeToString()  # type: ignore[no-any-return]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one.png", "two.png")):
        picture(SIZES[seed], seed).save(tmp_path / name)
    return tmp_path


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path) -> Callable[..., zoo_programs.Done]:
    """go(program, options...): the program with its net as net.onnx, and pictures one.png and two.png."""

    def run(name: str, *options: Any) -> zoo_programs.Done:
        (files / "net.onnx").write_bytes(written(name))
        return zoo_programs.run(monkeypatch, capsys, name, "--model", "net.onnx", "--cache", files / "cache", *options)

    return run


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    return lambda name: zoo_programs.module(monkeypatch, name)


def picture(size: tuple[int, int], seed: int) -> Any:
    """Coloured rectangles on a gradient."""
    width, height = size
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 255 / height, columns * 255 / width, (rows + columns) % 256], -1)
    for _ in range(12):
        y, x = rng.integers(0, height - 30), rng.integers(0, width - 30)
        pixels[y : y + rng.integers(10, 90), x : x + rng.integers(10, 90)] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels.astype(np.uint8))


def softmax(scores: Any) -> list[float]:
    values = [float(s) for s in np.ravel(scores)]
    e = [math.exp(v - max(values)) for v in values]
    return [v / sum(e) for v in e]


# --- every program


@pytest.mark.parametrize("name", NETS)
def test_verify_with_the_data_of_onnxruntime(name: str, go: Any, files: Path, oracle: Oracle) -> None:
    """The values of the network; with other data the program ends with 1."""
    _, shape, _, most = NETS[name]
    x = np.random.default_rng(9).uniform(0, most, shape).astype(F)
    (y,) = oracle.run(written(name), {"data": x}).values()
    data = files / "test_data_set_0"
    data.mkdir()
    for shift, code in ((0, 0), (0.01, 1)):
        for file, array in (("input_0.pb", x), ("output_0.pb", y + F(shift))):
            (data / file).write_bytes(numpy_helper.from_array(array).SerializeToString())
        done = go(name, "--verify")
        assert done.code == code, done.err
        assert ("equal to 4 decimals" in done.out) == (not code) and ("values differ from the file" in done.err) == bool(code)
    assert np.abs(y).max() > 1e-2 or name == "shufflenetv1"  # probabilities


def test_the_nets_have_the_operators_and_ends_of_the_published_files() -> None:
    def net(name: str) -> Any:
        return onnx.load_from_string(written(name)).graph

    assert {n: [d.dim_value for d in net(n).output[0].type.tensor_type.shape.dim] for n in NETS} == {
        **{n: [1, 1000] for n in CLASSIFIERS}, "densenet121": [1, 1000, 1, 1], "tiny_yolov2": [1, 125, 13, 13],
        "arcface": [1, 512], "ferplus": [1, 8], "super_resolution": [1, 1, 672, 672],
    }  # fmt: skip
    counts = {n: sum(node.op_type == "Conv" for node in net(n).node) for n in NETS}
    assert counts == {
        "mobilenetv2": 52, "resnet18": 20, "vgg16": 13, "vgg19": 16, "densenet121": 121, "shufflenetv1": 49, "shufflenetv2": 56,
        "squeezenet": 26, "tiny_yolov2": 9, "arcface": 1 + 49 * 2 + 4, "ferplus": 10, "super_resolution": 4,
    }  # fmt: skip


LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


@pytest.mark.parametrize("name", ["shufflenetv1", "densenet121", "squeezenet"])
def test_the_graphs_of_the_model_zoo(name: str, monkeypatch: Any, capsys: Any, files: Path) -> None:
    """onnx has the graphs of some published files, at full width with constant weights, and their outputs."""
    light = LIGHT / f"light_{name.removesuffix('v1')}.onnx"
    (array,) = light_inputs(onnx.load(light))
    data = files / "test_data_set_0"
    data.mkdir()
    (data / "input_0.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
    shutil.copy(f"{light.with_suffix('')}_output_0.pb", data / "output_0.pb")
    shutil.copy(light, "net.onnx")
    done = zoo_programs.run(monkeypatch, capsys, name, "--model", "net.onnx", "--verify", "one.png", "--top", "1000")
    values = [float(v) for v in re.findall(r"^  (\S+)  class", done.out, re.M)]
    assert done.code == 0 and "equal to 4 decimals" in done.out
    assert len(values) == CLASSES and sum(values) == pytest.approx(1, abs=0.05)


# --- classification


@cache
def prepared(seed: int, is_stretched: bool) -> np.ndarray:
    """The input of ImageNet's models for a picture, pixel by pixel."""
    image = picture(SIZES[seed], seed)
    if is_stretched:
        image = image.resize((224, 224), Image.Resampling.BILINEAR)
    else:
        width, height = image.size
        size = (256, round(256 * height / width)) if width < height else (round(256 * width / height), 256)
        image = image.resize(size, Image.Resampling.BILINEAR)
        left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
        image = image.crop((left, top, left + 224, top + 224))
    x = np.zeros(IMAGENET)
    for c, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        for row in range(224):
            for column in range(224):
                x[0, c, row, column] = (image.getpixel((column, row))[c] / 255 - mean) / std
    return x.astype(F)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_most_probable_classes(name: str, go: Any, oracle: Oracle, files: Path) -> None:
    names = [f"n{i:08} thing {i}, kind" for i in range(CLASSES)]
    (files / "synset.txt").write_text("\n".join(names) + "\n")
    done = go(name, "two.png", "--labels", "synset.txt", "--plot", "result.png")
    (y,) = oracle.run(written(name), {"data": prepared(1, name == "squeezenet")}).values()
    wanted = [float(v) for v in y.ravel()] if name == "shufflenetv1" else softmax(y)
    best = sorted(range(CLASSES), key=lambda i: -wanted[i])[:5]
    rows = re.findall(r"^  (\d\.\d{4})  thing (\d+), kind$", done.out, re.M)
    assert done.code == 0 and [int(i) for _, i in rows] == best
    for (value, _), i in zip(rows, best, strict=True):
        assert float(value) == pytest.approx(wanted[i], abs=1e-4)
    assert Image.open("result.png").width > 360


def test_several_pictures_and_no_labels(go: Any) -> None:
    done = go("mobilenetv2", "one.png", "two.png", "--top", "2")
    assert re.fullmatch(r"net.onnx: .*\n(?:(one|two).png\n(  0\.\d{4}  class \d+\n){2}){2}", done.out)


def test_pictures_are_prepared_as_documented(load: Any, files: Path) -> None:
    images = load("images")
    for name, path in (("resnet18", "one.png"), ("vgg16", "two.png"), ("squeezenet", "two.png")):
        found = images.normalised(load(name).MODEL.crop(images.read(path)))
        np.testing.assert_allclose(found, prepared(int(path == "two.png"), name == "squeezenet"), atol=1e-6)


def deep_png(colour: int, channels: int) -> bytes:
    """A picture of 2 x 2 pixels with 16 bits a channel."""
    pixels = (b"\0" + bytes(range(2 * 2 * channels))) * 2
    parts = {b"IHDR": struct.pack(">IIBBBBB", 2, 2, 16, colour, 0, 0, 0), b"IDAT": zlib.compress(pixels), b"IEND": b""}
    chunks = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts.items()]
    return b"".join([b"\x89PNG\r\n\x1a\n", *chunks])


def test_a_picture_much_longer_than_short_is_refused(load: Any) -> None:
    images = load("images")
    with pytest.raises(InvalidInput, match="at most 100 times as long as short, got 30000 x 1"):
        images.covered(Image.new("RGB", (30_000, 1)), 256, 224)  # 6 GB in full
    assert images.covered(Image.new("RGB", (1, 100)), 256, 224).size == (224, 224)


def test_a_model_that_returns_nan_has_no_result(load: Any) -> None:
    graph = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Log(x) }""")
    with pytest.raises(InvalidModel, match="returned NaN"):
        load("images").run(sonnx.prepare(graph), np.array([-1, 1], F))


def test_pictures_of_other_modes(load: Any, files: Path) -> None:
    images = load("images")
    half = Image.new("RGBA", (4, 2), (200, 100, 0, 0))
    half.paste((10, 20, 30, 255), (0, 0, 2, 2))
    half.save("alpha.png")
    assert np.asarray(images.read("alpha.png"))[0].tolist() == [[10, 20, 30]] * 2 + [[255] * 3] * 2
    Image.new("L", (3, 3), 77).save("grey.png")
    assert np.asarray(images.read("grey.png"))[1, 1].tolist() == [77] * 3
    turned = Image.new("RGB", (6, 2), "red")
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned.save("turned.jpg", exif=exif)
    assert images.read("turned.jpg").size == (2, 6)
    Image.fromarray(np.full((2, 2), 40_000, np.uint16)).save("deep.png")
    with pytest.raises(InvalidInput, match="8 bits a channel"):
        images.read("deep.png")
    for colour, channels in ((2, 3), (4, 2), (6, 4)):  # RGB, grey and RGB with transparency: Pillow drops the low 8 bits
        Path("deep.png").write_bytes(deep_png(colour, channels))
        with pytest.raises(InvalidInput, match=r"8 bits a channel, got .*;16B"):
            images.read("deep.png")
    Path("text.png").write_text("not a picture")
    for path in ("text.png", "none.png", "."):
        with pytest.raises(InvalidInput, match="SX307"):
            images.read(path)


def test_labels(load: Any, files: Path) -> None:
    images = load("images")
    Path("labels.txt").write_text("\ufeffn01440764 tench, Tinca tinca\n\nplain name\n", "utf-8")
    assert images.labels(Path("labels.txt"), 2) == ["tench, Tinca tinca", "plain name"]
    assert images.labels(None, 2) == ["class 0", "class 1"]
    with pytest.raises(InvalidInput, match="3 labels for the classes of the model, got 2"):
        images.labels(Path("labels.txt"), 3)


def test_a_result_needs_a_name_of_a_picture(go: Any) -> None:
    done = go("ferplus", "one.png", "--plot", "result.txt")
    assert done.code == 3 and "SX351" in done.err and not Path("result.txt").exists()


@pytest.mark.parametrize("name, option", [("vgg16", "--plot"), ("ferplus", "--plot"), ("tiny_yolov2", "--output")])
def test_a_result_needs_a_picture(name: str, option: str, go: Any) -> None:
    done = go(name, option, "result.png")
    assert done.code == 2 and f"{option} needs a picture" in done.err and not Path("result.png").exists()


@pytest.mark.parametrize("name, option, value", [
    ("vgg16", "--top", "0"), ("vgg16", "--top", "1.5"), ("tiny_yolov2", "--overlap", "2"), ("tiny_yolov2", "--threshold", "nan"),
    ("arcface", "--threshold", "-1.1"),
])  # fmt: skip
def test_options_have_bounds(name: str, option: str, value: str, go: Any) -> None:
    done = go(name, f"{option}={value}")
    assert done.code == 2 and option in done.err and value in done.err and done.out == ""


def test_bars_are_as_long_as_their_values(load: Any, files: Path) -> None:
    load("images").bars(picture((100, 100), 0), [("a", 1.0), ("b", 0.5), ("c", 0.0)], Path("bars.png"))
    pixels = np.asarray(Image.open("bars.png")).astype(int)
    blue = (np.abs(pixels - (0x9E, 0xC9, 0xFF)).max(-1) < 3)[:, 110:]
    lengths = [int(blue[28 * i + 4 : 28 * i + 24].any(0).sum()) for i in range(3)]
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=3) and lengths[2] <= 1


# --- Tiny YOLOv2

ANCHORS = [(1.08, 1.19), (3.42, 4.41), (6.63, 11.38), (9.42, 5.11), (16.62, 10.52)]
Box = tuple[float, float, float, float]


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def quiet() -> np.ndarray:
    """An output without objects: every confidence is about 0."""
    out = np.zeros((1, 125, 13, 13), F)
    out[0, 4::25] = -30
    return out


def put(out: np.ndarray, box: Box, number: int, score: float, anchor: int, size: tuple[int, int]) -> None:
    """Write the values whose box is (left, top, right, bottom) in pixels of a picture."""
    left, top, right, bottom = (v * 13 / n for v, n in zip(box, (*size, *size), strict=True))
    x, y, first = (left + right) / 2, (top + bottom) / 2, 25 * anchor
    cell = out[0, :, int(y), int(x)]
    cell[first : first + 2] = logit(x - int(x)), logit(y - int(y))
    cell[first + 2 : first + 4] = math.log((right - left) / ANCHORS[anchor][0]), math.log((bottom - top) / ANCHORS[anchor][1])
    cell[first + 4] = logit(score)
    cell[first + 5 : first + 25] = -40
    cell[first + 5 + number] = 40


def test_known_boxes(load: Any) -> None:
    """Of two that overlap by 0.6, the better; of two classes, or that overlap by 0.3, both; none below the threshold."""
    yolo, size, out = load("tiny_yolov2"), (640, 480), quiet()
    dog, person = yolo.CLASSES.index("dog"), yolo.CLASSES.index("person")
    put(out, (100, 100, 200, 200), dog, 0.9, 1, size)
    put(out, (125, 100, 225, 200), dog, 0.8, 2, size)  # 75 of 125: suppressed
    put(out, (100, 100, 200, 201), person, 0.7, 3, size)
    put(out, (300, 100, 400, 200), dog, 0.85, 0, size)
    put(out, (354, 100, 454, 200), dog, 0.75, 1, size)  # 46 of 154
    put(out, (500, 300, 600, 400), dog, 0.49, 2, size)
    put(out, (-40, 410, 90, 500), person, 0.95, 4, size)  # beyond two edges
    found = yolo.detect(out, size)
    wanted = [("person", 0.95, (0, 410, 90, 480)), ("dog", 0.9, (100, 100, 200, 200)), ("dog", 0.85, (300, 100, 400, 200)),
              ("dog", 0.75, (354, 100, 454, 200)), ("person", 0.7, (100, 100, 200, 201))]  # fmt: skip
    assert [f.name for f in found] == [w[0] for w in wanted]
    for f, (_, score, box) in zip(found, wanted, strict=True):
        assert f.score == pytest.approx(score, abs=1e-5) and f.box == pytest.approx(box, abs=1e-2)
    assert len(yolo.detect(out, size, most=0.65)) == 6 and len(yolo.detect(out, size, threshold=0.4)) == 6
    assert yolo.detect(quiet(), size) == []
    with pytest.raises(InvalidInput, match=r"\(1, 125, rows, columns\)"):
        yolo.detect(out[:, :120], size)


def test_a_box_is_one_object(load: Any) -> None:
    """Of the best class, though another one exceeds the threshold too."""
    yolo, out = load("tiny_yolov2"), quiet()
    put(out, (100, 100, 200, 200), 11, 0.999, 1, (416, 416))
    cell = out[0, :, 4, 4]
    assert cell[25 + 5 + 11] == 40
    cell[25 + 5 + 14] = 40 + math.log(0.8)  # 1 : 0.8
    (found,) = yolo.detect(out, (416, 416), threshold=0.3)
    assert found.name == "dog" and found.score == pytest.approx(0.999 / 1.8, abs=1e-4)


def test_a_chain_of_overlaps(load: Any) -> None:
    """The second is suppressed by the first, so the third, which overlaps only the second, remains."""
    yolo, size, out = load("tiny_yolov2"), (416, 416), quiet()
    for i, left in enumerate((100, 130, 160)):
        put(out, (left, 100, left + 100, 200), 0, 0.9 - i / 10, i, size)
    assert [f.box[0] for f in yolo.detect(out, size)] == pytest.approx([100, 160], abs=1e-3)


def overlap(a: Box, b: Box) -> float:
    wide, high = max(min(a[2], b[2]) - max(a[0], b[0]), 0), max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    areas = [(right - left) * (bottom - top) for left, top, right, bottom in (a, b)]
    return wide * high / (sum(areas) - wide * high)


def searched(out: np.ndarray, size: tuple[int, int], threshold: float) -> list[tuple[int, float, Box]]:
    """The objects, cell by cell."""
    every = []
    for row in range(13):
        for column in range(13):
            for b, (wide, high) in enumerate(ANCHORS):
                tx, ty, tw, th, tc, *scores = (float(v) for v in out[0, 25 * b : 25 * b + 25, row, column])
                x, y = (column + 1 / (1 + math.exp(-tx))) * size[0] / 13, (row + 1 / (1 + math.exp(-ty))) * size[1] / 13
                w, h = math.exp(tw) * wide * size[0] / 13, math.exp(th) * high * size[1] / 13
                p = softmax(scores)
                score = max(p) / (1 + math.exp(-tc))
                if score > threshold:
                    every.append((p.index(max(p)), score, (x - w / 2, y - h / 2, x + w / 2, y + h / 2)))
    kept: list[tuple[int, float, Box]] = []
    for number, score, box in sorted(every, key=lambda e: -e[1]):
        if all(n != number or overlap(box, other) <= 0.45 for n, _, other in kept):
            kept.append((number, score, box))
    return [(n, s, (*(min(max(v, 0), e) for v, e in zip(b, (*size, *size), strict=True)),)) for n, s, b in kept]  # type: ignore[misc]


def test_objects_in_a_picture(go: Any, load: Any, oracle: Oracle) -> None:
    image = Image.open("one.png")
    small = np.asarray(image.resize((416, 416), Image.Resampling.BILINEAR), F).transpose(2, 0, 1)[None]
    (out,) = oracle.run(written("tiny_yolov2"), {"data": np.ascontiguousarray(small)}).values()
    wanted = searched(out, image.size, 0.3)
    assert 5 < len(wanted) < len(searched(out, image.size, 0.2))
    done = go("tiny_yolov2", "one.png", "--threshold", "0.3", "--output", "result.png")
    rows = re.findall(r"^  (\d\.\d{4})  (\w+)  (\S+) (\S+) (\S+) (\S+)$", done.out, re.M)
    assert done.code == 0 and f"one.png: {len(wanted)} objects" in done.out and len(rows) == len(wanted)
    names = load("tiny_yolov2").CLASSES
    for (score, name, *box), (number, value, edges) in zip(rows, wanted, strict=True):
        assert name == names[number] and float(score) == pytest.approx(value, abs=2e-4)
        assert [float(v) for v in box] == pytest.approx(edges, abs=0.2)
    assert Image.open("result.png").size == image.size


def test_boxes_are_drawn(load: Any) -> None:
    yolo = load("tiny_yolov2")
    found = [yolo.Found("cat", 0.8, (40.0, 60.0, 120.0, 140.0))]
    pixels = np.asarray(yolo.drawn(Image.new("RGB", (300, 200)), found)).astype(int)
    colour = tuple(int(yolo.PALETTE[7][i : i + 2], 16) for i in (1, 3, 5))
    assert all(tuple(pixels[y, x]) == colour for x, y in ((40, 120), (120, 120), (100, 140), (110, 60)))
    assert not pixels[125, 60:110].any() and not pixels[:, 130:].any()


# --- ArcFace


def face(path: str) -> np.ndarray:
    image = Image.open(path)
    short = min(image.size)
    image = image.resize(tuple(round(n * 112 / short) for n in image.size), Image.Resampling.BILINEAR)
    left, top = (image.width - 112) // 2, (image.height - 112) // 2
    return np.asarray(image.crop((left, top, left + 112, top + 112)), F).transpose(2, 0, 1)[None].copy()


def test_faces_are_compared(go: Any, oracle: Oracle) -> None:
    a, b = (next(iter(oracle.run(written("arcface"), {"data": face(p)}).values()))[0].tolist() for p in ("one.png", "two.png"))
    la, lb = (math.sqrt(sum(v * v for v in vector)) for vector in (a, b))
    distance = sum((x / la - y / lb) ** 2 for x, y in zip(a, b, strict=True))
    cosine = sum(x / la * y / lb for x, y in zip(a, b, strict=True))
    done = go("arcface", "one.png", "two.png")
    found = re.search(r"^squared distance (\S+), cosine (\S+): (.*)$", done.out, re.M)
    assert done.code == 0 and found is not None
    assert [float(found[1]), float(found[2])] == pytest.approx([distance, cosine], abs=2e-4)
    assert 0.01 < distance < 4 and found[3] == ("the same face" if cosine >= 0.3 else "different faces")
    turned = cosine + 0.01 if cosine >= 0.3 else cosine - 0.01
    assert found[3] not in go("arcface", "one.png", "two.png", "--threshold", turned).out
    assert "squared distance 0.0000, cosine 1.0000: the same face" in go("arcface", "one.png", "one.png").out
    one = go("arcface", "one.png")
    assert one.code == 2 and "there must be two pictures, got 1" in one.err


def test_two_faces_are_one_batch_if_the_model_permits(load: Any) -> None:
    """A file with an open batch runs once, one for single pictures twice; the vectors are the same."""
    images = load("images")
    x = np.random.default_rng(0).uniform(0, 255, (2, 3, 112, 112)).astype(F)
    sample = Tensor(data=x[:1], requires_grad=False, name="data")
    fixed = sonnx.export(built("arcface"), [sample], opset=8)
    free = sonnx.export(built("arcface"), [sample], opset=8, dynamic_axes={"data": {0: "n"}})
    found = []
    for rep in (sonnx.prepare(fixed), sonnx.prepare(free)):
        sizes: list[int] = []

        class Counted:
            inputs = rep.inputs

            def run(self, xs: list[np.ndarray], rep: Any = rep, sizes: list[int] = sizes) -> Any:
                sizes.append(len(xs[0]))
                return rep.run(xs)

        found.append((images.run(Counted(), x), sizes))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert [sizes for _, sizes in found] == [[1, 1], [2]]


def test_the_form_of_the_published_file(oracle: Oracle) -> None:
    """Its normalizations have `spatial=0` with a scale for each channel, and its slopes are reshaped by nodes."""
    proto = onnx.load_from_string(written("arcface"))
    x = np.random.default_rng(0).uniform(0, 255, (1, 3, 112, 112)).astype(F)
    (wanted,) = oracle.run(written("arcface"), {"data": x}).values()
    graph, slopes = proto.graph, {t.name: t for t in proto.graph.initializer if t.name.endswith("slope")}
    graph.initializer.append(numpy_helper.from_array(np.array([-1, 1, 1]), "of a channel"))
    del proto.graph.input[1:]
    proto.ir_version = 4
    nodes = []
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(helper.make_attribute("spatial", 0))
        elif node.op_type == "PRelu":
            slope = slopes[node.input[1]]
            slope.dims[:] = [slope.dims[0]]
            nodes.append(helper.make_node("Reshape", [slope.name, "of a channel"], [f"{slope.name} reshaped"]))
            node.input[1] = f"{slope.name} reshaped"
        nodes.append(node)
    assert len(slopes) == 50 == sum(n.op_type == "Reshape" for n in nodes)
    made = helper.make_graph(nodes, "published", graph.input, graph.output, graph.initializer)
    (found,) = sonnx.prepare(helper.make_model(made, opset_imports=proto.opset_import, ir_version=4)).run([x])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_vectors_are_normalised(load: Any) -> None:
    arcface = load("arcface")
    np.testing.assert_allclose(arcface.embedded(np.array([[3, 4], [0, 0]], F)), [[0.6, 0.8], [0, 0]])
    assert arcface.compared(np.array([[3, 4], [-8, 6]], F)) == pytest.approx((2, 0), abs=1e-7)
    assert arcface.compared(np.array([[1, 0], [-7, 0]], F)) == pytest.approx((4, -1))


# --- FER+


def test_emotions(go: Any, oracle: Oracle) -> None:
    labels = ["neutral", "happiness", "surprise", "sadness", "anger", "disgust", "fear", "contempt"]
    grey = Image.open("two.png").convert("L").resize((64, 64), Image.Resampling.BILINEAR)
    (y,) = oracle.run(written("ferplus"), {"data": np.asarray(grey, F)[None, None].copy()}).values()
    wanted = softmax(y)
    done = go("ferplus", "two.png", "--plot", "result.png")
    rows = re.findall(r"^  (\d\.\d{4})  (\w+)$", done.out, re.M)
    assert [n for _, n in rows] == sorted(labels, key=lambda n: -wanted[labels.index(n)])
    for value, name in rows:
        assert float(value) == pytest.approx(wanted[labels.index(name)], abs=1e-4)
    assert Image.open("result.png").format == "PNG"


# --- super-resolution


def whole(y: np.ndarray) -> np.ndarray:
    """The net on the whole picture at once."""
    found = tensor.to_numpy(built("super_resolution").forward(Tensor(data=y[None, None], requires_grad=False)))
    return found[0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(224, 224), (224, 225), (300, 260)])
def test_tiles_are_the_whole_picture(shape: tuple[int, int], load: Any) -> None:
    y = np.random.default_rng(1).random(shape, F)
    found = load("super_resolution").enlarged(sonnx.prepare(written("super_resolution")), y)
    np.testing.assert_allclose(found, whole(y), rtol=1e-4, atol=1e-5)


def test_a_small_picture_is_continued_by_its_edges(load: Any) -> None:
    y = np.random.default_rng(1).random((100, 60), F)
    found = load("super_resolution").enlarged(sonnx.prepare(written("super_resolution")), y)
    assert found.shape == (300, 180)
    np.testing.assert_allclose(found, whole(np.pad(y, [(0, 124), (0, 164)], mode="edge"))[:300, :180], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[:276, :156], whole(y)[:276, :156], rtol=1e-4, atol=1e-5)  # away from these edges


@pytest.mark.parametrize("length", [1, 223, 224, 225, 240, 431, 432, 433, 1000])
def test_tiles_cover_every_pixel_once_and_keep_their_margin(length: int, load: Any) -> None:
    made = load("super_resolution").tiles(length, 224)
    assert [p for _, a, b in made for p in range(a, b)] == list(range(length))
    for start, a, b in made:
        assert 0 <= start <= a < b <= start + 224 and (start + 224 <= length or len(made) == 1)
        assert a == 0 or a - start >= 8
        assert b == length or start + 224 - b >= 8


def test_a_picture_is_enlarged(go: Any, oracle: Oracle) -> None:
    image = Image.open("one.png").crop((20, 10, 244, 234))
    image.save("square.png")
    done = go("super_resolution", "square.png", "--output", "large.png")
    assert done.code == 0 and "square.png: 224 x 224 to 672 x 672" in done.out
    y, cb, cr = image.convert("YCbCr").split()
    (out,) = oracle.run(written("super_resolution"), {"data": np.asarray(y, F)[None, None] / F(255)}).values()
    light = np.array([[min(max(round(float(v) * 255), 0), 255) for v in row] for row in out[0, 0]], np.uint8)
    colours = [c.resize((672, 672), Image.Resampling.BICUBIC) for c in (cb, cr)]
    wanted = np.asarray(Image.merge("YCbCr", [Image.fromarray(light), *colours]).convert("RGB")).astype(int)
    assert np.abs(np.asarray(Image.open("large.png")).astype(int) - wanted).max() <= 2  # a value near .5 may be rounded otherwise
    assert len(np.unique(light)) > 20
    go("super_resolution", "two.png")
    assert Image.open("large.png").size == (750, 1020)
