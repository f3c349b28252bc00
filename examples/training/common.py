"""What the programs of this folder share: the options, the model with a new head, the loop, checkpoints and results.

Every epoch starts from seeds that depend on `--seed` and its number only: the order of the samples, the augmentation and
dropout.  A checkpoint holds everything else, so that a resumed run equals an uninterrupted one to the bit.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drawing
import numpy as np
import onnx
from rich.console import Console
from rich.progress import track

from singa import autograd, device, layer, opt, sonnx, tensor
from singa_backend.collectives import launched_size
from singa_backend.errors import SonnxError
from singa_backend.io.files import staged

Pick = Callable[[Any], Any]

UPDATES: dict[str, Callable[[Any, Any, float], None]] = {
    "plain": lambda o, loss, spars: o.backward_and_update(loss),
    "half": lambda o, loss, spars: o.backward_and_update_half(loss),
    "partialUpdate": lambda o, loss, spars: o.backward_and_partial_update(loss),
    "sparseTopK": lambda o, loss, spars: o.backward_and_sparse_update(loss, topK=True, spars=spars),
    "sparseThreshold": lambda o, loss, spars: o.backward_and_sparse_update(loss, topK=False, spars=spars),
}
UPDATES |= {"fp32": UPDATES["plain"], "fp16": UPDATES["half"]}


def options(description: str | None, lr: float = 0.005) -> argparse.ArgumentParser:
    """The options of all programs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="an ONNX file; without it, a small random net of the same structure")
    add("--data", type=Path, help="the set; without it, one that needs no download")
    add("--samples", type=int, help="the largest number of samples for training")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=lr)
    add("--optimizer", choices=("sgd", "adam"), default="sgd", help="SGD with momentum 0.9, or Adam; weight decay 1e-5")
    add("--seed", type=int, default=0)
    add("--last-layers", type=int, help="how much of the file runs; by default all before the last product (Gemm, MatMul, Conv)")
    add("--freeze", action="store_true", help="train the new head only")
    add("--patience", type=int, help="stop after so many epochs without a lower validation loss, and restore the best weights")
    add("--checkpoint", type=Path, help="keep the state of the training in this file, after each epoch")
    add("--resume", action="store_true", help="continue at the checkpoint")
    add("--plot", type=Path, help="draw loss and accuracy by epoch as .svg, or as .png (needs matplotlib)")
    add("--confusion", type=Path, help="draw the confusion matrix of the test set as .svg, or as .png (needs matplotlib)")
    add("--output", type=Path, help="write the trained model as ONNX, checked against onnxruntime")
    add("--device", choices=("CPU", "CUDA"), default="CPU")
    add("--no-graph", action="store_true", help="run the steps on the tape")
    add("--dist-option", choices=sorted(UPDATES), default="plain", help="how ranks exchange gradients; see --distributed")
    add("--spars", type=float, default=0.05, help="the share or the threshold of the sparse options")
    add("--distributed", action="store_true", help="use opt.DistOpt also for one process; under mpiexec it is always used")
    return parser


class Net(sonnx.SONNXModel):
    """A file without its last layers, and a new head.

    Weights that the new head does not need are frozen, and so are the constants of the file.

    Args:
        proto: The file.
        classes: The number of classes.
        cut: `last_layers`; None for all layers before the last product.
        freeze: Whether to train the head only.
        pick: Makes a matrix (N, features) of the features.
    """

    def __init__(
        self, proto: onnx.ModelProto, classes: int, cut: int | None, freeze: bool, pick: Callable[[Any], Any], place: Any
    ):
        super().__init__(proto, place)
        self.cut = before_the_head(proto) if cut is None else cut
        self.pick = pick
        self.head = layer.Linear(classes)
        params = set(self.get_params())
        constants = set(sonnx.trainable_report(proto).constants)
        self.frozen = sorted(params if freeze else (params - needed(proto, self.cut)) | (params & constants))
        for name in self.frozen:
            self.freeze(glob.escape(name))

    def forward(self, *xs: Any) -> Any:
        return self.head(self.pick(super().forward(*xs, last_layers=self.cut)[0]))

    def train_one_batch(self, *batch: Any, dist_option: str = "plain", spars: float = 0.05) -> Any:
        out = self.forward(*batch[:-1])
        loss = autograd.softmax_cross_entropy(out, batch[-1])
        UPDATES[dist_option](self.optimizer, loss, spars)
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def flat(y: Any) -> Any:
    """Image features as a matrix: the mean over the image if there is one."""
    if len(y.shape) == 4 and y.shape[2:] != (1, 1):
        y = autograd.globalaveragepool(y)
    return autograd.flatten(y) if len(y.shape) != 2 else y


def layers(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that `last_layers` counts."""
    return [n for n in proto.graph.node if n.op_type != "Constant"]


def before_the_head(proto: onnx.ModelProto) -> int:
    """The `last_layers` that ends before the last product of the file."""
    nodes = layers(proto)
    last = max((i for i, n in enumerate(nodes) if n.op_type in ("Gemm", "MatMul", "Conv")), default=0)
    if not last or nodes[last].input[0] not in nodes[last - 1].output:
        raise SystemExit("the file has no last product that one node feeds: pass --last-layers")
    return last - len(nodes) - 1


def needed(proto: onnx.ModelProto, cut: int) -> set[str]:
    """The names of all values that the result of the layers up to the cut depends on."""
    nodes = layers(proto)
    kept = nodes[: len(nodes) + cut + 1] if cut < 0 else nodes[: cut + 1]
    found = {proto.graph.output[0].name} if len(kept) == len(nodes) else set(kept[-1].output)
    for node in reversed(kept):
        if found & set(node.output):
            found |= reads(node)
    return found


def reads(node: onnx.NodeProto) -> set[str]:
    """The names of the values that a node reads, also in its subgraphs."""
    bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return {*node.input, *(v for g in bodies for n in g.node for v in reads(n))}


def loaded(path: Path) -> onnx.ModelProto:
    """The user's file."""
    try:
        return sonnx.load(path)
    except (OSError, SonnxError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None


def run(args: argparse.Namespace, proto: onnx.ModelProto, sets: tuple[Any, Any, Any], pick: Pick = flat) -> None:
    """Train on the first set, validate on the second, test on the third."""
    for path in (args.plot, args.confusion):
        drawing.check(path)
    if args.checkpoint and args.checkpoint.exists() and not args.resume:
        raise SystemExit(f"{args.checkpoint} exists: pass --resume to continue that training, or another path")
    if args.resume and not (args.checkpoint and args.checkpoint.exists()):
        raise SystemExit(f"--resume needs a --checkpoint that exists, got {args.checkpoint}")
    workers = launched_size()
    if args.dist_option not in ("plain", "fp32") and workers == 1 and not args.distributed:
        raise SystemExit(f"--dist-option {args.dist_option} needs several workers: mpiexec -n 2 python ..., or --distributed")
    rule = (
        opt.SGD(lr=args.lr, momentum=0.9, weight_decay=1e-5)
        if args.optimizer == "sgd"
        else opt.Adam(lr=args.lr, weight_decay=1e-5)
    )
    optimizer: Any = opt.DistOpt(rule) if workers > 1 or args.distributed else rule
    Trainer(args, proto, sets, pick, optimizer).run()


class Trainer:
    """A training: the loop over the epochs and its state."""

    def __init__(self, args: argparse.Namespace, proto: Any, sets: tuple[Any, Any, Any], pick: Any, optimizer: Any) -> None:
        self.args, self.optimizer = args, optimizer
        self.training, self.validation, self.test = sets
        self.ranks = hasattr(optimizer, "communicator")
        self.rank, self.world = (optimizer.global_rank, optimizer.world_size) if self.ranks else (0, 1)
        self.dev = (
            device.get_default_device()
            if args.device == "CPU"
            else device.create_cuda_gpu_on(getattr(optimizer, "local_rank", 0))
        )
        self.out = Console(quiet=self.rank != 0, soft_wrap=True, highlight=False)
        self.dev.SetRandSeed(args.seed)
        self.inputs = [v.name for v in proto.graph.input if v.name not in {t.name for t in proto.graph.initializer}]
        self.model = Net(proto, len(self.training.names), args.last_layers, args.freeze, pick, self.dev)
        self.model.set_optimizer(optimizer)
        self.model.compile(
            self.tensors(self.training.batch(np.arange(min(2, len(self.training))))), True, not args.no_graph, self.ranks
        )
        kept = ("batch_size", "optimizer", "seed", "last_layers", "freeze", "dist_option", "spars", "device")
        self.settings = {n: str(getattr(args, n)) for n in kept} | {
            "model": hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest(),
            "data": self.training.identity() + self.validation.identity(),
            "workers": str(self.world),
        }
        self.history: list[list[float]] = []
        """Training loss and accuracy, validation loss and accuracy of each epoch."""
        self.best = self.states()

    def tensors(self, arrays: list[np.ndarray]) -> list[Any]:
        return [tensor.Tensor(data=a, device=self.dev, requires_grad=False) for a in arrays]

    def states(self) -> dict[str, np.ndarray]:
        return {n: tensor.to_numpy(t).copy() for n, t in self.model.get_states().items()}

    def run(self) -> None:
        args = self.args
        if self.model.frozen and not args.freeze:
            self.out.print(f"not trained: {', '.join(self.model.frozen[:6])}{', ...' * (len(self.model.frozen) > 6)}")
        if args.resume:
            self.read()
            self.out.print(f"resumed {args.checkpoint} at the end of epoch {len(self.history)}")
        while len(self.history) < args.epochs and not self.stops():
            self.epoch(len(self.history) + 1)
            if args.checkpoint and self.rank == 0:
                self.write()
        if args.patience is not None:
            self.model.set_states(self.best)
            how = "stopped" if self.stops() else "ended"
            self.out.print(f"{how} after epoch {len(self.history)}, restored the weights of epoch {self.lowest() + 1}")
        if self.rank == 0:
            self.results()

    def lowest(self) -> int:
        """The index of the epoch with the lowest validation loss."""
        return min(range(len(self.history)), key=lambda i: self.history[i][2], default=-1)

    def stops(self) -> bool:
        return (
            self.args.patience is not None and bool(self.history) and len(self.history) - 1 - self.lowest() >= self.args.patience
        )

    def epoch(self, number: int) -> None:
        """Train one epoch, and validate."""
        args, samples = self.args, self.training
        self.dev.SetRandSeed(int(np.random.SeedSequence([args.seed, number, self.rank]).generate_state(1)[0]) >> 1)
        order = np.random.default_rng([args.seed, number]).permutation(len(samples))
        order = np.resize(order, -(-len(order) // self.world) * self.world)[self.rank :: self.world]
        rng = np.random.default_rng([args.seed, number, self.rank])
        self.model.train()
        loss = right = 0.0
        steps = list(batches(order, args.batch_size))
        text, quiet = f"epoch {number}/{args.epochs}", not self.out.is_terminal
        for rows in track(steps, text, console=self.out, transient=True, disable=quiet):
            batch = self.tensors([*samples.batch(rows, rng), samples.y[rows]])
            scores, value = self.model(*batch, dist_option=args.dist_option, spars=args.spars)
            loss += float(tensor.to_numpy(value)[0]) * len(rows)
            right += float((tensor.to_numpy(scores).argmax(1) == samples.y[rows]).sum())
            if not np.isfinite(loss):
                raise SystemExit(f"the loss of epoch {number} is {loss}: lower --lr; a checkpoint holds the epoch before")
        if self.ranks:
            self.share()
        scores = self.scores(self.validation)
        y = self.validation.y
        shifted = scores - scores.max(1, keepdims=True)
        held = float(np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]))
        row = self.mean([loss / len(order), right / len(order), held, float((scores.argmax(1) == y).mean())])
        self.history.append(row)
        if self.lowest() == len(self.history) - 1:
            self.best = self.states()
        text = "loss {:.4f}, accuracy {:.3f}, validation loss {:.4f}, accuracy {:.3f}".format(*row)
        self.out.print(f"epoch {number}: {text}")

    def share(self) -> None:
        """Give all ranks the mean of the running statistics, and of the parameters if they differ (partialUpdate)."""
        shared = set() if self.args.dist_option == "partialUpdate" else set(self.model.get_params())
        for name, t in self.model.get_states().items():
            if name not in shared:
                self.optimizer.all_reduce(t.data)
                self.optimizer.wait()
                t.copy_from_numpy(tensor.to_numpy(t) / np.float32(self.world))

    def mean(self, values: list[float]) -> list[float]:
        """The mean over the ranks."""
        if not self.ranks:
            return values
        reducer = tensor.Tensor((len(values),), self.dev, tensor.float32)
        reducer.copy_from_numpy(np.array(values, np.float32))
        self.optimizer.all_reduce(reducer.data)
        self.optimizer.wait()
        return [float(v) / self.world for v in tensor.to_numpy(reducer)]

    def scores(self, samples: Any) -> np.ndarray:
        self.model.eval()
        rows = batches(np.arange(len(samples)), 64)
        return np.concatenate([tensor.to_numpy(self.model(*self.tensors(samples.batch(r)))) for r in rows]).astype(np.float64)

    # --- checkpoints

    def write(self) -> None:
        """Replace the checkpoint: the model, the optimizer, the best weights, the history and the settings."""
        text = json.dumps(self.settings).encode()
        arrays = {"run.settings": np.frombuffer(text, np.uint8), "run.history": np.array(self.history, np.float64)}
        arrays |= {f"best.{n}": a for n, a in self.best.items()}
        more = {n: tensor.Tensor(data=a, requires_grad=False) for n, a in arrays.items()}
        more |= {f"optimizer.{n}": t for n, t in self.optimizer.get_states().items()}
        with staged(self.args.checkpoint) as stage:
            self.model.save_states(stage / stage.target.name, more)

    def read(self) -> None:
        """Continue at the checkpoint; another training is refused."""
        path = self.args.checkpoint
        try:
            stored = {n: tensor.to_numpy(t) for n, t in self.model.load_states(path).items()}
            settings = json.loads(stored["run.settings"].tobytes())
            other = [n for n, v in self.settings.items() if settings[n] != v]
        except (KeyError, ValueError, SonnxError) as error:
            raise SystemExit(f"{path} is not a checkpoint of this program and model: {error}") from None
        if other:
            raise SystemExit(f"{path} is the checkpoint of another training: {', '.join(other)} differ")
        self.history = stored["run.history"].tolist()

        def under(head: str) -> dict[str, np.ndarray]:
            return {n.removeprefix(head): a for n, a in stored.items() if n.startswith(head)}

        self.best = under("best.")
        self.optimizer.set_states(under("optimizer."))

    # --- results

    def results(self) -> None:
        """The accuracy on the test set, the pictures, and the file."""
        args, samples = self.args, self.test
        predicted = self.scores(samples).argmax(1)
        counts = np.zeros((len(samples.names),) * 2, np.int64)
        np.add.at(counts, (samples.y, predicted), 1)
        self.out.print(f"test accuracy {np.trace(counts) / counts.sum():.4f}")
        if args.plot and self.history:
            drawing.curves(args.plot, np.array(self.history))
        if args.confusion:
            drawing.confusion(args.confusion, counts, samples.names)
        if args.output:
            axes = {n: {0: "N"} for n in self.inputs}
            xs = self.tensors(samples.batch(np.arange(2)))
            _, check = sonnx.export_and_check(self.model, xs, args.output, dynamic_axes=axes)
            self.out.print(f"largest difference from onnxruntime {max(check.errors.values()):.1e}")
        for path in (args.checkpoint, args.plot, args.confusion, args.output):
            if path:
                self.out.print(f"wrote {path}")


def batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (order[i : i + size] for i in range(0, len(order), size))
