"""Bits of deterministic nets and of their training: MLP, CNN, transformer, recurrent layers.

python -m tests.helpers.deterministic_nets      # prints a digest for each as JSON; other processors must print the same
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser
from tests.helpers.plan_checks import kernels_used

from singa import autograd, opt, sonnx, tensor
from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.kernels.table import Options

F = np.float32
Net = tuple[onnx.ModelProto, list[np.ndarray]]

_RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    """Numbers of a magnitude that keeps that of a layer; no function of NumPy makes them, whose last bits differ by processor."""
    drawn = _RNG.integers(-1000, 1000, shape) / F(1000)
    return (drawn * F(2.0 ** -np.floor(np.log2(np.prod(shape[1:], dtype=float) + 1) / 2))).astype(F)


def model(body: str, inputs: str, outputs: str, initializers: dict[str, np.ndarray], opset: int = 20) -> onnx.ModelProto:
    """A model from its text."""
    made = parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g ({inputs}) => ({outputs}) {{ {body} }}')
    made.graph.initializer.extend(numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in initializers.items())
    return made


def mlp() -> Net:
    body = """h = Gemm<transB = 1>(x, a, b)
        r = Relu(h)
        i = Gemm(r, c, d)
        g = Gelu(i)
        y = Gemm<alpha = 0.5>(g, e, f)
        z = Softmax(y)"""
    held = {
        "a": weights(64, 30),
        "b": weights(64),
        "c": weights(64, 70),
        "d": weights(70),
        "e": weights(70, 10),
        "f": weights(10),
    }
    return model(body, "float[5, 30] x", "float[5, 10] z", held), [weights(5, 30)]


def cnn() -> Net:
    body = """c1 = Conv<pads = [3, 3, 3, 3], strides = [2, 2]>(x, w1, b1)
        n1 = BatchNormalization(c1, s1, t1, m1, v1)
        r1 = Relu(n1)
        p1 = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(r1)
        c2 = Conv<pads = [1, 1, 1, 1], group = 16>(p1, w2)
        r2 = Clip(c2, low, high)
        c3 = Conv(r2, w3, b3)
        g3 = Sigmoid(c3)
        s3 = Mul(c3, g3)
        a3 = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(s3)
        t3 = ConvTranspose<strides = [2, 2]>(a3, w4)
        c4 = Conv<group = 2>(t3, w5)
        q4 = GlobalAveragePool(c4)
        f4 = Flatten(q4)
        y = Gemm<transB = 1>(f4, w6, b6)"""
    held = {
        "w1": weights(16, 3, 7, 7), "b1": weights(16), "s1": weights(16), "t1": weights(16), "m1": weights(16),
        "v1": abs(weights(16)) + F(0.5), "w2": weights(16, 1, 3, 3), "low": np.zeros((), F), "high": np.full((), 6, F),
        "w3": weights(24, 16, 1, 1), "b3": weights(24), "w4": weights(24, 12, 2, 2), "w5": weights(10, 6, 2, 2),
        "w6": weights(7, 10), "b6": weights(7),
    }  # fmt: skip
    return model(body, "float[2, 3, 33, 35] x", "float[2, 7] y", held), [weights(2, 3, 33, 35)]


def transformer() -> Net:
    body = """q = MatMul(x, wq)
        k = MatMul(x, wk)
        v = MatMul(x, wv)
        q1 = Reshape(q, split)
        k1 = Reshape(k, split)
        v1 = Reshape(v, split)
        q2 = Transpose<perm = [0, 2, 1, 3]>(q1)
        k2 = Transpose<perm = [0, 2, 3, 1]>(k1)
        v2 = Transpose<perm = [0, 2, 1, 3]>(v1)
        s = MatMul(q2, k2)
        s1 = Mul(s, scale)
        p = Softmax(s1)
        o = MatMul(p, v2)
        o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, joined)
        o3 = MatMul(o2, wo)
        h = Add(x, o3)
        n = LayerNormalization(h, g, b)
        f1 = MatMul(n, w1)
        f2 = Add(f1, b1)
        f3 = Gelu(f2)
        f4 = MatMul(f3, w2)
        r = Add(h, f4)
        y = LayerNormalization(r, g, b)"""
    held = {w: weights(48, 48) for w in ("wq", "wk", "wv", "wo")}
    held |= {"split": np.array([0, 0, 4, 12]), "joined": np.array([0, 0, 48]), "scale": np.full((), 0.25, F)}
    held |= {"g": weights(48), "b": weights(48), "w1": weights(48, 192), "b1": weights(192), "w2": weights(192, 48)}
    return model(body, "float[2, 11, 48] x", "float[2, 11, 48] y", held), [weights(2, 11, 48)]


def recurrent() -> Net:
    body = """y, h, c = LSTM<hidden_size = 20, direction = "bidirectional">(x, w1, r1, b1)
        t = Transpose<perm = [0, 2, 1, 3]>(y)
        u = Reshape(t, joined)
        z, n = GRU<hidden_size = 24, linear_before_reset = 1>(u, w2, r2, b2)
        v = Squeeze(n)"""
    held = {
        "w1": weights(2, 80, 17), "r1": weights(2, 80, 20), "b1": weights(2, 160), "joined": np.array([0, 0, 40]),
        "w2": weights(1, 72, 40), "r2": weights(1, 72, 24), "b2": weights(1, 144),
    }  # fmt: skip
    return model(body, "float[13, 3, 17] x", "float[3, 24] v", held), [weights(13, 3, 17)]


NETS: dict[str, Callable[[], Net]] = {f.__name__: f for f in (mlp, cnn, transformer, recurrent)}


def net(name: str) -> Net:
    """A net, the same in each call."""
    global _RNG
    _RNG = np.random.default_rng(list(NETS).index(name))
    return NETS[name]()


def digest(arrays: list[np.ndarray]) -> str:
    """The digest of the bits of arrays."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def inference(name: str, threads: int = 1) -> dict[str, Any]:
    """The digest of what a net returns, and the kernels that it has used."""
    made, feeds = net(name)
    rep = SingaBackend.prepare(made, deterministic=True)
    if threads > 1:  # which the option refuses
        rep = SingaRep(rep.graph, rep.device, options=Options(threads, deterministic=True))
    found = {digest([np.asarray(y) for y in rep.run(feeds)]) for _ in range(2)}
    assert len(found) == 1, "runs differ"
    return {"digest": found.pop(), "steps": kernels_used(rep)}


class _Trained(sonnx.SONNXModel):
    def train_one_batch(self, x: tensor.Tensor, t: tensor.Tensor) -> tuple[tensor.Tensor, tensor.Tensor]:
        y = self.forward(x)[0]
        loss = autograd.mse_loss(y, t)
        self.rule(loss)
        return y, loss


def training(name: str, steps: int = 3) -> dict[str, Any]:
    """The digest of the losses and the parameters after some steps."""
    made, (x,) = net(name)
    m = _Trained(made)
    m.rule = opt.SGD(lr=0.05, momentum=0.9)
    shape = SingaBackend.prepare(made, deterministic=True).run([x])[0].shape
    batch = [tensor.Tensor(data=a, requires_grad=False) for a in (x, np.full(shape, 0.25, F))]
    m.train()
    m.graph(True, deterministic=True)
    losses = [np.asarray(m(*batch)[1].data) for _ in range(steps)]
    assert losses[-1] < losses[0]
    return {"digest": digest([*losses, *(np.asarray(p.data) for p in m.get_params().values())])}


def computed(threads: int = 1) -> dict[str, dict[str, Any]]:
    """What all nets return, and their training."""
    found = {name: inference(name, threads) for name in NETS}
    return found | {f"training of {name}": training(name) for name in NETS}


if __name__ == "__main__":
    print(json.dumps(computed()))
