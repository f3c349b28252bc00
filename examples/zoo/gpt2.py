"""GPT-2 with its language model head (opset 10): continues a text.

    python examples/zoo/gpt2.py "Here is some text" --model gpt2-lm-head-10.onnx --vocab vocab.json --merges merges.txt
    python examples/zoo/gpt2.py "Here is some text" --model ... --top-k 40 --temperature 0.8 --seed 7 --tokens 50

The next token is the one with the highest score; with --top-k it is drawn from the k highest.  A model without a cache, such as
the published one, reads the whole text for each token.  A model with inputs for past keys and values reads only the new token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from published import between, load, numbers, options, softmax, start
from text import add_vocabulary, bpe, input_of, require

from singa_backend.errors import InvalidInput

CONTEXT = 1024
"""The largest number of tokens that the published model reads."""
END = "<|endoftext|>"


class LanguageModel:
    """The scores of the next token, with or without a cache of keys and values, as the inputs of the model require.

    Args:
        rep: the model.

    Attributes:
        ids: the tokens that it has read.
        cached: whether the model has a cache.
    """

    def __init__(self, rep: Any) -> None:
        self.rep = rep
        self.ids: list[int] = []
        self._past = [v for v in rep.inputs if "past" in v.name.lower()]
        self.cached = bool(self._past)
        others = {v.name: v for v in rep.inputs if v not in self._past}
        self._extra = {n: v for n, v in others.items() if n in EXTRA}
        read = [v for n, v in others.items() if n not in EXTRA]
        if len(read) != 1:
            names = ", ".join(map(str, rep.inputs))
            raise InvalidInput(
                f"the model must have one input for tokens, {', '.join(EXTRA)} and past keys and values, got {names}"
            )
        self._input = read[0]
        names = [v.name for v in rep.outputs]
        self._scores = "logits" if "logits" in names else names[0]
        self._present = [n for n in names if "present" in n.lower()] or [n for n in names if n != self._scores]
        if self.cached and len(self._present) != len(self._past):
            what = f"{len(self._past)} inputs for past keys and values, and {len(self._present)} outputs for present ones"
            raise InvalidInput(f"the model must have as many of both, got {what}")
        self._cache = [empty(v) for v in self._past]

    def next(self, ids: Sequence[int]) -> np.ndarray:
        """Read tokens, and return the scores of the token after them."""
        begin = len(self.ids)
        self.ids += ids
        new = list(ids) if self.cached else self.ids
        begin = begin if self.cached else 0
        fed = {self._input.name: input_of(self._input, new)}
        fed |= {n: EXTRA[n](v, begin, len(new)) for n, v in self._extra.items()}
        fed |= {v.name: a for v, a in zip(self._past, self._cache, strict=True)}
        outputs = self.rep.run(fed)
        if self.cached:
            self._cache = [outputs[n] for n in self._present]
        scores = numbers(outputs[self._scores])
        if scores.ndim < 2 or scores.shape[-2] not in (1, len(new)):
            raise InvalidInput(f"the model must return scores (..., {len(new)}, vocabulary), got {scores.shape}")
        return scores.reshape(-1, scores.shape[-1])[-1]  # type: ignore[no-any-return]


EXTRA: dict[str, Callable[[Any, int, int], np.ndarray]] = {
    "attention_mask": lambda v, begin, count: input_of(v, [1] * (begin + count)),
    "position_ids": lambda v, begin, count: input_of(v, range(begin, begin + count)),
    "token_type_ids": lambda v, begin, count: input_of(v, [0] * count),
    "use_cache_branch": lambda v, begin, count: np.array([begin > 0]),
}
"""Other inputs that exporters make: each for the tokens `begin` to `begin + count`."""


def empty(declared: Any) -> np.ndarray:
    """Return the cache of no tokens: (batch, heads, 0, size), or keys and values in one, (2, batch, heads, 0, size)."""
    shape = declared.shape
    if shape is None or len(shape) not in (4, 5) or not all(isinstance(shape[i], int) and shape[i] > 0 for i in (-3, -1)):
        what = "past keys and values must declare (batch, heads, past, size), or (2, batch, heads, past, size)"
        raise InvalidInput(f"{what}, with numbers of heads and of their size, got {declared}")
    return np.zeros((*(2,) * (len(shape) - 4), 1, shape[-3], 0, shape[-1]), declared.dtype)


def greedy(scores: np.ndarray) -> int:
    """Return the token with the highest score; the first of equal ones."""
    return int(scores.argmax())


def top_k(k: int, temperature: float, seed: int) -> Callable[[np.ndarray], int]:
    """Return a function that draws a token from the k with the highest scores, by their probabilities at a temperature."""
    if k < 1 or not 0 < temperature < np.inf:
        raise InvalidInput(f"--top-k must be at least 1 and --temperature above 0, got {k} and {temperature}")
    rng = np.random.default_rng(seed)

    def draw(scores: np.ndarray) -> int:
        best = np.argsort(-scores.astype(np.float64), kind="stable")[:k]
        return int(rng.choice(best, p=softmax(scores[best].astype(np.float64) / temperature)))

    return draw


def generate(
    model: LanguageModel, ids: Sequence[int], count: int, choose: Callable[[np.ndarray], int], end: int | None
) -> Iterator[int]:
    """Return `count` tokens after those of a text, or fewer if the token `end` is chosen, which is the last then."""
    if not ids:
        raise InvalidInput("the text must have at least one token")
    if len(ids) + count > CONTEXT:
        what = f"the text and its continuation must have at most {CONTEXT} tokens, got {len(ids)} + {count}"
        raise InvalidInput(what, hint="--tokens")
    new = list(ids)
    for _ in range(count):
        new = [choose(model.next(new))]
        yield new[0]
        if new[0] == end:
            return


def main() -> None:
    parser = options(__doc__, "gpt2-lm-head-10.onnx")
    add_vocabulary(parser)
    parser.add_argument("--tokens", type=between(1, CONTEXT, int), default=20, help="how many tokens to add (%(default)s)")
    parser.add_argument(
        "--top-k",
        type=between(1, 1 << 31, int),
        help="draw from the k tokens with the highest scores; otherwise take the highest",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of --top-k: below 1 prefers high scores (%(default)s)")
    parser.add_argument("--seed", type=between(0, 1 << 62, int), default=0, help="of --top-k (%(default)s)")
    args = parser.parse_args()
    given = require(parser, args, "texts", "vocab", "merges")
    tokenizer = bpe(args.vocab, args.merges, special=(END,)) if given else None
    rep = load(args)
    for text in args.texts:
        choose = greedy if args.top_k is None else top_k(args.top_k, args.temperature, args.seed)
        ids = tokenizer.encode(text).ids
        made = list(generate(LanguageModel(rep), ids, args.tokens, choose, tokenizer.token_to_id(END)))
        print(tokenizer.decode([*ids, *made]))


if __name__ == "__main__":
    start(main)
