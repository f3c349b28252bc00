"""Write calls of ONNX's newest operators at any opset from 7 to the newest.

An `OpsetWriter` takes the calls of rules, layers and graphs, all at the newest opset, and adds nodes of the target opset.  It
writes a call in the first of these ways that is possible:

1. unchanged, if the older version of the operator has its inputs, attributes and element types;
2. with inputs whose values are known as the attributes that they were before (axes, sizes, bounds);
3. by a rule of adapters.py, if the semantics changed;
4. between casts, if the older version does not have the narrow floats of the call, in which its body would not compute anyway;
5. as its decomposition, declared or ONNX's function body, whose calls are written in the same way.

If none is possible, `Unwritable` names the operator and the minimum opset that can express the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
from onnx import TensorProto, TypeProto

from .. import dtypes
from ..autodiff.replay import replay
from ..choices import LEAST as LEAST
from ..errors import OperatorError, SonnxError
from ..interpreters.base import DifferentiatedCall, Example, Interpreter, Subgraph, arguments, same_attributes
from ..interpreters.builder import GraphBuilder, Symbol, has_rank, repeated
from ..interpreters.eager import Eager
from ..ir.declaration import REQUIRED, Declaration, OperatorRule, declarations
from ..ir.gradient import Gradient
from ..ir.versioned import VersionedOperator
from ..proto.schemas import (
    LAX,
    MICROSOFT,
    newest,
    public_domain,
    schema_version,
    schemas,
    version_at,
)
from ..runtime.failures import typed_error
from .call_functions import CallFunctions
from .function_bodies import function_of
from .rule_bodies import RuleBodies, name_of
from .target_schema import (
    Unwritable,
    by_name,
    check_call,
    check_results,
    in_place,
    is_deprecated,
    other_defaults,
    parts_of,
    result_types,
    same_value,
    type_string,
)

UNWRITTEN = "ai.singa.unwritten"
"""The domain of placeholders for operators that could not be written."""

ADAPTERS: dict[tuple[str, int], OperatorRule] = {}
"""(operator, schema version to write) -> rule."""


def adapter(name: str, *versions: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how the newest version of an operator is written as these versions."""

    def declare(rule: Callable[..., Any]) -> Callable[..., Any]:
        for version in versions:
            if (name, version) in ADAPTERS:
                raise ValueError(f"the adapter of {name}-{version} is declared twice")
            ADAPTERS[name, version] = OperatorRule(rule)
        return rule

    return declare


class OpsetWriter(Interpreter[Symbol]):
    """Takes calls at the newest opset and writes them to a `GraphBuilder` of an older opset (`target`).

    Attributes:
        calls: the number of calls of each operator.
        attributes: the number of calls with each attribute.
        warnings: calls that the file expresses only with restrictions.
        problems: if a list, errors are appended to it and a placeholder of the domain UNWRITTEN is written; if None, they raise.
        bodies: the bodies of the gradients that are one call each; None if rules write the nodes of all gradients.
        finds_minimum_opset: whether an error names the minimum opset, which is found by trying the opsets in turn.
        lowers: whether operators of other domains than ONNX's are written as their decompositions.
        functions: the function bodies of onnxruntime's operators; None to write none.
    """

    target: int

    def __init__(self, target: int, builder: GraphBuilder | None = None) -> None:
        self.opset = newest("")
        self.target = target
        self.builder = builder or GraphBuilder(target)
        self._depth = 0
        self._evaluator = Eager(opset=self.opset)
        self.warnings: list[str] = []
        self.calls: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.problems: list[Unwritable] | None = None
        self.finds_minimum_opset = True
        self.lowers = False
        self.functions: CallFunctions | None = None
        self.bodies: RuleBodies | None = None

    # --- values of the builder

    @property
    def is_symbolic(self) -> bool:
        return True

    def input(self, name: str, type: TypeProto | None) -> Symbol:
        return self.builder.input(name, type)

    @property
    def inputs(self) -> list[Symbol]:
        return self.builder.inputs

    def own(self, outputs: Sequence[Any], names: Sequence[str] | None = None) -> list[Any]:
        """The outputs as distinct outputs of nodes: inputs, constants and repeated values are copied.

        names: of the outputs of the model; a value that can have its name without a copy is not copied.
        """
        made: list[Any] = []
        there: set[Any] = set()
        before = repeated(outputs, names)
        for i, v in enumerate(outputs):
            if before[i] != i:
                made.append(made[before[i]])
                continue
            value = v if self.is_value(v) else self.constant(v)
            kept = names and self.builder.can_output(value, names[i], there)
            if not kept and (not self.builder.makes(value) or value in there):
                value = self._attempt("Identity", _copy, [value], {}, 1, self.opset)[0]
            made.append(value)
            there.add(value)
        return made

    def gradients_of(self, call: DifferentiatedCall) -> list[Symbol | None] | None:
        if self.bodies is None or not self.bodies.keeps(call):
            return None
        gradient = self.bodies.gradient(self, call)
        values = (*call.dys, *call.inputs, *call.outputs)
        return None if gradient is None else self.builder.gradient(gradient, values)

    def within(self, call: DifferentiatedCall) -> AbstractContextManager[None]:
        return self.builder.writing(Gradient(call.operator, name_of(call)))

    def constant(self, value: Any, dtype: dtypes.DTypeLike | None = None) -> Symbol:
        return self.builder.constant(value, dtype)

    def is_value(self, x: Any) -> bool:
        return isinstance(x, Symbol) or self.builder.is_value(x)

    def dtype(self, x: Symbol) -> np.dtype[Any]:
        return self.builder.dtype(x)

    def is_sequence(self, x: Symbol) -> bool:
        return self.builder.is_sequence(x)

    def shape(self, x: Symbol) -> tuple[int | str | None, ...] | None:
        return self.builder.shape(x)

    def constant_value(self, x: Symbol) -> np.ndarray | None:
        return self.builder.constant_value(x)

    def with_type(self, x: Symbol, type: TypeProto | None) -> Symbol:
        return self.builder.with_type(x, type)

    def type_of(self, x: Symbol) -> TypeProto | None:
        return self.builder.type_of(x)

    def example(self, x: Symbol) -> Any:
        return self.builder.example(x)

    def with_example(self, x: Symbol, example: Example) -> Symbol:
        return self.builder.with_example(x, example)

    def learn(self, x: Symbol) -> None:
        self.builder.learn(x)

    def graph(
        self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None], examples: Sequence[Example] = ()
    ) -> Subgraph:
        inner = GraphBuilder(self.target, outer=self.builder)

        def written(builder: Any, *xs: Any) -> Sequence[Any]:
            writer = OpsetWriter(self.target, builder)
            writer.warnings, writer.problems, writer.finds_minimum_opset = self.warnings, self.problems, self.finds_minimum_opset
            writer.lowers, writer.functions = self.lowers, self.functions
            writer._depth = self._depth  # within a decomposition only the decomposed call is counted and reported
            writer.calls, writer.attributes = self.calls, self.attributes
            return writer.own(make(writer, *xs))

        return inner.body(written, types, examples)

    # --- calls

    @property
    def runs_old_versions(self) -> bool:
        return True

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Symbol]:
        """Write a call of an older version; it is unchanged if the target has that version, or an equivalent one."""
        given = {n: v for n, v in operator.declaration.stored(attributes).items() if v is not None}
        self._count(operator.declaration.name, given)

        def write(writer: OpsetWriter, values: Sequence[Any]) -> list[Symbol]:
            return writer._version_written(operator, values, given, wanted)

        return self._attempt(operator.declaration.name, write, self._symbols(inputs), given, len(wanted), operator.version)

    def _symbols(self, values: Sequence[Any]) -> list[Any]:
        """Values of outer interpreters as symbols of this graph."""
        return [v if v is None or isinstance(v, Symbol) else self.builder.imported_value(v) for v in values]

    def _version_written(
        self, operator: VersionedOperator, inputs: Sequence[Any], given: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Symbol]:
        declaration, name, domain = operator.declaration, operator.declaration.name, operator.declaration.domain
        there = self._version(domain, name)
        current = schema_version(domain, name, self.opset)
        if domain and domain in self.builder.domains:
            there = schema_version(domain, name, self.builder.imported(domain))
            if there != operator.version:
                raise Unwritable(
                    f"a file must have one version of {domain}:{name}, got {operator.version} and {there}",
                    operator=name,
                    version=operator.version,
                )
        if domain and in_place(declaration, operator.version, self.target, self.lowers):
            return self._decomposed(declaration, operator.version, inputs, given, len(wanted))
        if domain:
            return self._called(declaration, operator.version, inputs, given, len(wanted))
        if there == operator.version and (there != current or (name, there) not in ADAPTERS):
            return self.at_target(name, inputs, given, outputs=len(wanted))
        versioned = "version" in declaration.services.values()
        renumbered = there is not None and operator.version < there and there != current and not versioned
        if (
            renumbered
            and result_types(name, operator.version) == result_types(name, there or 0)
            and declarations["", name].get(there or 0) is declaration
        ):
            return self.at_target(name, inputs, given, outputs=len(wanted))
        same = current is not None and declarations[domain, name].get(current) is declaration and not is_deprecated(name, current)
        if same and not (versioned and declaration.decomposition_rule is not None):
            return self.call(name, inputs, same_attributes(domain, name, self.opset, given), len(wanted), domain)
        if declaration.decomposition_rule is None:
            raise Unwritable(f"{name}-{operator.version} has no decomposition", operator=name, version=operator.version)
        if self._widens(declaration, inputs, given):
            return self._rounded_once(
                operator.schema, inputs, lambda xs: declaration.decompose(self, operator.version, xs, given, len(wanted))
            )
        return declaration.decompose(self, operator.version, inputs, given, len(wanted))

    def _called(
        self, declaration: Declaration, version: int, inputs: Sequence[Any], given: dict[str, Any], outputs: int
    ) -> list[Symbol]:
        """The outputs of a call that is kept as it is, with its function body if the file has those."""
        made = self.builder.call(declaration.name, inputs, given, outputs, declaration.domain)
        if self.functions is not None and declaration.domain in (MICROSOFT, LAX):
            self.functions.add(self.builder, declaration, version, inputs, given, made[0].ir.producer)
        return made

    def _decomposed(
        self, declaration: Declaration, version: int, inputs: Sequence[Any], given: dict[str, Any], outputs: int
    ) -> list[Symbol]:
        """The outputs of a call of a custom operator, written with the operators of its decomposition."""
        if declaration.decomposition_rule is None:
            what = f"{public_domain(declaration.domain) or 'ai.onnx'}.{declaration.name} has no body in ONNX's operators"
            raise Unwritable(what, operator=declaration.name, version=version)

        def write(values: Sequence[Any]) -> Sequence[Symbol]:
            return declaration.decompose(self, version, values, given, outputs)

        if self._widens(declaration, inputs, given):
            return self._rounded_once(schemas[declaration.domain, declaration.name][version], inputs, write)
        return list(write(inputs))

    def _widens(self, declaration: Declaration, values: Sequence[Any], given: dict[str, Any]) -> bool:
        """Whether the body of a declaration computes a call in float32, because its inputs are narrow floats."""
        graphs = any(isinstance(v, Subgraph) for v in given.values())
        return declaration.widen and not graphs and any(self._is_narrow(v) for v in values)

    def _is_narrow(self, value: Any) -> bool:
        type = None if value is None else self.type_of(value)
        code = type.tensor_type.elem_type if type is not None and type.WhichOneof("value") == "tensor_type" else 0
        return bool(code) and dtypes.numpy_dtype(code) in dtypes.NARROW_FLOATS

    def _rounded_once(self, schema: Any, values: Sequence[Any], write: Callable[[list[Any]], Sequence[Symbol]]) -> list[Symbol]:
        """What `write` returns for narrow floats cast to float32; each result is rounded once, as that of an operator's body."""
        parameters = [schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in range(len(values))]
        narrow = {p: dtypes.onnx_code(self.dtype(v)) for p, v in zip(parameters, values, strict=True) if self._is_narrow(v)}
        made = write([self._cast(v, TensorProto.FLOAT) if self._is_narrow(v) else v for v in values])
        ends = [schema.outputs[min(i, len(schema.outputs) - 1)].type_str for i in range(len(made))]
        return [self._cast(y, narrow[p]) if p in narrow else y for y, p in zip(made, ends, strict=True)]

    def _cast(self, value: Symbol, code: int) -> Symbol:
        return self.call("Cast", [value], {"to": code}, 1)[0]

    def call(
        self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = ""
    ) -> list[Symbol]:
        """The outputs of an operator's newest version; raises Unwritable."""
        values = self._symbols(arguments(self, domain, op_type, inputs))
        while values and values[-1] is None:
            values.pop()
        given = {n: v for n, v in attributes.items() if v is not None}
        if self._depth and op_type in ("Cast", "CastLike") and not domain:
            plain = self._plain_cast(values, given)
            if plain is not None:
                return [plain]
        self._count(op_type, given)
        version = schema_version(domain, op_type, self.builder.imported(domain)) if domain else None
        custom = declarations.get((domain, op_type), {}).get(version or 0)
        if domain and not (custom and version):
            return self.builder.call(op_type, values, given, outputs, domain)
        if custom and version and domain and not in_place(custom, version, self.target, self.lowers):
            return self._called(custom, version, values, given, outputs)

        def write(writer: OpsetWriter, values: Sequence[Any]) -> list[Symbol]:
            if custom and version:
                return writer._decomposed(custom, version, values, given, outputs)
            return writer._written(op_type, list(values), given, outputs)

        return self._attempt(op_type, write, values, given, outputs, self.opset)

    def _attempt(
        self,
        name: str,
        write: Write,
        values: list[Any],
        given: dict[str, Any],
        outputs: int,
        opset: int,
    ) -> list[Symbol]:
        """The result of `write`; for an outermost call that cannot be written, the error is raised or collected.

        opset: one that selects the version of the call.
        """
        self._depth += 1
        try:
            return write(self, values)
        except Exception as found:
            if self._depth > 1 or (not isinstance(found, Unwritable) and self.problems):
                raise  # after a problem, a value computed from a placeholder may lack a required type
            reason = found.__cause__ if isinstance(found, OperatorError) else found  # of a nested graph
            if not isinstance(reason, (Unwritable, ValueError)):
                if isinstance(found, SonnxError):
                    raise
                raise typed_error(found, name).locate(operator=name) from reason
            error = reason if isinstance(reason, Unwritable) else Unwritable(f"{name} in opset {self.target}: {reason}")
            error.operator = error.operator or name
            refusal = self._refusal(name, write, values, error) if self.finds_minimum_opset else error
            if self.problems is None:
                raise refusal from None
            self.problems.append(refusal)
            return self._placeholders(name, values, given, outputs, opset)
        finally:
            self._depth -= 1

    def _plain_cast(self, values: list[Symbol], given: dict[str, Any]) -> Symbol | None:
        """Simplify a cast within a decomposition: a value that has the type already, or a constant cast like another value.

        Decompositions cast between the types that they allow, which usually are the same: float32 to float32.
        """
        types = [self.type_of(v) for v in values]
        if any(t is None or not t.tensor_type.elem_type for t in types):
            return None
        code = given["to"] if len(values) == 1 else dtypes.onnx_code(self.dtype(values[1]))
        if dtypes.onnx_code(self.dtype(values[0])) == code:
            return values[0]
        if len(values) == 1 or self.constant_value(values[0]) is None:
            return None
        return self.call("Cast", [values[0]], {"to": code}, 1)[0]

    def _written(self, name: str, values: list[Any], given: dict[str, Any], outputs: int) -> list[Symbol]:
        known = self.builder.folded(name, values, given, outputs, self._evaluator)
        if known is not None:
            return [known]
        current = schema_version("", name, self.opset)
        assert current is not None
        declaration = declarations["", name][current]
        version = self._version("", name)
        reasons: list[Unwritable] = []
        if version is not None:
            try:
                rule = ADAPTERS.get((name, version))
                if rule is not None:
                    made = rule(self, by_name(declaration, values, given, outputs))
                    made = list(made) if isinstance(made, (tuple, list)) else [made]
                    if len(made) >= outputs:
                        return made[:outputs]
                    raise Unwritable(f"{name}-{version} has fewer outputs", operator=name)
                return self.at_target(name, *self._form(declaration, version, values, given), outputs=outputs)
            except Unwritable as error:
                reasons.append(error)
        if self._widens(declaration, values, given):
            try:
                schema = schemas["", name][current]
                made = self._rounded_once(schema, values, lambda xs: self.call(name, xs, given, outputs))
                return self._typed(name, values, given, made)
            except Unwritable as error:
                reasons.append(error)
        if declaration.decomposition_rule is not None:
            try:
                return self._typed(name, values, given, declaration.decompose(self, current, values, given, outputs))
            except Unwritable as error:
                reasons.append(error)
        body = function_of(name, current, given, tuple(map(self._type_bytes, values)), outputs)
        if body is not None:
            padded = [*values, *[None] * (len(body.inputs) - len(values))]
            return self._typed(name, values, given, list(replay(self, body, padded))[:outputs])
        if reasons:
            raise reasons[0]
        raise Unwritable(f"opset {self.target} has no {name}", operator=name)

    def _typed(self, name: str, values: list[Any], given: dict[str, Any], made: list[Symbol]) -> list[Symbol]:
        """Complete the types of a decomposition by those of the single operator: inference may lose a rank between nodes."""
        if any(isinstance(y, Symbol) and not has_rank(y.type) for y in made):
            for y, type in zip(made, self._types(name, values, given, len(made), self.opset), strict=True):
                if isinstance(y, Symbol) and not has_rank(y.type) and type is not None and y.name:
                    y.type = type
        return made

    def _types(self, name: str, values: list[Any], given: dict[str, Any], outputs: int, opset: int) -> list[TypeProto | None]:
        """The output types of a call at an opset that has its version; None for calls with graphs, which are of the target."""
        if any(isinstance(v, Subgraph) for v in given.values()):
            return [None] * outputs
        scratch = GraphBuilder(opset)
        inputs = [None if v is None else scratch.input("x", self.type_of(v)) for v in values]
        return [y.type for y in scratch.call(name, inputs, given, outputs)]

    def at_target(
        self, name: str, inputs: Sequence[Any], attributes: dict[str, Any], *, outputs: int = 1, fold: bool = True
    ) -> list[Symbol]:
        """Write a node of the target's version of an operator.

        fold: fold constants.  Raises Unwritable if that version does not have these inputs, attributes or element types.
        """
        values = [v if v is None or self.is_value(v) else self.constant(v) for v in inputs]
        version = self._version("", name)
        if version is None:
            raise Unwritable(f"opset {self.target} has no {name}", operator=name)
        schema = schemas["", name][version]
        types = [v if v is None else type_string(self.type_of(v)) for v in values]
        check_call(schema, types, attributes, outputs)
        made = (
            self.builder.call(name, values, attributes, outputs) if fold else self.builder.node(name, values, attributes, outputs)
        )
        check_results(schema, [type_string(self.type_of(y)) for y in made])
        return made

    def _form(
        self, declaration: Declaration, version: int, values: list[Any], given: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Inputs and attributes as an older version takes them: a later input may be an attribute there."""
        name, newest_version = declaration.name, declaration.versions[-1]
        old, new = parts_of(schemas["", name][version]), parts_of(schemas["", name][newest_version])
        attributes = dict(given)
        inputs = list(values)
        if len(new.inputs) > len(old.inputs) and not new.variadic:
            for i, parameter in list(enumerate(new.inputs))[len(old.inputs) :]:
                value = values[i] if i < len(values) else None
                if value is None:
                    default = declaration.inputs[i].default
                    if parameter.name in old.attributes and default is not REQUIRED and default is not None:
                        attributes[parameter.name] = default  # the attribute may have another default
                    continue
                if parameter.name not in old.attributes:
                    if not self._is_default(declaration, parameter.name, value):
                        raise Unwritable(f"{name}-{version} has no {parameter.name}", operator=name)
                    continue
                array = self.value(value, f"{parameter.name} of {name}")
                attributes[parameter.name] = array.tolist()
            inputs = inputs[: len(old.inputs)]
        for key, value in list(attributes.items()):
            if key not in old.attributes:
                if key == "dilations" and all(d == 1 for d in value):
                    del attributes[key]
                    continue
                default = declaration.attributes.get(key, REQUIRED)
                if isinstance(value, Subgraph) or default is REQUIRED or not same_value(value, default):
                    raise Unwritable(f"{name}-{version} has no attribute {key}", operator=name)
                del attributes[key]
        for key, default in other_defaults(name, version, newest_version):
            attributes.setdefault(key, default)
        return inputs, attributes

    def _is_default(self, declaration: Declaration, name: str, value: Symbol) -> bool:
        default = next((i.default for i in declaration.inputs if i.name == name), REQUIRED)
        known = self.constant_value(value)
        return default not in (REQUIRED, None) and known is not None and bool(np.all(known == default))

    def _count(self, name: str, given: dict[str, Any]) -> None:
        """Count an outermost call and its attributes."""
        if self._depth == 0:
            self.calls[name] += 1
            self.attributes.update(list(given))

    def _placeholders(self, name: str, values: list[Any], given: dict[str, Any], outputs: int, opset: int) -> list[Symbol]:
        """A node of the domain UNWRITTEN, with outputs of the right types, so that the other nodes can be written."""
        plain = {n: v for n, v in given.items() if not isinstance(v, Subgraph)}
        made = self.builder.call(name, values, plain, outputs, UNWRITTEN)
        for y, type in zip(made, self._types(name, values, given, outputs, opset), strict=True):
            y.type = type
        return made

    # --- for the rules of adapters.py

    def value(self, x: Symbol, what: str) -> np.ndarray:
        """The value of a symbol, which must be known when the file is written; raises Unwritable."""
        known = self.constant_value(x)
        if known is None:
            raise Unwritable(f"{what} must be a constant in opset {self.target}, but the model computes it")
        return known

    def rank(self, x: Symbol) -> int:
        return self.rank_of(x, "a value") if self._depth else super().rank(x)

    def rank_of(self, x: Symbol, what: str) -> int:
        if self.shape(x) is None:
            self.learn(x)
        shape = self.shape(x)
        if shape is None:
            text = f"the rank of {what} must be known to write it in opset {self.target}"
            raise Unwritable(text, hint="fix the sizes of the inputs: with inputs=[...], or without dynamic_axes")
        return len(shape)

    def _version(self, domain: str, name: str) -> int | None:
        """The version that the target opset selects; None if it has none or only a deprecated one."""
        version = version_at(domain, name, self.target)
        return None if version is None or (domain == "" and is_deprecated(name, version)) else version

    def _refusal(self, name: str, write: Write, values: list[Any], error: Unwritable) -> Unwritable:
        """The error that names the operator and the minimum opset in which this call can be written."""
        minimum = next((o for o in range(self.target + 1, self.opset + 1) if self._fits(o, write, values)), None)
        hint = f"the minimum opset is {minimum}" if minimum else "no opset can express it"
        found = Unwritable(f"{name} cannot be written in opset {self.target}: {error.message}; {hint}", operator=name)
        found.least = minimum
        return found

    def _fits(self, opset: int, write: Write, values: Sequence[Any]) -> bool:
        """Whether a call can be written in another opset."""
        scratch = OpsetWriter(opset)
        scratch._depth, scratch.lowers = 1, self.lowers  # no search for the minimum opset within the search
        scratch.builder.domains.update(self.builder.domains)
        try:  # subgraphs are unchanged: their nodes raise their own errors
            write(scratch, [None if v is None else self._copied(v, scratch) for v in values])
        except (Unwritable, ValueError):
            return False
        return True

    def _type_bytes(self, v: Any) -> bytes:
        return b"" if v is None or (type := self.type_of(v)) is None else type.SerializeToString()

    def _copied(self, v: Any, scratch: OpsetWriter) -> Symbol:
        """A value with its known type and value as a symbol of another writer."""
        v = v if self.is_value(v) else self.constant(v)
        symbol = v if isinstance(v, Symbol) else None
        known = self.constant_value(v)
        if known is None:
            return scratch.input("x", self.type_of(v))
        frozen = symbol is not None and symbol.value is None
        return scratch.builder.initializer("x", known) if frozen else scratch.constant(known)


Write: TypeAlias = Callable[[OpsetWriter, Sequence[Any]], list[Symbol]]


def _copy(writer: OpsetWriter, values: Sequence[Any]) -> list[Symbol]:
    """A node that copies a value, even a known one."""
    return writer.at_target("Identity", values, {}, fold=False)
