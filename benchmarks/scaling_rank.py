"""What each process of benchmarks/scaling.py runs:  mpiexec -n 2 python scaling_rank.py '{"job": "time", ...}'

Rank 0 prints the result as one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from singa import autograd, device, layer, model, opt, tensor
from singa_backend.collectives import Communicator, communicator
from singa_backend.collectives.communicator import total

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from zoo.residual import ResNet18

Json = dict[str, Any]
RATE, MOMENTUM = 0.01, 0.9


class Trained(model.Model):
    """A model whose step has the documented option of the exchange."""

    optimizer: Any

    def train_one_batch(self, x: Any, y: Any, mode: str = "plain", spars: float = 0.05) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), y)
        if mode == "plain":
            self.optimizer(loss)
        elif mode == "half":
            self.optimizer.backward_and_update_half(loss)
        elif mode == "partialUpdate":
            self.optimizer.backward_and_partial_update(loss)
        else:
            self.optimizer.backward_and_sparse_update(loss, spars=spars, topK=mode == "sparseTopK")
        return loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Residual(Trained, ResNet18):
    """ResNet-18 with 1,000 classes: 11,689,512 parameters."""


class Perceptron(Trained):
    """784 inputs, two hidden layers of 2,048, 10 classes: 5,824,522 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = layer.Linear(2048), layer.Linear(2048), layer.Linear(10)

    def forward(self, x: Any) -> Any:
        return self.c(autograd.relu(self.b(autograd.relu(self.a(x)))))


NETS: dict[str, Callable[[], Trained]] = {"resnet18": Residual, "mlp": Perceptron}


class Watched:
    """A Communicator that measures the time spent in its calls.

    Args:
        comm: The communicator that does the work.

    Attributes:
        started: Seconds spent in starting operations, and in `progress`.
        waited: Seconds spent in waiting for the end of operations.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.started = self.waited = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_reduce(self, array: Any) -> Any:
        return self._start(self.comm.all_reduce, array)

    def all_gather(self, array: Any, sizes: Sequence[int] | None = None) -> Any:
        return self._start(self.comm.all_gather, array, sizes)

    def progress(self) -> None:
        begin = time.perf_counter()
        self.comm.progress()
        self.started += time.perf_counter() - begin

    def _start(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        handle = call(*arguments)
        self.started += time.perf_counter() - begin
        return WatchedHandle(self, handle)


class WatchedHandle:
    """The handle of an operation of a Watched."""

    def __init__(self, watch: Watched, handle: Any) -> None:
        self.watch, self.handle = watch, handle

    def wait(self) -> Any:
        begin = time.perf_counter()
        result = self.handle.wait()
        self.watch.waited += time.perf_counter() - begin
        return result


def barrier(comm: Communicator) -> None:
    total(comm, np.zeros(1))


def built(job: Json, comm: Communicator, exchange: bool) -> tuple[Trained, list[Any]]:
    """A net with an optimizer, equal on all ranks, and the batch of this rank."""
    device.get_default_device().SetRandSeed(1)
    net = NETS[job["net"]]()
    sgd = opt.SGD(lr=RATE, momentum=MOMENTUM)
    net.set_optimizer(opt.DistOpt(sgd, communicator=comm) if exchange else sgd)
    rng = np.random.default_rng(comm.rank)
    picture = job["net"] == "resnet18"
    x = rng.standard_normal((job["batch"], *((3, job["size"], job["size"]) if picture else (784,)))).astype(np.float32)
    y = rng.integers(0, 1000 if picture else 10, job["batch"]).astype(np.int32)
    batch = [tensor.Tensor(data=a, requires_grad=False) for a in (x, y)]
    net.compile(batch[:1], is_train=True, use_graph=job.get("graph", False))
    if exchange and comm.size > 1:
        net.optimizer.broadcast_params(net)
    return net, batch


def timed(comm: Communicator, job: Json) -> Json:
    """Seconds of steps by mode: the slowest rank's wall time; means over the ranks of CPU time and time in the communicator."""
    results: Json = {}
    for mode in job["modes"]:
        watch = Watched(comm)
        net, batch = built(job, watch, job["exchange"])
        options = (mode,) if job["exchange"] else ()
        for _ in range(job["warm"]):
            net(*batch, *options)
        barrier(comm)
        watch.started = watch.waited = 0.0
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(job["steps"]):
            net(*batch, *options)
        cpu = time.process_time() - cpu
        barrier(comm)
        own = np.array([time.perf_counter() - begin, cpu, watch.started, watch.waited])
        ranks = np.array(comm.all_gather(own).wait())
        wall, cpus, started, waited = ranks.T / job["steps"]
        means = {"cpu": cpus, "started": started, "waited": waited}
        results[mode] = {"step": float(wall.max()), **{name: float(values.mean()) for name, values in means.items()}}
    return results


def counted(comm: Communicator, job: Json) -> Json:
    """Bytes of steps after the first, by mode, and what the formula needs: sizes, and how many values reach the bound.

    Those values are counted by a backward pass before the step, from the gradients and the residuals.
    """
    sizes: list[int] = []
    modes: Json = {}
    for mode in job["modes"]:
        net, batch = built(job, comm, True)
        spars = job["spars"].get(mode, 0.05)
        sent, chosen = [], []
        for _ in range(1 + job["steps"]):
            loss = autograd.softmax_cross_entropy(net.forward(batch[0]), batch[1])
            pairs = list(autograd.backward(loss))
            sizes = [p.size() for p, _ in pairs]
            residuals = net.optimizer.get_states()
            found = 0
            for p, g in pairs if mode == "sparseThreshold" else ():
                kept = residuals.get(f"residual.{p.name}")
                found += int((np.abs(g.data + (0 if kept is None else kept.data)) >= np.float32(spars)).sum())
            before = comm.sent
            net(*batch, mode, spars)
            sent.append(comm.sent - before)
            chosen.append(found)
        modes[mode] = {"spars": spars, "sent": sent, "chosen": chosen}
    return {"sizes": sizes, "modes": modes}


def linked(comm: Communicator, job: Json) -> Json:
    """Seconds of an all-reduce of float32 by size in bytes: the lowest."""
    found = {}
    for size in job["sizes"]:
        array, times = np.ones(max(size // 4, 1), np.float32), []
        for _ in range(job["repeats"]):
            barrier(comm)
            begin = time.perf_counter()
            comm.all_reduce(array).wait()
            times.append(time.perf_counter() - begin)
        found[str(array.nbytes)] = min(times)
    return {"seconds": found}


def phased(comm: Communicator, job: Json) -> Json:
    """CPU seconds of the parts of a step without an exchange, and of adding a received value: medians."""
    net, batch = built(job, comm, False)
    parts: list[list[float]] = []
    for _ in range(job["warm"] + job["steps"]):
        marks = [time.process_time()]
        loss = autograd.softmax_cross_entropy(net.forward(batch[0]), batch[1])
        marks.append(time.process_time())
        pairs = list(autograd.backward(loss))
        marks.append(time.process_time())
        for p, g in pairs:
            net.optimizer.apply(p.name, p, g)
        net.optimizer.step()
        marks.append(time.process_time())
        parts.append([b - a for a, b in itertools.pairwise(marks)])
    forward, backward, update = (statistics.median(p) for p in zip(*parts[job["warm"] :], strict=True))
    size = 1 << 21
    sum_, values = np.zeros(size, np.float32), np.ones(size // 20, np.float32)
    places = np.sort(np.random.default_rng(0).permutation(size)[: len(values)]).astype(np.int32)
    times = []
    for _ in range(21):  # as the operator AllReduceDone adds the values of a rank
        begin = time.process_time()
        where = places.astype(np.int64)
        sum_[where] = sum_[where] + values
        times.append(time.process_time() - begin)
    return {"forward": forward, "backward": backward, "update": update, "value": statistics.median(times) / len(values)}


JOBS: dict[str, Callable[[Communicator, Json], Json]] = {"time": timed, "bytes": counted, "link": linked, "phases": phased}


def main() -> None:
    job = json.loads(sys.argv[1])
    comm = communicator(timeout=60.0)
    result = JOBS[job["job"]](comm, job)
    if comm.rank == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
