"""Adapters in PEFT's form: a folder with `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from .. import dtypes
from ..errors import InvalidInput, MissingDependency, ResourceExhausted, UnsupportedModel
from ..io.archives import read_bytes
from ..io.documents import Document, read_document
from ..io.files import staged, staged_folder
from ..io.places import StrPath
from ..limits import admit, check_rank, check_rounds
from ..passes import ModelEditor
from ..passes.head import replace_head
from .adapter import Adapter, LowRank, safetensors_numpy
from .insert import within_values
from .matching import Wanted, match
from .modules import BIAS, CONVOLUTION, LINEAR, TABLE, WEIGHT, ModuleParameter, Modules
from .ties import UNTIED, Separation, without_ties

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of the folder."""

FOLDER = "SX980"
"""The code of an error in a folder."""

_BIN = "adapter_model.bin"
_PREFIX = "base_model.model."

_PLAIN = {
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type",
    "peft_version", "r", "rank_pattern", "alpha_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "use_rslora", "eva_config", "corda_config", "loftq_config", "megatron_core", "qalora_group_size",
}  # fmt: skip
"""The settings that are read, and those that have no effect on what an adapter computes."""

_SIMPLE = re.compile(r"[^*+?{(|]*")
"""A regular expression without repetitions and choices, which cannot backtrack."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""The initializations that change the weights of the base model, which then differ from those of its file."""

_KEYS = (
    ("matrix", re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")),
    ("table", re.compile(r"(?P<path>.+)\.lora_embedding_(?P<part>[AB])(?:\.default)?")),
    ("refused", re.compile(r"(?P<path>.+)\.lora_(?P<part>.+)")),
    ("value", re.compile(r"(?P<path>.+?)\.(?:base_layer\.|modules_to_save\.(?:default\.)?)?(?P<part>[^.]+)")),
)


@dataclass
class _Content:
    """The tensors of a folder by the paths of modules."""

    pairs: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    values: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)


def read_peft(path: StrPath, model: ModelProto, *, folder: Path | None = None) -> Adapter:
    """Read an adapter of PEFT (LoRA) for a model that was exported from the same network.

    Args:
        path: the folder that `save_pretrained` of PEFT wrote.
        model: the model; external data need not be loaded.
        folder: the folder of the model's external data; None if it has none.

    Returns:
        The adapter, whose names are those of the tensors of the model; float32.  `settings["modules"]` has the path of each
        module by the name of the tensor, so that the adapter can be written to such a folder again.

    Raises:
        InvalidInput: a file is missing, damaged, or has a setting that is not supported, such as DoRA (SX980); or a module has
            no counterpart in the model, or several, or one of another shape (SX981).
        MissingDependency: the package safetensors is not installed (SX700).
    """
    home = Path(path)
    config = _config(home)
    content = _content(home, read_safetensors(_weights(home)))
    modules = Modules.of(model, folder)
    wanted = [Wanted(path, WEIGHT, TABLE if path in content.tables else _kind(pair["A"])) for path, pair in content.pairs.items()]
    wanted += [Wanted(path, name, "") for path, name in content.values]
    found = match(modules, wanted, str(home))
    patterns = len(config["alpha_pattern"])
    if patterns:  # a search costs less than the compilation of an expression
        check_rounds(patterns * (len(content.pairs) + 100))
    changes: dict[str, LowRank] = {}
    names = Separation(modules, ModelEditor(model, folder).fresh)
    for w in wanted[: len(content.pairs)]:
        pair, p = content.pairs[w.path], found[w]
        _check_shapes(w.path, pair, p)
        change = LowRank(pair["A"], pair["B"], _scale(config, w.path, len(pair["A"])))
        name = names.name(p)
        changes[name] = change if p.rows is None else _in_rows(change, p, modules, changes.get(name))
    values = names.values(
        (found[w], _value(modules, w, found[w], content.values[w.path, w.name])) for w in wanted[len(content.pairs) :]
    )
    model = without_ties(model, {UNTIED: names.ties}, folder)
    resized = {n: v.shape for n, v in values.items() if v.shape != modules.shape(names.ties.get(n, (n,))[0])}
    settings = {
        "head": _head(model, folder, resized) or list(resized) or None,
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "dropout": config["lora_dropout"],
        "bias": config["bias"],
        "rslora": config["use_rslora"],
        "fan_in_fan_out": config["fan_in_fan_out"],
        "modules": {names.current(found[w]): [w.path, w.name] for w in wanted if found[w].rows is None},
        **({UNTIED: names.ties} if names.ties else {}),
    }
    return Adapter(changes, values, "", settings)


# --- the configuration


def _config(home: Path) -> dict[str, Any]:
    """The settings of a folder, checked; absent ones have PEFT's defaults."""
    if not os.path.isdir(home):
        raise _unfit(
            f"{home} must be a folder of PEFT's save_pretrained, and {'is a file' if os.path.exists(home) else 'does not exist'}"
        )
    if not os.path.isfile(home / CONFIG):
        raise _unfit(f"{home} must contain {CONFIG}", "PEFT's save_pretrained writes it")
    document = read_document(
        home / CONFIG, FOLDER, "PEFT's save_pretrained writes it; an adapter of another kind must be merged in PEFT"
    )
    document["peft_type"].one_of(["LORA"])
    config = document.mapping()
    given = {k: v for k, v in config.items() if v not in (None, False, [], {}, "")}
    kind = given.get("init_lora_weights", True)
    if isinstance(kind, str) and kind.startswith(_CHANGES_BASE):
        what = f"init_lora_weights={kind!r} changed the weights of the base model"
        raise _unfit(f"{home / CONFIG}: {what}", "save it in PEFT with path_initial_model_for_weight_conversion")
    others = sorted(set(given) - _PLAIN)
    if others:
        what = ", ".join(f"{k}={_short(given[k])}" for k in others)
        raise _unfit(f"{home / CONFIG} has settings that are not supported: {what}", "merge the adapter in PEFT, and export")

    def setting(key: str, read: Callable[..., Any], default: Any, *bounds: Any) -> Any:
        value = document.maybe(key, read, *bounds)
        return default if value is None else value

    return {
        "r": setting("r", Document.integer, 8, 1),
        "lora_alpha": setting("lora_alpha", Document.number, 8, -math.inf),
        "lora_dropout": setting("lora_dropout", Document.number, 0.0, 0, 1),
        "bias": setting("bias", Document.one_of, "none", ("none", "all", "lora_only")),
        "use_rslora": setting("use_rslora", Document.flag, False),
        "fan_in_fan_out": setting("fan_in_fan_out", Document.flag, False),
        "alpha_pattern": {k: v.number(-math.inf) for k, v in document.part("alpha_pattern").items()},
        "rank_pattern": {k: v.integer(1) for k, v in document.part("rank_pattern").items()},
    }


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """The factor of a module's product; a pattern is a regular expression for the end of the path, as in PEFT."""
    alpha = next((a for key, a in config["alpha_pattern"].items() if _ending(key).match(path)), config["lora_alpha"])
    return float(alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank)


@functools.lru_cache(1 << 14)
def _ending(pattern: str) -> Any:
    """The expression that matches a path whose end has a pattern; one that may backtrack is matched by RE2 in linear time."""
    library: Any = re
    options: Any = 0
    if not _SIMPLE.fullmatch(pattern):
        try:
            import re2
        except ImportError:
            what = f"alpha_pattern has {_short(pattern)}, which the package google-re2 matches"
            raise MissingDependency(what, hint="pip install 'sonnx[lora]'") from None
        library, options = re2, re2.Options()
        options.log_errors = False
    try:
        return library.compile(rf"(.*\.)?({pattern})$", options)
    except library.error as error:
        what = f"alpha_pattern must hold regular expressions of RE2, got {_short(pattern)}: {str(error)[:200]}"
        raise _unfit(what) from None


# --- the tensors


def _weights(home: Path) -> Path:
    if os.path.isfile(home / WEIGHTS):
        return home / WEIGHTS
    if os.path.isfile(home / _BIN):
        hint = "load it with PEFT, and save_pretrained(folder, safe_serialization=True)"
        raise _unfit(f"{home} holds its tensors in {_BIN}, a pickle, which is not read", hint)
    raise _unfit(f"{home} must contain {WEIGHTS}")


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a file of safetensors by name; floats of 16 bits become float32.

    Args:
        path: the path of the file.

    Returns:
        The tensors.

    Raises:
        InvalidInput: the file is damaged, or a tensor is not of floats (SX980).
        MissingDependency: the package safetensors is not installed (SX700).
    """
    safetensors_numpy()  # raises without the package
    import safetensors as library

    kinds: dict[str, np.dtype[Any]] = {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": dtypes.numpy_dtype(16),
    }
    read: Any = library
    try:
        entries = read.deserialize(read_bytes(path, FOLDER))
    except library.SafetensorError as error:
        raise _unfit(f"{path} is damaged: {error}") from None
    found = {}
    for name, entry in sorted(entries, key=lambda e: e[0]):
        if entry["dtype"] not in kinds:
            raise _unfit(f"{path}: tensor {name!r} must be of floats, got {entry['dtype']}")
        check_rank(len(entry["shape"]))
        array = np.frombuffer(entry["data"], kinds[entry["dtype"]]).reshape(entry["shape"])
        found[name] = array.copy() if array.itemsize > 2 else array.astype(np.float32)
    return found


def _content(home: Path, tensors: Mapping[str, np.ndarray]) -> _Content:
    """Sort the tensors by what their names specify."""
    made = _Content()
    for name, array in tensors.items():
        if ".original_module." in name:  # the base's, which PEFT writes with its biases
            continue
        kind, path, part = _parsed(name.removeprefix(_PREFIX))
        if kind == "refused":
            what = "DoRA" if part.startswith("magnitude") else "a bias of B" if part.startswith("B") else f"lora_{part}"
            raise _unfit(f"{home / WEIGHTS}: tensor {name!r} ({what}) is not supported", "merge the adapter in PEFT, and export")
        if kind == "value":
            made.values[path, part] = array
            continue
        made.pairs.setdefault(path, {})[part] = array
        if kind == "table":
            made.tables.add(path)
    for path, pair in made.pairs.items():
        if set(pair) != {"A", "B"}:
            raise _unfit(f"{home / WEIGHTS}: module {path!r} must have A and B, got only {next(iter(pair))}")
    if not made.pairs and not made.values:
        raise _unfit(f"{home / WEIGHTS} has no tensors")
    return made


def _parsed(name: str) -> tuple[str, str, str]:
    for kind, pattern in _KEYS:
        if found := pattern.fullmatch(name):
            return kind, found["path"], found["part"]
    raise _unfit(f"a tensor must be named by its module and parameter, got {name!r}")


def _kind(a: np.ndarray) -> str:
    return LINEAR if a.ndim == 2 else CONVOLUTION


def _check_shapes(path: str, pair: Mapping[str, np.ndarray], p: ModuleParameter) -> None:
    """Check A and B against the weight; raises InvalidInput (SX981)."""
    a, b = pair["A"], pair["B"]
    fits = a.ndim >= 2 and b.ndim == a.ndim and a.shape[0] > 0 and a.shape[0] == b.shape[1] * p.group
    if not fits or (a.shape[1], b.shape[0]) != (p.inputs, p.outputs):
        what = f"module {path!r}: A {a.shape} and B {b.shape} do not fit the weight {p.tensor!r}, which has {p.inputs} inputs"
        raise InvalidInput(f"{what} and {p.outputs} outputs", code="SX981", hint="pass the model that the adapter was trained on")


def _in_rows(change: LowRank, p: ModuleParameter, modules: Modules, others: LowRank | None) -> LowRank:
    """The change of a packed product by that of one of its modules, and of those that were read before."""
    whole = next(q for entries in modules.parameters.values() for q in entries if q.tensor == p.tensor and q.rows is None)
    assert p.rows is not None
    admit((whole.outputs, change.b.shape[1]), change.b.dtype)
    b = np.zeros((whole.outputs, change.b.shape[1]), change.b.dtype)
    if others is not None and not others.scale:
        others = LowRank(others.a, np.zeros_like(others.b), 1.0)
    b[slice(*p.rows)] = change.b if others is None else change.b * np.float32(change.scale / others.scale)
    if others is None:
        return LowRank(change.a, b, change.scale)
    return LowRank(np.concatenate([others.a, change.a]), np.concatenate([others.b, b], axis=1), others.scale)


def _value(modules: Modules, w: Wanted, p: ModuleParameter, array: np.ndarray) -> np.ndarray:
    """A value in the layout of the file; raises InvalidInput (SX981) if it is not one for this tensor."""
    array = np.ascontiguousarray(array.T) if _turned(p, w.path, w.name) else array
    known = modules.shape(p.tensor)
    same = known == array.shape
    if (
        not p.dense or known is None or not (same or (len(known) == array.ndim and w.name in (WEIGHT, BIAS)))
    ):  # a head may have another size
        what = f"module {w.path!r}: {w.name} of shape {array.shape} cannot replace the tensor {p.tensor!r} of shape {known}"
        raise InvalidInput(what, code="SX981")
    return array


def _head(model: ModelProto, folder: Path | None, resized: Mapping[str, tuple[int, ...]]) -> int:
    """The number of outputs with which these shapes are those of a new last layer; 0 if there is none."""
    for outputs in sorted({n for shape in resized.values() for n in shape if n}):
        copied = ModelProto()
        copied.CopyFrom(model)
        try:
            with within_values(resized.values()):
                head = replace_head(copied, outputs, folder=folder)
        except UnsupportedModel:
            return 0
        except ResourceExhausted:  # the adapter has no weight of this size
            continue
        made = {t.name: tuple(t.dims) for t in copied.graph.initializer if t.name in head.parameters}
        if made.items() >= resized.items():
            return outputs
    return 0


def _turned(p: ModuleParameter | None, path: str, name: str) -> bool:
    """Whether the file holds the transpose: a tensor with the name of the parameter is as it is in the framework."""
    return p is not None and p.flipped and p.tensor.split(".")[-2:] != [path.rpartition(".")[2], name]


# --- writing


def write_peft(adapter: Adapter, path: StrPath, model: ModelProto, *, folder: Path | None = None) -> None:
    """Write an adapter as a folder that `PeftModel.from_pretrained` of PEFT loads.

    Args:
        adapter: the adapter.
        path: the folder; it must not hold an adapter.
        model: the model of the adapter, whose names of nodes or tensors contain the paths of the modules.
        folder: the folder of the model's external data; None if it has none.

    Raises:
        InvalidInput: a tensor of the adapter does not belong to a module that PEFT can adapt (SX981); or the folder holds an
            adapter, or cannot be written (SX351).
        MissingDependency: the package safetensors is not installed (SX700).
    """
    save = safetensors_numpy().save
    home = Path(path)
    if os.path.exists(home) and (not os.path.isdir(home) or any(os.path.lexists(home / n) for n in (CONFIG, WEIGHTS))):
        what = "holds an adapter" if os.path.isdir(home) else "is a file"
        raise InvalidInput(f"{home} cannot be written: it {what}", code="SX351", hint="pass a new folder")
    config, made = _peft_form(adapter, Modules.of(without_ties(model, adapter.settings, folder), folder))
    texts = {CONFIG: json.dumps(config, indent=2, sort_keys=True) + "\n"}
    data = save({n: np.ascontiguousarray(x) for n, x in made.items()}, {"format": "pt"})
    if os.path.exists(home):
        with staged(home / CONFIG) as stage:
            stage.write(WEIGHTS, data)
            stage.write(CONFIG, texts[CONFIG])
    else:
        with staged_folder(home) as place:
            (place / WEIGHTS).write_bytes(data)
            (place / CONFIG).write_text(texts[CONFIG], encoding="utf-8")


def _peft_form(adapter: Adapter, modules: Modules) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The settings and tensors of a folder."""
    settings, known = adapter.settings, dict(adapter.settings.get("modules") or {})
    made: dict[str, np.ndarray] = {}
    scales: dict[str, tuple[int, float]] = {}
    for tensor, change in adapter.changes.items():
        every = _users(modules, *_place(modules, known, tensor))
        for path, p in every:
            table = p is not None and p.kind == TABLE
            a, b = _whole(change, p), change.b
            if table and every[0][1] is not None and every[0][1].kind != TABLE:  # the rows of a table are outputs of a layer
                a, b = b.T, a.T
            for part, array in (("A", a), ("B", b)):
                made[f"{_PREFIX}{path}.lora_{'embedding_' if table else ''}{part}{'' if table else '.weight'}"] = array
            scales[path] = (int(change.a.shape[0]), float(change.scale))
    values: dict[str, dict[str, np.ndarray]] = {}
    homes: dict[str, str] = {}
    for tensor, array in adapter.values.items():
        first, name, parameter = _named(modules, known, tensor)
        for path, p in _users(modules, first, parameter) if name == WEIGHT else [(first, parameter)]:
            homes[path] = p.path if p is not None else path
            values.setdefault(path, {})[name] = array.T if _turned(p, path, name) else array
    saved = [path for path, of in values.items() if path not in scales and set(of) != {BIAS}]
    for path in saved:
        for name in (WEIGHT, BIAS):
            for p in modules.parameters.get((homes[path], name), ())[:1]:
                if name not in values[path] and p.dense:
                    old = modules.array(p.tensor)
                    values[path][name] = old.T if _turned(p, path, name) else old
    for path, of in values.items():
        layer = "base_layer." if path in scales else ""
        made |= {f"{_PREFIX}{path}.{layer}{name}": array for name, array in of.items()}
    biases = [path for path, of in values.items() if path not in saved and BIAS in of]
    bias = "none" if not biases else "lora_only" if all(p in scales for p in biases) else "all"
    return _settings(settings, scales, saved, bias, modules.paths()), made


def _whole(change: LowRank, p: ModuleParameter | None) -> np.ndarray:
    """A as PEFT has it: of all inputs; of a convolution with groups it has zeros between the groups."""
    a = change.a
    if p is None or p.group == 1 or a.shape[1] == p.inputs:
        return a
    each, inputs = len(a) // p.group, a.shape[1]
    admit((len(a), p.inputs, *a.shape[2:]), a.dtype)
    made = np.zeros((len(a), p.inputs, *a.shape[2:]), a.dtype)
    for g in range(p.group):
        made[g * each : (g + 1) * each, g * inputs : (g + 1) * inputs] = a[g * each : (g + 1) * each]
    return made


def _place(modules: Modules, known: Mapping[str, Any], tensor: str) -> tuple[str, ModuleParameter | None]:
    path, name, p = _named(modules, known, tensor)
    if any(q.rows is not None and q.tensor == tensor for entries in modules.parameters.values() for q in entries):
        what = f"tensor {tensor!r} packs several modules of the network into one product, which PEFT's form does not have"
        raise InvalidInput(what, code="SX981", hint="write .safetensors or .onnx_adapter")
    if name != WEIGHT or (p is not None and p.kind not in (LINEAR, CONVOLUTION, TABLE)):
        raise InvalidInput(f"tensor {tensor!r} is not the weight of a module that PEFT adapts: {path}.{name}", code="SX981")
    return path, p


def _users(modules: Modules, path: str, p: ModuleParameter | None) -> list[tuple[str, ModuleParameter | None]]:
    """All modules that use the weight of a module, with the beginning that its path has; the first has the layout of a change."""
    every = [] if p is None else modules.users(p.tensor)
    if len(every) < 2:
        return [(path, p)]
    mine = next((q.path for q in every if f".{q.path}".endswith(f".{path}") or f".{path}".endswith(f".{q.path}")), path)
    old = mine.removesuffix(path) if mine.endswith(path) else ""
    new = path.removesuffix(mine) if path.endswith(mine) else ""
    return [(new + q.path.removeprefix(old), q) for q in every]


def _named(modules: Modules, known: Mapping[str, Any], tensor: str) -> tuple[str, str, ModuleParameter | None]:
    """The module and the parameter that a tensor is."""
    found = modules.path_of(tensor)
    if tensor in known:
        path, name = known[tensor]
        return str(path), str(name), found[2] if found else None
    if found is None:
        what = f"tensor {tensor!r} has no module: neither its name nor the names of its nodes contain a path"
        raise InvalidInput(what, code="SX981", hint="export the network again with torch.onnx.export, which writes the paths")
    return found


def _settings(
    settings: Mapping[str, Any], scales: Mapping[str, tuple[int, float]], saved: list[str], bias: str, paths: Iterable[str]
) -> dict[str, Any]:
    """PEFT's settings for these ranks and factors."""
    rslora = bool(settings.get("rslora", False))
    alphas = {path: scale * (math.sqrt(rank) if rslora else rank) for path, (rank, scale) in scales.items()}
    rank = Counter(r for r, _ in scales.values()).most_common(1)[0][0] if scales else 8
    alpha = Counter(round(a, 9) for a in alphas.values()).most_common(1)[0][0] if alphas else rank
    targets, others = list(scales), set(paths) - set(scales)
    unclear = any(other.endswith(f".{t}") for t in targets for other in others)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": float(settings.get("dropout") or 0.0),
        "rank_pattern": {_exact(p): r for p, (r, _) in scales.items() if r != rank},
        "alpha_pattern": {_exact(p): _number(a) for p, a in alphas.items() if round(a, 9) != alpha},
        "use_rslora": rslora,
        "fan_in_fan_out": bool(settings.get("fan_in_fan_out", False)),
        "bias": bias,
        "target_modules": "|".join(map(re.escape, targets)) if unclear else targets,
        "modules_to_save": saved or None,
        "init_lora_weights": True,
    }


def _exact(path: str) -> str:
    """A pattern that matches a path, and no other that ends with it."""
    return f"^{re.escape(path)}"


def _number(x: float) -> int | float:
    return int(x) if float(x).is_integer() else float(x)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _unfit(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code=FOLDER, hint=hint)
