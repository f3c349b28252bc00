"""The bits of recorded trainings: equal from run to run and after a resume, at any fixed number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.frontend.test_train_checkpoint import fill
from tests.helpers.paths import PROJECT

from singa.cli import main
from singa_backend.kernels import onednn
from singa_backend.kernels.options import VARIABLE

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

PROGRAM = """
import hashlib, json, sys
import numpy as np
from singa import autograd, device, layer, opt
from singa.model import Model
from singa.tensor import Tensor

class Net(Model):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = layer.Conv2d(16, 3, padding=1), layer.BatchNorm2d()
        self.pool, self.flat, self.last = layer.MaxPool2d(2, 2), layer.Flatten(), layer.Linear(10)
        self.optimizer = opt.AdamW(0.01)
    def forward(self, x):
        return self.last(self.flat(self.pool(autograd.relu(self.norm(self.conv(x))))))
    def train_one_batch(self, x, t):
        loss = autograd.softmax_cross_entropy(autograd.dropout(self.forward(x), 0.1), t)
        self.optimizer(loss)
        return loss

def bits(net):
    named = {**net.get_states(), **net.optimizer.get_states()}
    return hashlib.sha256(b"".join(np.asarray(t.data).tobytes() for t in named.values())).hexdigest()

device.default_device.SetRandSeed(1)
net = Net()
rng = np.random.default_rng(0)
batches = [(rng.standard_normal((32, 3, 32, 32)).astype("float32"), rng.integers(0, 10, 32)) for _ in range(6)]
net.compile([Tensor(data=batches[0][0])], use_graph=True, deterministic=sys.argv[1] == "deterministic")
for x, t in batches:
    net(Tensor(data=x), Tensor(data=t))
steps = [s for found in net._steps.values() for s in found]
print(json.dumps([bits(net), [str(s._session.reason) for s in steps], [s._session.options.threads for s in steps]]))
"""


def ran(kind: str, threads: int | None) -> list[object]:
    """The digest of all states after a training in a process, why no plan ran, and its threads."""
    env = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "PYTEST_XDIST_WORKER_COUNT", "OMP_NUM_THREADS")}
    if threads is not None:
        env[VARIABLE] = str(threads)
    env["PYTHONPATH"] = os.pathsep.join([str(PROJECT / "backend"), str(PROJECT / "frontend"), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], env=env, capture_output=True, text=True, check=True, timeout=120)
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_are_equal_from_process_to_process(threads: int) -> None:
    first, second = ran("", threads), ran("", threads)
    assert first == second and first[1:] == [["None"], [threads]]


def test_a_deterministic_training_has_the_bits_of_one_thread() -> None:
    """Whatever the number of threads that the process has otherwise."""
    found = ran("deterministic", None)
    assert found == ran("deterministic", 1) == ran("deterministic", 2) and found[2] == [1]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_resumed_training_has_the_bits_of_an_unbroken(threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a fixed number of threads; with another number, the command reports both."""
    monkeypatch.setenv(VARIABLE, threads)
    folder = fill(tmp_path)

    def train(*flags: str) -> str:
        common = ["train", str(folder / "m.onnx"), "--data", str(folder / "data.npz"), "--batch-size", "4", "--optimizer", "adam"]
        done = CliRunner().invoke(main, [*common, *flags], catch_exceptions=False)
        assert not done.exit_code, done.output
        return done.output

    kept, other = str(folder / "run.ckpt"), str(folder / "other.ckpt")
    train("--epochs", "4", "--checkpoint", other)
    train("--epochs", "2", "--checkpoint", kept)
    assert "threads" not in train("--epochs", "4", "--checkpoint", kept, "--resume")
    with np.load(_tensors(Path(kept))) as a, np.load(_tensors(Path(other))) as b:
        assert set(a.files) == set(b.files) and [n for n in a.files if not np.array_equal(a[n], b[n])] == []
    another = "1" if threads == "2" else "2"
    monkeypatch.setenv(VARIABLE, another)
    told = train("--epochs", "5", "--checkpoint", kept, "--resume")
    assert f"threads were {threads}, are {another}: bits differ" in " ".join(told.split())


def _tensors(path: Path) -> Path:
    """The archive of arrays in a file of states."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        made = path.with_suffix(".npz")
        made.write_bytes(archive.read("tensor_dict.npz"))
    return made
