"""The arguments of `sonnx train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ._records import RecordOptions
from ._train_data import FunctionName


@dataclass(frozen=True)
class TrainOptions:
    """The arguments of the command, by the names of its options."""

    model: Path
    data: Path | FunctionName
    validation: Path | FunctionName | None
    head: int | None
    at: str | None
    target: str
    loss: str
    ignore_index: int | None
    class_axis: str | None
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
    records: RecordOptions
    workers: int
    dist_option: str
    sparsity: float
    sync_batch_norm: bool
    timeout: float
    no_graph: bool
    precision: str
    device: str
    as_json: bool
