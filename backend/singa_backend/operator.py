"""An operator is declared once: its ONNX name, the schema versions it means, and what it computes.

    @operator("Softmax", 13)
    def softmax(xp: Xp, x: Array, *, axis: int = -1) -> Array: ...

Left of the star stand the inputs, right of it the attributes, with the names and defaults of ONNX's schema.
`xp` is the array namespace (see arrays.py).  Annotations ask for more:

    Host[int], Host[Ints], Host[np.ndarray]    an input that is read on the host: a shape, an axis, a ratio
    run: Run           run(subgraph, *inputs) -> list of outputs, for operators with graph attributes
    wanted: Wanted     which outputs the node asks for, a tuple of bool
    version: Version   the schema version that the node means, where one body serves several

An optional input that is absent takes the parameter's default.  What a body returns is cast to the dtype that the
schema binds to that output, and a body returns a tuple for several outputs.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import numpy as np
from onnx import defs

from . import dtypes
from .arrays import Array, Xp
from .errors import OperatorError

if TYPE_CHECKING:
    pass

__all__ = [
    "Array", "Declaration", "Host", "Ints", "Run", "Version", "Wanted", "Xp", "declarations", "operator", "schemas",
]  # fmt: skip

T = TypeVar("T")
Ints: TypeAlias = tuple[int, ...]
Host: TypeAlias = Annotated[T, "host"]
Run: TypeAlias = Annotated[Callable[..., list[Any]], "run"]
Wanted: TypeAlias = Annotated[tuple[bool, ...], "wanted"]
Version: TypeAlias = Annotated[int, "version"]

REQUIRED: Any = inspect.Parameter.empty

DOMAINS = {"": "ai.onnx"}
"""ONNX writes its main domain as the empty string; everything that people read says ai.onnx."""


@dataclass(frozen=True)
class Input:
    """An input parameter of a body: how to read it, and what stands in for it when it is absent."""

    name: str
    default: Any
    variadic: bool
    host: Any = None  # the type to read it as on the host, or None


@dataclass
class Declaration:
    """One meaning of an operator, for the schema versions that it lists.  Calling it calls the body."""

    name: str
    domain: str
    versions: tuple[int, ...]
    body: Callable[..., Any]
    widen: bool
    host: bool
    inputs: tuple[Input, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)  # name -> default, REQUIRED where there is none
    services: dict[str, str] = field(default_factory=dict)  # parameter -> "run", "wanted" or "version"

    def __post_init__(self) -> None:
        inputs: list[Input] = []
        for parameter in list(inspect.signature(self.body, eval_str=True).parameters.values())[1:]:
            kind, base = _annotation(parameter.annotation)
            if kind in ("run", "wanted", "version"):
                self.services[parameter.name] = kind
            elif parameter.kind == parameter.KEYWORD_ONLY:
                self.attributes[parameter.name] = parameter.default
            else:
                variadic = parameter.kind == parameter.VAR_POSITIONAL
                inputs.append(Input(parameter.name, parameter.default, variadic, base if kind == "host" else None))
        self.inputs = tuple(inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    def __str__(self) -> str:
        return f"{self.name}-{','.join(map(str, self.versions))}"

    @cached_property
    def _plain(self) -> bool:
        """No input needs preparation: the body takes the values as they are."""
        return not any(i.host or i.variadic for i in self.inputs)

    def arguments(self, xp: Xp, values: Sequence[Any]) -> list[Any]:
        """The values of a node's inputs as the body wants them; None marks an absent one."""
        out: list[Any] = []
        last = len(self.inputs) - 1
        for i, value in enumerate(values):
            declared = self.inputs[min(i, last)]
            if value is None and declared.default is not REQUIRED:
                value = declared.default
            elif declared.host is not None and value is not None:
                value = _on_host(xp, value, declared)
            out.append(value)
        return out


def _annotation(annotation: Any) -> tuple[str, Any]:
    """What an annotation asks for ('host', 'run', ... or ''), and the type that it names."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for arm in typing.get_args(annotation):
            kind, base = _annotation(arm)
            if kind:
                return kind, base
    if typing.get_origin(annotation) is Annotated:
        base, kind, *_ = typing.get_args(annotation)
        return kind, base
    return "", annotation


def _on_host(xp: Xp, value: Any, declared: Input) -> Any:
    """Read an input on the host as the declared type: a Python number, a tuple of numbers, or a NumPy array."""
    if not xp.isarray(value) and not isinstance(value, (np.ndarray, np.generic)):
        return value  # a sequence, a map
    array = value if isinstance(value, np.ndarray) else xp.to_host(value)
    kind = declared.host
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if kind is np.ndarray:
        return array
    if typing.get_origin(kind) is tuple or kind is tuple:
        return tuple(array.reshape(-1).tolist())
    if array.size != 1:
        raise OperatorError(f"input {declared.name!r} must hold one value; it has shape {array.shape}", code="SX402")
    return kind(array.reshape(-1)[0])


# --- the register ---------------------------------------------------------------------------------------------------

declarations: dict[tuple[str, str], dict[int, Declaration]] = {}
"""(domain, name) -> schema version -> its declaration."""

schemas: dict[tuple[str, str], dict[int, defs.OpSchema]] = {}
"""(domain, name) -> since-version -> ONNX's schema; the 659 of onnx 1.23 and whatever a newer onnx adds."""

for _schema in defs.get_all_schemas_with_history():
    schemas.setdefault((_schema.domain, _schema.name), {})[_schema.since_version] = _schema


def operator(
    name: str, *versions: int, domain: str = "", widen: bool = True, host: bool = False
) -> Callable[[Callable[..., Any]], Declaration]:
    """Declare what `name` means in these schema versions (listed, never ranged).

    widen: narrow floats (float16, bfloat16, float8, ...) reach the body as float32 and are rounded once at the end.
        False for operators that only move values or that do their own rounding.
    host: the body runs on NumPy whatever the device (strings, maps, decoders).

    Raises ValueError when one of the versions is taken, or is none of ONNX's.
    """

    def declare(body: Callable[..., Any]) -> Declaration:
        known = schemas.get((domain, name), {})
        plain = body.body if isinstance(body, Declaration) else body
        declaration = Declaration(name, domain, versions, plain, widen, host)
        taken = declarations.setdefault((domain, name), {})
        for version in versions:
            if version in taken:
                raise ValueError(f"{name}-{version} is declared twice: {taken[version].body} and {plain}")
            if version not in known:
                raise ValueError(f"ONNX has no {name}-{version} (it has {sorted(known)})")
            taken[version] = declaration
        return declaration

    return declare


def schema_version(domain: str, name: str, opset: int) -> int | None:
    """The schema version that a model with this opset means: the newest at or below it; None where there is none."""
    return max((v for v in schemas.get((domain, name), {}) if v <= opset), default=None)


# --- calling a declaration as one schema version ----------------------------------------------------------------------


class Meaning:
    """A declaration seen as one schema version: what the schema knows about types is applied around the body."""

    def __init__(self, declaration: Declaration, version: int) -> None:
        self.declaration = declaration
        self.version = version
        self.schema = schemas[declaration.domain, declaration.name][version]
        self._bound = [self._binding(o) for o in self.schema.outputs]
        variadic = defs.OpSchema.FormalParameterOption.Variadic
        self._variadic_output = bool(self._bound) and self.schema.outputs[-1].option == variadic

    def _binding(self, output: defs.OpSchema.FormalParameter) -> np.dtype[Any] | tuple[int, ...] | None:
        """Where an output's dtype comes from: a fixed dtype, the inputs of the same type parameter, or nowhere."""
        if not output.is_homogeneous:
            return None
        allowed = [t.allowed_type_strs for t in self.schema.type_constraints if t.type_param_str == output.type_str]
        names = list(allowed[0]) if allowed else [output.type_str]
        if len(names) == 1:
            return dtypes.from_type_string(names[0])
        same = tuple(i for i, p in enumerate(self.schema.inputs) if p.type_str == output.type_str and p.is_homogeneous)
        return same or None

    def compute(self, xp: Xp, inputs: Sequence[Any], attributes: dict[str, Any], wanted: int) -> list[Any]:
        """Run the body on these values; gives at least `wanted` outputs, as arrays of the dtypes that the schema binds.

        inputs: one value per input of the node, None where absent.
        attributes: the keyword arguments of the body, services included.
        """
        declaration = self.declaration
        args = list(inputs) if declaration._plain and None not in map(type_or_none, inputs) else declaration.arguments(xp, inputs)
        if declaration.widen:
            for i, value in enumerate(args):
                if hasattr(value, "dtype") and value.dtype in dtypes.NARROW_FLOATS:
                    args[i] = value.astype(np.float32)
        result = declaration.body(xp, *args, **attributes)
        outputs = list(result) if isinstance(result, tuple) else [result]
        for i, value in enumerate(outputs):
            if value is None or isinstance(value, (list, dict)):
                continue
            if not xp.isarray(value) and not is_host_value(value):
                outputs[i] = value = xp.asarray(value)
            bound = self._bound[min(i, len(self._bound) - 1)] if i < len(self._bound) or self._variadic_output else None
            if bound is None:
                continue
            dtype = bound if isinstance(bound, np.dtype) else self._dtype(bound, inputs)
            if dtype is not None and value.dtype != dtype:
                outputs[i] = value.astype(dtype)
        if len(outputs) < wanted:
            raise OperatorError(f"{declaration} gave {len(outputs)} outputs where the node names {wanted}", code="SX490")
        return outputs

    @staticmethod
    def _dtype(candidates: tuple[int, ...], inputs: Sequence[Any]) -> np.dtype[Any] | None:
        for i in candidates:
            if i < len(inputs) and hasattr(inputs[i], "dtype"):
                dtype: np.dtype[Any] = inputs[i].dtype
                return dtype
        return None


def type_or_none(value: Any) -> Any:
    return None if value is None else type(value)


def is_host_value(value: Any) -> bool:
    """Whether a value lives on the host on every device: strings, maps, and dtypes that CuPy lacks."""
    if isinstance(value, np.ndarray):
        return value.dtype in dtypes.HOST_ONLY
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and any(is_host_value(v) for v in value)


def runs_on_host(declaration: Declaration, attributes: dict[str, Any], inputs: Sequence[Any]) -> bool:
    """Whether a node must run on NumPy: by declaration, for its values, or for the dtype that it makes."""
    if "run" in declaration.services.values():
        return False  # its subgraphs choose, node by node
    if declaration.host or any(is_host_value(v) for v in inputs):
        return True
    for name in ("to", "dtype", "output_dtype"):
        code = attributes.get(name)
        if isinstance(code, int) and code and dtypes.numpy_dtype(code) in dtypes.HOST_ONLY:
            return True
    return any(is_host_value(v) for v in attributes.values())


def load_all() -> None:
    """Import every operator family, so that `declarations` is complete."""
    import importlib
    import pkgutil

    from . import operators

    for module in pkgutil.iter_modules(operators.__path__):
        importlib.import_module(f"{operators.__name__}.{module.name}")
