"""Recipes of searches for tokens, with small decoders: sums of table rows, caches that grow, and logits from a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

from .....backend import prepare
from .....dtypes import onnx_code
from .....proto.schemas import MICROSOFT
from ...strategies import Draw, Skip
from ..registry import recipe

node, info = helper.make_node, helper.make_tensor_value_info
I32, F32 = TensorProto.INT32, TensorProto.FLOAT
LENGTH = 24
"""The length of the longest sequences, the prompt included."""


def gpt2(rng: np.random.Generator, size: int, heads: int, width: int, layers: int, name: str = "decoder") -> GraphProto:
    """A decoder of model_type 0: each layer adds the tanh of the sum of the cached keys that the mask leaves."""
    hidden = heads * width
    values = {
        "table": rng.standard_normal((size, hidden)).astype(np.float32),
        "places": rng.standard_normal((LENGTH, hidden)).astype(np.float32),
        "out": (rng.standard_normal((hidden, size)) * 1.5).astype(np.float32),
        "split": np.array([0, 0, heads, width]), "merge": np.array([0, 0, hidden]), "first": np.array(0),
        "front": np.array([0]), "tokens": np.array([2]), "around": np.array([1, 3]),
    }  # fmt: skip
    nodes = [
        node("Gather", ["table", "input_ids"], ["token"]), node("Gather", ["places", "position_ids"], ["place"]),
        node("Add", ["token", "place"], ["h0"]), node("Cast", ["attention_mask"], ["floats"], to=F32),
        node("Unsqueeze", ["floats", "around"], ["kept"]),
    ]  # fmt: skip
    for i in range(layers):
        nodes += [
            node("Reshape", [f"h{i}", "split"], [f"s{i}"]), node("Transpose", [f"s{i}"], [f"k{i}"], perm=[0, 2, 1, 3]),
            node("Neg", [f"k{i}"], [f"v{i}"]), node("Unsqueeze", [f"k{i}", "front"], [f"k1{i}"]),
            node("Unsqueeze", [f"v{i}", "front"], [f"v1{i}"]), node("Concat", [f"k1{i}", f"v1{i}"], [f"kv{i}"], axis=0),
            node("Concat", [f"past_{i}", f"kv{i}"], [f"present_{i}"], axis=3),
            node("Gather", [f"present_{i}", "first"], [f"keys{i}"], axis=0), node("Mul", [f"keys{i}", "kept"], [f"some{i}"]),
            *_summed(f"some{i}", f"h{i}", f"h{i + 1}"),
        ]  # fmt: skip
    nodes.append(node("MatMul", [f"h{layers}", "out"], ["logits"]))
    inputs = [info("input_ids", I32, ["b", "s"]), info("position_ids", I32, ["b", "s"]), info("attention_mask", I32, ["b", "t"])]
    inputs += [info(f"past_{i}", F32, [2, "b", heads, "p", width]) for i in range(layers)]
    outputs = [info("logits", F32, ["b", "s", size])]
    outputs += [info(f"present_{i}", F32, [2, "b", heads, "t", width]) for i in range(layers)]
    return helper.make_graph(nodes, name, inputs, outputs, [numpy_helper.from_array(v, k) for k, v in values.items()])


def _summed(keys: str, x: str, y: str) -> list[Any]:
    """Nodes for y = x + tanh(sum of the keys over the tokens)."""
    return [
        node("ReduceSum", [keys, "tokens"], [f"{y}_sum"], keepdims=1),
        node("Transpose", [f"{y}_sum"], [f"{y}_back"], perm=[0, 2, 1, 3]), node("Reshape", [f"{y}_back", "merge"], [f"{y}_all"]),
        node("Tanh", [f"{y}_all"], [f"{y}_tanh"]), node("Add", [x, f"{y}_tanh"], [y]),
    ]  # fmt: skip


def _split(x: str, y: str) -> list[Any]:
    """Nodes for the heads of x: (sequences, heads, tokens, size)."""
    return [node("Reshape", [x, "split"], [f"{y}_parts"]), node("Transpose", [f"{y}_parts"], [y], perm=[0, 2, 1, 3])]


def _masked(keys: str, y: str, mask: bool) -> list[Any]:
    """Nodes for the keys of the encoder's tokens that its mask leaves."""
    if not mask:
        return [node("Identity", [keys], [y])]
    return [
        node("Cast", ["encoder_attention_mask"], [f"{y}_mask"], to=F32),
        node("Unsqueeze", [f"{y}_mask", "around"], [f"{y}_kept"]),
        node("Mul", [keys, f"{y}_kept"], [y]),
    ]  # fmt: skip


def with_encoder(
    rng: np.random.Generator, size: int, heads: int, width: int, whole: bool, speech: int = 0, tokens: int | str = 1,
    past: str = "past",
) -> tuple[GraphProto, GraphProto]:  # fmt: skip
    """An encoder and a decoder of model_type 1, or of model_type 2 with `speech` features of each frame.

    whole: the encoder runs the first tokens of the decoder too.
    tokens: the declared number of tokens of a run of the decoder; all tokens of a sequence unless it is 1.
    past: the beginning of the names of caches.
    """
    hidden, mask = heads * width, not speech
    shared = {"split": np.array([0, 0, heads, width]), "merge": np.array([0, 0, hidden]),
              "tokens": np.array([2]), "around": np.array([1, 3])}  # fmt: skip
    shared |= {"table": rng.standard_normal((size, hidden)).astype(np.float32),
               "out": rng.standard_normal((hidden, size)).astype(np.float32)}  # fmt: skip
    own = {"mix": rng.standard_normal((hidden, hidden)).astype(np.float32)}
    ids = [info("encoder_input_ids", I32, ["b", "e"]), info("encoder_attention_mask", I32, ["b", "e"])]
    nodes = [node("Gather", ["table", "encoder_input_ids"], ["source"])]
    if speech:
        own["features"] = rng.standard_normal((speech, hidden)).astype(np.float32)
        ids = [info("encoder_input_ids", F32, ["b", speech, "e"])]
        nodes = [node("Transpose", ["encoder_input_ids"], ["frames"], perm=[0, 2, 1]),
                 node("MatMul", ["frames", "features"], ["source"])]  # fmt: skip
    cross = [info(f"present_{k}_cross_0", F32, ["b", heads, "e", width]) for k in ("key", "value")]
    nodes += [node("MatMul", ["source", "mix"], ["mixed"]), *_split("mixed", cross[0].name),
              node("Neg", [cross[0].name], [cross[1].name])]  # fmt: skip
    new = [info(f"present_{k}_self_0", F32, ["b", heads, "q", width]) for k in ("key", "value")]
    logits = info("logits", F32, ["b", "s", size])
    attend = [*_summed(new[0].name, "token", "h1"), *_masked("cross", "heard", mask), *_summed("heard", "h1", "h2"),
              node("MatMul", ["h2", "out"], ["logits"])]  # fmt: skip
    outputs = cross
    if whole:
        ids.append(info("decoder_input_ids", I32, ["b", "s"]))
        nodes += [node("Gather", ["table", "decoder_input_ids"], ["token"]), *_split("token", new[0].name),
                  node("Neg", [new[0].name], [new[1].name]), node("Identity", [cross[0].name], ["cross"]), *attend,
                  node("Identity", ["source"], ["encoder_hidden_states"])]  # fmt: skip
        outputs = [logits, info("encoder_hidden_states", F32, ["b", "e", hidden]), *new, *cross]
    values = [numpy_helper.from_array(v, k) for k, v in (shared | own).items()]
    encoder = helper.make_graph(nodes, "encoder", ids, outputs, values)
    pasts = [info(f"{past}_{k}_self_0", F32, ["b", heads, "p", width]) for k in ("key", "value")]
    inputs = [info("input_ids", I32, ["b", tokens]), *([ids[1]] if mask else []), *pasts]
    inputs += [info(f"{past}_{k}_cross_0", F32, ["b", heads, "e", width]) for k in ("key", "value")]
    nodes = [node("Gather", ["table", "input_ids"], ["token"]), *_split("token", "key"), node("Neg", ["key"], ["value"])]
    nodes += [node("Concat", [p.name, n], [m.name], axis=2) for p, n, m in zip(pasts, ("key", "value"), new, strict=True)]
    nodes += [node("Identity", [f"{past}_key_cross_0"], ["cross"]), *attend]
    values = [numpy_helper.from_array(v, k) for k, v in shared.items()]
    return encoder, helper.make_graph(nodes, "decoder", inputs, [logits, *new], values)


def _prompt(d: Draw, size: int, pad: int) -> np.ndarray:
    """Tokens, some sequences with padding in front."""
    ids = d.rng.integers(0, size, (d.whole(1, 3), d.whole(1, 4))).astype(np.int32)
    for row in ids:
        row[: d.whole(0, ids.shape[1] - 1)] = pad if d.chance(0.3) else row[0]
    return ids


def _mask(d: Draw, shape: tuple[int, ...], p: float = 0.7) -> np.ndarray:
    mask = (d.rng.random(shape) < p).astype(np.int32)
    mask[..., d.whole(0, shape[-1] - 1)] = 1
    return mask


def _decoders(d: Draw, size: int) -> None:
    heads, width, layers = d.whole(1, 3), d.whole(1, 4), d.whole(1, 2)
    d.attributes["decoder"] = gpt2(d.rng, size, heads, width, layers)
    if d.chance(0.3):
        d.attributes["init_decoder"] = gpt2(d.rng, size, heads, width, layers, "init")
    if d.chance(0.3):
        d.attributes["vocab_size"] = size - d.whole(1, 3) * d.chance(0.15)


def _searched(d: Draw) -> tuple[int, np.ndarray]:
    """Draw what GreedySearch and Sampling share; return the number of tokens and the prompt."""
    size = d.whole(5, 12)
    _decoders(d, size)
    known = d.attributes.get("vocab_size", size)
    pad = d.whole(0, known - 1)
    d.attributes["pad_token_id"] = pad
    d.attributes["eos_token_id"] = d.pick([-1, d.whole(0, known - 1)])
    d.attr("no_repeat_ngram_size", [1, 2, 3], 0)
    ids = _prompt(d, known, pad)
    most = ids.shape[1] + d.whole(1, 9 if d.attributes.get("no_repeat_ngram_size") != 1 else known)
    d.put(ids, d.ints([most], np.int32))
    d.put(d.ints([d.whole(0, most)], np.int32) if d.chance() else None)
    d.put(np.array([d.pick([0.5, 1.0, 1.3, 2.0])], np.float32) if d.chance() else None)
    some = d.attributes.get("no_repeat_ngram_size") != 1  # else no token may be left
    d.put(_mask(d, (known,)) if some and d.chance(0.4) else None)
    d.put(_mask(d, (len(ids), known)) if some and d.chance(0.4) else None)
    d.put(_mask(d, ids.shape) if d.chance(0.4) else None)
    return known, ids


def _specified(d: Draw) -> None:
    """Choose a length at which a sequence goes on: onnxruntime does not write the places after the end of all of them."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(d.inputs)]
    given = {n: x for n, x in zip(names, d.inputs, strict=True) if n}
    infos = [info(n, onnx_code(x.dtype), x.shape) for n, x in given.items()]
    one = node(d.schema.name, names, ["y"], domain=MICROSOFT, **d.attributes)
    graph = helper.make_graph([one], "search", infos, [info("y", I32, None)])
    imports = [helper.make_opsetid("", 13), helper.make_opsetid(MICROSOFT, 1)]
    found = np.asarray(prepare(helper.make_model(graph, opset_imports=imports, ir_version=8)).run(list(given.values()))[0])
    start, pad = d.inputs[0].shape[1], d.attributes["pad_token_id"]
    written = start + np.flatnonzero((found[:, start:] != pad).any(axis=0)) + 1
    d.inputs[1] = d.ints([min(max(written, default=start) + 1, found.shape[1])], np.int32)


@recipe("GreedySearch", MICROSOFT)
def greedy_search(d: Draw) -> None:
    _searched(d)
    _specified(d)


@recipe("Sampling", MICROSOFT)
def sampling(d: Draw) -> None:
    known, ids = _searched(d)
    d.put(_mask(d, (len(ids), known)) if d.chance(0.15) else None, d.ints([d.whole(0, 99)], np.int32))
    d.attributes["top_p"] = d.real(0.01, 1.0)  # 0 leaves the token whose sum rounding lifts above 1
    d.attr("temperature", [0.5, 0.7, 2.0], 1.0)
    d.attr("presence_penalty", [0.5, 3.0], 0.0)
    d.attr("min_tokens_to_keep", [1, min(2, known - 1)], 0)
    d.attr("custom", [0, 1], 0)
    d.attr("filter_value", [-1e20, -1e4], None)
    _specified(d)


@recipe("BeamSearch WhisperBeamSearch", MICROSOFT)
def beam_search(d: Draw) -> None:
    whisper = d.schema.name != "BeamSearch"
    if d.dtype("T") != np.float32 or ((whisper or d.dtype("F") != np.int32) and d.dtype("F") != np.float32):
        raise Skip
    kind = 2 if whisper or d.dtype("F") == np.float32 else d.pick([0, 0, 1])
    size, beams = d.whole(10, 14), d.whole(1, 3)
    if kind:
        whole = kind == 2 or d.chance()
        speech, past = d.whole(1, 3) if kind == 2 else 0, "cache" if d.chance(0.2) else "past"
        graphs = with_encoder(d.rng, size, d.whole(1, 3), d.whole(1, 4), whole, speech, past=past)
        d.attributes |= {"encoder": graphs[0], "decoder": graphs[1], "decoder_start_token_id": d.whole(0, size - 1)}
    else:
        _decoders(d, size)
    known = d.attributes.get("vocab_size", size)
    pad = d.whole(0, known - 1)
    ids = _prompt(d, known, pad)
    begin = d.rng.integers(0, known, (len(ids), d.whole(1, 3))).astype(np.int32)
    start = {0: ids.shape[1], 1: 1, 2: begin.shape[1]}[kind]
    most = start + d.whole(2 if kind == 1 else 1, 8)  # onnxruntime's results of one step vary between runs
    d.put(d.array(np.float32, (len(ids), _features(graphs[0]), d.whole(1, 4)), "tame") if kind == 2 else ids)
    d.put(d.ints([most], np.int32), d.ints([d.whole(0, most)], np.int32), d.ints([beams], np.int32))
    d.put(d.ints([d.whole(1, beams)], np.int32))
    eos = d.pick([-1, d.whole(0, known - 1), d.whole(0, known - 1)])
    d.attributes |= {"pad_token_id": pad, "eos_token_id": eos, "model_type": kind}
    _rules(d, known, ids, kind)
    if kind == 2:
        times = whisper and d.chance()
        d.put(begin, d.ints([int(times)], np.int32))
        if times:
            d.attributes["beginning_timestamp_token_id"] = d.whole(2, size - 2)
            names = ("no_timestamps_token_id", "start_of_lm_token_id", "translate_token_id", "transcribe_token_id")
            d.attributes |= {name: d.whole(0, size - 1) for name in names}
        if whisper:
            d.put(None, None, np.array([d.pick([0.5, 1.0, 2.0])], np.float32) if d.chance() else None)
    if eos < 0 and d.chance():
        d.outputs.append("steps")  # onnxruntime does not write those after the end of all sequences


def _features(encoder: GraphProto) -> int:
    return int(encoder.input[0].type.tensor_type.shape.dim[1].dim_value)


def _allowed(d: Draw, *shape: int) -> np.ndarray:
    """A mask that forbids at most two tokens, so that each beam has a next one."""
    mask = np.ones(shape, np.int32)
    for row in mask.reshape(-1, shape[-1]):
        row[d.wholes(0, shape[-1] - 1, 2)] = 0
    return mask


def _rules(d: Draw, known: int, ids: np.ndarray, kind: int) -> None:
    """Draw the penalties and masks of a beam search."""
    d.put(np.array([d.pick([0.0, 0.5, 1.0, 1.0, 2.0, -1.0])], np.float32))
    d.put(np.array([d.pick([0.5, 1.0, 1.3, 2.0])], np.float32) if d.chance() else None)
    d.put(_allowed(d, known) if d.chance(0.3) else None)
    d.put(_allowed(d, len(ids), known) if d.chance(0.3) else None)
    d.put(_mask(d, ids.shape) if d.chance(0.4) and kind < 2 else None)
    d.attr("no_repeat_ngram_size", [2, 3], 0)
    d.attr("early_stopping", [0, 1], 0)
    d.outputs.append("score")
