"""Text as tokens, tokens as text: the tokenizer of a folder, text that streams in whole characters, and texts that stop it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.io.archives import read_bytes

TOKENIZER = "SX375"
"""The code of an error of a tokenizer, or of tokens."""

LARGEST_FILE = 256 << 20
"""The maximum bytes of tokenizer.json."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are not a whole character."""

PATIENCE = 4
"""The number of tokens that a character may be split over: it has at most four bytes."""

FORGOTTEN = 64
"""The number of tokens without text after which the tokens before them are no longer decoded with the next ones."""

CONTEXT = 6
"""The number of tokens of a prompt that are decoded with the first new ones: some decoders drop the space of a first token."""


class TextTokenizer:
    """The tokenizer of a folder: tokenizer.json, as the library `tokenizers` writes it.

    Attributes:
        special: the texts of the special tokens, which `decode` leaves out.

    Raises:
        MissingDependency: the library is not installed (SX700).
        InvalidInput: the file is missing or damaged (SX374, SX375).
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            what = "text is made into tokens by the library tokenizers, which is not installed"
            raise MissingDependency(what, hint="pip install 'sonnx[generate]'") from None
        path = folder / "tokenizer.json"
        if not os.path.isfile(path):
            hint = "`tokenizer.save_pretrained(FOLDER)` of transformers writes it"
            raise InvalidInput(f"{folder} must contain tokenizer.json", code=TOKENIZER, hint=hint)
        data = read_bytes(path, TOKENIZER, LARGEST_FILE)
        self._tokenizer: Any = _guarded(
            lambda: Tokenizer.from_buffer(data), f"{path} is not a tokenizer of the library tokenizers"
        )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.special: dict[int, str] = {n: t.content for n, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}

    def encode(self, text: str, special: bool) -> list[int]:
        """The tokens of a text; `special`: with those that the tokenizer adds, such as one that begins a text."""
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise InvalidInput("a prompt must be text without surrogates", code=TOKENIZER)
        encoded = _guarded(lambda: self._tokenizer.encode(text, add_special_tokens=special), "the tokenizer refuses the prompt")
        return list(encoded.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(_guarded(lambda: self._tokenizer.decode(list(tokens), skip_special_tokens=True), "tokens cannot be decoded"))


def _guarded(call: Callable[[], Any], what: str) -> Any:
    """The result of a call of the library, whose errors, and panics of its language, become InvalidInput."""
    try:
        return call()
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        detail = " ".join(str(error).split())[:300]
        raise InvalidInput(f"{what}: {detail}", code=TOKENIZER) from None


class Characters:
    """The text of tokens as they come, in whole characters.

    Args:
        decode: returns the text of tokens.
        before: the tokens before the first one, which are not part of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(before[-CONTEXT:])
        self._settled = len(self._window)
        self._shown = len(decode(self._window)) if self._window else 0

    def add(self, token: int) -> str:
        """The text that is complete after this token; "" while a character may be incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._settled
        if text.endswith(BROKEN):
            if waiting <= PATIENCE:
                return ""
            end = len(text.rstrip(BROKEN))
            end = max(end, len(text) - PATIENCE + 1)  # bytes that were invalid for long stay invalid
            piece, self._shown = text[self._shown : end], max(end, self._shown)
            return piece
        piece = text[self._shown :]
        if piece or waiting > FORGOTTEN:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._shown = len(self._decode(self._window))
        return piece

    def rest(self) -> str:
        """The remaining text; an incomplete character at its end is left out."""
        return self._decode(self._window)[self._shown :].rstrip(BROKEN)


class TextWriter:
    """The text of a sequence as it grows, up to the first text that stops it.

    Args:
        characters: the text of the tokens.
        stops: the texts that end it; they are not part of it.
        special: the texts of special tokens, which may be in `stops`, but are not part of the text.

    Attributes:
        stopped: whether one of them occurred.
        text: what was returned so far.
    """

    def __init__(self, characters: Characters, stops: Sequence[str] = (), special: Mapping[int, str] | None = None) -> None:
        self._characters, self._stops, self._special = characters, tuple(stops), special or {}
        self._held = ""
        self._shown: list[bool] = []  # for each character of what is held, whether it is part of the text
        self.stopped = False
        self.text = ""

    def add(self, token: int) -> str:
        """The text that this token completes, and that no text to stop at begins with."""
        self._hold(self._characters.add(token), True)
        self._hold(self._special.get(token, ""), False)
        return self._take(last=False)

    def finish(self) -> str:
        """The remaining text."""
        if self.stopped:
            return ""
        self._hold(self._characters.rest(), True)
        return self._take(last=True)

    def _hold(self, piece: str, shown: bool) -> None:
        self._held += piece
        self._shown += [shown] * len(piece)

    def _take(self, last: bool) -> str:
        held = self._held
        end = min((at for s in self._stops if (at := held.find(s)) >= 0), default=-1)
        self.stopped = end >= 0
        if not self.stopped:
            end = len(held) - (0 if last else _beginning(held, self._stops))
        ready = "".join(c for c, shown in zip(held[:end], self._shown, strict=False) if shown)
        self._held, self._shown = ("", []) if self.stopped else (held[end:], self._shown[end:])
        self.text += ready
        return ready


def _beginning(text: str, stops: Iterable[str]) -> int:
    """The length of the longest end of a text with which one of the others begins."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
