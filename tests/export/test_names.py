"""Names of inputs and outputs never change: every writer keeps them, and their order, whatever their values are."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from singa import codegen, sonnx
from singa.tensor import Tensor
from singa_backend import InvalidInput, SingaBackend, passes

X = np.array([3.0, -4.0], np.float32)
LIKELY = [
    "neg",
    "identity",
    "c",
    "y",
    "x_1",
    "constant",
    "output",
    "output_0",
    "add",
    "shape",
    "if",
    "Neg#0:0",
    "outer_0",
    "z",
    "z_1",
]
"""Names that builders and exporters choose too."""


def drawn(seed: int) -> ModelProto:
    """A graph over x and k with 1 to 4 outputs, which may be inputs, constants, weights, copies or one value twice."""
    rng = random.Random(seed)
    free = rng.sample(LIKELY, len(LIKELY))
    floats = [rng.choice(["x", "neg_in"])]
    first, flag = floats[0], "k"
    other: list[str] = []
    nodes, weights = [], []

    def name() -> str:
        return free.pop()

    for _ in range(rng.randrange(2, 8)):
        kind = rng.choice(["Neg", "Identity", "Identity", "Add", "Constant", "weight", "integers", "Shape", "If", "fold"])
        if kind == "weight":
            weights.append(numpy_helper.from_array(np.array([rng.random(), 2], np.float32), name()))
            floats.append(weights[-1].name)
        elif kind == "integers":
            weights.append(numpy_helper.from_array(np.array([rng.randrange(9)]), name()))
            other.append(weights[-1].name)
        elif kind == "Shape":
            nodes.append(helper.make_node("Shape", [rng.choice(floats)], [name()]))
            other.append(nodes[-1].output[0])
        elif kind == "Constant":
            value = numpy_helper.from_array(np.array([rng.random(), 1], np.float32))
            nodes.append(helper.make_node("Constant", [], [name()], value=value))
            floats.append(nodes[-1].output[0])
        elif kind == "fold":
            source = next((n for n in floats if n in {w.name for w in weights}), first)
            nodes.append(helper.make_node("Neg", [source], [name()]))
            floats.append(nodes[-1].output[0])
        elif kind == "If":
            bodies = [branch(rng, rng.choice(floats), name() if i else "inner") for i in range(2)]
            nodes.append(helper.make_node("If", [flag], [name()], then_branch=bodies[0], else_branch=bodies[1]))
            floats.append(nodes[-1].output[0])
        else:
            inputs = [rng.choice(floats) for _ in range(2 if kind == "Add" else 1)]
            nodes.append(helper.make_node(kind, inputs, [name()]))
            floats.append(nodes[-1].output[0])
    values = [*floats, *other]
    outputs = [rng.choice(values) for _ in range(rng.randrange(1, 5))]
    outputs = outputs if seed % 5 == 0 else list(dict.fromkeys(outputs))  # one name twice is valid too
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info(first, TensorProto.FLOAT, [2]), info(flag, TensorProto.BOOL, [])],
        [info(n, TensorProto.INT64, [1]) if n in other else info(n, TensorProto.FLOAT, [2]) for n in outputs],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def branch(rng: random.Random, source: str, out: str) -> GraphProto:
    node = helper.make_node(rng.choice(["Neg", "Identity"]), [source], [out])
    if rng.random() < 0.3:
        node = helper.make_node("Constant", [], [out], value=numpy_helper.from_array(np.ones(2, np.float32)))
    return helper.make_graph([node], "b", [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, [2])])


def names(proto: ModelProto) -> tuple[list[str], list[str]]:
    held = {t.name for t in proto.graph.initializer}
    return [v.name for v in proto.graph.input if v.name not in held], [v.name for v in proto.graph.output]


def run(proto: ModelProto) -> list[np.ndarray]:
    return [np.asarray(v) for v in SingaBackend.prepare(proto).run([X, np.array(True)])]


def tensors() -> list[Tensor]:
    return [Tensor(data=a, requires_grad=False) for a in (X, np.array(True))]


def optimized(proto: ModelProto, folder: Path) -> ModelProto:
    passes.optimize(proto)
    return proto


def saved(proto: ModelProto, folder: Path) -> ModelProto:
    sonnx.save(proto, folder / "m.onnx")
    return onnx.load(folder / "m.onnx")


def exported_twice(proto: ModelProto, folder: Path) -> ModelProto:
    return sonnx.export(sonnx.SONNXModel(sonnx.export(sonnx.SONNXModel(proto), tensors())), None, folder / "m.onnx")


WRITERS: dict[str, Callable[[ModelProto, Path], ModelProto]] = {
    "convert": lambda proto, folder: sonnx.convert(proto, 18),
    "convert to 8": lambda proto, folder: sonnx.convert(proto, 8),
    "convert and optimize": lambda proto, folder: sonnx.convert(proto, 19, folder / "m.onnx", optimize=True),
    "export": lambda proto, folder: sonnx.export(sonnx.SONNXModel(proto), tensors()),
    "export without inputs": lambda proto, folder: sonnx.export(sonnx.SONNXModel(proto)),
    "export and optimize": lambda proto, folder: sonnx.export(sonnx.SONNXModel(proto), tensors(), optimize=True),
    "export twice": exported_twice,
    "optimize": optimized,
    "save": saved,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_writers_keep_names_and_values(writer: str, tmp_path: Path) -> None:
    for seed in range(40):
        proto = drawn(seed)
        onnx.checker.check_model(proto)
        before, expected = names(proto), run(proto)
        written = WRITERS[writer](ModelProto.FromString(proto.SerializeToString()), tmp_path)
        assert names(written) == before, f"seed {seed}"
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(run(written), expected, strict=True)), (
            f"seed {seed}"
        )


def test_generated_programs_return_the_outputs_in_order(tmp_path: Path) -> None:
    for seed in range(25):
        proto = drawn(seed)
        path = codegen.generate(proto, f"p{seed}").write(tmp_path / f"p{seed}.py")[0]
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        net = module.Model()
        net.eval()
        made: Any = net.forward(*tensors())
        got = [np.asarray(t.data) for t in (made if isinstance(made, (list, tuple)) else [made])]
        assert all(np.array_equal(a, b) for a, b in zip(got, run(proto), strict=True)), f"seed {seed}"


def test_a_constant_output_is_one_node() -> None:
    """It was two Identity nodes, the second with another name."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y, float[2] z)'
    proto = onnx.parser.parse_model(f"{text} {{ y = Neg(x) z = Constant <value = float[2] {{1, 2}}> () }}")
    assert sorted(n.op_type for n in sonnx.convert(proto, 18).graph.node) == ["Constant", "Neg"]


def test_a_requested_output_name_that_is_an_input_is_refused() -> None:
    """A file that renamed it silently would surprise whoever asked for it."""
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Neg(x) }')
    model = sonnx.SONNXModel(proto)
    with pytest.raises(InvalidInput, match="'x'") as caught:
        sonnx.export(model, [Tensor(data=X, requires_grad=False)], output_names=["x"])
    assert caught.value.code == "SX355"
    made = sonnx.export(model, [Tensor(data=X, requires_grad=False)], input_names=["y"], output_names=["x"])
    assert names(made) == (["y"], ["x"])
