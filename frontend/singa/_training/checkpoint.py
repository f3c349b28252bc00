"""Checkpoints of `fit`: the states, the point in the data and the losses, with which a training continues to the bit.

    kept = Checkpoint("run.ckpt", model, optimizer, {"--batch-size": "32"})
    fit(model, x, y, reached=kept.write)
    fit(model, x, y, start=kept.read(len(y), batch_size), reached=kept.write)        # in another process

A checkpoint is a file of `Model.save_states`, whose further tensors are the states of the optimizer ("optimizer.m.W") and
of the loop ("fit.order").  If several ranks train, rank 0 writes it, with the states of the other ranks that differ from its own
("rank1.model.mean", "rank1.optimizer.residual.W").  Reading it runs no code, and everything that it holds is checked.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from singa_backend import dtypes
from singa_backend.collectives import Communicator
from singa_backend.collectives.communicator import copied, total
from singa_backend.errors import InvalidInput, SonnxError
from singa_backend.io.archives import open_archive, typed
from singa_backend.io.documents import Document, parse_document
from singa_backend.io.files import remove, staged, write_copy
from singa_backend.io.places import refused
from singa_backend.kernels.options import MOST_THREADS
from singa_backend.kernels.options import options as plan_options

from .._core import random
from .._core.tensor import Tensor
from ..device import Device
from .distributed import PARTIAL, RESIDUAL
from .fit import History, Position
from .history import weighted_mean
from .optimizer import MASTER
from .state_files import read_described, read_states, write_states

OPTIMIZER, LOOP, MEASURED, STATES, PART = "optimizer.", "fit.", "fit.validation.", "model.", "part."
RANDOM = f"{LOOP}random_state"
DEFAULTS = {
    "--workers": "1",
    "--dist-option": "none",
    "--schedule": "constant",
    "--warmup": "0",
    "--clip-norm": "none",
    "--accumulate": "1",
    "--sync-batch-norm": "no",
    "--precision": "float32",
    "--train-constants": "yes",
    "--lora": "none",
    "--lora-target": "none",
    "--lora-alpha": "the rank",
    "--lora-dropout": "0.0",
    "--lora-bias": "none",
    "--rslora": "False",
    "--qlora": "none",
    "--head": "none",
    "--at": "none",
    "--keep-best": "none",
    "--ignore-index": "none",
    "--class-axis": "none",
}
"""The settings that a checkpoint has only if they have other values than these.  Versions without --train-constants trained the
constants of a model; a model without constants has no such setting."""

_RANK = re.compile(r"rank\d+\.")
"""The beginning of the name of a state of another rank."""

_MARK = b"tensor_dict.npz"
"""The name of the first member of a file of states."""

_LARGEST = 1 << 20
"""Maximum bytes of the settings."""

_RNG = {"bit_generator": str, "state": {"state": int, "inc": int}, "has_uint32": int, "uinteger": int}
_ANOTHER = "resume another checkpoint, or start again"


class Kept(Protocol):
    """The methods of a Model that a checkpoint uses."""

    def get_params(self) -> dict[str, Tensor]: ...

    def get_states(self) -> dict[str, Tensor]: ...

    def set_states(self, states: Mapping[str, Any]) -> None: ...

    def save_states(self, fpath: Any, aux_states: dict[str, Tensor] | None = None) -> None: ...

    def load_states(self, fpath: Any) -> dict[str, Tensor]: ...


class Updates(Protocol):
    """The methods of an Optimizer that a checkpoint uses."""

    kinds: tuple[str, ...]

    def get_states(self) -> dict[str, Tensor]: ...

    def set_states(self, states: Mapping[str, Any]) -> None: ...


class Part(Protocol):
    """What a checkpoint keeps besides the states and the point: the best epoch, files that grow."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpoint:
    """The file of a training.

    Args:
        path: The path of the file.
        model: The model, whose parameters exist.
        optimizer: Its optimizer.
        device: The device whose random numbers the training draws.
        settings: The arguments that must not change, by name: the identity of the model and the data, the loss, ...
        rates: The arguments that may change, by name.
        group: The ranks that train together; None for one process. All ranks must call `write` and `read`.
        keep: The number of checkpoints that are kept: the file, and those before it, whose names have their steps.

    Attributes:
        parts: What else is kept, by name; a part that the file does not have is not loaded.
        step: The step that the file holds; 0 before it is written or read.
        changed: After `read`, the values of `rates` in the file, of those that differ.
        threads: The number of threads of plans in this process, which the file has.
        other_threads: After `read`, the number in the file if it differs: sums are then added in another order.
    """

    def __init__(
        self,
        path: Path,
        model: Kept,
        optimizer: Updates,
        device: Device,
        settings: Mapping[str, str],
        rates: Mapping[str, str],
        group: Communicator | None = None,
        keep: int = 1,
    ) -> None:
        self.keep, self.step, self.parts = keep, 0, dict[str, Part]()
        self.path, self.model, self.optimizer, self.device = path, model, optimizer, device
        self.settings, self.rates = dict(settings), dict(rates)
        self.group = group if group and group.size > 1 else None
        self.changed: dict[str, str] = {}
        self.threads = plan_options().threads
        self.other_threads: int | None = None
        self._finite = set(_finite(model.get_states()))

    def write(self, place: Position) -> None:
        """Replace the file by one of the current point; the old one stays if that fails.

        Raises:
            InvalidInput: A state that was finite is NaN or infinite (SX343), or the file cannot be written (SX351); then the
                old file is unchanged.
        """
        lost = sorted(self._finite - set(_finite(self.model.get_states())))
        if lost:
            step, names = len(place.history.losses), ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            raise InvalidInput(
                f"parameters must be finite after step {step}, got NaN or infinite values in {names}",
                code="SX343",
                hint="lower the learning rate, or bound the gradients (--clip-norm)",
            )
        others = self._others()
        if self.group and self.group.rank:
            return
        rng: Any = place.rng.bit_generator.state
        updated = self.optimizer.get_states()
        parts = {name: part.state_dict() for name, part in self.parts.items()}  # their files reach the disk first
        run = {
            "parts": {name: {n: v for n, v in s.items() if not isinstance(v, np.ndarray)} for name, s in parts.items()},
            "settings": self.settings, "rates": self.rates, "states": len(updated),
            "epoch": place.epoch, "batch": place.batch, "rng": rng, "threads": self.threads,
        }  # fmt: skip
        order = np.zeros(0, np.int64) if place.order is None else place.order
        measured: dict[str, list[float]] = {}
        for seen in place.history.validation:
            for name, value in seen.items():
                measured.setdefault(name, []).append(value)
        arrays = {
            f"{LOOP}run": np.frombuffer(json.dumps(run).encode(), np.uint8),
            f"{LOOP}order": order.astype(np.int32 if len(order) < 1 << 31 else np.int64),
            f"{LOOP}losses": np.array(place.history.losses, np.float64),
            f"{LOOP}weights": np.array(place.history.weights, np.int64),
            RANDOM: random.get_state(self.device),
            **others,
            **{MEASURED + name: np.array(values, np.float64) for name, values in measured.items()},
            **{f"{PART}{name}.{n}": v for name, s in parts.items() for n, v in s.items() if isinstance(v, np.ndarray)},
        }
        extra = {OPTIMIZER + n: t for n, t in updated.items()}
        extra |= {n: Tensor(data=a, requires_grad=False) for n, a in arrays.items()}
        step = len(place.history.losses)
        if self.keep > 1 and 0 < self.step < step:
            self._set_aside()
        with staged(self.path) as stage:
            self.model.save_states(stage / stage.target.name, extra)
        self.step = step
        if self.keep > 1:
            self._clean()

    def _set_aside(self) -> None:
        """Give the present file its second name, under which it stays."""
        name = self.path.with_name(f"{self.path.stem}.step-{self.step:06}{self.path.suffix}")
        if os.path.lexists(name) and not _is_checkpoint(name):
            raise refused(name, FileExistsError(errno.EEXIST, "there is a file of that name that is not a checkpoint"))
        write_copy(name, self.path, _MARK)

    def _clean(self) -> None:
        """Remove the oldest files, and those of later steps, which a training left that was resumed at an earlier point."""
        there = {step: path for step, path in earlier(self.path).items() if _is_checkpoint(path)}
        kept = [n for n in there if n < self.step][1 - self.keep :]
        for step in there.keys() - set(kept):
            remove(there[step], _MARK)

    def read(self, count: int | None, batch_size: int) -> Position:
        """Set the states of the model, the optimizer and the random stream to those in the file.

        Args:
            count: The number of samples; None for batches of another source, a part named "data" that knows their numbers.
            batch_size: The number of samples of a step.

        Returns:
            The point at which to continue.

        Raises:
            InvalidInput: The file does not exist, or is not a checkpoint, or is damaged (SX380, SX340); or it is of another
                training (SX381).
        """
        if not os.path.isfile(self.path):
            hint = "leave out --resume to start a training"
            raise InvalidInput(f"there is no checkpoint {self.path}", code="SX380", hint=hint)
        try:
            extra = self.model.load_states(self.path)
        except InvalidInput as error:
            if error.code != "SX341":
                raise
            raise _other(self.path, error.message, "pass the model of that training, or another checkpoint") from None
        arrays = {n: np.asarray(t.data) for n, t in extra.items()}
        own = self._of_this_rank(arrays)
        with typed(f"{self.path} must be a checkpoint of sonnx train", "SX380", _ANOTHER):
            run = _run(self.path, arrays)
            self._compare(run)
            place = _place(run, arrays, count, batch_size)
        states = {n.removeprefix(OPTIMIZER): a for n, a in arrays.items() if n.startswith(OPTIMIZER)}
        self._fits(states, run)
        self._fits_rank(own, states)
        states |= {n.removeprefix(OPTIMIZER): a for n, a in own.items() if n.startswith(OPTIMIZER)}
        self.model.set_states({n.removeprefix(STATES): a for n, a in own.items() if n.startswith(STATES)})
        self.optimizer.set_states(states)
        random.set_state(self.device, own.get(RANDOM, arrays[RANDOM]))
        self._read_parts(run, arrays)
        self.step = len(place.history.losses)
        self._finite = set(_finite(self.model.get_states()))
        return place

    def _read_parts(self, run: Document, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the parts that the file has."""
        for name, part in self.parts.items():
            mark = f"{PART}{name}."
            state = run.part("parts").get(name)
            if state is not None:
                own = {n.removeprefix(mark): a for n, a in arrays.items() if n.startswith(mark)}
                with typed(f"{self.path} must be a checkpoint of sonnx train, got one with another {name}", "SX380", _ANOTHER):
                    part.load_state_dict({**state.mapping(), **own})

    def _others(self) -> dict[str, np.ndarray]:
        """On rank 0, the states of the other ranks that differ from its own, by name."""
        group = self.group
        if group is None:
            return {}
        mine = {STATES + n: t for n, t in self.model.get_states().items()}
        mine |= {OPTIMIZER + n: t for n, t in self.optimizer.get_states().items()}
        arrays = {n: np.asarray(t.device.backend.get(t._data), order="C") for n, t in mine.items()}
        arrays[RANDOM] = random.get_state(self.device)
        digests = np.zeros((group.size, len(arrays)), np.int64)
        digests[group.rank] = [_digest(a) for a in arrays.values()]
        digests = total(group, digests)
        found: dict[str, np.ndarray] = {}
        for rank in range(1, group.size):
            for i, (name, array) in enumerate(arrays.items()):
                if digests[rank, i] != digests[0, i]:
                    theirs = copied(group, array, rank)  # one at a time: only rank 0 keeps it
                    if group.rank == 0:
                        found[f"rank{rank}.{name}"] = theirs
        return found

    def _of_this_rank(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Remove the states of ranks from the arrays of a file; return those of this rank."""
        mark = f"rank{self.group.rank if self.group else 0}."
        found = {n.removeprefix(mark): a for n, a in arrays.items() if n.startswith(mark)}
        for name in [n for n in arrays if _RANK.match(n)]:
            del arrays[name]
        return found

    def _compare(self, run: Document) -> None:
        """Raise for the first arguments of another training."""
        was = {n: value.text() for n, value in run["settings"].items()}
        if (was.keys() ^ self.settings.keys()) - DEFAULTS.keys():
            raise run["settings"].error(f"must be those of this command, got {', '.join(sorted(was))[:200]}")
        was, now = DEFAULTS | was, DEFAULTS | self.settings
        other = [n for n, value in now.items() if was[n] != value]
        if other:
            parts = [_difference(n, was[n], now[n]) for n in other]
            hint = f"only --epochs, {', '.join(self.rates)} may change"
            if other == ["--train-constants"]:
                words = "pass" if was[other[0]] == "yes" else "leave out"
                hint = f"{words} --train-constants to continue it, or start a training with another --checkpoint"
            raise _other(self.path, "; ".join(parts), hint)
        rates = {n: run["rates"][n].text() for n in self.rates}
        self.changed = {n: rates[n] for n, value in self.rates.items() if rates[n] != value}
        threads = run.maybe("threads", Document.integer, 1, MOST_THREADS) or self.threads  # versions before it did not write it
        self.other_threads = None if threads == self.threads else threads

    def _fits(self, states: dict[str, np.ndarray], run: Document) -> None:
        """Raise unless the states are those of this optimizer, for parameters of the model."""
        params = {n: tuple(p.shape) for n, p in self.model.get_params().items()}
        exchange = {n for n in states if n == PARTIAL or n.startswith(f"{RESIDUAL}.")} if self.group else set()
        exchange |= {n for n in states if n.startswith(f"{MASTER}.")}  # of narrow parameters only
        kinds = {n: n.partition(".") for n in states if n != "step_counter" and n not in exchange}
        wanted = {"step_counter", *(f"{kind}.{p}" for kind in self.optimizer.kinds for _, _, p in kinds.values())}
        kept = {n: n.partition(".") for n in exchange if n != PARTIAL}
        same = all(
            states[n].shape == params.get(p) and dtypes.is_float(states[n].dtype) for n, (_, _, p) in (kinds | kept).items()
        )
        if wanted != states.keys() - exchange or not same or run["states"].value != len(states):
            raise _other(self.path, f"its optimizer has the states {', '.join(sorted(states)[:5]) or '(none)'}", "")

    def _fits_rank(self, own: dict[str, np.ndarray], states: dict[str, np.ndarray]) -> None:
        """Raise unless the states of this rank are of the kinds that `write` stores, and of the shapes of rank 0's."""
        first: dict[str, Any] = {STATES + n: t.data for n, t in self.model.get_states().items()}
        first |= {OPTIMIZER + n: a for n, a in states.items()} | {RANDOM: np.zeros(2, np.int64)}
        for name, a in own.items():
            like = first.get(name)
            fits = like is not None and like.shape == a.shape and like.dtype == a.dtype
            if not fits or (name == RANDOM and (a < 0).any()):
                text = f"{self.path} must be a checkpoint of sonnx train, got one with another state {name} of a worker"
                raise InvalidInput(text, code="SX380", hint=_ANOTHER)


class TrainedStates:
    """The states of a model without its frozen parameters, for a checkpoint: those stay in the file of the model."""

    def __init__(self, model: Kept) -> None:
        self.model = model
        fixed = {n for n, p in model.get_params().items() if not p.requires_grad}
        self.names = [n for n in model.get_states() if n not in fixed]

    def get_params(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return self.model.get_params()

    def get_states(self) -> dict[str, Tensor]:
        """The states by name."""
        every = self.model.get_states()
        return {n: every[n] for n in self.names}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Write values into the states."""
        self.model.set_states(states)

    def save_states(self, fpath: Any, aux_states: dict[str, Tensor] | None = None) -> None:
        """Write the states and further tensors to a new file."""
        write_states(Path(fpath), self.get_states(), aux_states or {})

    def load_states(self, fpath: Any) -> dict[str, Tensor]:
        """Read the states from a file, and return its further tensors."""
        mine, others = read_states(fpath, {n: tuple(t.shape) for n, t in self.get_states().items()})
        self.set_states({n: Tensor(data=a) for n, a in mine.items()})
        return {n: Tensor(data=a, name=n) for n, a in others.items()}


def earlier(path: Path) -> dict[int, Path]:
    """The files of the earlier checkpoints of a path, by step, the oldest first."""
    form = re.compile(re.escape(path.stem) + r"\.step-(\d{6,18})" + re.escape(path.suffix))
    found = [(form.fullmatch(p.name), p) for p in path.parent.iterdir()]
    return dict(sorted((int(m[1]), p) for m, p in found if m))


def _is_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint; False for a link."""
    if os.path.islink(path):
        return False
    try:
        with open_archive(path, "SX380") as pack:
            return f"{LOOP}run" in read_described(pack).mapping()
    except SonnxError:
        return False


def _run(path: Path, arrays: Mapping[str, np.ndarray]) -> Document:
    """The settings in a file, as `write` stores them."""
    stored = arrays.get(f"{LOOP}run", np.zeros(0))
    if stored.dtype != np.uint8 or stored.ndim != 1 or stored.size > _LARGEST:
        raise ValueError(f"settings of {stored.size} bytes")
    return parse_document(stored.tobytes(), f"{path}, {LOOP}run", "SX380", _ANOTHER)


def _place(run: Document, arrays: Mapping[str, np.ndarray], count: int | None, batch_size: int) -> Position:
    """The point in a file; raises ValueError or KeyError if its parts contradict each other."""
    epoch, batch = run["epoch"].integer(), run["batch"].integer()
    most = None if count is None else -(-count // batch_size)
    if most is None:
        steps = [n.integer(1) for n in run["parts"]["data"]["counts"].parts(epoch, epoch)]
    else:
        steps = [most]
    losses, order, state = (arrays[LOOP + n] for n in ("losses", "order", "random_state"))
    if most is not None and batch > most:
        raise ValueError(f"epoch {epoch}, batch {batch}")
    finished = sum(steps) if most is None else epoch * most
    if losses.dtype != np.float64 or losses.shape != (finished + batch,):
        raise ValueError(f"{losses.size} losses after {finished + batch} steps")
    weights = arrays.get(f"{LOOP}weights", np.full(losses.shape, batch_size, np.int64))  # older versions did not write them
    if weights.dtype != np.int64 or weights.shape != losses.shape or (weights < 0).any():
        raise ValueError("weights of other batches")
    whole = count is not None and order.ndim == 1 and order.dtype.kind == "i" and np.array_equal(np.sort(order), np.arange(count))
    if not (whole if batch and count is not None else order.size == 0):
        raise ValueError("an order of other samples")
    if state.dtype != np.int64 or state.shape != (2,) or (state < 0).any():
        raise ValueError("another random state")
    measured = {n.removeprefix(MEASURED): a for n, a in arrays.items() if n.startswith(MEASURED)}
    if any(a.dtype != np.float64 or a.shape != (epoch,) for a in measured.values()):
        raise ValueError("measurements of other epochs")
    rng = np.random.default_rng(0)
    rng.bit_generator.state = run["rng"].matches(_RNG)
    validation = [{n: float(a[i]) for n, a in measured.items()} for i in range(epoch)] if measured else []
    ends = np.cumsum(steps) if most is None else most * np.arange(1, epoch + 1)
    parts = list(zip(np.split(losses, ends), np.split(weights, ends), strict=True))[:epoch]
    means = [weighted_mean(of.tolist(), by.tolist()) for of, by in parts]
    rows = order.astype(np.int64) if batch and count is not None else None
    return Position(rng, batch, rows, epoch, History(losses.tolist(), validation, means, weights.tolist()))


def _digest(array: np.ndarray) -> int:
    """64 bits of the digest of an array's values."""
    return int.from_bytes(hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()[:8], "little", signed=True)


def _finite(states: Mapping[str, Tensor]) -> Iterable[str]:
    """The names of the states whose values are all finite."""
    for name, t in states.items():
        if np.isfinite(t.device.backend.get(t.data).astype(np.float64)).all():
            yield name


def _other(path: Path, why: str, hint: str) -> InvalidInput:
    return InvalidInput(f"{path} is the checkpoint of another training: {why}", code="SX381", hint=hint)


def _difference(name: str, was: str, now: str) -> str:
    """A sentence about an argument; digests are not shown."""
    if was.startswith("sha256:") or now.startswith("sha256:"):
        return f"{name} differs"
    return f"{name} was {was}, got {now}"
