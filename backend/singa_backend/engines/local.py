"""Engines that run a part of a model: this package on a device, or another engine in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from onnx import ModelProto

from ..backend import SingaRep
from ..devices import device as devices
from ..errors import SonnxError
from ..ir.reader import read
from ..kernels.options import options
from ..runtime.origins import NonFinite, Origin
from .command import checked
from .oracle import EngineFailure, Oracle, is_backend


class Engine(Protocol):
    """Runs models one after the other.

    Attributes:
        name: shown in results.
        typed: whether the models must declare the types of their outputs, with known shapes if possible.
    """

    name: str
    typed: bool

    def run(self, model: ModelProto, folder: Path | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run a model and return its outputs by name; raises SonnxError."""

    def close(self) -> None:
        """Release the engine's resources."""


class Ours:
    """This package, in this process.

    Args:
        device: "CPU", "CUDA", "CUDA:1", "STRICT"; raises DeviceUnavailable.
        validate: whether to keep the origin of the first NaN or infinity of all runs in `origin`, and the first node that made a
            NaN of infinities in `of_infinity`.
        level: 0 to compute by definitions, 2 by plans.
    """

    typed = False

    def __init__(self, device: devices.DeviceLike = "CPU", *, validate: bool = False, level: int = 0) -> None:
        self.validate = validate
        self.options = options(optimize=level)
        self.origin: Origin | None = None
        self.of_infinity: Origin | None = None
        self.device = devices.resolve(device)
        self.name = "sonnx" if str(self.device) == "CPU" else f"sonnx on {self.device}"

    def run(self, model: ModelProto, folder: Path | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
        rep = self._rep(model, folder)
        try:
            return rep.run(inputs, validate=self.validate and self.origin is None).to_dict()
        except NonFinite as error:
            if error.origin.of_infinity:
                self.of_infinity = self.of_infinity or error.origin
            elif error.origin.kind == "node" or self.of_infinity is None:  # otherwise it may follow `of_infinity`
                self.origin = error.origin
            found: dict[str, Any] = error.outputs.to_dict()
            return found

    def _rep(self, model: ModelProto, folder: Path | None) -> SingaRep:
        return SingaRep(read(model, folder), self.device, options=self.options)

    def close(self) -> None:
        pass


class Planned(Ours):
    """The plans of this package: each part runs twice, first to make the plan, then by it."""

    def __init__(self) -> None:
        super().__init__(level=2)
        self.name = "plan"

    def run(self, model: ModelProto, folder: Path | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
        rep = self._rep(model, folder)
        rep.run(inputs)
        return rep.run(inputs).to_dict()


class Foreign:
    """onnxruntime, onnx's reference or a backend of another package, in a child process; raises MissingDependency and SonnxError.

    Args:
        name: the engine, one of `oracle.ENGINES`, or MODULE:CLASS.
        optimise: whether onnxruntime may rewrite the graph.
        timeout: seconds for one part.
    """

    def __init__(self, name: str, *, optimise: bool = False, timeout: float = 60.0) -> None:
        self.name = name
        self.timeout = timeout
        self.typed = is_backend(name)
        self._oracle = Oracle(name, optimise=optimise, exact=False)
        try:
            self._oracle.check()
        except SonnxError:
            self._oracle.close()
            raise

    def run(self, model: ModelProto, folder: Path | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = self._oracle.run(model.SerializeToString(), inputs, timeout=self.timeout, folder=folder)
        plain = {name: _plain(value) for name, value in outputs.items()}
        return checked(self.name, model, plain) if self.typed else plain

    def run_file(self, path: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run a model of a file, which the child opens itself; raises SonnxError."""
        return {name: _plain(value) for name, value in self._oracle.run(path, inputs, timeout=self.timeout).items()}

    def close(self) -> None:
        self._oracle.close()


def _plain(value: Any) -> Any:
    """Convert a value to this package's form: arrays, strings as objects, lists."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return value.astype(object) if value.dtype.kind in "US" else value
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


class FailedRun:
    """Why one side has no values of a call.

    Attributes:
        engine: its name.
        how: "refused", "died", "timeout"; "not reached" if an earlier failure left it without inputs; "absent" if the other
            model has no such value.
        message: the engine's own message.
        code: of the error.
    """

    def __init__(self, engine: str, how: str, message: str, code: str = "") -> None:
        self.engine, self.how, self.message, self.code = engine, how, message, code

    @classmethod
    def of(cls, engine: Engine, error: SonnxError) -> FailedRun:
        if isinstance(error, EngineFailure):
            return cls(engine.name, error.how, error.reason, error.code)
        return cls(engine.name, "refused", f"[{error.code}] {error.message}", error.code)

    def __str__(self) -> str:
        return f"{self.engine}: {self.how}" + (f": {self.message}" if self.message else "")

    def to_dict(self) -> dict[str, str]:
        """Return the failure as plain data."""
        return dict(vars(self))
