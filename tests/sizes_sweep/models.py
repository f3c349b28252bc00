"""Draws small models whose inputs have open sizes, and the sizes of the requests for them.

The size of an axis is a number, a tuple with the size in each request, or the name of a size that data decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tests.onednn_sweep.cases import Draw

from singa_backend.comparison.tolerances import narrowest

Dim = int | tuple[int, ...] | str

REQUESTS = 8
"""The number of sizes in which each model runs."""

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)

FLOATS = (TensorProto.FLOAT,) * 14 + (TensorProto.DOUBLE, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.FLOAT16)


@dataclass(frozen=True)
class Drawn:
    """A value of a model.

    Attributes:
        name: its name.
        shape: its sizes.
        dtype: its type, as ONNX numbers it.
        is_exact: whether rounding cannot change it: an operator that is not continuous may read it.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: int
    is_exact: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)


def least(size: Dim) -> int:
    """The smallest of the sizes of an axis; 0 if data decide it."""
    return size if isinstance(size, int) else 0 if isinstance(size, str) else min(size)


def greatest(size: Dim) -> int:
    """The largest of the sizes of an axis; 1 if data decide it."""
    return size if isinstance(size, int) else 1 if isinstance(size, str) else max(size)


def mapped(compute: Callable[..., int], *sizes: Dim) -> Dim:
    """A size that is computed from others; one of its own if data decide one of them."""
    if any(isinstance(s, str) for s in sizes):
        return "data " + ",".join(map(str, sizes))
    if all(isinstance(s, int) for s in sizes):
        return max(compute(*sizes), 0)
    turns = ([s] * REQUESTS if isinstance(s, int) else s for s in sizes)
    return tuple(max(compute(*turn), 0) for turn in zip(*turns, strict=True))  # a request for which it is negative is refused


def broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The shape of a sum; None if it is not valid in all requests."""
    a, b = (1,) * (len(b) - len(a)) + tuple(a), (1,) * (len(a) - len(b)) + tuple(b)
    if any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


class Model:
    """A graph that is drawn node by node."""

    def __init__(self, seed: Sequence[int]) -> None:
        self.d = Draw(seed)
        self.float = int(self.d.one(*FLOATS))
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.infos: list[Any] = []
        self.values: list[Drawn] = []
        self.inputs: list[Drawn] = []
        self.used: set[str] = set()
        self.names: dict[str, tuple[int, ...]] = {}
        self.domains: set[str] = set()
        self.limits: dict[str, int] = {}

    # --- sizes

    def open(self, top: int) -> tuple[str, tuple[int, ...]]:
        """A name of an axis with its sizes: often one that another axis has."""
        if self.names and (len(self.names) == 3 or self.chance(0.4)):
            return self.d.one(*self.names.items())
        rng, name = self.d.rng, f"n{len(self.names)}"
        sizes = [int(s) for s in rng.choice([p for p in PRIMES if p <= top], REQUESTS)]
        if self.chance(0.5):
            sizes[int(rng.integers(2, REQUESTS))] = int(rng.integers(0, 2))
        if self.chance(0.35):
            sizes[int(rng.integers(1, REQUESTS))] = 1
        if top > 5 and self.chance(0.7):
            sizes[int(rng.integers(0, REQUESTS))] = int(rng.integers(40, 300))
        self.names[name] = tuple(sizes)
        return name, self.names[name]

    def chance(self, p: float) -> bool:
        return bool(self.d.rng.random() < p)

    def input(self, kind: str) -> None:
        """Add an input of a kind: its axes are numbers, or open with or without a name."""
        d, small = self.d, (self.d.one(1, 2, 3), 5)
        tops = {
            "image": [small, (d.one(1, 2, 3, 4, 8), 0), *[(d.size(12), 13)] * 2],
            "signal": [small, (d.one(1, 3, 4, 8), 0), (d.size(20), 31)],
            "rows": [small, (d.size(20), 31), (d.one(4, 6, 8, 16), 0 if self.chance(0.85) else 7)],
            "matrix": [(d.size(20), 31), (d.one(3, 4, 8, 16), 0 if self.chance(0.8) else 13)],
            "vector": [(d.size(20), 31)],
            "ids": [small, (d.size(20), 31)],
        }[kind]
        declared: list[Any] = []
        shape: list[Dim] = []
        if self.inputs and kind != "ids" and self.chance(0.6):  # it broadcasts with another one
            other = self.d.one(*self.inputs)
            pairs = [(1, 1) if self.chance(0.2) else (n, s) for n, s in zip(self.declared[other.name], other.shape, strict=True)][
                int(self.d.rng.integers(0, other.rank)) :
            ]
            declared, shape = [n for n, _ in pairs], [s for _, s in pairs]
        else:
            for number, top in tops:
                name, sizes = self.open(top) if top and (self.chance(0.7) or not self.names) else (None, number)
                declared.append(number if name is None else None if self.chance(0.15) else name)
                shape.append(sizes)
        dtype = TensorProto.INT64 if kind == "ids" else self.float
        if kind != "ids" and self.chance(0.06):
            dtype = d.one(TensorProto.INT32, TensorProto.INT64, TensorProto.INT8, TensorProto.UINT8)
        name = f"x{len(self.inputs)}"
        self.declared = {**getattr(self, "declared", {}), name: declared}
        self.inputs.append(Drawn(name, tuple(shape), dtype, True))
        self.infos.append(helper.make_tensor_value_info(name, dtype, declared))
        if kind == "ids":
            self.limits[name] = 7
        self.values.append(self.inputs[-1])

    # --- nodes

    def constant(self, value: Any, dtype: int) -> str:
        """Add an initializer; return its name."""
        name = f"c{len(self.constants)}"
        array = np.asarray(value).astype(helper.tensor_dtype_to_np_dtype(dtype))
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64), TensorProto.INT64)

    def weights(self, shape: Sequence[int], fan: int = 1, dtype: int = 0) -> str:
        return self.constant(self.d.rng.standard_normal(tuple(shape)) / np.sqrt(fan), dtype or self.float)

    def call(self, op: str, *inputs: str | Drawn, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or a list of them."""
        names = [i.name if isinstance(i, Drawn) else i for i in inputs]
        self.used |= set(names)
        results = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.domains.add(attributes.get("domain", ""))
        self.nodes.append(helper.make_node(op, names, results, **attributes))
        return results[0] if outputs == 1 else results

    def keep(self, name: str, shape: Sequence[Dim], dtype: int, is_exact: bool = False) -> Drawn:
        """Note a value that later nodes may read."""
        value = Drawn(name, tuple(shape), dtype, is_exact)
        self.values.append(value)
        return value

    def like(self, x: Drawn, name: str, shape: Sequence[Dim] | None = None) -> Drawn:
        """Note a value of the type of another one that is exact if that is: it holds the same elements."""
        return self.keep(name, x.shape if shape is None else shape, x.dtype, x.is_exact)

    def size_of(self, x: Drawn, axis: int, is_vector: bool = True) -> str:
        """The size of an axis, by one of the forms that exporters write."""
        form = self.d.one("slice", "gather", "start")
        if form == "start":
            size = self.call("Shape", x, start=axis, end=axis + 1)
        elif form == "slice":
            size = self.call("Slice", self.call("Shape", x), self.ints(axis), self.ints(axis + 1))
        elif is_vector and self.chance(0.5):
            size = self.call("Unsqueeze", self.call("Gather", self.call("Shape", x), self.constant(axis, 7)), self.ints(0))
        else:
            size = self.call("Gather", self.call("Shape", x), self.ints(axis))
        return size if is_vector else self.call("Squeeze", size)

    def alike(self, x: Drawn, fits: Callable[[Drawn], bool]) -> Drawn | None:
        """Another value of the same type; None if none fits."""
        others = [v for v in self.values if v.dtype == x.dtype and v is not x and fits(v)]
        return self.d.one(*others) if others else None

    def outputs(self) -> list[Drawn]:
        """What no node reads."""
        return [v for v in self.values if v.name not in self.used and v not in self.inputs]

    def model(self) -> ModelProto:
        """The model; its outputs are what no node reads, and sometimes another value."""
        outputs = self.outputs()
        if self.chance(0.3):
            outputs += [self.d.one(*(v for v in self.values if v not in self.inputs))]
        outputs = list({v.name: v for v in outputs}.values())
        results = [helper.make_tensor_value_info(v.name, v.dtype, None) for v in outputs]
        graph = helper.make_graph(self.nodes, "g", self.infos, results, self.constants)
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets[: 2 if "com.microsoft" in self.domains else 1], ir_version=10)

    def narrowest(self, output: str) -> np.dtype[Any] | None:
        """The narrowest type of the floats from which an output is computed; None without floats."""
        makers = {name: n for n in self.nodes for name in n.output}
        names, pending = set[str](), [output]
        while pending:
            if (name := pending.pop()) not in names:
                names.add(name)
                pending += makers[name].input if name in makers else []
        kinds = {np.dtype(helper.tensor_dtype_to_np_dtype(v.dtype)) for v in self.values if v.name in names}
        return narrowest(floats) if (floats := [k for k in kinds if k.kind == "f"]) else None

    # --- requests

    def request(self, index: int, draw: np.random.Generator) -> list[np.ndarray]:
        """The inputs of a request."""
        made = []
        for x in self.inputs:
            shape = [s if isinstance(s, int) else s[index] for s in x.shape]
            dtype = helper.tensor_dtype_to_np_dtype(x.dtype)
            if x.name in self.limits:
                array = draw.integers(0, self.limits[x.name], shape)
            elif np.dtype(dtype).kind in "iu":
                array = draw.integers(0 if dtype == np.uint8 else -9, 10, shape)
            else:
                array = draw.standard_normal(shape)
            made.append(array.astype(dtype))
        return made
