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

MOST_TEMPLATES = 64
"""The maximum number of templates of a folder."""

TIMEOUT = 60.0
"""Seconds that the process of a template may take to answer: more than its processor time, if other programs compute."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a template may use, by their keys in tokenizer_config.json or special_tokens_map.json."""

_MORE = ("model_specific_special_tokens", "extra_special_tokens")
"""The keys of further special tokens, by the names that a template may use."""


def _refused(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code=TEMPLATE, hint=hint)


class ChatTemplate:
    """The templates of a folder: chat_template.jinja and those in additional_chat_templates, or those in tokenizer_config.json.

    Raises:
        InvalidInput: the folder has no template, or it is not one (SX391).
        MissingDependency: jinja2 is not installed (SX700).
    """

    def __init__(self, folder: Path) -> None:
        if find_spec("jinja2") is None:
            hint = "pip install 'sonnx[generate]'"
            raise MissingDependency("chat templates are run by jinja2, which is not installed", hint=hint)
        section = _section(folder, "tokenizer_config.json")
        self._texts = _texts(folder, section)
        self._tokens = _special_tokens(section, _section(folder, "special_tokens_map.json"))
        self._lock = threading.Lock()
        self._child = Child(_template_child.serve, alone=True)

    @reports_shortage
    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, up to where the answer begins."""
        arguments = {
            "add_generation_prompt": True, **self._tokens, **(variables or {}), "messages": _messages(messages),
            "tools": _dicts(tools, "tools"), "documents": _dicts(documents, "documents"),
        }  # fmt: skip
        template = self._texts.get("default") if tools is None else self._texts.get("tool_use", self._texts.get("default"))
        if template is None:
            raise _refused(f"the folder must have a chat template named default, and has {', '.join(sorted(self._texts))}")
        try:
            request = template, json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise _refused(f"messages, and other variables, must hold values that JSON can represent: {error}") from None
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


def _section(folder: Path, name: str) -> Document:
    """A file of a folder; an empty object without one."""
    path = folder / name
    return read_document(path, FOLDER) if os.path.isfile(path) else Document({}, str(path), FOLDER)


def _texts(folder: Path, section: Document) -> dict[str, str]:
    """The texts of the templates by name; files come before those in the configuration."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if len(files) > 1 + MOST_TEMPLATES:
        what = f"{folder} must have at most {MOST_TEMPLATES} additional chat templates, got {len(files) - 1}"
        raise InvalidInput(what, code=FOLDER)
    texts = {name: _read(file) for name, file in files.items() if os.path.isfile(file)}
    value = section.get("chat_template")
    if not texts and value is not None:
        if not isinstance(value.value, list):
            return {"default": value.text(LARGEST_TEMPLATE)}
        texts = {t["name"].text(): t["template"].text(LARGEST_TEMPLATE) for t in value.parts(0, MOST_TEMPLATES)}
    if not texts:
        hint = "pass the prompt as the text that the model expects"
        raise _refused(f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json", hint)
    return texts


def _read(file: Path) -> str:
    try:
        return read_bytes(file, TEMPLATE, LARGEST_TEMPLATE).decode()
    except UnicodeDecodeError:
        raise _refused(f"{file} must be UTF-8") from None


def _special_tokens(section: Document, older: Document) -> dict[str, str]:
    """The special tokens by name; those of special_tokens_map.json if the configuration does not have them."""
    tokens: dict[str, str | None] = {}
    for document in (older, section):
        tokens |= {n: t for n in _SPECIAL if (t := _token(document.get(n))) is not None}
        for more in filter(None, map(document.get, _MORE)):
            if isinstance(more.value, dict):
                tokens |= {n: _token(t) for n, t in more.items()}
    return {n: t for n, t in tokens.items() if t is not None}


def _token(value: Document | None) -> str | None:
    """A special token, which is a text or an object with the text."""
    if value is not None and isinstance(value.value, dict):
        value = value.get("content")
    return None if value is None or value.value is None else value.text()


def _dicts(values: Sequence[Mapping[str, Any]] | None, name: str) -> list[dict[str, Any]] | None:
    """Values that a template may use, checked; None without them."""
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, Mapping) for v in values):
        raise _refused(f"{name} must be a list of dicts, got {values!r}")
    return [dict(v) for v in values]


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, checked."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise _refused(f"messages must be a list of dicts with the keys role and content, got {messages!r}")
    for m in messages:
        calls = isinstance(m, Mapping) and bool(m.get("tool_calls")) and m.get("content") is None
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or not (calls or isinstance(m.get("content"), str)):
            raise _refused(f"a message must be a dict with texts for the keys role and content, got {m!r}")
    return [{key: value for key, value in m.items() if value is not None} for m in messages]
