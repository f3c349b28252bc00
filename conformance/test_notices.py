"""A wrong kernel is detected: in every family of operators, a wrong computation fails the cases of the suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from singa_backend import SingaBackend
from singa_backend.conform import cases, gaps, worker
from singa_backend.ir.declaration import Declaration, declarations
from singa_backend.proto.schemas import LAX, MICROSOFT, plain_domain, schema_version

EACH = 6
"""The number of operators per family that are broken; with all of them the test would take as long as the suite."""

GAPS = set(gaps.read(cases.data_file("gaps.txt")))


@cache
def families() -> dict[str, dict[int, tuple[Declaration, list[cases.Case]]]]:
    """Return the declarations of each operator module, with up to three cases of the suite that run them."""
    found: dict[str, dict[int, tuple[Declaration, list[cases.Case]]]] = defaultdict(dict)
    for case in cases.load(("node",)):
        model = onnx.load_model_from_string(case.model)
        nodes = [n for n in model.graph.node if n.op_type not in ("Constant", "Identity")]
        empty = not any(getattr(y, "size", 1) for _, outputs in case.data for y in outputs)
        if len(nodes) != 1 or case.name in GAPS or empty:
            continue
        domain, name = plain_domain(nodes[0].domain), nodes[0].op_type
        opset = next((o.version for o in model.opset_import if plain_domain(o.domain) == domain), 1)
        declaration = declarations.get((domain, name), {}).get(schema_version(domain, name, opset) or 0)
        if declaration is not None:
            chosen = found[_family(declaration)].setdefault(id(declaration), (declaration, []))[1]
            if len(chosen) < 3:
                chosen.append(case)
    return found


def _family(declaration: Declaration) -> str:
    return declaration.body.__module__.rpartition(".")[2]


def spoilt(value: Any) -> Any:
    """Return a wrong value of the same kind: larger, negated, a longer string, or a list without its last element."""
    if isinstance(value, tuple):
        return tuple(map(spoilt, value))
    if isinstance(value, (list, dict)):
        return value[:-1] if isinstance(value, list) and value else type(value)()
    if value is None or (np.ndim(value) == 0 and not hasattr(value, "dtype")):
        return value
    if value.dtype == np.bool_:
        return ~value
    if value.dtype == object:
        return np.array([f"{v}x" if isinstance(v, str) else v for v in value.reshape(-1)], object).reshape(value.shape)
    if value.dtype.kind in "iu":
        return value ^ value.dtype.type(1)
    if value.dtype.kind in "fc":
        return np.where(np.isfinite(value), np.asarray(value * 1.01 + 1, value.dtype), value.dtype.type(0))
    return (-value.astype(np.float32) + np.float32(1)).astype(value.dtype)


def all_families() -> Iterator[str]:
    own = (d for versions in declarations.values() for d in versions.values() if d.body.__module__.startswith("singa_backend."))
    # Modules of tests define operators too; drawn nodes judge those of onnxruntime (tests/operators/microsoft).
    yield from sorted({_family(d) for d in own if d.domain not in (MICROSOFT, LAX)})


WITHOUT_CASES = {
    "collective": "operators of ai.singa that need several ranks; tests/frontend/test_distributed.py",
    "gradient": "its cases have several nodes; tests/gradients/test_gradients.py",
    "ml_linear": "ONNX's suite has no case of these operators; tests/operators/test_ml_linear.py",
    "ml_map": "ONNX's suite has no case of these operators; tests/operators/test_ml_map.py",
    "ml_svm": "ONNX's suite has no case of these operators; tests/operators/test_ml_svm.py",
    "philox": "an operator of ai.singa; tests/operators/test_philox.py",
}


class Definitions(SingaBackend):
    """The backend without kernels, which would hide a wrong definition."""

    @classmethod
    def prepare(cls, model: Any, device: Any = "CPU", **kwargs: Any) -> Any:
        return super().prepare(model, device, **{**kwargs, "optimize": 0})


@pytest.mark.row("Q1")
@pytest.mark.parametrize("family", list(all_families()))
def test_a_wrong_kernel_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = families().get(family, {})
    assert bool(members) != (family in WITHOUT_CASES), f"{family}: {len(members)} operators with cases"
    for declaration, examples in sorted(members.values(), key=lambda m: m[0].name)[:EACH]:
        body = declaration.body

        def wrong(*args: Any, body: Any = body, **kwargs: Any) -> Any:
            return spoilt(body(*args, **kwargs))

        monkeypatch.setattr(declaration, "body", wrong)
        for case in examples:
            result = worker.run_case(case, Definitions, "CPU")
            assert result.strict != "passed", f"{case.name} passes with a wrong {declaration.name}"
        monkeypatch.setattr(declaration, "body", body)
