"""Optimizers: they update parameters by gradients, using ONNX's operators, so that an update is part of a recorded step.

sgd = opt.SGD(lr=opt.ExponentialDecay(0.1, 1000, 0.5), momentum=0.9, weight_decay=1e-5)
sgd(loss)                                          backward, an update of each parameter, and a step of the counter
for p, g in autograd.backward(loss): sgd.apply(p.name, p, g)
sgd.step()                                         the same in single calls

adam = opt.AdamW(opt.WarmUp(opt.CosineDecay(1e-3, 900), 100))
adam.set_group("*.bias", weight_decay=0)           other hyperparameters for the parameters of these names
adam.clip_gradients(norm=1.0)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import override

from singa_backend.collectives import Communicator, launched_size, nccl_group
from singa_backend.collectives import communicator as make_communicator
from singa_backend.errors import InvalidInput

from ._core.conversions import DTypeLike, float32
from ._core.tensor import Tensor, op
from ._training.distributed import DataParallel
from ._training.nan import first_nan
from ._training.optimizer import Optimizer
from ._training.schedules import (
    Constant,
    CosineDecay,
    DecayScheduler,
    ExponentialDecay,
    MultiStepDecay,
    StepDecay,
    WarmUp,
    double,
    is_constant,
    schedule_of,
)

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Constant",
    "CosineDecay",
    "DecayScheduler",
    "DistOpt",
    "ExponentialDecay",
    "MultiStepDecay",
    "Optimizer",
    "RMSProp",
    "StepDecay",
    "WarmUp",
    "first_nan",
]


class SGD(Optimizer):
    """Stochastic gradient descent, with optional momentum and Nesterov momentum.

    v = momentum * v + (1 - dampening) * g, also at the first step; d = g + momentum * v with `nesterov`, otherwise d = v, and d
    = g without momentum; p -= lr * d. States: `moments` (v), if momentum is not 0.

    Args:
        lr: Learning rate, a number or a DecayScheduler, as for the other hyperparameters.
        momentum: Momentum.
        dampening: Dampening of the gradient in the momentum.
        weight_decay: Factor of the parameter that is added to its gradient.
        nesterov: Whether Nesterov's variant is used.
        dtype: Dtype of `lr_value`.
        check_nan: Whether a loss that is NaN raises InvalidInput.

    Raises:
        TypeError: If a hyperparameter is neither a number nor a DecayScheduler.
        ValueError: If momentum or weight decay is negative, or `nesterov` is set without momentum or with dampening.
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
        schedule = schedule_of("momentum", momentum)
        plain = is_constant(schedule) and schedule.init_value == 0
        self.kinds = () if plain else ("moments",)
        super().__init__(lr, dtype, check_nan)
        self.momentum = self._set_hyperparameter("momentum", momentum)
        self.dampening = self._set_hyperparameter("dampening", dampening)
        self.weight_decay = self._set_hyperparameter("weight_decay", weight_decay)
        self.nesterov = nesterov
        self.moments = self._states.get("moments", {})
        self._check()

    def _check(self) -> None:
        super()._check()
        if not self.kinds and not self._is("momentum", 0):
            raise ValueError(
                "momentum of an SGD created without momentum must be 0: it has no states for it; create one with momentum"
            )
        if self.nesterov and (not self.kinds or not self._is("dampening", 0)):
            raise ValueError("nesterov must be used with momentum and without dampening")

    def _settings(self) -> tuple[Any, ...]:
        return (*super()._settings(), self.nesterov)

    @override
    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        d, new = g, ()  # type: tuple[Tensor, tuple[Tensor, ...]]
        if states:
            m = self._value("momentum", p)
            fresh = g if self._is("dampening", 0) else op.Mul(g, self._one_minus("dampening", p))
            v = op.Add(op.Mul(states[0], m), fresh)
            d, new = (op.Add(g, op.Mul(v, m)) if self.nesterov else v), (v,)
        return (op.Sub(p, op.Mul(d, self._value("lr", p))), *new)


class RMSProp(Optimizer):
    """RMSProp: r = rho * r + (1 - rho) * g**2; p -= lr * g / sqrt(r + epsilon).

    States: `running_average` (r).

    Args:
        lr: Learning rate, a number or a DecayScheduler, as for the other hyperparameters.
        rho: Weight of the old average of squared gradients.
        epsilon: Number added under the square root.
        weight_decay: Factor of the parameter that is added to its gradient.
        dtype: Dtype of `lr_value`.
        check_nan: Whether a loss that is NaN raises InvalidInput.

    Raises:
        TypeError: If a hyperparameter is neither a number nor a DecayScheduler.
        ValueError: If the weight decay is negative.
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
        self.rho = self._set_hyperparameter("rho", rho)
        self.epsilon = self._set_hyperparameter("epsilon", epsilon)
        self.weight_decay = self._set_hyperparameter("weight_decay", weight_decay)
        self.running_average = self._states["running_average"]
        self._check()

    @override
    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        (r,) = states
        r = op.Add(op.Mul(r, self._value("rho", p)), op.Mul(op.Mul(g, g), self._one_minus("rho", p)))
        d = op.Div(g, op.Sqrt(op.Add(r, self._value("epsilon", p))))
        return op.Sub(p, op.Mul(d, self._value("lr", p))), r


class AdaGrad(Optimizer):
    """AdaGrad (Duchi et al., 2011): h += g**2; p -= lr * g / sqrt(h + epsilon).

    States: `history` (h).

    Args:
        lr: Learning rate, a number or a DecayScheduler, as for the other hyperparameters.
        epsilon: Number added under the square root.
        weight_decay: Factor of the parameter that is added to its gradient.
        dtype: Dtype of `lr_value`.
        check_nan: Whether a loss that is NaN raises InvalidInput.

    Raises:
        TypeError: If a hyperparameter is neither a number nor a DecayScheduler.
        ValueError: If the weight decay is negative.
    """

    kinds = ("history",)

    def __init__(
        self, lr: Any = 0.1, epsilon: Any = 1e-8, weight_decay: Any = 0, dtype: DTypeLike = float32, check_nan: bool = False
    ) -> None:
        super().__init__(lr, dtype, check_nan)
        self.epsilon = self._set_hyperparameter("epsilon", epsilon)
        self.weight_decay = self._set_hyperparameter("weight_decay", weight_decay)
        self.history = self._states["history"]
        self._check()

    @override
    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        h = op.Add(states[0], op.Mul(g, g))
        d = op.Div(g, op.Sqrt(op.Add(h, self._value("epsilon", p))))
        return op.Sub(p, op.Mul(d, self._value("lr", p))), h


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2014): p -= lr * (m / (1 - beta_1**t)) / (sqrt(v / (1 - beta_2**t)) + epsilon).

    m and v are moving averages of g and g**2, and t = step_counter + 1. States: `m` and `v`.

    Args:
        lr: Learning rate, a number or a DecayScheduler, as for the other hyperparameters.
        beta_1: Weight of the old average of gradients.
        beta_2: Weight of the old average of squared gradients.
        epsilon: Number added to the square root.
        weight_decay: Factor of the parameter that is added to its gradient.
        dtype: Dtype of `lr_value`.
        check_nan: Whether a loss that is NaN raises InvalidInput.

    Raises:
        TypeError: If a hyperparameter is neither a number nor a DecayScheduler.
        ValueError: If the weight decay is negative.
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
        self.beta_1 = self._set_hyperparameter("beta_1", beta_1)
        self.beta_2 = self._set_hyperparameter("beta_2", beta_2)
        self.epsilon = self._set_hyperparameter("epsilon", epsilon)
        self.weight_decay = self._set_hyperparameter("weight_decay", weight_decay)
        self.m, self.v = self._states["m"], self._states["v"]
        self._check()

    @override
    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        m, v = states
        m = op.Add(op.Mul(m, self._value("beta_1", p)), op.Mul(g, self._one_minus("beta_1", p)))
        v = op.Add(op.Mul(v, self._value("beta_2", p)), op.Mul(op.Mul(g, g), self._one_minus("beta_2", p)))
        root = op.Add(op.Sqrt(op.Div(v, self._bias("beta_2", p))), self._value("epsilon", p))
        d = op.Div(op.Div(m, self._bias("beta_1", p)), root)
        return op.Sub(p, op.Mul(d, self._value("lr", p))), m, v

    def _bias(self, name: str, p: Tensor) -> Tensor:
        """1 - beta ** t, computed in float64 because 1 - 0.999 has only five correct digits in float32."""

        def make() -> Tensor:
            t = op.Add(double(op.Squeeze(self.step_counter, [0])), 1.0)
            beta = self._value(name, t)
            power = op.Pow(beta if isinstance(beta, Tensor) else np.float64(beta), t)
            corrected: Tensor = op.cast(op.Sub(1.0, power), p)
            return corrected

        return self._shared_value(f"1 - {name}**t", p, make)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2017): p -= lr * weight_decay * p, then the update of Adam.

    The moving averages do not contain the weight decay. States: `m` and `v`.

    Args:
        lr: Learning rate, a number or a DecayScheduler, as for the other hyperparameters.
        beta_1: Weight of the old average of gradients.
        beta_2: Weight of the old average of squared gradients.
        epsilon: Number added to the square root.
        weight_decay: Factor of the parameter that is subtracted from it, times the learning rate.
        dtype: Dtype of `lr_value`.
        check_nan: Whether a loss that is NaN raises InvalidInput.

    Raises:
        TypeError: If a hyperparameter is neither a number nor a DecayScheduler.
        ValueError: If the weight decay is negative.
    """

    _decoupled = True

    def __init__(
        self,
        lr: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: Any = 1e-8,
        weight_decay: Any = 0.01,
        dtype: DTypeLike = float32,
        check_nan: bool = False,
    ) -> None:
        super().__init__(lr, beta_1, beta_2, epsilon, weight_decay, dtype, check_nan)

    @override
    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        if not self._is("weight_decay", 0):
            p = op.Sub(p, op.Mul(op.Mul(p, self._value("weight_decay", p)), self._value("lr", p)))
        return super().rule(p, g, *states)


class DistOpt(DataParallel):
    """Trains one model in several processes, each with its own samples: data-parallel training around an optimizer.

    Every process runs the same program, on a shard of the data: `global_rank` of `world_size`.  After a training call
    the parameters are equal on all ranks.  They must be equal at the start too: build the model from the same file or seed,
    or call `broadcast_params`.  Start the processes by `mpiexec -n 2 python train.py`, or on one machine by multiprocessing with
    a `nccl_id`; otherwise there is one rank.

    Args:
        opt: The optimizer; None for SGD().
        nccl_id: The id of a group of processes on one machine (`singa_wrap.NcclIdHolder`), made before they start, with GPUs or
            on CPUs; None if MPI starts the processes.
        local_rank: With `nccl_id`, the number of this process; otherwise None, or the number that MPI determines.
        world_size: With `nccl_id`, the number of processes; otherwise None, or the number that the launcher has started.
        buffSize: The maximum number of elements of one message of MPI or NCCL; larger buckets are sent in pieces.
        engine: "mpi", "nccl" (MPI starts the processes, GPUs exchange the gradients) or "single"; None for "mpi" if a
            launcher has started several processes, otherwise "single".
        timeout: Seconds that an exchange waits for the other processes before it raises CommunicationError.
        communicator: A communicator to use in place of these, such as a rank of `singa_backend.collectives.LocalGroup`.
        sync_batch_norm: Whether BatchNormalization uses the samples of all processes in the steps of a Model that holds this
            optimizer: its mean and variance, and their gradients, are those of one process with the whole batch. Each of them
            exchanges a few numbers for each channel, forward and backward.

    Attributes:
        opt: The optimizer.
        communicator: The communicator.
        world_size: The number of ranks.
        global_rank: The number of this rank, from 0.
        local_rank: The number of lower ranks on the same machine.

    Raises:
        TypeError: `opt` is not an Optimizer.
        InvalidInput: An argument is out of range, or contradicts another one or how the process was started (SX386).
        CommunicationError: Another process does not come within the timeout (SX950).
        MissingDependency: mpi4py or CuPy is needed and is not installed.
        DeviceUnavailable: There is no GPU for NCCL.

    Example:
        >>> dist = opt.DistOpt(opt.SGD(lr=0.1))
        >>> rows = range(dist.global_rank, len(x), dist.world_size)
        >>> model.set_optimizer(dist)
    """

    def __init__(
        self,
        opt: Optimizer | None = None,
        nccl_id: Any = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = 4194304,
        *,
        engine: str | None = None,
        timeout: float = 300.0,
        communicator: Communicator | None = None,
        sync_batch_norm: bool = False,
    ) -> None:
        opt = SGD() if opt is None else opt
        if not isinstance(opt, Optimizer):
            raise TypeError(f"opt must be an Optimizer, got a {type(opt).__name__}")
        if isinstance(buffSize, bool) or not isinstance(buffSize, (int, np.integer)) or buffSize < 1:
            raise InvalidInput(f"buffSize must be an integer of at least 1, got {buffSize!r}", code="SX386")
        self.buffSize = int(buffSize)
        if communicator is not None:
            _refuse_with("communicator", nccl_id=nccl_id, engine=engine, timeout=None if timeout == 300.0 else timeout)
        elif nccl_id is not None:
            _refuse_with("nccl_id", engine=engine)
            communicator = nccl_group(nccl_id, local_rank, world_size, timeout, self.buffSize)
        else:
            _refuse_other("world_size", world_size, 1 if engine == "single" else launched_size())
            communicator = make_communicator(engine, timeout, self.buffSize)
        _refuse_other("world_size", world_size, communicator.size)
        _refuse_other("local_rank", local_rank, communicator.local_rank)
        super().__init__(opt, communicator, bool(sync_batch_norm))


def _refuse_with(name: str, **others: Any) -> None:
    """Raise InvalidInput if an argument is passed that another one replaces."""
    for other, value in others.items():
        if value is not None:
            raise InvalidInput(f"{other} must be left out if {name} is passed, got {value!r}", code="SX386")


def _refuse_other(name: str, value: Any, found: int) -> None:
    """Raise InvalidInput if an argument of DistOpt differs from the group of this process."""
    if value is not None and (isinstance(value, bool) or value != found):
        hint = "pass nccl_id=singa_wrap.NcclIdHolder(), made before the processes start, or start them by mpiexec"
        raise InvalidInput(f"{name} must be None or that of the group, {found}, got {value!r}", code="SX386", hint=hint)
