"""Train on pairs, then count the questions whose own answer is the nearest of all."""

import argparse
import random

import numpy as np
import qabot_data
from qabot_model import QAModel, QAModel_maxpooling, QAModel_mlp

from singa import device, opt, tensor


def do_train(m, tq, ta, pairs, args):
    for epoch in range(args.epochs):
        total_loss, count = 0.0, 0
        m.train()
        for q, a in qabot_data.batches(pairs, args.bs):
            tq.copy_from_numpy(q)
            ta.copy_from_numpy(a)
            _, loss = m(tq, ta)
            total_loss += tensor.to_numpy(loss)[0]
            count += 1
        print(f"epoch {epoch}, loss {total_loss / count}")


def do_eval(m, pairs, dev):
    m.eval()
    right = 0
    answers = np.stack([a for _, a in pairs])
    for i, (q, _) in enumerate(pairs):
        scores = []
        for a in answers:
            tq = tensor.from_numpy(q[None])
            ta = tensor.from_numpy(np.stack([a, a]))
            tq.to_device(dev), ta.to_device(dev)
            scores.append(tensor.to_numpy(m.forward(tq, ta)[0]).item())
        right += int(np.argmax(scores)) == i
    print(f"right {right} of {len(pairs)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("embedding")
    parser.add_argument("pairs")
    parser.add_argument("--model", choices=["lstm", "pool", "mlp"], default="lstm")
    parser.add_argument("--bs", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=25)
    args = parser.parse_args()
    random.seed(0)
    dev = device.get_default_device()
    dev.SetRandSeed(0)
    q_seq, a_seq = 4, 5
    embed = qabot_data.load_embed(args.embedding)
    size = len(next(iter(embed.values())))
    pairs = qabot_data.load(args.pairs, embed, q_seq, a_seq)
    tq = tensor.random((args.bs, q_seq, size), dev)
    ta = tensor.random((args.bs * 2, a_seq, size), dev)
    if args.model == "pool":
        m = QAModel_maxpooling(6, q_seq, a_seq)
    else:
        m = QAModel(6) if args.model == "lstm" else QAModel_mlp(6)
    m.set_optimizer(opt.SGD(0.3, 0.9))
    m.compile([tq, ta], is_train=True, use_graph=True, sequential=False)
    do_train(m, tq, ta, pairs, args)
    do_eval(m, pairs[:8], dev)
