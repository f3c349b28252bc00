"""Functions that write a model to an ONNX file, and their options; `sonnx` offers the functions too."""

from ._onnx.export import ExportReport, Options, convert, export, to_onnx

__all__ = ["ExportReport", "Options", "convert", "export", "to_onnx"]
