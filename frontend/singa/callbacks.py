"""Callbacks of `Model.fit`: the best epoch, and the measurements as a table or as events of TensorBoard."""

from ._training.best import KeepBest
from ._training.records import MetricsFile, TensorBoardEvents

__all__ = ["KeepBest", "MetricsFile", "TensorBoardEvents"]
