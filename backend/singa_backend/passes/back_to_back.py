"""`remove_back_to_back`: merge two successive nodes into one, or remove both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import dtypes
from ..ir.declaration import has_trait
from ..ir.graph import Node
from ..rewriting.padding import padding
from ..rewriting.reshapes import joined_reshapes
from ..rewriting.transposes import transposes
from .operator_facts import axes_since, get_ints, inside, set_ints
from .rewriter import ModelRewriter


def remove_back_to_back(rewriter: ModelRewriter) -> int:
    """Merge successive Casts, Transposes, Reshapes, Squeezes and Unsqueezes, a Pad and its Conv; remove pairs that cancel."""
    count = padding(rewriter) + transposes(rewriter) + joined_reshapes(rewriter)
    for node in rewriter.graph.nodes:
        x = node.input(0)
        first = None if x is None else x.producer
        if first is None or not node.plain or node.domain or not first.plain or first.domain:
            continue
        rule = _RULES.get((first.op_type, node.op_type), _same_operator if first.op_type == node.op_type else None)
        if rule is not None and first.inputs and rule(rewriter, first, node):
            count += 1
    return count


def _skip(rewriter: ModelRewriter, first: Node, node: Node) -> bool:
    """Let `node` read what `first` reads; remove `first` if nothing else reads it."""
    node.read([first.inputs[0], *node.inputs[1:]])
    _remove_unused(rewriter, first)
    return True


def _remove_unused(rewriter: ModelRewriter, node: Node) -> None:
    if not any(o.is_used for o in node.results):
        rewriter.graph.remove(node)


def _undo(rewriter: ModelRewriter, first: Node, node: Node) -> bool:
    """Replace the output of `node`, which cancels `first`, by the input of `first`."""
    x = first.inputs[0]
    if x is None or not rewriter.editor.bypass(node, x):
        return False
    _remove_unused(rewriter, first)
    return True


def _same_operator(rewriter: ModelRewriter, first: Node, node: Node) -> bool:
    if has_trait("", node.op_type, "idempotent"):
        return rewriter.editor.bypass(node, first.results[0])
    return has_trait("", node.op_type, "involution") and _undo(rewriter, first, node)


# --- Cast


def _bits(dtype: np.dtype[np.generic]) -> tuple[int, int, bool] | None:
    """(bits of precision, largest exponent, sign) of a number type; one type holds another if none of these is smaller."""
    if dtype.kind == "b":
        return 1, 1, False
    if dtype.kind in "iu":
        bits = dtype.itemsize * 8 - (dtype.kind == "i")
        return bits, bits, dtype.kind == "i"
    known = {"float16": (11, 15), "bfloat16": (8, 127), "float32": (24, 127), "float64": (53, 1023)}.get(dtype.name)
    return None if known is None else (*known, True)


def _holds(narrow: np.dtype[np.generic], wide: np.dtype[np.generic]) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    a, b = _bits(narrow), _bits(wide)
    if a is None or b is None:
        return False
    if dtypes.is_float(narrow) and not dtypes.is_float(wide):
        return False
    return a[0] <= b[0] and a[1] <= b[1] and a[2] <= b[2] and not (narrow.name == "bfloat16" and wide.name == "float16")


def _casts(rewriter: ModelRewriter, first: Node, node: Node) -> bool:
    """Replace a -> b -> c by a -> c if b holds every a, and if c of a wide b equals c of a.

    int32 -> double -> int8 is kept: a double beyond int8 converts as the machine defines, an int32 wraps around.
    """
    code = rewriter.editor.type(first.inputs[0]).dtype
    codes = (code, first.get("to"), node.get("to"))
    if not all(isinstance(c, int) and dtypes.is_code(c) for c in codes):
        return False
    a, b, c = (dtypes.numpy_dtype(code) for code in codes)
    if not _holds(a, b) or _bits(c) is None:
        return False
    whole = c.kind in "iu"
    if dtypes.is_float(a) and whole:  # NaN and infinity have no integer: the result may depend on the float type
        return False
    if a.kind in "iu" and dtypes.is_float(b) and whole and not _holds(a, c):
        return False
    return _skip(rewriter, first, node)


# --- Squeeze, Unsqueeze


def _squeezes(rewriter: ModelRewriter, first: Node, node: Node) -> bool:
    ranks = [rewriter.editor.rank(n) for n in (first.inputs[0], first.outputs[0], node.outputs[0])]
    (_, a), (_, b) = (get_ints(rewriter, n, "axes", 1, axes_since(n)) for n in (first, node))
    if a is None or b is None:
        return False
    if first.op_type != node.op_type:  # both count axes in the larger rank
        around = ranks[0] if first.op_type == "Squeeze" else ranks[1]
        same = sorted(a) == sorted(b) if all(i < 0 for i in (*a, *b)) else None
        if same is None:
            one, two = inside(a, around), inside(b, around)
            same = one is not None and two is not None and sorted(one) == sorted(two)
        return same and _undo(rewriter, first, node)
    grows = node.op_type == "Unsqueeze"
    a_in, b_in = inside(a, ranks[1 if grows else 0]), inside(b, ranks[2 if grows else 1])
    if a_in is None or b_in is None:
        return False
    # Axes of the smaller step, counted in the larger rank: the i-th place that the other step leaves free.
    outer, inner = (b_in, a_in) if grows else (a_in, b_in)
    free = [i for i in range(len(outer) + max(inner, default=-1) + 1) if i not in outer]
    set_ints(rewriter, node, "axes", 1, axes_since(node), sorted((*outer, *(free[i] for i in inner))))
    return _skip(rewriter, first, node)


_Rule = Callable[[ModelRewriter, Node, Node], bool]
_RULES: dict[tuple[str, str], _Rule] = {
    ("Cast", "Cast"): _casts,
    **{(a, b): _squeezes for a in ("Squeeze", "Unsqueeze") for b in ("Squeeze", "Unsqueeze")},
}  # fmt: skip
