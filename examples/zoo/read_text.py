"""Read the text of a picture with PP-OCRv4: python read_text.py PICTURE [--output boxes.png]

Three models find lines of text, tell which are upside down, and read them.  They are files of a PyPI package:
pip install --no-deps --ignore-requires-python rapidocr-onnxruntime==1.4.4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
import numpy as np
from images import Image, ImageDraw, ImageFont
from packaged import Package, options
from published import between, find, start, verify

from singa import sonnx
from singa_backend.errors import InvalidModel

RAPID = Package("rapidocr-onnxruntime", "1.4.4", "--ignore-requires-python")  # the code needs an old Python, the files do not
DETECTOR, ANGLES, READER = "ch_PP-OCRv4_det_infer.onnx", "ch_ppocr_mobile_v2.0_cls_infer.onnx", "ch_PP-OCRv4_rec_infer.onnx"

MASK, SURE, DROPPED = 0.3, 0.5, 0.5
"""Lowest probabilities: of a pixel of text, of a box on average, and of a text on average."""

GROWTH = 2.0
"""The detector marks the core of a line; its edges move out by this factor of area / perimeter."""

LONGEST = 2000
WIDEST = 8
"""The longest side that the detector receives, and the highest ratio of sides of a page; other pages get margins."""

TURNED = 0.9
HEIGHT, NARROWEST = 48, 320
ANGLE_WIDTH = 192
BATCH = 6


@dataclass(frozen=True)
class Line:
    """A piece of text, its mean probability, and its corners on the page: top left, top right, bottom right, bottom left."""

    text: str
    score: float
    corners: np.ndarray
    turned: bool = False


# --- finding


def detector_input(page: Any, side: int) -> np.ndarray:
    """Return a page as float32[1, 3, H, W]; its short side becomes at least `side`, and both multiples of 32."""
    scale = min(max(1.0, side / min(page.size)), LONGEST / max(page.size))
    width, height = (max(32, round(n * scale / 32) * 32) for n in page.size)
    return planes(page.resize((width, height), Image.Resampling.BILINEAR))


def planes(image: Any) -> np.ndarray:
    """Return a picture as float32[1, 3, H, W] between -1 and 1: blue, green and red, as the models were trained."""
    return images.planes(image)[:, ::-1] / np.float32(127.5) - np.float32(1)


def components(mask: np.ndarray) -> list[np.ndarray]:
    """Return the ends of the runs of each connected part of a mask as points (x, y); diagonal neighbours are connected.

    The convex hull of a part is that of these points.
    """
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    ys, first = np.nonzero(edges == 1)
    last = np.nonzero(edges == -1)[1] - 1
    parent = list(range(len(ys)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    begin = np.searchsorted(ys, np.arange(len(mask) + 1))
    for y in range(1, len(mask)):
        above, stop = int(begin[y - 1]), int(begin[y])
        for i in range(stop, int(begin[y + 1])):
            while above < stop and last[above] < first[i] - 1:
                above += 1
            k = above
            while k < stop and first[k] <= last[i] + 1:
                parent[root(k)] = root(i)
                k += 1
    if not len(ys):
        return []
    roots = np.array([root(i) for i in range(len(ys))])
    order = np.argsort(roots, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(roots[order])) + 1)
    return [np.concatenate([np.stack([ends[own], ys[own]], 1) for ends in (first, last)]) for own in parts]


def hull(points: np.ndarray) -> np.ndarray:
    """Return the convex hull of points, by Andrew's monotone chain."""
    ordered = [tuple(p) for p in np.unique(points, axis=0).tolist()]
    if len(ordered) < 3:
        return np.array(ordered, np.float64)

    def half(row: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        out: list[tuple[float, float]] = []
        for p in row:
            while len(out) > 1 and _turn(out[-2], out[-1], p) <= 0:
                out.pop()
            out.append(p)
        return out[:-1]

    return np.array(half(ordered) + half(ordered[::-1]), np.float64)


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


@dataclass(frozen=True)
class Box:
    """A rectangle: its centre, its sides, and the unit vector of its width, within 45 degrees of the x axis."""

    centre: np.ndarray
    width: float
    height: float
    along: np.ndarray

    @property
    def down(self) -> np.ndarray:
        """The unit vector of its height."""
        return np.array([-self.along[1], self.along[0]])

    def grown(self, by: float) -> Box:
        """Return the rectangle with its edges moved out."""
        return Box(self.centre, self.width + 2 * by, self.height + 2 * by, self.along)

    def corners(self) -> np.ndarray:
        """Return the corners: top left, top right, bottom right, bottom left."""
        u, v = self.along * self.width / 2, self.down * self.height / 2
        return np.array([self.centre - u - v, self.centre + u - v, self.centre + u + v, self.centre - u + v])

    def mean(self, values: np.ndarray) -> float:
        """Return the mean of the values within the rectangle."""
        corners = self.corners()
        low = np.maximum(np.floor(corners.min(0)).astype(int), 0)
        high = np.minimum(np.ceil(corners.max(0)).astype(int) + 1, values.shape[::-1])
        y, x = np.mgrid[low[1] : high[1], low[0] : high[0]]
        off = np.stack([x, y], -1) - self.centre
        inside = (abs(off @ self.along) <= self.width / 2 + 1e-6) & (abs(off @ self.down) <= self.height / 2 + 1e-6)
        return float(values[low[1] : high[1], low[0] : high[0]][inside].mean()) if inside.any() else 0.0


def smallest_box(points: np.ndarray) -> Box:
    """Return the rectangle of the smallest area around points; one of its sides is on an edge of their convex hull."""
    corners = hull(points)
    edges = np.roll(corners, -1, axis=0) - corners
    angles = np.arctan2(edges[:, 1], edges[:, 0])
    angles = np.unique(np.append((angles + np.pi / 4) % (np.pi / 2) - np.pi / 4, 0.0))
    along = np.stack([np.cos(angles), np.sin(angles)], 1)
    down = np.stack([-along[:, 1], along[:, 0]], 1)
    u, v = corners @ along.T, corners @ down.T
    sizes = np.stack([np.ptp(u, axis=0), np.ptp(v, axis=0)], 1)
    best = int(np.lexsort((abs(angles), sizes.prod(1).round(6)))[0])
    middle = (u[:, best].min() + u[:, best].max()) / 2, (v[:, best].min() + v[:, best].max()) / 2
    width, height = sizes[best].tolist()
    return Box(middle[0] * along[best] + middle[1] * down[best], width, height, along[best])


def boxes(probabilities: np.ndarray) -> list[Box]:
    """Return the boxes of lines of text on a map of probabilities, by the rules of differentiable binarization (DB)."""
    mask = probabilities > MASK
    wide = np.pad(mask, ((1, 0), (1, 0)))
    wide = wide[1:, 1:] | wide[:-1, 1:] | wide[1:, :-1] | wide[:-1, :-1]  # each pixel of text, and its neighbours below
    found = []
    for points in components(wide):
        box = smallest_box(points)
        if min(box.width, box.height) < 3 or box.mean(probabilities) < SURE:
            continue
        box = box.grown(GROWTH * box.width * box.height / (2 * (box.width + box.height)))
        if min(box.width, box.height) >= 5:
            found.append(box)
    return found


def find_lines(rep: Any, page: Any, side: int) -> list[np.ndarray]:
    """Return the corners of the lines of text on a page, in no order."""
    x = detector_input(page, side)
    found = rep.run([x])[0][0, 0]
    scale = np.array(page.size) / found.shape[::-1]
    return [np.clip((box.corners() + 0.5) * scale, 0, page.size) for box in boxes(found)]


# --- reading


def cut(page: Any, corners: np.ndarray) -> Any:
    """Return a line of text as a picture; one that is much higher than wide is turned to the left."""
    a, b, c, d = corners
    width = max(1, round(max(np.linalg.norm(a - b), np.linalg.norm(d - c))))
    height = max(1, round(max(np.linalg.norm(a - d), np.linalg.norm(b - c))))
    quad = [float(v) for v in np.concatenate([a, d, c, b])]
    line = page.transform((width, height), Image.Transform.QUAD, quad, Image.Resampling.BICUBIC)
    return line.transpose(Image.Transpose.ROTATE_90) if height >= 1.5 * width else line


def row(line: Any, width: int) -> np.ndarray:
    """Return a line of text as float32[1, 3, 48, width]: at this height, with zeros after it, or squeezed to the width."""
    own = min(width, max(1, round(HEIGHT * line.width / line.height)))
    out = np.zeros((1, 3, HEIGHT, width), np.float32)
    out[..., :own] = planes(line.resize((own, HEIGHT), Image.Resampling.BILINEAR))
    return out


def upside_down(rep: Any, lines: Sequence[Any]) -> list[bool]:
    """Return which lines of text are turned by 180 degrees."""
    found: list[bool] = []
    for i in range(0, len(lines), BATCH):
        out = rep.run([np.concatenate([row(line, ANGLE_WIDTH) for line in lines[i : i + BATCH]])])[0]
        found += [bool(p > TURNED) for p in out[:, 1]]
    return found


def characters(path: Path) -> list[str]:
    """Return the characters of a reader's outputs, by the metadata of its file; the first is the blank between equal ones."""
    listed = {p.key: p.value for p in sonnx.load(path).metadata_props}.get("character")
    if listed is None:
        raise InvalidModel("the model must have the property 'character'", hint=f"--model is {READER}")
    return ["", *listed.removesuffix("\n").split("\n"), " "]


def decoded(probabilities: np.ndarray, alphabet: Sequence[str]) -> tuple[str, float]:
    """Return the text of probabilities float32[steps, characters] and its mean probability (greedy CTC decoding)."""
    if probabilities.shape[1] != len(alphabet):
        raise InvalidModel(f"the model has {probabilities.shape[1]} outputs for {len(alphabet)} characters")
    best = probabilities.argmax(1)
    kept = (best != 0) & (best != np.append(-1, best[:-1]))
    scores = probabilities.max(1)[kept]
    return "".join(alphabet[i] for i in best[kept]), float(scores.mean()) if len(scores) else 0.0


def read_lines(rep: Any, alphabet: Sequence[str], lines: Sequence[Any]) -> list[tuple[str, float]]:
    """Return the text of each line and its mean probability; lines of similar widths share a batch."""
    ratios = [line.width / line.height for line in lines]
    order = sorted(range(len(lines)), key=ratios.__getitem__)
    found: list[tuple[str, float]] = [("", 0.0)] * len(lines)
    for k in range(0, len(order), BATCH):
        part = order[k : k + BATCH]
        width = max(NARROWEST, int(HEIGHT * ratios[part[-1]]))
        out = rep.run([np.concatenate([row(lines[i], width) for i in part])])[0]
        for i, probabilities in zip(part, out, strict=True):
            found[i] = decoded(probabilities, alphabet)
    return found


# --- a page


def with_margins(page: Any) -> tuple[Any, int, int]:
    """Return a page that is not extremely long, and the columns and rows that were added before it."""
    width, height = page.size
    wide, high = max(width, -(-height // WIDEST)), max(height, -(-width // WIDEST))
    if (wide, high) == page.size:
        return page, 0, 0
    pixels = np.asarray(page)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    out = Image.new("RGB", (wide, high), tuple(int(v) for v in np.median(border, axis=0)))
    left, top = (wide - width) // 2, (high - height) // 2
    out.paste(page, (left, top))
    return out, left, top


def in_order(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the rows of a page from top to bottom, each from left to right; of a page upside down, as one that is upright."""
    sign = -1 if sum(line.turned for line in lines) * 2 > len(lines) else 1
    middle = {id(line): sign * line.corners.mean(0) for line in lines}
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda n: middle[id(n)][1]):
        y = middle[id(line)][1]
        high = np.ptp(line.corners[:, 1])
        if rows and abs(y - middle[id(rows[-1][0])][1]) < min(high, np.ptp(rows[-1][0].corners[:, 1])) / 2:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [sorted(r, key=lambda n: middle[id(n)][0]) for r in rows]


def read_page(detector: Any, angles: Any, reader: Any, alphabet: Sequence[str], page: Any, side: int = 736) -> list[list[Line]]:
    """Return the text of a page: its rows, each of one or more pieces."""
    whole, left, top = with_margins(page)
    corners = find_lines(detector, whole, side)
    cuts = [cut(whole, c) for c in corners]
    turned = upside_down(angles, cuts)
    cuts = [c.transpose(Image.Transpose.ROTATE_180) if t else c for c, t in zip(cuts, turned, strict=True)]
    read = zip(read_lines(reader, alphabet, cuts), corners, turned, strict=True)
    lines = [Line(text, score, np.clip(c - (left, top), 0, page.size), t) for (text, score), c, t in read]
    return in_order([line for line in lines if line.text.strip() and line.score >= DROPPED])


def draw(page: Any, rows: Sequence[Sequence[Line]], path: Path) -> None:
    """Write the page with its boxes, and the texts in a second column."""
    out = Image.new("RGB", (2 * page.width, page.height), "white")
    out.paste(page, (0, 0))
    pen = ImageDraw.Draw(out)
    for i, line in enumerate(n for r in rows for n in r):
        colour = images.PALETTE[i % len(images.PALETTE)]
        pen.polygon([tuple(p) for p in line.corners.tolist()], outline=colour, width=2)
        x, y = line.corners.min(0)
        size = max(10, min(40, int(np.ptp(line.corners[:, 1]) * 0.6)))
        pen.text((page.width + float(x), float(y)), line.text, fill=colour, font=ImageFont.load_default(size))
    images.save(out, path)


def main() -> None:
    parser = options(__doc__, RAPID, READER)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--detector", metavar="PATH_OR_URL", help=f"{DETECTOR}, by default that of the package")
    parser.add_argument("--angles", metavar="PATH_OR_URL", help=f"{ANGLES}, by default that of the package")
    parser.add_argument(
        "--side", type=between(32, LONGEST, int), default=736, help="pixels of the short side for the detector (%(default)s)"
    )
    parser.add_argument("--boxes", action="store_true", help="print the probability and the corners of each piece of text")
    parser.add_argument("--output", type=Path, help="write the page with its boxes and texts, such as boxes.png")
    args = parser.parse_args()
    page = images.read(args.picture)
    given = {READER: args.model, DETECTOR: args.detector, ANGLES: args.angles}
    paths = {n: find(g or str(RAPID.file(n)), args.sha256 if n == READER else None, args.cache) for n, g in given.items()}
    reps = {n: sonnx.prepare(p, device=args.device) for n, p in paths.items()}
    if args.verify:
        verify(reps[READER], paths[READER])
    rows = read_page(reps[DETECTOR], reps[ANGLES], reps[READER], characters(paths[READER]), page, args.side)
    for r in rows:
        print(*(line.text for line in r))
        for line in r if args.boxes else ():
            places = " ".join(f"({x:.0f}, {y:.0f})" for x, y in line.corners)
            print(f"    {line.score:.3f} {places}{' upside down' if line.turned else ''}")
    if args.output:
        draw(page, rows, args.output)


if __name__ == "__main__":
    start(main)
