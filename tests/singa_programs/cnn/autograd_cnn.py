"""A net without a Model: layers of autograd, and the gradients applied one by one."""

import sys

import numpy as np
from data import mnist

from singa import autograd, device, opt, tensor


class CNN:
    def __init__(self):
        self.conv1 = autograd.Conv2d(1, 4, 5, padding=0)
        self.conv2 = autograd.Conv2d(4, 6, 5, padding=0)
        self.linear1 = autograd.Linear(4 * 4 * 6, 20)
        self.linear2 = autograd.Linear(20, 10)
        self.pooling1 = autograd.MaxPool2d(2, 2, padding=0)
        self.pooling2 = autograd.MaxPool2d(2, 2, padding=0)

    def forward(self, x):
        y = self.pooling1(autograd.relu(self.conv1(x)))
        y = self.pooling2(autograd.relu(self.conv2(y)))
        y = autograd.relu(self.linear1(autograd.flatten(y)))
        return self.linear2(y)


train_x, train_y, val_x, val_y = mnist.load(sys.argv[1])
onehot = np.eye(10, dtype=np.float32)[train_y]
dev = device.get_default_device()
dev.SetRandSeed(0)
batch_size = 8
tx = tensor.Tensor((batch_size, 1, 28, 28), dev, tensor.float32)
ty = tensor.Tensor((batch_size, 10), dev, tensor.float32)
model = CNN()
sgd = opt.SGD(lr=0.05, momentum=0.9, weight_decay=1e-5)
for _epoch in range(2):
    autograd.training = True
    total = 0.0
    for b in range(len(train_x) // batch_size):
        rows = slice(b * batch_size, (b + 1) * batch_size)
        tx.copy_from_numpy(train_x[rows])
        ty.copy_from_numpy(onehot[rows])
        out = model.forward(tx)
        loss = autograd.softmax_cross_entropy(out, ty)
        total += tensor.to_numpy(loss)[0]
        for p, g in autograd.backward(loss):
            sgd.update(p, g)
        sgd.step()
    autograd.training = False
    tx.copy_from_numpy(val_x[:batch_size])
    correct = (tensor.to_numpy(model.forward(tx)).argmax(1) == val_y[:batch_size]).sum()
    print("Training loss = %f, correct = %d" % (total, correct))
