"""The options of `sonnx train` for adapters, and the model that they are added to and written with."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.choices import BIASES, FORMS
from singa_backend.errors import InvalidInput

from ._common import FiniteNumber

if TYPE_CHECKING:
    from onnx import ModelProto

    from singa_backend.adapters import Adapter
    from singa_backend.passes.head import ReplacedHead

    from .._onnx.model import SONNXModel
    from ._train_options import TrainOptions

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


def new_head(chosen: TrainOptions) -> ReplacedHead:
    """The last layer that --head replaces."""
    from singa_backend.passes.head import replace_head
    from singa_backend.proto.load import open_light

    assert chosen.head is not None
    proto, folder = open_light(chosen.model)
    return replace_head(proto, chosen.head, seed=chosen.seed, folder=folder)


def lora_of(chosen: TrainOptions) -> dict[str, Any] | None:
    """The arguments of `sonnx.lora`; None without --lora."""
    if chosen.lora is None:
        return None
    return {
        "rank": chosen.lora, "target": chosen.lora_target, "alpha": chosen.lora_alpha, "dropout": chosen.lora_dropout,
        "bias": chosen.lora_bias, "rslora": chosen.rslora, "head": chosen.head, "seed": chosen.seed,
    }  # fmt: skip


def lora_settings(chosen: TrainOptions) -> dict[str, str]:
    """The options of adapters that differ from their defaults."""
    found = {name: getattr(chosen, name) for name in ("lora", *LORA)}
    return {
        f"--{name.replace('_', '-')}": ", ".join(value) if isinstance(value, tuple) else str(value)
        for name, value in found.items()
        if value and value != BIASES[0]
    }


_FILES = (".safetensors", ".onnx_adapter")
"""The suffixes of the files of an adapter: of sonnx, and of onnxruntime."""


def writes_adapter(chosen: TrainOptions) -> bool:
    """Whether -o is the file of an adapter."""
    return chosen.target_file is not None and chosen.target_file.suffix in _FILES


def write_adapter(adapter: Adapter, path: Path) -> None:
    """Write an adapter in the form that the suffix names."""
    from singa_backend.adapters.onnxruntime import write_onnx_adapter

    if path.suffix == _FILES[1]:
        write_onnx_adapter(adapter, path)
    else:
        adapter.save(path)


def check_adapter_output(chosen: TrainOptions, tuned: SONNXModel) -> None:
    """Raise before the training what writing its result would raise."""
    if writes_adapter(chosen):
        if chosen.target_file is not None and chosen.target_file.suffix == _FILES[0]:
            tuned.adapter().to_bytes()
    elif chosen.target_file is not None:
        model_with_adapter(tuned)


def model_with_adapter(tuned: SONNXModel) -> tuple[ModelProto, Path | None]:
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
    from singa_backend.proto.save import save

    if chosen.qlora is None:
        yield chosen
        return
    from singa_backend.quantization import quantize_weights

    made = quantize_weights(chosen.model, chosen.qlora, exclude=[] if chosen.head is None else [node_pattern(new_head(chosen))])
    with tempfile.TemporaryDirectory(prefix="sonnx-") as folder:
        path = Path(folder, chosen.model.name)
        save(made, path, check=False)
        del made
        yield replace(chosen, model=path)


def node_pattern(head: ReplacedHead) -> str:
    """The pattern of the node that --qlora does not quantize: the last layer, which --head replaces."""
    return re.escape(head.node)
