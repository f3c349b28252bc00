"""The page of a model: repeated blocks, subgraphs, times, errors and differences, read as HTML without a browser."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import InvalidInput, debug
from singa_backend.inspection import blocks, inspect
from singa_backend.inspection.blocks import Repeat, fold, members, scoped

VOID = {"meta", "input", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """The elements of a page: (tag, attributes, the tags that contain it), and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.stack: list[tuple[str, int]] = []
        self.feed(text)
        self.close()
        assert not self.stack, f"not closed: {self.stack}"
        self.data: dict[str, Any] = json.loads(self.all("script", id="data")[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(t for t, _ in self.stack)))
        self.texts.append("")
        if tag not in VOID:
            self.stack.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1][0] == tag, f"</{tag}> in {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        for _, at in self.stack:
            self.texts[at] += data

    def all(self, tag: str, **attributes: str) -> list[str]:
        """The texts of the elements of this tag and these attributes."""
        return [
            t
            for (name, have, _), t in zip(self.elements, self.texts, strict=True)
            if name == tag and attributes.items() <= have.items()
        ]

    def having(self, name: str) -> list[tuple[str, str]]:
        """(value of this attribute, text) of the elements that have it."""
        return [(str(a[name]), t) for (_, a, _), t in zip(self.elements, self.texts, strict=True) if name in a]

    def rows(self, section: str) -> list[str]:
        """The texts of the rows of the table after this heading, without its head."""
        start = next(i for i, (_, a, _) in enumerate(self.elements) if a.get("id") == section)
        depth = len(self.elements[start][2])
        found = []
        for (tag, _, path), text in zip(self.elements[start + 1 :], self.texts[start + 1 :], strict=True):
            if len(path) < depth:
                break
            found += [text] if tag == "tr" and "tbody" in path else []
        return found


def layers(count: int = 12, width: int = 2, name: str = "/net/layer.{}") -> ModelProto:
    """A chain of equal layers (MatMul, Add, Relu, Mul, residual Add) between two other nodes."""
    rng = np.random.default_rng(0)
    nodes = [helper.make_node("Neg", ["x"], ["h0"], name="/begin")]
    weights = []
    for i in range(count):
        scope = name.format(i)
        weights += [numpy_helper.from_array(rng.normal(size=(width, width)).astype(np.float32), f"w{i}"),
                    numpy_helper.from_array(rng.normal(size=width).astype(np.float32), f"b{i}")]  # fmt: skip
        for op, inputs, output in (("MatMul", [f"h{i}", f"w{i}"], f"m{i}"), ("Add", [f"m{i}", f"b{i}"], f"a{i}"),
                                   ("Relu", [f"a{i}"], f"r{i}"), ("Mul", [f"r{i}", f"m{i}"], f"p{i}"),
                                   ("Add", [f"p{i}", f"h{i}"], f"h{i + 1}")):  # fmt: skip
            nodes.append(helper.make_node(op, inputs, [output], name=f"{scope}/{op}_{output}" if name else ""))
    nodes.append(helper.make_node("Tanh", [f"h{count}"], ["y"], name="/end"))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, width]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


NESTED = """<ir_version: 10, opset_import: ["": 18, "my": 1]> g (float[2] x, bool c, int64 n) => (float[2] y) {
 a = my.twice(x)
 b = If(c) <then_branch = tb () => (float[2] q) { t = Relu(a) q = my.twice(t) },
   else_branch = eb () => (float[2] r) { r = Neg(a) }>
 y = Loop(n, c, b) <body = body (int64 i, bool k, float[2] s) => (bool k2, float[2] s2) { k2 = Identity(k) s1 = Mul(s, a)
   s2 = If(k) <then_branch = t2 () => (float[2] u) { u = Abs(s1) }, else_branch = e2 () => (float[2] v) { v = Sin(x) }> }>
}
<opset_import: ["": 18], domain: "my"> twice (p) => (r) { s = Add(p, p) r = Tanh(s) }"""


def cli(*words: Any) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words])


def every(page: Page) -> dict[str, dict[str, Any]]:
    """The vertices of a page, by the ids of the outline."""
    return {f"n{g}-{i}": v for g, graph in enumerate(page.data["graphs"]) for i, v in enumerate(graph["vertices"])}


# --- repeated blocks


def chain(labels: str) -> list[int | Repeat]:
    return fold(labels, [[i - 1] for i in range(len(labels))], [""] * len(labels))


def shown(items: Any) -> Any:
    return [i if isinstance(i, int) else (len(i.blocks), shown(i.blocks[0])) for i in items]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("abcdefghij", list(range(10))),
        ("xy" + "abcde" * 4 + "z", [0, 1, (4, [2, 3, 4, 5, 6]), 22]),
        ("abab", [0, 1, 2, 3]),  # too short to fold
        ("a" * 9, [(9, [0])]),
        ("z" + "ababababc" * 2 + "q", [0, (2, [(4, [1, 2]), 9]), 19]),
        ("", []),
    ],
)
def test_blocks_of_chains(labels: str, expected: list[Any]) -> None:
    found = chain(labels)
    assert shown(found) == expected and members(found) == list(range(len(labels)))


def test_blocks_with_other_edges_are_not_the_same() -> None:
    straight = [[i - 1] for i in range(24)]
    assert shown(fold("abcdef" * 4, straight, [""] * 24)) == [(4, [0, 1, 2, 3, 4, 5])]
    crossed = [*straight[:15], [12], *straight[16:]]  # the fourth node of the third block reads another one
    found = fold("abcdef" * 4, crossed, [""] * 24)
    assert members(found) == list(range(24)) and [len(i.blocks) for i in found if isinstance(i, Repeat)] == [2]


def test_blocks_begin_where_names_do_and_other_blocks_keep_their_scope() -> None:
    names = ["/in/f", *(f"/layer.{i}/{c}" for i in range(5) for c in "abcdef")]
    found = fold("f" + "abcdef" * 5, [[i - 1] for i in range(31)], names)
    assert shown(found) == [0, (5, [1, 2, 3, 4, 5, 6])]  # not from the first f, where a sixth label would match
    labels = [*("f" + "abcdef" * 5)]
    labels[14] = "other"
    found = scoped(fold(labels, [[i - 1] for i in range(31)], names), names)
    assert shown(found) == [0, (2, [1, 2, 3, 4, 5, 6]), (1, [13, 14, 15, 16, 17, 18]), (2, [19, 20, 21, 22, 23, 24])]


@pytest.mark.parametrize("name", ["/net/layer.{}", ""], ids=["names", "no names"])
def test_twelve_layers_are_drawn_once(name: str) -> None:
    page = Page(inspect(layers(name=name)).html())
    (graph,) = page.data["graphs"]
    kinds = [item[0] for item in graph["scenes"][0]["items"]]
    assert Counter(kinds) == {"v": 4, "g": 1}  # x, Neg, Tanh, y, and the layers
    group = graph["groups"][0]
    assert (group["count"], group["nodes"], group["t"]) == (
        12,
        60,
        "net/layer/0-11 ×12" if name else "MatMul, Add, Relu, ... ×12",
    )
    assert [g["nodes"] for g in graph["groups"][1:]] == [5] * 12 and {g["up"] for g in graph["groups"][1:]} == {0}
    (summary,) = [t for t in page.all("summary") if "×12" in t]
    assert "12 blocks of 5 nodes" in summary
    assert len(graph["scenes"]) == 14 and len(page.all("details")) == 13


# --- the page as HTML


X = np.ones((1, 2), np.float32)

PAGES: dict[str, Callable[[], str]] = {
    "layers": lambda: inspect(layers()).html(), "nested": lambda: inspect(parser.parse_model(NESTED)).html(),
    "diff": lambda: debug.diff_page(parser.parse_model(NESTED), changed()),
    "errors": lambda: inspect(layers()).html(comparison=debug.compare(layers(), {"x": X}, against="sonnx").to_dict()),
}  # fmt: skip


def changed() -> ModelProto:
    text = NESTED.replace("t = Relu(a) q", "t = Sigmoid(a) q").replace("r = Tanh(s)", "r = Erf(s)")
    return parser.parse_model(text.replace("a = my.twice(x)\n", "a0 = my.twice(x)\n a = Relu(a0)\n"))


@pytest.mark.parametrize("made", PAGES.values(), ids=PAGES)
def test_landmarks_headings_labels_and_ids(made: Callable[[], str]) -> None:
    page = Page(made())
    tags = Counter(tag for tag, _, _ in page.elements)
    assert tags["header"] == tags["nav"] == tags["main"] == tags["aside"] == tags["h1"] == 1
    ids = [i for i, _ in page.having("id")]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    body = [(tag, a) for tag, a, path in page.elements if path == ("html", "body")]
    assert body[0][0] == "a" and str(body[0][1]["href"]).removeprefix("#") in ids  # the link to skip the header
    labelled = {a["for"] for tag, a, _ in page.elements if tag == "label"}
    for (tag, a, _), text in zip(page.elements, page.texts, strict=True):
        if tag in ("input", "select"):
            assert a["id"] in labelled or "aria-label" in a
        if tag == "button":
            assert text.strip() or a.get("aria-label")
        if tag in ("nav", "aside"):
            assert a["aria-label"]
        for reference in ("aria-labelledby", "aria-describedby"):
            assert a.get(reference) is None or a[reference] in ids
    assert page.elements[0][1]["lang"] == "en"


@pytest.mark.parametrize("made", PAGES.values(), ids=PAGES)
def test_every_node_is_in_the_outline_once_and_in_one_scene(made: Callable[[], str]) -> None:
    page = Page(made())
    vertices = every(page)
    listed = [i for i, _ in page.having("id") if re.fullmatch(r"n\d+-\d+", i)]
    assert sorted(listed) == sorted(vertices)
    for g, graph in enumerate(page.data["graphs"]):
        drawn = [item[1] for scene in graph["scenes"] for item in scene["items"] if item[0] == "v"]
        assert sorted(drawn) == list(range(len(graph["vertices"])))
        groups = [item[1] for scene in graph["scenes"] for item in scene["items"] if item[0] == "g"]
        assert sorted(groups) == list(range(len(graph["groups"])))
        keys = {k for k, _ in page.having("data-key")}
        assert {f"{g}-g{i}" for i in groups} <= keys
        for i, vertex in enumerate(graph["vertices"]):
            inner = [j for j in vertex.get("g", ()) if page.data["graphs"][j]["depth"]]
            assert (f"{g}-v{i}" in keys) == bool(inner)
        ends = {tuple(e[:2]) for e in graph["edges"]}  # every edge is drawn where its ends are apart
        flat = {tuple(graph["edges"][n][:2]) for scene in graph["scenes"] for e in scene["edges"] for n in e[3]}
        assert flat == ends
    for key, text in page.having("data-at"):
        vertex = vertices[f"n{key}"]
        if not text.startswith(("function", "weight")) and "changes" not in page.data:
            assert vertex["t"] in text and vertex["n"] in text


def test_subgraphs_read_values_of_outer_graphs() -> None:
    page = Page(inspect(parser.parse_model(NESTED)).html())
    graphs = {g["title"]: g for g in page.data["graphs"]}
    outer = {title: [v["c"] for v in g["vertices"] if "c" in v] for title, g in graphs.items()}
    assert outer["then_branch of If_1"] == outer["else_branch of If_1"] == ["a"] and outer["body of Loop_2"] == ["a", "x"]
    assert outer["else_branch of If_2"] == ["x"] and outer["main graph"] == outer["function my.twice"] == []


def test_subgraphs_in_functions_read_values_of_the_function() -> None:
    text = """<ir_version: 10, opset_import: ["": 18, "my": 1]> g (float[2] x, bool c) => (float[2] y) { y = my.pick(x, c) }
    <opset_import: ["": 18], domain: "my"> pick (p, q) => (r) { s = Abs(p)
      r = If(q) <then_branch = t () => (u) { u = Relu(s) }, else_branch = e () => (v) { v = Neg(s) }> }"""
    page = Page(inspect(parser.parse_model(text)).html())
    body = next(g for g in page.data["graphs"] if g["title"] == "function my.pick")
    titles = [v["t"] for v in body["vertices"]]
    assert ("Abs-13", "If-16") in [(titles[a], titles[b]) for a, b, _ in body["edges"]]
    assert [[v["c"] for v in g["vertices"] if "c" in v] for g in page.data["graphs"] if g["depth"]] == [["s"], ["s"]]


def test_a_page_of_two_thousand_nodes_is_small() -> None:
    operators = ["Relu", "Tanh", "Abs", "Neg", "Sin", "Exp", "Sigmoid", "Softplus"]
    drawn = np.random.default_rng(1).integers(8, size=2000)
    nodes = [helper.make_node(operators[k], [f"v{i}"], [f"v{i + 1}"]) for i, k in enumerate(drawn)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("v0", "v2000")]
    text = inspect(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]))).html()
    page = Page(text)
    (graph,) = page.data["graphs"]
    assert len(graph["vertices"]) == 2002 and len(text) < 1_500_000
    assert sum(len(scene["items"]) for scene in graph["scenes"]) < 2 * 2002  # no node is laid out twice


def test_states_are_read_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of all states for each node or subgraph would be quadratic in the size of the model."""
    read = Counter[str]()

    class States(list[Any]):
        def __iter__(self) -> Any:
            read["states"] += len(self)
            return super().__iter__()

    counts = []
    for size in (8, 32):
        branch = "() => (float[2] t) { t = Relu(x) }"
        nodes = " ".join(f"v{i} = If(c) <then_branch = a {branch}, else_branch = b {branch}>" for i in range(size))
        weights = ", ".join(f"float[1] w{i} = {{{i}}}" for i in range(size))
        text = f'<ir_version: 9, opset_import: ["": 20]> g (float[2] x, bool c) => (float[2] v0) <{weights}> {{ {nodes} }}'
        seen = inspect(parser.parse_model(text))
        read.clear()
        for table in seen.graphs:
            monkeypatch.setattr(table, "states", States(table.states))
        seen.html()
        counts.append(read["states"] / size)
    assert counts[0] > 0 and counts[1] == counts[0]


def test_short_stretches_are_no_candidates_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two labels in any order: a quarter of the nodes begin a stretch at each distance, but few of them are long enough."""
    judged = []
    worthy = blocks._worthy
    monkeypatch.setattr(blocks, "_worthy", lambda *given: judged.append(given) or worthy(*given))
    count = 2000
    fold(np.random.default_rng(0).integers(2, size=count).tolist(), [[i - 1] for i in range(count)], [""] * count)
    assert 0 < len(judged) < 2 * count


# --- times and errors


def measured(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A model whose layer 3 has another weight than the trusted one, its profile and its comparison, from the commands."""
    path, other = tmp_path / "m.onnx", tmp_path / "other.onnx"
    model = layers(6)
    onnx.save(model, path)
    wrong = numpy_helper.to_array(model.graph.initializer[6]).copy()
    wrong[0, 0] += 0.25
    model.graph.initializer[6].CopyFrom(numpy_helper.from_array(wrong, "w3"))
    onnx.save(model, other)
    profile, comparison = cli("profile", path, "--runs", 1, "--json"), cli("compare", path, "--against", other, "--json")
    assert (profile.exit_code, comparison.exit_code) == (0, 1), profile.output + comparison.output
    (tmp_path / "p.json").write_text(profile.stdout)
    (tmp_path / "c.json").write_text(comparison.stdout[comparison.stdout.index("{") :])
    return path, json.loads((tmp_path / "p.json").read_text()), json.loads((tmp_path / "c.json").read_text())


def test_times_and_errors_are_those_of_the_documents(tmp_path: Path) -> None:
    path, profile, comparison = measured(tmp_path)
    done = cli("inspect", path, "--html", tmp_path / "g.html", "--profile", tmp_path / "p.json", "--compare", tmp_path / "c.json")
    assert done.exit_code == 0, done.output
    page = Page((tmp_path / "g.html").read_text())
    vertices = every(page)
    by_name = {v["n"]: v for v in vertices.values() if "x" in v}
    for row in profile["nodes"]:
        assert by_name[row["name"]]["m"]["seconds"] == row["seconds"] and by_name[row["name"]]["m"]["share"] == row["share"]
    for row in comparison["rows"]:
        error = by_name[row["node"]]["e"]
        assert (error["excess"], error["abs"], error["ok"]) == (row["excess"], row["max_abs"], row["verdict"] == "agrees")
    (graph,) = page.data["graphs"]
    assert graph["groups"][0]["m"]["seconds"] == pytest.approx(
        sum(r["seconds"] for r in profile["nodes"] if "layer" in r["name"])
    )
    assert graph["groups"][0]["e"]["excess"] == max(r["excess"] for r in comparison["rows"] if "layer" in r["node"])
    slowest = sorted((r for r in profile["nodes"] if r["seconds"]), key=lambda r: -r["seconds"])[:10]
    rows = page.rows("slowest")
    assert len(rows) == len(slowest)
    for text, row in zip(rows, slowest, strict=True):
        assert row["name"] in text and f"{row['seconds'] * 1e3:.4g}" in text and f"{row['share']:.1%}" in text
    largest = sorted(comparison["rows"], key=lambda r: (r["verdict"] == "agrees", -r["excess"]))[:10]
    rows = page.rows("largest")
    assert len(rows) == 10 and "✗" in rows[0]  # a sign, not only a color
    for text, row in zip(rows, largest, strict=True):
        assert row["node"] in text and f"{row['max_abs']:.6g}" in text and f"{row['excess']:.3g}×" in text
    for text in page.all("li", id=next(k for k, v in vertices.items() if v.get("n") == largest[0]["node"])):
        assert f"✗ {largest[0]['excess']:.3g}× tolerance" in text


def test_compare_writes_the_page_that_inspect_writes_from_its_document(tmp_path: Path) -> None:
    path, _, _ = measured(tmp_path)
    cli("compare", path, "--against", tmp_path / "other.onnx", "--html", tmp_path / "a.html")
    cli("inspect", path, "--compare", tmp_path / "c.json", "--html", tmp_path / "b.html")
    assert Page((tmp_path / "a.html").read_text()).data == Page((tmp_path / "b.html").read_text()).data


def test_documents_of_other_models_and_of_other_commands_are_refused(tmp_path: Path) -> None:
    path, profile, comparison = measured(tmp_path)
    seen, other, longer = inspect(path), inspect(parser.parse_model(NESTED)), inspect(layers(7))
    for bad in (other, longer):
        with pytest.raises(InvalidInput, match=r"SX398.*must be of this model"):
            bad.html(profile)
    with pytest.raises(InvalidInput, match=r"SX398.*must be of this model"):
        other.html(comparison=comparison)
    swapped = layers(6)
    swapped.graph.node[3].op_type = "Sigmoid"
    with pytest.raises(InvalidInput, match=r"SX398.*Relu '/net/layer.0/Relu_r0'"):
        inspect(swapped).html(comparison=comparison)
    rows = profile["nodes"]
    for document in (comparison, {}, [], None, {"nodes": 3}, {"nodes": [3]}, {"nodes": [rows[0] | {"seconds": "1"}]},
                     {"nodes": [rows[0] | {"seconds": -1.0}]}, {"nodes": [rows[0] | {"values": "h0"}]},
                     {"nodes": [rows[0] | {"steps": [[]]}]}, {"nodes": [rows[0] | {"seconds": 10**400}]},
                     profile | {"seconds": math.nan}, profile | {"seconds": "1"}):  # fmt: skip
        if document is not None:
            with pytest.raises(InvalidInput, match="SX398"):
                seen.html(document)  # type: ignore[arg-type]
    done = cli("inspect", path, "--html", tmp_path / "g.html", "--compare", tmp_path / "p.json", "--json")
    assert done.exit_code == 3 and json.loads(done.stdout)["code"] == "SX398" and not (tmp_path / "g.html").exists()
    (tmp_path / "c.json").write_text("{")
    assert cli("inspect", path, "--html", tmp_path / "g.html", "--compare", tmp_path / "c.json").exit_code == 3
    done = cli("inspect", path, "--compare", tmp_path / "p.json")
    assert done.exit_code == 2 and "--html" in done.output


@pytest.mark.parametrize("words", [
    ("inspect", "a", "--html", "a"), ("inspect", "a", "--profile", "p", "--html", "p"), ("profile", "a", "--html", "a"),
    ("profile", "a", "--trace", "a"), ("compare", "a", "--html", "a"), ("compare", "a", "--against", "b", "--html", "b"),
    ("diff", "a", "b", "--html", "b"), ("run", "a", "--random", "0", "-o", "a"),
    ("run", "a", "--random", "0", "--save-inputs", "a"),
])  # fmt: skip
def test_results_do_not_replace_what_a_command_reads(tmp_path: Path, words: tuple[str, ...]) -> None:
    files = {"a": layers(1).SerializeToString(), "b": layers(2).SerializeToString(), "p": b"{}"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    done = cli(words[0], *(tmp_path / w if w in files else w for w in words[1:]))
    assert done.exit_code == 3 and "SX351" in done.output
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


# --- two models


def edited() -> ModelProto:
    """Layer 2 has another weight, layer 4 another operator; a node is removed, and one is added."""
    model = layers(8)
    wrong = numpy_helper.to_array(model.graph.initializer[4]).copy()
    wrong[0] += [0.5, -1.0]
    model.graph.initializer[4].CopyFrom(numpy_helper.from_array(wrong, "w2"))
    model.graph.node[23].op_type = "Sigmoid"
    del model.graph.node[0]
    model.graph.node[0].input[0] = "x"
    model.graph.node[4].input[1] = "x"
    model.graph.node.append(helper.make_node("Exp", ["y"], ["z"], name="/added"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 2]))
    return model


def test_the_page_of_a_difference_has_each_change(tmp_path: Path) -> None:
    onnx.save(layers(8), tmp_path / "a.onnx")
    onnx.save(edited(), tmp_path / "b.onnx")
    done = cli("diff", tmp_path / "a.onnx", tmp_path / "b.onnx", "--html", tmp_path / "d.html")
    told = json.loads(cli("diff", tmp_path / "a.onnx", tmp_path / "b.onnx", "--json").stdout)
    assert done.exit_code == 1, done.output
    page = Page((tmp_path / "d.html").read_text())
    how = {v["n"] if "x" in v else v["t"]: v["d"]["how"] for v in every(page).values() if "d" in v}
    assert how == {
        "/begin": "removed", "/net/layer.0/MatMul_m0": "changed", "/net/layer.0/Add_h1": "changed",
        "/added": "added", "z": "added", "/net/layer.2/MatMul_m2": "changed", "/net/layer.4/Relu_r4": "changed",
    }  # fmt: skip
    (weight,) = [c for c in told["changes"] if c["kind"] == "weight"]
    assert (weight["name"], weight["max_abs"], weight["differing"], weight["elements"]) == (
        "w2",
        pytest.approx(1.0),
        2,
        4,
    )
    (row,) = [r for r in page.rows("changes") if "weight w2" in r]
    assert "max abs 1; 2 of 4 elements differ" in row and "≠" in row
    assert len(page.rows("changes")) == len(told["changes"]) == len({json.dumps(c) for c in told["changes"]})
    groups = {g["t"]: g["d"]["how"] if "d" in g else "" for g in page.data["graphs"][0]["groups"] if g["up"] < 0}
    assert groups == {
        **{f"net/layer/{i}": "" if i % 2 else "changed" for i in range(5)},
        "net/layer/5-7 ×3": "",
    }
    line = next(x for x in done.output.splitlines() if "w2" in x)
    assert line.split()[:7] == ["~", "changed", "weight", "w2", "1", "2", "4"]
    assert {c["how"] for c in told["changes"]} == {"added", "removed", "changed"}
    for sign in ("+ added", "- removed", "~ changed"):
        assert sign in done.output


def test_subgraphs_and_functions_of_both_models_are_in_the_page() -> None:
    page = Page(debug.diff_page(parser.parse_model(NESTED), changed()))
    titles = [g["title"] for g in page.data["graphs"]]
    assert "then_branch of If_1 in the first model" in titles and "function my.twice in the first model" in titles
    operators = {g["title"]: [v["t"] for v in g["vertices"] if "x" in v] for g in page.data["graphs"]}
    assert operators["function my.twice in the first model"] == ["Add-14", "Tanh-13"]
    assert operators["function my.twice"] == ["Add-14", "Erf-13"]
    call = next(v for v in page.data["graphs"][0]["vertices"] if v["t"] == "If-16")
    assert [titles[g] for g in call["g"]] == [
        "then_branch of If_2", "else_branch of If_2", "then_branch of If_1 in the first model",
        "else_branch of If_1 in the first model",
    ]  # fmt: skip
    assert call["d"]["how"] == "changed" and "only the first has Relu; only the second has Sigmoid" in call["d"]["r"][1][1]


def test_equal_models_have_no_marks_and_renamed_values_in_subgraphs_are_no_change() -> None:
    page = Page(debug.diff_page(layers(), layers()))
    assert page.data["changes"] == [] and not any("d" in v for v in every(page).values())
    renamed = parser.parse_model(NESTED.replace(" a = my", " new = my").replace("(a)", "(new)").replace("(s, a)", "(s, new)"))
    found = debug.diff(parser.parse_model(NESTED), renamed)
    assert found.equal and found.renamed == {"a": "new"}
