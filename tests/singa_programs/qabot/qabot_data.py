"""Word vectors in GloVe's text form, questions as lines of `question<TAB>answer`."""

import random

import numpy as np


def load_embed(path):
    with open(path, encoding="utf8") as f:
        return {w[0]: np.array(w[1:], dtype=np.float32) for w in (line.split() for line in f)}


def encode(text, embed, length):
    size = len(next(iter(embed.values())))
    rows = [embed.get(w, np.zeros(size, np.float32)) for w in text.split()[:length]]
    return np.stack(rows + [np.zeros(size, np.float32)] * (length - len(rows)))


def load(path, embed, q_seq, a_seq):
    with open(path) as f:
        pairs = [line.rstrip("\n").split("\t") for line in f]
    return [(encode(q, embed, q_seq), encode(a, embed, a_seq)) for q, a in pairs]


def batches(pairs, bs):
    random.shuffle(pairs)
    for i in range(len(pairs) // bs):
        part = pairs[i * bs : (i + 1) * bs]
        q, pos = np.stack([p[0] for p in part]), np.stack([p[1] for p in part])
        yield q, np.concatenate([pos, np.roll(pos, 1, axis=0)])
