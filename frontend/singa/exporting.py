"""Functions that write a model to an ONNX file, and their options; the functions are also in `singa.sonnx`."""

from ._onnx.export import convert, export, to_onnx
from ._onnx.export_options import ExportReport, Options

__all__ = ["ExportReport", "Options", "convert", "export", "to_onnx"]
