"""Plants one fault in a copy of a model, and knows the node that it makes wrong; engines that are wrong in one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper


@dataclass
class Planted:
    """A model with a fault, or an engine with one.

    Attributes:
        kind: weight, attribute, dtype, opset or engine.
        what: the change.
        node: the first output of the node that is wrong.
        model: the model to run.
        engine: MODULE:CLASS of the engine; "" for a right one.
    """

    kind: str
    what: str
    node: str
    model: ModelProto
    engine: str = ""


def copy(model: ModelProto) -> ModelProto:
    made = ModelProto()
    made.CopyFrom(model)
    return made


def weight(model: ModelProto, random: np.random.Generator) -> Planted | None:
    """One element, one row or all of a float weight is changed."""
    made = copy(model)
    uses = [(t, n) for t in made.graph.initializer for n in made.graph.node if t.name in n.input]
    uses += [(a.t, n) for c in made.graph.node for a in c.attribute if c.op_type == "Constant" and a.name == "value"
             for n in made.graph.node if c.output[0] in n.input]  # fmt: skip
    uses = [(t, n) for t, n in uses if t.data_type == TensorProto.FLOAT and n.op_type != "Constant"]
    tensor, node = uses[random.integers(len(uses))]
    array = numpy_helper.to_array(tensor).copy()
    if sum(u is not None and u[0] is tensor for u in uses) > 1 or not array.size:
        return None
    scale = np.abs(array).mean() or 1.0
    how = random.integers(3)
    if how == 0:
        array.reshape(-1)[random.integers(array.size)] += np.float32(scale * random.choice([1, 3, 10]))
    elif how == 1 and array.ndim:
        array[random.integers(len(array))] *= np.float32(random.choice([0.5, 1.1, -1]))
    else:
        array *= np.float32(random.choice([1.001, 1.01, 0.9]))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return Planted("weight", f"{tensor.name} {['one element', 'one row', 'all'][how]}", node.output[0], made)


def attribute(model: ModelProto, random: np.random.Generator) -> Planted | None:
    """One attribute is changed, so that the model may remain valid."""
    made = copy(model)
    options: list[tuple[NodeProto, str, Any]] = []
    for node in made.graph.node:
        for a in node.attribute:
            if node.op_type == "Constant":
                continue
            if a.type == a.FLOAT:
                options.append((node, a.name, a.f * 1.5 + 0.01))
            elif (a.name in ("axis",) and a.i > 0) or (a.name == "axis" and a.i < 0):
                options.append((node, a.name, a.i - 1))
            elif a.name == "perm" and len(a.ints) > 2:
                ints = list(a.ints)
                options.append((node, a.name, ints[:-2] + ints[:-3:-1]))
            elif a.name in ("transB", "ceil_mode", "exclusive", "keepdims"):
                options.append((node, a.name, 1 - a.i))
            elif a.name in ("pads", "strides", "dilations") and len(set(a.ints)) > 1:
                options.append((node, a.name, list(a.ints)[::-1]))
        if node.op_type == "LayerNormalization":
            options.append((node, "epsilon", 0.1))
        if node.op_type == "Gelu":
            options.append((node, "approximate", "tanh"))
        if node.op_type == "LeakyRelu":
            options.append((node, "alpha", 0.2))
    if not options:
        return None
    node, name, value = options[random.integers(len(options))]
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return Planted("attribute", f"{node.op_type}.{name} = {value}", node.output[0], made)


def dtype(model: ModelProto, random: np.random.Generator, float_values: list[str]) -> Planted:
    """One value is rounded to float16 on its way."""
    made = copy(model)
    nodes = [n for n in made.graph.node if n.output[0] in float_values]
    node = nodes[random.integers(len(nodes))]
    name = node.output[0]
    node.output[0] = f"{name}_wide"
    at = list(made.graph.node).index(node) + 1
    made.graph.node.insert(at, helper.make_node("Cast", [f"{name}_wide"], [f"{name}_half"], to=TensorProto.FLOAT16))
    made.graph.node.insert(at + 1, helper.make_node("Cast", [f"{name}_half"], [name], to=TensorProto.FLOAT))
    return Planted("dtype", f"{name} through float16", name, made)


def opset(random: np.random.Generator) -> tuple[ModelProto, Planted]:
    """A net whose Softmax, LogSoftmax or Hardmax has the default axis, which opset 13 changed; and its copy at opset 11."""
    operator = str(random.choice(["Softmax", "LogSoftmax", "Hardmax"]))
    before, width = int(random.integers(1, 4)), int(random.integers(4, 12))
    nodes, name = [], "x"
    for i in range(before):
        nodes.append(helper.make_node("MatMul", [name, f"w{i}"], [f"m{i}"], f"matmul{i}"))
        nodes.append(helper.make_node("Tanh", [f"m{i}"], [f"t{i}"], f"tanh{i}"))
        name = f"t{i}"
    nodes += [helper.make_node(operator, [name], ["s"], "chosen"), helper.make_node("MatMul", ["s", "v"], ["y"], "last")]
    weights = {f"w{i}": (width, width) for i in range(before)} | {"v": (width, 3)}
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 5, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5, 3])],
        [numpy_helper.from_array(random.standard_normal(s).astype(np.float32), n) for n, s in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    made = copy(model)
    made.opset_import[0].version = int(random.integers(7, 13))
    return model, Planted("opset", f"{operator} at {made.opset_import[0].version}", "s", made)


def engine(model: ModelProto, random: np.random.Generator, float_values: list[str]) -> Planted:
    """The engine is wrong in one operator: in the first of its nodes, and in all others."""
    operators = sorted({n.op_type for n in model.graph.node if n.output[0] in float_values})
    operator = operators[random.integers(len(operators))]
    node = next(n for n in model.graph.node if n.op_type == operator and n.output[0] in float_values)
    wrong = str(random.choice(["Scaled", "Shifted", "Last"]))
    return Planted("engine", f"{wrong} {operator}", node.output[0], model, f"tests.helpers.planted:{wrong}_{operator}")


def planted(model: ModelProto, float_values: list[str], kind: str, random: np.random.Generator) -> Planted | None:
    """A fault of a kind."""
    if kind in ("weight", "attribute"):
        return {"weight": weight, "attribute": attribute}[kind](model, random)
    makers: dict[str, Callable[..., Planted]] = {"dtype": dtype, "engine": engine}
    return makers[kind](model, random, float_values)


# --- engines ----------------------------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """The engine Scaled_Tanh is onnxruntime with every Tanh multiplied by 1.01; Shifted adds, Last changes its last element."""
    how, _, operator = name.partition("_")
    if how not in ("Scaled", "Shifted", "Last") or not operator:
        raise AttributeError(name)
    return type(name, (Wrong,), {"how": how, "operator": operator})


class Wrong:
    """onnxruntime, wrong in one operator."""

    how = operator = ""

    @classmethod
    def run_model(cls, model: ModelProto, inputs: list[Any], device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        import onnxruntime

        made = copy(model)
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        settings.intra_op_num_threads = 1
        made.graph.node.extend(())
        nodes = list(made.graph.node)
        del made.graph.node[:]
        for i, node in enumerate(nodes):
            made.graph.node.append(node)
            if node.op_type == cls.operator:
                made.graph.node.extend(cls.after(made.graph.node[-1], str(i)))
        session = onnxruntime.InferenceSession(made.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        return tuple(session.run([o.name for o in model.graph.output], dict(zip(names, inputs, strict=True))))

    @classmethod
    def after(cls, node: NodeProto, tag: str) -> Iterator[NodeProto]:
        name = node.output[0]
        node.output[0] = f"{name}_right"
        value = helper.make_tensor(f"k{tag}", TensorProto.FLOAT, [], [1.01 if cls.how == "Scaled" else 0.02])
        yield helper.make_node("Constant", [], [f"k{tag}"], value=value)
        if cls.how == "Scaled":
            yield helper.make_node("Mul", [f"{name}_right", f"k{tag}"], [name])
        elif cls.how == "Shifted":
            yield helper.make_node("Add", [f"{name}_right", f"k{tag}"], [name])
        else:  # one of the last axis, the last, is multiplied: in every row
            yield helper.make_node("Shape", [f"{name}_right"], [f"s{tag}"])
            one = helper.make_tensor(f"o{tag}", TensorProto.INT64, [1], [-1])
            yield helper.make_node("Constant", [], [f"o{tag}"], value=one)
            yield helper.make_node("Gather", [f"s{tag}", f"o{tag}"], [f"n{tag}"])
            begin = helper.make_tensor(f"z{tag}", TensorProto.INT64, [], [0])
            yield helper.make_node("Constant", [], [f"z{tag}"], value=begin)
            single = helper.make_tensor(f"i{tag}", TensorProto.INT64, [], [1])
            yield helper.make_node("Constant", [], [f"i{tag}"], value=single)
            yield helper.make_node("Squeeze", [f"n{tag}", f"z1{tag}"], [f"c{tag}"])
            yield helper.make_node("Constant", [], [f"z1{tag}"], value=helper.make_tensor("", TensorProto.INT64, [1], [0]))
            yield helper.make_node("Range", [f"z{tag}", f"c{tag}", f"i{tag}"], [f"r{tag}"])
            yield helper.make_node("Sub", [f"c{tag}", f"i{tag}"], [f"l{tag}"])
            yield helper.make_node("Equal", [f"r{tag}", f"l{tag}"], [f"e{tag}"])
            yield helper.make_node("Add", [f"{name}_right", f"k{tag}"], [f"a{tag}"])
            yield helper.make_node("Where", [f"e{tag}", f"a{tag}", f"{name}_right"], [name])
