"""The kernels of Einsum and RotaryEmbedding against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import check, drawn, model_of

from singa_backend.kernels import onednn

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
node = helper.make_node
SIZES = {"a": 6, "b": 2, "c": 7, "d": 8, "h": 3, "i": 5, "j": 9, "k": 4}


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    "equation",
    [
        "ij,jk->ik", "ij,jk->ki", "ji,kj->ik", "ij,jk", "bij,bjk->bik", "bhid,bhjd->bhij", "bhij,bhjd->bihd",
        "bihd,bjhd->bhij",
        "bhij,bjhd->bihd", "bcd,dhk->bchk", "bchk,hkd->bcd", "bcd,hdk->bhck", "abc,cd->abd", "...ij,...jk->...ik",
        "b...d,dk->b...k",
        "bi,bj->bij", "ij,j->i", "i,ij->j", "bik,bjk->kij", "bic,bcj->ijb", "ij,ij->i",
        "ij,ij->ij", "abc,bcd->ad", "i,i->", "ij,kl->ijkl",
    ],
)  # fmt: skip
def test_einsum_of_two(equation: str, constant: bool) -> None:
    terms = equation.partition("->")[0].split(",")
    shapes = [tuple(SIZES.get(c, 10) for c in t.replace("...", "ab")) for t in terms]
    feeds = [drawn(s, x=shapes[0], y=shapes[1]) for s in (1, 2)]
    held = {}
    if constant:
        held = {"y": feeds[0]["y"]}
        feeds = [{"x": f["x"]} for f in feeds]
    used = check(model_of([node("Einsum", ["x", "y"], ["z"], equation=equation)], feeds[0], ["z"], held), feeds)
    assert used[-1].startswith("matmul") != (equation in ("bi,bj->bij", "ij,ij->i", "ij,ij->ij", "i,i->", "ij,kl->ijkl"))


@pytest.mark.parametrize("equation", ["ij->ji", "bhij->bihj", "...ij->...ji", "ij->ij", "ij->i", "ii->i", "ijk->", "ij"])
def test_einsum_of_one(equation: str) -> None:
    shape = tuple(SIZES[c] for c in equation.partition("->")[0].replace("...", "ab"))
    feeds = [drawn(s, x=shape) for s in (1, 2)]
    check(model_of([node("Einsum", ["x"], ["z"], equation=equation)], feeds[0], ["z"]), feeds)


def test_einsum_with_followers_and_views() -> None:
    feeds = [drawn(s, x=(2, 20, 3, 16), y=(2, 30, 3, 16)) for s in (1, 2)]
    nodes = [
        node("Einsum", ["x", "y"], ["s"], equation="bihd,bjhd->bhij"),
        node("Mul", ["s", "f"], ["t"]),
        node("Softmax", ["t"], ["p"]),
        node("Einsum", ["p", "y"], ["z"], equation="bhij,bjhd->bihd"),
    ]
    used = check(model_of(nodes, feeds[0], ["z"], {"f": np.float32(0.25)}), feeds)
    assert [u.split()[0] for u in used] == ["matmul", "numpy.softmax", "matmul"]


def test_einsum_of_three_and_errors() -> None:
    feeds = [drawn(s, x=(3, 4), y=(4, 5), w=(5, 6)) for s in (1, 2)]
    check(model_of([node("Einsum", ["x", "y", "w"], ["z"], equation="ij,jk,kl->il")], feeds[0], ["z"]), feeds)


@pytest.mark.parametrize("dim", [0, 8])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [None, "constant", "input"])
@pytest.mark.parametrize("form", ["flat", "deep", "view"])
@pytest.mark.parametrize("constant", [False, True])
def test_rotary(form: str, positions: Any, interleaved: int, dim: int, constant: bool) -> None:
    batch, heads, length, size = 2, 3, 5, 16
    half = (dim or size) // 2
    caches = (batch, length, half) if positions is None else (11, half)
    shape = {"flat": (batch, length, heads * size), "deep": (batch, heads, length, size), "view": (batch, length, heads, size)}[
        form
    ]
    feeds = [drawn(s, x=shape, cos=caches, sin=caches) for s in (1, 2)]
    names = ["x", "cos", "sin"]
    held: dict[str, Any] = {}
    if positions is not None:
        names.append("p")
        for s, f in enumerate(feeds):
            f["p"] = np.random.default_rng(s).integers(0, 11, (batch, length))
    held = {n: feeds[0][n] for n in (["cos", "sin"] if constant else []) + (["p"] if positions == "constant" else [])}
    feeds = [{n: v for n, v in f.items() if n not in held} for f in feeds]
    given = {"interleaved": interleaved, "rotary_embedding_dim": dim, "num_heads": heads if form == "flat" or dim else 0}
    nodes = [node("RotaryEmbedding", names, ["y"], **given)]
    if form == "view":
        nodes = [node("Transpose", ["x"], ["t"], perm=[0, 2, 1, 3]), node("RotaryEmbedding", ["t", *names[1:]], ["y"], **given)]
    assert check(model_of(nodes, feeds[0], ["y"], held), feeds) == ["numpy.rotary"]


def test_positions_out_of_range_are_errors() -> None:
    from singa_backend import OperatorError
    from singa_backend.backend import SingaBackend, SingaRep
    from singa_backend.kernels.table import Options

    feed = drawn(1, x=(1, 2, 3, 8), cos=(4, 4), sin=(4, 4))
    feed["p"] = np.array([[0, 1, 2]])
    model = model_of([node("RotaryEmbedding", list(feed), ["y"])], feed, ["y"])
    read = SingaBackend.prepare(model)
    rep = SingaRep(read.graph, read.device, options=Options())
    rep.run(list(feed.values()))
    for wrong in (4, -1):
        with pytest.raises(OperatorError):
            rep.run([feed["x"], feed["cos"], feed["sin"], np.array([[0, wrong, 2]])])
    rep.run(list(feed.values()))
