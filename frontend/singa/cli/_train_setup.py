"""The parts of `sonnx train` before its first step: whatever can be refused is refused here."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from singa_backend.errors import DeviceUnavailable, InvalidInput, UnsupportedModel

from .._autograd.loss_names import CLASSES, NEXT_TOKEN, PROBABILITIES
from ._common import err
from ._records import Recorder, Tally
from ._train_adapters import (
    check_adapter_output,
    lora_of,
    lora_settings,
    model_with_adapter,
    new_head,
    write_adapter,
    writes_adapter,
)
from ._train_data import Arrays, BatchFunction, FunctionName, columns_of, digest, read_data, sample_axis
from ._train_loss import TrainLoss
from ._train_options import TrainOptions

if TYPE_CHECKING:
    import numpy as np
    from onnx import GraphProto, ModelProto, TensorProto

    from singa_backend.collectives import Communicator
    from singa_backend.passes.head import ReplacedHead
    from singa_backend.proto.load import ModelSource
    from singa_backend.proto.values import Value

    from .._core.tensor import Tensor
    from .._onnx.model import SONNXModel
    from .._training.checkpoint import Checkpoint
    from .._training.fit import Position
    from ..device import Device
    from ..opt import DistOpt

SCHEDULES = ("constant", "cosine")

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")

target_option = click.option("--target", default="y", show_default=True, help="The name of the targets in the .npz.")
optimizer_option = click.option("--optimizer", default="sgd", show_default=True, type=click.Choice(OPTIMIZERS))
freeze_option = click.option("--freeze", multiple=True, metavar="PATTERN", help="Do not train parameters whose names match.")

DISTRIBUTED = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


@dataclass
class TrainSetup:
    """A training that is ready for its first step.

    Attributes:
        model: The model, with the optimizer in its training step.
        compute: The loss.
        empty: The file of the model without the data of its trained tensors.
        folder: The folder of its external data; None if it has none.
        data: The inputs and the targets, or batches of them.
        held_out: The inputs and the targets of the validation; None without one.
        steps: The number of steps; None if that of an epoch is not known.
        at: The point at which the training starts.
        kept: The checkpoint; None without one.
        group: The ranks that train together; None for one process.
        records: What is kept of the steps.
        head: The layer that was replaced; None without --head.
    """

    model: SONNXModel
    compute: TrainLoss
    empty: ModelProto
    folder: Path | None
    data: Arrays | BatchFunction
    held_out: Arrays | None
    steps: int | None
    at: Position
    kept: Checkpoint | None
    group: Communicator | None
    records: Recorder
    head: ReplacedHead | None

    @property
    def first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.group is None or self.group.rank == 0


def place_of(chosen: TrainOptions, group: Communicator | None, starts: bool) -> Device:
    """The device of a process.

    Args:
        chosen: The options.
        group: The ranks that train together.
        starts: Whether this process starts the workers: it computes nothing, and leaves the GPUs to them.

    Raises:
        DeviceUnavailable: There is no such device, or none for each worker.
    """
    from ..device import get_num_gpus, resolve

    each = chosen.device.upper() == "CUDA" and group is not None
    if not starts:
        return resolve(f"{chosen.device}:{group.local_rank}" if each and group else chosen.device)
    if not each:
        resolve(chosen.device)
    elif group is not None and not 0 < group.size <= get_num_gpus():
        resolve(chosen.device)  # why there is none
        raise DeviceUnavailable(f"--workers must be at most the number of GPUs, {get_num_gpus()}, got {group.size}")
    return resolve("CPU")


def prepared(chosen: TrainOptions, group: Communicator | None, starts: bool = False) -> TrainSetup:
    """Read the model, the data and the checkpoint, and check that they fit together.

    Args:
        chosen: The options.
        group: The ranks that train together; None for one process.
        starts: Whether this process starts the workers, and trains nothing.

    Raises:
        SonnxError: The model, the data, an option or the checkpoint is refused.
        click.UsageError: An option does not fit the data or the checkpoint.
    """
    import numpy as np

    from singa_backend.proto.load import open_light

    from .. import opt
    from .._training.fit import Position

    place = place_of(chosen, group, starts)
    rule = rule_of(chosen.optimizer, lr=chosen.lr, momentum=chosen.momentum, weight_decay=decay(chosen))
    rule.clip_gradients(norm=chosen.clip_norm)
    rule.accumulate_gradients(chosen.accumulate)
    if group:
        rule = opt.DistOpt(rule, communicator=group, sync_batch_norm=chosen.sync_batch_norm)
    update = exchange(rule, chosen.dist_option, chosen.sparsity) if group else rule
    place.SetRandSeed(chosen.seed)
    source, head = _source(chosen)
    tally, lora = Tally(), lora_of(chosen)

    def counted(scores: Tensor, targets: Tensor) -> None:
        if getattr(rule, "_has_rows", True):  # a worker without a sample computes one of another worker
            tally.add(scores, targets)

    compute = TrainLoss(chosen.loss, chosen.ignore_index, None if chosen.class_axis is None else int(chosen.class_axis))
    tuned = tuned_model(source, place, compute, update, chosen.freeze, chosen.train_constants, lora, counted)
    place.SetRandSeed(chosen.seed + (group.rank if group else 0))  # after the adapters, which all ranks begin with
    for name in head.parameters if head else ():
        tuned.unfreeze(name)
    _check_roundings(tuned)
    tuned.set_optimizer(rule)  # from whose counter the model knows that a training is resumed, and records the first step too
    empty, folder = _without_weights(source, tuned) if lora is None else open_light(chosen.model)
    if lora is not None:
        check_adapter_output(chosen, tuned)
    data, held_out, steps = _data(chosen, tuned, compute)
    if steps is not None and chosen.warmup >= steps:
        raise click.UsageError(f"--warmup must be below the number of steps, {steps}, got {chosen.warmup}")
    if steps is None and chosen.schedule == "cosine":
        raise click.UsageError(f"--schedule cosine needs the number of steps: the batches of {chosen.data} have no len()")
    falling = opt.CosineDecay(chosen.lr, (steps or 0) - chosen.warmup) if chosen.schedule == "cosine" else chosen.lr
    rule.lr = opt.WarmUp(falling, chosen.warmup) if chosen.warmup else falling
    tuned.train()
    tuned.graph(not chosen.no_graph, precision=chosen.precision)
    first = group is None or group.rank == 0
    tally.classes = compute.counts_classes(_targets(data))
    if chosen.records.keep_best == "accuracy" and not compute.counts_classes(_targets(held_out or data)):
        raise click.UsageError(f"--keep-best accuracy needs class numbers as targets, and --loss {CLASSES} or {PROBABILITIES}")
    records = Recorder(chosen.records, tally, tuned, rule, first)
    at = Position(np.random.default_rng(chosen.seed))
    made = TrainSetup(tuned, compute, empty, folder, data, held_out, steps, at, None, group, records, head)
    if chosen.checkpoint:
        made.kept = _checkpoint(chosen, made, rule, place)
    if made.kept and chosen.resume:
        _resume(chosen, made, made.kept, quiet=starts)
    records.check()
    if first and not starts:
        _warn(chosen, made)
    return made


def _source(chosen: TrainOptions) -> tuple[ModelSource, ReplacedHead | None]:
    """The model to train: the file, or its content with another last layer, or with the weights of branches as initializers.

    An adapter adds the layer itself.
    """
    from singa_backend.passes.branches import has_branches, lift_weights
    from singa_backend.passes.head import replace_head
    from singa_backend.proto.load import embed, load_model, open_light

    if chosen.head is None:
        light, _ = open_light(chosen.model)
        if chosen.lora is not None or not has_branches(light):
            return str(chosen.model), None
        proto, folder = load_model(chosen.model)
        embed(proto, folder)
        return (proto if lift_weights(proto) else str(chosen.model)), None
    if chosen.lora is not None:
        return str(chosen.model), new_head(chosen)
    proto, folder = load_model(chosen.model)
    embed(proto, folder)
    if has_branches(proto):
        lift_weights(proto)
    return proto, replace_head(proto, chosen.head, seed=chosen.seed, at=chosen.at)


def _data(chosen: TrainOptions, model: SONNXModel, loss: TrainLoss) -> tuple[Arrays | BatchFunction, Arrays | None, int | None]:
    """The data, those of the validation, and the number of steps, if it is known; all of them fit the model."""
    from .._training.fit import batches
    from .._training.loader import ArrayLoader

    def read(option: str, source: Path | FunctionName) -> Arrays | BatchFunction:
        found = read_data(source, columns_of(option, model, chosen.target, chosen.loss == NEXT_TOKEN))
        if isinstance(found, tuple):
            ArrayLoader(*found[0], found[1], batch_size=chosen.batch_size)  # as many samples in all
        loss.check(model.imported.graph.declared_outputs[0].shape, _targets(found), option)
        return found

    data = read("--data", chosen.data)
    held = read("--validation", chosen.validation) if chosen.validation else None
    held_out = held.joined() if isinstance(held, BatchFunction) else held
    if isinstance(data, tuple):
        return data, held_out, batches(len(data[1]), chosen.batch_size * chosen.accumulate, chosen.epochs)
    data.together = chosen.accumulate
    if click.get_current_context().get_parameter_source("batch_size") is not ParameterSource.DEFAULT:
        raise click.UsageError(f"--batch-size must be left out: {chosen.data} returns batches")
    return data, held_out, None if data.per_epoch is None else batches(data.per_epoch, chosen.accumulate, chosen.epochs)


def _check_roundings(model: SONNXModel) -> None:
    """Refuse to train parameters whose values are quantized on the way to the output: their gradients are 0, or lack a part."""
    from singa_backend.inspection.trainable import rounded

    found = rounded(model.imported.graph, [n for n, p in model.imported.parameters.items() if p.requires_grad])
    if not found:
        return
    names = list(found)
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    what = f"parameters must not be quantized on the way to the output, through which gradients do not pass, got {listed}: "
    hint = (
        "train the float model and quantize it (sonnx quantize), or train it with quantization.FakeQuantize; --freeze leaves them"
    )
    raise InvalidInput(f"{what}{found[names[0]]}", code="SX399", hint=hint)


def _targets(data: Arrays | BatchFunction) -> np.ndarray:
    """The targets, or those of the first batch."""
    return data[1] if isinstance(data, tuple) else data.first[-1]


def _warn(chosen: TrainOptions, made: TrainSetup) -> None:
    """Tell what was replaced, and of a softmax before a softmax."""
    from singa_backend.passes.head import SIGMOIDS, last_activation

    head, activation = made.head, last_activation(made.empty)
    if head and not chosen.as_json:
        names = ", ".join(head.parameters)
        place = f"at {head.at!r}" if head.at else f"in place of {head.before}"
        what = f"new last layer: {head.node}, {head.outputs} outputs {place}, from {head.features} values"
        err.print(f"{what} ({names})", markup=False, highlight=False, soft_wrap=True)
    if chosen.loss == CLASSES and activation in ("Softmax", *SIGMOIDS):
        what = f"the output of the model is computed by {activation}, and --loss {chosen.loss} applies a softmax to it once more"
        other = f"{PROBABILITIES} takes it as it is" if activation == "Softmax" else (
            "binary_cross_entropy takes it as it is, with targets of the shape of the output"
        )  # fmt: skip
        err.print(f"{what}: it learns slowly; --loss {other}",
                  markup=False, highlight=False, soft_wrap=True, style="yellow")  # fmt: skip


def tuned_model(
    source: ModelSource,
    place: Device,
    compute: TrainLoss,
    update: Any,
    freeze: Sequence[str],
    train_constants: bool = False,
    lora: Mapping[str, Any] | None = None,
    counted: Callable[[Tensor, Tensor], None] | None = None,
) -> SONNXModel:
    """The model of a file with a training step.

    Args:
        source: The file, or the model.
        place: The device.
        compute: The loss.
        update: What the step calls with the loss: an optimizer.
        freeze: Patterns of the names of parameters that do not train.
        train_constants: Whether constants train.
        lora: The arguments of `sonnx.lora`; None to train the parameters themselves.
        counted: Called with the output and the targets after each batch.
    """
    from .._onnx.lora import lora as with_adapter
    from .._onnx.model import SONNXModel

    class Tuned(SONNXModel):
        def train_one_batch(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
            inputs = self.imported.graph.declared_inputs
            y = self.forward(*(_of_batch(x, v, inputs) for x, v in zip(batch[:-1], inputs, strict=True)))[0]
            value = compute(y, batch[-1])
            update(value)
            return y, value

        def batch_weight(self, *batch: Tensor) -> int:
            t = batch[-1]
            with t.device.backend.active():
                return compute.weight(t.data)

        def __call__(self, *batch: Any, **kwargs: Any) -> Any:
            found = super().__call__(*batch, **kwargs)
            if counted is not None:
                counted(found[0], batch[-1])
            return found

    made = Tuned(source, place, train_constants=train_constants)
    if lora is not None:
        with_adapter(made, **lora)
    for pattern in freeze:
        made.freeze(pattern)
    return made


def _of_batch(x: Tensor, declared: Value, inputs: Sequence[Value]) -> Tensor:
    """An input as the model takes it, of a batch whose samples are along axis 0: see `DataColumns.spread`."""
    from .._core.tensor import op

    axis = sample_axis(declared, inputs)
    if axis is None:
        return op.Gather(x, 0) if len(x.shape) == len(declared.shape or ()) + 1 else x
    return op.Transpose(x, perm=[*range(1, axis + 1), 0, *range(axis + 1, len(x.shape))]) if axis else x


def write_trained(chosen: TrainOptions, made: TrainSetup) -> None:
    """Write the trained model, or its adapter."""
    from singa_backend.proto.save import save

    assert chosen.target_file is not None
    if chosen.lora is None:
        save(updated(made.empty, made.model), chosen.target_file, folder=made.folder, check=False)
    elif writes_adapter(chosen):
        write_adapter(made.model.adapter(), chosen.target_file)
    else:
        proto, folder = model_with_adapter(made.model)
        save(proto, chosen.target_file, folder=folder, check=False)


def rule_of(optimizer: str, *, lr: float = 0.01, momentum: float = 0.9, weight_decay: float | None = None) -> Any:
    """An optimizer by its name, one of OPTIMIZERS.

    Args:
        optimizer: The name.
        lr: The learning rate.
        momentum: Of sgd.
        weight_decay: None for the default of the optimizer.
    """
    from .. import opt

    decayed = _decay(optimizer, weight_decay)
    rules: dict[str, Callable[[], Any]] = {
        "sgd": lambda: opt.SGD(lr=lr, momentum=momentum, weight_decay=decayed),
        "adam": lambda: opt.Adam(lr=lr, weight_decay=decayed),
        "adamw": lambda: opt.AdamW(lr=lr, weight_decay=decayed),
        "rmsprop": lambda: opt.RMSProp(lr=lr, weight_decay=decayed),
        "adagrad": lambda: opt.AdaGrad(lr=lr, weight_decay=decayed),
    }
    return rules[optimizer]()


def _decay(optimizer: str, weight_decay: float | None) -> float:
    return (0.01 if optimizer == "adamw" else 0.0) if weight_decay is None else weight_decay


def decay(chosen: TrainOptions) -> float:
    """The weight decay."""
    return _decay(chosen.optimizer, chosen.weight_decay)


def _checkpoint(chosen: TrainOptions, made: TrainSetup, rule: Any, place: Device) -> Checkpoint:
    """The checkpoint, with the options that a later command must or may have."""
    from .._training.checkpoint import Checkpoint, TrainedStates

    assert chosen.checkpoint is not None
    optimizer, group = chosen.optimizer, made.group
    constants = [place.backend.get(t.data) for t in made.model.imported._constants.values()]
    settings = {
        "MODEL": digest([_structure(made.empty), *constants])
        + ("" if chosen.lora is None else f" {made.model._require_adapted().known.base}"),
        "--data": _identity(made.data),
        "--validation": _identity(made.held_out) if made.held_out else "none",
        "--loss": chosen.loss,
        **({"--ignore-index": str(ignored)} if (ignored := made.compute.ignore_index) is not None else {}),
        **({"--class-axis": chosen.class_axis} if chosen.class_axis is not None else {}),
        "--optimizer": f"{optimizer} without momentum" if optimizer == "sgd" and not chosen.momentum else optimizer,
        "--batch-size": str(chosen.batch_size) if isinstance(made.data, tuple) else "that of --data",
        "--freeze": ", ".join(sorted(chosen.freeze)) or "none",
        "--seed": str(chosen.seed),
        **lora_settings(chosen),
        **({"--train-constants": "yes" if chosen.train_constants else "no"} if made.model.imported.constants() else {}),
        **({"--schedule": chosen.schedule} if chosen.schedule != SCHEDULES[0] else {}),
        **({"--warmup": str(chosen.warmup)} if chosen.warmup else {}),
        **({"--clip-norm": repr(chosen.clip_norm)} if chosen.clip_norm is not None else {}),
        **({"--accumulate": str(chosen.accumulate)} if chosen.accumulate > 1 else {}),
        **({"--sync-batch-norm": "yes"} if chosen.sync_batch_norm and group else {}),
        **({"--head": str(chosen.head)} if chosen.head is not None else {}),
        **({"--at": chosen.at} if chosen.at is not None else {}),
        **({"--keep-best": chosen.records.keep_best} if chosen.records.keep_best else {}),
        **({"--precision": chosen.precision} if chosen.precision != "float32" else {}),
        **({"--workers": str(group.size), "--dist-option": _exchanged(chosen.dist_option, chosen.sparsity)} if group else {}),
    }
    rates = {"--lr": repr(chosen.lr), "--momentum": repr(chosen.momentum), "--weight-decay": repr(decay(chosen))}
    if chosen.schedule != SCHEDULES[0]:
        rates["--epochs"] = str(chosen.epochs)
    states = made.model if chosen.lora is None else TrainedStates(made.model)
    kept = Checkpoint(chosen.checkpoint, states, rule, place, settings, rates, group, chosen.records.keep)
    kept.parts = made.records.parts() | ({"data": made.data} if isinstance(made.data, BatchFunction) else {})
    return kept


def _identity(data: Arrays | BatchFunction) -> str:
    """The digest of arrays; the name of the function of batches, whose digests are compared while they are read."""
    return digest([*data[0], data[1]]) if isinstance(data, tuple) else f"batches of {data.named}"


def _resume(chosen: TrainOptions, made: TrainSetup, kept: Checkpoint, quiet: bool) -> None:
    """Set the states to those of the checkpoint."""
    count = len(made.data[1]) if isinstance(made.data, tuple) else None
    at = made.at = kept.read(count, 1 if count is None else chosen.batch_size * chosen.accumulate)
    reached = f"epoch {at.epoch + 1}, step {len(at.history.losses)}" if at.batch else f"the end of epoch {at.epoch}"
    if (at.epoch, at.batch) > (chosen.epochs, 0):
        raise click.UsageError(f"--epochs {chosen.epochs} is before the point of the checkpoint: {reached}")
    changes = "".join(f"; {n} was {was}, is {kept.rates[n]}" for n, was in kept.changed.items())
    if kept.other_threads is not None:
        changes += f"; threads were {kept.other_threads}, are {kept.threads}: bits differ from those of an unbroken training"
    if made.first and not quiet:
        err.print(f"resumed {kept.path} at {reached}{changes}", markup=False, highlight=False, soft_wrap=True)


def exchange(rule: DistOpt, dist_option: str, sparsity: float) -> Callable[[Any], None]:
    """The training call of a `--dist-option`; raises InvalidInput if its argument is out of range."""
    from .._training.distributed import share_of

    if dist_option.startswith("sparse"):
        share_of(sparsity, dist_option == "sparseTopK")
    calls: dict[str, Callable[[Any], None]] = {
        "plain": rule.backward_and_update,
        "half": rule.backward_and_update_half,
        "partialUpdate": rule.backward_and_partial_update,
        "sparseTopK": partial(rule.backward_and_sparse_update, spars=sparsity, topK=True),
        "sparseThreshold": partial(rule.backward_and_sparse_update, spars=sparsity),
    }
    return calls[dist_option]


def _exchanged(dist_option: str, sparsity: float) -> str:
    """A `--dist-option` with its argument."""
    return f"{dist_option} {sparsity!r}" if dist_option.startswith("sparse") else dist_option


def _without_weights(source: ModelSource, model: SONNXModel) -> tuple[ModelProto, Path | None]:
    """The model without the data of its trained tensors, and its folder; raises UnsupportedModel if it has no place for some."""
    from onnx import ModelProto, TensorProto

    from singa_backend.proto.load import load_model

    proto, folder = load_model(source)
    if proto is source:
        proto = ModelProto()
        proto.CopyFrom(source)
    names = set(model.get_states())
    for sparse in [t for t in proto.graph.sparse_initializer if t.values.name in names]:
        proto.graph.initializer.add(name=sparse.values.name)
        proto.graph.sparse_initializer.remove(sparse)
    found = set()
    for name, tensor in _stored(proto.graph, names):
        found.add(name)
        tensor.CopyFrom(TensorProto(name=tensor.name))
    if names - found:
        raise UnsupportedModel(f"the trained values of {', '.join(sorted(names - found)[:5])} cannot be written into the model")
    return proto, folder


def _stored(graph: GraphProto, names: Container[str]) -> Iterator[tuple[str, TensorProto]]:
    """The tensors of these names: initializers, and Constant nodes under the name of their output."""
    for tensor in graph.initializer:
        if tensor.name in names:
            yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and node.output[0] in names:
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")


def updated(proto: ModelProto, model: SONNXModel) -> ModelProto:
    """Write the current values of the parameters and running statistics into a model of `_without_weights`, and return it."""
    import numpy as np
    from onnx import numpy_helper

    states = model.get_states()
    for name, tensor in _stored(proto.graph, states):
        value = states[name]
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value.device.backend.get(value.data), order="C"), tensor.name))
    return proto


def _structure(proto: ModelProto) -> np.ndarray:
    """The bytes of a model without the data of its initializers."""
    import numpy as np
    from onnx import ModelProto, TensorProto

    bare = ModelProto()
    bare.CopyFrom(proto)
    for tensor in bare.graph.initializer:
        tensor.CopyFrom(TensorProto(name=tensor.name))
    return np.frombuffer(bare.SerializeToString(deterministic=True), np.uint8)
