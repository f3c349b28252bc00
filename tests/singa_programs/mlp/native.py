"""The same on tensors alone, with the optimizer applied by hand."""

import numpy as np

from singa import autograd, opt, tensor
from singa.tensor import Tensor

if __name__ == "__main__":
    autograd.training = True
    rng = np.random.default_rng(0)
    data = rng.uniform(-1, 1, (400, 2)).astype(np.float32)
    label = np.eye(2, dtype=np.float32)[(5 * data[:, 0] + data[:, 1] > 0.1).astype(np.int32)]
    inputs = Tensor(data=data)
    target = Tensor(data=label)
    w0 = Tensor(shape=(2, 3), requires_grad=True, stores_grad=True)
    w0.gaussian(0.0, 0.1)
    b0 = Tensor(shape=(3,), requires_grad=True, stores_grad=True)
    b0.set_value(0.0)
    w1 = Tensor(shape=(3, 2), requires_grad=True, stores_grad=True)
    w1.gaussian(0.0, 0.1)
    b1 = Tensor(shape=(2,), requires_grad=True, stores_grad=True)
    b1.set_value(0.0)
    sgd = opt.SGD(0.05)
    for i in range(401):
        x = autograd.relu(autograd.add_bias(autograd.matmul(inputs, w0), b0))
        x = autograd.add_bias(autograd.matmul(x, w1), b1)
        loss = autograd.softmax_cross_entropy(x, target)
        for p, gp in autograd.backward(loss):
            sgd.apply(p.name, p, gp)
        sgd.step()
        if i % 200 == 0:
            print("training loss = ", tensor.to_numpy(loss)[0])
