"""Optimizers: they change parameters by their gradients, in ONNX's operators, so that an update is part of a recorded step.

sgd = opt.SGD(lr=opt.ExponentialDecay(0.1, 1000, 0.5), momentum=0.9, weight_decay=1e-5)
sgd(loss)                                          backward, an update of each parameter, and a step of the counter
for p, g in autograd.backward(loss): sgd.apply(p.name, p, g)
sgd.step()                                         the same by hand
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.proto.messages import FreshNames

from ._core import coverage, tape, trace
from ._core.backward import backward
from ._core.coverage import nothing_trains
from ._core.tensor import DTypeLike, Tensor, dtype_of, float32, op
from ._training.nan import first_nan, refuse_nan
from .device import Device

__all__ = ["SGD", "AdaGrad", "Adam", "Constant", "DecayScheduler", "ExponentialDecay", "Optimizer", "RMSProp", "first_nan"]

_SEP = "."


class DecayScheduler:
    """A hyperparameter that changes with the steps: write `__call__(step)`.

    step: an int64 Tensor of shape (1,).  The value is a number, or is computed from `step` by operators, so that it stays right
    in a step that is recorded as a graph.
    """

    def __init__(self, init_value: float) -> None:
        self.init_value = init_value

    def __call__(self, step: Tensor) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __call__(step)")


class Constant(DecayScheduler):
    """The same value at every step."""

    def __call__(self, step: Tensor) -> Any:
        return self.init_value


class ExponentialDecay(DecayScheduler):
    """init_value * decay_rate ** (step / decay_steps); with `staircase` the quotient is rounded down."""

    def __init__(self, init_value: float, decay_steps: float, decay_rate: float, staircase: bool = False) -> None:
        super().__init__(init_value)
        self.decay_steps = decay_steps
        self.decay_rate = decay_rate
        self.staircase = staircase

    def __call__(self, step: Tensor) -> Any:
        quotient = op.Div(_double(step), float(self.decay_steps))
        if self.staircase:
            quotient = op.Floor(quotient)
        return op.Mul(op.Pow(np.float64(self.decay_rate), quotient), float(self.init_value))


class Optimizer:
    """The base class of optimizers: name the `kinds` of states that a parameter has, and write `rule(p, g, *states)`.

    lr: a number or a DecayScheduler, as every hyperparameter.  dtype: of `lr_value`.
    check_nan: whether a loss that is NaN stops the training, before anything is changed, with the first node that made one.
        It reads the loss in Python: such steps stay on the tape.
    lr_value, step_counter: Tensors of shape (1,).  A step that is recorded as a graph reads them: a rate that is set later, by
        `sgd.lr = 0.01` or in `lr_value`, counts there too.
    Parameters of half precision are updated in float32, and their states are float32.
    Raises TypeError for a hyperparameter that is neither a number nor a DecayScheduler.
    """

    kinds: tuple[str, ...] = ()

    def __init__(self, lr: Any, dtype: DTypeLike = float32, check_nan: bool = False) -> None:
        self.dtype = dtype_of(dtype)
        self.check_nan = check_nan
        self.step_counter = Tensor(data=np.zeros(1, np.int64), requires_grad=False, name="step_counter")
        self._schedules: dict[str, DecayScheduler] = {}
        self._values: dict[str, Tensor] = {}
        self._states: dict[str, dict[str, Tensor]] = {kind: {} for kind in self.kinds}
        self._loaded: set[str] = set()
        self._keys: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._shared: dict[Any, Tensor] | None = None
        self._settled: Device | None = None
        self._values["lr"] = Tensor(data=np.zeros(1, self.dtype), requires_grad=False, name="lr_value")
        self.lr = lr

    # --- hyperparameters

    @property
    def lr(self) -> DecayScheduler:
        """The schedule of the learning rate; a number may be assigned too."""
        return self._schedules["lr"]

    @lr.setter
    def lr(self, lr: Any) -> None:
        self._schedules["lr"] = _schedule("lr", lr)
        self._refresh(["lr"])

    @property
    def lr_value(self) -> Tensor:
        return self._values["lr"]

    def _hyper(self, name: str, value: Any) -> DecayScheduler:
        """Note a hyperparameter; one that changes has its value in a Tensor `<name>_value` of shape (1,)."""
        schedule = self._schedules[name] = _schedule(name, value)
        if not isinstance(schedule, Constant) and name not in self._values:
            device = self.step_counter.device
            self._values[name] = Tensor((1,), device, self.dtype, requires_grad=False, name=f"{name}_value")
        if name in self._values:
            self._refresh([name])
        return schedule

    def __setattr__(self, name: str, value: Any) -> None:
        """A hyperparameter may be assigned at any time: a number, or a schedule."""
        before = self.__dict__.get("_schedules", {}).get(name)
        if name != "lr" and before is not None and before is not value:
            value = self._hyper(name, value)
            try:
                self._check()
            except ValueError:
                self._hyper(name, before)
                raise
        super().__setattr__(name, value)

    def _check(self) -> None:
        """Raises ValueError for hyperparameters that make no sense."""
        for name in {"momentum", "weight_decay"} & set(self._schedules):
            schedule = self._schedules[name]
            if isinstance(schedule, Constant) and schedule.init_value < 0:
                raise ValueError(f"{name} is at least 0, not {schedule.init_value}")

    def _settings(self) -> tuple[Any, ...]:
        """What a recorded step has of the hyperparameters in itself: numbers but the rate, and the formulas of schedules."""
        return tuple((n, type(s), None if isinstance(s, Constant) and n in self._values else repr(vars(s)))
                     for n, s in self._schedules.items())  # fmt: skip

    def _refresh(self, names: Any) -> None:
        """The values of this step, out of `step_counter`."""
        with tape.no_tape():
            for name in names:
                value, target = self._schedules[name](self.step_counter), self._values[name]
                if isinstance(value, Tensor):
                    trace.assign(target, op.Reshape(op.cast(value, target), [1]).raw)
                else:
                    trace.assign(target, op.full_like(target, float(value)).raw)

    def _value(self, name: str, like: Tensor) -> Any:
        """A hyperparameter: a number, or a 0-d Tensor in the dtype of `like`."""
        if name in self._values:
            return self._once(name, like, lambda: op.cast(op.Squeeze(self._values[name], [0]), like))
        return float(self._schedules[name].init_value)

    def _once(self, what: str, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """What all parameters of one dtype share in a step."""
        if self._shared is None:
            return make()
        key = (what, op.dtype(like))
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _is(self, name: str, number: float) -> bool:
        schedule = self._schedules[name]
        return isinstance(schedule, Constant) and schedule.init_value == number

    def _less(self, name: str, like: Tensor) -> Any:
        """One minus a hyperparameter."""
        value = self._value(name, like)
        return op.Sub(1.0, value) if isinstance(value, Tensor) else 1.0 - value

    # --- a step

    def __call__(self, loss: Tensor) -> None:
        """Backward from a loss of one element, an update of every parameter, and a step of the counter.

        Raises InvalidInput where `backward` does, where no parameter gets a gradient, for loaded states of another model, and
        with `check_nan` for a NaN; then nothing has changed.
        """
        self.call(loss)
        self.step()

    def call(self, loss: Tensor) -> None:
        """Backward, and an update of every parameter."""
        if self.check_nan:
            refuse_nan(loss)
        pairs = [(p, g) for p, g in backward(loss) if p.is_dummy()]
        if not pairs:
            raise nothing_trains(coverage.current())
        if self._loaded and pairs and not any(self._key(p.name, p) in self._loaded for p, _ in pairs):
            have, want = _some(self._loaded), _some(p.name for p, _ in pairs)
            raise InvalidInput(
                f"the states that were set are those of another model: of {have}; this one has {want}", code="SX327"
            )
        for p, g in pairs:
            self._fits(self._key(p.name, p), p, g)
        self._shared = {}
        try:
            for p, g in pairs:
                self.apply(p.name, p, g)
        finally:
            self._shared = None

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        """Update a parameter in place.

        param_name: the key of its states; where two parameters have one name, the second is known as `name#1`.
        Raises InvalidInput where the gradient has another shape.
        """
        trace.depends(self, self._settings)
        name = self._key(param_name, param_value)
        self._fits(name, param_value, param_grad)
        self.make_states(name, param_value)
        with tape.no_tape():
            p, g = _wide(param_value), _wide(param_grad)
            g = op.cast(g, p)
            if "weight_decay" in self._schedules and not self._is("weight_decay", 0):
                g = op.Add(g, op.Mul(p, self._value("weight_decay", p)))
            states = [self._states[kind][name] for kind in self.kinds]
            new, *updated = self.rule(p, g, *states)
            for t, value in zip((param_value, *states), (new, *updated), strict=True):
                trace.assign(t, op.cast(value, t).raw)

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """The new value of a parameter and of its states, for its gradient (which contains the weight decay)."""
        raise NotImplementedError(f"{type(self).__name__} has no rule(p, g, *states)")

    def step(self) -> None:
        """Advance `step_counter`, and every hyperparameter that follows it."""
        trace.depends(self, self._settings)
        with tape.no_tape():
            trace.assign(self.step_counter, op.Add(self.step_counter, 1).raw)
        self._refresh([n for n in self._values if not isinstance(self._schedules[n], Constant)])

    def update(self, param: Tensor, grad: Tensor) -> None:
        """`apply` under the parameter's own name; kept for old programs."""
        self.apply(param.name, param, grad)

    def backward_and_update(self, loss: Tensor) -> None:
        """The same as calling the optimizer."""
        self(loss)

    def _fits(self, name: str, p: Tensor, g: Tensor) -> None:
        if not trace.alike(p.shape, g.shape):
            raise InvalidInput(f"the gradient of {name!r} has shape {g.shape}; the parameter's is {p.shape}", code="SX329")
        for kind in self.kinds:
            state = self._states[kind].get(name)
            if state is not None and tuple(state.shape) != tuple(p.shape):
                what = f"the state {kind}{_SEP}{name} has shape {state.shape}; the parameter's is {p.shape}"
                raise InvalidInput(what, code="SX327", hint="it is that of another model")

    # --- states

    def make_states(self, name: str, p: Tensor) -> None:
        """Give a parameter its states, zeros, where it has none yet; raises InvalidInput where it has some of another shape."""
        name = self._key(name, p)
        self._settle(p.device)
        for kind, group in self._states.items():
            t = group.get(name)
            if t is None:
                dtype = _wide_dtype(op.dtype(p))
                group[name] = Tensor(p.shape, p.device, dtype, requires_grad=False, name=f"{kind}{_SEP}{name}")
            elif name in self._loaded:
                self._fits(name, p, p)
                _move(t, p.device, _wide_dtype(op.dtype(p)))
        self._loaded.discard(name)

    def get_states(self) -> dict[str, Tensor]:
        """`step_counter`, and the states of each parameter as `<kind>.<parameter>`: `moments.conv1.W`."""
        named = {f"{kind}{_SEP}{name}": t for kind, group in self._states.items() for name, t in group.items()}
        return {"step_counter": self.step_counter, **named}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Set what `get_states` gave, Tensors or arrays; the states of a kind may also come as one dict by parameter.

        Before the first step, they are kept for the parameters to come, which are checked then.
        Raises InvalidInput for a name that this optimizer does not know, states that are lacking, or another shape: then
        nothing is changed.
        """
        counter: np.ndarray | None = None
        groups: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in self.kinds}
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
                raise InvalidInput(f"{type(self).__name__} has no state {key!r}", code="SX327", hint=f"there are {known}")
        if counter is not None and counter.size != 1:
            raise InvalidInput(f"step_counter has one element, not shape {counter.shape}", code="SX327")
        for kind, group in groups.items():
            self._comparable(kind, group)
        for kind, group in groups.items():
            for name, array in group.items():
                mine = self._states[kind].get(name)
                if mine is None:
                    mine = self._states[kind][name] = Tensor(data=array.copy(), requires_grad=False, name=f"{kind}{_SEP}{name}")
                    self._loaded.add(name)
                else:
                    mine._data[...] = mine.device.backend.put(array.astype(mine._data.dtype))
        if counter is not None:
            self.step_counter._data[...] = int(counter.reshape(-1)[0])
            self._refresh([n for n in self._values if not isinstance(self._schedules[n], Constant)])

    def _comparable(self, kind: str, given: dict[str, Any]) -> None:
        mine = self._states[kind]
        if not given or not mine:
            return
        lacking, unknown = sorted(set(mine) - set(given)), sorted(set(given) - set(mine))
        parts = [f"they lack {_some(lacking)}"] * bool(lacking) + [f"they have {_some(unknown)} besides"] * bool(unknown)
        if parts:
            raise InvalidInput(f"the states {kind!r} are those of another model: {'; '.join(parts)}", code="SX327")
        for name, array in given.items():
            if tuple(array.shape) != tuple(mine[name].shape):
                what = f"the state {kind}{_SEP}{name} has shape {tuple(array.shape)}; this model's has {mine[name].shape}"
                raise InvalidInput(what, code="SX327")

    def _key(self, name: str, p: Tensor) -> str:
        """The key of a parameter's states: its name, unless another living parameter goes by it."""
        known = self._keys.get(id(p))
        if known is not None and known[0]() is p:
            return known[1]
        taken = {key for ref, key in self._keys.values() if ref() is not None}
        key = FreshNames(taken, mark="#").new(name)
        gone = [i for i, (ref, k) in self._keys.items() if k == key]
        for i in gone:  # the parameter that had this name is no more, and its states are not for this one
            del self._keys[i]
            for group in self._states.values():
                group.pop(key, None)
        self._keys[id(p)] = (weakref.ref(p), key)
        return key

    def __getstate__(self) -> dict[str, Any]:
        """Pickles know parameters by their names alone."""
        return {**self.__dict__, "_keys": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An optimizer with states of its own, for parameters of the same names, or for those that were copied with it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__getstate__().items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        for known, key in self._keys.values():
            p = memo.get(id(known()))
            if isinstance(p, Tensor):
                made._keys[id(p)] = (weakref.ref(p), key)
        return made

    def _settle(self, device: Device) -> None:
        """The counter and the values lie where the parameters do."""
        if self._settled is None:
            self._settled = device
            for t in (self.step_counter, *self._values.values()):
                _move(t, device, op.dtype(t))


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum and Nesterov's variant of it.

    v = momentum * v + (1 - dampening) * g, also at the first step;  d = g + momentum * v with `nesterov`, else v;  p -= lr * d
    Without momentum d = g.  States: `moments`, where there is momentum.
    Raises ValueError for negative momentum or weight decay, and for nesterov without momentum or with dampening.
    """

    def __init__(
        self,
        lr: Any = 0.1,
        momentum: Any = 0,
        dampening: Any = 0,
        weight_decay: Any = 0,
        nesterov: bool = False,
        dtype: DTypeLike = float32,
        check_nan: bool = False,
    ) -> None:
        plain = isinstance(_schedule("momentum", momentum), Constant) and _schedule("momentum", momentum).init_value == 0
        self.kinds = () if plain else ("moments",)
        super().__init__(lr, dtype, check_nan)
        self.momentum = self._hyper("momentum", momentum)
        self.dampening = self._hyper("dampening", dampening)
        self.weight_decay = self._hyper("weight_decay", weight_decay)
        self.nesterov = nesterov
        self.moments = self._states.get("moments", {})
        self._check()

    def _check(self) -> None:
        super()._check()
        if not self.kinds and not self._is("momentum", 0):
            raise ValueError("this SGD was made without momentum, and has no states for it: make one with momentum")
        if self.nesterov and (not self.kinds or not self._is("dampening", 0)):
            raise ValueError("nesterov needs momentum, and no dampening")

    def _settings(self) -> tuple[Any, ...]:
        return (*super()._settings(), self.nesterov)

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        d, new = g, ()  # type: tuple[Tensor, tuple[Tensor, ...]]
        if states:
            m = self._value("momentum", p)
            fresh = g if self._is("dampening", 0) else op.Mul(g, self._less("dampening", p))
            v = op.Add(op.Mul(states[0], m), fresh)
            d, new = (op.Add(g, op.Mul(v, m)) if self.nesterov else v), (v,)
        return (op.Sub(p, op.Mul(d, self._value("lr", p))), *new)


class RMSProp(Optimizer):
    """r = rho * r + (1 - rho) * g**2;  p -= lr * g / sqrt(r + epsilon).  States: `running_average`.

    Raises ValueError for negative weight decay.
    """

    kinds = ("running_average",)

    def __init__(
        self,
        lr: Any = 0.1,
        rho: Any = 0.9,
        epsilon: Any = 1e-8,
        weight_decay: Any = 0,
        dtype: DTypeLike = float32,
        check_nan: bool = False,
    ) -> None:
        super().__init__(lr, dtype, check_nan)
        self.rho = self._hyper("rho", rho)
        self.epsilon = self._hyper("epsilon", epsilon)
        self.weight_decay = self._hyper("weight_decay", weight_decay)
        self.running_average = self._states["running_average"]
        self._check()

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        (r,) = states
        r = op.Add(op.Mul(r, self._value("rho", p)), op.Mul(op.Mul(g, g), self._less("rho", p)))
        d = op.Div(g, op.Sqrt(op.Add(r, self._value("epsilon", p))))
        return op.Sub(p, op.Mul(d, self._value("lr", p))), r


class AdaGrad(Optimizer):
    """h += g**2;  p -= lr * g / sqrt(h + epsilon).  States: `history`.  Raises ValueError for negative weight decay."""

    kinds = ("history",)

    def __init__(
        self, lr: Any = 0.1, epsilon: Any = 1e-8, weight_decay: Any = 0, dtype: DTypeLike = float32, check_nan: bool = False
    ) -> None:
        super().__init__(lr, dtype, check_nan)
        self.epsilon = self._hyper("epsilon", epsilon)
        self.weight_decay = self._hyper("weight_decay", weight_decay)
        self.history = self._states["history"]
        self._check()

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        h = op.Add(states[0], op.Mul(g, g))
        d = op.Div(g, op.Sqrt(op.Add(h, self._value("epsilon", p))))
        return op.Sub(p, op.Mul(d, self._value("lr", p))), h


class Adam(Optimizer):
    """m, v: moving averages of g and g**2;  p -= lr * (m / (1 - beta_1**t)) / (sqrt(v / (1 - beta_2**t)) + epsilon)

    with t = step_counter + 1.  States: `m` and `v`.  Raises ValueError for negative weight decay.
    """

    kinds = ("m", "v")

    def __init__(
        self,
        lr: Any = 0.1,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-8,
        weight_decay: Any = 0,
        dtype: DTypeLike = float32,
        check_nan: bool = False,
    ) -> None:
        super().__init__(lr, dtype, check_nan)
        self.beta_1 = self._hyper("beta_1", beta_1)
        self.beta_2 = self._hyper("beta_2", beta_2)
        self.epsilon = self._hyper("epsilon", epsilon)
        self.weight_decay = self._hyper("weight_decay", weight_decay)
        self.m, self.v = self._states["m"], self._states["v"]
        self._check()

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        m, v = states
        m = op.Add(op.Mul(m, self._value("beta_1", p)), op.Mul(g, self._less("beta_1", p)))
        v = op.Add(op.Mul(v, self._value("beta_2", p)), op.Mul(op.Mul(g, g), self._less("beta_2", p)))
        root = op.Add(op.Sqrt(op.Div(v, self._bias("beta_2", p))), self._value("epsilon", p))
        d = op.Div(op.Div(m, self._bias("beta_1", p)), root)
        return op.Sub(p, op.Mul(d, self._value("lr", p))), m, v

    def _bias(self, name: str, p: Tensor) -> Tensor:
        """1 - beta ** t, in float64: in float32, 1 - 0.999 has five digits."""

        def make() -> Tensor:
            t = op.Add(_double(op.Squeeze(self.step_counter, [0])), 1.0)
            beta = self._value(name, t)
            power = op.Pow(beta if isinstance(beta, Tensor) else np.float64(beta), t)
            corrected: Tensor = op.cast(op.Sub(1.0, power), p)
            return corrected

        return self._once(f"1 - {name}**t", p, make)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _schedule(name: str, value: Any) -> DecayScheduler:
    if isinstance(value, DecayScheduler):
        return value
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return Constant(float(value))
    raise TypeError(f"{name} is a number or a DecayScheduler, not a {type(value).__name__}")


def _double(t: Tensor) -> Tensor:
    return op.Cast(t, to=dtypes.onnx_code(np.float64))


def _wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _wide(t: Tensor) -> Tensor:
    """Half precision is too narrow for an update: an epsilon of 1e-8 would be 0."""
    dtype = op.dtype(t)
    return t if _wide_dtype(dtype) == dtype else op.Cast(t, to=dtypes.onnx_code(np.float32))


def _move(t: Tensor, device: Device, dtype: np.dtype[Any]) -> None:
    if t.device is not device or t._data.dtype != dtype:
        t._data = device.backend.put(t.device.backend.get(t._data).astype(dtype))
        t.device = device


def _array(value: Any) -> Any:
    return value.device.backend.get(value.data) if isinstance(value, Tensor) else np.asarray(value)


def _some(names: Any) -> str:
    listed = [str(n) for n in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
