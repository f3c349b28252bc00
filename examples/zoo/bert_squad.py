"""BERT-SQuAD (opset 8, 10 or 12): the answer to a question, as a part of a text.

    python examples/zoo/bert_squad.py --model bertsquad-10.onnx --vocab vocab.txt --context text.txt --question "Who wrote it?"

Question and text are WordPiece tokens: [CLS] question [SEP] text [SEP], 256 in all.  A longer text is cut into windows that begin
128 tokens apart.  The model returns a score for each token as the begin, and as the end, of the answer.  A token counts only in
the window that shows most of the text around it.  Of the 20 best begins and ends of each window, the pair with the largest sum of
scores is the answer; its text is that of the file, with its capitals and spaces.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from published import between, load, numbers, options, plain, softmax, start
from text import input_of, read, require, wordpiece

from singa_backend.errors import InvalidInput

LENGTH, STRIDE, QUERY = 256, 128, 64
"""Tokens of an input, between two windows, and, at most, of a question."""
BEST, ANSWER = 20, 30
"""Candidates of a window, and the largest number of tokens of an answer."""


class Window(NamedTuple):
    """A part of the text, as an input of the model.

    start: the number of its first token in the text.  shift: the place of that token in `ids`.
    counts: for each token of the part, whether this window shows most of the text around it.
    """

    ids: list[int]
    start: int
    shift: int
    counts: list[bool]


class Answer(NamedTuple):
    """A candidate: its text, its probability among the candidates, its score, and where it is in the text, in characters."""

    text: str
    probability: float
    score: float
    begin: int
    end: int


def windows(question: Sequence[int], text: Sequence[int], cls: int, sep: int, length: int = LENGTH) -> list[Window]:
    """Return the inputs for the tokens of a question and a text."""
    if not 0 < len(question) <= QUERY:
        raise InvalidInput(f"the question must have 1 to {QUERY} tokens, got {len(question)}")
    if not text:
        raise InvalidInput("the text has no words")
    room = length - len(question) - 3
    if room < 1:
        raise InvalidInput(f"a question for inputs of {length} tokens must have less than {length - 3}, got {len(question)}")
    spans = [(0, min(room, len(text)))]
    while sum(spans[-1]) < len(text):
        begin = spans[-1][0] + min(STRIDE, room)
        spans.append((begin, min(room, len(text) - begin)))
    found = []
    for number, (begin, count) in enumerate(spans):
        part = [best_window(spans, i) == number for i in range(begin, begin + count)]
        ids = [cls, *question, sep, *text[begin : begin + count], sep]
        found.append(Window(ids, begin, len(question) + 2, part))
    return found


def best_window(spans: Sequence[tuple[int, int]], token: int) -> int:
    """Return the window that shows most of the text on the poorer side of a token; the first of equal ones."""
    scores = [
        min(token - begin, begin + count - 1 - token) + 0.01 * count if begin <= token < begin + count else -1.0
        for begin, count in spans
    ]
    return int(np.argmax(scores))


def feeds(rep: Any, window: Window, number: int, length: int) -> dict[str, np.ndarray]:
    """Return the inputs of the model for a window."""
    filled, rest = len(window.ids), [0] * (length - len(window.ids))
    values = {
        "unique_ids": [number],
        "segment_ids": [0] * window.shift + [1] * (filled - window.shift) + rest,
        "input_mask": [1] * filled + rest,
        "input_ids": window.ids + rest,
    }
    found = {v.name: next((n for n in values if v.name.startswith(n)), "") for v in rep.inputs}
    if not {"segment_ids", "input_mask", "input_ids"} <= set(found.values()) or "" in found.values():
        raise InvalidInput(f"the inputs of the model must begin with {', '.join(values)}, got {', '.join(found)}")
    return {v.name: input_of(v, values[found[v.name]]) for v in rep.inputs}


def length_of(rep: Any) -> int:
    """Return the number of tokens of an input."""
    declared = next((v.shape[-1] for v in rep.inputs if v.name.startswith("input_ids") and v.shape), None)
    return declared if isinstance(declared, int) and declared > 0 else LENGTH


def logits(outputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of the begins and of the ends: the published model calls them unstack:0 and unstack:1."""
    found = []
    for names in (("unstack:0", "start_logits"), ("unstack:1", "end_logits")):
        name = next((n for n in names if n in outputs.names), None)
        if name is None:
            raise InvalidInput(f"the model must have an output {' or '.join(names)}, got {', '.join(outputs.names)}")
        found.append(numbers(outputs[name]).reshape(-1))
    return found[0], found[1]


def candidates(
    found: Sequence[Window], scores: Sequence[tuple[np.ndarray, np.ndarray]], best: int = BEST
) -> list[tuple[float, int, int]]:
    """Return (score, first token, last token) of the possible answers, the best first."""
    made = []
    for window, (begins, ends) in zip(found, scores, strict=True):
        count = len(window.counts)
        top = [np.argsort(-s.astype(np.float64), kind="stable")[:best] - window.shift for s in (begins, ends)]
        for first in top[0].tolist():
            for last in top[1].tolist():
                if 0 <= first <= last < min(count, first + ANSWER) and window.counts[first]:
                    score = float(begins[first + window.shift]) + float(ends[last + window.shift])
                    made.append((score, window.start + first, window.start + last))
    return sorted(made, key=lambda c: -c[0])


def answers(rep: Any, tokenizer: Any, question: str, text: str, best: int = BEST) -> list[Answer]:
    """Return the `best` answers, each text once, the most probable first; none if no pair of begin and end is possible."""
    asked, read_text = (tokenizer.encode(t, add_special_tokens=False) for t in (question, text))
    cls, sep = (tokenizer.token_to_id(t) for t in ("[CLS]", "[SEP]"))
    length = length_of(rep)
    found = windows(asked.ids, read_text.ids, cls, sep, length)
    scores = [logits(rep.run(feeds(rep, w, i, length))) for i, w in enumerate(found)]
    kept: dict[str, tuple[float, int, int]] = {}
    for score, first, last in candidates(found, scores, best):
        begin, end = read_text.offsets[first][0], read_text.offsets[last][1]
        while text[end : end + 1] and unicodedata.combining(text[end]):  # accents of the last letter are not in its token
            end += 1
        if len(kept) < best:
            kept.setdefault(text[begin:end], (score, begin, end))
    if not kept:
        return []
    shares = softmax([score for score, _, _ in kept.values()]).tolist()
    return [Answer(part, share, *rest) for (part, rest), share in zip(kept.items(), shares, strict=True)]


def main() -> None:
    parser = options(__doc__, "bertsquad-10.onnx")
    parser.add_argument("--vocab", type=Path, help="vocab.txt of the model")
    parser.add_argument("--context", type=Path, help="the file of the text")
    parser.add_argument("--question", action="append", default=[], type=plain, help="a question; may be repeated")
    parser.add_argument("--cased", action="store_true", help="the vocabulary has capitals; that of the published model has none")
    parser.add_argument("--show", type=between(1, BEST, int), default=3, help="answers to print for each question (%(default)s)")
    args = parser.parse_args()
    given = require(parser, args, "question", "vocab", "context")
    tokenizer = wordpiece(args.vocab, args.cased) if given else None
    rep = load(args)
    for question in args.question:
        print(question)
        found = answers(rep, tokenizer, question, read(args.context))
        for answer in found[: args.show]:
            print(f"  {answer.probability:.4f}  {answer.text}")
        if not found:
            print("  no answer")


if __name__ == "__main__":
    start(main)
