"""New adapters: which weights they change, and the values with which training starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from .. import dtypes
from ..choices import BIASES as BIASES
from ..errors import InvalidInput
from ..ir.declaration import newest_declaration
from ..passes import ModelEditor
from ..passes.head import replace_head
from ..proto import tensor_data
from .adapter import Adapter, LowRank, base_digest
from .uses import CONVOLUTION, LOOKUP, Weight, by_default, passes_on, trace, weights

_ADAPTED = (
    "an adapter changes weights of MatMul, Gemm and Conv and of onnxruntime's products, tables of Gather, and other matrices of "
    "floats; biases train with bias='all' (--lora-bias all)"
)
"""What an adapter can change, as a hint."""

Draw = Callable[[Sequence[int], float], np.ndarray]
"""Draws numbers of a shape: uniform between -bound and bound, or normal with a deviation."""


def create(
    model: ModelProto,
    rank: int,
    *,
    uniform: Draw,
    normal: Draw,
    folder: Path | None = None,
    target: Sequence[str] = (),
    alpha: float | None = None,
    dropout: float = 0.0,
    bias: str = "none",
    rslora: bool = False,
    head: int | None = None,
    seed: int = 0,
) -> Adapter:
    """Create an adapter that does not change a model yet: A is random and B is 0, as in PEFT; of a table, A is 0.

    Args:
        model: the model.
        rank: the rank of each change.
        uniform: draws A of products and convolutions.
        normal: draws B of tables.
        folder: the folder of the model's external data; None if it has none.
        target: patterns of `fnmatch` for the names of weights, or of the nodes that use them; none for every product but those
            of the last layer.
        alpha: the scale is alpha / rank; None for rank.
        dropout: the probability of dropout before A, for the settings.
        bias: the biases that train too, one of `BIASES`.
        rslora: whether the scale is alpha / sqrt(rank).
        head: the number of outputs of a new last layer, whose values the adapter has; None to keep the layer.
        seed: the seed of these values.

    Returns:
        The adapter.

    Raises:
        UnsupportedModel: `head` is passed, and there is no last layer that can be replaced (SX369).
        InvalidInput: an argument is out of range (SX973), or a pattern selects no weight, or one that cannot be changed (SX972).
        InvalidModel: the model cannot be read.
    """
    check_settings(rank, alpha, dropout, bias)
    patterns = [target] if isinstance(target, str) else list(target)
    base = base_digest(model, folder)
    replaced = None
    if head is not None:
        copied = ModelProto()
        copied.CopyFrom(model)
        replaced, model = replace_head(copied, head, seed=seed, folder=folder), copied
    editor = ModelEditor(model, folder)
    chosen = select(editor, patterns, rank)
    scaled = float(rank if alpha is None else alpha)
    scale = scaled / (math.sqrt(rank) if rslora else rank)
    changes: dict[str, LowRank] = {}
    for weight in chosen:
        use = weight.main
        a, b = use.sizes(rank)
        dtype = np.dtype(np.float64 if use.origin.dtype == TensorProto.DOUBLE else np.float32)
        if use.kind == LOOKUP:
            changes[weight.name] = LowRank(np.zeros(a, dtype), normal(b, 1.0).astype(dtype), scale)
        else:
            drawn = uniform(a, 1 / math.sqrt(math.prod(a[1:]))).astype(dtype)
            changes[weight.name] = LowRank(drawn, np.zeros(b, dtype), scale)
    settings: dict[str, Any] = {
        "rank": rank, "alpha": scaled, "dropout": float(dropout), "target": patterns,
        "bias": bias, "rslora": bool(rslora), "head": head,
    }  # fmt: skip
    trained = dict.fromkeys([*_biases(editor, chosen, bias), *(replaced.parameters if replaced else ())])
    return Adapter(changes, {n: _value(editor, n) for n in trained}, base, settings)


def check_settings(rank: Any, alpha: Any, dropout: Any, bias: Any) -> None:
    """Raise InvalidInput (SX973) for settings that are out of range."""
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 1:
        raise InvalidInput(f"rank must be an integer of at least 1, got {rank!r}", code="SX973")
    if alpha is not None and not (isinstance(alpha, (int, float, np.number)) and math.isfinite(alpha) and alpha > 0):
        raise InvalidInput(f"alpha must be a number above 0, got {alpha!r}", code="SX973")
    if not (isinstance(dropout, (int, float, np.number)) and 0 <= dropout < 1):
        raise InvalidInput(f"dropout must be at least 0 and below 1, got {dropout!r}", code="SX973")
    if bias not in BIASES:
        raise InvalidInput(f"bias must be one of {', '.join(BIASES)}, got {bias!r}", code="SX973")


def select(editor: ModelEditor, target: Sequence[str], rank: int) -> list[Weight]:
    """The weights that patterns select, in the order of the nodes; without patterns, all products but the last layer's."""
    found = weights(editor)
    if not target:
        products = [w for w in found.values() if w.main.multiplies and w.main.kind != LOOKUP and not _refusal(w, rank)]
        chosen = [w for w in products if by_default(w)] or products
        if not chosen:
            hint = "select a matrix by its name: target=[...]" if found else _ADAPTED
            raise InvalidInput("the model has no product with a weight that an adapter could change", code="SX972", hint=hint)
        return chosen
    names: dict[str, None] = {}
    for pattern in target:
        matching = [n for n, w in found.items() if _matches(pattern, w.titles())]
        if not matching:
            raise _nothing(editor, pattern, found)
        names |= dict.fromkeys(matching)
    for weight in (found[n] for n in names):
        if why := _refusal(weight, rank):
            raise InvalidInput(f"cannot adapt {weight.name!r}: {why}", code="SX972")
    return [w for n, w in found.items() if n in names]


def _matches(pattern: str, titles: Iterable[str]) -> bool:
    return any(t == pattern or fnmatchcase(t, pattern) for t in titles)


def _nothing(editor: ModelEditor, pattern: str, found: dict[str, Weight]) -> InvalidInput:
    """The error for a pattern that selects no weight: what it matches instead, such as a weight of an LSTM."""
    others: dict[int, str] = {}  # by the number of axes: the most of them name the weight of a node
    for graph in editor.main.walk():
        for node in (n for n in graph.nodes if not (passes_on(n) or n.is_("DequantizeLinear"))):
            for origin in filter(None, (trace(editor, v) for v in node.inputs)):
                if _matches(pattern, filter(None, (origin.name, node.name))):
                    kind = dtypes.onnx_name(dtypes.numpy_dtype(origin.dtype))
                    what = f"cannot adapt {origin.name!r}: {node.op_type} reads it as {kind}{list(origin.shape)}"
                    others.setdefault(len(origin.shape), what)
            if node.name and _matches(pattern, [node.name]):
                others.setdefault(-1, f"cannot adapt {node.name!r}: {node.op_type} has no weight")
    if others:
        return InvalidInput(others[max(others)], code="SX972", hint=_ADAPTED)
    return InvalidInput(f"no weight or node matches {pattern!r}", code="SX972", hint=_candidates(pattern, found))


def _refusal(weight: Weight, rank: int) -> str:
    """Why a weight cannot be changed; "" if it can."""
    use = weight.main
    if use.kind == CONVOLUTION and rank % use.group:
        return f"the rank must be a multiple of its groups, {use.group}, got {rank}"
    if use.kind == CONVOLUTION and any(u.kind != CONVOLUTION or u.group != use.group for u in weight.uses):
        return "it is used by a convolution and in another way"
    if len(weight.uses) > 1 and use.kind != CONVOLUTION and use.by_outputs is None:
        return "it is reshaped, and used by several nodes"
    if use.origin.quantized and any(u is not use and u.by_outputs is None for u in weight.uses):
        return "it is quantized, and used in several ways"
    return ""


def _candidates(pattern: str, found: dict[str, Weight]) -> str:
    """The names near a pattern."""
    names = [t for w in found.values() for t in w.titles()]
    plain = pattern.strip("*?")
    near = [n for n in names if plain and plain.lower() in n.lower()] or difflib.get_close_matches(plain, names, 5, 0.4)
    return f"names like it are {', '.join(map(repr, near[:5]))}" if near else f"names are {', '.join(map(repr, names[:5]))}, ..."


def _biases(editor: ModelEditor, chosen: Sequence[Weight], bias: str) -> list[str]:
    """The names of the biases that train."""
    if bias == "none":
        return []
    found = dict.fromkeys(u.bias for w in chosen for u in w.uses if u.bias)
    if bias == "all":
        for graph in editor.main.walk():
            for node in graph.nodes:
                declared = newest_declaration(node.domain, node.op_type) if node.plain else None
                marks = declared.weights if declared is not None else {}
                values = (node.input(i) for i, text in marks.items() if "bias" in text)
                found |= dict.fromkeys(v.original.name for v in values if v is not None)
        found |= dict.fromkeys(u.bias for w in weights(editor).values() for u in w.uses if u.bias)
        found |= dict.fromkeys(n for n in editor.main.initializers if "bias" in n.lower())
    return [n for n in found if n and _floats(editor, n)]


def _floats(editor: ModelEditor, name: str) -> bool:
    found = editor.stored(name)
    code = 0 if found is None else found[1].data_type
    return dtypes.is_code(code) and dtypes.is_float(dtypes.numpy_dtype(code))


def _value(editor: ModelEditor, name: str) -> np.ndarray:
    found = editor.stored(name)
    assert found is not None
    return tensor_data.tensor(found[1], editor.folder)
