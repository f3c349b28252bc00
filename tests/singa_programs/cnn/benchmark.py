"""Time steps of a residual net on random images."""

import time

import numpy as np
from model import resnet

from singa import device, opt, tensor


def train_resnet(graph=True, sequential=False, verbosity=0, niters=7, batch_size=2, size=32):
    sgd = opt.SGD(lr=0.1, momentum=0.9, weight_decay=1e-5)
    dev = device.get_default_device()
    tx = tensor.Tensor((batch_size, 3, size, size), dev)
    ty = tensor.Tensor((batch_size,), dev, tensor.int32)
    tx.copy_from_numpy(np.random.randn(batch_size, 3, size, size).astype(np.float32))
    ty.copy_from_numpy(np.random.randint(0, 1000, batch_size, dtype=np.int32))
    dev.SetVerbosity(verbosity)
    dev.SetSkipIteration(5)
    model = resnet.resnet50(num_channels=3, num_classes=1000)
    model.train()
    model.set_optimizer(sgd)
    model.compile([tx], is_train=True, use_graph=graph, sequential=sequential)
    dev.Sync()
    start = time.time()
    for _ in range(niters):
        model(tx, ty, dist_option="plain", spars=None)
    dev.Sync()
    titer = (time.time() - start) / float(niters)
    print(f"Throughput = {float(batch_size) / titer} per second", flush=True)
    dev.PrintTimeProfiling()


if __name__ == "__main__":
    train_resnet(verbosity=1)
