"""The error function and its complement, written in operations of an array namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # of any namespace

# erf(x) = 1 - exp(-x * p(x)) for 0 <= x, and erfc(x) = exp(-x * x) * q(t) / (x + 3) with t = (x - 3) / (x + 3).  The polynomials,
# lowest power first, minimize the maximum relative error: 4e-9 and 3e-9 (float32), 7e-17 and 7e-18 (float64).
# At or above the bound before each polynomial, erf is 1 and erfc is 0.
ERF = {
    np.float32: (4.0, (
        1.128379172, 0.636619382, 0.1027778308, -0.01915306625, -0.0001603897153, 0.001667018699, -0.0006328303106,
        0.0001176388181, -9.255911292e-06,
    )),
    np.float64: (6.0, (
        1.1283791670955126, 0.6366197723676116, 0.10277260330005952, -0.01912844696305003, -0.00020919523046740508,
        0.0016962105310236327, -0.0005901468176880316, 2.5955221433075416e-05, 6.428997609609923e-05,
        -2.9323472408179907e-05, 2.7957649298677515e-06, 3.564798970816897e-06, -2.4298982167350693e-06,
        8.537837506145426e-07, -1.741296039119686e-07, 8.385611741624913e-09, 7.778072282436206e-09,
        -3.152099362421681e-09, 6.809139387127237e-10, -9.54588589920976e-11, 8.718957192471213e-12,
        -4.753703059609676e-13, 1.179706162506552e-14,
    )),
}  # fmt: skip


ERFC = {
    np.float32: (11.0, (
        1.074006908, -0.8833944972, 0.5902282405, -0.3104657096, 0.1195299774, -0.02684159855, -0.0012314781,
        0.003081950199, -0.0004740216106, -0.0003205091483,
    )),
    np.float64: (28.0, (
        1.0740069070883398, -0.8833944531698835, 0.5902283571040994, -0.3104672619005751, 0.11952776128744148,
        -0.026827234624271855, -0.001212416630723521, 0.003034061998500589, -0.0005483096502871543,
        -0.00027677782494498187, 0.00010756120439412006, 3.0398045662354787e-05, -1.7469383334947886e-05,
        -4.748754796237903e-06, 2.762250596117233e-06, 9.975493446243912e-07, -4.0270097821261456e-07,
        -2.3089715578726004e-07, 4.0727959781593355e-08, 4.7298456095462126e-08, 1.8550521865617685e-09,
        -5.952391901882899e-09, -1.3846146371334817e-09,
    )),
}  # fmt: skip


def erf(xp: Any, x: Array) -> Array:
    """The error function of each element."""
    z, kind = _float(x)
    last, p = ERF[kind]
    a = xp.minimum(xp.abs(z), last)
    return _like(x, xp.copysign(xp.expm1(-a * xp.polynomial(a, p)), z))


def erfc(xp: Any, x: Array) -> Array:
    """The complementary error function of each element."""
    z, kind = _float(x)
    last, q = ERFC[kind]
    a = xp.minimum(xp.abs(z), last)
    r = 1 / (a + 3)
    y = xp.polynomial((a - 3) * r, q) * r * xp.exp(-a * a)
    return _like(x, xp.abs(2 * (z < 0).astype(kind) - y))  # erfc(-x) = 2 - erfc(x)


def with_float(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply an elementwise function of float32 and float64 to an array of any dtype."""
    return _like(x, function(_float(x)[0]))


def _float(x: Array) -> tuple[Array, Any]:
    kind = np.float32 if x.dtype == np.float32 or x.dtype == np.float16 else np.float64
    return x.astype(kind, copy=False), kind


def _like(x: Array, y: Array) -> Array:
    return y.astype(x.dtype, copy=False) if x.dtype.kind == "f" else y


def in_pieces(function: Callable[[Array], Array], x: np.ndarray, size: int = 1 << 13) -> Array:
    """Apply an elementwise function with many temporaries to pieces that fit in the processor's cache."""
    if x.size <= size:
        return function(x)
    flat = x.reshape(-1)
    pieces = [function(flat[i : i + size]) for i in range(0, flat.size, size)]
    return np.concatenate(pieces).reshape(x.shape)
