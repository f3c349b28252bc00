"""RotaryEmbedding against a rotation of complex numbers."""

import ml_dtypes
import numpy as np
import pytest


def turned(x, angle, dim, interleaved):
    """x: batch x heads x sequence x features; angle: batch x sequence x dim / 2."""
    y = x.copy()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle[:, None, :, i])
        y[..., a], y[..., b] = z.real, z.imag
    return y


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("dim", [0, 4])
def test_rotary(check, interleaved, dim):
    rng = np.random.default_rng(dim)
    b, h, s, n = 2, 3, 4, 6
    x = rng.standard_normal((b, h, s, n))
    table = rng.uniform(-9, 9, (10, (dim or n) // 2))
    ids = rng.integers(0, 10, (b, s))
    y = turned(x, table[ids], dim or n, interleaved)
    at = {"opset": 23, "interleaved": interleaved, "rotary_embedding_dim": dim, "rtol": 1e-5, "atol": 1e-6}
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        loose = {} if dtype == np.float32 else {"atol": 5e-2}
        cos, sin = np.cos(table).astype(dtype), np.sin(table).astype(dtype)
        check("RotaryEmbedding", [x.astype(dtype), cos, sin, ids], [y.astype(dtype)], **{**at, **loose})
        check("RotaryEmbedding", [x.astype(dtype), cos[ids], sin[ids]], [y.astype(dtype)], **{**at, **loose})
        flat = np.swapaxes(x, 1, 2).reshape(b, s, h * n).astype(dtype)
        flat_y = np.swapaxes(y, 1, 2).reshape(b, s, h * n).astype(dtype)
        check("RotaryEmbedding", [flat, cos, sin, ids], [flat_y], num_heads=h, **{**at, **loose})


def test_edges(check, fails):
    x = np.ones((1, 1, 2, 4), np.float32)
    cache = np.ones((3, 2), np.float32)
    ids = np.array([[0, 2]])
    check("RotaryEmbedding", [x[:, :, :0], cache, cache, ids[:, :0]], [x[:, :, :0]], opset=23)
    fails("RotaryEmbedding", [x, cache, cache, ids + 1], "index must be in .* got 3", opset=23)
    fails("RotaryEmbedding", [x, cache, cache, ids - 1], "index must be in .* got -1", opset=23)
    fails("RotaryEmbedding", [x[0], cache, cache, ids], "num_heads", opset=23)
    fails("RotaryEmbedding", [x[..., :3], cache, cache, ids], "must be even and at most 3", opset=23)
    fails("RotaryEmbedding", [x, cache[:, :1], cache[:, :1], ids], "the caches must have shape", opset=23)
    fails("RotaryEmbedding", [x, cache, cache], "the caches must have shape", opset=23)
