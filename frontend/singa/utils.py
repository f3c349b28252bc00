"""Small helpers of SINGA's API: a progress bar, padding arithmetic, and the order of a tape."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from singa_backend.devices.device import device_of
from singa_backend.errors import InvalidInput
from singa_backend.proto.messages import FreshNames

from . import device as devices
from ._core import tape
from ._core.tape import Dummy, Operator
from ._core.tensor import Tensor, op

if TYPE_CHECKING:
    from typing import TextIO

__all__ = [
    "force_unicode",
    "get_output_shape",
    "get_padding_shape",
    "handle_odd_pad_bwd",
    "handle_odd_pad_fwd",
    "post_order_recursive",
    "update_progress",
]

_BAR = 20


def update_progress(progress: float, info: str = "") -> None:
    """Print a bar and a text: `[..........          ] 50.0% loss 0.3`.

    progress: a number of [0, 1]; below 0 it says "Halt.", from 1 on "Done.".
    On a terminal each call replaces the line before, elsewhere each is a line.  Raises TypeError for what is no number.
    """
    share = min(max(float(progress), 0.0), 1.0)
    status = "Halt. " if progress < 0 else "Done. " if progress >= 1 else ""
    dots = round(_BAR * share)
    text = f"[{'.' * dots}{' ' * (_BAR - dots)}] {share * 100:3.1f}% {status}{info}".rstrip()
    out: TextIO = sys.stdout
    if out.isatty():
        out.write(f"\r\x1b[K{text}" + ("\n" if status else ""))
    else:
        out.write(text + "\n")
    out.flush()


# --- padding ----------------------------------------------------------------------------------------------------------


def get_output_shape(
    auto_pad: str, input_spatial_shape: Sequence[int], kernel_spatial_shape: Sequence[int], strides_spatial: Sequence[int]
) -> list[int]:
    """The spatial sizes of a convolution or pooling: ceil(in / stride) for SAME_*, ceil((in - kernel + 1) / stride) for VALID.

    Raises InvalidInput for another `auto_pad`, strides below 1, or lengths that differ.
    """
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        raise InvalidInput(f"auto_pad is SAME_UPPER, SAME_LOWER or VALID, not {auto_pad!r}", code="SX347")
    if not len(input_spatial_shape) == len(kernel_spatial_shape) == len(strides_spatial) or min(strides_spatial, default=1) < 1:
        raise InvalidInput(
            f"sizes {list(input_spatial_shape)}, kernel {list(kernel_spatial_shape)} and strides {list(strides_spatial)} do not "
            "go together",
            code="SX347",
            hint="one of each for each spatial axis; strides are 1 or more",
        )
    taken = [k - 1 if auto_pad == "VALID" else 0 for k in kernel_spatial_shape]
    return [max(0, -((t - n) // s)) for n, t, s in zip(input_spatial_shape, taken, strides_spatial, strict=True)]


def get_padding_shape(
    pad_mode: str, input_spatial_shape: Sequence[int], kernel_spatial_shape: Sequence[int], strides_spatial: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The padding of a convolution or pooling, axis by axis as (before, behind): what is even, and the odd rest.

    Where the whole padding of an axis is odd, one is left over: it stands behind for SAME_UPPER, before for SAME_LOWER.
    `get_padding_shape("SAME_UPPER", [5], [4], [2])` gives ([1, 1], [0, 1]).  Raises as `get_output_shape` does.
    """
    sizes = get_output_shape(pad_mode, input_spatial_shape, kernel_spatial_shape, strides_spatial)
    even, odd = [], []
    for n, m, k, s in zip(input_spatial_shape, sizes, kernel_spatial_shape, strides_spatial, strict=True):
        whole = max(0, (m - 1) * s + k - n)  # a stride that is larger than the kernel leaves something out: no padding
        even += [whole // 2] * 2
        odd += [0, whole % 2] if pad_mode == "SAME_UPPER" else [whole % 2, 0]
    return even, odd


def handle_odd_pad_fwd(x: Any, odd_padding: Sequence[int]) -> Any:
    """Zeros around the spatial axes of x (N, C, ...): `odd_padding` says how many, axis by axis as (before, behind).

    x: a Tensor, or its `.data`; the result is of the same kind and lies on the same device.
    """
    before, behind = _by_axis(x, odd_padding)
    tensor = x if isinstance(x, Tensor) else Tensor._of(x, devices.resolve(device_of(x)), False)
    padded = op.Pad(tensor, [*before, *behind])
    return padded if isinstance(x, Tensor) else padded.raw


def handle_odd_pad_bwd(dx: Any, odd_padding: Sequence[int]) -> Any:
    """The gradient of `handle_odd_pad_fwd`: dx without what was added.  dx: a Tensor, or its `.data`."""
    before, behind = _by_axis(dx, odd_padding)
    return dx[tuple(slice(b, n - e) for b, e, n in zip(before, behind, dx.shape, strict=True))]


def _by_axis(x: Any, odd: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each axis of x, how much stands before and behind; raises InvalidInput where that does not fit."""
    rank = len(x.shape)
    if len(odd) % 2 or 2 + len(odd) // 2 > rank or min(odd, default=0) < 0:
        raise InvalidInput(
            f"a padding {tuple(odd)} does not fit a shape of {tuple(x.shape)}",
            code="SX347",
            hint="two numbers, 0 or more, for each spatial axis",
        )
    more = [0] * (rank - 2 - len(odd) // 2)
    return [0, 0, *odd[::2], *more], [0, 0, *odd[1::2], *more]


# --- text and tapes ---------------------------------------------------------------------------------------------------


def force_unicode(s: Any) -> Any:
    """Bytes as text, by UTF-8; anything else as it is."""
    return s.decode("utf-8") if isinstance(s, (bytes, bytearray)) else s


def post_order_recursive(
    root: Operator, root_t: Tensor | None
) -> tuple[OrderedDict[str, Operator], OrderedDict[str, Tensor], OrderedDict[str, None]]:
    """The operators that lead to `root`, each after those that made its inputs; then the weights, and the inputs, by name.

    root: the creator of `root_t`.  weights: leaves that store their gradients.  inputs: other leaves; their values are None.
    Each operator is visited once, and no tape is too deep.  Where two have one name, the second goes by `name#1`.
    """
    nodes: OrderedDict[str, Operator] = OrderedDict()
    weights: OrderedDict[str, Tensor] = OrderedDict()
    inputs: OrderedDict[str, None] = OrderedDict()
    of_node, of_weight, of_input = (FreshNames(mark="#") for _ in range(3))
    seen: set[tape.Operator] = set()
    pending: list[tuple[Operator, Tensor | None, bool]] = [(root, root_t, False)]
    while pending:
        operator, t, ready = pending.pop()
        if isinstance(operator, Dummy) or ready:
            if ready or operator not in seen:
                seen.add(operator)
                if ready:
                    nodes[of_node.new(operator.name)] = operator
                elif t is None:
                    inputs[of_input.new(operator.name)] = None
                else:
                    weights[of_weight.new(operator.name)] = t
        elif operator not in seen:
            seen.add(operator)
            pending.append((operator, t, True))
            pending += [(creator, x, False) for creator, _, x, _ in reversed(operator.src)]
    return nodes, weights, inputs
