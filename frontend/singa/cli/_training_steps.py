"""A training step of a model file that `sonnx profile --train` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from singa_backend.errors import InvalidInput

from .._autograd.loss_names import CLASSES, NEXT_TOKEN
from ._train_loss import TrainLoss
from ._train_setup import rule_of, tuned_model

if TYPE_CHECKING:
    import numpy as np
    from onnx import ModelProto

    from singa_backend import Limits
    from singa_backend.kernels.table import Options
    from singa_backend.plans.profile import Profile


@dataclass(frozen=True)
class StepOptions:
    """The options of a training step, by the names of their parameters.

    Attributes:
        loss: The name of the loss.
        optimizer: The name of the optimizer.
        target: The name of the targets.
        freeze: Patterns of the names of parameters that do not train.
    """

    loss: str
    optimizer: str
    target: str
    freeze: tuple[str, ...]


def check_step(train: bool, step: StepOptions) -> None:
    """Raise UsageError for an option of a training step without --train."""
    context = click.get_current_context()
    for name in vars(step):
        if not train and context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            raise click.UsageError(f"--{name} needs --train")


def profiled_training(
    path: Path,
    chosen: StepOptions,
    feeds: Mapping[str, Any],
    names: Sequence[str],
    runs: int,
    device: str,
    options: Options,
    limits: Limits,
) -> tuple[Profile, ModelProto]:
    """The profile of a training step of a model file, and the step as a model.

    Args:
        path: The file.
        chosen: The options of the step.
        feeds: The inputs by name; the targets are drawn if they are not among them.
        names: The names of the inputs, in order.
        runs: The number of whole steps, and of measured ones.
        device: The device.
        options: How plans compute.
        limits: The bounds of each run.

    Raises:
        SonnxError: The model cannot be trained, or the inputs or targets do not fit it.
    """
    import numpy as np

    from .._core.tensor import Tensor
    from .._training.profiling import profiled_step
    from ..device import resolve

    place = resolve(device)
    place.SetRandSeed(0)
    model = tuned_model(path, place, TrainLoss(chosen.loss), rule_of(chosen.optimizer), chosen.freeze)
    lacking = [n for n in names if n not in feeds]
    if lacking:
        raise InvalidInput(f"the inputs must have {', '.join(map(repr, lacking))} for a training step", code="SX331")
    inputs = [Tensor(data=np.asarray(feeds[n]), device=place, requires_grad=False) for n in names]
    if chosen.target in feeds:
        targets = np.asarray(feeds[chosen.target])
    else:
        model.eval()
        targets = _drawn(chosen.loss, tuple(model.forward(*inputs)[0].shape))
    batch = (*inputs, Tensor(data=targets, device=place, requires_grad=False))
    found, step = profiled_step(model, batch, {}, runs, options, limits)
    return found, step.onnx


def _drawn(loss: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random targets for an output of this shape: class numbers for losses of these, numbers in [0, 1) for other ones."""
    import numpy as np

    generator = np.random.default_rng(0)
    if loss == NEXT_TOKEN:
        return generator.integers(0, shape[-1], shape[:-1])
    if loss == CLASSES and len(shape) >= 2:
        return generator.integers(0, shape[1], (shape[0], *shape[2:]))
    return generator.random(shape, np.float32)
