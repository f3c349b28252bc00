"""Every public function of tensors, operators and start values has the results and gradients of the CPU on another device."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.helpers import other_device

from singa import autograd, initializer, tensor
from singa._core import tape
from singa._core.tensor import Tensor
from singa.device import Device, default_device

pytestmark = other_device.MARKS

RNG = np.random.default_rng(0)
ARRAYS = {
    "x": RNG.uniform(1.1, 1.9, (3, 4)),  # in the domain of acosh; `u` is in that of acos
    "y": RNG.standard_normal((3, 4)),
    "u": RNG.uniform(-0.9, 0.9, (3, 4)),
    "v": RNG.standard_normal(4),
    "c": RNG.standard_normal(3),
    "q": RNG.standard_normal((3, 3)),
    "im": RNG.standard_normal((2, 4, 4, 6)),
    "w": RNG.standard_normal((3, 4, 3, 3)) * 0.2,
    "seq": RNG.standard_normal((5, 2, 24)),
    "p": RNG.dirichlet(np.ones(4), 3),
}
CALLS = """
tensor.abs(y)
tensor.add(x, y)
tensor.add(x, 2)
tensor.add(x, y, z)
tensor.add_column(0.5, c, 2.0, z)
tensor.add_row(0.5, v, 2.0, z)
tensor.average(x)
tensor.average(x, 0)
tensor.axpy(0.5, x, z)
t = x.clone(); tensor.bernoulli(0.5, t); t
tensor.ceil(y)
tensor.concatenate([x, y], 1)
tensor.contiguous(x.transpose())
tensor.copy_data_to_from(z, x, 5, 2, 1); z
tensor.copy_from_numpy(z._data, np.ones((3, 4), np.float32)); z
tensor.div(x, y)
tensor.einsum("ij,kj->ik", x, y)
tensor.eltwise_mult(x, y)
tensor.eltwise_mult(x, y, z)
tensor.eq(x, 1.5)
tensor.exp(y)
tensor.from_numpy(np.ones(3, np.float32), dev)
tensor.from_raw_tensor(x.raw)
tensor.from_raw_tensors([x.raw, y.raw])
tensor.gaussian(1.0, 2.0, z); z
tensor.ge(x, 1.5)
tensor.gt(x, y)
tensor.le(x, 1.5)
tensor.log(x)
tensor.lt(x, y)
tensor.mult(x, tensor.transpose(y))
tensor.mult(x, v)
tensor.mult(x, tensor.transpose(y), q, 0.5, 2.0)
tensor.ones((2, 3), dev)
tensor.ones_like(x)
tensor.pow(x, 2.0)
tensor.pow(x, y)
tensor.pow(x, 2.0, z)
tensor.random((2, 3), dev)
tensor.repeat(x, 2, 1)
tensor.repeat(x, [1, 0, 2], 0)
tensor.reshape(x, (2, 6))
tensor.sigmoid(y)
tensor.sign(y)
tensor.softmax(y)
tensor.softmax(y, z)
tensor.sqrt(x)
tensor.square(y)
tensor.sub(x, y)
tensor.sum(x)
tensor.sum(x, 1)
tensor.sum_columns(x)
tensor.sum_rows(x)
tensor.tanh(y)
tensor.tensordot(x, y, axes=((0, 1), (0, 1)))
tensor.tensordot(x, tensor.transpose(y), axes=1)
tensor.to_host(x)
tensor.to_numpy(x)
tensor.transpose(x)
tensor.transpose(im, (0, 2, 3, 1))
tensor.uniform(-1.0, 1.0, z); z
tensor.zeros((2, 3), dev)
tensor.zeros_like(x)
x.T()
z.add_column(c); z
z.add_row(v); z
y.argmax(1)
x.as_type(tensor.float16)
x.as_type(np.int32)
z.bernoulli(0.5)
x.clone()
x.transpose().contiguous()
x.copy()
z.copy_data(y); z
z.copy_from(y); z
z.copy_from_numpy(np.full((3, 4), 2, np.float32)); z
x.deepcopy()
x.detach()
z.div_column(c); z
z.div_row(v); z
z.gaussian(0.0, 1.0)
x.is_dummy()
x.is_empty()
x.transpose().is_transpose()
tensor.sum(x.reshape((12,)), 0).item()
x.l1()
x.l2()
y.max(1)
x.mean(0)
x.memsize()
y.min(0)
z.mult_column(c); z
z.mult_row(v); z
x.ndim()
x.numpy()
x.repeat(2, 0)
z.reset_like(y); z
x.reshape((4, 3))
z.set_value(3.0); z
x.size()
x.sum(1)
z.to_device(default_device); z.to_device(dev); z
t = x.clone(); t.to_host(); t.to_device(dev); t
z.to_type(tensor.float16); z
z.transpose((1, 0))
z.uniform(0.0, 1.0)
abs(y)
x + y
x + 1
1 + x
x - y
2 - x
x * y
2 * x
x / y
1 / x
x // 0.5
x ** 2
x @ tensor.transpose(y)
-x
x < y
x <= y
x > y
x >= y
x == y
z += x; z
z -= x; z
z *= x; z
z /= x; z
x[1]
x[1:, ::2]
x[-1, 2]
bool(tensor.sum(x.reshape((12,)), 0))
float(tensor.sum(x.reshape((12,)), 0))
int(tensor.sum(x.reshape((12,)), 0))
len(x)
autograd.relu(y)
autograd.sigmoid(y)
autograd.tanh(y)
autograd.sin(y)
autograd.sinh(y)
autograd.cos(y)
autograd.cosh(y)
autograd.tan(u)
autograd.asin(u)
autograd.asinh(y)
autograd.acos(u)
autograd.acosh(x)
autograd.atan(y)
autograd.atanh(u)
autograd.abs(y)
autograd.exp(y)
autograd.log(x)
autograd.sqrt(x)
autograd.sign(y)
autograd.ceil(y)
autograd.floor(y)
autograd.round(y)
autograd.rounde(y)
autograd.reciprocal(x)
autograd.negative(y)
autograd.erf(y)
autograd.softplus(y)
autograd.softsign(y)
autograd.identity(y)
autograd.elu(y, 0.5)
autograd.selu(y)
autograd.leakyrelu(y, 0.3)
autograd.hardsigmoid(y)
autograd.prelu(y, x)
autograd.clip(y, -0.5, 0.5)
autograd.clip(y, min=0.0)
autograd.softmax(y)
autograd.softmax(im, 2)
autograd.add(x, v)
autograd.sub(x, y)
autograd.mul(x, v)
autograd.div(y, x)
autograd.pow(x, y)
autograd.less(x, y)
autograd.greater(x, y)
autograd.equal(x, y)
autograd._and(autograd.less(x, u), autograd.less(y, u))
autograd._or(autograd.less(x, u), autograd.less(y, u))
autograd._xor(autograd.less(x, u), autograd.less(y, u))
autograd._not(autograd.less(y, u))
autograd.not_equal(x, y)
autograd.matmul(x, tensor.transpose(y))
autograd.nonzero(autograd.relu(y))
autograd.shape(x)
autograd.sum(x, y, u)
autograd.mean(x, y)
autograd.max(x, y)
autograd.min(x, y)
autograd.add_all(x, y, u)
autograd.gemm(x, y, q, 0.5, 2.0, 0, 1)
autograd.add_bias(x, c, 1)
autograd.add_bias(x, v, 0)
autograd.bias_add(im, tensor.from_numpy(np.ones(4, np.float32), dev))
autograd.cossim(x, y)
autograd.reshape(x, [2, -1])
autograd.flatten(im)
autograd.transpose(im, [0, 2, 3, 1])
autograd.squeeze(tensor.reshape(x, (1, 3, 4)), 0)
autograd.unsqueeze(x, [0, 2])
autograd.cat([x, y], 1)
autograd._cat(x, y, axis=1)
autograd.split(x, 1, [1, 3])
autograd.split(x, 1, num_output=2)
autograd.slice(x, [1], [4], [1], [2])
autograd.tile(x, [2, 1])
autograd.expand(x, [2, 3, 4])
autograd.pad(x, "reflect", [1, 0, 1, 2])
autograd.pad(x, "constant", [1, 0, 1, 2], 0.5)
autograd.upsample(im, "nearest", [1, 1, 2, 3])
autograd.depth_to_space(im, 2)
autograd.space_to_depth(im, 2)
autograd.gather(x, 1, [0, -1, 0])
autograd.scatter_elements(x, tensor.from_numpy(np.array([[0, 2, 1, 0]]), dev), tensor.reshape(v, (1, 4)), 0)
autograd.where(x, y, y > 0)
autograd.onehot(-1, tensor.from_numpy(np.array([0, 2], np.int64), dev), 3)
autograd.embedding(tensor.from_numpy(np.array([2, 0, 2], np.int64), dev), x)
autograd.cast(x, tensor.float16)
autograd.constant_of_shape(tensor.from_numpy(np.array([2, 3], np.int64), dev), 1.5)
autograd.reduce_sum(x, [1], 0)
autograd.reduce_mean(x, [0])
autograd.globalaveragepool(im)
autograd.dropout(x, 3, 0.5)
autograd.fused_bias_add_scale_mask_softmax_dropout(y, v, y > 5, p=0.0)
autograd.square(y)
autograd.rsqrt(x)
autograd.quick_gelu(y)
autograd.squared_difference(x, y)
autograd.floor_mod(y, x)
autograd.narrow(x, 1, 1, 2)
autograd.var(x, [1])
autograd.std(x, [1], False)
autograd.adaptive_avg_pool(im, (2, 3))
autograd.adaptive_max_pool(im, 2)
autograd.fused_self_attention_query_mul_key_and_value(seq, 4)
autograd.conv2d(autograd.ConvHandle((1, 1), (1, 1, 1, 1)), im, w)
autograd.pooling_2d(autograd.PoolingHandle((2, 2), (2, 2)), im)
autograd.pooling_2d(autograd.PoolingHandle((2, 2), (1, 1), is_max=False), im)
autograd.batchnorm_2d(autograd.BatchNormHandle(), im, v, v, s.clone(), s.clone())
t = s.clone(); r = s.clone(); autograd.batchnorm_2d(autograd.BatchNormHandle(), im, v, v, t, r); [t, r]
autograd.softmax_cross_entropy(y, p)
autograd.next_token_cross_entropy(tensor.reshape(y, (1, 3, 4)), tensor.from_numpy(np.array([[2, 0, 2]], np.int64), dev))
autograd.mse_loss(x, y)
autograd.cross_entropy(autograd.softmax(y), p)
autograd.binary_cross_entropy(autograd.sigmoid(y), p)
autograd.ranking_loss(x, y, 0.5)
autograd.ctensor2numpy(x._data)
list(autograd.gradients(autograd.mse_loss(x, y)).values())
list(autograd.backward(autograd.mse_loss(x, y)))[0][1]
initializer.eye(z)
initializer.gaussian(z, 3, 4)
initializer.glorot(z)
initializer.glorot_normal(z)
initializer.glorot_uniform(z)
initializer.he_normal(z)
initializer.he_uniform(z)
initializer.lecun_normal(z)
initializer.lecun_uniform(z)
initializer.msra(z)
initializer.orthogonal(z)
initializer.xavier(z)
"""
ROWS = [line for line in CALLS.splitlines() if line]
ELSEWHERE = {"to_host(x)", "to_numpy", "ctensor2numpy", "numpy()"}
"""Calls whose results are on the host."""
NO_ARRAYS = {
    "tensor.code_of", "tensor.dtype_of", "tensor.product", "tensor.sizeof", "autograd.axis_helper", "autograd.back_broadcast",
    "autograd.infer_dependency", "tensor.from_dlpack",
}  # fmt: skip
"""Functions of dtypes, shapes and NumPy's arrays; STRICT's arrays have no DLPack (test_cuda_arrays.py)."""


def evaluated(row: str, device: Device) -> tuple[Any, list[Any]]:
    """The value of the last expression of a row, and the gradients of the leaves that it has."""
    device.SetRandSeed(3)
    leaves = {n: Tensor(data=a.astype(np.float32), device=device, stores_grad=True, name=n) for n, a in ARRAYS.items()}
    z = Tensor(data=np.arange(12, dtype=np.float32).reshape(3, 4) + 1, device=device, requires_grad=False)
    s = Tensor(data=np.linspace(0.5, 1.5, 4, dtype=np.float32), device=device, requires_grad=False)
    names = {**leaves, "z": z, "s": s, "dev": device, "default_device": default_device, "np": np}
    names |= {"tensor": tensor, "autograd": autograd, "initializer": initializer, "Tensor": Tensor}
    *before, last = row.split("; ")
    exec("\n".join(before), names)
    value = eval(last, names)
    if isinstance(value, Tensor) and value.creator is not None and value.requires_grad and value._data.dtype == np.float32:
        loss = autograd.reduce_sum(autograd.mul(value, autograd.sin(value)), keepdims=0)
        grads = {t.name: g for t, g in autograd.backward(loss)}
        return value, [grads[n] for n in sorted(grads)]
    return value, []


def flat(value: Any) -> list[Any]:
    return [e for v in value for e in flat(v)] if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("row", ROWS)
def test_it_computes_on_another_device(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "training", True)
    device = Device(other_device.NAME)
    (want, want_grads), (got, got_grads) = evaluated(row, default_device), evaluated(row, device)
    assert len(got_grads) == len(want_grads) and type(got) is type(want)
    for a, b in zip([*flat(got), *got_grads], [*flat(want), *want_grads], strict=True):
        if isinstance(a, Tensor):
            place = default_device if any(e in row for e in ELSEWHERE) else device
            assert str(a.device.backend) == str(place.backend)
            assert place.backend.is_host or place.backend.xp.isarray(a._data)
            assert (a.shape, a._data.dtype) == (b.shape, b._data.dtype)
            a, b = a.numpy(), b.numpy()
        other_device.same(a, b)


def functions(module: ModuleType) -> set[str]:
    short = module.__name__.rpartition(".")[2]
    return {f"{short}.{n}" for n in module.__all__ if inspect.isfunction(getattr(module, n))}


def test_every_function_and_method_has_a_row() -> None:
    named = set(re.findall(r"(?:tensor|autograd|initializer)\.\w+", CALLS))
    assert functions(tensor) | functions(autograd) | functions(initializer) <= named | NO_ARRAYS
    methods = {n for n in dir(Tensor) if not n.startswith("_") and callable(getattr(Tensor, n))}
    assert methods <= set(re.findall(r"\.(\w+)\(", CALLS))
