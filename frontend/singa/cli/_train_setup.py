"""The parts of `sonnx train` before its first step: whatever can be refused is refused here."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

from singa_backend.adapters.create import BIASES
from singa_backend.collectives import Communicator
from singa_backend.errors import DeviceUnavailable, InvalidInput, UnsupportedModel
from singa_backend.io.archives import open_arrays
from singa_backend.proto.load import load_model, open_light
from singa_backend.proto.save import save
from singa_backend.quantization.options import FORMS

from ._common import FiniteNumber, err

if TYPE_CHECKING:
    from .._core.tensor import Tensor
    from .._onnx.model import SONNXModel
    from .._training.checkpoint import Checkpoint
    from .._training.fit import Position
    from ..device import Device
    from ..opt import DistOpt

LOSSES = ("softmax_cross_entropy", "mse_loss", "cross_entropy", "binary_cross_entropy")

SCHEDULES = ("constant", "cosine")

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")

target_option = click.option("--target", default="y", show_default=True, help="The name of the targets in the .npz.")
loss_option = click.option("--loss", default=LOSSES[0], show_default=True, type=click.Choice(LOSSES))
optimizer_option = click.option("--optimizer", default="sgd", show_default=True, type=click.Choice(OPTIMIZERS))
LORA = ("lora_target", "lora_alpha", "lora_dropout", "lora_bias", "rslora", "qlora")
"""The options that need --lora."""

_POSITIVE = FiniteNumber(min=0, min_open=True)
_SHARE = FiniteNumber(min=0, max=1, max_open=True)
_LORA_OPTIONS = (
    click.option("--lora", type=click.IntRange(1), metavar="RANK", help="Train low-rank adapters; the model stays as it is."),
    click.option(
        "--lora-target",
        multiple=True,
        metavar="PATTERN",
        show_default="all products but the last layer's",
        help="Adapt the weights whose names match, or the names of nodes that use them.",
    ),
    click.option("--lora-alpha", type=_POSITIVE, show_default="RANK", help="The adapters are scaled by ALPHA / RANK."),
    click.option("--lora-dropout", default=0.0, show_default=True, type=_SHARE, help="Dropout before the adapters."),
    click.option("--lora-bias", default=BIASES[0], show_default=True, type=click.Choice(BIASES), help="Biases that train too."),
    click.option("--rslora", is_flag=True, help="Scale the adapters by ALPHA / sqrt(RANK)."),
    click.option(
        "--qlora",
        is_flag=False,
        flag_value="int4",
        type=click.Choice(list(FORMS)),
        help="Quantize the weights of MODEL first, as sonnx quantize --weight-only does (without a value: int4).",
    ),
)


def lora_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of adapters to a command."""
    for option in reversed(_LORA_OPTIONS):
        command = option(command)
    return command


freeze_option = click.option("--freeze", multiple=True, metavar="PATTERN", help="Do not train parameters whose names match.")

DISTRIBUTED = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


@dataclass(frozen=True)
class TrainOptions:
    """The arguments of the command, by the names of its options."""

    model: Path
    data: Path
    validation: Path | None
    target: str
    loss: str
    optimizer: str
    lr: float
    momentum: float
    weight_decay: float | None
    schedule: str
    warmup: int
    clip_norm: float | None
    epochs: int
    batch_size: int
    accumulate: int
    freeze: tuple[str, ...]
    train_constants: bool
    lora: int | None
    lora_target: tuple[str, ...]
    lora_alpha: float | None
    lora_dropout: float
    lora_bias: str
    rslora: bool
    qlora: str | None
    seed: int
    target_file: Path | None
    checkpoint: Path | None
    every: int | None
    resume: bool
    plot: Path | None
    workers: int
    dist_option: str
    sparsity: float
    sync_batch_norm: bool
    timeout: float
    no_graph: bool
    precision: str
    device: str
    as_json: bool


@dataclass
class TrainSetup:
    """A training that is ready for its first step.

    Attributes:
        model: The model, with the optimizer in its training step.
        compute: The loss.
        empty: The file of the model without the data of its trained tensors.
        folder: The folder of its external data; None if it has none.
        data: The inputs and the targets.
        held_out: Those of the validation; None without one.
        steps: The number of steps.
        at: The point at which the training starts.
        kept: The checkpoint; None without one.
        group: The ranks that train together; None for one process.
    """

    model: SONNXModel
    compute: Callable[..., Any]
    empty: ModelProto
    folder: Path | None
    data: tuple[list[np.ndarray], np.ndarray]
    held_out: tuple[list[np.ndarray], np.ndarray] | None
    steps: int
    at: Position
    kept: Checkpoint | None
    group: Communicator | None

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
    from .. import opt
    from .._training.fit import Position, batches
    from .._training.loader import ArrayLoader

    place = place_of(chosen, group, starts)
    rule = rule_of(chosen.optimizer, lr=chosen.lr, momentum=chosen.momentum, weight_decay=decay(chosen))
    rule.clip_gradients(norm=chosen.clip_norm)
    rule.accumulate_gradients(chosen.accumulate)
    if group:
        rule = opt.DistOpt(rule, communicator=group, sync_batch_norm=chosen.sync_batch_norm)
    update = exchange(rule, chosen.dist_option, chosen.sparsity) if group else rule
    place.SetRandSeed(chosen.seed)
    tuned, compute = tuned_model(chosen.model, place, chosen.loss, update, chosen.freeze, chosen.train_constants, lora_of(chosen))
    place.SetRandSeed(chosen.seed + (group.rank if group else 0))  # after the adapters, which all ranks begin with
    tuned.set_optimizer(rule)  # from whose counter the model knows that a training is resumed, and records the first step too
    empty, folder = _without_weights(chosen.model, tuned) if chosen.lora is None else open_light(chosen.model)
    if chosen.lora is not None:
        _check_output(chosen, tuned)
    xs, y = _arrays(chosen.data, tuned, chosen.target)
    held_out = _arrays(chosen.validation, tuned, chosen.target) if chosen.validation else None
    for arrays in ((xs, y), held_out) if held_out else ((xs, y),):
        ArrayLoader(*arrays[0], arrays[1], batch_size=chosen.batch_size)  # as many samples in all
    steps = batches(len(y), chosen.batch_size * chosen.accumulate, chosen.epochs)
    if chosen.warmup >= steps:
        raise click.UsageError(f"--warmup must be below the number of steps, {steps}, got {chosen.warmup}")
    falling = opt.CosineDecay(chosen.lr, steps - chosen.warmup) if chosen.schedule == "cosine" else chosen.lr
    rule.lr = opt.WarmUp(falling, chosen.warmup) if chosen.warmup else falling
    tuned.train()
    tuned.graph(not chosen.no_graph, precision=chosen.precision)
    made = TrainSetup(
        tuned, compute, empty, folder, (xs, y), held_out, steps, Position(np.random.default_rng(chosen.seed)), None, group
    )
    if chosen.checkpoint:
        made.kept = _checkpoint(chosen, made, rule, place)
    if made.kept and chosen.resume:
        _resume(chosen, made, made.kept, quiet=starts)
    return made


def tuned_model(
    path: Path,
    place: Device,
    loss: str,
    update: Any,
    freeze: Sequence[str],
    train_constants: bool = False,
    lora: Mapping[str, Any] | None = None,
) -> tuple[SONNXModel, Callable[..., Any]]:
    """The model of a file with a training step, and its loss.

    Args:
        path: The file.
        place: The device.
        loss: The name of the loss, one of LOSSES.
        update: What the step calls with the loss: an optimizer.
        freeze: Patterns of the names of parameters that do not train.
        train_constants: Whether constants train.
        lora: The arguments of `sonnx.lora`; None to train the parameters themselves.
    """
    from .. import autograd
    from .._onnx.lora import lora as with_adapter
    from .._onnx.model import SONNXModel

    compute: Callable[..., Any] = getattr(autograd, loss)

    class Tuned(SONNXModel):
        def train_one_batch(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
            y = self.forward(*batch[:-1])[0]
            value = compute(y, batch[-1])
            update(value)
            return y, value

    made = Tuned(str(path), place, train_constants=train_constants)
    if lora is not None:
        with_adapter(made, **lora)
    for pattern in freeze:
        made.freeze(pattern)
    return made, compute


def lora_of(chosen: TrainOptions) -> dict[str, Any] | None:
    """The arguments of `sonnx.lora`; None without --lora."""
    if chosen.lora is None:
        return None
    return {
        "rank": chosen.lora, "target": chosen.lora_target, "alpha": chosen.lora_alpha, "dropout": chosen.lora_dropout,
        "bias": chosen.lora_bias, "rslora": chosen.rslora,
    }  # fmt: skip


def _lora_settings(chosen: TrainOptions) -> dict[str, str]:
    """The options of adapters that differ from their defaults."""
    found = {name: getattr(chosen, name) for name in ("lora", *LORA)}
    return {
        f"--{name.replace('_', '-')}": ", ".join(value) if isinstance(value, tuple) else str(value)
        for name, value in found.items()
        if value and value != BIASES[0]
    }


def writes_adapter(chosen: TrainOptions) -> bool:
    """Whether -o is the file of an adapter."""
    return chosen.target_file is not None and chosen.target_file.suffix == ".safetensors"


def _check_output(chosen: TrainOptions, tuned: SONNXModel) -> None:
    """Raise before the training what writing its result would raise."""
    if writes_adapter(chosen):
        tuned.adapter().to_bytes()
    elif chosen.target_file is not None:
        _with_adapter(tuned)


def _with_adapter(tuned: SONNXModel) -> tuple[ModelProto, Path | None]:
    """The model with the adapter in its weights, or next to them if they are quantized; and the folder of external data."""
    try:
        return tuned._merged()
    except InvalidInput as error:
        if error.code != "SX974":
            raise
    return tuned.unmerged(), None


@contextmanager
def with_base(chosen: TrainOptions) -> Iterator[TrainOptions]:
    """The options with the model that is trained: with --qlora, MODEL with quantized weights in a temporary file."""
    if chosen.qlora is None:
        yield chosen
        return
    from singa_backend.quantization import quantize_weights

    made = quantize_weights(chosen.model, chosen.qlora)
    with tempfile.TemporaryDirectory(prefix="sonnx-") as folder:
        path = Path(folder, chosen.model.name)
        save(made, path, check=False)
        del made
        yield replace(chosen, model=path)


def write_trained(chosen: TrainOptions, made: TrainSetup) -> None:
    """Write the trained model, or its adapter."""
    assert chosen.target_file is not None
    if chosen.lora is None:
        save(updated(made.empty, made.model), chosen.target_file, folder=made.folder, check=False)
    elif writes_adapter(chosen):
        made.model.adapter().save(chosen.target_file)
    else:
        proto, folder = _with_adapter(made.model)
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
        "MODEL": digest([_structure(made.empty), *constants]) + ("" if chosen.lora is None else f" {made.model.adapter().base}"),
        "--data": digest([*made.data[0], made.data[1]]),
        "--validation": digest([*made.held_out[0], made.held_out[1]]) if made.held_out else "none",
        "--loss": chosen.loss,
        "--optimizer": f"{optimizer} without momentum" if optimizer == "sgd" and not chosen.momentum else optimizer,
        "--batch-size": str(chosen.batch_size),
        "--freeze": ", ".join(sorted(chosen.freeze)) or "none",
        "--seed": str(chosen.seed),
        **_lora_settings(chosen),
        **({"--qlora": chosen.qlora} if chosen.qlora else {}),
        **({"--train-constants": "yes" if chosen.train_constants else "no"} if made.model.imported.constants() else {}),
        **({"--schedule": chosen.schedule} if chosen.schedule != SCHEDULES[0] else {}),
        **({"--warmup": str(chosen.warmup)} if chosen.warmup else {}),
        **({"--clip-norm": repr(chosen.clip_norm)} if chosen.clip_norm is not None else {}),
        **({"--accumulate": str(chosen.accumulate)} if chosen.accumulate > 1 else {}),
        **({"--sync-batch-norm": "yes"} if chosen.sync_batch_norm and group else {}),
        **({"--precision": chosen.precision} if chosen.precision != "float32" else {}),
        **({"--workers": str(group.size), "--dist-option": _exchanged(chosen.dist_option, chosen.sparsity)} if group else {}),
    }
    rates = {"--lr": repr(chosen.lr), "--momentum": repr(chosen.momentum), "--weight-decay": repr(decay(chosen))}
    if chosen.schedule != SCHEDULES[0]:
        rates["--epochs"] = str(chosen.epochs)
    states = made.model if chosen.lora is None else TrainedStates(made.model)
    return Checkpoint(chosen.checkpoint, states, rule, place, settings, rates, group)


def _resume(chosen: TrainOptions, made: TrainSetup, kept: Checkpoint, quiet: bool) -> None:
    """Set the states to those of the checkpoint."""
    at = made.at = kept.read(len(made.data[1]), chosen.batch_size * chosen.accumulate)
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


def _arrays(path: Path, model: SONNXModel, target: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Read the inputs, in the model's order, and the targets from an .npz file."""
    with open_arrays(path, "SX307") as stored:
        inputs = model.imported.graph.inputs
        names = [v.name for v in inputs]
        if len(names) == 1 and names[0] not in stored.names and "x" in stored.names:
            names = ["x"]
        lacking = [n for n in (*names, target) if n not in stored.names]
        if lacking:
            what = f"{path} must contain {', '.join(map(repr, lacking))}, got {', '.join(map(repr, stored.names)) or 'no arrays'}"
            raise InvalidInput(what, code="SX331", hint="save the arrays by name: np.savez(path, x=..., y=...)")
        headers = {n: stored.header(n) for n in (*names, target)}
        for n, (shape, dtype) in headers.items():
            if dtype.kind in "SU" or not shape:
                raise InvalidInput(
                    f"{path}: {n!r} must be numbers with the samples along axis 0, got {dtype}{list(shape)}", code="SX331"
                )
        arrays = {n: stored[n] for n in headers}
    found = [
        a if v.dtype is None or a.dtype == v.dtype else a.astype(v.dtype)
        for n, v in zip(names, inputs, strict=True)
        for a in [arrays[n]]
    ]
    return found, arrays[target]


def _without_weights(path: Path, model: SONNXModel) -> tuple[ModelProto, Path | None]:
    """The model without the data of its trained tensors, and its folder; raises UnsupportedModel if it has no place for some."""
    proto, folder = load_model(path)
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
    states = model.get_states()
    for name, tensor in _stored(proto.graph, states):
        value = states[name]
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value.device.backend.get(value.data), order="C"), tensor.name))
    return proto


def _structure(proto: ModelProto) -> np.ndarray:
    """The bytes of a model without the data of its initializers."""
    bare = ModelProto()
    bare.CopyFrom(proto)
    for tensor in bare.graph.initializer:
        tensor.CopyFrom(TensorProto(name=tensor.name))
    return np.frombuffer(bare.SerializeToString(deterministic=True), np.uint8)


def digest(arrays: Sequence[Any]) -> str:
    """The identity of arrays: their dtypes, shapes and values."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode())
        strings = array.dtype == object
        found.update(repr(array.tolist()).encode() if strings else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return f"sha256:{found.hexdigest()}"
