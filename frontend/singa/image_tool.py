"""Image augmentation on Pillow, as a chain: each step makes of every image one or several.

    tool = image_tool.ImageTool()
    images = tool.load("cat.png").resize_by_range((112, 128)).random_crop((96, 96)).flip().get()

Pillow is the extra `image`; it is imported when an image is read or made.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput, MissingDependency

__all__ = ["ImageTool", "color_cast", "crop", "crop_and_resize", "enhance", "flip", "flip_down", "load_img", "resize", "scale"]

CORNERS = ("left_top", "left_bottom", "right_top", "right_bottom", "center")
ACROSS, DOWN = ("left", "center", "right"), ("top", "middle", "bottom")


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageEnhance
    except ImportError as error:
        raise MissingDependency("images need Pillow, which is not installed", hint="pip install 'sonnx[image]'") from error
    return PIL


# --- one image --------------------------------------------------------------------------------------------------------


def load_img(path: str | os.PathLike[str], grayscale: bool = False) -> Any:
    """The image in a file, in RGB or in grey; raises InvalidInput where there is none."""
    pil = _pillow()
    try:
        with pil.Image.open(path) as opened:
            return opened.convert("L" if grayscale else "RGB")
    except (OSError, pil.Image.DecompressionBombError) as error:
        raise InvalidInput(f"{os.fspath(path)} is no image that can be read: {error}", code="SX348") from None


def crop(img: Any, patch: tuple[int, int], position: str = "center") -> Any:
    """A patch (width, height) of the image at left_top, left_bottom, right_top, right_bottom or center."""
    (width, height), (w, h) = img.size, patch
    _fits(img, patch)
    if position not in CORNERS:
        raise InvalidInput(f"a patch is taken at {', '.join(CORNERS)}, not at {position!r}", code="SX347")
    across, _, down = position.partition("_")
    left = {"left": 0, "right": width - w}.get(across, (width - w) // 2)
    upper = {"top": 0, "bottom": height - h}.get(down, (height - h) // 2)
    return img.crop((left, upper, left + w, upper + h))


def crop_and_resize(img: Any, patch: tuple[int, int], position: str) -> Any:
    """The largest square at left, center or right of a wide image, at top, middle or bottom of a high one, in size `patch`."""
    width, height = img.size
    side = min(width, height)
    if position not in (*ACROSS, *DOWN):
        raise InvalidInput(f"a square is taken at {', '.join((*ACROSS, *DOWN))}, not at {position!r}", code="SX347")
    left = {"center": (width - side) // 2, "right": width - side}.get(position, 0)
    upper = {"middle": (height - side) // 2, "bottom": height - side}.get(position, 0)
    return img.crop((left, upper, left + side, upper + side)).resize(tuple(patch), _pillow().Image.BILINEAR)


def resize(img: Any, small_size: int) -> Any:
    """The image with its smaller side of this size, in the same proportions."""
    width, height = img.size
    if small_size < 1:
        raise InvalidInput(f"an image has a side of 1 or more, not of {small_size}", code="SX347")
    if width < height:
        size = (small_size, max(1, small_size * height // width))
    else:
        size = (max(1, small_size * width // height), small_size)
    return img.resize(size, _pillow().Image.BILINEAR)


scale = resize


def flip(img: Any) -> Any:
    """The image with left and right exchanged."""
    return img.transpose(_pillow().Image.Transpose.FLIP_LEFT_RIGHT)


def flip_down(img: Any) -> Any:
    """The image with top and bottom exchanged."""
    return img.transpose(_pillow().Image.Transpose.FLIP_TOP_BOTTOM)


def color_cast(img: Any, offset: int, rng: Any = random) -> Any:
    """Add to each channel, every other time, a number of [-offset, offset]; values stay within [0, 255]."""
    if not 0 <= offset <= 255:
        raise InvalidInput(f"the offset of a colour cast lies in [0, 255]; it is {offset}", code="SX347")
    pixels = np.asarray(img).astype(np.int16)
    cast = [rng.randint(-offset, offset) if rng.randint(0, 1) else 0 for _ in img.getbands()]
    shifted = np.clip(pixels + np.array(cast if pixels.ndim == 3 else cast[0], np.int16), 0, 255)
    return _pillow().Image.fromarray(shifted.astype(np.uint8))


def enhance(img: Any, scale: float, rng: Any = random) -> Any:
    """Change colour, contrast, brightness and sharpness, each every other time, by a factor of [1 - scale, 1 + scale]."""
    tools = _pillow().ImageEnhance
    for kind in (tools.Color, tools.Contrast, tools.Brightness, tools.Sharpness):
        if rng.randint(0, 1):
            img = kind(img).enhance(rng.uniform(1 - scale, 1 + scale))
    return img


def _fits(img: Any, patch: tuple[int, int]) -> None:
    if img.size[0] < patch[0] or img.size[1] < patch[1] or min(patch) < 1:
        raise InvalidInput(
            f"a patch of {patch[0]} x {patch[1]} is no part of an image of {img.size[0]} x {img.size[1]}", code="SX347"
        )


# --- a chain ----------------------------------------------------------------------------------------------------------


class ImageTool:
    """Images, and what is made of them.

    Each method replaces the images by what it makes and gives the tool; with `inplace=False` it gives the new images and keeps
    the old ones.  Where there are several cases, `num_case` says how many are drawn for each image: 1 in training, all in tests.
    seed: of the tool's own random numbers; when absent it is drawn from Python's `random`, so `random.seed` decides.
    Raises InvalidInput for arguments that fit no image.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.imgs: list[Any] = []
        self._given = 0
        self._rng = random.Random(random.getrandbits(64) if seed is None else seed)

    def load(self, path: str | os.PathLike[str], grayscale: bool = False) -> ImageTool:
        """Begin with the image in a file."""
        return self.set([load_img(path, grayscale)])

    def set(self, imgs: Sequence[Any]) -> ImageTool:
        """Begin with these images."""
        self.imgs = list(imgs)
        self._given = len(self.imgs)
        return self

    def append(self, img: Any) -> ImageTool:
        """Add an image."""
        self.imgs.append(img)
        self._given += 1
        return self

    def get(self) -> list[Any]:
        """The images."""
        return self.imgs

    def num_augmentation(self) -> int:
        """How many images the steps so far have made of each that was given."""
        return len(self.imgs) // self._given if self._given else 0

    # --- sizes and angles

    def resize(self, small_size: int, inplace: bool = True) -> Any:
        """The smaller side gets this size."""
        return self._each(lambda img: [resize(img, small_size)], inplace)

    def resize_by_range(self, rng: tuple[int, int], inplace: bool = True) -> Any:
        """The smaller side gets a size of [begin, end)."""
        return self.resize_by_list(range(*rng), 1, inplace)

    def resize_by_list(self, size_list: Sequence[int], num_case: int = 1, inplace: bool = True) -> Any:
        """The smaller side gets some of these sizes."""
        return self._cases(size_list, num_case, resize, inplace)

    scale, scale_by_range, scale_by_list = resize, resize_by_range, resize_by_list

    def rotate(self, angle: float, inplace: bool = True) -> Any:
        """Turn by degrees against the clock; what comes in at the corners is black."""
        return self._each(lambda img: [img.rotate(angle)], inplace)

    def rotate_by_range(self, rng: tuple[int, int], inplace: bool = True) -> Any:
        """Turn by degrees of [begin, end)."""
        return self.rotate_by_list(range(*rng), 1, inplace)

    def rotate_by_list(self, angle_list: Sequence[float], num_case: int = 1, inplace: bool = True) -> Any:
        """Turn by some of these degrees."""
        return self._cases(angle_list, num_case, lambda img, angle: img.rotate(angle), inplace)

    # --- patches

    def crop(self, patch: tuple[int, int], position: str = "center", inplace: bool = True) -> Any:
        """A patch (width, height) at one of `CORNERS`."""
        return self._each(lambda img: [crop(img, patch, position)], inplace)

    def crop5(self, patch: tuple[int, int], num_case: int = 1, inplace: bool = True) -> Any:
        """Patches at the four corners and the center."""
        return self._cases(CORNERS, num_case, lambda img, position: crop(img, patch, position), inplace)

    def crop3(self, patch: tuple[int, int], num_case: int = 1, inplace: bool = True) -> Any:
        """The largest squares at the two ends and in the middle, in size `patch`, a square too."""
        _square(patch)
        _check_cases(num_case, 3)
        return self._each(lambda img: [crop_and_resize(img, patch, p) for p in self._some(_thirds(img), num_case)], inplace)

    def crop8(self, patch: tuple[int, int], num_case: int = 1, inplace: bool = True) -> Any:
        """The five of `crop5` and the three of `crop3`."""
        _square(patch)
        _check_cases(num_case, 8)

        def patches(img: Any) -> list[Any]:
            every = [*((crop, p) for p in CORNERS), *((crop_and_resize, p) for p in _thirds(img))]
            return [make(img, patch, p) for make, p in self._some(every, num_case)]

        return self._each(patches, inplace)

    def random_crop(self, patch: tuple[int, int], inplace: bool = True) -> Any:
        """A patch (width, height) at any place."""

        def one(img: Any) -> list[Any]:
            _fits(img, patch)
            left, upper = (self._rng.randint(0, n - p) for n, p in zip(img.size, patch, strict=True))
            return [img.crop((left, upper, left + patch[0], upper + patch[1]))]

        return self._each(one, inplace)

    def random_crop_resize(self, patch: tuple[int, int], inplace: bool = True) -> Any:
        """A part of 8 to 100 % of the area, of proportions of [3/4, 4/3], in size `patch`; the whole where ten draws miss."""

        def one(img: Any) -> list[Any]:
            (width, height), part = img.size, img
            for _ in range(10):
                area, ratio = self._rng.uniform(0.08, 1.0) * width * height, self._rng.uniform(3 / 4, 4 / 3)
                w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
                if 0 < w <= width and 0 < h <= height:
                    left, upper = self._rng.randint(0, width - w), self._rng.randint(0, height - h)
                    part = img.crop((left, upper, left + w, upper + h))
                    break
            return [part.resize(tuple(patch), _pillow().Image.BILINEAR)]

        return self._each(one, inplace)

    # --- mirrors and colours

    def flip(self, num_case: int = 1, inplace: bool = True) -> Any:
        """Exchange left and right, every other time; with num_case=2, the exchanged image and the one that was."""
        return self._mirrored(flip, num_case, inplace)

    def flip_down(self, num_case: int = 1, inplace: bool = True) -> Any:
        """Exchange top and bottom, as `flip` does."""
        return self._mirrored(flip_down, num_case, inplace)

    def color_cast(self, offset: int = 20, inplace: bool = True) -> Any:
        """Add to some channels a number of [-offset, offset]."""
        return self._each(lambda img: [color_cast(img, offset, self._rng)], inplace)

    def enhance(self, scale: float = 0.2, inplace: bool = True) -> Any:
        """Change some of colour, contrast, brightness and sharpness by a factor of [1 - scale, 1 + scale]."""
        return self._each(lambda img: [enhance(img, scale, self._rng)], inplace)

    # --- how

    def _each(self, make: Callable[[Any], list[Any]], inplace: bool) -> Any:
        made = [new for img in self.imgs for new in make(img)]
        if not inplace:
            return made
        self.imgs = made
        return self

    def _cases(self, cases: Sequence[Any], count: int, make: Callable[[Any, Any], Any], inplace: bool) -> Any:
        _check_cases(count, len(cases))
        return self._each(lambda img: [make(img, case) for case in self._some(cases, count)], inplace)

    def _some(self, cases: Sequence[Any], count: int) -> list[Any]:
        """So many of the cases, in their order."""
        chosen = range(len(cases)) if count == len(cases) else sorted(self._rng.sample(range(len(cases)), count))
        return [cases[i] for i in chosen]

    def _mirrored(self, mirror: Callable[[Any], Any], num_case: int, inplace: bool) -> Any:
        _check_cases(num_case, 2)
        if num_case == 2:
            return self._each(lambda img: [mirror(img), img], inplace)
        return self._each(lambda img: [mirror(img) if self._rng.randint(0, 1) else img], inplace)


def _thirds(img: Any) -> tuple[str, ...]:
    return ACROSS if img.size[0] > img.size[1] else DOWN


def _check_cases(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidInput(f"num_case lies in [1, {most}]; it is {count}", code="SX347")


def _square(patch: tuple[int, int]) -> None:
    if patch[0] != patch[1]:
        raise InvalidInput(f"the patch is a square; it is {patch[0]} x {patch[1]}", code="SX347")
