"""The ONNX backend: operators, graphs, executors, and the runner of ONNX's conformance suite."""

from typing import TYPE_CHECKING

from ._lazy import __dir__ as __dir__
from ._lazy import __getattr__ as __getattr__

if TYPE_CHECKING:
    from ._names import *  # noqa: F403 - `_names.__all__` lists them
    from ._names import __all__ as __all__
