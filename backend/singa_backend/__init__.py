"""The ONNX backend: operators, graphs, executors, and the runner of ONNX's conformance suite."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a type checker sees the names, and reports others
    from ._names import *  # noqa: F403 - `_names.__all__` lists them
    from ._names import __all__ as __all__
else:
    from ._lazy import __dir__ as __dir__
    from ._lazy import __getattr__ as __getattr__
