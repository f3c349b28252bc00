"""Runs the stages of `sonnx device-check`: each in a child process that has a deadline, each reported as soon as it ends.

A stage is a function at the top of a module.  It receives the `CheckSetup` and a dict that it fills with what it found, and
raises `Wrong`, or any other exception, if the device does not pass.  The dict is reported in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from ..choices import TOTAL as TOTAL
from ..errors import DeviceUnavailable, SonnxError, described
from ..io.processes import Child, ChildFailure

PASSED, FAILED, NOT_RUN, ONE_DEVICE = "passed", "failed", "not run", "one device"
"""The statuses; "one device" is that of a stage that needs two devices on a machine that has one."""


class Wrong(Exception):
    """What a stage found wrong."""


class OneDevice(Exception):
    """The stage needs two devices, and the machine has one."""


@dataclass(frozen=True)
class CheckSetup:
    """What the stages are to do.

    Attributes:
        device: The device, such as "CUDA" or "CUDA:1".
        every: Each stage with a list of cases takes every n-th one.
        processes: The number of child processes of a stage; None for one per core.
        deadline: The seconds that the stage may take.
    """

    device: str = "CUDA"
    every: int = 1
    processes: int | None = None
    deadline: float = TOTAL


Check = Callable[[CheckSetup, dict[str, Any]], None]


@dataclass(frozen=True)
class CheckStage:
    """A stage.

    Attributes:
        name: Its name on the command line and in the results.
        check: What it does.
        deadline: The seconds that it may take; more in proportion if all stages may take more than `TOTAL`.
    """

    name: str
    check: Check
    deadline: float


@dataclass(frozen=True)
class StageResult:
    """The result of a stage.

    Attributes:
        stage: The stage's name.
        status: "passed", "failed", "not run" or "one device".
        seconds: How long it took.
        reason: Why it did not pass; "" if it passed.
        details: What it found.
        unusable: Whether the device cannot be used at all, so that the other stages are not run.
    """

    stage: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    unusable: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        found = asdict(self)
        del found["unusable"]
        return found | {"seconds": round(self.seconds, 3)}


def run(stages: Sequence[CheckStage], setup: CheckSetup) -> Iterator[StageResult]:
    """Run the stages in their order; `setup.deadline` is for all of them together.

    Args:
        stages: The stages.
        setup: What they are to do.

    Yields:
        The outcome of each stage as it ends; a stage that the deadline or an unusable device prevents is "not run".
    """
    end = time.monotonic() + setup.deadline
    prevented = ""
    for stage in stages:
        left = end - time.monotonic()
        if not prevented and left <= 0:
            prevented = f"the deadline of {setup.deadline:g} s for all stages has passed"
        if prevented:
            yield StageResult(stage.name, NOT_RUN, reason=prevented)
            continue
        most = stage.deadline * max(1.0, setup.deadline / TOTAL)
        outcome = _run(stage, replace(setup, deadline=min(most, left)))
        if outcome.unusable:
            prevented = f"the stage {stage.name} found no usable device"
        yield outcome


def _run(stage: CheckStage, setup: CheckSetup) -> StageResult:
    """Run one stage in a child process, and kill it at its deadline."""
    start = time.monotonic()
    with Child(_serve, stage.name, stage.check) as child:
        try:
            outcome: StageResult = child.ask(setup, timeout=setup.deadline)
        except ChildFailure as failure:
            late = failure.how == "timeout"
            reason = f"deadline: not finished within {setup.deadline:.4g} s" if late else f"its process died: {failure}"
            outcome = StageResult(stage.name, FAILED, reason=reason)
    return replace(outcome, seconds=time.monotonic() - start)


def _serve(name: str, check: Check) -> Callable[[CheckSetup], StageResult]:
    """Return, in the child, the function that runs a stage."""
    return partial(attempt, name, check)


def attempt(name: str, check: Check, setup: CheckSetup) -> StageResult:
    """Run a stage in this process.

    Args:
        name: The stage's name.
        check: What it does.
        setup: What it is to do.

    Returns:
        Its outcome; an exception is a failure.
    """
    details: dict[str, Any] = {}
    try:
        check(setup, details)
    except OneDevice as one:
        return StageResult(name, ONE_DEVICE, reason=str(one), details=details)
    except DeviceUnavailable as error:
        return StageResult(name, FAILED, reason=str(error), details=details, unusable=True)
    except (Wrong, SonnxError) as error:
        return StageResult(name, FAILED, reason=str(error), details=details)
    except Exception as error:
        return StageResult(name, FAILED, reason=described(error), details=details)
    return StageResult(name, PASSED, details=details)
