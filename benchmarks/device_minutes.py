"""Measures this project and PyTorch on a CUDA device in at most eight minutes; a line of JSON for each item.

    python benchmarks/device_minutes.py --out FOLDER

Each item runs in a process that is killed at the item's deadline: an item that hangs costs only itself.  The line of an item is
printed and added to FOLDER/device-minutes.jsonl when the item ends, with all that it had measured until then.  `--rehearse`
reduces sizes and repeats, for a machine without a device.  PyTorch is measured if it is installed: eagerly and as a CUDA graph,
in float32 and in TF32, and compiled.

Times are of the wall, medians of some repeats; inputs are on the device.  Of products and small copies, those between the waits
are many calls, or many in one graph.  The nets have the topologies of published models and random weights.

Not measured, because this project does not have it: convolutions and attention by cuDNN, elementwise kernels that are not
CuPy's, products in TF32 or bfloat16, and the time on the device of single nodes of a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from singa_backend.comparison.verdict import same_bits  # noqa: E402
from singa_backend.conform import device_check_capture, device_check_peers, device_models  # noqa: E402
from singa_backend.conform.device_check import CheckSetup, Wrong  # noqa: E402
from singa_backend.conform.device_check_peers import seconds  # noqa: E402
from singa_backend.conform.device_models import Built, RandomNet  # noqa: E402
from singa_backend.io.files import write_text  # noqa: E402

TOTAL = 480.0
"""The seconds of all items together."""

DEVICE = "CUDA"


class Line(dict[str, Any]):
    """What an item measured; each value is printed as soon as it is there."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(json.dumps({name: value}), flush=True)


class Setup(NamedTuple):
    """How much an item does."""

    rehearse: bool

    @property
    def repeats(self) -> int:
        return 2 if self.rehearse else 20

    def size(self, whole: int, reduced: int) -> int:
        return reduced if self.rehearse else whole


def ms(run: Callable[[], Any], wait: Callable[[], Any], setup: Setup, calls: int = 1) -> float:
    """The median milliseconds of a call."""
    return round(1e3 * seconds(run, wait, calls, setup.repeats), 5)


def issue_ms(run: Callable[[], Any], setup: Setup) -> float:
    """The median milliseconds until a call returns, while the device has nothing else to do."""
    times = []
    for _ in range(setup.repeats):
        wait_for_device()
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    wait_for_device()
    return round(statistics.median(times), 5)


def wait_for_device() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


# --- versions, capture, primitives --------------------------------------------------------------------------------------


def versions(line: Line, setup: Setup) -> None:
    """Names and versions, and the clocks of the device."""
    from singa_backend.conform import device_check_page, device_check_stages

    details: dict[str, Any] = {}
    try:
        device_check_stages.versions(CheckSetup(DEVICE), details)
    finally:
        for name, value in device_check_page.public([{"details": details}])[0]["details"].items():
            line[name] = value
    line["PyTorch"] = metadata.version("torch") if _torch() else NO_TORCH
    names = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        line[names] = done.stdout.strip().splitlines()


def capture(line: Line, setup: Setup) -> None:
    """The stage `capture` of `sonnx device-check`."""
    with patch.object(device_check_capture, "REPLAYS", setup.size(device_check_capture.REPLAYS, 3)):
        device_check_capture.capture(CheckSetup(DEVICE), line)


def primitives(line: Line, setup: Setup) -> None:
    """Copies, an addition, products, and graphs that only launch."""
    import cupy

    from singa_backend.devices.device import resolve

    device = resolve(DEVICE)
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28)[: setup.size(4, 2)]:
        x, y = (cupy.ones(size // 4, cupy.float32) for _ in range(2))
        calls = setup.size(max(10, min(200, (1 << 26) // size)), 2)
        copy = ms(partial(y.data.copy_from_device_async, x.data, size), wait_for_device, setup, calls)
        add = ms(partial(cupy.add, x, x, y), wait_for_device, setup, calls)  # reads one array and writes one
        line[f"{size} bytes, GB/s"] = {"copy": rate(2 * size, copy), "CuPy's add": rate(2 * size, add)}
    for m, k, n in PRODUCTS if not setup.rehearse else [(32, 16, 8)]:
        line[f"product {m} x {k} x {n}"] = product(device, m, k, n, setup)
    one = cupy.ones(1, cupy.float32)
    wait_for_device()  # graphs are captured on other streams
    times = {}
    for nodes in (1, 10, 100, 1000)[: setup.size(4, 3)]:

        def chain(x: Any, nodes: int = nodes) -> Any:
            for _ in range(nodes):
                cupy.add(x, one, out=x)
            return x

        graph = device_check_capture.SmokeGraph(cupy, chain, np.ones(1, np.float32))
        times[nodes] = 1e3 * ms(graph.launch, wait_for_device, setup)
        host = 1e3 * issue_ms(graph.launch, setup)
        line[f"graph of {nodes} nodes, µs"] = {"launch and wait": round(times[nodes], 2), "launch": round(host, 2)}
    few, many = list(times)[-2:]
    line["a node of a graph, µs"] = round((times[many] - times[few]) / (many - few), 3)


PRODUCTS = ((4096, 4096, 4096), (128, 768, 768), (128, 768, 3072), (128, 3072, 768))
"""The sizes of products: a large one, and those of a layer of BERT-base at batch 1."""

_IN_GRAPH = 10
"""The products of one graph."""


def rate(amount: float, milliseconds: float) -> float:
    """Units of 1e9 a second."""
    return round(amount / milliseconds / 1e6, 2)


def product(device: Any, m: int, k: int, n: int, setup: Setup) -> dict[str, Any]:
    """TFLOP/s of one product by calls, by a graph, and by PyTorch's graph; the largest error, as a share of the largest value."""
    import cupy

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
    x, y = cupy.asarray(a), cupy.asarray(b)
    exact = a.astype(np.float64) @ b
    work = 2e-3 * m * k * n
    found: dict[str, Any] = {
        "error": float(np.abs(device.xp.matmul(x, y).get() - exact).max() / np.abs(exact).max()),
        "calls": rate(work, ms(lambda: device.xp.matmul(x, y), wait_for_device, setup, _IN_GRAPH)),
    }

    def several(x: Any) -> Any:
        return [device.xp.matmul(x, y) for _ in range(_IN_GRAPH)][-1]

    try:
        graph = device_check_capture.SmokeGraph(cupy, several, a)
        found["graph"] = rate(_IN_GRAPH * work, ms(graph.launch, wait_for_device, setup))
    except Exception as error:
        found["graph"] = refused(error)
    if torch := _torch():
        p, q = (torch.from_numpy(v).to(torch_device(torch)) for v in (a, b))
        for precision in PRECISIONS:
            device_check_peers.set_precision(torch, tf32=precision == "TF32")
            found[f"PyTorch, {precision}"] = peer(
                torch,
                "CUDA graph",
                lambda p, q: [p @ q for _ in range(_IN_GRAPH)],
                (p, q),
                setup,
                lambda t: rate(_IN_GRAPH * work, t),
            )
    return found


def refused(error: Exception) -> str:
    return f"not measured: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


# --- PyTorch ------------------------------------------------------------------------------------------------------------

NO_TORCH = "not measured: PyTorch is not installed"
PRECISIONS = ("float32", "TF32")


def _torch() -> Any:
    """PyTorch; None if it is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    torch.backends.cudnn.benchmark = True
    return torch


def torch_device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def peer(
    torch: Any, mode: str, function: Any, arguments: Any, setup: Setup, shown: Callable[[float], float] = float
) -> float | str:
    """The median milliseconds of a function of PyTorch in a mode, or what `shown` makes of them; why it was not measured."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    try:
        return shown(ms(device_check_peers.in_mode(torch, mode, function, *arguments), wait, setup))
    except Exception as error:
        return refused(error)


def torch_nets(line: Line, setup: Setup) -> None:
    """PyTorch's times of all nets: eager, and as a CUDA graph; nets of images with channels last too."""
    torch = _torch()
    if torch is None:
        line["PyTorch"] = NO_TORCH
        return
    for name, net in nets(setup.rehearse).items():
        with torch.device(torch_device(torch)):
            function, arguments = net.theirs()
        times = {}
        for precision in PRECISIONS:
            device_check_peers.set_precision(torch, tf32=precision == "TF32")
            for mode in ("CUDA graph", "eager"):
                times[f"{mode}, {precision}"] = peer(torch, mode, function, arguments, setup)
            if arguments[0].ndim == 4:
                last = {"memory_format": torch.channels_last}
                times[f"CUDA graph, channels last, {precision}"] = peer(
                    torch, "CUDA graph", function.to(**last), [a.to(**last) for a in arguments], setup
                )
                function.to(memory_format=torch.contiguous_format)
        line[f"{name}, ms"] = times


def compiled(line: Line, setup: Setup) -> None:
    """`torch.compile` of two nets, with its own graphs."""
    torch = _torch()
    if torch is None:
        line["PyTorch"] = NO_TORCH
        return
    for name, net in nets(setup.rehearse).items():
        if name in ("BERT-base x 128, batch 1", "ResNet-50, batch 1"):
            with torch.device(torch_device(torch)):
                function, arguments = net.theirs()
            device_check_peers.set_precision(torch, tf32=False)
            compiled = torch.compile(function, mode="default" if setup.rehearse else "max-autotune")
            line[f"{name}, ms"] = {"compiled, float32": peer(torch, "eager", compiled, arguments, setup)}


# --- the nets -----------------------------------------------------------------------------------------------------------


class Net(NamedTuple):
    """A net: a model of this project with its inputs, and a module of PyTorch with its arguments."""

    ours: Callable[[], Built]
    theirs: Callable[[], tuple[Any, Any]]


def nets(reduced: bool) -> dict[str, Net]:
    """The ten nets, in the order in which they are measured."""
    import cuda_counts

    image = {"width": 8, "size": 32, "classes": 10} if reduced else {}
    words: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "words": 50} if reduced else {}
    side, length, past = (32, 8, 8) if reduced else (224, 128, 512)
    small = words or {"layers": 4, "width": 256, "heads": 4, "words": 1000}

    def images(make: Callable[[], Any], batch: int) -> tuple[Any, Any]:
        import torch

        return make().eval(), (torch.randn(batch, 3, side, side),)

    def bert(batch: int, **sizes: Any) -> tuple[Any, Any]:
        import compare_nets
        import torch

        net = compare_nets.Bert(**_torch_sizes(sizes)).eval()
        ids = torch.randint(sizes.get("words", 30522), (batch, length))
        return net, (ids, torch.ones_like(ids), torch.zeros_like(ids))

    def gpt2() -> tuple[Any, Any]:
        import compare_nets
        import torch

        layers, width, heads = words.get("layers", 12), words.get("width", 768), words.get("heads", 12)
        kept = [torch.randn(1, heads, past, width // heads) for _ in range(2 * layers)]
        return compare_nets.Gpt2(**_torch_sizes(words)).eval(), (torch.randint(50, (1, 1)), *kept)

    recurrent = {"length": 4, "width": 8, "batch": 2} if reduced else {"length": 64, "width": 256, "batch": 8}
    found = {
        f"BERT-base x 128, batch {b}": Net(
            partial(device_models.bert, batch=b, length=length, **words), partial(bert, b, **words)
        )
        for b in (1, 8)
    }
    found |= {
        f"ResNet-50, batch {b}": Net(partial(device_models.resnet50, batch=b, **image), partial(images, _resnet50, b))
        for b in (1, 8)
    }
    found["GPT-2, one token, 512 past"] = Net(partial(device_models.gpt2, past=past, **words), gpt2)
    found["LSTM, both directions, batch 8"] = Net(partial(device_models.lstm, **recurrent), partial(_lstm, **recurrent))
    found |= {
        f"MobileNetV2, batch {b}": Net(partial(cuda_counts.mobilenet, b, side), partial(images, _mobilenet, b)) for b in (1, 8)
    }
    found["transformer, 4 layers, batch 8"] = Net(
        partial(device_models.bert, batch=8, length=length, **small), partial(bert, 8, **small)
    )
    widths = (16, 16, 10) if reduced else (784, 256, 10)
    found["perceptron, batch 128"] = Net(partial(perceptron, *widths), partial(_perceptron, *widths))
    return found


def _torch_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"depth" if n == "layers" else n: v for n, v in sizes.items()}


def _resnet50() -> Any:
    from compare_nets import Residual, conv, head
    from torch import nn

    parts: list[Any] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(conv(channels, inner, 1), conv(inner, inner, 3, stride), conv(inner, 4 * inner, 1, act=None))
            parts.append(Residual(body, None if block else conv(channels, 4 * inner, 1, stride, act=None), nn.ReLU))
            channels = 4 * inner
    return nn.Sequential(*parts, head(channels))


def _mobilenet() -> Any:
    import compare_nets

    return compare_nets.mobilenetv2()


def _lstm(length: int, width: int, batch: int) -> tuple[Any, Any]:
    import torch

    class Last(torch.nn.LSTM):
        """The last states of both directions."""

        def forward(self, x: Any) -> Any:
            return super().forward(x)[1][0].transpose(0, 1).reshape(batch, -1)

    return Last(width, width, bidirectional=True).eval(), (torch.randn(length, batch, width),)


def perceptron(inputs: int, hidden: int, outputs: int) -> Built:
    """Three linear layers, batch 128."""
    net = RandomNet()
    x = {"x": np.random.default_rng(1).standard_normal((128, inputs)).astype(np.float32)}
    y = net("Relu", net.dense(net("Relu", net.dense("x", inputs, hidden)), hidden, hidden))
    return net.model(x, [net.dense(y, hidden, outputs)]), x


def _perceptron(inputs: int, hidden: int, outputs: int) -> tuple[Any, Any]:
    import torch
    from torch import nn

    parts = nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    return nn.Sequential(*parts).eval(), (torch.randn(128, inputs),)


# --- ours ---------------------------------------------------------------------------------------------------------------


def models(line: Line, setup: Setup) -> None:
    """Our times of all nets, without and with graphs, outputs on the device and on the host; errors, bits and memory."""
    chosen = nets(setup.rehearse)
    for name in REHEARSED if setup.rehearse else chosen:
        line[name] = model(*chosen[name].ours(), setup)


REHEARSED = ("LSTM, both directions, batch 8", "perceptron, batch 128")
"""The nets of which a rehearsal runs our models: those that an emulated device computes in seconds."""


def model(net: Any, inputs: dict[str, np.ndarray], setup: Setup) -> dict[str, Any]:
    """What is measured of one of our models."""
    import cupy

    from singa_backend import SingaBackend

    samples = [inputs, *(shuffled(inputs, i) for i in range(2))]
    placed = [{n: cupy.asarray(x) for n, x in sample.items()} for sample in samples]
    found: dict[str, Any] = {}
    with without_graphs():
        plain = SingaBackend.prepare(net, DEVICE)
        wants = [plain.run(x) for x in placed]
        found |= run_times("uncaptured", plain, placed[0], setup)
    here = SingaBackend.prepare(net, "CPU").run(inputs)
    found["error"] = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in zip(wants[0], here, strict=True))
    rep = SingaBackend.prepare(net, DEVICE)
    found |= run_times("captured", rep, placed[0], setup)
    found["graphs"] = graphs_of(rep._session)
    there = [[cupy.asarray(y) for y in want] for want in wants]
    used, equal, replays = [], True, setup.size(200, 6)
    for i in range(replays):
        outputs = rep.run(placed[i % 3], to_host=False)
        equal = equal and all(bool((a.view("u4") == b.view("u4")).all()) for a, b in zip(outputs, there[i % 3], strict=True))
        if i in (2, replays - 1):
            free, total = cupy.cuda.runtime.memGetInfo()
            used.append({"device": total - free, "pool": cupy.get_default_memory_pool().total_bytes()})
    return found | {
        "replays": replays, "equal bits": equal, "bytes after three replays": used[0], "bytes after all": used[1],
        "bytes of graphs": rep._session._executor.graph_bytes,
    }  # fmt: skip


def run_times(what: str, rep: Any, inputs: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """Milliseconds of the first runs, and of a run with the outputs on the device, on the host, and until it returns."""
    first = []
    for _ in range(4):  # the second run is recorded, and the third one captured
        start = time.perf_counter()
        rep.run(inputs)
        first.append(round(1e3 * (time.perf_counter() - start), 3))
    return {
        f"{what}, first runs, ms": first,
        f"{what}, on the device, ms": ms(lambda: rep.run(inputs, to_host=False), wait_for_device, setup),
        f"{what}, to the host, ms": ms(lambda: rep.run(inputs), wait_for_device, setup),
        f"{what}, until run returns, ms": issue_ms(lambda: rep.run(inputs, to_host=False), setup),
    }


def shuffled(inputs: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The inputs with their elements in another order."""
    rng = np.random.default_rng(seed)
    return {n: rng.permutation(x.ravel()).reshape(x.shape) for n, x in inputs.items()}


def without_graphs() -> Any:
    """A context in which no run is captured."""
    from singa_backend.devices.device import CudaDevice

    return patch.object(CudaDevice, "captures", False)


def graphs_of(session: Any) -> list[Any]:
    """For each record of runs: what computes it, graphs or why steps are issued; or why there are no graphs."""
    captured = [record.captured for record in session._executor._records._all()]
    return [c if c is None or isinstance(c, str) else [part.reason or "graph" for part in c.parts] for c in captured]


# --- training -----------------------------------------------------------------------------------------------------------


def training(line: Line, setup: Setup) -> None:
    """Training steps of ResNet-18 and of a transformer with SGD and momentum, ours and PyTorch's."""
    import cuda_training

    from singa.device import resolve

    batch = setup.size(8, 2)
    ours: dict[str, Callable[[], Callable[[], Any]]] = {
        "ResNet-18": partial(cuda_training.wide_resnet18, batch=batch),
        "transformer": partial(cuda_training.wide_transformer, batch=batch),
    }
    if setup.rehearse:  # a step of ResNet-18 takes half a minute on an emulated device
        ours = {"transformer": partial(cuda_training.transformer, graph=True)}
    for name, make in ours.items():
        found: dict[str, Any] = {}
        states = []
        for what, graphs in (("uncaptured", without_graphs()), ("captured", contextlib.nullcontext())):
            with graphs:
                resolve(DEVICE).SetRandSeed(0)
                step = make()
                for _ in range(6):
                    step()
                states.append(states_of(step))
                found[f"{what}, ms"] = ms(step, wait_for_device, setup)
        line[name] = found | {"states": len(states[0]), "equal bits of states": same_bits(*states)}
    torch = _torch()
    if torch is None:
        line["PyTorch"] = NO_TORCH
        return
    for name in ours:
        line[f"{name}, PyTorch, ms"] = torch_steps(torch, name, batch, setup)


def states_of(step: Any) -> list[np.ndarray]:
    """The parameters and the other states of the net that a step trains."""
    net = next(c.cell_contents for c in step.__closure__ if hasattr(c.cell_contents, "get_states"))
    return [t.numpy() for _, t in sorted(net.get_states().items())]


def torch_steps(torch: Any, name: str, batch: int, setup: Setup) -> dict[str, Any]:
    """Milliseconds of PyTorch's training step of a net."""
    found = {}
    for precision in PRECISIONS:
        device_check_peers.set_precision(torch, tf32=precision == "TF32")
        for mode in ("CUDA graph", "eager"):
            with torch.device(torch_device(torch)):
                step = torch_step(torch, name, batch, setup)
            found[f"{mode}, {precision}"] = peer(torch, mode, step, (), setup)
    return found


def torch_step(torch: Any, name: str, batch: int, setup: Setup) -> Callable[[], None]:
    """A training step of PyTorch with SGD and momentum, on the default device."""
    import compare_training_nets
    from torch import nn

    if name == "ResNet-18":
        net, x = compare_training_nets.build("resnet18"), torch.randn(batch, 3, *[setup.size(224, 32)] * 2)
    else:
        width, words, length = setup.size(256, 8), setup.size(8000, 20), setup.size(128, 5)
        layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(4)]
        net = nn.Sequential(nn.Embedding(words, width), *layers, nn.Flatten(0, 1), nn.Linear(width, words))
        x = torch.randint(words, (batch, length))
    target = torch.zeros(batch if name == "ResNet-18" else x.numel(), dtype=torch.long)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(net(x), target).backward()
            optimizer.step()

    return step


# --- items --------------------------------------------------------------------------------------------------------------


class Item(NamedTuple):
    """An item: the seconds that it may take, and what it does."""

    deadline: float
    measure: Callable[[Line, Setup], None]


ITEMS = {
    "versions": Item(30, versions),
    "capture": Item(40, capture),
    "primitives": Item(50, primitives),
    "PyTorch": Item(80, torch_nets),
    "models": Item(130, models),
    "training": Item(70, training),
    "compiled": Item(80, compiled),
}
"""The items, in their order."""


def run_item(name: str, rehearse: bool, deadline: float) -> dict[str, Any]:
    """Run an item in a process, kill it with all that it started at the deadline, and return its line."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--item", name, *["--rehearse"] * rehearse]
    with TemporaryFile() as output, TemporaryFile() as errors:  # no pipes: what the child starts may keep them open
        child = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        try:
            code = child.wait(deadline)
            status = "failed" if code else "done"
        except subprocess.TimeoutExpired:
            status = "deadline"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        errors.seek(0)
        lines, problems = (file.read().decode(errors="replace") for file in (output, errors))
    reason = ""
    if status == "failed":
        reason = problems.strip()[-2000:] or f"exit code {code}"
    elif status == "deadline":
        reason = f"not finished within {deadline:.4g} s"
    measured: dict[str, Any] = {}
    for text in lines.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line that was cut, or what a library prints
            value = json.loads(text)
            measured |= value if isinstance(value, dict) else {}
    return {"item": name, "status": status, "seconds": round(time.monotonic() - start, 1), "reason": reason, "found": measured}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder of device-minutes.jsonl")
    parser.add_argument("--rehearse", action="store_true", help="reduce sizes and repeats, for a machine without a device")
    parser.add_argument("--item", choices=ITEMS, help="run one item in this process")
    options = parser.parse_args()
    if options.item:
        try:
            ITEMS[options.item].measure(Line(), Setup(options.rehearse))
        except Wrong as error:
            sys.exit(str(error))
        return 0
    if options.out is None:
        parser.error("--out is required")
    end, wrong, lines = time.monotonic() + TOTAL, 0, ""
    for name, item in ITEMS.items():
        line = run_item(name, options.rehearse, max(0.1, min(item.deadline, end - time.monotonic())))
        wrong += line["status"] != "done"
        lines += json.dumps(line) + "\n"
        print(json.dumps(line), flush=True)
        write_text(options.out / "device-minutes.jsonl", lines)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
