"""The errors that this package raises.

    SonnxError
    ├── InvalidModel         the model violates ONNX's rules                        (SX1..)
    ├── UnsupportedModel     the model is valid, but not implemented here           (SX2..)
    ├── InvalidInput         inputs or options do not match the model               (SX3..)
    ├── OperatorError        a node cannot compute with its inputs                  (SX4..)
    ├── DeviceUnavailable    this machine does not have the device, or cannot use it (SX5..)
    ├── DeviceFailure        a device failed while it computed                      (SX5..)
    ├── ResourceExhausted    memory, nesting or another limit was exceeded          (SX6..)
    ├── MissingDependency    an optional package is not installed                   (SX7..)
    └── CommunicationError   another process of a training has ended, or is stuck   (SX95.)

and two warnings: NoGradientWarning (SX346) for parameters that do not train, and ConstantTrainsWarning (SX382) for constants of
a file that a program trains.

A message states what was requested, what was found and what to do.  The same facts are fields:
a stable `code`, `node`, `operator`, `opset`, `version`, `dtypes`, `shapes` and `hint`.
docs/errors.md lists all codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from .rendering import TEXT, printable


@dataclass(frozen=True)
class Problem:
    """One problem of a model, and its place.

    Attributes:
        message: the problem, in words.
        code: the stable code, "SX101".
        node: the name of the node; "" if it is not known.
        operator: the operator type of the node; "" if it is not known.
        opset: the opset of the operator's domain.
        version: the schema version of the operator.
        hint: what to do; "" if there is none.
    """

    message: str
    code: str
    node: str = ""
    operator: str = ""
    opset: int | None = None
    version: int | None = None
    hint: str = ""

    def __str__(self) -> str:
        """Return the message with the name of the node."""
        where = f"node '{printable(self.node)}': " if self.node else ""
        return f"{where}{printable(self.message, TEXT)}"


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    """An error or a warning from its pickle."""
    made = kind.__new__(kind, *args)
    made.__dict__.update(fields)
    return made


class SonnxError(Exception):
    """The base class of all errors that this package raises.

    `str(error)` is the message with its code, place and hint.

    Attributes:
        message: the error, in words.
        code: the stable code, "SX301"; docs/errors.md lists all of them.
        hint: what to do; "" if there is none.
        node: the name of the node that failed; "" if it is not known.
        operator: the operator type of that node; "" if it is not known.
        opset: the opset of the operator's domain; None if it is not known.
        version: the schema version of the operator; None if it is not known.
        dtypes: ONNX's names of the dtypes of the node's inputs.
        shapes: their shapes; None for an input that is not a tensor.
        problems: all problems of a model, if several were found.
    """

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
        """Create the error.

        Args:
            message: the error, in words.
            code: the stable code; None for the default code of the class.
            hint: what to do.
            node: the name of the node that failed.
            operator: the operator type of that node.
            opset: the opset of the operator's domain.
            version: the schema version of the operator.
            dtypes: ONNX's names of the dtypes of the node's inputs.
            shapes: their shapes; None for an input that is not a tensor.
            problems: all problems of a model.
        """
        message, hint = printable(message, TEXT, lines=True), printable(hint, TEXT, lines=True)
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

    def __reduce__(self) -> Any:
        """Support pickle: an error of a worker reaches the caller with all its fields, whatever its class is called with."""
        return _rebuilt, (type(self), self.args, self.__dict__)

    def locate(self, **where: Any) -> Self:
        """Set the fields that are not set yet, so that the innermost caller's values are kept.

        Args:
            **where: fields by name: `node`, `operator`, `opset`, `version`, `dtypes`, `shapes`.

        Returns:
            The error itself.
        """
        for field, value in where.items():
            if not getattr(self, field):
                setattr(self, field, value)
        return self

    def __str__(self) -> str:
        """Return the message with its code, place, inputs, problems and hint."""
        lines = [f"[{self.code}] {self.message}"]
        if self.operator:
            operator = self.operator if self.version is None else f"{self.operator}-{self.version}"
            opset = "" if self.opset is None else f" (opset {self.opset})"
            node = f"node '{printable(self.node)}', " if self.node else ""
            lines.append(f"  at: {node}operator {printable(operator)}{opset}")
        if self.dtypes:
            values = ", ".join(_value(d, s) for d, s in zip(self.dtypes, self.shapes, strict=False))
            lines.append(f"  inputs: {values}")
        if len(self.problems) > 1:
            lines += [f"  - {problem}" for problem in self.problems]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, as `--json` writes them.

        Returns:
            A dict of the class name under "error" and of all fields by name.
        """
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


def described(error: BaseException, frames: int = 4) -> str:
    """Return an exception as text that may be cut at its end: its type and message first, then where it was raised.

    Args:
        error: any exception.
        frames: the number of the innermost calls that are listed.

    Returns:
        "ValueError: no", a line for each exception that caused it, and a traceback.
    """
    import traceback  # not by `import singa_backend`: nothing has failed yet

    lines, seen, one = [_headline(error)], {id(error)}, error
    while (cause := one.__cause__ or (None if one.__suppress_context__ else one.__context__)) and id(cause) not in seen:
        lines.append(f"caused by {_headline(cause)}")
        seen.add(id(cause))
        one = cause
    calls = traceback.format_tb(error.__traceback__, -frames)
    return "\n".join([*lines, *(["Traceback (most recent call last):", *(c.rstrip() for c in calls)] if calls else [])])


def _headline(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(text: str) -> str:
    """Return the first line of a text that is not empty.

    Args:
        text: any text.

    Returns:
        The line without the space around it; "" if all are empty.
    """
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of a message that suggests a name.

    Args:
        name: the unknown name.
        candidates: the names that exist.

    Returns:
        A clause with the closest candidate; "" if none is close.
    """
    import difflib  # only messages need it

    close = difflib.get_close_matches(name, list(candidates), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of keyword arguments.

    Args:
        call: the name of what was called, for the message.
        given: the names that were passed.
        known: the names that it accepts.

    Raises:
        UnknownKeyword: a name is not accepted.
    """
    accepted = list(known)
    for name in given:
        if name not in accepted:
            names = ", ".join(accepted) or "none"
            raise UnknownKeyword(f"{call}() accepts the keywords {names}; got {name!r}{did_you_mean(name, accepted)}")


def _value(dtype: str, shape: tuple[int, ...] | None) -> str:
    return dtype if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"


class InvalidModel(SonnxError):
    """The model violates ONNX's rules: a cycle, a duplicate name, a damaged initializer, ... (SX100 to SX112).

    Raised when a model is read, before anything runs; `problems` lists all violations.
    """

    default_code = "SX100"


class UnsupportedModel(SonnxError):
    """The model is valid, but something in it is not implemented here (SX200 to SX209).

    Raised when a model is read, converted, exported or differentiated; `problems` lists everything that was found.
    """

    default_code = "SX200"


class UnknownType(UnsupportedModel, ValueError):
    """The element type or rank of a value is required to write a model, and is not known (SX209)."""

    default_code = "SX209"


class InvalidInput(SonnxError):
    """Inputs or options do not match what a model or a function accepts (SX300 to SX398)."""

    default_code = "SX300"


class UnknownKeyword(InvalidInput, TypeError):
    """A call has a keyword argument that it does not accept (SX364)."""

    default_code = "SX364"


class NotExchangeable(InvalidInput, BufferError):
    """A value cannot be passed through DLPack (SX367)."""

    default_code = "SX367"


class ParameterWarning(UserWarning):
    """The base class of warnings about parameters in a training step.

    Attributes:
        code: the stable code.
        message: the warning, in words.
        parameters: the names of the parameters.
        hint: what to do.
    """

    code: ClassVar[str] = "SX000"

    def __init__(self, message: str, parameters: Sequence[str], hint: str = "") -> None:
        """Create the warning.

        Args:
            message: the warning, in words.
            parameters: the names of the parameters.
            hint: what to do.
        """
        message = printable(message, TEXT)
        super().__init__(message)
        self.message, self.parameters, self.hint = message, tuple(parameters), printable(hint, TEXT)

    def __reduce__(self) -> Any:
        """Support pickle."""
        return _rebuilt, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        """Return the message with its code and hint."""
        return f"[{self.code}] {self.message}\n  hint: {self.hint}"


class NoGradientWarning(ParameterWarning):
    """A training step computes no gradient for some parameters, which stay unchanged (SX346)."""

    code: ClassVar[str] = "SX346"


class ConstantTrainsWarning(ParameterWarning):
    """A training step changes constants of a file (factors, masks, tables), whose flags a program has set (SX382)."""

    code: ClassVar[str] = "SX382"


class OperatorError(SonnxError):
    """A node cannot compute with its inputs, for which ONNX defines no result (SX400 to SX409, SX490).

    Raised by a run; the error names the node and the dtypes and shapes of its inputs.
    """

    default_code = "SX400"


class DeviceUnavailable(SonnxError):
    """The requested device does not exist on this machine (SX500), or cannot be used (SX501 to SX509)."""

    default_code = "SX500"


class DeviceFailure(SonnxError):
    """A device failed while it computed: a library of CUDA is absent, or a kernel failed (SX505 to SX509).

    Raised by a run; the error names the node, if it is known.
    """

    default_code = "SX509"


class ResourceExhausted(SonnxError):
    """A limit was exceeded: memory, nesting, time or another field of `Limits`, or a run was cancelled (SX600 to SX614).

    Limits on memory are checked before the memory is allocated.
    """

    default_code = "SX600"


class MissingDependency(SonnxError):
    """An optional package is required and is not installed, or fails when it is imported (SX700, SX701)."""

    default_code = "SX700"


class CommunicationError(SonnxError):
    """Another process of a distributed training has ended or makes no progress (SX950 to SX952)."""

    default_code = "SX950"
