"""Files that onnxruntime's tools make of exported nets, and their comparison with onnxruntime.

python tests/torch/onnxruntime_files.py FOLDER    writes them, compares each, and prints the counts
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions

from singa import sonnx
from singa_backend import SingaBackend
from singa_backend.engines.oracle import EngineFailure, Oracle

_spec = importlib.util.spec_from_file_location("onnxruntime_nets", Path(__file__).with_name("onnxruntime_nets.py"))
assert _spec is not None and _spec.loader is not None
nets = importlib.util.module_from_spec(_spec)
sys.modules["onnxruntime_nets"] = nets
_spec.loader.exec_module(nets)

MICROSOFT = "com.microsoft"
TOLERANCE, TOLERANCE16 = 1e-4, 5e-3
"""The bounds of a difference, relative to the largest value of an output; of files with 16-bit floats, the second."""

WAYS = ("plan", "definitions", "lowered", "lowered in onnxruntime")
"""How a file is run here, each compared with onnxruntime's run of the file."""


# --- the tools ------------------------------------------------------------------------------------------------------------


def fuse(source: Path, to: Path, kind: str, *, half: bool = False, option: str = "", **how: Any) -> None:
    """Apply the fusions of onnxruntime.transformers."""
    options = FusionOptions(kind)
    if option:
        setattr(options, option, True)
    made = optimizer.optimize_model(
        str(source), model_type=kind, num_heads=nets.HEADS, hidden_size=nets.HIDDEN, optimization_options=options,
        **{"opt_level": 0, **how},
    )  # fmt: skip
    if half:
        made.convert_float_to_float16(keep_io_types=True)
    made.save_model_to_file(str(to))


def optimize(source: Path, to: Path, level: str) -> None:
    """Write what the session's optimizer makes of a file."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(to)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def few_bits(source: Path, to: Path, bits: int, level: int = 0, *, symmetric: bool = True, gather: bool = False) -> None:
    """Quantize the weights of products (and of Gather) to blocks of 4 or 8 bits."""
    kinds = {"op_types_to_quantize": ("MatMul", "Gather"), "quant_axes": (("MatMul", 0), ("Gather", 1))} if gather else {}
    made = MatMulNBitsQuantizer(
        onnx.load(source), bits=bits, block_size=32, is_symmetric=symmetric, accuracy_level=level, **kinds
    )
    made.process()
    made.model.save_model_to_file(str(to))


def bnb4(source: Path, to: Path, kind: int) -> None:
    """Quantize the weights of products to FP4 (0) or NF4 (1)."""
    made = MatMulBnb4Quantizer(onnx.load(source), kind, 32)
    made.process()
    made.model.save_model_to_file(str(to))


class _Batches(quantization.CalibrationDataReader):  # type: ignore[misc]
    """The inputs of a net, once."""

    def __init__(self, feeds: dict[str, np.ndarray]) -> None:
        self.batches = iter([feeds])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


def static(source: Path, to: Path, feeds: dict[str, np.ndarray], form: str, **how: Any) -> None:
    """Quantize activations and weights to 8 bits."""
    options = {"quant_format": quantization.QuantFormat[form], **how}
    quantization.quantize_static(str(source), str(to), _Batches(feeds), **options)


def without_import(source: Path, to: Path) -> None:
    """Remove the import of com.microsoft."""
    model = onnx.load(source)
    kept = [o for o in model.opset_import if o.domain != MICROSOFT]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    onnx.save(model, to)


# --- the corpus -----------------------------------------------------------------------------------------------------------


class File(NamedTuple):
    """A written file: its path, the inputs, whether it computes in float16, and whether it rounds activations to integers."""

    path: Path
    feeds: dict[str, np.ndarray]
    half: bool
    rounds: bool = False


def by_definition(file: File) -> set[str]:
    """Return onnxruntime's operators in a file that a plan computes by their definitions, not by a kernel or their body."""
    own = {n.op_type for n in onnx.load(file.path, load_external_data=False).graph.node if n.domain == MICROSOFT}
    steps = SingaBackend.prepare(str(file.path)).profile(file.feeds).steps
    whole = [s for s in steps if s.kernel == "definition" and not any("of the body" in n for n in s.notes)]
    return {name for s in whole for name in s.operators} & own


def _forms(net: Any, source: Path) -> dict[str, Callable[[Path], None]]:
    """What the tools make of an exported net: functions that write to a path, by name."""
    fused = source.with_name(f"{source.stem}-fused.onnx")
    int8 = quantization.QuantType.QInt8
    forms: dict[str, Callable[[Path], None]] = {
        "fused": lambda p: fuse(source, p, net.kind),
        "fused-level1": lambda p: fuse(source, p, net.kind, opt_level=1),
        "fused-onnxruntime": lambda p: optimizer.optimize_by_onnxruntime(str(source), optimized_model_path=str(p), opt_level=99),
        "fused-fp16": lambda p: fuse(source, p, net.kind, half=True),
        "fused-mha": lambda p: fuse(source, p, net.kind, option="use_multi_head_attention"),
        "extended": lambda p: optimize(source, p, "EXTENDED"),
        "all": lambda p: optimize(source, p, "ALL"),
        "fused-all": lambda p: optimize(fused, p, "ALL"),
        "dynamic": lambda p: quantization.quantize_dynamic(str(source), str(p), weight_type=int8),
        "fused-dynamic": lambda p: quantization.quantize_dynamic(str(fused), str(p), weight_type=int8),
        "fused-dynamic-all": lambda p: optimize(source.with_name(f"{source.stem}-fused-dynamic.onnx"), p, "ALL"),
        "int4": lambda p: few_bits(source, p, 4, symmetric=False),
        "int4-gather": lambda p: few_bits(source, p, 4, gather=True),
        "int8": lambda p: few_bits(source, p, 8),
        "fused-int4": lambda p: few_bits(fused, p, 4),
        "fused-int4-level4": lambda p: few_bits(fused, p, 4, 4),
        "fp4": lambda p: bnb4(source, p, 0),
        "nf4": lambda p: bnb4(source, p, 1),
        "fused-no-import": lambda p: without_import(fused, p),
        "int4-no-import": lambda p: without_import(source.with_name(f"{source.stem}-int4.onnx"), p),
    }
    for form in ("QOperator", "QDQ"):
        forms[f"static-{form}"] = lambda p, form=form: static(source, p, net.inputs, form)  # type: ignore[misc]
    forms["fused-static-QDQ"] = lambda p: static(fused, p, net.inputs, "QDQ")
    forms["static-QDQ-extended"] = lambda p: optimize(source.with_name(f"{source.stem}-static-QDQ.onnx"), p, "EXTENDED")
    forms["static-16-bit"] = lambda p: static(
        source, p, net.inputs, "QDQ", activation_type=quantization.QuantType.QUInt16, extra_options={"UseQDQContribOps": True}
    )
    return forms


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def write(name: str, folder: Path, failures: dict[str, str] | None = None) -> list[File]:
    """Write a net and its forms.

    Args:
        name: of a net.
        folder: where to write.
        failures: receives the forms that a tool cannot make, with its message.

    Returns:
        The files with operators of onnxruntime or 8-bit ones: a form that equals another, or is ONNX's alone, is left out.
    """
    net = nets.make(name)
    source = nets.export(net, folder / f"{name}.onnx")
    files, seen = [], {source.read_bytes()}
    for form, made in _forms(net, source).items():
        path = folder / f"{name}-{form}.onnx"
        try:
            with _quiet():
                made(path)
        except Exception as error:
            if failures is not None:
                failures[path.stem] = f"{type(error).__name__}: {error}"
            continue
        content, model = path.read_bytes(), onnx.load(path)
        own = any(n.domain == MICROSOFT for n in model.graph.node)
        rounds = "dynamic" in form or "static" in form
        if content not in seen and (own or rounds):
            files.append(File(path, net.inputs, "fp16" in form, rounds))
        seen.add(content)
    return files


# --- the comparison -------------------------------------------------------------------------------------------------------


def relative(found: list[Any], expected: list[Any]) -> float:
    """The largest difference of each output, relative to its largest value; the largest of them."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        if b.size:
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)))
    return worst


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in ONNX's operators, at opset 21 or its own if that is newer."""
    return sonnx.convert(model, max(21, *(o.version for o in model.opset_import if o.domain == "")), lower=True)


class Refused(Exception):
    """onnxruntime does not run a file."""


def reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray], oracle: Oracle) -> list[Any]:
    """Run a model in onnxruntime and return its outputs."""
    try:
        run = oracle.run(model.SerializeToString(), feeds, timeout=60)
    except EngineFailure as error:
        raise Refused(str(error)) from error
    return [run[o.name] for o in model.graph.output]


def exact(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without accuracy_level 4, at which onnxruntime rounds activations to 8 bits."""
    model = copy.deepcopy(model)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    return model


def compare(file: File, oracle: Oracle, ways: tuple[str, ...] = WAYS) -> dict[str, float]:
    """Run a file in each way and return the difference from onnxruntime's results.

    Args:
        file: to run.
        oracle: onnxruntime, without optimizations.
        ways: of `WAYS`.

    Returns:
        The difference by way.

    Raises:
        Refused: onnxruntime does not run the file.
    """
    model = onnx.load(file.path)
    expected = reference(exact(model), file.feeds, oracle)
    differences = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model does not import com.microsoft")
        lower = lowered(model)
        assert {n.domain for n in lower.graph.node} == {""}
        for way in ways:
            if way == "plan":
                rep = SingaBackend.prepare(exact(model))  # a plan rounds activations at level 4 too
                rep.run(file.feeds)
                found = list(rep.run(file.feeds))
            elif way == "definitions":
                found = list(SingaBackend.run_model(model, file.feeds, optimize=0))
            elif way == "lowered":
                found = list(SingaBackend.run_model(lower, file.feeds))
            else:
                found = reference(lower, file.feeds, oracle)
            differences[way] = relative(found, expected)
    return differences


def each_node(file: File, oracle: Oracle) -> list[str]:
    """Run each node of a file on onnxruntime's own values of its inputs.

    At a half, the last bit of a real decides to which 8-bit value it is rounded: whole files differ by such steps.

    Args:
        file: to run.
        oracle: onnxruntime, without optimizations.

    Returns:
        The nodes whose results differ by more than `TOLERANCE` of the largest value, or by more than one step of an integer.
    """
    model = exact(onnx.load(file.path))
    full = copy.deepcopy(model)
    del full.graph.output[:]
    full.graph.output.extend(onnx.ValueInfoProto(name=o) for n in model.graph.node for o in n.output if o)
    values = dict(zip([o.name for o in full.graph.output], reference(full, file.feeds, oracle), strict=True)) | file.feeds
    values |= {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    bad = []
    for node in model.graph.node:
        inputs, outputs = list(dict.fromkeys(i for i in node.input if i)), [o for o in node.output if o]
        infos = [
            [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.asarray(values[n]).dtype), None) for n in names]
            for names in (inputs, outputs)
        ]
        single = helper.make_model(helper.make_graph([node], "node", *infos), opset_imports=model.opset_import)
        single.ir_version = model.ir_version
        for name, found in zip(outputs, SingaBackend.run_model(single, [values[n] for n in inputs], optimize=0), strict=True):
            expected = np.asarray(values[name])
            if np.issubdtype(expected.dtype, np.integer):
                apart = np.abs(np.asarray(found).astype(np.int64) - expected.astype(np.int64)).max(initial=0)
                wrong = apart > (1 if "Q" in node.op_type or "Quantize" in node.op_type else 0)
            else:
                wrong = relative([found], [expected]) > TOLERANCE
            if wrong:
                bad.append(f"{node.op_type} {node.name}")
    return bad


def verdict(file: File, oracle: Oracle) -> tuple[str, dict[str, float]]:
    """Compare a file.

    Args:
        file: to run.
        oracle: onnxruntime, without optimizations.

    Returns:
        "agrees", "agrees node by node" (a file that rounds activations), "differs" or "refused by onnxruntime"; the differences.
    """
    try:
        found = compare(file, oracle)
    except Refused as error:
        return f"refused by onnxruntime: {error}", {}
    if max(found.values()) <= (TOLERANCE16 if file.half else TOLERANCE):
        return "agrees", found
    return "agrees node by node" if file.rounds and not each_node(file, oracle) else "differs", found


def main(folder: Path, *names: str) -> None:
    """Write and compare the files of every net, and print a row for each and the counts."""
    folder.mkdir(parents=True, exist_ok=True)
    counts, failures, operators = Counter[str](), dict[str, str](), Counter[str]()
    with Oracle("onnxruntime", optimise=False) as oracle:
        for name in names or nets.NETS:
            for file in write(name, folder, failures):
                operators.update({n.op_type for n in onnx.load(file.path).graph.node if n.domain == MICROSOFT})
                try:
                    word, found = verdict(file, oracle)
                except Exception as error:
                    word, found = f"{type(error).__name__}: {error}", {}
                counts[word.partition(":")[0]] += 1
                print(f"{file.path.stem:36} {word[:300]}", *(f"{d:.1e}" for d in found.values()), flush=True)
    print(dict(counts))
    print({name: operators[name] for name in sorted(operators)})
    for name, why in failures.items():
        print(f"not made: {name}: {why[:200]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
