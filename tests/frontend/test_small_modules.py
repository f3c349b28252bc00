"""SINGA's small modules: progress, padding, the order of a tape, batches of images, augmentation, snapshots."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from tests.helpers import other_device

from singa import autograd, data, image_tool, snapshot, tensor, utils
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor, to_numpy
from singa.data import ImageBatchIter
from singa.device import Device, default_device
from singa.image_tool import ImageTool
from singa.snapshot import Snapshot
from singa_backend import MissingDependency, SingaBackend
from singa_backend.errors import InvalidInput
from singa_backend.proto.messages import FreshNames

F = np.float32


def test_every_module_is_imported_from_singa_and_none_asks_for_pillow() -> None:
    names = "tensor, device, autograd, layer, model, opt, initializer, sonnx, utils, data, image_tool, snapshot"
    code = (
        f"import sys\nsys.modules['PIL'] = None\nfrom singa import {names}\nimport singa_backend\n"
        "tool = image_tool.ImageTool()\nassert not tool.get()\n"
        "try:\n    tool.load('x.png')\nexcept singa_backend.MissingDependency as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "SX700" in done.stdout and "sonnx[image]" in done.stdout
    assert issubclass(MissingDependency, Exception)


# --- utils


@pytest.mark.parametrize(("progress", "line"), [
    (0, "[                    ] 0.0% loss"), (0.5, "[..........          ] 50.0% loss"),
    (np.float32(0.25), "[.....               ] 25.0% loss"), (1, "[....................] 100.0% Done. loss"),
    (7.5, "[....................] 100.0% Done. loss"), (-1, "[                    ] 0.0% Halt. loss"),
])  # fmt: skip
def test_progress(progress: float, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    utils.update_progress(progress, "loss")
    assert capsys.readouterr().out == line + "\n"


def test_progress_on_a_terminal_replaces_its_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    for share in (0.5, 1.0):
        utils.update_progress(share, "x")
    first, second = capsys.readouterr().out.split("\r")[1:]
    assert first.endswith("50.0% x") and second.endswith("100.0% Done. x\n")
    with pytest.raises(TypeError):
        utils.update_progress(None, "x")  # type: ignore[arg-type]


CASES = [(n, k, s) for n in (1, 4, 5, 7, 12) for k in (1, 2, 3, 5) for s in (1, 2, 3)]


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_padding_is_that_of_onnx(mode: str) -> None:
    """A pooling with these pads returns what one with ONNX's auto_pad returns."""
    from onnx import helper

    for n, k, s in CASES:
        if mode == "VALID" and k > n:
            continue
        x = np.random.default_rng(n).standard_normal((1, 1, n)).astype(F)
        even, odd = utils.get_padding_shape(mode, [n], [k], [s])
        begin, end = (e + o for e, o in zip(even, odd, strict=True))
        automatic = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[k], strides=[s], auto_pad=mode)
        (want,) = SingaBackend.run_node(automatic, [x], opset_version=11)
        assert list(want.shape[2:]) == utils.get_output_shape(mode, [n], [k], [s])
        given = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[k], strides=[s], pads=[begin, end])
        (made,) = SingaBackend.run_node(given, [x], opset_version=11)
        np.testing.assert_array_equal(made[..., : want.shape[2]], want, err_msg=f"{n}, {k}, {s}")


def test_padding_of_several_axes() -> None:
    assert utils.get_padding_shape("SAME_UPPER", [5, 6], [4, 3], [2, 1]) == ([1, 1, 1, 1], [0, 1, 0, 0])
    assert utils.get_padding_shape("SAME_LOWER", [5, 6], [4, 3], [2, 1]) == ([1, 1, 1, 1], [1, 0, 0, 0])
    assert utils.get_output_shape("VALID", (8, 9), (3, 2), (2, 4)) == [3, 2]


@pytest.mark.parametrize("arguments", [("FULL", [5], [3], [1]), ("VALID", [5, 5], [3], [1]), ("VALID", [5], [3], [0])])
def test_padding_that_means_nothing(arguments: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        utils.get_padding_shape(*arguments)
    assert caught.value.code == "SX347"


@other_device.runs
@pytest.mark.parametrize("dev", [default_device, Device(other_device.NAME)], ids=["CPU", other_device.NAME])
@pytest.mark.parametrize("odd", [(1, 0, 0, 2), (0, 0, 0, 0), (0, 3), ()])
def test_odd_padding_there_and_back(odd: tuple[int, ...], dev: Device) -> None:
    array = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(F)
    widths = [(0, 0), (0, 0), *zip(odd[::2], odd[1::2], strict=True)]
    want = np.pad(array, [*widths, *[(0, 0)] * (4 - len(widths))])
    raw = dev.backend.put(array)
    padded = utils.handle_odd_pad_fwd(raw, odd)
    assert type(padded) is type(raw)
    np.testing.assert_array_equal(dev.backend.get(padded), want)
    np.testing.assert_array_equal(dev.backend.get(utils.handle_odd_pad_bwd(padded, odd)), array)
    t = Tensor(data=array, device=dev, stores_grad=True)
    tape.training = True
    y = utils.handle_odd_pad_fwd(t, odd)
    ((_, g),) = autograd.backward(op.ReduceSum(op.Mul(y, y), keepdims=0))
    np.testing.assert_allclose(to_numpy(g), 2 * array)
    np.testing.assert_array_equal(to_numpy(utils.handle_odd_pad_bwd(y, odd)), array)


def test_odd_padding_goes_where_a_convolution_expects_it() -> None:
    x = Tensor(data=np.random.default_rng(0).standard_normal((1, 1, 5, 7)).astype(F))
    w = Tensor(data=np.random.default_rng(1).standard_normal((1, 1, 4, 3)).astype(F))
    even, odd = utils.get_padding_shape("SAME_UPPER", x.shape[2:], [4, 3], [2, 2])
    handle = autograd.ConvHandle(strides=(2, 2), pads=(even[0], even[2], even[1], even[3]))
    want = op.Conv(x, w, strides=[2, 2], auto_pad="SAME_UPPER")
    np.testing.assert_allclose(autograd.conv2d(handle, x, w, odd_padding=odd).data, want.data, rtol=1e-6)
    before = autograd.conv2d(handle, utils.handle_odd_pad_fwd(x, odd), w)
    np.testing.assert_allclose(before.data, want.data, rtol=1e-6)


def test_odd_padding_that_does_not_fit() -> None:
    for odd in ((1,), (0, 0, 0, 0, 0, 0), (-1, 0)):
        with pytest.raises(InvalidInput) as caught:
            utils.handle_odd_pad_fwd(np.zeros((1, 1, 2, 2), F), odd)
        assert caught.value.code == "SX347"


def test_text() -> None:
    assert [utils.force_unicode(s) for s in (b"gr\xc3\xbcn", "gr\xfcn", 3)] == ["gr\xfcn", "gr\xfcn", 3]


def test_the_order_of_a_tape() -> None:
    tape.training = True
    x = Tensor(data=np.ones((2, 2), F), name="x")
    w, v = (Tensor(data=np.ones((2, 2), F), name=n, stores_grad=True) for n in ("w", "v"))
    h = autograd.matmul(x, w)
    y = autograd.add(autograd.relu(h), autograd.matmul(h, v))
    nodes, weights, inputs = utils.post_order_recursive(y.creator, y)
    assert [n.partition("#")[0] for n in nodes] == ["MatMul", "Relu", "MatMul", "Add"]
    places = {id(o): i for i, o in enumerate(nodes.values())}
    assert all(places[id(c)] < places[id(o)] for o in nodes.values() for c, *_ in o.src if id(c) in places)
    assert list(weights) == ["w", "v"] and weights["w"] is w and dict(inputs) == {"x": None}
    nodes, weights, inputs = utils.post_order_recursive(w.creator, w)
    assert (list(nodes), list(weights), list(inputs)) == ([], ["w"], [])


def test_a_deep_tape_and_a_wide_one() -> None:
    """Neither Python's stack nor the number of paths is a limit."""
    tape.training = True
    y = Tensor(data=np.ones(1, F), stores_grad=True, name="w")
    for _ in range(2000):
        y = autograd.add(y, y)
    nodes, weights, _ = utils.post_order_recursive(y.creator, y)
    assert len(nodes) == 2000 and list(weights) == ["w"]


def test_two_leaves_of_one_name() -> None:
    tape.training = True
    a, b = (Tensor(data=np.ones(1, F), name="w", stores_grad=True) for _ in "ab")
    y = autograd.mul(a, b)
    _, weights, _ = utils.post_order_recursive(y.creator, y)
    assert weights["w"] is a and weights["w#1"] is b


# --- batches of images


def pictures(folder: Path, count: int = 10, delimiter: str = " ") -> Path:
    """Images whose red says which they are, in a list whose class numbers say it too."""
    folder.joinpath("images").mkdir()
    for i in range(count):
        Image.new("RGB", (8, 6), (i, 0, 0)).save(folder / "images" / f"a picture {i}.png")
    listed = folder / "list.txt"
    listed.write_text("".join(f"a picture {i}.png{delimiter}{i}\n" for i in range(count)) + "\n", "utf-8")
    return listed


def opened(path: str) -> list[Any]:
    return [image_tool.load_img(path)]


def batches(folder: Path, **kwargs: Any) -> ImageBatchIter:
    listed = folder / "list.txt"
    transform = kwargs.pop("transform", opened)
    return ImageBatchIter(listed if listed.exists() else pictures(folder), kwargs.pop("batch_size", 4), transform,
                          image_folder=folder / "images", **kwargs)  # fmt: skip


def test_batches_in_order_go_round(tmp_path: Path) -> None:
    source = batches(tmp_path, shuffle=False)
    assert source.num_samples == 10
    source.start()
    seen = [source.next() for _ in range(5)]
    source.end()
    assert all(x.shape == (4, 3, 6, 8) and x.dtype == F and y.dtype == np.int32 for x, y in seen)
    assert np.concatenate([y for _, y in seen]).tolist() == [*range(10)] * 2
    assert all((x[:, 0].max((1, 2)) == y).all() and not x[:, 1:].any() for x, y in seen)


def labels(source: ImageBatchIter, count: int) -> list[int]:
    with source:
        return np.concatenate([source.next()[1] for _ in range(count)]).tolist()  # type: ignore[no-any-return]


def test_shuffled_batches_have_every_image_once_in_each_round_and_follow_the_seed(tmp_path: Path) -> None:
    seen = labels(batches(tmp_path, seed=3), 5)
    assert sorted(seen[:10]) == sorted(seen[10:]) == [*range(10)] and seen[:10] != seen[10:]
    assert labels(batches(tmp_path, seed=3), 5) == seen != labels(batches(tmp_path, seed=4), 5)
    random.seed(1)
    drawn = labels(batches(tmp_path), 5)
    random.seed(1)
    assert labels(batches(tmp_path), 5) == drawn


def test_augmented_batches_follow_the_seed_too(tmp_path: Path) -> None:
    def run(seed: int) -> Any:
        tool = ImageTool(seed)
        source = batches(tmp_path, seed=0, transform=lambda p: tool.load(p).color_cast(100).random_crop((4, 4)).flip().get())
        with source:
            return [source.next()[0] for _ in range(3)]

    assert np.array_equal(run(1), run(1)) and not np.array_equal(run(1), run(2))


def test_several_images_of_one(tmp_path: Path) -> None:
    """They need not fill whole batches: the rest comes first in the next."""
    source = batches(tmp_path, batch_size=5, shuffle=False, transform=lambda p: [image_tool.load_img(p)] * 3)
    assert labels(source, 2) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert labels(batches(tmp_path, shuffle=False, transform=lambda p: np.zeros((3, 2, 2))), 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("spelling", ["delimiter", "delimeter"])
def test_a_delimiter(spelling: str, tmp_path: Path) -> None:
    listed = pictures(tmp_path, delimiter=",")
    source = ImageBatchIter(listed, 2, opened, False, image_folder=tmp_path / "images", **{spelling: ","})  # type: ignore[arg-type]
    assert labels(source, 1) == [0, 1]


def test_an_error_in_the_thread_surfaces_in_next_and_again(tmp_path: Path) -> None:
    def transform(path: str) -> Any:
        if path.endswith("5.png"):
            raise KeyError("five")
        return opened(path)

    source = batches(tmp_path, shuffle=False, transform=transform)
    source.start()
    assert source.next()[1].tolist() == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(KeyError, match="five"):
            source.next()
    source.end()
    source.start()  # and another try begins at the beginning
    assert source.next()[1].tolist() == [0, 1, 2, 3]
    source.end()


@pytest.mark.parametrize(("transform", "match"), [
    (lambda p: [Image.new("RGB", (int(p[-5]) + 1, 4))], "one shape, got .*picture 0.*picture 1"),
    (lambda p: [], "returned no image for any of the"),
    (lambda p: ["text"], "must return images, got str"), (lambda p: image_tool.load_img(p + "x"), "is not a readable image"),
])  # fmt: skip
def test_what_makes_no_batch(transform: Any, match: str, tmp_path: Path) -> None:
    with batches(tmp_path, shuffle=False, transform=transform) as source, pytest.raises(InvalidInput, match=match):
        source.next()


def test_a_transform_that_hangs_hangs_nobody(tmp_path: Path) -> None:
    release = threading.Event()
    source = batches(tmp_path, timeout=0.2, transform=lambda p: release.wait(30) and opened(p))
    begun = time.monotonic()
    source.start()
    with pytest.raises(InvalidInput, match=r"within 0\.2 seconds") as caught:
        source.next()
    source.end()
    assert caught.value.code == "SX349" and time.monotonic() - begun < 10
    release.set()


def test_the_end_comes_however_full_the_queue_is(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    source = batches(tmp_path, capacity=1, batch_size=1)
    source.end()  # before it began
    source.start()
    source.next()
    (thread,) = set(threading.enumerate()) - threads
    source.start()  # anew: the first thread ends
    assert not thread.is_alive()
    (thread,) = set(threading.enumerate()) - threads
    source.end()
    source.end()
    assert not thread.is_alive()
    with pytest.raises(InvalidInput, match="no batches") as caught:
        source.next()
    assert caught.value.code == "SX349"


def test_a_forgotten_iterator_ends_its_thread(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    source = batches(tmp_path, capacity=1)
    source.start()
    (thread,) = set(threading.enumerate()) - threads
    del source
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("text", "match"),
    [("", "is empty"), ("a.png 1\nb.png\n", ":2 must be `path class number`"), ("a.png one\n", ":1 must be `path class number`")],
)
def test_a_list_that_is_none(text: str, match: str, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(text)
    with pytest.raises(InvalidInput, match=match):
        data.ImageBatchIter(listed, 2, opened)
    for path, size in ((tmp_path / "missing.txt", 2), (listed, 0)):
        with pytest.raises(InvalidInput) as caught:
            data.ImageBatchIter(path, size, opened)
        assert caught.value.code == "SX349"


# --- augmentation


def ramp(width: int = 12, height: int = 8) -> Any:
    """Red says the column, green the row."""
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([columns * 10, rows * 10, np.full_like(rows, 100)], -1).astype(np.uint8))


def corner(img: Any) -> tuple[int, int]:
    """The column and the row that an image begins with."""
    red, green, _ = img.getpixel((0, 0))
    return red // 10, green // 10


def test_crops() -> None:
    tool = ImageTool().set([ramp()])
    patches = tool.crop5((4, 4), 5, inplace=False)
    assert [corner(p) for p in patches] == [(0, 0), (0, 4), (8, 0), (8, 4), (4, 2)] and {p.size for p in patches} == {(4, 4)}
    assert [corner(p) for p in tool.crop((6, 2), "right_bottom", inplace=False)] == [(6, 6)]
    squares = tool.crop3((8, 8), 3, inplace=False)
    assert [corner(p) for p in squares] == [(0, 0), (2, 0), (4, 0)]
    high = ImageTool().set([ramp(8, 12)]).crop3((8, 8), 3).get()
    assert [corner(p) for p in high] == [(0, 0), (0, 2), (0, 4)]
    assert tool.num_augmentation() == 1  # nothing was in place
    eight = tool.crop8((4, 4), 8)
    assert eight is tool and tool.num_augmentation() == len(tool.get()) == 8
    assert [corner(p) for p in tool.get()[:5]] == [corner(p) for p in patches]


def test_drawn_cases_are_drawn_for_each_image_and_follow_the_seed() -> None:
    def run(seed: int) -> list[tuple[int, int]]:
        return [corner(p) for p in ImageTool(seed).set([ramp()] * 20).crop5((4, 4), 2).get()]

    assert run(1) == run(1) != run(2) and len(run(1)) == 40 and len(set(run(1))) == 5
    random.seed(7)
    first = ImageTool().set([ramp()] * 9).random_crop((3, 3)).get()
    random.seed(7)
    again = ImageTool().set([ramp()] * 9).random_crop((3, 3)).get()
    assert [corner(p) for p in first] == [corner(p) for p in again] and len({corner(p) for p in first}) > 3
    assert all(0 <= c <= 9 and 0 <= r <= 5 for c, r in map(corner, first))


def test_sizes_and_angles() -> None:
    tool = ImageTool(0).set([ramp()])
    assert [i.size for i in tool.resize_by_list([4, 16], 2, inplace=False)] == [(6, 4), (24, 16)]
    assert [i.size for i in tool.scale(4, inplace=False)] == [i.size for i in tool.resize(4, inplace=False)] == [(6, 4)]
    assert ImageTool().set([ramp(8, 12)]).resize(4).get()[0].size == (4, 6)
    sizes = {ImageTool(s).set([ramp()]).resize_by_range((4, 8)).get()[0].size[1] for s in range(40)}
    assert sizes == {4, 5, 6, 7}
    assert image_tool.resize(ramp(300, 2), 1).size == (150, 1) and image_tool.resize(ramp(2, 300), 1).size == (1, 150)
    (turned,) = tool.rotate(180, inplace=False)
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(ramp())[::-1, ::-1])
    assert len(tool.rotate_by_list([0, 90, 180], 3, inplace=False)) == 3
    assert [i.size for i in tool.rotate_by_range((0, 10)).random_crop_resize((5, 5)).get()] == [(5, 5)]


def test_mirrors() -> None:
    array, tool = np.asarray(ramp()), ImageTool(0).set([ramp()])
    both = [np.asarray(i) for i in tool.flip(2, inplace=False)]
    np.testing.assert_array_equal(both, [array[:, ::-1], array])
    np.testing.assert_array_equal([np.asarray(i) for i in tool.flip_down(2, inplace=False)], [array[::-1], array])
    some = {corner(i) for i in ImageTool(0).set([ramp()] * 30).flip().flip_down().get()}
    assert some == {(0, 0), (11, 0), (0, 7), (11, 7)}


def test_colours() -> None:
    img = Image.new("RGB", (2, 2), (250, 5, 100))
    cast = np.array([np.asarray(i)[0, 0] for i in ImageTool(0).set([img] * 60).color_cast(20).get()], int)
    assert (cast[:, 0] <= 255).all() and (cast[:, 1] >= 0).all() and np.abs(cast - [250, 5, 100]).max() <= 20
    assert 255 in cast[:, 0] and 0 in cast[:, 1] and len(set(cast[:, 2])) > 5 and (cast[:, 2] == 100).sum() > 10
    grey = ImageTool(3).set([Image.new("L", (2, 2), 9)] * 8).color_cast(4).get()
    assert {i.mode for i in grey} == {"L"} and len({i.getpixel((0, 0)) for i in grey}) > 1
    enhanced = [np.asarray(i) for i in ImageTool(0).set([ramp()] * 20).enhance(0.5).get()]
    assert len({e.tobytes() for e in enhanced}) > 10 and all(e.shape == (8, 12, 3) for e in enhanced)
    (same,) = ImageTool(0).set([ramp()]).enhance(0.0).get()
    assert np.abs(np.asarray(same, int) - np.asarray(ramp(), int)).max() <= 1


def test_images_from_files(tmp_path: Path) -> None:
    ramp().save(tmp_path / "a.png")
    tool = ImageTool().load(tmp_path / "a.png")
    np.testing.assert_array_equal(np.asarray(tool.get()[0]), np.asarray(ramp()))
    assert tool.load(tmp_path / "a.png", grayscale=True).append(ramp()).get()[0].mode == "L"
    assert len(tool.get()) == 2 and tool.num_augmentation() == 1 and ImageTool().num_augmentation() == 0
    (tmp_path / "b.png").write_bytes(b"no image")
    for name in ("b.png", "missing.png"):
        with pytest.raises(InvalidInput) as caught:
            tool.load(tmp_path / name)
        assert caught.value.code == "SX348"


@pytest.mark.parametrize("ask", [
    lambda t: t.crop5((4, 4), 6), lambda t: t.crop5((4, 4), 0), lambda t: t.crop8((4, 4), 9), lambda t: t.crop3((4, 5)),
    lambda t: t.crop8((4, 5)), lambda t: t.crop((13, 4)), lambda t: t.random_crop((4, 9)), lambda t: t.resize(0),
    lambda t: t.resize_by_list([4], 2), lambda t: t.rotate_by_list([1, 2], 0), lambda t: t.flip(3), lambda t: t.color_cast(256),
    lambda t: t.crop((4, 4), "top"), lambda t: image_tool.crop_and_resize(ramp(), (4, 4), "up"), lambda t: t.crop3((4, 4), 4),
])  # fmt: skip
def test_what_fits_no_image(ask: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        ask(ImageTool().set([ramp()]))
    assert caught.value.code == "SX347"


# --- snapshots


VALUES = {
    "conv.W": np.arange(6, dtype=F).reshape(2, 3), "a/b c": np.array(2.5), "ü": np.zeros((0, 3), np.int64),
    "half": np.array([1.5, -2]).astype(ml_dtypes.bfloat16), "four": np.array([1, -3]).astype(ml_dtypes.int4),
    "yes": np.array(True),
}  # fmt: skip


def kept(path: Path, mode: Any) -> Snapshot:
    with pytest.warns(DeprecationWarning, match="save_states"):
        return Snapshot(path, mode)


def same(read: dict[str, Tensor], want: dict[str, Any]) -> None:
    assert list(read) == list(want)
    for name, t in read.items():
        array = to_numpy(t)
        assert array.dtype == want[name].dtype and array.shape == want[name].shape and array.tobytes() == want[name].tobytes()


@other_device.runs
@pytest.mark.parametrize("dev", [default_device, Device(other_device.NAME)], ids=["CPU", other_device.NAME])
def test_a_snapshot_there_and_back(dev: Device, tmp_path: Path) -> None:
    with kept(tmp_path / "net", True) as out:
        for name, value in VALUES.items():
            if not (dev is not default_device and name == "four"):
                out.write(name, Tensor(data=value, device=dev))
        assert not (tmp_path / "net").exists()
    same(kept(tmp_path / "net", False).read(), {n: v for n, v in VALUES.items() if dev is default_device or n != "four"})
    assert [p.name for p in tmp_path.iterdir()] == ["net"]


def test_a_snapshot_that_nobody_closes(tmp_path: Path) -> None:
    out = kept(tmp_path / "a", "w")
    out.write("x", tensor.from_numpy(np.ones(2, F)))
    assert list(kept(tmp_path / "a", False).read()) == ["x"]  # read in the same process
    out.write("y", tensor.from_numpy(np.ones(2, F)))  # and written further
    del out
    gc.collect()
    assert list(kept(tmp_path / "a", "r").read()) == ["x", "y"]
    code = "from singa import snapshot, tensor\ns = snapshot.Snapshot('b', True)\ns.write('x', tensor.Tensor((2,)))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert list(kept(tmp_path / "b", False).read()) == ["x"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_snapshot_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "net"
    with kept(path, True) as out:
        out.write("x", tensor.from_numpy(np.ones(2, F)))
    with pytest.raises(RuntimeError), kept(path, True) as out:
        out.write("y", tensor.from_numpy(np.zeros(2, F)))
        raise RuntimeError
    assert list(kept(path, False).read()) == ["x"] and os.listdir(tmp_path) == ["net"]


def test_what_a_snapshot_refuses(tmp_path: Path) -> None:
    x = tensor.from_numpy(np.ones(2, F))
    out = kept(tmp_path / "net", True)
    out.write("x", x)
    bad: list[Any] = [
        lambda: out.write("x", x), lambda: out.write("y", np.ones(2)),
        lambda: out.write("y", Tensor(data=np.array(["a"], object))), out.read, lambda: kept(tmp_path / "other", "a"),
        lambda: kept(tmp_path / "no" / "net", True), kept(tmp_path / "missing", False).read,
    ]  # fmt: skip
    out.close()
    out.close()
    bad += [lambda: out.write("z", x), lambda: kept(tmp_path / "net", False).write("z", x)]
    (tmp_path / "text").write_text("no zip")
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "hostile", "w") as pack:
        info = zipfile.ZipInfo("x.npy")
        info.comment = b"float"
        pack.writestr(info, (tmp_path / "pickled.npy").read_bytes())
    with zipfile.ZipFile(tmp_path / "foreign", "w") as pack:
        pack.writestr("readme.txt", "hello")
    bad += [kept(tmp_path / name, False).read for name in ("text", "hostile", "foreign")]
    for ask in bad:
        with pytest.raises(InvalidInput) as caught:
            ask()
        assert caught.value.code == "SX350"
    assert list(kept(tmp_path / "net", False).read()) == ["x"] and snapshot.__all__ == ["Snapshot"]


# --- names


def test_fresh_names() -> None:
    fresh = FreshNames(["a", "a_1", "b"])
    assert [fresh.new(n) for n in ("a", "a", "a_2", "b", "c", "c")] == ["a_2", "a_3", "a_2_1", "b_1", "c", "c_1"]
    marked = FreshNames(mark="#", first=2)
    assert [marked.new("w") for _ in range(3)] == ["w", "w#2", "w#3"]
