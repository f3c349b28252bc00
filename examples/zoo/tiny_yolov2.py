"""Tiny YOLOv2 (opset 7 or 8): the objects of 20 kinds in a picture, with their boxes.

    python examples/zoo/tiny_yolov2.py street.jpg --model tinyyolov2-8.onnx --output result.png

The picture is stretched to 416 x 416, with values of 0 to 255.  The model returns (1, 125, 13, 13): for each cell of 32 x 32
pixels five boxes of four coordinates, a confidence and the scores of the classes.  Of boxes of one class that overlap, the best
is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from images import PALETTE, Image, ImageDraw, ImageFont, planes, read, run, save, softmax, stretched
from published import between, load, options, start

from singa_backend.errors import InvalidInput

SIZE = 416
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog", "horse",
    "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
ANCHORS = np.array([(1.08, 1.19), (3.42, 4.41), (6.63, 11.38), (9.42, 5.11), (16.62, 10.52)])
"""Widths and heights of the five boxes, in cells."""


class Found(NamedTuple):
    """An object: its class, its score, and its box (left, top, right, bottom) in pixels."""

    name: str
    score: float
    box: tuple[float, float, float, float]


def decode(output: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return all boxes, (n, 4) in pixels of a picture of this width and height, and the scores of their classes, (n, classes)."""
    count, (rows, columns) = len(ANCHORS), output.shape[-2:]
    if output.shape != (1, count * (5 + len(CLASSES)), rows, columns):
        raise InvalidInput(f"the model must return (1, {count * (5 + len(CLASSES))}, rows, columns), got {output.shape}")
    t = output.astype(np.float64).reshape(count, -1, rows, columns).transpose(2, 3, 0, 1)  # row, column, anchor, value
    corner = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1)[:, :, None]
    centre = corner + sigmoid(t[..., :2])
    half = np.exp(t[..., 2:4]) * ANCHORS / 2
    scale = np.array(size) / (columns, rows)
    boxes = np.concatenate([(centre - half) * scale, (centre + half) * scale], -1)
    scores = sigmoid(t[..., 4:5]) * softmax(t[..., 5:])
    return boxes.reshape(-1, 4), scores.reshape(-1, len(CLASSES))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))  # type: ignore[no-any-return]


def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the intersection over the union of a box and each of the others."""
    inner = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.prod(np.maximum(inner, 0), -1)
    union = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], -1) - common
    return common / union  # type: ignore[no-any-return]


def suppress(boxes: np.ndarray, scores: np.ndarray, most: float) -> list[int]:
    """Return the boxes of one class that remain, the best first: each overlaps every better one by `most` at the most."""
    left, kept = np.argsort(-scores, kind="stable"), []
    while left.size:
        kept.append(int(left[0]))
        left = left[1:][overlap(boxes[left[0]], boxes[left[1:]]) <= most]
    return kept


def detect(output: np.ndarray, size: tuple[int, int], threshold: float = 0.5, most: float = 0.45) -> list[Found]:
    """Return the objects in the output of the model, the best first; boxes end at the edges of the picture."""
    boxes, scores = decode(output, size)
    best = scores.argmax(-1)
    found = []
    for number, name in enumerate(CLASSES):
        mine = np.flatnonzero((best == number) & (scores[:, number] > threshold))
        for i in mine[suppress(boxes[mine], scores[mine, number], most)]:
            left, top, right, bottom = np.clip(boxes[i], 0, (*size, *size)).tolist()
            found.append(Found(name, float(scores[i, number]), (left, top, right, bottom)))
    return sorted(found, key=lambda f: -f.score)


def drawn(image: Any, found: list[Found]) -> Any:
    """Return the picture with the boxes and their labels."""
    image = image.copy()
    draw, width = ImageDraw.Draw(image), max(2, round(max(image.size) / 300))
    font = ImageFont.load_default(max(12, round(max(image.size) / 40)))
    for name, score, box in reversed(found):
        colour = PALETTE[CLASSES.index(name) % len(PALETTE)]
        draw.rectangle(box, outline=colour, width=width)
        text = f"{name} {score:.2f}"
        edges = draw.textbbox((box[0], box[1]), text, font=font)
        draw.rectangle(edges, fill=colour)
        draw.text((box[0], box[1]), text, fill="white", font=font)
    return image


def main() -> None:
    parser = options(__doc__, "tinyyolov2-8.onnx")
    parser.add_argument("pictures", nargs="*", type=Path)
    parser.add_argument("--threshold", type=between(0, 1), default=0.5, help="the lowest score of an object (%(default)s)")
    parser.add_argument("--overlap", type=between(0, 1), default=0.45, help="the largest overlap within a class (%(default)s)")
    parser.add_argument("--output", type=Path, help="write the first picture with its boxes, such as result.png")
    args = parser.parse_args()
    rep = load(args)
    for number, path in enumerate(args.pictures):
        image: Image.Image = read(path)
        found = detect(run(rep, planes(stretched(image, SIZE))), image.size, args.threshold, args.overlap)
        print(f"{path}: {len(found)} objects")
        for name, score, box in found:
            print(f"  {score:.4f}  {name}  " + " ".join(f"{v:.1f}" for v in box))
        if args.output and not number:
            save(drawn(image, found), args.output)


if __name__ == "__main__":
    start(main)
