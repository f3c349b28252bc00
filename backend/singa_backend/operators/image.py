"""ImageDecoder, which uses Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import MissingDependency, OperatorError, ResourceExhausted
from ..ir.declaration import Host, operator
from ._api import Array

FORMATS = ("BMP", "JPEG", "JPEG2000", "TIFF", "PNG", "WEBP", "PPM")
"""Formats that ONNX specifies; Pillow also supports formats that run programs."""


@operator("ImageDecoder", 20, host=True)
def image_decoder(xp: Xp, encoded: Host[np.ndarray], *, pixel_format: str = "RGB") -> Array:
    """Return height x width x channels; ONNX specifies an empty matrix for data that cannot be decoded."""
    if pixel_format not in ("RGB", "BGR", "Grayscale"):
        raise OperatorError(f"pixel_format must be RGB, BGR or Grayscale, got {pixel_format!r}", code="SX404")
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("ImageDecoder needs Pillow", hint="pip install 'sonnx[image]'") from error
    channels = 1 if pixel_format == "Grayscale" else 3
    limit = Image.MAX_IMAGE_PIXELS or 1 << 27
    try:
        with Image.open(io.BytesIO(encoded.tobytes()), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limit:  # the size is in the header: nothing is decoded yet
                raise Image.DecompressionBombError(f"{width} x {height} pixels")
            limits.admit((height, width, channels), np.uint8)
            pixels = _eight_bits(image).convert("L" if channels == 1 else "RGB")
            y = np.asarray(pixels, dtype=np.uint8).reshape(height, width, channels)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ResourceExhausted(f"an image must not exceed Pillow's limit of {limit} pixels: {error}", code="SX603") from error
    except (MemoryError, ResourceExhausted):
        raise
    except Exception:  # Pillow's plugins raise many exceptions for damaged files
        y = np.zeros((0, 0, channels), np.uint8)
    return y[:, :, ::-1].copy() if pixel_format == "BGR" else y


def _eight_bits(image: Any) -> Any:
    """Convert an image of 16 bits per channel to 8 bits; Pillow's conversion would clip instead of scale."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image
