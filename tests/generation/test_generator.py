"""`sonnx.Generator` against a loop over onnxruntime that reads the whole text again for each token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.helpers import language_models as models
from tests.helpers.language_models import BEGIN, HEADS, LAYERS, PAD, SIZE, WIDTH, WORDS, Decoder, encoder, genai, script, write

from singa import sonnx
from singa_backend import InvalidInput
from singa_backend.backend import SingaRep
from singa_backend.engines.oracle import Oracle

PROMPTS = ["The sea is", "a", "h\u00e9llo, \u4f60\u597d", "once more, and longer than the others"]
NEW = 24


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    pytest.importorskip("onnxruntime")
    with Oracle("onnxruntime") as engine:
        yield engine


def greedy(oracle: Oracle, model: onnx.ModelProto, tokens: Sequence[int], count: int, fixed: dict[str, Any]) -> list[int]:
    """The most likely tokens by a file without caches, in onnxruntime, up to the one that ends the text."""
    data, new, inputs = model.SerializeToString(), list(tokens), {v.name for v in model.graph.input}
    for _ in range(count):
        ids = np.array([new])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(len(new))[None], **fixed}
        logits = oracle.run(data, {k: v for k, v in feeds.items() if k in inputs})["logits"][0, -1]
        new.append(int(logits.argmax()))
        if new[-1] == models.END:
            break
    return [t for t in new[len(tokens) :] if t != models.END]


def encoded(text: str) -> list[int]:
    return list(text.encode())


FORMS = {
    "pairs": Decoder(), "joined": Decoder("joined"), "no positions": Decoder(positions=False), "no mask": Decoder(mask=False),
    "only tokens": Decoder("", positions=False, mask=False), "no cache": Decoder(""), "one sequence": Decoder(batch=1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_are_those_of_onnxruntime(form: str, oracle: Oracle, tmp_path: Path) -> None:
    decoder = FORMS[form]
    folder = write(tmp_path / "folder", {"model": decoder.model()})
    generator = sonnx.Generator(folder)
    found = generator.generate(PROMPTS, max_new_tokens=NEW)
    whole = Decoder("", positions=decoder.positions, mask=decoder.mask).model()
    for i, text in enumerate(found.texts):
        expected = greedy(oracle, whole, encoded(PROMPTS[i]), NEW, {})
        assert text.prompt == i and list(text.tokens) == expected
        assert text.end == ("length" if len(expected) == NEW else "end")
        assert "".join(generator.stream(PROMPTS[i], max_new_tokens=NEW)) == text.text
    assert found.prompt_tokens == sum(len(encoded(p)) for p in PROMPTS) and found.seed is None
    assert found.new_tokens == sum(len(t.tokens) + (t.end == "end") for t in found.texts)
    assert len({t.tokens for t in found.texts}) > 2  # the prompts matter


@pytest.mark.parametrize("form", ["merged", "two files", "merged in onnx"])
@pytest.mark.parametrize("cross", [False, True], ids=["decoder", "encoder"])
def test_the_files_of_optimum(form: str, cross: bool, oracle: Oracle, tmp_path: Path) -> None:
    decoder = Decoder(cross=cross, positions=not cross, mask=not cross, merged="merged" in form)
    files = {"encoder_model": encoder()} if cross else {}
    if "merged" in form:
        files["decoder_model_merged"] = decoder.model()
    else:
        files |= {"decoder_model": decoder.model(past=False), "decoder_with_past_model": decoder.model()}
    config = models.CONFIG | ({"is_encoder_decoder": True, "decoder_start_token_id": PAD} if cross else {})
    folder = write(tmp_path / "folder", files, config)
    if form == "merged in onnx":
        (folder / "onnx").mkdir()
        for path in folder.glob("*.onnx"):
            path.rename(folder / "onnx" / path.name)
    found = sonnx.Generator(folder).generate(PROMPTS, max_new_tokens=NEW)
    whole = Decoder("", cross=cross, positions=not cross, mask=not cross).model()
    for prompt, text in zip(PROMPTS, found.texts, strict=True):
        fixed = {}
        start = encoded(prompt)
        if cross:
            mask = np.ones((1, len(start)), np.int64)
            hidden = oracle.run(encoder().SerializeToString(), {"input_ids": np.array([start]), "attention_mask": mask})
            fixed = {"encoder_hidden_states": hidden["last_hidden_state"], "encoder_attention_mask": mask}
            start = [PAD]
        assert list(text.tokens) == greedy(oracle, whole, start, NEW, fixed)


def test_a_token_that_an_encoder_needs_first(tmp_path: Path) -> None:
    decoder = Decoder(cross=True, positions=False, mask=False)
    config = models.CONFIG | {"is_encoder_decoder": True, "decoder_start_token_id": PAD, "forced_bos_token_id": 65}
    files = {"encoder_model": encoder(), "decoder_model": decoder.model(past=False)}
    found = sonnx.Generator(write(tmp_path / "folder", files, config)).generate("a", max_new_tokens=3)
    assert found.texts[0].text.startswith("A")


@pytest.mark.parametrize("decoder", [Decoder(), Decoder("joined"), Decoder(batch=1)], ids=["pairs", "joined", "one sequence"])
def test_decoding_makes_no_new_plan_and_copies_no_cache(decoder: Decoder, tmp_path: Path) -> None:
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": decoder.model()}))
    rep = generator._first.rep
    runs = rep.run
    shared, made = [], []

    def run(feeds: dict[str, Any], **more: Any) -> Any:
        outputs = runs(feeds, **more)
        planner = rep._session._planner
        assert planner is not None
        made.append((len(planner.plans), bool(planner.latest and planner.latest.caches), rep._session.reason))
        pasts = [n for n in feeds if n.startswith("past")]
        names = {n: re.sub("^past_key_values|^past", "present", n) for n in pasts}
        shared.append(all(np.shares_memory(feeds[n], outputs[names[n]]) for n in pasts))
        return outputs

    object.__setattr__(rep, "run", run)
    generator.generate("The sea is", max_new_tokens=60, end_tokens=[])
    assert len(made) == 60 and made[-1][1] and made[-1] == made[2], made  # the plan of the prompt, and that of what follows
    assert made[-1][0] == 2 and made[-1][2] is None
    if decoder.cache == "pairs":
        assert sum(shared) >= 55


def test_a_folder_of_onnxruntime_genai(oracle: Oracle, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": Decoder().model()}, genai_config=genai())
    (folder / "config.json").unlink()
    found = sonnx.Generator(folder).generate(PROMPTS[0])
    expected = greedy(oracle, Decoder("").model(), encoded(PROMPTS[0]), 64 - len(PROMPTS[0]), {})
    assert list(found.texts[0].tokens) == expected  # max_length counts the prompt


def test_files_with_group_query_attention(oracle: Oracle, tmp_path: Path) -> None:
    """As onnxruntime-genai's builder writes them: prompts of one length run together, and caches grow by one plan."""
    config = genai(past_present_share_buffer=True)
    config["model"]["decoder"] |= {"num_key_value_heads": 1, "head_size": models.WIDE}
    model = models.grouped()
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": model}, genai_config=config))
    fixed = {
        f"past_key_values.{n}.{k}": np.zeros((1, 1, 0, models.WIDE), np.float32) for n in range(LAYERS) for k in ("key", "value")
    }
    found = generator.generate([*PROMPTS, PROMPTS[0]], max_new_tokens=NEW, end_tokens=[])
    for prompt, text in zip(PROMPTS, found.texts, strict=False):
        expected = list(encoded(prompt))
        for _ in range(NEW):
            feeds = {"input_ids": np.array([expected]), "attention_mask": np.ones((1, len(expected)), np.int64), **fixed}
            expected.append(int(oracle.run(model.SerializeToString(), feeds)["logits"][0, -1].argmax()))
        assert list(text.tokens) == expected[len(encoded(prompt)) :]
    assert found.texts[-1].tokens == found.texts[0].tokens and len({t.tokens for t in found.texts}) == len(PROMPTS)
    planner = generator._first.rep._session._planner
    assert (
        planner is not None
        and planner.latest is not None
        and planner.latest.caches
        and generator._first.rep._session.reason is None
    )


def buffered() -> onnx.ModelProto:
    """A decoder whose caches are buffers of a maximum length: the mask says which row is the next."""
    model = Decoder("", positions=False).model()
    for n in range(LAYERS):
        for word, source in (("key", f"kh{n}"), ("value", f"vh{n}")):
            past, present = f"past_key_values.{n}.{word}", f"present.{n}.{word}"
            for name, field in ((past, model.graph.input), (present, model.graph.output)):
                field.append(onnx.helper.make_tensor_value_info(name, 1, ["batch", HEADS, "longest", SIZE]))
            reader = next(k for k in model.graph.node if k.output[0] == f"{word}{n}_all")
            at = list(model.graph.node).index(reader)
            parts = [
                models.node("Slice", f"{past} at0_ length1 at2", f"{word}{n}_before"),
                models.node("Concat", f"{word}{n}_before {source}", f"{word}{n}_joined", axis=2),
                models.node("Slice", f"{past} total1 end1 at2", f"{word}{n}_behind"),
                models.node("Concat", f"{word}{n}_joined {word}{n}_behind", present, axis=2),
            ]
            reader.input[0] = f"{word}{n}_joined"
            for part in reversed(parts):
                model.graph.node.insert(at, part)
    head = [
        models.node("Shape", "attention_mask", "mask_sizes"), models.node("Gather", "mask_sizes one", "mask_total"),
        models.node("Sub", "mask_total count", "length"), models.node("Unsqueeze", "length at0", "length1"),
        models.node("Unsqueeze", "mask_total at0", "total1"),
    ]  # fmt: skip
    old = next(k for k in model.graph.node if k.output[0] == "length")
    at = list(model.graph.node).index(old)
    model.graph.node.remove(old)
    for part in reversed(head):
        model.graph.node.insert(at, part)
    named = {"at0_": [0], "at2": [2], "end1": [1 << 40]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v, np.int64), k) for k, v in named.items())
    onnx.checker.check_model(model)
    return model


def test_buffers_of_the_maximum_length(oracle: Oracle, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": buffered()}, genai_config=genai(past_present_share_buffer=True))
    generator = sonnx.Generator(folder)
    seen: list[Any] = []
    runs = generator._first.rep.run
    object.__setattr__(generator._first.rep, "run", lambda feeds, **more: (seen.append(feeds), runs(feeds, **more))[1])
    found = generator.generate(PROMPTS[:2], max_new_tokens=NEW)
    for prompt, text in zip(PROMPTS, found.texts, strict=False):
        assert list(text.tokens) == greedy(oracle, Decoder("", positions=False).model(), encoded(prompt), NEW, {})
    assert {f["past_key_values.0.key"].shape[2] for f in seen} == {256}
    assert seen[3]["attention_mask"].shape == (1, len(PROMPTS[0]) + 3)


def test_sequences_do_not_depend_on_each_other(tmp_path: Path) -> None:
    """Greedy and drawn sequences of a batch that is padded are those of each prompt alone."""
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": Decoder().model()}))
    for options in ({}, {"temperature": 0.7, "seed": 3}):
        together = generator.generate(PROMPTS, max_new_tokens=NEW, **options)
        alone = generator.generate(PROMPTS[0], max_new_tokens=NEW, **options)
        assert together.texts[0].tokens == alone.texts[0].tokens
    several = generator.generate(PROMPTS[:2], max_new_tokens=NEW, temperature=0.9, seed=3, num_return_sequences=3)
    assert [t.prompt for t in several.texts] == [0, 0, 0, 1, 1, 1] and len({t.tokens for t in several.texts}) == 6
    again = generator.generate(PROMPTS[:2], max_new_tokens=NEW, temperature=0.9, seed=3, num_return_sequences=3)
    other = generator.generate(PROMPTS[:2], max_new_tokens=NEW, temperature=0.9, seed=4, num_return_sequences=3)
    assert again.texts == several.texts != other.texts and several.seed == 3
    drawn = generator.generate(PROMPTS[0], max_new_tokens=NEW, top_k=5)
    assert drawn.seed is not None
    assert generator.generate(PROMPTS[0], max_new_tokens=NEW, top_k=5, seed=drawn.seed).texts == drawn.texts


def test_tokens_in_place_of_a_text(tmp_path: Path) -> None:
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": Decoder().model()}))
    text = generator.generate("sea", max_new_tokens=5)
    for tokens in (encoded("sea"), np.array(encoded("sea")), [encoded("sea")]):
        assert generator.generate(tokens, max_new_tokens=5).texts == text.texts
    assert generator.generate("", max_new_tokens=5).texts == generator.generate([BEGIN], max_new_tokens=5).texts
    assert (
        generator.generate("<s>sea", max_new_tokens=5).texts
        == generator.generate([BEGIN, *encoded("sea")], max_new_tokens=5).texts
    )


WRITTEN = "caf\u00e9 \U0001f600\u4f60 end"

ENDS = [
    ({}, WRITTEN, "end"),
    ({"stop": "\u00e9 \U0001f600"}, "caf", "stop"),
    ({"stop": ["nothing", " e"]}, WRITTEN[:-4], "stop"),
    ({"stop": ["end!", "nd and"]}, WRITTEN, "end"),
    ({"max_new_tokens": 4}, "caf", "length"),  # half of a character is left out
    ({"max_new_tokens": 5}, "caf\u00e9", "length"),
    ({"max_new_tokens": 8}, "caf\u00e9 ", "length"),
    ({"max_length": 4}, "caf", "length"),
    ({"end_tokens": ord("f")}, "ca", "end"),
    ({"end_tokens": [7, ord("e")], "stop": "x"}, WRITTEN[:-3], "end"),
]


@pytest.mark.parametrize(("options", "expected", "end"), ENDS)
def test_text_ends_and_streams_in_whole_characters(options: dict[str, Any], expected: str, end: str, tmp_path: Path) -> None:
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": script(encoded(WRITTEN))}))
    found = generator.generate([1], **options).texts[0]
    assert (found.text, found.end) == (expected, end)
    pieces = list(generator.stream([1], **options))
    assert "".join(pieces) == expected and all(pieces)
    if not options:
        assert pieces == list(expected) and list(found.tokens) == encoded(WRITTEN)


def test_lengths(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": script(encoded("ab"))}, generation_config={"max_length": 9, "min_length": 0})
    generator = sonnx.Generator(folder)
    assert generator.generate([1]).texts[0].tokens == tuple(b"ab")
    least = generator.generate([1], min_new_tokens=5, max_new_tokens=7).texts[0]
    assert len(least.tokens) == 5 and least.end == "end" and models.END not in least.tokens
    assert len(generator.generate([1], min_length=5).texts[0].tokens) == 4
    assert len(generator.generate([1], end_tokens=[]).texts[0].tokens) == 8  # max_length of the folder, with the prompt
    assert len(generator.generate([1], end_tokens=[], max_new_tokens=12).texts[0].tokens) == 12
    write(folder, {}, generation_config={})
    assert len(sonnx.Generator(folder).generate([1], end_tokens=[]).texts[0].tokens) == 256


def test_the_defaults_of_a_folder(tmp_path: Path) -> None:
    chosen = {"do_sample": True, "top_k": 4, "temperature": 0.5, "max_new_tokens": 6, "unknown": {"a": 1}, "top_p": None}
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": Decoder().model()}, generation_config=chosen))
    drawn = generator.generate("a", seed=1)
    assert drawn.seed == 1 and drawn.new_tokens <= 6
    assert drawn.texts == generator.generate("a", seed=1, sample=True, top_k=4, temperature=0.5, max_new_tokens=6).texts
    write(generator.folder, {}, generation_config=chosen | {"num_return_sequences": 3})
    several = sonnx.Generator(generator.folder)
    assert len(several.generate("a", seed=1).texts) == 3
    assert "".join(several.stream("a", seed=1)) == drawn.texts[0].text  # a stream is one of them
    greedy_texts = generator.generate("a", sample=False).texts
    assert greedy_texts == generator.generate("a", temperature=0).texts == generator.generate("a", top_k=1, seed=9).texts


@pytest.mark.parametrize("value", [{"temperature": 0}, {"top_p": 0}, {"temperature": 0.0, "top_k": 50, "min_p": 0.1}])
def test_options_of_a_folder_that_does_not_sample_have_no_effect(value: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": Decoder().model()}, generation_config={"do_sample": False, **value})
    plain = write(tmp_path / "plain", {"model": Decoder().model()})
    expected = sonnx.Generator(plain).generate("a", max_new_tokens=6).texts
    assert sonnx.Generator(folder).generate("a", max_new_tokens=6).texts == expected
    drawn = {"do_sample": True, **value}
    folder = write(tmp_path / "folder", {}, generation_config=drawn)
    if "temperature" in value:
        with pytest.raises(InvalidInput, match=r"SX374.*temperature must be above 0, got 0"):
            sonnx.Generator(folder)
    else:
        assert sonnx.Generator(folder).generate("a", max_new_tokens=6).texts == expected  # only the most likely token is left


def test_the_tokens_that_a_folder_excludes_or_forces(oracle: Oracle, tmp_path: Path) -> None:
    """Each key alone changes the greedy tokens to the most likely ones that it allows, by the logits of onnxruntime."""
    whole, prompt = Decoder("").model(), encoded("sea")

    def expected(excluded: Any, forced: dict[int, int]) -> tuple[int, ...]:
        new: list[int] = []
        for i in range(8):
            ids = np.array([prompt + new])
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
            logits = oracle.run(whole.SerializeToString(), feeds)["logits"][0, -1].copy()
            logits[excluded(new)] = -np.inf
            new.append(forced.get(i, int(logits.argmax())))
        return tuple(new)

    free = expected(lambda new: [], {})
    keys: list[tuple[dict[str, Any], Any, dict[int, int]]] = [
        ({"bad_words_ids": [[free[0]], [free[1], free[2]]]}, lambda n: [free[0]] + [free[2]] * (n[-1:] == [free[1]]), {}),
        ({"suppress_tokens": [free[0], free[3]]}, lambda n: [free[0], free[3]], {}),
        ({"begin_suppress_tokens": [free[0]]}, lambda n: [] if n else [free[0]], {}),
        ({"forced_eos_token_id": 65}, lambda n: [], {7: 65}),
        ({"sequence_bias": [[[free[0]], -100.0]]}, lambda n: [free[0]], {}),
    ]
    model = {"model": Decoder().model()}
    for i, (config, excluded, forced) in enumerate(keys):
        generator = sonnx.Generator(write(tmp_path / str(i), model, generation_config=config))
        tokens = generator.generate("sea", max_new_tokens=8, end_tokens=[]).texts[0].tokens
        assert tokens == expected(excluded, forced) != free, config
        assert generator.generate("sea", max_new_tokens=8, end_tokens=[], num_beams=1).texts[0].tokens == tokens
        first = generator.generate("sea", max_new_tokens=1, end_tokens=[], num_beams=3).texts[0].tokens
        assert first == ((65,) if "forced_eos_token_id" in config else tokens[:1])


def test_the_stops_and_the_seed_of_a_folder(tmp_path: Path) -> None:
    model = {"model": script(encoded("one two three"))}
    generator = sonnx.Generator(write(tmp_path / "folder", model, generation_config={"stop_strings": " th"}))
    assert generator.generate([1]).texts[0].text == "one two"
    assert generator.generate([1], stop=[]).texts[0].text == "one two three"
    config = genai(do_sample=True, temperature=2.0, random_seed=5)
    place = write(tmp_path / "seed", {"model": Decoder().model()}, genai_config=config)
    assert sonnx.Generator(place).generate("a").seed == 5
    (place / "genai_config.json").write_text(json.dumps(genai(do_sample=True, random_seed=-1)))
    assert sonnx.Generator(place).generate("a", max_new_tokens=1).seed not in (5, -1)


@pytest.mark.parametrize(("stop", "text"), [
    ("<s>", "ab"), ("b<s>", "a"), ("<s>cd", "ab"), ("d</s>", "abc"), ("<s>d", "abcd"), ("<s></s>", "abcd"), ("</s>!", "abcd"),
])  # fmt: skip
def test_a_stop_that_is_or_holds_a_special_token(stop: str, text: str, tmp_path: Path) -> None:
    written = [*b"ab", BEGIN, *b"cd", models.END, BEGIN, models.END]
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": script(written)}))
    found = generator.generate([1], stop=stop, end_tokens=[], max_new_tokens=8).texts[0]
    assert found.text == "".join(generator.stream([1], stop=stop, end_tokens=[], max_new_tokens=8)) == text
    assert found.end == ("stop" if stop in "ab<s>cd</s><s></s>" else "length")


def test_a_text_ends_where_the_tables_of_positions_end(tmp_path: Path) -> None:
    """With a reason of its own, if the configuration says nothing, or more; and with a warning, which a stream needs."""
    rotary = genai()
    rotary["model"]["decoder"] |= {"num_key_value_heads": 1, "head_size": models.WIDE}
    learned = {k: v for k, v in models.CONFIG.items() if k != "n_positions"}
    rotary["model"]["context_length"] = 1 << 20
    folders = {
        "learned": write(tmp_path / "learned", {"model": Decoder().model()}, learned),
        "rotary": write(tmp_path / "rotary", {"model": models.grouped()}, genai_config=rotary),
        "configured": write(tmp_path / "configured", {"model": Decoder().model()}, models.CONFIG | {"n_positions": 500}),
    }
    for name, folder in folders.items():
        generator, most = sonnx.Generator(folder), 500 if name == "configured" else models.PLACES
        prompt: dict[str, Any] = {"max_new_tokens": 30, "end_tokens": []}
        with pytest.warns(UserWarning, match=f"can attend to no more tokens, at {most} with those of the prompt"):
            found = generator.generate([[5] * (most - 20)], **prompt).texts[0]
        assert found.end == "context" and len(found.tokens) == 20
        with pytest.warns(UserWarning, match="can attend to no more tokens"):
            assert "".join(generator.stream([5] * (most - 3), **prompt))
        assert generator.generate([[5] * 9], **prompt).texts[0].end == "length"


def test_a_flag_and_limits_end_a_call(tmp_path: Path) -> None:
    import threading

    flag = threading.Event()
    folder = write(tmp_path / "folder", {"model": Decoder().model()})
    generator = sonnx.Generator(folder)
    pieces = generator.stream("a", cancel=flag, max_new_tokens=100, end_tokens=[])
    next(pieces)
    flag.set()
    with pytest.raises(sonnx_error("ResourceExhausted"), match="SX609"):
        list(pieces)
    with pytest.raises(sonnx_error("ResourceExhausted"), match="SX606"):
        sonnx.Generator(folder, limits=limits(iterations=10)).generate("a", max_new_tokens=11)
    shared = write(tmp_path / "shared", {"model": buffered()}, genai_config=genai(past_present_share_buffer=True))
    with pytest.raises(sonnx_error("ResourceExhausted"), match="SX603"):
        sonnx.Generator(shared, limits=limits(tensor_bytes=60_000)).generate(["a"] * 8)


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "temperature": 1.0}])
def test_the_deadline_bounds_a_whole_call(search: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second: a deadline ends the call, although each run alone would be within it."""
    from singa_backend import deadline

    folder = write(tmp_path / "folder", {"model": Decoder().model()})
    options = {"max_new_tokens": 8, "end_tokens": [], **search}
    free = sonnx.Generator(folder).generate("a", seed=1, **options)
    generous = sonnx.Generator(folder, limits=limits(deadline=1e6))
    assert generous.generate("a", seed=1, **options).texts == free.texts
    now, runs = [0.0], 0

    def clock() -> float:
        now[0] += 1000.0
        return now[0]

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=clock))
    run = SingaRep.run

    def counted(self: Any, *arguments: Any, limits: Any = None, **keywords: Any) -> Any:
        nonlocal runs
        runs += 1
        assert 0 < limits.deadline < 20_000
        return run(self, *arguments, limits=None if runs < 3 else limits, **keywords)

    monkeypatch.setattr(SingaRep, "run", counted)
    generous._limits = limits(deadline=20_000.0)
    with pytest.raises(sonnx_error("ResourceExhausted"), match=r"SX608.*the deadline of 20000\.0 seconds"):
        generous.generate("a", seed=1, **options)
    assert 0 < runs < 8


def test_a_deadline_that_has_passed_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "folder", {"model": Decoder().model()}, tokenizer_config={"chat_template": "{{ messages }}"})
    generator = sonnx.Generator(folder)
    generator._limits = limits(deadline=1e-9)
    monkeypatch.setattr(SingaRep, "run", lambda *_, **__: pytest.fail("a run began"))
    error = sonnx_error("ResourceExhausted")
    with pytest.raises(error, match="SX608"):
        generator.generate("a")
    with pytest.raises(error, match="SX608"):
        list(generator.stream("a", num_beams=2))
    with pytest.raises(error, match="SX608"):
        generator.chat_prompt([{"role": "user", "content": "a"}])
    with pytest.raises(error, match="SX608"):
        sonnx.Generator(folder, limits=limits(deadline=1e-9))


def limits(**given: Any) -> Any:
    from singa_backend import Limits

    return Limits(**given)


def sonnx_error(name: str) -> type[Exception]:
    import singa_backend.errors

    found = getattr(singa_backend.errors, name)
    assert issubclass(found, Exception)
    return found


def test_other_devices_and_options(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": Decoder().model()})
    expected = sonnx.Generator(folder).generate(PROMPTS, max_new_tokens=6).texts
    assert sonnx.Generator(folder, "STRICT").generate(PROMPTS, max_new_tokens=6).texts == expected
    assert sonnx.Generator(folder, threads=1, optimize=0).generate(PROMPTS, max_new_tokens=6).texts == expected
    with pytest.raises(sonnx_error("UnknownKeyword"), match="thread"):
        sonnx.Generator(folder, thread=1)


def test_logits_that_are_nan(tmp_path: Path) -> None:
    model = Decoder().model()
    head = next(i for i in model.graph.initializer if i.name == "head")
    head.CopyFrom(onnx.numpy_helper.from_array(np.full((models.WIDTH, WORDS), np.nan, np.float32), "head"))
    with pytest.raises(sonnx_error("OperatorError"), match="SX410"):
        sonnx.Generator(write(tmp_path / "folder", {"model": model})).generate("a")


def test_a_beam_search_finds_what_a_greedy_one_misses(tmp_path: Path) -> None:
    """With as many beams as sequences of two tokens continue, it returns the most likely sequence of all."""
    rng = np.random.default_rng(3)
    folder = write(tmp_path / "folder", {"model": Decoder().model()}, generation_config={"num_beams": 100})
    generator = sonnx.Generator(folder)
    given: dict[str, Any] = {"max_new_tokens": 2, "end_tokens": []}
    differ = 0
    for _ in range(8):
        prompt = rng.integers(3, 60, 4).tolist()
        best = generator.generate([prompt], **given).texts[0].tokens
        more = generator.generate([prompt], **given, num_return_sequences=3)
        assert [t.end for t in more.texts] == ["length"] * 3 and more.texts[0].tokens == best
        assert len({t.tokens for t in more.texts}) == 3 and more.new_tokens == 6
        one = generator.generate([prompt], **given, num_beams=1).texts[0].tokens
        assert "".join(generator.stream(prompt, **given)) == generator.generate([prompt], **given).texts[0].text
        differ += one != best
    assert differ


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_beams": 3, "temperature": 0.5}, "num_beams must be 1 for a search that samples"),
        ({"num_beams": 3, "num_return_sequences": 4}, "at most num_beams 3"),
        ({"num_beams": 3, "stop": "x"}, "stop must be empty"),
        ({"num_beams": 129}, "num_beams must be an integer from 1 to 128"),
        (
            {"num_beams": 2, "length_penalty": float("nan")},
            "length_penalty must be a finite number of at least -100 and at most 100",
        ),
        ({"num_beams": 2, "early_stopping": "never"}, "early_stopping must be True, False or None"),
    ],
)
def test_beams_that_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": Decoder().model()}))
    with pytest.raises(InvalidInput, match=words) as caught:
        generator.generate([5], **given)
    assert caught.value.code == "SX390"


def test_a_model_for_one_sequence_has_no_beams(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": script([65])}, generation_config={"num_beams": 4})
    with pytest.raises(InvalidInput, match="whose batch is 1"):
        sonnx.Generator(folder).generate([1])
    assert sonnx.Generator(folder).generate([1], num_beams=1).texts[0].text == "A"


def test_a_call_uses_no_network(tmp_path: Path) -> None:
    """In a child process, whose audit hook refuses every address and connection."""
    import subprocess
    import sys

    folder = write(
        tmp_path / "folder", {"model": Decoder().model()}, tokenizer_config={"chat_template": "{{ messages[0].content }}"}
    )
    code = (
        "import sys\n"
        "def hook(event, arguments):\n"
        "    assert not event.startswith('socket.') or event in ('socket.__new__', 'socket.gethostname'), event\n"
        "sys.addaudithook(hook)\n"
        "import json, sonnx\n"
        f"generator = sonnx.Generator({str(folder)!r})\n"
        "prompt = generator.chat_prompt([{'role': 'user', 'content': 'sea'}])\n"
        "print(json.dumps(generator.generate(prompt, max_new_tokens=4).texts[0].tokens))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4


def test_an_adapter_of_the_decoder(tmp_path: Path, oracle: Oracle) -> None:
    """As the model in which it is merged, in onnxruntime; of one file, and of two that share weights."""
    pytest.importorskip("safetensors")
    from singa_backend.adapters import Adapter, LowRank, merge

    draw = np.random.default_rng(0)
    names = {"q0": (WIDTH, WIDTH), "up1": (WIDTH, 2 * WIDTH), "head": (WIDTH, WORDS)}
    changes = {
        n: LowRank(*(draw.standard_normal(s).astype(np.float32) for s in ((2, k), (m, 2))), 0.3) for n, (k, m) in names.items()
    }
    adapter = Adapter(changes, {}, "", {})
    adapter.save(tmp_path / "a.safetensors")
    decoder = Decoder()
    folder = write(tmp_path / "folder", {"model": decoder.model()})
    two = write(tmp_path / "two", {"decoder_model": decoder.model(False), "decoder_with_past_model": decoder.model()})
    whole = merge(Decoder("").model(), adapter)
    expected = greedy(oracle, whole, encoded(PROMPTS[0]), NEW, {})
    assert expected != greedy(oracle, Decoder("").model(), encoded(PROMPTS[0]), NEW, {})
    for place in (folder, two):
        for given in (adapter, tmp_path / "a.safetensors", [tmp_path / "a.safetensors"]):
            found = sonnx.Generator(place, adapter=given).generate(PROMPTS[0], max_new_tokens=NEW)
            assert list(found.texts[0].tokens) == expected
