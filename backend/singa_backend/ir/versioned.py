"""An operator at one schema version: checks its inputs, calls the body of the declaration, and casts the outputs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from onnx import defs

from .. import dtypes, limits
from ..devices.device import is_host_value
from ..devices.namespaces import Xp
from ..errors import InvalidInput, OperatorError, UnsupportedModel
from ..proto.schemas import is_private, public_domain, schemas, type_strings
from .declaration import REQUIRED, Declaration, declarations, newest_declaration

_SMALL = 1 << 16
"""Broadcast results of at most this many elements are not checked against the limits."""


class _Types(NamedTuple):
    """The type constraints of a schema version.

    Attributes:
        bound: the source of each output's dtype: a fixed dtype, the inputs of the same type parameter, or None.
        variadic_output: whether the last output is variadic.
        takes: for each input, whether it may be a tensor, a tensor of strings, a tensor of floats, a sequence or map.
        alike: pairs of inputs that share a type parameter.
        repeated: the variadic input whose values share a type parameter, if any.
        elementwise: whether the result has the inputs' broadcast shape.
        is_modern: whether the version has the operator's present meaning.
    """

    bound: tuple[np.dtype[Any] | tuple[int, ...] | None, ...]
    variadic_output: bool
    takes: tuple[tuple[bool, bool, bool, bool], ...]
    alike: tuple[tuple[int, int], ...]
    repeated: int | None
    elementwise: bool
    is_modern: bool


@cache
def _types(domain: str, name: str, version: int) -> _Types:
    newest = newest_declaration(domain, name)
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
        is_modern=newest is None or version >= newest.meaning_since,
    )


class _Plan(NamedTuple):
    """How to call a body, computed once for each combination of input dtypes.

    Attributes:
        ready: whether the inputs are passed unchanged.
        narrow: the inputs that are widened.
        halves: whether none is where a device multiplies float16 numbers.
        results: the dtypes of the outputs, None for those that the schema does not bind.
        rest: the dtype of further variadic outputs.
        grows: whether several inputs are broadcast to one shape, which may be larger than each of theirs.
    """

    ready: bool
    narrow: tuple[int, ...]
    halves: bool
    results: tuple[np.dtype[Any] | None, ...]
    rest: np.dtype[Any] | None
    grows: bool


class VersionedOperator:
    """A declaration at one schema version: checks the inputs' types and casts the outputs as the schema requires."""

    def __init__(self, declaration: Declaration, version: int) -> None:
        self.declaration = declaration
        self.version = version
        self.schema = schemas[declaration.domain, declaration.name][version]
        self._types = _types(declaration.domain, declaration.name, version)
        newest = newest_declaration(declaration.domain, declaration.name)
        self._traits = declaration.traits if newest is None else newest.traits
        self._plans: dict[tuple[np.dtype[Any] | None, ...], _Plan] = {}
        self._derived: Any = None
        self.is_modern = self._types.is_modern
        """Whether this version has the operator's present meaning."""

    def arguments(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of a call as definitions and kernels expect them, defaults included."""
        known = {n: (None if v is REQUIRED else v) for n, v in self.declaration.attributes.items()}
        given = self.declaration.stored({n: v for n, v in attributes.items() if v is not None and n in known})
        return known | {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}

    def __reduce__(self) -> Any:
        """Support pickle: an operator is found by its name, in the module that declares it."""
        declaration = self.declaration
        check_findable(declaration)
        return declared_operator, (declaration.domain, declaration.name, self.version, self.module)

    @property
    def module(self) -> str:
        """The module that declares the operator."""
        return self.declaration.body.__module__

    def derived(self, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed at the first call of this node and cached."""
        if self._derived is None:
            self._derived = make()
        return self._derived

    def _plan(self, given: tuple[np.dtype[Any] | None, ...]) -> _Plan:
        """The plan for inputs of these dtypes, None for those without one; raises OperatorError if they are incompatible."""
        declaration, known = self.declaration, self._types
        self._check_types(given)
        bound = [
            next((given[i] for i in b if i < len(given) and given[i] is not None), None) if isinstance(b, tuple) else b
            for b in known.bound
        ]
        return _Plan(
            ready=not declaration.prepares and all(dtype is not None for dtype in given),
            halves="half_products" in self._traits and all(dtype == np.float16 for dtype in given),
            narrow=tuple(i for i, dtype in enumerate(given) if declaration.widen and dtype in dtypes.NARROW_FLOATS),
            results=tuple(bound),
            rest=bound[-1] if known.variadic_output else None,
            grows=known.elementwise and len(given) > 1,
        )

    def _check_kinds(self, inputs: Sequence[Any]) -> None:
        """Raise OperatorError for an input of the wrong kind: NumPy would convert sequences to arrays and concatenate strings."""
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
            else:  # a shape of [1.7, 2] would be truncated to integers on the host
                host = read[min(i, len(read) - 1)].host
                wrong = "floats" if host and not floats and dtypes.is_float(value.dtype) else ""
            if wrong:
                raise OperatorError(f"input {i} of {self.declaration.name} must not be {wrong}", code="SX406")

    def _check_types(self, given: tuple[np.dtype[Any] | None, ...]) -> None:
        """Raise OperatorError if inputs of one type parameter differ: NumPy would convert them and lose digits."""
        pairs, first = self._types.alike, self._types.repeated
        if first is not None and len(given) > first + 1:
            pairs = (*pairs, *((first, j) for j in range(first + 1, len(given))))
        for i, j in pairs:
            if j >= len(given):
                continue
            a, b = given[i], given[j]
            if a is not None and b is not None and a != b:
                there = f"{dtypes.onnx_name(a)} and {dtypes.onnx_name(b)}"
                what = f"inputs {i} and {j} of {self.declaration.name} must have one element type, got {there}"
                raise OperatorError(what, code="SX406", hint="put a Cast before one of them")

    def run(
        self,
        xp: Xp,
        inputs: Sequence[Any],
        attributes: dict[str, Any],
        wanted: Sequence[bool],
        run: Callable[..., list[Any]] | None = None,
    ) -> list[Any]:
        """Compute one call by the definition: everything outside an executor's walk does so here.

        Args:
            xp: the namespace of the arrays.
            inputs: one value per input of the node, None for an absent one.
            attributes: those of the node, as the body expects them; absent ones have the body's defaults.
            wanted: for each output of the node, whether it is used.
            run: the service of this name; None for a call without subgraphs.

        Returns:
            One value for each element of `wanted`.
        """
        given = self.with_services(attributes, wanted, run=run, derived=_made) if self.declaration.services else attributes
        return self.compute(xp, inputs, given, len(wanted))[: len(wanted)]

    def with_services(
        self,
        attributes: dict[str, Any],
        wanted: Sequence[bool],
        *,
        run: Callable[..., list[Any]] | None,
        derived: Callable[[Callable[[], Any]], Any],
        forward_graph: Any = None,
    ) -> dict[str, Any]:
        """The attributes, and the services that the body requests."""
        services = {
            "run": run,
            "wanted": tuple(wanted),
            "version": self.version,
            "derived": derived,
            "forward_graph": forward_graph,
        }
        return {**attributes, **{name: services[kind] for name, kind in self.declaration.services.items()}}

    def compute(
        self,
        xp: Xp,
        inputs: Sequence[Any],
        attributes: dict[str, Any],
        wanted: int,
        body: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """Run the body for an executor; returns at least `wanted` outputs, of the dtypes that the schema binds.

        Args:
            xp: the namespace of the arrays.
            inputs: one value per input of the node, None for an absent one.
            attributes: the keyword arguments of the body, services included.
            wanted: the number of outputs of the node.
            body: is called in place of the body; None for the body.
        """
        declaration = self.declaration
        given = tuple([getattr(v, "dtype", None) for v in inputs])
        plan = self._plans.get(given)
        if plan is None:
            self._check_kinds(inputs)
            plan = self._plans[given] = self._plan(given)
        args: Sequence[Any] = inputs if plan.ready else declaration.arguments(xp, inputs)
        if plan.narrow and not (plan.halves and xp.multiplies_halves):
            args = list(args)
            for i in plan.narrow:
                if hasattr(args[i], "dtype"):  # a host input may be a Python value
                    args[i] = args[i].astype(np.float32)
        if plan.grows and not xp.records and _product(args) > _SMALL:
            limits.admit_broadcast(args)
        result = declaration.body(xp, *args, **attributes) if body is None else body(xp, *args, **attributes)
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
            raise OperatorError(f"{declaration} must return {wanted} outputs, got {len(outputs)}", code="SX490")
        return outputs


@cache
def versioned(domain: str, name: str, version: int | None = None) -> VersionedOperator:
    """An operator at a version; the newest by default."""
    versions = declarations[domain, name]
    version = max(versions) if version is None else version
    return VersionedOperator(versions[version], version)


def _made(make: Callable[[], Any]) -> Any:
    """The `derived` service of a call whose operator may serve other calls: nothing is cached."""
    return make()


def check_findable(declaration: Declaration) -> None:
    """Raise InvalidInput (SX389) for an operator of some models only that another process cannot find by its name."""
    if is_private(declaration.domain) and ("<" in declaration.domain or declaration.domain.endswith(")")):
        raise InvalidInput(
            f"{declaration.name} cannot be pickled: it is defined in a function, or twice ({declaration.domain})",
            code="SX389",
            hint="define it once, at the top of a module",
        )


def declared_operator(domain: str, name: str, version: int, module: str) -> VersionedOperator:
    """An operator of a pickled model; raises UnsupportedModel (SX202) if this process does not declare it."""
    import_declarations([module])
    found = declarations.get((domain, name), {}).get(version)
    if found is None:
        raise UnsupportedModel(
            f"the pickled model calls {public_domain(domain) or 'ai.onnx'}.{name}-{version}, which this process does not declare",
            code="SX202",
            hint=f"import the module that declares it, {module!r} there, before the model is unpickled",
        )
    return VersionedOperator(found, version)


def import_declarations(modules: Iterable[str]) -> None:
    """Import the modules that declare the operators of a pickled model; raises UnsupportedModel (SX202)."""
    for module in modules:
        if module in sys.modules or module in ("__main__", "__mp_main__"):  # a program's own module is not imported by its name
            continue
        try:
            import_module(module)
        except ImportError as error:
            raise UnsupportedModel(
                f"the pickled model calls operators that the module {module!r} declares, which cannot be imported here: {error}",
                code="SX202",
                hint="install the module here, or import it by its path before the model is unpickled",
            ) from None


def _product(arrays: Sequence[Any]) -> int:
    """The number of elements of the outer product of all arrays."""
    if len(arrays) == 2:
        return int(arrays[0].size * arrays[1].size)
    return math.prod(a.size for a in arrays)


def reads_on_host(declaration: Declaration, i: int) -> bool:
    """Whether an operator reads input `i` on the host."""
    declared = declaration.inputs
    return declaration.host or (bool(declared) and declared[min(i, len(declared) - 1)].host is not None)


def runs_on_host(declaration: Declaration, attributes: dict[str, Any], inputs: Sequence[Any]) -> bool:
    """Whether a node must run on NumPy: by its declaration, its values, or the dtype of its result."""
    if "run" in declaration.services.values():
        return False  # decided for each node of its subgraphs
    if declaration.host or any(is_host_value(v) for v in inputs):
        return True
    for name in ("to", "dtype", "output_dtype"):
        code = attributes.get(name)
        if isinstance(code, int) and code and dtypes.numpy_dtype(code) in dtypes.HOST_ONLY:
            return True
    return any(is_host_value(v) for v in attributes.values())
