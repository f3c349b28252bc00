"""ImageDecoder on images that Pillow writes; a damaged stream is an empty matrix."""

import io
import sys

import numpy as np
import pytest

from singa_backend import MissingDependency, ResourceExhausted

Image = pytest.importorskip("PIL.Image")


def encode(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return np.frombuffer(stream.getvalue(), np.uint8)


@pytest.fixture
def picture():
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)


@pytest.mark.parametrize("kind", ["BMP", "PNG", "TIFF", "PPM", "WEBP", "JPEG2000"])
def test_lossless(check, picture, kind):
    data = encode(Image.fromarray(picture), kind, **({"lossless": True} if kind == "WEBP" else {}))
    r, g, b = np.moveaxis(picture.astype(np.int64), -1, 0)
    grey = ((19595 * r + 38470 * g + 7471 * b + 2**15) >> 16).astype(np.uint8)[..., None]  # ITU-R 601
    check("ImageDecoder", [data], [picture], opset=20)
    check("ImageDecoder", [data], [picture[..., ::-1]], opset=20, pixel_format="BGR")
    check("ImageDecoder", [data], [grey], opset=20, pixel_format="Grayscale")


def test_other_pixels(check, picture):
    image = Image.fromarray(picture)
    grey = picture[..., 0]
    check("ImageDecoder", [encode(Image.fromarray(grey), "PNG")], [np.stack([grey] * 3, -1)], opset=20)
    rgba = image.copy()
    rgba.putalpha(10)
    check("ImageDecoder", [encode(rgba, "PNG")], [picture], opset=20)
    few = image.quantize(256)
    check("ImageDecoder", [encode(few, "PNG")], [np.asarray(few.convert("RGB"))], opset=20)
    deep = grey.astype(np.uint16) * 257
    check("ImageDecoder", [encode(Image.fromarray(deep), "PNG")], [grey[..., None]], opset=20, pixel_format="Grayscale")


def test_damage(check, picture):
    data = encode(Image.fromarray(picture), "PNG")
    for broken in (data[:40], data[:0], np.arange(9, dtype=np.uint8), encode(Image.fromarray(picture), "GIF")):
        check("ImageDecoder", [broken], [np.zeros((0, 0, 3), np.uint8)], opset=20)


def test_refusals(fails, picture, monkeypatch):
    data = encode(Image.fromarray(picture), "PNG")
    fails("ImageDecoder", [data], "HSV", opset=20, pixel_format="HSV")
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
        fails("ImageDecoder", [data], "5|bound", opset=20, error=ResourceExhausted)
    monkeypatch.setitem(sys.modules, "PIL", None)
    fails("ImageDecoder", [data], r"pip install 'sonnx\[image\]'", opset=20, error=MissingDependency)
