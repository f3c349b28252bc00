"""Retrain a file that model.json describes, with a new last layer: NAME FOLDER_OF_MODELS FOLDER_OF_CIFAR."""

import argparse
import json
import os
import sys

import numpy as np
import onnx

from singa import autograd, device, layer, opt, sonnx, tensor

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "cnn"))
from data import cifar10


class MyModel(sonnx.SONNXModel):
    def __init__(self, onnx_model, num_classes=10, image_size=32, num_channels=3, last_layers=-1, in_dim=1000):
        super().__init__(onnx_model)
        self.num_classes = num_classes
        self.image_size = image_size
        self.num_channels = num_channels
        self.last_layers = last_layers
        self.linear = layer.Linear(in_dim, num_classes)

    def forward(self, *x):
        y = super().forward(*x, last_layers=self.last_layers)[0]
        return self.linear(y)

    def train_one_batch(self, x, y, dist_option, spars):
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        if dist_option == "fp32":
            self.optimizer.backward_and_update(loss)
        elif dist_option == "fp16":
            self.optimizer.backward_and_update_half(loss)
        elif dist_option == "partialUpdate":
            self.optimizer.backward_and_partial_update(loss)
        elif dist_option == "sparseTopK":
            self.optimizer.backward_and_sparse_update(loss, topK=True, spars=spars)
        elif dist_option == "sparseThreshold":
            self.optimizer.backward_and_sparse_update(loss, topK=False, spars=spars)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer


def run(args, sgd, shift):
    dev = device.create_cpu_device()
    dev.SetRandSeed(0)
    train_x, train_y, val_x, val_y = cifar10.load(args.data)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "model.json")) as f:
        config = json.load(f)[args.model]
    onnx_model = onnx.load(os.path.join(args.models, config["path"]))
    model = MyModel(onnx_model, num_classes=int(train_y.max()) + 1, last_layers=config["last_layers"] + shift,
                    in_dim=config["last_layer_dim"])  # fmt: skip
    bs = args.batch_size
    tx = tensor.Tensor((bs, 3, 32, 32), dev, tensor.float32)
    ty = tensor.Tensor((bs,), dev, tensor.int32)
    model.set_optimizer(sgd)
    model.compile([tx], is_train=True, use_graph=args.graph, sequential=hasattr(sgd, "communicator"))
    for epoch in range(args.max_epoch):
        model.train()
        total = correct = 0
        for b in range(len(train_x) // bs):
            tx.copy_from_numpy(train_x[b * bs : (b + 1) * bs])
            ty.copy_from_numpy(train_y[b * bs : (b + 1) * bs])
            _, loss = model(tx, ty, args.dist_option, args.spars)
            total += tensor.to_numpy(loss)[0]
        model.eval()
        for b in range(len(val_x) // bs):
            tx.copy_from_numpy(val_x[b * bs : (b + 1) * bs])
            correct += (np.argmax(tensor.to_numpy(model(tx)), 1) == val_y[b * bs : (b + 1) * bs]).sum()
        print(f"epoch {epoch}, training loss = {total}, evaluation accuracy = {correct / len(val_x)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("models")
    parser.add_argument("data")
    parser.add_argument("--max-epoch", default=4, type=int)
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--dist-option", default="fp32")
    parser.add_argument("--spars", default=0.05, type=float)
    parser.add_argument("--documented", action="store_true", help="count last_layers as SINGA's documents do")
    parser.add_argument("-g", "--disable-graph", default=True, action="store_false", dest="graph")
    args = parser.parse_args()
    run(args, opt.SGD(lr=0.02, momentum=0.9, weight_decay=1e-5), int(args.documented))
