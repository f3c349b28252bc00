"""The wire format of a model: its large tensors are found without reading them, and the rest is parsed by protobuf.

What protobuf refuses, or merges from several parts, is refused here too: then the caller has protobuf parse the whole.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from onnx import TensorProto

Data: TypeAlias = mmap.mmap | memoryview
"""The bytes of a model."""


class Field(NamedTuple):
    """A field that leads to tensors.

    Attributes:
        fields: those of its message that lead on, by number; a TensorProto has none.
        repeated: whether a message may have it several times.
    """

    fields: Fields
    repeated: bool = True


Fields: TypeAlias = dict[int, Field]

# The field numbers of onnx.proto that lead from a ModelProto to its tensors.
_TENSOR: Fields = {}
_GRAPH: Fields = {5: Field(_TENSOR)}  # initializer
_GRAPH[1] = Field({5: Field({5: Field(_TENSOR, False), 6: Field(_GRAPH, False)})})  # node.attribute: t, g
EVERY: Fields = {7: Field(_GRAPH, False)}
"""The tensors of all graphs."""
OUTER: Fields = {7: Field({5: Field(_TENSOR), 1: Field({5: Field({5: Field(_TENSOR, False)})})}, False)}
"""The tensors of the outer graph only."""

_RAW_DATA = 9 << 3 | 2
"""The tag of TensorProto.raw_data."""


def light_bytes(data: Data, fields: Fields, location: str, long: int) -> bytes:
    """Replace the raw_data of long tensors by references to their places.

    Args:
        data: a serialized ModelProto.
        fields: `EVERY` or `OUTER`.
        location: of the external data that a reference is.
        long: tensors of more bytes than this are replaced.

    Returns:
        The serialized ModelProto; offsets of external data at this location are those in `data`.

    Raises:
        ValueError: the data are malformed, or protobuf would have to merge several parts of a message.
        DecodeError: a tensor is malformed.
        RecursionError: graphs are nested too deeply.
    """
    return b"".join(_stripped(data, 0, len(data), fields, location, long))


def _stripped(data: Data, at: int, end: int, fields: Fields, location: str, long: int) -> Iterator[bytes | memoryview]:
    """The message in data[at:end], with references in place of the raw_data of its long tensors."""
    once: set[int] = set()
    for tag, start, body, stop in _fields(data, at, end):
        field = fields.get(tag >> 3) if tag & 7 == 2 else None
        if field is not None and not field.repeated:
            if tag in once:
                raise ValueError("the parts of a message are to be merged")
            once.add(tag)
        if field is None or stop - body <= long:
            yield data[start:stop]
            continue
        if field.fields is _TENSOR:
            rest = _reference(data, body, stop, location, long)
        else:
            rest = b"".join(_stripped(data, body, stop, field.fields, location, long))
        yield _write_varint(tag) + _write_varint(len(rest)) + rest


def _reference(data: Data, at: int, end: int, location: str, long: int) -> bytes:
    """The TensorProto in data[at:end]; long raw_data are a reference."""
    rest: list[bytes | memoryview] = []
    raw: list[tuple[int, int]] = []
    for tag, start, body, stop in _fields(data, at, end):
        if tag == _RAW_DATA:
            raw.append((body, stop - body))
        if tag != _RAW_DATA or stop - body <= long:
            rest.append(data[start:stop])
    if len(raw) > 1:
        raise ValueError("a tensor has several raw_data")
    if not raw or raw[0][1] <= long:
        return bytes(data[at:end])
    proto = TensorProto.FromString(b"".join(rest))
    if proto.data_location == TensorProto.EXTERNAL:
        return bytes(data[at:end])
    proto.data_location = TensorProto.EXTERNAL
    del proto.external_data[:]
    for key, value in (("location", location), ("offset", str(raw[0][0])), ("length", str(raw[0][1]))):
        proto.external_data.add(key=key, value=value)
    return proto.SerializeToString()


def _fields(data: Data, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(tag, start, start of the content, end) of each field of the message in data[at:end]."""
    while at < end:
        start = at
        tag, body = _varint(data, at, end, 5)
        wire = tag & 7
        if wire == 2:
            size, body = _varint(data, body, end, 5)
            at = body + size
        elif wire == 0:
            _, at = _varint(data, body, end, 10)
        elif wire in (1, 5):
            at = body + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field is longer than its message")
        yield tag, start, body, at


def _varint(data: Data, at: int, end: int, most: int) -> tuple[int, int]:
    """The number at a place, of at most so many bytes, and where it ends."""
    value = 0
    for i in range(min(most, end - at)):
        byte = data[at + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            if most == 5 and value >= 1 << 32:
                break
            return value, at + i + 1
    raise ValueError("a number does not end, or is too large")


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
