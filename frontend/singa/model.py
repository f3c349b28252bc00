"""Models: layers, a training step and states. A step runs operator by operator, or as one ONNX graph."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import signal
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, SonnxError, UnsupportedModel
from singa_backend.kernels.options import options as plan_options
from singa_backend.kernels.table import Options
from singa_backend.machine import without_collections
from singa_backend.passes.change_dtype import WIDE
from singa_backend.plans.profile import Profile
from singa_backend.rendering import printable

from ._core import provenance, sync_norm, tape, trace
from ._core.conversions import DTypeLike, dtype_of
from ._core.coverage import watch_gradients
from ._core.tensor import Tensor
from ._core.trace import NotTraceable
from ._core.variable import tensor_list
from ._layers.base import Layer
from ._training.accumulation import Accumulates, rows_of
from ._training.callbacks import Callback, Callbacks, Ended, FitProgress
from ._training.fit import (
    EarlyStop,
    History,
    Position,
    accumulating,
    after_step,
    check_metrics,
    device_of,
    evaluate,
    loop,
    predict,
    stop_signals,
)
from ._training.loader import positive, seeded
from ._training.profiling import profiled_step, restored
from ._training.sources import ArgumentNames, TableBatches, length_of, one_epoch, source_of
from ._training.state_files import read_states, write_states
from ._training.step import Sizes, Step, batched, has_names, step_form
from .device import DeviceLike, default_device, resolve

__all__ = ["Callback", "FitProgress", "Model", "Step"]

_STEPS = 64
"""The number of graphs that a model keeps, one for each set of shapes and settings."""

_PLANS = 10
"""The number of shapes whose recorded steps keep the memory of their plans: those that were used last."""


class Model(Layer):
    """The base class of models: a subclass defines `forward`; to be trained, also `train_one_batch`.

    Calling a model calls `train_one_batch` in training, otherwise `forward`. A new model follows `autograd.training`, which is
    off when a program begins; `compile`, `train` and `eval` set its own mode and that of the models in it. Calling a new model
    with the arguments of its `train_one_batch` calls `train()` first, as in SINGA's documentation. `repr` reports the mode. The
    first training step issues a NoGradientWarning that names the parameters that are not frozen and get no gradient; it raises
    InvalidInput (SX345) if no parameter gets one. The first step of a model from a file issues a ConstantTrainsWarning that names
    the constants of the file that a program trains by their flags.

    Attributes:
        graph_mode: Whether a step runs as one ONNX graph.
        sequential: Kept for old programs; a graph always runs its nodes in the order in which the step created them.
        deterministic: Whether recorded steps run on one thread.
        precision: How a recorded step may compute products, "float32" or "bf16": see `graph`.
        activation_memory: The bytes that the values of a recorded step may take; None for no bound.
        not_traceable: Why the steps of this model cannot become a graph; "" if they can.
        history: The measurements of the last call of `fit`, also of one that was interrupted; None before the first.

    Example:
        class Net(model.Model):
            def __init__(self):
                super().__init__()
                self.fc = layer.Linear(10)

            def forward(self, x):
                return self.fc(x)

            def train_one_batch(self, x, y):
                out = self.forward(x)
                loss = autograd.softmax_cross_entropy(out, y)
                self.optimizer(loss)
                return out, loss

        net = Net()
        net.set_optimizer(opt.SGD(lr=0.1))
    """

    _mode: bool | None = None
    _weight: int | None = None  # of the batch of the present step, if something has read it
    _tape_first = False  # whether states must follow parameters that `to` has changed
    history: History | None = None
    precision = "float32"
    activation_memory: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.graph_mode = False
        self.sequential = False
        self.deterministic = False
        self._steps: OrderedDict[tuple[Any, Sizes | None], list[Step]] = OrderedDict()
        self._checked = False
        self.not_traceable = ""
        """Why the steps of this model cannot become a graph; "" if they can."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An independent model in the same mode; if it holds its optimizer, also at the same point of its training."""
        memo[id(self._steps)] = OrderedDict()  # a recorded step is bound to this model's tensors: the copy records its own
        return super().__deepcopy__(memo)

    def _copied_fields(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": OrderedDict()}

    if not TYPE_CHECKING:  # it would allow every attribute

        def __getattr__(self, name: str) -> Any:
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = ": call set_optimizer, for example with opt.SGD(lr=0.1)" if name == "optimizer" else ""
            raise AttributeError(what + hint, name=name, obj=self)

    def set_optimizer(self, optimizer: Any) -> None:
        """Set the optimizer that `train_one_batch` uses: the attribute `optimizer`. A subclass may define another method.

        Args:
            optimizer: An Optimizer, or a DistOpt.
        """
        self.optimizer = optimizer

    # --- modes

    def compile(
        self,
        inputs: Sequence[Tensor],
        is_train: bool = True,
        use_graph: bool = False,
        sequential: bool = False,
        *,
        deterministic: bool = False,
        precision: str = "float32",
        activation_memory: int | None = None,
    ) -> None:
        """Create the parameters by one call of `forward`, and set the mode.

        The outputs are discarded. Running statistics, existing parameters and random numbers are unchanged.

        Args:
            inputs: Tensors of the shapes and dtypes of the inputs of `forward`.
            is_train: Whether calling the model trains it.
            use_graph: Whether to run steps as one ONNX graph.
            sequential: Kept for old programs; it has no effect.
            deterministic: As for `graph`.
            precision: "bf16" permits products in bfloat16 in steps that run as a graph: see `graph`.
            activation_memory: As for `graph`.

        Raises:
            InvalidInput: An input is not a Tensor (SX317), or `precision` has another value, or is "bf16" without `use_graph`
                (SX384).
        """
        tensor_list("inputs", inputs)
        _check_precision(precision, use_graph, "use_graph=True")
        with self._in_mode(False):
            self.forward(*inputs)
        self.train(is_train)
        self.graph(use_graph, sequential, deterministic=deterministic, precision=precision, activation_memory=activation_memory)
        self._checked = False

    @property
    def training(self) -> bool:
        """Whether the model is in training; `autograd.training` until `compile`, `train`, `eval` or an assignment sets it.

        The first call with the arguments of `train_one_batch` sets it too.
        """
        return tape.training if self._mode is None else self._mode

    @training.setter
    def training(self, mode: bool) -> None:
        self._mode = bool(mode)

    def train(self, mode: bool = True) -> None:
        """Set whether calling the model trains it, also for the models in it; `autograd.training` is set to the same.

        Args:
            mode: True for training, False for inference.
        """
        for model in self._models():
            model._mode = bool(mode)
        tape.training = bool(mode)

    def eval(self) -> None:
        """Set the model to inference, as `train(False)`."""
        self.train(False)

    def _models(self) -> list[Model]:
        """This model and the models in it, each once."""
        found: dict[int, Layer] = {}
        pending: list[Layer] = [self]
        while pending:
            layer = pending.pop()
            if id(layer) not in found:
                found[id(layer)] = layer
                pending += layer._layers.values()
        return [layer for layer in found.values() if isinstance(layer, Model)]

    @contextlib.contextmanager
    def _in_mode(self, training: bool) -> Iterator[None]:
        """The context in which the model is in a mode; on exit, the modes of its models and of the tape are restored."""
        before = [(model, model._mode) for model in self._models()]
        with tape.restored():
            self.train(training)
            try:
                yield
            finally:
                for model, mode in before:
                    model._mode = mode

    def __repr__(self) -> str:
        mode = "training" if self.training else "inference"
        source = " (follows autograd.training)" if self._mode is None else ""
        lines = [*self._origin_lines(), *(f"{n}: {type(v).__name__}, {_counted(v)}" for n, v in self._layers.items())]
        inner = "".join(f"\n  {printable(line)}" for line in lines)
        return f"<{type(self).__qualname__} at {id(self):#x}:{inner}\n  {_counted(self)}, mode: {mode}{source}>"

    def _origin_lines(self) -> list[str]:
        """What `repr` shows before the layers."""
        return []

    def graph(
        self,
        mode: bool = True,
        sequential: bool = False,
        *,
        deterministic: bool = False,
        precision: str | None = None,
        activation_memory: int | None = None,
    ) -> None:
        """Set whether steps run as one ONNX graph, and discard the graphs that were recorded.

        The first step with some shapes runs operator by operator, the second is recorded; after the first step of the optimizer,
        also in a training that is resumed, the first step with other shapes is recorded too. A step that cannot become a graph,
        because it reads values in Python, stays on the tape with a UserWarning.

        Args:
            mode: True for a graph, False for the tape.
            sequential: Kept for old programs; it has no effect.
            deterministic: Whether recorded steps run on one thread, as `prepare(deterministic=True)`: their bits then do not
                depend on the number of cores, nor on other programs that use them, nor on the processor where machine code
                computes every step; the first step is recorded too. Otherwise they are equal from run to run at
                a number of threads that SONNX_NUM_THREADS sets.
            precision: "bf16" permits products of float32 in bfloat16 on the CPU, as for `prepare`; the tensors, the sums and the
                parameters stay float32. "float32" does not; None leaves the precision as it is. Steps on the tape, such as the
                first one, compute in float32.
            activation_memory: The bytes that the activations, gradients and workspaces of a recorded step may take on the CPU;
                None for as many as they need. Activations beyond them are computed again when a gradient needs them, the
                cheapest ones first. The first step, on the tape, and the next one, which makes the plan, need more. If nothing
                further can be computed again, a UserWarning has the bytes that the step takes.

        Raises:
            InvalidInput: `precision` has another value, or is "bf16" with `mode=False`, or `activation_memory` is not a positive
                integer (SX384).
        """
        plan_options(activation_memory=activation_memory)
        if precision is not None:
            _check_precision(precision, mode, "mode=True")
            self.precision = precision
        self.graph_mode, self.deterministic, self.activation_memory = bool(mode), bool(deterministic), activation_memory
        self.sequential = bool(sequential)
        self._steps.clear()

    def forward(self, *input: Any) -> Any:
        """Compute the outputs; defined by subclasses.

        Args:
            *input: The inputs, Tensors.

        Returns:
            The outputs.

        Raises:
            NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def train_one_batch(self, *input: Any, **kwargs: Any) -> Any:
        """Run one training step: forward pass, loss and update of the parameters; defined by subclasses.

        Args:
            *input: The inputs and the targets of a batch, Tensors.
            **kwargs: Further arguments of the step.

        Returns:
            The results of the step; `(output, loss)` for `sonnx train` and for code that follows SINGA's examples.

        Raises:
            NotImplementedError: The subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define train_one_batch")

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """Call `train_one_batch` in training, otherwise `forward`; also `forward` of a model in a model that has no step.

        The first call of a new model that has a step, with the arguments of that step, calls `train()`.

        Raises:
            InvalidInput: The arguments are not those of `train_one_batch` in training, or of `forward` in inference (SX301); or
                the first training step computed no gradient for any parameter (SX345).
        """
        has_step = self._has_step()
        if self.__dict__["_parent"] is not None and not (self.training and has_step):
            return self.forward(*input, **kwargs)  # a layer of the model that it is in, whose step it must not leave
        is_open = self._mode is None and has_step and not (tape.training or provenance.suspended)
        if is_open and _accepts(self.train_one_batch, input, kwargs):
            self.train()
        tape.set_training(self.training)
        try:
            return self._called(input, kwargs)
        except TypeError:
            self._check_arguments(input, kwargs)
            raise

    def _has_step(self) -> bool:
        return type(self).train_one_batch is not Model.train_one_batch

    def _check_arguments(self, input: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InvalidInput (SX301) unless the arguments of a call are those of the method that it calls in this mode."""
        called, other = (self.train_one_batch, self.forward) if self.training else (self.forward, self.train_one_batch)
        if _accepts(called, input, kwargs):
            return
        got = f"{len(input)} argument{'s' * (len(input) != 1)}" + "".join(f", {name}=" for name in kwargs)
        mode, switch = ("training", "eval()") if self.training else ("inference", "train() or compile(..., is_train=True)")
        what = f"a call of {type(self).__name__} in {mode} must have the arguments of {_signature(called)}, got {got}"
        hint = f"call {switch} first to run {_signature(other)}" if _accepts(other, input, kwargs) else ""
        hint = hint or (f"the other mode runs {_signature(other)}" if self._has_step() else "")
        raise InvalidInput(what, code="SX301", hint=hint) from None

    def _called(self, input: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the method that a call runs in this mode."""
        if not self.training:
            return self.forward(*input, **kwargs)
        if not self._checked:
            constants = self._constants()  # before the step changes them
            with watch_gradients(self.get_params) as covered:
                result = self._step(input, kwargs)
            for warning in (covered.check(), covered.check_constants(constants)):
                if warning is not None:
                    warnings.warn(warning, stacklevel=3)
            self._checked = covered.backward_ran
            return result
        return self._step(input, kwargs)

    def _constants(self) -> dict[str, str]:
        """The constants of a file that nobody has requested to train, and why they are constants, the first time."""
        return {}

    def _step(self, input: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = next((x.device for x in input if isinstance(x, Tensor)), default_device)
        if not device.verbosity:
            return self._run_step(input, kwargs)
        with device._times.step(device.skip_iterations):
            return self._run_step(input, kwargs)

    def _run_step(self, input: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._begun(input):
            return self._recorded_step(input, kwargs)

    def _begun(self, input: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
        """Begin a step on a batch; the context in which it computes."""
        self._weight = None
        optimizers = self._optimizers()
        for optimizer in optimizers:
            if isinstance(optimizer, Accumulates):
                optimizer._begin(partial(self._weighed, input))
        groups = [o.sync_group() for o in optimizers if hasattr(o, "sync_group")]
        return sync_norm.together(groups[0]) if groups else contextlib.nullcontext()

    def _weighed(self, batch: Sequence[Any]) -> int:
        """The weight of the batch of the present step, which is computed once."""
        if self._weight is None:
            self._weight = self.batch_weight(*batch)
        return self._weight

    def _recorded_step(self, input: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.graph_mode or self.not_traceable:
            return self.train_one_batch(*input, **kwargs)
        return self._graph_step(input, kwargs)

    def _graph_step(self, input: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first step with some shapes runs on the tape and creates the states of the optimizer. The next becomes a graph.

        If the optimizer has its states, the first step becomes a graph too: a resumed training then computes each step as an
        unbroken one does, to the bit.  So it does in deterministic steps, whose bits are those of plans, after a step on the tape
        that is undone.
        """
        key = form, sizes = self._step_key(input, kwargs)
        if key not in self._steps:
            self._steps[key] = []
            self._forget_steps()
            if not self._has_stepped():
                self._tape_first = False
                with restored(self) if self.deterministic else contextlib.nullcontext(), tape.by_definitions():
                    first = self.train_one_batch(*input, **kwargs)  # a plan of each node would serve this step only
                if not self.deterministic:
                    return first
        self._steps.move_to_end(key)
        for other in list(self._steps)[:-_PLANS]:
            for old in self._steps[other]:
                old.forget_plan()
        recorded = self._steps[key]
        step = next((step for step in recorded if step.holds()), None)
        if has_names(sizes) and (step is None or not step.is_recorded_for(input, kwargs)):
            step = self._open_step(step, sizes, input, kwargs)
            if step is None:
                del self._steps[key]
                self._steps[form, None] = []  # there is a graph for each size
                recorded = self._steps.setdefault(self._step_key(input, kwargs), [])
        if step is None:
            try:
                with without_collections():
                    step = Step(self.train_one_batch, input, kwargs, self._plan_options())
            except (NotTraceable, UnsupportedModel) as error:  # the tape has computed this step
                where = f"node {error.node!r}, operator {error.operator}: " if error.node else ""
                self.not_traceable = where + error.message
                warnings.warn(f"this model's steps stay on the tape: {self.not_traceable}", UserWarning, stacklevel=7)
                return self.train_one_batch(*input, **kwargs)
        if step not in recorded:
            recorded.append(step)
            self._forget_steps()
        return step.run(input, kwargs)

    def _step_key(self, input: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Sizes]:
        """The form of a step, and the sizes that it has a graph for."""
        seen: dict[int, tuple[int, ...]] = {}
        form = (step_form((input, kwargs), seen), self._frozen(), tuple(self._optimizers()), self.precision)
        shapes = tuple(seen.values())
        device = next((x.device for x in input if isinstance(x, Tensor)), default_device)
        return form, batched(shapes) if device.backend.is_host and (form, None) not in self._steps else shapes

    def _open_step(self, known: Step | None, sizes: Sizes, input: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """Record a step for several sizes; None if that is not possible, or one that was recorded for other sizes differs."""
        try:
            with without_collections():
                step = Step(self.train_one_batch, input, kwargs, self._plan_options(), sizes=sizes)
            return step if known is None else known if known.agrees(step) else None
        except (SonnxError, TypeError, ValueError, IndexError):  # a graph of the present sizes shows errors of another cause
            return None

    def profile_step(self, *input: Any, runs: int = 10, **kwargs: Any) -> Profile:
        """Measure where the time of a training step goes: by part, by node, and what computes each gradient.

        The step is recorded as a graph, also if the steps of this model run on the tape. Afterwards the parameters, running
        statistics, states of the optimizers that are attributes of the model, and the random state are those before.

        Args:
            *input: The positional arguments of `train_one_batch`.
            runs: The number of whole steps, and of steps that are measured node by node, in turns; the times are medians.
            **kwargs: The keyword arguments of `train_one_batch`.

        Returns:
            The profile; `parts` and `gradient_calls` are those of the training step.

        Raises:
            InvalidInput: `runs` is not a positive integer.
            NotTraceable: The step reads values in Python, so that it cannot become a graph (SX330).
            UnsupportedModel: An operator has no gradient, or cannot be written to a graph.
            OperatorError: A node cannot compute with its inputs.

        Example:
            found = net.profile_step(x, t)
            for part in found.parts:
                print(f"{part.part}: {part.share:.0%}")
        """
        return profiled_step(self, input, kwargs, runs, self._plan_options())[0]

    def _plan_options(self) -> Options:
        """How the plans of recorded steps compute."""
        memory = self.activation_memory
        return plan_options(precision=self.precision, deterministic=self.deterministic, activation_memory=memory)

    def _has_stepped(self) -> bool:
        """Whether the optimizer has taken steps, here or in the training that is resumed, and `to` has changed nothing since."""
        counters = [o.step_counter for o in self._optimizers()]
        return not self._tape_first and any(int(t.device.backend.get(t._data)[0]) > 0 for t in counters)

    def _optimizers(self) -> list[Any]:
        """The optimizers that are attributes of this model, each once; of a DistOpt and the optimizer in it only the former."""
        found = {id(v): v for v in self.__dict__.values() if isinstance(getattr(v, "step_counter", None), Tensor)}
        inner = {id(v.opt) for v in found.values() if hasattr(v, "opt")}
        return [v for i, v in found.items() if i not in inner]

    def _forget_steps(self) -> None:
        """Discard the oldest graphs: first those of the shapes that were used the longest time ago."""
        while sum(max(len(steps), 1) for steps in self._steps.values()) > _STEPS:
            key, steps = next(iter(self._steps.items()))
            if len(steps) > 1:
                del steps[0]
            else:
                del self._steps[key]

    def _frozen(self) -> tuple[bool, ...]:
        return tuple(p.stores_grad and p.requires_grad for p in self.get_params().values())

    # --- dtype and device

    def to(self, *, dtype: DTypeLike | None = None, device: DeviceLike | None = None) -> Self:
        """Cast the parameters and running statistics that are floats, and move all of them, in place.

        Tensors stay the same objects. The states of the optimizer follow in its next step. Steps that were recorded as a graph
        are recorded again. In a model from a file, all floats change: its inputs, outputs and constants too; operators that
        do not take the dtype in the opset of the file compute in their old one, between Casts.

        Args:
            dtype: float16, bfloat16, float32 or float64; None to keep the dtypes.
            device: The device, or a name such as "CUDA"; None to keep the devices.

        Returns:
            This model.

        Raises:
            InvalidInput: The dtype is not one of these, a value does not fit in it, or the model is not compiled and has no
                parameters yet (SX388); or it is not a dtype (SX316). Then nothing is changed.
            DeviceUnavailable: This machine does not have the device.
            UnsupportedModel: An operator of a file cannot be written again.
            NotTraceable: A step is being recorded as a graph.
        """
        wanted = None if dtype is None else dtype_of(dtype)
        if wanted is not None and dtypes.onnx_code(wanted) not in WIDE:
            what = f"dtype must be float16, bfloat16, float32 or float64, got {dtypes.onnx_name(wanted)}"
            raise InvalidInput(what, code="SX388")
        if trace.current() is not None:
            raise NotTraceable("a model must not be changed by `to` while its step is recorded as a graph")
        if self._layers and not self.get_states():
            what = f"{type(self).__name__} must have its parameters before they are changed"
            raise InvalidInput(what, code="SX388", hint="compile the model first")
        for change in self._moved(wanted, None if device is None else resolve(device), set()):
            change()
        outer: Any = self
        while outer is not None:  # the steps of a model that this one is in contain its parameters
            for model in outer._models() if isinstance(outer, Model) else ():
                model._steps.clear()
                model.not_traceable, model._tape_first = "", True
            outer = outer.__dict__["_parent"]
        return self

    # --- loops over data

    def fit(
        self,
        *data: Any,
        epochs: int = 1,
        batch_size: int | None = None,
        seed: int = 0,
        validation: Any = None,
        metrics: Mapping[str, Callable[[Any, Any], float]] | None = None,
        patience: int | None = None,
        callbacks: Sequence[Callback | Callable[[History], Any]] = (),
        verbose: bool = False,
        target: str | None = None,
    ) -> History:
        """Train the model: call its `train_one_batch` for the batches of several epochs.

        It keeps a copy of the parameters that train and of the running statistics, as they were up to 16 steps before: a loss
        that becomes NaN or infinite is then computed again, to name the node that made it (SX343).

        Afterwards the model is in the mode in which it was before. On Ctrl-C, the current step is completed, then
        KeyboardInterrupt is raised; `history` has the measurements so far. With `optimizer.accumulate_gradients(n)`, a step is n
        batches, at the end of an epoch those that remain.

        Args:
            *data: The arguments of `train_one_batch` for all samples: arrays with the samples along axis 0, whose order changes
                in each epoch, also as a dict by name, or a dataset of Hugging Face; or batches: an ArrayLoader, a DataLoader of
                PyTorch, or another iterable. A batch is a tuple of arrays or tensors, or a dict of them: those that are named
                as the arguments of `train_one_batch`, or as the inputs of the model, then the targets.
            epochs: The number of passes over the data; 1 for an iterator.
            batch_size: The number of samples in a batch of arrays or of a dataset; None for 32. The last batch of an epoch may be
                smaller.
            seed: The seed of the order of arrays and datasets.
            validation: A tuple of arrays, or another source of batches, for `evaluate` after each epoch.
            metrics: The metrics of `evaluate`.
            patience: The number of epochs without a lower validation loss after which the training ends, with the parameters
                and running statistics of the epoch with the lowest; None to run all epochs.
            callbacks: Objects whose `on_step` and `on_epoch` are called with a FitProgress, see Callback, or functions that are
                called with the history after each epoch; the training ends if one returns True.
            verbose: Whether a line is printed after each epoch.
            target: The name of the targets in dicts; None for the last argument of `train_one_batch`, or "labels", "label",
                "y", "target" or "targets".

        Returns:
            The history: `losses` of the steps, their means in `epochs`, and what `evaluate` returned in `validation`.

        Raises:
            InvalidInput: The data have no batch, differ in length or lack an argument, an argument is out of range, `patience`
                is used without `validation` (SX342), `train_one_batch` returns no loss (SX387), or the loss is NaN or infinite
                (SX343): its step has then updated the parameters, except for NaN with `check_nan` of the optimizer (SX328).
            NotImplementedError: The model does not define `train_one_batch`.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        positive("epochs", epochs)
        place = Position(seeded(seed))
        names = self._names(target)
        source = source_of(data, batch_size, names, seed, shuffle=True, epochs=epochs)
        held = None if validation is None else source_of((validation,), None, names, epochs=epochs)
        check_metrics(metrics)
        if patience is not None and held is None:
            raise InvalidInput("patience must be used with validation, whose loss it compares", code="SX342")
        measure = None if held is None else lambda: self.evaluate(held, metrics=metrics, target=target)
        stop = None if patience is None else EarlyStop(self, patience)
        each = length_of(source)
        micro = max([o._sums.steps for o in accumulating(self)], default=1)
        progress = FitProgress(self, place.history, epochs, steps_in_epoch=None if each is None else -(-each // micro))
        told = Callbacks([*callbacks, *([stop] if stop else [])] if isinstance(callbacks, Sequence) else callbacks, progress)
        self.history = place.history
        self._fitted(place, lambda: one_epoch(source, device_of(self), names), measure, told, epochs if verbose else None, stop)
        return place.history

    def _fitted(
        self,
        place: Position,
        batches: Callable[[], Any],
        measure: Callable[[], dict[str, float]] | None,
        told: Callbacks,
        printed: int | None,
        stop: EarlyStop | None,
    ) -> None:
        """Run the loop of `fit`."""
        interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with self._in_mode(True), stop_signals(*[signal.SIGINT] * interrupts) as received:
            try:
                loop(self, batches, place, epochs=told.progress.epochs, measure=measure,
                     reached=after_step(told, received, printed))  # fmt: skip
            except Ended:
                pass
            finally:
                if stop is not None:
                    stop.restore()

    def evaluate(
        self,
        *data: Any,
        batch_size: int | None = None,
        metrics: Mapping[str, Callable[[Any, Any], float]] | None = None,
        target: str | None = None,
    ) -> dict[str, float]:
        """Compute the loss, and metrics, in inference mode: the loss of `train_one_batch`, which updates nothing here.

        Args:
            *data: The arguments of `train_one_batch`, targets last, as for `fit`. An ArrayLoader is read in the order of its
                arrays with all samples; its state does not change.
            batch_size: The number of samples in a batch of arrays; None for 32.
            metrics: Functions of the outputs and the targets of all samples, both NumPy arrays, by name. None for "accuracy" if
                the targets are class numbers, and the outputs scores of shape (N, C). The output is that of
                `train_one_batch`, or the first one of `forward` if the step returns only the loss.
            target: As for `fit`.

        Returns:
            "loss", the mean over the batches, each with the weight `batch_weight` (by default its number of samples); and the
            value of each metric.

        Raises:
            InvalidInput: The data have no batch or differ in length, `metrics` are not functions or return more than a number
                (SX342), or `train_one_batch` returns no loss (SX387).
            NotImplementedError: The model does not define `train_one_batch`.
        """
        check_metrics(metrics)
        names = self._names(target)
        source = data[0] if len(data) == 1 and isinstance(data[0], TableBatches) else source_of(data, batch_size, names)
        with self._in_mode(False):
            return evaluate(self, source, self._input_count(), metrics, names)

    def predict(self, *data: Any, batch_size: int | None = None) -> Any:
        """Compute the outputs for all samples, in inference mode.

        Args:
            *data: The inputs of `forward` for all samples, as for `fit`. The batches of an ArrayLoader or a list may have targets
                too: only the inputs of `forward` without default values are read from them. An ArrayLoader is read in the order
                of its arrays with all samples; its state does not change.
            batch_size: The number of samples in a batch of arrays; None for 32.

        Returns:
            The output, a NumPy array; a list of arrays if there are several.

        Raises:
            InvalidInput: The data have no batch or differ in length (SX342), or an output is not a Tensor with the samples along
                axis 0 (SX387).
        """
        names = self._names(only_inputs=True)
        source = source_of(data, batch_size, names)
        given = len(data) > 1 or source is not data[0]  # arrays, which are all inputs
        with self._in_mode(False):
            made = predict(self, source, None if given else self._input_count(), names)
        return made[0] if len(made) == 1 else made

    def batch_weight(self, *batch: Any) -> int:
        """Return the weight of a batch in means over batches, and of its gradients if several batches are accumulated.

        Override it for a loss that is a mean over something other than samples, such as tokens.

        Args:
            *batch: The arguments of `train_one_batch`; if several processes train, the targets of a part of them.

        Returns:
            The number of samples: the size of axis 0 of the last Tensor, the targets.
        """
        return rows_of(batch)

    def _names(self, target: str | None = None, only_inputs: bool = False) -> ArgumentNames:
        """The names by which batches that are dicts are read."""
        return ArgumentNames(_required(self.train_one_batch), self._input_names(), target, only_inputs)

    def _input_names(self) -> list[str] | None:
        """The names of the inputs of `forward`; None if it takes any number."""
        return _required(self.forward)

    def _input_count(self) -> int | None:
        """The number of inputs of `forward`; None if it takes any number."""
        names = self._input_names()
        return None if names is None else len(names)

    # --- parameters

    def freeze(self, pattern: str = "*") -> list[str]:
        """Exclude the parameters whose names match a pattern from training.

        Args:
            pattern: A name or a pattern of `fnmatch`, such as "conv1.*" or "*.bias".

        Returns:
            The names of the parameters.

        Raises:
            InvalidInput: No parameter matches (SX318).
        """
        return self._set_trains(pattern, False)

    def unfreeze(self, pattern: str = "*") -> list[str]:
        """Include the parameters whose names match a pattern in training again.

        Args:
            pattern: A name or a pattern of `fnmatch`, such as "conv1.*" or "*.bias".  A constant of an imported file is included
                by its name, or by a pattern that matches constants only: `unfreeze("*")` restores what trains by default.

        Returns:
            The names of the parameters.

        Raises:
            InvalidInput: No parameter matches (SX318).
        """
        return self._set_trains(pattern, True)

    def _set_trains(self, pattern: str, trains: bool) -> list[str]:
        params = self.get_params()
        chosen = [pattern] if pattern in params else [n for n in params if fnmatchcase(n, pattern)]
        if trains and pattern not in params:
            chosen = [n for n in chosen if (m := params[n]._member) is None or not m.is_fixed()] or chosen
        if not chosen:
            raise InvalidInput(
                f"no parameter matches {pattern!r}", code="SX318", hint=f"the model has {', '.join(params) or 'none yet'}"
            )
        for name in chosen:
            params[name].requires_grad = params[name].stores_grad = trains
            member = params[name]._member
            if trains and member is not None:
                member.request()
        return chosen

    # --- states in files

    def save_states(self, fpath: str | os.PathLike[str], aux_states: dict[str, Tensor] | None = None) -> None:
        """Write the states, and further tensors, to a file.

        The file is a zip archive of `tensor_dict.npz` and `states_attr.json`, as SINGA writes it. It is written whole or not at
        all.

        Args:
            fpath: The path of the file, which must not exist.
            aux_states: Further tensors by name, such as the states of an optimizer.

        Raises:
            AssertionError: The file exists already.
            InvalidInput: A value is not a numeric Tensor, or a state and a further tensor have the same name (SX319), or
                the file cannot be written (SX351).
        """
        path = Path(fpath)
        assert not os.path.exists(path), f"{path} exists already"
        if not os.path.isdir(path.parent):
            raise InvalidInput(f"{path} cannot be written: there is no folder {path.parent}", code="SX351")
        write_states(path, self.get_states(), aux_states or {})

    def load_states(self, fpath: str | os.PathLike[str]) -> dict[str, Tensor]:
        """Read the states of this model from a file of `save_states`, or of SINGA's own.

        Args:
            fpath: The path of the file.

        Returns:
            The further tensors in the file by name, on the CPU.

        Raises:
            InvalidInput: The file cannot be read (SX340), or its names or shapes differ from those of this model's states
                (SX341). Then nothing is changed.
            ResourceExhausted: The states exceed a limit. Then nothing is changed.
        """
        mine, others = read_states(fpath, {name: tuple(t.shape) for name, t in self.get_states().items()})
        self.set_states({n: Tensor(data=a) for n, a in mine.items()})
        return {n: Tensor(data=a, name=n) for n, a in others.items()}


def _check_precision(precision: str, graph: bool, needed: str) -> None:
    """Raise InvalidInput for a precision that does not exist, or that has no effect because steps run on the tape."""
    plan_options(precision=precision)
    if precision != "float32" and not graph:
        raise InvalidInput(f"precision must be 'float32' without {needed}, got {precision!r}", code="SX384",
                           hint="the tape computes each operator in float32")  # fmt: skip


def _accepts(method: Callable[..., Any], input: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a method can be called with these arguments."""
    try:
        inspect.signature(method).bind(*input, **kwargs)
    except TypeError:
        return False
    return True


def _required(method: Callable[..., Any]) -> list[str] | None:
    """The positional parameters of a method without default values; None if it takes any number."""
    kinds = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in kinds):
        return None
    return [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]


def _signature(method: Callable[..., Any]) -> str:
    """The name of a method with its parameters, without their types."""
    found = inspect.signature(method)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return f"{method.__name__}{found.replace(parameters=plain, return_annotation=inspect.Signature.empty)}"


def _counted(layer: Layer) -> str:
    """The numbers of parameters and of their elements."""
    found = layer.get_params().values()
    total = sum(math.prod(t.shape) for t in {id(t): t for t in found}.values())
    return f"{len(found)} parameter{'s' * (len(found) != 1)} ({total:,} elements)" if found else "no parameters yet"
