"""Shared by the text programs of this folder: tokenizers from published vocabularies, and ids as inputs of models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from published import plain, stop

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.io.archives import read_bytes, typed
from singa_backend.io.documents import read_document

try:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
except ModuleNotFoundError:
    stop(MissingDependency("this program needs tokenizers", hint="pip install 'sonnx[zoo]'"))


# --- tokenizers


def read(path: str | Path) -> str:
    """Return the text of a UTF-8 file."""
    data = read_bytes(path, "SX307")
    with typed(str(path), "SX307"):
        return data.decode("utf-8-sig")


def lines(path: str | Path) -> list[str]:
    """Return the lines of a file of tokens, which may contain other characters that end lines."""
    return [line.rstrip("\r") for line in read(path).removesuffix("\n").split("\n")]


def wordpiece(vocabulary: str | Path, cased: bool = False) -> Any:
    """Return BERT's tokenizer; `vocabulary` is a vocab.txt: one token a line, whose number is its id."""
    ids = {token.strip(): i for i, token in enumerate(lines(vocabulary))}
    lacking = [t for t in ("[UNK]", "[CLS]", "[SEP]", "[PAD]") if t not in ids]
    if lacking:
        raise InvalidInput(f"{vocabulary} must be the vocab.txt of a BERT model; it lacks {', '.join(lacking)}", code="SX307")
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=200))
    made.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def bpe(vocabulary: str | Path, merges: str | Path, space: bool = False, special: Sequence[str] = ()) -> Any:
    """Return the byte-level tokenizer of GPT-2 and RoBERTa; the files are vocab.json and merges.txt.

    Args:
        vocabulary: the ids by token.
        merges: two tokens a line that become one, the first merged first.
        space: whether a space is put before the text.
        special: tokens that are not split, and not decoded; two of them are put around the text.
    """
    ids = read_document(vocabulary, "SX307").value
    if not isinstance(ids, dict) or not all(type(i) is int and 0 <= i < 1 << 32 for i in ids.values()):
        raise InvalidInput(f"{vocabulary} must be the vocab.json of the model: ids by token", code="SX307")
    pairs = [line.split(" ") for line in lines(merges) if line and not line.startswith("#version")]
    wrong = [a for a in pairs if len(a) != 2 or not {*a, "".join(a)} <= ids.keys()]
    if wrong:
        what = f"{merges} must have two tokens of {vocabulary} in each line, got {' '.join(wrong[0])!r}"
        raise InvalidInput(what, code="SX307")
    lacking = [token for token in special if token not in ids]
    if lacking:
        raise InvalidInput(f"{vocabulary} must have {', '.join(special)}; it lacks {', '.join(lacking)}", code="SX307")
    made = Tokenizer(models.BPE(ids, [(a, b) for a, b in pairs]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    if len(special) == 2:
        first, last = special
        made.post_processor = processors.TemplateProcessing(f"{first} $0 {last}", special_tokens=[(t, ids[t]) for t in special])
    return made


def add_vocabulary(parser: argparse.ArgumentParser) -> None:
    """Add the options for the files of a byte-level tokenizer."""
    parser.add_argument("--vocab", type=Path, help="vocab.json of the model")
    parser.add_argument("--merges", type=Path, help="merges.txt of the model")
    parser.add_argument("texts", nargs="*", type=plain, help="texts; none to --verify only")


def require(parser: argparse.ArgumentParser, args: argparse.Namespace, what: str, *names: str) -> bool:
    """Return whether `what` was passed; it needs the options of these names, without which the program ends."""
    lacking = [f"--{n}" for n in names if getattr(args, n) is None]
    if getattr(args, what) and lacking:
        parser.error(f"{what} needs {' and '.join(lacking)}")
    return bool(getattr(args, what))


# --- inputs


def input_of(declared: Any, values: Sequence[int]) -> np.ndarray:
    """Return whole numbers as an input of a model: (1, n), or (1, 1, n), in the declared dtype; ids may be floats.

    Raises:
        InvalidInput: the model does not take one row of numbers, or its dtype does not have one of the numbers.
    """
    rank = 2 if declared.shape is None else len(declared.shape)
    if rank < 1 or any(isinstance(n, int) and n not in (1, -1) for n in (declared.shape or ())[:-1]):
        raise InvalidInput(f"an input of the model must take one row of numbers, got {declared}")
    wide = np.asarray(values, np.int64)
    made = wide.astype(declared.dtype or np.int64)
    if made.astype(np.int64).tolist() != wide.tolist():
        raise InvalidInput(f"the numbers of the text must fit in the input {declared}, got {wide.max()}")
    return made.reshape((1,) * (rank - 1) + (-1,))
