"""Models whose large tensors are found in the wire format are those that protobuf parses, or protobuf reports the error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper

import singa_backend
from singa import sonnx
from singa_backend.errors import SonnxError
from singa_backend.proto import load, tensor_data, wire
from singa_backend.proto.save import tensors

SUITE = Path(onnx.__file__).parent / "backend" / "test" / "data"
REFUSED = (ValueError, DecodeError, RecursionError)


def restored(data: bytes, fields: wire.Fields, long: int = 0) -> tuple[ModelProto, int]:
    """The model, whose data are read where its references are, and the number of references."""
    model, count = ModelProto.FromString(wire.light_bytes(memoryview(data), fields, tensor_data.INSIDE, long)), 0
    for t in tensors(model):
        entries = {e.key: e.value for e in t.external_data}
        if t.data_location == TensorProto.EXTERNAL and entries.get("location") == tensor_data.INSIDE:
            offset, length = int(entries["offset"]), int(entries["length"])
            assert length > long and not t.HasField("raw_data") and offset + length <= len(data)
            t.raw_data, t.data_location = data[offset : offset + length], TensorProto.DEFAULT
            count += 1
    return plain(model), count


def plain(model: ModelProto) -> ModelProto:
    """Without what says that data which are in the message are not external."""
    for t in tensors(model):
        if t.HasField("raw_data") and t.raw_data and t.data_location != TensorProto.EXTERNAL:
            t.ClearField("data_location")
            t.ClearField("external_data")
    return model


def agrees(data: bytes, fields: wire.Fields = wire.EVERY) -> str:
    """ "same" if the model is that of protobuf, "refused" if protobuf is to report; raises AssertionError otherwise."""
    try:
        expected = plain(ModelProto.FromString(data))
    except DecodeError:
        expected = None
    try:
        found, _ = restored(data, fields)
    except REFUSED:
        return "refused"
    assert expected is not None
    assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    return "same"


def suite() -> Iterator[Path]:
    yield from sorted(SUITE.glob("*/*/model.onnx"))
    yield from sorted(SUITE.glob("light/*.onnx"))


def test_the_models_of_onnx_are_read_alike() -> None:
    references = 0
    for path in suite():
        data = path.read_bytes()
        expected = plain(ModelProto.FromString(data)).SerializeToString(deterministic=True)
        for fields in (wire.EVERY, wire.OUTER):
            found, count = restored(data, fields)
            assert found.SerializeToString(deterministic=True) == expected, path
            references += count
    assert references > 500


def small() -> ModelProto:
    """Tensors in an initializer, an attribute, a branch and the branch of a branch; one has no raw_data, one is external."""
    raw = [numpy_helper.from_array(np.arange(n, dtype=np.float32), f"raw{n}") for n in range(1, 6)]
    plain_floats = helper.make_tensor("floats", TensorProto.FLOAT, [3], [1, 2, 3])
    outside = TensorProto(name="outside", data_type=1, dims=[2], raw_data=b"ignored!", data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="elsewhere")
    x = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    inner = helper.make_graph([helper.make_node("Constant", [], ["a"], value=raw[0])], "inner", [], [], [raw[1]])
    middle = helper.make_graph([helper.make_node("If", ["c"], ["b"], then_branch=inner)], "middle", [], [], [raw[2]])
    nodes = [helper.make_node("If", ["c"], ["d"], then_branch=middle), helper.make_node("Constant", [], ["e"], value=raw[3])]
    graph = helper.make_graph(nodes, "outer", [x], [], [raw[4], plain_floats, outside])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_references_are_in_all_graphs_or_the_outer_one() -> None:
    data = small().SerializeToString()
    assert restored(data, wire.EVERY)[1] == 5 and restored(data, wire.OUTER)[1] == 2
    assert restored(data, wire.EVERY, 12)[1] == 2  # those of 16 and 20 bytes
    assert agrees(data) == agrees(data, wire.OUTER) == "same"


def test_damaged_models_are_those_of_protobuf_or_refused() -> None:
    data, found, draw = small().SerializeToString(), [], random.Random(5)
    for i in range(len(data)):
        damaged = [data[:i], data[:i] + data[i + 1 :], data[:i] + data[i : i + 1] + data[i:]]
        damaged += [data[:i] + bytes([b]) + data[i + 1 :] for b in {0, 0x7F, 0x80, 0xFF, data[i] ^ 1, draw.randrange(256)}]
        for case in damaged:
            found += [agrees(case), agrees(case, wire.OUTER)]
    assert found.count("same") > 1000 and found.count("refused") > 1000


def varint(value: int, size: int = 0) -> bytes:
    """A number; of so many bytes."""
    digits = [value >> shift & 127 for shift in range(0, max(7 * size, value.bit_length(), 1), 7)]
    return bytes(d | 128 for d in digits[:-1]) + bytes(digits[-1:])


def chunk(tag: int, data: bytes, size: int = 0, tag_size: int = 0) -> bytes:
    """A field of bytes."""
    return varint(tag << 3 | 2, tag_size) + varint(len(data), size) + data


TENSOR = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2]).SerializeToString()
OUTSIDE = varint(14 << 3) + varint(TensorProto.EXTERNAL)
RAW, OTHER = b"\0\0\x80?" * 2, b"\0\0\0@" * 2


def with_initializer(tensor: bytes) -> bytes:
    return chunk(7, chunk(5, tensor)) + varint(1 << 3) + varint(8)


def with_attribute(*parts: bytes) -> bytes:
    attribute = AttributeProto(name="value", type=AttributeProto.TENSOR).SerializeToString() + b"".join(parts)
    return chunk(7, chunk(1, chunk(5, attribute)))


CASES: dict[str, tuple[bytes, str]] = {
    "raw_data twice": (with_initializer(TENSOR + chunk(9, RAW) + chunk(9, OTHER)), "refused"),
    "long, then empty raw_data": (with_initializer(TENSOR + chunk(9, RAW) + chunk(9, b"")), "refused"),
    "raw_data before the dims": (with_initializer(chunk(9, RAW) + TENSOR), "same"),
    "raw_data and float_data": (with_initializer(TENSOR + chunk(9, RAW) + chunk(4, OTHER)), "same"),
    "raw_data of another wire type": (with_initializer(TENSOR + chunk(9, RAW) + varint(9 << 3) + varint(5)), "same"),
    "raw_data and a place": (with_initializer(TENSOR + chunk(9, RAW) + chunk(13, chunk(1, b"offset"))), "same"),
    "raw_data and an unknown location": (with_initializer(TENSOR + chunk(9, RAW) + varint(14 << 3) + varint(7)), "same"),
    "a reference in a file": (with_initializer(TENSOR + OUTSIDE + chunk(13, chunk(1, b"location") + chunk(2, b"\0"))), "same"),
    "external and raw_data": (with_initializer(TENSOR + chunk(9, RAW) + OUTSIDE), "same"),
    "malformed dims": (with_initializer(TENSOR + chunk(9, RAW) + chunk(1, b"\xff")), "refused"),
    "unknown fields": (chunk(77, b"x") + with_initializer(TENSOR + chunk(9, RAW) + chunk(99, b"y")), "same"),
    "fixed fields": (b"\x99\x06" + b"8" * 8 + b"\x9d\x06" + b"4" * 4 + with_initializer(TENSOR + chunk(9, RAW)), "same"),
    "a group": (varint(77 << 3 | 3) + varint(77 << 3 | 4) + with_initializer(TENSOR + chunk(9, RAW)), "refused"),
    "a group in a tensor": (with_initializer(TENSOR + chunk(9, RAW) + varint(77 << 3 | 3) + varint(77 << 3 | 4)), "refused"),
    "the field 0": (with_initializer(TENSOR + chunk(9, RAW) + chunk(0, b"x")), "refused"),
    "a tag of 5 bytes": (with_initializer(TENSOR + chunk(9, RAW, tag_size=5)), "same"),
    "a tag of 6 bytes": (with_initializer(TENSOR + chunk(9, RAW, tag_size=6)), "refused"),
    "a tag of 33 bits": (with_initializer(TENSOR + varint(1 << 32 | 9 << 3 | 2) + varint(8) + RAW), "refused"),
    "a length of 5 bytes": (with_initializer(TENSOR + chunk(9, RAW, size=5)), "same"),
    "a length of 6 bytes": (with_initializer(TENSOR + chunk(9, RAW, size=6)), "refused"),
    "a length beyond the tensor": (with_initializer(TENSOR + varint(9 << 3 | 2) + varint(9) + RAW), "refused"),
    "a length beyond the file": (with_initializer(TENSOR + varint(9 << 3 | 2) + varint((1 << 31) - 1) + RAW), "refused"),
    "a number of 10 bytes": (with_initializer(TENSOR + chunk(9, RAW) + varint(1 << 3) + varint(1, 10)), "same"),
    "a number of 11 bytes": (with_initializer(TENSOR + chunk(9, RAW) + varint(1 << 3) + varint(1, 11)), "refused"),
    "a name that is not UTF-8": (with_initializer(TENSOR + chunk(9, RAW) + chunk(8, b"\xff\xff")), "same"),
    "two graphs": (with_initializer(TENSOR + chunk(9, RAW)) * 2, "refused"),
    "two tensors of an attribute": (with_attribute(chunk(5, TENSOR + chunk(9, RAW)), chunk(5, chunk(9, OTHER))), "refused"),
    "two graphs of an attribute": (with_attribute(*[chunk(6, chunk(5, TENSOR + chunk(9, RAW)))] * 2), "refused"),
    "nested too deeply": (b"", "refused"),
}  # fmt: skip


def nested(depth: int) -> bytes:
    graph = chunk(5, TENSOR + chunk(9, RAW))
    for _ in range(depth):
        graph = chunk(1, chunk(5, chunk(6, graph)))
    return chunk(7, graph)


@pytest.mark.parametrize("name", list(CASES))
def test_unusual_encodings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model or the error of a file and of bytes are those without the scan."""
    data, verdict = CASES[name]
    data = data or nested(2000)
    assert agrees(data) == verdict
    path = tmp_path / "model.onnx"
    path.write_bytes(data)

    def outcome(function: Callable[[], tuple[ModelProto, object]]) -> tuple[str, object]:
        try:
            return "", [(t.name, tensor_data.tensor(t, None).tobytes()) for t in function()[0].graph.initializer]
        except SonnxError as error:
            return error.code, str(error).replace(str(path), "").lstrip(": ")

    expected = [outcome(partial(load.load_model, source)) for source in (path, data)]
    monkeypatch.setattr(load, "SMALL", 0)
    monkeypatch.setattr(load, "MAPPED", 0)

    def mapped(source: Path | bytes) -> tuple[ModelProto, object]:
        model, folder, within = load.map_model(source)
        for t in tensors(model) if within is not None else ():
            if any(e.value == tensor_data.INSIDE for e in t.external_data):
                array = tensor_data.tensor(t, folder, None, within)
                assert tensor_data.is_mapped(array) and not array.flags.writeable
                t.raw_data, t.data_location = array.tobytes(), TensorProto.DEFAULT
        return model, folder

    assert [outcome(partial(mapped, source)) for source in (path, data)] == expected


def linear(rows: int = 64, columns: int = 512) -> tuple[ModelProto, np.ndarray]:
    """A product by weights of 128 KiB, and its input."""
    draw = np.random.default_rng(1)
    w = numpy_helper.from_array(draw.standard_normal((rows, columns), np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, d]) for n, d in (("x", rows), ("y", columns)))
    graph: GraphProto = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), draw.standard_normal((1, rows), np.float32)


@pytest.mark.parametrize("prepare", [singa_backend.prepare, sonnx.prepare])
@pytest.mark.parametrize("odd", range(4))
def test_weights_stay_in_the_bytes_of_a_model(
    prepare: Callable[..., singa_backend.SingaRep], odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = linear()
    model.producer_name = "." * odd
    data = model.SerializeToString()
    expected = prepare(model).run([x])[0]
    monkeypatch.setattr(load, "SMALL", 0)
    rep = prepare(data)
    held = [a for states in rep._session.states.values() for _, a in states]
    assert all(np.may_share_memory(a, np.frombuffer(data, np.uint8)) for a in held) and len(held) == 1
    assert not any(a.flags.writeable for a in (*held, *rep.states.values()))
    for _ in range(2):
        assert np.array_equal(rep.run([x])[0], expected)
    assert np.array_equal(rep.run([x], validate=True)[0], prepare(model, optimize=0).run([x])[0])  # by aligned copies
    assert np.array_equal(rep.states["w"], numpy_helper.to_array(model.graph.initializer[0]))
    assert data == model.SerializeToString()


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_weights_in_memory_that_may_change_are_copied(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = linear()
    monkeypatch.setattr(load, "SMALL", 0)
    data = bytearray(model.SerializeToString())
    rep, expected = singa_backend.prepare(kind(data)), singa_backend.prepare(model).run([x])[0]
    data[:] = bytes(len(data))
    assert np.array_equal(rep.run([x])[0], expected)
