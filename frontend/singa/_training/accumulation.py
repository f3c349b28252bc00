"""Gradient accumulation: the gradients of several micro-batches are added, and one update uses their mean.

A recorded step adds to the sums; the update is a graph of its own, so that a model has one plan for the micro-batches of a shape.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.kernels.table import Options

from .._core import tape, trace
from .._core.tensor import Tensor, op
from .._core.trace import NotTraceable
from .interrupts import deferred
from .loader import positive
from .step import Step

GRADIENT_SUM, GRADIENT_COUNTS = "gradient_sum", "gradient_counts"
"""Names of the states of an optimizer between two updates: a sum for each parameter, and how many micro-batches it has."""

_KEPT = 64
"""The number of recorded updates that are kept."""

Finish = Callable[[Iterable[tuple[Tensor, Tensor]]], None]
"""Updates parameters by their gradients, and advances the counter."""


class GradientSums:
    """The sums of gradients since the last update, each gradient weighted by the samples of its micro-batch, or another weight.

    Args:
        key_of: Returns the key of a parameter's states.
        prepare: Creates the states of a parameter, by its key.
        steps: The number of micro-batches of an update.

    Attributes:
        steps: The number of micro-batches of an update.
        count: The number of micro-batches since the last update.
    """

    def __init__(self, key_of: Callable[[str, Tensor], str], prepare: Callable[[str, Tensor], None], steps: int = 1) -> None:
        self.steps, self.count = steps, 0
        self._key_of, self._prepare = key_of, prepare
        self._sums: dict[str, Tensor] = {}
        self._params: dict[str, weakref.ref[Tensor]] = {}
        self._touched: dict[str, None] = {}  # the keys of the parameters of this group, in the order of the backward pass
        self._first = self._total = 0.0  # samples of the first micro-batch; the sum of the weights
        self._relative = self._share = 1.0  # the weight of the next micro-batch, and of the part that this process computes
        self._weight = Tensor(data=np.ones((), np.float32), requires_grad=False, name="gradient_weight")
        self._inverses: dict[tuple[Any, int], Tensor] = {}
        self._last: tuple[Any, Finish, Options | None] | None = None
        self._updates: dict[Any, list[Step]] = {}
        self._on_tape = False

    @property
    def adds(self) -> bool:
        """Whether the next gradients are added to sums."""
        return self.steps > 1 or self.count > 0

    def begin(self, samples: float, share: float = 1.0) -> None:
        """Set the weight of the next micro-batch.

        Args:
            samples: The number of its samples, or another weight.
            share: The weight of the part that this process computes, relative to an equal part.
        """
        if not self.count:
            self._first = max(samples, 1)
        self._relative = samples / self._first if self.adds and self._first else 1.0
        self._share = share
        if self._is_weighted():
            self._weight.device.backend.write(self._weight._data, np.float32(self._relative * share))

    def seed(self, loss: Tensor, scale: float = 1.0) -> Any:
        """The gradient of a loss with which the backward pass starts; None for 1."""
        trace.depends(self, self._mode)
        if not self._is_weighted():
            return None if scale == 1.0 else np.float32(scale)
        if self._weight.device is not loss.device and trace.current() is None:
            self._weight.to_device(loss.device)
        with tape.no_tape():
            return self._weight if scale == 1.0 else op.Mul(self._weight, np.float32(scale))

    def take(self, pairs: Iterable[tuple[Tensor, Tensor]], key: Any, finish: Finish) -> None:
        """Update by gradients, or add them to the sums, and update by their mean if they complete a group.

        Args:
            pairs: Parameters and gradients.
            key: Identifies what `finish` does.
            finish: Makes the update.
        """
        trace.depends(self, self._mode)
        if not self.adds:
            finish(pairs)
            return
        added = [self._add(p, g) for p, g in pairs]
        done = partial(self._counted, added, key, finish)
        if not trace.completes(self, done):
            done(None)

    def _add(self, p: Tensor, g: Tensor) -> str:
        """Add a gradient to its sum, in float32 or wider."""
        key = self._key_of(p.name, p)
        if not trace.alike(p.shape, g.shape):
            raise InvalidInput(f"the gradient of {key!r} must have the parameter's shape {p.shape}, got {g.shape}", code="SX329")
        t = self._sums.get(key)
        dtype = np.dtype(np.float32) if op.dtype(p).itemsize < 4 else op.dtype(p)
        if t is None or tuple(t.shape) != tuple(p.shape):
            if t is not None and self.count:
                what = f"the state {GRADIENT_SUM}.{key} must have the parameter's shape {p.shape}, got {t.shape}"
                raise InvalidInput(what, code="SX327", hint="it belongs to another model")
            t = Tensor(p.shape, p.device, dtype, requires_grad=False, name=f"{GRADIENT_SUM}.{key}")
            self._sums[key] = t
        elif trace.current() is None and (t.device is not p.device or t._data.dtype != dtype):  # `Model.to` was called
            t._data = p.device.backend.put(t.device.backend.get(t._data).astype(dtype))
            t.device = p.device
        self._params[key] = weakref.ref(p)
        with tape.no_tape():
            trace.assign(t, op.Add(t, op.cast(g, t)).raw)
        return key

    def _counted(self, added: list[str], key: Any, finish: Finish, options: Options | None) -> None:
        """After a step that has added gradients: note them, and update if the group is complete."""
        self.count += 1
        self._total += self._relative
        self._relative = self._share = 1.0
        self._touched |= dict.fromkeys(added)
        self._last = (key, finish, options)
        if self.count >= self.steps:
            self.flush()

    def flush(self) -> bool:
        """Update by the mean of the gradients since the last update; return whether there were any."""
        if not self.count:
            return False
        params = [(k, ref()) for k in self._touched if (ref := self._params.get(k)) is not None]
        found = [(k, p) for k, p in params if p is not None]
        if self._last is None or len(found) < len(self._touched):
            what = "the sums of gradients must be those of a model that has run a step, got loaded ones"
            raise InvalidInput(what, code="SX327", hint="run the next micro-batch before flush()")
        key, finish, options = self._last
        with deferred():
            for inverse in [self._inverse(self._sums[k]) for k, _ in found]:
                inverse.device.backend.write(inverse._data, inverse._data.dtype.type(1 / (self._total or 1)))
            update = partial(self._update, found, finish)
            if options is None or not self._recorded(found, (key, options), update, options):
                update()
            self.discard()
        return True

    def _inverse(self, t: Tensor) -> Tensor:
        """One over the sum of the weights, in the dtype and on the device of a sum."""
        key = (t._data.dtype, id(t.device))
        if key not in self._inverses:
            self._inverses[key] = Tensor((), t.device, t._data.dtype, requires_grad=False, name="gradient_scale")
        return self._inverses[key]

    def _update(self, params: list[tuple[str, Tensor]], finish: Finish, *_: Tensor) -> None:
        """Update the parameters by the means of their gradients."""
        with tape.no_tape():
            means = [(p, op.Mul(self._sums[k], self._inverse(self._sums[k]))) for k, p in params]
        finish(means)

    def _recorded(self, params: list[tuple[str, Tensor]], key: Any, update: Callable[..., None], options: Options) -> bool:
        """Update by a graph; return False if the update cannot become one."""
        if self._on_tape:
            return False
        for k, p in params:
            self._prepare(k, p)
        form = (key, tuple((k, id(p), p._data.dtype, id(p.device)) for k, p in params))
        known = self._updates.setdefault(form, [])
        step = next((s for s in known if s.holds()), None)
        inverses = tuple({id(t): t for t in [self._inverse(self._sums[k]) for k, _ in params]}.values())
        if step is None:
            try:
                step = Step(update, inverses, {}, options)
            except (NotTraceable, UnsupportedModel) as error:
                self._on_tape = True
                warnings.warn(f"the updates of this optimizer stay on the tape: {error.message}", UserWarning, stacklevel=8)
                return False
            known.append(step)
            while sum(map(len, self._updates.values())) > _KEPT:
                oldest = next(iter(self._updates))
                self._updates[oldest].pop(0)
                if not self._updates[oldest]:
                    del self._updates[oldest]
        step.run(inverses, {})
        return True

    def discard(self) -> None:
        """Forget the gradients since the last update."""
        for k in self._touched:
            if k in self._sums:
                t = self._sums[k]
                t.device.backend.write(t._data, 0)
                trace.note_write(t, True)
        self._touched.clear()
        self.count, self._total, self._relative, self._share = 0, 0.0, 1.0, 1.0

    def _is_weighted(self) -> bool:
        return self._relative * self._share != 1.0

    def _mode(self) -> tuple[bool, bool]:
        """What a recorded step contains as constants."""
        return self.adds, self._is_weighted()

    # --- states

    def states(self) -> dict[str, Tensor]:
        """The sums and their counts by name; nothing right after an update."""
        if not self.count:
            return {}
        counts = np.array([self.count, self._first, self._total], np.float64)
        named = {f"{GRADIENT_SUM}.{k}": self._sums[k] for k in self._touched}
        return {GRADIENT_COUNTS: Tensor(data=counts, requires_grad=False, name=GRADIENT_COUNTS), **named}

    def split(self, states: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Separate states of the sums from others; raises InvalidInput (SX327) if they contradict each other.

        Args:
            states: Tensors or arrays by name.

        Returns:
            (the other states, a function that sets those of the sums).
        """
        mark = f"{GRADIENT_SUM}."
        own = {n.removeprefix(mark): _array(v) for n, v in states.items() if n.startswith(mark)}
        counts = _array(states[GRADIENT_COUNTS]) if GRADIENT_COUNTS in states else None
        others = {n: v for n, v in states.items() if n != GRADIENT_COUNTS and not n.startswith(mark)}
        if (counts is None) != (not own) or (counts is not None and not _are_counts(counts)):
            what = f"{GRADIENT_COUNTS} must be three numbers, with a {GRADIENT_SUM} for each parameter"
            raise InvalidInput(what, code="SX327", hint="pass the states that get_states returned")
        for k, array in own.items():
            ref = self._params.get(k)
            p = ref() if ref is not None else None
            if not dtypes.is_float(array.dtype) or (p is not None and tuple(p.shape) != tuple(array.shape)):
                what = f"the state {mark}{k} must be floats of the parameter's shape, got {array.dtype}{list(array.shape)}"
                raise InvalidInput(what, code="SX327")

        def write() -> None:
            self.discard()
            for k, array in own.items():
                t = self._sums.get(k)
                if t is None or tuple(t.shape) != tuple(array.shape):
                    self._sums[k] = Tensor(data=array.copy(), requires_grad=False, name=mark + k)
                else:  # in place: recorded steps hold it
                    t.device.backend.write(t._data, array.astype(t._data.dtype))
            self._touched = dict.fromkeys(own)
            if counts is not None:
                self.count, self._first, self._total = int(counts[0]), float(counts[1]), float(counts[2])

        return others, write

    def tensors(self) -> list[Tensor]:
        """The sums."""
        return list(self._sums.values())

    def point(self) -> tuple[Any, ...]:
        """The point between two updates, without the sums; for `set_point`."""
        return self.count, self._first, self._total, dict(self._touched)

    def set_point(self, point: tuple[Any, ...]) -> None:
        """Return to a point of `point`."""
        self.count, self._first, self._total, self._touched = *point[:3], dict(point[3])

    def copied(self, to: GradientSums, memo: dict[int, Any]) -> None:
        """Copy the settings and sums to those of another optimizer, for parameters of the same names."""
        to.steps = self.steps
        to._sums = {
            k: Tensor(data=_array(t).copy(), device=t.device, requires_grad=False, name=t.name) for k, t in self._sums.items()
        }
        to._params = {k: weakref.ref(p) for k, r in self._params.items() if isinstance(p := memo.get(id(r())), Tensor)}
        to.set_point(self.point())


def _array(value: Any) -> np.ndarray:
    return value.device.backend.get(value.data) if isinstance(value, Tensor) else np.asarray(value)


def _are_counts(counts: np.ndarray) -> bool:
    return counts.shape == (3,) and all(math.isfinite(c) and c >= 0 for c in counts.tolist()) and counts[0] >= 1


class Accumulates:
    """The part of an optimizer that accumulates gradients."""

    if TYPE_CHECKING:  # an attribute, or a property

        @property
        def _sums(self) -> GradientSums: ...

    def accumulate_gradients(self, steps: int) -> None:
        """Update the parameters once for several micro-batches, by the mean of their gradients.

        Each call of the optimizer on a loss then adds gradients; every `steps` calls, it updates, and `step_counter` and the
        schedules advance. Gradients are limited (`clip_gradients`) after the mean. A step of a Model weights a gradient by the
        samples of its batch (`Model.batch_weight`), so that the mean is the gradient of one large batch if the loss is a mean
        over samples. In
        `DistOpt`, processes exchange gradients at an update only. The sums are float32 or wider, as many as the parameters.

        Args:
            steps: The number of micro-batches of an update; 1 to update at each call.

        Raises:
            InvalidInput: `steps` is not an integer of at least 1 (SX342).
        """
        self._sums.steps = positive("steps", steps)

    def _begin(self, weigh: Callable[[], int]) -> None:
        """Note the weight of the next batch, which only sums of gradients need."""
        self._sums.begin(weigh() if self._sums.adds else 1)

    @property
    def accumulated(self) -> int:
        """The number of micro-batches whose gradients wait for an update."""
        return self._sums.count

    def flush(self) -> bool:
        """Update by the gradients that wait, such as those of an incomplete group at the end of an epoch; `Model.fit` calls it.

        Returns:
            Whether there were any.

        Raises:
            InvalidInput: They were loaded, and no step has run since (SX327).
            CommunicationError: A process has ended or makes no progress (SX950), in `DistOpt`.
        """
        return self._sums.flush()

    def discard_gradients(self) -> None:
        """Forget the gradients that wait for an update."""
        self._sums.discard()


def rows_of(args: Iterable[Any]) -> int:
    """The number of samples of a batch: the size of axis 0 of its last Tensor, the targets; 1 if there is none."""
    shapes = [x.shape for x in args if isinstance(x, Tensor) and not isinstance(x._data, list) and len(x.shape)]
    return int(shapes[-1][0]) if shapes else 1


def sums_of(optimizers: Iterable[Any]) -> list[GradientSums]:
    """The sums of these optimizers."""
    return [o._sums for o in optimizers if isinstance(o, Accumulates)]
