"""What `sonnx train` keeps of its steps: the accuracy, the best epoch, a table and events of the measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._common import OutputPath

if TYPE_CHECKING:
    from singa_backend.collectives import Communicator

    from .._training.best import KeepBest
    from .._training.checkpoint import Part
    from .._training.fit import History
    from .._training.records import Sink

METRICS = ("loss", "accuracy")


@dataclass(frozen=True)
class RecordOptions:
    """The options of what is kept, by the names of their parameters.

    Attributes:
        keep_best: The measurement of the validation that selects the epoch whose model is written; None for the last epoch.
        patience: The number of epochs without an improvement of it after which the training ends; None for no end.
        keep: The number of checkpoints.
        metrics: The .csv file.
        tensorboard: The folder of events.
    """

    keep_best: str | None
    patience: int | None
    keep: int
    metrics: Path | None
    tensorboard: Path | None


record_options = (
    click.option("--keep-best", type=click.Choice(METRICS), metavar="METRIC",
                 help="Write the model of the epoch with the lowest validation loss, or the highest accuracy."),
    click.option("--patience", type=click.IntRange(1), metavar="EPOCHS",
                 help="End after EPOCHS epochs without an improvement of --keep-best (loss), and write the best epoch."),
    click.option("--keep", default=1, show_default=True, type=click.IntRange(1),
                 help="Checkpoints that are kept: earlier ones as NAME.step-000123.ckpt."),
    click.option("--metrics", type=OutputPath(dir_okay=False, alone="--resume continues it"),
                 help="Append a row for each step and epoch to this .csv file."),
    click.option("--tensorboard", type=OutputPath(file_okay=False), metavar="FOLDER",
                 help="Write the same values as events to this folder (needs tensorboardX)."),
)  # fmt: skip


class Tally:
    """How many samples each step had, and of how many the class with the largest score was the target.

    Attributes:
        right: The samples whose class is right, of all ranks, in the first n steps, by n.
        seen: The samples in the first n steps, by n.
        classes: Whether the targets are class numbers.
    """

    def __init__(self) -> None:
        self.classes = False
        self.right, self.seen = [0], [0]
        self._right = self._seen = 0

    def add(self, scores: Any, targets: Any) -> None:
        """Count a batch of this rank, of which a step may have several."""
        import numpy as np

        self._seen += targets.shape[0] if targets.shape else 1
        if self.classes and len(targets.shape) == 1 and len(scores.shape) == 2 and scores.shape[1] > 1:
            found = np.asarray(scores.device.backend.get(scores.data)).argmax(1)
            self._right += int((found == np.asarray(targets.device.backend.get(targets.data))).sum())

    def close_step(self, group: Communicator | None, signals: int) -> int:
        """Sum a step over the ranks; return the signals that all of them have received."""
        import numpy as np

        from singa_backend.collectives.communicator import total

        found = np.array([self._right, self._seen, signals], np.int64)
        found = total(group, found) if group else found
        self._right = self._seen = 0
        self.right.append(self.right[-1] + int(found[0]))
        self.seen.append(self.seen[-1] + int(found[1]))
        return int(found[2])

    def accuracy(self, first: int, last: int = -1) -> float | None:
        """The accuracy of the steps from `first` to before `last`, by default of all that follow; None if it is not known."""
        seen = self.seen[last] - self.seen[first]
        return (self.right[last] - self.right[first]) / seen if self.classes and seen else None

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        import numpy as np

        return {"right": np.diff(self.right), "seen": np.diff(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counts to those of a checkpoint; raises ValueError if they are of another form."""
        import numpy as np

        right, seen = (state[n] for n in ("right", "seen"))
        if any(a.dtype != np.int64 or a.ndim != 1 or a.shape != seen.shape for a in (right, seen)) or (right > seen).any():
            raise ValueError("other counts of samples")
        self.right, self.seen = ([0, *np.cumsum(a).tolist()] for a in (right, seen))


class Recorder:
    """What is kept of the steps of a training.

    Args:
        chosen: The options.
        tally: The accuracies.
        model: The model.
        rule: The optimizer.
        first: Whether this process writes files.

    Attributes:
        tally: The accuracies.
        best: The best epoch; None if it is not asked for.
    """

    def __init__(self, chosen: RecordOptions, tally: Tally, model: Any, rule: Any, first: bool) -> None:
        from .._training.best import KeepBest
        from .._training.records import MetricsFile, TensorBoardEvents

        self.tally = tally
        self.best: KeepBest | None = KeepBest(model, chosen.keep_best) if chosen.keep_best else None
        self._sinks: dict[str, Sink] = {}
        if first and chosen.metrics:
            self._sinks["metrics"] = MetricsFile(chosen.metrics)
        if first and chosen.tensorboard:
            self._sinks["tensorboard"] = TensorBoardEvents(chosen.tensorboard)
        self._rule, self._rate, self._clock = rule, math.nan, 0.0

    def check(self) -> None:
        """Refuse files that belong to another training; nothing is written."""
        for sink in self._sinks.values():
            sink.check()

    def parts(self) -> dict[str, Part]:
        """What the checkpoint keeps, by name."""
        return {"accuracy": self.tally, **({"best": self.best} if self.best else {}), **self._sinks}

    def begin(self, step: int) -> None:
        """Open the files, before the first step of this process; `step` are finished."""
        lacking = step + 1 - len(self.tally.seen)  # a checkpoint of a version that did not count
        self.tally.right, self.tally.seen = [[0] * lacking + n for n in (self.tally.right, self.tally.seen)]
        for sink in self._sinks.values():
            sink.begin(step)
        self.tick()

    def tick(self) -> None:
        """Begin the time of the next step, and note its rate."""
        from .._training.fit import number

        if self._sinks:
            self._rate = number(self._rule.lr_value)
        self._clock = time.monotonic()

    def step(self, history: History, epoch: int) -> None:
        """Write the row of a step that has just ended."""
        if not self._sinks:
            return
        from .._training.records import MetricsRow

        elapsed, at = time.monotonic() - self._clock, len(history.losses)
        values = {"loss": history.losses[-1], "rate": self._rate}
        if (accuracy := self.tally.accuracy(at - 1)) is not None:
            values["accuracy"] = accuracy
        if elapsed > 0:
            values["samples_per_second"] = (self.tally.seen[-1] - self.tally.seen[-2]) / elapsed
        for sink in self._sinks.values():
            sink.write(MetricsRow(at, epoch, False, values))

    def epoch(self, history: History, first: int) -> None:
        """Write the row of an epoch that has just ended, whose first step has this index, and note whether it is the best."""
        from .._training.records import epoch_row

        if self.best:
            self.best(history)
        accuracy = self.tally.accuracy(first)
        row = epoch_row(history, **({} if accuracy is None else {"accuracy": accuracy}))
        for sink in self._sinks.values():
            sink.write(row)

    def close(self) -> None:
        """Flush the files to the disk, and close them."""
        for sink in self._sinks.values():
            sink.state_dict()
            sink.close()
