"""Dropout as a class and as a function; the public module is `autograd`."""

from __future__ import annotations

import warnings

from singa_backend.errors import InvalidInput

from .._core import random, tape
from .._core.tape import Operator
from .._core.tensor import Tensor
from .._core.tensor import op as recorder

__all__: list[str] = ["Dropout", "dropout"]


class Dropout(Operator):
    """Dropout: in training x mask / (1 - ratio), in inference x.

    Calling the operator on a Tensor returns a tuple with the result, as `dropout` defines it.

    Args:
        seed: Ignored; kept for programs written for SINGA. A seed between 0 and 1 is warned of: it may be meant as the ratio.
        ratio: The probability that an element is dropped, in [0, 1).

    Raises:
        InvalidInput: `ratio` is not in [0, 1).
    """

    def __init__(self, seed: int = 0, ratio: float = 0.5) -> None:
        super().__init__()
        _check_dropout("Dropout", 0, seed, ratio)
        self.ratio = ratio

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Drop elements of a tensor in training mode.

        Args:
            *xs: One Tensor of a float dtype, any shape.

        Returns:
            A tuple with one Tensor of the shape and dtype of the input.
        """
        return (recorder.Identity(xs[0]) if not tape.training else random.dropout(xs[0], self.ratio)[0],)


def dropout(x: Tensor, seed: int = 0, ratio: float = 0.5) -> Tensor:
    """Dropout: in training x mask / (1 - ratio), in inference x.

    Each element of the mask is 0 with probability `ratio`, otherwise 1; it is drawn from the random stream of x's device, which
    `device.SetRandSeed` seeds. The gradient is dy mask / (1 - ratio). Source: ONNX Dropout.

    Args:
        x: Tensor of a float dtype, any shape.
        seed: Ignored; kept for programs written for SINGA, where it is the second argument.
        ratio: The probability that an element is dropped, in [0, 1).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        InvalidInput: `ratio` is not in [0, 1).
    """
    _check_dropout("dropout", 1, seed, ratio)
    return Dropout(0, ratio)(x)[0]


def _check_dropout(name: str, place: int, seed: float, ratio: float) -> None:
    """Warn the caller's caller of a seed that looks like a ratio; raise InvalidInput for a ratio out of range."""
    if isinstance(seed, float) and 0 < seed < 1:
        nth = ("first", "second")[place]
        warnings.warn(f"the {nth} argument of {name} is its seed; write ratio={seed}", UserWarning, stacklevel=3)
    if not 0 <= ratio < 1:
        raise InvalidInput(f"ratio must be in [0, 1), got {ratio}", code="SX333")
