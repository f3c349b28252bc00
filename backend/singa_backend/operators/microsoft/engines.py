"""Why operators that only one engine or one device can run are not declared."""

from __future__ import annotations

from ._api import not_declared

not_declared(
    "it holds a model that one execution provider of onnxruntime has compiled; use the ONNX file from which it was compiled",
    "EPContext",
)
not_declared("it holds a model compiled for Qualcomm's SNPE; use the ONNX file from which it was compiled", "Snpe")
not_declared(
    "it writes records to an address in the memory of a device, which an input holds; it has no meaning outside that program",
    "SpeculativePrefixCommit",
)
