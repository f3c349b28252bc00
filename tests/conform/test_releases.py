"""Cases of older releases: wheels made here stand for those of PyPI, which no test fetches."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import OptionalProto, TensorProto, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import MissingDependency
from singa_backend.conform import cases, gaps, releases, worker
from singa_backend.proto import test_data

F = np.float32
X = np.array([-1, 2], F)
OLD = releases.FOLDER


def wheel_of(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def case(op: str, y: np.ndarray, *, kind: str = "node", name: str = "", opset: int = 11, attributes: str = "",
         dtype: str = "float[2]") -> dict[str, bytes]:  # fmt: skip
    text = f'<ir_version: 6, opset_import: ["": {opset}]> g ({dtype} x) => ({dtype} y) {{ y = {op} {attributes} (x) }}'
    folder = f"{OLD}{kind}/{name or 'test_' + op.lower()}/"
    return {
        folder + "model.onnx": parser.parse_model(text).SerializeToString(),
        folder + "test_data_set_0/input_0.pb": numpy_helper.from_array(X).SerializeToString(),
        folder + "test_data_set_0/output_0.pb": numpy_helper.from_array(y).SerializeToString(),
    }


GOOD, WRONG = case("Relu", np.array([0, 2], F)), case("Neg", X)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A temporary conformance/ with two releases, and a cache with the wheels of both."""
    (tmp_path / "releases").mkdir()
    monkeypatch.setattr(releases, "data_file", lambda name: tmp_path / name)
    cache = tmp_path / "cache"
    cache.mkdir()
    found = {}
    for release, members in (("1.6.0", GOOD | WRONG), ("1.10.2", GOOD | case("Neg", -X))):
        wheel = wheel_of(cache / f"onnx-{release}-cp37-cp37m-manylinux1_x86_64.whl", members)
        found[release] = releases.entry_of(wheel, releases.load(wheel))
    (tmp_path / "releases" / "manifest.json").write_text(json.dumps(found))
    (tmp_path / "releases" / "gaps.txt").write_text("It is wrong.\n    1.6.0 test_neg\n")
    return tmp_path


def conform(held: Path, *args: str) -> tuple[int, dict[str, Any]]:
    found = CliRunner().invoke(main, ["conform", "--cache", str(held / "cache"), "-n", "1", "--json", *args])
    return found.exit_code, json.loads(found.output)


# --- the committed data


def test_what_is_committed_fits_together() -> None:
    known = releases.manifest()
    assert list(known) == sorted(known, key=lambda r: [int(p) for p in r.split(".")]) and len(known) == 21
    assert known["1.6.0"]["counts"] == {"node": 557, "simple": 20, "pytorch-converted": 80, "pytorch-operator": 35, "real": 0}
    for release, entry in known.items():
        releases.tags(release)
        assert entry["wheel"].startswith(f"onnx-{release}-") and len(entry["sha256"]) == 64
    assert len(releases.known_gaps("1.6.0")) == 4 and not releases.known_gaps("1.5.0")
    assert releases.known_gaps("1.16.1") == releases.known_gaps("1.16.2")  # a release that is not listed, from its sibling


@pytest.mark.parametrize("release", ["1.1.0", "1.23.0", "2.0.0", "1.6", "x", "1.6.0/../../x"])
def test_a_release_without_a_wheel_is_refused(release: str, tmp_path: Path) -> None:
    with pytest.raises(cases.ConformanceError, match=r"must be one of 1\.2\.1 to 1\.22\.0, got"):
        releases.fetch(release, tmp_path)


# --- fetching


def test_a_wheel_is_fetched_once_and_kept(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = next((held / "cache").glob("onnx-1.6.0-*")).read_bytes()
    calls: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> Any:
        calls.append(command)
        Path(command[command.index("--dest") + 1], "onnx-1.6.0-cp37-cp37m-manylinux1_x86_64.whl").write_bytes(original)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    empty = held / "empty"
    path = releases.fetch("1.6.0", empty)
    assert path == releases.fetch("1.6.0", empty) and path.read_bytes() == original and len(calls) == 1
    assert [p.name for p in empty.iterdir()] == [path.name], "the working folder is gone"
    for part in ("download", "--no-deps", "--only-binary=:all:", "cp37m", "onnx==1.6.0"):
        assert part in calls[0]
    path.write_bytes(original + b"x")
    with pytest.raises(cases.ConformanceError, match="SHA-256 differs"):
        releases.fetch("1.6.0", empty)


def test_what_pip_says_is_passed_on(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: no network")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(cases.ConformanceError, match="ERROR: no network"):
        releases.fetch("1.6.0", held / "empty")
    monkeypatch.setattr(releases.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency):
        releases.fetch("1.6.0", held / "empty")


@pytest.mark.parametrize("content", [b"no zip", None])
def test_what_is_no_wheel_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "onnx-1.7.0-x.whl"
    if content is None:
        wheel_of(path, {"onnx/__init__.py": b""})
    else:
        path.write_bytes(content)
    with pytest.raises(cases.ConformanceError, match=r"is not a wheel|no test data"):
        releases.check_wheel(path, None)


def test_a_zip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "MAX_BYTES", 10)
    with pytest.raises(cases.ConformanceError, match="more than any"):
        releases.check_wheel(wheel_of(tmp_path / "w.whl", GOOD), None)


def test_nothing_is_written_beside_the_wheel(tmp_path: Path) -> None:
    evil = {f"{OLD}node/test_x/../../../../../../evil": b"x", "/abs": b"x", f"{OLD}node/../../evil/model.onnx": b"x"}
    wheel = wheel_of(tmp_path / "w.whl", GOOD | evil)
    assert [c.name for c in releases.load(wheel)] == ["test_relu"]
    assert [p.name for p in tmp_path.iterdir()] == ["w.whl"]


# --- reading


def test_kinds_selection_and_light_models(tmp_path: Path) -> None:
    about = {"model_name": "tiny", "rtol": 0.002, "atol": 1e-7, "url": f"{OLD}light/light_tiny.onnx"}
    far = {"model_name": "resnet50", "url": "https://example.org/resnet50.tar.gz"}  # as in onnx 1.2.1: without tolerances
    members = GOOD | case("Neg", -X, kind="simple") | {
        f"{OLD}real/test_tiny/data.json": json.dumps(about).encode(),
        f"{OLD}real/test_far/data.json": json.dumps(far).encode(),
        f"{OLD}light/light_tiny.onnx": GOOD[f"{OLD}node/test_relu/model.onnx"],
        f"{OLD}light/light_tiny_output_0.pb": numpy_helper.from_array(np.array([0, 0.5], F)).SerializeToString(),
    }  # fmt: skip
    wheel = wheel_of(tmp_path / "w.whl", members)
    assert [(c.kind, c.name, c.rtol) for c in releases.load(wheel)] == [
        ("node", "test_relu", 1e-3), ("simple", "test_neg", 1e-3), ("real", "test_tiny", 0.002),
    ]  # fmt: skip
    assert [c.name for c in releases.load(wheel, ["simple"])] == ["test_neg"]
    assert [c.name for c in releases.load(wheel, select="tin")] == ["test_tiny"]


def test_unreadable_and_empty_cases_fail(tmp_path: Path) -> None:
    broken = numpy_helper.from_array(np.array(["a", "b"], object))
    broken.string_data[0] = b"\xf0\x00"
    members = GOOD | {f"{OLD}node/test_relu/test_data_set_0/output_0.pb": broken.SerializeToString()}
    members |= {k: v for k, v in case("Neg", X).items() if k.endswith("model.onnx")}
    found = releases.load(wheel_of(tmp_path / "w.whl", members))
    run = releases.run(found, {}, backend="x", device="CPU", processes=1, timeout=1, progress=lambda r: None)
    assert {r.name: r.strict for r in run} == {"test_relu": "failed", "test_neg": "failed"}
    assert any("output_0.pb cannot be read" in r.reason for r in run) and any("no data set" in r.reason for r in run)


def test_an_empty_optional_of_onnx_1_10_is_none() -> None:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    assert test_data.value(OptionalProto(name="x", elem_type=1).SerializeToString(), kind) is None
    full = OptionalProto(elem_type=1, tensor_value=numpy_helper.from_array(X))
    np.testing.assert_array_equal(test_data.value(full.SerializeToString(), kind), X)


# --- running


@pytest.mark.row("I3")
def test_one_release(held: Path) -> None:
    code, document = conform(held, "--release", "1.6.0", "--results", str(held / "r.json"))
    assert code == 0 and document["environment"]["release"] == "1.6.0" and document["manifest"]
    assert document["totals"]["cases"] == 2 and document["gaps"] == {"test_neg": "It is wrong."}
    assert len(json.loads((held / "r.json").read_text())["cases"]) == 2
    (held / "releases" / "gaps.txt").write_text("")
    code, document = conform(held, "--release", "1.6.0")
    assert code == 1 and document["unexpected"] == ["test_neg"]
    (held / "releases" / "gaps.txt").write_text("No.\n    1.6.0 test_neg\n    1.6.0-1.10.2 test_relu\n")
    code, document = conform(held, "--release", "1.6.0")
    assert code == 1 and document["closed_gaps"] == ["test_relu"]


@pytest.mark.row("I3")
def test_all_releases_share_what_is_equal_and_prove_their_gaps(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "load", lambda *_: [])  # the installed onnx's cases take seconds to build
    code, document = conform(held, "--release", "all", "--results", str(held / "r.json"))
    assert code == 0 and document["distinct_cases"] == 3 and document["distinct_passed"] == 2
    assert document["releases"]["1.6.0"]["corrected"] == {"test_neg": "1.10.2"}
    whole = json.loads((held / "r.json").read_text())
    assert whole["releases"] == document["releases"] and whole["environment"]["release"] == "all"
    relu = next(e for e in whole["executed"] if e["operator"] == "Relu")
    assert (relu["version"], relu["cases"], relu["passed"], relu["tested"]) == (6, 1, 1, 1)
    neg = next(e for e in whole["executed"] if e["operator"] == "Neg")
    assert (neg["cases"], neg["passed"], neg["failed"], neg["dtypes"]) == (2, 1, ["test_neg"], [["T", "float32"]])
    first = (held / "r.json").read_bytes()
    conform(held, "--release", "all", "--results", str(held / "r.json"))
    assert (held / "r.json").read_bytes() == first


def test_a_lucky_draw_is_no_official_pass() -> None:
    def lucky() -> worker.Result:
        return worker.Result("test_bernoulli", "node", "failed", "passed", "a second run returned another result")

    assert releases.judged([], [lucky()], {"test_bernoulli": "Random."}).results[0].official == "failed"
    assert releases.judged([], [lucky()], {}).results[0].official == "passed"


def test_a_missing_case_is_noticed(held: Path) -> None:
    known = releases.manifest()
    known["1.6.0"]["counts"]["node"] = 3
    (held / "releases" / "manifest.json").write_text(json.dumps(known))
    code, document = conform(held, "--release", "1.6.0")
    assert code == 3 and document["code"] == "SX801"


def test_renewing(held: Path) -> None:
    before = releases.manifest()
    (held / "releases" / "manifest.json").write_text(json.dumps({"1.10.2": before["1.10.2"]}))
    found = CliRunner().invoke(main, ["conform", "--release", "1.6.0", "--renew-manifest", "--cache", str(held / "cache")])
    assert found.exit_code == 0 and releases.manifest() == before


def test_wrong_usage() -> None:
    assert CliRunner().invoke(main, ["conform", "--release", "all", "--report", "x"]).exit_code == 2
    assert CliRunner().invoke(main, ["conform", "--release", "1.6.0", "--release", "1.7.0", "--junit", "x"]).exit_code == 2


@pytest.mark.parametrize(
    "entry", ["test_neg", "1.7.0 test_neg", "1.10.2-1.6.0 test_neg", "1.6.0 test_neg\n    1.6.0-1.10.2 test_neg"]
)
def test_gaps_must_name_known_releases_once(held: Path, entry: str) -> None:
    (held / "releases" / "gaps.txt").write_text(f"Why.\n    {entry}\n")
    with pytest.raises(cases.ConformanceError):
        releases.known_gaps("1.6.0")


def test_bfloat16_stored_as_uint16_feeds_the_same() -> None:
    import ml_dtypes

    def of(x: Any) -> str:
        return releases.inputs_digest(cases.Case("c", "node", b"", [([x], [])], 0, 0))

    x = np.array([1, 2], ml_dtypes.bfloat16)
    assert of(x) == of(x.view(np.uint16)) != of(x[:1])
    assert of([x]) != of(x) and of(None) != of(np.array(["a"], object)) != of(np.array(["b"], object))


def test_a_proof_needs_the_same_inputs() -> None:
    def run(y: np.ndarray, x: np.ndarray, verdict: str) -> releases.Run:
        made = releases.StoredCase("test_neg", "node", b"", [([x], [y])], 0, 0, "")
        result = worker.Result("test_neg", "node", verdict, verdict)
        return releases.Run([made], [result], gaps.judge([result], {"test_neg": "Why."} if verdict == "failed" else {}))

    old = run(X, X, "failed")
    assert releases.corrected({"1.6.0": old, "1.7.0": run(-X, X, "passed")})["1.6.0"] == {"test_neg": "1.7.0"}
    assert releases.corrected({"1.6.0": old, "1.7.0": run(-X, 2 * X, "passed")})["1.6.0"] == {}
    assert releases.corrected({"1.6.0": old, "1.7.0": run(-X, X, "failed")})["1.6.0"] == {}
    new = run(-X, X, "passed")
    assert releases.corrected({"1.6.0": old}, new.cases, new.results)["1.6.0"] == {"test_neg": onnx.__version__}
    runs = {"1.6.0": old, onnx.__version__: new}  # the installed release's own run, with other cases of it or with none
    for cases_, results in (([], []), (new.cases, run(-X, X, "failed").results), (new.cases, new.results)):
        assert releases.corrected(runs, cases_, results)["1.6.0"] == {"test_neg": onnx.__version__}
