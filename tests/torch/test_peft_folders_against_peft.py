"""Folders of PEFT: what PEFT writes computes the same here and in onnxruntime, and PEFT loads what is written here."""

from __future__ import annotations

import copy
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto
from peft import LoraConfig, PeftModel, get_peft_model
from tests.helpers.onnxruntime_adapters import in_child
from torch import nn

from singa import sonnx
from singa_backend import run_model
from singa_backend.adapters import Adapter, LowRank, create, insert, merge
from singa_backend.adapters.files import load_adapter, save_adapter
from singa_backend.adapters.onnxruntime import adapter_inputs, write_onnx_adapter
from singa_backend.adapters.peft import read_peft, write_peft
from singa_backend.errors import InvalidInput


class Small(nn.Module):
    """Linear modules in containers, an embedding, a convolution with groups, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.plain = nn.Conv1d(8, 8, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 8, bias=False), nn.Tanh()))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.plain(self.conv(self.emb(x).transpose(1, 2))).transpose(1, 2)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.body(h).mean(1))


class Tied(nn.Module):
    """An embedding and a last layer with one weight, as language models have it; PEFT saves their base layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight
        self.config = {"tie_word_embeddings": True}

    def get_input_embeddings(self) -> nn.Module:
        return self.emb

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.emb(x))))


class Logits(nn.Module):
    """A network of transformers as a function of tokens; the wrapper puts `net.` in front of the paths."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.net(x, **({"use_cache": False} if hasattr(self.net, "lm_head") else {}))
        return found.logits


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=16, num_labels=3)  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


NETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "small": (Small, {"target_modules": ["conv", "plain", "blocks.0", "blocks.1", "body.0", "body.2.0", "emb"],
                      "modules_to_save": ["head"], "bias": "all", "rank_pattern": {"blocks.1": 2},
                      "alpha_pattern": {"body.0": 3}}),
    "bert": (bert, {"target_modules": ["query", "value", "output.dense"], "modules_to_save": ["classifier"], "use_rslora": True}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}  # fmt: skip
TOKENS = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(0))


@cache
def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = NETS[name][0]().eval()
    for p in net.parameters():  # the exporter joins equal tensors, such as biases of zeros
        p.data += 0.05 * torch.randn_like(p)
    return net


def callable_of(name: str, net: nn.Module) -> nn.Module:
    return net if name == "small" else Logits(net)


@cache
def exported(name: str, dynamo: bool) -> ModelProto:
    out = io.BytesIO()
    net = callable_of(name, copy.deepcopy(network(name))).eval()
    if dynamo:
        program = torch.onnx.export(net, (TOKENS,), dynamo=True, dynamic_shapes={"x": {0: "n", 1: "t"}}, verbose=False)
        return program.model_proto
    torch.onnx.export(net, (TOKENS,), out, dynamo=False, opset_version=17, input_names=["x"],
                      dynamic_axes={"x": {0: "n", 1: "t"}})  # fmt: skip
    return onnx.load_from_string(out.getvalue())


@cache
def tuned(name: str, rank: int) -> Any:
    """The network with an adapter of PEFT, whose values are random."""
    torch.manual_seed(rank)
    net = get_peft_model(copy.deepcopy(network(name)), LoraConfig(r=rank, lora_alpha=2 * rank, **NETS[name][1]))
    for p in net.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn_like(p)
    return net.eval()


def expected(name: str, net: nn.Module) -> np.ndarray:
    with torch.no_grad():
        found = net(TOKENS)
    return np.asarray((found if name == "small" else found.logits).numpy())


CASES = [("small", False), ("small", True), ("bert", False), ("bert", True), ("gpt2", True)]


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("settings", [
    {"target_modules": ["head"]}, {"target_modules": ["emb"]}, {"target_modules": ["emb", "head"]},
    {"target_modules": ["emb", "head"], "ensure_weight_tying": True}, {"target_modules": ["body"], "modules_to_save": ["head"]},
    {"target_modules": ["body"], "modules_to_save": ["emb"]}, {"target_modules": ["body"], "modules_to_save": ["emb", "head"]},
], ids=str)  # fmt: skip
def test_tied_weights_are_those_of_peft(settings: dict[str, Any], optimize: bool, tmp_path: Path) -> None:
    """The exporter writes one tensor for both modules, or a transposed copy with another name."""
    torch.manual_seed(0)
    base = Tied().eval()
    program = torch.onnx.export(copy.deepcopy(base), (TOKENS,), dynamo=True, optimize=optimize, verbose=False)
    net = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, **settings)).eval()
    for p in net.parameters():
        if p.requires_grad:
            p.data += 0.3 * torch.randn_like(p)
    net.save_pretrained(tmp_path / "in")
    with torch.no_grad():
        want = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "in").eval()(TOKENS).numpy()
        assert np.abs(want - base(TOKENS).numpy()).max() > 1e-2
    adapter = read_peft(tmp_path / "in", program.model_proto)
    for join in (insert, merge):
        np.testing.assert_allclose(run_model(join(program.model_proto, adapter), [TOKENS.numpy()])[0], want, rtol=1e-4, atol=1e-5)
    write_peft(adapter, tmp_path / "out", program.model_proto)
    with torch.no_grad():
        again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out").eval()(TOKENS).numpy()
    np.testing.assert_allclose(again, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "dynamo"), CASES)
@pytest.mark.parametrize("rank", [4, 16])
def test_an_adapter_of_peft_computes_the_same(name: str, dynamo: bool, rank: int, tmp_path: Path) -> None:
    net, model = tuned(name, rank), exported(name, dynamo)
    net.save_pretrained(tmp_path / "in")
    adapter = read_peft(tmp_path / "in", model)
    want, feeds = expected(name, net), {model.graph.input[0].name: TOKENS.numpy()}
    assert np.abs(want - expected(name, network(name))).max() > 1e-2
    made = {"factors": insert(model, adapter)}
    if name != "small":  # PEFT cannot merge a convolution with groups, either
        made["merged"] = merge(model, adapter)
    for form, proto in made.items():
        np.testing.assert_allclose(run_model(proto, feeds)[0], want, rtol=0, atol=1e-5, err_msg=form)
        np.testing.assert_allclose(in_child(("run", proto.SerializeToString(), feeds))[0][0], want, rtol=0, atol=1e-5)
    two = adapter_inputs(model, [adapter])
    write_onnx_adapter(adapter, tmp_path / "a.onnx_adapter")
    found = in_child(("run", two.SerializeToString(), feeds, str(tmp_path / "a.onnx_adapter")))[0][0]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "dynamo"), CASES)
def test_peft_loads_what_is_written(name: str, dynamo: bool, tmp_path: Path) -> None:
    net, model = tuned(name, 4), exported(name, dynamo)
    net.save_pretrained(tmp_path / "in")
    read_peft(tmp_path / "in", model).save(tmp_path / "a.safetensors")
    save_adapter(load_adapter(tmp_path / "a.safetensors", model), tmp_path / "out", model)
    again = PeftModel.from_pretrained(copy.deepcopy(network(name)), tmp_path / "out").eval()
    np.testing.assert_allclose(expected(name, again), expected(name, net), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["small", "bert"])
def test_peft_loads_an_adapter_that_was_made_here(name: str, tmp_path: Path) -> None:
    rng, model = np.random.default_rng(0), exported(name, True)
    drawn = {"uniform": lambda s, b: rng.uniform(-b, b, s), "normal": lambda s, d: rng.normal(0, d, s)}
    new = create(model, 4, **drawn, alpha=6, bias="lora_only", target=() if name == "bert" else ["*"])
    changes = {}
    for name_of, c in new.changes.items():
        a, b = (rng.normal(0, 0.1, x.shape).astype(np.float32) for x in (c.a, c.b))
        changes[name_of] = LowRank(c.a + a, b, c.scale)
    values = {n: v + np.float32(0.1) for n, v in new.values.items()}
    adapter = Adapter(changes, values, new.base, new.settings)
    want = run_model(insert(model, adapter), [TOKENS.numpy()])[0]
    if name == "bert":  # the paths of the file begin with that of the wrapper
        base: nn.Module = Logits(copy.deepcopy(network(name)))
    else:
        base = copy.deepcopy(network(name))
    write_peft(adapter, tmp_path / "out", model)
    again = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(TOKENS).numpy(), want, rtol=0, atol=1e-5)


def test_a_quantized_base_takes_the_adapter(tmp_path: Path) -> None:
    net, model = tuned("bert", 4), exported("bert", False)
    net.save_pretrained(tmp_path / "in")
    want, errors = expected("bert", net), {}
    for form in ("int8", "int4", "nf4"):
        small = sonnx.quantize_weights(model, form, exclude=["/net/classifier/.*"])
        adapter = read_peft(tmp_path / "in", small)
        found = run_model(insert(small, adapter), {"x": TOKENS.numpy()})[0]
        base = run_model(small, {"x": TOKENS.numpy()})[0]
        errors[form] = np.abs(found - want).max()
        assert np.abs(base - want).max() > 3 * errors[form], "the adapter brings it nearer to the tuned network"
    assert errors["int8"] < errors["int4"] and errors["int8"] < 0.01


def test_initializations_that_change_the_base_are_refused(tmp_path: Path) -> None:
    for kind in ("pissa", "olora"):
        net = get_peft_model(copy.deepcopy(network("small")), LoraConfig(r=2, target_modules=["body.0"], init_lora_weights=kind))
        net.save_pretrained(tmp_path / kind)
        with pytest.raises(InvalidInput, match=f"init_lora_weights='{kind}' changed the weights"):
            read_peft(tmp_path / kind, exported("small", True))
    dora = get_peft_model(copy.deepcopy(network("small")), LoraConfig(r=2, target_modules=["body.0"], use_dora=True))
    dora.save_pretrained(tmp_path / "dora")
    with pytest.raises(InvalidInput, match="use_dora=True"):
        read_peft(tmp_path / "dora", exported("small", True))


@pytest.mark.parametrize(
    "job", [("Llama", "fp32"), ("Qwen2", "fp32"), ("Llama", "fp32", "disable_qkv_fusion=true"), ("Llama", "int4")]
)
def test_decoders_of_onnxruntime_genai(job: tuple[str, ...], tmp_path: Path) -> None:
    """The adapter of the network in PyTorch changes the file of the builder as it changes the network."""
    pytest.importorskip("onnxruntime_genai")
    import transformers

    decoders = load_decoders()
    place = decoders.write(job, tmp_path)
    net = transformers.AutoModelForCausalLM.from_pretrained(decoders._checkpoint(job[0], tmp_path), dtype=torch.float32).eval()
    torch.manual_seed(0)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    tuned_net: Any = get_peft_model(copy.deepcopy(net), LoraConfig(r=4, lora_alpha=8, target_modules=names)).eval()
    for p in tuned_net.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn_like(p)
    tuned_net.save_pretrained(tmp_path / "peft")
    tokens = [5, 7, 11, 13]
    prompt = torch.tensor([tokens])
    rep = sonnx.prepare(place, adapter=tmp_path / "peft")
    feeds = decoders.inputs(onnx.load(place, load_external_data=False), new=4, past=0)
    feeds["input_ids"] = prompt.numpy()
    with torch.no_grad():
        want, base = tuned_net(prompt).logits.numpy(), net(prompt).logits.numpy()
    found = rep.run({n: x for n, x in feeds.items() if n in {v.name for v in rep.inputs}})["logits"]
    error, moved = np.abs(found - want).max(), np.abs(want - base).max()
    assert moved > 0.05 and error < (1e-4 if "fp32" in job else 0.5 * moved), (error, moved)


def load_decoders() -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("onnxruntime_decoders", Path(__file__).parent / "onnxruntime_decoders.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
