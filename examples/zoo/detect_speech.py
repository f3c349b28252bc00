"""Find speech in a recording with Silero VAD: python detect_speech.py RECORDING.wav [--plot speech.png]

The model is a file of a PyPI package: pip install --no-deps silero-vad==6.2.3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import sound
from packaged import Package, load, options
from published import between, start

VOICES = Package("silero-vad", "6.2.3")
FILE = "silero_vad.onnx"

RATE, WINDOW, CONTEXT = 16000, 512, 64
"""The model hears windows of 512 samples at 16 kHz, each after the last 64 samples of the one before."""

SIZE = 128
"""Of each of the two states of its LSTM."""


def probabilities(rep: Any, samples: np.ndarray) -> np.ndarray:
    """Return the probability of speech in each window; the last one is filled with silence."""
    count = -(-len(samples) // WINDOW)
    padded = np.zeros(CONTEXT + count * WINDOW, np.float32)
    padded[CONTEXT : CONTEXT + len(samples)] = samples
    state, rate = np.zeros((2, 1, SIZE), np.float32), np.array(RATE, np.int64)
    found = np.empty(count, np.float32)
    for i in range(count):
        window = padded[None, i * WINDOW : (i + 1) * WINDOW + CONTEXT]
        out = rep.run({"input": window, "state": state, "sr": rate})
        found[i], state = out["output"][0, 0], out["stateN"]
    return found


def segments(
    found: Sequence[float] | np.ndarray,
    seconds: float,
    *,
    threshold: float = 0.5,
    release: float | None = None,
    shortest: float = 0.25,
    pause: float = 0.1,
    margin: float = 0.03,
) -> list[tuple[float, float]]:
    """Return the start and end of each piece of speech, in seconds.

    Args:
        found: the probability of each window.
        seconds: the duration of the recording.
        threshold: speech starts with a window of at least this probability.
        release: it ends with a window below this one; by default `threshold` - 0.15.
        shortest: speech that is not longer is left out.
        pause: speech continues over shorter pauses.
        margin: added on both sides; between two pieces at most half of the pause.
    """
    release = max(threshold - 0.15, 0.01) if release is None else release
    step, pieces = WINDOW / RATE, list[tuple[float, float]]()
    begun: float | None = None
    quiet: float | None = None  # the first window of a pause that may end the speech
    for i, p in enumerate(found):
        now = i * step
        if p >= threshold:
            begun, quiet = now if begun is None else begun, None
        elif begun is not None and p < release:
            quiet = now if quiet is None else quiet
            if now - quiet >= pause:
                pieces.append((begun, quiet))
                begun = quiet = None
    if begun is not None:
        pieces.append((begun, seconds))
    pieces = [(a, b) for a, b in pieces if b - a > shortest]
    starts = [0.0, *((b + a) / 2 for (_, b), (a, _) in pairwise(pieces)), seconds]
    return [(max(a - margin, low), min(b + margin, high)) for (a, b), low, high in zip(pieces, starts, starts[1:], strict=False)]


def plot(found: np.ndarray, pieces: Sequence[tuple[float, float]], seconds: float, path: Path) -> None:
    """Write a picture of the probabilities, with the speech behind them."""
    line = sound.Timeline(seconds, 0, 1.05)
    for a, b in pieces:
        line.box(a, b, 0, 1.05, "#9ec9ff", f"{a:.2f}")
    line.curve((np.arange(len(found)) + 0.5) * WINDOW / RATE, found, "#e6194b")
    line.save(path)


def main() -> None:
    parser = options(__doc__, VOICES, FILE)
    parser.add_argument("recording", type=Path, help="a WAV file")
    parser.add_argument("--threshold", type=between(0, 1), default=0.5, help="probability at which speech starts (%(default)s)")
    parser.add_argument("--release", type=between(0, 1), help="probability below which it ends (threshold - 0.15)")
    parser.add_argument(
        "--shortest", type=between(0, 3600), default=0.25, help="seconds; shorter speech is left out (%(default)s)"
    )
    parser.add_argument(
        "--pause", type=between(0, 3600), default=0.1, help="seconds; shorter pauses are part of the speech (%(default)s)"
    )
    parser.add_argument(
        "--margin", type=between(0, 3600), default=0.03, help="seconds that are added on both sides (%(default)s)"
    )
    parser.add_argument("--plot", type=Path, help="write a picture of the probabilities, such as speech.png")
    args = parser.parse_args()
    if args.release is not None and args.release > args.threshold:
        parser.error(f"--release must not be above --threshold, got {args.release} and {args.threshold}")
    samples = sound.read(args.recording, RATE)
    found = probabilities(load(args, VOICES, FILE), samples)
    seconds = len(samples) / RATE
    limits = {n: getattr(args, n) for n in ("threshold", "release", "shortest", "pause", "margin")}
    pieces = segments(found, seconds, **limits)
    for a, b in pieces:
        print(f"{a:8.2f} s to {b:8.2f} s")
    print(f"{sum(b - a for a, b in pieces):.2f} s of speech in {seconds:.2f} s")
    if args.plot:
        plot(found, pieces, seconds, args.plot)


if __name__ == "__main__":
    start(main)
