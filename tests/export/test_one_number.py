"""One number: an operator with float attributes has the same bits on the tape, in the recorded graph, and in the exported file.

The cases are drawn from the schemas: every version that has an attribute of type FLOAT or FLOATS, in every float dtype that it
takes.  Each drawn attribute is moved by less than float32 can represent, so that code that does not round it has another result.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from singa import autograd, opt, sonnx
from singa._core.tensor import Tensor, op
from singa.model import Model, Step
from singa_backend import SingaBackend, dtypes
from singa_backend.comparison.verdict import same_bits
from singa_backend.conform.fuzz import generate, recipes, regular_cases
from singa_backend.errors import InvalidInput, NoGradientWarning, SonnxError
from singa_backend.ir.declaration import declarations, single
from singa_backend.ir.versioned import VersionedOperator
from singa_backend.proto.schemas import MICROSOFT, load_domain, schemas

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

FLOATS = [np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
load_domain(MICROSOFT)


def is_drawn(schema: Any) -> bool:
    """Whether an operator has float attributes and takes floats; a graph that it takes is not an attribute of a call."""
    kinds = {a.type.name for a in schema.attributes.values()}
    takes = {t for found in generate.allowed_types(schema).values() for t in found}
    return bool(kinds & {"FLOAT", "FLOATS"}) and "GRAPH" not in kinds and not takes.isdisjoint(FLOATS)


VERSIONS: dict[tuple[str, str], list[int]] = {}
for (_domain, _name), _known in sorted(declarations.items()):
    for _version in sorted(_known):
        if is_drawn(schemas[_domain, _name][_version]):
            VERSIONS.setdefault((_domain, _name), []).append(_version)
DRAWS = int(os.environ.get("SONNX_ONE_NUMBER_DRAWS", "1"))
"""The number of nodes of each version and dtype; if it is 1, older versions are drawn in float32 alone."""


@dataclass
class Drawn:
    """A node of one schema version, with attributes that float32 does not represent."""

    case: generate.NodeCase
    attributes: dict[str, Any]

    @property
    def operator(self) -> VersionedOperator:
        return VersionedOperator(declarations[self.case.domain, self.case.operator][self.case.version], self.case.version)

    @property
    def wanted(self) -> tuple[bool, ...]:
        return tuple(map(bool, self.case.node.output))

    def arrays(self) -> list[Any]:
        return [self.case.inputs[n] if n else None for n in self.case.node.input]

    def call(self, xs: list[Any]) -> list[Any]:
        """The outputs on tensors, called as programs call the newest version, and as files call older ones."""
        case = self.case
        if case.version == max(declarations[case.domain, case.operator]):
            ys = op.call(case.operator, xs, self.attributes, len(self.wanted), case.domain)
        else:
            ys = op.call_version(self.operator, xs, self.attributes, self.wanted)
        return [y for y, wanted in zip(ys, self.wanted, strict=False) if wanted]


def moved(value: float, rng: np.random.Generator) -> float:
    """A float64 number that rounds to this float32 number, and differs from it if it is neither 0 nor infinite."""
    near = value * (1 + rng.choice([-1, 1]) * 1e-8)
    return near if np.float32(near) == np.float32(value) else value


def drawn(domain: str, name: str, version: int, dtype: np.dtype[Any], index: int) -> Drawn | None:
    """A node of a version on inputs of a dtype; None if the version does not take it."""
    schema = schemas[domain, name][version]
    allowed = generate.allowed_types(schema)
    if not any(dtype in types for types in allowed.values()):
        return None
    rng = np.random.default_rng([index, version, *name.encode()])
    for _ in range(40):
        types = {p: dtype if dtype in found else found[int(rng.integers(len(found)))] for p, found in allowed.items()}
        made = regular_cases.drawn(rng, domain, name, version, types)
        if made is not None:
            break
    else:
        return None
    case, taken = made[0], declarations[domain, name][version].attributes
    attributes: dict[str, Any] = {}
    for a in case.node.attribute:
        if a.name in taken:
            value = helper.get_attribute_value(a)
            attributes[a.name] = value.decode() if isinstance(value, bytes) else value
            if isinstance(value, list) and value and isinstance(value[0], bytes):
                attributes[a.name] = [v.decode() for v in value]
    floats = {n: a.type.name for n, a in schema.attributes.items() if a.type.name in ("FLOAT", "FLOATS")}
    for n in taken if index == 0 else ():  # the other draws omit some
        if floats.get(n) == "FLOAT" and schema.attributes[n].default_value.name:
            attributes.setdefault(n, schema.attributes[n].default_value.f)
    if "seed" in floats:  # equal draws
        attributes.setdefault("seed", float(np.float32(rng.uniform(1, 100))))
    case.node.ClearField("attribute")
    for n, value in attributes.items():
        case.node.attribute.append(helper.make_attribute(n, value, attr_type=int(schema.attributes[n].type.value)))
    for n in set(floats) & set(attributes):
        value = attributes[n]
        attributes[n] = moved(value, rng) if floats[n] == "FLOAT" else [moved(v, rng) for v in value]
    return Drawn(case, attributes)


def cases(domain: str, name: str) -> Iterator[Drawn]:
    for version in VERSIONS[domain, name]:
        newest = version == VERSIONS[domain, name][-1]
        for dtype in FLOATS if newest or DRAWS > 1 else FLOATS[1:2]:
            for index in range(DRAWS):
                made = drawn(domain, name, version, dtype, index)
                if made is not None and not any(isinstance(x, list) for x in made.arrays()):
                    yield made


def is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and dtypes.is_float(x.dtype)


class Node(Model):
    """A drawn node whose float inputs are parameters, and the sum of the squares of its float outputs as loss."""

    def __init__(self, node: Drawn, results: list[Any]) -> None:
        super().__init__()
        self.node, self.optimizer, self.inputs = node, opt.SGD(lr=0.1), []  # type: ignore[var-annotated]
        self.floats = [is_float(y) for y in results]  # inference does not know the dtypes of all operators
        for i, x in enumerate(node.arrays()):
            trains = is_float(x)
            t = None if x is None else Tensor(data=np.array(x), requires_grad=trains, stores_grad=trains, name=f"x{i}")
            setattr(self, f"x{i}", t)
            self.inputs.append(t)

    def forward(self) -> Any:
        loss = op.constant(np.zeros(1, np.float32))
        for y, floats in zip(self.node.call(self.inputs), self.floats, strict=True):
            if floats:
                flat = op.Reshape(op.Cast(op.Mul(y, y), to=1), [-1])
                loss = op.Add(loss, op.ReduceSum(flat, [0], keepdims=1))
        return loss

    def train_one_batch(self) -> Any:
        loss = self.forward()
        self.optimizer(loss)
        return loss

    def results(self, loss: Any) -> list[Any]:
        return [loss.data, *(t.data for t in self.get_params().values())]


def attempt(run: Any, m: Node) -> Any:
    """The results, or the code of the error."""
    try:
        return run(m)
    except SonnxError as error:
        return error.code


def differs(a: Any, b: Any) -> bool:
    return a != b if isinstance(a, str) or isinstance(b, str) else not same_bits(list(a), list(b))


def on_the_tape(m: Node) -> Any:
    m.train()
    return m.results(m.train_one_batch())


def in_a_graph(m: Node) -> Any:
    m.train()
    return m.results(Step(m.train_one_batch, (), {}).run((), {}))


def in_a_training_file(m: Node) -> Any:
    step = sonnx.to_training_onnx(m, lambda y, t: y, m.optimizer, inputs=[], target=Tensor(data=np.zeros(1)))
    made = SingaBackend.run_model(step, {i.name: np.zeros(1) for i in step.graph.input if i.name == "target"}, optimize=0)
    values = dict(zip([o.name for o in step.graph.output], made, strict=True))
    pairs = sonnx.step_pairs(step)
    return [values["loss"], *(values[pairs[n]] if n in pairs else t.data for n, t in m.get_params().items())]


@pytest.mark.filterwarnings("ignore:clip=0")
@pytest.mark.parametrize("domain, name", VERSIONS, ids=[n for _, n in VERSIONS])
def test_float_attributes_have_the_same_bits_everywhere(domain: str, name: str) -> None:
    wrong: list[str] = []
    count = 0
    for node in cases(domain, name):
        count += 1
        wrong += [f"{node.case.describe()}: {what}" for what, a, b in found(node) if differs(a, b)]
    assert not wrong, "\n".join(wrong)
    assert count


def found(node: Drawn) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of results that must be equal, each with what is compared."""
    case = node.case
    feeds = {n: case.inputs[n] for n in case.node.input if n}
    file = list(SingaBackend.run_model(generate.model(case, constants=frozenset()), feeds, optimize=0))
    for training in (True, False):
        autograd.training = training
        xs = [None if x is None else Tensor(data=np.array(x), requires_grad=is_float(x)) for x in node.arrays()]
        ys = node.call(xs)
        yield f"the tape, training={training}", file, [y.data for y in ys]
    yield "the graph", file, [y.data for y in Step(lambda: node.call(xs), (), {}).run((), {})]
    own = case.opset if not case.domain and case.opset >= 7 else None
    for opset in dict.fromkeys((own, None)):
        proto = sonnx.to_onnx([x for x in xs if x is not None], ys, opset=opset, training=True, check=False)
        again = list(
            SingaBackend.run_model(proto, {i.name: x for i, x in zip(proto.graph.input, feeds.values(), strict=True)}, optimize=0)
        )
        if opset is None and case.operator not in {n.op_type for n in proto.graph.node}:  # written in other operators
            again = [a if close(a, b) else b for a, b in zip(file, again, strict=True)]
        yield f"an export at opset {opset}", file, again
    if case.version == VERSIONS[case.domain, case.operator][-1] or np.dtype(np.float64) in case.types.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoGradientWarning)
            tape, graph, step = (attempt(run, Node(node, file)) for run in (on_the_tape, in_a_graph, in_a_training_file))
        yield "a step in a graph", tape, graph
        yield "a training file", tape, step


def close(a: Any, b: Any) -> bool:
    """Whether values agree to a few units in the last place of sums: other operators add in another order."""
    if not is_float(a) or a.shape != b.shape or a.dtype != b.dtype:
        return same_bits([a], [b])
    eps = float(ml_dtypes.finfo(a.dtype).eps)
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=64 * eps, atol=64 * eps, equal_nan=True))


def test_every_operator_with_float_attributes_is_drawn() -> None:
    assert set(VERSIONS) <= set(recipes.load() | recipes.load("com.microsoft"))


def test_defaults_are_those_of_the_schema() -> None:
    for (domain, name), versions in VERSIONS.items():
        for version in versions:
            declared = declarations[domain, name][version]
            for n, a in schemas[domain, name][version].attributes.items():
                if a.type.name == "FLOAT" and a.default_value.name and declared.attributes.get(n) is not None:
                    assert declared.attributes[n] == a.default_value.f, (name, version, n)
                    assert declared.composes or declared.body.__kwdefaults__[n] == a.default_value.f, (name, version, n)


@pytest.mark.parametrize("value", [1e39, -1e300, 1e-50, 10**400, "0.5", b"1", 1j, [0.1]], ids=lambda v: str(v)[:9])
def test_a_value_that_float32_does_not_have_is_refused(value: Any) -> None:
    x = Tensor(data=np.array([-1.0, 2.0]))
    for run in (lambda: op.LeakyRelu(x, alpha=value), lambda: Step(lambda: op.LeakyRelu(x, alpha=value), (), {})):
        with pytest.raises(InvalidInput, match=r"'alpha' of LeakyRelu must be a number that float32 can represent") as e:
            run()
        assert e.value.code == "SX378"


@pytest.mark.parametrize("value", [[0.1, 1e39], ["a"], [None], [[0.1]], 0.1], ids=str)
def test_values_that_float32_does_not_have_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="'value_floats' of Constant must be numbers that float32 can represent"):
        op.Constant(value_floats=value)


def test_numbers_of_every_kind_are_rounded() -> None:
    for value in (0.1, np.float64(0.1), np.float32(0.1), np.array(0.1), 1, True, np.int64(3), np.float16(0.1)):
        assert single(value, "alpha", "Elu", False) == float(np.float32(value))
    for value in (np.inf, -np.inf, 3.4028235e38, 1e-45, 0.0, -0.0):
        assert single(value, "alpha", "Elu", False) == float(np.float32(value))
    assert np.isnan(single(np.nan, "alpha", "Elu", False)) and np.signbit(single(-0.0, "alpha", "Elu", False))
    expected = (float(np.float32(0.1)), 2.0)
    for values in ((0.1, 2), [0.1, np.float64(2)], np.array([0.1, 2]), np.array([0.1, 2], np.float32)):
        assert single(values, "scales", "Upsample", True) == expected
