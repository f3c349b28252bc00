"""Every error that a user can meet, drawn once.

    SonnxError
    ├── InvalidModel         the file contradicts ONNX's rules                    (SX1..)
    ├── UnsupportedModel     valid, but something in it is not implemented here   (SX2..)
    ├── InvalidInput         what was fed, or asked for, does not fit the model   (SX3..)
    ├── OperatorError        one node cannot compute with these values            (SX4..)
    ├── DeviceUnavailable    the device that was asked for is not there           (SX5..)
    ├── ResourceExhausted    memory, nesting or another bound of this machine     (SX6..)
    └── MissingDependency    an optional package is not installed                 (SX7..)

and one warning, NoGradientWarning (SX346), of parameters that do not train.

Each says what was asked, what there is and what to do, and carries the same facts as fields for tools:
a stable ``code``, ``node``, ``operator``, ``opset``, ``version``, ``dtypes``, ``shapes`` and ``hint``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a model: where it stands, and why."""

    message: str
    code: str
    node: str = ""
    operator: str = ""
    opset: int | None = None
    version: int | None = None

    def __str__(self) -> str:
        where = f"node {self.node!r}: " if self.node else ""
        return f"{where}{self.message}"


class SonnxError(Exception):
    """The family.  Catch this one to catch everything that this package raises on purpose."""

    default_code: ClassVar[str] = "SX000"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str = "",
        node: str = "",
        operator: str = "",
        opset: int | None = None,
        version: int | None = None,
        dtypes: Sequence[str] = (),
        shapes: Sequence[tuple[int, ...] | None] = (),
        problems: Sequence[Problem] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        self.node = node
        self.operator = operator
        self.opset = opset
        self.version = version
        self.dtypes = tuple(dtypes)
        self.shapes = tuple(shapes)
        self.problems = tuple(problems)

    def locate(self, **where: Any) -> Self:
        """Fill in the fields that are still unknown: the innermost place that knows wins."""
        for field, value in where.items():
            if not getattr(self, field):
                setattr(self, field, value)
        return self

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.message}"]
        if self.operator:
            operator = self.operator if self.version is None else f"{self.operator}-{self.version}"
            opset = "" if self.opset is None else f" (opset {self.opset})"
            lines.append(f"  at: node {self.node!r}, operator {operator}{opset}")
        if self.dtypes:
            values = ", ".join(_value(d, s) for d, s in zip(self.dtypes, self.shapes, strict=False))
            lines.append(f"  inputs: {values}")
        if len(self.problems) > 1:
            lines += [f"  - {problem}" for problem in self.problems]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain data, for ``--json``."""
        return {
            "error": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "node": self.node,
            "operator": self.operator,
            "opset": self.opset,
            "version": self.version,
            "dtypes": list(self.dtypes),
            "shapes": [None if s is None else list(s) for s in self.shapes],
            "problems": [vars(p) for p in self.problems],
        }


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message that suggests the candidate closest to a wrong name; "" if none is close."""
    close = difflib.get_close_matches(name, list(candidates), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _value(dtype: str, shape: tuple[int, ...] | None) -> str:
    return dtype if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"


class InvalidModel(SonnxError):
    """The model contradicts ONNX's rules: a cycle, a duplicate name, a damaged initializer, ..."""

    default_code = "SX100"


class UnsupportedModel(SonnxError):
    """The model is valid; ``problems`` lists everything in it that is not implemented here."""

    default_code = "SX200"


class InvalidInput(SonnxError):
    """What was fed to a model, or asked of it, does not fit its declared inputs and outputs."""

    default_code = "SX300"


class NoGradientWarning(UserWarning):
    """A training step gives some parameters no gradient: they stay as they are.

    parameters: their names.  hint: how to freeze them, or where to look.
    """

    code: ClassVar[str] = "SX346"

    def __init__(self, message: str, parameters: Sequence[str], hint: str = "") -> None:
        super().__init__(message)
        self.message, self.parameters, self.hint = message, tuple(parameters), hint

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}\n  hint: {self.hint}"


class OperatorError(SonnxError):
    """A node cannot compute with the values that it got: ONNX gives such a call no meaning."""

    default_code = "SX400"


class DeviceUnavailable(SonnxError):
    """The device that was asked for does not exist on this machine."""

    default_code = "SX500"


class ResourceExhausted(SonnxError):
    """A bound of this machine was met: memory, or the depth of nesting."""

    default_code = "SX600"


class MissingDependency(SonnxError):
    """An optional package is needed for this and is not installed."""

    default_code = "SX700"
