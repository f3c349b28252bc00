"""Every elementwise definition leaves an expression, and the expression has the definition's bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

import singa_backend.operators  # noqa: F401  # declares ONNX's operators
from singa_backend.conform.fuzz import recipes
from singa_backend.conform.fuzz.generate import allowed_types, draw_opset
from singa_backend.conform.fuzz.strategies import Draw, Skip
from singa_backend.devices.namespaces import numpy
from singa_backend.domains import load_domain
from singa_backend.elementwise.expression import NotTraced, Trace, order
from singa_backend.elementwise.numpy_form import evaluate
from singa_backend.errors import OperatorError
from singa_backend.ir.declaration import Declaration, declarations, newest_declaration
from singa_backend.ir.versioned import VersionedOperator, reads_on_host
from singa_backend.proto.schemas import MICROSOFT, schemas

load_domain(MICROSOFT)
TRAINING = "ai.onnx.preview.training"
DOMAINS = ("", MICROSOFT, TRAINING)
NATIVE = [np.dtype(c) for c in "?bBhHiIlLefd"]
CASES = 6
"""How many nodes of an operator are drawn for each combination of types."""


class Special(Draw):
    """Draws special values among those of every tensor of floats that may have them."""

    def _floats(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> np.ndarray:
        x = super()._floats(dtype, shape, kind)
        if kind not in ("any", "small"):
            return x
        info = np.finfo(dtype)
        tiny = [info.smallest_subnormal, 3 * info.smallest_subnormal, -info.smallest_subnormal, info.tiny, -info.tiny, info.eps]
        large = [info.max, -info.max, 1e4, -1e4, 88.5, -103.5, 20, -20, 3, -3]
        values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, *tiny, *large], dtype)
        return np.where(self.rng.random(shape) < 0.5, self.rng.choice(values, shape), x)


def elementwise() -> list[tuple[str, str, int]]:
    """The versions of the operators that are elementwise by their newest declaration, and of the optimizers."""
    named = [key for key in declarations if key[0] in DOMAINS]
    newest = {key: newest_declaration(*key) for key in named}
    kept = [k for k, d in newest.items() if d is not None and (k[0] == TRAINING or d.traits & {"unary", "broadcasting"})]
    return [(domain, name, version) for domain, name in sorted(kept) for version in sorted(declarations[domain, name])]


def combinations(domain: str, name: str, version: int) -> list[dict[str, np.dtype[Any]]]:
    """The types of a version, as far as NumPy has them."""
    allowed = {p: [d for d in found if d in NATIVE] for p, found in allowed_types(schemas[domain, name][version]).items()}
    return [dict(zip(allowed, types, strict=True)) for types in product(*allowed.values())]


def draws(domain: str, name: str, version: int, types: dict[str, np.dtype[Any]]) -> Iterator[Draw]:
    """Nodes of these types."""
    rng = np.random.default_rng([version, *name.encode(), *"".join(d.char for d in types.values()).encode()])
    found = 0
    for _ in range(10 * CASES):
        d = Special(rng, schemas[domain, name][version], draw_opset(rng, domain, name, version), types)
        try:
            recipes.recipe_of(domain, name)(d)
        except Skip:
            continue
        found += 1
        yield d
        if found == CASES:
            return


def check(declaration: Declaration, version: int, d: Draw) -> None:
    """Compare the definition with its trace; raises NotTraced."""
    operator = VersionedOperator(declaration, version)
    wanted = [bool(o) for o in d.outputs]
    inputs = list(d.inputs)
    given = operator.arguments(d.attributes)
    with np.errstate(all="ignore"):
        expected = operator.run(numpy, inputs, given, wanted)
    trace = Trace()
    recorded = [v if v is None or reads_on_host(declaration, i) else trace.input(v.dtype, v.shape) for i, v in enumerate(inputs)]
    results = operator.run(trace.xp, recorded, given, wanted)
    arrays = [v for i, v in enumerate(inputs) if v is not None and not reads_on_host(declaration, i)]
    for a, b in zip(expected, results, strict=True):
        if a is None:
            assert b is None
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        same(a, evaluate([b.term], arrays)[0], any(t.op in ("max", "min", "fmax", "fmin") for t in order([b.term])))
    for bad, _ in trace.checks:
        assert not evaluate([bad], arrays)[0].any()


def same(expected: np.ndarray, actual: np.ndarray, zeros: bool) -> None:
    """Equal bits, NaN at the same places.  zeros: the sign of a zero is free: that of max and min depends on the processor."""
    assert actual.dtype == expected.dtype
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected)
        return
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    bits = f"u{expected.itemsize}"
    free = nan | ((expected == 0) & (actual == 0)) if zeros else nan
    np.testing.assert_array_equal(np.where(free, 0, actual.astype(expected.dtype).view(bits)), np.where(free, 0, np.asarray(expected).view(bits)))


if __name__ == "__main__":
    import collections, traceback
    no = collections.defaultdict(set); ok = 0
    for domain, name, version in elementwise():
        decl = declarations[domain, name][version]
        for types in combinations(domain, name, version):
            n = 0
            for d in draws(domain, name, version, types):
                n += 1
                try:
                    check(decl, version, d); ok += 1
                except NotTraced as e:
                    no[domain, name, version, "NOT " + str(e)].add(str([t.char for t in types.values()]))
                except Exception as e:
                    no[domain, name, version, type(e).__name__ + str(e)[:400]].add(str([t.char for t in types.values()]))
            if not n: no[domain, name, version, "no case"].add(str([t.char for t in types.values()]))
    for k, v in no.items(): print(k, sorted(v)[:12], len(v))
    print(ok, len(elementwise()))
