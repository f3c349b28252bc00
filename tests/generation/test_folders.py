"""Folders that cannot be used are refused before any run, by an error that names the file, the key and the rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import onnx
import pytest
from onnx import TensorProto, helper
from tests.helpers.language_models import CONFIG, HEADS, SIZE, Decoder, encoder, genai, script, write

from singa import sonnx
from singa_backend.backend import SingaRep
from singa_backend.errors import InvalidInput, MissingDependency, ResourceExhausted, SonnxError, UnsupportedModel


@pytest.fixture(autouse=True)
def _no_run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A run fails the test, unless its name says that it runs."""
    if "runs" not in request.node.name:
        monkeypatch.setattr(SingaRep, "run", lambda *_, **__: pytest.fail("a run"))


def refusal(folder: Path, kind: type[SonnxError] = InvalidInput) -> SonnxError:
    with pytest.raises(kind) as caught:
        sonnx.Generator(folder)
    return caught.value


MODEL = ("model",)
DECODER = ("model", "decoder")

GENAI = [
    (MODEL, "eos_token_id", "2", "$.model.eos_token_id must be an integer from -1 to"),
    (MODEL, "eos_token_id", [1, -7], "$.model.eos_token_id[1] must be an integer from -1 to 2147483647, got -7"),
    (MODEL, "context_length", 0, "model.context_length must be an integer from 1 to"),
    (MODEL, "vocab_size", True, "model.vocab_size must be an integer from 1 to"),
    (DECODER, "filename", "../model.onnx", "model.decoder.filename must be a path within the folder, got '../model.onnx'"),
    (DECODER, "filename", "/etc/passwd", "must be a path within the folder"),
    (DECODER, "filename", "a/../../model.onnx", "must be a path within the folder"),
    (DECODER, "filename", "..\\model.onnx", "must be a path within the folder"),
    (DECODER, "filename", "", "must be a path within the folder"),
    (DECODER, "filename", 7, "model.decoder.filename must be a text, got 7"),
    (DECODER, "filename", None, "$.model.decoder.filename must not be null"),
    (DECODER, "filename", "other.onnx", "other.onnx does not exist"),
    (DECODER, "head_size", -1, "model.decoder.head_size must be an integer from 1"),
    (DECODER, "inputs", [], "$.model.decoder.inputs must be an object, got a list"),
    ((*DECODER, "inputs"), "past_key_names", "past", "past_key_names must be a name with one %d, for the layer, got 'past'"),
    ((*DECODER, "inputs"), "past_key_names", "%s.%d", "must be a name with one %d"),
    ((*DECODER, "outputs"), "present_key_names", None, "$.model.decoder.outputs.present_key_names must not be null"),
    (("search",), "top_p", 1.5, "$.search.top_p must be a finite number of at least 0 and at most 1, got 1.5"),
    (("search",), "temperature", "hot", "search.temperature must be a finite number of at least 0 and at most 1e+06, got 'hot'"),
    (("search",), "repetition_penalty", 0, "search.repetition_penalty must be above 0"),
    (("search",), "bad_words_ids", [[1], []], "search.bad_words_ids[1] must be a list of 1 to"),
    (("search",), "bad_words_ids", [[1], [-2]], "search.bad_words_ids[1][0] must be an integer from 0"),
    (("search",), "sequence_bias", [[[1, 2]]], "search.sequence_bias[0] must be a list of 2 values, got 1"),
    (("search",), "sequence_bias", [[[1], "a"]], "search.sequence_bias[0][1] must be a finite number"),
    (("search",), "exponential_decay_length_penalty", [3], "must be a list of 2 values, got 1"),
    (("search",), "min_p", 1.5, "search.min_p must be a finite number of at least 0 and at most 1"),
    (("search",), "typical_p", 0, "search.typical_p must be above 0"),
    (("search",), "stop_strings", ["a", ""], "search.stop_strings[1] must be a text that is not empty"),
    (("search",), "guidance_scale", 1.5, "search.guidance_scale must not be set: it changes the tokens, and is not supported"),
    (("search",), "watermarking_config", {}, "search.watermarking_config must not be set"),
    (("search",), "token_healing", True, "search.token_healing must not be set"),
    (("search",), "penalty_alpha", 0.6, "search.penalty_alpha must not be set"),
    (("search",), "max_time", 2.0, "search.max_time must not be set"),
    (("search",), "max_length", -3, "search.max_length must be an integer from 1 to"),
    (("search",), "do_sample", "yes", "search.do_sample must be true or false, got 'yes'"),
    (("search",), "past_present_share_buffer", 1, "must be true or false, got 1"),
    ((), "model", 3, "model must be an object, got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "key", "value", "message"), GENAI)
def test_values_of_genai_config(place: tuple[str, ...], key: str, value: Any, message: str, tmp_path: Path) -> None:
    config = genai()
    section: dict[str, Any] = config
    for name in place:
        section = section[name]
    section[key] = value
    folder = write(tmp_path / "folder", {"model": Decoder().model()}, genai_config=config)
    (tmp_path / "model.onnx").write_bytes((folder / "model.onnx").read_bytes())  # a path out of the folder would find it
    error = refusal(folder)
    assert error.code == "SX374" and message in error.message and "genai_config.json" in error.message


def test_a_folder_that_is_a_link(tmp_path: Path) -> None:
    """A path through it leaves the folder; the folder itself, and a file in it, may be links."""
    folder = write(tmp_path / "folder", {"model": Decoder().model()}, genai_config=genai())
    (folder / "model.onnx").rename(tmp_path / "model.onnx")
    (folder / "out").symlink_to(tmp_path)
    config = genai()
    config["model"]["decoder"]["filename"] = "out/model.onnx"
    (folder / "genai_config.json").write_text(json.dumps(config))
    assert "must be a path within the folder, got 'out/model.onnx'" in refusal(folder).message
    (folder / "genai_config.json").write_text(json.dumps(genai()))
    (folder / "model.onnx").symlink_to(tmp_path / "model.onnx")
    (tmp_path / "link").symlink_to(folder)
    assert sonnx.Generator(tmp_path / "link").load_seconds > 0


def test_unknown_keys_and_nulls_are_ignored_when_it_runs(tmp_path: Path) -> None:
    config = genai(unknown=[1, 2], top_p=None, max_length=20.0)
    config["model"] |= {"new": {"deep": 1}, "bos_token_id": None}
    config["more"] = True
    folder = write(tmp_path / "folder", {"model": Decoder().model()}, genai_config=config)
    assert len(sonnx.Generator(folder).generate("a", end_tokens=[]).texts[0].tokens) == 19


@pytest.mark.parametrize("part", ["encoder", "vision", "speech", "embedding", "pipeline"])
def test_models_with_other_parts(part: str, tmp_path: Path) -> None:
    config = genai()
    (config["model"]["decoder"] if part == "pipeline" else config["model"])[part] = {"filename": "x.onnx"}
    error = refusal(write(tmp_path / "folder", {"model": Decoder().model()}, genai_config=config), UnsupportedModel)
    assert error.code == "SX210" and part in error.message


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("config.json", b"[]", "config.json: $ must be an object, got a list"),
        ("config.json", b"{", "config.json"),
        ("config.json", b"\xff", "config.json"),
        ("config.json", b'{"a": 1, "a": 2}', "config.json: $ has the key 'a' twice"),
        ("generation_config.json", b"3", "generation_config.json: $ must be an object, got 3"),
        ("generation_config.json", b'{"top_k": -1}', "generation_config.json: $.top_k must be an integer from 0 to"),
        ("generation_config.json", b'{"eos_token_id": {}}', "$.eos_token_id must be an integer"),
        ("generation_config.json", b'{"num_beams": 0}', "num_beams must be an integer from 1"),
        ("config.json", b'{"n_positions": "many"}', "config.json: $.n_positions must be an integer"),
        ("config.json", b'{"is_encoder_decoder": 1}', "$.is_encoder_decoder must be true or false"),
        ("config.json", b'{"is_encoder_decoder": true}', "must contain encoder_model.onnx, and has model.onnx"),
    ],
)
def test_files_of_optimum(file: str, data: bytes, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": Decoder().model()})
    (folder / file).write_bytes(data)
    error = refusal(folder)
    assert error.code == "SX374" and message in error.message, error.message


def test_what_a_folder_lacks(tmp_path: Path) -> None:
    assert "which does not exist" in refusal(tmp_path / "nothing").message
    assert "got a int" in refusal(cast(Path, 7)).message
    assert "which does not exist" in refusal(Path("a\0b")).message
    (tmp_path / "file").write_text("")
    assert "which is a file" in refusal(tmp_path / "file").message
    assert "has neither" in refusal(tmp_path).message
    folder = write(tmp_path / "folder", {})
    assert "must contain an ONNX file" in refusal(folder).message
    onnx.save(Decoder().model(), folder / "other.onnx")
    assert "must contain model.onnx or" in refusal(folder).message and "has other.onnx" in refusal(folder).message
    (folder / "other.onnx").rename(folder / "model.onnx")
    (folder / "tokenizer.json").unlink()
    error = refusal(folder)
    assert error.code == "SX375" and "must contain tokenizer.json" in error.message and error.hint
    for data in (b"", b"{}", b"[1]", b"\xff", b'{"version": "1.0", "model": {"type": "BPE"}}'):
        (folder / "tokenizer.json").write_bytes(data)
        assert refusal(folder).code == "SX375"
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    assert refusal(folder).code == "SX375"


def test_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {"model": Decoder().model()})
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(257 << 20)
    assert refusal(folder, ResourceExhausted).code == "SX600"
    with (folder / "config.json").open("r+b") as file:
        file.truncate(17 << 20)
    assert refusal(folder, ResourceExhausted).code == "SX600"


def test_the_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    error = refusal(write(tmp_path / "folder", {"model": Decoder().model()}), MissingDependency)
    assert error.code == "SX700" and error.hint == "pip install 'sonnx[generate]'"


def changed(*, remove: str = "", add: str = "", output: bool = False, **shapes: list[Any]) -> onnx.ModelProto:
    model = Decoder().model()
    values = model.graph.output if output else model.graph.input
    for value in list(values):
        if value.name == remove:
            values.remove(value)
        if value.name in shapes:
            value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, shapes[value.name]))
    if add:
        values.append(helper.make_tensor_value_info(add, TensorProto.FLOAT, ["batch", 4]))
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"add": "pixel_values"}, "inputs that generation does not provide: pixel_values"),
        ({"remove": "logits", "output": True}, "must have the output logits"),
        ({"remove": "present.1.value", "output": True}, "must return present.1.value, which is the next past"),
        ({"past_key_values.0.key": ["n", HEADS, SIZE]}, "a cache must be of shape"),
        ({"logits": ["batch"], "output": True}, "the output must be of shape [batch, length, words]"),
        ({"input_ids": ["batch", 4]}, "must be of shape [batch, any length]"),
    ],
)
def test_models_that_are_not_decoders(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", {})
    onnx.save(changed(**change), folder / "model.onnx")
    error = refusal(folder, UnsupportedModel)
    assert error.code == "SX210" and message in error.message, error.message


def test_sizes_of_a_cache_may_be_in_the_configuration_when_it_runs(tmp_path: Path) -> None:
    shapes = {f"past_key_values.{n}.{w}": ["batch", "heads", "past", "size"] for n in range(2) for w in ("key", "value")}
    folder = write(tmp_path / "folder", {}, CONFIG | {"n_head": HEADS, "n_embd": HEADS * SIZE})
    onnx.save(changed(**shapes), folder / "model.onnx")
    whole = write(tmp_path / "whole", {"model": Decoder().model()})
    found = sonnx.Generator(folder).generate("a", max_new_tokens=5)
    assert found.texts == sonnx.Generator(whole).generate("a", max_new_tokens=5).texts
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "must declare its heads and their size" in refusal(folder, UnsupportedModel).message


def test_encoders(tmp_path: Path) -> None:
    decoder = Decoder(cross=True, positions=False, mask=False)
    files = {"encoder_model": encoder(), "decoder_model": decoder.model(past=False)}
    config = CONFIG | {"is_encoder_decoder": True}
    none = {k: v for k, v in config.items() if k not in ("bos_token_id", "pad_token_id")}
    assert "decoder_start_token_id" in refusal(write(tmp_path / "start", files, none)).message
    assert "is_encoder_decoder must be true" in refusal(write(tmp_path / "no", files)).message
    other = files | {"encoder_model": decoder.model(past=False)}
    assert (
        "must have the inputs input_ids and attention_mask"
        in refusal(write(tmp_path / "o", other, config), UnsupportedModel).message
    )


@pytest.mark.parametrize(
    ("prompt", "options", "code", "message"),
    [
        ([], {}, "SX390", "1 to 4096 sequences"),
        (7, {}, "SX390", "a text or a list of tokens, got a int"),
        ([None], {}, "SX390", "a text or a list of tokens"),
        ([5, 1.5], {}, "SX390", "got a list of numbers: a token is an integer"),
        ("a", {"end_tokens": [260]}, "SX390", "from 0 to 259, got 260"),
        ([["a"]], {}, "SX375", "an integer from 0 to 259, got 'a'"),
        ([[1, 260]], {}, "SX375", "got 260"),
        ([[-1]], {}, "SX375", "got -1"),
        ("a\ud800", {}, "SX375", "surrogates"),
        (b"a", {}, "SX390", "got a bytes"),
        ([1] * 512, {}, "SX390", "must be shorter than the 512 tokens"),
        ("abc", {"max_length": 3}, "SX390", "above the 3 tokens of the prompt"),
        ("a", {"max_new_tokens": 0}, "SX390", "max_new_tokens must be an integer from 1"),
        ("a", {"max_new_tokens": 2.5}, "SX390", "max_new_tokens"),
        ("a", {"min_new_tokens": 9, "max_new_tokens": 8}, "SX390", "at most the maximum, got 9 and 8"),
        ("a", {"seed": -1}, "SX390", "seed"),
        ("a", {"temperature": -1}, "SX390", "temperature"),
        ("a", {"temperature": float("nan")}, "SX390", "temperature"),
        ("a", {"top_p": -0.1}, "SX390", "top_p must be a finite number of at least 0 and at most 1"),
        ("a", {"top_p": 1.1}, "SX390", "at most 1"),
        ("a", {"top_k": -1}, "SX390", "top_k"),
        ("a", {"repetition_penalty": 0}, "SX390", "above 0"),
        ("a", {"sample": True, "temperature": 0}, "SX390", "above 0 for a search that samples"),
        ("a", {"sample": 1}, "SX390", "sample must be true or false"),
        ("a", {"num_return_sequences": 2}, "SX390", "must be 1 for a greedy search"),
        ("a", {"num_return_sequences": 5000}, "SX390", "4096"),
        (["a"] * 3, {"num_return_sequences": 2000, "sample": True}, "SX390", "1 to 4096 sequences, got 6000"),
        ("a", {"stop": [""]}, "SX390", "not empty"),
        ("a", {"stop": 7}, "SX390", "stop must be a text"),
        ("a", {"stop": ["a", 7]}, "SX390", "stop[1] must be a text, got 7"),
        ("a", {"bad_words_ids": 7}, "SX390", "bad_words_ids must be a list"),
        ("a", {"sequence_bias": {(1, -2): 1.0}}, "SX390", "sequence_bias[0][0][1] must be an integer from 0"),
        ("a", {"max_new_tokens": 10**400}, "SX390", "max_new_tokens must be an integer"),
        ("a", {"temperature": 10**400}, "SX390", "temperature must be a finite number"),
        ("a", {"sample": False, "top_k": 5}, "SX390", "top_k must be absent from a search that it does not affect, got 5"),
        ("a", {"temperature": 0, "min_p": 0.5}, "SX390", "min_p must be absent"),
        ("a", {"sample": False, "temperature": 0.5}, "SX390", "temperature must be absent"),
        ("a", {"length_penalty": 2}, "SX390", "length_penalty must be absent"),
        ("a", {"early_stopping": True}, "SX390", "early_stopping must be absent"),
        ("a", {"end_tokens": [-1]}, "SX390", "end_tokens"),
        ("a", {"beams": 2}, "SX364", "beams"),
    ],
)
def test_arguments_of_a_call(prompt: Any, options: dict[str, Any], code: str, message: str, tmp_path: Path) -> None:
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": Decoder().model()}))
    for call in (generator.generate, *((generator.stream,) if isinstance(prompt, str) else ())):
        with pytest.raises(InvalidInput) as caught:
            call(prompt, **options)
        assert caught.value.code == code and message in caught.value.message, caught.value.message


def test_a_prompt_without_tokens_and_a_stream_of_several(tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "bos_token_id"}
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": script([65])}, config))
    with pytest.raises(InvalidInput, match="at least one token"):
        generator.generate("")
    with pytest.raises(InvalidInput, match="a stream continues one prompt, got 2"):
        generator.stream(["a", "b"])
    with pytest.raises(InvalidInput, match="must be 1 for a stream, got 2"):
        generator.stream("a", sample=True, num_return_sequences=2)


# --- what a model returns -------------------------------------------------------------------------------------------------

LOGITS = {
    "rank 0": "logits = Constant<value_float = 1.0>()",
    "rank 1": "s = Shape(input_ids) logits = Cast<to = 1>(s)",
    "rank 4": "axes = Constant<value_ints = [2, 3]>() u = Unsqueeze(input_ids, axes) logits = Cast<to = 1>(u)",
    "no words": "e = Constant<value_ints = [0]>() s = Shape(input_ids) t = Concat<axis = 0>(s, e) logits = ConstantOfShape(t)",
    "no length": "e = Constant<value_ints = [1, 0, 256]>() logits = ConstantOfShape(e)",
    "no batch": "e = Constant<value_ints = [0, 1, 256]>() logits = ConstantOfShape(e)",
    "another batch": "e = Constant<value_ints = [3, 1, 256]>() logits = ConstantOfShape(e)",
    "texts": "logits = Cast<to = 8>(input_ids)",
    "a sequence": "logits = SequenceConstruct(input_ids)",
}


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("form", LOGITS)
def test_logits_of_another_form_are_refused_when_it_runs(form: str, search: dict[str, Any], tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17]> g (int64[b, s] input_ids) => (float logits) {{ {LOGITS[form]} }}'
    )
    kind = TensorProto.STRING if form == "texts" else TensorProto.FLOAT
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(kind, None))
    if form == "a sequence":
        inner = helper.make_tensor_type_proto(TensorProto.INT64, None)
        model.graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(inner))
    folder = write(tmp_path / "folder", {"model": model}, CONFIG)
    with pytest.raises(UnsupportedModel, match="logits") as caught:
        sonnx.Generator(folder).generate("a", max_new_tokens=2, **search)
    assert caught.value.code == "SX210"


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}, {"sample": True, "seed": 1}], ids=["greedy", "beams", "sample"])
def test_a_forced_token_beyond_the_words_is_refused_when_it_runs(search: dict[str, Any], tmp_path: Path) -> None:
    decoder = Decoder(cross=True, positions=False, mask=False)
    config = {**CONFIG, "is_encoder_decoder": True, "decoder_start_token_id": 0, "forced_bos_token_id": 10**6}
    config.pop("vocab_size", None)
    files = {"encoder_model": encoder(), "decoder_model": decoder.model(past=False)}
    generator = sonnx.Generator(write(tmp_path / "folder", files, config))
    with pytest.raises(InvalidInput, match="forced_bos_token_id must have tokens of the model, integers from 0 to") as caught:
        generator.generate("a", max_new_tokens=3, **search)
    assert caught.value.code == "SX374"


@pytest.mark.parametrize("option", ["bad_words_ids", "sequence_bias"])
def test_a_sequence_beyond_the_words_is_refused_when_it_runs(option: str, tmp_path: Path) -> None:
    value = [[5], [6, 999]] if option == "bad_words_ids" else [[[5], 1.0], [[6, 999], 1.0]]
    generator = sonnx.Generator(write(tmp_path / "folder", {"model": Decoder().model()}, generation_config={option: value}))
    with pytest.raises(InvalidInput, match=f"{option} must have tokens of the model, integers from 0 to 259, got 999"):
        generator.generate("a", max_new_tokens=3)
