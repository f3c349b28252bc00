"""The reader of arrays, archives and JSON: intact files are read exactly, damaged ones are refused before they are unpacked."""

from __future__ import annotations

import io
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import OptionalProto, SequenceProto, TensorProto, TypeProto, helper, numpy_helper

from singa.cli import main
from singa_backend import InvalidInput, Limits, ResourceExhausted
from singa_backend.io import archives, files
from singa_backend.io.documents import read_document
from singa_backend.limits import Budget, spend
from singa_backend.proto import test_data

MIB = 1 << 20

ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "big endian": np.array([1, -2], ">i4"),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.int64),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "text": np.array(["a", "ü", ""]),
    "bytes": np.array([b"ab", b"c"]),
    "half": np.array([1.5], np.float16),
    "file": np.ones(1, np.uint8),
    "../up": np.ones(1, np.int8),
    "": np.zeros(1),
    "x.npy": np.ones(2),
}


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        files.write_npz(file, ARRAYS)
    return path


def test_arrays_of_any_name_and_dtype_come_back(npz: Path, tmp_path: Path) -> None:
    with archives.open_arrays(npz, "SX307") as stored:
        assert list(stored.names) == list(ARRAYS)
        for name, array in ARRAYS.items():
            shape, dtype = stored.header(name)
            found = stored[name]
            assert (found.shape, found.dtype) == (shape, dtype) == (array.shape, array.dtype.newbyteorder("="))
            np.testing.assert_array_equal(found, array)
            np.save(tmp_path / "one.npy", array)
            np.testing.assert_array_equal(archives.read_array(tmp_path / "one.npy", "SX307"), array)


def test_numpy_reads_what_is_written_and_the_reader_what_numpy_writes(npz: Path, tmp_path: Path) -> None:
    with np.load(npz) as stored:
        assert all(np.array_equal(stored[f"{n}.npy"], a) for n, a in ARRAYS.items() if n)
    np.savez_compressed(tmp_path / "c.npz", x=ARRAYS["matrix"])
    with archives.open_arrays(tmp_path / "c.npz", "SX307") as stored:
        np.testing.assert_array_equal(stored["x"], ARRAYS["matrix"])


def test_equal_arrays_make_equal_files() -> None:
    one, two = io.BytesIO(), io.BytesIO()
    files.write_npz(one, ARRAYS)
    files.write_npz(two, dict(ARRAYS))
    assert one.getvalue() == two.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_nothing_is_unpacked_beyond_a_limit(method: int, tmp_path: Path) -> None:
    """The header is enough: an array above `tensor_bytes`, and arrays that are above `live_bytes` together."""
    path = tmp_path / "z.npz"
    with zipfile.ZipFile(path, "w", method) as pack:
        for name in "abcd":
            file = io.BytesIO()
            np.save(file, np.zeros(MIB, np.uint8))
            pack.writestr(f"{name}.npy", file.getvalue())

    def read(**limits: int) -> int:
        tracemalloc.start()
        try:
            with spend(Budget(Limits(**limits))), archives.open_arrays(path, "SX307") as stored:
                found = [stored[n] for n in stored.names]
            return sum(a.nbytes for a in found)
        except ResourceExhausted as error:
            assert error.code in ("SX603", "SX604")
            return -tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert read() == 4 * MIB
    assert -MIB // 2 < read(tensor_bytes=MIB - 1) < 0
    assert -4 * MIB < read(live_bytes=3 * MIB) < -MIB


def test_a_stream_is_cut_at_its_declared_size(tmp_path: Path) -> None:
    """The directory and the header state four bytes; the stream unpacks to a megabyte."""
    file = io.BytesIO()
    np.save(file, np.zeros(1, np.float32))
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr("x.npy", file.getvalue() + bytes(MIB))
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    for place in (at + 24, data.index(b"PK\x03\x04") + 22):
        data[place : place + 4] = len(file.getvalue()).to_bytes(4, "little")
    path.write_bytes(data)
    with archives.open_arrays(path, "SX307") as stored:
        tracemalloc.start()
        with pytest.raises(InvalidInput, match="CRC"):
            stored["x"]
        assert tracemalloc.get_traced_memory()[1] < MIB // 2
        tracemalloc.stop()


def test_the_directory_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w") as pack:
        for i in range(100):
            pack.writestr("m" * 60_000 + str(i), b"")
    with pytest.raises(InvalidInput, match="directory"), archives.open_archive(path, "SX307"):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to(p.name)])
def test_only_regular_files_are_opened(make: object, tmp_path: Path) -> None:
    path = tmp_path / "f"
    make(path)  # type: ignore[operator]  # any of the functions
    for read in (archives.read_array, archives.read_bytes, read_document):
        with pytest.raises(InvalidInput) as caught:
            read(path, "SX307")
        assert caught.value.code == "SX307"


# --- serialized values ------------------------------------------------------------------------------------------------

FLOAT = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
VALUES = {
    "tensor": (numpy_helper.from_array(ARRAYS["matrix"]), FLOAT),
    "undeclared": (numpy_helper.from_array(ARRAYS["matrix"]), TypeProto()),
    "text": (numpy_helper.from_array(np.array(["a", "ü"], object)), helper.make_tensor_type_proto(TensorProto.STRING, None)),
    "sequence": (
        numpy_helper.from_list([np.ones(2, np.float32), np.ones(3, np.float32)]),
        helper.make_sequence_type_proto(FLOAT),
    ),
    "empty sequence": (numpy_helper.from_list([], dtype=SequenceProto.TENSOR), helper.make_sequence_type_proto(FLOAT)),
    "sequences": (
        numpy_helper.from_list([[np.ones(1, np.float32)], [np.ones(2, np.float32)]]),
        helper.make_sequence_type_proto(helper.make_sequence_type_proto(FLOAT)),
    ),
    "optional": (numpy_helper.from_optional(np.ones(2, np.float32)), helper.make_optional_type_proto(FLOAT)),
    "absent": (numpy_helper.from_optional(None, dtype=OptionalProto.TENSOR), helper.make_optional_type_proto(FLOAT)),
    "map": (
        numpy_helper.from_dict({1: np.array(0.5, np.float32), 2: np.array(1.5, np.float32)}),
        helper.make_map_type_proto(TensorProto.INT64, FLOAT),
    ),
}
PLAIN = {"absent": None, "map": {1: 0.5, 2: 1.5}, "text": np.array(["a", "ü"], object)}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b)


@pytest.mark.parametrize("name", VALUES)
def test_serialized_values_are_those_of_onnx(name: str, tmp_path: Path) -> None:
    proto, declared = VALUES[name]
    (tmp_path / "x.pb").write_bytes(proto.SerializeToString())
    read = {TensorProto: numpy_helper.to_array, SequenceProto: numpy_helper.to_list, OptionalProto: numpy_helper.to_optional}
    expected = PLAIN[name] if name in PLAIN else read[type(proto)](proto)
    assert equal(test_data.read_value(tmp_path / "x.pb", declared), expected)


@pytest.mark.parametrize("of", VALUES)
@pytest.mark.parametrize("name", VALUES)
def test_values_of_another_type_are_refused_or_read_whole(name: str, of: str, tmp_path: Path) -> None:
    """Protocol Buffers parse one message as another: never a bare error, and an array only of the declared kind."""
    (tmp_path / "x.pb").write_bytes(VALUES[name][0].SerializeToString())
    try:
        found = test_data.read_value(tmp_path / "x.pb", VALUES[of][1])
    except InvalidInput as error:
        assert error.code == "SX307"
    else:
        kinds = {"sequence_type": list, "map_type": dict, "optional_type": (np.ndarray, type(None))}
        assert isinstance(found, kinds.get(VALUES[of][1].WhichOneof("value") or "", np.ndarray))


def test_the_inputs_of_a_set_have_the_names_of_the_model(tmp_path: Path) -> None:
    """In old models the initializers are among the inputs, and files count all of them."""
    x, w, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xwy")
    node = helper.make_node("Sub", ["x", "w"], ["y"])
    weights = [numpy_helper.from_array(np.ones(2, np.float32), "w")]
    graph = helper.make_graph([node], "g", [w, x], [y], weights)
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=3, opset_imports=[helper.make_opsetid("", 8)]).SerializeToString())
    (tmp_path / "set").mkdir()
    for i, array in enumerate([np.array([5, 5]), np.array([7, 8])]):
        (tmp_path / "set" / f"input_{i}.pb").write_bytes(numpy_helper.from_array(array.astype(np.float32)).SerializeToString())
    (tmp_path / "set" / "output_0.pb").write_bytes(numpy_helper.from_array(np.array([2, 3], np.float32)).SerializeToString())
    found = CliRunner().invoke(main, ["run", str(path), "--data", str(tmp_path / "set")])
    assert found.exit_code == 0, found.output
