"""Gradients of LSTM and GRU: those of recorded steps by oneDNN's backward primitives equal those of the definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.helpers.plan_checks import same
from tests.helpers.recorded_steps import compare, differentiated, normal, record

from singa._core.ops import op
from singa_backend.kernels import onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

KINDS = ("LSTM", "GRU", "GRU-after")
GATES = {"LSTM": 4, "GRU": 3, "GRU-after": 3}
SIZES = [(1, 1, 3, 3), (5, 3, 7, 9), (9, 5, 16, 32), (4, 1, 10, 17), (1, 4, 5, 70), (3, 2, 70, 8), (6, 4, 1, 1)]
"""Time, batch, inputs, hidden."""

Arrays = dict[str, np.ndarray]


def operands(
    kind: str, given: str, sizes: tuple[int, int, int, int] = (5, 3, 7, 9), directions: int = 1, layout: int = 0, seed: int = 0
) -> Arrays:
    """The input, the weights, and of the bias "b" and the first states "h" and "c" those that are given."""
    time, batch, width, hidden = sizes
    rows = GATES[kind] * hidden
    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    shapes = {
        "x": (batch, time, width) if layout else (time, batch, width), "w": (directions, rows, width),
        "r": (directions, rows, hidden), "b": (directions, 2 * rows), "h": state, "c": state,
    }  # fmt: skip
    small = np.float32(1 / np.sqrt(hidden))
    names = ["x", "w", "r", *given.split()]
    return {n: normal(*shapes[n], seed=seed + i) * (1 if n == "x" else small) for i, n in enumerate(names)}


def layer(kind: str, names: Sequence[str], wanted: Sequence[int] = (0, 1, 2), **attributes: Any) -> Callable[..., list[Any]]:
    """The layer as a function of these operands, which returns the outputs at these places."""
    attributes |= {"linear_before_reset": 1} if kind == "GRU-after" else {}
    name, count = ("LSTM", 3) if kind == "LSTM" else ("GRU", 2)

    def function(*values: Any) -> list[Any]:
        known = dict(zip(names, values, strict=True))
        inputs = [known.get(n) for n in ("x", "w", "r", "b", "lengths", "h", "c", "p")[: 8 if kind == "LSTM" else 6]]
        made = getattr(op, name)(*inputs, hidden_size=values[2].shape[2], outputs=count, **attributes)
        return [made[i] for i in wanted if i < count]

    return function


def judge(kind: str, given: Arrays, wanted: Sequence[int] = (0, 1, 2), needs: Sequence[str] = (), **attributes: Any) -> None:
    """Require that one kernel computes the gradients of these operands, all by default, and that they are right."""
    places = [i for i, n in enumerate(given) if n in (needs or given)]
    step = compare(
        layer(kind, list(given), wanted, **attributes), list(given.values()), places, joined=[kind[:4].rstrip("-")],
        exact=True, tolerance=5e-6,
    )  # fmt: skip
    assert step.in_training == [kind[:4].rstrip("-")]
    assert any(" gradient ref" in k for k in step.kernels), step.kernels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(kind: str, sizes: tuple[int, int, int, int]) -> None:
    judge(kind, operands(kind, "b h c" if kind == "LSTM" else "b h", sizes))
    judge(kind, operands(kind, "", sizes), (0,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_outputs(kind: str, wanted: tuple[int, ...]) -> None:
    """An output that nothing depends on has no gradient."""
    if kind != "LSTM" and wanted == (2,):
        wanted = (0, 1)
    judge(kind, operands(kind, "b"), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["b", "h", "c", "b h", "b c", "h c"])
def test_operands(kind: str, given: str) -> None:
    judge(kind, operands(kind, given if kind == "LSTM" else given.replace("c", "").strip()), (0, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("direction", "layout"), [*product(("forward", "reverse", "bidirectional"), (0, 1))][1:])
def test_directions_and_layouts(kind: str, direction: str, layout: int) -> None:
    """The first direction and layout are those of `test_sizes`; two directions have all sizes, in both layouts."""
    directions = 2 if direction == "bidirectional" else 1
    for sizes in [(5, 3, 7, 9), (1, 2, 4, 16), (4, 1, 6, 5)][: 3 if directions == 2 else 1]:
        given = operands(kind, "b h c" if kind == "LSTM" else "b h", sizes, directions, layout)
        judge(kind, given, direction=direction, layout=layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needs", ["x", "w", "r", "b", "h", "w r b", "x h"])
def test_only_needed_gradients(kind: str, needs: str) -> None:
    judge(kind, operands(kind, "b h c" if kind == "LSTM" else "b h"), (0, 1), needs.split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_input_and_gradient_with_the_batch_first_in_memory(kind: str, direction: str) -> None:
    """As exporters write a layer of PyTorch: both ends are transposed, which plans do by strides."""
    directions = 2 if direction == "bidirectional" else 1
    given = operands(kind, "b", (6, 4, 32, 32), directions)
    given["x"] = np.ascontiguousarray(given["x"].swapaxes(0, 1))
    inner = layer(kind, list(given), (0,), direction=direction)

    def function(x: Any, *rest: Any) -> Any:
        y = inner(op.Transpose(x, perm=[1, 0, 2]), *rest)[0]
        return op.Transpose(y, perm=[2, 0, 1, 3])

    name = kind[:4].rstrip("-")
    compare(function, list(given.values()), range(4), joined=[name], exact=True, tolerance=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_layers_do_not_add_to_each_other(kind: str) -> None:
    """The gradients of the weights are overwritten: oneDNN adds to them unless it is told not to."""
    first = operands(kind, "b", (5, 3, 9, 9))
    second = {n: v for n, v in operands(kind, "b", (5, 3, 9, 9), seed=9).items() if n != "x"}
    one, two = layer(kind, list(first), (0,)), layer(kind, list(first), (0,))
    name = kind[:4].rstrip("-")

    def apart(x: Any, w: Any, r: Any, b: Any, *rest: Any) -> Any:
        return two(op.Squeeze(one(x, w, r, b)[0], [1]), *rest)[0]

    def shared(x: Any, w: Any, r: Any, b: Any) -> Any:
        return two(op.Squeeze(one(x, w, r, b)[0], [1]), w, r, b)[0]

    arrays = [*first.values(), *second.values()]
    compare(apart, arrays, range(7), joined=[name] * 2, exact=True, tolerance=5e-6)
    compare(shared, arrays[:4], range(4), joined=[name] * 2, exact=True, tolerance=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_differ_only_in_their_attributes(kind: str) -> None:
    """Each gradient finds its own forward call, although both have the same operands."""
    given = operands(kind, "b")
    both = [layer(kind, list(given), (0, 1), direction=d) for d in ("forward", "reverse")]
    name = kind[:4].rstrip("-")
    compare(
        lambda *v: [y for f in both for y in f(*v)], list(given.values()), range(4), joined=[name] * 2, exact=True,
        tolerance=5e-6,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_threads(kind: str, threads: int) -> None:
    given = operands(kind, "b", (3, 24, 64, 128))
    name = kind[:4].rstrip("-")
    compare(
        layer(kind, list(given), (0,)), list(given.values()), range(4), joined=[name], exact=True, tolerance=5e-6,
        threads=threads,
    )  # fmt: skip


REFUSED = [
    ("LSTM", {"clip": 0.5}, "b"),
    ("LSTM", {"input_forget": 1}, "b"),
    ("LSTM", {"activations": ["Sigmoid", "Tanh", "Relu"]}, "b"),
    ("GRU", {"activations": ["HardSigmoid", "Tanh"]}, "b"),
    ("GRU-after", {"clip": 0.5}, "b"),
]


@pytest.mark.parametrize(("kind", "attributes", "given"), REFUSED, ids=str)
def test_attributes_that_are_refused(kind: str, attributes: dict[str, Any], given: str) -> None:
    values = operands(kind, given)
    compare(layer(kind, list(values), (0,), **attributes), list(values.values()), range(len(values)), joined=[])


def test_peepholes_are_refused() -> None:
    values = operands("LSTM", "b") | {"p": normal(1, 27, seed=5)}
    for needs in range(4), range(5):
        compare(layer("LSTM", list(values), (0,)), list(values.values()), needs, joined=[])


@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind: str) -> None:
    """Constant lengths that are all the whole time are nothing else than none; others are refused."""
    given = operands(kind, "b")
    for lengths, joined in (([5, 5, 5], [kind[:4].rstrip("-")]), ([5, 2, 3], [])):
        function = layer(kind, ["x", "w", "r", "b", "lengths"], (0, 1))

        def body(*v: Any, f: Any = function, n: Any = np.array(lengths, np.int32)) -> Any:  # noqa: B008
            return f(*v, n)

        step = compare(body, list(given.values()), range(4), joined=joined, tolerance=5e-6)
        assert joined or "the lengths of the sequences differ" in step.reasons[kind[:4].rstrip("-")]


def test_explicit_default_activations_are_taken() -> None:
    names = ["sigmoid", "Tanh", "tanh"]
    judge("LSTM", operands("LSTM", "b", directions=2), activations=names * 2, direction="bidirectional")


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite(kind: str) -> None:
    """The results are NaN or infinite where those of the definition are; a plan with a GRU leaves such runs to it."""
    given = operands(kind, "b h c" if kind == "LSTM" else "b h")
    body, arrays = differentiated(layer(kind, list(given)), list(given.values()), range(len(given)))
    plan, exact = (record(body, arrays, range(len(given)), Options(level=n)) for n in (2, 0))
    plan.run()
    assert plan.joined == [kind[:4].rstrip("-")]
    assert all(p.facts.finite == (kind != "LSTM") for p in plan.planner.plans.values())
    for at, bad in product(range(len(arrays)), (np.nan, np.inf, -np.inf)):
        changed = [a.copy() for a in arrays]
        changed[at].reshape(-1)[changed[at].size // 2] = bad
        for r in plan, exact:
            r.set(changed)
        for got, wanted in zip(plan.run(), exact.run(), strict=True):
            same(got, wanted)
