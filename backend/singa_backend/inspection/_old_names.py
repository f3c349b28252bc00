"""The name of the checker's result before version 0.2."""

from ..deprecation import old_names
from ..proto.checker import CheckerResult

__getattr__ = old_names("singa_backend.inspection", {"Opinion": CheckerResult})
