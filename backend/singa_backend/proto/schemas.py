"""ONNX's operator schemas by domain, name and version, and those of custom domains such as `ai.singa`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, lru_cache
from typing import Any

from onnx import defs, helper

from ..domains import load_domain as load_domain
from ..domains import waiting

DOMAINS = {"": "ai.onnx"}
"""The displayed name of a domain: files write ONNX's main domain as the empty string."""


def plain_domain(domain: str) -> str:
    """A domain with "" for ONNX's main domain, which a file may also write as "ai.onnx"."""
    return "" if domain == "ai.onnx" else domain


_newest = {domain: versions[1] for domain, versions in defs.C.schema_version_map().items()}
_newest.pop("ai.onnx.training", None)  # a domain without operators
_ONNX_DOMAINS = frozenset(_newest)
_NEWEST = defs.onnx_opset_version()


class _Schemas(MutableMapping[tuple[str, str], dict[int, defs.OpSchema]]):
    """A table that asks onnx for the schemas of an operator at its first use, because reading all of them takes 20 ms."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], dict[int, defs.OpSchema]] = {}
        self._order: dict[tuple[str, str], int] = {}  # of all of onnx, if they have been read

    def __getitem__(self, key: tuple[str, str]) -> dict[int, defs.OpSchema]:
        if key not in self._entries and not self._order and key[0] in _ONNX_DOMAINS and (versions := _history(*key)):
            return self._entries.setdefault(key, versions)
        return self._entries[key]

    def __setitem__(self, key: tuple[str, str], value: dict[int, defs.OpSchema]) -> None:
        self._entries[key] = value

    def __delitem__(self, key: tuple[str, str]) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        if not self._order:
            whole: dict[tuple[str, str], dict[int, defs.OpSchema]] = {}
            for schema in defs.get_all_schemas_with_history():
                whole.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
            for key, versions in whole.items():
                self._entries.setdefault(key, versions)
            self._order = {key: i for i, key in enumerate(whole)}
        return iter(sorted(self._entries, key=lambda key: self._order.get(key, len(self._order))))  # whatever was read first

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove all entries at once."""
        self._entries.clear()


def _history(domain: str, name: str) -> dict[int, defs.OpSchema]:
    """The schemas of one of ONNX's operators, the oldest first; none for a name that ONNX does not have."""
    versions: dict[int, defs.OpSchema] = {}
    version = _newest[domain]
    while version > 0 and defs.has(name, version, domain):
        schema = defs.get_schema(name, version, domain)
        versions[schema.since_version] = schema
        version = schema.since_version - 1
    return dict(sorted(versions.items()))


schemas = _Schemas()
"""(domain, name) -> since-version -> schema: the 659 of onnx 1.23, those that a newer onnx adds, and declared ones."""


def is_custom(domain: str) -> bool:
    """Whether a domain is not one of ONNX's: `ai.singa`, or one whose schemas are declared by `declare_schema`."""
    return domain not in _ONNX_DOMAINS


_PRIVATE = " of "


def private_domain(domain: str, module: str, qualname: str, taken: Iterable[str]) -> str:
    """The domain of an operator for some models only: no file has it, and it names where the operator is defined."""
    made = f"{domain}{_PRIVATE}{'__main__' if module == '__mp_main__' else module}.{qualname}"
    names = set(taken)
    return next(n for n in (made, *(f"{made} ({i})" for i in range(2, len(names) + 3))) if n not in names)


def is_private(domain: str) -> bool:
    """Whether a domain is one of `private_domain`."""
    return _PRIVATE in domain


def public_domain(domain: str) -> str:
    """The domain that files have: that of a private domain, otherwise the domain itself."""
    return domain.partition(_PRIVATE)[0]


MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""

ASSUMED = {MICROSOFT: 1}
"""The domains whose operators files may call without an import, as in onnxruntime, and the opset that is then assumed."""


def opset_of(opsets: Mapping[str, int], domain: str) -> int:
    """The opset of a domain: the imported one, otherwise the assumed one; 0 if there is none."""
    return opsets.get(domain) or ASSUMED.get(domain, 0)


LAX = " of onnxruntime"
"""The private domain of the operators that onnxruntime reads in ONNX's main domain although ONNX does not define them."""

lax: dict[str, int] = {
    "Affine": 9,
    "Crop": 9,
    "DynamicSlice": 9,
    "ImageScaler": 9,
    "LayerNormalization": 16,
    "ParametricSoftplus": 9,
    "Scale": 9,
    "ScaledTanh": 9,
    "SimplifiedLayerNormalization": 1 << 30,
}
"""The names of these operators, and the newest opset at which onnxruntime reads each."""


def schema_version(domain: str, name: str, opset: int) -> int | None:
    """The schema version that an opset selects: the newest at or below it; None if there is none."""
    if domain in waiting:
        load_domain(domain)
    return _fixed_version(domain, name, opset) if domain in _ONNX_DOMAINS else _version(domain, name, opset)


def _version(domain: str, name: str, opset: int) -> int | None:
    return max((v for v in schemas.get((domain, name), {}) if v <= opset), default=None)


_fixed_version = lru_cache(1 << 13)(_version)
"""Versions in ONNX's own domains, whose schemas do not change."""


ANY_OPSET = 1 << 30
"""A number above every opset, used as the version of a domain that is not imported."""


def version_at(domain: str, name: str, opset: int) -> int | None:
    """The schema version at an opset of ONNX's main domain; for another domain, the newest version."""
    return schema_version(domain, name, opset if domain == "" else ANY_OPSET)


def newest(domain: str) -> int:
    """The newest opset of a domain, ONNX's or a custom one; 0 for an unknown domain."""
    if domain in waiting:
        load_domain(domain)
    return _NEWEST if domain == "" else _newest.get(domain, 0)


RUNTIME, RUNTIME_DATE = "1.31.1", "2026-11-22"
"""The newest release of onnxruntime, and the date of this table."""

TAKEN = {"": 26, "ai.onnx.ml": 5}
"""The newest opset of each domain that this release supports; it refuses newer ones, which it calls "under development"."""


def newest_taken(domain: str) -> int:
    """The default opset of files for other runtimes: the newest one that a released onnxruntime supports."""
    return min(newest(domain), TAKEN.get(domain, newest(domain)))


def opset_of_file(domain: str, names: Iterable[str]) -> int:
    """The opset of a domain that the model does not import yet: that of released runtimes if they have these operators."""
    taken, top = newest_taken(domain), newest(domain)
    same = all(schema_version(domain, n, taken) == schema_version(domain, n, top) for n in names)
    return (taken if same else top) or 1


@cache
def type_strings(schema: defs.OpSchema) -> dict[str, list[str]]:
    """The allowed types of each type string in a schema: those of a type parameter, otherwise the type itself."""
    fixed = {p.type_str: [p.type_str] for p in (*schema.inputs, *schema.outputs)}
    return fixed | {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}


SINGA_DOMAIN = "ai.singa"
"""The domain of operators that ONNX lacks."""


def declare_schema(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: dict[str, Any] | None = None,
    *,
    types: dict[str, Sequence[str]],
    doc: str = "",
    domain: str = SINGA_DOMAIN,
    version: int = 1,
) -> defs.OpSchema:
    """Declare the schema of an operator that ONNX lacks; `operator(name, version, domain=domain)` declares what it computes.

    Args:
        name: the operator type.
        inputs: "name: type" for each input, with "?" after the name of an optional one, "*" before that of a variadic one, and
            "**" if its values may have several types.
        outputs: "name: type" for each output, with the same marks.
        attributes: defaults by name, or schemas; a type in place of a default makes the attribute required.
        types: the element types, or the types such as "seq(tensor(float))", that each type parameter allows.
        doc: the documentation of the operator.
        domain: `ai.singa` or another custom domain.
        version: the schema version.

    Returns:
        The schema.

    Raises:
        ValueError: the domain is one of ONNX's.
    """
    if not is_custom(domain):
        raise ValueError(f"the domain of a declared schema must be a custom one, got {DOMAINS.get(domain, domain)!r}")
    made = defs.OpSchema(
        name,
        domain,
        version,
        doc,
        inputs=[_parameter(p) for p in inputs],
        outputs=[_parameter(p) for p in outputs],
        type_constraints=[(n, [t if "(" in t else f"tensor({t})" for t in ts], "") for n, ts in types.items()],
        attributes=[_attribute(n, v) for n, v in (attributes or {}).items()],
    )
    schemas.setdefault((domain, name), {})[version] = made
    _newest[domain] = max(_newest.get(domain, 0), version)
    return made


def _parameter(text: str) -> defs.OpSchema.FormalParameter:
    name, separator, type_str = text.partition(": ")
    if not separator:
        raise ValueError(f"an input or output of a schema must be 'name: type', got {text!r}")
    options = defs.OpSchema.FormalParameterOption
    option = options.Optional if name.endswith("?") else options.Variadic if name.startswith("*") else options.Single
    alike = not name.startswith("**")
    return defs.OpSchema.FormalParameter(name.strip("?*"), type_str, param_option=option, is_homogeneous=alike)


def _attribute(name: str, default: Any) -> defs.OpSchema.Attribute:
    if isinstance(default, defs.OpSchema.Attribute):
        return default
    kinds = {int: "INT", float: "FLOAT", str: "STRING", tuple: "INTS"}
    if isinstance(default, type):
        return defs.OpSchema.Attribute(name, getattr(defs.OpSchema.AttrType, kinds[default]), required=True)
    return defs.OpSchema.Attribute(name, helper.make_attribute(name, default), "")
