"""Chat templates: a folder's template makes one text of the messages of a conversation, in a child process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from singa_backend.errors import InvalidInput, MissingDependency, ResourceExhausted
from singa_backend.io.archives import read_bytes
from singa_backend.io.documents import Document, read_document
from singa_backend.io.processes import Child, ChildFailure
from singa_backend.limits import current, format_bytes, reports_shortage

from . import _template_child
from .config import FOLDER

TEMPLATE = "SX391"
"""The code of an error of a chat template, or of messages."""

LARGEST_TEMPLATE = 1 << 20
"""The maximum characters of a template."""

TIMEOUT = 60.0
"""Seconds that the process of a template may take to answer: more than its processor time, if other programs compute."""

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
        if find_spec("jinja2") is None:
            hint = "pip install 'sonnx[generate]'"
            raise MissingDependency("chat templates are run by jinja2, which is not installed", hint=hint)
        config = folder / "tokenizer_config.json"
        section = read_document(config, FOLDER) if os.path.isfile(config) else Document({}, str(config), FOLDER)
        text = _text(folder, section)
        self._tokens = {n: t for n in _SPECIAL if (t := _token(section, n)) is not None}
        self._text = text
        self._lock = threading.Lock()
        self._child = Child(_template_child.serve, alone=True)

    @reports_shortage
    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, up to where the answer begins."""
        arguments = {"messages": _messages(messages), "add_generation_prompt": True, **self._tokens}
        try:
            request = self._text, json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise _refused(f"messages must hold values that JSON can represent: {error}") from None
        kind, content = self._answer(request)
        if kind in _BOUNDS:
            raise _exceeded(_BOUNDS[kind])
        if kind:
            what = "is not a template of jinja2" if kind == "template" else "refuses the messages"
            raise _refused(f"the chat template {what}: {content.decode()}")
        prompt: str = content.decode(errors="surrogatepass")
        return prompt

    def _answer(self, request: tuple[str, str]) -> tuple[str, bytes]:
        """The kind of an error, or "", and its message, or the prompt."""
        try:
            with self._lock:
                remaining = current().remaining()
                answer: tuple[str, bytes] = self._child.ask(request, TIMEOUT if remaining is None else min(remaining, TIMEOUT))
                if answer[0] in _BOUNDS:
                    self._child.close()  # what it still holds is not known
                return answer
        except OSError as error:
            raise ResourceExhausted(f"the process of a chat template cannot start: {error}", code="SX601") from error
        except ChildFailure as failure:
            current().watch()
            if failure.how == "timeout":
                raise _exceeded(f"{TIMEOUT:g} seconds") from None
            if failure.exit_code == _template_child.OUT_OF_TIME:
                raise _exceeded(f"{_template_child.SECONDS} seconds of processor time") from None
            raise _exceeded(f"the memory of its process ({failure})") from None


_BOUNDS = {
    "memory": f"{format_bytes(_template_child.MEMORY)} of memory, or {format_bytes(_template_child.LARGEST_TEXT)} of text",
    "nesting": "Python's stack",
}


def _exceeded(bound: str) -> ResourceExhausted:
    hint = "pass the prompt as the text that the model expects"
    return ResourceExhausted(f"the chat template needs more than {bound}", code="SX600", hint=hint)


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
