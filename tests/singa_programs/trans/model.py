"""A transformer with custom layers made of functions of autograd: attention with masks, normalization, both stacks."""

import math

import numpy as np

from singa import autograd, layer, model, tensor


class LayerNorm(layer.Layer):
    def __init__(self, n_features, eps=1e-6):
        super().__init__()
        self.n_features, self.eps = n_features, eps

    def initialize(self, x):
        shape = (self.n_features,)
        self.Gamma = tensor.Tensor(shape=shape, dtype=x.dtype, requires_grad=True, stores_grad=True)
        self.Beta = tensor.Tensor(shape=shape, dtype=x.dtype, requires_grad=True, stores_grad=True)
        self.Gamma.set_value(1.0)
        self.Beta.set_value(0.0)

    def forward(self, x):
        self.device_check(x, self.Gamma, self.Beta)
        mean = autograd.reduce_mean(x, axes=[-1], keepdims=1)
        centred = autograd.sub(x, mean)
        var = autograd.reduce_mean(autograd.mul(centred, centred), axes=[-1], keepdims=1)
        eps = tensor.Tensor(shape=(1,), device=x.device, requires_grad=False)
        eps.set_value(self.eps)
        y = autograd.div(centred, autograd.sqrt(autograd.add(var, eps)))
        return autograd.add(autograd.mul(y, self.Gamma), self.Beta)


class MultiHeadAttention(layer.Layer):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.d_k, self.n_head, self.d_model = d_model // n_head, n_head, d_model
        self.W_Q, self.W_K, self.W_V = layer.Linear(d_model), layer.Linear(d_model), layer.Linear(d_model)
        self.linear = layer.Linear(d_model)
        self.layer_norm = LayerNorm(d_model)

    def split(self, x, n):
        x = autograd.reshape(x, (n, -1, self.n_head, self.d_k))
        return autograd.transpose(x, (0, 2, 1, 3))

    def forward(self, query, key, value, attn_mask):
        n = query.shape[0]
        q, k, v = self.split(self.W_Q(query), n), self.split(self.W_K(key), n), self.split(self.W_V(value), n)
        scores = autograd.matmul(q, autograd.transpose(k, (0, 1, 3, 2)))
        root = tensor.Tensor(shape=(1,), device=query.device, requires_grad=False)
        root.set_value(math.sqrt(self.d_k))
        scores = autograd.div(scores, root)
        mask = tensor.from_numpy(np.expand_dims(tensor.to_numpy(attn_mask), 1).repeat(self.n_head, 1).astype(np.float32))
        low = tensor.Tensor(shape=mask.shape, requires_grad=False)
        low.set_value(-1e6)
        mask.requires_grad = False
        scores = autograd.add(scores, autograd.mul(mask, low))
        context = autograd.matmul(autograd.softmax(scores, axis=-1), v)
        context = autograd.reshape(autograd.transpose(context, (0, 2, 1, 3)), (n, -1, self.d_model))
        return self.layer_norm(autograd.add(self.linear(context), query))


class Feed(layer.Layer):
    def __init__(self, d_model, d_feed):
        super().__init__()
        self.linear1, self.linear2, self.norm = layer.Linear(d_feed), layer.Linear(d_model), LayerNorm(d_model)

    def forward(self, x):
        return self.norm(autograd.add(x, self.linear2(autograd.relu(self.linear1(x)))))


def pad_mask(q, k):
    empty = np.equal(tensor.to_numpy(k), 0)[:, None, :]
    return tensor.from_numpy(np.repeat(empty, q.shape[1], axis=1).astype(np.int32))


class Transformer(model.Model):
    def __init__(self, src_vocab, tgt_vocab, d_model=8, n_head=2, d_feed=16, n_layers=1):
        super().__init__()
        self.d_model = d_model
        self.src_embed = layer.Embedding(src_vocab, d_model)
        self.tgt_embed = layer.Embedding(tgt_vocab, d_model)
        self.encoders, self.decoders = [], []
        for _ in range(n_layers):
            self.encoders.append((MultiHeadAttention(d_model, n_head), Feed(d_model, d_feed)))
            self.decoders.append(
                (MultiHeadAttention(d_model, n_head), MultiHeadAttention(d_model, n_head), Feed(d_model, d_feed))
            )
        self.register_layers(*[x for group in self.encoders + self.decoders for x in group])
        self.projection = layer.Linear(tgt_vocab, bias=False)
        self.soft_cross_entropy = layer.SoftMaxCrossEntropy()

    def place(self, x):
        length = x.shape[1]
        angle = np.arange(length)[:, None] / 10000 ** (2 * (np.arange(self.d_model)[None] // 2) / self.d_model)
        table = np.where(np.arange(self.d_model) % 2, np.cos(angle), np.sin(angle)).astype(np.float32)
        return tensor.from_numpy(table[None])

    def forward(self, enc_inputs, dec_inputs):
        enc = autograd.add(self.src_embed(enc_inputs), self.place(enc_inputs))
        for attend, feed in self.encoders:
            enc = feed(attend(enc, enc, enc, pad_mask(enc_inputs, enc_inputs)))
        dec = autograd.add(self.tgt_embed(dec_inputs), self.place(dec_inputs))
        later = np.triu(np.ones((dec_inputs.shape[1],) * 2), 1)
        own = tensor.to_numpy(pad_mask(dec_inputs, dec_inputs)) + later > 0
        for mine, cross, feed in self.decoders:
            dec = mine(dec, dec, dec, tensor.from_numpy(own.astype(np.int32)))
            dec = feed(cross(dec, enc, enc, pad_mask(dec_inputs, enc_inputs)))
        y = self.projection(dec)
        return autograd.reshape(y, (-1, y.shape[-1]))

    def train_one_batch(self, enc_inputs, dec_inputs, dec_outputs, pad):
        out = self.forward(enc_inputs, dec_inputs)
        words = tensor.to_numpy(dec_outputs).reshape(-1)
        onehot = np.eye(out.shape[-1], dtype=np.float32)[words]
        keep = tensor.from_numpy((words != pad).astype(np.float32)[:, None].repeat(out.shape[-1], 1))
        loss = self.soft_cross_entropy(autograd.mul(out, keep), tensor.from_numpy(onehot))
        self.optimizer(loss)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer
