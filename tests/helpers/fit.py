"""The coefficients of `singa_backend.elementwise.functions`: `python tests/helpers/fit.py` prints them.

A polynomial takes the values of 40 digits at Chebyshev nodes, weighted so that its relative error is near the minimum.
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp

mp.mp.dps = 40

_LN = mp.log(2) / 2 * mp.mpf("1.002")
_TURN = mp.sqrt(2) - 1

JOBS: dict[str, tuple[Callable[[mp.mpf], mp.mpf], tuple[mp.mpf, mp.mpf], mp.mpf, mp.mpf, int]] = {
    "EXP float": (lambda r: (mp.expm1(r) - r) / r**2, (mp.mpf(1) / 2, mp.mpf(1) / 6), -_LN, _LN, 4),
    "EXP double": (lambda r: (mp.expm1(r) - r) / r**2, (mp.mpf(1) / 2, mp.mpf(1) / 6), -_LN, _LN, 10),
    "LOG": (lambda f: (mp.log1p(f) - f + f * f / 2) / f**3, (mp.mpf(1) / 3, -mp.mpf(1) / 4), mp.sqrt(0.5) - 1, _TURN, 8),
    "LOG_WIDE": (
        lambda z: (2 * mp.atanh(mp.sqrt(z)) / mp.sqrt(z) - 2) / z,
        (mp.mpf(2) / 3, mp.mpf(2) / 5),
        mp.mpf(0),
        (_TURN / (_TURN + 2)) ** 2,
        7,
    ),
    "TANH": (
        lambda z: (mp.tanh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (-mp.mpf(1) / 3, mp.mpf(2) / 15),
        mp.mpf(0),
        mp.mpf("0.3605"),
        4,
    ),
    "ATAN": (lambda z: (mp.atan(mp.sqrt(z)) / mp.sqrt(z) - 1) / z, (-mp.mpf(1) / 3, mp.mpf(1) / 5), mp.mpf(0), _TURN**2, 10),
    "SIN": (
        lambda z: (mp.sin(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (-mp.mpf(1) / 6, mp.mpf(1) / 120),
        mp.mpf(0),
        (mp.pi / 4) ** 2,
        6,
    ),
    "COS": (
        lambda z: (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2,
        (mp.mpf(1) / 24, -mp.mpf(1) / 720),
        mp.mpf(0),
        (mp.pi / 4) ** 2,
        6,
    ),
}
"""For each polynomial the function, its first two terms at 0, the interval, and the degree."""


def fitted(name: str) -> tuple[list[mp.mpf], mp.mpf]:
    """The coefficients, lowest power first, and the largest relative error of the polynomial."""
    function, first, low, high, degree = JOBS[name]

    def f(x: mp.mpf) -> mp.mpf:
        return function(x) if abs(x) > mp.mpf("1e-8") else first[0] + first[1] * x

    turns = [mp.pi * (2 * i + 1) / (2 * degree + 2) for i in range(degree + 1)]
    nodes = [(low + high) / 2 + (high - low) / 2 * mp.cos(t) for t in turns]
    rows = mp.matrix([[x**j / abs(f(x)) for j in range(degree + 1)] for x in nodes])
    found = list(mp.lu_solve(rows, mp.matrix([mp.sign(f(x)) for x in nodes])))
    error = max(abs(mp.polyval(found[::-1], x) / f(x) - 1) for x in (low + (high - low) * i / 400 for i in range(401)))
    return found, error


def two_over_pi(words: int) -> list[int]:
    """64 zero bits, then the fraction of 2 / pi, in words of 64 bits."""
    with mp.workdps(20 * words):
        bits = int(mp.floor(2 / mp.pi * mp.mpf(2) ** (64 * (words - 1))))
    return [bits >> 64 * (words - 1 - i) & (1 << 64) - 1 for i in range(words)]


if __name__ == "__main__":
    for name in JOBS:
        coefficients, error = fitted(name)
        print(name, ", ".join(mp.nstr(c, 17) for c in coefficients), "error", mp.nstr(error, 2))
    print("TWO_OVER_PI", two_over_pi(21))
