"""Image augmentation with Pillow, as a chain: each step replaces every image by one or several.

    tool = image_tool.ImageTool()
    images = tool.load("cat.png").resize_by_range((112, 128)).random_crop((96, 96)).flip().get()

Pillow is the optional dependency `image`; it is imported when an image is read or created.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.io.archives import open_file

__all__ = [
    "ImageTool", "color_cast", "crop", "crop_and_resize", "enhance", "flip", "flip_down", "get_list_sample", "load_img", "resize",
    "resize_by_hw", "scale",
]  # fmt: skip

CORNERS = ("left_top", "left_bottom", "right_top", "right_bottom", "center")
ACROSS, DOWN = ("left", "center", "right"), ("top", "middle", "bottom")


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageEnhance
    except ImportError as error:
        raise MissingDependency(
            "Pillow is required for images and is not installed", hint="pip install 'sonnx[image]'"
        ) from error
    return PIL


# --- one image --------------------------------------------------------------------------------------------------------


def load_img(path: str | os.PathLike[str], grayscale: bool = False) -> Any:
    """Read an image from a file.

    Args:
        path: Path of the file, in a format that Pillow reads.
        grayscale: Whether the image is converted to mode "L" (8-bit grey); otherwise to "RGB".

    Returns:
        A Pillow image.

    Raises:
        InvalidInput: If the file is not a readable image (SX348).
        MissingDependency: If Pillow is not installed.
    """
    pil = _pillow()
    try:
        with open_file(path, "SX348") as file, pil.Image.open(file) as opened:
            return opened.convert("L" if grayscale else "RGB")
    except (InvalidInput, OSError, ValueError, SyntaxError, pil.Image.DecompressionBombError) as error:
        why = getattr(error, "message", error)
        raise InvalidInput(f"{os.fspath(path)} is not a readable image: {why}", code="SX348") from None


def crop(img: Any, patch: tuple[int, int], position: str = "center") -> Any:
    """Cut out a patch of an image.

    Args:
        img: Pillow image.
        patch: Width and height of the patch, in pixels.
        position: "left_top", "left_bottom", "right_top", "right_bottom" or "center".

    Returns:
        The patch, a Pillow image.

    Raises:
        InvalidInput: If the patch is larger than the image, or the position is unknown (SX347).
    """
    (width, height), (w, h) = img.size, patch
    _check_patch(img, patch)
    if position not in CORNERS:
        raise InvalidInput(f"position of a patch must be one of {', '.join(CORNERS)}, got {position!r}", code="SX347")
    across, _, down = position.partition("_")
    left = {"left": 0, "right": width - w}.get(across, (width - w) // 2)
    upper = {"top": 0, "bottom": height - h}.get(down, (height - h) // 2)
    return img.crop((left, upper, left + w, upper + h))


def crop_and_resize(img: Any, patch: tuple[int, int], position: str) -> Any:
    """Cut out the largest square of an image and resize it (bilinear).

    Args:
        img: Pillow image.
        patch: Width and height of the result, in pixels.
        position: "left", "center" or "right" for a wide image, "top", "middle" or "bottom" for a tall one.

    Returns:
        A Pillow image of size `patch`.

    Raises:
        InvalidInput: If the position is unknown (SX347).
    """
    width, height = img.size
    side = min(width, height)
    if position not in (*ACROSS, *DOWN):
        raise InvalidInput(f"position of a square must be one of {', '.join((*ACROSS, *DOWN))}, got {position!r}", code="SX347")
    left = {"center": (width - side) // 2, "right": width - side}.get(position, 0)
    upper = {"middle": (height - side) // 2, "bottom": height - side}.get(position, 0)
    return img.crop((left, upper, left + side, upper + side)).resize(tuple(patch), _pillow().Image.BILINEAR)


def resize(img: Any, small_size: int) -> Any:
    """Resize an image (bilinear), keeping its proportions.

    Args:
        img: Pillow image.
        small_size: Size of its smaller side in the result, in pixels.

    Returns:
        A Pillow image.

    Raises:
        InvalidInput: If the size is below 1 (SX347).
    """
    width, height = img.size
    if small_size < 1:
        raise InvalidInput(f"small_size must be at least 1, got {small_size}", code="SX347")
    if width < height:
        size = (small_size, max(1, small_size * height // width))
    else:
        size = (max(1, small_size * width // height), small_size)
    return img.resize(size, _pillow().Image.BILINEAR)


scale = resize


def resize_by_hw(img: Any, size: tuple[int, int]) -> Any:
    """Resize an image (bilinear) to a height and a width.

    Args:
        img: Pillow image.
        size: Height and width of the result, in pixels.

    Returns:
        A Pillow image.

    Raises:
        InvalidInput: If the size is not two numbers of at least 1 (SX347).
    """
    if len(size) != 2 or min(size) < 1:
        raise InvalidInput(f"size must be a height and a width of at least 1, got {size}", code="SX347")
    height, width = size
    return img.resize((width, height), _pillow().Image.BILINEAR)


def get_list_sample(l: Sequence[Any], sample_size: int, rng: Any = random) -> list[Any]:  # noqa: E741
    """Draw a sample of a list, without repetition and in the order of the list.

    Args:
        l: The list.
        sample_size: The number of elements to draw.
        rng: Source of random numbers with the methods of Python's `random`.

    Returns:
        A list of the elements.

    Raises:
        InvalidInput: If `sample_size` is not in [0, number of elements] (SX347).
    """
    if not 0 <= sample_size <= len(l):
        raise InvalidInput(f"sample_size must be in [0, {len(l)}], got {sample_size}", code="SX347")
    return [l[i] for i in sorted(rng.sample(range(len(l)), sample_size))]


def flip(img: Any) -> Any:
    """Exchange left and right.

    Args:
        img: Pillow image.

    Returns:
        A Pillow image of the same size.
    """
    return img.transpose(_pillow().Image.Transpose.FLIP_LEFT_RIGHT)


def flip_down(img: Any) -> Any:
    """Exchange top and bottom.

    Args:
        img: Pillow image.

    Returns:
        A Pillow image of the same size.
    """
    return img.transpose(_pillow().Image.Transpose.FLIP_TOP_BOTTOM)


def color_cast(img: Any, offset: int, rng: Any = random) -> Any:
    """Add to each channel, with probability 1/2, an integer drawn from [-offset, offset]; values are clipped to [0, 255].

    Args:
        img: Pillow image with 8 bits per channel.
        offset: Maximum magnitude of the integers, in [0, 255].
        rng: Source of random numbers with the methods of Python's `random`.

    Returns:
        A Pillow image of the same size and mode.

    Raises:
        InvalidInput: If the offset is outside [0, 255] (SX347).
    """
    if not 0 <= offset <= 255:
        raise InvalidInput(f"offset of a colour cast must be in [0, 255], got {offset}", code="SX347")
    pixels = np.asarray(img).astype(np.int16)
    cast = [rng.randint(-offset, offset) if rng.randint(0, 1) else 0 for _ in img.getbands()]
    shifted = np.clip(pixels + np.array(cast if pixels.ndim == 3 else cast[0], np.int16), 0, 255)
    return _pillow().Image.fromarray(shifted.astype(np.uint8))


def enhance(img: Any, scale: float, rng: Any = random) -> Any:
    """Change colour, contrast, brightness and sharpness, each with probability 1/2, by a factor from [1 - scale, 1 + scale].

    Args:
        img: Pillow image.
        scale: Maximum deviation of the factors from 1.
        rng: Source of random numbers with the methods of Python's `random`.

    Returns:
        A Pillow image of the same size.
    """
    tools = _pillow().ImageEnhance
    for kind in (tools.Color, tools.Contrast, tools.Brightness, tools.Sharpness):
        if rng.randint(0, 1):
            img = kind(img).enhance(rng.uniform(1 - scale, 1 + scale))
    return img


def _check_patch(img: Any, patch: tuple[int, int]) -> None:
    if img.size[0] < patch[0] or img.size[1] < patch[1] or min(patch) < 1:
        raise InvalidInput(
            f"a patch of an image of {img.size[0]} x {img.size[1]} must fit in it, got {patch[0]} x {patch[1]}", code="SX347"
        )


# --- a chain ----------------------------------------------------------------------------------------------------------


class ImageTool:
    """A list of images and a chain of steps that transform them.

    Each step replaces the images and returns the tool; with `inplace=False` it returns the list of new images and keeps the old
    ones. If a step has several cases, such as the corners of `crop5`, `num_case` of them are drawn at random for each image:
    use 1 in training and all in tests.

    Args:
        seed: Seed of the tool's random numbers; if None, it is drawn from Python's `random`, so that `random.seed` determines it.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.imgs: list[Any] = []
        self._originals = 0
        self._rng = random.Random(random.getrandbits(64) if seed is None else seed)

    def load(self, path: str | os.PathLike[str], grayscale: bool = False) -> ImageTool:
        """Replace the images by one read from a file.

        Args:
            path: Path of the file.
            grayscale: Whether the image is converted to 8-bit grey; otherwise to RGB.

        Returns:
            The tool.

        Raises:
            InvalidInput: If the file is not a readable image (SX348).
            MissingDependency: If Pillow is not installed.
        """
        return self.set([load_img(path, grayscale)])

    def set(self, imgs: Sequence[Any]) -> ImageTool:
        """Replace the images.

        Args:
            imgs: Pillow images.

        Returns:
            The tool.
        """
        self.imgs = list(imgs)
        self._originals = len(self.imgs)
        return self

    def append(self, img: Any) -> ImageTool:
        """Add an image.

        Args:
            img: Pillow image.

        Returns:
            The tool.
        """
        self.imgs.append(img)
        self._originals += 1
        return self

    def get(self) -> list[Any]:
        """Return the current images.

        Returns:
            A list of Pillow images.
        """
        return self.imgs

    def num_augmentation(self) -> int:
        """Return how many images the steps made from each original image.

        Returns:
            The number of current images divided by the number of original ones; 0 if there are none.
        """
        return len(self.imgs) // self._originals if self._originals else 0

    # --- sizes and angles

    def resize(self, small_size: int, inplace: bool = True) -> Any:
        """Resize each image, keeping its proportions.

        Args:
            small_size: Size of the smaller side, in pixels.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the size is below 1 (SX347).
        """
        return self._each(lambda img: [resize(img, small_size)], inplace)

    def resize_by_range(self, rng: tuple[int, int], inplace: bool = True) -> Any:
        """Resize each image to a random size, keeping its proportions.

        Args:
            rng: The range [begin, end) of the size of the smaller side, in pixels.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the range is empty or contains a size below 1 that is drawn (SX347).
        """
        return self.resize_by_list(range(*rng), 1, inplace)

    def resize_by_list(self, size_list: Sequence[int], num_case: int = 1, inplace: bool = True) -> Any:
        """Resize each image to some of several sizes, keeping its proportions.

        Args:
            size_list: Sizes of the smaller side, in pixels.
            num_case: Number of sizes that are drawn for each image.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If `num_case` is not in [1, number of sizes], or a size is below 1 (SX347).
        """
        return self._cases(size_list, num_case, resize, inplace)

    scale, scale_by_range, scale_by_list = resize, resize_by_range, resize_by_list

    def rotate(self, angle: float, inplace: bool = True) -> Any:
        """Rotate each image counterclockwise; new pixels at the corners are black.

        Args:
            angle: Angle in degrees.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.
        """
        return self._each(lambda img: [img.rotate(angle)], inplace)

    def rotate_by_range(self, rng: tuple[int, int], inplace: bool = True) -> Any:
        """Rotate each image counterclockwise by a random whole number of degrees.

        Args:
            rng: The range [begin, end) of the angle, in degrees.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the range is empty (SX347).
        """
        return self.rotate_by_list(range(*rng), 1, inplace)

    def rotate_by_list(self, angle_list: Sequence[float], num_case: int = 1, inplace: bool = True) -> Any:
        """Rotate each image counterclockwise by some of several angles.

        Args:
            angle_list: Angles in degrees.
            num_case: Number of angles that are drawn for each image.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If `num_case` is not in [1, number of angles] (SX347).
        """
        return self._cases(angle_list, num_case, lambda img, angle: img.rotate(angle), inplace)

    # --- patches

    def crop(self, patch: tuple[int, int], position: str = "center", inplace: bool = True) -> Any:
        """Cut out a patch of each image.

        Args:
            patch: Width and height of the patch, in pixels.
            position: One of `CORNERS`: "left_top", "left_bottom", "right_top", "right_bottom" or "center".
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the patch is larger than an image, or the position is unknown (SX347).
        """
        return self._each(lambda img: [crop(img, patch, position)], inplace)

    def crop5(self, patch: tuple[int, int], num_case: int = 1, inplace: bool = True) -> Any:
        """Cut out patches at the four corners and the center.

        Args:
            patch: Width and height of the patches, in pixels.
            num_case: Number of patches that are drawn for each image, in [1, 5].
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the patch is larger than an image, or `num_case` is outside its range (SX347).
        """
        return self._cases(CORNERS, num_case, lambda img, position: crop(img, patch, position), inplace)

    def crop3(self, patch: tuple[int, int], num_case: int = 1, inplace: bool = True) -> Any:
        """Cut out the largest squares at both ends and in the middle, and resize them.

        Args:
            patch: Width and height of the results, in pixels; they must be equal.
            num_case: Number of squares that are drawn for each image, in [1, 3].
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the patch is not a square, or `num_case` is outside its range (SX347).
        """
        _check_square(patch)
        _check_cases(num_case, 3)
        return self._each(lambda img: [crop_and_resize(img, patch, p) for p in self._some(_thirds(img), num_case)], inplace)

    def crop8(self, patch: tuple[int, int], num_case: int = 1, inplace: bool = True) -> Any:
        """Cut out the five patches of `crop5` and the three of `crop3`.

        Args:
            patch: Width and height of the results, in pixels; they must be equal.
            num_case: Number of patches that are drawn for each image, in [1, 8].
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the patch is not a square or larger than an image, or `num_case` is outside its range (SX347).
        """
        _check_square(patch)
        _check_cases(num_case, 8)

        def patches(img: Any) -> list[Any]:
            every = [*((crop, p) for p in CORNERS), *((crop_and_resize, p) for p in _thirds(img))]
            return [make(img, patch, p) for make, p in self._some(every, num_case)]

        return self._each(patches, inplace)

    def random_crop(self, patch: tuple[int, int], inplace: bool = True) -> Any:
        """Cut out a patch at a random position of each image.

        Args:
            patch: Width and height of the patch, in pixels.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the patch is larger than an image (SX347).
        """

        def one(img: Any) -> list[Any]:
            _check_patch(img, patch)
            left, upper = (self._rng.randint(0, n - p) for n, p in zip(img.size, patch, strict=True))
            return [img.crop((left, upper, left + patch[0], upper + patch[1]))]

        return self._each(one, inplace)

    def random_crop_resize(self, patch: tuple[int, int], inplace: bool = True) -> Any:
        """Cut out a random part of each image and resize it (bilinear).

        The part has 8 to 100 % of the area and an aspect ratio in [3/4, 4/3]; it is the whole image if ten draws do not fit.

        Args:
            patch: Width and height of the result, in pixels.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.
        """

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
        """Exchange left and right of each image with probability 1/2.

        Args:
            num_case: With 2, each image is replaced by the flipped image and the original.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If `num_case` is not 1 or 2 (SX347).
        """
        return self._mirrored(flip, num_case, inplace)

    def flip_down(self, num_case: int = 1, inplace: bool = True) -> Any:
        """Exchange top and bottom of each image with probability 1/2.

        Args:
            num_case: With 2, each image is replaced by the flipped image and the original.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If `num_case` is not 1 or 2 (SX347).
        """
        return self._mirrored(flip_down, num_case, inplace)

    def color_cast(self, offset: int = 20, inplace: bool = True) -> Any:
        """Add to each channel, with probability 1/2, an integer drawn from [-offset, offset]; values are clipped to [0, 255].

        Args:
            offset: Maximum magnitude of the integers, in [0, 255].
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.

        Raises:
            InvalidInput: If the offset is outside [0, 255] (SX347).
        """
        return self._each(lambda img: [color_cast(img, offset, self._rng)], inplace)

    def enhance(self, scale: float = 0.2, inplace: bool = True) -> Any:
        """Change colour, contrast, brightness and sharpness, each with probability 1/2, by a factor from [1 - scale, 1 + scale].

        Args:
            scale: Maximum deviation of the factors from 1.
            inplace: Whether the tool's images are replaced.

        Returns:
            The tool, or the new images if not `inplace`.
        """
        return self._each(lambda img: [enhance(img, scale, self._rng)], inplace)

    # --- helpers

    def _each(self, make: Callable[[Any], list[Any]], inplace: bool) -> Any:
        """Replace each image by those that `make` returns for it."""
        made = [new for img in self.imgs for new in make(img)]
        if not inplace:
            return made
        self.imgs = made
        return self

    def _cases(self, cases: Sequence[Any], count: int, make: Callable[[Any, Any], Any], inplace: bool) -> Any:
        """Replace each image by one for each of `count` cases that are drawn for it."""
        _check_cases(count, len(cases))
        return self._each(lambda img: [make(img, case) for case in self._some(cases, count)], inplace)

    def _some(self, cases: Sequence[Any], count: int) -> list[Any]:
        """A random selection of `count` cases, in their order."""
        return list(cases) if count == len(cases) else get_list_sample(cases, count, self._rng)

    def _mirrored(self, mirror: Callable[[Any], Any], num_case: int, inplace: bool) -> Any:
        _check_cases(num_case, 2)
        if num_case == 2:
            return self._each(lambda img: [mirror(img), img], inplace)
        return self._each(lambda img: [mirror(img) if self._rng.randint(0, 1) else img], inplace)


def _thirds(img: Any) -> tuple[str, ...]:
    """The positions of squares in an image: along its longer side."""
    return ACROSS if img.size[0] > img.size[1] else DOWN


def _check_cases(count: int, maximum: int) -> None:
    if not 1 <= count <= maximum:
        raise InvalidInput(f"num_case must be in [1, {maximum}], got {count}", code="SX347")


def _check_square(patch: tuple[int, int]) -> None:
    if patch[0] != patch[1]:
        raise InvalidInput(f"patch must be a square, got {patch[0]} x {patch[1]}", code="SX347")
