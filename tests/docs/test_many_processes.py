"""The recipes of docs/many-processes.md as they are written there, on two workers, one of which is killed in the middle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.helpers.paths import PROJECT

MORTAL = '''
"""A model one of whose processes dies, once, in its third run."""

import os
import signal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from singa_backend import SingaBackend, SingaRep

BATCHES, SIZE = 12, 4
X = np.arange(BATCHES * SIZE * 2, dtype=np.float32).reshape(BATCHES, SIZE, 2)
RUNS = 0


class Mortal(SingaRep):
    def run(self, inputs, **kwargs):
        global RUNS
        RUNS += 1
        with open(f"{self.folder}/{os.getpid()}.runs", "a") as file:
            file.write("x")
        if RUNS == 3:
            try:
                os.remove(f"{self.folder}/armed")
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().run(inputs, **kwargs)


def prepared():
    w = numpy_helper.from_array(np.array([[1, 2], [3, 4]], np.float32), "w")
    values = [helper.make_tensor_value_info(n, 1, ["N", 2]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "net.onnx")
    rep = SingaBackend.prepare("net.onnx", threads=1)
    rep.__class__ = Mortal
    rep.folder = os.getcwd()
    open("armed", "w").close()
    return rep


def check(results):
    expected = np.stack([X[..., 0] + 3 * X[..., 1], 2 * X[..., 0] + 4 * X[..., 1]], -1)
    np.testing.assert_array_equal(np.asarray(results).reshape(expected.shape), expected)
    assert not os.path.exists("armed"), "no worker was killed"
    print("complete")
'''

POOL = """
from mortal import X, check, prepared
from predict_pool import predict_all

if __name__ == "__main__":
    check(predict_all(prepared(), list(X)))
"""

FATAL = """
import os


class Fatal:
    def __reduce__(self):
        return os.abort, ()
"""

DASK = """
from dask.distributed import Client, LocalCluster
from mortal import X, check, prepared
from predict_dask import predict_all

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster:
        client = Client(cluster)
        check(predict_all(client, prepared(), list(X)))
        client.close()
"""

RAY = """
import ray
from mortal import SIZE, X, check, prepared
from predict_ray import predict_all

ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=100_000_000)
check(predict_all(prepared(), X.reshape(-1, 2), SIZE))
"""


SWEPT = '''
"""Ten models; the worker that receives the seventh is killed, once."""

import os
import signal
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from singa_backend.sweep import Sweep, SweepSettings, find_files


class Mortal:
    def __init__(self, path):
        self.path, self.home = path, os.getcwd()

    def __fspath__(self):
        try:
            os.remove(f"{self.home}/armed")
        except FileNotFoundError:
            return self.path
        os.kill(os.getpid(), signal.SIGKILL)


def models():
    Path("models").mkdir()
    for i in range(10):
        w = numpy_helper.from_array(np.full((2, 2), i, np.float32), "w")
        values = [helper.make_tensor_value_info(n, 1, ["N", 2]) for n in "xy"]
        graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [w])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), f"models/{i}.onnx")
    open("armed", "w").close()
    paths = [str(Path("models", f"{i}.onnx").resolve()) for i in range(10)]
    return [*paths[:6], Mortal(paths[6]), *paths[7:]], "run", str(Path("results").resolve())


def check(rows):
    assert [r["status"] for r in rows] == ["passed"] * 10, rows
    assert [Path(r["file"]).name for r in rows] == [f"{i}.onnx" for i in range(10)]
    assert not os.path.exists("armed"), "no worker was killed"
    sweep = Sweep(find_files("models", "run"), SweepSettings("run"), "results")
    assert sweep.run().good() and sweep.kept == 10
    print("complete")
'''

SWEEP_POOL = """
from swept import check, models
from sweep_pool import sweep_all

if __name__ == "__main__":
    check(sweep_all(*models()))
"""

SWEEP_DASK = """
from dask.distributed import Client, LocalCluster
from swept import check, models
from sweep_dask import sweep_all

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None, host="127.0.0.1") as cluster:
        client = Client(cluster)
        check(sweep_all(client, *models()))
        client.close()
"""

SWEEP_RAY = """
import ray
from swept import check, models
from sweep_ray import sweep_all

ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=100_000_000)
check(sweep_all(*models()))
"""


def recipes() -> dict[str, str]:
    """The programs of the page, by their names."""
    blocks = re.findall(r"```python\n(.*?)```", (PROJECT / "docs" / "many-processes.md").read_text(encoding="utf-8"), re.DOTALL)
    return {re.match(r'"""(\w+\.py)"""', block)[1]: block for block in blocks}  # type: ignore[index]


def run(name: str, driver: str, folder: Path, task: str = "predict") -> str:
    (folder / f"{task}_{name}.py").write_text(recipes()[f"{task}_{name}.py"])
    (folder / "mortal.py").write_text(MORTAL)
    (folder / "swept.py").write_text(SWEPT)
    (folder / "driver.py").write_text(driver)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "driver.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "complete" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_every_recipe_is_run() -> None:
    assert set(recipes()) == {f"{task}_{where}.py" for task in ("predict", "sweep") for where in ("pool", "dask", "ray")}


def test_a_pool_of_processes(tmp_path: Path) -> None:
    run("pool", POOL, tmp_path)
    runs = [p.read_text() for p in tmp_path.glob("*.runs")]
    assert len(runs) >= 2 and sum(map(len, runs)) < 2 * 12  # of a pool, one worker may compute all; no result that arrived again


def test_a_pool_whose_workers_always_die(tmp_path: Path) -> None:
    driver = POOL.replace("list(X)", "[Fatal()] * 2, pools=2").replace("if __name__", FATAL + "\n\nif __name__")
    with pytest.raises(AssertionError, match=r"workers died in 2 pools; batches without a result: \[0, 1\]"):
        run("pool", driver, tmp_path)


def test_a_sweep_by_a_pool(tmp_path: Path) -> None:
    run("pool", SWEEP_POOL, tmp_path, "sweep")


@pytest.mark.skipif(find_spec("distributed") is None, reason="Dask is not installed: tox -e many-processes")
def test_a_sweep_by_dask(tmp_path: Path) -> None:
    run("dask", SWEEP_DASK, tmp_path, "sweep")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: tox -e many-processes")
def test_a_sweep_by_ray(tmp_path: Path) -> None:
    run("ray", SWEEP_RAY, tmp_path, "sweep")


@pytest.mark.skipif(find_spec("distributed") is None, reason="Dask is not installed: tox -e many-processes")
def test_dask(tmp_path: Path) -> None:
    run("dask", DASK, tmp_path)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: tox -e many-processes")
def test_ray_data(tmp_path: Path) -> None:
    run("ray", RAY, tmp_path)
