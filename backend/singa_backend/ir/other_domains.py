"""What the operators of a domain are that ONNX does not define, and what can be done: the hints of the reader's problems."""

from __future__ import annotations

from ..proto.schemas import MICROSOFT, lax, load_domain, schemas

_DOMAINS = {
    f"{MICROSOFT}.nchwc": "com.microsoft.nchwc has layouts for one processor, which onnxruntime's optimizer writes at its "
    "highest level: use the file before optimization, or optimize at the level 'extended'",
    "com.ms.internal.nhwc": "com.ms.internal.nhwc is internal to onnxruntime, which rewrites a loaded model with it: use the "
    "file before optimization",
    MICROSOFT: "com.microsoft is the domain of onnxruntime's own operators, of which sonnx has those with a CPU kernel and a few "
    "more (reports/microsoft.md): use the file before the step that wrote this one",
    "ai.onnx.contrib": "ai.onnx.contrib is the domain of onnxruntime-extensions (tokenizers, decoders of images and audio): run "
    "them outside the model, and export the rest",
    "qonnx": "QONNX files have quantizers of any number of bits: convert them with the tools of qonnx, for example to the QDQ "
    "format of ONNX",
    "onnx.brevitas": "Brevitas wrote its own quantizers: export with its QCDQ or QDQ export, which writes ONNX's operators",
    "trt.plugins": "the operators are plugins of TensorRT: only TensorRT with these plugins runs them; export without them",
    "org.pytorch.aten": "PyTorch's exporter wrote operators that ONNX cannot express: export without its ATen fallback",
    "ai.onnx.preview.training": "the operators are ONNX's preview of training",
}
"""The hint by the beginning of the domain; a longer name precedes its beginning."""

_TRAINING = "onnxruntime-training writes this operator: use the inference model of its artifacts, or train the model with sonnx"
_COMPILED = "the node holds a model that an accelerator's compiler wrote: use the model before compilation"
_MICROSOFT_ONLY = {
    "EPContext": _COMPILED,
    "Snpe": _COMPILED,
    "YieldOp": _TRAINING,
    "ConcatTraining": _TRAINING,
    "InPlaceAccumulator": _TRAINING,
    "AdamWOptimizer": _TRAINING,
    "SGDOptimizer": _TRAINING,
    "ATen": _TRAINING,
    "PythonOp": _TRAINING,
}


def of_domain(domain: str, name: str, lines: str) -> str:
    """The hint for an operator of a domain that ONNX does not define.

    Args:
        domain: the domain.
        name: the operator type.
        lines: the Python lines that define it; "" to leave them out.
    """
    known = next((text for key, text in _DOMAINS.items() if domain == key or domain.startswith(f"{key}.")), "")
    if domain == MICROSOFT:
        training = _TRAINING if name.endswith("Grad") else ""
        known = next((text for key, text in _MICROSOFT_ONLY.items() if name.startswith(key)), training) or known
    own = f"add its operators to the model as functions, or define them, in a module for --operators{lines and f':{lines}'}"
    return f"{known}; or {own}" if known else f"the domain {domain!r} is not one of ONNX's: {own}"


def newer(name: str) -> str:
    """The hint for an operator that ONNX defines at a later opset only: "" unless com.microsoft has one of this name."""
    load_domain(MICROSOFT)
    if (MICROSOFT, name) not in schemas:
        return ""
    return f"com.microsoft has an operator {name}, too: if it is meant, `sonnx sanitize --domains` adds the domain"


def without_domain(name: str) -> str:
    """The hint for an operator of ONNX's domain that ONNX does not define: "" unless onnxruntime has it."""
    if name in lax:
        return f"onnxruntime reads {name} in ONNX's domain up to opset {lax[name]} only"
    load_domain(MICROSOFT)
    if (MICROSOFT, name) not in schemas:
        return ""
    return f"{name} is an operator of com.microsoft, and the node lacks that domain: `sonnx sanitize --domains` adds it"
