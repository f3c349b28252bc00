"""Data-parallel training: mpiexec -n 2 python examples/train_distributed.py [--dist-option half] [--steps 60].

Every process runs this program on its share of each batch. Without mpiexec it trains alone. The set is scikit-learn's digits if
it is installed, otherwise generated.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from rich.progress import track

from singa import autograd, device, layer, model, opt, tensor


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layer.Linear(64)
        self.scores = layer.Linear(10)

    def forward(self, x: Any) -> Any:
        return self.scores(autograd.relu(self.hidden(x)))

    def train_one_batch(self, x: Any, y: Any, dist_option: str, spars: float) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        if dist_option == "plain":
            self.optimizer.backward_and_update(loss)
        elif dist_option == "half":
            self.optimizer.backward_and_update_half(loss)
        elif dist_option == "partialUpdate":
            self.optimizer.backward_and_partial_update(loss)
        else:
            self.optimizer.backward_and_sparse_update(loss, spars=spars, topK=dist_option == "sparseTopK")
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def data() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((1600, 64)).astype(np.float32)
        return x, x[:, :10].argmax(1).astype(np.int32)
    found = load_digits()
    return (found.data / 16).astype(np.float32), found.target.astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist-option", default="plain",
                        choices=["plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold"])  # fmt: skip
    parser.add_argument("--spars", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=128, help="of all processes together")
    args = parser.parse_args()
    dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9))
    rank, size = dist.global_rank, dist.world_size
    device.get_default_device().SetRandSeed(0)  # the same weights everywhere
    x, y = data()
    net = Net()
    net.set_optimizer(dist)
    net.compile([tensor.from_numpy(x[:1])], is_train=True, use_graph=True)
    rng = np.random.default_rng(1)  # the same order everywhere
    losses = []
    for _ in track(range(args.steps), description="training", disable=rank > 0):
        rows = rng.permutation(len(x))[: args.batch // size * size].reshape(size, -1)[rank]
        _, loss = net(tensor.from_numpy(x[rows]), tensor.from_numpy(y[rows]), args.dist_option, args.spars)
        dist.all_reduce(loss)
        dist.wait()
        losses.append(float(tensor.to_numpy(loss)[0]) / size)
    mine = slice(rank, None, size)
    net.eval()
    right = (tensor.to_numpy(net(tensor.from_numpy(x[mine]))).argmax(1) == y[mine]).sum()
    count = tensor.from_numpy(np.array([right], np.int32))
    dist.all_reduce(count.data)
    dist.wait()
    if rank == 0:
        print(f"{size} processes, loss {losses[0]:.4f} -> {losses[-1]:.4f}, accuracy {count.data[0] / len(x):.3f}")


if __name__ == "__main__":
    main()
