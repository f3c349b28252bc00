"""Writes the models that benchmarks/compare.py times: NAME-bBATCH.onnx, with seeded random weights.

    tox -e compare-models -- --to FOLDER [--models resnet50 bert] [--batch 1 8] [--again]

A family that needs a package which is not installed (torch, onnxruntime, silero-vad) is named and left out.  Every family is
built in its own process.  Files that exist are kept, unless --again.

    light     the light models of the onnx wheel
    torch     the nets of compare_nets.py, exported from PyTorch
    graphs    chains and blocks of small operators
    package   the voice activity model of the package silero-vad
    int8      quantized forms of resnet50 and bert, by onnxruntime's quantizer
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from singa_backend.io.files import new_folder, write_bytes

BATCH = 0
"""A dimension of `Model.shapes` that is the batch."""


@dataclass(frozen=True)
class Model:
    """One row of the comparison, for each batch.

    Attributes:
        family: which builder writes it.
        integers: the ranges of integer inputs, [low, high).
        shapes: the shapes of inputs whose shape the file leaves open.
        others: other models that onnxruntime runs in the same turns; their times are compared with ours on this model.
        reference: whether onnx.reference runs it in reasonable time.
        held_out: whether it is only timed at the end.
        busy: whether busy.py alone times it.
        file: the model whose file it is, if that is another one.
        grows: inputs that are the outputs of the run before, after the first output in this order.
    """

    family: str
    integers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    reference: bool = False
    held_out: bool = False
    busy: bool = False
    file: str = ""
    grows: tuple[str, ...] = ()


_BERT = {"input_ids": (0, 30522), "attention_mask": (1, 2), "token_type_ids": (0, 2)}
_PAST = {f"past_{i}_{kind}": (BATCH, 12, 512, 64) for i in range(12) for kind in ("key", "value")}
_OF_RESNET, _OF_BERT = ("resnet50", "resnet50-u8s8"), ("bert", "bert-u8s8", "bert-dynamic")  # float, and the fastest int8 forms

MODELS: dict[str, Model] = {
    "alexnet": Model("light"),
    "densenet121": Model("light"),
    "inception-v1": Model("light"),
    "inception-v2": Model("light"),
    "resnet50": Model("light"),
    "shufflenet": Model("light"),
    "squeezenet": Model("light"),
    "vgg19": Model("light"),
    "zfnet512": Model("light"),
    "mobilenetv2": Model("torch"),
    "efficientnet-b0": Model("torch"),
    "vit-tiny": Model("torch"),
    "convnext-tiny": Model("torch"),
    "unet": Model("torch"),
    "yolo": Model("torch"),
    "bert": Model("torch", _BERT),
    "gpt2": Model("torch", {"input_ids": (0, 50257)}),
    "t5-encoder": Model("torch", {"input_ids": (0, 32128), "attention_mask": (1, 2)}),
    "lstm": Model("torch", reference=True),
    "gru": Model("torch", reference=True),
    "mlp": Model("torch", reference=True),
    "cnn28": Model("torch", reference=True),
    "chain1000": Model("graphs", reference=True),
    "shapes300": Model("graphs", shapes={"x": (BATCH, 16, 64)}, reference=True),
    "mixed300": Model("graphs", reference=True),
    "silero-vad": Model("package", {"sr": (16000, 16001)}, {"input": (BATCH, 576), "state": (2, BATCH, 128)}),
    "gpt2-decode": Model("torch", {"input_ids": (0, 50257)}, _PAST),
    "gpt2-generate": Model("torch", {"input_ids": (0, 50257)}, _PAST, file="gpt2-decode", grows=tuple(_PAST)),
    "resnet50-u8s8": Model("int8", others=_OF_RESNET),
    "resnet50-s8s8": Model("int8", others=_OF_RESNET),
    "resnet50-dynamic": Model("int8", others=_OF_RESNET),
    "bert-u8s8": Model("int8", _BERT, others=_OF_BERT),
    "bert-s8s8": Model("int8", _BERT, others=_OF_BERT),
    "bert-dynamic": Model("int8", _BERT, others=_OF_BERT),
    "vit-small": Model("torch", busy=True),
    "bert4": Model("torch", _BERT, busy=True),
    # Fixed before anything was tuned; timed at the end only.
    "resnext": Model("torch", held_out=True),
    "mobilenetv3": Model("torch", held_out=True),
    "conformer": Model("torch", held_out=True),
    "crnn": Model("torch", held_out=True),
    "swin": Model("torch", held_out=True),
}
"""The rows of the comparison by name."""

NEEDS = {"light": "onnx", "torch": "torch", "graphs": "onnx", "package": "silero-vad", "int8": "onnxruntime"}
"""The families, in the order in which they are built, and the distribution that each needs."""


def path_of(folder: Path, name: str, batch: int) -> Path:
    """Return the path of a model's file."""
    return folder / f"{MODELS.get(name, Model('')).file or name}-b{batch}.onnx"


def inputs_of(path: Path, name: str, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw inputs for a model's file: floats normal, integers within the ranges of the table."""
    row, generator, feeds = MODELS.get(name, Model("")), np.random.default_rng(seed), {}
    graph = onnx.load(path, load_external_data=False).graph
    weights = {t.name for t in graph.initializer}
    for value in graph.input:
        if value.name in weights:
            continue
        kind = value.type.tensor_type
        declared = row.shapes.get(value.name) or tuple(d.dim_value for d in kind.shape.dim)
        shape = tuple(d or batch for d in declared)
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if np.issubdtype(dtype, np.floating):
            feeds[value.name] = generator.standard_normal(shape).astype(dtype)
        else:
            feeds[value.name] = np.asarray(generator.integers(*row.integers.get(value.name, (0, 2)), shape), dtype)
    return feeds


# --- light


def light(name: str, batch: int, folder: Path) -> ModelProto:
    """Return a light model with random weights and folded constants.  What its last Softmax reads is an output too."""
    from singa_backend.conform import light_models

    model = light_models.model({"alexnet": "bvlc_alexnet"}.get(name, name.replace("-", "_")))
    graph = model.graph
    known = {t.name: t for t in graph.initializer}
    for node in list(graph.node):
        if node.op_type == "Dropout":
            graph.node.remove(node)
            _rename(graph, node.output[0], node.input[0])
        elif node.op_type in ("Unsqueeze", "Reshape") and all(n in known for n in node.input):
            single = helper.make_model(
                helper.make_graph([node], "g", [], [_open(node.output[0])]), opset_imports=model.opset_import
            )
            (folded,) = ReferenceEvaluator(single).run(None, {n: numpy_helper.to_array(known[n]) for n in node.input})
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(folded), node.output[0]))
            known[node.output[0]] = graph.initializer[-1]
            graph.node.remove(node)
        elif node.op_type == "Reshape":
            target = numpy_helper.to_array(known[node.input[1]]).copy()
            target[0] = batch
            known[node.input[1]].CopyFrom(numpy_helper.from_array(target, node.input[1]))
    used = {n for node in graph.node for n in node.input}
    for tensor in [t for t in graph.initializer if t.name not in used]:
        graph.initializer.remove(tensor)
    for value in [v for v in graph.input if v.name in known]:
        graph.input.remove(value)
    for value in [*graph.input, *graph.output]:
        value.type.tensor_type.shape.dim[0].dim_value = batch
    if graph.node[-1].op_type == "Softmax":
        logits = graph.output.add()
        logits.CopyFrom(graph.output[0])
        logits.name = graph.node[-1].input[0]
    del graph.value_info[:]
    onnx.checker.check_model(model)
    return model


def _open(name: str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _rename(graph: Any, old: str, new: str) -> None:
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = new


# --- torch


def nets(name: str, batch: int, folder: Path) -> ModelProto:
    """Return a net of compare_nets.py."""
    found: ModelProto = importlib.import_module("compare_nets").export(name, batch)
    return found


# --- graphs


class _Chain:
    """Nodes, each of which reads the one before it."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: dict[str, np.ndarray] = {}
        self.generator = np.random.default_rng(0)

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        out = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], **attributes))
        return out

    def weight(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(value, dtype)
        return name

    def model(self, last: str, shape: Sequence[int | str]) -> ModelProto:
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", "y"))
        self.nodes[-1].output[0] = "y"
        assert last == f"v{len(self.nodes) - 1}"
        weights = [numpy_helper.from_array(a, name) for name, a in self.weights.items()]
        graph = helper.make_graph(self.nodes, "g", [x], [y], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def chain(count: int, batch: int) -> ModelProto:
    """Return a chain of Add, Mul, Relu, Slice and Gather that no optimizer shortens."""
    add, at = _Chain(), "x"
    ends = [add.weight([-1]), add.weight([-65]), add.weight([1]), add.weight([-1])]
    while len(add.nodes) < count:
        scale, shift = add.generator.uniform(0.9, 1.1, (1, 64)), add.generator.standard_normal((1, 64)) * 0.05
        at = add("Add", at, add.weight(shift, np.float32))
        at = add("Mul", at, add.weight(scale, np.float32))
        at = add("Relu", at)
        at = add("Slice", at, *ends)
        at = add("Gather", at, add.weight(add.generator.permutation(64)), axis=1)
    return add.model(at, [batch, 64])


def shapes(count: int, batch: int) -> ModelProto:
    """Return blocks of shape arithmetic, slices, reshapes and gathers over N x T x C with N and T open."""
    add, at = _Chain(), "x"
    i = [add.weight(k) for k in range(3)]
    zero, two, last, axis, eight, width = (add.weight([k]) for k in (0, 2, 2**62, 2, 8, 64))
    while len(add.nodes) < count:
        size = add("Shape", at)
        n, t, c = (add("Gather", size, k, axis=0) for k in i)
        half = add("Div", add("Unsqueeze", c, zero), two)
        swapped = add("Concat", add("Slice", at, half, last, axis), add("Slice", at, zero, half, axis), axis=2)
        n1, t1 = add("Unsqueeze", n, zero), add("Unsqueeze", t, zero)
        split = add("Reshape", swapped, add("Concat", n1, t1, eight, eight, axis=0))
        turned = add("Reshape", add("Transpose", split, perm=[0, 1, 3, 2]), add("Concat", n1, t1, width, axis=0))
        backwards = add("Sub", add("Sub", t, i[1]), add("Range", i[0], t, i[1]))
        at = add("Sub", add("Gather", turned, backwards, axis=1), at)
    return add.model(at, ["N", "T", 64])


def mixed(count: int, batch: int) -> ModelProto:
    """Return blocks in which Relu, Concat, Where and reductions prevail."""
    add, at = _Chain(), "x"
    zero, one, pair = add.weight(0, np.float32), add.weight([1]), add.weight([batch, 2, 64])
    while len(add.nodes) < count:
        kept = add("Relu", at)
        mean = add("ReduceMean", kept, one, keepdims=1)
        moved = add("Sub", at, mean)
        above = add("Greater", moved, zero)
        chosen = add("Where", above, moved, kept)
        both = add("Reshape", add("Concat", chosen, at, axis=1), pair)
        most = add("ReduceMax", both, one, keepdims=0)
        least = add("ReduceSum", add("Relu", both), one, keepdims=0)
        at = add("Where", above, add("Sub", most, least), moved)
    return add.model(at, [batch, 64])


def graphs(name: str, batch: int, folder: Path) -> ModelProto:
    """Return a graph of small operators."""
    make, count = {"chain1000": (chain, 1000), "shapes300": (shapes, 300), "mixed300": (mixed, 300)}[name]
    model = make(count, batch)
    onnx.checker.check_model(model, full_check=True)
    return model


# --- package


def package(name: str, batch: int, folder: Path) -> bytes:
    """Return the file that silero-vad publishes."""
    (found,) = [f for f in metadata.files("silero-vad") or [] if f.name == "silero_vad.onnx"]
    return Path(str(found.locate())).read_bytes()


# --- int8


def int8(name: str, batch: int, folder: Path) -> bytes:
    """Return a quantized form of a model that is in the folder."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    base, _, form = name.partition("-")
    source, kinds = path_of(folder, base, batch), quantization.QuantType
    if not source.exists():
        raise FileNotFoundError(f"{name} is a form of {source}, which does not exist: build {base} first")
    model = onnx.load(source)
    if model.opset_import[0].version < 13:  # before opset 13 nothing is quantized by channel
        model = onnx.version_converter.convert_version(model, 13)
    for node in model.graph.node:
        if node.op_type == "Sum" and len(node.input) == 2:  # the quantizer leaves Sum in float
            node.op_type = "Add"

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
        def __init__(self) -> None:
            self.left: Iterator[Any] = iter([inputs_of(source, base, batch, seed) for seed in (1, 2)])

        def get_next(self) -> Any:
            return next(self.left, None)

    with tempfile.TemporaryDirectory() as work:
        given, ready, done = (Path(work) / f"{n}.onnx" for n in ("given", "ready", "done"))
        write_bytes(given, model.SerializeToString())
        quant_pre_process(str(given), str(ready), skip_symbolic_shape=True)
        if form == "dynamic":
            quantization.quantize_dynamic(ready, done, per_channel=True, weight_type=kinds.QInt8)
        else:
            activations = kinds.QUInt8 if form == "u8s8" else kinds.QInt8
            quantization.quantize_static(
                ready, done, Samples(), per_channel=True, weight_type=kinds.QInt8, activation_type=activations
            )
        return done.read_bytes()


# --- the command

BUILDERS: dict[str, Callable[[str, int, Path], ModelProto | bytes]] = {
    "light": light, "torch": nets, "graphs": graphs, "package": package, "int8": int8,
}  # fmt: skip


def build(folder: Path, name: str, batch: int) -> None:
    """Write one model into a folder."""
    found, target = BUILDERS[MODELS[name].family](name, batch, folder), path_of(folder, name, batch)
    write_bytes(target, found if isinstance(found, bytes) else found.SerializeToString())
    print(f"{target.name:28} {target.stat().st_size / 2**20:8.1f} MiB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="the folder of the models")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--again", action="store_true", help="also write files that exist")
    parser.add_argument("--family", choices=list(NEEDS), help="build this family, in this process")
    options = parser.parse_args()
    new_folder(options.to)
    files = dict.fromkeys(MODELS[n].file or n for n in options.models)
    todo = [(n, b) for n in files for b in options.batch if options.again or not path_of(options.to, n, b).exists()]
    failed = 0
    if options.family:
        for name, batch in todo:
            if MODELS[name].family == options.family:
                try:
                    build(options.to, name, batch)
                except Exception as error:  # the others are still built
                    print(f"{name}, batch {batch}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    failed = 1
        return failed
    for family, needed in NEEDS.items():
        wanted = [n for n, _ in todo if MODELS[n].family == family]
        if not wanted:
            continue
        try:
            metadata.version(needed)
        except metadata.PackageNotFoundError:
            print(f"left out, {needed} is not installed: {', '.join(dict.fromkeys(wanted))}", flush=True)
            continue
        failed |= subprocess.run([sys.executable, __file__, *sys.argv[1:], "--family", family]).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
