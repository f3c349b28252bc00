"""Compute single operators on a device, by their definitions, and the bodies of operators on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from typing import Any

import numpy as np
from onnx import TypeProto, defs, numpy_helper

from .. import dtypes
from ..devices import namespaces
from ..devices.device import Device, device_of_namespace, is_host_value, resolve
from ..devices.namespaces import NumpyNamespace, Xp
from ..errors import DeviceFailure, ResourceExhausted
from ..ir.declaration import Declaration, declarations
from ..ir.versioned import VersionedOperator, reads_on_host, runs_on_host
from ..proto.schemas import newest, version_at
from ..runtime.failures import types_of
from ..runtime.placement import SMALL, computes_on_host
from .base import Example, Interpreter, Subgraph, arguments


@cache
def _versioned(domain: str, op_type: str, opset: int) -> VersionedOperator:
    version = version_at(domain, op_type, opset)
    if version is None:
        raise ValueError(f"opset {opset} has no {op_type}")
    return VersionedOperator(declarations[domain, op_type][version], version)


@lru_cache(1024)
def _scalar(device: Device, dtype: np.dtype[Any], value: bytes) -> Any:
    """A number on a device, which no call changes."""
    return device.put(np.frombuffer(value, dtype).reshape(()))


class EmptySequence(list[Any]):
    """An empty sequence with an element type; not a list to convert to a constant."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype


class Evaluator(Interpreter[Any]):
    """Computes single operators on a device; operators with subgraphs require `Eager`.

    Shapes, and results of small values on the host, are NumPy arrays, as in a run (`runtime.placement`); `device.put` copies them
    to the device.  Indices and divisors are checked at once.
    """

    def __init__(self, device: Device | None = None, opset: int | None = None) -> None:
        self.device = device or resolve("CPU")
        self.xp = self.device.xp
        self.opset = opset or defs.onnx_opset_version()

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Any]:
        operator = _versioned(domain, op_type, self.opset)
        values = arguments(self, domain, op_type, inputs)
        return self.call_version(operator, values, attributes, (True,) * outputs)

    @property
    def runs_old_versions(self) -> bool:
        return True

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Any]:
        declaration, values, given = operator.declaration, inputs, _attributes(operator.declaration, attributes)
        if declaration.name == "SequenceEmpty":
            return [EmptySequence(dtypes.numpy_dtype(given.get("dtype") or dtypes.onnx_code(np.float32)))]
        made = self._computed(operator, values, given, wanted)
        if made and type(made[0]) is list and not made[0]:  # an operator on sequences keeps the element type of its first input
            made[0] = EmptySequence(self.dtype(inputs[0]))
        return made

    def _computed(
        self, operator: VersionedOperator, values: Sequence[Any], given: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Any]:
        """The outputs of a call by the definition."""
        declaration = operator.declaration
        try:
            if self.device.is_host:
                with np.errstate(all="ignore"):
                    return operator.run(self.xp, values, given, wanted)
            with self.device.active(), np.errstate(all="ignore"):
                if computes_on_host(declaration, values):
                    return operator.run(namespaces.numpy, values, given, wanted)
                if not runs_on_host(declaration, given, values):
                    values = [v if reads_on_host(declaration, i) else self.device.put(v) for i, v in enumerate(values)]
                    return operator.run(self.xp, values, given, wanted)
                made = operator.run(namespaces.numpy, [self.device.get(v) for v in values], given, wanted)
                return [self.device.put(v) for v in made]
        except (DeviceFailure, ResourceExhausted) as error:
            place = {"operator": declaration.name, "version": operator.version, **types_of(values)}
            raise error.locate(**place) from error.__cause__

    def constant(self, value: Any, dtype: dtypes.DTypeLike | None = None) -> Any:
        array = np.asarray(value, dtype)
        return array if array.dtype.kind == "i" and array.size <= SMALL else self.device.put(array)

    def argument(self, domain: str, op_type: str, i: int, value: Any, dtype: dtypes.DTypeLike) -> Any:
        stays = self.device.is_host or np.dtype(dtype).kind == "i"
        declaration = _versioned(domain, op_type, self.opset).declaration
        if stays or reads_on_host(declaration, i):
            return np.asarray(value, dtype)
        array = np.asarray(value, dtype)
        if not array.ndim and "broadcasting" in declaration.traits and not is_host_value(array):
            return _scalar(self.device, array.dtype, array.tobytes())  # no result shares its memory
        return self.device.put(array)

    def is_value(self, x: Any) -> bool:
        if isinstance(x, list):
            return isinstance(x, EmptySequence) or (bool(x) and self.is_value(x[0]))
        return isinstance(x, np.ndarray) or self.xp.isarray(x)

    def dtype(self, x: Any) -> np.dtype[Any]:
        return np.dtype(x[0].dtype if x else getattr(x, "dtype", np.float32)) if isinstance(x, list) else x.dtype

    def is_sequence(self, x: Any) -> bool:
        return isinstance(x, list)

    def constant_value(self, x: Any) -> np.ndarray | None:
        return np.asarray(self.device.get(x))

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def example(self, x: Any) -> Any:
        return self.device.get(x)

    def graph(
        self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None], examples: Sequence[Example] = ()
    ) -> Subgraph:
        raise TypeError("an Evaluator computes single operators; use Eager for subgraphs")


class BodyEvaluator(Evaluator):
    """Computes the operators of a body on the arrays of a namespace, in a run that has set its device and its limits."""

    def __init__(self, xp: Xp) -> None:
        on_host = xp.ndarray is np.ndarray or xp.records
        super().__init__(_HOST if on_host else device_of_namespace(xp), newest(""))
        if not isinstance(xp, NumpyNamespace):  # one of NumPy may note what is checked: that is for what the operator accepts
            self.xp = xp

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Any]:
        operator = _versioned(domain, op_type, self.opset)
        if not self.device.is_host or operator.declaration.services:
            return self.call_version(operator, arguments(self, domain, op_type, inputs), attributes, (True,) * outputs)
        if any(x.__class__ is not np.ndarray for x in inputs):
            inputs = self._with_numbers(operator, inputs)
        return operator.compute(self.xp, inputs, _cached_attributes(operator, attributes), outputs)[:outputs]

    def _with_numbers(self, operator: VersionedOperator, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs as arrays, those for numbers from earlier calls with inputs of the same dtypes."""
        types = tuple([getattr(x, "dtype", None) for x in inputs])
        values = list(inputs)
        for i, x in enumerate(inputs):
            if x.__class__ is list and x and all(n.__class__ is int for n in x):
                key: Any = tuple(x)
            elif x.__class__ is int or x.__class__ is float:
                key = (x.__class__, repr(x))  # 0.0 equals -0.0
            else:
                continue
            found: Any = _numbers.get((operator, i, key, types))
            if found is None:
                found = arguments(self, operator.declaration.domain, operator.declaration.name, inputs)[i]
                found.flags.writeable = False  # a result may be a view of it
                if len(_numbers) >= _NUMBERS:
                    _numbers.clear()
                _numbers[operator, i, key, types] = found
            values[i] = found
        if any(v.__class__ is not np.ndarray for v in values):
            return arguments(self, operator.declaration.domain, operator.declaration.name, values)
        return values

    def full_like(self, x: Any, value: float) -> Any:
        return self.xp.full(x.shape, value, x.dtype)


_HOST = resolve("CPU")
_NUMBERS = 4096
_numbers: dict[Any, Any] = {}
"""At most _NUMBERS arrays for numbers in bodies, by operator, index of the input, number and dtypes of all inputs."""


def _cached_attributes(operator: VersionedOperator, attributes: dict[str, Any]) -> dict[str, Any]:
    """As `_attributes`, from earlier calls with equal ones."""
    if not attributes:
        return {}
    try:
        given = [(n, tuple(v) if v.__class__ is list else v, repr(v)) for n, v in attributes.items()]  # 1 equals 1.0 and True
        return _equal_attributes(operator, *given)
    except TypeError:  # an attribute that is a tensor
        return _attributes(operator.declaration, attributes)


@lru_cache(4096)
def _equal_attributes(operator: VersionedOperator, *attributes: tuple[str, Any, str]) -> dict[str, Any]:
    return _attributes(operator.declaration, {n: v for n, v, _ in attributes})


def computed_by_body(declaration: Declaration, body: Callable[..., Any]) -> Callable[..., Any]:
    """The computation on arrays of an operator that a body declares: what it refuses, then the body."""

    @wraps(body)
    def compute(xp: Xp, *inputs: Any, **attributes: Any) -> Any:
        declaration.check(xp, *inputs, **attributes)
        made = body(BodyEvaluator(xp), *inputs, **attributes)
        return tuple(made) if isinstance(made, list) else made

    return compute


def _attributes(declaration: Declaration, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a call as an operator's body expects them."""
    if not attributes:
        return {}
    return {n: _attribute(v) for n, v in declaration.stored(attributes).items() if v is not None}


def _attribute(value: Any) -> Any:
    """An attribute as an operator's body expects it."""
    if isinstance(value, list):
        return tuple(value)
    if hasattr(value, "SerializeToString") and hasattr(value, "raw_data"):
        return numpy_helper.to_array(value)
    return value
