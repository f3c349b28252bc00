"""Classify a picture by a file: MODEL.onnx FOLDER, where FOLDER has test_data_set_0."""

import os
import sys

import numpy as np
import onnx
from onnx import numpy_helper

from singa import device, sonnx, tensor


class MyModel(sonnx.SONNXModel):
    def __init__(self, onnx_model):
        super(MyModel, self).__init__(onnx_model)

    def forward(self, *x):
        y = super(MyModel, self).forward(*x)
        return y[0]

    def train_one_batch(self, x, y):
        pass


def load_dataset(folder):
    found = []
    for part in ("input_0.pb", "output_0.pb"):
        t = onnx.TensorProto()
        with open(os.path.join(folder, part), "rb") as f:
            t.ParseFromString(f.read())
        found.append(numpy_helper.to_array(t))
    return found


if __name__ == "__main__":
    onnx_model = onnx.load(sys.argv[1])
    dev = device.create_cpu_device()
    img, ref = load_dataset(os.path.join(sys.argv[2], "test_data_set_0"))
    sg_ir = sonnx.prepare(onnx_model, device=dev)
    for ref_o, o in zip([ref], sg_ir.run([tensor.Tensor(device=dev, data=img)]), strict=True):
        np.testing.assert_almost_equal(ref_o, tensor.to_numpy(o), 4)
    m = MyModel(onnx_model)
    x = tensor.PlaceHolder(img.shape, device=dev)
    m.compile([x], is_train=False, use_graph=True, sequential=True)
    x_batch = tensor.Tensor(device=dev, data=img)
    y = m.forward(x_batch)
    y = tensor.softmax(y)
    scores = np.squeeze(tensor.to_numpy(y))
    for i in np.argsort(scores)[::-1][:3]:
        print("class=%d; probability=%f" % (i, scores[i]))
