"""Communication between the processes of one training: sums, collections and copies of arrays."""

from .communicator import Communicator, Handle
from .launch import communicator, launched_size, nccl_group
from .local import LocalGroup
from .single import SingleProcess

__all__ = ["Communicator", "Handle", "LocalGroup", "SingleProcess", "communicator", "launched_size", "nccl_group"]
