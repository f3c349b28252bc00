"""Train a classifier of texts on BERT: python examples/training/bert.py [MODEL.onnx --vocab vocab.txt] [--data LABELS.tsv].

MODEL.onnx has inputs of ids, a mask and segments, in any order.  A new head reads the state of the first word.  The set is a
file with lines of label, tab, text; without it, sentences are generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import data
import nets
import numpy as np
import onnx

from singa import autograd

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def first_word(y: Any) -> Any:
    """The state of the first word, from the states (N, L, size) of all words."""
    return y if len(y.shape) == 2 else autograd.squeeze(autograd.slice(y, [0], [1], [1]), 1)


def has_states(proto: onnx.ModelProto) -> bool:
    """Whether the first output of a file is the state of every word."""
    return len(proto.graph.output[0].type.tensor_type.shape.dim) == 3


if __name__ == "__main__":
    parser = common.options(__doc__, lr=0.003)
    parser.set_defaults(optimizer="adam")
    parser.add_argument("--vocab", type=Path, help="the vocabulary of the file (needs the tokenizers library)")
    parser.add_argument("--length", type=int, default=16, help="the number of tokens of a text, padded")
    args = parser.parse_args()
    if args.model and not args.vocab:
        raise SystemExit("MODEL needs --vocab: the ids of the words are those of its vocabulary")
    proto = common.loaded(args.model) if args.model else None
    known = {t.name for t in proto.graph.initializer} if proto else set()
    inputs = [v.name for v in proto.graph.input if v.name not in known] if proto else INPUTS
    *sets, words = data.texts(args.data, args.vocab, inputs, args.length, args.samples)
    if proto is None:
        example = {n: np.zeros((2, args.length), np.int64) for n in INPUTS}
        proto = nets.exported(nets.BERT(words, args.length), example, args.seed)
    elif args.last_layers is None and has_states(proto):
        args.last_layers = -1
    common.run(args, proto, tuple(sets), first_word)
