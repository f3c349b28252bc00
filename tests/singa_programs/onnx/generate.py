"""Greedy text from a file with one input of ids that grows: MODEL.onnx LENGTH."""

import sys

import numpy as np
import onnx

from singa import autograd, device, sonnx, tensor


class MyModel(sonnx.SONNXModel):
    def __init__(self, onnx_model):
        super().__init__(onnx_model)

    def forward(self, *x):
        return super().forward(*x)[0]

    def train_one_batch(self, x, y):
        pass


def postprocess(out):
    y = autograd.reshape(out, out.shape[-2:])[-1, :]
    y = tensor.to_numpy(tensor.softmax(y))[0]
    return np.argsort(y)[::-1][0]


if __name__ == "__main__":
    dev = device.create_cpu_device()
    m = MyModel(onnx.load(sys.argv[1]))
    x = tensor.Tensor(device=dev, data=np.array([[3, 1]]).astype(np.float32))
    output = []
    for _ in range(int(sys.argv[2])):
        selected = postprocess(m.forward(x))
        output.append(int(selected))
        y = tensor.Tensor(device=dev, data=np.array([[selected]]).astype(np.float32))
        x = tensor.concatenate((x, y), axis=1)
    print("output", output)
