r"""Names and values from a model are data in everything that people see: no markup, no control characters, no megabytes."""

from __future__ import annotations

import json
import re
import unicodedata
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import singa_backend
from singa.cli import main
from singa_backend import rendering
from singa_backend.conform.foreign import markdown
from singa_backend.errors import InvalidInput, NoGradientWarning, Problem, SonnxError

HOSTILE = {
    "rich markup": "[/red] [bold]x[/bold] :warning:",
    "unbalanced markup": "[/]",
    "terminal": "\x1b]0;title\x07\x1b[2J\x1b[31m",
    "c1 control": "a\x9b31mb\x85c",
    "carriage return": "good\rbad\nnext\tcell\x08",
    "bidirectional": "a\u202eb\u2066c\u200bd",
    "html": "<script>alert('x')</script>&amp;\"",
    "markdown": "| a ` b | [x](http://x) **c** <b>",
    "format": "%s {0} {name} %(x)d $x",
    "long": "n" * (1 << 20),
}

LARGEST = 256 << 10
"""Bytes of the output of a command for these models: a name of a megabyte is cut."""


def named(name, wrong=False):
    """x -> Relu -> y with a state and a node of this name; `wrong` makes the node one that fails when it runs."""
    x = helper.make_tensor_value_info(f"x{name}", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info(f"y{name}", TensorProto.FLOAT, None)
    w = numpy_helper.from_array(np.ones((4, 5) if wrong else (3, 5), np.float32), f"w{name}")
    nodes = [
        helper.make_node("Relu", [f"x{name}"], [f"h{name}"], name=f"a{name}", doc_string=name),
        helper.make_node("MatMul", [f"h{name}", f"w{name}"], [f"y{name}"], name=f"b{name}"),
    ]
    graph = helper.make_graph(nodes, f"g{name}", [x], [y], [w])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name=name)
    helper.set_model_props(made, {f"key{name}": name})
    return made


def clean(text):
    """Whether a text has no control characters but line feeds and tabs, and no invisible characters of formats."""
    return all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co") for c in text)


# --- the functions ----------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(), max_size=300))
def test_rendered_text_is_clean_in_every_medium(text):
    for render in (rendering.printable, rendering.markdown, rendering.html, rendering.xml):
        assert clean(render(text))
    assert "\n" not in rendering.printable(text) and "\n" not in rendering.markdown(text)
    assert not re.search(r"[<>\"]", rendering.html(text))
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`<*\[]", rendering.markdown(text))
    element = ElementTree.Element("a", b=rendering.xml(text))
    element.text = rendering.xml(text)
    again = ElementTree.fromstring(ElementTree.tostring(element, encoding="utf-8"))
    assert (again.text or "") == rendering.xml(text)


@given(st.text(max_size=50), st.integers(8, 60))
def test_short_printable_text_is_unchanged_and_long_text_is_bounded(text, limit):
    shown = rendering.printable(text, limit)
    if text.isprintable() and len(text) <= limit:
        assert shown == text
    assert len(rendering.printable("x" * 10**6, limit)) <= limit + 40


def test_long_text_keeps_both_ends_and_its_length():
    shown = rendering.printable("head" + "x" * 1000 + "tail")
    assert shown.startswith("head") and shown.endswith("tail") and "(1,008 characters)" in shown


# --- errors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_errors_are_clean_and_bounded(name):
    problem = Problem(f"value {name} is wrong", "SX101", name, name)
    error = InvalidInput(f"no value {name}", hint=f"write {name}", node=name, operator=name, problems=[problem, problem])
    warning = NoGradientWarning(f"no gradient reaches {name}", [name], f"freeze {name}")
    for text in (str(error), str(problem), str(warning)):
        assert clean(text) and len(text) < 5 * rendering.TEXT
    assert error.node == name and warning.parameters == (name,)  # for programs, the names are those of the model


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_errors_of_a_model_are_clean_and_bounded(name):
    with pytest.raises(SonnxError) as failed:
        singa_backend.prepare(named(name, wrong=True)).run([np.ones((2, 3), np.float32)])
    assert clean(str(failed.value)) and len(str(failed.value)) < 2 * rendering.TEXT
    with pytest.raises(SonnxError) as refused:
        singa_backend.prepare(named("")).run({f"x{name}": np.ones((2, 3), np.float32)})
    assert clean(str(refused.value)) and len(str(refused.value)) < 2 * rendering.TEXT


# --- commands ---------------------------------------------------------------------------------------------------------------

COMMANDS = {
    "run": "run {model} --random 0",
    "run --aux": "run {model} --random 0 --aux {aux}",
    "check": "check {model}",
    "check --train": "check {model} --train",
    "inspect": "inspect {model} --nodes --states",
    "compare": "compare {model} --against sonnx --random 0 --html {out}.html",
    "diff": "diff {model} {wrong} --html {out}.html",
    "bisect": "bisect {model} --against STRICT --random 0 --to {out}",
    "profile": "profile {model} --random 0 --runs 1 --nodes --trace {out}.json --html {out}.html",
    "optimize": "optimize {model} -o {out}.onnx",
    "convert": "convert {model} -o {out}.onnx --opset 20",
    "layout": "layout {model} -o {out}.onnx --to channels_last",
    "quantize": "quantize {model} --dynamic -o {out}.onnx",
    "codegen": "codegen {model} -o {out}.py",
    "run of a model that fails": "run {wrong} --random 0",
    "check of a model that fails": "check {wrong}",
    "run with a wrong name": "run {model} --random 0 --aux no{aux}",
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_print_names_as_text(command, name, tmp_path):
    onnx.save(named(name), tmp_path / "m.onnx")
    onnx.save(named(name, wrong=True), tmp_path / "wrong.onnx")
    words = command.split(" ")
    places = {"{model}": tmp_path / "m.onnx", "{wrong}": tmp_path / "wrong.onnx", "{out}": tmp_path / "out", "{aux}": f"h{name}"}
    arguments = []
    for word in words:
        for mark, value in places.items():
            word = word.replace(mark, str(value))
        arguments.append(word)
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1, 2, 3)
    assert clean(done.output), sorted({c for c in done.output if not clean(c)})
    assert len(done.output) < LARGEST


def test_markup_in_names_is_shown(tmp_path):
    onnx.save(named("[/red] :smile:"), tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.onnx"), "--nodes"])
    assert "[/red] :smile:" in done.output


def test_strings_in_values_are_printed_as_text(tmp_path):
    text = numpy_helper.from_array(np.array(["[/red]\x1b[2J"], object), "s")
    graph = helper.make_graph(
        [helper.make_node("Identity", ["s"], ["y"])], "g", [], [helper.make_tensor_value_info("y", 8, [1])], [text]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["run", str(tmp_path / "m.onnx")])
    assert done.exit_code == 0 and clean(done.output) and "[/red]" in done.output.replace("\n", "")


# --- pages ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_pages_of_models_are_clean(name, tmp_path):
    worst = {"value": name, "operator": name, "error": 0.0}
    row = {"model": name, "inputs": {name: [2]}, "operators": 1, "peer": "p", "device": "CPU", "outputs": {name: 0.0},
           "values": 1, "worst": worst, "good": True}  # fmt: skip
    page = markdown({"environment": {}, "error": "e", "bound": 1e-4, "comparisons": [row]})
    last = page.splitlines()[-1]
    assert clean(page) and len(re.findall(r"(?<!\\)\|", last)) == 10 and len(page) < LARGEST

    onnx.save(named(name[:1000]), tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.onnx"), "--html", str(tmp_path / "m.html")])
    assert done.exit_code == 0, done.output
    html = (tmp_path / "m.html").read_text(encoding="utf-8")
    data = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', html, re.DOTALL)
    assert data is not None and "<" not in data[1]
    json.loads(data[1])
