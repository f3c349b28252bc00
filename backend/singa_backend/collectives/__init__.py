"""Communication between the processes of one training: sums, collections and copies of arrays."""

from .communicator import Communicator, Handle
from .environment import launched_rank, launched_size
from .launch import communicator, nccl_group
from .local import LocalGroup
from .single import SingleProcess

__all__ = [
    "Communicator",
    "Handle",
    "LocalGroup",
    "SingleProcess",
    "communicator",
    "launched_rank",
    "launched_size",
    "nccl_group",
]
