"""What a sweep does with each file, and the limits of a file."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import numpy as np
import onnx

from ..choices import TASKS as TASKS
from ..deadline import SHORTEST
from ..errors import InvalidInput, MissingDependency, did_you_mean
from ..io.installation import version
from ..limits import check_number

LOWEST_MEMORY = 64 << 20
"""The lowest limit of memory in bytes: below it no child process starts."""


@dataclass(frozen=True)
class SweepSettings:
    """What a sweep does with each file.

    Attributes:
        task: one of `TASKS`.
        against: the engine of the task "compare": "onnxruntime" or "reference" (onnx.reference).
        seed: of drawn inputs.
        timeout: seconds for one file.
        memory: the maximum address space of a child process in bytes; None for no limit.

    Raises:
        InvalidInput: a value is unknown or out of range (SX309, SX992).
        MissingDependency: onnxruntime is needed and not installed.
    """

    task: str
    against: str = "onnxruntime"
    seed: int = 0
    timeout: float = 60.0
    memory: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for what, value, known in (("task", self.task, TASKS), ("against", self.against, ("onnxruntime", "reference"))):
            if value not in known:
                hint = did_you_mean(str(value), known)
                raise InvalidInput(f"{what} must be one of {', '.join(known)}, got {value!r}{hint}", code="SX992")
        check_number("seed", self.seed, 0, whole=True)
        check_number("timeout", self.timeout, SHORTEST)
        check_number("memory", self.memory, LOWEST_MEMORY, whole=True)
        if self.engine == "onnxruntime" and not self.versions.get("onnxruntime"):
            raise MissingDependency("onnxruntime is not installed", hint="pip install 'sonnx[oracle]'")

    @property
    def engine(self) -> str:
        """The engine whose results depend on its version: that of a comparison, otherwise "sonnx"."""
        return self.against if self.task == "compare" else "sonnx"

    @property
    def versions(self) -> dict[str, str]:
        """The versions of all packages that compute a result.

        Returns:
            Versions by the name of the package; "" for one that is not installed.
        """
        found = {"sonnx": version(), "onnx": onnx.__version__, "numpy": np.__version__}
        if self.engine == "onnxruntime":
            try:
                found["onnxruntime"] = importlib.metadata.version("onnxruntime")
            except importlib.metadata.PackageNotFoundError:
                found["onnxruntime"] = ""
        return found
