"""Chat templates: a folder's template makes one text of the messages of a conversation, in a sandbox."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.io.archives import read_bytes
from singa_backend.io.documents import Document, read_document
from singa_backend.limits import reports_shortage

from .config import FOLDER

TEMPLATE = "SX391"
"""The code of an error of a chat template, or of messages."""

LARGEST_TEMPLATE = 1 << 20
"""The maximum characters of a template."""

LARGEST_TEXT = 16 << 20
"""The maximum characters of a prompt that a template makes, and of a text in it that an operator repeats."""


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""The special tokens that a template may use, by their keys in tokenizer_config.json."""


def _refused(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code=TEMPLATE, hint=hint)


class ChatTemplate:
    """The template of a folder: chat_template.jinja, or `chat_template` in tokenizer_config.json.

    Raises:
        InvalidInput: the folder has no template, or it is not one (SX391).
        MissingDependency: jinja2 is not installed (SX700).
    """

    def __init__(self, folder: Path) -> None:
        config = folder / "tokenizer_config.json"
        section = read_document(config, FOLDER) if os.path.isfile(config) else Document({}, str(config), FOLDER)
        text = _text(folder, section)
        self._tokens = {
            n: t for n in ("bos_token", "eos_token", "pad_token", "unk_token") if (t := _token(section, n)) is not None
        }
        self._template = _compiled(text)

    @reports_shortage
    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, up to where the answer begins."""
        given = _messages(messages)
        import jinja2

        parts, size = [], 0
        try:
            for part in self._template.generate(messages=given, add_generation_prompt=True, **self._tokens):
                parts.append(part)
                size += len(part)
                if size > LARGEST_TEXT:
                    raise _refused(f"the prompt of the chat template must have at most {LARGEST_TEXT} characters")
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _refused(f"the chat template refuses the messages: {error}") from None
        return "".join(parts)


def _text(folder: Path, section: Document) -> str:
    """The text of the template."""
    file = folder / "chat_template.jinja"
    if os.path.isfile(file):
        try:
            return read_bytes(file, TEMPLATE, LARGEST_TEMPLATE).decode()
        except UnicodeDecodeError:
            raise _refused(f"{file} must be UTF-8") from None
    value = section.get("chat_template")
    if value is not None and isinstance(value.value, list):  # several templates with names
        value = next((t["template"] for t in value.parts() if t["name"].text() == "default"), None)
    if value is None:
        hint = "pass the prompt as the text that the model expects"
        raise _refused(f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json", hint)
    return value.text(LARGEST_TEMPLATE)


def _token(section: Document, key: str) -> str | None:
    """A special token, which is a text or an object with the text."""
    value = section.get(key)
    if value is not None and isinstance(value.value, dict):
        value = value.get("content")
    return None if value is None else value.text()


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, checked."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise _refused(f"messages must be a list of dicts with the keys role and content, got {messages!r}")
    for m in messages:
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
            raise _refused(f"a message must be a dict with texts for the keys role and content, got {m!r}")
    return [dict(m) for m in messages]


def _compiled(text: str) -> Any:
    """The template in a sandbox: it reads nothing but its arguments, and changes nothing."""
    try:
        import jinja2
        from jinja2 import sandbox
    except ImportError:
        hint = "pip install 'sonnx[generate]'"
        raise MissingDependency("chat templates are run by jinja2, which is not installed", hint=hint) from None
    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    environment: Any = sandbox.ImmutableSandboxedEnvironment(**options)
    environment.intercepted_binops = frozenset({"+", "*", "**", "%"})
    environment.call_binop = _computed
    environment.filters["tojson"] = _json
    for unbounded in ("center", "indent"):  # their widths are not bounded
        environment.filters.pop(unbounded, None)
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise _refused(f"the chat template is not a template of jinja2: {error}") from None


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod,
}  # fmt: skip


def _computed(context: Any, symbol: str, left: Any, right: Any) -> Any:
    """The result of an operator that can make a large value from small ones."""
    sized = [len(v) for v in (left, right) if isinstance(v, (str, list, tuple))]
    numbers = [abs(v) for v in (left, right) if isinstance(v, int)]
    if symbol == "%" and sized:
        raise _refused("the chat template must not format texts by %")
    large = sum(sized) * max(numbers if symbol == "*" else (), default=1) > LARGEST_TEXT
    if large or (symbol == "**" and max(numbers, default=0) > 1000):
        raise _refused(f"the chat template makes a value that is too large, by {symbol}")
    return _BINARY[symbol](left, right)


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=None if indent is None else min(indent, 8))


def _raise(text: str) -> None:
    raise _refused(f"the chat template refuses the messages: {text}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)
