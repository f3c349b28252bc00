"""Chat templates: the prompts of conversations, refusals, and the sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.language_models import script, write

from singa import sonnx
from singa_backend.errors import InvalidInput, MissingDependency, ResourceExhausted, SonnxError

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


def test_what_a_template_may_use(tmp_path: Path) -> None:
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    tokens = {f"{n}_token": f"<{n}>" for n in names}
    made = generator(tmp_path / "a", "".join(f"{{{{ {n} }}}}" for n in tokens), **tokens)
    assert made.chat_prompt(USER) == "".join(tokens.values())
    older = generator(tmp_path / "b", "{{ sep_token }}{{ eos_token }}", eos_token="<e>")
    (older.folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": {"content": "<sep>"}, "eos_token": "<other>"}))
    assert older.chat_prompt(USER) == "<sep><e>"
    absent = generator(tmp_path / "c", "{{ tools is none }}{{ documents is none }}")
    assert absent.chat_prompt(USER) == "TrueTrue"
    used = generator(tmp_path / "d", "{{ tools[0].name }}{{ documents | length }}{{ enable_thinking }}")
    assert used.chat_prompt(USER, tools=[{"name": "add"}], documents=[{}], enable_thinking=False) == "add1False"
    both = [{"name": "tool_use", "template": "with"}, {"name": "default", "template": "without"}]
    assert generator(tmp_path / "e", both).chat_prompt(USER, tools=[]) == "with"
    calls = [*USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]
    assert generator(tmp_path / "f", "{{ messages[1].content is defined }}").chat_prompt(calls) == "False"


@pytest.mark.parametrize(("template", "expected"), [
    ("{{ {'b': 1, 'a': 'é<'} | tojson }}", '{"b": 1, "a": "é<"}'),
    ("{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=True, ensure_ascii=True, separators=(',', ':')) }}", r'{"a":"\u00e9","b":1}'),
    ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
])  # fmt: skip
def test_the_filter_and_the_tag_of_transformers(template: str, expected: str, tmp_path: Path) -> None:
    assert generator(tmp_path / "folder", template).chat_prompt(USER) == expected


@pytest.mark.parametrize("arguments", [{"tools": "add"}, {"tools": [1]}, {"documents": {}}, {"x": object()}])
def test_variables_that_are_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="SX391"):
        generator(tmp_path / "folder", TEMPLATE).chat_prompt(USER, **arguments)


def refusal(made: sonnx.Generator, messages: Any = USER, kind: type[SonnxError] = InvalidInput) -> SonnxError:
    with pytest.raises(kind) as caught:
        made.chat_prompt(messages)
    return caught.value


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for %}", "is not a template of jinja2"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "too many statically nested blocks"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ a.b.c }}", "undefined"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'config.json' %}", "refuses the messages"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ raise_exception('a' * 10 ** 6) }}", "a" * 1000),
    ],
)
def test_templates_that_are_refused(template: str | None, message: str, tmp_path: Path) -> None:
    error = refusal(generator(tmp_path / "folder", template))
    assert error.code == "SX391" and message in error.message and len(error.message) < 1200, error.message


GROWS = "{%% set n = namespace(x='aaaaaaaa') %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}"
TEXTS = [
    "{{ 'a' * 10 ** 12 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%0*d' % (10 ** 10, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' | indent(10 ** 9, first=True) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ (messages * 20000000) | length }}",
    GROWS % "n.x + n.x",
    GROWS % "n.x ~ n.x",
    GROWS % "n.x.replace('a', 'aaaa')",
    GROWS % "[n.x, n.x, n.x] | join(n.x)",
    "{% set x %}{% for i in range(9999) %}{{ 'aaaaaaaaaaaaaaaa' * 9999 }}{% endfor %}{% endset %}",
    "{% for i in range(9999) %}{{ 'aaaaaaaaaaaaaaaa' * 999 }}{% endfor %}",
]
"""Templates that make large values."""

STEPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
]
"""Templates that compute for a long time."""

NESTED = [
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "-" * 99999 + "1 }}",
    "{% if a %}" * 300 + "{% endif %}" * 300,
]
"""Templates that need a deep stack."""

PEAKS = """
import json, resource, sys
from pathlib import Path
from singa._generation.chat import ChatTemplate
folder, found = Path(sys.argv[1]), []
for text in json.loads((folder / "templates.json").read_text()):
    (folder / "chat_template.jinja").write_text(text)
    try:
        found.append(["", ChatTemplate(folder).text([{"role": "user", "content": "Hi"}])])
    except Exception as error:
        found.append([error.code, error.message])
print(json.dumps([found, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


def peaks(folder: Path, templates: list[str]) -> tuple[list[list[str]], int]:
    """The code and the message of each template, and the most memory of a child in KiB."""
    (folder / "templates.json").write_text(json.dumps(templates))
    done = subprocess.run([sys.executable, "-c", PEAKS, folder], capture_output=True, text=True, timeout=400, check=True)
    found, peak = json.loads(done.stdout)
    return found, peak


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not bound the memory and the time of a child")
def test_templates_that_need_too_much_end_in_bounded_memory_and_time(tmp_path: Path) -> None:
    _, before = peaks(tmp_path, ["{{ messages }}"])
    found, peak = peaks(tmp_path, [*TEXTS, *STEPS, *NESTED, "fine"])
    assert [code for code, _ in found] == ["SX600"] * (len(found) - 1) + [""], found
    needs = ["64.0 MiB of memory"] * len(TEXTS) + ["seconds of processor time"] * len(STEPS) + ["stack"] * len(NESTED)
    assert [n for (_, text), n in zip(found, needs, strict=False) if n not in text] == []
    assert peak - before <= 64 << 10


def test_a_template_serves_after_one_call_that_needed_too_much(tmp_path: Path) -> None:
    made = generator(tmp_path / "folder", "{{ 'a' * messages[0].content | int }}")
    assert made.chat_prompt([{"role": "user", "content": "3"}]) == "aaa"
    error = refusal(made, [{"role": "user", "content": "9" * 12}], ResourceExhausted)
    assert error.code == "SX600" and error.hint
    assert made.chat_prompt([{"role": "user", "content": "4"}]) == "aaaa"


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


def test_messages_hold_values_of_json(tmp_path: Path) -> None:
    made = generator(tmp_path / "folder", "{{ messages[0].calls[0].name }}")
    message: dict[str, Any] = {"role": "user", "content": "a", "calls": [{"name": "\ud800\u00e9"}]}
    assert made.chat_prompt([message]) == "\ud800\u00e9"
    assert "Object of type object is not JSON serializable" in refusal(made, [{**message, "calls": object()}]).message


def test_jinja2_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generator(tmp_path / "folder", TEMPLATE)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert refusal(made, kind=MissingDependency).hint == "pip install 'sonnx[generate]'"
