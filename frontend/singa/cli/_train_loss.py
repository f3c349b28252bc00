"""The loss of `sonnx train`: what computes it, which targets it counts, and where the classes of its scores are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from singa_backend.errors import InvalidInput

from .._autograd.loss_names import CLASSES, IGNORED, LOSSES, NEXT_TOKEN, PROBABILITIES

if TYPE_CHECKING:
    import numpy as np

    from .._core.tensor import Tensor

loss_option = click.option("--loss", default=CLASSES, show_default=True, type=click.Choice(LOSSES))
_LABEL_OPTIONS = (
    click.option("--ignore-index", type=int, metavar="N", show_default=f"none, for {NEXT_TOKEN} {IGNORED}",
                 help="Labels that are N have no loss: padding, prompts."),
    click.option("--class-axis", type=click.Choice(["1", "-1"]), show_default="the axis that the shape of the labels leaves",
                 help=f"The axis of the classes, with several labels for a sample (--loss {CLASSES} or {PROBABILITIES})."),
)  # fmt: skip


def label_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of labels to a command."""
    for option in reversed(_LABEL_OPTIONS):
        command = option(command)
    return command


def check_labels(name: str, ignore_index: int | None, class_axis: str | None) -> None:
    """Raise UsageError for options that have no effect on this loss."""
    if ignore_index is not None and name not in (CLASSES, NEXT_TOKEN, PROBABILITIES):
        raise click.UsageError(f"--ignore-index needs --loss {CLASSES}, {NEXT_TOKEN} or {PROBABILITIES}")
    if class_axis is not None and name not in (CLASSES, PROBABILITIES):
        raise click.UsageError(f"--class-axis needs --loss {CLASSES} or {PROBABILITIES}")


class TrainLoss:
    """The loss of a training.

    Args:
        name: One of LOSSES.
        ignore_index: The label without a loss; None for the default.
        axis: The axis of the classes; None to take the one that the shapes leave.

    Attributes:
        name: The name.
        ignore_index: The label without a loss; None if there is none.
        axis: The axis of the classes; None if only the scores of a batch decide it.
    """

    def __init__(self, name: str, ignore_index: int | None = None, axis: int | None = None) -> None:
        self.name = name
        self.ignore_index = IGNORED if ignore_index is None and name == NEXT_TOKEN else ignore_index
        self.axis = -1 if name == NEXT_TOKEN else axis

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch."""
        from .. import autograd

        options: dict[str, Any] = {} if self.ignore_index is None else {"ignore_index": self.ignore_index}
        if self.name in (CLASSES, PROBABILITIES) and self.axis is not None:
            options["axis"] = self.axis
        loss: Tensor = getattr(autograd, self.name)(scores, targets, **options)
        return loss

    def weight(self, targets: Any) -> int:
        """How many targets, an array of a device, have a loss: labels of losses of class numbers, samples of other ones."""
        from singa_backend.devices.device import device_of

        if self.name not in (CLASSES, NEXT_TOKEN) and not (self.name == PROBABILITIES and self.counts_classes(targets)):
            return len(targets) if targets.ndim else 1
        labels = targets[:, 1:] if self.name == NEXT_TOKEN and targets.ndim > 1 else targets
        if self.ignore_index is None:
            return int(labels.size)
        counted = (labels != self.ignore_index).sum()
        return int(device_of(counted).get(counted))

    def counts_classes(self, targets: Any) -> bool:
        """Whether targets are class numbers, one for each sample."""
        return targets.ndim == 1 and (self.name == CLASSES or (self.name == PROBABILITIES and targets.dtype.kind in "iu"))

    def check(self, sizes: Sequence[Any] | None, targets: np.ndarray, where: str) -> None:
        """Find the axis of the classes, and refuse class numbers that the model does not have, before the first step.

        Args:
            sizes: The declared shape of the scores; None if it is not known.
            targets: The targets.
            where: The option that names the data.

        Raises:
            InvalidInput: No label has a loss, a class number is outside [0, C), or one-hot labels have another number of
                classes (SX335, SX334).
        """
        from .._autograd.losses import class_axes

        if targets.size and not self.weight(targets):
            what = f"{where}: at least one label must have a loss, got none that is not {self.ignore_index}"
            raise InvalidInput(what, code="SX335", hint="--ignore-index chooses the label without a loss")
        if self.name not in (CLASSES, NEXT_TOKEN, PROBABILITIES) or sizes is None or len(sizes) < 2 or not targets.size:
            return
        if self.name == PROBABILITIES and targets.ndim == len(sizes):
            return
        if self.axis is None and len(sizes) > 2 and len(axes := class_axes(sizes, targets.shape)) == 1:
            self.axis = axes[0]
        classes = sizes[self.axis or 1]
        if not isinstance(classes, int):
            return
        if targets.ndim == len(sizes) and targets.shape[1] != 1:
            if targets.shape[self.axis or 1] != classes:
                what = f"the labels must have {classes} classes, as the output of the model, got shape {list(targets.shape)}"
                hint = f"--head {targets.shape[1]} writes a last layer of as many" if len(sizes) == 2 else ""
                raise InvalidInput(f"{where}: {what}", code="SX334", hint=hint)
            return
        numbers = targets if self.ignore_index is None else targets[targets != self.ignore_index]
        if targets.dtype.kind not in "iuf" or classes == 1 or not numbers.size:
            return
        low, high = numbers.min(), numbers.max()
        if low < 0 or high >= classes:
            what = f"{where}: class numbers must be in [0, {classes}), as the output of the model, got {low} to {high}"
            hint = f"--head {int(high) + 1} writes a last layer of as many classes" if low >= 0 else (
                "class numbers start at 0; --ignore-index N marks labels without a loss"
            )  # fmt: skip
            raise InvalidInput(what, code="SX335", hint=hint)
