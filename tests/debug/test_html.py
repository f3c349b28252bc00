"""The report page and the graph page contain all their data and load nothing; a report is stale if its sources changed."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from onnx import parser

from singa_backend.conform import html, lookup, report
from singa_backend.conform.cases import ConformanceError
from singa_backend.conform.gradient_matrix.page import VERDICTS
from singa_backend.conform.results import WRITER
from singa_backend.errors import InvalidInput
from singa_backend.inspection import inspect
from singa_backend.inspection.graph_drawing import FAR, GAP, layered
from singa_backend.proto.schemas import newest

TOTALS = {"cases": 2, "strict": 1, "official": 2, "by_verdict": {}, "by_kind": {"node": {"cases": 2, "strict": 1, "official": 2}}}


def _run(device: str = "CPU", release: str = "", **more: Any) -> dict[str, Any]:
    entry = {
        "domain": "ai.onnx", "operator": "Softmax", "version": 13, "cases": 2, "passed": 1, "official": 2, "tested": 2,
        "tested_passed": 1, "dtypes": [["T", "float32"], ["T", "nonsense"]], "attributes": ["axis"], "max_ulp": 1.5,
        "names": ["test_softmax_a", "test_softmax_b"], "failed": ["test_softmax_b"],
    }  # fmt: skip
    environment = {"device": device, "onnx": "1.23.2", **({"release": release} if release else {})}
    gaps = {"test_softmax_b": "because </script><b>"}
    return {"environment": environment, "manifest": "0" * 16, "totals": TOTALS, "gaps": gaps, "unexpected": [],
            "executed": [entry], **more}  # fmt: skip


def _data(page: str) -> Any:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def _row(built: dict[str, Any], operator: str = "Softmax", version: int = 13) -> Any:
    return next(r for r in built["rows"] if (r["operator"], r["version"]) == (operator, version))


def _alone(page: str) -> None:
    """No reference to anything outside, and a policy that would forbid it."""
    shell = page.replace(json.dumps(_data(page)), "")
    assert not re.search(
        r"""(?:src|href|action)\s*=\s*["']?(?!["'#])|url\(|@import|import\(|fetch\(|XMLHttp|<link|<img|<iframe""", shell
    )
    assert "default-src 'none'" in page
    assert [u for u in re.findall(r"https?://[^\s\"'<]+", shell) if u != "http://www.w3.org/2000/svg"] == []


def test_the_report_page_stands_alone_and_has_every_row() -> None:
    built = report.build([_run(), _run("STRICT")])
    page = html.page(built)
    _alone(page)
    data = _data(page)
    assert len(page.encode()) < 2_000_000
    assert [(data["domains"][r["d"]], r["o"], r["v"]) for r in data["rows"]] == [
        (r["domain"], r["operator"], r["version"]) for r in built["rows"]
    ]
    assert len(data["rows"]) >= 659 and data["devices"] == ["CPU", "STRICT"]
    assert data["gaps"]["CPU"]["test_softmax_b"] == "because </script><b>"
    assert page.count("</script>") == 2  # the data cannot close their element
    assert html.page(built) == page


def test_an_emulated_device_is_never_shown_as_cuda(tmp_path: Path) -> None:
    """Its column has another name, is kept, and the pages state what it cannot show."""
    run = _run("CUDA")
    run["environment"] |= {"emulated": True, "gpu": "emulated device 0"}
    report.keep([run], tmp_path)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["CUDA_emulated.json"]
    built = report.build([_run()], tmp_path)
    assert list(built["totals"]) == ["CPU", "CUDA, emulated"]
    assert built["environments"]["CUDA, emulated"]["gpu"] == "emulated device 0"
    page = report.markdown(built)
    told = next(line for line in page.splitlines() if line.startswith("* CUDA, emulated: strict verdict"))
    assert "no GPU was used" in told and "cannot show reads before an array, races between warps" in told
    assert "* CUDA:" not in page and "| CUDA |" not in page
    data = _data(html.page(built))
    assert data["devices"] == ["CPU", "CUDA, emulated"] and data["about"]["CUDA, emulated"] in told
    other = _run("CUDA")
    assert list(report.build([_run(), other], tmp_path)["totals"]) == ["CPU", "CUDA", "CUDA, emulated"]


def test_a_column_of_a_gpu_stays_in_a_report_without_its_run(tmp_path: Path) -> None:
    """As in a checkout, which has support.json and not runs/."""
    runs = [_run(), _run("CUDA")]
    first = report.build(runs, tmp_path)
    report.write(first, tmp_path)
    assert not (tmp_path / "runs").exists()
    again = report.build([_run()], tmp_path)
    assert again == first and list(again["totals"]) == ["CPU", "CUDA"] and report.stale(again, tmp_path) == ""
    report.write(again, tmp_path)
    newer = _run("CUDA")
    newer["totals"] = TOTALS | {"strict": 0}
    assert report.build([_run(), newer], tmp_path)["totals"]["CUDA"]["strict"] == 0
    other = _run() | {"manifest": "1" * 16}  # of another suite: a column of this one would show other cases
    assert list(report.build([other], tmp_path)["totals"]) == ["CPU"]


def test_bits_are_the_dtypes() -> None:
    data = _data(html.page(report.build([_run()])))
    row = next(r for r in data["rows"] if (r["o"], r["v"]) == ("Softmax", 13))
    names = lambda bits: {d for i, d in enumerate(data["dtypes"]) if bits >> i & 1}  # noqa: E731
    assert names(row["t"]["T"]) == {"float16", "float32", "float64", "bfloat16"}
    cases, passed, official, tested, tested_passed, dtypes, attributes, ulp, failed = row["s"][0]
    assert (cases, passed, official, tested, tested_passed, ulp, failed) == (2, 1, 2, 2, 1, 1.5, ["test_softmax_b"])
    assert names(dtypes["T"]) == {"float32"} and [row["a"][i] for i in attributes] == ["axis"]


def test_generated_models_and_old_releases_are_columns(tmp_path: Path) -> None:
    cells = [["", "Softmax", 13, "T", "float64"], ["", "Softmax", 13, "T", "int4"], ["", "None", 1, "T", "float32"]]
    (tmp_path / "fuzz.json").write_text(json.dumps({"cells": cells, "count": 7, "seed": 3, "totals": {"agree": 6, "hang": 1}}))
    old = {"ours": {"totals": TOTALS, "gaps": {"why": ["test_a"]}, "unexpected": ["test_b"], "manifest": ""}}
    several = _run(release="all", releases={"1.10.2": old["ours"], "1.9.0": old["ours"]})
    built = report.build([_run(), several, _run(release="1.6.0")], tmp_path)
    row = _row(built)
    assert row["fuzz"] == {"T": ["float64"]} and row["dtypes_allowed"]["T"] == ["bfloat16", "float16", "float32", "float64"]
    assert row["releases"]["1.6.0"] | {"failed": 0} == {"cases": 2, "passed": 1, "dtypes": {"T": ["float32"]}, "failed": 0}
    assert set(row["releases"]) == {"all", "1.6.0"} and set(built["totals"]) == {"CPU"}
    assert set(built["releases"]) == {"1.9.0", "1.10.2", "1.6.0"}
    assert built["releases"]["1.9.0"]["gaps"] == {"test_a": "why"} and built["releases"]["1.9.0"]["unexpected"] == ["test_b"]
    data = _data(html.page(built))
    assert data["cells"][-1] == ["by any of these", 2] and data["fuzz"]["count"] == 7
    page = report.markdown(built)
    assert "* Generated models: **7**, seed 3: 6 agree, 1 hung.\n" in page
    assert data["fuzz"] == {"count": 7, "words": "seed 3: 6 agree, 1 hung"}
    assert "| Softmax | 13 | partly | unchecked | 1/2 | 1/2 | 1/4 | 1/1 | 2 | 2/4 | 1/4 |" in page
    for one in (built, json.loads(json.dumps(built, sort_keys=True))):  # pages sort them, whatever their order in the file
        assert re.findall(r"cases of onnx (\S+)", report.markdown(one)) == ["1.6.0", "1.9.0", "1.10.2"]


def test_the_report_begins_with_what_works(tmp_path: Path) -> None:
    """The question, its short answer in words, then the tables; the figures, each with its meaning, come after them."""
    rows = [{"domain": "ai.onnx", "operator": "Softmax", "version": 13, "verdict": "checked"}]
    (tmp_path / "gradients.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "fuzz.json").write_text(json.dumps({"cells": [["", "Relu", 14, "T", "float32"]], "count": 7, "seed": 3}))
    page = report.markdown(report.build([_run()], tmp_path))
    places = [page.index(text) for text in (
        "Does operator X at opset Y work here?", "Short answer: **", "| works | operator versions |", "| partly | 1 |",
        "| gradient | operator versions |", "| checked | 1 |", "## ai.onnx\n", "| Softmax | 13 | partly | checked | 1/2 |",
        "## Figures", "* CPU: strict verdict **1 of 2**", "  * Strict: the outputs", "dtype cells executed, suite on CPU: **1 of",
        "  * A cell is", "## Cases that do not pass",
    )]  # fmt: skip
    assert places == sorted(places)
    assert "some device; each is listed with its reason: Softmax-13 |" in page
    assert "| Relu | 14 | other | unchecked |" in page and "| Relu | 13 | unrun | unchecked |" in page
    (tmp_path / "gradients.json").write_text(json.dumps({"rows": [{"domain": "ai.onnx"}]}))
    with pytest.raises(InvalidInput, match="SX804"):
        report.build([_run()], tmp_path)


def test_other_verdicts_on_gradients_make_a_report_stale(tmp_path: Path) -> None:
    report.write(report.build([_run()], tmp_path), tmp_path)
    rows = [{"domain": "ai.onnx", "operator": "Softmax", "version": 13, "verdict": "wrong"}]
    (tmp_path / "gradients.json").write_text(json.dumps({"rows": rows}))
    assert "Softmax-13 differs" in report.stale(report.build([_run()], tmp_path), tmp_path)


def _evidence(here: str, old: str = "", fuzz: bool = False, declared: bool = True) -> dict[str, Any]:
    """A row whose cases passed as written: "2/3" is two of three; "" is no cell."""

    def cell(text: str) -> dict[str, int]:
        passed, _, cases = text.partition("/")
        return {"cases": int(cases), "passed": int(passed)}

    return {"declared": declared, "devices": {str(i): cell(t) for i, t in enumerate(here.split())},
            "releases": {"all": cell(old)} if old else {}, "fuzz": {"T": ["float32"]} if fuzz else {}}  # fmt: skip


@pytest.mark.parametrize(("row", "word"), [
    (_evidence("3/3 3/3"), "yes"), (_evidence("3/3 2/3"), "partly"), (_evidence("0/0 3/3", old="1/9"), "yes"),
    (_evidence("0/0", old="9/9"), "other"), (_evidence("0/0", old="8/9", fuzz=True), "partly"),
    (_evidence("0/0", fuzz=True), "other"), (_evidence("0/0"), "unrun"), (_evidence("3/3", declared=False), "no"),
])  # fmt: skip
def test_the_word_of_a_row_follows_from_its_evidence(row: dict[str, Any], word: str) -> None:
    assert lookup.works(row) == word and word in lookup.WORKS


def test_every_verdict_on_a_gradient_has_a_meaning() -> None:
    assert set(lookup.GRADIENTS) == {*VERDICTS, lookup.UNCHECKED}
    assert lookup.gradient("", "Softmax", 13, None) == lookup.UNCHECKED and lookup.gradient("", "Ceil", 13, None) == "zero"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What the page answers to a look-up, as a browser shows it."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "gradients.json").write_text(
        json.dumps({"rows": [{"domain": "ai.onnx", "operator": "Softmax", "version": 13, "verdict": "checked"}]})
    )
    report.write(report.build([_run()], folder), folder)

    def answer(asked: str) -> str:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
                   "--dump-dom", f"{(folder / 'support.html').as_uri()}#{asked}"]  # fmt: skip
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        found = re.search(r'<div class="answer"[^>]*>(.*?)</div>\s*</section>', dom, re.DOTALL)
        assert found
        return unescape(" ".join(re.sub("<[^>]*>", " ", found[1]).split()))

    return answer


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("asked", "told"), [
    ("op=softmax&opset=17", "In part Softmax at opset 17 of ai.onnx is version 13. Some cases that run this version do not pass"
     " on some device; each is listed with its reason. Cases that do not pass: because </script><b>. Gradient: a gradient that"
     " agrees with differences in float64. evidence cases passed dtypes run ONNX's suite on CPU 1/2 1/4 All details of"
     " Softmax-13"),
    ("op=Softmax&opset=12", "Not shown Softmax at opset 12 of ai.onnx is version 11. This version is declared, and nothing"),
    ("op=Gelu&opset=19", "No Gelu does not exist at opset 19 of ai.onnx: its first version is 20."),
    ("op=Gelu&opset=999", "No The newest opset of ai.onnx in onnx"),
    ("op=Gelu&opset=x", "Opset? An opset is a number from 1 to"),
    ("op=Scaler", f"Not shown Scaler at opset {newest('ai.onnx.ml')} of ai.onnx.ml is version 1."),
    ("op=softm", "has no operator softm. Operators whose names contain it: LogSoftmax Softmax SoftmaxCrossEntropyLoss"),
    ("op=Nothing", "has no operator Nothing. Operators of other domains can be defined"),
    ("", "operator versions of onnx"),
])  # fmt: skip
def test_the_look_up_answers(answers: Callable[[str], str], asked: str, told: str) -> None:
    assert told in answers(asked)


def test_the_look_up_has_labels() -> None:
    page = html.page(report.build([_run()]))
    form = re.search(r'<form id="look".*?</form>', page, re.DOTALL)
    assert form and re.findall(r"<label[^>]*>(\w+)<input[^>]*name=\"(\w+)\"", form[0]) == [("Operator", "op"), ("Opset", "opset")]
    assert page.index('id="look"') < page.index('id="cards"') < page.index('id="filters"') and 'id="answer" role="status"' in page


def test_what_cannot_be_repeated_everywhere_is_kept(tmp_path: Path) -> None:
    runs = [_run(), _run("CUDA"), _run(release="1.6.0")]
    assert sorted(p.name for p in report.keep(runs, tmp_path)) == ["1.6.0.json", "CUDA.json"]
    report.write(report.build(runs, tmp_path), tmp_path)
    again = report.build([_run()], tmp_path)  # as continuous integration does, without a GPU and without the old wheel
    assert list(again["totals"]) == ["CPU", "CUDA"] and list(again["releases"]) == ["1.6.0"]
    assert report.stale(again, tmp_path) == ""
    with pytest.raises(ConformanceError, match="SX809"):
        report.build([_run(release="1.6.0")])


def test_the_run_of_all_old_releases_is_kept_once_and_the_newest_counts(tmp_path: Path) -> None:
    def old(strict: int) -> dict[str, Any]:
        part = {"totals": TOTALS | {"strict": strict}, "gaps": {}, "unexpected": [], "manifest": ""}
        return _run(release="all", releases={"1.9.0": part})

    for strict in (1, 2):
        assert report.keep([_run(), old(strict)], tmp_path) == [tmp_path / "releases.json"]
        assert json.loads((tmp_path / "releases.json").read_text()) == WRITER | old(strict)
        report.write(report.build([_run(), old(strict)], tmp_path), tmp_path)
        again = report.build([_run()], tmp_path)
        assert again["releases"]["1.9.0"]["totals"]["strict"] == strict and report.stale(again, tmp_path) == ""


@pytest.mark.parametrize("name", ["support.md", "support.html"])
def test_a_page_that_is_not_what_the_data_render_to_is_stale(tmp_path: Path, name: str) -> None:
    built = report.build([_run()], tmp_path)
    report.write(built, tmp_path)
    assert report.stale(built, tmp_path) == ""
    (tmp_path / name).write_text((tmp_path / name).read_text() + " ")
    assert f"{name} differs from the page rendered from support.json" in report.stale(built, tmp_path)
    (tmp_path / name).unlink()
    absent = report.stale(built, tmp_path)
    assert absent == "" if name in report.BUILT else f"{name} differs from the page" in absent


def test_other_generated_models_make_a_report_stale(tmp_path: Path) -> None:
    report.write(report.build([_run()], tmp_path), tmp_path)
    (tmp_path / "fuzz.json").write_text(json.dumps({"cells": [], "count": 7, "seed": 3, "totals": {}}))
    assert "'fuzz' differs" in report.stale(report.build([_run()], tmp_path), tmp_path)


# --- the graph page and its layout


def test_the_graph_page_stands_alone() -> None:
    text = """<ir_version: 10, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y)
        { c = Constant <value_float = 2.0> () s = Mul(x, c) t = Add(s, s) y = Relu(t) }"""
    page = inspect(parser.parse_model(text)).html()
    _alone(page)
    (graph,) = _data(page)["graphs"]
    titles = [v["t"] for v in graph["vertices"]]
    assert titles == ["x", "Mul-14", "Add-14", "Relu-14", "y"]
    assert graph["constants"] == {"c": "2"} and graph["types"]["t"] == "float[n, 3]"
    assert [(titles[a], titles[b]) for a, b, *_ in graph["edges"]] == [
        ("x", "Mul-14"), ("Mul-14", "Add-14"), ("Add-14", "Relu-14"), ("Relu-14", "y"),
    ]  # fmt: skip


def _free(widths: list[float], found: Any) -> bool:
    """Whether nodes of one layer are apart."""
    rows: dict[int, list[int]] = {}
    for v, at in enumerate(found.layer):
        rows.setdefault(at, []).append(v)
    for row in rows.values():
        row.sort(key=lambda v: found.x[v])
        for a, b in itertools.pairwise(row):
            if found.x[b] - found.x[a] < (widths[a] + widths[b]) / 2 + GAP - 0.2:
                return False
    return True


def test_layout_keeps_order_and_distance() -> None:
    widths = [90.0, 60.0, 120.0, 90.0, 90.0, 60.0]
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 4), (5, 4)]
    found = layered(widths, edges, frozenset({4}))
    assert found.layer == [0, 1, 1, 2, 3, 2]  # 5, a constant, is in the layer above the node that uses it
    assert len(found.routes[0, 4] or []) == 2 and _free(widths, found)
    line = layered([80.0] * 9, [(i, i + 1) for i in range(8)])
    assert len(set(line.x)) == 1 and line.layer == list(range(9))


def test_layout_survives_cycles_far_edges_and_nothing() -> None:
    assert layered([], []).layers == 0
    found = layered([50.0] * 3, [(0, 1), (1, 2), (2, 0), (1, 1)])
    assert sorted(found.layer) == [0, 1, 2] and (2, 0) in found.routes and (1, 1) not in found.routes
    long = FAR + 5
    found = layered([50.0] * long, [(i, i + 1) for i in range(long - 1)] + [(0, long - 1)])
    assert found.routes[0, long - 1] is None


def test_layout_of_five_thousand_nodes_is_quick() -> None:
    import time

    edges = [(i - 1, i) for i in range(1, 5000)] + [(i - 7, i) for i in range(7, 5000, 3)]
    start = time.process_time()
    found = layered([90.0] * 5000, edges)
    assert time.process_time() - start < 20 and len(found.x) == 5000
