"""Bits of deterministic sessions of one node each, and of nets and their training, on this and other processors.

    python -m tests.helpers.elementwise_bits FOLDER [PYTHON ...]     # a step of tox -e aarch64

Draws models and inputs into FOLDER, computes them here by one and two threads and for AVX2, and by other interpreters, and
compares.  The inputs are drawn once: functions of NumPy, by which some are made, have other last bits on other processors.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.helpers.deterministic_nets import NETS, net, training
from tests.helpers.elementwise_draws import FURTHER, Key, Special, combinations, draws, elementwise
from tests.helpers.plan_checks import kernels_used

from singa_backend.backend import SingaBackend, SingaRep
from singa_backend.conform.fuzz.generate import as_case, shown_domain
from singa_backend.elementwise.compile import LEVELS, available, native
from singa_backend.ir.declaration import declarations
from singa_backend.ir.versioned import reads_on_host
from singa_backend.kernels import frames, rows
from singa_backend.kernels.table import Options
from singa_backend.proto.schemas import LAX, MICROSOFT

BODIES = [
    *((MICROSOFT, name) for name in ("BiasGelu", "BiasSoftmax", "BiasSplitGelu", "FastGelu")),
    *((MICROSOFT, name) for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")),
    (LAX, "SimplifiedLayerNormalization"),
]
"""Operators with bodies of elementwise operators and rows."""

LOWERED = [*elementwise(), *(("", name) for name in rows.OPERATORS), *BODIES]
VIEWS = [("", "Identity"), (MICROSOFT, "SampleOp")]
"""The elementwise operators that compute nothing."""

KEYS = list(dict.fromkeys((*LOWERED, *FURTHER)))
"""The operators that machine code computes, and neighbours, some of which it computes."""

OTHER_BITS = {
    "BiasSplitGelu": "erf and exp of NumPy, in the definition for float16",
    "FastGelu": "tanh of NumPy, in the definition for float16",
    "ScaledSiLU": "exp of NumPy, in the definition for two types",
    "SwiGLU": "exp of NumPy, in the definition",
}
"""The operators of which some cases have other bits on other processors, and what computes these."""


class Large(Special):
    """Draws rows that are longer than vectors, most of which are reduced, and floats of any bits."""

    def _floats(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> np.ndarray:
        x = super()._floats(dtype, shape, kind)
        word = np.dtype(f"u{dtype.itemsize}")
        drawn = np.asarray(self.rng.integers(0, np.iinfo(word).max, shape, word)).view(dtype)
        drawn = np.where(np.isnan(drawn), np.array(np.nan, dtype), drawn)  # a signaling NaN is another value for NumPy
        return np.where(self.rng.random(shape) < 0.3, drawn, x) if kind == "any" else x

    def shape(self, *args: Any, **options: Any) -> tuple[int, ...]:
        shape = super().shape(*args, **options)
        return (*shape[:-1], self.pick([7, 16, 33, 67, 200])) if shape and shape[-1] and self.chance(0.9) else shape

    def axis(self, rank: int, negative_from: int = 11) -> int:
        axis = super().axis(rank, negative_from)
        return rank - 1 if self.chance(0.8) else axis

    def axes(self, rank: int, low: int = 1, negative_from: int = 11) -> list[int]:
        axes = super().axes(rank, low, negative_from)
        return [rank - 1] if self.chance(0.8) else axes


def cases(key: Key, most: int = 4) -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray]]]:
    """The name, the model and the inputs of nodes of an operator: of a part of its types, if these are many, `most` of each."""
    version = max(declarations[key])
    kinds = combinations(key, version)
    kinds = kinds[:: 5 if len(kinds) > 50 else 1]
    for types in kinds:
        count = most if len(kinds) < 20 and any(t.kind == "f" for t in types.values()) else 1
        for n, d in enumerate(draws(key, version, types, count, Large)):
            d.fixed |= {i for i in range(len(d.inputs)) if reads_on_host(declarations[key][version], i)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of type inference
                case = as_case(0, n, *key, d, "")
            yield f"{name_of(key)} {' '.join(t.name for t in types.values())} {n}", case.model, case.feeds


def is_x86() -> bool:
    """Whether the levels of x86-64 run here."""
    return str(native().target.triple).startswith("x86_64")


def name_of(key: Key) -> str:
    """The operator in names of cases."""
    return ":".join(part for part in (shown_domain(key[0]), key[1]) if part)


def bits(y: np.ndarray) -> bytes:
    """The bits of an array, with one NaN."""
    y = np.ascontiguousarray(y)
    return (np.where(np.isnan(y), np.array(np.nan, y.dtype), y) if y.dtype.kind == "f" else y).tobytes()


def computed(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], threads: int = 1) -> dict[str, Any]:
    """The steps of a session, and the digest of what two runs return."""
    rep = SingaBackend.prepare(model, deterministic=True)
    if threads > 1:  # which the option refuses
        rep = SingaRep(rep.graph, rep.device, options=Options(threads, deterministic=True))
    with np.errstate(all="ignore"):
        first, second = (b"".join(map(bits, rep.run(list(feeds.values())))) for _ in range(2))
    assert first == second
    return {"steps": kernels_used(rep), "digest": hashlib.sha256(first).hexdigest()}


def is_compiled(found: Mapping[str, Any]) -> bool:
    """Whether machine code computes all steps of a session."""
    return bool(found["steps"]) and all(step.startswith("machine.") for step in found["steps"])


@contextmanager
def at(level: str) -> Iterator[None]:
    """Compile for a level of compile.LEVELS."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compiled", "kept"):
            patch.setattr(frames, name, partial(getattr(frames, name), features=LEVELS[level][2]))
        patch.setattr(frames, "_KNOWN", {})
        yield


@contextmanager
def small_parts() -> Iterator[None]:
    """Divide all work among threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "PARALLEL", 0)
        patch.setattr(frames, "CHUNK", 16)
        yield


# On several processors


def draw(path: Path) -> None:
    """Write all cases."""
    arrays: dict[str, Any] = {}
    for key in KEYS:
        for name, model, feeds in cases(key):
            arrays[f"{name}/model"] = np.frombuffer(model.SerializeToString(), np.uint8)
            arrays |= {f"{name}/{k}": v for k, v in feeds.items()}
    for name in NETS:
        model, given = net(name)
        arrays[f"{name} net/model"] = np.frombuffer(model.SerializeToString(), np.uint8)
        arrays |= {f"{name} net/{i.name}": v for i, v in zip(model.graph.input, given, strict=True)}
    np.savez(path, **arrays)


def compute(path: Path, threads: int = 1) -> dict[str, Any]:
    """What is computed of each case."""
    models: dict[str, onnx.ModelProto] = {}
    feeds: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for name in arrays.files:
            case, _, what = name.rpartition("/")
            if what == "model":
                models[case], feeds[case] = onnx.ModelProto.FromString(arrays[name].tobytes()), {}
            else:
                feeds[case][what] = arrays[name]
    found = {case: computed(model, feeds[case], threads) for case, model in models.items()}
    return found | {f"{name} training": training(name) | {"steps": []} for name in NETS}


def differences(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with the results of several processors: other bits without a reason, and reasons that nothing needs."""
    first, *others = found
    wrong, needed = [], set()
    for (case, a), other in product(found[first].items(), others):
        b, operator = found[other][case], case.split()[0]
        if a["digest"] != b["digest"]:
            needed.add(operator)
            if operator not in OTHER_BITS or (is_compiled(a) and is_compiled(b)):
                wrong.append(f"{case}: {first} by {', '.join(a['steps'])} has other bits than {other} by {', '.join(b['steps'])}")
    return wrong + [f"{operator} has a reason for other bits, but none" for operator in OTHER_BITS if operator not in needed]


def main(folder: Path, interpreters: Sequence[str]) -> int:
    """Compute here and by other interpreters; returns 1 if bits differ."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(path := folder / "cases.npz")
    found = {"one thread": compute(path)}
    with small_parts():
        found["two threads"] = compute(path, 2)
    if is_x86():
        with at("avx2"):
            found["AVX2"] = compute(path)
    for python in interpreters:
        command = [python, "-m", "tests.helpers.elementwise_bits", str(path), str(result := folder / "result.json")]
        subprocess.run(command, check=True)
        found |= json.loads(result.read_text())
    for name, results in found.items():
        print(f"bits: {name}: machine code computes {sum(map(is_compiled, results.values()))} of {len(results)} cases")
    wrong = differences(found)
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    if reason := available():
        sys.exit(f"bits: there must be machine code, got none: {reason}")
    place, *rest = sys.argv[1:]
    if place.endswith(".npz"):
        Path(rest[0]).write_text(json.dumps({platform.machine(): compute(Path(place))}))
    else:
        sys.exit(main(Path(place), rest))
