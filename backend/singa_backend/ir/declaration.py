"""The declaration of an operator: its ONNX name, its schema versions, its computation, and its gradient.

    @operator("Softmax", 13)
    def softmax(xp: Xp, x: Array, *, axis: int = -1) -> Array: ...

The parameters before the star are the inputs, those after it the attributes, with the names and defaults of ONNX's schema.
`xp` is the array namespace (see devices/namespaces.py).  Annotations request more:

    Host[int], Host[Ints], Host[np.ndarray]    an input that is read on the host: a shape, an axis, a ratio
    Host[V]                                    the same for a composition, whose body has it as a value
    run: Run           run(subgraph, *inputs) -> list of outputs, for operators with graph attributes
    wanted: Wanted     which outputs the node uses, a tuple of bool
    version: Version   the schema version of the node, if one body implements several
    forward_graph: ForwardGraph   the graph from the xs to the y of a Gradient
    derived: Derived   derived(make) -> make(), called once for each node: values that depend on the attributes only

Attributes that ONNX stores as float32 are rounded to it, defaults included: a call has the numbers that a file would have.

An absent optional input has the parameter's default.  The result of a body is cast to the dtype that the
schema binds to the output; a body with several outputs returns a tuple.

An operator that is a composition of other operators is declared by its body only, a function of `op` (see interpreters/base.py):

    @microsoft("BiasGelu", 1)
    def bias_gelu(op: Op, a: V, b: V) -> V:
        return op.Gelu(op.Add(a, b))

    @bias_gelu.accepts
    def bias_gelu_accepts(a: Array, b: Array) -> None: ...      raises OperatorError; it reads shapes, dtypes and attributes

Its computation is derived: `accepts`, then the body on arrays.  Everywhere else the body is the decomposition.

After the computation follows the gradient, written in ONNX's own operators (see autodiff/tape.py), or why there is none:

    @softmax.gradient
    def softmax_gradient(op: Op, dy: V, y: V, axis: int) -> V:
        return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)))

    ceil.no_gradient("zero")

The work of a call, if it is not one operation for each element of the result (see operators/_flops.py):

    softmax.flops(each_input(8))

The shapes of its results, and sizes that it computes, if its traits do not name them, and the dtype if the schema binds it to no
input (see ir/shapes.py):

    @flatten.shapes
    def flatten_shapes(known: KnownShapes[Any], call: Any) -> Shape | None: ...

    size.sizes(lambda known, call: ...)
    cast.dtypes(lambda known, call: ...)

Facts of the operator that other modules use are `traits` (see TRAITS) and `settings`:

    @operator("Relu", 1, 6, 13, 14, traits=("unary", "cannot_fail", "idempotent"))
    @operator("Dropout", 12, 13, 22, traits=("random_in_training",), settings=("ratio",))

`weights` names the inputs that may be trained, `caches` those that hold a past to which the call appends, `meaning_since` is the
first version that means what the newest does, `symbol` is the sign between two inputs.  All of these are declared with the newest
version.
`has_trait` reads the traits of the newest declaration; tests/operators/test_declarations.py checks them against the schema.
"""

from __future__ import annotations

import inspect
import struct
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from onnx import defs

from .. import dtypes
from ..devices.namespaces import Xp
from ..domains import Families
from ..errors import InvalidInput, OperatorError
from ..proto.schemas import is_custom, schemas
from .shapes import RULES_OF_TRAITS, DtypesRule, ShapesRule, SizesRule

T = TypeVar("T")
WorkShape: TypeAlias = tuple[int, ...] | None
"""The shape of an input in a rule of work; None for an absent one and for one that is not a tensor."""
FlopsRule: TypeAlias = Callable[[Mapping[str, Any], Sequence[WorkShape], Sequence[int]], int | None]
"""(attributes, shapes of the inputs, shape of the first output) -> floating point operations; None if they are not known."""
Ints: TypeAlias = tuple[int, ...]
Host: TypeAlias = Annotated[T, "host"]
Run: TypeAlias = Annotated[Callable[..., list[Any]], "run"]
Wanted: TypeAlias = Annotated[tuple[bool, ...], "wanted"]
Version: TypeAlias = Annotated[int, "version"]
Derived: TypeAlias = Annotated[Callable[[Callable[[], Any]], Any], "derived"]
ForwardGraph: TypeAlias = Annotated[Any, "forward_graph"]

REQUIRED: Any = inspect.Parameter.empty

TRAITS = {
    "unary": "one value for each value of the first input; other inputs hold one value, or only a type",
    "broadcasting": "one value for each place of the broadcast inputs",
    "reduction": "reduces the axes of `axes`, and keeps them with size 1 if `keepdims` is set",
    "random": "draws random numbers: the same inputs need not have the same result",
    "random_in_training": "draws random numbers in training mode only",
    "exchanges": "starts or ends an exchange with other processes, which a repeated run continues",
    "sends": "the result has the same shape for inputs of any size",
    "masks": "a negative infinity of the result may be a place that a mask removes",
    "cannot_fail": "computes every tensor of the dtypes that its schema allows",
    "idempotent": "f(f(x)) is f(x)",
    "involution": "f(f(x)) is x",
    "shape_of_first": "the result has the shape of the first input, and its dtype unless the schema fixes one",
    "finite": "the results for finite inputs that are not empty are finite, unless one overflows",
    "keeps_finite": "no NaN is made of infinities",
    "epilogue": "kernels of ONNX's operators may compute it with the call before it, of whose result it is a function",
    "reads_quantized": "kernels read its quantized constants as they are",
    "packed_weights": "several weights are in a byte, and only its definition and its kernels unpack them, in each run",
    "arithmetic": "adds, subtracts, multiplies or divides",
    "elements_of_first": "each element of the results is one of the first input, as its dtype",
    "view": "the results may be views of the first input, which need no memory",
    "rearranges": "the result has each element of the first input once, and may be a view of it",
    "pools": "combines the values of a channel at several places",
    "keeps_weights": "the result holds the values of the first input, in another place, shape or dtype: a weight stays a weight",
    "product": "its work is in products of matrices: it is the main node of a fused step",
    "linear": "a sum of products with weights, which are an input",
    "half_products": "takes float16 as it is where a device adds its products in float32 and rounds the sum",
    "norm": "normalizes the first input and multiplies it by a scale, the second input",
    "on_sizes": "exporters use it in arithmetic on shapes, and the results are about as large as the inputs",
    "moves": "counts as no floating point operation: values are moved, selected, cast or numbered",
}
"""The traits that a declaration may have, and the meaning of each."""


class Input(NamedTuple):
    """An input parameter of a body: how to read it, and its default if it is absent."""

    name: str
    default: Any
    variadic: bool
    host: Any = None  # the type to read it as on the host (int, tuple, np.ndarray, ...), or None


class OperatorRule:
    """A function written in ONNX operators, called with `op` and the known values that its parameters name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters after `op`."""
        return tuple(inspect.signature(self.function).parameters)[1:]

    @cached_property
    def _before_star(self) -> int:
        """The number of parameters that are passed by position: those up to a variadic one."""
        kinds = [p.kind for p in inspect.signature(self.function).parameters.values()][1:]
        return kinds.index(inspect.Parameter.VAR_POSITIONAL) + 1 if inspect.Parameter.VAR_POSITIONAL in kinds else 0

    def __call__(self, op: Any, known: dict[str, Any]) -> Any:
        first = self._before_star
        named = {name: known[name] for name in self.names[first:]}
        if not first:
            return self.function(op, **named)
        return self.function(op, *(known[name] for name in self.names[: first - 1]), *known[self.names[first - 1]], **named)


@dataclass
class Declaration:
    """The computation of an operator in the schema versions that it lists; calling it calls the function that declares it.

    Attributes:
        body: the computation on arrays: the function that declares the operator, or derived from it if that is a composition.
        composes: whether the function that declares the operator is a composition, which takes `op`.
        accepts_rule: raises OperatorError for arguments of a composition that the operator does not have.
    """

    name: str
    domain: str
    versions: tuple[int, ...]
    body: Callable[..., Any]
    widen: bool
    host: bool
    traits: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    weights: Mapping[int, str] = field(default_factory=dict)
    caches: Mapping[int, int] = field(default_factory=dict)
    meaning_since: int = 1
    symbol: str = ""
    absent: dict[str, Any] = field(default_factory=dict)
    gradient_rule: OperatorRule | None = None
    decomposition_rule: OperatorRule | None = None
    flops_rule: FlopsRule | None = None
    shapes_rule: ShapesRule | None = None
    sizes_rule: SizesRule | None = None
    dtypes_rule: DtypesRule | None = None
    reason: str = ""
    floats: dict[str, bool] = field(default_factory=dict)  # attributes of type FLOAT or FLOATS -> whether it is FLOATS
    composes: bool = False
    accepts_rule: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        self._declared = self.body  # its parameters are read later, when another function may be in the place of the body
        if self.floats and (defaults := self.body.__kwdefaults__):
            rounded = {n: single(defaults[n], n, self.name, s) for n, s in self.floats.items() if defaults.get(n) is not None}
            self.body.__kwdefaults__ = {**defaults, **rounded}

    @cached_property
    def _parameters(self) -> list[tuple[str, Any, inspect.Parameter]]:
        """The parameters after the namespace, each with the kind and type of its annotation; reading takes time."""
        parameters = list(inspect.signature(self._declared, eval_str=True).parameters.values())[1:]
        return [(*_annotation(p.annotation), p) for p in parameters]

    @cached_property
    def services(self) -> dict[str, str]:
        """Parameter -> "run", "wanted", "version", "derived" or "forward_graph"."""
        return {p.name: kind for kind, _, p in self._parameters if kind not in ("", "host")}

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Name -> default, REQUIRED if there is none."""
        named = (p for _, _, p in self._parameters if p.name not in self.services)
        return {p.name: p.default for p in named if p.kind == p.KEYWORD_ONLY}

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs, in the order of the schema."""
        return tuple(
            Input(p.name, p.default, p.kind == p.VAR_POSITIONAL, _form(base) if kind == "host" else None)
            for kind, base, p in self._parameters
            if p.name not in self.services and p.kind != p.KEYWORD_ONLY
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._declared(*args, **kwargs) if self.composes else self.body(*args, **kwargs)

    def accepts(self, rule: Callable[..., None]) -> Callable[..., None]:
        """Declare which arguments a composition has: the rule raises OperatorError for all others.

        Its parameters are any of the inputs and the attributes, by name, of whose arrays it reads shapes and dtypes.  Values are
        checked by `xp.indices` and `xp.refuse` only, of a parameter `xp`.
        """
        if not self.composes or self.accepts_rule is not None:
            raise ValueError(f"{self} must be a composition without another rule of what it accepts")
        self.accepts_rule = rule
        return rule

    @cached_property
    def _accepted(self) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]:
        """The parameters of `accepts`, the names of the inputs, and the defaults."""
        assert self.accepts_rule is not None
        defaults = {p.name: None if p.default is REQUIRED else p.default for _, _, p in self._parameters}
        return tuple(inspect.signature(self.accepts_rule).parameters), tuple(i.name for i in self.inputs), defaults

    def check(self, xp: Xp, *inputs: Any, **attributes: Any) -> None:
        """Raise OperatorError for arguments that the operator does not have; they are passed as to the body."""
        if self.accepts_rule is None:
            return
        names, placed, defaults = self._accepted
        known = {**defaults, **dict(zip(placed, inputs, strict=False)), **attributes, "xp": xp}
        if self.inputs and self.inputs[-1].variadic:
            known[placed[-1]] = list(inputs[len(placed) - 1 :])
        self.accepts_rule(**{n: known[n] for n in names})

    def gradient(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the gradient in ONNX operators; autodiff/tape.py lists the parameters that a rule may have."""
        self._once("gradient")
        self.gradient_rule = OperatorRule(rule)
        return rule

    def decomposition(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Declare this operator as a composition of other, newer operators.

        The body takes `op`, the inputs and the attributes, and returns the outputs.  An operator without a gradient rule is
        differentiated through it, and a node of an old version is written as it at a newer opset.
        """
        if self.decomposition_rule is not None:
            raise ValueError(f"the decomposition of {self} is declared twice")
        self.decomposition_rule = OperatorRule(body)
        return body

    def composed(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Deprecated: use `decomposition`."""
        warnings.warn("composed is now decomposition", DeprecationWarning, stacklevel=2)
        return self.decomposition(body)

    def no_gradient(self, reason: str) -> None:
        """Declare why there is no gradient: a key of `autodiff.support.REASONS`, optionally followed by ": " and details."""
        self._once("gradient")
        self.reason = reason

    def flops(self, rule: FlopsRule) -> FlopsRule:
        """Declare the floating point operations of a call, a product and a sum counting two; declared with the newest version.

        Without a rule, a call of ONNX's domain has one for each element of its first output.
        """
        if self.flops_rule is not None:
            raise ValueError(f"the flops of {self} are declared twice")
        self.flops_rule = rule
        return rule

    def shapes(self, rule: ShapesRule) -> ShapesRule:
        """Declare the shapes of the results, for all versions with the present meaning; declared with the newest version.

        Without a rule they are known from the traits: unary, broadcasting, reduction, shape_of_first.
        """
        if self.shapes_rule is not None:
            raise ValueError(f"the shapes of {self} are declared twice")
        self.shapes_rule = rule
        self.__dict__.pop("shapes_inference", None)
        return rule

    def sizes(self, rule: SizesRule) -> SizesRule:
        """Declare the sizes that the first output holds, if the operator computes with sizes; as `shapes`."""
        if self.sizes_rule is not None:
            raise ValueError(f"the sizes of {self} are declared twice")
        self.sizes_rule = rule
        return rule

    def dtypes(self, rule: DtypesRule) -> DtypesRule:
        """Declare the dtype of the first output, if the schema binds it to no input; as `shapes`."""
        if self.dtypes_rule is not None:
            raise ValueError(f"the dtypes of {self} are declared twice")
        self.dtypes_rule = rule
        return rule

    @cached_property
    def shapes_inference(self) -> ShapesRule | None:
        """The rule of the shapes of the results: the declared one, or that of a trait."""
        if self.shapes_rule is not None:
            return self.shapes_rule
        return next((rule for trait, rule in RULES_OF_TRAITS.items() if trait in self.traits), None)

    def _once(self, what: str) -> None:
        if self.gradient_rule is not None or self.reason:
            raise ValueError(f"the {what} of {self} is declared twice")

    def __str__(self) -> str:
        return f"{self.name}-{','.join(map(str, self.versions))}"

    def stored(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """The attributes as a file stores them: those of type FLOAT or FLOATS are rounded to float32.

        Raises InvalidInput (SX378) for a value that float32 cannot represent.
        """
        if not (attributes and self.floats):
            return attributes
        floats = {n: several for n, several in self.floats.items() if attributes.get(n) is not None}
        return {**attributes, **{n: single(attributes[n], n, self.name, s) for n, s in floats.items()}} if floats else attributes

    @cached_property
    def prepares(self) -> bool:
        """Whether some input is read on the host."""
        return any(i.host for i in self.inputs)

    def bind(self, inputs: Sequence[Any], attributes: dict[str, Any]) -> dict[str, Any]:
        """Inputs and attributes by the names of the declaration; absent ones have their default."""
        known: dict[str, Any] = {}
        attributes = self.stored(attributes)
        for i, declared in enumerate(self.inputs):
            if declared.variadic:
                known[declared.name] = list(inputs[i:])
            else:
                value = inputs[i] if i < len(inputs) else None
                known[declared.name] = (None if declared.default is REQUIRED else declared.default) if value is None else value
        for name, default in self.attributes.items():
            value = attributes.get(name)
            if isinstance(value, list):
                value = tuple(value)
            known[name] = (None if default is REQUIRED else default) if value is None else value
        return known

    def decompose(self, op: Any, version: int, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int) -> list[Any]:
        """The outputs of a call, written with the operators of the decomposition."""
        assert self.decomposition_rule is not None
        known = {"wanted": (True,) * outputs, "version": version, **self.bind(inputs, attributes)}
        result = self.decomposition_rule(op, known)
        return list(result)[:outputs] if isinstance(result, (tuple, list)) else [result]

    def arguments(self, xp: Xp, values: Sequence[Any]) -> list[Any]:
        """The values of a node's inputs as the body expects them; None marks an absent one."""
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


def single(value: Any, name: str, operator: str, several: bool) -> Any:
    """A float attribute rounded to float32, in which ONNX stores it: a float, or a tuple of floats if it is `several`.

    Raises InvalidInput (SX378) for anything else, and for a finite number that float32 has as infinity or a nonzero one as 0.
    """
    try:
        numbers = list(value) if several else [value]
        form = f"<{len(numbers)}f"
        rounded = struct.unpack(form, struct.pack(form, *numbers))
        fits = all(r or not float(n) for r, n in zip(rounded, numbers, strict=True))
    except (struct.error, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        what = "numbers" if several else "a number"
        text = f"attribute {name!r} of {operator} must be {what} that float32 can represent, got {value!r}"
        raise InvalidInput(text, code="SX378", hint="ONNX stores float attributes as float32")
    return rounded if several else rounded[0]


def _annotation(annotation: Any) -> tuple[str, Any]:
    """The kind of an annotation ('host', 'run', ... or ''), and its type."""
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
    """The type to read an input as: int for `Host[int] | None`, tuple for `Host[Ints]`."""
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
    if kind is np.ndarray or kind is Any:
        return value
    if kind is bool and value.dtype.kind != "b":
        raise OperatorError(f"input {declared.name!r} must be bool, got {dtypes.onnx_name(value.dtype)}", code="SX406")
    if value.size != 1:
        raise OperatorError(f"input {declared.name!r} must hold one value, got shape {value.shape}", code="SX402")
    return kind(value.reshape(-1)[0])


# --- the registry ---------------------------------------------------------------------------------------------------

declarations: Families[dict[int, Declaration]] = Families("declarations")
"""(domain, name) -> schema version -> its declaration."""

undeclared: Families[str] = Families("undeclared")
"""(domain, name) -> why an operator that has a schema is not declared, and what can be done."""


def newest_declaration(domain: str, name: str) -> Declaration | None:
    """The declaration of an operator's newest version; None if the operator is not declared."""
    known = declarations.get((domain, name))
    return known[max(known)] if known else None


def has_trait(domain: str, name: str, trait: str) -> bool:
    """Whether the newest declaration of an operator has a trait; False for an operator that is not declared."""
    declaration = newest_declaration(domain, name)
    return declaration is not None and trait in declaration.traits


def caches_of(domain: str, name: str) -> Mapping[int, int]:
    """The inputs of an operator that hold a past, each with the output that is the present."""
    declaration = newest_declaration(domain, name)
    return {} if declaration is None else declaration.caches


def _is_taken(declaration: Declaration | None, body: Callable[..., Any]) -> bool:
    """Whether a version is declared, unless a family declares the same function again because its import was interrupted."""
    if declaration is None:
        return False
    old, key = declaration._declared, (declaration.domain, declaration.name)
    again = (old.__module__, old.__qualname__) == (body.__module__, body.__qualname__)
    return not (again and declarations.lists(key, body.__module__))


def operator(
    name: str,
    *versions: int,
    domain: str = "",
    widen: bool = True,
    host: bool = False,
    traits: Sequence[str] = (),
    settings: Sequence[str] = (),
    weights: Mapping[int, str] | None = None,
    caches: Mapping[int, int] | None = None,
    meaning_since: int = 1,
    symbol: str = "",
    absent: dict[str, Any] | None = None,
    by_body: Callable[[Declaration, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[[Callable[..., Any]], Declaration]:
    """Declare the computation of an operator in these schema versions, each of which is listed.

    Args:
        name: the operator type.
        *versions: the schema versions.
        domain: the domain; "" for ONNX's.
        widen: the body receives narrow floats (float16, bfloat16, float8, ...) as float32, and the results are rounded once.
            False for operators that only move values or round themselves.
        host: the body runs on NumPy whatever the device (strings, maps, decoders).
        traits: names in TRAITS; declared with the newest version.
        settings: float inputs that configure the operator as an attribute does (a ratio, scales): they have no gradient.
        weights: the inputs that may be trained, by index, each with its name in a sentence; declared with the newest version.
        caches: the inputs that hold keys or values of a past, by index, each with the output that is the present: past and new
            rows, concatenated along the second to last axis; declared with the newest version.
        meaning_since: the first version with the present meaning, if older ones have another; declared with the newest version.
        symbol: the sign between two inputs in messages; declared with the newest version.
        absent: attribute -> the value that exporters write if they mean that it is absent; the reader drops it and warns.
        by_body: returns the computation on arrays of an operator that a composition declares: a function of `op`.

    Raises:
        ValueError: a version is declared twice or has no schema, or a trait or setting is unknown.
    """

    def declare(body: Callable[..., Any]) -> Declaration:
        known = schemas.get((domain, name), {})
        plain = body.body if isinstance(body, Declaration) else body
        attributes = [item for version in versions if version in known for item in known[version].attributes.items()]
        one, several = defs.OpSchema.AttrType.FLOAT, defs.OpSchema.AttrType.FLOATS
        floats = {n: a.type == several for n, a in attributes if a.type in (one, several)}
        marks = frozenset(traits), frozenset(settings), weights or {}, caches or {}, meaning_since, symbol, absent or {}
        declaration = Declaration(name, domain, versions, plain, widen, host, *marks, floats=floats)
        if by_body is not None and next(iter(inspect.signature(plain).parameters), "") == "op":
            declaration.composes, declaration.decomposition_rule = True, OperatorRule(plain)
            declaration.body = by_body(declaration, plain)
        taken = declarations.present((domain, name), {})
        for version in versions:
            if _is_taken(taken.get(version), plain):
                raise ValueError(f"{name}-{version} is declared twice: {taken[version].body} and {plain}")
            if version not in known:
                where, hint = (domain, ": call declare_schema before") if is_custom(domain) else ("ONNX", "")
                raise ValueError(f"{where} has no {name}-{version} (it has {sorted(known)}){hint}")
        inputs = list(dict.fromkeys(p.name for version in versions for p in known[version].inputs))
        for what, found, allowed in (("trait", traits, list(TRAITS)), ("setting", settings, inputs)):
            if unknown := sorted(set(found) - set(allowed)):
                raise ValueError(f"a {what} of {declaration} must be one of {', '.join(allowed)}, got {unknown[0]!r}")
        declarations[domain, name] = {**taken, **dict.fromkeys(versions, declaration)}
        return declaration

    return declare
