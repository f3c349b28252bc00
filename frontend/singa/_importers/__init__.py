"""Models of other frameworks, by way of ONNX: the framework's own exporter writes the file, in memory where it can.

    model = sonnx.from_pytorch(net, x, train=True)      # also from_tensorflow, from_paddle, from_sklearn, from_onnx

A framework is imported when its function is called, and nowhere else.
"""

from ._common import ExporterFailure
from ._onnx import from_onnx
from ._paddle import from_paddle
from ._pytorch import from_pytorch
from ._sklearn import from_sklearn
from ._tensorflow import from_tensorflow

__all__ = ["ExporterFailure", "from_onnx", "from_paddle", "from_pytorch", "from_sklearn", "from_tensorflow"]
