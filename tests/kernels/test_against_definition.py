"""compare and bisect between the plans of this package and its definitions: a wrong kernel, and a wrong fusion, are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

from singa.cli import main
from singa_backend import InvalidInput, SingaBackend, debug
from singa_backend.kernels.table import Site, kernel, table
from singa_backend.kernels.values import Value

CHAIN = """<ir_version: 8, opset_import: ["": 17]>
chain (float[3, 4] x) => (float[3, 4] y, float[3, 4] z)
<float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> {
  a = Tan(x)
  b = MatMul(a, w)
  c = Mod<fmod = 1>(b, w1)
  w1 = Constant<value_float = 3.0>()
  d = Tan(c)
  e = Relu(d)
  y = Tan(e)
  z = Sin(a)
}"""

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def model(text: str = CHAIN) -> onnx.ModelProto:
    return parser.parse_model(text)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that a test adds are removed after it."""
    before = {key: list(found) for key, found in table.items()}
    yield
    for key in list(table):
        if key in before:
            table[key][:] = before[key]
        else:
            del table[key]


def wrong_tan(skew: float) -> None:
    """A kernel of Tan whose result is wrong."""

    @kernel("Tan", 7, on="numpy", rank=-1)
    def tan(site: Site, x: Value) -> Value:
        y = site.new(x.shape, x.dtype)

        def bind() -> Any:
            source, target = x.array, y.array
            return [(lambda: np.copyto(target, np.tan(source) * np.float32(skew)), ())]

        site.emit(bind, reads=(x,), writes=(y,), kernel="wrong")
        return y


def wrong_after(first: str, versions: tuple[int, ...], second: str) -> None:
    """A kernel that computes `first` alone rightly, and wrongly if `second` follows."""

    @kernel(first, *versions, on="numpy", rank=-1)
    def both(site: Site, x: Value, w: Value) -> Value:
        site.require(site.followers and site.followers[0].name == second, "it is alone")
        site.absorb(1)
        y = site.new((*x.shape[:-1], w.shape[-1]), x.dtype)

        def bind() -> Any:
            left, right, target = x.array, w.array, y.array
            return [(lambda: np.copyto(target, np.maximum(left @ right, np.float32(1))), ())]

        site.emit(bind, reads=(x, w), writes=(y,), kernel="wrong")
        return y


def test_plans_agree_with_definitions() -> None:
    found = debug.compare(model(), {"x": X}, against="definition")
    assert found.agrees and (found.mine, found.theirs) == ("plan", "definition")
    assert {r.value for r in found.rows} == {*"abcdeyz", "w1"}
    assert debug.bisect(model(), {"x": X}, against="definition") is None


def test_a_wrong_kernel_is_found(kernels: None, tmp_path: Path) -> None:
    wrong_tan(1.01)
    compared = debug.compare(model(), {"x": X}, against="definition")
    assert not compared.agrees and compared.first is not None and compared.first.values == ["a"]
    found = debug.bisect(model(), {"x": X}, against="definition", to=tmp_path / "repro")
    assert found is not None and found.alone and found.node.operator == "Tan" and found.node.values == ["a"]
    assert [n.op_type for n in onnx.load(tmp_path / "repro" / "model.onnx").graph.node] == ["Tan"]


FUSED = """<ir_version: 8, opset_import: ["": 17]>
fused (float[3, 4] x) => (float[3, 4] y, float[3, 4] u)
<float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> {
  a = Tan(x)
  v = Sin(x)
  b = MatMul(a, w)
  s = Cos(v)
  c = Relu(b)
  d = Tan(c)
  u = Cos(s)
  e = Sin(d)
  y = Cos(e)
}"""


@pytest.mark.parametrize("how", ["function", "command"])
def test_nodes_that_are_wrong_together_are_written_together(how: str, kernels: None, tmp_path: Path) -> None:
    wrong_after("MatMul", (13,), "Relu")
    path, folder = tmp_path / "m.onnx", tmp_path / "repro"
    onnx.save(model(FUSED), path)
    np.save(tmp_path / "x.npy", X)
    compared = debug.compare(path, {"x": X}, against="definition")
    assert not compared.agrees and {r.value for r in compared.rows if not r.agrees} == {"y"}
    if how == "function":
        found = debug.bisect(path, {"x": X}, against="definition", to=folder)
        assert found is not None
        told = found.to_dict()
    else:
        command = ["bisect", str(path), "-i", f"x={tmp_path / 'x.npy'}", "--against", "definition", "--to", str(folder), "--json"]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 1, done.output
        told = json.loads(done.stdout)
    assert told["alone"] and told["node"]["operator"] == "Relu" and told["node"]["values"] == ["c"]
    assert "MatMul" in told["node"]["notes"][0] and set(told["differences"]) == {"c"}
    part = onnx.load(folder / "model.onnx")
    assert [n.op_type for n in part.graph.node] == ["MatMul", "Relu"] and [i.name for i in part.graph.input] == ["a"]
    rep, exact = SingaBackend.prepare(part), SingaBackend.prepare(part, optimize=0)
    a = np.tan(X)
    assert not np.allclose(rep.run([a])[0], exact.run([a])[0])


def test_where_an_error_accumulates_the_node_that_adds_most_is_named(kernels: None, tmp_path: Path) -> None:
    wrong_tan(1 + 3e-6)
    found = debug.bisect(model(), {"x": X}, against="definition", to=tmp_path / "repro", rtol=2e-6, atol=2e-6)
    assert found is not None and found.node.operator in ("Tan", "MatMul", "Mod")


def test_random_values_are_shared() -> None:
    text = CHAIN.replace("a = Tan(x)", "a = RandomNormalLike(x)")
    found = debug.compare(model(text), {"x": X}, against="definition")
    assert found.agrees
    assert debug.bisect(model(text), {"x": X}, against="definition") is None


def test_reduce_to_the_nodes_that_are_wrong_together(kernels: None, tmp_path: Path) -> None:
    wrong_after("MatMul", (13,), "Relu")
    found = debug.reduce(model(FUSED), {"x": X}, debug.differs("definition"), to=tmp_path / "reduced")
    assert {"MatMul", "Relu"} <= {n.op_type for n in onnx.load(found.folder / "model.onnx").graph.node}
    assert len(onnx.load(found.folder / "model.onnx").graph.node) < 5


def test_only_the_cpu_has_plans() -> None:
    for function in (debug.compare, debug.bisect):
        with pytest.raises(InvalidInput, match="the device must be CPU") as error:
            function(model(), {"x": X}, against="definition", device="STRICT")
        assert error.value.code == "SX320"
    with pytest.raises(InvalidInput, match="names map values"):
        debug.compare(model(), {"x": X}, against="definition", names={"a": "a"})
    with pytest.raises(InvalidInput, match="must be 'onnxruntime'"):
        debug.compare(model(), {"x": X}, against="definition", optimised=True)


def test_the_command_compares(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    done = CliRunner().invoke(main, ["compare", str(path), "--against", "definition", "--random", "0"])
    assert done.exit_code == 0 and "plan and definition agree" in done.output
    done = CliRunner().invoke(main, ["compare", str(path), "--against", "definitions"])
    assert done.exit_code == 2 and "definition" in done.output
