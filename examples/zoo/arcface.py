"""ArcFace, LResNet100E-IR (opset 8): whether two pictures show the same face.

    python examples/zoo/arcface.py one.jpg other.jpg --model arcfaceresnet100-8.onnx

The short side is resized to 112 and the centre, 112 x 112, is used with values of 0 to 255; the pictures should show aligned
faces.  The two vectors of 512 numbers are scaled to a length of 1.  Their squared distance is 0 for equal pictures and at most 4,
their cosine is 1 - distance / 2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from images import covered, planes, read, run
from published import between, load, options, start

SIZE = 112


def embedded(vectors: np.ndarray) -> np.ndarray:
    """Return the rows scaled to a length of 1; a row of zeros remains."""
    length = np.sqrt(np.square(vectors, dtype=np.float64).sum(-1, keepdims=True))
    return vectors / np.where(length > 0, length, 1)  # type: ignore[no-any-return]


def compared(vectors: np.ndarray) -> tuple[float, float]:
    """Return the squared distance and the cosine of two vectors."""
    a, b = embedded(vectors)
    return float(np.square(a - b).sum()), float(a @ b)


def main() -> None:
    parser = options(__doc__, "arcfaceresnet100-8.onnx")
    parser.add_argument("pictures", nargs="*", type=Path, metavar="picture", help="two pictures")
    parser.add_argument("--threshold", type=between(-1, 1), default=0.3, help="the lowest cosine of one face (%(default)s)")
    args = parser.parse_args()
    if len(args.pictures) not in (0, 2):
        parser.error(f"there must be two pictures, got {len(args.pictures)}")
    rep = load(args)
    if args.pictures:
        batch = np.concatenate([planes(covered(read(path), SIZE, SIZE)) for path in args.pictures])
        distance, cosine = compared(run(rep, batch))
        verdict = "the same face" if cosine >= args.threshold else "different faces"
        print(f"squared distance {distance:.4f}, cosine {cosine:.4f}: {verdict}")


if __name__ == "__main__":
    start(main)
