"""The name of a model that is compared before version 0.3."""

from ..deprecation import old_names
from .model import ComparedModel

__getattr__ = old_names("singa_backend.debug", {"Source": ComparedModel})
