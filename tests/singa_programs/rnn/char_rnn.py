"""A model of characters: an LSTM whose states are tensors of the model, trained on sequences of one text file."""

import argparse
import sys

import numpy as np

from singa import autograd, device, layer, model, opt, tensor


class CharRNN(model.Model):
    def __init__(self, vocab_size, hidden_size=32):
        super().__init__()
        self.rnn = layer.LSTM(vocab_size, hidden_size)
        self.cat = layer.Cat()
        self.reshape1 = layer.Reshape()
        self.dense = layer.Linear(hidden_size, vocab_size)
        self.reshape2 = layer.Reshape()
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()
        self.optimizer = opt.SGD(0.01)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size

    def reset_states(self, dev):
        self.hx.to_device(dev)
        self.cx.to_device(dev)
        self.hx.set_value(0.0)
        self.cx.set_value(0.0)

    def initialize(self, inputs):
        batchsize = inputs[0].shape[0]
        self.hx = tensor.Tensor((batchsize, self.hidden_size))
        self.cx = tensor.Tensor((batchsize, self.hidden_size))
        self.reset_states(inputs[0].device)

    def forward(self, inputs):
        x, hx, cx = self.rnn(inputs, (self.hx, self.cx))
        self.hx.copy_data(hx)
        self.cx.copy_data(cx)
        x = self.cat(x)
        x = self.reshape1(x, (-1, self.hidden_size))
        return self.dense(x)

    def train_one_batch(self, x, y):
        out = self.forward(x)
        y = self.reshape2(y, (-1, 1))
        loss = self.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss

    def get_states(self):
        ret = super().get_states()
        ret[self.hx.name] = self.hx
        ret[self.cx.name] = self.cx
        return ret

    def set_states(self, states):
        self.hx.copy_from(states[self.hx.name])
        self.cx.copy_from(states[self.cx.name])
        super().set_states(states)


class Data:
    def __init__(self, fpath, batch_size=32, seq_length=100, train_ratio=0.8):
        with open(fpath, encoding="iso-8859-1") as f:
            self.raw_data = f.read()
        chars = sorted(set(self.raw_data))
        self.vocab_size = len(chars)
        self.char_to_idx = {ch: i for i, ch in enumerate(chars)}
        self.idx_to_char = dict(enumerate(chars))
        data = [self.char_to_idx[c] for c in self.raw_data]
        nsamples = len(data) // (1 + seq_length)
        data = np.asarray(data[: nsamples * (1 + seq_length)], dtype=np.int32).reshape((-1, seq_length + 1))
        np.random.shuffle(data)
        n = int(data.shape[0] * train_ratio)
        self.train_dat, self.val_dat = data[:n], data[n:]
        self.num_train_batch = self.train_dat.shape[0] // batch_size
        self.num_test_batch = self.val_dat.shape[0] // batch_size


def numpy2tensors(npx, npy, dev, inputs=None, labels=None):
    tmpx = np.swapaxes(npx, 0, 1)
    tmpy = np.swapaxes(npy, 0, 1).reshape((-1, 1))
    if inputs is None:
        inputs = [tensor.from_numpy(x) for x in tmpx]
        for x in inputs:
            x.to_device(dev)
        labels = tensor.from_numpy(tmpy)
        labels.to_device(dev)
    else:
        for x, array in zip(inputs, tmpx, strict=True):
            x.copy_from_numpy(array)
        labels.copy_from_numpy(tmpy)
    return inputs, labels


def convert(batch, batch_size, seq_length, vocab_size, dev, inputs=None, labels=None):
    x = np.eye(vocab_size, dtype=np.float32)[batch[:, :seq_length]]
    return numpy2tensors(x, batch[:, 1:], dev, inputs, labels)


def one(data, c, dev):
    x = np.zeros((1, data.vocab_size), dtype=np.float32)
    x[0, c] = 1
    tx = tensor.from_numpy(x)
    tx.to_device(dev)
    return tx


def sample(model, data, dev, seed, nsamples=20, use_max=False):
    model.eval()
    inputs = [one(data, data.char_to_idx[c], dev) for c in seed]
    model.reset_states(dev)
    outputs = model(inputs)
    y = tensor.softmax(outputs[-1])
    sys.stdout.write("sample: " + seed)
    for _ in range(nsamples):
        prob = tensor.to_numpy(y)[0]
        if use_max:
            cur = np.argmax(prob)
        else:
            cur = np.random.choice(data.vocab_size, 1, p=prob / prob.sum())[0]
        sys.stdout.write(data.idx_to_char[cur])
        outputs = model([one(data, cur, dev)])
        y = tensor.softmax(outputs[-1])
    sys.stdout.write("\n")


def evaluate(model, data, batch_size, seq_length, dev, inputs, labels):
    model.eval()
    val_loss = 0.0
    for b in range(data.num_test_batch):
        batch = data.val_dat[b * batch_size : (b + 1) * batch_size]
        inputs, labels = convert(batch, batch_size, seq_length, data.vocab_size, dev, inputs, labels)
        model.reset_states(dev)
        y = model(inputs)
        loss = autograd.softmax_cross_entropy(y, labels)[0]
        val_loss += tensor.to_numpy(loss)[0]
    print("validation loss is %f" % (val_loss / data.num_test_batch))


def train(data, max_epoch, hidden_size, seq_length, batch_size, dev, graph, path):
    dev.SetRandSeed(0)
    model = CharRNN(data.vocab_size, hidden_size)
    model.graph(graph, False)
    inputs, labels = None, None
    for epoch in range(max_epoch):
        model.train()
        train_loss = 0
        for b in range(data.num_train_batch):
            batch = data.train_dat[b * batch_size : (b + 1) * batch_size]
            inputs, labels = convert(batch, batch_size, seq_length, data.vocab_size, dev, inputs, labels)
            out, loss = model(inputs, labels)
            model.reset_states(dev)
            train_loss += tensor.to_numpy(loss)[0]
        print("epoch %d, train loss is %f" % (epoch, train_loss / data.num_train_batch))
        evaluate(model, data, batch_size, seq_length, dev, inputs, labels)
    model.save_states(path)
    other = CharRNN(data.vocab_size, hidden_size)
    other.initialize(inputs)
    other.forward(inputs)
    other.load_states(path)
    model.eval(), other.eval()
    model.reset_states(dev), other.reset_states(dev)
    assert (tensor.to_numpy(other(inputs)) == tensor.to_numpy(model(inputs))).all()
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("-b", type=int, default=4)
    parser.add_argument("-l", type=int, default=8)
    parser.add_argument("-d", type=int, default=12)
    parser.add_argument("-m", type=int, default=3)
    parser.add_argument("-g", action="store_true")
    args = parser.parse_args()
    np.random.seed(0)
    dev = device.get_default_device()
    data = Data(args.data, batch_size=args.b, seq_length=args.l)
    m = train(data, args.m, args.d, args.l, args.b, dev, args.g, "char_rnn.zip")
    sample(m, data, dev, data.raw_data[:3])
    sample(m, data, dev, data.raw_data[:3], use_max=True)
