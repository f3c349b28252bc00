"""Train a WGAN with a gradient penalty on the digits of scikit-learn: python examples/wgan_gp.py [--no-graph] [--steps 200].

The critic's loss contains the norm of its own gradient by the images: `autograd.gradients(..., create_graph=True)` records the
gradient, so that the loss can be differentiated through it.  Without scikit-learn, the images are bars at random places.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from singa import autograd, layer, opt, tensor
from singa.model import Model
from singa.tape import op

NOISE, BATCH, PENALTY, CRITIC_STEPS = 16, 64, 10.0, 3


class Generator(Model):
    """Makes images of 8 x 8 pixels out of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = layer.Linear(64), layer.Linear(64), layer.Linear(64)

    def forward(self, z: Any) -> Any:
        h = autograd.leakyrelu(self.fc1(z), 0.2)
        return autograd.tanh(self.fc3(autograd.leakyrelu(self.fc2(h), 0.2)))

    def train_one_batch(self, z: Any, critic: Critic) -> Any:
        loss = op.Neg(mean(critic.forward(self.forward(z))))
        params = list(self.get_params().values())
        gradients = autograd.gradients(loss, inputs=params)  # not those of the critic
        for p in params:
            self.optimizer.apply(p.name, p, gradients[id(p)])
        self.optimizer.step()
        return loss


class Critic(Model):
    """Scores images: high for real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = layer.Linear(64), layer.Linear(64), layer.Linear(1)

    def forward(self, x: Any) -> Any:
        h = autograd.leakyrelu(self.fc1(x), 0.2)
        return self.fc3(autograd.leakyrelu(self.fc2(h), 0.2))

    def train_one_batch(self, real: Any, fake: Any, share: Any) -> Any:
        distance = op.Sub(mean(self.forward(real)), mean(self.forward(fake)))
        mixed = share * real + (1.0 - share) * fake
        mixed.requires_grad = True  # a leaf: gradients end here
        score = op.ReduceSum(self.forward(mixed), None, keepdims=0)
        g = autograd.gradients(score, create_graph=True, inputs=[mixed])[id(mixed)]
        norm = op.Sqrt(op.ReduceSum(g * g, [1], keepdims=0) + 1e-12)
        loss = PENALTY * mean((norm - 1.0) * (norm - 1.0)) - distance
        self.optimizer(loss)
        return distance, loss


def mean(x: Any) -> Any:
    return op.ReduceMean(x, None, keepdims=0)


def images() -> np.ndarray:
    """Images as rows of 64 values from -1 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        rng = np.random.default_rng(0)
        pixels = np.zeros((1024, 8, 8))
        pixels[np.arange(1024), :, rng.integers(2, 6, 1024)] = 16
        return (pixels.reshape(-1, 64) / 8 - 1).astype(np.float32)
    return (load_digits().data / 8 - 1).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-graph", action="store_true", help="run the steps on the tape")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    data = images()

    def constant(array: Any) -> Any:
        return tensor.Tensor(data=np.asarray(array, np.float32), requires_grad=False)

    def noise(count: int) -> Any:
        return constant(rng.standard_normal((count, NOISE)))

    generator, critic = Generator(), Critic()
    for net, example in ((generator, noise(BATCH)), (critic, constant(data[:BATCH]))):
        net.optimizer = opt.Adam(lr=1e-3, beta_1=0.5)
        net.compile([example], is_train=True, use_graph=not args.no_graph)

    def apart() -> float:
        """The distance between the mean of generated images and that of the data."""
        generator.eval()
        made = tensor.to_numpy(generator(noise(512)))
        generator.train()
        return float(np.linalg.norm(made.mean(0) - data.mean(0)))

    first, distance = apart(), 0.0
    for _ in range(args.steps):
        for _ in range(CRITIC_STEPS):
            generator.eval()
            fake = generator(noise(BATCH))
            generator.train()
            real = constant(data[rng.integers(0, len(data), BATCH)])
            found, _ = critic(real, fake, constant(rng.random((BATCH, 1))))
        distance = float(found)
        generator(noise(BATCH), critic)
    print(
        f"Wasserstein distance {distance:.4f}, critic {'on the tape' if critic.not_traceable or args.no_graph else 'as a graph'}"
    )
    print(f"distance of the mean images {first:.4f} -> {apart():.4f}")


if __name__ == "__main__":
    main()
