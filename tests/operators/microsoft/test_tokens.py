"""Operators of com.microsoft on tokens, strings, words and signals: what drawn nodes do not show."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
from tests.helpers.microsoft_nodes import check_gradients, model, ours, theirs

import singa_backend
from singa_backend import MissingDependency, OperatorError, UnsupportedModel
from singa_backend.engines.oracle import Oracle
from singa_backend.interpreters.eager import Eager

RNG = np.random.default_rng(8)
F, I32 = np.float32, np.int32


def test_tokens_that_would_repeat_an_ngram() -> None:
    ids, scores = np.array([[1, 2, 3, 1, 2]]), np.arange(6, dtype=F)[None]
    assert np.flatnonzero(np.isinf(ours("NGramRepeatBlock", [ids, scores], ngram_size=3)[0])).tolist() == [3]
    assert np.flatnonzero(np.isinf(ours("NGramRepeatBlock", [ids, scores], ngram_size=1)[0])).tolist() == [1, 2, 3]
    assert ours("NGramRepeatBlock", [ids, scores], ngram_size=9)[0].tolist() == scores.tolist()
    with pytest.raises(OperatorError, match="9") as caught:
        ours("NGramRepeatBlock", [np.array([[1, 2, 9, 1, 2]]), scores], ngram_size=3)
    assert caught.value.code == "SX401"
    with pytest.raises(OperatorError, match="ngram_size must be at least 1"):
        ours("NGramRepeatBlock", [ids, scores], ngram_size=0)


def test_blocked_scores_have_no_gradient() -> None:
    ids, scores = np.array([[1, 2, 3, 1, 2]]), np.arange(6, dtype=F)[None]
    from singa_backend.autodiff.tape import Tape

    tape = Tape(Eager())
    x = tape.variable(scores)
    y = tape.call("NGramRepeatBlock", [ids, x], {"ngram_size": 3}, 1, "com.microsoft")[0]
    assert tape.gradients([y], [np.ones((1, 6), F)], [x])[0].tolist() == [[1, 1, 1, 0, 1, 1]]


def test_bifurcations(oracle: Oracle) -> None:
    """The predicted tokens count up to the first that differs; the last n-gram must occur once in the source."""
    source, names = np.array([1, 5, 3, 4, 2]), ("tokens", "index")
    cases: list[tuple[list[Any], dict[str, int], list[int], int]] = [
        ([source, np.array([5]), np.array([0]), np.array([1, 5, 3, 7, 9, 2])], {}, [5, 1, 5, 3, 7], -1),
        ([source, np.array([5]), np.array([3]), np.array([5, 3, 7])], {}, [5, 5], 2),
        ([source, np.array([5]), np.array([0])], {}, [5], 2),
        ([np.array([1, 5, 3, 7, 5, 9]), np.array([1, 5]), np.array([0])], {"max_ngram_size": 2}, [1, 5], 2),
        ([np.array([1, 5, 3, 1, 5, 3]), np.array([1, 5]), np.array([0])], {"max_ngram_size": 2}, [1, 5], -1),
    ]
    for inputs, given, tokens, index in cases:
        for found in (
            ours("BifurcationDetector", inputs, names, **given),
            theirs(oracle, "BifurcationDetector", inputs, names, **given),
        ):
            assert found[0].tolist() == tokens and found[1].tolist() == [index]
    with pytest.raises(OperatorError, match="hold one token more than the source has from there on, got 3 and 2 tokens"):
        ours("BifurcationDetector", [source, np.array([5]), np.array([3]), np.array([4, 2])], names)


def test_hashes() -> None:
    """The numbers are those of onnxruntime 1.32."""
    assert ours("MurmurHash3", [np.array([1, 2, 3], I32)])[0].tolist() == [4226891818, 1085422463, 847579505]
    assert ours("MurmurHash3", [np.array(["a", "hello"], object)], positive=0, seed=5)[0].tolist() == [-421461367, 2066056305]
    assert ours("MurmurHash3", [np.array([[1.0, 2.0]])], positive=0)[0].tolist() == [[-142385009, -1149829158]]
    assert ours("MurmurHash3", [np.zeros(1, I32)])[0].tolist() == [0x2362F9DE]
    assert ours("MurmurHash3", [np.array([1], I32)])[0].dtype == np.uint32


def test_hashes_of_ngrams_do_not_depend_on_the_calls(oracle: Oracle) -> None:
    """One call for the whole sequence, or one for each half that passes the last tokens on, also behind end tokens."""
    ids, factors, sizes = RNG.integers(0, 6, (2, 9)), np.array([3, 5, 7]), np.array([11, 13, 17, 19])
    names, given = ("hashes", "present"), {"max_ngram_size": 3, "n_head_per_ngram": 2, "pad_id": 1, "reset_on_eos": 1}
    eos = np.array(5)
    whole, last = ours("NGramHashMapping", [ids, factors, sizes, None, None, eos], names, **given)
    first, passed = ours("NGramHashMapping", [ids[:, :4], factors, sizes, None, None, eos], names, **given)
    second, present = ours("NGramHashMapping", [ids[:, 4:], factors, sizes, passed, None, eos], names, **given)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(present, last)
    np.testing.assert_array_equal(
        theirs(oracle, "NGramHashMapping", [ids, factors, sizes, None, None, eos], names, **given)[0], whole
    )
    packed = ours("VarlenNGramHashMapping",
                  [ids.reshape(-1), factors, sizes, np.array([0, 9, 18], I32), None, None, eos], names, **given)  # fmt: skip
    np.testing.assert_array_equal(packed[0].reshape(whole.shape), whole)
    np.testing.assert_array_equal(packed[1], last)


def test_states_behind_tokens() -> None:
    """The state behind the first and behind each of the first three tokens of two sequences; unused ones are pad_id."""
    inputs = [np.array([3, 5, 7, 2, 9]), np.array([3, 5, 7]), np.array([11, 13, 17, 19]), np.array([0, 2, 5], I32),
              *[None] * 5, np.array([1, 3], I32)]  # fmt: skip
    given = {"max_ngram_size": 3, "n_head_per_ngram": 2, "pad_id": 1, "state_update_capacity": 3}
    states = ours("VarlenNGramHashMapping", inputs, ("y", "", "", "s"), **given)[1]
    assert states.tolist() == [[[1, 3], [1, 1], [1, 1]], [[1, 7], [7, 2], [2, 9]]]


@pytest.mark.parametrize(
    ("inputs", "given", "message"),
    [([np.array([1]), np.array([3, 5]), np.array([0])], {}, "vocab_sizes must be positive"),
     ([np.array([1]), np.array([3]), np.array([7])], {}, "multipliers must hold 2 values or more and vocab_sizes 1"),
     ([np.array([1]), np.array([3, 5]), np.array([7])], {"max_ngram_size": 1}, "max_ngram_size must be at least 2"),
     ([np.array([1]), np.array([3, 5]), np.array([7])], {"state_update_capacity": 1}, "capture_count must be present"),
     ([np.array([1, 2]), np.array([3, 5]), np.array([7])], {}, "must rise from 0 to the number of tokens 2"),
     ([np.array([1]), np.array([3, 5]), np.array([7])], {"past_segments": True}, "need segment_ids")],
)  # fmt: skip
def test_what_packed_hashes_refuse(inputs: list[Any], given: dict[str, Any], message: str) -> None:
    past = [None] * 4 + [np.zeros((1, 1), I32)] if given.get("past_segments") else []
    attributes = {"max_ngram_size": 2, "n_head_per_ngram": 1, "pad_id": 0} | {
        k: v for k, v in given.items() if k != "past_segments"
    }
    with pytest.raises(OperatorError, match=message):
        ours("VarlenNGramHashMapping", [*inputs, np.array([0, 1], I32), *past], **attributes)


def tokens(*texts: str, **given: Any) -> list[Any]:
    attributes = {"mark": 0, "mincharnum": 1, "pad_value": "#"} | given
    found: list[Any] = ours("Tokenizer", [np.array(texts, object)], **attributes)[0].tolist()
    return found


def test_tokens_of_strings() -> None:
    """Separators apply one after the other, the longest match counts, and marks are left out if there is no token at all."""
    pytest.importorskip("re2", reason="the expressions are RE2's: pip install 'sonnx[text]'")
    assert tokens("Hello World", "I", separators=[" "], mark=1) == [["\2", "Hello", "World", "\3"], ["\2", "I", "\3", "#"]]
    assert tokens("aXYbXc", separators=["X", "XY"]) == [["a", "Yb", "c"]]
    assert tokens("aXYbXc", separators=["XY", "X"]) == [["a", "b", "c"]]
    assert tokens("abab", tokenexp="a|ab") == [["ab", "ab"]]
    assert tokens("", " ", separators=[" "], mark=1) == [[], []]
    assert tokens("é日", separators=[""]) == [["é", "日"]] == tokens("é日", tokenexp=".")
    assert tokens("a bb ccc", separators=[" "], mincharnum=2) == [["bb", "ccc"]]


def test_a_class_of_ascii_characters_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expression of scikit-learn's vectorizers: every way to run a file computes it, not only a plan."""
    words = ["naïve café_1", "", "b-c"]
    expected = [["na", "ve", "caf", "_1"], ["#"] * 4, ["b", "c", "#", "#"]]
    if importlib.util.find_spec("re2"):
        assert tokens(*words, tokenexp="(?:[a-zA-Z0-9_]+)") == expected
    monkeypatch.setitem(sys.modules, "re2", None)
    assert tokens(*words, tokenexp="[a-zA-Z0-9_]+") == expected
    assert tokens("aXXbYc", separators=["[XY]+"]) == [["a", "b", "c"]]
    with pytest.raises(MissingDependency, match="google-re2"):
        tokens("a", tokenexp="a|b")


def test_what_the_tokenizer_refuses() -> None:
    for given, message in (({"separators": [""], "mincharnum": 2}, "mincharnum must be 1"), ({}, "separators and tokenexp"),
                           ({"separators": [" "], "mincharnum": 0}, "mincharnum must be at least 1")):  # fmt: skip
        with pytest.raises(OperatorError, match=message):
            tokens("a", **given)
    pytest.importorskip("re2", reason="the expressions are RE2's: pip install 'sonnx[text]'")
    with pytest.raises(OperatorError, match="valid RE2 syntax"):
        tokens("a", separators=["("])


def test_a_word_without_characters_is_zero() -> None:
    """onnxruntime leaves its row as the memory was."""
    words = np.array([[0, 0, 0], [1, 2, 0], [1, 0, 2]], I32)
    w, b, c = (RNG.standard_normal(s).astype(F) for s in ((2, 1, 2, 4), (2,), (3, 4)))
    found = ours("WordConvEmbedding", [words, w, b, c])[0]
    assert found[0].tolist() == [0, 0]
    np.testing.assert_allclose(found[1], np.tanh((w[:, 0] * c[[1, 2]]).sum((1, 2)) + b), rtol=1e-5)
    np.testing.assert_allclose(found[2], np.tanh((w[:, 0] * c[[1, 0]]).sum((1, 2)) + b), rtol=1e-5)
    with pytest.raises(OperatorError, match="a window must be at most 1 characters, got 2"):
        ours("WordConvEmbedding", [words[:, :1], w, b, c])


def test_the_cheapest_path_with_equal_costs(oracle: Oracle) -> None:
    costs = [np.zeros((3, 4), F)]
    for found in (ours("DynamicTimeWarping", costs), theirs(oracle, "DynamicTimeWarping", costs)):
        assert found[0].tolist() == [[0, 1, 2, 2, 2, 2], [0, 0, 0, 1, 2, 3]]


def test_packed_rows_out_of_range_are_the_first() -> None:
    table = np.arange(8, dtype=F).reshape(2, 4).view(np.uint8)
    found = ours("GatherPacked", [table, np.array([1, -1, 2])], K=4, output_dtype=1, packed_type=0)[0]
    assert found.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3], [0, 1, 2, 3]]
    with pytest.raises(OperatorError, match=r"packed_type must be one of .*2 \(Q4_0\), .*got 3"):
        ours("GatherPacked", [table, np.array([1])], K=4, packed_type=3)
    with pytest.raises(OperatorError, match="positive multiple of 32"):
        ours("GatherPacked", [table, np.array([1])], K=4, packed_type=2)


def test_transforms() -> None:
    x = RNG.standard_normal((2, 3, 8))
    spectrum = np.fft.rfft2(x)
    y = ours("Rfft", [x], signal_ndim=2)[0]
    np.testing.assert_allclose(y, np.stack([spectrum.real, spectrum.imag], -1), atol=1e-12)
    np.testing.assert_allclose(ours("Irfft", [y], signal_ndim=2)[0], x, atol=1e-12)
    with pytest.raises(OperatorError, match="normalized must be 0 and onesided 1"):
        ours("Rfft", [x], onesided=0)
    with pytest.raises(OperatorError, match="signal_ndim must be in"):
        ours("Rfft", [x], signal_ndim=4)


@pytest.mark.parametrize(
    ("name", "inputs", "which", "attributes"),
    [("Rfft", [RNG.standard_normal((3, 4))], (0,), {"signal_ndim": 2}),
     ("Irfft", [RNG.standard_normal((3, 4, 2))], (0,), {"signal_ndim": 2})],
)  # fmt: skip
def test_gradients(name: str, inputs: list[Any], which: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check_gradients(name, inputs, which, **attributes)


def test_words_are_trained() -> None:
    """The weights, the bias and the table of a float32 operator, by differences of its formula in float64."""
    words = np.array([[1, 2, 0], [2, 1, 1]], I32)
    values = [RNG.standard_normal(s) for s in ((2, 1, 2, 4), (2,), (3, 4))]

    def loss(w: Any, b: Any, c: Any) -> float:
        rows = [c[[1, 2]]], [c[[2, 1]], c[[1, 1]]]
        return float(sum(np.max([np.tanh((w[:, 0] * r).sum((1, 2)) + b) for r in row], axis=0).sum() for row in rows))

    from singa_backend.autodiff.tape import Tape

    tape = Tape(Eager())
    variables = [tape.variable(v.astype(F)) for v in values]
    y = tape.call("WordConvEmbedding", [words, *variables], {}, 1, "com.microsoft")[0]
    for i, found in enumerate(tape.gradients([y], [np.ones((2, 2), F)], variables)):
        for place in np.ndindex(values[i].shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [v.copy() for v in values]
                moved[i][place] += step
                ends.append(loss(*moved))
            assert abs(found[place] - (ends[0] - ends[1]) / 2e-6) < 1e-4


@pytest.mark.parametrize("name", ["EPContext", "Snpe", "SpeculativePrefixCommit"])
def test_operators_of_one_engine_are_refused(name: str) -> None:
    from singa_backend.ir.declaration import undeclared

    inputs: list[Any] = [np.zeros(1, F)] if name != "SpeculativePrefixCommit" else [np.zeros(1, np.int64)] * 7
    given = {"DLC": "x"} if name == "Snpe" else {}
    outputs = ("y",) if name != "SpeculativePrefixCommit" else ("y", "z", "w")
    with pytest.raises(UnsupportedModel) as caught:
        singa_backend.prepare(model(name, inputs, outputs, **given))
    assert undeclared["com.microsoft", name] in f"{caught.value} {caught.value.hint}"
