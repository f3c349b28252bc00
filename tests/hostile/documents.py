"""Damaged documents of each kind that a program reads: `run(kind, seed, first, last)` draws them and says how each ended.

A kind has whole files, a reader, and for each file its format: what a damage changes. `python documents.py COUNT SEED [KIND...]`
draws COUNT documents of each kind in one process, and ends with 1 if one is not read or refused by a SonnxError.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

from singa_backend.errors import SonnxError

Rng = random.Random
SECONDS, MEBIBYTES = 10, 256.0
"""What a document may take: processor time that the alarm counts, and memory above that in use before the draw."""

# --- damages ------------------------------------------------------------------------------------------------------------

RAW = {
    "#400": "9" * 400,
    "#5000": "-" + "1" * 5000,
    "#1e999": "1e999",
    "#nan": "NaN",
    "#inf": "-Infinity",
    "#half": '"\\ud800"',
    "#deep": "[" * 70 + "]" * 70,
    "#deeper": '{"a":' * 5000 + "1" + "}" * 5000,
    "#twice": '{"a": 1, "a": 2}',
    "#hex": "0x10",
    "#40": "9" * 40,
    "#small": "1e-400",
    "#zero": "-0",
    "#exact": "2.0",
}
"""Values that Python's writer of JSON does not write, by the text that stands for them."""

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    255,
    1 << 31,
    -(1 << 31),
    1 << 62,
    1 << 63,
    1 << 64,
    0.5,
    -0.5,
    1e308,
    "",
    "a",
    "a\0b",
    "../x",
    "/etc/passwd",
    "é",
    "😀",
    "x" * 300,
    "x" * 70_000,
    "%d",
    "%s%d",
    "float[2,3]",
    "AAAA",
    "[",
    [],
    {},
    [[]],
    [None],
    [1],
    [-1],
    ["a"],
    [0] * 70,
    [1 << 40] * 3,
    {"a": 1},
    {"": None},
    {"a": {"b": []}},
    *RAW,
]


def changed(rng: Rng, value: Any) -> Any:
    """A document in which one to three parts are removed, replaced, repeated, or put in another place."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(parts(value))
        if not places:
            return copy.deepcopy(rng.choice(VALUES))
        parent, key = rng.choice(places)
        how = rng.randrange(8)
        if how == 0:
            del parent[key]
        elif how == 1:
            other, name = rng.choice(places)
            parent[key] = json.loads(json.dumps(other[name]))
        elif how == 2 and isinstance(parent, list):
            parent.extend([parent[key]] * rng.choice([1, 3, 70]))
        elif how == 2:
            parent[rng.choice(["", "new", "\0", "a" * 300, "é", str(key) + "x"])] = parent.pop(key)
        elif how == 3 and isinstance(parent[key], str) and parent[key]:
            parent[key] = text_damage(rng, parent[key])
        elif how == 3 and isinstance(parent[key], (int, float)):
            parent[key] = rng.choice([-parent[key], parent[key] * 2, parent[key] + 1, parent[key] - 1, parent[key] * 10**9])
        else:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from parts(value[key])


def text_damage(rng: Rng, text: str) -> str:
    at = rng.randrange(len(text))
    return rng.choice(
        [text[:at], text[at:], text * 2, text[:at] + "\0" + text[at:], text[:at] + "é" + text[at + 1 :], text + "=" * 3]
    )


def document(rng: Rng, data: bytes) -> bytes:
    if rng.random() < 0.1:
        return noise(rng, data)
    if rng.random() < 0.05:
        return rng.choice(list(RAW.values())).encode()
    text = json.dumps(changed(rng, json.loads(data)))
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


def noise(rng: Rng, data: bytes) -> bytes:
    """Bytes that are cut, changed, removed or repeated."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(out) + 1)
        how = rng.randrange(6)
        if how == 0:
            del out[at:]
        elif how == 1:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 2:
            del out[at : at + rng.choice([1, 4, 64])]
        elif how == 3:
            out[at:at] = out[at : at + rng.choice([4, 64])]
        elif how == 4:
            out[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\x80\0\0\0"])
        else:
            out[at : at + 8] = rng.choice([b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x80", b"\0\0\0\0\x01\0\0\0"])
    return bytes(out)


def safetensors(rng: Rng, data: bytes) -> bytes:
    """The header, the document in its metadata, or any byte."""
    if rng.random() < 0.25:
        return noise(rng, data)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if rng.random() < 0.2:  # another shape of as many elements
        facts = header[rng.choice([n for n in header if n != "__metadata__"])]
        count = int(np.prod(facts["shape"]))
        shapes = [
            [count],
            [],
            [1, count],
            facts["shape"][::-1],
            [count, 1, 1, 1],
            [1] * 70 + [count],
            [0, count],
            [1, *facts["shape"]],
        ]
        facts["shape"] = rng.choice(shapes)
        facts["dtype"] = rng.choice(["F32", "F32", "F32", "I32", "BF16"])
        head = json.dumps(header).encode()
    elif "__metadata__" in header and rng.random() < 0.7:
        header["__metadata__"]["sonnx"] = document(rng, header["__metadata__"]["sonnx"].encode()).decode("utf-8", "replace")
        head = json.dumps(header).encode()
    else:
        head = document(rng, json.dumps(header).encode())
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def states(rng: Rng, data: bytes) -> bytes:
    """A file of states: the document, a tensor, the settings in a tensor, or any byte."""
    if rng.random() < 0.1:
        return noise(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        described = pack.read("states_attr.json")
        with np.load(io.BytesIO(pack.read("tensor_dict.npz"))) as read:
            arrays = {n: read[n] for n in read.files}
    if rng.random() < 0.3:
        described = document(rng, described)
    else:
        name = "fit.run" if rng.random() < 0.7 else rng.choice(list(arrays))
        if name == "fit.run":
            arrays[name] = np.frombuffer(document(rng, arrays[name].tobytes()), np.uint8)
        else:
            arrays[name] = other_array(rng, arrays[name])
        facts = json.loads(described)
        facts[name]["shape"] = list(arrays[name].shape)
        described = json.dumps(facts).encode()
    inner, out = io.BytesIO(), io.BytesIO()
    np.savez(inner, **arrays)
    with zipfile.ZipFile(out, "w") as pack:
        pack.writestr("tensor_dict.npz", inner.getvalue())
        pack.writestr("states_attr.json", described)
    return out.getvalue()


def other_array(rng: Rng, array: np.ndarray) -> np.ndarray:
    extremes = [-1, 0, 1, np.iinfo(np.int64).max, np.iinfo(np.int64).min]
    return rng.choice(
        [
            array[:0],
            array.reshape(-1)[:1],
            np.concatenate([array.reshape(-1)] * 2),
            array.reshape(1, *array.shape),
            np.full(array.shape, rng.choice(extremes)).astype(array.dtype),
            np.full_like(array, np.nan) if array.dtype.kind == "f" else -array,
            array.reshape(-1)[0] if array.size else array,
        ]
    )


def journal(rng: Rng, data: bytes) -> bytes:
    line, _, rest = data.partition(b"\n")
    return line + b"\n" + (document(rng, rest) if rng.random() < 0.8 else noise(rng, rest))


# --- kinds ----------------------------------------------------------------------------------------------------------------


@dataclass
class Kind:
    """Files by name with the function that damages each, and what reads their folder."""

    files: dict[str, bytes]
    damages: dict[str, Callable[[Rng, bytes], bytes]]
    read: Callable[[Path], Any]
    keeps: tuple[str, ...] = ()
    """Files of the user that no reader changes."""
    alone: bool = False
    """Whether each file is read without the others."""


KINDS: dict[str, Callable[[], Kind]] = {}


def kind(build: Callable[[], Kind]) -> Callable[[], Kind]:
    once = cache(build)
    KINDS[build.__name__] = once
    return once


def _model(text: str, names: dict[str, str], **weights: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> {text}')
    for node in model.graph.node:
        node.name = names.get(node.output[0], "")
        for i, name in enumerate(node.input):
            node.input[i] = name.replace("__", ".")
    model.graph.initializer.extend(numpy_helper.from_array(w, n.replace("__", ".")) for n, w in weights.items())
    return model


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def net() -> ModelProto:
    text = """g (float[n,6] x) => (float[n,4] y) { h = Gemm<transB=1>(x, a__fc__weight, a__fc__bias)  r = Relu(h)
    p = MatMul(r, w)  y = Add(p, b) }"""
    return _model(
        text,
        {"p": "/b/b.0/fc/MatMul", "y": "/b/b.0/fc/Add"},
        a__fc__weight=normal(5, 6),
        a__fc__bias=normal(5),
        w=normal(5, 4),
        b=normal(4),
    )


def written(write: Callable[[Path], Any]) -> dict[str, bytes]:
    """The files that a function writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}


@kind
def guards() -> Kind:
    from singa_backend.debug import guards

    model = net()

    def write(folder: Path) -> None:
        guards.write_guard(model, folder / "small.guard")
        (folder / "packed.guard").write_text(guards.read_guard(folder / "small.guard").text(300), encoding="utf-8")

    files = written(write)

    def read(folder: Path) -> None:
        for path in sorted(folder.glob("*.guard")):
            guard = guards.read_guard(path)
            for case in guard.cases:
                [i.array() for i in case.inputs.values()]
            np.savez(folder / "values.npz", y=np.zeros((1, 4), np.float32))
            guards.check_guard(guard, against=folder / "values.npz", case=guard.cases[0].name, model=model, to=folder / "to")

    return Kind(files, dict.fromkeys(files, document), read, alone=True)


@kind
def adapters() -> Kind:
    from singa_backend.adapters import Adapter, LowRank, insert
    from singa_backend.adapters.files import load_adapter, save_adapter

    model = net()
    changes = {"a.fc.weight": LowRank(normal(2, 6), normal(5, 2), 0.5), "w": LowRank(normal(2, 5), normal(4, 2), 1.0)}
    settings = {"rank": 2, "alpha": 1.0, "dropout": 0.0, "target": [], "bias": "none", "rslora": False, "head": None}
    adapter = Adapter(changes, {"b": normal(4)}, "", settings)
    files = written(lambda f: adapter.save(f / "a.safetensors"))
    files |= written(lambda f: save_adapter(Adapter(changes, {}, "", settings), f / "b.onnx_adapter", model))

    def read(folder: Path) -> None:
        for path in folder.glob("*.*"):
            found = load_adapter(path, model)
            insert(model, found, any_base=True)
            found.to_bytes()

    return Kind(files, {"a.safetensors": safetensors, "b.onnx_adapter": noise}, read, alone=True)


@kind
def peft_folders() -> Kind:
    from safetensors.numpy import save

    from singa_backend.adapters import insert
    from singa_backend.adapters.peft import CONFIG, WEIGHTS, read_peft, write_peft

    model = net()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.1,
        "target_modules": ["fc"],
        "bias": "none",
        "use_rslora": False,
        "alpha_pattern": {"b.0.fc": 8},
        "rank_pattern": {"b.0.fc": 4},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    pairs = {"a.fc": (normal(2, 6), normal(5, 2)), "b.0.fc": (normal(4, 5), normal(4, 4))}
    tensors = {f"base_model.model.{n}.lora_{k}.weight": x for n, ab in pairs.items() for k, x in zip("AB", ab, strict=True)}
    files = {CONFIG: json.dumps(config).encode(), WEIGHTS: save(tensors)}

    def read(folder: Path) -> None:
        found = read_peft(folder, model)
        insert(model, found, any_base=True)
        write_peft(found, folder / "again", model)

    return Kind(files, {CONFIG: document, WEIGHTS: safetensors}, read)


@kind
def genai_folders() -> Kind:
    from tests.helpers.language_models import CONFIG, Decoder, genai, write

    from singa import sonnx
    from singa._generation.chat import ChatTemplate
    from singa._generation.config import read_folder
    from singa._generation.options import SearchOptions

    config = genai(top_k=4, temperature=0.7, do_sample=True, num_beams=1)
    chat = {"chat_template": "{{ bos_token }}{{ messages[0]['content'] }}", "bos_token": {"content": "<s>"}}
    optimum = {**CONFIG, "vocab_size": 256, "eos_token_id": [1], "n_positions": 64, "forced_bos_token_id": 3}
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place) / "f", {"model": Decoder().model()}, genai_config=config)
        files = {p.name: p.read_bytes() for p in folder.iterdir()}
    files["config.json"] = json.dumps(optimum).encode()
    files["generation_config.json"] = json.dumps({"top_k": 3, "eos_token_id": [1, 2], "max_length": 20}).encode()
    files["tokenizer_config.json"] = json.dumps(chat).encode()

    def read(folder: Path) -> None:
        SearchOptions().completed(read_folder(folder))
        template = ChatTemplate(folder)
        if int(folder.name) % 16 == 0:  # a process runs it
            template.text([{"role": "user", "content": "a"}])
        (folder / "genai_config.json").unlink()
        SearchOptions().completed(read_folder(folder))
        if int(folder.name) % 8 == 0:  # a model is prepared
            sonnx.Generator(folder).generate("ab", max_new_tokens=2)

    names = ("genai_config.json", "config.json", "generation_config.json", "tokenizer_config.json")
    return Kind(files, dict.fromkeys(names, document), read)


@kind
def results() -> Kind:
    from singa_backend.conform.report import _generated, _judged, _verdicts, kept, label
    from singa_backend.inspection import inspect
    from singa_backend.sweep.results import SweepStore
    from singa_backend.sweep.settings import SweepSettings

    settings = SweepSettings(task="check")
    answer = {"status": "timeout", "reason": "", "code": "", "facts": {"values": 3}, "seconds": 0.5}
    totals = {"cases": 1, "strict": 1, "official": 1}
    run = {
        "environment": {"onnx": "1.23.0", "device": "CPU"},
        "manifest": "abc",
        "totals": {**totals, "by_kind": {"node": totals}},
        "gaps": {"test": "why"},
        "unexpected": [],
        "executed": [
            {
                "domain": "ai.onnx",
                "operator": "Abs",
                "version": 13,
                "cases": 1,
                "passed": 1,
                "tested": 1,
                "tested_passed": 1,
                "dtypes": [["T", "float32"]],
                "attributes": [],
                "max_ulp": 0,
                "names": ["test"],
                "failed": [],
            }
        ],
    }
    fuzz = {"cells": [["ai.onnx", "Abs", 13, "T", "float32"]], "totals": {"ok": 1}, "count": 1, "seed": 1}
    gradients = {"rows": [{"domain": "ai.onnx", "operator": "Abs", "version": 13, "verdict": "agrees"}]}
    seen = inspect(net())
    nodes = [
        {
            "name": c.name,
            "operator": c.operator,
            "values": list(c.outputs),
            "main": True,
            "kernels": ["k"],
            "part_of": "",
            "steps": [0],
            "notes": [],
            "seconds": 0.1,
            "share": 0.25,
            "bytes": 100,
            "flops": 10,
            "roofline": 0.5,
        }
        for c in seen.main.nodes
    ]
    rows = [
        {
            "value": c.outputs[0],
            "node": c.name,
            "operator": c.operator,
            "index": c.index,
            "judged": True,
            "verdict": "agrees",
            "excess": 0.5,
            "max_abs": 0.1,
            "ulps": 1,
        }
        for c in seen.main.nodes
    ]

    def write(folder: Path) -> None:
        SweepStore(folder).keep("key", answer, settings)

    files = written(write)
    files |= {
        "run.json": json.dumps(run).encode(),
        "fuzz.json": json.dumps(fuzz).encode(),
        "gradients.json": json.dumps(gradients).encode(),
        "profile.json": json.dumps({"schema": "sonnx.profile", "seconds": 0.5, "nodes": nodes}).encode(),
        "compare.json": json.dumps({"schema": "sonnx.compare", "rows": rows, "not_compared": []}).encode(),
    }

    def read(folder: Path) -> None:
        from singa_backend.io.documents import read_document

        json.dumps(SweepStore(folder).find("key", settings))
        if (folder / "run.json").exists():
            (folder / "runs").mkdir()
            (folder / "run.json").rename(folder / "runs" / "run.json")
            [label(one) for one in kept(folder).values()]
        _judged(_generated(folder)), _verdicts(folder)
        pages = [folder / n for n in ("profile.json", "compare.json")]
        if any(p.exists() for p in pages):
            profile, comparison = (read_document(p, "SX398").value if p.exists() else None for p in pages)
            seen.html(profile, comparison)

    return Kind(files, dict.fromkeys(files, document), read, alone=True)


@kind
def journals() -> Kind:
    from singa_backend.io import temporary

    files = {"lock": b'sonnx 1\n{"main": "a", "placed": {"a.data": [1, 2, 3]}, "stale": {"b": [1, 2, 3]}}', "mine": b"mine"}

    def read(folder: Path) -> None:
        """What a dead process left: its folder, with the mark and a journal that names files of the user."""
        top = folder / temporary._name("0123abcd")
        (top / temporary.NEW).mkdir(parents=True)
        (folder / "lock").rename(top / "lock")
        lock = (top / "lock").read_bytes()
        (top / "lock").write_bytes(temporary._mark(top) + lock.partition(b"\n")[2])
        temporary.clean(folder)

    return Kind(files, {"lock": journal}, read, keeps=("mine",))


@kind
def checkpoints() -> Kind:
    from singa import layer, model, opt, tensor
    from singa._training.checkpoint import Checkpoint
    from singa._training.fit import fit
    from singa.device import get_default_device

    class Net(model.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a = layer.Linear(3)

        def forward(self, x: Any) -> Any:
            return self.a(x)

        def train_one_batch(self, x: Any, y: Any) -> Any:
            from singa import autograd

            out = self.forward(x)
            loss = autograd.softmax_cross_entropy(out, y)
            self.optimizer(loss)
            return out, loss

    x, y = normal(6, 4), np.arange(6, dtype=np.int32) % 3
    net = Net()
    net.set_optimizer(opt.SGD(lr=0.1, momentum=0.9))
    net.compile([tensor.Tensor(data=x[:2], requires_grad=False)], is_train=True, use_graph=False)

    def checkpoint(folder: Path) -> Checkpoint:
        return Checkpoint(folder / "run.ckpt", net, net.optimizer, get_default_device(), {"--loss": "softmax"}, {"--lr": "0.1"})

    files = written(lambda f: fit(net, x, y, epochs=2, batch_size=2, reached=checkpoint(f).write))

    def read(folder: Path) -> None:
        found = checkpoint(folder)
        found.read(len(y), 2)

    return Kind(files, {"run.ckpt": states}, read)


# --- the draw ---------------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """A document took longer than SECONDS of processor time."""


def _alarm(*_: Any) -> None:
    raise Hang


def run(name: str, seed: int, first: int, last: int) -> tuple[Counter[str], list[str]]:
    """How many documents were read and refused by each code; and what else happened, by index."""
    what = KINDS[name]()
    ended, wrong = Counter[str](), list[str]()
    signal.signal(signal.SIGPROF, _alarm)
    with tempfile.TemporaryDirectory() as place:
        base = _kibibytes("VmRSS")
        for index in range(first, last):
            rng = Rng(f"{name} {seed} {index}")
            folder = Path(place, str(index))
            folder.mkdir()
            target = rng.choice(list(what.damages))
            for file, data in what.files.items():
                if file == target or not what.alone:
                    (folder / file).write_bytes(what.damages[target](rng, data) if file == target else data)
            _forget_peak()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                what.read(folder)
                ended["read"] += 1
            except SonnxError as error:
                ended[error.code] += 1
                str(error).encode()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                wrong.append(f"{name} {seed} {index} {target}: {traceback.format_exc()[-1500:]}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if (peak := (_kibibytes("VmHWM") - base) / 1024) > MEBIBYTES:
                wrong.append(f"{name} {seed} {index} {target}: {peak:.0f} MiB")
            if any((folder / n).read_bytes() != what.files[n] for n in what.keeps):
                wrong.append(f"{name} {seed} {index} {target}: a file of the user was changed")
            _remove(folder)
    return ended, wrong


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _kibibytes(name: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))


def main() -> int:
    count, seed, *names = sys.argv[1:]
    bad = 0
    for name in names or KINDS:
        started = time.process_time()
        ended, wrong = run(name, int(seed), 0, int(count))
        print(
            f"{name}: {count} drawn, {len(wrong)} wrong, {time.process_time() - started:.0f} s: {dict(ended.most_common())}",
            flush=True,
        )
        print(*wrong[:20], sep="\n", flush=True)
        bad += len(wrong)
    return bool(bad)


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parents[2]))  # tests.helpers
    sys.exit(main())
