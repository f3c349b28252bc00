"""Operators that a program adds: their schema is derived from the signature of the function that computes them.

    @register_operator(domain="com.example")
    def Squareplus(xp, x: "float") -> "float":
        return (x + xp.sqrt(x * x + 4)) / 2

`register_operator` adds an operator for every model of the process. `define_operator` adds it for the models that request it by
`prepare(..., operators=[...])`: its declaration has a private domain, which no file can name, and `opsets/model.py` writes the
public one.
"""

from __future__ import annotations
import __future__

import inspect
import re
import types as python_types
import typing
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, TypeVar

import numpy as np
from onnx import AttributeProto, defs, helper

from .. import dtypes
from ..errors import InvalidInput, UnsupportedModel
from ..proto.schemas import DOMAINS, LAX, declare_schema, is_custom, is_private, load_domain, private_domain
from .declaration import TRAITS, Declaration, declarations, operator
from .graph import Node
from .versioned import check_findable, import_declarations

FLOATS = ("bfloat16", "float16", "float", "double")
"""The element types of the type parameter T, unless `types` has others."""

_FORMS = 'write an element type such as "float" or "int64", a NumPy dtype, or a type parameter: "T" has any float type'
_DOMAIN = r"[A-Za-z0-9_.-]+"
_SERVICES = ("wanted", "version")
Self = TypeVar("Self", bound="CustomOperator")


class CustomOperator:
    """An operator that a program has added; `define_operator` and `register_operator` create it.

    Attributes:
        name: the operator type.
        domain: its domain in files.
        version: its schema version.
        declaration: what it computes; its domain is private unless the operator is registered.
    """

    def __init__(self, declaration: Declaration, domain: str, version: int) -> None:
        self.declaration = declaration
        self.name = declaration.name
        self.domain = domain
        self.version = version

    def gradient(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the gradient, in ONNX operators.

        Args:
            rule: a function of `op` and, by name, any of dy, dys, y, ys, needs, the inputs and the attributes. It returns the
                gradient of each input.

        Returns:
            The rule.

        Raises:
            InvalidInput: a parameter of the rule has another name, or there is a gradient already (SX389).
        """
        self._names(rule, "gradient", ("dy", "dys", "y", "ys", "needs", *_SERVICES))
        if self.declaration.gradient_rule is not None or self.declaration.reason:
            raise _wrong(f"{self} has a gradient already")
        return self.declaration.gradient(rule)

    def function(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the function body: the operator as a composition of ONNX operators.

        Files contain it, so that other runtimes can run the operator. Without a gradient rule the operator is differentiated
        through it.

        Args:
            body: a function of `op` and, by name, any of the inputs and the attributes. It returns the outputs.

        Returns:
            The body.

        Raises:
            InvalidInput: a parameter of the body has another name, or there is a function body already (SX389).
        """
        self._names(body, "function body", _SERVICES)
        if self.declaration.decomposition_rule is not None:
            raise _wrong(f"{self} has a function body already")
        return self.declaration.decomposition(body)

    def _names(self, rule: Callable[..., Any], what: str, more: Sequence[str]) -> None:
        if not callable(rule):
            raise _wrong(f"the {what} of {self} must be a function, got a {type(rule).__name__}")
        known = [*(i.name for i in self.declaration.inputs), *self.declaration.attributes, *more]
        given = list(inspect.signature(rule).parameters)
        unknown = [n for n in given[1:] if n not in known]
        if not given or unknown:
            there = repr(unknown[0]) if unknown else "no parameter"
            raise _wrong(f"the {what} of {self} must have `op` first, then any of {', '.join(known)}; got {there}")

    def __reduce__(self) -> Any:
        """Support pickle: an operator is found by its name, in the module that defines it."""
        declaration = self.declaration
        check_findable(declaration)
        return _defined, (declaration.domain, self.name, self.version, declaration.body.__module__)

    def __repr__(self) -> str:
        return f"<operator {self}>"

    def __str__(self) -> str:
        return f"{self.domain}.{self.name}-{self.version}"


_made: dict[tuple[str, str, int], CustomOperator] = {}
"""(domain, name, version) -> the operator; the domain is private unless the operator is registered."""


def _defined(domain: str, name: str, version: int, module: str) -> CustomOperator:
    """An operator of a pickle; raises UnsupportedModel (SX202) if this process does not define it."""
    import_declarations([module])
    found = _made.get((domain, name, version))
    if found is None:
        raise UnsupportedModel(
            f"the pickle has the operator {name}-{version}, which this process does not define",
            code="SX202",
            hint=f"define it in a module, as {module!r} does there, not within a function, and import the module here",
        )
    return found


def define_operator(
    name: str = "",
    *,
    domain: str,
    version: int = 1,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    types: Mapping[str, Sequence[str]] | None = None,
    gradient: Callable[..., Any] | None = None,
    function: Callable[..., Any] | None = None,
    traits: Sequence[str] = (),
    doc: str = "",
) -> Callable[[Callable[..., Any]], CustomOperator]:
    """Define an operator for the models that request it: `prepare(model, operators=[it])`.

    Args:
        name: the operator type; by default the name of the function.
        domain: its domain, which is not one of ONNX's.
        version: its schema version.
        inputs: "x: T" for each input, "x?: T" for an optional one; None for the annotations of the function.
        outputs: "y: T" for each output, "y?: T" for an optional one, which files may leave out and for which the function
            may return None; None for the annotation of the result.
        types: the element types that each type parameter allows; T allows the floats.
        gradient: the gradient, as for the method `gradient` of an operator.
        function: the function body, as for the method `function` of an operator.
        traits: facts of the operator, such as "unary" for one value for each value of the first input.
        doc: the documentation; by default that of the function.

    Returns:
        A decorator of the function that computes the operator. Its parameters are `xp` (NumPy, CuPy), the inputs, and after a
        star the attributes with their defaults. It receives arrays of narrow floats as float32.

    Raises:
        InvalidInput: the domain is one of ONNX's, or the signature is not that of an operator (SX389).

    Example:
        @define_operator(domain="com.example")
        def Squareplus(xp, x: "float", *, b: float = 4.0) -> "float":
            return (x + xp.sqrt(x * x + b)) / 2

        rep = SingaBackend.prepare("net.onnx", operators=[Squareplus])
    """
    return _definition(False, name, domain, version, inputs, outputs, types, gradient, function, traits, doc)


def register_operator(
    name: str = "",
    *,
    domain: str,
    version: int = 1,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    types: Mapping[str, Sequence[str]] | None = None,
    gradient: Callable[..., Any] | None = None,
    function: Callable[..., Any] | None = None,
    traits: Sequence[str] = (),
    doc: str = "",
) -> Callable[[Callable[..., Any]], CustomOperator]:
    """Define an operator for every model of this process.

    Args:
        name: the operator type; by default the name of the function.
        domain: its domain, which is not one of ONNX's.
        version: its schema version.
        inputs: "x: T" for each input, "x?: T" for an optional one; None for the annotations of the function.
        outputs: "y: T" for each output, "y?: T" for an optional one, which files may leave out and for which the function
            may return None; None for the annotation of the result.
        types: the element types that each type parameter allows; T allows the floats.
        gradient: the gradient, as for the method `gradient` of an operator.
        function: the function body, as for the method `function` of an operator.
        traits: facts of the operator, such as "unary" for one value for each value of the first input.
        doc: the documentation; by default that of the function.

    Returns:
        A decorator of the function that computes the operator, as for `define_operator`.

    Raises:
        InvalidInput: the operator is registered already, the domain is one of ONNX's, or the signature is not that of an
            operator (SX389).

    Example:
        @register_operator(domain="com.example")
        def Squareplus(xp, x: "float", *, b: float = 4.0) -> "float":
            return (x + xp.sqrt(x * x + b)) / 2
    """
    return _definition(True, name, domain, version, inputs, outputs, types, gradient, function, traits, doc)


def _definition(
    registers: bool,
    name: str,
    domain: str,
    version: int,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    types: Mapping[str, Sequence[str]] | None,
    gradient: Callable[..., Any] | None,
    function: Callable[..., Any] | None,
    traits: Sequence[str],
    doc: str,
) -> Callable[[Callable[..., Any]], CustomOperator]:
    """The decorator of `define_operator` and `register_operator`."""
    if callable(name):
        raise _wrong("the decorator needs a domain: write @register_operator(domain=...)")
    if not isinstance(domain, str) or not re.fullmatch(_DOMAIN, domain):
        raise _wrong(f"a domain must be letters, digits, '_', '-' and '.', such as 'com.example', got {domain!r}")
    load_domain(domain)
    if not is_custom(domain) or domain in DOMAINS.values():
        raise _wrong(f"the domain of an operator must not be one of ONNX's, got {domain!r}")
    if isinstance(version, bool) or not isinstance(version, int) or not 0 < version < 1 << 31:
        raise _wrong(f"the version of an operator must be a positive integer, got {version!r}")
    if unknown := sorted(set(traits) - set(TRAITS)):
        raise _wrong(f"a trait must be one of {', '.join(TRAITS)}, got {unknown[0]!r}")

    def declare(body: Callable[..., Any]) -> CustomOperator:
        if not isinstance(body, python_types.FunctionType):
            raise _wrong(f"an operator must be computed by a function, got a {type(body).__name__}")
        plain = name or body.__name__
        if not plain.isidentifier():
            raise _wrong(f"the name of an operator must be an identifier, got {name!r}")
        if registers and version in declarations.get((domain, plain), {}):
            there = declarations[domain, plain][version].body
            text = f"{domain}.{plain}-{version} is registered already, by {there.__module__}.{there.__qualname__}"
            raise _wrong(text, "use another version, or define_operator and prepare(..., operators=[...])")
        form = _Form(body, plain, dict(types or {}))
        taken = [d for d, n, v in _made if (n, v) == (plain, version)]
        place = domain if registers else private_domain(domain, body.__module__, body.__qualname__, taken)
        declare_schema(
            plain,
            form.inputs(inputs),
            form.outputs(outputs),
            form.attributes(),
            types=form.types,
            doc=doc or inspect.getdoc(body) or "",
            domain=place,
            version=version,
        )
        made = CustomOperator(operator(plain, version, domain=place, traits=traits)(_bare(body)), domain, version)
        try:
            if gradient is not None:
                made.gradient(gradient)
            if function is not None:
                made.function(function)
        except InvalidInput:
            del declarations[place, plain][version]
            raise
        _made[place, plain, version] = made
        return made

    return declare


def adopted(made: CustomOperator, kind: type[Self]) -> Self:
    """The operator as an object of a subclass, which takes its place."""
    found = kind(made.declaration, made.domain, made.version)
    _made[made.declaration.domain, made.name, made.version] = found
    return found


class _Form:
    """The schema of an operator, read from the signature of its function."""

    def __init__(self, body: python_types.FunctionType, name: str, types: dict[str, Sequence[str]]) -> None:
        self.body, self.name = body, name
        self.types: dict[str, Sequence[str]] = {
            p: [self._element(t, f"type parameter {p}") for t in ts] for p, ts in types.items()
        }
        if "T" not in self.types:
            self.types["T"] = list(FLOATS)
        self.signature = inspect.signature(body)
        given = list(self.signature.parameters.values())
        if not given or given[0].kind not in (given[0].POSITIONAL_ONLY, given[0].POSITIONAL_OR_KEYWORD):
            raise _wrong(f"the first parameter of {name} must be `xp`, the namespace of the arrays")
        self.parameters = [p for p in given[1:] if p.kind != p.KEYWORD_ONLY]
        for p in given:
            if p.kind == p.VAR_KEYWORD:
                raise _wrong(f"{name} must name its attributes, got **{p.name}")
        for p in self.parameters:
            if p.default is not p.empty and p.default is not None:
                raise _wrong(f"the default of the input {p.name!r} of {name} must be None", "put attributes after a star")

    def inputs(self, given: Sequence[str] | None) -> list[str]:
        names = [p.name for p in self.parameters]
        if given is not None:
            made = [self._text(t, "input") for t in given]
            there = [t.split(": ")[0].rstrip("?").lstrip("*") for t in made]
            if there != names:
                raise _wrong(f"inputs of {self.name} must name the parameters {', '.join(names)}, got {', '.join(there)}")
            return made
        made = []
        for p in self.parameters:
            mark = "*" if p.kind == p.VAR_POSITIONAL else ""
            end = "?" if p.default is None else ""
            made.append(f"{mark}{p.name}{end}: {self._type(self._value(p.annotation), f'input {p.name!r}')}")
        return made

    def outputs(self, given: Sequence[str] | None) -> list[str]:
        if given is not None:
            made = [self._text(t, "output") for t in given]
            optional = [t.split(": ")[0].endswith("?") for t in made]
            if not made or optional[0] or any("*" in t for t in made) or optional != sorted(optional):
                what = "must have one output or more, the optional ones last and none of them variadic"
                raise _wrong(f"{self.name} {what}, got {list(given)}")
            return made
        value = self._value(self.signature.return_annotation)
        several = typing.get_args(value) if typing.get_origin(value) is tuple else value
        kinds = list(several) if isinstance(several, tuple) else [several]
        taken = {p.name for p in self.parameters}
        free = (n for n in ("y", "z", "result", "result_of_operator") if n not in taken)
        first = next(free)
        names = [first] if len(kinds) == 1 else [f"{first}{i}" for i in range(len(kinds))]
        return [f"{n}: {self._type(k, 'the result')}" for n, k in zip(names, kinds, strict=True)]

    def attributes(self) -> dict[str, Any]:
        return {p.name: self._attribute(p) for p in self.signature.parameters.values() if p.kind == p.KEYWORD_ONLY}

    def _attribute(self, p: inspect.Parameter) -> defs.OpSchema.Attribute:
        default = p.default
        if default is not p.empty and default is not None:
            try:
                if isinstance(default, (bool, int, float, str)) or (isinstance(default, (tuple, list)) and default):
                    return defs.OpSchema.Attribute(p.name, helper.make_attribute(p.name, default), "")
            except (TypeError, ValueError):
                pass
            what = f"the default of the attribute {p.name!r} of {self.name} must be a number, a text or a tuple of them"
            raise _wrong(f"{what}, got {default!r}", "write None, and the type as the annotation, for no default")
        value = self._value(p.annotation, element=False)
        arms = [a for a in typing.get_args(value) if a is not type(None)]
        if isinstance(value, python_types.UnionType) or typing.get_origin(value) is typing.Union:
            value = arms[0] if len(arms) == 1 else None
        kinds = {bool: "INT", int: "INT", float: "FLOAT", str: "STRING"}
        if typing.get_origin(value) is tuple:
            kind = f"{kinds.get(typing.get_args(value)[0], '')}S"
        else:
            kind = kinds.get(value, "") if isinstance(value, type) else ""
        if kind in ("", "S"):
            what = f"the attribute {p.name!r} of {self.name} must have a default, or a type such as int or tuple[float, ...]"
            raise _wrong(what)
        return defs.OpSchema.Attribute(p.name, getattr(defs.OpSchema.AttrType, kind), required=default is p.empty)

    def _value(self, annotation: Any, element: bool = True) -> Any:
        """An annotation; a text is an element type or an expression, and the text of one if annotations are not evaluated."""
        deferred = bool(self.body.__code__.co_flags & __future__.annotations.compiler_flag)
        if isinstance(annotation, str) and deferred and not (element and self._is_type(annotation)):
            annotation = self._evaluated(annotation)
        if isinstance(annotation, str) and not (element and self._is_type(annotation)):
            annotation = self._evaluated(annotation)
        return annotation

    def _is_type(self, text: str) -> bool:
        return text in self.types or dtypes.from_type_string(f"tensor({text})") is not None

    def _evaluated(self, text: str) -> Any:
        try:
            return eval(text, self.body.__globals__)
        except Exception:
            return text  # the name of an element type, or reported as a type that is not known

    def _text(self, text: Any, what: str) -> str:
        found = re.fullmatch(r"(\*?)([A-Za-z_]\w*)(\??):\s*(\S+)", text) if isinstance(text, str) else None
        if found is None:
            raise _wrong(f'an {what} of {self.name} must be "name: type", got {text!r}')
        mark, name, end, kind = found.groups()
        return f"{mark}{name}{end}: {self._type(kind, f'{what} {name!r}')}"

    def _type(self, value: Any, what: str) -> str:
        if value is inspect.Parameter.empty:
            raise _wrong(f"{what} of {self.name} has no type", _FORMS)
        if isinstance(value, str) and value in self.types:
            return value
        return f"tensor({self._element(value, what)})"

    def _element(self, value: Any, what: str) -> str:
        """The ONNX name of an element type."""
        if isinstance(value, str):
            text = value.removeprefix("tensor(").removesuffix(")")
            if dtypes.from_type_string(f"tensor({text})") is not None:
                return text
            try:
                exact = np.dtype(text).name == text  # not "int", which differs between ONNX and NumPy
            except TypeError:
                exact = False
            if exact and dtypes.known(np.dtype(text)):
                return dtypes.onnx_name(np.dtype(text))
        numpy_type = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
        if numpy_type and dtypes.known(np.dtype(value)):
            return dtypes.onnx_name(np.dtype(value))
        raise _wrong(f"{what} of {self.name} has the unknown type {value!r}", _FORMS)


def _bare(body: python_types.FunctionType) -> Callable[..., Any]:
    """The function without its annotations, which the declaration would read as requests."""
    made = python_types.FunctionType(body.__code__, body.__globals__, body.__name__, body.__defaults__, body.__closure__)
    made.__kwdefaults__ = dict(body.__kwdefaults__ or {})
    made.__module__, made.__qualname__, made.__doc__ = body.__module__, body.__qualname__, body.__doc__
    return made


def by_public_name(operators: Any) -> dict[tuple[str, str], dict[int, str]]:
    """(domain, name) -> version -> the domain of the declaration, of the argument `operators` of `prepare`.

    Raises InvalidInput (SX389) for anything but a list of operators that have one name and version each.
    """
    if isinstance(operators, (str, CustomOperator)) or not isinstance(operators, Sequence):
        raise _wrong(f"operators must be a list of operators, got a {type(operators).__name__}")
    found: dict[tuple[str, str], dict[int, str]] = {}
    for one in operators:
        if not isinstance(one, CustomOperator):
            text = f"operators must hold what define_operator or register_operator returned, got a {type(one).__name__}"
            raise _wrong(text, "put @define_operator(domain=...) above the function")
        versions = found.setdefault((one.domain, one.name), {})
        if versions.setdefault(one.version, one.declaration.domain) != one.declaration.domain:
            raise _wrong(f"operators has two of {one}")
    return found


def registered(module: str) -> list[CustomOperator]:
    """The operators that a module, or one of a package, has registered."""
    return [
        one
        for (domain, *_), one in _made.items()
        if not is_private(domain) and f"{one.declaration.body.__module__}.".startswith(f"{module}.")
    ]


def scoped(found: Sequence[Declaration]) -> list[CustomOperator]:
    """The operators with these declarations that `define_operator` made."""
    return [_made[d.domain, d.name, d.versions[0]] for d in found if is_private(d.domain) and d.domain != LAX]


def definition_lines(node: Node) -> str:
    """The lines to write for an operator that nothing defines; "" for a node whose names cannot be those of Python."""
    names = [f"x{i}" if len(node.inputs) > 1 else "x" for i in range(len(node.inputs))]
    kinds = {"INT": "int", "FLOAT": "float", "STRING": "str", "INTS": "tuple[int, ...]", "FLOATS": "tuple[float, ...]",
             "STRINGS": "tuple[str, ...]"}  # fmt: skip
    name_of = AttributeProto.AttributeType.Name
    attributes = [(n, kinds.get(name_of(getattr(a, "type", AttributeProto.GRAPH)), "")) for n, a in node.attributes.items()]
    words = [node.op_type, *(n for n, _ in attributes)]
    usable = all(w.isascii() and w.isidentifier() and not iskeyword(w) and len(w) <= 60 for w in words)
    if not usable or len(names) > 8 or len(words) > 9 or not re.fullmatch(_DOMAIN, node.domain) or len(node.domain) > 60:
        return ""
    if not all(kind for _, kind in attributes) or set(names) & {n for n, _ in attributes}:
        return ""
    parts = ["xp", *(f'{n}: "T"' for n in names), *(["*"] if attributes else []), *(f"{n}: {kind}" for n, kind in attributes)]
    kind = ", ".join(['"T"'] * len(node.outputs))
    result = kind if len(node.outputs) == 1 else f"tuple[{kind}]"
    shown = [
        "import sonnx",
        f'@sonnx.register_operator(domain="{node.domain}")',
        f"def {node.op_type}({', '.join(parts)}) -> {result}:",
        "    y = ...  # computed by xp as by NumPy; T is any float type",
        "    return y",
    ]
    return "".join(f"\n    {line}" for line in shown)


def _wrong(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code="SX389", hint=hint)
