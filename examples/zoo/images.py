"""Shared by the image programs of this folder: pictures as inputs of models, probabilities, labels and result pictures."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from published import between, load, numbers, options, softmax, stop

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.io.archives import read_bytes, typed
from singa_backend.io.files import writing

try:
    from PIL import Image, ImageDraw, ImageFont, ImageOps
except ModuleNotFoundError:
    stop(MissingDependency("this program needs Pillow", hint="pip install 'sonnx[zoo]'"))

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pictures of ImageNet: red, green and blue, in 0 to 1."""

PALETTE = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000", "#000075", "#f032e6")


# --- in


def read(path: str | Path, mode: str = "RGB") -> Any:
    """Return a picture upright, in "RGB" or "L" (grey); transparent parts become white.

    Raises:
        InvalidInput: the file is not a picture of 8 bits a channel.
    """
    data = read_bytes(path, "SX307")
    with typed(str(path), "SX307"):
        image = Image.open(io.BytesIO(data))
        packed = str([tile[3] for tile in getattr(image, "tile", ())])  # "RGB;16B": Pillow would drop the low bits
        if image.mode[0] in "IF" or re.search(r";16[BLN]", packed):
            raise ValueError(f"a picture must have 8 bits a channel, got Pillow's mode {image.mode}, stored as {packed}")
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert(mode)


def stretched(image: Any, size: int) -> Any:
    """Return a picture of `size` x `size`, whatever its proportions were."""
    return image.resize((size, size), Image.Resampling.BILINEAR)


def covered(image: Any, side: int, size: int) -> Any:
    """Return the centre, `size` x `size`, of a picture whose short side becomes `side`.

    Raises:
        InvalidInput: one side is more than 100 times the other: the resized picture would be very large.
    """
    if max(image.size) > 100 * min(image.size):
        raise InvalidInput(f"a picture must be at most 100 times as long as short, got {image.width} x {image.height}")
    width, height = (max(side, round(n * side / min(image.size))) for n in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def planes(image: Any) -> np.ndarray:
    """Return the channels of a picture as float32[1, C, H, W], 0 to 255."""
    array = np.asarray(image, np.float32)
    return array.reshape(*array.shape[:2], -1).transpose(2, 0, 1)[None].copy()


def normalised(image: Any) -> np.ndarray:
    """Return `planes` in 0 to 1, less the mean of ImageNet, divided by its standard deviation."""
    mean, std = (np.array(v, np.float32).reshape(1, 3, 1, 1) for v in (MEAN, STD))
    return (planes(image) / np.float32(255) - mean) / std  # type: ignore[no-any-return]


# --- out


def run(rep: Any, x: np.ndarray) -> np.ndarray:
    """Return the first output for a batch; a model that is declared for smaller batches runs several times."""
    declared = rep.inputs[0].shape
    size = declared[0] if declared and isinstance(declared[0], int) else len(x)
    return np.concatenate([numbers(rep.run([x[i : i + size]])[0]) for i in range(0, len(x), size)])


def labels(path: Path | None, count: int) -> list[str]:
    """Return the names of the classes from a file with a name a line, without WordNet's numbers ("n01440764 tench").

    Without a file they are numbers.
    """
    if path is None:
        return [f"class {i}" for i in range(count)]
    with typed(str(path), "SX307"):
        lines = [line.strip() for line in read_bytes(path, "SX307").decode("utf-8-sig").splitlines()]
    names = [re.sub(r"^n\d{8}\s+", "", line) for line in lines if line]
    if len(names) != count:
        raise InvalidInput(f"there must be {count} labels for the classes of the model, got {len(names)} in {path}")
    return names


def bars(image: Any, rows: Sequence[tuple[str, float]], path: Path) -> None:
    """Write a picture next to a plot of bars with their names; values are in 0 to 1."""
    high, wide, font = 28, 420, ImageFont.load_default(14)
    shown = ImageOps.contain(image.convert("RGB"), (360, 360))
    page = Image.new("RGB", (shown.width + wide, max(shown.height, high * len(rows))), "white")
    page.paste(shown, (0, 0))
    draw = ImageDraw.Draw(page)
    for i, (name, value) in enumerate(rows):
        left, top = shown.width + 10, i * high + 4
        draw.rectangle((left, top, left + round(value * (wide - 20)), top + high - 8), fill="#9ec9ff")
        draw.text((left + 4, top + 1), f"{value:.3f}  {name}", fill="black", font=font)
    save(page, path)


def save(image: Any, path: Path) -> None:
    """Write a picture in the format of its name."""
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind not in Image.SAVE:
        raise InvalidInput(f"a picture must have a name such as result.png, got {path}", code="SX351")
    with writing(path) as out:
        image.save(out, format=kind)
    print(f"wrote {path}")


# --- the classification programs


@dataclass(frozen=True)
class Classifier:
    """A published model of ImageNet's classes, and what its authors document.

    published: the name of its file.  crop: from a picture to 224 x 224.
    """

    published: str
    crop: Callable[[Any], Any] = lambda image: covered(image, 256, 224)

    def probabilities(self, rep: Any, image: Any) -> np.ndarray:
        """Return the probability of each class; models return (1, classes) or (1, classes, 1, 1), some after a softmax."""
        scores = run(rep, normalised(self.crop(image))).reshape(-1)
        kinds = [
            step.node.op_type for step in rep.layers if step.node.op_type not in ("Reshape", "Flatten", "Squeeze", "Identity")
        ]
        return scores if kinds[-1:] == ["Softmax"] else softmax(scores)

    def main(self, about: str | None) -> None:
        """Run the program."""
        parser = options(about, self.published)
        parser.add_argument("pictures", nargs="*", type=Path)
        parser.add_argument("--labels", type=Path, help="a file with the name of a class a line, such as synset.txt")
        parser.add_argument("--top", type=between(1, 1000, int), default=5, help="the number of classes shown (%(default)s)")
        parser.add_argument("--plot", type=Path, help="write the first picture and the probabilities, such as result.png")
        args = parser.parse_args()
        if args.plot and not args.pictures:
            parser.error("--plot needs a picture")
        rep = load(args)
        for number, path in enumerate(args.pictures):
            image = read(path)
            found = self.probabilities(rep, image)
            names = labels(args.labels, len(found))
            rows = [(names[i], float(found[i])) for i in np.argsort(-found, kind="stable")[: args.top]]
            print(path, *(f"  {value:.4f}  {name}" for name, value in rows), sep="\n")
            if args.plot and not number:
                bars(image, rows, args.plot)
