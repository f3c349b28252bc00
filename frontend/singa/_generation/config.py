"""The configuration of a folder: files, names of inputs and outputs, special tokens, defaults of the search."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.io.documents import Document, read_document

GENAI, CONFIG, DEFAULTS = "genai_config.json", "config.json", "generation_config.json"
NAME = 4096
"""The maximum characters of a name or a path in a configuration."""

FOLDER = "SX374"
"""The code of an error in a folder or in its configuration."""

UNSUPPORTED = "SX210"
"""The code of a model that generation does not support."""


def unfit(text: str, hint: str = "") -> InvalidInput:
    """The error of a folder that cannot be used."""
    return InvalidInput(text, code=FOLDER, hint=hint)


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
        context: the maximum number of tokens; None if it is not known.
        vocabulary: the number of tokens that the model knows; None if it is not known.
        search: the defaults of the search.
    """

    path: Path
    decoder: Path
    search: Document
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
    if not os.path.isdir(folder):
        raise unfit(f"a folder of a model must be passed, got {str(folder)!r}, which {_what(folder)}")
    if os.path.exists(folder / GENAI):
        return _genai(folder, read_document(folder / GENAI, FOLDER))
    if os.path.exists(folder / CONFIG):
        return _optimum(folder, read_document(folder / CONFIG, FOLDER))
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
    if not os.path.isfile(path):
        raise unfit(f"{key}: the file {path} does not exist")
    return path


# --- onnxruntime-genai


def _genai(folder: Path, top: Document) -> ModelFolder:
    model = top.part("model")
    decoder = model.part("decoder")
    parts = [k for k in ("encoder", "vision", "speech", "embedding") if model.get(k)]
    parts += ["decoder.pipeline"] if decoder.get("pipeline") else []
    if parts:
        what = f"{top.where}: model.{parts[0]} describes a part of a model that `sonnx generate` does not run"
        raise UnsupportedModel(what, code=UNSUPPORTED, hint="a decoder of text in one file is supported; T5 as Optimum writes it")
    name = _path(decoder["filename"], folder)
    search = top.part("search")
    end, pad = model.maybe("eos_token_id", tokens) or (), model.maybe("pad_token_id", _token)
    return ModelFolder(
        folder,
        _file(name, f"{top.where}: {decoder.path}.filename"),
        search,
        names=_genai_names(decoder),
        shared=search.maybe("past_present_share_buffer", Document.flag) or False,
        heads=decoder.maybe("num_key_value_heads", Document.integer, 1, 1 << 16),
        size=decoder.maybe("head_size", Document.integer, 1, 1 << 16),
        end=end,
        pad=pad if pad is not None else (end or (0,))[0],
        begin=model.maybe("bos_token_id", _token),
        context=model.maybe("context_length", Document.integer, 1),
        vocabulary=model.maybe("vocab_size", Document.integer, 1),
    )


def _genai_names(decoder: Document) -> InputNames:
    inputs, outputs = decoder.part("inputs"), decoder.part("outputs")
    plain = InputNames()
    caches = []
    for kind in ("key", "value", ""):
        past, present = (f"{word}_{kind}_names" if kind else f"{word}_names" for word in ("past", "present"))
        if inputs.get(past) or outputs.get(present):
            caches.append((_template(inputs[past]), _template(outputs[present])))
    chosen = [inputs.maybe(k, Document.text, NAME) for k in ("input_ids", "attention_mask", "position_ids")]
    ids, mask, positions = (
        default if name is None else (name,)
        for name, default in zip(chosen, (plain.ids, plain.mask, plain.positions), strict=True)
    )
    return InputNames(ids, mask, positions, outputs.maybe("logits", Document.text, NAME) or plain.logits, tuple(caches))


def _template(name: Document) -> str:
    text = name.text(NAME)
    if text.count("%d") != 1 or text.count("%") != 1:
        raise name.wrong("a name with one %d, for the layer")
    return text


# --- values


def tokens(value: Document) -> tuple[int, ...]:
    """A token or a list of tokens; -1 is written for none."""
    parts = value.parts(0, 1024) if isinstance(value.value, list) else [value]
    return tuple(t for part in parts if (t := part.integer(-1)) >= 0)


def _token(value: Document) -> int | None:
    """A token, the first one of a list; None without one."""
    return next(iter(tokens(value)), None)


def _path(name: Document, folder: Path) -> Path:
    """The path of a file in a folder."""
    text = name.text(NAME)
    parts = PurePosixPath(text).parts
    if not parts or text.startswith("/") or ".." in parts or {"\\", ":", "\0"} & set(text):
        raise name.wrong("a path within the folder")
    found = folder.joinpath(*parts)
    if not Path(os.path.realpath(found.parent)).is_relative_to(os.path.realpath(folder)):  # a folder in it may be a link
        raise name.wrong("a path within the folder")
    return found


# --- Optimum


def _optimum(folder: Path, config: Document) -> ModelFolder:
    chosen = read_document(folder / DEFAULTS, FOLDER) if os.path.exists(folder / DEFAULTS) else config
    nested = config.get("text_config") or config

    def every(key: str) -> tuple[int, ...]:
        return next((tokens(found) for s in (chosen, config, nested) if (found := s.get(key))), ())

    def first(key: str) -> int | None:
        return next(iter(every(key)), None)

    def size(low: int, *keys: str) -> int | None:
        return next((v for k in keys if (v := nested.maybe(k, Document.integer, low)) is not None), None)

    heads = size(1, "num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
    width, count = size(1, "hidden_size", "n_embd", "d_model"), size(1, "num_attention_heads", "n_head", "num_heads")
    head = size(1, "head_dim", "d_kv") or (width // count if width and count else None)
    decoder, continued, encoder = _optimum_files(folder, config.maybe("is_encoder_decoder", Document.flag) or False)
    end, pad = every("eos_token_id"), first("pad_token_id")
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
        context=None if encoder else size(1, "max_position_embeddings", "n_positions", "n_ctx"),
        vocabulary=nested.maybe("vocab_size", Document.integer, 1),
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
    return next((home / n for n in names if os.path.isfile(home / n)), None)


def _one(home: Path, names: Sequence[str]) -> Path:
    found = _there(home, names)
    if found is None:
        raise unfit(f"{home} must contain {' or '.join(names)}, and has {', '.join(sorted(p.name for p in home.glob('*.onnx')))}")
    return found
