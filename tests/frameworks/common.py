"""What the exporting scripts of this folder share: seeded images, the files, and what must hold of them before they are kept."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

HERE = Path(__file__).resolve().parent
BATCHES = (1, 3)
"""The batch sizes at which a framework's own outputs are kept."""
SPREAD = 0.02
"""How much of its largest value an output must change from image to image; nets whose weights fade say little about faults."""


def images(size: int, seed: int = 0, *, last: bool = False) -> list[np.ndarray]:
    """Images of 3 x size x size at each batch size, in 9 levels from -1 to 1: few levels pack well.  last: channels last."""
    rng = np.random.default_rng(seed)
    shapes = [(n, size, size, 3) if last else (n, 3, size, size) for n in BATCHES]
    return [(rng.integers(-4, 5, s) / 4).astype(np.float32) for s in shapes]


def keep_data(path: Path, inputs: Iterable[Sequence[np.ndarray]], outputs: Iterable[Sequence[np.ndarray]]) -> None:
    """Write NET.npz: x0_0 is input 0 of the first batch, y1_2 output 2 of the second.

    Raises ValueError for outputs that are not finite, or hardly depend on the inputs.
    """
    data: dict[str, np.ndarray] = {}
    for i, (xs, ys) in enumerate(zip(inputs, outputs, strict=True)):
        data |= {f"x{i}_{j}": np.asarray(x) for j, x in enumerate(xs)} | {f"y{i}_{j}": np.asarray(y) for j, y in enumerate(ys)}
    for name, y in data.items():
        if name[0] == "y" and y.dtype.kind == "f":
            if not np.isfinite(y).all():
                raise ValueError(f"{path.name}: {name} is not finite everywhere")
            if len(y) > 1 and np.ptp(y, axis=0).max() < SPREAD * np.abs(y).max():
                raise ValueError(f"{path.name}: {name} is nearly the same for all inputs: {y.reshape(len(y), -1)[:, :4]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _only_lists:
        np.savez_compressed(path, **data)


def keep_model(path: Path, model: ModelProto, sizes: int = 1) -> None:
    """Write a checked model without the exporter's notes; sizes: how many sizes of its inputs must be free.

    Raises ValueError when an input has another number of free sizes.
    """
    graphs = [model.graph, *model.functions]
    for graph in graphs:
        for node in graph.node:  # the places in the exporter's own source, and machine paths among them, are of no use here
            node.doc_string = ""
            del node.metadata_props[:]
            graphs += [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        del graph.value_info[:], graph.metadata_props[:]
        graph.doc_string = ""
    del model.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    onnx.checker.check_model(model)
    for value in model.graph.input:
        free = sum(not d.HasField("dim_value") for d in value.type.tensor_type.shape.dim)
        if free != sizes:
            raise ValueError(f"{path.name}: {sizes} sizes of {value.name} should be free, {free} are")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def floats(model: ModelProto) -> dict[str, np.ndarray]:
    """The float initializers of a model, and its float constants under the names of their outputs."""
    found = {t.name: t for t in model.graph.initializer}
    found |= {n.output[0]: a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"}
    arrays = {name: numpy_helper.to_array(t) for name, t in found.items()}
    return {name: a for name, a in arrays.items() if a.dtype.kind == "f"}


def parameters(model: ModelProto, other: ModelProto) -> list[str]:
    """The float initializers and constants of a file that come from parameters that the framework trains.

    Exporters rename, transpose, join and fold weights, so neither names nor values tell which these are.  `other` is the same net
    with other values of all trained parameters, and with the same buffers, exported in the same way: a value that is not in it
    comes from the parameters.
    """
    there = {(a.shape, a.tobytes()) for a in floats(other).values()}
    return [name for name, a in floats(model).items() if (a.shape, a.tobytes()) not in there]


def keep_parameters(path: Path, other: ModelProto) -> None:
    """Write the list of `parameters` of a file into parameters.json in its folder; the lists of other files stay."""
    to = path.with_name("parameters.json")
    kept = json.loads(to.read_text(encoding="utf-8")) if to.exists() else {}
    kept[path.name] = parameters(onnx.load(path), other)
    lines = [f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
    to.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def keep(path: Path, model: ModelProto, other: ModelProto) -> None:
    """Write a model by `keep_model`, unless only the lists are wanted, and the list of its parameters by `other`."""
    if not _only_lists:
        keep_model(path, model)
    keep_parameters(path, other)


_only_lists = False


def export_all(doc: str | None, folder: str, names: Iterable[str], export: Callable[[str, Path], Iterable[Path]]) -> None:
    """The command line of a script: export every net, or those that --only names, into a folder next to the script."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--lists", action="store_true", help="write only parameters.json, for the files that are there")
    options = parser.parse_args()
    global _only_lists
    _only_lists = options.lists
    for name in names:
        if options.only in name:
            start = time.perf_counter()
            for path in export(name, options.to / folder):
                print(f"{path.name:40} {path.stat().st_size / 1000:7.1f} kB", flush=True)
            print(f"{'':40} {time.perf_counter() - start:7.1f} s", flush=True)
