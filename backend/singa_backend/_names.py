"""The public names of the package: each is imported with its module when one of them is first used."""

from . import operators
from .backend import Outputs, SingaBackend, SingaRep, is_compatible, prepare, run_model, run_node, supports_device
from .errors import (
    ConstantTrainsWarning,
    DeviceFailure,
    DeviceUnavailable,
    InvalidInput,
    InvalidModel,
    MissingDependency,
    NoGradientWarning,
    OperatorError,
    Problem,
    ResourceExhausted,
    SonnxError,
    UnsupportedModel,
)
from .io import installation
from .ir.custom import CustomOperator, define_operator, register_operator
from .ir.graph import Graph, Node
from .ir.reader import read
from .limits import Limits
from .plans.profile import Profile
from .proto.values import Value
from .runtime.origins import NonFinite

__all__ = [
    "ConstantTrainsWarning",
    "CustomOperator",
    "DeviceFailure",
    "DeviceUnavailable",
    "Graph",
    "InvalidInput",
    "InvalidModel",
    "Limits",
    "MissingDependency",
    "NoGradientWarning",
    "Node",
    "NonFinite",
    "OperatorError",
    "Outputs",
    "Problem",
    "Profile",
    "ResourceExhausted",
    "SingaBackend",
    "SingaRep",
    "SonnxError",
    "UnsupportedModel",
    "Value",
    "define_operator",
    "installation",
    "is_compatible",
    "operators",
    "prepare",
    "read",
    "register_operator",
    "run_model",
    "run_node",
    "supports_device",
]
