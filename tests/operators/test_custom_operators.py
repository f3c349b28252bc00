# ruff: noqa: F821, UP037
"""Operators that a program adds: for every model, or for one; they run, train, are exported and compared."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, defs, helper, parser
from tests.helpers.paths import PROJECT

import singa_backend
from singa import autograd, opt, sonnx
from singa._core.tensor import Tensor
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.ir import custom
from singa_backend.ir.declaration import declarations
from singa_backend.proto import schemas

F = np.float32
DOMAIN = "com.example"
X = np.array([[-3.0, -0.5, 0.0], [0.25, 2.0, 10.0]], F)


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Operators of a test go with it."""
    before = {n: dict(t) for n, t in (("d", declarations), ("s", schemas.schemas), ("n", schemas._newest), ("m", custom._made))}
    yield
    for n, table in (("d", declarations), ("s", schemas.schemas), ("n", schemas._newest), ("m", custom._made)):
        table.clear()
        table.update(before[n])


def model(text: str, dtype: str = "float", version: int = 1, opset: int = 17) -> ModelProto:
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "{DOMAIN}": {version}]> g ({dtype}[n, 3] x) => ({dtype}[n, 3] y) {text}'
    )


def squareplus(x: Any) -> Any:
    return 0.5 * (x + np.sqrt(np.square(x) + 4))


def five_lines(name: str, make: Callable[..., Any] = sonnx.register_operator) -> Any:
    """An operator of five lines, under a name of its own: caches know names."""

    @make(name, domain=DOMAIN, function=lambda op, x: op.Mul(op.Add(x, op.Sqrt(op.Add(op.Mul(x, x), 4.0))), 0.5))
    def body(xp, x: "float") -> "float":
        return (x + xp.sqrt(x * x + 4)) / 2

    return body


# --- one operator, from start to end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scoped", [False, True])
def test_it_runs_trains_is_exported_and_compared(scoped: bool, tmp_path: Path) -> None:
    name = f"Squareplus{scoped}"
    made = five_lines(name, sonnx.define_operator if scoped else sonnx.register_operator)
    known: dict[str, Any] = {"operators": [made]} if scoped else {}
    proto = model(f"<float[3] w = {{0.5, 1.5, 2.5}}> {{ h = Mul(x, w) y = {DOMAIN}.{name}(h) }}")
    w = np.array([0.5, 1.5, 2.5])
    for device in ("CPU", "STRICT"):
        for prepare in (sonnx.prepare, singa_backend.prepare):
            np.testing.assert_allclose(prepare(proto, device, **known).run([X])[0], squareplus(X * w), rtol=1e-6)

    class Net(sonnx.SONNXModel):
        def train_one_batch(self, x: Any, target: Any) -> Any:
            y = self.forward(x)[0]
            loss = autograd.mse_loss(y, target)
            self.optimizer(loss)
            return y, loss

    x, target = Tensor(data=X), Tensor(data=np.zeros((2, 3), F))
    trained = []
    for graph in (False, True):
        net = Net(proto, **known)
        net.optimizer = opt.SGD(lr=0.01)
        net.compile([x], is_train=True, use_graph=graph)
        for _ in range(4):
            net(x, target)
        trained.append(net.get_params()["w"].data.copy())
    moved = w.copy()
    for _ in range(4):
        h = X * moved
        y = squareplus(h)
        moved -= 0.01 * (2 / y.size * y * (0.5 + 0.5 * h / np.sqrt(h * h + 4)) * X).sum(0)
    for found in trained:
        np.testing.assert_allclose(found, moved, rtol=1e-5)

    net.eval()
    path = tmp_path / "net.onnx"
    pytest.importorskip("onnxruntime")
    _, check = sonnx.export_and_check(net, [x], path)
    assert {c.engine for c in check.comparisons} == {"onnxruntime", "sonnx"}
    written = onnx.load(path)
    assert [(f.domain, f.name) for f in written.functions] == [(DOMAIN, name)]
    assert [(n.domain, n.op_type) for n in written.graph.node] == [("", "Mul"), (DOMAIN, name)]
    assert {o.domain: o.version for o in written.opset_import} == {"": 17, DOMAIN: 1}
    assert sonnx.compare(path, {"x": X}, against="onnxruntime").first is None


def test_onnx_has_no_schema_of_it() -> None:
    five_lines("Untold")
    assert not defs.has("Untold", domain=DOMAIN)


def test_it_is_a_function_of_tensors() -> None:
    for make in (sonnx.register_operator, sonnx.define_operator):
        made = five_lines(f"Call{make.__name__}", make)
        x = Tensor(data=X, requires_grad=False)
        np.testing.assert_allclose(made(x).data, squareplus(X), rtol=1e-6)
        autograd.training = True
        try:
            p = Tensor(data=X.copy(), stores_grad=True)
            loss = autograd.reduce_sum(made(p), axes=[0, 1], keepdims=0)
            ((_, grad),) = autograd.backward(loss)
            np.testing.assert_allclose(grad.data, 0.5 + 0.5 * X / np.sqrt(X * X + 4), rtol=1e-5)
            written = sonnx.to_onnx([x], [made(x)])
        finally:
            autograd.training = False
        assert [(n.domain, n.op_type) for n in written.graph.node] == [(DOMAIN, made.name)]
        for xs, given, code in (((X,), {}, "SX311"), ((), {}, "SX301"), ((x,), {"beta": 1}, "SX333")):
            with pytest.raises(InvalidInput) as found:
                made(*xs, **given)
            assert found.value.code == code


@pytest.mark.parametrize(
    ("inputs", "given", "told"),
    [
        (0, {"k": 2}, "Shifted takes the inputs x, bias, got 0"),
        (3, {"k": 2}, "Shifted takes the inputs x, bias, got 3"),
        (1, {"k": 2, "scal": 1.0}, "an attribute of Shifted must be one of k, scale, got 'scal'; did you mean 'scale'?"),
        (1, {}, "Shifted requires the attribute 'k'"),
        (1, {"k": None}, "Shifted requires the attribute 'k'"),
        (1, {"k": 2, "scale": None}, ""),
    ],
)
def test_calls_of_tensors_and_in_graphs_have_the_same_errors(inputs: int, given: dict[str, Any], told: str) -> None:
    @sonnx.define_operator("Shifted", domain=DOMAIN)
    def Shifted(xp, x: "float", bias: np.float32 = None, *, scale: float = 0.5, k: int) -> "float":
        return x * np.float32(scale) + k if bias is None else x + bias

    def call(x: Any) -> Any:
        return Shifted(*[x] * inputs, **given)

    x = Tensor(data=X, requires_grad=False)
    for compute in (lambda: call(x).data, lambda: sonnx.graph(call, types={"x": sonnx.Float})(X)):
        if told:
            with pytest.raises(InvalidInput, match=re.escape(told)) as found:
                compute()
            assert found.value.operator == "Shifted"
        else:
            np.testing.assert_allclose(compute(), X * 0.5 + 2)


def test_a_signature_of_every_kind() -> None:
    @sonnx.register_operator(domain=DOMAIN, types={"T": ["float16", "double"], "I": ["int32", "int64"]})
    def Mixed(
        xp, x: "T", i: "I", bias: np.float64 = None, *, scale: float = 0.1, axes: tuple[int, ...] = (0, 1), mode: str = "sum",
        k: int, names: "tuple[str, ...] | None" = None,
    ) -> tuple["T", "I", "bool"]:  # fmt: skip
        total = x * scale * k if bias is None else x * scale * k + bias
        return total, i + len(axes), i > 0

    schema = schemas.schemas[DOMAIN, "Mixed"][1]
    shown = [(p.name, p.type_str, p.option.name) for p in schema.inputs]
    assert shown == [("x", "T", "Single"), ("i", "I", "Single"), ("bias", "tensor(double)", "Optional")]
    assert [(p.name, p.type_str) for p in schema.outputs] == [("y0", "T"), ("y1", "I"), ("y2", "tensor(bool)")]
    kinds = {n: (a.type.name, a.required) for n, a in schema.attributes.items()}
    assert kinds == {"scale": ("FLOAT", False), "axes": ("INTS", False), "mode": ("STRING", False), "k": ("INT", True),
                     "names": ("STRINGS", False)}  # fmt: skip
    node = helper.make_node("Mixed", ["x", "i"], ["a", "b", "c"], domain=DOMAIN, k=3)
    a, b, c = sonnx.run_node(node, [X.astype(np.float64), np.array([-1, 2], np.int32)])
    np.testing.assert_array_equal(a, X.astype(np.float64) * float(F(0.1)) * 3)
    assert b.dtype == np.int32 and b.tolist() == [1, 4] and c.tolist() == [False, True]
    with pytest.raises(singa_backend.InvalidModel, match="requires the attribute 'k'"):
        sonnx.prepare(model(f"{{ y, b, c = {DOMAIN}.Mixed(x, x) }}", "double"))

    @sonnx.register_operator(domain=DOMAIN, inputs=["*xs: T"], outputs=["sum: T"], traits=("shape_of_first",))
    def Total(xp, *xs):
        return sum(xs)

    out = sonnx.prepare(model(f"{{ y = {DOMAIN}.Total(x, x, x) }}")).run([X])[0]
    np.testing.assert_array_equal(out, X + X + X)


def test_a_gradient_rule_precedes_the_function() -> None:
    made = five_lines("Ruled")
    made.gradient(lambda op, dy, x: op.Mul(dy, 7.0))
    autograd.training = True
    try:
        p = Tensor(data=X.copy(), stores_grad=True)
        ((_, grad),) = autograd.backward(autograd.reduce_sum(made(p), axes=[0, 1], keepdims=0))
    finally:
        autograd.training = False
    assert (grad.data == 7).all()


# --- one model only ---------------------------------------------------------------------------------------------------


def test_other_models_do_not_see_it() -> None:
    plus, minus = (sonnx.define_operator("Own", domain=DOMAIN)(f) for f in (_plus, _minus))
    proto = model(f"{{ y = {DOMAIN}.Own(x) }}")
    reps = [sonnx.prepare(proto, operators=[o]) for o in (plus, minus)]
    assert [float(r.run([X])[0][1, 2]) for r in reps] == [11, 9]
    for prepare in (sonnx.prepare, singa_backend.prepare):
        with pytest.raises(UnsupportedModel, match="no operator Own") as found:
            prepare(proto)
        assert found.value.code == "SX202"
    assert not sonnx.SingaBackend.is_compatible(proto) and sonnx.SingaBackend.is_compatible(proto, operators=[plus])
    stolen = model(f"{{ y = {DOMAIN}.Own(x) }}")
    stolen.graph.node[0].domain = stolen.opset_import[1].domain = plus.declaration.domain
    with pytest.raises(UnsupportedModel):
        sonnx.prepare(stolen)


def _plus(xp, x: "float") -> "float":
    return x + 1


def _minus(xp, x: "float") -> "float":
    return x - 1


def test_it_precedes_a_registered_one_and_the_models_function() -> None:
    sonnx.register_operator("Both", domain=DOMAIN)(_plus)
    own = sonnx.define_operator("Both", domain=DOMAIN)(_minus)
    proto = model(f"{{ y = {DOMAIN}.Both(x) }}")
    assert [float(sonnx.prepare(proto, operators=o).run([X])[0][1, 2]) for o in ((), [own])] == [11, 9]


def test_the_version_is_that_of_the_model() -> None:
    own = [sonnx.define_operator("Old", domain=DOMAIN, version=v)(f) for v, f in ((2, _plus), (4, _minus))]
    text = f"{{ y = {DOMAIN}.Old(x) }}"
    for version, last in ((2, 11), (3, 11), (4, 9), (5, 9)):
        assert sonnx.prepare(model(text, version=version), operators=own).run([X])[0][1, 2] == last
    with pytest.raises(singa_backend.InvalidModel, match=rf"requires opset 2 of {DOMAIN} or later, got 1"):
        sonnx.prepare(model(text, version=1), operators=own)


def test_one_file_has_one_operator_of_a_name() -> None:
    made = [sonnx.define_operator("Same", domain=DOMAIN)(f) for f in (_plus, _minus)]
    x = Tensor(data=X, requires_grad=False)
    autograd.training = True
    try:
        y = made[1](made[0](x))
        with pytest.raises(UnsupportedModel, match=r"one operator com\.example\.Same"):
            sonnx.to_onnx([x], [y])
    finally:
        autograd.training = False


# --- pickles ----------------------------------------------------------------------------------------------------------

MODULE = """
from singa import sonnx

@sonnx.define_operator(domain="com.example")
def Shared(xp, x: "float") -> "float":
    return x + 1
"""


@pytest.mark.parametrize("from_file", [False, True])
def test_a_pickle_finds_it_in_its_module(from_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_operator.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "an_operator", raising=False)
    shared = __import__("an_operator").Shared
    proto: Any = model(f"{{ y = {DOMAIN}.Shared(x) }}")
    if from_file:
        onnx.save(proto, tmp_path / "net.onnx")
        proto = tmp_path / "net.onnx"
    reps = [make(proto, operators=[shared]) for make in (singa_backend.prepare, sonnx.prepare, sonnx.SONNXModel)]
    (tmp_path / "reps").write_bytes(pickle.dumps(reps))
    program = (
        "import pickle, numpy as np; reps = pickle.load(open('reps', 'rb'))\n"
        "x = np.ones((1, 3), np.float32)\n"
        "print(*(float(v[0, 0]) for v in (reps[0].run([x])[0], reps[1].run([x])[0], reps[2].forward(x)[0].data)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2.0"] * 3, done.stderr
    monkeypatch.undo()


def test_what_no_process_would_find_is_not_pickled() -> None:
    within = five_lines("Within", sonnx.define_operator)
    rep = sonnx.prepare(model(f"{{ y = {DOMAIN}.Within(x) }}"), operators=[within])
    for value in (rep, within):
        with pytest.raises(InvalidInput, match="cannot be pickled") as found:
            pickle.dumps(value)
        assert found.value.code == "SX389"
    np.testing.assert_array_equal(copy.deepcopy(rep).run([X])[0], rep.run([X])[0])


# --- mistakes ---------------------------------------------------------------------------------------------------------


def _default(xp, x: "float" = 3.0) -> "float": ...
def _untyped(xp, x) -> "float": ...
def _unknown(xp, x: "U") -> "float": ...  # type: ignore[name-defined]
def _python(xp, x: int) -> "float": ...
def _nothing(): ...
def _keywords(xp, x: "float", **given) -> "float": ...
def _attribute(xp, x: "float", *, a=None) -> "float": ...
def _empty(xp, x: "float", *, a=()) -> "float": ...
def _no_result(xp, x: "float"): ...


@pytest.mark.parametrize(
    "given, body, words",
    [
        ({"domain": ""}, _plus, "a domain must be letters"),
        ({"domain": "ai.onnx"}, _plus, "must not be one of ONNX's"),
        ({"domain": "ai.onnx.ml"}, _plus, "must not be one of ONNX's"),
        ({"domain": "a b"}, _plus, "a domain must be letters"),
        ({"version": 0}, _plus, "a positive integer, got 0"),
        ({"version": True}, _plus, "a positive integer, got True"),
        ({"traits": ("unnary",)}, _plus, "got 'unnary'"),
        ({"name": "no name"}, _plus, "must be an identifier"),
        ({}, np.add, "must be computed by a function, got a ufunc"),
        ({}, _default, "the default of the input 'x'"),
        ({}, _untyped, "input 'x' of _untyped has no type"),
        ({}, _unknown, "unknown type 'U'"),
        ({}, _python, "unknown type <class 'int'>"),
        ({}, _nothing, "the first parameter of _nothing must be `xp`"),
        ({}, _keywords, "must name its attributes"),
        ({}, _attribute, "must have a default, or a type"),
        ({}, _empty, "the default of the attribute 'a'"),
        ({}, _no_result, "the result of _no_result has no type"),
        ({"inputs": ["z: T"]}, _plus, "must name the parameters x, got z"),
        ({"inputs": ["x"]}, _plus, 'must be "name: type"'),
        ({"outputs": []}, _plus, "one output or more"),
        ({"types": {"T": ["flat"]}}, _plus, "unknown type 'flat'"),
        ({"gradient": lambda op, dx: dx}, _plus, "got 'dx'"),
        ({"function": lambda: 0}, _plus, "must have `op` first"),
        ({"function": 3}, _plus, "must be a function, got a int"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_where_it_is_made(given: dict[str, Any], body: Any, words: str) -> None:
    before = {k: set(v) for k, v in declarations.items() if k[0] == DOMAIN}
    for make in (sonnx.register_operator, singa_backend.define_operator):
        with pytest.raises(InvalidInput) as found:
            make(**{"domain": DOMAIN, **given})(body)
        assert found.value.code == "SX389" and words in found.value.message
    assert {k: set(v) for k, v in declarations.items() if k[0] == DOMAIN and v} == before


def test_it_is_registered_once() -> None:
    five_lines("Once")
    with pytest.raises(InvalidInput, match=r"com\.example\.Once-1 is registered already, by .*body"):
        five_lines("Once")
    five_lines("Once", sonnx.define_operator)
    made = five_lines("Once", sonnx.define_operator)
    for add in (made.function, made.gradient):
        with pytest.raises(InvalidInput, match="already"):
            add(lambda op, x: x), add(lambda op, x: x)


@pytest.mark.parametrize("operators", [3, "Own", [_plus], [int]])
def test_operators_are_a_list_of_operators(operators: Any) -> None:
    with pytest.raises(InvalidInput) as found:
        sonnx.prepare(model("{ y = Neg(x) }"), operators=operators)
    assert found.value.code == "SX389"


def test_the_hint_has_the_lines_to_write() -> None:
    """They are executed: the model then runs."""
    proto = model(f"{{ h, i = {DOMAIN}.Hinted<alpha = 2.0, k = [1, 2]>(x, x) y = {DOMAIN}.Other(h) }}")
    with pytest.raises(UnsupportedModel) as found:
        sonnx.prepare(proto)
    lines = [line for line in found.value.hint.splitlines() if line.startswith("    ")]
    assert len(lines) == 5 and found.value.hint.count("import sonnx") == 1
    text = "\n".join(line[4:] for line in lines)
    assert "def Hinted(" in text
    exec(text.replace("y = ...", "y = x0 * alpha, x1").replace("import sonnx", "import sonnx"), {})
    five_lines("Other")
    np.testing.assert_allclose(sonnx.prepare(proto).run([X])[0], squareplus(2 * X), rtol=1e-6)


@pytest.mark.parametrize("name, domain", [("a\nb", DOMAIN), ("class", DOMAIN), ("R" * 500, DOMAIN), ("Ok", 'x"); import os #')])
def test_names_that_are_not_pythons_are_not_in_the_lines(name: str, domain: str) -> None:
    proto = model("{ y = Neg(x) }")
    proto.opset_import[1].domain = proto.graph.node[0].domain = domain
    proto.graph.node[0].op_type = name
    with pytest.raises(UnsupportedModel) as found:
        sonnx.prepare(proto)
    assert "def " not in found.value.hint


def test_the_page_runs() -> None:
    text = (PROJECT / "docs" / "operators.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {"__name__": "a_page"})


def test_a_missing_gradient_has_a_hint_that_names_the_decorators() -> None:
    @sonnx.register_operator(domain="com.example.hint")
    def Cubed(xp: Any, x: "T") -> "T":  # type: ignore[name-defined]  # ONNX's names of types
        return x * x * x

    expected = "with `@Cubed.function`, or its gradient with `@Cubed.gradient` (docs/operators.md)"
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.example.hint": 1]> g (float[3] x) => (float[3] y)'
        " <float[3] w = {1, 2, 3}> { a = Mul(x, w) y = com.example.hint.Cubed(a) }"
    )
    report = sonnx.trainable_report(model)
    assert [(p.code, p.hint.endswith(expected)) for p in report.fatal] == [("SX830", True)] and expected in str(report)
    autograd.training = True
    try:
        x = Tensor(data=np.ones(3, np.float32), requires_grad=True, stores_grad=True)
        with pytest.raises(UnsupportedModel) as found:
            list(autograd.backward(autograd.reduce_sum(Cubed(x))))
    finally:
        autograd.training = False
    assert found.value.code == "SX205" and found.value.hint.endswith(expected)

    @Cubed.function
    def body(op: Any, x: Any) -> Any:
        return op.Mul(op.Mul(x, x), x)

    assert sonnx.trainable_report(model).good
