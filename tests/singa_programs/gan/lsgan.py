"""Train the least-squares form on the pickled MNIST."""

import sys

from model import lsgan_mlp
from vanilla import VANILLA

from singa import device

if __name__ == "__main__":
    gan = VANILLA(lsgan_mlp, sys.argv[1], iterations=100, interval=99, learning_rate=0.005)
    gan.train(device.get_default_device())
