"""Gradients by the rules of the operators: call the rule of one operator, or record calls and differentiate them in reverse.

A rule takes `op`, the interpreter, and then by name any of these:

    dy, dys        the gradient of the first output; of all outputs (None for an output that nothing depends on)
    y, ys          the first output; all of them
    the inputs and attributes of the declaration, by their names; a variadic input is a list; absent ones have their default
    needs          for each input, whether its gradient is needed
    version        the schema version of the call
    captured       the outer values that the graphs of an If, Loop or Scan read; their gradients follow those of the inputs

It returns the gradients of the inputs in order: one value, or a tuple that may be shorter, with None for no gradient.
A declaration without a rule is differentiated through its decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import TypeProto

from .. import dtypes
from ..errors import SonnxError, UnsupportedModel
from ..interpreters.base import DifferentiatedCall, Example, Interpreter, Subgraph, arguments
from ..ir.declaration import Declaration, declarations
from ..ir.versioned import VersionedOperator
from ..proto.schemas import version_at
from ..runtime.failures import typed_error
from .support import REASONS, gradient_hint, no_gradient_reason


def gradients(
    op: Interpreter[Any],
    declaration: Declaration,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attributes: dict[str, Any],
    dys: Sequence[Any],
    needs: Sequence[bool],
    version: int | None = None,
    hidden: Sequence[Any] = (),
) -> list[Any]:
    """The gradients of a call's inputs (and of the values that its graphs capture).

    Narrow floats are widened as in the forward: a rule computes in float32, and its gradients are rounded once.

    Args:
        op: the interpreter that computes them.
        declaration: the operator's declaration.
        inputs: one value per input of the node, None for an absent one, then the captured values.
        outputs: the outputs of the call.
        attributes: the attributes of the call.
        dys: the gradient of each output, None for an output that nothing depends on.
        needs: for each of `inputs`, whether its gradient is needed.
        version: the schema version of the call; None for the declaration's last.
        hidden: what the call returned besides its outputs, for a gradient kernel.

    Returns:
        One gradient for each of `inputs`, None for no gradient.

    Raises:
        UnsupportedModel: the operator has no gradient.
        OperatorError: the rule cannot compute with these values.
    """
    if declaration.gradient_rule is None and declaration.decomposition_rule is None:
        reason = no_gradient_reason(declaration)
        text = REASONS.get(reason.partition(":")[0], "none is declared")
        hint = gradient_hint(declaration)
        raise UnsupportedModel(f"{declaration.name} has no gradient: {text}", code="SX205", operator=declaration.name, hint=hint)
    operator = VersionedOperator(declaration, version or declaration.versions[-1])
    call = DifferentiatedCall(operator, attributes, inputs, outputs, dys, needs, hidden)
    if op.is_symbolic:
        for dy, y in zip(dys, outputs, strict=False):
            _like(op, dy, y)
    by_one_call = op.gradients_of(call)
    if by_one_call is not None:
        return by_one_call
    with op.within(call):
        return gradients_by_rule(op, call)


def gradients_by_rule(op: Interpreter[Any], call: DifferentiatedCall) -> list[Any]:
    """The gradients of a call by the rule of its operator; raises as `gradients` does."""
    declaration, version = call.operator.declaration, call.operator.version
    try:
        found = _widened_rule(op, call)
    except UnsupportedModel as error:
        raise error.locate(operator=declaration.name, version=version) from None
    except Exception as error:
        place: dict[str, Any] = {"operator": declaration.name, "version": version}
        if isinstance(error, (SonnxError, MemoryError, RecursionError)) or not op.is_symbolic:
            raise typed_error(error, f"the gradient of {declaration.name}").locate(**place) from (
                error.__cause__ if isinstance(error, SonnxError) else error
            )
        raise UnsupportedModel(  # a branch that never runs may have types that its operators do not allow
            f"the gradient of {declaration.name} cannot be written for inputs of these types: {error}",
            code="SX205",
            **place,
        ) from error
    if op.is_symbolic:
        for g, x in zip(found, call.inputs, strict=True):
            _like(op, g, x)
    return found


def _widened_rule(op: Interpreter[Any], call: DifferentiatedCall) -> list[Any]:
    """The gradients by the rule, which computes in float32 for narrower floats."""
    bodies = [v for v in call.attributes.values() if isinstance(v, Subgraph)]
    if call.operator.declaration.widen and not bodies:
        given = (call.inputs, call.outputs, call.dys)
        wide = [[_widened(op, v) for v in values] for values in given]
        if any(w is not v for a, b in zip(wide, given, strict=True) for w, v in zip(a, b, strict=True)):
            found = _rule(op, replace(call, inputs=wide[0], outputs=wide[1], dys=wide[2]))
            like = next(dy for dy in call.dys if dy is not None)  # for an input that was not kept: rules that cast declare theirs
            pairs = zip(found, call.inputs, strict=True)
            return [None if g is None else op.cast(g, x if op.is_value(x) else like) for g, x in pairs]
    return _rule(op, call)


def _like(op: Interpreter[Any], gradient: Any, value: Any) -> None:
    """Complete the type of a gradient by that of its value: the rank is the same, but inference may not know it."""
    if gradient is None or value is None or not op.is_value(value):
        return
    if op.shape(gradient) is None and not op.is_sequence(value) and op.shape(value) is not None:
        op.with_type(gradient, op.type(value))


def _widened(op: Interpreter[Any], value: Any) -> Any:
    """A tensor of narrow floats as float32; a placeholder of the caller is unchanged."""
    if not op.is_value(value) or op.is_sequence(value):
        return value
    try:
        narrow = op.dtype(value) in dtypes.NARROW_FLOATS
    except ValueError:  # the type of a symbol may be unknown
        return value
    return op.call("Cast", (value,), {"to": dtypes.onnx_code(np.float32)}, 1)[0] if narrow else value


def _rule(op: Interpreter[Any], call: DifferentiatedCall) -> list[Any]:
    """The gradients by the rule of a declaration, or through its decomposition."""
    declaration, inputs, outputs, dys = call.operator.declaration, call.inputs, call.outputs, call.dys
    if declaration.gradient_rule is None:
        return _through_decomposition(op, call)
    count = len(inputs) - sum(len(v.captured) for v in call.attributes.values() if isinstance(v, Subgraph))
    known: dict[str, Any] = {"dys": list(dys), "ys": list(outputs), "y": outputs[0] if outputs else None}
    known |= {"captured": list(inputs[count:]), "version": call.operator.version, "needs": tuple(call.needs)}
    known |= declaration.bind(inputs[:count], dict(call.attributes))  # if an input is named y, the name means the input
    if "dy" in declaration.gradient_rule.names:
        known["dy"] = dys[0] if dys[0] is not None else op.zeros_like(outputs[0])
    result = declaration.gradient_rule(op, known)
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    if any(g is not None for g in found[len(inputs) :]):
        raise ValueError(f"the rule of {declaration} must return at most {len(inputs)} gradients, got {len(found)}")
    found = [*found, *[None] * (len(inputs) - len(found))][: len(inputs)]  # omitted inputs have none
    return [g if n else None for g, n in zip(found, call.needs, strict=True)]


def _through_decomposition(op: Interpreter[Any], call: DifferentiatedCall) -> list[Any]:
    tape, inputs, attributes = Tape(op), call.inputs, call.attributes
    values = [None if x is None else tape.variable(x, n) for x, n in zip(inputs, call.needs, strict=True)]
    captured = iter(values[len(inputs) - sum(len(v.captured) for v in attributes.values() if isinstance(v, Subgraph)) :])
    own = {
        n: v.with_captured([next(captured) for _ in v.captured]) if isinstance(v, Subgraph) else v for n, v in attributes.items()
    }
    made = call.operator.declaration.decompose(tape, call.operator.version, values, own, len(call.outputs))
    ends = [v if isinstance(v, Var) else tape.variable(v, False) for v in made]
    # The schema may bind another float dtype to an output than the one in which its parts are computed.
    pairs = zip(ends, call.dys, strict=True)
    dys = [op.cast(dy, v.raw) if dy is not None and tape.differentiable(v.raw) else dy for v, dy in pairs]
    return tape.gradients(ends, dys, values)


# --- the tape ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Var:
    """A value on a tape; `active` is True if it depends on a variable whose gradient is needed."""

    raw: Any
    active: bool
    tape: Any = None


@dataclass(slots=True)
class _Entry:
    """A recorded call."""

    declaration: Declaration
    version: int | None
    attributes: dict[str, Any]
    inputs: list[Var | None]
    outputs: list[Var]


class Tape(Interpreter[Var]):
    """Calls another interpreter, and records the calls that depend on active variables."""

    def __init__(self, op: Interpreter[Any]) -> None:
        self.op = op
        self.opset = op.opset
        self.entries: list[_Entry] = []

    def variable(self, raw: Any, active: bool = True) -> Var:
        """A value of the underlying interpreter as a variable of this tape; None is an output that was not computed."""
        return Var(raw, active and raw is not None and self.differentiable(raw), self)

    def differentiable(self, raw: Any) -> bool:
        """Whether a value has a float dtype."""
        try:
            return dtypes.is_float(self.op.dtype(raw))
        except ValueError:
            return False

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Var]:
        bodies = [v for v in attributes.values() if isinstance(v, Subgraph)]
        raw = arguments(self.op, domain, op_type, [_raw(x) for x in inputs])
        values = [x if isinstance(x, Var) else None if v is None else Var(v, False) for x, v in zip(inputs, raw, strict=True)]
        captured = [self._own(v) or Var(self._below(v), False) for b in bodies for v in b.captured]
        below = {n: self._lowered(v) if isinstance(v, Subgraph) else v for n, v in attributes.items()}
        made = self.op.call(op_type, raw, below, outputs, domain)
        version = version_at(domain, op_type, self.opset)
        return self._record(declarations[domain, op_type][version or 1], version, below, [*values, *captured], made)

    def _own(self, value: Any) -> Var | None:
        """The variable of this tape that a value is or wraps; an inner tape may have wrapped it again."""
        while isinstance(value, Var) and value.tape is not self:
            value = value.raw
        return value if isinstance(value, Var) else None

    def _below(self, value: Any) -> Any:
        """A captured value as the underlying interpreter knows it: a computed one has no variables of other tapes."""
        while isinstance(value, Var) and not self.op.is_value(value):
            value = value.raw
        return value

    def _lowered(self, body: Subgraph) -> Subgraph:
        """A subgraph whose captured values are those of the underlying interpreter."""
        return body.with_captured([v if (own := self._own(v)) is None else own.raw for v in body.captured])

    def _record(
        self,
        declaration: Declaration,
        version: int | None,
        attributes: dict[str, Any],
        inputs: list[Var | None],
        made: Sequence[Any],
    ) -> list[Var]:
        """The results as variables; a call that depends on an active one is recorded."""
        if not any(v is not None and v.active for v in inputs):
            return [Var(y, False) for y in made]
        flows = not no_gradient_reason(declaration, version)
        results = [self.variable(y, flows) for y in made]
        if flows:
            self.entries.append(_Entry(declaration, version, attributes, inputs, results))
        return results

    @property
    def runs_old_versions(self) -> bool:
        return self.op.runs_old_versions

    @property
    def is_symbolic(self) -> bool:
        return self.op.is_symbolic

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Var]:
        values = [x if isinstance(x, Var) or x is None else Var(x, False) for x in inputs]
        made = self.op.call_version(operator, [_raw(x) for x in inputs], attributes, wanted)
        return self._record(operator.declaration, operator.version, attributes, values, made)

    def gradients(self, outputs: Sequence[Var], dys: Sequence[Any], by: Sequence[Var | None]) -> list[Any]:
        """The gradients of the variables `by`, from those of the outputs; None for no gradient."""
        op = self.op
        found: dict[int, Any] = {}
        for y, dy in zip(outputs, dys, strict=True):
            if dy is not None and y.active:
                found[id(y)] = op.add(found.get(id(y)), dy)
        for entry in reversed(self.entries):
            here = [found.get(id(y)) for y in entry.outputs]
            if all(dy is None for dy in here):
                continue
            needs = [v is not None and v.active for v in entry.inputs]
            inputs = [None if v is None else v.raw for v in entry.inputs]
            grads = gradients(
                op, entry.declaration, inputs, [y.raw for y in entry.outputs], entry.attributes, here, needs, entry.version
            )
            for v, g in zip(entry.inputs, grads, strict=True):
                if v is not None and g is not None:
                    found[id(v)] = op.add(found.get(id(v)), g)
        return [None if v is None else found.get(id(v)) for v in by]

    def constant(self, value: Any, dtype: dtypes.DTypeLike | None = None) -> Var:
        return Var(self.op.constant(value, dtype), False)

    def is_value(self, x: Any) -> bool:
        return isinstance(x, Var) or self.op.is_value(x)

    def dtype(self, x: Any) -> np.dtype[Any]:
        return self.op.dtype(_raw(x))

    def is_sequence(self, x: Any) -> bool:
        return self.op.is_sequence(_raw(x))

    def shape(self, x: Any) -> tuple[int | str | None, ...] | None:
        return self.op.shape(_raw(x))

    def constant_value(self, x: Any) -> np.ndarray | None:
        return self.op.constant_value(_raw(x))

    def type(self, x: Any, drop: Sequence[int] = (), add: int = 0) -> TypeProto:
        return self.op.type(_raw(x), drop, add)

    def graph(self, make: Any, types: Sequence[TypeProto | None], examples: Sequence[Example] = ()) -> Subgraph:
        return self.op.graph(make, types, examples)

    def example(self, x: Any) -> Any:
        return self.op.example(_raw(x))

    def with_example(self, x: Any, example: Example) -> Any:
        self.op.with_example(_raw(x), example)
        return x

    def learn(self, x: Any) -> None:
        self.op.learn(_raw(x))

    def with_type(self, x: Any, type: TypeProto | None) -> Any:
        self.op.with_type(_raw(x), type)
        return x


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Var) else x
