"""An operator is declared once: its ONNX name, the schema versions it means, and what it computes.

    @operator("Softmax", 13)
    def softmax(xp: Xp, x: Array, *, axis: int = -1) -> Array: ...

Left of the star stand the inputs, right of it the attributes, with the names and defaults of ONNX's schema.
`xp` is the array namespace (see arrays.py).  Annotations ask for more:

    Host[int], Host[Ints], Host[np.ndarray]    an input that is read on the host: a shape, an axis, a ratio
    run: Run           run(subgraph, *inputs) -> list of outputs, for operators with graph attributes
    wanted: Wanted     which outputs the node asks for, a tuple of bool
    version: Version   the schema version that the node means, where one body serves several
    between: Between   the graph between the xs and the y of a Gradient
    derived: Derived   derived(make) -> make(), made once for each node: what follows from the attributes alone

An optional input that is absent takes the parameter's default.  What a body returns is cast to the dtype that the
schema binds to that output, and a body returns a tuple for several outputs.

Under its forward stands the gradient, written in ONNX's own operators (see differentiate.py), or why there is none:

    @softmax.gradient
    def _(op: Op, dy: V, y: V, axis: int) -> V:
        return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)))

    ceil.no_gradient("zero")
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import numpy as np
from onnx import defs

from . import dtypes, limits
from .arrays import Array, Xp
from .errors import OperatorError

if TYPE_CHECKING:
    from .vocabulary import Vocabulary

__all__ = [
    "Array", "Between", "Declaration", "Derived", "Host", "Ints", "Op", "Run", "V", "Version", "Wanted", "Xp", "declarations",
    "operator", "schemas",
]  # fmt: skip

T = TypeVar("T")
Ints: TypeAlias = tuple[int, ...]
Host: TypeAlias = Annotated[T, "host"]
Run: TypeAlias = Annotated[Callable[..., list[Any]], "run"]
Wanted: TypeAlias = Annotated[tuple[bool, ...], "wanted"]
Version: TypeAlias = Annotated[int, "version"]
Derived: TypeAlias = Annotated[Callable[[Callable[[], Any]], Any], "derived"]
Between: TypeAlias = Annotated[Any, "between"]
Op: TypeAlias = "Vocabulary[Any]"
"""ONNX's operators as functions; see vocabulary.py."""
V: TypeAlias = Any
"""A value in a vocabulary: an array, or a symbol of a graph that is being built."""

REQUIRED: Any = inspect.Parameter.empty
_SMALL = 1 << 16
"""Elements of a broadcast result that no limit is asked about."""

DOMAINS = {"": "ai.onnx"}
"""ONNX writes its main domain as the empty string; everything that people read says ai.onnx."""

RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
"""Operators that draw: the same inputs need not give the same.  A Dropout may."""


def plain_domain(domain: str) -> str:
    """A domain as it is written here: a file may spell out that of ONNX itself."""
    return "" if domain == "ai.onnx" else domain


@dataclass(frozen=True)
class Input:
    """An input parameter of a body: how to read it, and what stands in for it when it is absent."""

    name: str
    default: Any
    variadic: bool
    host: Any = None  # the type to read it as on the host (int, tuple, np.ndarray, ...), or None


class Rule:
    """A function in ONNX's vocabulary, called with `op` and those of the known values that its parameters name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.names = tuple(inspect.signature(function).parameters)[1:]

    def __call__(self, op: Any, known: dict[str, Any]) -> Any:
        return self.function(op, **{name: known[name] for name in self.names})


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
    services: dict[str, str] = field(default_factory=dict)  # parameter -> "run", "wanted", "version", "derived" or "between"
    rule: Rule | None = None
    composition: Rule | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        inputs: list[Input] = []
        for parameter in list(inspect.signature(self.body, eval_str=True).parameters.values())[1:]:
            kind, base = _annotation(parameter.annotation)
            if kind in ("run", "wanted", "version", "derived", "between"):
                self.services[parameter.name] = kind
            elif parameter.kind == parameter.KEYWORD_ONLY:
                self.attributes[parameter.name] = parameter.default
            else:
                variadic = parameter.kind == parameter.VAR_POSITIONAL
                inputs.append(Input(parameter.name, parameter.default, variadic, _form(base) if kind == "host" else None))
        self.inputs = tuple(inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    def gradient(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the gradient, in ONNX's vocabulary; see differentiate.py for what a rule may ask for."""
        self._once("gradient")
        self.rule = Rule(rule)
        return rule

    def composed(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Declare what this operator means in other, newer operators.

        The body takes `op`, the inputs and the attributes, and gives the outputs.  An operator without a gradient of its
        own is differentiated through it, and a node of an old version is written so where a newer opset is asked for.
        """
        if self.composition is not None:
            raise ValueError(f"{self} is composed twice")
        self.composition = Rule(body)
        return body

    def no_gradient(self, reason: str) -> None:
        """Say why there is no gradient: one of `differentiate.REASONS`, and ": ..." where more is to be said."""
        self._once("gradient")
        self.reason = reason

    def _once(self, what: str) -> None:
        if self.rule is not None or self.reason:
            raise ValueError(f"the {what} of {self} is declared twice")

    def __str__(self) -> str:
        return f"{self.name}-{','.join(map(str, self.versions))}"

    @cached_property
    def prepares(self) -> bool:
        """Whether some input is read on the host."""
        return any(i.host for i in self.inputs)

    def arguments(self, xp: Xp, values: Sequence[Any]) -> list[Any]:
        """The values of a node's inputs as the body wants them; None marks an absent one."""
        out: list[Any] = []
        last = len(self.inputs) - 1
        for i, value in enumerate(values):
            declared = self.inputs[i if i < last else last]
            if value is None:
                value = None if declared.default is REQUIRED else declared.default
            elif declared.host is not None:
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


def _form(kind: Any) -> Any:
    """The type to read an input as: the one of `Host[int] | None` is int, that of Host[Ints] is tuple."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    return typing.get_origin(kind) or kind


def _on_host(xp: Xp, value: Any, declared: Input) -> Any:
    """Read an input on the host as the declared type: a Python number, a tuple of numbers, or a NumPy array."""
    if not isinstance(value, np.ndarray):
        if not xp.isarray(value) and not isinstance(value, np.generic):
            return value  # a sequence, a map
        value = xp.to_host(value)
    kind = declared.host
    if kind is tuple:
        return tuple(value.tolist() if value.ndim == 1 else value.reshape(-1).tolist())
    if kind is np.ndarray:
        return value
    if kind is bool and value.dtype.kind != "b":
        raise OperatorError(f"input {declared.name!r} must be bool; it is {dtypes.onnx_name(value.dtype)}", code="SX406")
    if value.size != 1:
        raise OperatorError(f"input {declared.name!r} must hold one value; it has shape {value.shape}", code="SX402")
    return kind(value.reshape(-1)[0])


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


@cache
def newest(domain: str) -> int:
    """The newest opset of a domain, of ONNX's or of our own; 0 for a domain that nobody knows."""
    if domain == "":
        return defs.onnx_opset_version()
    load_all()
    return max((v for (d, _), known in schemas.items() if d == domain for v in known), default=0)


@cache
def type_strings(schema: defs.OpSchema) -> dict[str, list[str]]:
    """The types behind each name that a schema gives its inputs and outputs: the choices of a type parameter, else the name."""
    fixed = {p.type_str: [p.type_str] for p in (*schema.inputs, *schema.outputs)}
    return fixed | {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}


# --- calling a declaration as one schema version ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Types:
    """What a schema version says of types, read once.

    bound: where each output's dtype comes from: a fixed dtype, the inputs of the same type parameter, or nowhere.
    takes: for each input, whether it may be a tensor, of strings, of floats; a sequence or a map.
    alike: pairs of inputs that share a type parameter.  repeated: the variadic input whose values share one, if any.
    elementwise: whether the result has the inputs' broadcast shape.
    """

    bound: tuple[np.dtype[Any] | tuple[int, ...] | None, ...]
    variadic_output: bool
    takes: tuple[tuple[bool, bool, bool, bool], ...]
    alike: tuple[tuple[int, int], ...]
    repeated: int | None
    elementwise: bool


@cache
def _types(domain: str, name: str, version: int) -> _Types:
    schema = schemas[domain, name][version]
    variadic = defs.OpSchema.FormalParameterOption.Variadic
    inputs = [p.type_str if p.is_homogeneous else None for p in schema.inputs]
    outputs = list(schema.outputs)
    allowed = type_strings(schema)

    def binding(output: defs.OpSchema.FormalParameter) -> np.dtype[Any] | tuple[int, ...] | None:
        names = allowed[output.type_str]
        if not output.is_homogeneous:
            return None
        if len(names) == 1:
            return dtypes.from_type_string(names[0])
        return tuple(i for i, t in enumerate(inputs) if t == output.type_str) or None

    def taken(types: list[str]) -> tuple[bool, bool, bool, bool]:
        tensors = [t for t in types if "seq(" not in t and "map(" not in t]
        strings, floats = (any(name in t for t in tensors) for name in ("string", "float"))
        return bool(tensors), strings, floats, len(tensors) < len(types)

    return _Types(
        takes=tuple(taken(allowed[p.type_str]) for p in schema.inputs),
        bound=tuple(binding(o) for o in outputs),
        variadic_output=bool(outputs) and outputs[-1].option == variadic,
        alike=tuple((i, j) for j, t in enumerate(inputs) for i in range(j) if t is not None and t == inputs[i]),
        repeated=len(inputs) - 1 if inputs and inputs[-1] is not None and schema.inputs[-1].option == variadic else None,
        elementwise="multidirectional" in (schema.doc or "").lower(),
    )


@dataclass(frozen=True)
class _Plan:
    """What the types of a call decide, found once for each combination of input dtypes that a node meets.

    ready: whether the body takes the inputs as they are.  narrow: the inputs that are widened.
    results: the outputs' dtypes, None where nothing binds them.  rest: that of the outputs behind, where they are variadic.
    grows: whether several inputs are broadcast to one shape, which may be larger than all of theirs.
    """

    ready: bool
    narrow: tuple[int, ...]
    results: tuple[np.dtype[Any] | None, ...]
    rest: np.dtype[Any] | None
    grows: bool


class Meaning:
    """A declaration seen as one schema version: what the schema knows about types is applied around the body."""

    def __init__(self, declaration: Declaration, version: int) -> None:
        self.declaration = declaration
        self.version = version
        self.schema = schemas[declaration.domain, declaration.name][version]
        self._types = _types(declaration.domain, declaration.name, version)
        self._plans: dict[tuple[np.dtype[Any] | None, ...], _Plan] = {}
        self._derived: Any = None

    def derived(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, made at the first call of this node and kept."""
        if self._derived is None:
            self._derived = make()
        return self._derived

    def _plan(self, given: tuple[np.dtype[Any] | None, ...]) -> _Plan:
        """The plan for inputs of these dtypes, None for what is no tensor; raises OperatorError where they do not go together."""
        declaration, known = self.declaration, self._types
        self._check_types(given)
        bound = [
            next((given[i] for i in b if i < len(given) and given[i] is not None), None) if isinstance(b, tuple) else b
            for b in known.bound
        ]
        return _Plan(
            ready=not declaration.prepares and all(dtype is not None for dtype in given),
            narrow=tuple(i for i, dtype in enumerate(given) if declaration.widen and dtype in dtypes.NARROW_FLOATS),
            results=tuple(bound),
            rest=bound[-1] if known.variadic_output else None,
            grows=known.elementwise and len(given) > 1,
        )

    def _check_kinds(self, inputs: Sequence[Any]) -> None:
        """Raise OperatorError for an input of the wrong kind: NumPy would make an array of a sequence, and join strings by +."""
        read = self.declaration.inputs
        for i, value in enumerate(inputs):
            if value is None:
                continue
            tensor, strings, floats, container = self._types.takes[min(i, len(self._types.takes) - 1)]
            if isinstance(value, (list, dict)):
                wrong = "" if container else "a sequence" if isinstance(value, list) else "a map"
            elif not tensor:
                wrong = "a tensor"
            elif value.dtype == dtypes.STRING:
                wrong = "" if strings else "strings"
            else:  # a shape of [1.7, 2] would be cut to whole numbers where it is read
                host = read[min(i, len(read) - 1)].host
                wrong = "floats" if host and not floats and dtypes.is_float(value.dtype) else ""
            if wrong:
                raise OperatorError(f"the input {i} of {self.declaration.name} may not be {wrong}", code="SX406")

    def _check_types(self, given: tuple[np.dtype[Any] | None, ...]) -> None:
        """Raise OperatorError where inputs of one type parameter differ: NumPy would convert them, and lose digits."""
        pairs, first = self._types.alike, self._types.repeated
        if first is not None and len(given) > first + 1:
            pairs = (*pairs, *((first, j) for j in range(first + 1, len(given))))
        for i, j in pairs:
            if j >= len(given):
                continue
            a, b = given[i], given[j]
            if a is not None and b is not None and a != b:
                there = f"{dtypes.onnx_name(a)} and {dtypes.onnx_name(b)}"
                what = f"the inputs {i} and {j} of {self.declaration.name} must have one element type; they have {there}"
                raise OperatorError(what, code="SX406", hint="put a Cast before one of them")

    def compute(self, xp: Xp, inputs: Sequence[Any], attributes: dict[str, Any], wanted: int) -> list[Any]:
        """Run the body on these values; gives at least `wanted` outputs, as arrays of the dtypes that the schema binds.

        inputs: one value per input of the node, None where absent.
        attributes: the keyword arguments of the body, services included.
        """
        declaration = self.declaration
        given = tuple([getattr(v, "dtype", None) for v in inputs])
        plan = self._plans.get(given)
        if plan is None:
            self._check_kinds(inputs)
            plan = self._plans[given] = self._plan(given)
        args: Sequence[Any] = inputs if plan.ready else declaration.arguments(xp, inputs)
        if plan.narrow:
            args = list(args)
            for i in plan.narrow:
                if hasattr(args[i], "dtype"):  # it may have been read on the host
                    args[i] = args[i].astype(np.float32)
        if plan.grows and _product(args) > _SMALL:
            limits.admit_broadcast(args)
        result = declaration.body(xp, *args, **attributes)
        outputs = list(result) if isinstance(result, tuple) else [result]
        bound, device_array = plan.results, xp.ndarray
        for i, value in enumerate(outputs):
            if not isinstance(value, device_array):
                if value is None or isinstance(value, (list, dict)):
                    continue
                if not is_host_value(value):
                    outputs[i] = value = xp.asarray(value)
            dtype = bound[i] if i < len(bound) else plan.rest
            if dtype is not None and value.dtype is not dtype and value.dtype != dtype:
                outputs[i] = value.astype(dtype)
        if len(outputs) < wanted:
            raise OperatorError(f"{declaration} gave {len(outputs)} outputs where the node names {wanted}", code="SX490")
        return outputs


def _product(arrays: Sequence[Any]) -> int:
    """Elements of an outer product of all."""
    if len(arrays) == 2:
        return int(arrays[0].size * arrays[1].size)
    return math.prod(a.size for a in arrays)


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
