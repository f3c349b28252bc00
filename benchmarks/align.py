"""Plants faults in exported models, and counts how often `compare` names the node across PyTorch's two exporters; also its cost.

    python benchmarks/align.py [--faults 10] [--seed 0] [--folder FOLDER]

The models are those of tests/models: four architectures by the exporter that traces TorchScript and by the one that captures an
FX graph, with other names, operators and structures; or those of a folder that align_nets.py wrote.  A fault is a weight, an
attribute, a dropped node or another input; only faults that run and move an output beyond its tolerance count.  A node is
"named" if it has the fault, or reads the value that a dropped node computed, and all its inputs were compared and agree; "among"
if several nodes are reported; otherwise "wrong".
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from singa_backend import SingaBackend, SonnxError, debug

MODELS = Path(__file__).parents[1] / "tests" / "models"
NETS = ("bert", "gpt2", "mobilenetv2", "vit")
PAIRS = (("script-17", "dynamo-18"), ("dynamo-18", "script-17"))
SIZES = (1250, 2500, 5000, 10000)

Fault = Callable[[ModelProto, NodeProto, np.random.Generator], "set[str] | None"]
"""Changes a node of a model; returns the outputs of the nodes that are wrong then, None if the node cannot have the fault."""


def _weights(model: ModelProto) -> dict[str, TensorProto]:
    return {t.name: t for t in model.graph.initializer}


def weight(model: ModelProto, node: NodeProto, rng: np.random.Generator) -> set[str] | None:
    weights, readers = _weights(model), Counter(i for n in model.graph.node for i in n.input)
    names = [i for i in node.input if i in weights and readers[i] == 1 and weights[i].data_type == TensorProto.FLOAT]
    names = [i for i in names if np.prod(weights[i].dims) > 4]
    if not names:
        return None
    name = names[rng.integers(len(names))]
    value = numpy_helper.to_array(weights[name]).copy()
    flat = value.reshape(-1)
    flat[rng.choice(flat.size, max(1, flat.size // 10), replace=False)] += np.float32(2 * value.std() + 0.5)
    weights[name].CopyFrom(numpy_helper.from_array(value, name))
    return {node.output[0]}


def attribute(model: ModelProto, node: NodeProto, rng: np.random.Generator) -> set[str] | None:
    known = {a.name: a for a in node.attribute}
    changed: dict[str, Any] = {}
    if node.op_type == "Softmax":
        changed = {"axis": 1}
    elif node.op_type == "LayerNormalization":
        changed = {"epsilon": 0.5}
    elif node.op_type == "Gemm":
        changed = {"alpha": 1.5}
    elif node.op_type == "Transpose" and len(known["perm"].ints) > 2:
        first, second, third, *rest = known["perm"].ints
        changed = {"perm": [first, third, second, *rest]}
    elif node.op_type == "Conv" and "pads" in known and any(known["pads"].ints):
        changed = {"pads": [0, 2 * known["pads"].ints[1], 2 * known["pads"].ints[2], 0]}
    for name, value in changed.items():
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return {node.output[0]} if changed else None


def dropped(model: ModelProto, node: NodeProto, rng: np.random.Generator) -> set[str] | None:
    weights = _weights(model)
    data = [i for i in node.input if i not in weights]
    unary = node.op_type in ("Clip", "Tanh", "Erf", "Softmax", "Sqrt", "LayerNormalization", "Gelu")
    output = node.output[0]
    if not (unary or (node.op_type in ("Add", "Mul") and len(data) == 1)) or output in {o.name for o in model.graph.output}:
        return None
    readers = [n for n in model.graph.node if output in n.input]
    for reader in readers:
        reader.input[:] = [data[0] if i == output else i for i in reader.input]
    model.graph.node.remove(node)
    return {n.output[0] for n in readers}


def another_input(model: ModelProto, node: NodeProto, rng: np.random.Generator) -> set[str] | None:
    if node.op_type in ("Sub", "Div", "MatMul", "Where", "Pow"):
        a = int(node.op_type == "Where")
        node.input[a], node.input[a + 1] = node.input[a + 1], node.input[a]
        return {node.output[0]}
    weights, nodes = _weights(model), list(model.graph.node)
    places = [k for k, i in enumerate(node.input) if i and i not in weights]
    if node.op_type not in ("Add", "Mul", "Concat", "Softmax", "Clip", "LayerNormalization", "Transpose", "Conv") or not places:
        return None
    place = places[rng.integers(len(places))]
    before = [n for n in nodes[: nodes.index(node)] if n.op_type != "Constant"]
    earlier = [o for n in before for o in n.output if o != node.input[place]]
    if not earlier:
        return None
    node.input[place] = earlier[rng.integers(len(earlier))]
    return {node.output[0]}


FAULTS: tuple[Fault, ...] = (weight, attribute, dropped, another_input)


def inputs(net: str) -> list[np.ndarray]:
    with np.load(MODELS / f"{net}.npz") as arrays:
        return [arrays[k] for k in sorted(arrays.files) if k.startswith("x0_")]


def planted(model: ModelProto, fault: Fault, rng: np.random.Generator) -> tuple[ModelProto, set[str], str] | None:
    """A copy of a model with a fault in the first node, in a drawn order, that can have it."""
    for i in rng.permutation(len(model.graph.node)):
        copy = ModelProto()
        copy.CopyFrom(model)
        node = copy.graph.node[i]
        name = f"{node.op_type} {node.name!r}"
        wrong = fault(copy, node, rng) if node.op_type != "Constant" else None
        if wrong is not None:
            return copy, wrong, name
    return None


def shows(model: ModelProto, copy: ModelProto, feeds: list[np.ndarray]) -> bool:
    """Whether a copy runs, with outputs of the same shapes that are finite, and at least one is beyond its tolerance."""
    try:
        right, wrong = (SingaBackend.prepare(m).run(feeds) for m in (model, copy))
    except SonnxError:
        return False
    if any(a.shape != b.shape or not np.isfinite(b).all() for a, b in zip(right, wrong, strict=True)):
        return False
    return any(not debug.difference(b, a).agrees for a, b in zip(right, wrong, strict=True))


def cases(net: str, exporter: str, count: int, seed: int) -> Iterator[tuple[ModelProto, set[str], str]]:
    """Copies of a model with faults that move an output, each kind in turn."""
    model, feeds, rng = onnx.load(MODELS / f"{net}-{exporter}.onnx"), inputs(net), np.random.default_rng(seed)
    made = 0
    for _ in range(40 * count):
        if made == count:
            return
        case = planted(model, FAULTS[made % len(FAULTS)], rng)
        if case is not None and shows(model, case[0], feeds):
            made += 1
            yield case


def verdict(copy: ModelProto, wrong: set[str], net: str, other: str) -> tuple[str, str]:
    """Whether `compare` names the node of a fault, and what it reports."""
    first = debug.compare(copy, inputs(net), against=MODELS / f"{net}-{other}.onnx").first
    if first is None:
        return "missed", "no node"
    if first.inputs_agreed is None:
        return "among", f"one of {first.among} nodes up to {first.operator} {first.node!r}"
    node = debug.ComparedModel(copy).node(first.values[0])
    named = any(o in wrong for o in node.output_names)
    return "named" if named else "wrong", f"{first.operator} {first.node!r}"


def chain(count: int, prefix: str) -> ModelProto:
    """x -> (MatMul, Tanh) * count / 2 -> y, with names that begin with a prefix."""
    rng, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    for i in range(count // 2):
        w, a, b = (f"{prefix}{letter}{i}" for letter in "wab")
        weights.append(numpy_helper.from_array(np.linalg.qr(rng.standard_normal((8, 8)))[0].astype(np.float32) * 1.3, w))
        nodes += [helper.make_node("MatMul", [x, w], [a]), helper.make_node("Tanh", [a], [b])]
        x = b
    nodes.append(helper.make_node("Neg", [x], ["y"]))
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 8]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=10, help="faults for each architecture and pair of exporters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the models of align_nets.py")
    given = parser.parse_args()
    global MODELS, NETS
    if given.folder is not None:
        MODELS, NETS = given.folder, tuple(sorted(p.stem for p in given.folder.glob("*.npz")))
    for mine, theirs in PAIRS:
        total: Counter[str] = Counter()
        for net in NETS:
            clean = debug.compare(MODELS / f"{net}-{mine}.onnx", inputs(net), against=MODELS / f"{net}-{theirs}.onnx")
            print(f"{net} {mine} against {theirs}: {'agree' if clean.agrees else 'DIFFER'}; {clean.alignment}")
            for copy, wrong, name in cases(net, mine, given.faults, given.seed):
                found, what = verdict(copy, wrong, net, theirs)
                total[found] += 1
                if found != "named":
                    print(f"  {found}: the fault is in {name}, reported is {what}")
        print(f"{mine} against {theirs}: {total['named']} of {sum(total.values())} faults named; {dict(total)}")
    x = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    for size in SIZES:
        models = chain(size, "m"), chain(size, "t")
        seconds = []
        for align in (True, False):
            start = time.process_time()
            debug.compare(models[0], x, against=models[1], align=align)
            seconds.append(time.process_time() - start)
        print(f"{size} nodes: {seconds[0] - seconds[1]:.1f} s of CPU time more with the alignment")


if __name__ == "__main__":
    main()
