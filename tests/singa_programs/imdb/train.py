"""Train a recurrent model to classify reviews as positive or negative, on an archive of encoded rows with one-hot labels."""

import argparse

import numpy as np
from model import IMDBModel

from singa import device, opt, tensor

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("-m", "--mode", default="lstm", choices=["lstm", "gru", "tanh", "relu"])
parser.add_argument("-b", "--bidirectional", default=False, action="store_true")
parser.add_argument("--mask", action="store_true")
parser.add_argument("--sequences", action="store_true")
args = parser.parse_args()

dev = device.get_default_device()
dev.SetRandSeed(0)
with np.load(args.data) as stored:
    x, y, lengths = stored["x"], stored["y"], stored["lengths"]
bs = 8
tx = tensor.Tensor((bs, *x.shape[1:]), dev, tensor.float32)
ty = tensor.Tensor((bs, 2), dev, tensor.float32)
tl = tensor.Tensor((bs,), dev, tensor.int32)
model = IMDBModel(6, mode=args.mode, return_sequences=args.sequences, bidirectional=args.bidirectional, use_mask=args.mask)
model.set_opt(opt.Adam(0.02))
more = [tl] if args.mask else []
tl.copy_from_numpy(lengths[:bs])
model.compile([tx, *more], is_train=True, use_graph=True, sequential=False)
onehot = np.eye(2, dtype=np.float32)
for epoch in range(8):
    model.train()
    total = correct = 0
    for b in range(len(x) // bs):
        rows = slice(b * bs, (b + 1) * bs)
        tx.copy_from_numpy(x[rows])
        ty.copy_from_numpy(onehot[y[rows]])
        tl.copy_from_numpy(lengths[rows])
        out, loss = model(tx, ty, *more)
        total += tensor.to_numpy(loss)[0]
        correct += (tensor.to_numpy(out).argmax(1) == y[rows]).sum()
    print(f"epoch {epoch}, training loss {total / (len(x) // bs)}, accuracy {correct / len(x)}")
model.eval()
out = model(tx, *more)
print("evaluated", (tensor.to_numpy(out).argmax(1) == y[rows]).mean())
