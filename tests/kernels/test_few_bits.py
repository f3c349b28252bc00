"""The kernel of MatMulNBits against its definition, and against float64."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.helpers.plan_checks import kernels_used

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.kernels import onednn
from singa_backend.kernels.few_bits import reads_tiles
from singa_backend.kernels.few_bits_packing import Blocks, pack
from singa_backend.kernels.rounding import NONE, rounding

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")

EXACT, TWO_DIGITS, ONE_DIGIT = 1e-5, 5e-5, 1e-2
"""The error of float32 sums, of two digits and of one, as a part of the root mean square of the result."""


def drawn(
    n: int, k: int, *, bits: int = 4, block: int = 32, zeros: str = "", bias: bool = False, seed: int = 0
) -> dict[str, np.ndarray]:
    """Constants of a node: bytes with random padding, scales of both signs, zero points of type uint8 or float32."""
    g, blocks = np.random.default_rng(seed), -(-k // block)
    made = {
        "b": g.integers(0, 256, (n, blocks, block * bits // 8), dtype=np.uint8),
        "scales": (g.uniform(0.01, 0.03, (n, blocks)) * g.choice([-1, 1], (n, blocks))).astype(np.float32),
    }
    if zeros == "bytes":
        made["zeros"] = g.integers(0, 256, (n, -(-blocks * bits // 8)), dtype=np.uint8)
    elif zeros == "floats":
        made["zeros"] = g.uniform(0, 2**bits, (n, blocks)).astype(np.float32)
    if bias:
        made["bias"] = g.standard_normal(n).astype(np.float32)
    return made


def model(
    n: int, k: int, given: dict[str, np.ndarray], *, rank: int = 2, dtype: int = TensorProto.FLOAT, **attributes: Any
) -> Any:
    """A node with these constants; the other sizes of A are free."""
    names = ["x", "b", "scales", "zeros" if "zeros" in given else "", "", "bias" if "bias" in given else ""]
    while not names[-1]:
        names.pop()
    node = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", K=k, N=n, **attributes)
    x = helper.make_tensor_value_info("x", dtype, [*[f"d{i}" for i in range(rank - 1)], k])
    y = helper.make_tensor_value_info("y", dtype, None)
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(v, name) for name, v in given.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def weights(n: int, k: int, given: dict[str, np.ndarray], bits: int, block: int) -> np.ndarray:
    """The weights in float64, by their definition one after another."""
    values = np.array(
        [[byte >> s & (2**bits - 1) for byte in row for s in range(0, 8, bits)] for row in given["b"].reshape(n, -1)]
    )
    blocks = -(-k // block)
    zeros = given.get("zeros", np.full((n, blocks), 2 ** (bits - 1)))
    if zeros.dtype == np.uint8:
        zeros = np.array([[byte >> s & (2**bits - 1) for byte in row for s in range(0, 8, bits)] for row in zeros])[:, :blocks]
    w = (values.reshape(n, blocks, block) - zeros[..., None].astype(np.float64)) * given["scales"].astype(np.float64)[..., None]
    return w.reshape(n, -1)[:, :k]


def rows(*shape: int, seed: int = 1) -> np.ndarray:
    """A with rows and columns of different sizes, and a row of zeros."""
    g = np.random.default_rng(seed)
    x = g.standard_normal(shape) * g.uniform(0.1, 3, shape[-1])
    x.reshape(-1, shape[-1])[1::3] *= 1e-3
    x.reshape(-1, shape[-1])[2:3] = 0
    return x.astype(np.float32)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest over the rows of the root mean square error over the root mean square."""
    assert got.shape == wanted.shape and np.isfinite(got).all()
    difference, size = (np.sqrt((v.astype(np.float64) ** 2).mean(-1)) for v in (got - wanted, wanted))
    return float((difference / np.maximum(size, 1e-20)).max())


def ran_by_kernel(rep: SingaRep) -> list[str]:
    used = kernels_used(rep)
    assert used and not any("definition" in k for k in used), used
    return used


def compare(n: int, k: int, count: int, bits: int, block: int, zeros: str, level: int, bound: float, **options: Any) -> list[str]:
    given = drawn(n, k, bits=bits, block=block, zeros=zeros)
    made = model(n, k, given, bits=bits, block_size=block, accuracy_level=level)
    rep = SingaBackend.prepare(made, threads=1, **options)
    definition = SingaBackend.prepare(made, optimize=0)
    w = weights(n, k, given, bits, block)
    for seed in (1, 2, 1):  # the trace, and what it has bound
        x = rows(count, k, seed=seed)
        (got,), (defined,) = rep.run([x]), definition.run([x])
        assert error(got, x.astype(np.float64) @ w.T) <= bound
        assert error(got, defined) <= bound
    return ran_by_kernel(rep)


@pytest.mark.parametrize("zeros", ["", "bytes", "floats"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_level_0_is_as_exact_as_float32(bits: int, block: int, zeros: str) -> None:
    for count in (1, 3, 17):
        compare(70, 300, count, bits, block, zeros, 0, EXACT)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 31), (64, 64), (65, 33), (130, 1000), (5000, 96)])
@pytest.mark.parametrize("level", [0, 4])
def test_sizes(n: int, k: int, level: int) -> None:
    for count in (1, 2, 5, 16, 70):
        compare(n, k, count, 4, 32, "bytes", level, ONE_DIGIT * 5 if level else EXACT)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_levels(block: int) -> None:
    several = "digits" if reads_tiles() else "unpacked weights"
    for level, bound, kernel in (
        (1, EXACT, several),
        (2, TWO_DIGITS, several),
        (3, TWO_DIGITS, several),
        (4, ONE_DIGIT, "digits"),
    ):
        assert any(kernel in k for k in compare(256, 512, 1, 4, block, "", level, bound))
    used = compare(256, 512, 1, 4, block, "", 0, TWO_DIGITS, precision="bf16")
    assert any(several in k for k in used)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_sum_of_pairs_saturates(bits: int, block: int) -> None:
    """Elements of one magnitude have exact digits; weights and zero points are 0 or the highest integer."""
    n, k = 70, 512
    g, given = np.random.default_rng(0), drawn(n, k, bits=bits, block=block, zeros="bytes")
    given["b"] = np.where(g.random(given["b"].shape) < 0.7, 255, 0).astype(np.uint8)
    given["zeros"] = g.choice([0, 255], given["zeros"].shape).astype(np.uint8)
    rep = SingaBackend.prepare(model(n, k, given, bits=bits, block_size=block, accuracy_level=4), threads=1)
    x = np.where(g.random((1, k)) < 0.9, 3, -3).astype(np.float32)
    (y,) = rep.run([x])
    assert error(y, x @ weights(n, k, given, bits, block).T) <= EXACT
    assert any(("digits" if reads_tiles() or bits < 8 else "unpacked weights") in k for k in ran_by_kernel(rep))


def test_an_outlier_hides_the_elements_of_its_group_only() -> None:
    n, k = 128, 256
    given = drawn(n, k)
    x = np.ones((1, k), np.float32)
    x[0, 0] = 1e6
    rep = SingaBackend.prepare(model(n, k, given, bits=4, block_size=32, accuracy_level=0), threads=1)
    (y,) = rep.run([x])
    w = weights(n, k, given, 4, 32)
    half = 1e6 / (127 * (1 + 256 + 65536)) / 2  # of the last digit in the group of the outlier
    assert (np.abs(y - x @ w.T) <= 1.1 * half * np.abs(w[:, :64]).sum(1) + 1e6 * 2**-23).all()
    x[0, 0] = 0
    (y,) = rep.run([x])
    assert error(y, x @ w.T) <= EXACT


def test_the_largest_element_does_not_overflow_its_digits() -> None:
    n, k = 64, 64 * 64
    given = drawn(n, k)
    rep = SingaBackend.prepare(model(n, k, given, bits=4, block_size=32), threads=1)
    w = weights(n, k, given, 4, 32)
    for seed in range(20):
        x = np.random.default_rng(seed).uniform(1, 2, (1, k)).astype(np.float32)
        (y,) = rep.run([x])
        assert np.abs(y - x @ w.T).max() <= 1e-4


@pytest.mark.parametrize("shape", [(96,), (2, 96), (2, 3, 96), (1, 2, 2, 96)])
def test_ranks_and_bias(shape: tuple[int, ...]) -> None:
    given = drawn(40, 96, bias=True, zeros="bytes")
    made = model(40, 96, given, rank=len(shape), bits=4, block_size=32)
    rep = SingaBackend.prepare(made, threads=1)
    x = rows(*shape) if len(shape) > 1 else rows(1, 96)[0]
    (y,) = rep.run([x])
    assert error(y, x @ weights(40, 96, given, 4, 32).T + given["bias"]) <= EXACT
    ran_by_kernel(rep)


def test_bias_of_many_rows() -> None:
    given = drawn(70, 200, bias=True, zeros="floats")
    rep = SingaBackend.prepare(model(70, 200, given, bits=4, block_size=32), threads=1)
    x = rows(33, 200)
    (y,) = rep.run([x])
    assert error(y, x @ weights(70, 200, given, 4, 32).T + given["bias"]) <= EXACT
    assert any("unpacked" in k for k in ran_by_kernel(rep))


@pytest.mark.parametrize("count", [1, 4, 40])
def test_bits_do_not_differ_between_runs(count: int) -> None:
    given = drawn(2048, 512)
    made, x = model(2048, 512, given, bits=4, block_size=32), rows(count, 512)
    for threads in (1, 2):
        first, second = (SingaBackend.prepare(made, threads=threads) for _ in range(2))
        (a,), (b,), (c,) = first.run([x]), first.run([x]), second.run([x])
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_nodes_with_one_input_round_it_once() -> None:
    given = drawn(64, 128)
    made = model(64, 128, given, bits=4, block_size=32, accuracy_level=4)
    again = onnx.NodeProto()
    again.CopyFrom(made.graph.node[0])
    again.output[0] = "z"
    made.graph.node.append(again)
    made.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    rep = SingaBackend.prepare(made, threads=1, optimize=1)
    y, z = rep.run([rows(1, 128)])
    np.testing.assert_array_equal(y, z)
    assert sum(k == "numpy digits" for k in ran_by_kernel(rep)) == 1


@pytest.mark.skipif(rounding() == NONE, reason="there are no products in bfloat16")
def test_memory_for_speed_keeps_bfloat16() -> None:
    for count in (1, 2, 40):
        used = compare(128, 256, count, 4, 32, "bytes", 4, ONE_DIGIT, memory="speed")
        assert any("kept weights" in k for k in used)
    assert any("unpacked" in k for k in compare(128, 256, 40, 4, 32, "bytes", 0, EXACT, memory="speed"))


def test_memory_is_kept_by_a_pickle() -> None:
    given = drawn(16, 64)
    rep = SingaBackend.prepare(model(16, 64, given, bits=4, block_size=32), memory="speed")
    assert pickle.loads(pickle.dumps(rep)).options.memory == "speed"
    assert SingaBackend.prepare(model(16, 64, given, bits=4, block_size=32)).options.memory == "compact"


def derived(rep: SingaRep) -> list[Any]:
    planner = rep._session._planner
    assert planner is not None
    return list(planner.shared.kernels.derived.values())


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_packed_bytes_are_at_most_twice_those_of_four_bits(block: int) -> None:
    n, k = 512, 1024
    given = drawn(n, k, block=block, zeros="bytes")
    made = model(n, k, given, bits=4, block_size=block)
    rep = SingaBackend.prepare(made, threads=1)
    for count in (1, 2, 30, 1):
        rep.run([rows(count, k)])
    forms = [v for v in derived(rep) if isinstance(v, Blocks)]
    assert len(forms) == 1  # for all plans
    assert sum(v.nbytes for v in derived(rep)) == forms[0].nbytes <= 2 * (given["b"].nbytes + given["scales"].nbytes)


@pytest.mark.parametrize("plain", [False, True])
def test_packed_tiles_have_the_weights(plain: bool) -> None:
    n, k, block = 70, 100, 32
    given = drawn(n, k, block=block, zeros="bytes")
    form = pack(given["b"], given["scales"], given["zeros"], 4, block, n, k, plain, plain)
    (first, wide), *others = form.stripes
    assert (first, wide, others) == (0, 128, [])
    if plain:
        tiles = form.tiles.array.reshape(form.count, 128, 64).swapaxes(1, 2).reshape(form.count * 64, 128)
        scales = form.scales.array.reshape(-1, 128)
    else:
        tiles = form.tiles.array.reshape(form.count, 2, 16, 64, 4).transpose(0, 2, 4, 1, 3).reshape(form.count * 64, 128)
        scales = form.scales.array.reshape(2, form.count, 128).transpose(1, 0, 2).reshape(-1, 128)
    w = tiles.astype(np.float64) * np.repeat(scales, block, 0)
    np.testing.assert_allclose(w[:k, :n], weights(n, k, given, 4, block).T, rtol=1e-7)
    assert not w[k:].any() and not w[:, n:].any()
    np.testing.assert_allclose(form.sums.array, w.reshape(form.count, 64, 128).sum(1), rtol=1e-6, atol=1e-6)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("the dtype is float16", {"dtype": TensorProto.FLOAT16}),
    ("g_idx", {"g_idx": True}),
    ("not constant", {"variable": True}),
]


@pytest.mark.parametrize(("reason", "change"), REFUSED, ids=[r for r, _ in REFUSED])
def test_other_forms_run_by_the_definition(reason: str, change: dict[str, Any]) -> None:
    n, k = 32, 64
    given = drawn(n, k)
    half = "dtype" in change
    if half:
        given["scales"] = given["scales"].astype(np.float16)
    made = model(n, k, given, bits=4, block_size=32, **({"dtype": TensorProto.FLOAT16} if half else {}))
    x, feeds = rows(2, k), {}
    if half:
        x = x.astype(np.float16)
    if "g_idx" in change:
        made.graph.node[0].input.extend(["", "g_idx"])
        made.graph.initializer.append(numpy_helper.from_array((np.arange(k) // 32).astype(np.int32), "g_idx"))
    if "variable" in change:
        made.graph.input.append(helper.make_tensor_value_info("scales", TensorProto.FLOAT, [n, k // 32]))
        del made.graph.initializer[1]
        feeds["scales"] = given["scales"]
    rep = SingaBackend.prepare(made, threads=1)
    (y,) = rep.run({"x": x, **feeds})
    assert error(y.astype(np.float64), x.astype(np.float64) @ weights(n, k, given, 4, 32).T) <= (2e-3 if half else EXACT)
    assert rep._session._planner is not None
    steps = [s for p in rep._session._planner.plans.values() for segment in p.segments for s in segment.steps]
    assert any("definition" in s.kernel and any(reason in note for note in s.notes) for s in steps), [
        (s.kernel, s.notes) for s in steps
    ]


def test_values_that_are_not_finite_are_those_of_the_definition() -> None:
    given = drawn(32, 64)
    rep = SingaBackend.prepare(model(32, 64, given, bits=4, block_size=32), threads=1)
    x = rows(1, 64)
    rep.run([x])
    x[0, 3] = np.nan
    (y,) = rep.run([x])
    assert np.isnan(y).all()
