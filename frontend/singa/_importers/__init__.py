"""Imports models of other frameworks through ONNX files, which the framework's own exporter writes, in memory if it can.

    model = sonnx.from_pytorch(net, x, train=True)      # also from_tensorflow, from_paddle, from_sklearn, from_onnx

A framework is imported only when its function is called.
"""

from ._common import ExporterFailure
from ._onnx import from_onnx
from ._paddle import from_paddle
from ._pytorch import from_pytorch
from ._sklearn import from_sklearn
from ._tensorflow import from_tensorflow

__all__ = ["ExporterFailure", "from_onnx", "from_paddle", "from_pytorch", "from_sklearn", "from_tensorflow"]
