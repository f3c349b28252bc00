"""Helper functions of SINGA's API: a progress bar, padding arithmetic, and the order of operators on a tape."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from singa_backend.devices.device import device_of
from singa_backend.errors import InvalidInput
from singa_backend.proto.messages import FreshNames

from . import device as devices
from ._autograd.handles import ConvHandle, PoolingHandle
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
    "re_new_handle",
    "same_pad_shape_check",
    "update_progress",
]

_BAR = 20


def update_progress(progress: float, info: str = "") -> None:
    """Print a progress bar and a text: `[..........          ] 50.0% loss 0.3`.

    On a terminal each call replaces the previous line; elsewhere each call prints a line.

    Args:
        progress: Progress in [0, 1]; the bar shows "Halt." below 0, and "Done." at 1 or more.
        info: Text after the bar.

    Raises:
        TypeError: If `progress` is not a number.
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
    """Compute the spatial sizes of a convolution or pooling.

    They are ceil(in / stride) for SAME_UPPER and SAME_LOWER, and ceil((in - kernel + 1) / stride) for VALID (ONNX: Conv,
    `auto_pad`).

    Args:
        auto_pad: "SAME_UPPER", "SAME_LOWER" or "VALID".
        input_spatial_shape: Sizes of the spatial axes of the input.
        kernel_spatial_shape: Sizes of the kernel, one per spatial axis.
        strides_spatial: Strides, one per spatial axis.

    Returns:
        The sizes of the spatial axes of the output.

    Raises:
        InvalidInput: If `auto_pad` is unknown, a stride is below 1, or the lengths differ (SX347).
    """
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        raise InvalidInput(f"auto_pad must be SAME_UPPER, SAME_LOWER or VALID, got {auto_pad!r}", code="SX347")
    if not len(input_spatial_shape) == len(kernel_spatial_shape) == len(strides_spatial) or min(strides_spatial, default=1) < 1:
        raise InvalidInput(
            f"sizes, kernel and strides must have one entry per spatial axis, got {list(input_spatial_shape)}, "
            f"{list(kernel_spatial_shape)} and {list(strides_spatial)}",
            code="SX347",
            hint="strides must be at least 1",
        )
    taken = [k - 1 if auto_pad == "VALID" else 0 for k in kernel_spatial_shape]
    return [max(0, -((t - n) // s)) for n, t, s in zip(input_spatial_shape, taken, strides_spatial, strict=True)]


def get_padding_shape(
    pad_mode: str, input_spatial_shape: Sequence[int], kernel_spatial_shape: Sequence[int], strides_spatial: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Compute the padding of a convolution or pooling, divided into an even part and an odd rest.

    If the total padding of an axis is odd, the rest of 1 is after the axis for SAME_UPPER, and before it for SAME_LOWER.

    Args:
        pad_mode: "SAME_UPPER", "SAME_LOWER" or "VALID".
        input_spatial_shape: Sizes of the spatial axes of the input.
        kernel_spatial_shape: Sizes of the kernel, one per spatial axis.
        strides_spatial: Strides, one per spatial axis.

    Returns:
        The even part and the odd rest; each is a list (before, after, before, after, ...) over the spatial axes.

    Raises:
        InvalidInput: If `pad_mode` is unknown, a stride is below 1, or the lengths differ (SX347).

    Example:
        `get_padding_shape("SAME_UPPER", [5], [4], [2])` returns ([1, 1], [0, 1]).
    """
    sizes = get_output_shape(pad_mode, input_spatial_shape, kernel_spatial_shape, strides_spatial)
    even, odd = [], []
    for n, m, k, s in zip(input_spatial_shape, sizes, kernel_spatial_shape, strides_spatial, strict=True):
        total = max(0, (m - 1) * s + k - n)  # no padding if the stride exceeds the kernel size
        even += [total // 2] * 2
        odd += [0, total % 2] if pad_mode == "SAME_UPPER" else [total % 2, 0]
    return even, odd


def same_pad_shape_check(handle: ConvHandle | PoolingHandle, pad_mode: str, x: Any) -> list[int]:
    """Check that the padding of a handle is that of a mode of equal sizes.

    Args:
        handle: The handle, with the sizes of its window.
        pad_mode: "SAME_UPPER" or "SAME_LOWER".
        x: The input, Tensor of shape (N, C, ...), or its `.data`.

    Returns:
        The total padding of each spatial axis.

    Raises:
        InvalidInput: If the handle does not specify its window, `pad_mode` is unknown, or the pads of the handle, before and
            after each axis, are not half of the total (SX347).
    """
    kernel = handle.kernel
    if kernel is None:
        raise InvalidInput(
            "the handle must have the sizes of its window", code="SX347", hint="write ConvHandle(..., kernel=(3, 3))"
        )
    even, odd = get_padding_shape(pad_mode, x.shape[2:], kernel, handle.strides)
    begin = [*even[::2], *even[1::2]]  # as ONNX orders pads
    if list(handle.pads) != begin:
        what = f"pads for {pad_mode} of the shape {tuple(x.shape)} must be {begin}, got {list(handle.pads)}"
        raise InvalidInput(what, code="SX347", hint=f"an odd rest {odd} is an argument of the operator: odd_padding")
    return [a + b + c + d for a, b, c, d in zip(even[::2], even[1::2], odd[::2], odd[1::2], strict=True)]


def re_new_handle(handle: ConvHandle | PoolingHandle, x: Any, is_pool: bool = False) -> ConvHandle | PoolingHandle:
    """Make a handle with the same attributes for another input; a handle does not depend on the shape of the input.

    Args:
        handle: The handle.
        x: The input, Tensor of shape (N, C, ...), or its `.data`.
        is_pool: Whether it is the handle of a pooling.

    Returns:
        A copy of the handle.

    Raises:
        InvalidInput: If the handle is of the other kind, or has another number of spatial axes than x (SX347).
    """
    if isinstance(handle, PoolingHandle) is not is_pool:
        raise InvalidInput(f"is_pool={is_pool} does not match the handle, a {type(handle).__name__}", code="SX347")
    if len(handle.strides) != len(x.shape) - 2:
        what = f"x must have {2 + len(handle.strides)} axes for this handle, got the shape {tuple(x.shape)}"
        raise InvalidInput(what, code="SX347")
    return replace(handle)


def handle_odd_pad_fwd(x: Any, odd_padding: Sequence[int]) -> Any:
    """Add zeros around the spatial axes (ONNX: Pad).

    Args:
        x: Tensor of shape (N, C, ...), or its `.data`.
        odd_padding: Numbers of zeros, axis by axis as (before, after).

    Returns:
        The padded tensor or array, of the type and on the device of x.

    Raises:
        InvalidInput: If the padding does not match the shape of x (SX347).
    """
    before, after = _by_axis(x, odd_padding)
    tensor = x if isinstance(x, Tensor) else Tensor._of(x, devices.resolve(device_of(x)), False)
    padded = op.Pad(tensor, [*before, *after])
    return padded if isinstance(x, Tensor) else padded.raw


def handle_odd_pad_bwd(dx: Any, odd_padding: Sequence[int]) -> Any:
    """Compute the gradient of `handle_odd_pad_fwd`: remove the padding.

    Args:
        dx: Tensor of shape (N, C, ...), or its `.data`.
        odd_padding: The padding that was added, axis by axis as (before, after).

    Returns:
        The tensor or array without the padding.

    Raises:
        InvalidInput: If the padding does not match the shape of dx (SX347).
    """
    before, after = _by_axis(dx, odd_padding)
    return dx[tuple(slice(b, n - e) for b, e, n in zip(before, after, dx.shape, strict=True))]


def _by_axis(x: Any, odd: Sequence[int]) -> tuple[list[int], list[int]]:
    """The padding before and after each axis of x; raises InvalidInput if it does not match the shape."""
    rank = len(x.shape)
    if len(odd) % 2 or 2 + len(odd) // 2 > rank or min(odd, default=0) < 0:
        raise InvalidInput(
            f"odd_padding must have two numbers, 0 or more, per spatial axis of the shape {tuple(x.shape)}, got {tuple(odd)}",
            code="SX347",
        )
    rest = [0] * (rank - 2 - len(odd) // 2)
    return [0, 0, *odd[::2], *rest], [0, 0, *odd[1::2], *rest]


# --- text and tapes ---------------------------------------------------------------------------------------------------


def force_unicode(s: Any) -> Any:
    """Decode bytes as UTF-8.

    Args:
        s: Bytes, or any other value.

    Returns:
        The text; s itself if it is not bytes.

    Raises:
        UnicodeDecodeError: If the bytes are not UTF-8.
    """
    return s.decode("utf-8") if isinstance(s, (bytes, bytearray)) else s


def post_order_recursive(
    root: Operator, root_t: Tensor | None
) -> tuple[OrderedDict[str, Operator], OrderedDict[str, Tensor], OrderedDict[str, None]]:
    """List the operators that lead to `root` in topological order, and the leaves.

    The search is iterative, so that its depth is not limited. If two entries have the same name, the second is named `name#1`.

    Args:
        root: The creator of `root_t`.
        root_t: The tensor at which the search starts.

    Returns:
        Three ordered dicts by name: the operators, each after those that produce its inputs; the weights, that is, leaves that
        store their gradients; and the inputs, that is, other leaves, whose values are None.
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
