"""Sources of batches: arrays, tables of columns, and any iterable, whose batches become the Tensors that a step takes.

Objects of other libraries are recognized by their methods, so that none of them is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from ..device import Device
from .loader import ArrayLoader, seeded

TARGETS = ("labels", "label", "y", "target", "targets")
"""The names under which a batch has its targets, unless one is requested."""


@dataclass
class ArgumentNames:
    """The names of the arguments of a model, by which it reads batches that are dicts.

    Attributes:
        step: The parameters of `train_one_batch`; None if it takes any number.
        inputs: The inputs of `forward`, or of a file; None if they are not known.
        target: The requested name of the targets; None to look for TARGETS.
        only_inputs: Whether the targets are not used.
    """

    step: list[str] | None
    inputs: list[str] | None
    target: str | None = None
    only_inputs: bool = False

    def columns(self, have: Iterable[Any]) -> list[str]:
        """The names of the values of a batch, in the order of the arguments; raises InvalidInput (SX342) for a missing one."""
        names = [str(n) for n in have]
        if not self.only_inputs and self.target is None and self.step and all(n in names for n in self.step):
            return self.step
        if self.inputs is None:
            what = (
                f"a dict must be for a model whose inputs have names, got one with {_listed(names)} for a forward of any inputs"
            )
            raise InvalidInput(what, code="SX342", hint="pass tuples")
        lacking = [n for n in self.inputs if n not in names]
        if lacking:
            hint = f"the model has the inputs {_listed(self.inputs)}: rename the columns"
            raise InvalidInput(f"a batch must have the inputs {_listed(lacking)}, got {_listed(names)}", code="SX342", hint=hint)
        if self.only_inputs:
            return self.inputs
        wanted = [self.target] if self.target is not None else [*(self.step or [])[-1:], *TARGETS]
        found = next((n for n in wanted if n in names and n not in self.inputs), None)
        if found is None:
            rule = f"the targets {self.target!r}" if self.target is not None else f"targets named {_listed(TARGETS)}"
            what = f"a batch must have {rule}, got {_listed(names)}"
            raise InvalidInput(what, code="SX342", hint="pass target= with the name of the column")
        return [*self.inputs, found]

    def inputs_of(self, batch: Mapping[Any, Any]) -> list[Any]:
        """The inputs in a dict, without targets."""
        return [batch[n] for n in ArgumentNames(self.step, self.inputs, only_inputs=True).columns(batch)]


class TableBatches:
    """Batches of the rows of a dataset of columns, as those of Hugging Face, whose items of a list of rows are dicts.

    Args:
        rows: The dataset.
        names: The names of the model's arguments.
        batch_size: The number of rows in a batch.
        seed: The seed of the orders.
        shuffle: Whether each epoch has a new random order.
    """

    def __init__(self, rows: Any, names: ArgumentNames, batch_size: int, seed: int, shuffle: bool) -> None:
        if not len(rows):
            raise InvalidInput("a dataset must have at least one row, got none", code="SX342")
        self.columns = names.columns(rows.column_names)
        kept = rows.select_columns(self.columns) if hasattr(rows, "select_columns") else rows
        plain = (getattr(kept, "format", None) or {}).get("type") is None
        self.rows = kept.with_format("numpy") if plain else kept
        self.batch_size, self.shuffle, self._rng = batch_size, shuffle, seeded(seed)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self.rows) // self.batch_size)

    def epoch(self, shuffle: bool) -> Iterator[list[Any]]:
        """The batches of an epoch, in a new order or in that of the rows."""
        count = len(self.rows)
        order = self._rng.permutation(count) if shuffle and self.shuffle else np.arange(count)
        for first in range(0, count, self.batch_size):
            batch = self.rows[order[first : first + self.batch_size].tolist()]
            yield [batch[n] for n in self.columns]


class StreamedBatches:
    """Batches of a dataset that is read in order, by its method `iter`, as an IterableDataset of Hugging Face.

    Args:
        rows: The dataset.
        batch_size: The number of rows in a batch.
    """

    def __init__(self, rows: Any, batch_size: int) -> None:
        self.rows, self.batch_size = rows, batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows.iter(batch_size=self.batch_size))


def source_of(
    data: Sequence[Any], batch_size: int | None, names: ArgumentNames, seed: int = 0, shuffle: bool = False, epochs: int = 1
) -> Any:
    """The ArrayLoader, TableBatches or iterable of batches of the positional arguments of a call.

    Args:
        data: Arrays, or one tuple or dict of arrays, or one source of batches.
        batch_size: The number of samples in a batch of arrays; None for 32.
        names: The names of the model's arguments.
        seed: The seed of the order of arrays.
        shuffle: Whether the order of arrays changes.
        epochs: The number of times that the source is read.

    Raises:
        InvalidInput: The arrays cannot form batches, `batch_size` is passed with batches, or an iterator must be read several
            times (SX342).
    """
    size = 32 if batch_size is None else batch_size
    if len(data) == 1 and isinstance(data[0], tuple):
        data = data[0]
    one = data[0] if len(data) == 1 else None
    if isinstance(one, Mapping):
        if any(hasattr(v, "column_names") for v in one.values()):
            what = f"data must be one split of a dataset, got the splits {_listed(one)}"
            raise InvalidInput(what, code="SX342", hint=f"pass data[{next(iter(one))!r}]")
        return ArrayLoader(*(converted(one[n]) for n in names.columns(one)), batch_size=size, seed=seed, shuffle=shuffle)
    if len(data) != 1 or isinstance(one, Tensor) or hasattr(one, "__array__"):
        return ArrayLoader(*map(converted, data), batch_size=size, seed=seed, shuffle=shuffle)
    if hasattr(one, "column_names") and hasattr(one, "with_format"):
        if hasattr(one, "__len__"):
            return TableBatches(one, names, size, seed, shuffle)
        return StreamedBatches(one, size)
    if not isinstance(one, Iterable):
        what = f"data must be arrays, an ArrayLoader or a list of batches, got a {type(one).__name__}"
        raise InvalidInput(what, code="SX342")
    if batch_size is not None:
        raise InvalidInput(f"batch_size must be that of the batches, which exist already, got {batch_size}", code="SX342")
    if epochs > 1 and isinstance(one, Iterator):
        what = f"data must be iterable {epochs} times, once for each epoch, got a {type(one).__name__}, which has one epoch"
        raise InvalidInput(what, code="SX342", hint="pass a list, a DataLoader, or an object whose __iter__ begins again")
    return one


def in_order(source: Any, device: Device | None, names: ArgumentNames) -> Iterator[Sequence[Any]]:
    """The batches of an epoch: of an ArrayLoader and a TableBatches all samples in their own order."""
    if isinstance(source, ArrayLoader):
        return (source._batch(rows, source.device or device) for rows in source._in_order())
    return tensors(source.epoch(False) if isinstance(source, TableBatches) else source, device, names)


def one_epoch(source: Any, device: Device | None, names: ArgumentNames) -> Iterator[Sequence[Any]]:
    """The batches of an epoch, for a training."""
    if isinstance(source, ArrayLoader):
        return (source._batch(rows, source.device or device) for rows in source._rows())
    return tensors(source.epoch(True) if isinstance(source, TableBatches) else source, device, names)


def length_of(source: Any) -> int | None:
    """The number of batches of an epoch; None if it is not known."""
    try:
        return len(source)
    except TypeError:  # also of a DataLoader of an IterableDataset
        return None


def tensors(batches: Iterable[Any], device: Device | None, names: ArgumentNames) -> Iterator[Sequence[Any]]:
    """The batches of another source; arrays become Tensors."""
    for batch in batches:
        yield [x if isinstance(x, Tensor) else Tensor(data=x, device=device, requires_grad=False) for x in _flat(batch, names)]


def _flat(batch: Any, names: ArgumentNames) -> list[Any]:
    """The values of a batch in the order of the arguments of a step."""
    if isinstance(batch, Mapping):
        return [converted(batch[n]) for n in names.columns(batch)]
    if not isinstance(batch, (list, tuple)):
        hint = "pass the arrays of all samples as a tuple" if hasattr(batch, "__array__") else ""
        what = f"a batch must be a tuple of Tensors or arrays, or a dict of them, got a {type(batch).__name__}"
        raise InvalidInput(what, code="SX342", hint=hint)
    found: list[Any] = []
    for x in batch:
        if isinstance(x, Mapping):  # (inputs by name, targets)
            found += map(converted, names.inputs_of(x))
        elif isinstance(x, (list, tuple)) and x and all(hasattr(v, "__array__") and getattr(v, "ndim", 1) for v in x):
            found += map(converted, x)  # ((first input, second input), targets)
        else:
            found.append(converted(x))
    return found


def converted(x: Any) -> Any:
    """A value of a batch as what `Tensor(data=)` and NumPy accept, without a copy: tensors of PyTorch may refuse NumPy.

    Raises:
        InvalidInput: A tensor of PyTorch is not dense, or has no values (SX342).
    """
    if not any(c.__module__.partition(".")[0] == "torch" for c in type(x).__mro__) or not hasattr(x, "detach"):
        return x
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.device.type not in ("cpu", "cuda"):
        what = f"a tensor of PyTorch must be dense and on the CPU or a GPU, got {x.layout} on {x.device}"
        raise InvalidInput(what, code="SX342", hint="convert it: x.to_dense(), x.cpu()")
    x = x.detach()  # data are constants of a step
    if x.device.type == "cuda":
        return x
    if x.dtype is torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.resolve_conj().resolve_neg().numpy()


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
