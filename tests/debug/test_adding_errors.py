"""Values beyond the tolerance although no node is wrong: rounding errors that add up, and results near the end of a range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, defs, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import SingaBackend, debug
from singa_backend.comparison import tolerances
from singa_backend.comparison.difference import Tolerance
from singa_backend.comparison.tolerances import RANGES, RULES
from singa_backend.ir.declaration import has_trait

ONES = {"v0": np.ones((1, 3), np.float32)}


def chain(step: float, *, fault: int = -1, last: str = "") -> ModelProto:
    """Twelve products by weights that are wrong by `step` each, one of them by a tenth."""
    nodes = " ".join(f"v{i + 1} = Mul(v{i}, w{i})" for i in range(12))
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[1,3] v0) => (float[1,3] y) {{ {nodes} {last or "y = Neg(v12)"} }}'
    )
    for i in range(12):
        weight = np.full(3, 1.5 * (1 + (0.1 if i == fault else step)), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{i}"))
    return model


def test_no_node_is_named_if_errors_only_add_up(tmp_path: Path) -> None:
    found = debug.compare(chain(0), ONES, against=chain(2e-5), atol=0)
    assert found.first is None and not found.origins and not found.agrees  # the output differs
    assert found.accumulated is not None and found.accumulated.values == ["y"]
    assert {r.value for r in found.rows if r.adds_up} == {"y", *(f"v{i}" for i in range(5, 13))}
    part = debug.bisect(chain(0), ONES, against=chain(2e-5), atol=0, to=tmp_path / "part")
    assert part is not None and part.accumulated and not part.alone


def test_a_sum_of_errors_within_the_model_is_no_difference(tmp_path: Path) -> None:
    last = "s = Sigmoid(v12) y = Round(s)"
    found = debug.compare(chain(0, last=last), ONES, against=chain(2e-5, last=last), atol=0)
    assert found.agrees and found.first is None and any(r.adds_up for r in found.rows)
    assert debug.bisect(chain(0, last=last), ONES, against=chain(2e-5, last=last), atol=0, to=tmp_path / "part") is None
    for name, step in (("mine", 0.0), ("theirs", 2e-5)):
        onnx.save(chain(step, last=last), tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "x.npz", **ONES)
    words = ("compare", "mine.onnx", "--against", "theirs.onnx", "--atol", "0", "--inputs", "x.npz")
    told = CliRunner().invoke(main, [str(tmp_path / w) if "." in w else w for w in words])
    assert told.exit_code == 0, told.output
    assert "values are beyond the tolerance, but no node is wrong: rounding errors add up" in told.stdout
    assert told.stdout.strip().splitlines()[-1].endswith(" agree")


@pytest.mark.parametrize("fault", range(12))
def test_a_fault_is_named_before_and_after_errors_that_add_up(fault: int, tmp_path: Path) -> None:
    found = debug.compare(chain(0, fault=fault), ONES, against=chain(2e-5), atol=0)
    assert found.first is not None and found.first.values == [f"v{fault + 1}"] and not found.agrees
    part = debug.bisect(chain(0, fault=fault), ONES, against=chain(2e-5), atol=0, to=tmp_path / "part")
    assert part is not None and part.alone and part.node.values == [f"v{fault + 1}"]


# --- bounded ranges ---------------------------------------------------------------------------------------------------

GRID = np.concatenate([-np.logspace(-3, 3, 200), [0], np.logspace(-3, 3, 200)]).astype(np.float32)
ROUNDS = {name for rule in RULES if rule.ulps or rule.norm for name in rule.operators}


def unary() -> list[str]:
    """ONNX's operators that compute floats from one float input, with a rule that allows errors."""
    found = []
    for name in sorted(ROUNDS):
        if "." in name or not defs.has(name):
            continue
        schema = defs.get_schema(name)
        if schema.min_input == schema.max_input == 1 == schema.max_output and has_trait("", name, "unary"):
            found.append(name)
    return found


def computed(name: str, x: np.ndarray) -> np.ndarray:
    (y,) = SingaBackend.run_node(helper.make_node(name, ["x"], ["y"]), [x[None, None]])
    return y


@pytest.mark.parametrize("name", unary())
def test_an_operator_of_a_bounded_range_is_listed(name: str) -> None:
    with np.errstate(all="ignore"):
        y = computed(name, GRID)
    y = np.abs(y[np.isfinite(y)])
    if y.max() <= 4 and name != "Atanh":  # Atanh ends at 1, where it is infinite
        assert name in RANGES and RANGES[name] >= y.max() * (1 - 1e-6), (name, y.max())
    elif name in RANGES:  # one side approaches 0
        side = GRID < -20
        assert np.abs(computed(name, GRID[side])).max() <= RANGES[name]


@pytest.mark.parametrize("name", sorted(n for n in RANGES if "." not in n))
@pytest.mark.parametrize("ends", [(-800.0, -12.0), (-30.0, -15.0), (12.0, 800.0)], ids=str)
def test_far_from_0_onnxruntime_agrees_and_a_wrong_value_does_not(name: str, ends: tuple[float, float]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    x = np.linspace(*ends, 64, dtype=np.float32)
    x = np.tanh(x / 900) if name in ("Asin", "Acos") else x
    node = helper.make_node(name, ["x"], ["s"])
    moved = [helper.make_node("Reshape", ["s", "shape"], ["r"]), helper.make_node("Concat", ["r", "r"], ["y"], axis=0)]
    kinds = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [64]), ("y", [16, 8]))]
    graph = helper.make_graph([node, *moved], "g", kinds[:1], kinds[1:],
                              [numpy_helper.from_array(np.array([8, 8]), "shape")])  # fmt: skip
    opset = 24 if name == "Swish" else 22
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime has no kernel of this operator: the definitions of ONNX are the witness
        against = "reference"
    else:
        against = "onnxruntime"
    found = debug.compare(model, {"x": x}, against=against)
    assert found.agrees, [str(r.difference) for r in found.rows]
    right = computed(name, x).reshape(-1)
    wrong = debug.difference(
        right + np.float32(1e-3) * max(1, np.abs(right).max()), right, Tolerance(operators=frozenset([name]))
    )
    assert not wrong.agrees


def test_the_floor_ends_where_a_value_is_computed_further() -> None:
    text = "s = Sigmoid(x) t = Transpose(s) u = Mul(t, t) y = Concat<axis=0>(t, u)"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[2,2] x) => (float[4,2] y) {{ {text} }}')
    source = debug.ComparedModel.of(model)
    named = {n: source.widened(Tolerance(), n).operators for n in "stuy"}
    assert named == {"s": {"Sigmoid"}, "t": {"Sigmoid"}, "u": frozenset(), "y": {"Sigmoid"}}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_floor_is_small_against_the_range(name: str, dtype: Any) -> None:
    floor = tolerances.range_floor(np.dtype(dtype), [name, "Relu"])
    assert 0 < floor <= tolerances.COMPARE.bound(np.dtype(dtype)).rtol * RANGES[name]
    assert tolerances.range_floor(np.dtype(dtype), ["Relu"]) == tolerances.range_floor(np.dtype(np.int32), [name]) == 0
