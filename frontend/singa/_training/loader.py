"""Batches of arrays: their order depends on a seed, and its state can be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from ..device import Device, DeviceLike, resolve


@dataclass
class Order:
    """The position in the data: the next batch of the current epoch, and the generator of the next orders.

    Attributes:
        rng: The generator of the orders.
        batch: The number of batches of the current epoch that were returned.
        order: The order of the samples in the current epoch; None before its first batch.
    """

    rng: np.random.Generator
    batch: int = 0
    order: np.ndarray | None = None


class ArrayLoader:
    """Batches of NumPy arrays, for a loop over one epoch: `for x, y in loader`.

    A batch is a tuple with one Tensor for each array, with the dtype of the array. Each loop is an epoch. Its order depends only
    on the seed and the number of loops before. A loop that is left early is not continued, except after `load_state_dict`.

    Args:
        *arrays: Arrays with the samples along axis 0, equally many in each; usually the inputs of a model, then the targets.
            An array that maps a file is read batch by batch.
        batch_size: The number of samples in a batch.
        shuffle: Whether each epoch has a new random order; otherwise it is that of the arrays.
        seed: The seed of the orders.
        drop_last: Whether a last batch with fewer samples is omitted.
        device: The device of the tensors; None for the CPU, or in `Model.fit` for that of the model.

    Attributes:
        arrays: The arrays.
        batch_size: The number of samples in a batch.
        shuffle: Whether each epoch has a new random order.
        drop_last: Whether a last batch with fewer samples is omitted.
        samples: The number of samples.

    Raises:
        InvalidInput: There is no array or no sample, the arrays have different lengths or no axis or are objects, `batch_size` is
            not an integer of at least 1, `seed` is negative or not an integer, or there is no batch because `drop_last` omits
            the only one (SX342).
        DeviceUnavailable: This machine does not have the device.

    Example:
        >>> loader = data.ArrayLoader(x, y, batch_size=64, shuffle=True, seed=1)
        >>> for x_batch, y_batch in loader:
        ...     out, loss = model(x_batch, y_batch)
    """

    def __init__(
        self,
        *arrays: Any,
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: DeviceLike | None = None,
    ) -> None:
        self.arrays = tuple(_array(i, a) for i, a in enumerate(arrays))
        self.batch_size, self.shuffle, self.drop_last = positive("batch_size", batch_size), shuffle, drop_last
        self.device = None if device is None else resolve(device)
        lengths = [len(a) for a in self.arrays]
        if len(set(lengths)) != 1 or not lengths[0]:
            sizes = f"arrays with {', '.join(map(str, lengths))}" if lengths else "no array"
            raise InvalidInput(f"arrays must have one number of samples, at least 1, got {sizes}", code="SX342")
        self.samples = lengths[0]
        if not len(self):
            what = f"batch_size must be at most {self.samples}, the number of samples, with drop_last, got {batch_size}"
            raise InvalidInput(what, code="SX342")
        self._at = Order(seeded(seed))
        self._begins = self._at.rng.bit_generator.state  # of the generator before the order of the current epoch is drawn
        self._continues = False  # whether the next loop starts at the loaded state and not at the first batch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the batches of an epoch."""
        return (self._batch(rows, self.device) for rows in self._rows())

    def state_dict(self) -> dict[str, Any]:
        """Return the point in the data: a loop after `load_state_dict` continues with the next batch, in the same order.

        Returns:
            Numbers and text, which JSON can store.
        """
        return {"samples": self.samples, "batch_size": self.batch_size, "batch": self._at.batch, "rng": self._begins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the point in the data to one of `state_dict`; the next loop continues there.

        Args:
            state: What `state_dict` returned, of a loader of as many samples and the same batch size.

        Raises:
            InvalidInput: It is not such a state, or of another loader (SX342); then nothing is changed.
        """
        try:
            here = {"samples": self.samples, "batch_size": self.batch_size}
            was = {n: index(state[n]) for n in here}
            rng = np.random.default_rng(0)
            rng.bit_generator.state = state["rng"]
            batch = index(state["batch"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"state must be one that state_dict returned, got one with {type(error).__name__}: {error}"
            raise InvalidInput(what, code="SX342") from None
        if was != here or not 0 <= batch <= len(self):
            got = ", ".join(f"{n} {v}" for n, v in [*was.items(), ("batch", batch)])
            what = f"state must be of a loader with {self.samples} samples in batches of {self.batch_size}, got {got}"
            raise InvalidInput(what, code="SX342")
        if batch == len(self):  # the end of an epoch
            batch = 0
            if self.shuffle:
                rng.permutation(self.samples)
        self._begins = rng.bit_generator.state
        self._start(Order(rng, batch))

    def _start(self, at: Order) -> None:
        """Continue at a point, which the next loops advance."""
        self._at, self._continues = at, True

    def _rows(self) -> Iterator[np.ndarray]:
        """The rows of the batches of an epoch; those that remain, if the state was loaded."""
        at = self._at
        if not self._continues:
            at.batch, at.order = 0, None
        self._continues = False
        if at.order is None:
            self._begins = at.rng.bit_generator.state
            at.order = at.rng.permutation(self.samples) if self.shuffle else np.arange(self.samples)
        order = at.order
        for batch in range(at.batch, len(self)):
            at.batch = batch + 1
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]
        at.batch, at.order = 0, None
        self._begins = at.rng.bit_generator.state

    def _in_order(self) -> Iterator[np.ndarray]:
        """The rows of batches of all samples in the order of the arrays; the state stays."""
        for first in range(0, self.samples, self.batch_size):
            yield np.arange(first, min(first + self.batch_size, self.samples))

    def _batch(self, rows: np.ndarray, device: Device | None) -> tuple[Tensor, ...]:
        return tuple(Tensor(data=np.ascontiguousarray(a[rows]), device=device, requires_grad=False) for a in self.arrays)


def positive(name: str, value: Any) -> int:
    """The value of an argument; raises InvalidInput unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidInput(f"{name} must be an integer of at least 1, got {value!r}", code="SX342")
    return int(value)


def seeded(seed: Any) -> np.random.Generator:
    """The generator of a seed; raises InvalidInput unless it is an integer of at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InvalidInput(f"seed must be an integer of at least 0, got {seed!r}", code="SX342")
    return np.random.default_rng(seed)


def _array(i: int, value: Any) -> np.ndarray:
    """One of the arrays; raises InvalidInput if it has no samples."""
    if isinstance(value, Tensor):
        value = value.device.backend.get(value.data)
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise InvalidInput(f"array {i} must be an array, got a {type(value).__name__}: {error}", code="SX342") from None
    if not array.ndim or not dtypes.known(array.dtype) or (array.dtype == object and not _is_text(array)):
        what = f"array {i} must have the samples along axis 0 and a dtype of ONNX, got {array.dtype}{list(array.shape)}"
        raise InvalidInput(what, code="SX342")
    return array


def _is_text(array: np.ndarray) -> bool:
    return all(isinstance(v, str) for v in array.flat)
