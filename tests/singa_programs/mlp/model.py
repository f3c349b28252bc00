"""A perceptron with one hidden layer; as a program, it separates points by a line."""

import argparse

import numpy as np

from singa import device, layer, model, opt, tensor

np_dtype = {"float16": np.float16, "float32": np.float32}
singa_dtype = {"float16": tensor.float16, "float32": tensor.float32}


class MLP(model.Model):
    def __init__(self, data_size=10, perceptron_size=100, num_classes=10):
        super(MLP, self).__init__()
        self.num_classes = num_classes
        self.dimension = 2
        self.relu = layer.ReLU()
        self.linear1 = layer.Linear(perceptron_size)
        self.linear2 = layer.Linear(num_classes)
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, inputs):
        return self.linear2(self.relu(self.linear1(inputs)))

    def train_one_batch(self, x, y, dist_option, spars):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        if dist_option in ("fp32", "plain"):
            self.optimizer(loss)
        elif dist_option in ("fp16", "half"):
            self.optimizer.backward_and_update_half(loss)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer


def create_model(pretrained=False, **kwargs):
    return MLP(**kwargs)


__all__ = ["MLP", "create_model"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", choices=["float32", "float16"], default="float32", dest="precision")
    parser.add_argument("-g", "--disable-graph", default=True, action="store_false", dest="graph")
    parser.add_argument("-m", "--max-epoch", default=201, type=int, dest="max_epoch")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    data = rng.uniform(-1, 1, (400, 2)).astype(np_dtype[args.precision])
    label = np.asarray([int(5 * a + b > 0.1) for a, b in data]).astype(np.int32)
    dev = device.get_default_device()
    precision = singa_dtype[args.precision]
    sgd = opt.SGD(0.1, 0.9, 1e-5, dtype=precision)
    tx = tensor.Tensor((400, 2), dev, precision)
    ty = tensor.Tensor((400,), dev, tensor.int32)
    net = MLP(data_size=2, perceptron_size=3, num_classes=2)
    net.set_optimizer(sgd)
    net.compile([tx], is_train=True, use_graph=args.graph, sequential=True)
    net.train()
    for i in range(args.max_epoch):
        tx.copy_from_numpy(data)
        ty.copy_from_numpy(label)
        out, loss = net(tx, ty, "fp32", spars=None)
        if i % 100 == 0:
            print("training loss = ", tensor.to_numpy(loss)[0])
