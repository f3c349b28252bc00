"""Learn to turn sentences around; a greedy decoder reads one back."""

import sys

import numpy as np
from model import Transformer

from singa import device, opt, tensor

dev = device.get_default_device()
dev.SetRandSeed(0)
with open(sys.argv[1]) as f:
    pairs = [line.split("\t") for line in f.read().splitlines()]
vocab = {w: i + 1 for i, w in enumerate(sorted({w for p in pairs for s in p for w in s.split()} | {"<s>"}))}
src = np.array([[vocab[w] for w in a.split()] + [0] for a, _ in pairs], np.int32)
tgt = np.array([[vocab["<s>"], *(vocab[w] for w in b.split())] for _, b in pairs], np.int32)
net = Transformer(len(vocab) + 1, len(vocab) + 1)
net.set_optimizer(opt.Adam(0.01))
enc, dec, out = (tensor.from_numpy(a) for a in (src, tgt[:, :-1].copy(), tgt[:, 1:].copy()))
for t in (enc, dec, out):
    t.to_device(dev)
net.compile([enc, dec], is_train=True, use_graph=False, sequential=False)
for epoch in range(60):
    net.train()
    y, loss = net(enc, dec, out, 0)
    if epoch % 59 == 0:
        print("loss", tensor.to_numpy(loss)[0])
net.eval()
words = [vocab["<s>"]]
for _ in range(tgt.shape[1] - 1):
    y = net(tensor.from_numpy(src[:1]), tensor.from_numpy(np.array([words], np.int32)))
    words.append(int(tensor.to_numpy(y)[-1].argmax()))
print("read back", words[1:] == tgt[0, 1:].tolist())
