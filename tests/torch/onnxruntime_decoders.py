"""Decoders with random weights, written by onnxruntime-genai's builder without a network: fp32, fp16, int4 and int8 files."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
import torch
import transformers
from onnx import helper

os.environ["HF_HUB_OFFLINE"] = "1"
builder = importlib.import_module("onnxruntime_genai.models.builder")  # reads the variable when it is imported

VOCABULARY = 256
WINDOW = 8
"""The window of the architectures that have one."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {"head_dim": 16},
    "Phi": {"hidden_size": 128, "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "Gemma": {"head_dim": 16}, "Gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "Mistral": {"head_dim": 16, "sliding_window": WINDOW}, "Olmo": {}, "Granite": {}, "Nemotron": {"head_dim": 32}, "SmolLM3": {},
    "Lfm2": {}, "Ernie4_5": {"head_dim": 16},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
}  # fmt: skip
"""The configurations: what each architecture has besides `_SIZES`."""

_NOT_SUPPORTED = {("GptOss", "int4")}
"""The builder reads int4 experts from the original checkpoint only."""

JOBS: list[tuple[str, ...]] = [
    *((name, precision) for name in _OWN for precision in ("fp32", "int4") if (name, precision) not in _NOT_SUPPORTED),
    ("Llama", "fp16"), ("Llama", "int8"), ("Qwen2", "int8"), ("Llama", "int4", "accuracy_level=0"),
    ("Qwen2", "int4", "accuracy_level=0"), ("Gemma", "int4", "accuracy_level=0"), ("Phi", "int4", "accuracy_level=0"),
    ("Llama", "int4", "use_qdq=true"), ("Llama", "fp32", "exclude_embeds=true"), ("Llama", "fp32", "exclude_lm_head=true"),
    ("Llama", "fp32", "include_hidden_states=true"), ("Llama", "fp32", "prune_lm_head=true"),
    ("Llama", "int4", "block_size=128", "accuracy_level=0"), ("Llama", "int4", "is_symmetric=false", "accuracy_level=0"),
    ("Gemma", "int4", "op_types_to_quantize=MatMul,Gather", "accuracy_level=0"), ("Llama", "int4", "algo_config=rtn_last"),
    ("Llama", "int4", "algo_config=k_quant_mixed", "accuracy_level=0"), ("Llama", "int4", "disable_qkv_fusion=true"),
]  # fmt: skip
"""What the builder is asked for: the architecture, the precision, and options."""

HEAD = {"Phi": 32, "Nemotron": 32}
"""The sizes of heads other than 16."""


def name_of(job: tuple[str, ...]) -> str:
    """Return the name of a job's folder."""
    return "-".join(part.replace("=", "-").replace(",", "-") for part in job).lower()


def _checkpoint(name: str, folder: Path) -> Path:
    """Write a checkpoint with weights drawn from seed 0, unless it is there."""
    path = folder / f"{name.lower()}-checkpoint"
    if not path.exists():
        config = getattr(transformers, f"{name}Config")(**{**_SIZES, **_OWN[name]})
        torch.manual_seed(0)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
        words = {chr(0x4E00 + i): i for i in range(VOCABULARY)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=chr(0x4E00)))
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def write(job: tuple[str, ...], folder: Path) -> Path:
    """Run the builder and return the path of its model, with external data next to it."""
    name, precision, *options = job
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        source, to, cache = str(_checkpoint(name, folder)), folder / name_of(job), str(folder / "cache")
        parsed = builder.parse_extra_options(source, source, str(to), precision, "cpu", cache, options)
        builder.create_model(source, source, str(to), precision, "cpu", cache, **parsed)
    return to / "model.onnx"


def continued(name: str, folder: Path, tokens: list[int], count: int) -> list[int]:
    """Return the most likely tokens after a prompt, by PyTorch without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(_checkpoint(name, folder), dtype=torch.float32).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        for _ in range(count):
            last = model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
    return ids[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def searched(name: str, folder: Path, tokens: list[int], ends: list[int], **options: Any) -> list[list[int]]:
    """Return the new tokens of the sequences that transformers finds, without those that end them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(_checkpoint(name, folder), dtype=torch.float32).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends or None, ends[0] if ends else 0
    with torch.no_grad():
        found = model.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), do_sample=False, **options)
    made = []
    for row in found[:, len(tokens) :].tolist():
        end = next((i for i, t in enumerate(row) if t in ends), len(row))
        made.append(row[:end])
    return made


def inputs(model: onnx.ModelProto, *, new: int, past: int, head: int = 16) -> dict[str, np.ndarray]:
    """Draw `new` tokens (or rows of embeddings) after `past` rows of a cache with drawn values.

    A sliding cache has the rows of its window.
    """
    rng = np.random.default_rng(new + past)
    sizes = {
        "batch_size": 1,
        "sequence_length": new,
        "past_sequence_length": past,
        "past_sliding_length": WINDOW,
        "kv_cache_dim": head,
    }
    feeds = {}
    for x in model.graph.input:
        kind = x.type.tensor_type
        shape = [d.dim_value or sizes.get(d.dim_param, past + new) for d in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if np.issubdtype(dtype, np.integer):
            drawn = np.ones(shape) if "mask" in x.name else rng.integers(3, VOCABULARY, shape)
            drawn = np.broadcast_to(np.arange(past, past + new), shape) if "position" in x.name else drawn
            feeds[x.name] = np.ascontiguousarray(drawn.astype(dtype))
        else:
            feeds[x.name] = rng.standard_normal(shape).astype(dtype)
    return feeds
