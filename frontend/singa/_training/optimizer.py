"""The base class of optimizers: hyperparameters, groups, clipping, a step and the states."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.proto.messages import FreshNames

from .._core import coverage, tape, trace
from .._core.backward import backward
from .._core.conversions import DTypeLike, dtype_of, float32
from .._core.coverage import nothing_trains
from .._core.tensor import Tensor, op
from .._core.variable import required
from ..device import Device
from .accumulation import Accumulates, GradientSums
from .interrupts import deferred
from .nan import refuse_nan
from .schedules import DecayScheduler, is_constant, positive, schedule_of

_SEP = "."
MASTER = "master"
"""The kind of the states that are float32 copies of narrower parameters."""


class Optimizer(Accumulates):
    """The base class of optimizers: a subclass lists the `kinds` of states of a parameter, and defines `rule(p, g, *states)`.

    Every hyperparameter is a number or a DecayScheduler, and may be assigned at any time. Parameters of half precision are
    updated in float32, and their states are float32. The update starts from g + weight_decay * p if the optimizer has a weight
    decay.

    Args:
        lr: Learning rate.
        dtype: Dtype of `lr_value`.
        check_nan: Whether a loss that is NaN raises InvalidInput, before any change, with the first node that produced a NaN. The
            loss is read in Python, so that such steps stay on the tape.

    Attributes:
        kinds: Names of the states that each parameter has.
        step_counter: Number of steps so far, an int64 Tensor of shape (1,).

    Raises:
        TypeError: If a hyperparameter is neither a number nor a DecayScheduler.
    """

    kinds: tuple[str, ...] = ()
    _sums: GradientSums
    _decoupled = False
    """Whether the rule applies the weight decay itself, not as a part of the gradient."""

    def __init__(self, lr: Any, dtype: DTypeLike = float32, check_nan: bool = False) -> None:
        self.dtype = dtype_of(dtype)
        self.check_nan = check_nan
        self.step_counter = Tensor(data=np.zeros(1, np.int64), requires_grad=False, name="step_counter")
        self._schedules: dict[str, DecayScheduler] = {}
        self._values: dict[str, Tensor] = {}
        self._states: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*self.kinds, MASTER)}
        self._loaded: set[str] = set()
        self._keys: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._shared: dict[Any, Tensor] | None = None
        self._placed: Device | None = None
        self._groups: list[str] = []
        self._unmatched: set[str] = set()
        self._current = ""
        self._clip: tuple[float | None, float | None] = (None, None)
        self._sums = GradientSums(self._key, self.make_states)
        self._values["lr"] = Tensor(data=np.zeros(1, self.dtype), requires_grad=False, name="lr_value")
        self.lr = lr

    # --- hyperparameters

    @property
    def lr(self) -> DecayScheduler:
        """The schedule of the learning rate; a number or a DecayScheduler may be assigned."""
        return self._schedules["lr"]

    @lr.setter
    def lr(self, lr: Any) -> None:
        self._schedules["lr"] = schedule_of("lr", lr)
        self._refresh(["lr"])

    @property
    def lr_value(self) -> Tensor:
        """The learning rate of the current step, a Tensor of shape (1,).

        A step that is recorded as a graph reads it: a rate that is set later, by `sgd.lr = 0.01` or in `lr_value`, takes effect
        there too.
        """
        return self._values["lr"]

    def _set_hyperparameter(self, name: str, value: Any) -> DecayScheduler:
        """Register a hyperparameter; one that changes has its value in a Tensor `<name>_value` of shape (1,)."""
        schedule = self._schedules[name] = schedule_of(name, value)
        if not is_constant(schedule) and name not in self._values:
            device = self.step_counter.device
            self._values[name] = Tensor((1,), device, self.dtype, requires_grad=False, name=f"{name}_value")
        if name in self._values:
            self._refresh([name])
        return schedule

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a hyperparameter may be set to a number or a schedule at any time."""
        before = self.__dict__.get("_schedules", {}).get(name)
        if name != "lr" and before is not None and before is not value:
            value = self._set_hyperparameter(name, value)
            try:
                self._check()
            except ValueError:
                self._set_hyperparameter(name, before)
                raise
        super().__setattr__(name, value)

    def _check(self) -> None:
        """Raise ValueError for invalid hyperparameters."""
        for name in {"momentum", "weight_decay"} & set(self._schedules):
            schedule = self._schedules[name]
            if is_constant(schedule) and schedule.init_value < 0:
                raise ValueError(f"{name} must be at least 0, got {schedule.init_value}")

    def _settings(self) -> tuple[Any, ...]:
        """The hyperparameters that a recorded step contains as constants: numbers but the rate, and the formulas of schedules."""
        changing = tuple((n, type(s), None if is_constant(s) and n in self._values else repr(vars(s)))
                         for n, s in self._schedules.items())  # fmt: skip
        return (*changing, self._clip)

    def _refresh(self, names: Any) -> None:
        """Compute the values of this step from `step_counter`."""
        with tape.no_tape():
            for name in names:
                schedule, target = self._schedules[name], self._values[name]
                value = schedule.init_value if is_constant(schedule) else schedule(self.step_counter)
                if isinstance(value, Tensor):
                    trace.assign(target, op.Reshape(op.cast(value, target), [1]).raw)
                else:
                    trace.assign(target, op.full_like(target, float(value)).raw)

    def _value(self, name: str, like: Tensor) -> Any:
        """A hyperparameter: a number, or a 0-d Tensor in the dtype of `like`."""
        name = self._in_group(name)
        if name in self._values:
            return self._shared_value(name, like, lambda: op.cast(op.Squeeze(self._values[name], [0]), like))
        return float(self._schedules[name].init_value)

    def _shared_value(self, what: str, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """A value that all parameters of one dtype share in a step."""
        if self._shared is None:
            return make()
        key = (what, op.dtype(like))
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _is(self, name: str, number: float) -> bool:
        """Whether a hyperparameter is this number at every step."""
        schedule = self._schedules[self._in_group(name)]
        return is_constant(schedule) and schedule.init_value == number

    # --- groups and clipping

    def set_group(self, pattern: str, *, lr: Any = None, weight_decay: Any = None) -> None:
        """Set hyperparameters of the parameters whose names match a pattern; the others keep those of the optimizer.

        If several patterns match a parameter, the one that was set last determines each hyperparameter that it sets. A call with
        the pattern of an earlier call changes that group.

        Args:
            pattern: A name or a pattern of `fnmatch`, such as "conv1.*" or "*.bias". It must match a parameter of the model; the
                first step that has all gradients raises InvalidInput (SX318) otherwise.
            lr: The learning rate, a number or a DecayScheduler; None to leave it.
            weight_decay: The weight decay, a number or a DecayScheduler; None to leave it.

        Raises:
            TypeError: A hyperparameter is neither a number nor a DecayScheduler.
            ValueError: No hyperparameter is set, the weight decay is negative, or the optimizer has none.
        """
        given = {n: schedule_of(n, v) for n, v in (("lr", lr), ("weight_decay", weight_decay)) if v is not None}
        if not given:
            raise ValueError(f"the group {pattern!r} must set lr or weight_decay, got neither")
        for name, schedule in given.items():
            if name not in self._schedules:
                raise ValueError(f"{type(self).__name__} must have the hyperparameter {name} for a group to set it")
            if name == "weight_decay" and is_constant(schedule) and schedule.init_value < 0:
                raise ValueError(f"weight_decay must be at least 0, got {schedule.init_value}")
        self._groups = [*(g for g in self._groups if g != pattern), pattern]
        self._unmatched.add(pattern)
        for name, schedule in given.items():
            self._set_hyperparameter(_grouped(name, pattern), schedule)

    def clip_gradients(self, *, norm: float | None = None, value: float | None = None) -> None:
        """Limit the gradients of later steps, before the weight decay is added; None switches a limit off.

        With both limits, the values are cut first. A recorded step contains the operators, and is recorded again after a change.

        Args:
            norm: The bound of the Euclidean norm of all gradients together: if it is larger, they are all multiplied by norm /
                (their norm + 1e-6). Steps by single calls of `apply` raise InvalidInput, because they do not have all gradients.
            value: The bound v of each element, which is cut to [-v, v].

        Raises:
            ValueError: A bound is not a positive number.
        """
        for what, bound in (("norm", norm), ("value", value)):
            if bound is not None:
                positive(what, bound)
        self._clip = (None if norm is None else float(norm), None if value is None else float(value))

    def _in_group(self, name: str) -> str:
        """The name of a hyperparameter of the parameter that is being updated."""
        for pattern in reversed(self._groups) if self._current else ():
            if _grouped(name, pattern) in self._schedules and fnmatchcase(self._current, pattern):
                return _grouped(name, pattern)
        return name

    def _check_groups(self, names: set[str]) -> None:
        """Raise InvalidInput if a new group matches no parameter, also none without a gradient."""
        for pattern in [g for g in self._groups if g in self._unmatched]:
            if not any(fnmatchcase(name, pattern) for name in names):
                what = f"the group {pattern!r} of the optimizer must match a parameter"
                raise InvalidInput(what, code="SX318", hint=f"the parameters are {_some(names)}")
        self._unmatched.clear()

    def _clipped(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The gradients after the limits of `clip_gradients`, in float32 or wider if they change."""
        norm, value = self._clip
        if norm is None and value is None:
            return pairs
        with tape.no_tape():
            gs = [_wide(g) for _, g in pairs]
            if value is not None:
                gs = [op.Clip(g, -value, value) for g in gs]
            if norm is not None:
                widest = max(gs, key=lambda g: op.dtype(g).itemsize)
                squares = [op.cast(op.ReduceSum(op.Mul(g, g), keepdims=0), widest) for g in gs]
                total = op.Sqrt(op.Sum(*squares))
                factor = op.Min(op.Div(norm, op.Add(total, 1e-6)), op.full_like(total, 1))
                gs = [op.Mul(g, op.cast(factor, g)) for g in gs]
        return [(p, g) for (p, _), g in zip(pairs, gs, strict=True)]

    def _one_minus(self, name: str, like: Tensor) -> Any:
        """One minus a hyperparameter."""
        value = self._value(name, like)
        return op.Sub(1.0, value) if isinstance(value, Tensor) else 1.0 - value

    # --- a step

    def __call__(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, update every parameter, and advance the counter.

        Args:
            loss: Tensor of one element.

        Raises:
            InvalidInput: If `backward` raises it, no parameter gets a gradient, loaded states belong to another model (SX327),
                or, with `check_nan`, the loss is NaN; then nothing is changed.
        """
        if not self._sums.adds:
            with deferred():
                self.call(loss)
                self.step()
        elif not tape.is_measuring():
            self._refuse_nan(loss)
            with deferred():
                pairs = [(p, g) for p, g in backward(loss, self._sums.seed(loss)) if p.is_dummy()]
                if not pairs:
                    raise nothing_trains(coverage.current())
                self._sums.take(pairs, "plain", self._finish)

    def _finish(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Update by gradients, and advance the counter."""
        self._update_all(list(pairs))
        self.step()

    def call(self, loss: Tensor) -> None:
        """Compute the gradients of a loss and update every parameter.

        Args:
            loss: Tensor of one element.

        Raises:
            InvalidInput: If `backward` raises it, no parameter gets a gradient, loaded states belong to another model (SX327),
                or, with `check_nan`, the loss is NaN; then nothing is changed.
        """
        if tape.is_measuring():
            return
        trace.depends(self._sums, self._sums._mode)
        if self._sums.adds:
            what = f"gradients are accumulated by a call of the optimizer, got a call of {type(self).__name__}.call"
            raise InvalidInput(what, code="SX329", hint="write optimizer(loss), which also advances the counter")
        self._refuse_nan(loss)
        self._update_all([(p, g) for p, g in backward(loss) if p.is_dummy()])

    def _refuse_nan(self, loss: Tensor) -> None:
        if self.check_nan:
            refuse_nan(loss)

    def _update_all(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Update parameters by their gradients; raises InvalidInput before any change."""
        if not pairs:
            raise nothing_trains(coverage.current())
        if self._loaded and not any(self._key(p.name, p) in self._loaded for p, _ in pairs):
            have, want = _some(self._loaded), _some(p.name for p, _ in pairs)
            raise InvalidInput(f"the loaded states must be those of this model ({want}), got states of {have}", code="SX327")
        for p, g in pairs:
            self._check_shapes(self._key(p.name, p), p, g)
        if self._unmatched:
            covered = coverage.current()
            self._check_groups({self._key(p.name, p) for p, _ in pairs} | set(covered._params() if covered else ()))
        self._shared = {}
        try:
            for p, g in self._clipped(pairs):
                self.apply(p.name, p, g)
        finally:
            self._shared = None

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        """Update a parameter in place.

        Args:
            param_name: Key of its states; if two parameters have one name, the second has the key `name#1`.
            param_value: The parameter.
            param_grad: Its gradient, of the same shape.

        Raises:
            InvalidInput: If the gradient (SX329) or a loaded state (SX327) has another shape, or gradients are limited by their
                norm or accumulated (SX329).
        """
        trace.depends(self, self._settings)
        name = self._key(param_name, required(param_value))
        required(param_grad)
        if self._shared is None:  # not a part of a call with all gradients
            if self._sums.adds:
                what = "gradients that are accumulated must come from a call of the optimizer, got one of apply"
                raise InvalidInput(what, code="SX329", hint="call the optimizer on the loss, or accumulate_gradients(1)")
            if self._clip[0] is not None:
                what = "gradients that are limited by their norm must be applied together, got one of them"
                raise InvalidInput(what, code="SX329", hint="call the optimizer on the loss, or clip_gradients() for no limit")
            ((_, param_grad),) = self._clipped([(param_value, param_grad)])
        self._check_shapes(name, param_value, param_grad)
        self.make_states(name, param_value)
        with tape.no_tape():
            master = self._states[MASTER].get(name)
            p, g = _wide(param_value), _wide(param_grad)
            g = op.cast(g, p)
            if master is not None:  # where it does not round to the parameter, that was set since
                p = op.Where(op.Equal(op.cast(master, param_value), param_value), master, p)
            states = [self._states[kind][name] for kind in self.kinds]
            self._current = name
            try:
                if not self._decoupled and "weight_decay" in self._schedules and not self._is("weight_decay", 0):
                    g = op.Add(g, op.Mul(p, self._value("weight_decay", p)))
                new, *updated = self.rule(p, g, *states)
            finally:
                self._current = ""
            masters = () if master is None else (master,)
            for t, value in zip((param_value, *states, *masters), (new, *updated, *(new for _ in masters)), strict=True):
                trace.assign(t, op.cast(value, t).raw)

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Compute the update of a parameter; defined by subclasses.

        Args:
            p: The parameter, float32 or wider.
            g: Its gradient, including the weight decay, in the dtype of p.
            *states: Its states, in the order of `kinds`.

        Returns:
            The new value of the parameter, then those of its states.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rule(p, g, *states)")

    def step(self) -> None:
        """Advance `step_counter` and every hyperparameter that depends on it."""
        if tape.is_measuring():
            return
        trace.depends(self, self._settings)
        with tape.no_tape():
            trace.assign(self.step_counter, op.Add(self.step_counter, 1).raw)
        self._refresh([n for n in self._values if not is_constant(self._schedules[n])])

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Call `apply` with the parameter's own name; deprecated.

        Args:
            param: The parameter.
            grad: Its gradient, of the same shape.

        Raises:
            InvalidInput: If the gradient (SX329) or a loaded state (SX327) has another shape.
        """
        self.apply(param.name, param, grad)

    def device_check(self, *inputs: Tensor) -> None:
        """Move tensors, in place, to the device of the first.

        Args:
            *inputs: The tensors.
        """
        for t in inputs[1:]:
            _move(t, inputs[0].device, t._data.dtype)

    def backward_and_update(self, loss: Tensor) -> None:
        """Call the optimizer on a loss; deprecated.

        Args:
            loss: Tensor of one element.

        Raises:
            InvalidInput: As for `call`.
        """
        self(loss)

    def _check_shapes(self, name: str, p: Tensor, g: Tensor) -> None:
        """Raise InvalidInput if the gradient (SX329) or a state (SX327) of a parameter has another shape."""
        if not trace.alike(p.shape, g.shape):
            raise InvalidInput(f"the gradient of {name!r} must have the parameter's shape {p.shape}, got {g.shape}", code="SX329")
        for kind, group in self._states.items():
            state = group.get(name)
            if state is not None and tuple(state.shape) != tuple(p.shape):
                what = f"the state {kind}{_SEP}{name} must have the parameter's shape {p.shape}, got {state.shape}"
                raise InvalidInput(what, code="SX327", hint="it belongs to another model")

    # --- states

    def make_states(self, name: str, p: Tensor) -> None:
        """Create the missing states of a parameter, filled with zeros, on its device.

        A parameter that is narrower than float32 has a float32 copy among them, "master", which accumulates what its dtype
        cannot represent.

        Args:
            name: Key of the states.
            p: The parameter.

        Raises:
            InvalidInput: If a loaded state has another shape (SX327).
        """
        name = self._key(name, p)
        self._place(p.device)
        for kind, group in self._states.items():
            t = group.get(name)
            if kind == MASTER and _wide_dtype(op.dtype(p)) == op.dtype(p):
                group.pop(name, None)
            elif t is None:
                dtype = _wide_dtype(op.dtype(p))
                group[name] = Tensor(p.shape, p.device, dtype, requires_grad=False, name=f"{kind}{_SEP}{name}")
            elif name in self._loaded:
                self._check_shapes(name, p, p)
                _move(t, p.device, _wide_dtype(op.dtype(p)))
            elif trace.current() is None:  # `Model.to` may have changed the parameter
                _move(t, p.device, _wide_dtype(op.dtype(p)))
        self._loaded.discard(name)

    def get_states(self) -> dict[str, Tensor]:
        """Collect the states of the optimizer.

        Returns:
            `step_counter`, and the states of each parameter as `<kind>.<parameter>`, such as `moments.conv1.W`; of a parameter
            narrower than float32 also "master.<parameter>", its float32 copy.
        """
        named = {f"{kind}{_SEP}{name}": t for kind, group in self._states.items() for name, t in group.items()}
        return {"step_counter": self.step_counter, **named, **self._sums.states()}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Set the states to those that `get_states` returned.

        Before the first step they are stored until their parameters are known; they are checked then.

        Args:
            states: Tensors or arrays by name; the states of one kind may also be one dict by parameter.

        Raises:
            InvalidInput: If a name is unknown, a state is missing, or a shape differs; then nothing is changed (SX327).
        """
        counter: np.ndarray | None = None
        states, write_sums = self._sums.split(states)
        groups: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in self._states}
        for key, value in states.items():
            kind, _, name = key.partition(_SEP)
            if key == "step_counter":
                counter = _array(value)
            elif kind in groups and isinstance(value, Mapping):
                groups[kind].update({n: _array(v) for n, v in value.items()})
            elif kind in groups and name:
                groups[kind][name] = _array(value)
            else:
                known = _some(["step_counter", *(f"{k}{_SEP}<parameter>" for k in self.kinds)])
                raise InvalidInput(f"{type(self).__name__} has no state {key!r}", code="SX327", hint=f"its states are {known}")
        if counter is not None and counter.size != 1:
            raise InvalidInput(f"step_counter must have one element, got shape {counter.shape}", code="SX327")
        for kind, group in groups.items():
            self._check_states(kind, group)
        write_sums()
        for kind, group in groups.items():
            for name, array in group.items():
                mine = self._states[kind].get(name)
                if mine is None:
                    mine = self._states[kind][name] = Tensor(data=array.copy(), requires_grad=False, name=f"{kind}{_SEP}{name}")
                    self._loaded.add(name)
                else:
                    mine.device.backend.write(mine._data, array.astype(mine._data.dtype))
        if counter is not None:
            self.step_counter.device.backend.write(self.step_counter._data, int(counter.reshape(-1)[0]))
            self._refresh([n for n in self._values if not is_constant(self._schedules[n])])

    def _check_states(self, kind: str, given: dict[str, Any]) -> None:
        """Raise InvalidInput (SX327) if given states of a kind are not those of the known parameters."""
        mine = self._states[kind]
        if not given or not mine:
            return
        missing, unknown = sorted(set(mine) - set(given)), sorted(set(given) - set(mine))
        parts = [f"missing: {_some(missing)}"] * bool(missing) + [f"unknown: {_some(unknown)}"] * bool(unknown)
        if parts:
            raise InvalidInput(f"the states {kind!r} belong to another model; {'; '.join(parts)}", code="SX327")
        for name, array in given.items():
            if tuple(array.shape) != tuple(mine[name].shape):
                what = f"the state {kind}{_SEP}{name} must have shape {mine[name].shape}, got {tuple(array.shape)}"
                raise InvalidInput(what, code="SX327")

    def _key(self, name: str, p: Tensor) -> str:
        """The key of a parameter's states: its name, unless another living parameter has that key."""
        known = self._keys.get(id(p))
        if known is not None and known[0]() is p:
            return known[1]
        taken = {key for ref, key in self._keys.values() if ref() is not None}
        key = FreshNames(taken, mark="#").new(name)
        gone = [i for i, (ref, k) in self._keys.items() if k == key]
        for i in gone:  # the previous parameter of this name was deleted; its states are not for this one
            del self._keys[i]
            for group in self._states.values():
                group.pop(key, None)
        self._keys[id(p)] = (weakref.ref(p), key)
        return key

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: it identifies parameters by name only."""
        return {**self.__dict__, "_keys": {}, "_sums": self._sums.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set a pickled state, between two updates; gradients that wait for one are not part of it."""
        self.__dict__.update(state)
        self._sums = GradientSums(self._key, self.make_states, state["_sums"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An independent optimizer for parameters of the same names, or for parameters copied in the same deepcopy."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__getstate__().items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        for known, key in self._keys.values():
            p = memo.get(id(known()))
            if isinstance(p, Tensor):
                copied._keys[id(p)] = (weakref.ref(p), key)
        copied._sums = GradientSums(copied._key, copied.make_states)
        self._sums.copied(copied._sums, memo)
        return copied

    def _place(self, device: Device) -> None:
        """Move the counter and the values to the device of the parameters."""
        if self._placed is None or (self._placed is not device and trace.current() is None):
            self._placed = device
            for t in (self.step_counter, *self._values.values()):
                _move(t, device, op.dtype(t))


def _grouped(name: str, pattern: str) -> str:
    """The name of a hyperparameter of a group."""
    return f"{name}[{pattern}]"


def _wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _wide(t: Tensor) -> Tensor:
    """Cast half precision to float32 for the update: an epsilon of 1e-8 would be 0."""
    dtype = op.dtype(t)
    return t if _wide_dtype(dtype) == dtype else op.Cast(t, to=dtypes.onnx_code(np.float32))


def _move(t: Tensor, device: Device, dtype: np.dtype[Any]) -> None:
    """Move a tensor to a device and cast it, in place."""
    if t.device is not device or t._data.dtype != dtype:
        t._data = device.backend.put(t.device.backend.get(t._data).astype(dtype))
        t.device = device


def _array(value: Any) -> Any:
    return value.device.backend.get(value.data) if isinstance(value, Tensor) else np.asarray(value)


def _some(names: Any) -> str:
    listed = [str(n) for n in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
