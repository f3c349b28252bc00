"""The configuration of a folder: files, names of inputs and outputs, special tokens, defaults of the search."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from singa_backend.errors import UnsupportedModel

from .documents import LARGEST, Section, unfit

GENAI, CONFIG, DEFAULTS = "genai_config.json", "config.json", "generation_config.json"

UNSUPPORTED = "SX210"
"""The code of a model that generation does not support."""


@dataclass(frozen=True)
class InputNames:
    """The names of a decoder's inputs and outputs in a configuration; those of `DEFAULT_NAMES` otherwise.

    Attributes:
        ids: of the input of tokens.
        mask: of the input that has 1 for each token to attend to.
        positions: of the input of positions.
        logits: of the output.
        caches: pairs of names of an input and an output, in which %d stands for the layer; none: their names begin with "past".
    """

    ids: tuple[str, ...] = ("input_ids", "decoder_input_ids")
    mask: tuple[str, ...] = ("attention_mask", "decoder_attention_mask")
    positions: tuple[str, ...] = ("position_ids",)
    logits: str = "logits"
    caches: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ModelFolder:
    """A folder, after its configuration was checked.

    Attributes:
        path: the folder.
        decoder: the file of the first run.
        continued: the file of later runs; None if it is the same.
        encoder: the file of an encoder; None without one.
        names: the names of the decoder's inputs and outputs.
        shared: whether past and present may be buffers of the maximum length.
        heads: the number of heads in a cache, for files that do not declare it.
        size: the size of a head, for files that do not declare it.
        end: the tokens that end a sequence.
        pad: the token that fills a sequence that has ended.
        begin: the token of an empty prompt; None if there is none.
        start: the first token of a decoder after an encoder; None if there is none.
        forced: the token that follows `start`; None for any.
        context: the maximum number of tokens; None if it is not known.
        vocabulary: the number of tokens that the model knows; None if it is not known.
        search: the defaults of the search.
    """

    path: Path
    decoder: Path
    search: Section
    continued: Path | None = None
    encoder: Path | None = None
    names: InputNames = field(default_factory=InputNames)
    shared: bool = False
    heads: int | None = None
    size: int | None = None
    end: tuple[int, ...] = ()
    pad: int = 0
    begin: int | None = None
    start: int | None = None
    forced: int | None = None
    context: int | None = None
    vocabulary: int | None = None


def read_folder(path: str | os.PathLike[str]) -> ModelFolder:
    """Read the configuration of a folder.

    Raises:
        InvalidInput: it is not a folder, a file is missing, or a value is not what its key needs (SX374).
        UnsupportedModel: the model takes more than text (SX210).
    """
    if not isinstance(path, (str, os.PathLike)):
        raise unfit(f"a folder of a model must be passed, got a {type(path).__name__}")
    folder = Path(path)
    if not folder.is_dir():
        raise unfit(f"a folder of a model must be passed, got {str(folder)!r}, which {_what(folder)}")
    if (folder / GENAI).exists():
        return _genai(folder, Section.read(folder / GENAI))
    if (folder / CONFIG).exists():
        return _optimum(folder, Section.read(folder / CONFIG))
    raise unfit(
        f"{folder} must contain {GENAI} (of onnxruntime-genai) or {CONFIG} (of Optimum), and has neither",
        "write the folder with `python -m onnxruntime_genai.models.builder` or `optimum-cli export onnx`",
    )


def _what(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return "does not exist"
    return "is a file" if stat.S_ISREG(mode) else "is not a folder"


def _file(path: Path, key: str) -> Path:
    if not path.is_file():
        raise unfit(f"{key}: the file {path} does not exist")
    return path


# --- onnxruntime-genai


def _genai(folder: Path, top: Section) -> ModelFolder:
    model = top.section("model")
    decoder = model.section("decoder")
    parts = [k for k in ("encoder", "vision", "speech", "embedding") if model.has(k)]
    parts += ["decoder.pipeline"] if decoder.has("pipeline") else []
    if parts:
        what = f"{top.file}: model.{parts[0]} describes a part of a model that `sonnx generate` does not run"
        raise UnsupportedModel(what, code=UNSUPPORTED, hint="a decoder of text in one file is supported; T5 as Optimum writes it")
    name = decoder.path("filename", folder)
    if name is None:
        raise decoder.lacks("filename", "the name of an ONNX file")
    search = top.section("search")
    end = model.tokens("eos_token_id")
    pad = model.token("pad_token_id")
    return ModelFolder(
        folder,
        _file(name, f"{top.file}: model.decoder.filename"),
        search,
        names=_genai_names(decoder),
        shared=search.flag("past_present_share_buffer") or False,
        heads=decoder.integer("num_key_value_heads", 1, 1 << 16),
        size=decoder.integer("head_size", 1, 1 << 16),
        end=end,
        pad=pad if pad is not None else (end or (0,))[0],
        begin=model.token("bos_token_id"),
        context=model.integer("context_length", 1),
        vocabulary=model.integer("vocab_size", 1),
    )


def _genai_names(decoder: Section) -> InputNames:
    inputs, outputs = decoder.section("inputs"), decoder.section("outputs")
    plain = InputNames()
    caches = []
    for kind in ("key", "value", ""):
        past, present = (f"{word}_{kind}_names" if kind else f"{word}_names" for word in ("past", "present"))
        if inputs.has(past) != outputs.has(present):
            section, key = (outputs, present) if inputs.has(past) else (inputs, past)
            raise section.lacks(key, "a name with %d for the layer")
        if inputs.has(past):
            caches.append((_template(inputs, past), _template(outputs, present)))
    chosen = [inputs.text(k) for k in ("input_ids", "attention_mask", "position_ids")]
    ids, mask, positions = (
        default if name is None else (name,)
        for name, default in zip(chosen, (plain.ids, plain.mask, plain.positions), strict=True)
    )
    return InputNames(ids, mask, positions, outputs.text("logits") or plain.logits, tuple(caches))


def _template(section: Section, key: str) -> str:
    text = section.text(key)
    if text is None or text.count("%d") != 1 or text.count("%") != 1:
        raise section.wrong(key, "a name with one %d, for the layer", text)
    return text


# --- Optimum


def _optimum(folder: Path, config: Section) -> ModelFolder:
    chosen = Section.read(folder / DEFAULTS) if (folder / DEFAULTS).exists() else config
    nested = config.section("text_config") if config.has("text_config") else config

    def tokens(key: str) -> tuple[int, ...]:
        return next((s.tokens(key) for s in (chosen, config, nested) if s.has(key)), ())

    def first(key: str) -> int | None:
        return next(iter(tokens(key)), None)

    def size(low: int, *keys: str) -> int | None:
        return next((v for k in keys if (v := nested.integer(k, low)) is not None), None)

    heads = size(1, "num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
    width, every = size(1, "hidden_size", "n_embd", "d_model"), size(1, "num_attention_heads", "n_head", "num_heads")
    head = size(1, "head_dim", "d_kv") or (width // every if width and every else None)
    decoder, continued, encoder = _optimum_files(folder, config.flag("is_encoder_decoder") or False)
    end, pad = tokens("eos_token_id"), first("pad_token_id")
    return ModelFolder(
        folder,
        decoder,
        chosen,
        continued,
        encoder,
        heads=heads,
        size=head,
        end=end,
        pad=pad if pad is not None else (end or (0,))[0],
        begin=first("bos_token_id"),
        start=next((t for k in ("decoder_start_token_id", "bos_token_id", "pad_token_id") if (t := first(k)) is not None), None)
        if encoder
        else None,
        forced=first("forced_bos_token_id") if encoder else None,
        context=None if encoder else size(1, "max_position_embeddings", "n_positions", "n_ctx"),
        vocabulary=nested.integer("vocab_size", 1, LARGEST),
    )


def _optimum_files(folder: Path, encodes: bool) -> tuple[Path, Path | None, Path | None]:
    """The files of the first run, of later runs, and of the encoder, in the folder or in its folder `onnx`."""
    homes = [h for h in (folder, folder / "onnx") if any(h.glob("*.onnx"))]
    if not homes:
        raise unfit(f"{folder} must contain an ONNX file, as Optimum writes them: {_NAMES}")
    home = homes[0]
    encoder = _one(home, ("encoder_model.onnx",)) if encodes else None
    if merged := _there(home, ("decoder_model_merged.onnx",)):
        return merged, None, encoder
    if plain := _there(home, ("decoder_model.onnx",)):
        return plain, _there(home, ("decoder_with_past_model.onnx",)), encoder
    return _one(home, _ANY if not encodes else ("decoder_model_merged.onnx", "decoder_model.onnx")), None, encoder


_ANY = ("model.onnx", "decoder_model_merged.onnx", "decoder_model.onnx")
_NAMES = "model.onnx, decoder_model_merged.onnx, or decoder_model.onnx"


def _there(home: Path, names: Sequence[str]) -> Path | None:
    return next((home / n for n in names if (home / n).is_file()), None)


def _one(home: Path, names: Sequence[str]) -> Path:
    found = _there(home, names)
    if found is None:
        raise unfit(f"{home} must contain {' or '.join(names)}, and has {', '.join(sorted(p.name for p in home.glob('*.onnx')))}")
    return found
