"""Nets with random weights, exported by PyTorch, for onnxruntime's tools: see onnxruntime_files.py."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH = 64, 4, 2, 200, 16
HEAD = HIDDEN // HEADS


class Net(NamedTuple):
    """A net to export.

    Attributes:
        module: its forward takes the inputs in their order.
        inputs: arrays by name.
        kind: onnxruntime's name of the fusions to apply ("bert", "gpt2", ...).
        outputs: their number.
        dynamic: whether the first axis of inputs is symbolic.
    """

    module: nn.Module
    inputs: dict[str, np.ndarray]
    kind: str
    outputs: int = 1
    dynamic: bool = True


def export(net: Net, path: Path, *, opset: int = 17) -> Path:
    """Write the net with PyTorch's TorchScript exporter and return the path."""
    names = [*net.inputs]
    axes = {n: {0: "batch"} for n in names if net.dynamic and net.inputs[n].ndim}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.module.eval(), tuple(torch.from_numpy(a) for a in net.inputs.values()), str(path), input_names=names,
            output_names=[f"output_{i}" for i in range(net.outputs)], opset_version=opset, dynamo=False, dynamic_axes=axes,
        )  # fmt: skip
    return path


class Call(nn.Module):
    """A module called by a function, which returns a tensor or a tuple of them."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.module, *inputs)


# --- decoders as older exports have them, which onnxruntime's fusions look for --------------------------------------------


class Affine(nn.Module):
    """GPT-2's linear layer: Gemm of rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.05), nn.Parameter(torch.randn(outputs) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.size()[:-1], self.bias.size(0))


class CausalBlock(nn.Module):
    """A block of GPT-2 with a cache 2 x B x N x P x D."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = Affine(HIDDEN, 3 * HIDDEN), Affine(HIDDEN, HIDDEN)
        self.c_fc, self.c_out = Affine(HIDDEN, 2 * HIDDEN), Affine(2 * HIDDEN, HIDDEN)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64, dtype=torch.uint8)).view(1, 1, 64, 64).bool())
        self.register_buffer("masked", torch.tensor(-1e4))

    def forward(self, x: Tensor, past: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.c_attn(self.ln_1(x)).split(HIDDEN, dim=2)
        q, k, v = (t.view(*t.size()[:-1], HEADS, HEAD) for t in (q, k, v))
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        if past is not None:
            k, v = torch.cat((past[0].transpose(-2, -1), k), -1), torch.cat((past[1], v), -2)
        present = torch.stack((k.transpose(-2, -1), v))
        w = torch.matmul(q, k) / (float(HEAD) ** 0.5)
        new, total = w.size(-2), w.size(-1)
        w = torch.where(self.bias[:, :, total - new : total, :total], w, self.masked.to(w.dtype))
        w = w if mask is None else w + mask
        a = torch.matmul(functional.softmax(w, dim=-1), v).permute(0, 2, 1, 3).contiguous()
        x = x + self.c_proj(a.view(*a.size()[:-2], HIDDEN))
        h = self.c_fc(self.ln_2(x))
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * torch.pow(h, 3))))
        return x + self.c_out(h), present


class Gpt2(nn.Module):
    """GPT-2: token and position embeddings, blocks, and the token embedding again as the head."""

    def __init__(self, *, past: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks, self.ln_f = nn.ModuleList(CausalBlock() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.past = past

    def forward(self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, *past: Tensor) -> Any:
        if positions is None:
            positions = torch.arange(ids.size(1)).unsqueeze(0)
        if mask is not None:
            mask = (1.0 - mask.view(mask.size(0), -1).unsqueeze(1).unsqueeze(2)) * -10000.0
        x, presents = self.wte(ids) + self.wpe(positions), []
        for i, block in enumerate(self.blocks):
            x, present = block(x, past[i] if self.past else None, mask)
            presents.append(present)
        logits = self.head(self.ln_f(x))
        return (logits, *presents) if self.past else logits


class Images(nn.Module):
    """A net of convolutions whose 8-bit form has most of onnxruntime's QLinear operators."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(32, 32, 1)
        self.depth, self.fc = nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.a(x), 0.1)
        y = torch.sigmoid(self.b(x)) * x + x
        y = functional.relu(self.c(torch.cat((x, y), 1)))
        y = functional.avg_pool2d(functional.relu6(self.depth(y)), 2)
        y = functional.max_pool2d(y, 2)
        return torch.softmax(self.fc(functional.adaptive_avg_pool2d(y, 1).flatten(1)), -1)


def _ids(rng: np.random.Generator, batch: int = 2, length: int = LENGTH) -> np.ndarray:
    return rng.integers(3, VOCABULARY, (batch, length))


def _whisper(seed: int) -> Any:
    return transformers.WhisperModel(transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=50,
        max_target_positions=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        attn_implementation="eager",
    ))  # fmt: skip


def bert() -> nn.Module:
    """BERT with two layers; its attention mask is an input."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config)
    return Call(model, lambda m, i, k, t: m(input_ids=i, attention_mask=k, token_type_ids=t, return_dict=False))


def _encoders(rng: np.random.Generator) -> dict[str, Callable[[], Net]]:
    ids, mask = _ids(rng), np.ones((2, LENGTH), np.int64)
    mask[1, 10:] = 0
    images = rng.standard_normal((2, 3, 32, 32), np.float32)
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": HIDDEN, "intermediate_size": 128}
    pixels = {**sizes, "image_size": 32, "patch_size": 8, "attn_implementation": "eager"}

    def vit() -> Net:
        model = transformers.ViTModel(transformers.ViTConfig(**pixels))
        return Net(Call(model, lambda m, x: m(x, return_dict=False)), {"pixels": images}, "vit", 2)

    def clip() -> Net:
        model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**pixels))
        return Net(Call(model, lambda m, x: m(x).pooler_output), {"pixels": images}, "clip")

    def t5() -> Net:
        model = transformers.T5EncoderModel(_t5_config())
        run = Call(model, lambda m, i, k: m(input_ids=i, attention_mask=k).last_hidden_state)
        return Net(run, {"input_ids": ids, "attention_mask": mask}, "t5")

    def whisper() -> Net:
        run = Call(_whisper(0).encoder, lambda m, x: m(x, return_dict=False))
        return Net(run, {"x": rng.standard_normal((1, 16, 100), np.float32)}, "bart", dynamic=False)

    def images_net() -> Net:
        return Net(Images(), {"x": images}, "bert", dynamic=False)

    text = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {
        "bert": lambda: Net(bert(), text, "bert", 2), "vit": vit, "clip": clip, "t5-encoder": t5, "whisper-encoder": whisper,
        "convolutions": images_net,
    }  # fmt: skip


def _t5_config() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HEAD, d_ff=128, num_layers=LAYERS, num_heads=HEADS, decoder_start_token_id=0
    )


def _decoders(rng: np.random.Generator) -> dict[str, Callable[[], Net]]:
    ids = _ids(rng)
    lower = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), 0, -1e9).astype(np.float32)[None, None]
    hidden = rng.standard_normal((2, 12, HIDDEN), np.float32)
    ones = np.ones((2, LENGTH), np.int64)

    def gpt2_past() -> Net:
        feeds = {
            "input_ids": _ids(rng, 2, 3),
            "position_ids": np.full((2, 3), 5) + np.arange(3),
            "mask": np.ones((2, 8), np.float32),
        }
        feeds |= {f"past_{i}": rng.standard_normal((2, 2, HEADS, 5, HEAD), np.float32) for i in range(LAYERS)}
        return Net(Gpt2(past=True), feeds, "gpt2", 1 + LAYERS, dynamic=False)

    def gpt2_new() -> Net:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=64, attn_implementation="eager"
        )
        run = Call(transformers.GPT2LMHeadModel(config), lambda m, i, k: m(input_ids=i, attention_mask=k, use_cache=False).logits)
        return Net(run, {"input_ids": ids, "mask": np.broadcast_to(lower, (2, 1, LENGTH, LENGTH)).copy()}, "gpt2")

    def llama() -> Net:
        config = transformers.LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            num_key_value_heads=2, vocab_size=VOCABULARY, attn_implementation="eager",
        )  # fmt: skip
        run = Call(
            transformers.LlamaForCausalLM(config), lambda m, i, k: m(input_ids=i, attention_mask=k, use_cache=False).logits
        )
        return Net(run, {"input_ids": ids, "mask": np.broadcast_to(lower, (2, 1, LENGTH, LENGTH)).copy()}, "gpt2")

    def t5() -> Net:
        model = transformers.T5Model(_t5_config())
        run = Call(
            model.decoder, lambda m, i, k, h: m(input_ids=i, attention_mask=k, encoder_hidden_states=h, use_cache=False)[0]
        )
        return Net(run, {"input_ids": ids, "attention_mask": ones, "hidden": hidden}, "t5")

    def whisper() -> Net:
        run = Call(_whisper(0).decoder, lambda m, i, k, h: m(
            input_ids=i, attention_mask=k, encoder_hidden_states=h, use_cache=False
        )[0])  # fmt: skip
        return Net(run, {"input_ids": ids, "attention_mask": ones, "hidden": hidden}, "bart")

    def bart() -> Net:
        config = transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64,
            attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        run = Call(transformers.BartModel(config), lambda m, i, k, d, e: m(
            input_ids=i, attention_mask=k, decoder_input_ids=d, decoder_attention_mask=e, use_cache=False
        )[0])  # fmt: skip
        feeds = {
            "input_ids": ids,
            "attention_mask": ones,
            "decoder_ids": _ids(rng, 2, 8),
            "decoder_mask": np.ones((2, 8), np.int64),
        }
        return Net(run, feeds, "bart")

    return {
        "gpt2": lambda: Net(Gpt2(past=False), {"input_ids": ids}, "gpt2"), "gpt2-past": gpt2_past, "gpt2-new": gpt2_new,
        "llama": llama, "t5-decoder": t5, "whisper-decoder": whisper, "bart": bart,
    }  # fmt: skip


_RNG = np.random.default_rng(0)
NETS = _encoders(_RNG) | _decoders(_RNG)
"""Functions that make the nets, by name."""


def make(name: str) -> Net:
    """Return a net with weights drawn from seed 0, none equal to another: the exporter writes equal ones once."""
    torch.manual_seed(0)
    net = NETS[name]()
    with torch.no_grad():
        for p in net.module.parameters():
            if p.ndim == 1:
                p += 0.02 * torch.randn(p.shape)
    return net
