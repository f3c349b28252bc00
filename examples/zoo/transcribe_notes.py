"""Write down the notes of a recording with Basic Pitch: python transcribe_notes.py RECORDING.wav [--midi notes.mid]

The model is a file of a PyPI package: pip install --no-deps basic-pitch==0.4.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sound
from packaged import Package, load, options
from published import between, start

from singa_backend.io.files import write_bytes

PITCH = Package("basic-pitch", "0.4.0")
FILE = "nmp.onnx"

RATE, HOP = 22050, 256
WINDOW = 2 * RATE - HOP
"""The model hears almost two seconds at 22,050 Hz, and returns a frame for each 256 samples."""

OVERLAP = 30
"""Frames that two windows share; half of them are cut from each."""

LOWEST, KEYS = 21, 88
"""Of a piano, as MIDI pitches; each is a column of the model's outputs."""

NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")

NOTES, ONSETS = "StatefulPartitionedCall:1", "StatefulPartitionedCall:2"
"""The outputs: the probability that a pitch sounds, and that it begins."""

QUIET = 11
"""Frames below the threshold after which a note has ended."""

TICKS = 960
"""Of a MIDI file in a second: 120 quarters a minute of 480 ticks."""


@dataclass(frozen=True)
class Note:
    """A note; times in seconds, its pitch as in MIDI (60 is C4), and its mean probability."""

    start: float
    end: float
    pitch: int
    amplitude: float

    @property
    def name(self) -> str:
        """The name of its pitch, such as C4 or F#3."""
        return NAMES[self.pitch % 12] + str(self.pitch // 12 - 1)


def posteriorgrams(rep: Any, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the probabilities of notes and of onsets, float32[frames, 88], and the time of each frame.

    The recording is read in windows that overlap.  A window's frames do not fill its hop exactly, so that frames of two
    windows are not at one distance from each other: the time of a frame is that of its window and its place there.
    """
    edge = OVERLAP // 2
    hop = WINDOW - OVERLAP * HOP
    padded = np.concatenate([np.zeros(edge * HOP, np.float32), samples, np.zeros(WINDOW, np.float32)])
    notes, onsets, times = [], [], []
    for begin in range(0, max(1, len(samples)), hop):
        out = rep.run([padded[None, begin : begin + WINDOW, None]])
        kept = slice(edge, out[NOTES].shape[1] - edge)
        notes.append(out[NOTES][0, kept])
        onsets.append(out[ONSETS][0, kept])
        times.append((begin + np.arange(len(notes[-1])) * HOP) / RATE)
    when = np.concatenate(times)
    inside = when < len(samples) / RATE
    return np.concatenate(notes)[inside], np.concatenate(onsets)[inside], when[inside]


def with_rises(onsets: np.ndarray, notes: np.ndarray) -> np.ndarray:
    """Return the onsets, or where they are larger the rises of the notes within two frames, scaled to the same maximum."""
    rises = np.zeros_like(notes)
    rises[2:] = np.maximum(0, notes[2:] - np.maximum(notes[1:-1], notes[:-2]))
    most = rises.max(initial=0)
    return np.maximum(onsets, rises * (onsets.max(initial=0) / most)) if most else onsets


def found_notes(
    notes: np.ndarray,
    onsets: np.ndarray,
    times: np.ndarray,
    *,
    onset: float = 0.5,
    frame: float = 0.3,
    shortest: float = 0.1277,
    rest: bool = True,
) -> list[Note]:
    """Return the notes in the order of their starts.

    A note begins at a peak of the onsets and ends when its pitch is silent; what it used, and the same frames of the
    neighbouring pitches, are not used again.  Then notes without an onset grow from the largest values that are left.

    Args:
        notes: the probabilities of notes, float32[frames, 88].
        onsets: the probabilities of onsets.
        times: the time of each frame.
        onset: the lowest probability of an onset.
        frame: the lowest probability of a sounding pitch.
        shortest: notes must be longer, in seconds.
        rest: whether notes without an onset are looked for.
    """
    count, fewest = len(notes), round(shortest * RATE / HOP)
    left, made = notes.copy(), list[tuple[int, int, int]]()

    def end(i: int, key: int, step: int, stop: int) -> int:
        """Return the first frame, from `i` in direction `step`, after which the pitch is silent."""
        quiet = 0
        while i != stop and quiet < QUIET:
            quiet = quiet + 1 if left[i, key] < frame else 0
            i += step
        return i - step * quiet

    def take(first: int, last: int, key: int) -> None:
        left[first:last, max(0, key - 1) : key + 2] = 0
        if last - first > fewest:
            made.append((first, last, key))

    rising = with_rises(onsets, notes)
    middle = rising[1:-1]
    peaks = np.argwhere((middle > rising[:-2]) & (middle > rising[2:]) & (middle >= onset))
    for before, key in peaks[::-1].tolist():  # from the last one: a note ends where the next one of its pitch begins
        i = before + 1
        last = end(i + 1, key, 1, count - 1)
        if last - i > fewest:
            take(i, last, key)
    while rest and left.max(initial=0) > frame:
        i, key = (int(v) for v in np.unravel_index(left.argmax(), left.shape))
        take(end(i, key, -1, -1) + 1, end(i, key, 1, count), key)

    width = HOP / RATE
    ends = np.append(times, times[-1] + width) if count else times
    return sorted(
        (Note(float(times[a]), float(ends[b]), LOWEST + k, float(notes[a:b, k].mean())) for a, b, k in made),
        key=lambda n: (n.start, n.pitch),
    )


def midi(notes: Sequence[Note]) -> bytes:
    """Return the notes as a MIDI file of one track, at 120 quarters a minute."""
    events = [(round(n.start * TICKS), 1, n.pitch, max(1, round(127 * n.amplitude))) for n in notes]
    events += [(round(n.end * TICKS), 0, n.pitch, 0) for n in notes]
    track, now = bytearray(b"\x00\xff\x51\x03" + (500_000).to_bytes(3, "big")), 0
    for tick, on, pitch, velocity in sorted(events):  # a note ends before the next one of its pitch begins
        track += variable(tick - now) + bytes([0x90 if on else 0x80, pitch, velocity])
        now = tick
    track += b"\x00\xff\x2f\x00"
    head = b"MThd" + (6).to_bytes(4, "big") + b"".join(v.to_bytes(2, "big") for v in (0, 1, TICKS // 2))
    return head + b"MTrk" + len(track).to_bytes(4, "big") + bytes(track)


def variable(value: int) -> bytes:
    """Return a number in groups of seven bits, as MIDI files write it."""
    out = [value & 127]
    while value := value >> 7:
        out.append(value & 127 | 128)
    return bytes(reversed(out))


def plot(notes: Sequence[Note], seconds: float, path: Path) -> None:
    """Write a picture of the notes, high pitches at the top."""
    pitches = [n.pitch for n in notes] or [LOWEST, LOWEST + KEYS]
    line = sound.Timeline(seconds, min(pitches) - 1, max(pitches) + 2)
    for n in notes:
        line.box(n.start, n.end, n.pitch, n.pitch + 1, "#9ec9ff", n.name)
    line.save(path)


def main() -> None:
    parser = options(__doc__, PITCH, FILE)
    parser.add_argument("recording", type=Path, help="a WAV file")
    parser.add_argument(
        "--onset", type=between(0, 1), default=0.5, help="lowest probability of the start of a note (%(default)s)"
    )
    parser.add_argument("--frame", type=between(0, 1), default=0.3, help="lowest probability of a sounding pitch (%(default)s)")
    parser.add_argument("--shortest", type=between(0, 3600), default=0.1277, help="seconds; notes must be longer (%(default)s)")
    parser.add_argument("--midi", type=Path, help="write the notes as a MIDI file")
    parser.add_argument("--plot", type=Path, help="write a picture of the notes, such as notes.png")
    args = parser.parse_args()
    samples = sound.read(args.recording, RATE)
    found = posteriorgrams(load(args, PITCH, FILE), samples)
    notes = found_notes(*found, onset=args.onset, frame=args.frame, shortest=args.shortest)
    for n in notes:
        print(f"{n.start:8.2f} s to {n.end:8.2f} s  {n.name:4} MIDI {n.pitch:3}  {n.amplitude:.2f}")
    print(f"{len(notes)} notes in {len(samples) / RATE:.2f} s")
    if args.midi:
        write_bytes(args.midi, midi(notes))
        print(f"wrote {args.midi}")
    if args.plot:
        plot(notes, len(samples) / RATE, args.plot)


if __name__ == "__main__":
    start(main)
