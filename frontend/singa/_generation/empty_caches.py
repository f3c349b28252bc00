"""The inputs with which a decoder reads whole texts, as in training: tokens, a mask, positions, empty caches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from onnx import ModelProto

from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.proto.load import ModelSource, open_light
from singa_backend.proto.values import Value

from .._onnx.model import SONNXModel
from .config import InputNames
from .decoders import _present

_NAMES = InputNames()

Filler = Callable[[np.ndarray], np.ndarray]
"""Computes an input from the tokens, of shape (N, T)."""


def decoder_inputs(model: SONNXModel | ModelSource, tokens: ArrayLike, mask: ArrayLike | None = None) -> dict[str, np.ndarray]:
    """Return the inputs with which a decoder reads whole texts, as its training does.

    Args:
        model: the decoder, a SONNXModel, a ModelProto, its bytes, or the path of its file.
        tokens: the tokens, integers of shape (N, T).
        mask: 1 for each token to attend to and 0 for padding, of shape (N, T); None for ones.

    Returns:
        The inputs by name: the tokens, the mask, the positions 0 to T - 1, and a cache of length 0 for each past.

    Raises:
        InvalidInput: tokens or mask are not integers of these shapes (SX342).
        UnsupportedModel: the model has other inputs (SX210).
    """
    ids = np.asarray(tokens)
    shown = np.ones(ids.shape, np.int64) if mask is None else np.asarray(mask)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or shown.shape != ids.shape:
        got = f"{ids.dtype}{list(ids.shape)} and {shown.dtype}{list(shown.shape)}"
        raise InvalidInput(f"tokens and mask must be integers of shape (N, T), got {got}", code="SX342")
    declared = _declared(model)
    names = [v.name for v in declared]
    own = {n: ids for n in _NAMES.ids if n in names} | {n: shown for n in _NAMES.mask if n in names}
    fillers = fillers_of(declared, own)
    others = [str(v) for v in declared if v.name not in own and v.name not in fillers]
    if not own or others:
        what = "inputs that are not those of a decoder of text" if own else f"no input {' or '.join(_NAMES.ids)}"
        raise UnsupportedModel(f"the model has {what}: {', '.join(others or names)}", code="SX210")
    arrays = own | {n: fill(ids) for n, fill in fillers.items()}
    return {v.name: arrays[v.name].astype(v.dtype or np.int64) for v in declared}


def _declared(model: SONNXModel | ModelSource) -> list[Value]:
    """The declared inputs of a model, without initializers."""
    if isinstance(model, SONNXModel):
        return model.imported.graph.declared_inputs
    proto: ModelProto = model if isinstance(model, ModelProto) else open_light(model)[0]
    stored = {t.name for t in proto.graph.initializer}
    return [Value.from_proto(v) for v in proto.graph.input if v.name not in stored]


def token_input(inputs: Sequence[Value]) -> str:
    """The name of the input of tokens; "" if the model is not a decoder of text."""
    return next((v.name for v in inputs if v.name in _NAMES.ids and v.dtype is not None and v.dtype.kind in "iu"), "")


def fillers_of(inputs: Sequence[Value], there: Collection[str]) -> Mapping[str, Filler]:
    """How the inputs of a decoder that data lack follow from the tokens, by name: all tokens shown, positions, empty caches."""
    return {v.name: fill for v in inputs if v.name not in there and (fill := _filler(v)) is not None}


def _filler(value: Value) -> Filler | None:
    dtype = value.dtype
    if dtype is None:
        return None
    if value.name in _NAMES.mask:
        return lambda ids: np.ones(ids.shape, dtype)
    if value.name in _NAMES.positions:
        return lambda ids: np.broadcast_to(np.arange(ids.shape[1], dtype=dtype), ids.shape).copy()
    shape = value.shape
    if shape is None or not _present(value.name, _NAMES) or len(shape) not in (4, 5):
        return None
    lead: list[Any] = list(shape[: len(shape) - 4])
    heads, size = shape[-3], shape[-1]
    if not isinstance(heads, int) or not isinstance(size, int):
        return None
    return lambda ids: np.zeros((*lead, len(ids), heads, 0, size), dtype)
