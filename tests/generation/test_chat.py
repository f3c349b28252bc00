"""Chat templates: the prompts of conversations, refusals, and the sandbox."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.language_models import script, write

from singa import sonnx
from singa_backend.errors import InvalidInput, MissingDependency, SonnxError

USER = [{"role": "user", "content": "Hi"}]

TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def generator(folder: Path, template: Any = None, **config: Any) -> sonnx.Generator:
    config |= {} if template is None else {"chat_template": template}
    return sonnx.Generator(write(folder, {"model": script(list(b"Yes"))}, tokenizer_config=config))


def test_a_template_makes_the_prompt(tmp_path: Path) -> None:
    made = generator(tmp_path / "a", TEMPLATE, bos_token="<s>", eos_token={"content": "</s>"})
    found = made.chat_prompt([{"role": "system", "content": " Be brief. "}, *USER])
    assert found == "<s><|system|>Be brief.</s>\n<|user|>Hi</s>\n<|assistant|>"
    assert (
        generator(tmp_path / "b", [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]).chat_prompt(USER)
        == "y"
    )
    other = generator(tmp_path / "c", "from the configuration")
    (other.folder / "chat_template.jinja").write_text("{{ messages | tojson }}{% for i in [1, 2] %}{% break %}{% endfor %}")
    assert other.chat_prompt([{"role": "user", "content": "\u00e9<"}]) == json.dumps(
        [{"role": "user", "content": "\u00e9<"}], ensure_ascii=False
    )


def refusal(made: sonnx.Generator, messages: Any = USER, kind: type[SonnxError] = InvalidInput) -> SonnxError:
    with pytest.raises(kind) as caught:
        made.chat_prompt(messages)
    return caught.value


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for %}", "is not a template of jinja2"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ a.b.c }}", "undefined"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'config.json' %}", "refuses the messages"),
        ("{{ 'a' * 10 ** 12 }}", "too large"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{{ '%1000000000d' % 1 }}", "must not format texts by %"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ 'a' | center(10 ** 10) }}", "is not a template of jinja2"),
        ("{{ (messages * 20000000) | length }}", "too large"),
        ("{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "too large"),
        ("{% for i in range(9999) %}{{ 'aaaaaaaaaaaaaaaa' * 999 }}{% endfor %}", "at most 16777216 characters"),
    ],
)
def test_templates_that_are_refused(template: str | None, message: str, tmp_path: Path) -> None:
    error = refusal(generator(tmp_path / "folder", template))
    assert error.code == "SX391" and message in error.message, error.message


def test_values_that_are_not_templates(tmp_path: Path) -> None:
    assert refusal(generator(tmp_path / "a", 7)).code == "SX374"
    assert refusal(generator(tmp_path / "b", [{"name": "rag", "template": "x"}])).code == "SX391"
    made = generator(tmp_path / "c")
    (made.folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "must be UTF-8" in refusal(made).message


@pytest.mark.parametrize(
    "messages", ["Hi", [], [1], [{"role": "user"}], [{"role": 1, "content": "a"}], [{"role": "user", "content": ["a"]}], None]
)
def test_messages_that_are_refused(messages: Any, tmp_path: Path) -> None:
    error = refusal(generator(tmp_path / "folder", TEMPLATE), messages)
    assert error.code == "SX391" and "role" in error.message


def test_jinja2_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generator(tmp_path / "folder", TEMPLATE)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert refusal(made, kind=MissingDependency).hint == "pip install 'sonnx[generate]'"
