"""Every schema version that onnx knows is declared as its schema says, or named with a reason."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import defs, helper
from tests.helpers.paths import PROJECT

from singa_backend import SingaBackend, SonnxError
from singa_backend.comparison.verdict import strict
from singa_backend.conform import gaps
from singa_backend.conform.cases import data_file
from singa_backend.conform.fuzz import generate
from singa_backend.conform.fuzz.generate import NodeCase
from singa_backend.devices import namespaces
from singa_backend.ir.declaration import (
    REQUIRED,
    TRAITS,
    Declaration,
    declarations,
    has_trait,
    newest_declaration,
    operator,
    undeclared,
)
from singa_backend.kernels.table import GRADIENT, TRAINING, gradient_kernels, kernel, table
from singa_backend.operators import activation
from singa_backend.passes import FUSIONS
from singa_backend.plans import fusion
from singa_backend.proto.schemas import MICROSOFT, declare_schema, load_domain, schemas, type_strings
from singa_backend.rewriting import activations

load_domain(MICROSOFT)

ALL = [(d, n, v) for (d, n), versions in sorted(schemas.items()) for v in sorted(versions)]
MISSING = gaps.undeclared(data_file("undeclared.txt"))
VARIADIC = defs.OpSchema.FormalParameterOption.Variadic


def test_the_count() -> None:
    assert len(ALL) >= 659
    assert len(MISSING) <= 5


@pytest.mark.row("Q3")
@pytest.mark.parametrize(("domain", "name", "version"), ALL, ids=lambda x: str(x) or "ai.onnx")
def test_declared_as_the_schema_says(domain: str, name: str, version: int) -> None:
    declaration = declarations.get((domain, name), {}).get(version)
    if declaration is None and domain == MICROSOFT:
        assert undeclared[domain, name]
        return
    if declaration is None:
        assert (domain, name, version) in MISSING, f"{name}-{version} is neither declared nor named in undeclared.txt"
        return
    assert (domain, name, version) not in MISSING, f"{name}-{version} is declared now: delete its line from undeclared.txt"
    schema = schemas[domain, name][version]
    _check_inputs(declaration, schema)
    _check_attributes(declaration, schema)


def _check_inputs(declaration: Declaration, schema: Any) -> None:
    inputs = declaration.inputs
    variadic = bool(schema.inputs) and schema.inputs[-1].option == VARIADIC
    assert not variadic or inputs[-1].variadic, f"{declaration}: the last input is variadic in the schema"
    assert sum(i.variadic for i in inputs) <= 1
    # One body may serve versions with fewer inputs: what the schema lacks must then be optional.
    formal = list(schema.inputs)
    if not inputs or not inputs[-1].variadic:
        assert len(inputs) >= len(formal), f"{declaration}: the schema has {[p.name for p in formal]}"
        for extra in inputs[len(formal) :]:
            assert extra.default is not REQUIRED, f"{declaration}: {extra.name} is no input of this version"
    for i, (declared, parameter) in enumerate(zip(inputs, formal, strict=False)):
        optional = parameter.option == defs.OpSchema.FormalParameterOption.Optional
        before_required = any(later.default is REQUIRED and not later.variadic for later in inputs[i + 1 :])
        if optional and not declared.variadic and not before_required:
            assert declared.default is not REQUIRED, f"{declaration}: input {parameter.name} is optional"


def _check_attributes(declaration: Declaration, schema: Any) -> None:
    known = dict(schema.attributes)
    known.pop("consumed_inputs", None)  # a hint of version 1 that means nothing: the reader drops it
    family = schemas[declaration.domain, declaration.name]
    somewhere = {a for v in declaration.versions for a in family[v].attributes}
    assert set(known) <= set(declaration.attributes), f"{declaration} lacks {set(known) - set(declaration.attributes)}"
    assert set(declaration.attributes) <= somewhere, f"{declaration} invents {set(declaration.attributes) - somewhere}"
    for name, attribute in known.items():
        default = declaration.attributes[name]
        if attribute.required:
            continue
        assert default is not REQUIRED, f"{declaration}: attribute {name} is optional"
        if not attribute.default_value.type:
            continue
        formal = helper.get_attribute_value(attribute.default_value)
        formal = formal.decode() if isinstance(formal, bytes) else formal
        others = {str(family[v].attributes[name].default_value) for v in declaration.versions if name in family[v].attributes}
        if len(others) > 1:
            continue  # versions that share the body have several defaults: the reader passes each its own
        if isinstance(formal, float):
            assert default is None or np.float32(default) == np.float32(formal), f"{declaration}: {name}={default}, not {formal}"
        elif isinstance(formal, list):
            assert default is None or list(default) == formal, f"{declaration}: {name}={default}, not {formal}"
        else:
            assert default == formal, f"{declaration}: {name}={default}, not {formal}"


def test_a_second_claim_is_refused() -> None:
    with pytest.raises(ValueError, match="declared twice"):

        @operator("Softmax", 13)
        def again(xp: Any, x: Any, *, axis: int = -1) -> Any:
            return x


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match="ONNX has no Softmax-12"):

        @operator("Softmax", 12)
        def never(xp: Any, x: Any, *, axis: int = -1) -> Any:
            return x


# --- traits -----------------------------------------------------------------------------------------------------------


def _tile(xp: Any, x: Any, repeats: Any) -> Any:
    return x


def _undeclared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(declarations, ("", "Tile"), {})


def test_an_unknown_trait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _undeclared(monkeypatch)
    with pytest.raises(ValueError, match=r"must be one of unary, broadcasting, .*, got 'unari'"):
        operator("Tile", 6, traits=("unari",))(_tile)
    assert declarations["", "Tile"] == {}


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _undeclared(monkeypatch)
    with pytest.raises(ValueError, match=r"a setting of .* must be one of input, repeats, got 'ratio'"):
        operator("Tile", 6, settings=("ratio",))(_tile)


def _wrong(declaration: Declaration, traits: Collection[str], settings: Collection[str] = ()) -> list[str]:
    """What contradicts the schemas of a declaration, were these its traits and settings."""
    family = schemas[declaration.domain, declaration.name]
    schema = family[declaration.versions[-1]]
    allowed = type_strings(schema)
    inputs, outputs = list(schema.inputs), list(schema.outputs)
    inputs_and_attributes = {p.name for p in inputs} | set(schema.attributes)
    variadic = bool(inputs) and inputs[-1].option == VARIADIC
    wrong = []

    def hold(trait: str, rule: bool, what: str) -> None:
        if trait in traits and not rule:
            wrong.append(f"{declaration} is {trait}, but {what}")

    for trait in traits:
        hold(trait, declaration is newest_declaration(declaration.domain, declaration.name), "a newer version is declared")
    bound = {p.type_str for p in inputs[:2]}
    typed = outputs[0].type_str in bound or allowed[outputs[0].type_str] == ["tensor(bool)"] or "to" in schema.attributes
    hold("unary", bool(inputs) and not variadic and len(outputs) == 1, "does not have one output, and inputs that are counted")
    hold("unary", outputs[0].option != VARIADIC, "the number of outputs varies")
    hold("unary", typed, "the output has neither the type of an input, nor bool")
    hold("broadcasting", "directional" in (schema.doc or ""), "the schema does not name the broadcasting")
    hold("broadcasting", len(outputs) == 1 and (variadic or len(inputs) > 1), "does not have several inputs and one output")
    hold("reduction", {"axes", "keepdims"} <= inputs_and_attributes, "the schema lacks axes or keepdims")
    hold("random", "seed" in schema.attributes, "the schema has no seed")
    hold("random_in_training", {"seed", "training_mode"} <= inputs_and_attributes, "the schema has no seed or no training_mode")
    hold("exchanges", bool({"communicator", "ticket"} & inputs_and_attributes), "the schema has no communicator and no ticket")
    hold("sends", "exchanges" in traits and [o.name for o in outputs] == ["ticket"], "its result is not a ticket alone")
    for trait in ("idempotent", "involution"):
        hold(trait, "unary" in traits and inputs[0].type_str == outputs[0].type_str, "the result is not what it takes")
    hold("cannot_fail", "random" not in traits, "it draws")
    tensors = inputs[:1] and all(t.startswith("tensor(") for p in (inputs[0], outputs[0]) for t in allowed[p.type_str])
    hold("shape_of_first", bool(tensors), "the first input or the result is not a tensor")
    for setting in settings:
        found = [
            (p, type_strings(family[v])[p.type_str]) for v in declaration.versions for p in family[v].inputs if p.name == setting
        ]
        if not found:
            wrong.append(f"{declaration} has no input {setting}")
        for parameter, types in found:
            if not all("float" in t or "double" in t for t in types):
                wrong.append(f"{declaration}: {setting} is not of floats")
            if parameter.differentiation_category == parameter.differentiation_category.Differentiable:
                wrong.append(f"{declaration}: ONNX says that {setting} is differentiable")
    return wrong


DECLARED = {id(d): d for versions in declarations.values() for d in versions.values()}.values()


def test_traits_and_settings_agree_with_the_schemas() -> None:
    assert {t for d in DECLARED for t in d.traits} == set(TRAITS), "a trait that no operator has is of no use"
    assert [w for d in DECLARED for w in _wrong(d, d.traits, d.settings)] == []


def test_meanings_and_weights_agree_with_the_schemas() -> None:
    """What a declaration specifies other than traits is read from the newest one, and names versions and inputs that exist."""
    for d in DECLARED:
        said = d.meaning_since > 1 or d.weights or d.symbol or d.flops_rule is not None
        assert not said or d is newest_declaration(d.domain, d.name), f"{d}: a newer version is declared"
        family = schemas[d.domain, d.name]
        assert d.meaning_since == 1 or d.meaning_since in family, f"{d} has no version {d.meaning_since}"
        assert all(i < len(family[d.versions[-1]].inputs) for i in d.weights), f"{d} has fewer inputs than weights"


@pytest.mark.parametrize(("name", "version", "traits"), [
    ("Split", 18, ["unary"]), ("Concat", 13, ["unary"]), ("ArgMax", 13, ["unary"]), ("Relu", 13, []),
    ("MatMul", 13, ["broadcasting"]),
    ("Softmax", 13, ["reduction"]), ("Relu", 14, ["random"]), ("Relu", 14, ["exchanges"]),
    ("AllReduceDone", 1, ["exchanges", "sends"]),
    ("Bernoulli", 22, ["random_in_training"]),
    ("Abs", 13, ["idempotent"]), ("IsNaN", 20, ["unary", "involution"]), ("Bernoulli", 22, ["random", "cannot_fail"]),
    ("ZipMap", 1, ["shape_of_first"]), ("Add", 6, ["broadcasting"]),
])  # fmt: skip
def test_a_wrong_trait_is_found(name: str, version: int, traits: list[str]) -> None:
    key = next(k for k in declarations if k[1] == name)
    declaration = declarations[key][version]
    assert bool(_wrong(declaration, traits)) == bool(traits)


@pytest.mark.parametrize(("name", "version", "setting"), [
    ("Split", 13, "split"), ("Mul", 14, "A"), ("Mul", 14, "ratio"), ("Resize", 19, "sizes"),
])  # fmt: skip
def test_a_wrong_setting_is_found(name: str, version: int, setting: str) -> None:
    assert _wrong(declarations["", name][version], [], [setting])


# --- traits by what operators do --------------------------------------------------------------------------------------


def _outputs(case: NodeCase, inputs: list[Any]) -> list[Any]:
    return list(SingaBackend.run_node(case.node, inputs, opset_version=case.opset))


def _differ(a: Any, b: Any) -> bool:
    return bool(strict([np.asarray(a)], [np.asarray(b)], 1e-5, 1e-6))


def _breaks(trait: str, case: NodeCase, y: Any = None) -> bool:
    """Whether what an operator computes contradicts a trait; y: its first output for the drawn inputs."""
    x = [case.inputs[n] for n in case.node.input if n]
    if trait == "keeps_finite":
        x = [_with_infinities(v) for v in x]
    if y is None or trait == "keeps_finite":
        y = _outputs(case, x)[0]
    if trait == "moves":
        return False  # the work of a call, which its results do not show
    if not isinstance(y, np.ndarray) or not all(isinstance(v, np.ndarray) for v in x):
        return False  # the sequences of Identity
    first = x[0]
    if trait in ("finite", "keeps_finite"):
        known = np.isfinite if trait == "finite" else lambda v: ~np.isnan(v)
        sound = all(v.size and known(v).all() for v in x if v.dtype.kind == "f")
        return bool(sound and y.dtype.kind == "f" and y.dtype.itemsize > 2 and not known(y).all())  # others overflow
    if trait in ("elements_of_first", "view"):
        known = np.isin(y, first[~_is_nan(first)]).sum() == (~_is_nan(y)).sum() if y.dtype != object else True
        return not (y.dtype == first.dtype and known)
    if trait == "rearranges":
        return y.dtype != first.dtype or sorted(map(repr, y.flat)) != sorted(map(repr, first.flat))
    if trait == "pools":
        return y.ndim != first.ndim or y.shape[:2] != first.shape[:2]
    if trait == "unary":
        return y.shape != first.shape or _differ(_outputs(case, [first.reshape(-1)[::-1], *x[1:]])[0], y.reshape(-1)[::-1])
    if trait == "broadcasting":
        flat = [np.ascontiguousarray(v).reshape(-1) for v in np.broadcast_arrays(*x)]
        return _differ(_outputs(case, flat)[0], y.reshape(-1))
    if trait == "reduction":
        kept = next((a.i for a in case.node.attribute if a.name == "keepdims"), 1)
        sizes = zip(y.shape, first.shape, strict=False)
        return y.ndim != first.ndim or any(n not in (1, m) for n, m in sizes) if kept else y.ndim > first.ndim
    if trait in ("idempotent", "involution"):
        return _differ(_outputs(case, [y])[0], y if trait == "idempotent" else first)
    return trait == "shape_of_first" and y.shape != first.shape  # cannot_fail: it has not


def _is_nan(value: np.ndarray) -> np.ndarray:
    return value != value


def _with_infinities(value: Any) -> Any:
    """A float tensor with infinities of both signs instead of its first and last element."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.size < 2:
        return value
    made = value.copy()
    made.flat[0], made.flat[-1] = np.inf, -np.inf
    return made


@lru_cache(maxsize=1)  # the traits of an operator follow each other
def _cases(domain: str, name: str, version: int, count: int) -> list[NodeCase]:
    select = f"^{generate.label(domain, name, version)}$"
    return [c for i in range(count) if (c := generate.draw(5, i, select)) is not None]


@lru_cache(maxsize=1)
def _results(domain: str, name: str, version: int, count: int) -> list[Any]:
    """The first output of each case."""
    return [_outputs(c, [c.inputs[n] for n in c.node.input if n])[0] for c in _cases(domain, name, version, count)]


@pytest.mark.parametrize(("domain", "name", "trait"), [
    (d, n, t) for d, n in sorted(declarations) for t in sorted(TRAITS) if has_trait(d, n, t)
    if not t.startswith(("random", "exchanges", "sends"))
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:clip=0 of")
def test_an_operator_does_what_its_traits_say(domain: str, name: str, trait: str) -> None:
    drawn = (domain, name, max(declarations[domain, name]), 12)
    cases = _cases(*drawn)
    assert cases and not [c.describe() for c, y in zip(cases, _results(*drawn), strict=True) if _breaks(trait, c, y)]


@pytest.mark.parametrize(("name", "version", "trait"), [
    ("Softmax", 13, "unary"), ("MatMul", 13, "broadcasting"), ("Tile", 13, "reduction"), ("Neg", 13, "idempotent"),
    ("Abs", 13, "involution"), ("Transpose", 25, "shape_of_first"),
    ("Log", 13, "finite"), ("Reciprocal", 13, "finite"), ("Softmax", 13, "keeps_finite"), ("MatMul", 13, "keeps_finite"),
    ("Neg", 13, "elements_of_first"), ("Concat", 13, "view"), ("Tile", 13, "rearranges"), ("Transpose", 25, "pools"),
])  # fmt: skip
def test_an_operator_that_does_not_is_found(name: str, version: int, trait: str) -> None:
    def breaks(case: NodeCase) -> bool:
        try:
            return _breaks(trait, case)
        except (SonnxError, ValueError):
            return True

    assert any(map(breaks, _cases("", name, version, 20)))


# --- what is misspelt -------------------------------------------------------------------------------------------------


def _declared(key: tuple[str, str]) -> tuple[str, str]:
    """The operator whose gradient, or whose call in training form, the kernels of a key compute; the key itself for others."""
    if key[0] not in (GRADIENT, TRAINING):
        return key
    return next(of for of in gradient_kernels if of[1] == key[1])


def test_each_kernel_is_of_declared_versions() -> None:
    """A kernel of any other operator or version would never be asked."""
    made = [(key, k) for key, kernels in table.items() for k in kernels if k.body.__module__.startswith("singa_backend.")]
    made = [(_declared(key), k) for key, k in made]
    assert len(made) > 100 and {key[0] for key, _ in made} <= {domain for domain, _ in declarations}
    assert [(key, k.name, v) for key, k in made for v in k.versions if v not in declarations.get(key, {})] == []


def test_each_pattern_is_of_operators_of_onnx() -> None:
    """A pattern of any other operator would never match."""
    files = sorted(Path(activations.__file__).parent.glob("*.py"))
    found = {(f.name, name) for f in files for name in re.findall(r"\bop\.([A-Z]\w*)\(", f.read_text())}
    assert len(found) > 20 and [pair for pair in sorted(found) if ("", pair[1]) not in schemas] == []


@pytest.mark.parametrize(("call", "message"), [
    (lambda: operator("Absent", 1, domain="test.absent")(lambda xp, x: x), r"test\.absent has no Absent-1 .*call declare_schema"),
    (lambda: declare_schema("A", ["x:T"], ["y: T"], types={"T": ["float"]}, domain="test.absent"),
     "must be 'name: type', got 'x:T'"),
    (lambda: kernel("Relu", 14, on="nunpy"), "must be one of view, machine, onednn, numpy, got 'nunpy'"),
])  # fmt: skip
def test_the_error_names_the_rule(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert ("test.absent", "Absent") not in declarations


# --- CONTRIBUTING -----------------------------------------------------------------------------------------------------


def _functions(source: str) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}


def _shown(mark: str) -> list[str]:
    """The blocks of Python in the page that contain a text."""
    page = (PROJECT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks if mark in block]


def _head(function: ast.FunctionDef) -> list[str]:
    """The decorators and the signature."""
    return [*map(ast.unparse, function.decorator_list), function.name, ast.unparse(function.args), ast.unparse(function.returns)]


def test_the_example_of_contributing_is_the_declaration() -> None:
    """Its head and its gradient are those of the family file; its body, which does not round halves, computes the same."""
    shown = {name: f for block in _shown("@") for name, f in _functions(block).items() if "softmax" in name}
    assert list(shown) == ["softmax", "softmax_gradient"]
    there = _functions(Path(activation.__file__).read_text())
    assert _head(shown["softmax"]) == _head(there["softmax"])
    assert ast.dump(shown["softmax_gradient"]) == ast.dump(there["softmax_gradient"])
    plain = shown["softmax"]
    plain.decorator_list = []
    scope: dict[str, Any] = {"Xp": Any, "Array": Any}
    exec(compile(ast.fix_missing_locations(ast.Module([plain], [])), "CONTRIBUTING.md", "exec"), scope)
    x = np.random.default_rng(0).standard_normal((3, 4, 5))
    for axis in (-1, 0, 1):
        np.testing.assert_allclose(
            scope["softmax"](np, x, axis=axis), declarations["", "Softmax"][13](namespaces.numpy, x, axis=axis), rtol=1e-12
        )


def test_the_fusion_of_contributing_is_the_rule() -> None:
    """Each of its functions and its rule are in the family file, where tests of both pipelines run them."""
    (block,) = _shown("Rules(")
    there = {ast.dump(n) for n in ast.parse(Path(activations.__file__).read_text()).body}
    shown = [n for n in ast.parse(block).body if not isinstance(n, ast.ImportFrom)]
    assert [ast.unparse(n) for n in shown if ast.dump(n) not in there] == ["X, BOUND = (Anything(), Number())"]
    assert activations.softplus in fusion.LEVEL_2 and "softplus" in FUSIONS
