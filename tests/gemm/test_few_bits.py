"""Products with weights of few bits against definitions and float64: plans, the functions that they call, and their text."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.helpers.gemm_frames import LIMITS, Frame, assembly
from tests.helpers.plan_checks import kernels_used

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.dtypes import FOUR_BIT_CODES
from singa_backend.elementwise.compile import available, level, target
from singa_backend.gemm import few_bits as code
from singa_backend.gemm.dots import DOTS
from singa_backend.gemm.few_bits import PANEL, FewBitsKind
from singa_backend.gemm.tiles import HEIGHT
from singa_backend.kernels import onednn
from singa_backend.kernels.few_bits_packing import Blocks, pack, signed
from singa_backend.kernels.rounding import NONE, rounding

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

EXACT, ROUNDED = 1e-5, 1e-2
"""The error of float32 sums, and of rows that are rounded to bytes, as a part of the root mean square of the result."""


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


def integers(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The integers of rows that are rounded by blocks, (rows, blocks, block), and the scale of each block."""
    m, k = x.shape
    wide = np.pad(x, ((0, 0), (0, -k % block))).reshape(m, -1, block)
    most = np.maximum(np.abs(wide).max(-1), np.float32(1e-30))
    return np.rint(wide.astype(np.float64) * (np.float32(127) / most)[..., None]), most / np.float32(127)


def compare(n: int, k: int, count: int, bits: int, block: int, zeros: str, level: int, **options: Any) -> list[str]:
    """Compare a product with the definition and with float64; at level 4 of rounded rows.  Return the kernels."""
    given = drawn(n, k, bits=bits, block=block, zeros=zeros)
    made = model(n, k, given, bits=bits, block_size=block, accuracy_level=level)
    rep = SingaBackend.prepare(made, threads=1, **options)
    definition = SingaBackend.prepare(made, optimize=0)
    w = weights(n, k, given, bits, block)
    for seed in (1, 2, 1):  # the trace, and what it has bound
        x = rows(count, k, seed=seed)
        (got,), (defined,) = rep.run([x]), definition.run([x])
        if level != 4 or options:
            assert max(error(got, x.astype(np.float64) @ w.T), error(got, defined)) <= (ROUNDED if options else EXACT)
            continue
        whole, scale = integers(x, min(block, 256))
        assert error(got, (whole * scale[..., None]).reshape(count, -1)[:, :k] @ w.T) <= EXACT
        assert error(got.reshape(-1), defined.reshape(-1)) <= ROUNDED * 5
    return ran_by_kernel(rep)


@pytest.mark.parametrize("zeros", ["", "bytes", "floats"])
@pytest.mark.parametrize("block", [16, 32, 64, 256, 1024])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_level_0_is_as_exact_as_float32(bits: int, block: int, zeros: str) -> None:
    for count in (1, 3, 17):
        compare(70, 300, count, bits, block, zeros, 0)


@pytest.mark.parametrize("zeros", ["", "bytes", "floats"])
@pytest.mark.parametrize("block", [16, 32, 64, 256, 1024])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_level_4_rounds_rows(bits: int, block: int, zeros: str) -> None:
    for count in (1, 3, 17):
        compare(70, 300, count, bits, block, zeros, 4)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 31), (64, 64), (65, 33), (130, 1000), (5000, 96)])
@pytest.mark.parametrize("level", [0, 4])
def test_sizes(n: int, k: int, level: int) -> None:
    for count in (1, 2, 5, 16, 70, HEIGHT + 1):
        compare(n, k, count, 4, 32, "bytes", level)


def test_levels() -> None:
    for accuracy in range(5):
        for count, kernel in (1, "a row"), (2, "rows"):
            used = compare(256, 512, count, 4, 32, "", accuracy)
            assert used[-1] == ("machine.product of integers" if accuracy == 4 else f"machine.product of {kernel}")


@pytest.mark.parametrize("block", [16, 32, 64, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sums_of_the_highest_integers_are_exact(limited: str, bits: int, block: int) -> None:
    """Elements of one magnitude are rounded without error; weights and zero points are 0 or the highest integer."""
    n, k = 70, 512
    g, given = np.random.default_rng(0), drawn(n, k, bits=bits, block=block, zeros="bytes")
    given["b"] = np.where(g.random(given["b"].shape) < 0.7, 255, 0).astype(np.uint8)
    given["zeros"] = g.choice([0, 255], given["zeros"].shape).astype(np.uint8)
    for count in (1, 7):
        rep = SingaBackend.prepare(model(n, k, given, bits=bits, block_size=block, accuracy_level=4), threads=1)
        x = np.where(g.random((count, k)) < 0.9, 3, -3).astype(np.float32)
        (y,) = rep.run([x])
        assert error(y, x @ weights(n, k, given, bits, block).T) <= EXACT
        assert "machine.product of integers" in ran_by_kernel(rep)


def test_an_outlier_hides_the_elements_of_its_block_only() -> None:
    n, k = 128, 256
    given = drawn(n, k)
    x = np.ones((1, k), np.float32)
    x[0, 0] = 1e6
    rep = SingaBackend.prepare(model(n, k, given, bits=4, block_size=32, accuracy_level=4), threads=1)
    (y,) = rep.run([x])
    w = weights(n, k, given, 4, 32)
    assert (np.abs(y - x @ w.T) <= 1.01 * np.abs(w[:, 1:32]).sum(1) + 1e6 * 2**-22).all()


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-35, 1e35])
@pytest.mark.parametrize("level", [0, 4])
def test_rows_of_any_magnitude(level: int, scale: float) -> None:
    given, x = drawn(40, 96), rows(2, 96)
    rep = SingaBackend.prepare(model(40, 96, given, bits=4, block_size=32, accuracy_level=level), threads=1)
    x *= np.float32(scale)
    (y,) = rep.run([x])
    assert np.abs(y - x @ weights(40, 96, given, 4, 32).T).max() <= max(0.02 * np.abs(x).max(), 1e-32) * 0.02 * 96


@pytest.mark.levels
@pytest.mark.parametrize("accuracy", [0, 4])
@pytest.mark.parametrize("count", [1, 7])
def test_processors_return_equal_bits(monkeypatch: pytest.MonkeyPatch, accuracy: int, count: int) -> None:
    results = {}
    for bits, block, zeros in (2, 16, "floats"), (4, 32, ""), (4, 128, "bytes"), (8, 64, "bytes"):
        given, x = drawn(70, 300, bits=bits, block=block, zeros=zeros, bias=True), rows(count, 300)
        made = model(70, 300, given, bits=bits, block_size=block, accuracy_level=accuracy)
        for limit in LIMITS.values():
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            results[level()] = SingaBackend.prepare(made, threads=1).run([x])[0]
        for y in results.values():
            np.testing.assert_array_equal(y, results["avx2"])


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
    assert "machine.product of rows" in ran_by_kernel(rep)


def test_a_bias_that_is_an_input() -> None:
    given = drawn(70, 96, bias=True)
    bias = given["bias"]
    made = model(70, 96, given, bits=4, block_size=32)
    del made.graph.initializer[-1]
    made.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [70]))
    rep, x = SingaBackend.prepare(made, threads=1), rows(2, 96)
    for factor in (1, 3):
        (y,) = rep.run({"x": x, "bias": factor * bias})
        assert error(y, x @ weights(70, 96, given, 4, 32).T + factor * bias) <= EXACT
    ran_by_kernel(rep)


@pytest.mark.parametrize("accuracy", [0, 4])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_bits_do_not_depend_on_the_run_or_on_threads(count: int, accuracy: int) -> None:
    given = drawn(2048, 1024)
    made, x = model(2048, 1024, given, bits=4, block_size=32, accuracy_level=accuracy), rows(count, 1024)
    results = []
    for threads in (1, 2, 3):
        rep = SingaBackend.prepare(made, threads=threads)
        results += [rep.run([x])[0] for _ in range(3)]
    for y in results:
        np.testing.assert_array_equal(y, results[0])


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
    assert ran_by_kernel(rep).count("machine.rounding of rows") == 1


@pytest.mark.parametrize("accuracy", [0, 4])
def test_nodes_with_one_input_and_other_blocks(accuracy: int) -> None:
    """Blocks of 1,024 are four packed ones, so that the copy of A is longer than for blocks of 256."""
    n, k, made = 40, 300, None
    given = {block: drawn(n, k, block=block, seed=block) for block in (256, 1024)}
    for block, constants in given.items():
        one = model(n, k, constants, bits=4, block_size=block, accuracy_level=accuracy)
        if made is None:
            made = one
            continue
        for tensor in one.graph.initializer:
            tensor.name += "2"
        one.graph.node[0].input[1:3] = ["b2", "scales2"]
        one.graph.node[0].output[0] = one.graph.output[0].name = "z"
        made.graph.node.extend(one.graph.node)
        made.graph.initializer.extend(one.graph.initializer)
        made.graph.output.extend(one.graph.output)
    for count in (1, 3):
        x = rows(count, k)
        results = SingaBackend.prepare(made, threads=1).run([x])
        for y, (block, constants) in zip(results, given.items(), strict=True):
            exact = x @ weights(n, k, constants, 4, block).T
            assert error(y.reshape(-1), exact.reshape(-1)) <= (5 * ROUNDED if accuracy else EXACT)


@pytest.mark.skipif(onednn.library() is None or rounding() == NONE, reason="there are no products in bfloat16")
def test_memory_for_speed_keeps_bfloat16() -> None:
    for count in (1, 2, 40):
        used = compare(128, 256, count, 4, 32, "bytes", 4, memory="speed")
        assert any("kept weights" in k for k in used)
    assert "machine.product of rows" in compare(128, 256, 40, 4, 32, "bytes", 0)


def test_memory_is_kept_by_a_pickle() -> None:
    given = drawn(16, 64)
    rep = SingaBackend.prepare(model(16, 64, given, bits=4, block_size=32), memory="speed")
    assert pickle.loads(pickle.dumps(rep)).options.memory == "speed"
    assert SingaBackend.prepare(model(16, 64, given, bits=4, block_size=32)).options.memory == "compact"


def derived(rep: SingaRep) -> list[Any]:
    planner = rep._session._planner
    assert planner is not None
    return list(planner.shared.kernels.derived.values())


@pytest.mark.parametrize("zeros", ["", "bytes", "floats"])
@pytest.mark.parametrize("block", [16, 32, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_bytes_are_those_of_the_file(bits: int, block: int, zeros: str) -> None:
    n, k = 512, 1024
    given = drawn(n, k, bits=bits, block=block, zeros=zeros)
    rep = SingaBackend.prepare(model(n, k, given, bits=bits, block_size=block), threads=1)
    for count in (1, 2, 30, 1):
        rep.run([rows(count, k)])
    forms = [v for v in derived(rep) if isinstance(v, Blocks)]
    assert len(forms) == 1  # for all plans
    assert sum(v.nbytes for v in derived(rep)) == forms[0].nbytes <= 1.15 * sum(v.nbytes for v in given.values())


@pytest.mark.parametrize("block", [32, 512])
def test_packed_tiles_have_the_weights(block: int) -> None:
    n, k = 70, 600
    given = drawn(n, k, block=block, zeros="bytes")
    form = pack(given["b"], given["scales"], given["zeros"], 4, block, lambda b: b)
    assert form.zeros is not None and form.tiles == 6
    values = form.words.array[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    values = values.transpose(0, 2, 1, 3).reshape(96, -1)
    scales, zeros = (v.array.transpose(0, 2, 1).reshape(96, -1) for v in (form.scales, form.zeros))
    size = values.shape[1] // scales.shape[1]
    assert size == min(block, 256)
    w = (values - np.repeat(zeros, size, 1).astype(np.float64)) * np.repeat(scales, size, 1)
    np.testing.assert_allclose(w[:n, :k], weights(n, k, given, 4, block), rtol=1e-7)
    assert not w[n:].any()


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


# MatMulBnb4


def codes_model(n: int, k: int, b: np.ndarray, absmax: np.ndarray, **attributes: Any) -> Any:
    """A node with constant weights."""
    node = helper.make_node("MatMulBnb4", ["x", "b", "absmax"], ["y"], domain="com.microsoft", K=k, N=n, **attributes)
    x, y = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    )
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(b, "b"), numpy_helper.from_array(absmax, "absmax")])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("block", [16, 64, 512])
@pytest.mark.parametrize("kind", [0, 1])
def test_codes(limited: str, kind: int, block: int) -> None:
    n, k, g = 70, 1024, np.random.default_rng(0)
    b = g.integers(0, 256, n * k // 2, dtype=np.uint8)
    absmax = g.uniform(0.1, 3, n * k // block).astype(np.float32)
    table = FOUR_BIT_CODES[kind].astype(np.float64)
    w = table[np.stack([b >> 4, b & 15], -1)].reshape(n, -1, block) * absmax.reshape(n, -1, 1)
    for count in (1, 7):
        rep, x = SingaBackend.prepare(codes_model(n, k, b, absmax, block_size=block, quant_type=kind), threads=1), rows(count, k)
        (y,) = rep.run([x])
        assert error(y, x @ w.reshape(n, k).T) <= EXACT
        ran_by_kernel(rep)


def test_codes_of_blocks_with_parts_of_rows_run_by_the_definition() -> None:
    n, k, g = 8, 48, np.random.default_rng(0)
    b, absmax = g.integers(0, 256, n * k // 2, dtype=np.uint8), g.uniform(0.1, 3, n * k // 32).astype(np.float32)
    rep = SingaBackend.prepare(codes_model(n, k, b, absmax, block_size=32, quant_type=1), threads=1)
    rep.run([rows(2, k)])
    assert "definition" in kernels_used(rep)


# The functions


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("zeros", ["", "bytes", "floats"])
@pytest.mark.parametrize(("bits", "block"), [(2, 16), (4, 32), (4, 128), (8, 64)])
def test_functions_stay_in_their_arrays(limited: str, ended: Any, bits: int, block: int, zeros: str, threads: int) -> None:
    for m, n, k in (1, 1, 1), (2, 17, 33), (3, 31, 100), (7, 70, 301), (64, 64, 128):
        given, x = drawn(n, k, bits=bits, block=block, zeros=zeros, seed=m), rows(m, k)
        exact = x.astype(np.float64) @ weights(n, k, given, bits, block).T
        for rounds in (False, True):
            kind = FewBitsKind(bits, min(block, 32), zeros, limited)
            form = pack(given["b"], given["scales"], given.get("zeros"), bits, block, (lambda b: b) if rounds else signed(bits))
            blocks = form.scales.shape[1]
            left = np.zeros((m, blocks * block), np.int8 if rounds else np.float32)
            sizes = {
                "rows": m, "n": n, "k": k, "block": block, "blocks": blocks, "steps": block // kind.deep,
                "groups": form.tiles // 2, "stride": left.strides[0], "height": min(m, HEIGHT),
            }  # fmt: skip
            arrays = {
                "x": x, "left": left, "sums": np.zeros((m, blocks), np.int32 if rounds else np.float32),
                "scales": np.zeros((m, blocks), np.float32), "w": form.words.array, "factors": form.scales.array,
                "bias": np.zeros(form.tiles * 16, np.float32), "table": ((np.arange(16) + 8) % 16 - 8).astype(np.float32),
                "y": np.full((m, n), np.nan, np.float32),
            }  # fmt: skip
            if form.zeros is not None:
                arrays["zeros"] = form.zeros.array
            held = {name: ended(a) for name, a in arrays.items()}
            Frame(code.rounding(kind.values) if rounds else code.copying(), sizes, held, threads)()
            product = code.integers(kind) if rounds else code.floats(kind) if m == 1 else code.panels(kind)
            Frame(product, sizes, held, threads)()
            assert error(held["y"], exact) <= (ROUNDED * 10 if rounds else EXACT)


def test_rows_are_rounded_to_the_nearest_integers() -> None:
    """The bytes, in their order, and the sums and scales of blocks, in NumPy."""
    x, block, values = rows(3, 90), 32, 8
    arrays = {
        "x": x, "left": np.zeros((3, 96), np.int8), "sums": np.zeros((3, 3), np.int32), "scales": np.zeros((3, 3), np.float32),
    }  # fmt: skip
    Frame(code.rounding(values), {"rows": 3, "k": 90, "blocks": 3, "block": block, "stride": 96}, arrays)()
    whole, scales = integers(x, block)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    np.testing.assert_array_equal(arrays["left"].reshape(3, 3, 4, 8), whole.reshape(3, 3, 4, 8)[..., order])
    np.testing.assert_array_equal(arrays["sums"], whole.sum(-1))
    np.testing.assert_array_equal(arrays["scales"], scales)


@pytest.mark.levels
@pytest.mark.parametrize(
    ("name", "bits", "instructions"),
    [
        ("avx2", 4, ("vpmaddubsw", "vpmaddwd")),
        ("avx2", 8, ("vpsignb", "vpmaddubsw", "vpmaddwd")),
        ("vnni", 4, ("vpdpbusd",)),
        ("aarch64", 4, ("smull", "saddlp", "addp")),
        ("dotprod", 4, ("sdot",)),
        ("dotprod", 8, ("sdot",)),
    ],
)
def test_products_of_integers_are_the_instructions_of_a_processor(name: str, bits: int, instructions: tuple[str, ...]) -> None:
    text = assembly(code.integers(FewBitsKind(bits, 32, "bytes", name)), name)
    assert all(i in text for i in instructions)
    assert ("zmm" in text) == (name == "vnni")


@pytest.mark.levels
@pytest.mark.parametrize("name", DOTS)
def test_every_level_has_objects(name: str) -> None:
    """They refer to nothing but themselves."""
    kinds = [FewBitsKind(bits, 16, zeros, name) for bits in (2, 4, 8) for zeros in ("", "floats")]
    functions = [f(kind) for kind in kinds for f in (code.integers, code.floats, code.panels)]
    functions += [code.copying(), code.panels(FewBitsKind(4, 32, "", name, table=True))]
    functions += [code.rounding(values) for values in {kind.values for kind in kinds}]
    assert all(target(name).object(f.text("f")) for f in functions)


def test_blocks_fit_into_a_panel() -> None:
    assert PANEL % 256 == 0
