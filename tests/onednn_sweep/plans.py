"""Whole plans on guarded memory: every place of the arena, packed weight, scratchpad and output has exact size between pages.

The memory of a plan comes from one function, `kernels.values.aligned`, and the places of an arena from `plans.arena.place`;
both are replaced here.  Before each run all places hold garbage.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tests.helpers.plan_checks import model_of

from singa import opt, sonnx
from singa_backend.backend import SingaBackend, SingaRep
from singa_backend.conform.fuzz import generate
from singa_backend.conform.fuzz.graphs import generate as graphs
from singa_backend.kernels import values
from singa_backend.kernels.table import Options
from singa_backend.plans import arena
from singa_backend.plans.passed import PASSED
from singa_backend.plans.trace import place

from .cases import CHANNELS, Draw
from .pages import FILLS, fill, guarded, spread, whole_pages
from .running import Fault

STEP = 8
"""The addresses of guarded memory are multiples of it, so that up to 7 bytes after it can be accessed."""


class GuardedMemory:
    """Takes the place of the memory of plans."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)
        self.arenas: list[tuple[np.ndarray, list[tuple[int, int]]]] = []
        self._spans: list[tuple[int, int]] = []
        self._sizes: list[int] = []

    def aligned(self, nbytes: int) -> np.ndarray:
        """Memory of this size before a page without access; the arena, if it has just been asked where its buffers are."""
        if self._sizes and nbytes == spread(self._sizes)[1]:
            memory = guarded(self._sizes)
            self.arenas.append((memory, self._spans))
            self._sizes, self._spans = [], []
            return memory
        (start,), _ = spread([nbytes])
        end = start + whole_pages(nbytes)
        return guarded([nbytes])[end - -(-nbytes // STEP) * STEP :][:nbytes]

    def place(self, buffers: Sequence[values.Buffer]) -> int:
        """Give each buffer pages of its own."""
        self._sizes = [b.nbytes for b in buffers]
        starts, total = spread(self._sizes)
        for b, start in zip(buffers, starts, strict=True):
            b.offset = start + whole_pages(b.nbytes) - -(-b.nbytes // STEP) * STEP
            self._spans.append((b.offset, b.offset + b.nbytes))
        return total

    def fill(self, how: str) -> None:
        """Fill all places with garbage."""
        for memory, spans in self.arenas:
            for start, end in spans:
                fill(memory[start:end], how, self.rng)


@contextmanager
def guarded_plans(passed: bool = False, memory: GuardedMemory | None = None) -> Iterator[GuardedMemory]:
    """Plans that are traced in the `with` block have guarded memory.

    Args:
        passed: whether small inputs and outputs are not copied either.
        memory: what takes the place of their memory.
    """
    memory, of = memory or GuardedMemory(), values.Value.of
    before: list[tuple[Any, str, Any]] = [
        (arena, "place", arena.place),
        (place, "PASSED", place.PASSED),
        (values.Value, "of", of),
    ]
    modules = [
        m for n, m in list(sys.modules.items()) if n.startswith("singa_backend.") and vars(m).get("aligned") is values.aligned
    ]
    before += [(m, "aligned", values.aligned) for m in modules]

    def copied(given: Any, key: Any = None) -> values.Value:
        """A constant in guarded memory."""
        if isinstance(given, np.ndarray) and given.dtype.kind in "biuf" and given.size and given.flags.c_contiguous:
            own = memory.aligned(given.nbytes).view(given.dtype).reshape(given.shape)
            np.copyto(own, given)
            given = own
        return of(given, key)

    arena.place = memory.place  # type: ignore[assignment]
    place.PASSED = 1 if passed else PASSED
    values.Value.of = copied  # type: ignore[method-assign, assignment]
    for module in modules:
        module.aligned = memory.aligned  # type: ignore[attr-defined]
    try:
        yield memory
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


# --- models -----------------------------------------------------------------------------------------------------------


class Net:
    """A model that is drawn node by node."""

    def __init__(self, d: Draw, shape: Sequence[int]) -> None:
        self.d, self.nodes, self.weights = d, [], dict[str, np.ndarray]()
        self.inputs = {"x": self.normal(shape)}
        self.shapes = {"x": list(shape)}

    def normal(self, shape: Sequence[int], scale: float = 1.0) -> np.ndarray:
        return (self.d.rng.standard_normal(tuple(shape)) * scale).astype(np.float32)

    def weight(self, shape: Sequence[int], scale: float | None = None) -> str:
        name = f"w{len(self.weights)}"
        fan = float(np.prod(shape[1:])) if scale is None else 1.0
        self.weights[name] = self.normal(shape, fan**-0.5 if scale is None else scale)
        return name

    def constant(self, value: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(value)
        return name

    def add(self, op: str, inputs: Sequence[str], shape: Sequence[int], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        self.shapes[name] = [int(s) for s in shape]
        return name

    def same(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.add(op, inputs, self.shapes[inputs[0]], **attributes)

    def activation(self, x: str) -> str:
        op = self.d.one(
            "Relu", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSwish", "Elu", "Softplus", "Mish", "Clip", "PRelu", ""
        )
        if op == "Clip":
            return self.same(op, x, self.constant(np.float32(-1)), self.constant(np.float32(2)))
        if op == "PRelu":
            return self.same(op, x, self.weight([self.shapes[x][1], *[1] * (len(self.shapes[x]) - 2)], 0.3))
        return self.same(op, x) if op else x

    def linear(self, x: str, outputs: int) -> str:
        *lead, depth = self.shapes[x]
        y = self.add("MatMul", [x, self.constant(self.normal([depth, outputs], depth**-0.5))], [*lead, outputs])
        return self.same("Add", y, self.weight([outputs], 0.1))

    def model(self, y: str) -> onnx.ModelProto:
        return model_of(self.nodes, self.inputs, [y], self.weights, 22)


def _image_step(net: Net, x: str, earlier: Sequence[str]) -> str:
    """One more operation on an image."""
    d, (n, c, *size) = net.d, net.shapes[x]
    kind = d.one(
        "conv", "conv", "conv", "1x1", "1x1", "depthwise", "pool", "norm", "add", "concat", "turned", "resize", "lrn", "group"
    )
    if kind in ("conv", "1x1", "depthwise", "group"):
        k = 1 if kind == "1x1" else d.one(2, 3, 3, 5)
        groups = c if kind == "depthwise" else next(g for g in (3, 2, 1) if c % g == 0) if kind == "group" else 1
        outputs, stride = c if kind == "depthwise" else d.one(*CHANNELS[:20]), d.one(1, 1, 2)
        outputs += -outputs % groups
        sizes = [(s + 2 * (k // 2) - k) // stride + 1 for s in size]
        if min(sizes) < 1:
            return x
        w = [net.weight([outputs, c // groups, *[k] * len(size)]), *([net.weight([outputs], 0.1)] if d.one(0, 1) else [])]
        y = net.add(
            "Conv", [x, *w], [n, outputs, *sizes], group=groups, strides=[stride] * len(size), pads=[k // 2] * 2 * len(size)
        )
        return net.activation(y)
    if kind == "turned":
        outputs, stride = d.one(*CHANNELS[:16]), d.one(1, 2)
        sizes = [(s - 1) * stride + 3 for s in size]
        w = net.constant(net.normal([c, outputs, *[3] * len(size)], 0.2))
        return net.add("ConvTranspose", [x, w], [n, outputs, *sizes], strides=[stride] * len(size)) if np.prod(sizes) < 400 else x
    if kind == "pool" and min(size) > 2:
        op = d.one("MaxPool", "AveragePool")
        sizes = [(s - 2) // 2 + 1 for s in size]
        return net.add(op, [x], [n, c, *sizes], kernel_shape=[2] * len(size), strides=[2] * len(size))
    if kind == "norm":
        moments = [net.constant(np.abs(net.normal([c])) + np.float32(0.5)), net.weight([c], 0.1)]
        op = d.one("BatchNormalization", "BatchNormalization", "InstanceNormalization")
        if op == "BatchNormalization":
            moments += [net.weight([c], 0.1), net.constant(np.abs(net.normal([c])) + np.float32(0.5))]
        return net.activation(net.same(op, x, *moments))
    alike = [v for v in earlier if net.shapes[v] == net.shapes[x] and v != x]
    if kind == "add" and alike:
        return net.activation(net.same(d.one("Add", "Mul", "Sub"), x, d.one(*alike)))
    if kind == "concat":
        beside = [v for v in earlier if net.shapes[v][2:] == size]
        other = d.one(*beside)
        return net.add("Concat", [x, other], [n, c + net.shapes[other][1], *size], axis=1)
    if kind == "resize" and np.prod(size) < 100:
        scales = net.constant(np.float32([1, 1, *[2] * len(size)]))
        return net.add("Resize", [x, "", scales], [n, c, *(2 * s for s in size)], mode=d.one("nearest", "linear"))
    return net.same("LRN", x, size=3) if kind == "lrn" else x


def images(d: Draw) -> Net:
    """A net of convolutions."""
    rank = d.one(1, 2, 2, 2, 3)
    net = Net(d, [d.one(1, 2, 3), d.one(*CHANNELS[:10]), *[d.size({1: 30, 2: 14, 3: 6}[rank]) + 1 for _ in range(rank)]])
    made = ["x"]
    for _ in range(d.size(8) + 2):
        made.append(_image_step(net, made[-1], made))
    n, c = net.shapes[made[-1]][:2]
    if not net.nodes or d.one(0, 1, 1):
        flat = net.add("GlobalAveragePool", [made[-1]], [n, c, *[1] * rank])
        made.append(net.linear(net.add("Flatten", [flat], [n, c]), d.one(*CHANNELS[:12]) + 1))
    net.last = made[-1]
    return net


def sequences(d: Draw) -> Net:
    """A net of attention."""
    b, t, heads, width = d.one(1, 2), d.size(20), d.one(1, 2, 3), d.one(4, 5, 8, 16)
    net = Net(d, [b, t, heads * width])
    x = "x"
    for _ in range(d.one(1, 2)):
        norm = net.same("LayerNormalization", x, net.weight([heads * width], 1.0), net.weight([heads * width], 0.1))
        parts = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            y = net.linear(norm, heads * width)
            y = net.add("Reshape", [y, net.constant(np.int64([b, t, heads, width]))], [b, t, heads, width])
            parts.append(net.add("Transpose", [y], [[b, t, heads, width][i] for i in perm], perm=perm))
        scores = net.add("MatMul", parts[:2], [b, heads, t, t])
        scores = net.same("Mul", scores, net.constant(np.float32(width**-0.5)))
        scores = net.same("Softmax", scores, axis=-1)
        y = net.add(
            "Transpose", [net.add("MatMul", [scores, parts[2]], [b, heads, t, width])], [b, t, heads, width], perm=[0, 2, 1, 3]
        )
        y = net.add("Reshape", [y, net.constant(np.int64([b, t, heads * width]))], [b, t, heads * width])
        x = net.same("Add", net.linear(y, heads * width), x)
        hidden = net.same(d.one("Gelu", "Relu", "Tanh"), net.linear(x, d.one(*CHANNELS)))
        x = net.same("Add", net.linear(hidden, heads * width), x)
    net.last = net.linear(x, d.one(*CHANNELS[:12]) + 1)
    return net


def layers(d: Draw) -> Net:
    """A net of recurrent layers."""
    t, b, i, h = d.size(6), d.size(5), d.one(*CHANNELS[:16]), d.one(*CHANNELS[:20])
    net, x = Net(d, [t, b, i]), "x"
    for _ in range(d.one(1, 2)):
        op, dirs = d.one("LSTM", "GRU", "RNN"), d.one(1, 2)
        gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op] * h
        w = [net.weight([dirs, gates, n], 0.3) for n in (net.shapes[x][2], h)]
        y = net.add(op, [x, *w, net.weight([dirs, 2 * gates], 0.1)], [t, dirs, b, h], hidden_size=h,
                    direction="forward" if dirs == 1 else "bidirectional")  # fmt: skip
        y = net.add("Transpose", [y], [t, b, dirs, h], perm=[0, 2, 1, 3])
        x = net.add("Reshape", [y, net.constant(np.int64([t, b, dirs * h]))], [t, b, dirs * h])
    net.last = net.linear(x, d.one(*CHANNELS[:12]) + 1)
    return net


NETS: dict[str, Callable[[Draw], Net]] = {"images": images, "sequences": sequences, "layers": layers}
KINDS = (
    "images",
    "images",
    "images trained",
    "images trained",
    "sequences",
    "sequences trained",
    "layers",
    "layers trained",
    "graph",
    "node",
    "node",
)
"""What is drawn: a net, its training step, a graph of drawn nodes, a node."""


def model_for(case: dict[str, Any]) -> tuple[onnx.ModelProto, list[Any], int | None]:
    """The model of a case, its inputs, and how many outputs are compared with those of the definitions; None for all."""
    kind, seed, index = case["plan"], case["seed"], case["index"]
    if kind in ("graph", "node"):
        drawn = graphs.draw(seed, index) if kind == "graph" else generate.draw(seed, index)
        if drawn is None:
            raise ValueError("there is no such node")
        return drawn.model, list(drawn.feeds.values()), 0  # the fuzzer judges them
    d = Draw([seed, index])
    net = NETS[kind.split()[0]](d)
    model, feeds = net.model(net.last), list(net.inputs.values())
    if not kind.endswith("trained"):
        return model, feeds, None
    optimizer = d.one(opt.SGD(lr=0.1), opt.SGD(lr=0.1, momentum=0.9), opt.AdamW(0.01))
    feeds.append(net.normal(net.shapes[net.last]))
    # AdamW divides a gradient by its size: a difference in the last bit may become a whole step
    return sonnx.to_training_onnx(model, "mse_loss", optimizer), feeds, 1 if isinstance(optimizer, opt.AdamW) else None


# --- runs -------------------------------------------------------------------------------------------------------------


def ran(case: dict[str, Any]) -> dict[str, Any]:
    """Run a model by a plan on guarded memory.

    Args:
        case: "plan", one of `KINDS`, its "seed" and "index", the number of "threads", and whether inputs are "passed".

    Returns:
        "faults", (sort, detail), and "kernels", those of oneDNN; "impossible" with a reason if there is no such model or no plan.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            model, feeds, compared = model_for(case)
            whole = SingaBackend.prepare(model)
        except Exception as error:  # a drawn model that is not valid, or has no gradient
            return {"impossible": f"{type(error).__name__}: {error}"}
        graph, device = whole.graph, whole.device
        options = Options(threads=case["threads"])
        plain, exact = SingaRep(graph, device, options=options), SingaRep(graph, device, options=Options(level=0))
        wanted = exact.run(feeds)
        first, again = plain.run(feeds), plain.run(feeds)
        faults = []
        with guarded_plans(case["passed"]) as memory:
            rep = SingaRep(graph, device, options=options)
            results = [("the trace", rep.run(feeds))]
            for how in FILLS:
                memory.fill(how)
                results.append((how, rep.run(feeds)))
        if rep._session.reason is not None or not memory.arenas:
            return {"impossible": f"there is no plan: {rep._session.reason}"}
        for how, result in results:
            if not alike(result, first):
                faults.append(Fault("unstable", f"other bits than those of the plan in other memory ({how})"))
                break
        if not alike(first, again):
            faults.append(Fault("unstable", "other bits in the second run"))
        faults += [Fault("wrong", text) for text in map(distant, results[-1][1][:compared], wanted[:compared]) if text][:1]
        kernels = {s.kernel for p in rep._session._planner.plans.values() for g in p.segments for s in g.steps if ":" in s.kernel}
    return {"faults": faults, "kernels": sorted(kernels), "runs": len(results)}


def alike(a: Any, b: Any) -> bool:
    """Whether results have the same bits; any NaN equals any other."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(alike, a, b))
    if not isinstance(a, np.ndarray) or a.dtype == object:
        return bool(np.array_equal(np.asarray(a, object), np.asarray(b, object))) if not isinstance(a, dict) else a == b
    if a.dtype.kind == "f":
        return a.dtype == b.dtype and bool(np.array_equal(a, b, equal_nan=True))
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def distant(got: np.ndarray, want: np.ndarray, tolerance: float = 2e-4) -> str:
    """How far a result is from that of the definitions, if that is too far."""
    if got.dtype.kind != "f" or not got.size:
        return "" if np.array_equal(got, want) else "an integer differs from the definitions"
    apart = float(np.abs(got.astype(np.float64) - want).max())
    largest = max(float(np.abs(want).max()), 1e-3)
    return "" if apart <= tolerance * largest else f"{apart / largest:.1e} of the largest value from the definitions"


def drawn(seed: int, index: int, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """The case of a seed and an index."""
    d = Draw([seed, index, 7])
    return {
        "plan": kinds[index % len(kinds)],
        "seed": seed,
        "index": index,
        "threads": d.one(1, 1, 1, 2),
        "passed": d.one(False, True),
    }
