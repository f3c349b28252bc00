"""Shared by the programs of this folder that hear: WAV files, other sample rates, and pictures of what happens when."""

from __future__ import annotations

import io
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput
from singa_backend.io.archives import read_bytes

RATES = (1000, 1_000_000)
"""The sample rates that files may have."""

ZEROS = 32
"""Zero crossings of the filter of `resampled` on each side."""


def read(path: str | Path, rate: int) -> np.ndarray:
    """Return a WAV file as float32 samples between -1 and 1 at a sample rate; several channels become their mean.

    Raises:
        InvalidInput: the file is not a WAV file with integer samples of 8 to 32 bits, or it ends too early.
    """
    data = read_bytes(path, "SX307")
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, own, count = file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()
            frames = file.readframes(count)
    except Exception as error:  # of damaged headers it raises any kind
        why = f"{path} is not a WAV file with integer samples: {error or 'it ends too early'}"
        raise InvalidInput(why, code="SX307", hint="convert it: ffmpeg -i IN -c:a pcm_s16le OUT.wav") from None
    if not RATES[0] <= own <= RATES[1]:
        raise InvalidInput(f"the sample rate of {path} must be between {RATES[0]} and {RATES[1]} Hz, got {own}", code="SX307")
    if len(frames) != count * channels * width:
        held = len(frames) // (channels * width)
        raise InvalidInput(f"{path} ends too early: it must have {count} samples, got {held}", code="SX307")
    return resampled(decoded(frames, width).reshape(-1, channels).mean(1), own, rate).astype(np.float32)


def decoded(frames: bytes, width: int) -> np.ndarray:
    """Return little-endian integer samples of 1 to 4 bytes as float64 between -1 and 1; those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(frames, np.uint8) - 128.0) / 128
    padded = np.zeros((len(frames) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(frames, np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0] / 2.0**31


def resampled(x: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Return a signal at another sample rate: sums of sinc functions under a Kaiser window, below both Nyquist frequencies."""
    if own == rate or not len(x):
        return x
    shared = math.gcd(own, rate)
    up, down = rate // shared, own // shared
    cutoff = min(1.0, up / down) * 0.92  # so that the filter falls before the lower Nyquist frequency
    half = math.ceil(ZEROS / cutoff)
    padded = np.pad(np.asarray(x, np.float64), half)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    offsets = np.arange(-half + 1, half + 1)
    out = np.empty(-(-len(x) * up // down))
    for phase in range(min(up, len(out))):  # outputs whose distance from the sample before them is the same
        start, rest = divmod(phase * down, up)
        distance = offsets - rest / up
        weights = np.sinc(cutoff * distance) * np.i0(9 * np.sqrt(np.maximum(0, 1 - (distance / half) ** 2)))
        part = out[phase::up]
        part[:] = windows[start + 1 :: down][: len(part)] @ (weights / weights.sum())
    return out


class Timeline:
    """A picture with time from left to right, and seconds below.

    Args:
        seconds: the duration of the whole picture.
        low: the value at the bottom.
        high: the value at the top.
    """

    WIDTH, HEIGHT, EDGE = 1000, 400, 30

    def __init__(self, seconds: float, low: float, high: float) -> None:
        from images import Image, ImageDraw, ImageFont  # only a picture needs Pillow

        self.seconds, self.low, self.high = max(seconds, 1e-9), low, high
        self.image = Image.new("RGB", (self.WIDTH, self.HEIGHT), "white")
        self.draw = ImageDraw.Draw(self.image)
        self.font = ImageFont.load_default(12)
        for second in range(0, int(seconds) + 1, max(1, int(seconds) // 20)):
            x, bottom = self.x(second), self.HEIGHT - self.EDGE
            self.draw.line((x, 0, x, bottom), fill="#dddddd")
            self.draw.text((x + 2, bottom + 4), f"{second} s", fill="black", font=self.font)

    def x(self, second: float) -> float:
        """Return the column of a time."""
        return second / self.seconds * (self.WIDTH - 1)

    def y(self, value: float) -> float:
        """Return the row of a value."""
        return (self.HEIGHT - self.EDGE) * (self.high - value) / (self.high - self.low)

    def box(self, start: float, end: float, bottom: float, top: float, fill: str, text: str = "") -> None:
        """Fill a span of times and values, and write a text in it."""
        place = (self.x(start), self.y(top), self.x(end), self.y(bottom))
        self.draw.rectangle(place, fill=fill)
        self.draw.text((place[0] + 2, place[1]), text, fill="black", font=self.font)

    def curve(self, times: Any, values: Any, fill: str) -> None:
        """Draw values over times."""
        self.draw.line([(self.x(t), self.y(v)) for t, v in zip(times, values, strict=True)], fill=fill, width=2)

    def save(self, path: Path) -> None:
        """Write the picture in the format of its name."""
        from images import save

        save(self.image, path)
