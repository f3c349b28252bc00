"""Batches of arrays, and of images from a list file, produced in a background thread while the model trains.

    for x, y in ArrayLoader(images, labels, batch_size=32, shuffle=True): ...

    data = ImageBatchIter("train.txt", 32, lambda path: tool.load(path).random_crop((96, 96)).flip().get(), image_folder="images")
    data.start()
    x, y = data.next()          float32 (32, 3, 96, 96) and int32 (32,)
    data.end()

A line of the file contains a path, the delimiter, and the class number: `cat/1.png 3`.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput
from singa_backend.io.archives import read_bytes

from ._training.loader import ArrayLoader

__all__ = ["ArrayLoader", "ImageBatchIter"]

_POLL = 0.05  # seconds between two checks of a waiting thread whether the other one still runs


class ImageBatchIter:
    """An endless iterator over batches of images: after the last image it starts again, in a new order if shuffled.

    The iterator is also a context manager, which calls `start` and `end`.

    Args:
        img_list_file: File with one path, delimiter and class number per line.
        batch_size: Number of images in a batch.
        image_transform: Function from a path to a list of images (of Pillow, or arrays of shape (3, height, width)), all of
            which get the path's class number.
        shuffle: Whether each pass over the list has a new random order.
        delimiter: Text between path and class number.
        image_folder: Folder to which the paths are relative.
        capacity: Maximum number of finished batches that wait.
        delimeter: SINGA's spelling of `delimiter`.
        seed: Seed of the order; if None, it is drawn from Python's `random` at `start`, so that `random.seed` determines it.
        timeout: Maximum time in seconds that `next` waits.

    Raises:
        InvalidInput: If `batch_size` or `capacity` is below 1, or the list cannot be read, is empty, or has a line without a
            class number (SX349).
    """

    def __init__(
        self,
        img_list_file: str | os.PathLike[str],
        batch_size: int,
        image_transform: Callable[[str], Any],
        shuffle: bool = True,
        delimiter: str = " ",
        image_folder: str | os.PathLike[str] | None = None,
        capacity: int = 10,
        *,
        delimeter: str | None = None,
        seed: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        if batch_size < 1 or capacity < 1:
            raise InvalidInput(f"batch_size and capacity must be at least 1, got {batch_size} and {capacity}", code="SX349")
        self.img_list_file = img_list_file
        self.batch_size = batch_size
        self.image_transform = image_transform
        self.shuffle = shuffle
        self.delimiter = delimiter if delimeter is None else delimeter
        self.image_folder = image_folder
        self.capacity = capacity
        self.seed = seed
        self.timeout = timeout
        self._items = _listed(Path(img_list_file), self.delimiter, image_folder)
        self.num_samples = len(self._items)
        self._work: _BatchThread | None = None

    def start(self) -> None:
        """Start producing batches; if they are being produced already, start again from the beginning."""
        self.end()
        seed = random.getrandbits(64) if self.seed is None else self.seed
        samples = _Samples(self._items, self.image_transform, self.shuffle, random.Random(seed))
        self._work = _BatchThread(samples, self.batch_size, self.capacity)
        weakref.finalize(self, self._work.stop.set)

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the next batch.

        Returns:
            The images, a float32 array of shape (batch, 3, height, width), and the class numbers, an int32 array of shape
            (batch,).

        Raises:
            InvalidInput: If `start` was not called, images have different sizes, or no batch is finished within `timeout` seconds
                (SX349).
            Exception: Any exception of `image_transform`.
        """
        if self._work is None:
            raise InvalidInput("no batches are being produced", code="SX349", hint="call start() before next()")
        return self._work.take(self.timeout)

    def end(self) -> None:
        """Stop producing batches; this takes at most one second, even if `image_transform` does not return."""
        if self._work is not None:
            self._work.stop.set()
            self._work.thread.join(timeout=1.0)
            self._work = None

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield self.next()

    def __enter__(self) -> ImageBatchIter:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def _listed(path: Path, delimiter: str, folder: Any) -> list[tuple[str, int]]:
    """The paths and class numbers of a list file."""
    try:
        lines = read_bytes(path, "SX349").decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"cannot read the list of images {path}: {error}", code="SX349") from None
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, found, label = line.strip().rpartition(delimiter)
        try:
            items.append((os.path.join(folder or "", name.strip()), int(label)))
        except ValueError:
            found = ""
        if not found:
            raise InvalidInput(
                f"{path}:{number} must be `path{delimiter}class number`, got {line!r}",
                code="SX349",
                hint="the delimiter is the fifth argument",
            )
    if not items:
        raise InvalidInput(f"the list of images {path} is empty", code="SX349")
    return items


class _Samples:
    """Images and class numbers in an endless sequence."""

    def __init__(
        self, items: Sequence[tuple[str, int]], transform: Callable[[str], Any], shuffle: bool, rng: random.Random
    ) -> None:
        self.items, self.transform, self.shuffle, self.rng = items, transform, shuffle, rng

    def __iter__(self) -> Iterator[tuple[np.ndarray, int, str]]:
        while True:
            order = list(self.items)
            if self.shuffle:
                self.rng.shuffle(order)
            count = 0
            for path, label in order:
                made = self.transform(path)
                for img in made if isinstance(made, (list, tuple)) else [made]:
                    count += 1
                    yield _pixels(img, path), label, path
            if not count:
                raise InvalidInput(
                    f"image_transform returned no image for any of the {len(order)} paths in the list", code="SX349"
                )


def _pixels(img: Any, path: str) -> np.ndarray:
    if hasattr(img, "convert"):
        return np.asarray(img.convert("RGB"), np.float32).transpose(2, 0, 1)
    if isinstance(img, np.ndarray):
        return img.astype(np.float32)
    raise InvalidInput(
        f"image_transform must return images, got {type(img).__name__} for {path}",
        code="SX349",
        hint="return a list of Pillow images, or of arrays (3, height, width)",
    )


def _batch(samples: Sequence[tuple[np.ndarray, int, str]]) -> tuple[np.ndarray, np.ndarray]:
    first, _, begun = samples[0]
    for pixels, _, path in samples:
        if pixels.shape != first.shape:
            what = f"images of one batch must have one shape, got {first.shape} ({begun}) and {pixels.shape} ({path})"
            raise InvalidInput(what, code="SX349", hint="crop them to one size in image_transform")
    return np.stack([s[0] for s in samples]), np.array([s[1] for s in samples], np.int32)


class _BatchThread:
    """A thread that produces batches; it holds no reference to the iterator, which may be deleted first."""

    def __init__(self, samples: _Samples, batch_size: int, capacity: int) -> None:
        self.stop = threading.Event()
        self.waiting: queue.Queue[tuple[np.ndarray, np.ndarray] | BaseException] = queue.Queue(capacity)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=_make, args=(samples, batch_size, self.waiting, self.stop), daemon=True)
        self.thread.start()

    def take(self, timeout: float) -> tuple[np.ndarray, np.ndarray]:
        deadline = time.monotonic() + timeout
        while self.error is None:
            try:
                made = self.waiting.get(timeout=_POLL)
            except queue.Empty:
                if self.stop.is_set() or not self.thread.is_alive():
                    raise InvalidInput("batches are no longer being produced", code="SX349", hint="call start() again") from None
                if time.monotonic() > deadline:
                    raise InvalidInput(
                        f"no batch was finished within {timeout:g} seconds",
                        code="SX349",
                        hint="image_transform is slow or does not return; timeout= allows more time",
                    ) from None
                continue
            if not isinstance(made, BaseException):
                return made
            self.error = made
        raise self.error


def _make(samples: _Samples, batch_size: int, waiting: queue.Queue[Any], stop: threading.Event) -> None:
    """Put batches into the queue, and finally the error that ends them."""
    try:
        source = takewhile(lambda _: not stop.is_set(), samples)
        while not stop.is_set():
            taken = list(islice(source, batch_size))
            if not stop.is_set():  # otherwise the batch may be incomplete
                _put(waiting, stop, _batch(taken))
    except BaseException as error:
        _put(waiting, stop, error)


def _put(waiting: queue.Queue[Any], stop: threading.Event, made: Any) -> None:
    while not stop.is_set():
        with suppress(queue.Full):
            waiting.put(made, timeout=_POLL)
            return
