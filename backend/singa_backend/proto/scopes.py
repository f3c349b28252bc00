"""The module of a PyTorch network that a node was exported from: by its metadata, or by its name."""

from __future__ import annotations

import ast
from contextlib import suppress

from onnx import NodeProto

SCOPES = "pkg.torch.onnx.name_scopes"
"""The key of the metadata in which PyTorch's exporter stores the scopes of a node."""

_LONGEST = 10_000


def stored_scopes(node: NodeProto) -> list[str]:
    """The scopes in the metadata of a node, without that of the node: ['', 'body', 'body.0']; empty if there are none."""
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                found = ast.literal_eval(entry.value[:_LONGEST])
                if isinstance(found, list) and all(isinstance(n, str) for n in found):
                    return found[:-1]
    return []


def named_scope(name: str) -> str:
    """The path in the name of a node, in which a child of a container repeats its name: /body/body.2/Gemm; "" without one."""
    parts: list[str] = []
    for part in name.split("/")[1:-1] if name.startswith("/") else ():
        if parts and part.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)
