"""NVRTC compiles the kernels of this project: g++, which compiles them for the emulated device, accepts what NVRTC refuses.

`tox -e cuda-kernels` compiles every kernel of the suite and of training, for four architectures.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from singa_backend.devices import fused, spatial
from singa_backend.devices.device import resolve

pytestmark = pytest.mark.fakecuda

KERNELS = sorted({*spatial._KERNELS, *fused._ELEMENTWISE, *fused._SUMS, "lstm_cell", "count", "joined"})


@pytest.fixture(scope="module")
def sources() -> dict[str, list[dict[str, Any]]]:
    """The sources of each kernel, after a call of each on the emulated device."""
    cupy = pytest.importorskip("cupy")
    from fakecuda.build import libraries

    for dtype in (np.float16, np.float32, np.float64):
        for name in spatial._KERNELS:
            _spatial(cupy, name, dtype)
    for dtype in (np.float32, np.float64):
        one = cupy.ones(2, dtype)
        for name in (*fused._ELEMENTWISE, *fused._SUMS):
            operands = (fused._SUMS if name in fused._SUMS else fused._ELEMENTWISE)[name][0].split()
            fused._kernel(cupy, name)(*(dtype(1) if o in ("count", "epsilon") else one for o in operands))
        gates = cupy.ones((1, 8), dtype)
        fused.lstm_cell(cupy, gates, gates, cupy.ones((1, 2), dtype))
        xp = resolve("CUDA").xp
        xp.elementwise("T a0, T a1", "T y0", "y0 = a0 + a1;")(one, one)
    for count in fused.COUNTS:
        fused.count(cupy, cupy.zeros(2, count), cupy.zeros(1, np.int64), 1)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in KERNELS}
    for path in sorted((libraries().kernels / "built").glob("*.json")):
        kept = json.loads(path.read_text())
        for name in set(re.findall(r"\bsonnx_(\w+)", kept["source"])) & set(found):
            found[name].append(kept)
    return found


def _spatial(cupy: Any, name: str, dtype: Any) -> None:
    """Call a kernel of spatial.py."""
    x = cupy.ones((1, 1, 2, 2), dtype)
    at = spatial.WindowPlaces((1, 1), (1, 1), (1, 1), (0, 0), (2, 2))
    if name == "columns":
        spatial.columns(cupy, x, at)
    elif name == "folded":
        spatial.folded(cupy, cupy.ones((1, 1, 1, 1, 1, 2, 2), dtype), (2, 2), at)
    else:
        spatial.maxima(cupy, x, at, places=name == "places")


@pytest.mark.parametrize("name", KERNELS)
def test_nvrtc_compiles_the_kernel(name: str, sources: dict[str, list[dict[str, Any]]]) -> None:
    from fakecuda import nvrtc

    assert sources[name]
    for kept in sources[name][:4]:
        assert not nvrtc.check(kept, "75")[0]


def test_nvrtc_refuses_macros_of_standard_headers() -> None:
    from fakecuda import nvrtc

    text = 'extern "C" __global__ void f(float* y) { y[0] = -INFINITY; }'
    assert "INFINITY" in nvrtc.compiled(text, [], [], "75")
