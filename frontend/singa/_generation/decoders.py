"""Runs of a decoder: its inputs by their roles, and caches that each run returns and the next one takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from singa_backend.backend import Outputs, SingaRep
from singa_backend.dtypes import is_float
from singa_backend.errors import ResourceExhausted, UnsupportedModel
from singa_backend.ir.graph import Node
from singa_backend.limits import Budget
from singa_backend.proto.values import Value

from .config import UNSUPPORTED, InputNames, ModelFolder

ROWS = 256
"""Buffers of a maximum length have a multiple of so many rows, so that similar lengths have the same shapes, and one plan."""

BRANCH = "use_cache_branch"
"""The input that selects the part of a merged file that reads the caches."""

HIDDEN = ("encoder_hidden_states", "encoder_outputs")
HIDDEN_MASK = "encoder_attention_mask"

_PACKING = frozenset({"GroupQueryAttention"})
"""Operators for which the mask is the number of tokens of each sequence, so that padding must not be in front of them.

They take buffers of the maximum length, or a past that grows: plans let it grow in place, and copy buffers.  A sliding cache is
a buffer of the tokens of its window."""


def unsupported(text: str, hint: str = "") -> UnsupportedModel:
    """The error of a model that generation cannot run."""
    return UnsupportedModel(text, code=UNSUPPORTED, hint=hint)


@dataclass(frozen=True)
class PastCache:
    """A cache: an input of past keys or values, and the output that the next run takes.

    Attributes:
        past: the name of the input.
        present: the name of the output; "" if the file does not return it.
        dtype: of both.
        shape: of the input; 0 for the batch and the length.
        encoder: whether it holds keys or values of the encoder, which do not grow.
        window: the number of its rows if it is a sliding cache, which keeps the last tokens only; 0 otherwise.
    """

    past: str
    present: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    encoder: bool
    window: int = 0

    @property
    def batch(self) -> int:
        """The axis of the sequences."""
        return len(self.shape) - 4

    @property
    def length(self) -> int:
        """The axis of the tokens."""
        return len(self.shape) - 2

    def empty(self, batch: int, rows: int) -> np.ndarray:
        """The cache before the first token, with rows of zeros."""
        return np.zeros(self.sizes(batch, rows), self.dtype)

    def sizes(self, batch: int, rows: int) -> tuple[int, ...]:
        """The shape of the cache; a sliding one always has the rows of its window."""
        rows = self.window or rows
        return tuple(batch if i == self.batch else (rows if i == self.length else d) for i, d in enumerate(self.shape))


@dataclass(frozen=True)
class DecoderFile:
    """A file of a decoder, prepared, and the roles of its inputs and outputs; a name is "" if there is no such input.

    Attributes:
        rep: the prepared model.
        ids: the input of tokens.
        ids_dtype: its dtype.
        mask: the input that has 1 for each token to attend to.
        positions: the input of positions.
        hidden: the input of the encoder's output.
        hidden_mask: the input of the encoder's mask.
        branch: the input that selects the part of a merged file that reads the caches.
        logits: the output.
        caches: the caches.
        batch: the number of sequences that the file declares; 0 for any.
        packs: whether its attention reads the mask as the number of tokens of each sequence, and takes a past of any length.
        places: the number of positions for which it has rows in its tables of rotations or of positions; None if it has none.
    """

    rep: SingaRep
    ids: str
    ids_dtype: np.dtype[Any]
    mask: str
    positions: str
    hidden: str
    hidden_mask: str
    branch: str
    logits: str
    caches: tuple[PastCache, ...]
    batch: int
    packs: bool
    places: int | None
    dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, rep: SingaRep, folder: ModelFolder, file: str) -> DecoderFile:
        """Find the roles; raises UnsupportedModel (SX210) for inputs that are not those of a decoder of text."""
        inputs = {v.name: v for v in rep.inputs}
        outputs = {v.name: v for v in rep.outputs}
        names = folder.names
        ids, mask, positions = (_among(n, inputs) for n in (names.ids, names.mask, names.positions))
        if not ids:
            raise unsupported(f"{file} must have the input {' or '.join(names.ids)}, and has {_list(inputs)}")
        logits = names.logits if names.logits in outputs else ""
        if not logits:
            raise unsupported(f"{file} must have the output {names.logits}, and has {_list(outputs)}")
        rank = outputs[logits].shape
        if rank is not None and len(rank) not in (2, 3):
            raise unsupported(f"{file}: the output must be of shape [batch, length, words]: {outputs[logits]}")
        nodes = list(rep.graph.all_nodes())
        caches = tuple(_caches(inputs, outputs, folder, file, _windows(nodes)))
        hidden = _among(HIDDEN, inputs)
        hidden_mask, branch = _among((HIDDEN_MASK,), inputs), _among((BRANCH,), inputs)
        known = {ids, mask, positions, hidden, hidden_mask, branch, *(c.past for c in caches)}
        others = [str(v) for n, v in inputs.items() if n not in known and v.kind != "optional"]
        if others:
            hint = "files whose inputs are tokens, a mask, positions and past keys and values are supported"
            raise unsupported(f"{file} has inputs that generation does not provide: {', '.join(others)}", hint)
        found: dict[str, np.dtype[Any]] = {}
        for name in filter(None, (ids, mask, positions, hidden_mask)):
            dtype = inputs[name].dtype
            if dtype is None or dtype.kind not in "iub":
                raise unsupported(f"{file}: the input must be of integers: {inputs[name]}")
            found[name] = dtype
        shape = inputs[ids].shape
        if shape is not None and (len(shape) != 2 or isinstance(shape[1], int)):
            raise unsupported(f"{file}: the input must be of shape [batch, any length]: {inputs[ids]}")
        batch = shape[0] if shape is not None and isinstance(shape[0], int) else 0
        packing = any(n.op_type in _PACKING for n in nodes)
        return cls(
            rep, ids, found[ids], mask, positions, hidden, hidden_mask, branch, logits, caches, batch,
            packing, _places(nodes, rep.graph.states, positions), found,
        )  # fmt: skip

    @property
    def pads(self) -> bool:
        """Whether prompts of unequal lengths may be padded on the left."""
        return bool(self.mask and self.positions) and not self.packs

    @property
    def grows(self) -> bool:
        """Whether the file has caches, so that a run takes the new tokens only."""
        return bool(self.caches)


def _among(names: Sequence[str], found: dict[str, Value]) -> str:
    return next((n for n in names if n in found), "")


def _list(found: dict[str, Value]) -> str:
    return ", ".join(found) or "none"


def _windows(nodes: Sequence[Node]) -> dict[str, int]:
    """The windows of the inputs that are sliding caches."""
    sliding = [n for n in nodes if n.op_type in _PACKING and n.attributes.get("sliding_window_cache")]
    return {name: int(n.attributes["local_window_size"]) for n in sliding for name in n.input_names[3:5]}


def _places(nodes: Sequence[Node], states: Mapping[str, np.ndarray], positions: str) -> int | None:
    """The rows of the smallest table that positions index: of a rotation, or of a Gather by the input of positions."""
    tables = [
        states[name].shape[0]
        for n in nodes
        for i, name in enumerate(n.input_names)
        if name in states
        and states[name].ndim == 2
        and (_formal(n, i) == "cos_cache" or (i == 0 and positions and n.input_names[1:] == (positions,)))
    ]
    return min(tables, default=None)


def _formal(node: Node, at: int) -> str:
    """The name of an input in the schema of its operator."""
    return "" if node.operator is None or at >= len(node.operator.schema.inputs) else node.operator.schema.inputs[at].name


def _caches(
    inputs: dict[str, Value], outputs: dict[str, Value], folder: ModelFolder, file: str, windows: dict[str, int]
) -> list[PastCache]:
    """The caches of a decoder."""
    pairs = {n: p for n in inputs if (p := _present(n, folder.names))}
    lacking = [p for p in pairs.values() if p not in outputs and "encoder" not in p and "cross" not in p]
    if lacking:
        raise unsupported(f"{file} must return {lacking[0]}, which is the next past, and returns {_list(outputs)}")
    return [_cache(inputs[n], p if p in outputs else "", folder, file, windows.get(n, 0)) for n, p in pairs.items()]


def _present(past: str, names: InputNames) -> str:
    """The name of the output that becomes this input; "" if the input is not a cache."""
    for before, after in names.caches:
        found = re.fullmatch(re.escape(before).replace("%d", "([0-9]+)"), past)
        if found:
            return after.replace("%d", found[1])
    if names.caches or not re.fullmatch(r"past(_key_values|_key|_value|_[0-9]+|_?).*", past) or past == "past_sequence_length":
        return ""
    return re.sub("^past_key_values|^past", "present", past)


def _cache(value: Value, present: str, folder: ModelFolder, file: str, window: int) -> PastCache:
    """The cache of an input, whose sizes are those of the file or of the configuration."""
    shape = value.shape
    if value.dtype is None or shape is None or len(shape) not in (4, 5):
        wanted = "[batch, heads, length, size] or [2, batch, heads, length, size]"
        raise unsupported(f"{file}: a cache must be of shape {wanted}: {value}")
    lead = len(shape) - 4
    heads, size = (
        d if isinstance(d, int) and d > 0 else default
        for d, default in ((shape[lead + 1], folder.heads), (shape[lead + 3], folder.size))
    )
    if heads is None or size is None:
        raise unsupported(f"{file}: a cache must declare its heads and their size, or the configuration must: {value}")
    name = value.name
    encodes = "encoder" in name or "cross" in name
    return PastCache(name, present, value.dtype, (*(2,) * lead, 0, heads, 0, size), encodes, window)


def run_within(rep: SingaRep, feeds: Mapping[str, Any], budget: Budget) -> Outputs:
    """One run of a call: it ends at the deadline of the call, and does not begin if the flag of the call is set."""
    remaining = budget.remaining()
    limits = None if remaining is None else replace(rep.limits, deadline=remaining)
    try:
        return rep.run(feeds, limits=limits) if rep.device.is_host else rep.run(feeds, limits=limits, to_host=False)
    except ResourceExhausted:
        budget.watch()  # raises with the deadline of the call
        raise


class Decoding:
    """The runs for some sequences, which have a prompt of one length.

    Args:
        first: the file of the first run.
        later: the file of later runs; the same, or another one.
        mask: for each sequence 1 for its tokens and 0 for padding, of shape (sequences, length of the prompt).
        most: the maximum number of tokens of a sequence, with its prompt.
        shared: whether past and present are buffers of that length.
        budget: of the call.
        hidden: the output of the encoder, and its mask; None without one.

    Attributes:
        count: the number of runs so far.
    """

    def __init__(
        self,
        first: DecoderFile,
        later: DecoderFile,
        mask: np.ndarray,
        most: int,
        shared: bool,
        budget: Budget,
        hidden: tuple[Any, np.ndarray] | None = None,
    ) -> None:
        self._first, self._later, self._hidden = first, later, hidden
        self._budget = budget
        self._batch = len(mask)
        self._prompt = mask.astype(np.int64)
        self._past: dict[str, Any] = {}
        self._tokens = np.zeros((self._batch, 0), np.int64)
        self._length = 0
        self.count = 0
        rows = -(-most // ROWS) * ROWS if shared else 0
        self._start(first, rows)

    def _start(self, file: DecoderFile, rows: int) -> None:
        """Allocate the caches before the first run."""
        budget = Budget(file.rep.limits, memory=file.rep.device.memory)
        for c in file.caches:
            shape = c.sizes(self._batch, rows)
            budget.admit(shape, c.dtype.itemsize)
            budget.count_tensor(int(np.prod(shape)) * c.dtype.itemsize)
        with file.rep.device.active():
            for c in file.caches:
                made = c.empty(self._batch, rows)
                self._past[c.past] = made if file.rep.device.is_host else file.rep.device.put(made)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Run on the next tokens, of shape (sequences, number), and return the logits after them, as float32."""
        file = self._first if not self.count else self._later
        self._length += tokens.shape[1]
        if not self._later.grows:  # each run reads all tokens
            tokens = self._tokens = np.concatenate([self._tokens, tokens], axis=1)
        outputs = self._run(file, tokens)
        self.count += 1
        found = outputs[file.logits]
        shape: tuple[int, ...] = getattr(found, "shape", ())
        dtype = getattr(found, "dtype", None)
        fits = len(shape) in (2, 3) and shape[0] == self._batch and 0 not in shape
        if not fits or dtype is None or not (is_float(dtype) or dtype.kind in "iub"):
            what = f"{dtype}{list(shape)}" if dtype is not None else f"a {type(found).__name__}"
            raise unsupported(f"{file.logits} must be numbers of shape [{self._batch}, length, words], got {what}")
        device = file.rep.device
        last = found[:, -1] if len(shape) == 3 else found
        if not device.is_host:
            last = device.get(last)
        return np.asarray(last).astype(np.float32)

    def reorder(self, rows: np.ndarray) -> None:
        """Let each sequence continue another one: `rows` has the number of the latter."""
        if np.array_equal(rows, np.arange(self._batch)):
            return
        self._tokens = self._tokens[rows]
        device = self._later.rep.device
        with device.active():
            for c in self._later.caches:
                if c.past in self._past and not c.encoder:
                    at = rows if device.is_host else device.put(rows)
                    self._past[c.past] = self._past[c.past].take(at, axis=c.batch)

    def _run(self, file: DecoderFile, tokens: np.ndarray) -> Outputs:
        """One run; it replaces the caches by those that it returns."""
        new = np.ones((self._batch, self._length - self._prompt.shape[1]), np.int64)
        mask = np.concatenate([self._prompt, new], axis=1)
        feeds: dict[str, Any] = {file.ids: tokens.astype(file.ids_dtype)}
        if file.mask:
            feeds[file.mask] = mask.astype(file.dtypes[file.mask])
        if file.positions:
            places = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, self._length - tokens.shape[1] :]
            feeds[file.positions] = places.astype(file.dtypes[file.positions])
        if self._hidden is not None:
            if file.hidden:
                feeds[file.hidden] = self._hidden[0]
            if file.hidden_mask:
                feeds[file.hidden_mask] = self._hidden[1].astype(file.dtypes[file.hidden_mask])
        if file.branch:
            feeds[file.branch] = np.array([self.count > 0])
        feeds |= {c.past: self._past[c.past] for c in file.caches}
        outputs = run_within(file.rep, feeds, self._budget)
        self._keep(file, outputs)
        return outputs

    def _keep(self, file: DecoderFile, outputs: Outputs) -> None:
        """Keep the caches for the next run; those of the encoder from the first run on."""
        for c in self._later.caches:
            if self.count and c.encoder:
                continue
            present = c.present or _present(c.past, InputNames())
            if present in outputs.names:
                self._past[c.past] = outputs[present]
            elif not self.count:
                what = f"the file of the first run must return {present}, the past of the next run, and returns"
                raise unsupported(f"{what} {', '.join(outputs.names)}")
