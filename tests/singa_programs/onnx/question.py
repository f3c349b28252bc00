"""A file with several inputs of ids and several outputs: MODEL.onnx DATA.npz."""

import sys

import numpy as np
import onnx

from singa import device, sonnx, tensor


class MyModel(sonnx.SONNXModel):
    def __init__(self, onnx_model):
        super().__init__(onnx_model)

    def forward(self, *x):
        return super().forward(*x)

    def train_one_batch(self, x, y):
        pass


if __name__ == "__main__":
    dev = device.create_cpu_device()
    m = MyModel(onnx.load(sys.argv[1]))
    with np.load(sys.argv[2]) as stored:
        arrays = [stored[n] for n in stored.files]
    for i in range(len(arrays[0])):
        x_batch = []
        for array in arrays:
            tmp_tensor = tensor.from_numpy(array[i : i + 1].astype(np.int32))
            tmp_tensor.to_device(dev)
            x_batch.append(tmp_tensor)
        outputs = m.forward(*x_batch)
        print("start", int(np.argmax(tensor.to_numpy(outputs[0])[0])), "end", int(np.argmax(tensor.to_numpy(outputs[1])[0])))
