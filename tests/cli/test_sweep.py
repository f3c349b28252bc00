"""`sonnx sweep`: the tasks, results that are found again, files that kill their process, kills of the sweep itself."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser
from tests.helpers import killed_sweeps
from tests.helpers.killed_sweeps import net

from singa.cli import main
from singa_backend import InvalidInput, SingaBackend, SonnxError
from singa_backend.io.processes import ChildFailure
from singa_backend.proto import source
from singa_backend.sweep import Sweep, SweepSettings, find_files, run, sweep_one

HEAD = '<ir_version: 8, opset_import: ["": 17]>'


def cli(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["sweep", *map(str, arguments)])


def save(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(net(seed), path)
    return path


def text(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(parser.parse_model(f"{HEAD} {body}"), path)
    return path


def statuses(found: Result) -> dict[str, str]:
    return {r["file"]: r["status"] for r in json.loads(found.stdout)["rows"]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the hook, which children import."""
    folder = killed_sweeps.hook(tmp_path / "hook")
    monkeypatch.syspath_prepend(str(folder))
    return folder


# --- tasks ------------------------------------------------------------------------------------------------------------


def data_set(model: Path, y: np.ndarray | None = None) -> None:
    """Write test_data_set_0 next to a model, with its outputs or others."""
    folder, x = model.parent / "test_data_set_0", np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    folder.mkdir(exist_ok=True)
    right = SingaBackend.prepare(model).run([x])[0]
    for name, value in (("input_0", x), ("output_0", right if y is None else y)):
        (folder / f"{name}.pb").write_bytes(numpy_helper.from_array(value).SerializeToString())


def test_each_task(tmp_path: Path) -> None:
    top = tmp_path / "m"
    save(top / "good.onnx")
    text(top / "unknown.onnx", "g (float[2] x) => (float[2] y) { y = NoSuchOperator(x) }")
    text(top / "fails.onnx", "g (float[2] x) => (float[m] y) <int64[1] s = {3}> { y = Reshape(x, s) }")
    text(top / "map.onnx", "g (seq(float[n]) x) => (float[n] y) <int64 i = {0}> { y = SequenceAt(x, i) }")
    (top / "junk.onnx").write_bytes(b"junk")
    (top / ".hidden").mkdir()
    save(top / ".hidden" / "h.onnx")
    data_set(save(top / "a" / "right.onnx", 1))
    data_set(save(top / "b" / "wrong.onnx", 2), np.zeros((2, 3), np.float32))

    both = {"a/right.onnx": "passed", "b/wrong.onnx": "passed"}
    bad = {"unknown.onnx": "refused", "junk.onnx": "refused", "good.onnx": "passed"}
    found = cli(top, "--task", "check", "--json")
    assert found.exit_code == 1 and statuses(found) == both | bad | {"fails.onnx": "passed", "map.onnx": "passed"}
    found = cli(top, "--task", "run", "--json")
    assert found.exit_code == 1 and statuses(found) == both | bad | {"fails.onnx": "failed", "map.onnx": "skipped"}
    document = json.loads(found.stdout)
    assert document["schema"] == "sonnx.sweep" and set(document["versions"]) == {"sonnx", "onnx", "numpy"}
    assert [r["file"] for r in document["rows"]] == sorted(r["file"] for r in document["rows"])
    codes = {r["file"]: r["code"] for r in document["rows"]}
    assert codes["junk.onnx"] == "SX110" and codes["map.onnx"] == "SX308" and codes["good.onnx"] == ""
    found = cli(top, "--task", "conform", "--junit", tmp_path / "j.xml", "--json")
    assert found.exit_code == 1 and statuses(found) == {"a/right.onnx": "passed", "b/wrong.onnx": "differs"}
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    assert "differs: test_data_set_0" in str(suite.find("testcase/failure").get("message"))  # type: ignore[union-attr]
    assert cli(top, "--task", "run", "-k", "good|map").exit_code == 1
    found = cli(top, "--task", "run", "-k", "good|map", "--allow-skipped")
    assert found.exit_code == 0 and "2 files: 1 passed, 1 skipped" in found.output


def test_compare_with_onnxruntime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    save(tmp_path / "good.onnx")
    text(tmp_path / "custom.onnx", "g (float[2] x) => (float[2] y) { h = Relu(x) y = Mish(h) }")  # an operator of opset 18
    found = cli(tmp_path, "--task", "compare", "--json", "-n", 1)
    rows = {r["file"]: r for r in json.loads(found.stdout)["rows"]}
    good = rows["good.onnx"]
    assert good["status"] == "passed" and good["facts"]["values"] == 2 and 0 <= good["facts"]["worst"] < 1
    assert rows["custom.onnx"]["status"] == "refused" and found.exit_code == 1
    assert "onnxruntime" in json.loads(found.stdout)["versions"]


def test_a_difference_is_a_row(tmp_path: Path, home: Path) -> None:
    """The other engine, onnx's reference, is made wrong in its child."""
    save(tmp_path / "m" / "a.onnx")
    text(tmp_path / "m" / "b.onnx", "g (float[2] x) => (float[2] y) { y = Relu(x) }")
    with (home / "sitecustomize.py").open("a") as hook:
        hook.write("import numpy\n_tanh = numpy.tanh\n"
                   "class Off:\n    def __call__(self, x, *a, **k):\n        return _tanh(x, *a, **k) * numpy.float32(1.01)\n"
                   "import onnx.reference.ops.op_tanh as t\nt.Tanh._run = lambda self, x: (Off()(x),)\n")  # fmt: skip
    found = cli(tmp_path / "m", "--task", "compare", "--against", "reference", "--json", "-n", 1)
    rows = {r["file"]: r for r in json.loads(found.stdout)["rows"]}
    assert found.exit_code == 1 and {n: r["status"] for n, r in rows.items()} == {"a.onnx": "differs", "b.onnx": "passed"}
    assert "Tanh" in rows["a.onnx"]["reason"] and rows["a.onnx"]["facts"]["value"] == "y"


# --- results ----------------------------------------------------------------------------------------------------------


def test_finished_work_is_not_repeated(tmp_path: Path, home: Path) -> None:
    top, results = tmp_path / "m", tmp_path / "r"
    for i in range(3):
        save(top / f"{i}.onnx", i)
    save(top / "copy.onnx", 0)
    first = cli(top, "--task", "run", "--results", results)
    names = {n for _, n in killed_sweeps.opened(home)}
    assert first.exit_code == 0 and len(list(results.glob("*.json"))) == 3 and len(names) == 3, names  # equal content runs once
    count = len(killed_sweeps.opened(home))
    second = cli(top, "--task", "run", "--results", results)
    assert second.exit_code == 0 and "4 files: 4 passed; 4 were finished before" in second.output
    assert len(killed_sweeps.opened(home)) == count

    save(top / "1.onnx", 9)
    third = cli(top, "--task", "run", "--results", results)
    new = killed_sweeps.opened(home)[count:]
    assert "3 were finished before" in third.output and {n for _, n in new} == {"1.onnx"}
    assert "finished before" not in cli(top, "--task", "run", "--results", results, "--again", "-n", 1).output


def test_a_result_depends_on_all_files_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m" / "a.onnx"
    path.parent.mkdir()
    onnx.save(net(0), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    data_set(path)

    def keys() -> dict[str, str]:
        return {t: run._key(path, SweepSettings(t)) for t in ("check", "run", "conform")}

    first = keys()
    assert len(set(first.values())) == 3 and first == keys()
    data = bytearray((path.parent / "w.bin").read_bytes())
    data[0] ^= 1
    (path.parent / "w.bin").write_bytes(data)
    second = keys()
    assert all(first[t] != second[t] for t in first)
    data_set(path, np.ones((2, 3), np.float32))
    third, other = keys(), run._key(path, SweepSettings("run", seed=1))
    assert other != third["run"] == run._key(path, SweepSettings("run", timeout=1.0))
    assert third["run"] == second["run"] and third["conform"] != second["conform"]
    monkeypatch.setattr(onnx, "__version__", "0.0")
    assert all(keys()[t] != third[t] for t in first)


def test_damaged_results_and_other_limits_run_again(tmp_path: Path, home: Path) -> None:
    top, results = tmp_path / "m", tmp_path / "r"
    save(top / "slow.onnx")
    save(top / "good.onnx", 1)
    line = (top, "--task", "check", "--results", results, "-n", 1, "--timeout")
    found = cli(*line, 5, "--json")
    assert statuses(found) == {"slow.onnx": "timeout", "good.onnx": "passed"}
    assert "2 were finished before" in cli(*line, 5).output
    assert "; 1 were finished before" in cli(*line, 4.9).output
    for path in results.glob("*.json"):
        path.write_text('{"schema": "sonnx.sweep.result", "answer": {"status": 3}}')
    assert "finished before" not in cli(*line, 5, "-k", "good").output


@pytest.mark.parametrize("how", ["other content", "a link", "a link to nothing", "a folder"])
def test_what_is_no_result_is_neither_read_nor_replaced(how: str, tmp_path: Path, home: Path) -> None:
    """Nor is the file that a link names; no process is started before it is refused."""
    results, other = tmp_path / "r", tmp_path / "precious"
    model = save(tmp_path / "m" / "a.onnx")
    path = results / f"{run._key(model, SweepSettings('check'))}.json"
    results.mkdir()
    if how == "a folder":
        path.mkdir()
    elif how == "other content":
        path.write_text("precious")
    else:
        path.symlink_to(other)
    if how == "a link":
        assert sweep_one(model, "check", results=tmp_path / "s")["status"] == "passed"
        other.write_bytes(next((tmp_path / "s").iterdir()).read_bytes().replace(b"passed", b"failed"))
    before, count = other.exists() and other.read_bytes(), len(killed_sweeps.opened(home))
    found = cli(tmp_path / "m", "--task", "check", "--results", results, "-n", 1)
    assert found.exit_code == 3 and "SX351" in found.stderr, found.output
    with pytest.raises(InvalidInput, match="SX351"):
        sweep_one(model, "check", results=results)
    assert (other.exists() and other.read_bytes()) == before and [p.name for p in results.iterdir()] == [path.name]
    assert how != "other content" or path.read_text() == "precious"
    assert len(killed_sweeps.opened(home)) == count


def test_a_file_that_changes_during_its_run_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, passed = save(tmp_path / "m" / "a.onnx"), {"status": "passed", "reason": "", "code": "", "facts": {}, "seconds": 0.1}

    def answers(*_: Any, **__: Any) -> Any:
        save(path, 5)
        yield 0, passed

    monkeypatch.setattr(run, "settle_all", answers)
    found = Sweep({"a": path}, SweepSettings("run"), tmp_path / "r").run()
    assert found.rows[0].status == "error" and "changed" in found.rows[0].reason and not (tmp_path / "r").exists()


# --- files that kill their process, kills from outside ----------------------------------------------------------------


def test_files_that_kill_their_process_are_rows(tmp_path: Path, home: Path) -> None:
    top = tmp_path / "m"
    for i, name in enumerate(("a", "crash", "exit", "large", "once", "z")):
        save(top / f"{name}.onnx", i)
    (home / "armed").touch()
    found = cli(top, "--task", "check", "--json", "-n", 1)
    rows = {r["file"]: r for r in json.loads(found.stdout)["rows"]}
    assert {n.removesuffix(".onnx"): r["status"] for n, r in rows.items()} == {
        "a": "passed", "crash": "died", "exit": "died", "large": "memory", "once": "passed", "z": "passed",
    }  # fmt: skip
    assert "died 2 times: SIGSEGV" in rows["crash.onnx"]["reason"] and "exit code 7" in rows["exit.onnx"]["reason"]
    tries = [n for _, n in killed_sweeps.opened(home)]
    assert tries.count("crash.onnx") == tries.count("exit.onnx") == 2


def test_one_file_in_a_worker_of_a_cluster(tmp_path: Path, home: Path) -> None:
    """The same rows, from the function for pools; it and its arguments can be pickled."""
    top, results = tmp_path / "m", tmp_path / "r"
    files = {n: str(save(top / f"{n}.onnx", i)) for i, n in enumerate(("good", "crash", "large", "slow"))}
    call = pickle.loads(pickle.dumps(sweep_one))
    rows = {n: call(p, "run", results=str(results), timeout=4.0, name=f"{n}.onnx") for n, p in files.items()}
    assert {n: r["status"] for n, r in rows.items()} == {"good": "passed", "crash": "died", "large": "memory", "slow": "timeout"}
    count = len(killed_sweeps.opened(home))
    again = {n: call(p, "run", results=str(results), timeout=4.0, name=f"{n}.onnx") for n, p in files.items()}
    assert again == rows and len(killed_sweeps.opened(home)) == count
    whole = Sweep(find_files(top, "run"), SweepSettings("run", timeout=4.0), results).run()
    assert [r.to_dict() for r in whole.rows] == [rows[n] for n in sorted(rows)]


def test_deaths_are_counted_by_who_caused_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_exhaustions", lambda: "oom_kill 0")
    outside = run._Deaths(memory="oom_kill 0")
    for _ in range(run.OUTSIDE_DEATHS):
        assert outside.answer is None
        outside.count(ChildFailure("died", "", -signal.SIGKILL))
    assert outside.answer and outside.answer["status"] == "died" and "another" in outside.answer["reason"]
    exhausted = run._Deaths(memory="oom_kill 0")
    for n in (1, 2):  # the kernel has killed it
        monkeypatch.setattr(run, "_exhaustions", lambda n=n: f"oom_kill {n}")
        exhausted.count(ChildFailure("died", "", -signal.SIGKILL))
    assert exhausted.answer and "SIGKILL" in exhausted.answer["reason"]
    with pytest.raises(SonnxError, match="must be able to start"):
        run._Deaths().count(ChildFailure("died", "exit code 1", 1, started=False))


KILLED = """
if any(a.endswith("processes.py") for a in sys.orig_argv):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_children_that_are_killed_again_and_again_are_rows(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, while they start: the files are rows, and their results are not stored."""
    monkeypatch.setattr(run, "_exhaustions", lambda: "oom_kill 0")
    for i in range(3):
        save(tmp_path / "m" / f"{i}.onnx", i)
    with (home / "sitecustomize.py").open("a") as hook:
        hook.write(KILLED)
    found = cli(tmp_path / "m", "--task", "check", "--results", tmp_path / "r", "-n", 1, "--json")
    rows = json.loads(found.stdout)["rows"]
    assert found.exit_code == 1 and [(r["status"], r["code"], r["key"]) for r in rows] == [("died", "SX803", "")] * 3
    assert all("ended by another one while it started: SIGKILL" in r["reason"] for r in rows)
    row = sweep_one(tmp_path / "m" / "0.onnx", "check", results=tmp_path / "r", timeout=33.0)  # no child waits for these settings
    assert (row["status"], row["code"]) == ("died", "SX803") and "ended by another one 5 times" in row["reason"]
    assert not (tmp_path / "r").exists()


def test_a_sweep_keeps_no_children_and_no_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_IDLE", 0.2)
    digests, paths = len(source._digests), [save(tmp_path / f"{i}.onnx", i) for i in range(2)]
    for timeout in (30.0, 40.0):
        assert sweep_one(paths[0], "check", timeout=timeout)["status"] == "passed"
    settings = [SweepSettings("check", timeout=t) for t in (30.0, 40.0)]
    end = time.monotonic() + 60
    while any(s in run._idle for s in settings) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(s in run._idle for s in settings)
    assert Sweep({p.name: p for p in paths}, SweepSettings("check")).run(1).good()
    assert len(source._digests) == digests


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the children of a process are read from /proc")
def test_a_child_that_is_stopped_ends_with_a_killed_sweep(tmp_path: Path, home: Path) -> None:
    """It cannot notice by itself that its parent has ended."""
    save(tmp_path / "m" / "slow.onnx")
    made = killed_sweeps.command(tmp_path / "m", tmp_path / "r", home, "check", 0.0)
    killed_sweeps._begun(made, home)
    inner = killed_sweeps.children(made.pid)
    for child in inner:
        os.kill(child, signal.SIGSTOP)
    made.kill()
    made.communicate()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in inner) and time.monotonic() < end:
        time.sleep(0.05)
    assert inner and not any(Path(f"/proc/{child}").exists() for child in inner)


def test_a_limit_of_memory(tmp_path: Path) -> None:
    save(tmp_path / "a.onnx")
    body = "g (float[1] x) => (float[n] y) <int64[1] s = {800000000}> { c = ConstantOfShape(s) y = Add(c, x) }"
    text(tmp_path / "large.onnx", body)  # 3.2 GB
    found = cli(tmp_path, "--task", "run", "--memory", 2048, "-n", 1, "--json")
    assert statuses(found) == {"a.onnx": "passed", "large.onnx": "memory"}


def test_a_child_that_cannot_start_is_an_error(tmp_path: Path, home: Path) -> None:
    save(tmp_path / "m" / "a.onnx")
    with (home / "sitecustomize.py").open("a") as hook:
        hook.write("sys.modules['singa_backend.sweep.tasks'] = None\n")
    found = cli(tmp_path / "m", "--task", "check", "-n", 1)
    assert found.exit_code == 3 and "must be able to start" in found.stderr


FILES, KILLS, SEED = (int(os.environ.get(f"SONNX_SWEEP_{n}", d)) for n, d in (("FILES", 16), ("KILLS", 3), ("SEED", 1)))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the children of a process are read from /proc")
def test_kills_at_drawn_times_change_nothing(tmp_path: Path) -> None:
    """`python -m tests.helpers.killed_sweeps 500 50 1` is the same with 500 files and 50 kills."""
    folder = killed_sweeps.models(tmp_path / "m", FILES)
    plain = killed_sweeps.command(folder, tmp_path / "whole", killed_sweeps.hook(tmp_path / "plain"), "run", 0.0)
    whole = killed_sweeps.report(plain, 900)
    assert len(whole["rows"]) == FILES and set(whole["counts"]) == {"passed", "refused"}
    home, longest = killed_sweeps.hook(tmp_path / "hook"), FILES * 0.22 / KILLS
    found = killed_sweeps.killed(folder, tmp_path / "killed", home, "run", kills=KILLS, pause=0.15, longest=longest, seed=SEED)
    print({k: v for k, v in found.items() if k != "report"})
    assert found["report"] == whole
    assert not found["early"] and found["parents"] + found["children"] == KILLS
    assert not found["repeated"] and found["amid"]


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path, home: Path) -> None:
    top, results = tmp_path / "m", tmp_path / "r"
    save(top / "a.onnx")
    save(top / "slow.onnx", 1)
    path = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, "-m", "singa.cli", "sweep", str(top), "--task", "run", "--results", str(results), "-n", "1"]
    made = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    limit = time.monotonic() + 100
    while not list(results.glob("*.json")) and time.monotonic() < limit:
        time.sleep(0.05)
    made.send_signal(signal.SIGINT)
    out, told = made.communicate(timeout=60)
    assert made.returncode == 130 and "Traceback" not in told, told
    assert "2 files: 1 passed; 1 have no result yet" in out and "the same command continues" in told
    assert len(list(results.glob("*.json"))) == 1


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "told"), [
    ("m", "--task"), ("m --task run --again", "--again needs --results"),
    ("m --task check --random 3", "--random is for --task"),
    ("m --task run --against reference", "--against is for --task compare"), ("m --task run -k nothing", "whose name matches"),
    ("m --task conform", "test_data_set_"), ("empty --task run", "must have a file .onnx"),
    ("m --task all", "'all' is not one of"),
    ("m --task run --results m/a.onnx", "a.onnx"),
])  # fmt: skip
def test_arguments_are_refused_at_once(line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("m/a.onnx"))
    Path("empty").mkdir()
    monkeypatch.setattr(run, "settle_all", None)
    found = cli(*line.split())
    assert found.exit_code in (2, 3) and told in " ".join(found.stderr.split()), found.output


def test_settings_are_checked() -> None:
    for more in ({"task": "walk"}, {"against": "torch"}, {"seed": -1}, {"timeout": 0.0}, {"memory": 1}):
        with pytest.raises(InvalidInput):
            SweepSettings(**{"task": "run", **more})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        sweep_one("a.onnx", "walk")


def test_rows_of_one_sweep_from_several_threads(tmp_path: Path) -> None:
    """Dask calls a function from the threads of a worker."""
    paths = [save(tmp_path / f"{i}.onnx", i) for i in range(4)]
    rows: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda p=p: rows.append(sweep_one(p, "check", results=tmp_path / "r"))) for p in paths]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [r["status"] for r in rows] == ["passed"] * 4 and len({r["key"] for r in rows}) == 4


def test_external_data_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    made = net(0)
    onnx.external_data_helper.set_external_data(made.graph.initializer[0], "../secret", length=48)
    made.graph.initializer[0].ClearField("raw_data")
    made.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.onnx").write_bytes(made.SerializeToString())
    (tmp_path / "secret").write_bytes(bytes(48))
    before = run._key(tmp_path / "m" / "a.onnx", SweepSettings("check"))
    (tmp_path / "secret").write_bytes(bytes(47) + b"x")
    assert run._key(tmp_path / "m" / "a.onnx", SweepSettings("check")) == before
    assert sweep_one(tmp_path / "m" / "a.onnx", "check")["status"] == "refused"
