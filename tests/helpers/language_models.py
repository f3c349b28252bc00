"""Tiny folders for text generation: random decoders with caches in several forms, with an encoder, or that write a fixed text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, SIZE, LAYERS, WORDS, PLACES = 2, 8, 2, 260, 512
WIDTH = HEADS * SIZE
BEGIN, END, PAD = 256, 257, 258
NEGATIVE = -1e9
WIDE = 16
"""The size of a head of GroupQueryAttention: onnxruntime accepts multiples of 16."""

Nodes = list[onnx.NodeProto]


def node(name: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(name, inputs.split(), outputs.split(), **attributes)


def constants() -> list[onnx.TensorProto]:
    scalars = {"zero": 0, "one": 1, "two": 2, "three": 3}
    lists = {"at0": [0], "at1": [1], "at12": [1, 2], "split": [0, 0, HEADS, SIZE], "flat": [0, 0, WIDTH]}
    made = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in {**scalars, **lists}.items()]
    floats = {"hidden_score": NEGATIVE, "shown_score": 0.0, "scale": SIZE**-0.5}
    made += [numpy_helper.from_array(np.array(v, np.float32), n) for n, v in floats.items()]
    return [*made, numpy_helper.from_array(np.zeros((0, HEADS, 1, SIZE), np.float32), "nothing")]


def weights(cross: bool, seed: int) -> list[onnx.TensorProto]:
    draw = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"wte": (WORDS, WIDTH), "wpe": (PLACES, WIDTH), "head": (WIDTH, WORDS)}
    for n in range(LAYERS):
        shapes |= {f"{w}{n}": (WIDTH, WIDTH) for w in ("q", "k", "v", "o", *(("cq", "ck", "cv", "co") if cross else ()))}
        shapes |= {f"up{n}": (WIDTH, 2 * WIDTH), f"down{n}": (2 * WIDTH, WIDTH)}
    values = {n: draw.standard_normal(s) / np.sqrt(s[0] if n[0] != "w" else 1) for n, s in shapes.items()}
    values |= {"gain": np.ones(WIDTH), "shift": np.zeros(WIDTH)}
    values["head"] *= 3
    return [numpy_helper.from_array(v.astype(np.float32), n) for n, v in values.items()]


def heads_of(name: str, source: str, weight: str) -> Nodes:
    return [
        node("MatMul", f"{source} {weight}", f"{name}_m"), node("Reshape", f"{name}_m split", f"{name}_r"),
        node("Transpose", f"{name}_r", name, perm=[0, 2, 1, 3]),
    ]  # fmt: skip


def attention(name: str, query: str, key: str, value: str, bias: str, weight: str) -> Nodes:
    return [
        node("Transpose", key, f"{name}_kt", perm=[0, 1, 3, 2]), node("MatMul", f"{query} {name}_kt", f"{name}_s"),
        node("Mul", f"{name}_s scale", f"{name}_scaled"), node("Add", f"{name}_scaled {bias}", f"{name}_b"),
        node("Softmax", f"{name}_b", f"{name}_p", axis=-1), node("MatMul", f"{name}_p {value}", f"{name}_y"),
        node("Transpose", f"{name}_y", f"{name}_t", perm=[0, 2, 1, 3]), node("Reshape", f"{name}_t flat", f"{name}_f"),
        node("MatMul", f"{name}_f {weight}", name),
    ]  # fmt: skip


def mask_bias(mask: str, output: str) -> Nodes:
    return [
        node("Cast", mask, f"{output}_c", to=TensorProto.BOOL), node("Unsqueeze", f"{output}_c at12", f"{output}_u"),
        node("Where", f"{output}_u shown_score hidden_score", output),
    ]  # fmt: skip


class Decoder:
    """A decoder of text as GPT-2's or, with `cross`, T5's.

    Args:
        cache: "pairs" (past_key_values.0.key, present.0.key), "joined" (past_0, present_0), or "" for none.
        positions: whether positions are an input; otherwise they are counted.
        mask: whether the mask is an input.
        cross: whether there is an encoder.
        merged: whether `use_cache_branch` selects the part that reads the caches.
        batch: the declared batch.
    """

    def __init__(
        self, cache: str = "pairs", *, positions: bool = True, mask: bool = True, cross: bool = False, merged: bool = False,
        batch: Any = "batch", seed: int = 0,
    ) -> None:  # fmt: skip
        self.cache, self.positions, self.mask, self.cross, self.merged = cache, positions, mask, cross, merged
        self.batch, self.seed = batch, seed

    def model(self, past: bool = True) -> onnx.ModelProto:
        """The file; `past`: whether it reads caches."""
        past = past and bool(self.cache)
        inputs = [self._info("input_ids", TensorProto.INT64, "now")]
        inputs += [self._info("attention_mask", TensorProto.INT64, "all")] if self.mask else []
        inputs += [self._info("position_ids", TensorProto.INT64, "now")] if self.positions else []
        inputs += [self._info("encoder_attention_mask", TensorProto.INT64, "source")] if self.cross else []
        if self.cross and not (past and not self.merged):
            inputs.append(
                helper.make_tensor_value_info("encoder_hidden_states", TensorProto.FLOAT, [self.batch, "source", WIDTH])
            )
        names = [n for k in range(LAYERS) for n in self._cache_names(k)]
        if past:
            inputs += [self._cache(p, "past_source" if "encoder" in p else "past") for p, _ in names]
        returned = [p for _, p in names if self.merged or not (past and "encoder" in p)]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [self.batch, "now", WORDS])]
        outputs += [self._cache(p, "rest" if "encoder" in p else "all") for p in returned]
        if self.merged:
            inputs.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
            rename = {o.name: f"{o.name}.b" for o in outputs}
            branches = [self._branch(p, rename) for p in (True, False)]
            nodes = [helper.make_node("If", ["use_cache_branch"], [o.name for o in outputs], then_branch=branches[0],
                                      else_branch=branches[1])]  # fmt: skip
        else:
            nodes = self._nodes(past)
        held = [*weights(self.cross, self.seed), *constants()]
        graph = helper.make_graph(nodes, "decoder", inputs, outputs, held)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        return model

    def _branch(self, past: bool, rename: dict[str, str]) -> onnx.GraphProto:
        nodes = self._nodes(past)
        made = {o for n in nodes for o in n.output}
        for n in nodes:
            for field in (n.input, n.output):
                field[:] = [rename.get(v, f"{v}.{past}" if v in made else v) for v in field]
        outputs = [onnx.ValueInfoProto(name=v) for v in rename.values()]
        for o, (name, _) in zip(outputs, rename.items(), strict=True):
            shape = [None] * (3 if name == "logits" else 4)
            o.CopyFrom(helper.make_tensor_value_info(o.name, TensorProto.FLOAT, shape))
        return helper.make_graph(nodes, "with" if past else "without", [], outputs)

    def _info(self, name: str, kind: int, length: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, [self.batch, length])

    def _cache_names(self, layer: int) -> list[tuple[str, str]]:
        if self.cache == "joined":
            return [(f"past_{layer}", f"present_{layer}")]
        if not self.cache:
            return []
        parts = ("decoder.key", "decoder.value", "encoder.key", "encoder.value") if self.cross else ("key", "value")
        return [(f"past_key_values.{layer}.{p}", f"present.{layer}.{p}") for p in parts]

    def _cache(self, name: str, length: str) -> onnx.ValueInfoProto:
        lead = [2] if self.cache == "joined" else []
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [*lead, self.batch, HEADS, length, SIZE])

    def _nodes(self, past: bool) -> Nodes:
        nodes = [node("Shape", "input_ids", "sizes"), node("Gather", "sizes one", "count")]
        if past:
            first, axis = self._cache_names(0)[0][0], "three" if self.cache == "joined" else "two"
            nodes += [node("Shape", first, "past_sizes"), node("Gather", f"past_sizes {axis}", "length")]
        else:
            nodes.append(node("Identity", "zero", "length"))
        nodes += [
            node("Add", "length count", "total"), node("Range", "length total one", "rows"),
            node("Range", "zero total one", "keys"),
            node("Unsqueeze", "rows at1", "rows1"), node("LessOrEqual", "keys rows1", "seen"),
            node("Where", "seen shown_score hidden_score", "causal"),
        ]  # fmt: skip
        if self.mask:
            nodes += [*mask_bias("attention_mask", "padding"), node("Add", "causal padding", "bias")]
        else:
            nodes.append(node("Identity", "causal", "bias"))
        places = "position_ids" if self.positions else "rows"
        nodes += [
            node("Gather", "wte input_ids", "found"),
            node("Gather", f"wpe {places}", "placed"),
            node("Add", "found placed", "x0"),
        ]
        if self.cross:
            nodes += mask_bias("encoder_attention_mask", "source_bias")
        for n in range(LAYERS):
            nodes += self._layer(n, past)
        last = f"x{LAYERS}"
        return [
            *nodes,
            node("LayerNormalization", f"{last} gain shift", "last_n", axis=-1),
            node("MatMul", "last_n head", "logits"),
        ]

    def _layer(self, n: int, past: bool) -> Nodes:
        nodes = [node("LayerNormalization", f"x{n} gain shift", f"n{n}", axis=-1)]
        for w in "qkv":
            nodes += heads_of(f"{w}h{n}", f"n{n}", f"{w}{n}")
        names = self._cache_names(n)
        if self.cache == "joined":
            now, after = names[0]
            nodes += [node("Unsqueeze", f"kh{n} at0", f"kj{n}"), node("Unsqueeze", f"vh{n} at0", f"vj{n}")]
            nodes.append(node("Concat", f"kj{n} vj{n}", f"kv{n}" if past else after, axis=0))
            nodes += [node("Concat", f"{now} kv{n}", after, axis=3)] if past else []
            nodes += [node("Gather", f"{after} {at}", f"{w}{n}_all", axis=0) for w, at in (("key", "zero"), ("value", "one"))]
        for i, w in enumerate("kv" if self.cache != "joined" else ""):
            word = f"{'key' if w == 'k' else 'value'}{n}_all"
            if self.cache:
                now, after = names[i]
                nodes.append(node("Concat", f"{now} {w}h{n}", after, axis=2) if past else node("Identity", f"{w}h{n}", after))
            nodes.append(node("Identity", after if self.cache else f"{w}h{n}", word))
        nodes += attention(f"a{n}", f"qh{n}", f"key{n}_all", f"value{n}_all", "bias", f"o{n}")
        nodes.append(node("Add", f"a{n} x{n}", f"r{n}"))
        rest = f"r{n}"
        if self.cross:
            nodes += [*heads_of(f"cqh{n}", rest, f"cq{n}"), *self._sources(n, past)]
            nodes += attention(f"c{n}", f"cqh{n}", f"ck{n}_all", f"cv{n}_all", "source_bias", f"co{n}")
            nodes.append(node("Add", f"c{n} {rest}", f"cr{n}"))
            rest = f"cr{n}"
        return [
            *nodes, node("MatMul", f"{rest} up{n}", f"u{n}"), node("Relu", f"u{n}", f"h{n}"),
            node("MatMul", f"h{n} down{n}", f"d{n}"), node("Add", f"d{n} {rest}", f"x{n + 1}"),
        ]  # fmt: skip

    def _sources(self, n: int, past: bool) -> Nodes:
        """The keys and values of the encoder: those of the past, or computed from its output."""
        nodes: Nodes = []
        for w, i in (("ck", 2), ("cv", 3)):
            now, after = self._cache_names(n)[i] if self.cache else ("", "")
            if past:
                nodes.append(node("Identity", now, f"{w}{n}_all"))
                nodes += [node("Identity", "nothing", after)] if self.merged else []
            else:
                nodes += heads_of(f"{w}{n}_all", "encoder_hidden_states", f"{w}{n}")
                nodes += [node("Identity", f"{w}{n}_all", after)] if self.cache else []
        return nodes


def grouped() -> onnx.ModelProto:
    """A decoder as onnxruntime-genai's builder writes them: GroupQueryAttention with rotary embeddings, two heads of one key."""
    width = HEADS * WIDE
    draw = np.random.default_rng(3)
    shapes = {"wte": (WORDS, width), "head": (width, WORDS)}
    for n in range(LAYERS):
        shapes |= {f"q{n}": (width, width), f"k{n}": (width, WIDE), f"v{n}": (width, WIDE), f"o{n}": (width, width)}
    angles = np.arange(PLACES)[:, None] / 10.0 ** np.arange(WIDE // 2)
    values = {n: draw.standard_normal(s) * (1 if n == "wte" else 3 / np.sqrt(s[0])) for n, s in shapes.items()}
    values |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    held = [numpy_helper.from_array(v.astype(np.float32), n) for n, v in values.items()]
    held += [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in {"one": 1, "at1": [1]}.items()]
    nodes = [
        node("ReduceSum", "attention_mask at1", "used", keepdims=1),
        node("Sub", "used one", "last"),
        node("Cast", "last", "seqlens", to=TensorProto.INT32), node("Shape", "attention_mask", "sizes"),
        node("Gather", "sizes one", "wide"), node("Cast", "wide", "total", to=TensorProto.INT32),
        node("Gather", "wte input_ids", "x0"),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "now"]),
              helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "all"])]  # fmt: skip
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "now", WORDS])]
    for n in range(LAYERS):
        past, present = ([f"{w}.{n}.{k}" for k in ("key", "value")] for w in ("past_key_values", "present"))
        inputs += [helper.make_tensor_value_info(p, TensorProto.FLOAT, ["batch", 1, "past", WIDE]) for p in past]
        outputs += [helper.make_tensor_value_info(p, TensorProto.FLOAT, ["batch", 1, "all", WIDE]) for p in present]
        nodes += [node("MatMul", f"x{n} {w}{n}", f"{w}h{n}") for w in "qkv"]
        nodes += [
            node("GroupQueryAttention", f"qh{n} kh{n} vh{n} {' '.join(past)} seqlens total cos sin", f"a{n} {' '.join(present)}",
                 domain="com.microsoft", num_heads=HEADS, kv_num_heads=1, do_rotary=1),
            node("MatMul", f"a{n} o{n}", f"p{n}"), node("Add", f"p{n} x{n}", f"x{n + 1}"),
        ]  # fmt: skip
    nodes.append(node("MatMul", f"x{LAYERS} head", "logits"))
    graph = helper.make_graph(nodes, "grouped", inputs, outputs, held)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def encoder(seed: int = 5) -> onnx.ModelProto:
    """An encoder: each position has its word, and the mean of the words that the mask shows."""
    draw = np.random.default_rng(seed)
    held = [numpy_helper.from_array(draw.standard_normal((WORDS, WIDTH)).astype(np.float32), "words")]
    held += [numpy_helper.from_array(np.array([v], np.int64), n) for n, v in (("axis", 1), ("last", 2))]
    nodes = [
        node("Gather", "words input_ids", "found"), node("Cast", "attention_mask", "m", to=TensorProto.FLOAT),
        node("Unsqueeze", "m last", "m2"), node("Mul", "found m2", "shown"), node("ReduceSum", "shown axis", "sum"),
        node("Add", "found sum", "both"), node("Tanh", "both", "last_hidden_state"),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "source"]) for n in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "source", WIDTH])]
    made = helper.make_model(helper.make_graph(nodes, "encoder", inputs, outputs, held),
                             opset_imports=[helper.make_opsetid("", 17)], ir_version=8)  # fmt: skip
    onnx.checker.check_model(made)
    return made


def script(tokens: Sequence[int]) -> onnx.ModelProto:
    """A decoder that writes these tokens, whatever the prompt of one token is, and then the token that ends a text."""
    table = np.full((PLACES, WORDS), -10, np.float32)
    table[np.arange(PLACES), [*tokens, *[END] * (PLACES - len(tokens))]] = 10
    held = [numpy_helper.from_array(table, "table")]
    held += [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in {"zero": 0, "one": 1, "at0": [0]}.items()]
    nodes = [
        node("Shape", "input_ids", "sizes"), node("Gather", "sizes one", "count"), node("Range", "zero count one", "places"),
        node("Gather", "table places", "rows"), node("Unsqueeze", "rows at0", "logits"),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "now"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "now", WORDS])]
    graph = helper.make_graph(nodes, "script", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def alphabet() -> list[str]:
    """The character by which a tokenizer of bytes writes each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(others)) for b in range(256)]


def tokenizer() -> str:
    """tokenizer.json of a tokenizer whose tokens are the 256 bytes, and three special tokens."""
    vocabulary = {c: i for i, c in enumerate(alphabet())}
    special = {"<s>": BEGIN, "</s>": END, "<pad>": PAD}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": t, **flags, "special": True} for t, i in special.items()],
        "pre_tokenizer": bytes_of, "decoder": bytes_of,
        "model": {"type": "BPE", **model, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary | special, "merges": []},
    })  # fmt: skip


SPECIAL = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
CONFIG = {"model_type": "gpt2", "vocab_size": WORDS, "n_positions": PLACES, **SPECIAL}


def write(folder: Path, models: dict[str, onnx.ModelProto], config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a folder as Optimum does; `files`: further JSON files, by their names without a suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        onnx.save(model, folder / f"{name}.onnx")
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "tokenizer.json").write_text(tokenizer())
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def genai(**changed: Any) -> dict[str, Any]:
    """The configuration of onnxruntime-genai for a folder with model.onnx."""
    names = {f"past_{k}_names": f"past_key_values.%d.{k}" for k in ("key", "value")}
    decoder = {
        "filename": "model.onnx", "head_size": SIZE, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", "position_ids": "position_ids", **names},
        "outputs": {"logits": "logits", **{f"present_{k}_names": f"present.%d.{k}" for k in ("key", "value")}},
    }  # fmt: skip
    model = {
        "type": "gpt2",
        "vocab_size": WORDS,
        "context_length": PLACES,
        "bos_token_id": BEGIN,
        "eos_token_id": [END],
        "pad_token_id": PAD,
    }
    search = {"do_sample": False, "max_length": 64, "past_present_share_buffer": False, "top_k": 50, "num_beams": 1}
    return {"model": {**model, "decoder": decoder}, "search": {**search, **changed}}
