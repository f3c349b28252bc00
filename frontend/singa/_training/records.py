"""The measurements of a training as files that grow: a table as .csv, and events of TensorBoard.

    table = MetricsFile("run.csv")
    table.write(MetricsRow(step=1, epoch=1, values={"loss": 0.7, "rate": 0.01}))
    point = table.state_dict()                  # with the checkpoint: what was written later is cut off when it is loaded

A row is written to its file at once.  A training that continues compares the beginning of each file with what the checkpoint
knows of it, by length and digest, cuts off the rest, and goes on.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.io.files import names_in, new_folder, remove
from singa_backend.io.growing import GrowingFile
from singa_backend.io.places import check_folder

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{6})\.([0-9a-f]{8})\.sonnx")

_MARK = b"brain.Event:2"
"""What the first event of a file states."""


@dataclass(frozen=True)
class MetricsRow:
    """The measurements of a step, or of an epoch.

    Attributes:
        step: The number of the step, or of the last one of the epoch, from 1.
        epoch: The number of the epoch, from 1.
        whole: Whether it is the row of an epoch.
        values: The measurements by name: loss, rate, accuracy, samples_per_second, and validation_<metric>.
    """

    step: int
    epoch: int
    whole: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


class Sink(ABC):
    """What takes the rows of a training; a callback of `Model.fit`."""

    def __init__(self) -> None:
        self._begun = False
        self._steps = 0

    @abstractmethod
    def check(self) -> None:
        """Refuse a target that cannot be written, or has measurements of another training; nothing is written."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Open the target.

        Args:
            step: The number of finished steps.
        """

    @abstractmethod
    def write(self, row: MetricsRow) -> None:
        """Write a row.

        Args:
            row: The measurements of a step or an epoch.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the target."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Flush to the disk, and describe what is written.

        Returns:
            What `load_state_dict` reads.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state.

        Args:
            state: What `state_dict` returned.
        """

    def __call__(self, history: Any) -> bool:
        """Write the steps since the last call, and the epoch.

        Args:
            history: The history of `fit`.

        Returns:
            False: the training goes on.

        Raises:
            InvalidInput: The file cannot be written (SX351, SX395).
        """
        if not self._begun:
            self.begin(0)
        for row in rows_of(history, self._steps):
            self.write(row)
        self._steps = len(history.losses)
        return False

    def on_step(self, progress: Any) -> None:
        """Write a step.

        Args:
            progress: The point of a training: `steps`, `epoch`, `rate` and `history`.

        Raises:
            InvalidInput: The file cannot be written (SX351, SX395).
        """
        if not self._begun:
            self.begin(progress.steps - 1)
        values = {"loss": progress.history.losses[-1]}
        if progress.rate is not None:
            values["rate"] = progress.rate
        self.write(MetricsRow(progress.steps, progress.epoch, False, values))
        self._steps = progress.steps

    def on_epoch(self, progress: Any) -> None:
        """Write an epoch, and the steps that `on_step` has not seen.

        Args:
            progress: The point of a training.

        Raises:
            InvalidInput: The file cannot be written (SX351, SX395).
        """
        self(progress.history)


def _continued(file: GrowingFile, state: Any) -> bool:
    """Whether a file begins with the bytes of a state, and continues after them."""
    size, digest = state["bytes"], state["sha256"]
    if type(size) is not int or size < 0 or not isinstance(digest, str):
        raise ValueError("another state of a file")
    return file.resume(size, digest)


class MetricsFile(Sink):
    """Writes the measurements of a training to a .csv file; a callback of `Model.fit`.

    There is a row for each step, and one for each epoch: the column `row` is "step" or "epoch". An epoch has the mean of its
    losses, and what was measured on the validation. What is not known is empty.

    Args:
        path: The file, which must not exist, or be empty; it must not be a link.
        metrics: The names of the metrics of the validation, besides the loss.

    Attributes:
        path: The file.
        columns: The names of the columns.

    Raises:
        InvalidInput: The file cannot be written (SX351), or has rows of another training (SX395).

    Example:
        >>> net.fit(x, y, epochs=10, callbacks=[MetricsFile("run.csv")])
    """

    def __init__(self, path: str | os.PathLike[str], *, metrics: Sequence[str] = ("accuracy",)) -> None:
        super().__init__()
        self.path = Path(path)
        known = ("row", "step", "epoch", "loss", "rate", "accuracy", "validation_loss")
        self.columns = (*known, *(f"validation_{n}" for n in metrics), "samples_per_second")
        self._head = (",".join(self.columns) + "\n").encode()
        self._file = GrowingFile(self.path, self._head)

    def check(self) -> None:
        """Refuse a file that cannot be written, or has rows; nothing is written.

        Raises:
            InvalidInput: It cannot be written (SX351), or is that of another training (SX395).
        """
        try:
            self._file.check()
        except FileExistsError:
            what = (
                f"{self.path} must be a new file of metrics, or that of the training that continues, got one with other content"
            )
            hint = "pass another path, or the file that this training has written"
            raise InvalidInput(what, code="SX395", hint=hint) from None

    def begin(self, step: int) -> None:
        """Open the file: create it, or cut off what was written after the loaded state.

        Args:
            step: The number of finished steps.

        Raises:
            InvalidInput: As `check`.
        """
        self.check()
        self._begun = True
        self._file.open()
        if not self._file.size:
            self._file.append(self._head)

    def write(self, row: MetricsRow) -> None:
        """Append a row.

        Args:
            row: The measurements.

        Raises:
            InvalidInput: The file cannot be written (SX351).
        """
        known = {"row": "epoch" if row.whole else "step", "step": str(row.step), "epoch": str(row.epoch)}
        cells = [known[n] if n in known else repr(float(row.values[n])) if n in row.values else "" for n in self.columns]
        self._file.append((",".join(cells) + "\n").encode())

    def state_dict(self) -> dict[str, Any]:
        """Flush the file to the disk, and return what `load_state_dict` reads.

        Returns:
            Its bytes and their digest, which JSON can store.
        """
        return {**self._file.sync(), "columns": ",".join(self.columns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the file at a state; `begin` cuts off what was written later. A file that was removed begins again.

        Args:
            state: What `state_dict` returned.

        Raises:
            InvalidInput: The file does not begin with what was written then, or has other columns (SX395).
        """
        if not _continued(self._file, state) or state["columns"] != ",".join(self.columns):
            self._file.close()
            self._file = GrowingFile(self.path, self._head)
            self.check()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardEvents(Sink):
    """Writes the measurements of a training as events for TensorBoard, by tensorboardX; a callback of `Model.fit`.

    The names are train/loss, train/rate, train/accuracy and train/samples_per_second of steps, epoch/loss and epoch/accuracy, and
    validation/loss, validation/accuracy and those of other metrics.

    Args:
        folder: The folder, which is created; it must not have events.

    Attributes:
        folder: The folder.

    Raises:
        MissingDependency: tensorboardX is not installed (SX700).

    Example:
        >>> net.fit(x, y, epochs=10, callbacks=[TensorBoardEvents("runs/first")])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        except ImportError:
            hint = "pip install 'sonnx[tensorboard]'"
            raise MissingDependency("events for TensorBoard need tensorboardX, which is not installed", hint=hint) from None
        super().__init__()
        self.folder = Path(folder)
        self._event, self._summary, self._crc = event_pb2, summary_pb2, masked_crc32c
        self._id, self._past = secrets.token_hex(4), list[GrowingFile]()
        self._file: GrowingFile | None = None
        self._continues = False

    def check(self) -> None:
        """Refuse a folder that cannot be written, or has events; nothing is written.

        Raises:
            InvalidInput: It cannot be written (SX351), or has the events of another training (SX395).
        """
        check_folder(self.folder)
        there = [] if self._continues else [name for name in names_in(self.folder) if "tfevents" in name]
        if there:
            what = f"{self.folder} must have no events, or those of the training that continues, got {there[0]}"
            raise InvalidInput(what, code="SX395", hint="pass another folder: TensorBoard shows those below one folder together")

    def begin(self, step: int) -> None:
        """Create a file of events; cut off and remove what was written after the loaded state.

        Args:
            step: The number of finished steps; later events of the folder are not shown.

        Raises:
            InvalidInput: As `check`.
        """
        self.check()
        self._begun = True
        past = {f.path.name for f in self._past}
        for name in names_in(new_folder(self.folder)):
            event = _EVENTS.fullmatch(name)
            if event and event[2] == self._id and name not in past:
                remove(self.folder / name, _MARK)  # of a training that was killed before it wrote the checkpoint
        for file in self._past:
            file.open()
            file.close()
        number = 1 + len(self._past)
        self._file = GrowingFile(self.folder / f"events.out.tfevents.{number:06}.{self._id}.sonnx", _MARK)
        self._file.open()
        self._add(file_version=_MARK.decode())
        if self._past:  # a viewer that has read later events drops them
            self._add(step=step + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def write(self, row: MetricsRow) -> None:
        """Append the events of a row.

        Args:
            row: The measurements.

        Raises:
            InvalidInput: The file cannot be written (SX351).
        """
        values = []
        for name, value in row.values.items():
            kind, _, rest = name.partition("_")
            tag = f"validation/{rest}" if kind == "validation" else f"{'epoch' if row.whole else 'train'}/{name}"
            values.append(self._summary.Summary.Value(tag=tag, simple_value=value))
        self._add(step=row.step, summary=self._summary.Summary(value=values))

    def _add(self, **fields: Any) -> None:
        """Append an event: its length, their checksums, and the message."""
        assert self._file is not None
        data = self._event.Event(wall_time=time.time(), **fields).SerializeToString()
        length = len(data).to_bytes(8, "little")
        sums = [self._crc(part).to_bytes(4, "little") for part in (length, data)]
        self._file.append(length + sums[0] + data + sums[1])

    def state_dict(self) -> dict[str, Any]:
        """Flush the file to the disk, and return what `load_state_dict` reads.

        Returns:
            The files, their bytes and digests, which JSON can store.
        """
        files = [*self._past, *([self._file] if self._file else [])]
        return {"id": self._id, "files": [{"name": f.path.name, **f.sync()} for f in files]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the events of a folder; `begin` removes what was written later. Files that were removed begin again.

        Args:
            state: What `state_dict` returned.

        Raises:
            InvalidInput: The folder does not have the files that were written then (SX395).
            ValueError: The state is of another form.
        """
        if not isinstance(state["id"], str) or any(not _EVENTS.fullmatch(f["name"]) for f in state["files"]):
            raise ValueError("another state of events")
        files = [GrowingFile(self.folder / f["name"], _MARK) for f in state["files"]]
        continued = [_continued(file, f) for file, f in zip(files, state["files"], strict=True)]
        if continued and all(continued):
            self._id, self._past, self._continues = state["id"], files, True
        else:
            self.check()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def rows_of(history: Any, after: int) -> list[MetricsRow]:
    """The rows of an epoch that has just ended: those of its steps, and its own.

    Args:
        history: The history of `fit`.
        after: The number of steps before it.
    """
    epoch = len(history.epochs)
    rows = [MetricsRow(i + 1, epoch, False, {"loss": history.losses[i]}) for i in range(after, len(history.losses))]
    return [*rows, epoch_row(history)]


def epoch_row(history: Any, **more: float) -> MetricsRow:
    """The row of the last epoch.

    Args:
        history: The history of `fit`.
        **more: Further measurements.
    """
    held = history.validation[-1] if history.validation else {}
    values = {"loss": history.epochs[-1], **more, **{f"validation_{n}": v for n, v in held.items()}}
    return MetricsRow(len(history.losses), len(history.epochs), True, values)
