"""Emotion FER+ (opset 7 or 8): the emotion of a face.

    python examples/zoo/ferplus.py face.jpg --model emotion-ferplus-8.onnx --plot result.png

The picture, which should show a face alone, becomes grey and is stretched to 64 x 64, with values of 0 to 255.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from images import bars, planes, read, run, softmax, stretched
from published import load, options, start

SIZE = 64
EMOTIONS = ("neutral", "happiness", "surprise", "sadness", "anger", "disgust", "fear", "contempt")


def main() -> None:
    parser = options(__doc__, "emotion-ferplus-8.onnx")
    parser.add_argument("pictures", nargs="*", type=Path)
    parser.add_argument("--plot", type=Path, help="write the first picture and the probabilities, such as result.png")
    args = parser.parse_args()
    rep = load(args)
    for number, path in enumerate(args.pictures):
        image = read(path, "L")
        found = softmax(run(rep, planes(stretched(image, SIZE))).reshape(-1).astype(np.float64))
        rows = sorted(zip(EMOTIONS, found.tolist(), strict=True), key=lambda row: -row[1])
        print(path, *(f"  {value:.4f}  {name}" for name, value in rows), sep="\n")
        if args.plot and not number:
            bars(image, rows, args.plot)


if __name__ == "__main__":
    start(main)
