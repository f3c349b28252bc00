"""Writes the module of a program: it reads its weights, trains, runs as a script, and compares itself with another engine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from onnx import TypeProto

from singa_backend import dtypes
from singa_backend.ir.graph import Node
from singa_backend.proto.values import Value

from . import layers
from .emitter import Assign, Emitter, Function, rendered
from .lowering import ProgramModel
from .stored import StoredArrays
from .templates import COMPARE, END, HELPERS, MAIN, TRAIN_OPTION, TRAIN_RUN, inputs, run, weights
from .text import WIDTH, call, flat, lines, quoted, shortened, statement, tuple_of

WEIGHTS = 'WEIGHTS = Path(__file__).with_suffix(".npz")'
"""The line that names the file of the weights."""


def weights_line(name: str) -> str:
    """The line for a file of another name, in the folder of the program."""
    return f"WEIGHTS = Path(__file__).with_name({quoted(name)})"


def spare_weights(text: str, stem: str) -> str:
    """The file that a program reads by `weights_line`, if its name is that of the program with a number; "" otherwise."""
    found = re.search(rf'^WEIGHTS = Path\(__file__\)\.with_name\("({re.escape(stem)}\.[0-9]+\.npz)"\)$', text, re.MULTILINE)
    return found[1] if found else ""


def write(model: ProgramModel, stem: str) -> tuple[str, StoredArrays, dict[str, int]]:
    """The text of the program, its arrays, and the numbers of its nodes, layers and parameters.

    stem: the name of the file, for the usage text.
    Raises UnsupportedModel for a node that cannot be written.
    """
    stored = StoredArrays()
    stored.reserve([*model.parameters, *model.statistics, *model.constants])
    emitter = Emitter(model, stored)
    body = list(_statements(emitter))
    graph = model.graph
    results = [emitter.expression(v.name) for v in graph.outputs]
    ends = zip(graph.declared_outputs, graph.outputs, strict=True) if model.parameters else ()
    trained = [i for i, (declared, v) in enumerate(ends) if _trainable(model, declared, v.name)]
    network = ["class Model(model.Model):", *_doc(model, emitter), *_init(emitter), *_forward(emitter, body, results)]
    if trained:
        network += _train(emitter, trained, len(results))
    parts = ["\n".join(_constants(model, trained)), weights(stored), *(HELPERS[h] for h in sorted(emitter.helpers))]
    plain = all(v.kind in ("", "tensor") for v in graph.declared_inputs)
    parts += ["\n".join(network), inputs(plain), COMPARE]
    main = [MAIN, TRAIN_OPTION, run(plain), TRAIN_RUN, END] if trained else [MAIN, run(plain), END]
    text = "\n\n\n".join(part.strip("\n") for part in [*parts, "".join(main)]) + "\n"
    head = _head(model, stem, bool(trained)) + _imports(text)
    facts = {
        "nodes": len(graph),
        "layers": emitter.layers,
        "parameters": len(model.parameters),
        "arrays": len(stored.arrays),
    }
    return head + text, stored, facts


def _statements(e: Emitter) -> Iterator[Assign | Function]:
    """The statements of the main graph; nodes become layers if possible."""
    done: set[Node] = set()
    for node in e.model.graph.nodes:
        if node in done:
            continue
        found = layers.made(e, node)
        if found is None:
            yield from e.node(node)
            continue
        done.update(found[1])
        yield found[0]


def _trainable(model: ProgramModel, value: Value, name: str) -> bool:
    known = model.dtype(name)
    dtype = value.dtype if known is None else known
    return value.kind in ("", "tensor") and dtype is not None and dtypes.is_float(dtype)


def _head(model: ProgramModel, stem: str, trains: bool) -> str:
    stem = stem if re.fullmatch(r"[\w.-]{1,60}", stem, re.ASCII) else "PROGRAM"
    text = [
        '"""A network that `sonnx codegen` wrote from an ONNX model; its weights are in the .npz file of the same name.',
        "",
    ]
    text += [f"python {stem}.py --device CPU          run it on seeded inputs"]
    text += [f"python {stem}.py --onnx model.onnx     ... and compare with onnxruntime"]
    text += [f"python {stem}.py --train 20            ... and train it"] if trains else []
    return "\n".join([*text, '"""', "", ""])


def _imports(text: str) -> str:
    """The imports that the text needs, sorted."""
    used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    modules = [m for m in ("autograd", "device", "layer", "model", "opt", "tensor") if m in used]
    names = [n for n in ("TensorProto", "helper") if n in used]
    out = ["import argparse", "from pathlib import Path", ""]
    out += ["import ml_dtypes"] * ("ml_dtypes" in used) + ["import numpy as np"]
    out += [f"from onnx import {', '.join(names)}"] * bool(names)
    out += [f"from singa import {', '.join(modules)}"]
    out += ["from singa.tape import op"] * ("op" in used)
    out += ["from singa_backend.conform.foreign import BOUND, error", "from singa_backend.engines.oracle import Oracle"]
    out += ["from singa_backend.errors import MissingDependency", "from singa_backend.io.files import write_npz"]
    out += ["from singa_backend.proto.named_arrays import named_arrays"]
    return "\n".join(out) + "\n\n"


def _constants(model: ProgramModel, trained: Sequence[int]) -> list[str]:
    out = [WEIGHTS, "", "INPUTS = {" if model.graph.inputs else "INPUTS = {}"]
    for v in model.graph.declared_inputs:
        shape = "None" if v.shape is None else _shape(v.shape)
        out += lines(f"{quoted(v.name)}: ", tuple_of([quoted(_kind(v.type)), shape]), 4, ",")
    out += ["}"] if model.graph.inputs else []
    out += ['"""The inputs in order: dtype and shape; a name is an open size."""', ""]
    names = [quoted(v.name) for v in model.graph.declared_outputs]
    out += statement("OUTPUTS = ", tuple_of(names), 0)
    out += statement("TRAINED = ", tuple_of([names[i] for i in trained]), 0) if trained else []
    return [*out, ""]


def _shape(shape: Sequence[Any]) -> str:
    return flat(tuple_of([str(d) if isinstance(d, int) else quoted(d or "?") for d in shape]))


def _kind(type: TypeProto | None) -> str:
    """`float32`, `object` for strings, `sequence(int64)`, `optional(sequence(float32))`."""
    kind = "" if type is None else type.WhichOneof("value") or ""
    if kind in ("sequence_type", "optional_type"):
        return f"{kind[:-5]}({_kind(getattr(type, kind).elem_type)})"
    code = getattr(type, kind).elem_type if kind in ("tensor_type", "sparse_tensor_type") else 0
    dtype = dtypes.numpy_dtype(code) if code else None
    return "?" if dtype is None else "object" if dtype == dtypes.STRING else dtype.name


def _doc(model: ProgramModel, e: Emitter) -> list[str]:
    count = sum(a.size for a in model.parameters.values())
    out = [f'    """{_title(model.graph.name)}: {count:,} parameters in {len(model.parameters)} tensors.', ""]
    out += [f"    {_title(str(v))}" for v in model.graph.declared_inputs]
    out += [f"    -> {_title(str(v))}" for v in model.graph.declared_outputs]
    return [*out, '    """', ""]


def _title(text: str) -> str:
    """Shorten and escape a name of the file for a docstring."""
    return shortened(text, 110)[1:-1].replace('"', "'")


def _init(e: Emitter) -> list[str]:
    out = ["    def __init__(self, weights=WEIGHTS, dev=None):", "        super().__init__()"]
    out += ["        w = Weights(weights, dev)", "        self.weights = w.tensors"]
    return [*out, *(line for made in e.initial for line in made.render(8)), ""]


def _forward(e: Emitter, body: list[Assign | Function], results: list[str]) -> list[str]:
    out = lines("def forward", call("", ["self", *e.parameters]), 4, ":")
    last = body[-1] if body else None
    if isinstance(last, Assign) and results == [last.target]:  # `return f(x)`, without a variable that is used once
        return [*out, *rendered(body[:-1], 8), *statement("return ", last.expr, 8, last.comment), ""]
    return [*out, *rendered(body, 8), *_returned(results), ""]


def _returned(results: list[str]) -> list[str]:
    one = f"        return {', '.join(results)}"
    if len(one) <= WIDTH:
        return [one]
    return ["        return (", *(f"            {r}," for r in results), "        )"]


def _train(e: Emitter, trained: Sequence[int], count: int) -> list[str]:
    targets = [e.locals.new("t")] if len(trained) == 1 else [e.locals.new(f"t_{i}") for i in range(len(trained))]
    y, loss = e.locals.new("y"), e.locals.new("loss")
    taken = [y if count == 1 else f"{y}[{i}]" for i in trained]
    out = lines("def train_one_batch", call("", ["self", *e.parameters, *targets]), 4, ":")
    out += ['        """Train one step by the mean squared error; returns the outputs of `forward`, and the loss."""']
    out += lines(f"{y} = ", call("self.forward", e.parameters), 8)
    out += [f"        {loss} = autograd.mse_loss({taken[0]}, {targets[0]})"]
    kinds = {e.model.dtype(e.model.graph.outputs[i].name) for i in trained}
    for a, t in zip(taken[1:], targets[1:], strict=True):
        one = f"autograd.mse_loss({a}, {t})"
        out += lines(f"{loss} = ", call("autograd.add", [loss, one if len(kinds) == 1 else f"op.CastLike({one}, {loss})"]), 8)
    out += [f"        self.optimizer({loss})", f"        return {y}, {loss}", ""]
    return [*out, "    def set_optimizer(self, optimizer):", "        self.optimizer = optimizer"]
