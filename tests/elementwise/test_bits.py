"""Deterministic sessions have equal bits for AVX2 and this processor, and for every number of threads."""

from __future__ import annotations

import pytest
from tests.helpers.elementwise_bits import KEYS, LOWERED, VIEWS, at, cases, computed, is_compiled, is_x86, name_of, small_parts
from tests.helpers.elementwise_draws import Key

from singa_backend.elementwise.compile import available

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=available()),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_equal_bits(key: Key) -> None:
    """Of two nodes of each type by threads, of the first also for AVX2; `tox -e aarch64 -- bits` computes four."""
    compiled = False
    for name, model, feeds in cases(key, 2):
        found = computed(model, feeds)
        compiled |= is_compiled(found)
        with small_parts():
            assert computed(model, feeds, 2) == found, name
        if is_x86() and name.endswith(" 0"):  # compiling takes nearly all the time
            with at("avx2"):
                assert computed(model, feeds) == found, name
    assert compiled or key in VIEWS or key not in LOWERED, "no machine code"
