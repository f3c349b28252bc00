"""Models from elsewhere: exported from PyTorch (tests/models), and light models with random weights.

The error of a value is max|ours - theirs| / max|theirs|; the bound is 1e-4.  PyTorch's own outputs are stored next to
the models; onnxruntime computes its values in a child process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser
from tests.helpers.paths import MODELS, PROJECT

from singa.cli import main
from singa_backend.conform import foreign, light_models
from singa_backend.conform.results import WRITER
from singa_backend.engines.oracle import Oracle

STORED = {m.name: m for m in foreign.stored(MODELS)}
F = np.float32


def test_every_net_is_here_from_both_exporters() -> None:
    nets = {"mobilenetv2", "bert", "gpt2", "lstm", "unet", "vit"}
    assert {tuple(n.split("-")[:2]) for n in STORED} == {(net, how) for net in nets for how in ("script", "dynamo")}
    opsets = {i.version for m in STORED.values() for i in onnx.load(m.path).opset_import if i.domain == ""}
    assert len(STORED) == 24 and opsets == {11, 14, 17, 18, 23}
    assert all(len({x.shape[0] for x, *_ in (list(inputs.values()) for inputs, _ in m.data)}) == 2 for m in STORED.values())
    assert sum(p.stat().st_size for p in MODELS.iterdir() if p.is_file()) < 4_000_000


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("name", STORED)
def test_beside_what_torch_computed(name: str, device: str) -> None:
    for inputs, expected in STORED[name].data:
        found = foreign.compare_with_stored(name, onnx.load(STORED[name].path), inputs, expected, device=device)
        assert found.good, found.to_dict()


@pytest.mark.parametrize("name", STORED)
def test_every_value_beside_onnxruntime(name: str, oracle: Oracle) -> None:
    for inputs, _ in STORED[name].data:
        found = foreign.compare_with_onnxruntime(name, onnx.load(STORED[name].path), inputs, oracle)
        assert found.good and len(found.values) > 20, found.to_dict()


@pytest.mark.parametrize("name", ["shufflenet", "squeezenet", "inception_v1"])
def test_light_models_with_random_weights(name: str, oracle: Oracle) -> None:
    """The other six take longer: `tox -e foreign` runs all nine and writes reports/foreign.md."""
    found = foreign.light_comparison(name, oracle)
    assert found.good and len(found.values) > 60, found.to_dict()


def test_all_nine_light_models_stand_in_the_report() -> None:
    document = json.loads((PROJECT / "reports" / "foreign.json").read_text())
    rows = {r["model"]: r for r in document["comparisons"]}
    assert {f"light {n}" for n in light_models.names()} | set(STORED) == set(rows) and len(light_models.names()) == 9
    assert all(r["good"] and r["worst"]["error"] <= document["bound"] == 1e-4 for r in document["comparisons"])


def test_random_weights_are_seeded_and_leave_no_constant_weight() -> None:
    one, again, other = (light_models.model("squeezenet", seed).SerializeToString(deterministic=True) for seed in (0, 0, 1))
    assert one == again != other
    graph = onnx.ModelProto.FromString(one).graph
    assert not any(n.op_type == "ConstantOfShape" for n in graph.node)
    weights = [onnx.numpy_helper.to_array(t) for t in graph.initializer]
    assert all(np.unique(w).size > w.size / 2 for w in weights if w.dtype == F)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (np.array([1, 2], F), np.array([1, 2], F), 0),
        (np.array([1, 2.5]), np.array([1, 2.0]), 0.25),
        (np.array([0.1, 2]), np.array([0, 2.0]), 0.05),  # measured by the largest value, not by each element
        (np.array([1e-9]), np.array([0.0]), math.inf),
        (np.array([0.0]), np.array([-0.0]), 0),
        (np.array([np.nan, 1]), np.array([np.nan, 1]), 0),
        (np.array([1.0, 1]), np.array([np.nan, 1]), math.inf),
        (np.array([np.nan, 1]), np.array([1.0, 1]), math.inf),
        (np.array([np.inf]), np.array([-np.inf]), math.inf),
        (np.array([np.inf, 1]), np.array([np.inf, 1]), 0),
        (np.zeros((2, 1), F), np.zeros(2, F), math.inf),
        (np.zeros(2, F), np.zeros(2), math.inf),
        (np.zeros(0, F), np.zeros(0, F), 0),
        (np.array([1000]), np.array([1001]), math.inf),
        (np.array([True]), np.array([True]), 0),
        (np.array(["a"], object), np.array(["a"]), 0),
        (np.array(["a"], object), np.array(["b"]), math.inf),
        (np.array([1 + 1j]), np.array([1 + 1j]), 0),
        (np.array([2], ml_dtypes.bfloat16), np.array([1], ml_dtypes.bfloat16), 1),
        ([np.ones(1)], [np.ones(1)], 0),
        ([np.ones(1)], [], math.inf),
        (None, None, 0),
        (None, np.ones(1), math.inf),
    ],
)
def test_the_error(ours: Any, theirs: Any, expected: float) -> None:
    assert foreign.error(ours, theirs) == expected


def test_a_wrong_value_inside_is_seen(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in one intermediate value that the output does not show: MatMul off by a hundredth, then Sign."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 2] x, float[2, 2] w) => (float[n, 2] y)'
    model = parser.parse_model(text + " { h = MatMul (x, w) y = Sign (h) }")
    inputs = {"x": np.ones((3, 2), F), "w": np.ones((2, 2), F)}
    assert foreign.compare_with_onnxruntime("m", model, inputs, oracle).good
    wrong = onnx.ModelProto.FromString(model.SerializeToString())
    run = Oracle.run

    def peer(self: Oracle, source: Any, feeds: Any, **options: Any) -> dict[str, Any]:
        return run(self, source, feeds | {"w": feeds["w"] * F(1.01)}, **options)

    monkeypatch.setattr(Oracle, "run", peer)
    found = foreign.compare_with_onnxruntime("m", wrong, inputs, oracle)
    assert found.outputs == {"y": 0} and not found.good and found.worst[:2] == ("h", "MatMul")
    assert found.to_dict()["worst"]["error"] == pytest.approx(0.0099, abs=1e-4)
    assert wrong == model, "the model is left as it was"


def test_the_command(tmp_path: Path) -> None:
    for name in ("lstm-script-11.onnx", "lstm.npz"):
        (tmp_path / name).write_bytes((MODELS / name).read_bytes())
    found = CliRunner().invoke(main, ["foreign", str(tmp_path), "--no-light", "--to", str(tmp_path / "r"), "--json"])
    assert found.exit_code == 0 and len(json.loads(found.output)["comparisons"]) == 4
    written = json.loads((tmp_path / "r" / "foreign.json").read_text())
    assert {"schema": "sonnx.foreign", "schema_version": 1} | written == json.loads(found.output) | WRITER
    page = (tmp_path / "r" / "foreign.md").read_text()
    assert "**4 of 4** comparisons are within the bound" in page and "| lstm-script-11 | ids[2, 7] |" in page
    data = dict(np.load(tmp_path / "lstm.npz"))
    np.savez(tmp_path / "lstm.npz", **data | {"y0_1": data["y0_1"] * 2})
    found = CliRunner().invoke(main, ["foreign", str(tmp_path), "--no-light"])
    assert found.exit_code == 1 and found.output.count("OFF") == 1
    assert CliRunner().invoke(main, ["foreign", str(tmp_path), "--no-light", "-k", "nothing"]).exit_code == 1
