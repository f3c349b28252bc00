"""Plans compute onnxruntime's operators by their bodies where the definition accepts the inputs, and refuse what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from singa_backend import Limits, OperatorError, SingaBackend, UnsupportedModel
from singa_backend.comparison import tolerances
from singa_backend.conform.fuzz import generate, witnesses
from singa_backend.conform.fuzz.compare import compare, magnitude
from singa_backend.errors import SonnxError
from singa_backend.ir.declaration import declarations, has_trait
from singa_backend.plans.bodies import KEEPING
from singa_backend.plans.trace import bodies as traced
from singa_backend.proto.schemas import LAX, MICROSOFT, load_domain

load_domain(MICROSOFT)

SEED, DRAWN = 29, 5
BODIES = sorted(
    key
    for key, versions in declarations.items()
    if key[0] in (MICROSOFT, LAX) and versions[1].decomposition_rule is not None and not has_trait(*key, "random")
)
RANDOM = np.random.default_rng(0)


def answer(rep: Any, feeds: Any) -> Any:
    """The outputs of a run, or the type, the code and the text of its error."""
    try:
        return rep.run(feeds)
    except SonnxError as error:
        return type(error), error.code, str(error)


def is_error(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], type)


def whole(profile: Any) -> list[Any]:
    """The steps that the definition of a node computes, not that of an operator of its body."""
    return [s for s in profile.steps if s.kernel == "definition" and not any("of the body" in n for n in s.notes)]


# --- every declaration with a body ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("domain", "name"), BODIES, ids=[n for _, n in BODIES])
@pytest.mark.parametrize("odd", [False, True], ids=["drawn", "not finite"])
def test_the_plan_of_drawn_nodes_returns_what_the_definition_does(domain: str, name: str, odd: bool) -> None:
    for index in range(DRAWN):
        case = generate.draw(SEED, index, f"^{generate.shown_domain(domain)}:{name}-1$")
        if case is None:
            continue
        plan = next(witnesses.plans(case))
        feeds = {k: disturbed(v, index) if odd else v for k, v in plan.feeds.items()}
        model = onnx.load_from_string(plan.model)
        try:
            defined, planned = (SingaBackend.prepare(model, optimize=level) for level in (0, 2))
        except SonnxError:  # an opset that lacks what follows the drawn node
            continue
        expected = answer(defined, feeds)
        for _ in range(2):
            found = answer(planned, feeds)
            if is_error(expected) or is_error(found):
                assert found == expected, case.describe()
                continue
            names = [o.name for o in model.graph.output]
            there, here = (plan.decode(dict(zip(names, values, strict=True))) for values in (expected, found))
            rule = tolerances.rule(domain, name)
            result = compare(there, here, rule, magnitude(list(case.inputs.values()), rule.power))
            assert not result.why or name == "MatMulNBits", f"{case.describe()}: {result.why}"  # its kernel rounds activations


def disturbed(value: Any, index: int) -> Any:
    """A value with a NaN or an infinity, if it is of floats."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not value.size:
        return value
    made = value.copy()
    made.reshape(-1)[index % made.size] = (np.nan, np.inf, -np.inf)[index % 3]
    return made


# --- which steps compute ----------------------------------------------------------------------------------------------


def model(text: str, inputs: str, outputs: str = "float[?,?,?] y") -> Any:
    head = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
    return parser.parse_model(f"{head} g ({inputs}) => ({outputs.replace('?', 'N')}) {{ {text} }}")


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def ints(high: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return RANDOM.integers(0, high, shape).astype(dtype)


ATTENTION = model(
    "y = com.microsoft.Attention<num_heads = 4>(x, w, b, m)",
    "float[B,S,32] x, float[32,96] w, float[96] b, int32[B,S] m",
)
EMBED = model(
    "y, i, s = com.microsoft.EmbedLayerNormalization(ids, seg, words, places, segments, g, b, m)",
    "int32[B,S] ids, int32[B,S] seg, float[40,32] words, float[9,32] places, float[2,32] segments, float[32] g, float[32] b, "
    "int32[B,S] m",
    "float[B,S,32] y, int32[B] i, float[B,S,32] s",
)
ROTARY = model(
    "y = com.microsoft.RotaryEmbedding(x, p, c, s)", "float[B,4,S,16] x, int64[1] p, float[20,8] c, float[20,8] s",
    "float[B,4,S,16] y",
)  # fmt: skip
TABLE = (floats(20, 8), floats(20, 8))
BYTES = (np.float32(0.1), np.uint8(120))

KINDS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "Attention": (ATTENTION, (floats(2, 6, 32), floats(32, 96), floats(96), np.ones((2, 6), np.int32))),
    "MultiHeadAttention": (
        model("y = com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v, , , b)",
              "float[B,S,32] q, float[B,T,32] k, float[B,T,32] v, float[B,1,S,T] b"),
        (floats(2, 6, 32), floats(2, 8, 32), floats(2, 8, 32), floats(2, 1, 6, 8)),
    ),
    "EmbedLayerNormalization": (
        EMBED,
        (ints(40, 2, 6, dtype=np.int32), ints(2, 2, 6, dtype=np.int32), floats(40, 32), floats(9, 32), floats(2, 32), floats(32),
         floats(32), np.ones((2, 6), np.int32)),
    ),
    "RotaryEmbedding": (ROTARY, (floats(2, 4, 6, 16), np.array([3]), *TABLE)),
    "RotaryEmbedding of all positions": (
        model("y = com.microsoft.RotaryEmbedding(x, p, c, s)", "float[B,4,S,16] x, int64[B,S] p, float[20,8] c, float[20,8] s",
              "float[B,4,S,16] y"),
        (floats(2, 4, 6, 16), ints(20, 2, 6), *TABLE),
    ),
    "FusedMatMul": (
        model("y = com.microsoft.FusedMatMul<alpha = 0.5, transB = 1>(a, b)", "float[M,K] a, float[N,K] b", "float[M,N] y"),
        (floats(32, 48), floats(40, 48)),
    ),
    "FusedGemm": (
        model('y = com.microsoft.FusedGemm<activation = "Relu">(a, b, c)', "float[M,K] a, float[K,N] b, float[N] c",
              "float[M,N] y"),
        (floats(32, 48), floats(48, 40), floats(40)),
    ),
    "FusedConv": (
        model('y = com.microsoft.FusedConv<activation = "Relu">(x, w, b)', "float[1,3,8,8] x, float[4,3,3,3] w, float[4] b",
              "float[1,4,6,6] y"),
        (floats(1, 3, 8, 8), floats(4, 3, 3, 3), floats(4)),
    ),
    "QLinearAdd": (
        model("y = com.microsoft.QLinearAdd(a, s, z, b, s, z, s, z)", "uint8[4,64] a, uint8[4,64] b, float s, uint8 z",
              "uint8[4,64] y"),
        (ints(256, 4, 64, dtype=np.uint8), ints(256, 4, 64, dtype=np.uint8), *BYTES),
    ),
    "QAttention": (
        model("y = com.microsoft.QAttention<num_heads = 4>(x, w, b, s, s, , z, z)",
              "uint8[B,S,32] x, uint8[32,96] w, float[96] b, float s, uint8 z"),
        (ints(256, 2, 6, 32, dtype=np.uint8), ints(256, 32, 96, dtype=np.uint8), floats(96), *BYTES),
    ),
    "SkipGroupNorm": (
        model("y, t = com.microsoft.SkipGroupNorm<groups = 4, activation = 1>(x, g, b, s)",
              "float[1,4,4,32] x, float[32] g, float[32] b, float[1,4,4,32] s", "float[1,4,4,32] y, float[1,4,4,32] t"),
        (floats(1, 4, 4, 32), floats(32), floats(32), floats(1, 4, 4, 32)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_compute(kind: str) -> None:
    proto, feeds = KINDS[kind]
    expected = SingaBackend.run_model(proto, list(feeds), optimize=0)
    rep = SingaBackend.prepare(proto)
    for _ in range(2):
        for a, b in zip(rep.run(list(feeds)), expected, strict=True):
            assert a.dtype == b.dtype and np.allclose(a, b, rtol=1e-4, atol=1 if a.dtype.kind in "iu" else 1e-4)
    profile = rep.profile(list(feeds))
    assert not whole(profile) and {n.operator for n in profile.nodes} == {kind.split()[0]}, [s.notes for s in profile.steps]


def test_the_body_follows_other_shapes() -> None:
    proto, (_, w, b, _) = KINDS["Attention"]
    rep = SingaBackend.prepare(proto)
    for length in (6, 3, 6, 9, 1, 9):
        feeds = [floats(2, length, 32), w, b, np.ones((2, length), np.int32)]
        expected = SingaBackend.run_model(proto, feeds, optimize=0)[0]
        for _ in range(2):
            assert np.allclose(rep.run(feeds)[0], expected, atol=1e-4)


# --- what the definition refuses --------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[[list[Any]], list[Any]]]] = {
    "a bias of one query": ("MultiHeadAttention", lambda f: [*f[:3], f[3][:, :, :1]]),
    "a scale of one value": ("EmbedLayerNormalization", lambda f: [*f[:5], f[5][:1], *f[6:]]),
    "a mask of one key": ("Attention", lambda f: [*f[:3], f[3][:, :1]]),
    "a negative word": ("EmbedLayerNormalization", lambda f: [f[0] - 40, *f[1:]]),
    "a word out of range": ("EmbedLayerNormalization", lambda f: [f[0] + 40, *f[1:]]),
    "a segment out of range": ("EmbedLayerNormalization", lambda f: [f[0], f[1] + 2, *f[2:]]),
    "a position out of range": ("RotaryEmbedding", lambda f: [f[0], np.array([15]), *f[2:]]),
    "a negative position": ("RotaryEmbedding", lambda f: [f[0], np.array([-1]), *f[2:]]),
    "a position before the first": ("RotaryEmbedding of all positions", lambda f: [f[0], f[1] - 20, *f[2:]]),
}


@pytest.mark.parametrize("after", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_raise_the_error_of_the_definition(what: str, after: bool) -> None:
    kind, spoil = WRONG[what]
    proto, feeds = KINDS[kind]
    proto = copy.deepcopy(proto)
    for value in proto.graph.input:  # any shape is let through to the operator
        for i, d in enumerate(value.type.tensor_type.shape.dim):
            d.dim_param = f"{value.name}{i}"
    wrong = spoil(list(feeds))
    expected = answer(SingaBackend.prepare(proto, optimize=0), wrong)
    rep = SingaBackend.prepare(proto)
    good = rep.run(list(feeds)) if after else None
    for _ in range(2):
        assert answer(rep, wrong) == expected
    assert expected[:2] == (OperatorError, "SX404" if " of one " in what else "SX401")
    if good is not None:
        assert all(np.array_equal(a, b) for a, b in zip(rep.run(list(feeds)), good, strict=True))


def test_a_sequence_longer_than_the_table_of_positions_is_refused() -> None:
    proto, feeds = KINDS["EmbedLayerNormalization"]
    long = [np.zeros((2, 10), np.int32), np.zeros((2, 10), np.int32), *feeds[2:7], np.ones((2, 10), np.int32)]
    with pytest.raises(OperatorError, match="at most 9 positions") as refused:
        SingaBackend.prepare(proto).run(long)
    assert refused.value.code == "SX401"


def test_what_depends_on_values_stays_with_the_definition() -> None:
    proto = model("y = com.microsoft.Trilu(x, k)", "float[4,4] x, int64 k", "float[4,4] y")
    rep, x = SingaBackend.prepare(proto), floats(4, 4)
    for k in (0, 1, -1, 0):
        assert np.array_equal(rep.run([x, np.int64(k)])[0], np.triu(x, k))
    (step,) = whole(rep.profile([x, np.int64(1)]))
    assert step.notes == (traced.ON_VALUES,)


def test_narrow_floats_stay_with_the_definition() -> None:
    x, w = floats(8, 16).astype(np.float16), floats(16, 8).astype(np.float16)
    proto = model("y = com.microsoft.FusedMatMul(a, b)", "float16[8,16] a, float16[16,8] b", "float16[8,8] y")
    rep = SingaBackend.prepare(proto)
    assert np.array_equal(rep.run([x, w])[0], SingaBackend.run_model(proto, [x, w], optimize=0)[0])
    (step,) = whole(rep.profile([x, w]))
    assert step.notes == (traced.ROUNDS,)


def test_packed_weights_stay_packed() -> None:
    kept = [name for domain, name in BODIES if KEEPING & declarations[domain, name][1].traits]
    assert {"MatMulNBits", "MatMulBnb4", "QMoE", "BiasDropout"} <= set(kept) and "GatherBlockQuantized" not in kept


# --- bodies that do not compute what the definition does ----------------------------------------------------------------


def _refuse(op: Any, a: Any, b: Any) -> Any:
    raise UnsupportedModel("it has no body", code="SX202")


BROKEN: dict[str, Callable[..., Any]] = {
    "fails": lambda op, a, b: op.Add(a, op.Gather(b, [7], axis=0)),
    "returns another shape": lambda op, a, b: op.Concat(a, b, axis=0),
    "returns another dtype": lambda op, a, b: op.Cast(op.Add(a, b), to=11),
    "is refused": _refuse,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_wrong_body_is_not_used(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declaration = declarations[MICROSOFT, "CDist"][1]
    a, b = [i.name for i in declaration.inputs]
    monkeypatch.setattr(declaration, "decomposition_rule", lambda op, known: BROKEN[how](op, known[a], known[b]))
    proto = model("s = Add(a, a) t = com.microsoft.CDist(s, b) y = Add(t, s)", "float[4,4] a, float[4,4] b", "float[4,4] y")
    feeds = [floats(4, 4), floats(4, 4)]
    expected = SingaBackend.run_model(proto, feeds, optimize=0)[0]
    rep = SingaBackend.prepare(proto)
    for _ in range(3):
        assert np.allclose(rep.run(feeds)[0], expected, atol=1e-5)
    (step,) = whole(rep.profile(feeds))
    assert step.notes[-1] == (traced.NO_BODY if how == "is refused" else traced.UNLIKE)


def test_a_call_that_kernels_decline_is_computed_by_its_body() -> None:
    """The kernel of CDist needs constant points."""
    proto = model("s = Add(a, a) t = com.microsoft.CDist(s, b) y = Add(t, s)", "float[4,4] a, float[4,4] b", "float[4,4] y")
    feeds = [floats(4, 4), floats(4, 4)]
    expected = SingaBackend.run_model(proto, feeds, optimize=0)[0]
    rep = SingaBackend.prepare(proto)
    for _ in range(3):
        assert np.allclose(rep.run(feeds)[0], expected, atol=1e-5)
    assert whole(rep.profile(feeds)) == []


def test_a_body_counts_as_one_node() -> None:
    proto, feeds = KINDS["Attention"]
    limits = Limits(executions=1)
    rep = SingaBackend.prepare(proto, limits=limits)
    for _ in range(3):
        rep.run(list(feeds))


def test_a_plan_with_a_past_opens_for_longer_ones() -> None:
    proto = model(
        "y, p = com.microsoft.Attention<num_heads = 4, unidirectional = 1>(x, w, b, , past)",
        "float[1,1,32] x, float[32,96] w, float[96] b, float[2,1,4,P,8] past", "float[1,1,32] y, float[2,1,4,T,8] p",
    )  # fmt: skip
    rep, defined = SingaBackend.prepare(proto), SingaBackend.prepare(proto, optimize=0)
    w, b, past = floats(32, 96), floats(96), floats(2, 1, 4, 3, 8)
    for _ in range(8):
        x = floats(1, 1, 32)
        found, expected = (r.run([x, w, b, past]) for r in (rep, defined))
        assert all(np.allclose(f, e, atol=1e-4) for f, e in zip(found, expected, strict=True))
        past = np.asarray(found[1])
