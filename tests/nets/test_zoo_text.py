"""The text programs of examples/zoo on nets of the published structure and reduced width, at the published opset.

Tokens, windows and answers are computed once more here, in plain Python; onnxruntime computes the network in between.
"""

from __future__ import annotations

import json
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.helpers import zoo_programs
from tests.zoo import seeded, transformers

from singa import sonnx
from singa._core.tensor import Tensor
from singa_backend import SingaBackend
from singa_backend.backend import Outputs
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput

pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

F, I64 = np.float32, np.int64
TEXT = """The Norman dynasty had a major political, cultural and military impact on medieval Europe and even the Near East. The
Normans were famed for their martial spirit and eventually for their Christian piety. They became an orthodox people, and
adopted the language of the land where they settled; their dialect became known as Norman French, an important literary language.
"""
LONG = " ".join([TEXT, "Héloïse wrote 12 letters in Zürich.", TEXT.replace("Norman", "Saxon"), TEXT])
"""A text of several windows, with capitals, accents, digits and ends of lines."""
QUESTION = "Who became an orthodox people?"
END = "<|endoftext|>"
HEADS, LAYERS, SIZE = 12, 12, 2
WIDTH = HEADS * SIZE


# --- vocabularies, made on the spot


@cache
def pieces() -> list[str]:
    """A WordPiece vocabulary: each character, then the commonest parts of words.

    It is not trained: the trainer of WordPiece orders equal counts by chance, so its vocabulary differs from process to process.
    """
    plain = unicodedata.normalize("NFD", (LONG + QUESTION).lower())
    words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", "".join(c for c in plain if unicodedata.category(c) != "Mn"))
    characters = sorted({c for word in words for c in word})
    parts: Counter[str] = Counter()
    for word in words:
        parts.update(("##" if at else "") + word[at : at + n] for n in (2, 3, 4) for at in range(len(word) - n + 1))
    common = sorted(parts, key=lambda part: (-parts[part], part))
    letters = [prefix + c for prefix in ("", "##") for c in characters]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *common][:200]


@cache
def pairs() -> tuple[dict[str, int], list[list[str]]]:
    """A byte-level BPE vocabulary and its merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([LONG], trainer)
    held = json.loads(made.to_str())["model"]
    return held["vocab"], [list(m) if isinstance(m, list) else m.split(" ") for m in held["merges"]]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("\n".join(pieces()) + "\n", encoding="utf-8")
    Path("text.txt").write_text(LONG, encoding="utf-8")
    ids, merges = pairs()
    Path("vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    Path("merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    return tmp_path


# --- nets of the published structure


def named(values: dict[str, np.ndarray]) -> list[Tensor]:
    return [Tensor(data=a, requires_grad=False, name=n) for n, a in values.items()]


def made(net: Any, inputs: dict[str, np.ndarray], outputs: list[str], opset: int, axes: dict[str, dict[int, str]]) -> bytes:
    xs = named(inputs)
    net.compile(xs, is_train=False)
    seeded(net, 5)
    renamed = {n: f"v{i}" for i, n in enumerate(inputs)}
    proto = sonnx.export(
        net, named({renamed[n]: a for n, a in inputs.items()}), opset=opset, run=False, input_names=list(inputs),
        output_names=outputs, dynamic_axes=axes,
    )  # fmt: skip
    assert proto.opset_import[0].version == opset
    return proto.SerializeToString()  # type: ignore[no-any-return]


UNIQUE, SEGMENTS, MASK, IDS = "unique_ids_raw_output___9:0", "segment_ids:0", "input_mask:0", "input_ids:0"


@cache
def bert() -> bytes:
    net = transformers.BertSquad(len(pieces()), WIDTH)
    rows = {n: np.ones((1, 256), I64) for n in (SEGMENTS, MASK, IDS)}
    names = ["unstack:1", "unstack:0", "unique_ids:0"]
    return made(net, {UNIQUE: np.ones(1, I64), **rows}, names, 10, {n: {0: "batch"} for n in (UNIQUE, *rows)})


@cache
def roberta() -> bytes:
    net = transformers.RobertaClassifier(len(pairs()[0]), WIDTH)
    return made(net, {"input": np.ones((1, 7), I64)}, ["output"], 9, {"input": {0: "batch", 1: "n"}})


@cache
def gpt2(form: str = "published", dtype: Any = I64, layers: int = LAYERS) -> bytes:
    kind = transformers.GPT2Pairs if form == "pairs" else transformers.GPT2
    net: Any = kind(len(pairs()[0]), WIDTH, layers=layers)
    three = np.zeros((2, 1, HEADS, 3, SIZE), F)
    blocks = range(layers)
    if form == "published":
        outputs = [f"output{i + 1}" for i in range(layers + 1)]
        return made(net, {"input1": np.ones((1, 1, 7), dtype)}, outputs, 10, {"input1": {0: "batch", 2: "n"}})
    if form == "past":
        inputs = {"input_ids": np.ones((1, 7), dtype), **{f"past_{i}": three for i in blocks}}
        axes = {"input_ids": {1: "n"}, **{f"past_{i}": {3: "past"} for i in blocks}}
        return made(net, inputs, ["logits", *(f"present_{i}" for i in blocks)], 10, axes)
    keys = [f"{i}.{kind}" for i in blocks for kind in ("key", "value")]
    inputs = {"input_ids": np.ones((1, 7), dtype), "attention_mask": np.ones((1, 10), I64), "position_ids": np.ones((1, 7), I64),
              **{f"past_key_values.{k}": three[0] for k in keys}}  # fmt: skip
    axes = {"input_ids": {1: "n"}, "attention_mask": {1: "all"}, "position_ids": {1: "n"},
            **{f"past_key_values.{k}": {2: "past"} for k in keys}}  # fmt: skip
    return made(net, inputs, ["logits", *(f"present.{k}" for k in keys)], 11, axes)


NETS: dict[str, Callable[[], bytes]] = {"bert_squad": bert, "roberta": roberta, "gpt2": gpt2}
VOCABULARY = {"bert_squad": ("--vocab", "vocab.txt"), "roberta": ("--vocab", "vocab.json", "--merges", "merges.txt")}
VOCABULARY["gpt2"] = VOCABULARY["roberta"]


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path) -> Callable[..., zoo_programs.Done]:
    """go(program, options...): the program with its net as net.onnx and its vocabulary."""

    def run(name: str, *options: Any, net: bytes | None = None) -> zoo_programs.Done:
        (files / "net.onnx").write_bytes(NETS[name]() if net is None else net)
        fixed = ("--model", "net.onnx", "--cache", files / "cache", *(() if "--verify" in options else VOCABULARY[name]))
        return zoo_programs.run(monkeypatch, capsys, name, *options, *fixed)

    return run


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, files: Path) -> Callable[[str], Any]:
    return lambda name: zoo_programs.module(monkeypatch, name)


def softmax(scores: Sequence[float]) -> list[float]:
    e = [math.exp(v - max(scores)) for v in scores]
    return [v / sum(e) for v in e]


def test_the_nets_have_the_inputs_and_outputs_of_the_published_files() -> None:
    def ends(model: bytes) -> tuple[list[str], list[str], Counter[str]]:
        graph = onnx.load_from_string(model).graph
        return [v.name for v in graph.input], [v.name for v in graph.output], Counter(n.op_type for n in graph.node)

    inputs, outputs, counts = ends(bert())
    assert (inputs, outputs) == ([UNIQUE, SEGMENTS, MASK, IDS], ["unstack:1", "unstack:0", "unique_ids:0"])
    assert counts["MatMul"] + counts["Gemm"] == 12 * 8 + 1 and counts["Softmax"] == 12
    inputs, outputs, counts = ends(roberta())
    assert (inputs, outputs, counts["MatMul"] + counts["Gemm"]) == (["input"], ["output"], 12 * 8 + 2)
    inputs, outputs, counts = ends(gpt2())
    assert (inputs, outputs[0], len(outputs), counts["MatMul"] + counts["Gemm"]) == (["input1"], "output1", 13, 12 * 8 + 1)


@pytest.mark.parametrize("name", NETS)
def test_verify_with_the_data_of_onnxruntime(name: str, go: Any, files: Path, oracle: Oracle) -> None:
    rng = np.random.default_rng(9)
    fed = {"input1": rng.integers(0, 300, (1, 1, 9))} if name == "gpt2" else {"input": rng.integers(0, 300, (1, 9))}
    if name == "bert_squad":
        fed = {n: rng.integers(0, most, (1, 256)) for n, most in ((SEGMENTS, 2), (MASK, 2), (IDS, len(pieces())))}
        fed = {UNIQUE: np.array([7]), **fed}
    outputs = oracle.run(NETS[name](), fed)
    data = files / "test_data_set_0"
    data.mkdir()
    for shift, code in ((0, 0), (0.01, 1)):
        for i, a in enumerate(fed.values()):
            (data / f"input_{i}.pb").write_bytes(numpy_helper.from_array(a).SerializeToString())
        for i, y in enumerate(outputs.values()):
            y = y + F(shift) if y.dtype == F else y
            (data / f"output_{i}.pb").write_bytes(numpy_helper.from_array(y).SerializeToString())
        done = go(name, "--verify")
        assert done.code == code, done.err


def test_verify_with_the_files_of_the_published_bert(go: Any, files: Path, oracle: Oracle) -> None:
    """The files of its archive are in the reverse order, and one output occurs twice; the tensors have the names of the model."""
    rng = np.random.default_rng(8)
    rows = {n: rng.integers(0, most, (1, 256)) for n, most in ((IDS, len(pieces())), (MASK, 2), (SEGMENTS, 2))}
    fed = {UNIQUE: np.array([7]), **rows}
    y = oracle.run(bert(), fed)
    data = files / "test_data_set_0"
    data.mkdir()
    for i, (n, a) in enumerate(fed.items()):
        (data / f"input_{i}.pb").write_bytes(numpy_helper.from_array(a, n).SerializeToString())
    for i, n in enumerate(("unique_ids:0", "unstack:0", "unstack:1", "unique_ids:0")):
        (data / f"output_{i}.pb").write_bytes(numpy_helper.from_array(y[n], n).SerializeToString())
    done = go("bert_squad", "--verify")
    assert done.code == 0 and "equal to 4 decimals" in done.out, done.err
    (data / "output_1.pb").write_bytes(numpy_helper.from_array(y["unstack:0"] + F(1), "unstack:0").SerializeToString())
    done = go("bert_squad", "--verify")
    assert done.code == 1 and "output 'unstack:0'" in done.err


# --- BERT


def wordpiece(text: str) -> list[tuple[int, int, int]]:
    """(id, begin, end) of each token, by the longest pieces first; accents and capitals are removed."""
    ids = {p: i for i, p in enumerate(pieces())}
    plain = {"é": "e", "ï": "i", "ü": "u"}
    found = []
    for word in re.finditer(r"\w+|[^\w\s]", text):
        letters = [plain.get(c, c) for c in word[0].lower()]
        at, parts = 0, []
        while at < len(letters):
            for end in range(len(letters), at, -1):
                piece = ("##" if at else "") + "".join(letters[at:end])
                if piece in ids:
                    parts.append((ids[piece], word.start() + at, word.start() + end))
                    at = end
                    break
            else:
                parts, at = [(ids["[UNK]"], word.start(), word.end())], len(letters)
        found += parts
    return found


def expected_answers(oracle: Oracle, question: str, text: str) -> list[tuple[str, float]]:
    """The n-best answers of the published program, step by step."""
    ids = {p: i for i, p in enumerate(pieces())}
    asked, tokens = [t[0] for t in wordpiece(question)], wordpiece(text)
    room, spans, at = 256 - len(asked) - 3, [], 0
    while True:
        spans.append((at, min(room, len(tokens) - at)))
        if at + spans[-1][1] == len(tokens):
            break
        at += min(spans[-1][1], 128)
    assert len(spans) > 2
    prelim = []
    for number, (first, count) in enumerate(spans):
        row = [ids["[CLS]"], *asked, ids["[SEP]"], *(t[0] for t in tokens[first : first + count]), ids["[SEP]"]]
        segments = [0] * (len(asked) + 2) + [1] * (count + 1)
        rows = (SEGMENTS, MASK, IDS)
        padded = [v + [0] * (256 - len(row)) for v in (segments, [1] * len(row), row)]
        y = oracle.run(bert(), {UNIQUE: np.array([number]), **{n: np.array([v]) for n, v in zip(rows, padded, strict=True)}})
        begins, ends = (list(map(float, y[n][0])) for n in ("unstack:0", "unstack:1"))
        tops = [sorted(range(256), key=lambda i: -s[i])[:20] for s in (begins, ends)]
        for a in tops[0]:
            for b in tops[1]:
                place = a - len(asked) - 2
                if not 0 <= place < count or not 0 <= b - len(asked) - 2 < count or b < a or b - a + 1 > 30:
                    continue
                token = first + place
                richest, owner = -1.0, -1
                for other, (f, n) in enumerate(spans):
                    if f <= token < f + n and min(token - f, f + n - 1 - token) + 0.01 * n > richest:
                        richest, owner = min(token - f, f + n - 1 - token) + 0.01 * n, other
                if owner == number:
                    prelim.append((begins[a] + ends[b], token, first + b - len(asked) - 2))
    best: dict[str, float] = {}
    for score, a, b in sorted(prelim, key=lambda p: -p[0]):
        if len(best) < 20:
            best.setdefault(text[tokens[a][1] : tokens[b][2]], score)
    return list(zip(best, softmax(list(best.values())), strict=True))


def test_answers_are_those_of_the_published_program(go: Any, oracle: Oracle) -> None:
    done = go("bert_squad", "--context", "text.txt", "--question", QUESTION, "--show", "20")
    wanted = expected_answers(oracle, QUESTION, LONG)
    rows = re.findall(r"^  (\d\.\d{4})  ((?:.|\n(?!  \d\.\d{4}  ))*)$", done.out.removesuffix("\n"), re.M)
    assert done.code == 0 and f"\n{QUESTION}\n" in done.out and len(wanted) == 20
    assert [text for _, text in rows] == [text for text, _ in wanted]
    for (value, _), (_, share) in zip(rows, wanted, strict=True):
        assert float(value) == pytest.approx(share, abs=2e-4)


def test_the_tokens_are_those_of_a_plain_tokenizer(load: Any) -> None:
    made = load("text").wordpiece("vocab.txt").encode(LONG, add_special_tokens=False)
    assert list(zip(made.ids, *zip(*made.offsets, strict=True), strict=True)) == wordpiece(LONG)
    cased = load("text").wordpiece("vocab.txt", cased=True).encode("Zürich", add_special_tokens=False)
    assert cased.ids == [pieces().index("[UNK]")]  # the vocabulary has no capitals


class Scored:
    """A model that returns chosen scores: {(window, token of the text): score}."""

    def __init__(self, asked: int, starts: dict[tuple[int, int], float], ends: dict[tuple[int, int], float]) -> None:
        shapes = {UNIQUE: (None,), SEGMENTS: (None, 256), MASK: (None, 256), IDS: (None, 256)}
        self.inputs = [SimpleNamespace(name=n, shape=s, dtype=np.dtype(I64)) for n, s in shapes.items()]
        self.asked, self.starts, self.ends = asked, starts, ends
        self.fed: list[dict[str, np.ndarray]] = []

    def run(self, fed: dict[str, np.ndarray]) -> Outputs:
        self.fed.append(fed)
        rows = []
        for chosen in (self.ends, self.starts):
            row = np.full((1, 256), -10, F)
            for (window, token), score in chosen.items():
                place = token - 128 * window + self.asked + 2
                if window == fed[UNIQUE][0] and 0 <= place < 256:
                    row[0, place] = score
            rows.append(row)
        return Outputs([*rows, fed[UNIQUE]], ["unstack:1", "unstack:0", "unique_ids:0"])


def find(text: str, part: str) -> tuple[int, int]:
    """The first and last token of a part of a text."""
    begin = text.index(part)
    tokens = wordpiece(text)
    return next(i for i, t in enumerate(tokens) if t[1] == begin), next(
        i for i, t in enumerate(tokens) if t[2] == begin + len(part)
    )


def test_scores_of_a_known_span_return_its_text(load: Any) -> None:
    program, made = load("bert_squad"), load("text").wordpiece("vocab.txt")
    first, last = find(LONG, "Héloïse wrote 12 letters")
    model = Scored(len(wordpiece(QUESTION)), {(w, first): 5 for w in range(9)}, {(w, last): 6 for w in range(9)})
    found = program.answers(model, made, QUESTION, LONG)
    assert found[0].text == "Héloïse wrote 12 letters" and found[0].score == 11 and found[0].probability > 0.9
    assert LONG[found[0].begin : found[0].end] == found[0].text
    assert len(found) == 20 and len({a.text for a in found}) == 20
    assert sum(a.probability for a in found) == pytest.approx(1)
    fed, asked = model.fed[0], len(wordpiece(QUESTION))
    assert len(model.fed) > 2 and fed[IDS].shape == (1, 256) and fed[IDS][0, 0] == pieces().index("[CLS]") and fed[MASK].all()
    assert fed[IDS][0, asked + 1] == fed[IDS][0, 255] == pieces().index("[SEP]")
    assert fed[SEGMENTS][0].tolist() == [0] * (asked + 2) + [1] * (254 - asked)
    filled = int(model.fed[-1][MASK].sum())
    assert filled < 256 and not model.fed[-1][IDS][0, filled:].any() and not model.fed[-1][SEGMENTS][0, filled:].any()


def test_an_answer_keeps_the_accents_of_its_last_letter(load: Any) -> None:
    """Decomposed, as macOS writes them: the tokenizer removes them, and its tokens end before them."""
    program, made = load("bert_squad"), load("text").wordpiece("vocab.txt")
    text = unicodedata.normalize("NFD", "at the café, é")
    tokens = made.encode(text, add_special_tokens=False)
    last = max(i for i, (_, end) in enumerate(tokens.offsets) if end <= text.index(","))
    model = Scored(len(wordpiece(QUESTION)), {(0, 0): 5}, {(0, last): 6})
    assert program.answers(model, made, QUESTION, text)[0].text == unicodedata.normalize("NFD", "at the café")


def test_a_token_counts_in_the_window_with_the_most_context(load: Any) -> None:
    """A token near the end of window 0 is in the middle of window 1: its score in window 0 has no effect."""
    program, made = load("bert_squad"), load("text").wordpiece("vocab.txt")
    room = 256 - len(wordpiece(QUESTION)) - 3
    token = room - 3
    model = Scored(len(wordpiece(QUESTION)), {(0, token): 90, (1, token): 5}, {(0, token): 90, (1, token): 5})
    assert program.answers(model, made, QUESTION, LONG)[0].score == 10
    spans = [(0, room), (128, room), (256, 50)]
    for i, owner in ((0, 0), (127, 0), (128 + 10, 0), (room - 1, 1), (127 + room, 1)):
        assert program.best_window(spans, i) == owner


def test_an_answer_ends_after_its_begin_and_has_at_most_thirty_tokens(load: Any) -> None:
    program, made = load("bert_squad"), load("text").wordpiece("vocab.txt")
    starts = {(0, 50): 9.0}
    model = Scored(len(wordpiece(QUESTION)), starts, {(0, 49): 50.0, (0, 79): 7.0, (0, 80): 40.0})
    best = program.answers(model, made, QUESTION, LONG)[0]
    tokens = wordpiece(LONG)
    assert (best.score, best.begin, best.end) == (16, tokens[50][1], tokens[79][2])


def test_one_short_text_is_one_window(load: Any) -> None:
    program = load("bert_squad")
    (window,) = program.windows([5, 6], [7, 8, 9], 2, 3)
    assert window == ([2, 5, 6, 3, 7, 8, 9, 3], 0, 4, [True] * 3)
    assert [w.start for w in program.windows([5], range(252), 2, 3)] == [0]
    assert [(w.start, len(w.ids)) for w in program.windows([5], range(253), 2, 3)] == [(0, 256), (128, 129)]


# --- BPE


@cache
def byte_letters() -> list[str]:
    """The letter of each byte: printable ones are their own."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def byte_pairs(text: str) -> list[int]:
    """The ids of a text, merged pair by pair."""
    ids, merges = pairs()
    rank = {tuple(m): i for i, m in enumerate(merges)}
    found = []
    for word in re.findall(r"'(?:[stmd]|re|ve|ll)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+", text):
        parts = [byte_letters()[b] for b in word.encode()]
        while True:
            ranked = [(rank[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in rank]
            if not ranked:
                break
            i = min(ranked)[1]
            parts[i : i + 2] = ["".join(parts[i : i + 2])]
        found += [ids[p] for p in parts]
    return found


SENTENCES = ("This dynasty was famed!", "they've settled;  in 12 lands, né à Zürich\nfor long ")


def test_byte_pairs_are_those_of_a_plain_tokenizer(load: Any) -> None:
    made = load("text").bpe("vocab.json", "merges.txt", special=(END,))
    for text in (*SENTENCES, LONG):
        assert made.encode(text).ids == byte_pairs(text) and made.decode(byte_pairs(text)) == text
    assert made.encode(f"a{END}").ids == [*byte_pairs("a"), pairs()[0][END]]
    assert load("text").bpe("vocab.json", "merges.txt", space=True).encode("was").ids == byte_pairs(" was")


def test_classes_are_those_of_onnxruntime(go: Any, oracle: Oracle) -> None:
    done = go("roberta", *SENTENCES)
    ids, _ = pairs()
    lines = done.out.splitlines(keepends=True)[1:]
    assert done.code == 0
    for text in SENTENCES:
        (y,) = oracle.run(roberta(), {"input": np.array([[ids["<s>"], *byte_pairs(text), ids["</s>"]]])}).values()
        shares = softmax([float(v) for v in y[0]])
        label, share = max(zip(("negative", "positive"), shares, strict=True), key=lambda p: p[1])
        found = re.search(rf"^(\w+)  (\d\.\d{{4}})  {re.escape(text)}$", "".join(lines), re.M)
        assert found and found[1] == label and float(found[2]) == pytest.approx(share, abs=2e-4)


def test_labels(load: Any) -> None:
    program = load("roberta")
    for scores, label in (([3.0, 1.0], 0), ([-1.0, 2.0], 1)):
        inputs, y = [SimpleNamespace(shape=(None, None), dtype=np.dtype(I64))], np.array([scores])
        fixed = SimpleNamespace(inputs=inputs, run=lambda x, y=y: [y])
        shares = program.classify(fixed, [1, 2, 3])
        assert int(shares.argmax()) == label and shares.tolist() == pytest.approx(softmax(scores))


# --- GPT-2

PROMPT = "The Normans became"
FORMS = ("published", "past", "pairs")


def continued(oracle: Oracle, text: str, count: int) -> list[int]:
    """The tokens with the highest scores in onnxruntime, which reads the whole text for each."""
    ids = byte_pairs(text)
    for _ in range(count):
        scores = oracle.run(gpt2(), {"input1": np.array([[ids]])})["output1"]
        ids.append(int(scores[0, 0, -1].argmax()))
    return ids


@pytest.mark.parametrize("form", FORMS)
def test_greedy_continuations_are_those_of_onnxruntime(form: str, go: Any, load: Any, oracle: Oracle) -> None:
    done = go("gpt2", PROMPT, "--tokens", "8", net=gpt2(form))
    wanted = load("text").bpe("vocab.json", "merges.txt", special=(END,)).decode(continued(oracle, PROMPT, 8))
    assert done.code == 0, done.err
    assert done.out.partition("\n")[2] == wanted + "\n" and wanted.startswith(PROMPT)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, d) for form in ("published", "past") for d in (np.int32, np.int64, np.float32)), ("pairs", np.int64)],
)
def test_a_cache_changes_no_token(form: str, dtype: Any, load: Any) -> None:
    program = load("gpt2")
    ids = byte_pairs(PROMPT)
    plain = program.LanguageModel(SingaBackend.prepare(gpt2(layers=2)))
    cached = program.LanguageModel(SingaBackend.prepare(gpt2(form, dtype, 2)))
    assert cached.cached == (form != "published") and not plain.cached
    new, made = list(ids), []
    for _ in range(6):
        scores = plain.next(new), cached.next(new)
        np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-4)
        assert scores[0].shape == (len(pairs()[0]),)
        new = [program.greedy(scores[0])]
        assert new == [program.greedy(scores[1])]
        made += new
    assert len(set(made)) > 1 and plain.ids == cached.ids == [*ids, *made][:-1]


def test_only_new_tokens_are_read_with_a_cache(load: Any) -> None:
    program = load("gpt2")
    lengths: dict[str, list[int]] = {}
    for form in FORMS:
        rep = SingaBackend.prepare(gpt2(form, layers=2))
        run, lengths[form] = rep.run, []

        def seen(fed: Any, run: Any = run, form: str = form) -> Any:
            lengths[form].append(fed["input1" if form == "published" else "input_ids"].shape[-1])
            return run(fed)

        rep.run = seen  # type: ignore[method-assign]
        list(program.generate(program.LanguageModel(rep), [5, 6, 7], 4, program.greedy, None))
    assert lengths == {"published": [3, 4, 5, 6], "past": [3, 1, 1, 1], "pairs": [3, 1, 1, 1]}


def test_top_k_draws_only_from_the_k_highest_scores(load: Any) -> None:
    program = load("gpt2")
    scores = np.random.default_rng(2).standard_normal(50).astype(F)
    best = sorted(range(50), key=lambda i: -scores[i])
    for k, temperature in ((5, 1.0), (5, 0.5), (3, 4.0), (80, 1.0)):
        draw, count = program.top_k(k, temperature, 11), Counter()
        for _ in range(4000):
            count[draw(scores)] += 1
        shares = softmax([float(scores[i]) / temperature for i in best[:k]])
        assert set(count) <= set(best[:k])
        for i, share in zip(best, shares, strict=False):
            assert count[i] / 4000 == pytest.approx(share, abs=4 * math.sqrt(share / 4000) + 1e-9)
    assert [program.top_k(1, 1.0, seed)(scores) for seed in range(5)] == [best[0]] * 5


def test_a_seed_repeats_a_text(go: Any) -> None:
    options = ("--tokens", "6", "--top-k", "40", "--temperature", "2.0", "--seed")
    texts = [go("gpt2", PROMPT, *options, seed, net=gpt2("past", layers=2)).out for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_the_end_of_a_text_ends_it(load: Any) -> None:
    program = load("gpt2")
    model = SimpleNamespace(next=lambda ids: np.eye(9, dtype=F)[min(ids[-1] + 1, 8)])
    assert list(program.generate(model, [1], 20, program.greedy, 4)) == [2, 3, 4]
    assert list(program.generate(model, [1], 3, program.greedy, None)) == [2, 3, 4]


# --- what cannot be done


def test_wrong_vocabularies_are_reported(load: Any, files: Path) -> None:
    text = load("text")
    wrong: list[tuple[Callable[[], Any], str]] = []
    Path("w.txt").write_text("a\nb\n")
    Path("bad.txt").write_bytes(b"\xff\xfe\xfd")
    Path("list.json").write_text("[1]")
    Path("m.txt").write_text("a b c\n")
    Path("unknown.txt").write_text("xx yy\n")
    wrong += [(lambda: text.wordpiece("w.txt"), r"lacks \[UNK\], \[CLS\]"), (lambda: text.wordpiece("bad.txt"), "bad.txt")]
    wrong += [(lambda: text.wordpiece("none.txt"), "none.txt"), (lambda: text.bpe("list.json", "merges.txt"), "ids by token")]
    wrong += [(lambda: text.bpe("vocab.json", "m.txt"), "two tokens .* 'a b c'"), (lambda: text.bpe("w.txt", "m.txt"), "w.txt")]
    wrong += [(lambda: text.bpe("vocab.json", "unknown.txt"), "'xx yy'")]
    wrong += [(lambda: text.bpe("vocab.json", "merges.txt", special=("<t>",)), "lacks <t>")]
    for call, message in wrong:
        with pytest.raises(InvalidInput, match=message) as found:
            call()
        assert found.value.code == "SX307"


def test_inputs_that_a_model_cannot_take_are_reported(load: Any) -> None:
    text, squad, classes, generator = (load(n) for n in ("text", "bert_squad", "roberta", "gpt2"))
    made = text.wordpiece("vocab.txt")
    value = SimpleNamespace(name="x", shape=(None, None), dtype=np.dtype(np.int8))
    for call, message in (
        (lambda: text.input_of(value, [1, 300]), "got 300"),
        (lambda: text.input_of(SimpleNamespace(shape=(4, None), dtype=None), [1]), "one row of numbers"),
        (lambda: squad.answers(Scored(1, {}, {}), made, "language " * 70, LONG), "1 to 64 tokens, got"),
        (lambda: squad.answers(Scored(1, {}, {}), made, QUESTION, " \n"), "no words"),
        (lambda: squad.feeds(SingaBackend.prepare(roberta()), squad.windows([1], [2], 3, 4)[0], 0, 256), "must begin with"),
        (lambda: squad.logits(Outputs([1], ["y"])), "unstack:0 or start_logits, got y"),
        (lambda: classes.tokens(text.bpe("vocab.json", "merges.txt", special=("<s>", "</s>")), "x" * 600), "1 to 510 tokens"),
        (lambda: classes.classify(SingaBackend.prepare(gpt2()), [1, 2]), "must return"),
        (lambda: classes.classify(SingaBackend.prepare(bert()), [1, 2]), "must have one input"),
        (lambda: generator.LanguageModel(SingaBackend.prepare(bert())), "must have one input for tokens"),
        (lambda: generator.top_k(0, 1.0, 0), "at least 1"),
        (lambda: generator.top_k(3, 0.0, 0), "above 0"),
        (lambda: list(generator.generate(None, [], 3, generator.greedy, None)), "at least one token"),
        (lambda: list(generator.generate(None, [1], 1024, generator.greedy, None)), "at most 1024 tokens, got 1 [+] 1024"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            call()


def test_no_answer(load: Any) -> None:
    program, made = load("bert_squad"), load("text").wordpiece("vocab.txt")
    asked = len(wordpiece(QUESTION))
    best = {(0, -i): 9.0 for i in range(1, 3 + asked)} | {(0, 100 + i): 9.0 for i in range(30)}  # question and padding
    assert program.answers(Scored(asked, best, best), made, QUESTION, "one two") == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert_squad", ("--question", "Who?", "--vocab", "vocab.txt"), "question needs --context"),
        ("roberta", ("some text",), "texts needs --vocab and --merges"),
        ("gpt2", ("some text", "--vocab", "vocab.json"), "texts needs --merges"),
        ("gpt2", ("--tokens", "0"), "--tokens: must be from 1 to 1024, got 0"),
        ("gpt2", ("\udcff",), "must be valid text in the encoding of the terminal, got '\\udcff'"),
        ("bert_squad", ("--question", "\udcff"), "must be valid text"),
    ],
)
def test_missing_options(name: str, options: Any, message: str, monkeypatch: Any, capsys: Any, files: Path) -> None:
    done = zoo_programs.run(monkeypatch, capsys, name, *options, "--model", "net.onnx")
    assert done.code == 2 and message in done.err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "text", raising=False)
    done = zoo_programs.run(monkeypatch, capsys, "gpt2", "--model", "net.onnx")
    assert done.code == 3 and "needs tokenizers" in done.err and "pip install 'sonnx[zoo]'" in done.err
