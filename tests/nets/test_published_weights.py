"""The programs with published weights on inputs with a known answer, and every value of their models against onnxruntime.

The models are files of packages that tox.ini installs.  Outside of tox and CI the tests skip where a package is not installed.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import sys
import wave
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper
from tests.helpers import zoo_programs

from singa import sonnx
from singa_backend.backend import Outputs
from singa_backend.conform import foreign
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput, InvalidModel, MissingDependency

pytest.importorskip("PIL")
from PIL import Image
from tests.helpers import published_inputs as inputs
from tests.helpers.paths import PROJECT

with pytest.MonkeyPatch.context() as patch:
    read_text, detect_speech, file_type, transcribe_notes, packaged, published, sound = (
        zoo_programs.module(patch, name)
        for name in ("read_text", "detect_speech", "file_type", "transcribe_notes", "packaged", "published", "sound")
    )

F = np.float32
PACKAGES = {p.name: p for p in (read_text.RAPID, detect_speech.VOICES, file_type.MAGIKA, transcribe_notes.PITCH)}
MODELS = {
    "detector": (read_text.RAPID, read_text.DETECTOR),
    "angles": (read_text.RAPID, read_text.ANGLES),
    "reader": (read_text.RAPID, read_text.READER),
    "speech": (detect_speech.VOICES, detect_speech.FILE),
    "kinds": (file_type.MAGIKA, file_type.FILE),
    "notes": (transcribe_notes.PITCH, transcribe_notes.FILE),
}
REQUIRED = os.environ.get("CI", "false").lower() not in ("", "0", "false") or "TOX_ENV_NAME" in os.environ


def path_of(model: str) -> Path:
    """The file of a model; without its package the test skips, or fails where the packages must be installed."""
    package, file = MODELS[model]
    try:
        return package.file(file)  # type: ignore[no-any-return]
    except MissingDependency as error:
        if REQUIRED:
            raise
        pytest.skip(str(error))


class Peer:
    """onnxruntime, called as the programs call a SingaRep."""

    def __init__(self, oracle: Oracle, path: Path) -> None:
        self.oracle, self.path = oracle, path
        self.names = [v.name for v in onnx.load(path).graph.input]

    def run(self, given: Any) -> Outputs:
        feeds = given if isinstance(given, dict) else dict(zip(self.names, given, strict=True))
        out = self.oracle.run(self.path, feeds)
        return Outputs(list(out.values()), list(out))


@pytest.fixture(params=["sonnx", "onnxruntime"])
def engine(request: pytest.FixtureRequest, oracle: Oracle) -> Callable[[str], Any]:
    """From the name of a model to an engine that runs it."""
    if request.param == "sonnx":
        return lambda model: sonnx.prepare(path_of(model))
    return lambda model: Peer(oracle, path_of(model))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """A program as a user runs it; none of them imports a package of a model."""
    yield lambda *options: zoo_programs.run(monkeypatch, capsys, *options)
    assert not {name.replace("-", "_") for name in PACKAGES} & set(sys.modules)


# --- every value ----------------------------------------------------------------------------------------------------------


def inlined(path: Path, feeds: dict[str, np.ndarray]) -> ModelProto:
    """The model with every If replaced by the nodes of the branch that these inputs choose, so that all values can be outputs."""
    model = onnx.load(path)
    nodes = model.graph.node
    while (at := next((i for i, n in enumerate(nodes) if n.op_type == "If"), None)) is not None:
        node = nodes[at]
        chosen = sonnx.prepare(model).run(feeds, aux_output=[node.input[0]])[node.input[0]].item()
        (branch,) = [a.g for a in node.attribute if a.name == ("then_branch" if chosen else "else_branch")]
        ends = [helper.make_node("Identity", [o.name], [n]) for o, n in zip(branch.output, node.output, strict=True)]
        model.graph.initializer.extend(branch.initializer)
        rest = [*nodes[:at], *branch.node, *ends, *nodes[at + 1 :]]
        del nodes[:]
        nodes.extend(rest)
    return model


def feeds_of(model: str) -> list[np.ndarray]:
    """The inputs of a model as its program prepares them."""
    page, places = inputs.page()
    strip = page.crop((0, 20, 640, 180))
    if model == "detector":
        return [read_text.detector_input(strip, 160)]
    if model in ("angles", "reader"):
        width = read_text.ANGLE_WIDTH if model == "angles" else read_text.NARROWEST
        return [read_text.row(page.crop(tuple(map(int, places["1,385.60"]))), width)]
    if model == "speech":
        state = np.tanh(np.random.default_rng(2).standard_normal((2, 1, detect_speech.SIZE))).astype(F)
        return [inputs.speech()[0][None, 20000:20576], state, np.array(detect_speech.RATE)]
    if model == "kinds":  # of a file without padding: the model's variances of equal tokens are differences of equal numbers
        config, data = file_type.Config.read(file_type.MAGIKA.file(file_type.CONFIG)), inputs.kinds()["jpeg"]
        return [file_type.features(data[:4096], data[-4096:], config)[None]]
    return [inputs.melody()[0][None, 70000 : 70000 + transcribe_notes.WINDOW, None]]


BOUNDS = {"kinds": 2 * foreign.BOUND}
"""Larger bounds: one variance of `kinds` is a difference, where onnxruntime's error is 1.6e-4 and ours 1e-5, against float64."""


@pytest.mark.parametrize("model", MODELS)
def test_every_value_against_onnxruntime(model: str, oracle: Oracle) -> None:
    path = path_of(model)
    proto = onnx.load(path)
    feeds = dict(zip([v.name for v in proto.graph.input], feeds_of(model), strict=True))
    flat = inlined(path, feeds) if model == "speech" else proto
    found = foreign.compare_with_onnxruntime(model, flat, feeds, oracle)
    assert found.worst[2] <= BOUNDS.get(model, foreign.BOUND), found.worst
    makers = {o for n in flat.graph.node if n.op_type != "Constant" for o in n.output if o}
    assert makers == found.values.keys() | found.outputs.keys() and len(makers) > 80
    whole, theirs = sonnx.prepare(path).run(feeds), oracle.run(path, feeds)  # the file itself, by a plan and optimised
    assert max(foreign.error(whole[n], theirs[n]) for n in theirs) <= foreign.BOUND


def test_inlining_keeps_the_outputs_of_the_file() -> None:
    path = path_of("speech")
    feeds = dict(zip(["input", "state", "sr"], feeds_of("speech"), strict=True))
    flat = inlined(path, feeds)
    assert len(onnx.load(path).graph.node) == 5 and not any(n.op_type == "If" for n in flat.graph.node)
    mine, kept = sonnx.prepare(flat).run(feeds), sonnx.prepare(path).run(feeds)
    assert all(foreign.error(mine[n], kept[n]) <= 1e-6 for n in ("output", "stateN"))


# --- text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("angle", [0, 180, 5], ids=["upright", "upside-down", "tilted"])
def test_a_page_is_read_back(angle: int, engine: Callable[[str], Any]) -> None:
    page, places = inputs.page()
    shown = page.rotate(angle, Image.Resampling.BICUBIC, fillcolor="white")
    reps = [engine(model) for model in ("detector", "angles", "reader")]
    rows = read_text.read_page(*reps, read_text.characters(path_of("reader")), shown)
    assert [[line.text for line in row] for row in rows] == [[text for text, *_ in row] for row in inputs.PAGE]
    turn, middle = math.radians(angle), np.array(page.size) / 2
    for line in (line for row in rows for line in row):
        assert line.score > 0.8 and line.turned == (angle == 180)
        left, top, right, bottom = places[line.text]
        where = np.array([(left + right) / 2, (top + bottom) / 2]) - middle  # rotated anticlockwise, with y downwards
        where = where @ [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]] + middle
        np.testing.assert_allclose(line.corners.mean(0), where, atol=4)
        a, b, _, d = line.corners
        np.testing.assert_allclose([math.dist(a, b), math.dist(a, d)], [right - left, bottom - top], atol=14)


def test_the_program_that_reads_text(run: Callable[..., Any], tmp_path: Path) -> None:
    path_of("reader")
    inputs.page()[0].save(tmp_path / "page.png")
    done = run("read_text", tmp_path / "page.png", "--boxes", "--output", tmp_path / "boxes.png")
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if "SHA-256" not in line and "wrote" not in line]
    assert [line for line in lines if line[0] != " "] == [" ".join(text for text, *_ in row) for row in inputs.PAGE]
    boxes = [line for line in lines if re.match(r"    0\.\d{3}( \(\d+, \d+\)){4}$", line)]
    assert len(boxes) == sum(map(len, inputs.PAGE))
    drawn = Image.open(tmp_path / "boxes.png")
    assert drawn.size == (1280, 400)
    x, y = map(int, re.findall(r"\((\d+), (\d+)\)", boxes[0])[0])
    near = np.asarray(drawn)[y - 2 : y + 3, x - 2 : x + 3].reshape(-1, 3)
    assert any(tuple(p) == (0xE6, 0x19, 0x4B) for p in near.tolist())
    assert (np.asarray(drawn)[:, 640:] != 255).any()
    Image.new("RGB", (200, 100), "white").save(tmp_path / "empty.png")
    assert "SHA-256" in run("read_text", tmp_path / "empty.png").out.splitlines()[-1]


def test_parts_of_a_mask_against_a_flood() -> None:
    generator = np.random.default_rng(3)
    for density in (0.1, 0.35, 0.5, 0.9):
        mask = generator.random((23, 31)) < density
        left, floods = {(x, y) for y, x in np.argwhere(mask).tolist()}, []
        while left:
            front = [left.pop()]
            flood = set(front)
            while front:
                x, y = front.pop()
                near = {(x + i, y + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
                left -= near
                flood |= near
                front += near
            floods.append(flood)
        parts = read_text.components(mask)
        assert len(parts) == len(floods)
        for part in parts:
            points = {tuple(p) for p in part.tolist()}
            (flood,) = [f for f in floods if points & f]
            rows = {y: sorted(x for x, yy in flood if yy == y) for _, y in flood}
            assert points <= flood and all({(r[0], y), (r[-1], y)} <= points for y, r in rows.items())
    assert read_text.components(np.zeros((4, 4), bool)) == []


def test_the_smallest_rectangle_against_all_angles() -> None:
    generator = np.random.default_rng(4)
    for _ in range(20):
        points = generator.integers(0, 60, (generator.integers(3, 40), 2))
        box = read_text.smallest_box(points)
        areas = []
        for turn in np.radians(np.arange(0, 90, 0.05)):
            u, v = points @ [math.cos(turn), math.sin(turn)], points @ [-math.sin(turn), math.cos(turn)]
            areas.append(np.ptp(u) * np.ptp(v))
        assert box.width * box.height <= min(areas) + 1e-6 and box.width * box.height > 0.98 * min(areas) - 1e-6
        a, b, c, d = box.corners()
        for start, end in ((a, b), (b, c), (c, d), (d, a)):  # clockwise on a page, whose y axis goes down
            across = np.array([start[1] - end[1], end[0] - start[0]]) / max(math.dist(start, end), 1e-9)
            assert ((points - start) @ across >= -1e-6).all()
        assert a[0] <= b[0] and a[1] <= d[1]


def test_the_mean_within_a_rectangle() -> None:
    values = np.random.default_rng(5).random((30, 40))
    box = read_text.Box(np.array([18.0, 12.0]), 15.0, 6.0, np.array([math.cos(0.3), math.sin(0.3)]))
    inside = []
    for y in range(30):
        for x in range(40):
            u = (x - 18) * math.cos(0.3) + (y - 12) * math.sin(0.3)
            v = (y - 12) * math.cos(0.3) - (x - 18) * math.sin(0.3)
            if abs(u) <= 7.5 and abs(v) <= 3:
                inside.append(values[y, x])
    assert box.mean(values) == pytest.approx(sum(inside) / len(inside))


def test_boxes_of_a_map_of_probabilities() -> None:
    found = np.zeros((100, 200), F)
    found[20:30, 40:120] = 0.9
    found[60:70, 40:120] = 0.4  # text perhaps, but not on average
    found[90:91, 5:6] = 1  # a dot
    (box,) = read_text.boxes(found)
    # Its core has the sides 80 and 10, measured between the centres of pixels, with the neighbours after them.
    by = 2.0 * 80 * 10 / (2 * (80 + 10))
    np.testing.assert_allclose([box.width, box.height], [80 + 2 * by, 10 + 2 * by])
    np.testing.assert_allclose(box.centre, [80, 25])


def test_boxes_in_pixels_of_the_page() -> None:
    class Detector:
        def run(self, given: list[np.ndarray]) -> list[np.ndarray]:
            found = np.zeros((1, 1, *given[0].shape[2:]), F)
            found[0, 0, 31:96, 63:192] = 1  # with the neighbours after them, pixels 31 to 96 and 63 to 192
            return [found]

    (corners,) = read_text.find_lines(Detector(), Image.new("RGB", (512, 128)), 256)
    by = 2.0 * 129 * 65 / (2 * (129 + 65))
    left, right, top, bottom = 63.5 - by, 192.5 + by, 31.5 - by, 96.5 + by  # of an input of 1024 x 256
    wanted = np.array([[left, top], [right, top], [right, bottom], [left, bottom]]) / 2
    np.testing.assert_allclose(corners, np.clip(wanted, 0, (512, 128)))


def test_characters_and_repetitions() -> None:
    steps = ["", "a", "a", "", "a", "b", "b", " ", "", "c"]
    alphabet = ["", "a", "b", "c", " "]
    rows = np.full((len(steps), 5), 0.05, F)
    for row, c in zip(rows, steps, strict=True):
        row[alphabet.index(c)] = 0.8
    rows[2] = 0.1  # of two equal ones in a row the first counts
    rows[2, 1] = 0.6
    text, score = read_text.decoded(rows, alphabet)
    assert text == "aab c" and score == pytest.approx(0.8)
    assert read_text.decoded(np.eye(5, dtype=F)[[0, 0]], alphabet) == ("", 0.0)
    with pytest.raises(InvalidModel, match="5 outputs for 4 characters"):
        read_text.decoded(rows, alphabet[:4])


def test_characters_are_the_metadata_of_the_reader(tmp_path: Path) -> None:
    x = [helper.make_tensor_value_info(n, 1, ["N"]) for n in "xy"]
    model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", x[:1], x[1:]))
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(InvalidModel, match="property 'character'"):
        read_text.characters(tmp_path / "net.onnx")
    helper.set_model_props(model, {"character": "a\nb\u2028\nc\n"})
    onnx.save(model, tmp_path / "net.onnx")
    assert read_text.characters(tmp_path / "net.onnx") == ["", "a", "b\u2028", "c", " "]


def test_a_long_strip_gets_margins() -> None:
    strip = Image.new("RGB", (1600, 40), (10, 20, 30))
    page, left, top = read_text.with_margins(strip)
    assert page.size == (1600, 200) and (left, top) == (0, 80) and page.getpixel((0, 0)) == (10, 20, 30)
    assert read_text.with_margins(strip.crop((0, 0, 320, 40)))[0].size == (320, 40)
    assert read_text.detector_input(page, 736).shape == (1, 3, 256, 1984)


def test_pictures_as_inputs() -> None:
    """Blue, green, red; 0 is -1 and 255 is 1; a row has the height 48, and zeros or a squeezed picture in its width."""
    colours = Image.new("RGB", (64, 32), (0, 51, 255))
    np.testing.assert_allclose(read_text.planes(colours)[0, :, 5, 7], [1, -0.6, -1], atol=1e-6)
    assert read_text.detector_input(colours, 64).shape == (1, 3, 64, 128)
    assert read_text.detector_input(Image.new("RGB", (4000, 1000)), 736).shape == (1, 3, 512, 1984)
    row = read_text.row(colours, 200)
    assert row.shape == (1, 3, 48, 200) and (row[0, 0, :, :96] == 1).all() and (row[..., 96:] == 0).all()
    assert (read_text.row(colours, 50)[0, 0] == 1).all()


def test_pieces_are_cut_out_of_a_page() -> None:
    page = Image.new("RGB", (100, 80), "white")
    page.paste((255, 0, 0), (20, 10, 50, 20))
    page.paste((0, 0, 255), (50, 10, 80, 20))
    box = np.array([[20, 10], [80, 10], [80, 20], [20, 20]], np.float64)
    line = np.asarray(read_text.cut(page, box))
    assert line.shape == (10, 60, 3) and (line[:, :28] == (255, 0, 0)).all() and (line[:, 32:] == (0, 0, 255)).all()
    upright = page.transpose(Image.Transpose.ROTATE_270)  # the line runs down
    (x0, y0), (x1, y1) = (80 - 20, 20), (80 - 10, 80)
    turned = np.asarray(read_text.cut(upright, np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float64)))
    np.testing.assert_array_equal(turned, line)
    tilted = page.rotate(20, Image.Resampling.BICUBIC, fillcolor="white")
    turn, middle = math.radians(20), np.array([50, 40])
    where = (box - middle) @ [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]] + middle
    back = np.asarray(read_text.cut(tilted, where)).astype(float)
    assert abs(back[2:-2, 2:26] - (255, 0, 0)).max() < 40 and abs(back[2:-2, 34:-2] - (0, 0, 255)).max() < 40


class Shades:
    """A model that sees how dark the first column of each picture is: 20 for the first output, 40 for the second..."""

    def __init__(self, outputs: int) -> None:
        self.outputs, self.batches = outputs, list[tuple[int, ...]]()

    def run(self, given: list[np.ndarray]) -> list[np.ndarray]:
        (x,) = given
        self.batches.append(x.shape)
        seen = np.round((x[:, 0, 24, 0] + 1) * 127.5 / 20).astype(int) - 1
        return [np.eye(self.outputs, dtype=F)[seen]]


def test_lines_of_several_batches_keep_their_order() -> None:
    widths = [100, 30, 400, 60, 90, 20, 300, 50, 80]
    lines = [Image.new("RGB", (width, 20), (20 * i,) * 3) for i, width in enumerate(widths, 2)]
    model = Shades(11)
    read = read_text.read_lines(_Steps(model), ["", *"abcdefghij"], lines)
    assert "".join(text for text, _ in read) == "abcdefghi"
    assert model.batches == [(6, 3, 48, 320), (3, 3, 48, 960)]
    lines = [Image.new("RGB", (100, 20), (20 * (1 + i % 2),) * 3) for i in range(8)]
    assert read_text.upside_down(Shades(2), lines) == [False, True] * 4


class _Steps:
    """Answers with one step of text for each picture."""

    def __init__(self, model: Shades) -> None:
        self.model = model

    def run(self, given: list[np.ndarray]) -> list[np.ndarray]:
        return [self.model.run(given)[0][:, None]]


# --- speech ---------------------------------------------------------------------------------------------------------------


def check_speech(pieces: list[tuple[float, float]], spans: list[tuple[float, float]]) -> None:
    """The model hears a phrase within 0.1 s of its start, and until at most 0.25 s after its end."""
    assert len(pieces) == len(spans) == 3
    for (start, end), (begun, ended) in zip(pieces, spans, strict=True):
        assert abs(start - begun) < 0.1 and -0.05 < end - ended < 0.25


def test_pauses_in_speech_are_found(engine: Callable[[str], Any]) -> None:
    samples, spans = inputs.speech()
    found = detect_speech.probabilities(engine("speech"), samples)
    check_speech(detect_speech.segments(found, len(samples) / 16000), spans)
    quiet = detect_speech.probabilities(engine("speech"), 0.001 * np.random.default_rng(1).standard_normal(16000).astype(F))
    assert detect_speech.segments(quiet, 1.0) == [] and len(quiet) == 32  # the last window is not full


def test_the_state_of_a_whole_recording_against_onnxruntime(oracle: Oracle) -> None:
    samples = inputs.speech()[0][:40000]
    ours, theirs = (
        detect_speech.probabilities(rep, samples) for rep in (sonnx.prepare(path_of("speech")), Peer(oracle, path_of("speech")))
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rate", "width"), [(16000, 2), (44100, 3)])
def test_the_program_that_detects_speech(rate: int, width: int, run: Callable[..., Any], tmp_path: Path) -> None:
    path_of("speech")
    samples, spans = inputs.speech(rate)
    both = np.stack([samples, 0.5 * samples], 1) if width == 3 else samples
    (tmp_path / "speech.wav").write_bytes(inputs.wav(both, rate, width))
    done = run("detect_speech", tmp_path / "speech.wav", "--plot", tmp_path / "speech.png")
    assert done.code == 0, done.err
    check_speech([(float(a), float(b)) for a, b in re.findall(r"([\d.]+) s to +([\d.]+) s", done.out)], spans)
    picture = np.asarray(Image.open(tmp_path / "speech.png"))
    columns = (picture == (0x9E, 0xC9, 0xFF)).all(2).any(0)  # of the speech, in time
    seconds = len(samples) / rate
    for begun, ended in spans:
        assert columns[int((begun + 0.15) / seconds * 1000) : int((ended - 0.05) / seconds * 1000)].all()
    for (_, ended), (begun, _) in pairwise(spans):
        assert not columns[int((ended + 0.3) / seconds * 1000) : int((begun - 0.12) / seconds * 1000)].any()


def test_windows_of_speech_and_the_state_between_them() -> None:
    samples = np.arange(1, 1301, dtype=F)

    class Recorder:
        windows: list[np.ndarray] = []  # noqa: RUF012
        state = np.zeros((2, 1, 128), F)

        def run(self, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            assert given["sr"] == 16000 and given["sr"].dtype == np.int64 and given["sr"].shape == ()
            np.testing.assert_array_equal(given["state"], self.state)
            self.windows.append(given["input"])
            self.state = self.state + 1
            return {"output": np.array([[len(self.windows) / 10]], F), "stateN": self.state}

    np.testing.assert_allclose(detect_speech.probabilities(Recorder(), samples), [0.1, 0.2, 0.3])
    first, second, third = Recorder.windows
    assert first.shape == second.shape == third.shape == (1, 576)
    np.testing.assert_array_equal(first[0], [*[0] * 64, *range(1, 513)])
    np.testing.assert_array_equal(second[0], range(449, 1025))
    np.testing.assert_array_equal(third[0], [*range(961, 1301), *[0] * 236])


def test_segments_by_thresholds_and_durations() -> None:
    step = detect_speech.WINDOW / detect_speech.RATE  # 32 ms

    def segments(text: str, **options: Any) -> list[tuple[int, int]]:
        found = [int(c) / 10 for c in text]
        pieces = detect_speech.segments(found, len(found) * step, **{"margin": 0, "shortest": 0, **options})
        return [(round(a / step), round(b / step)) for a, b in pieces]

    assert segments("00999900000") == [(2, 6)]
    assert segments("00494400000") == [(3, 6)]  # begins at 0.5, ends below 0.35
    assert segments("00494400000", release=0.45) == [(3, 4)]
    assert segments("00990099000") == [(2, 11)]  # the pauses are shorter than 0.1 s, the last one too
    assert segments("00990099000", pause=0.03) == [(2, 4), (6, 8)]
    assert segments("00990000090") == [(2, 4), (9, 11)]
    assert segments("00940404000") == [(2, 4)]  # values between the thresholds do not end a pause
    assert segments("00940409000") == [(2, 11)]  # but those above both do
    assert segments("00999900000", shortest=0.2) == []
    assert segments("00000009999") == [(7, 11)]
    assert segments("") == segments("0000") == []
    pieces = detect_speech.segments([0, 1, 1, 0, 0, 0, 0, 0, 1, 1], 10 * step, margin=0.1, shortest=0, pause=0.09)
    np.testing.assert_allclose(pieces, [(0, 5.5 * step), (5.5 * step, 10 * step)])


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width(width: int, tmp_path: Path) -> None:
    x = np.array([[-1, 0.5], [0.25, -0.5], [0, 0], [127 / 128, 127 / 128]])
    (tmp_path / "x.wav").write_bytes(inputs.wav(x, 8000, width))
    found = sound.read(tmp_path / "x.wav", 8000)
    assert found.dtype == F
    np.testing.assert_array_equal(found, x.mean(1).astype(F))


def test_damaged_wav_files(tmp_path: Path) -> None:
    good = inputs.wav(np.zeros(100), 8000)
    header = bytearray(good)
    header[20:22] = struct.pack("<H", 3)  # floats
    slow = bytearray(good)
    slow[24:28] = struct.pack("<I", 1)
    for data, why in (
        (b"", "not a WAV file"), (b"abc", "not a WAV file"), (good[:30], "not a WAV file"), (bytes(header), "ffmpeg"),
        (good[:-20], "ends too early: it must have 100 samples, got 90"), (bytes(slow), "sample rate"),
    ):  # fmt: skip
        (tmp_path / "x.wav").write_bytes(data)
        with pytest.raises(InvalidInput, match=why):
            sound.read(tmp_path / "x.wav", 8000)
    with pytest.raises(InvalidInput, match="No such file"):
        sound.read(tmp_path / "y.wav", 8000)


@pytest.mark.parametrize(("own", "rate"), [(44100, 16000), (48000, 22050), (44100, 22050), (8000, 16000), (11025, 16000)])
def test_other_sample_rates(own: int, rate: int) -> None:
    t, new = np.arange(own) / own, np.arange(rate) / rate
    for frequency in (100.0, 1000.0, 0.35 * min(own, rate)):
        found = sound.resampled(np.sin(2 * np.pi * frequency * t), own, rate)
        assert len(found) == rate
        inner = slice(rate // 20, -rate // 20)
        np.testing.assert_allclose(found[inner], np.sin(2 * np.pi * frequency * new)[inner], atol=2e-4)
    if own > rate:  # what the new rate cannot hold must not appear as another tone
        beyond = sound.resampled(np.sin(2 * np.pi * 0.55 * rate * t), own, rate)
        assert abs(beyond[rate // 20 : -rate // 20]).max() < 2e-4
    assert sound.resampled(np.zeros(0), own, rate).shape == (0,)
    assert sound.resampled(np.ones(1), own, rate).shape == (-(-rate // own),)


# --- types of files -------------------------------------------------------------------------------------------------------


def settings() -> tuple[Any, dict[str, Any]]:
    path_of("kinds")
    package = file_type.MAGIKA
    return file_type.Config.read(package.file(file_type.CONFIG)), json.loads(package.file(file_type.KINDS).read_text())


def test_files_of_many_kinds(engine: Callable[[str], Any], tmp_path: Path) -> None:
    config, names = settings()
    paths = inputs.write_kinds(tmp_path)
    found = file_type.verdicts(engine("kinds"), paths.values(), config, names)
    assert [v.label for v in found] == list(paths) and len(paths) > 40
    assert min(v.score for v in found) > 0.8


def test_scores_of_many_kinds_against_onnxruntime(oracle: Oracle) -> None:
    config, _ = settings()
    given = [np.stack([file_type.features(d[:4096], d[-4096:], config) for d in inputs.kinds().values()])]
    ours, theirs = sonnx.prepare(path_of("kinds")).run(given)[0], Peer(oracle, path_of("kinds")).run(given)[0]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_the_program_that_names_types(run: Callable[..., Any], tmp_path: Path) -> None:
    path_of("kinds")
    paths = inputs.write_kinds(tmp_path)
    for name, data in (("nothing", b""), ("word", b"hi\n"), ("byte", b"\xff\xfe\xfd"), ("blank", b" \n" * 5000)):
        (tmp_path / name).write_bytes(data)
    others = {"nothing": "empty", "word": "txt", "byte": "unknown", "blank": "txt", ".": "directory"}
    files = [paths["elf"], paths["python"], *(tmp_path / n for n in others)]
    done = run("file_type", *files)
    assert done.code == 0, done.err
    lines = done.out.splitlines()[1:]  # after the model's checksum
    assert [re.match(r".*?: (\w+) \(", line)[1] for line in lines] == ["elf", "python", *others.values()]  # type: ignore[index]
    assert "application/x-executable-elf" in lines[0]
    answer = json.loads(run("file_type", "--json", *files).out.partition("\n")[2])
    assert [a["label"] for a in answer] == ["elf", "python", *others.values()]
    assert answer[1]["guess"] == "python" and answer[2]["guess"] == "" and answer[2]["score"] == 1
    assert run("file_type", tmp_path / "absent").code == published.FAILED


def test_bytes_that_the_model_reads() -> None:
    config = file_type.Config(4, 3, 256, 16, 2, ["a", "b"], 0.5, {}, {})
    assert file_type.features(b" \nabcdef", b"uvwxyz\t ", config).tolist() == [97, 98, 99, 100, 120, 121, 122]
    assert file_type.features(b"ab\n", b"ab\n", config).tolist() == [97, 98, 10, 256, 256, 97, 98]
    assert file_type.features(b"  ab", b"  ab", config).tolist() == [97, 98, 256, 256, 32, 97, 98]


def test_files_of_several_batches_keep_their_order(tmp_path: Path) -> None:
    config = file_type.Config(4, 3, 256, 16, 2, [chr(97 + i) for i in range(26)], 0.5, {}, {})

    class First:
        sizes: list[int] = []  # noqa: RUF012

        def run(self, given: list[np.ndarray]) -> list[np.ndarray]:
            self.sizes.append(len(given[0]))
            return [np.eye(26, dtype=F)[given[0][:, 0] - 97]]

    paths = []
    for i in range(150):
        paths.append(tmp_path / str(i))
        paths[-1].write_text(chr(97 + i % 26) * 5 if i % 10 else "")
    found = file_type.verdicts(First(), paths, config, {})
    assert [v.label for v in found] == [chr(97 + i % 26) if i % 10 else "empty" for i in range(150)]
    assert First.sizes == [64, 64, 7]


def test_which_labels_are_believed() -> None:
    config = file_type.Config(4, 3, 256, 16, 2, ["png", "sql", "random"], 0.5, {"sql": 0.9}, {"random": "unknown"})
    names = {"png": {"is_text": False}, "sql": {"is_text": True}, "unknown": {"is_text": False}}

    def label(scores: list[float], mode: str) -> str:
        return file_type.judged(np.array(scores, F), config, names, mode).label  # type: ignore[no-any-return]

    assert [label([0.6, 0.3, 0.1], m) for m in file_type.MODES] == ["png", "png", "png"]
    assert [label([0.4, 0.3, 0.3], m) for m in file_type.MODES] == ["unknown", "unknown", "png"]
    assert [label([0.1, 0.8, 0.1], m) for m in file_type.MODES] == ["txt", "sql", "sql"]
    assert [label([0.1, 0.1, 0.8], m) for m in file_type.MODES] == ["unknown"] * 3
    verdict = file_type.judged(np.array([0.1, 0.8, 0.1], F), config, names)
    assert (verdict.label, verdict.guess, verdict.score) == ("txt", "sql", pytest.approx(0.8))


def test_a_model_that_reads_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.min.json"
    path.write_text(json.dumps({"mid_size": 1024, "use_inputs_at_offsets": False}))
    with pytest.raises(InvalidModel, match="the beginning and the end"):
        file_type.Config.read(path)
    path.write_text("{}")
    with pytest.raises(InvalidInput, match=r"config\.min\.json"):
        file_type.Config.read(path)


# --- notes ----------------------------------------------------------------------------------------------------------------


def check_notes(found: list[tuple[float, float, int]]) -> None:
    """Pitches are those of the melody, and times within 50 ms."""
    played = inputs.melody()[1]
    assert [pitch for *_, pitch in found] == [pitch for *_, pitch in played]
    np.testing.assert_allclose([times for *times, _ in found], [times for *times, _ in played], atol=0.05)


def test_a_melody_is_written_down(engine: Callable[[str], Any]) -> None:
    samples, _ = inputs.melody()
    notes = transcribe_notes.found_notes(*transcribe_notes.posteriorgrams(engine("notes"), samples))
    check_notes([(n.start, n.end, n.pitch) for n in notes])
    assert transcribe_notes.found_notes(*transcribe_notes.posteriorgrams(engine("notes"), np.zeros(1000, F))) == []


def parsed(data: bytes) -> list[tuple[float, float, int]]:
    """The notes of a MIDI file of one track, read by the rules of its format."""
    kind, size, form, tracks, quarter = struct.unpack(">4sIHHH", data[:14])
    name, length = struct.unpack(">4sI", data[14:22])
    assert (kind, size, form, tracks, name, length) == (b"MThd", 6, 0, 1, b"MTrk", len(data) - 22)
    file, now, tempo, open_notes, notes = io.BytesIO(data[22:]), 0.0, 500_000, dict[int, float](), []
    while True:
        delta = 0
        while (byte := file.read(1)[0]) & 128:
            delta = delta << 7 | byte & 127
        now += (delta << 7 | byte) * tempo / 1e6 / quarter
        status = file.read(1)[0]
        if status == 0xFF:
            what, count = file.read(2)
            body = file.read(count)
            if what == 0x2F:
                assert not file.read() and not open_notes
                return sorted(notes)
            assert what == 0x51
            tempo = int.from_bytes(body, "big")
            continue
        pitch, velocity = file.read(2)
        if status == 0x90:
            assert pitch not in open_notes and 0 < velocity < 128
            open_notes[pitch] = now
        else:
            assert status == 0x80
            notes.append((open_notes.pop(pitch), now, pitch))


def test_the_program_that_writes_notes_down(run: Callable[..., Any], tmp_path: Path) -> None:
    path_of("notes")
    samples, played = inputs.melody()
    (tmp_path / "song.wav").write_bytes(inputs.wav(samples, 22050))
    done = run("transcribe_notes", tmp_path / "song.wav", "--midi", tmp_path / "x.mid", "--plot", tmp_path / "x.png")
    assert done.code == 0, done.err
    rows = re.findall(r"([\d.]+) s to +([\d.]+) s  (\S+) +MIDI +(\d+)", done.out)
    check_notes([(float(a), float(b), int(pitch)) for a, b, _, pitch in rows])
    assert [name for _, _, name, _ in rows] == ["C4", "D4", "E4", "G4", "E4", "C4", "C5", "G3"]
    check_notes(parsed((tmp_path / "x.mid").read_bytes()))
    picture = (np.asarray(Image.open(tmp_path / "x.png")) == (0x9E, 0xC9, 0xFF)).all(2)
    rows_of = [np.flatnonzero(picture[:, int((a + b) / 2 / 6 * 1000)]).mean() for a, b, _ in played]
    assert np.argsort(rows_of, kind="stable").tolist() == np.argsort([-p for *_, p in played], kind="stable").tolist()


def test_notes_of_onsets_and_of_what_is_left() -> None:
    times = np.arange(200) / 100
    notes, onsets = np.zeros((2, 200, 88), F)
    notes[10:60, 40], onsets[10, 40] = 0.9, 0.9
    notes[60:90, 40], onsets[60, 40] = 0.8, 0.9  # again, without a pause
    notes[10:60, 41] = 0.4  # a neighbour of a note is part of it
    notes[20:25, 60], onsets[20, 60] = 0.9, 0.9  # too short
    notes[100:150, 50] = np.linspace(0.31, 0.9, 50)  # grows without an onset
    found = transcribe_notes.found_notes(notes, onsets, times)
    assert [(round(n.start, 2), round(n.end, 2), n.pitch) for n in found] == [(0.1, 0.6, 61), (0.6, 0.9, 61), (1.0, 1.5, 71)]
    assert [n.amplitude for n in found] == pytest.approx([0.9, 0.8, np.linspace(0.31, 0.9, 50).mean()])
    assert [n.pitch for n in transcribe_notes.found_notes(notes, onsets, times, rest=False)] == [61, 61]
    gap = notes.copy()
    gap[30:35, 40:42] = 0.1  # shorter than 11 frames
    assert [n.pitch for n in transcribe_notes.found_notes(gap, onsets, times, onset=0.85, rest=False)] == [61, 61]
    assert transcribe_notes.found_notes(notes[:0], onsets[:0], times[:0]) == []


def test_windows_cover_a_recording_without_gaps() -> None:
    class Echo:
        """Returns the samples at the beginning of each frame as the probabilities of notes."""

        def run(self, given: list[np.ndarray]) -> dict[str, np.ndarray]:
            (x,) = given
            assert x.shape == (1, transcribe_notes.WINDOW, 1) and x.dtype == F
            frames = np.repeat(x[:, : 172 * 256 : 256], 88, axis=2)
            return {transcribe_notes.NOTES: frames, transcribe_notes.ONSETS: -frames}

    samples = np.arange(1, 100_001, dtype=F)
    notes, onsets, times = transcribe_notes.posteriorgrams(Echo(), samples)
    np.testing.assert_allclose(notes[:, 3], 1 + times * transcribe_notes.RATE, atol=0.1)
    np.testing.assert_array_equal(onsets, -notes)
    assert times[0] == 0 and np.diff(times).min() > 0 and np.diff(times).max() <= 256.5 / transcribe_notes.RATE
    assert times[-1] * transcribe_notes.RATE > 100_000 - 257


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16383, 16384, 2**28 - 1])
def test_numbers_of_midi_files(value: int) -> None:
    data = transcribe_notes.variable(value)
    assert all(b & 128 for b in data[:-1]) and not data[-1] & 128 and data[0] != 128
    assert sum((b & 127) << 7 * i for i, b in enumerate(reversed(data))) == value


# --- packages -------------------------------------------------------------------------------------------------------------


def test_an_absent_package(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(inputs.wav(np.zeros(100), 16000))
    inputs.page()[0].save(tmp_path / "x.png")

    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    for program, file, package in (
        ("read_text", "x.png", "rapidocr-onnxruntime"), ("detect_speech", "x.wav", "silero-vad"),
        ("transcribe_notes", "x.wav", "basic-pitch"), ("file_type", "x.wav", "magika"),
    ):  # fmt: skip
        done = run(program, tmp_path / file)
        assert done.code == published.FAILED and done.out == ""
        assert PACKAGES[package].command in done.err and "--model PATH" in done.err and "not installed" in done.err


def test_a_package_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "files", lambda name: [])
    monkeypatch.setattr(metadata, "version", lambda name: "9.9")
    with pytest.raises(MissingDependency, match=r"magika 9\.9 has 0 files model\.onnx"):
        file_type.MAGIKA.file("model.onnx")


def test_a_model_of_the_users(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = path_of("speech")
    (tmp_path / "x.wav").write_bytes(inputs.wav(np.zeros(3000), 16000))
    monkeypatch.setattr(metadata, "files", lambda name: [])
    done = run("detect_speech", tmp_path / "x.wav", "--model", path)
    assert done.code == 0 and done.out.endswith("0.00 s of speech in 0.19 s\n")
    assert run("detect_speech", tmp_path / "x.wav", "--model", path, "--sha256", "0" * 64).code == published.FAILED


def test_ci_installs_the_packages_that_the_programs_name() -> None:
    text = (PROJECT / "tox.ini").read_text()
    (command,) = re.findall(r"^commands_pre =\n +py[^:]*: (.*)$", text, re.M)
    assert command.startswith("python -m pip install --no-deps --ignore-requires-python ")
    assert set(command.split()[6:]) == {f"{p.name}=={p.version}" for p in PACKAGES.values()}
    for package in PACKAGES.values():
        if package.name in {d.name for d in metadata.distributions()}:
            assert metadata.version(package.name) == package.version
        else:
            assert not REQUIRED
    for program in ("read_text", "detect_speech", "file_type", "transcribe_notes"):
        about = sys.modules[program].__doc__
        (package,) = [p for p in vars(sys.modules[program]).values() if isinstance(p, packaged.Package)]
        assert about and package.command in about


def test_wav_files_of_the_tests_are_valid() -> None:
    with wave.open(io.BytesIO(inputs.wav(np.array([0.5, -0.5]), 8000))) as file:
        assert file.readframes(2) == struct.pack("<hh", 16384, -16384)
