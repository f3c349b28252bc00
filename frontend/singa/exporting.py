"""Functions that write a model to an ONNX file, and their options; the functions are also in `singa.sonnx`."""

from ._onnx.export import ExportReport, Options, convert, export, to_onnx

__all__ = ["ExportReport", "Options", "convert", "export", "to_onnx"]
