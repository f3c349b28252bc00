"""Adapters of models with loops, branches, few bits, tied weights and open sizes: they train, and the base does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa import autograd, opt, sonnx
from singa.tensor import Tensor
from singa_backend import run_model
from singa_backend.engines.oracle import Oracle

rng = np.random.default_rng(3)


def floats(*shape: int) -> np.ndarray:
    return rng.normal(0, 0.5, shape).astype(np.float32)


def model_of(text: str, **weights: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return model


LOOP = model_of(
    """g (float[N, M, 4] x, int64 n) => (float[N, M, 3] y) {
        h = Loop (n, yes, x) <body = b (int64 i, bool c, float[N, M, 4] a) => (bool d, float[N, M, 4] e) {
            d = Identity(c) p = MatMul(a, w) q = Add(p, b) r = Tanh(q) e = Add(a, r) }>
        y = MatMul(h, v) }""",
    yes=np.array(True), w=floats(4, 4), b=floats(4), v=floats(4, 3),
)  # fmt: skip
SCAN = model_of(
    """g (float[N, T, 4] x) => (float[N, 3] y) {
        s = Transpose <perm = [1, 0, 2]> (x) z = ReduceSum <keepdims = 0> (s, zero)
        h, all = Scan <num_scan_inputs = 1, body = b (float[N, 4] a, float[N, 4] t) => (float[N, 4] e, float[N, 4] f) {
            u = Add(a, t) p = Gemm <transB = 1> (u, w) e = Tanh(p) f = Identity(e) }> (z, s)
        y = MatMul(h, v) }""",
    zero=np.array([0]), w=floats(4, 4), v=floats(4, 3),
)  # fmt: skip
IF = model_of(
    """g (float[N, 4] x, bool c) => (float[N, 3] y) {
        h = If (c) <then_branch = t () => (float[N, 4] p) { p = MatMul(x, w) },
                    else_branch = f () => (float[N, 4] q) { k = MatMul(x, u) q = Relu(k) }>
        y = MatMul(h, v) }""",
    w=floats(4, 4), u=floats(4, 4), v=floats(4, 3),
)  # fmt: skip
TIED = model_of(
    """g (int64[N, T] x) => (float[N, T, 9] y) {
        h = Gather(w, x) k = MatMul(h, m) r = Tanh(k) t = Transpose <perm = [1, 0]> (w) y = MatMul(r, t) }""",
    w=floats(9, 6), m=floats(6, 6),
)  # fmt: skip
NBITS = model_of(
    """g (float[N, 32] x) => (float[N, 3] y) {
        h = com.microsoft.MatMulNBits <K = 32, N = 16, bits = 4, block_size = 16> (x, q, s)
        a = Tanh(h) k = com.microsoft.MatMulBnb4 <K = 16, N = 16, block_size = 16, quant_type = 1> (a, p, absmax)
        b = Tanh(k) d = DequantizeLinear(i, is) l = MatMul(b, d) y = MatMul(l, v) }""",
    q=rng.integers(0, 256, (16, 2, 8)).astype(np.uint8), s=np.abs(floats(32)) / 8, p=rng.integers(0, 256, 128).astype(np.uint8),
    absmax=np.abs(floats(16)), i=rng.integers(-99, 99, (16, 8)).astype(np.int8), **{"is": np.float32(0.01)}, v=floats(8, 3),
)  # fmt: skip

CASES: dict[str, tuple[ModelProto, list[list[Any]], list[str], list[str]]] = {
    "loop": (LOOP, [[floats(2, 3, 4), np.array(3)], [floats(5, 1, 4), np.array(1)]], [], ["w"]),
    "scan": (SCAN, [[floats(2, 3, 4)], [floats(3, 6, 4)]], [], ["w"]),
    "if": (IF, [[floats(4, 4), np.array(True)], [floats(2, 4), np.array(False)]], [], ["w", "u"]),
    "tied": (TIED, [[rng.integers(0, 9, (2, 5))], [rng.integers(0, 9, (3, 1))]], ["w", "m"], ["w", "m"]),
    "few bits": (NBITS, [[floats(6, 32)], [floats(2, 32)]], [], ["q", "p", "i"]),
}
"""A model, two batches of different sizes, the patterns, and the weights that are adapted."""


class Tuned(sonnx.SONNXModel):
    def train_one_batch(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(*batch[:-1])[0]
        loss = autograd.mse_loss(y, batch[-1])
        self.optimizer(loss)
        return y, loss


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tape"])
@pytest.mark.parametrize("case", CASES)
def test_training(case: str, graph: bool, tmp_path: Path) -> None:
    model, batches, target, names = CASES[case]
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    before = path.read_bytes()
    tuned = sonnx.lora(Tuned(str(path)), rank=2, target=target)
    assert list(tuned.adapter().changes) == names
    tuned.set_optimizer(opt.AdamW(lr=0.05))
    tuned.train()
    tuned.graph(graph)
    fed = [[Tensor(data=x, requires_grad=False) for x in batch] for batch in batches]
    targets = [Tensor(data=run_model(model, batch)[0] + 1, requires_grad=False) for batch in batches]
    losses = [[float(tuned(*x, t)[1].data.reshape(-1)[0]) for _ in range(8)] for x, t in zip(fed, targets, strict=True)]
    assert all(found[-1] < found[0] - 0.005 for found in losses)
    assert tuned.not_traceable == ""

    adapter = tuned.adapter()
    assert all(np.abs(c.b).max() > 0 for c in adapter.changes.values()) and not adapter.values
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    states = {**tuned.get_states()}
    assert all(np.array_equal(a, states[n].data) for n, a in stored.items() if n in states)
    assert path.read_bytes() == before

    tuned.eval()
    got = [tuned.forward(*x)[0].data for x in fed]
    forms = [tuned.unmerged()] + ([] if case == "few bits" else [tuned.merged()])
    with Oracle("onnxruntime") as oracle:
        for form in forms:
            onnx.checker.check_model(form)
            for batch, want in zip(batches, got, strict=True):
                feeds = {v.name: x for v, x in zip(form.graph.input, batch, strict=True)}
                assert np.abs(next(iter(oracle.run(form.SerializeToString(), feeds).values())) - want).max() < 1e-5

    other = sonnx.SONNXModel(str(path))
    other.load_adapter(adapter)
    for x, want in zip(fed, got, strict=True):
        np.testing.assert_array_equal(other.forward(*x)[0].data, want)


def test_gradients_of_tied_factors() -> None:
    """Those of A and B are the sums over both uses: finite differences of the loss in float64."""
    text = "g (double[N, 6] x) => (double[N, 6] y) { h = Gemm <transB = 1> (x, w) r = Tanh(h) y = MatMul(r, w) }"
    model = model_of(text, w=rng.normal(size=(5, 6)))
    tuned = sonnx.lora(model, rank=2, target="w")
    x = Tensor(data=rng.normal(size=(3, 6)), requires_grad=False)
    params = {n: p for n, p in tuned.get_params().items() if p.requires_grad}
    for p in params.values():
        p.data = rng.normal(size=p.shape)

    def loss() -> Tensor:
        y = tuned.forward(x)[0]
        return autograd.reduce_sum(autograd.mul(y, y))

    tuned.train()
    found = {p.name: g.data for p, g in autograd.backward(loss())}
    assert found.keys() == params.keys() == {"w.lora_A", "w.lora_B"}
    for name, p in params.items():
        start = np.array(p.data)
        for at in ((0, 0), (1, 1)):
            sides = []
            for step in (1e-6, -1e-6):
                moved = start.copy()
                moved[at] += step
                p.data = moved
                sides.append(float(np.asarray(loss().data).reshape(-1)[0]))
            p.data = start
            assert found[name][at] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-6)
