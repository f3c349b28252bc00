"""What `sonnx conform` prints: the message of an exception first, failures by reason, and why its counts differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from singa.cli import _verdicts, main
from singa_backend.conform import gaps, report, results, worker
from singa_backend.conform.fuzz import run as fuzz
from singa_backend.conform.fuzz.graphs import answer as graphs
from singa_backend.conform.worker import Result
from singa_backend.errors import described, first_line

ENGINE = """
from onnx.backend.base import Backend, BackendRep
from onnx.reference import ReferenceEvaluator

class NotImplemented(Exception):
    pass

class Rep(BackendRep):
    def __init__(self, model):
        self.session, self.name = ReferenceEvaluator(model), model.graph.node[0].op_type

    def run(self, inputs, **_):
        if self.name == "Softplus":
            raise NotImplementedError("no kernel for Softplus")
        if self.name == "HardSigmoid":
            raise NotImplemented("NOT_IMPLEMENTED : HardSigmoid(6)")
        if self.name == "Sigmoid":
            try:
                {}["kernel"]
            except KeyError as error:
                raise ValueError("a long message" + " of many words" * 40 + "\\nand a second line") from error
        return tuple(self.session.run(None, dict(zip(self.session.input_names, inputs))))

class Engine(Backend):
    prepare = classmethod(lambda cls, model, device="CPU", **_: Rep(model))
    supports_device = classmethod(lambda cls, device: device == "CPU")
"""


def raised(deep: int, message: str) -> Exception:
    def fall(left: int) -> None:
        if left:
            fall(left - 1)
        raise ValueError(message)

    with pytest.raises(ValueError) as found:
        fall(deep)
    return found.value


def test_an_exception_begins_with_its_type_and_message() -> None:
    text = described(raised(9, "what is wrong\nin two lines"), 3)
    assert text.startswith("ValueError: what is wrong\nin two lines\nTraceback (most recent call last):\n")
    assert text.count("in fall") + text.count("raise ") >= 2 and "test_an_exception_begins" not in text.partition("Traceback")[2]
    assert first_line(text) == "ValueError: what is wrong" and first_line("\n \n") == ""
    assert described(KeyError("k")) == "KeyError: 'k'" and described(ValueError()) == "ValueError"


def test_the_causes_of_an_exception_are_named_before_the_traceback() -> None:
    with pytest.raises(RuntimeError) as found:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise OSError("second")  # noqa: B904  # the context is the case
        except OSError as error:
            raise RuntimeError("third") from error
    assert described(found.value).splitlines()[:3] == [
        "RuntimeError: third",
        "caused by OSError: second",
        "caused by KeyError: 'first'",
    ]
    with pytest.raises(RuntimeError) as hidden:
        try:
            raise KeyError("first")
        except KeyError:
            raise RuntimeError("alone") from None
    assert "caused by" not in described(hidden.value)


def sonnx(*args: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


def test_failures_of_a_backend_are_grouped_by_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summary_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = ("--backend", "summary_engine:Engine", "-n", 1, "-k", "^test_(hardsigmoid|sigmoid|softplus)(_example)?$")
    found = sonnx("conform", *backend, "--results", tmp_path / "r.json", "--junit", tmp_path / "r.xml")
    lines = found.stdout.splitlines()
    at = lines.index("error: 2 cases")
    assert lines[at + 1].startswith("  test_sigmoid_example: ValueError: a long message of many words of many words")
    assert lines[at + 2 : at + 8] == [
        "    likewise 1: test_sigmoid",
        "unsupported: 4 cases",
        "  test_hardsigmoid_example: NotImplemented: NOT_IMPLEMENTED : HardSigmoid(6)",
        "    likewise 1: test_hardsigmoid",
        "  test_softplus_example: NotImplementedError: no kernel for Softplus",
        "    likewise 1: test_softplus",
    ]
    assert "Traceback" not in found.stdout and found.exit_code == 1
    document = json.loads((tmp_path / "r.json").read_text())
    by_name = {c["name"]: c for c in document["cases"]}
    reason = by_name["test_sigmoid"]["reason"]
    assert reason.startswith("ValueError: a long message") and "\ncaused by KeyError: 'kernel'\nTraceback" in reason
    assert by_name["test_softplus"]["strict"] == "unsupported" and by_name["test_softplus"]["official"] == "failed"
    assert [(g["verdict"], len(g["cases"])) for g in document["reasons"]] == [
        ("error", 2),
        ("unsupported", 2),
        ("unsupported", 2),
    ]
    messages = {c.get("name"): f.get("message") for c in ElementTree.parse(tmp_path / "r.xml").iter("testcase")
                for f in c.findall("failure")}  # fmt: skip
    assert str(messages["test_softplus"]) == "unsupported: NotImplementedError: no kernel for Softplus"
    assert str(messages["test_sigmoid"]).startswith("error: ValueError: a long message")


def test_groups_have_the_worst_first_and_ignore_names_and_numbers() -> None:
    found = [
        Result("test_a", "node", "failed", "failed", "outputs[0][1]: 2.5, expected -1e-05 (1 of 2 differ)"),
        Result("test_b", "node", "failed", "failed", "outputs[0][7, 1]: 0, expected nan (3 of 9 differ)"),
        Result("test_c", "node", "failed", "failed", "outputs[0][0, 2]: 1.5, expected 3.25e+02 (1 of 9 differ)"),
        Result("test_d", "node", "unsupported", "failed", "'Foo' is not implemented for test_d\nTraceback"),
        Result("test_e", "node", "unsupported", "failed", "'Bar' is not implemented for test_e"),
        Result("test_f", "node", "passed", "failed", "", "shapes differ"),
        Result("test_g", "node", "died", "failed", "the process died with exit code -11"),
    ]
    groups = results.by_reason(found)
    assert [(v, names) for v, _, names in groups] == [
        ("died", ["test_g"]),
        ("failed", ["test_a", "test_c"]),
        ("failed", ["test_b"]),
        ("unsupported", ["test_d", "test_e"]),
        ("official", ["test_f"]),
    ]  # fmt: skip
    assert groups[3][1] == "'Foo' is not implemented for test_d" and groups[4][1] == "shapes differ"


def counts(found: list[Result], known: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    judged = gaps.judge(found, known)
    _verdicts.show_counts(found, judged, Path("gaps.txt"))
    _verdicts.show_failures(judged)
    return capsys.readouterr().out.splitlines()


def test_why_the_counts_differ_is_told_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        *(Result(f"coin{i}", "node", "failed", "failed", "random") for i in range(6)),
        Result("seq", "node", "passed", "failed", "", "TypeError"),
        Result("fine", "node", "passed", "passed"),
    ]
    assert counts(found, {**{f"coin{i}": "random" for i in range(6)}, "official:seq": "0-d"}, capsys) == [
        "1 case passes the strict verdict, but not ONNX's own comparison: seq",
        "known gaps: 7 (6 cases not passed, 1 case that only ONNX's own comparison fails), each with its reason in gaps.txt",
    ]
    lenient = [
        Result("a", "node", "unsupported", "passed", "no"),
        Result("b", "node", "failed", "passed", "an input was changed"),
    ]
    assert counts(lenient, {}, capsys) == [
        "2 cases pass ONNX's own comparison, but not the strict verdict: a, b",
        "failed: 1 case", "  b: an input was changed", "unsupported: 1 case", "  a: no",
    ]  # fmt: skip
    assert counts([Result("fine", "node", "passed", "passed")], {"fine": "old"}, capsys) == [
        "closed gap fine: it passes now; delete its line from gaps.txt"
    ]


def test_many_reasons_are_cut_with_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Result(f"n{i}", "node", "error", "failed", "X" * (i + 1)) for i in range(45)]
    assert counts(found, {}, capsys)[-1] == "... and 5 cases with 5 other reasons; --results FILE lists all of them"


def test_every_page_that_is_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole suite takes minutes: one case stands for it."""
    one = [Result("test_relu", "node", "passed", "passed")]
    monkeypatch.setattr("singa_backend.conform.cases.load", lambda *_: [])
    monkeypatch.setattr("singa_backend.conform.cases.check_manifest", lambda _: "0" * 16)
    monkeypatch.setattr(worker, "run", lambda *_, **__: one)
    found = sonnx("conform", "--report", tmp_path / "r")
    wrote = [line for line in found.stdout.splitlines() if line.startswith("wrote ")]
    assert wrote == [f"wrote {tmp_path / 'r' / name}" for name in ("support.json", *report.PAGES)], found.output
    assert all(Path(line.removeprefix("wrote ")).is_file() for line in wrote)
    last = found.stdout.splitlines()
    meaning = last.index("every case passes both verdicts")
    assert last[meaning - 2].startswith("strict: ") and last[meaning - 1].startswith("official: ONNX's own comparison")
    assert last[meaning + 1 : -1] == wrote
    page = wrote[-1].removeprefix("wrote ")
    assert last[-1] == f"open {page}: does an operator work at an opset, and what does each figure mean?"


def test_the_cases_that_do_not_pass_are_explained_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        *(Result(f"coin{i}", "node", "failed", "failed", "random") for i in range(2)),
        Result("seq", "node", "passed", "failed", "", "TypeError"),
        Result("bad", "node", "failed", "failed", "2, expected 1"),
    ]
    judged = gaps.judge(found, {"coin0": "It draws.", "coin1": "It draws.", "official:seq": "0-d."})
    _verdicts.show_meaning(judged, offers_report=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "explained, 2 cases not passed: It draws",
        "explained, 1 case that only ONNX's own comparison fails: 0-d",
        "not explained, 1 case not passed: listed above by verdict and reason",
        "--report FOLDER writes a page that answers: does an operator work at an opset?",
    ]
    _verdicts.show_meaning(judged, offers_report=False)
    assert capsys.readouterr().out.splitlines() == lines[:-1]


def test_generated_models_show_the_message_of_a_foreign_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad(*_: Any, **__: Any) -> Any:
        raise IndexError("what is wrong\nsecond line")

    monkeypatch.setattr(fuzz, "_ours", bad)
    found = next(a for i in range(50) if (a := fuzz.answer(0, i, "^Relu-")).case is not None)
    assert found.foreign.startswith("IndexError: what is wrong\nsecond line\nTraceback")
    monkeypatch.setattr(graphs.SingaBackend, "prepare", bad)
    form = graphs._form(None, "convert", lambda: (None, object()))  # type: ignore[arg-type]  # `prepare` raises first
    assert first_line(form.foreign).startswith(("IndexError: what is wrong", "AttributeError"))
