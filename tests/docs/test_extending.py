"""What CONTRIBUTING shows: an operator of two versions and its kernel, a device, an optimizer, a command, an importer, a report.

Each is registered for one test.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, parser

from singa import autograd, device, layer, opt, sonnx
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor, to_numpy
from singa._importers._common import TOLERANCE, ExporterFailure, as_array, exporting, made, outputs, verify
from singa.cli import _main
from singa.cli._examples import EXAMPLES
from singa.model import Model
from singa_backend import SingaBackend
from singa_backend.conform.results import load, publish, stale_page
from singa_backend.devices import device as devices
from singa_backend.devices.strict import StrictNamespace
from singa_backend.errors import DeviceUnavailable
from singa_backend.ir.declaration import declarations
from singa_backend.kernels.table import Site, kernel, table
from singa_backend.kernels.values import NAN, Value
from singa_backend.operators._api import Array, Op, V, Xp, operator
from singa_backend.proto.schemas import _newest, declare_schema, schemas
from singa_backend.rendering import markdown

TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 2] x) => (float[n, 2] y) <float[2] w = {2, -3}> {
    a = Mul(x, w)
    b = Relu(a)
    y = Add(b, w)
}"""
X = np.array([[1, 1], [-1, -1]], np.float32)
Y = np.array([[4, -3], [2, 0]], np.float32)


class Net(Model):
    def __init__(self, optimizer: opt.Optimizer) -> None:
        super().__init__()
        self.linear = layer.Linear(2)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        d = op.Sub(self.forward(x), t)
        loss: Tensor = op.ReduceMean(op.Mul(d, d), keepdims=0)
        self.optimizer(loss)
        return loss


def losses(optimizer: opt.Optimizer, where: Any = None, *, graph: bool = False) -> list[float]:
    """Five steps of a net from equal parameters."""
    place = device.default_device if where is None else where
    x, t = Tensor(data=X, device=place), Tensor(data=Y, device=place)
    net = Net(optimizer)
    net.compile([x], is_train=True, use_graph=graph)
    net.set_params({n: np.full(p.shape, 0.5, np.float32) for n, p in net.get_params().items()})
    found = [float(to_numpy(net(x, t))) for _ in range(5)]
    assert not net.not_traceable
    return found


# --- an operator version, and a kernel

DOMAIN = "test.extending"


@pytest.fixture
def soften() -> Iterator[None]:
    """`x / (alpha + |x|)`: alpha is an attribute in version 1, an input in version 2, which has a kernel."""
    declare_schema("Soften", ["x: T"], ["y: T"], {"alpha": 1.0}, types={"T": ["float", "double"]}, domain=DOMAIN)
    declare_schema("Soften", ["x: T", "alpha: T"], ["y: T"], types={"T": ["float", "double"]}, domain=DOMAIN, version=2)

    @operator("Soften", 2, domain=DOMAIN, traits=("shape_of_first",))
    def soften(xp: Xp, x: Array, alpha: Array) -> Array:
        return x / (alpha + abs(x))

    @soften.decomposition
    def soften_decomposition(op: Op, x: V, alpha: V) -> V:
        return op.Div(x, op.Add(alpha, op.Abs(x)))

    @operator("Soften", 1, domain=DOMAIN)
    def soften_1(xp: Xp, x: Array, *, alpha: float = 1.0) -> Array:
        """Before version 2, alpha was an attribute."""
        return soften(xp, x, xp.asarray(alpha, x.dtype))

    @soften_1.decomposition
    def soften_1_decomposition(op: Op, x: V, alpha: float) -> V:
        return op.Div(x, op.Add(op.Abs(x), alpha))

    @kernel("Soften", 2, on="numpy", domain=DOMAIN)
    def soften_kernel(site: Site, x: Value, alpha: Value) -> Value:
        site.require(x.dtype == np.float32, "only float32")
        site.require(alpha.shape == (), "alpha is not a number")
        y = site.new(x.shape, x.dtype, finiteness=NAN)  # infinity / infinity

        def steps() -> list[Any]:
            a, t, out = x.array, alpha.array, y.array
            return [(np.abs, (a, out)), (np.add, (out, t, out)), (np.divide, (a, out, out))]

        site.emit(steps, reads=(x, alpha), writes=(y,), kernel="soften")
        return y

    yield
    declarations.pop((DOMAIN, "Soften"))
    schemas.pop((DOMAIN, "Soften"))
    table.pop((DOMAIN, "Soften"))
    _newest.pop(DOMAIN)


def softened(version: int) -> ModelProto:
    node = {1: "y = test.extending.Soften <alpha = 3.0> (x)", 2: "y = test.extending.Soften (x, alpha)"}[version]
    text = f'<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : {version}]>'
    return parser.parse_model(f"{text} g (float[n, 2] x) => (float[n, 2] y) <float alpha = {{3}}> {{ {node} }}")


@pytest.mark.usefixtures("soften")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("where", ["CPU", "STRICT"])
def test_each_version_is_a_declaration(version: int, where: str) -> None:
    (y,) = SingaBackend.run_model(softened(version), [X], where)
    np.testing.assert_allclose(y, X / (3 + abs(X)), rtol=1e-6)


@pytest.mark.usefixtures("soften")
@pytest.mark.parametrize("version", [1, 2])
def test_a_version_is_differentiated_and_written_by_its_decomposition(version: int) -> None:
    net = sonnx.SONNXModel(softened(version))
    net.train()
    x = Tensor(data=X, requires_grad=True, stores_grad=True)
    (y,) = net.forward(x)
    ((_, grad),) = [(t, g) for t, g in autograd.backward(op.ReduceSum(y, keepdims=0)) if t is x]
    np.testing.assert_allclose(to_numpy(grad), 3 / (3 + abs(X)) ** 2, rtol=1e-5)
    if version == 1:  # with an attribute: the file has no function for it
        assert {n.op_type for n in sonnx.convert(softened(1), 17).graph.node} == {"Abs", "Add", "Constant", "Div"}


@pytest.mark.usefixtures("soften")
def test_a_kernel_accepts_calls_or_states_why_not() -> None:
    rep = SingaBackend.prepare(softened(2))
    (y,) = rep.run([X])
    np.testing.assert_array_equal(y, SingaBackend.run_model(softened(2), [X], optimize=0)[0])
    assert [s.kernel for s in rep.profile([X]).steps] == ["soften"]
    vector = softened(2)
    vector.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.full(2, 3, np.float32), "alpha"))
    profile = SingaBackend.prepare(vector).profile([X])
    assert "alpha is not a number" in str([s.notes for s in profile.steps])


# --- a device


class Counted(devices.Device):
    """A device with the arrays of STRICT, which counts what is copied to it and from it."""

    type = "COUNTED"
    namespace = StrictNamespace
    copies = [0, 0]  # noqa: RUF012  # of the class, as a device is made again for each use

    @classmethod
    def holding(cls, value: Any) -> devices.Device | None:
        return None  # its arrays are of STRICT's type; a device with a type of its own returns cls() for them

    def put(self, value: Any) -> Any:
        self.copies[0] += isinstance(value, np.ndarray)
        return super().put(value)

    def get(self, value: Any) -> Any:
        self.copies[1] += self.xp.isarray(value)
        return super().get(value)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    monkeypatch.setitem(devices.DEVICES, Counted.type, Counted)
    Counted.copies[:] = [0, 0]
    yield Counted.copies


def test_a_device_is_a_class_and_an_entry_of_the_table(counted: list[int]) -> None:
    model = parser.parse_model(TEXT)
    rep = SingaBackend.prepare(model, "COUNTED")
    before = list(counted)
    np.testing.assert_array_equal(rep.run([X])[0], Y)
    assert [now - then for now, then in zip(counted, before, strict=True)] == [1, 1]  # the input and the output of a run
    with pytest.raises(DeviceUnavailable, match="the ordinal of COUNTED must be 0"):
        SingaBackend.prepare(model, "COUNTED:1")


def test_a_model_trains_on_the_device(counted: list[int]) -> None:
    assert losses(opt.SGD(0.1), device.Device("COUNTED")) == losses(opt.SGD(0.1), device.Device("STRICT"))
    assert min(counted) > 0


# --- an optimizer


class Lion(opt.Optimizer):
    """Steps by the sign of a momentum: p -= lr * sign(b1 * m + (1 - b1) * g), then m = b2 * m + (1 - b2) * g."""

    kinds = ("moments",)

    def __init__(self, lr: Any = 0.1, b1: float = 0.9, b2: float = 0.99) -> None:
        super().__init__(lr)
        self.b1 = self._set_hyperparameter("b1", b1)
        self.b2 = self._set_hyperparameter("b2", b2)

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        (m,) = states

        def mean(name: str) -> Tensor:
            return op.Add(op.Mul(m, self._value(name, p)), op.Mul(g, self._one_minus(name, p)))  # type: ignore[no-any-return]

        return op.Sub(p, op.Mul(op.Sign(mean("b1")), self._value("lr", p))), mean("b2")


def test_an_optimizer_is_a_rule_of_onnx_operators() -> None:
    rng = np.random.default_rng(0)
    expected, m = rng.normal(size=(3, 4)), np.zeros((3, 4))
    p, lion = Tensor(data=expected.copy(), name="p", stores_grad=True), Lion(0.01)
    for _ in range(6):
        g = rng.normal(size=p.shape)
        lion.apply("p", p, Tensor(data=g))
        lion.step()
        expected -= 0.01 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        np.testing.assert_allclose(p.data, expected, rtol=1e-6)
    (state,) = (value for name, value in lion.get_states().items() if "moments" in name)
    np.testing.assert_allclose(state.data, m, rtol=1e-6)


def test_the_optimizer_is_recorded_with_the_step() -> None:
    on_tape = losses(Lion(0.01))
    np.testing.assert_allclose(losses(Lion(0.01), graph=True), on_tape, rtol=1e-5)
    assert on_tape == sorted(on_tape, reverse=True)


# --- a command

COMMAND = '''
"""`sonnx count`: count the nodes of a model."""

from pathlib import Path

import click

from singa.cli._common import echo, exit_codes, json_option, write_json
from singa_backend import read
from singa_backend.proto.load import load_model


@click.command("count")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
@exit_codes
def command(model: Path, as_json: bool) -> None:
    """Count the nodes of MODEL, also those of its inner graphs."""
    count = len(list(read(load_model(model)[0]).all_nodes()))
    if as_json:
        write_json({"nodes": count})
    else:
        echo(f"{count} nodes")
'''


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CliRunner]:
    """`sonnx count`: a module, an entry of COMMANDS, a place in SECTIONS, and two examples."""
    (tmp_path / "count_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(_main.COMMANDS, "count", ("count_command", "Count the nodes of MODEL."))
    monkeypatch.setitem(_main.SECTIONS, "Use", (*_main.SECTIONS["Use"], "count"))
    monkeypatch.setitem(EXAMPLES, "count", ("sonnx count model.onnx", "sonnx count model.onnx --json"))
    yield CliRunner()
    sys.modules.pop("count_command", None)


def test_a_command_is_a_module_and_an_entry_of_the_table(command: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(TEXT), path)
    assert command.invoke(_main.main, ["count", str(path)]).output == "3 nodes\n"
    shown = json.loads(command.invoke(_main.main, ["count", str(path), "--json"]).output)
    assert shown["nodes"] == 3 and {"schema", "schema_version"} <= set(shown)


def test_a_command_has_help_and_exit_codes(command: CliRunner, tmp_path: Path) -> None:
    assert "Count the nodes of MODEL." in command.invoke(_main.main, ["--help"]).output
    assert "sonnx count model.onnx --json" in command.invoke(_main.main, ["count", "--help"]).output
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xff")
    refused = command.invoke(_main.main, ["count", str(tmp_path / "broken.onnx"), "--json"])
    assert refused.exit_code == 3 and json.loads(refused.output)["schema"] == "sonnx.error"
    assert command.invoke(_main.main, ["count"]).exit_code == 2


# --- an importer


class Polynomial:
    """A model of a framework: c0 + c1 * x + c2 * x^2 + ..."""

    def __init__(self, *coefficients: float) -> None:
        self.coefficients = coefficients

    def __call__(self, x: Any) -> Any:
        return sum(c * x**i for i, c in enumerate(self.coefficients))

    def to_onnx(self) -> ModelProto:
        """The framework's exporter: Horner's scheme."""
        if not self.coefficients:
            raise ValueError("a polynomial without coefficients")
        *lower, highest = self.coefficients
        lines, weights, value = [], [f"float[1] c = {{{highest}}}"], "c"
        for i, c in reversed(list(enumerate(lower))):
            weights.append(f"float[1] c{i} = {{{c}}}")
            lines.append(f"m{i} = Mul({value}, x)\n v{i} = Add(m{i}, c{i})")
            value = f"v{i}"
        lines.append(f"y = Identity({value})")
        text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y) <{", ".join(weights)}>'
        return parser.parse_model(text + " {\n" + "\n".join(lines) + "\n}")


def from_polynomial(model: Polynomial, x: Any, *, check: bool = True, train: bool = False) -> sonnx.SONNXModel:
    """Import a polynomial by its exporter, and compare the model with it."""
    who = ("Polynomials", "1.0")
    with exporting(*who):
        proto = model.to_onnx()
    imported = made(proto, None, None, train)
    if check:
        verify(imported, outputs(imported, ["x"], [as_array(x)]), [as_array(model(x))], TOLERANCE, who)
    return imported


def test_an_importer_runs_an_exporter_and_compares() -> None:
    x = np.linspace(-1, 1, 7, dtype=np.float32)
    imported = from_polynomial(Polynomial(1.0, -2.0, 0.5), x)
    np.testing.assert_allclose(to_numpy(imported.forward(Tensor(data=x))[0]), 1 - 2 * x + x * x / 2, rtol=1e-5)
    assert imported.onnx_model.graph.input[0].name == "x"


def test_failures_of_the_exporter_and_differences_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(ExporterFailure, match="could not export the model: ValueError: a polynomial without") as caught:
        from_polynomial(Polynomial(), x)
    assert caught.value.code == "SX910"
    monkeypatch.setattr(Polynomial, "to_onnx", lambda self: _wrong())
    with pytest.raises(ExporterFailure, match="output 0 'y'") as caught:
        from_polynomial(Polynomial(1.0, 2.0), x)
    assert caught.value.code == "SX911"
    from_polynomial(Polynomial(1.0, 2.0), x, check=False)


def _wrong() -> ModelProto:
    return parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y) { y = Neg(x) }')


# --- a report


def page(document: dict[str, Any]) -> str:
    """The page of a document: Markdown, from the JSON alone; its beginning marks it as a file that the program may replace."""
    rows = [f"| {markdown(r['operator'])} | {r['nodes']} |" for r in document["rows"]]
    return "\n".join(["# Nodes", "", "Generated by `sonnx nodes`.", "", "| operator | nodes |", "|---|---:|", *rows, ""])


PAGES = {"nodes.md": page}


def test_a_report_is_a_document_and_pages_rendered_from_it(tmp_path: Path) -> None:
    names = [n.op_type for n in parser.parse_model(TEXT).graph.node]
    document = {"rows": [{"operator": name, "nodes": names.count(name)} for name in sorted(set(names))]}
    path = tmp_path / "nodes.json"
    assert publish(document, path, PAGES) == [path, tmp_path / "nodes.md"]
    assert load(path) == document and "| Relu | 1 |" in (tmp_path / "nodes.md").read_text()
    assert stale_page(load(path), path, PAGES) == ""
    document["rows"][0]["nodes"] = 2
    assert "nodes.md differs from the page rendered from nodes.json" in stale_page(document, path, PAGES)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Leave the mode of the thread as it was."""
    before = tape.training
    yield
    tape.training = before
