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
from singa_backend.adapters import Adapter, LowRank
from singa_backend.conform.foreign import markdown
from singa_backend.errors import InvalidInput, NoGradientWarning, Problem, SonnxError

HOSTILE = {
    "rich markup": "[/red] [bold]x[/bold] :warning:",
    "unbalanced markup": "[/]",
    "terminal": "\x1b]0;title\x07\x1b[2J\x1b[31m",
    "c1 control": "a\x9b31mb\x85c",
    "carriage return": "good\rbad\nnext\tcell\x08",
    "bidirectional": "a\u202eb\u2066c\u200bd",
    "every invisible character": "".join(
        map(
            chr,
            (
                *range(0x202A, 0x202F),
                *range(0x2066, 0x206A),
                *range(0x200B, 0x2010),
                0xFEFF,
                0x61C,
                0xAD,
                0x2028,
                0x2029,
                0xE0001,
                *range(1, 32),
                *range(127, 160),
            ),
        )
    ),
    "html": "<script>alert('x')</script>&amp;\"",
    "markdown": "| a ` b | [x](http://x) **c** <b>",
    "format": "%s {0} {name} %(x)d $x",
    "long": "n" * (1 << 18),
}

MIXED = {
    "markup": "".join(HOSTILE[n] for n in ("rich markup", "unbalanced markup", "html", "markdown", "format")),
    "controls": "".join(HOSTILE[n] for n in ("terminal", "c1 control", "carriage return", "bidirectional")),
    **{n: HOSTILE[n] for n in ("every invisible character", "long")},
}
"""For the commands: several in one name."""

LARGEST = 256 << 10
"""Bytes of the output of a command for these models: a name of a megabyte is cut, except in JSON."""


def named(name, wrong=False):
    """A model in which everything that can have a name or a text has this one: x -> Relu -> function -> If -> MatMul -> y.

    `wrong` makes a node one that fails when it runs. A name of a megabyte is in fewer places.
    """
    return _small(name, wrong) if len(name) > 1000 else _full(name, wrong)


def _small(name, wrong):
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


def _full(name, wrong):
    sizes = [f"n{name}", 3]
    x = helper.make_tensor_value_info(f"x{name}", TensorProto.FLOAT, sizes, f"doc{name}")
    h = helper.make_tensor_value_info(f"h{name}", TensorProto.FLOAT, sizes)
    inner = [helper.make_tensor_value_info(f"{n}{name}", TensorProto.FLOAT, sizes) for n in "kl"]
    y = helper.make_tensor_value_info(f"y{name}", TensorProto.FLOAT, [sizes[0], 5])
    w = numpy_helper.from_array(np.ones((4, 5) if wrong else (3, 5), np.float32), f"w{name}")
    nodes = [
        helper.make_node("Relu", [f"x{name}"], [f"h{name}"], name=f"a{name}", doc_string=name),
        helper.make_node(f"F{name}", [f"h{name}"], [f"f{name}"], name=f"c{name}", domain=f"d{name}"),
        helper.make_node(
            "If", [f"t{name}"], [f"i{name}"], name=f"if{name}", then_branch=_branch(name, "k"), else_branch=_branch(name, "l")
        ),
        helper.make_node("MatMul", [f"i{name}", f"w{name}"], [f"y{name}"], name=f"b{name}"),
    ]
    t = numpy_helper.from_array(np.array(True), f"t{name}")
    for tensor in (w, t):
        tensor.doc_string = name
    graph = helper.make_graph(nodes, f"g{name}", [x], [y], [w, t], name, [h, *inner])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(f"d{name}", 1)]
    body = [helper.make_node("Neg", [f"p{name}"], [f"q{name}"], name=f"e{name}", doc_string=name)]
    function = helper.make_function(f"d{name}", f"F{name}", [f"p{name}"], [f"q{name}"], body, opsets[:1])
    function.doc_string = name
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name=name, functions=[function],
                             producer_version=name, domain=f"m{name}", doc_string=name)  # fmt: skip
    helper.set_model_props(made, {f"key{name}": name})
    return made


def _branch(name, value):
    out = helper.make_tensor_value_info(f"{value}{name}", TensorProto.FLOAT, [None, 3])
    node = helper.make_node("Abs", [f"f{name}"], [f"{value}{name}"], name=f"{value}node{name}", doc_string=name)
    return helper.make_graph([node], f"graph {value}{name}", [], [out], doc_string=name)


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
    "inspect": "inspect {model} --nodes --states --stats --html {out}.html",
    "inspect with measures": "inspect {model} --html {out}.html --profile {profile} --compare {comparison}",
    "inspect --json": "inspect {model} --nodes --states --json",
    "extract": "extract {model} -o {out}.onnx --outputs {aux}",
    "sanitize": "sanitize {model} -o {out}.onnx",
    "reduce": "reduce {wrong} --raises SX404 --random 0 --to {out}",
    "compare of two models": "compare {model} --against {model} --random 0 --all",
    "foreign": "foreign {folder} --no-light --to {out}",
    "compare": "compare {model} --against sonnx --random 0 --html {out}.html",
    "diff": "diff {model} {wrong} --html {out}.html",
    "bisect": "bisect {model} --against definition --random 0 --to {out}",
    "profile": "profile {model} --random 0 --runs 1 --nodes --trace {out}.json --html {out}.html",
    "optimize": "optimize {model} -o {out}.onnx",
    "convert": "convert {model} -o {out}.onnx --opset 20",
    "layout": "layout {model} -o {out}.onnx --to channels_last",
    "quantize": "quantize {model} --dynamic -o {out}.onnx",
    "adapter": "adapter {adapter} -o {out}.onnx_adapter",
    "merge": "merge {model} {adapter} -o {out}.onnx",
    "weight-only quantization": "quantize {model} --weight-only int4 -o {out}.onnx",
    "codegen": "codegen {model} -o {out}.py",
    "sweep": "sweep {folder} --task check -k ^(m|wrong).onnx$ --results {out} --junit {out}.xml",
    "sweep of runs": "sweep {folder} --task run -k ^(m|wrong).onnx$ -n 1 --junit {out}.xml",
    "run of a model that fails": "run {wrong} --random 0",
    "check of a model that fails": "check {wrong}",
    "run with a wrong name": "run {model} --random 0 --aux no{aux}",
}


@pytest.mark.parametrize("name", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_print_names_as_text(command, name, tmp_path):
    onnx.save(named(name), tmp_path / "m.onnx")
    onnx.save(named(name, wrong=True), tmp_path / "wrong.onnx")
    words = command.split(" ")
    (tmp_path / "results").mkdir()
    places = {
        "{model}": tmp_path / "m.onnx", "{wrong}": tmp_path / "wrong.onnx", "{out}": tmp_path / "results" / "out",
        "{adapter}": tmp_path / "a.safetensors", "{aux}": f"h{name}", "{folder}": tmp_path, "{profile}": tmp_path / "p.json",
        "{comparison}": tmp_path / "c.json",
    }  # fmt: skip
    change = LowRank(np.ones((1, 3), np.float32), np.ones((5, 1), np.float32), 1.0)
    Adapter({f"w{name}": change}, {}, "", {}).save(tmp_path / "a.safetensors")
    for kind in ("profile", "compare"):
        if f"--{kind} " in command:
            options = ["--random", "0", *(["--against", "sonnx"] if kind == "compare" else ["--runs", "1"]), "--json"]
            (tmp_path / f"{kind[0]}.json").write_text(CliRunner().invoke(main, [kind, str(tmp_path / "m.onnx"), *options]).stdout)
    arguments = []
    for word in words:
        for mark, value in places.items():
            word = word.replace(mark, str(value))
        arguments.append(word)
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1, 2, 3) and "Usage:" not in done.output and "Error: " not in done.output
    assert clean(done.output), sorted({c for c in done.output if not clean(c)})
    assert len(done.output) < LARGEST or "--json" in command
    for path in (tmp_path / "results").rglob("*"):
        if path.suffix not in (".onnx", ".onnx_adapter", ".npz", ".npy", ".pb", ".data") and path.is_file():
            text = path.read_text(encoding="utf-8")
            assert clean(text), (path.name, sorted({c for c in text if not clean(c)}))
    if "--html" in command:
        page = (tmp_path / "results" / "out.html").read_text(encoding="utf-8")
        data = json.loads(re.findall(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[0])
        assert all(clean(text) for text in _texts(data)) and len(data["graphs"]) >= (3 if len(name) < 1000 else 1)


def _texts(data):
    if isinstance(data, dict):
        yield from data
        data = data.values()
    if isinstance(data, str):
        yield data
    elif isinstance(data, (list, type({}.values()))):
        for value in data:
            yield from _texts(value)


@given(st.recursive(st.text(st.characters()) | st.integers(), lambda data: st.lists(data) | st.dictionaries(st.text(), data)))
def test_json_has_escapes_and_reads_as_the_same_data(data):
    for options in ({}, {"indent": 1}):
        text = rendering.json_text(data, **options)
        assert clean(text) and json.loads(text) == data
    assert all(clean(text) for text in _texts(rendering.shown(data)))


def test_json_has_the_letters_of_every_script():
    assert rendering.json_text("né ж 漢 🙂") == '"né ж 漢 🙂"' and rendering.shown(["né ж 漢"]) == ["né ж 漢"]


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
