"""Hostile inputs, drawn: a damage, a door and a size.

A door is a call that reads what another program wrote: a file, a folder, an option, an argument.  Each has a format, whose files
can be damaged; `draw(seed, index)` chooses.  Doors take turns, so that each is drawn equally often.  To add a kind of damage, add
a function under the decorator of its format; every door of the format draws it.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import MapProto, OptionalProto, SequenceProto, TensorProto, helper, numpy_helper

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, MIB)
BOMBS = (16 * MIB, 64 * MIB, 256 * MIB)
LIMITS = {"tensor_bytes": 8 * MIB, "live_bytes": 24 * MIB}
"""The limits of the calls: a bomb of BOMBS exceeds them."""
LIMITED = [text for name, value in LIMITS.items() for text in ("--limit", f"{name}={value}")]

Rng = random.Random


@dataclass(frozen=True)
class Drawn:
    """A hostile input: `write` writes it into a folder; `call` passes it to the door."""

    door: str
    damage: str
    size: int
    write: Callable[[Path], None]
    call: Callable[[Path], Any]

    def __str__(self) -> str:
        return f"{self.door}-{self.damage}-{self.size}"


# --- damage to bytes and to files -------------------------------------------------------------------------------------

Damage = Callable[[Rng, bytes, int], bytes]
DAMAGES: dict[str, dict[str, Damage]] = {}


def damage(*formats: str) -> Callable[[Damage], Damage]:
    def add(function: Damage) -> Damage:
        for name in formats:
            DAMAGES.setdefault(name, {})[function.__name__] = function
        return function

    return add


@damage("npy", "zip", "json", "toml")
def truncated(rng: Rng, data: bytes, size: int) -> bytes:
    return data[: rng.randrange(len(data) - 1)] if len(data) > 1 else b""


@damage("npy", "zip", "json")
def empty(rng: Rng, data: bytes, size: int) -> bytes:
    return b""


@damage("npy", "zip", "pb", "json", "toml")
def noise(rng: Rng, data: bytes, size: int) -> bytes:
    return b"\xff" + rng.randbytes(size)


@damage("npy", "zip", "pb", "json", "toml")
def zeros(rng: Rng, data: bytes, size: int) -> bytes:
    return bytes(size)


# --- arrays -----------------------------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def npy_of(descr: str, shape: str, body: bytes, fortran: str = "False", version: int = 1, length: int | None = None) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    have = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + have.to_bytes(2 if version == 1 else 4, "little") + text + body


@damage("npy")
def absurd_shape(rng: Rng, data: bytes, size: int) -> bytes:
    shape = rng.choice(
        ["(1099511627776,)", "(0, 1152921504606846976)", "(9999999999999999999999,)", f"({'9' * 4000},)", "(-1,)", "(4, -4)",
         "(1.5,)", "'abc'", "None", "{}", "(True, 'x')", f"({'1, ' * 70})", "(1 << 40,)", "(65536, 65536, 65536)"]
    )  # fmt: skip
    return npy_of("'<f4'", shape, bytes(16), rng.choice(["True", "False"]))


@damage("npy")
def absurd_dtype(rng: Rng, data: bytes, size: int) -> bytes:
    descr = rng.choice(
        ["'|O'", "'O8'", "'<M8[s]'", "'<f16'", "'<c32'", "'|V2'", "'|V0'", "'<U0'", "'|S0'", "'<U999999999'", "'f4,f4'",
         "[('a', '<f4'), ('b', '<i4')]", "('<f4', (1000000000,))", "'nonsense'", "None", "3", "'<f3'", "[]",
         "'" + "f4," * 1000 + "'",
         "[('', '|O')]"]
    )  # fmt: skip
    return npy_of(descr, "(4,)", bytes(64))


@damage("npy")
def absurd_header(rng: Rng, data: bytes, size: int) -> bytes:
    return rng.choice(
        [
            npy_of("'<f4'", "(4,)", bytes(16), length=65535),
            npy_of("'<f4'", "(4,)", bytes(16), version=2, length=0xFFFFFFFF),
            npy_of("'<f4'", "(4,)", bytes(size), version=2, length=size),
            npy_of("'<f4'", "(4,)", bytes(16), version=9),
            npy_of("'<f4'", "(" * 4000, bytes(16)),
            npy_of("'<f4'", "-" * 9000 + "1", bytes(16)),
            npy_of("__import__('os').system('exit')", "(4,)", bytes(16)),
            npy_of("'<f4'", "(4,)", bytes(16), fortran="'maybe'"),
            npy_of("'<f4'", "(4,), 'shape': (5,)", bytes(16)),
            npy_of("'\xe9\xff'", "(4,)", bytes(16)),
            b"\x93NUMPY\x01\x00\x02\x00{}" + bytes(16),
            b"\x93NUMPY\x01\x00\x00\x00" + bytes(16),
            b"\x93NUMPX" + data[6:],
        ]
    )


@damage("npy")
def pickled(rng: Rng, data: bytes, size: int) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.array([{"a": 1}, [1]], dtype=object), allow_pickle=True)
    return rng.choice(
        [file.getvalue(), b"\x80\x04cos\nsystem\n(S'true'\ntR.", npy_of("'|O'", "(1,)", b"cos\nsystem\n(S'true'\ntR.")]
    )


@damage("npy")
def another_length(rng: Rng, data: bytes, size: int) -> bytes:
    return rng.choice([data + rng.randbytes(size), data[:-1], data[:-5], data + data])


@damage("npy")
def impossible_values(rng: Rng, data: bytes, size: int) -> bytes:
    return rng.choice(
        [npy_of("'|b1'", "(4,)", b"\x00\x01\x02\xff"), npy_of("'<U1'", "(2,)", b"\xff" * 8),
         npy_of("'<U1'", "(1,)", b"\0\xd8\0\0"),
         npy_of("'|S4'", "(1,)", b"\xff\xfe\xfd\xfc")]
    )  # fmt: skip


# --- archives ---------------------------------------------------------------------------------------------------------

CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"


def packed(members: dict[str, bytes], method: int = zipfile.ZIP_STORED, comments: dict[str, bytes] | None = None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as pack:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type, info.comment = method, (comments or {}).get(name, b"")
            pack.writestr(info, data)
    return file.getvalue()


def members(data: bytes) -> tuple[dict[str, bytes], dict[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        return {n: pack.read(n) for n in pack.namelist()}, {i.filename: i.comment for i in pack.infolist()}


def patched(data: bytes, signature: bytes, offset: int, form: str, value: int) -> bytes:
    """The archive with a field of its first record of a kind changed."""
    at = data.index(signature) + offset
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def both(data: bytes, central: int, form: str, value: int) -> bytes:
    """A field changed in the directory and in the member's own header, where it is two bytes earlier."""
    return patched(patched(data, CENTRAL, central, form, value), LOCAL, central - 2, form, value)


@damage("zip")
def flipped(rng: Rng, data: bytes, size: int) -> bytes:
    """A bit of a member's content: its checksum differs."""
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        info = rng.choice(pack.infolist())
    start = info.header_offset + 30 + len(info.filename.encode()) + int.from_bytes(data[info.header_offset + 28 :][:2], "little")
    at = start + rng.randrange(info.compress_size)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


@damage("zip")
def wrong_checksum(rng: Rng, data: bytes, size: int) -> bytes:
    return both(data, 16, "<I", rng.randrange(1 << 32))


@damage("zip")
def encrypted(rng: Rng, data: bytes, size: int) -> bytes:
    return both(data, 8, "<H", rng.choice([1, 0x41, 0x2001]))


@damage("zip")
def unknown_method(rng: Rng, data: bytes, size: int) -> bytes:
    return both(data, 10, "<H", rng.choice([1, 6, 9, 12, 14, 93, 95, 99, 65535]))


@damage("zip")
def damaged_stream(rng: Rng, data: bytes, size: int) -> bytes:
    """Members that claim to be deflated, with bzip2 or LZMA, and are not."""
    return both(data, 10, "<H", rng.choice([8, 12, 14]))


@damage("zip")
def lying_sizes(rng: Rng, data: bytes, size: int) -> bytes:
    offset = rng.choice([20, 24])
    return both(data, offset, "<I", rng.choice([0, 1, 7, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF]))


@damage("zip")
def lying_directory(rng: Rng, data: bytes, size: int) -> bytes:
    at = data.rindex(END)
    field, form, value = rng.choice([(12, "<I", 0xFFFFFFFE), (12, "<I", 7), (16, "<I", 0xFFFFFFFE), (12, "<I", 0), (16, "<I", 3)])
    return data[: at + field] + struct.pack(form, value) + data[at + field + 4 :]


@damage("zip")
def lying_offset(rng: Rng, data: bytes, size: int) -> bytes:
    return patched(data, CENTRAL, 42, "<I", rng.choice([1, 13, 0xFFFFFFFE, len(data)]))


@damage("zip")
def duplicate(rng: Rng, data: bytes, size: int) -> bytes:
    parts, comments = members(data)
    name = rng.choice(list(parts))
    other = "Q" * len(name.encode())
    made = packed({**parts, other: parts[name]}, comments={**comments, other: comments[name]})
    return made.replace(other.encode(), name.encode())


@damage("zip")
def other_members(rng: Rng, data: bytes, size: int) -> bytes:
    """A member has another name: one that leaves the folder, one of another file, one of no file."""
    parts, comments = members(data)
    old = rng.choice(list(parts))
    new = rng.choice(["../" * 8 + "tmp/evil", "/etc/passwd", "..\\evil", "a/b/c", ".npy.npy.exe", "x" * 200, "con", "\u202e"])
    return packed({new if n == old else n: v for n, v in parts.items()}, comments={new: comments[old], **comments})


@damage("zip")
def no_members(rng: Rng, data: bytes, size: int) -> bytes:
    return packed({rng.choice(["readme.txt", "dir/"]): b""})


@damage("zip")
def nested(rng: Rng, data: bytes, size: int) -> bytes:
    """Archives in archives."""
    parts, comments = members(data)
    name = rng.choice(list(parts))
    inner = packed(parts, comments=comments)
    for _ in range(rng.randrange(1, 20)):
        inner = packed({**parts, name: inner}, comments=comments)
    return inner


@damage("zip")
def many_members(rng: Rng, data: bytes, size: int) -> bytes:
    return packed({f"m{i}.txt": b"" for i in range(min(size, 20 * KIB) // 8)})


@damage("zip")
def endless_directory(rng: Rng, data: bytes, size: int) -> bytes:
    """A directory of more entries than an archive may have, each pointing to one member."""
    record = data[data.index(CENTRAL) : data.rindex(END)]
    times = 6 * MIB // len(record)
    start = data.index(CENTRAL)
    end = data[data.rindex(END) :]
    return data[:start] + record * times + end[:8] + struct.pack("<HHII", 0xFFFF, 0xFFFF, len(record) * times, start) + end[20:]


@damage("zip")
def bad_text(rng: Rng, data: bytes, size: int) -> bytes:
    """A name that claims to be UTF-8 and is not."""
    made = both(data, 8, "<H", 0x800)
    name = made[made.index(CENTRAL) + 46 :][:1]
    return (
        made.replace(name, b"\xff", 1)
        if name in made[:40]
        else made.replace(made[made.index(CENTRAL) + 46 :][:4], b"\xff\xfe\xff\xfe")
    )


# --- documents --------------------------------------------------------------------------------------------------------


@damage("json")
def blanks(rng: Rng, data: bytes, size: int) -> bytes:
    return rng.choice([b" " * 17 * MIB + data, data[:-1] + b" " * size, b"\n" * size])


@damage("json")
def deep(rng: Rng, data: bytes, size: int) -> bytes:
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return opening * size + b"1" + closing * size


@damage("json")
def wide(rng: Rng, data: bytes, size: int) -> bytes:
    unit = rng.choice([b"[]", b"{}", b"1e999", b'""', b'{"a":{}}', b"NaN"])
    return b"[" + b",".join([unit] * (8 * size // len(unit))) + b"]"


@damage("json")
def not_text(rng: Rng, data: bytes, size: int) -> bytes:
    return rng.choice([b'{"\xff": 1}', b"\xff\xfe{\0}\0", b'{"a": "\\ud800"', b"\0" + data, b'{"a": 0x10}', b"{'a': 1}", b"nul"])


@damage("json")
def repeated_key(rng: Rng, data: bytes, size: int) -> bytes:
    key = json.dumps(rng.choice(list(json.loads(data))))
    return b"{" + f"{key}: {{}}, {key}: {{}}".encode() + b"}"


@damage("json")
def large_number(rng: Rng, data: bytes, size: int) -> bytes:
    return rng.choice([b"9" * 5000, b"[" + b"9" * 5000 + b"]", b"-" + b"1" * size, b'{"environment": 1' + b"0" * 5000 + b"}"])


@damage("json")
def another_document(rng: Rng, data: bytes, size: int) -> bytes:
    """One value that the document needs is of another kind, or is not there."""
    document = json.loads(data)
    at = document
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else list(range(len(at))))
        if isinstance(at[key], (dict, list)) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        break
    if (
        key in ("environment", "totals", "executed", "onnx", "device", "domain", "version", "state_type", "dtype")
        and rng.random() < 0.3
    ):
        del at[key]
    else:
        choices = ["text" if not isinstance(at[key], str) else 5, [[]], {"a": []}, [None]]
        at[key] = rng.choice([c for c in choices if type(c) is not type(at[key])])
    return json.dumps(document).encode()


@damage("toml")
def not_toml(rng: Rng, data: bytes, size: int) -> bytes:
    return rng.choice(
        [b"entry = 3", b"entry = [1, 2]", b"[[entry]]\noperator = 3", b'[[entry]]\noperator = "("', b"\xff = 1", b"[" * size,
         b"a = " + b"[" * size, b"[entry]\na = 1", b'[[entry]]\nunknown = 1', b"x = " + b"9" * 6000,
         b'[[entry]]\noperator = "Add"\nclass = "ours"\nwhy = "w"\nversions = "3"',
         b'[[entry]]\noperator = "Add"\nclass = "ours"\nwhy = ["w"]',
         b'[[entry]]\noperator = "Add"\nclass = "ours"\nwhy = "w"\nbound = "x"',
         b'[[entry]]\noperator = "Add"\nclass = "ours"\nwhy = "w"\nwhen = ["dtype.T=("]',
         b'[[entry]]\noperator = "Add"\nclass = "ours"\nwhy = "w"\nwitness = "["']
    )  # fmt: skip


# --- messages ---------------------------------------------------------------------------------------------------------


@damage("pb")
def absurd_tensor(rng: Rng, data: bytes, size: int) -> bytes:
    changes: list[dict[str, Any]] = [
        {"dims": [1 << 40]}, {"dims": [1 << 62, 1 << 62]}, {"dims": [-1]}, {"dims": [0, 1 << 60]}, {"dims": [1] * 70},
        {"data_type": 0}, {"data_type": 99}, {"data_type": -5}, {"raw_data": b"abc"}, {"raw_data": bytes(size + 1)},
        {"data_type": TensorProto.STRING}, {"dims": [3]}, {"dims": []}, {"data_type": TensorProto.INT4},
    ]  # fmt: skip
    fields = {"name": "x", "data_type": TensorProto.FLOAT, "dims": [4], "raw_data": bytes(16)} | rng.choice(changes)
    return TensorProto(**fields).SerializeToString()


@damage("pb")
def external(rng: Rng, data: bytes, size: int) -> bytes:
    proto = TensorProto(name="x", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    location = rng.choice(["data.bin", "/etc/passwd", "../../x", "", "x" * size])
    for key, value in [("location", location), ("offset", "0"), ("length", "16")][: rng.randrange(4)]:
        proto.external_data.add(key=key, value=value)
    return proto.SerializeToString()


@damage("pb")
def bad_strings(rng: Rng, data: bytes, size: int) -> bytes:
    return TensorProto(
        name="x", data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff\xfe" * (size // 2)]
    ).SerializeToString()


@damage("pb")
def cut_message(rng: Rng, data: bytes, size: int) -> bytes:
    whole = numpy_helper.from_array(np.ones(64, np.float32), "x").SerializeToString()
    return whole[: rng.randrange(1, len(whole) - 1)]


@damage("pb")
def another_message(rng: Rng, data: bytes, size: int) -> bytes:
    one = numpy_helper.from_array(np.ones(4, np.float32))
    deep = SequenceProto(elem_type=SequenceProto.SEQUENCE)
    for _ in range(rng.choice([20, 90])):
        deep = SequenceProto(elem_type=SequenceProto.SEQUENCE, sequence_values=[deep])
    return rng.choice(
        [
            SequenceProto(elem_type=SequenceProto.TENSOR, tensor_values=[one, one]).SerializeToString(),
            OptionalProto(elem_type=OptionalProto.MAP, tensor_value=one).SerializeToString(),
            MapProto(key_type=TensorProto.FLOAT, keys=[1]).SerializeToString(),
            MapProto(key_type=TensorProto.INT64, keys=[1, 1]).SerializeToString(),
            deep.SerializeToString(),
            b"\x0a" + b"\xff" * 9 + b"\x01",
            b"\x1a\x00" * (size // 2),
        ]
    )


# --- what is not a file -----------------------------------------------------------------------------------------------


def _missing(path: Path, rng: Rng) -> None:
    pass


def _pipe(path: Path, rng: Rng) -> None:
    os.mkfifo(path)


def _folder(path: Path, rng: Rng) -> None:
    path.mkdir()


def _device(path: Path, rng: Rng) -> None:
    path.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem", "/dev/full", "/dev/stdin"]))


def _loop(path: Path, rng: Rng) -> None:
    path.symlink_to(path.name)


def _dangling(path: Path, rng: Rng) -> None:
    path.symlink_to("nowhere")


def _hole(path: Path, rng: Rng) -> None:
    """A file of 4 GiB that takes no room."""
    with path.open("wb") as file:
        file.truncate(4 << 30)


PLACES: dict[str, Callable[[Path, Rng], None]] = {
    "missing": _missing, "pipe": _pipe, "folder": _folder, "device": _device, "loop": _loop, "dangling": _dangling, "hole": _hole,
}  # fmt: skip

# --- doors that read files --------------------------------------------------------------------------------------------

ARRAY = np.arange(4, dtype=np.float32)
RUN = {
    "environment": {"onnx": "1.23.0", "device": "CPU"}, "manifest": "abc",
    "totals": {"cases": 1, "strict": 1, "official": 1, "by_kind": {"node": {"cases": 1, "strict": 1, "official": 1}}},
    "gaps": {"test": "why"},
    "executed": [{"domain": "ai.onnx", "operator": "Abs", "version": 13, "cases": 1, "passed": 1, "tested": 1,
                  "tested_passed": 1, "official": 1, "dtypes": [["T", "float32"]], "attributes": ["a"], "max_ulp": 0.5,
                  "names": ["test"], "failed": []}],
}  # fmt: skip
LEDGER = b'[[entry]]\noperator = "Add"\nclass = "ours"\nwhy = "because"\n' * 3
STATE = {"fc.W": {"state_type": 0, "shape": [3, 2], "dtype": 0}, "fc.b": {"state_type": 0, "shape": [2], "dtype": 0}}


def states(arrays: dict[str, bytes] | None = None, attributes: Any = None) -> bytes:
    arrays = arrays or {"fc.W": npy(np.ones((3, 2), np.float32)), "fc.b": npy(np.ones(2, np.float32))}
    inner = packed({f"{n}.npy": v for n, v in arrays.items()})
    text = attributes if isinstance(attributes, bytes) else json.dumps(attributes or STATE).encode()
    return packed({"tensor_dict.npz": inner, "states_attr.json": text}, zipfile.ZIP_DEFLATED)


def whole(form: str) -> bytes:
    """A file of this format without damage."""
    return {
        "npy": lambda: npy(ARRAY),
        "npz": lambda: packed({"x.npy": npy(ARRAY)}),
        "train": lambda: packed({"x.npy": npy(np.ones((8, 3), np.float32)), "y.npy": npy(np.zeros(8, np.int32))}),
        "states": states,
        "snapshot": lambda: packed({"w.npy": npy(ARRAY)}, comments={"w.npy": b"float"}),
        "pb": lambda: numpy_helper.from_array(ARRAY, "x").SerializeToString(),
        "run": lambda: json.dumps(RUN).encode(),
        "toml": lambda: LEDGER,
    }[form]()


def within(form: str, part: str, name: str, rng: Rng, size: int) -> bytes:
    """A damage to a part of a file (a document or an array), in a file that is otherwise whole."""
    if part == "json":
        return states(attributes=DAMAGES["json"][name](rng, json.dumps(STATE).encode(), size))
    damaged = DAMAGES["npy"][name](rng, npy(ARRAY), size)
    if form == "states":
        return states({"fc.W": damaged, "fc.b": npy(np.ones(2, np.float32))})
    if form == "train":
        return packed({"x.npy": npy(np.ones((8, 3), np.float32)), "y.npy": damaged})
    key = "w.npy" if form == "snapshot" else "x.npy"
    return packed({key: damaged}, zipfile.ZIP_DEFLATED, {key: b"float"})


def bomb(form: str, rng: Rng) -> tuple[int, Callable[[Path], None]]:
    """A small file whose content is large: zeros, compressed, streamed so that the writer needs no memory either."""
    size = rng.choice(BOMBS)
    blank = rng.choice([b"\0", b" "])

    def stream(pack: zipfile.ZipFile, name: str, head: bytes, comment: bytes = b"") -> None:
        with pack.open(name, "w", force_zip64=True) as out:
            out.write(head)
            for _ in range(size // MIB):
                out.write(blank * MIB)
        pack.getinfo(name).comment = comment

    def write(path: Path) -> None:
        head = npy_of("'<f4'", f"({size // 4},)", b"")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as pack:
            if form == "states":
                kind = rng.randrange(3)
                auxiliary = {**STATE, "aux": {"state_type": 1, "shape": [size // 4], "dtype": 0}}
                if kind == 0:  # blanks after the document
                    stream(pack, "states_attr.json", json.dumps(STATE).encode())
                    pack.writestr("tensor_dict.npz", packed({}))
                else:  # a large further tensor, or a large archive for small tensors
                    stream(pack, "tensor_dict.npz", head)
                    pack.writestr("states_attr.json", json.dumps(auxiliary if kind == 1 else STATE))
            elif form == "train":
                stream(pack, "x.npy", npy_of("'<f4'", f"({size // 12}, 3)", b""))
                pack.writestr("y.npy", npy(np.zeros(size // 12, np.int8)))
            else:
                stream(pack, "w.npy" if form == "snapshot" else "x.npy", head, b"float")

    return size, write


def net(folder: Path) -> None:
    """m.onnx: y = -x, whose x has an open size."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    _stored(folder, graph)


def trained_net(folder: Path) -> None:
    """m.onnx: y = x w, which can be trained."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    w = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    _stored(folder, helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w]))


def _stored(folder: Path, graph: Any) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (folder / "m.onnx").write_bytes(model.SerializeToString())


class Refused(Exception):
    """A command ended with an exit code that refuses its input."""


def command(*arguments: Any) -> None:
    """Run a command; raises Refused if it refuses, by the rule of exit codes: one message, no traceback."""
    from click.testing import CliRunner

    from singa.cli import main

    result = CliRunner().invoke(main, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "Traceback" in result.output or result.exit_code == 1:
        raise AssertionError(f"exit {result.exit_code}: {result.output[-2000:]}")
    if result.exit_code in (2, 3):
        if len(result.output) > 8 * KIB:
            raise AssertionError(f"a message of {len(result.output)} characters")
        raise Refused(result.output.strip())


def load_states(folder: Path) -> None:
    from singa import layer, model
    from singa.tensor import Tensor

    class Net(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layer.Linear(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    net = Net()
    net.compile([Tensor(data=np.ones((1, 3), np.float32))], is_train=False)
    net.load_states(folder / "f.zip")


def read_snapshot(folder: Path) -> None:
    import warnings

    from singa.snapshot import Snapshot

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot(folder / "f.zip", False).read()


@dataclass(frozen=True)
class FileDoor:
    form: str
    name: str
    call: Callable[[Path], Any]
    prepare: Callable[[Path], None] = net


def _in_set(folder: Path) -> None:
    net(folder)
    (folder / "set").mkdir()


FILE_DOORS: dict[str, FileDoor] = {
    "load_states": FileDoor("states", "f.zip", load_states, lambda folder: None),
    "Snapshot": FileDoor("snapshot", "f.zip", read_snapshot, lambda folder: None),
    "run -i npy": FileDoor("npy", "f.npy", lambda f: command("run", f / "m.onnx", *LIMITED, "-i", f"x={f / 'f.npy'}")),
    "run -i npz": FileDoor("npz", "f.npz", lambda f: command("run", f / "m.onnx", *LIMITED, "-i", f"x={f / 'f.npz'}")),
    "run -i pb": FileDoor("pb", "f.pb", lambda f: command("run", f / "m.onnx", *LIMITED, "-i", f"x={f / 'f.pb'}")),
    "run --inputs": FileDoor("npz", "f.npz", lambda f: command("run", f / "m.onnx", *LIMITED, "--inputs", f / "f.npz")),
    "run --data": FileDoor("pb", "set/input_0.pb", lambda f: command("run", f / "m.onnx", "--data", f / "set"), _in_set),
    "compare --inputs": FileDoor(
        "npz", "f.npz", lambda f: command("compare", f / "m.onnx", "--against", "sonnx", "--inputs", f / "f.npz")
    ),
    "bisect -i": FileDoor(
        "npy", "f.npy", lambda f: command("bisect", f / "m.onnx", "--against", "sonnx", "-i", f"x={f / 'f.npy'}")
    ),
    "reduce --data": FileDoor(
        "pb", "set/input_0.pb", lambda f: command("reduce", f / "m.onnx", "--raises", "SX404", "--data", f / "set"), _in_set
    ),
    "train --data": FileDoor(
        "train", "f.npz", lambda f: command("train", f / "m.onnx", "--data", f / "f.npz", "-o", f / "o.onnx"), trained_net
    ),
    "report": FileDoor("run", "f.json", lambda f: command("report", f / "f.json", "--to", f / "to"), lambda folder: None),
    "fuzz --ledger": FileDoor(
        "toml", "f.toml", lambda f: command("fuzz", "-k", "^Neg-13$", "--count", 1, "-n", 1, "--ledger", f / "f.toml"),
        lambda folder: None,
    ),
}  # fmt: skip

# --- doors that take options and arguments ----------------------------------------------------------------------------

OTHER_DOORS: dict[str, Callable[[Rng], Drawn]] = {}


def door(name: str) -> Callable[[Callable[[Rng], Drawn]], Callable[[Rng], Drawn]]:
    def add(function: Callable[[Rng], Drawn]) -> Callable[[Rng], Drawn]:
        OTHER_DOORS[name] = function
        return function

    return add


def options(*kinds: str) -> list[tuple[str, str, list[str]]]:
    """(command, option, arguments that it needs) of every option of the command line whose type is of these kinds."""
    import click

    from singa.cli import main
    from singa.cli._main import COMMANDS

    found = []
    for name in sorted(COMMANDS):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        needed: list[str] = []
        for p in command.params:
            if isinstance(p, click.Argument) and p.required:
                needed.append(p.type.choices[0] if isinstance(p.type, click.Choice) and name == "guard" else "nowhere.onnx")
            elif p.required:
                needed += [p.opts[-1], "nowhere/out"]
        if name in ("conform", "foreign", "fuzz"):
            needed += ["--select", "^nothing$"]  # a command without a model would begin its work
        elif name in ("gradients", "opsets"):
            needed.append("^nothing$")
        for p in command.params:
            if isinstance(p, click.Option) and not p.is_flag and kind_of(p) in kinds:
                found.append((name, p.opts[0], needed))
    return found


def kind_of(option: Any) -> str:
    import click

    kind = option.type
    if isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        return "number"
    if isinstance(kind, click.Path):
        return "path"
    if isinstance(kind, click.Choice):
        return "choice"
    return "pair" if option.multiple and "=" in (option.metavar or "") else "text"


NUMBERS = [
    "²",
    "٣٤",
    "-1",
    "nan",
    "-inf",
    "inf",
    "1e999",
    "9" * 400,
    "9" * 5000,
    "",
    " ",
    "0x10",
    "1,5",
    "--",
    "1.5.2",
    "½",
    "-0.5",
    "1e-400x",
]
PAIRS = ["", "=", "a", "a=", "=1", "n=²", "n=-1", "n=1.5", "n=" + "9" * 400, "foo=2", "n=1=2", "n==", "é=1",
         "tensor_bytes=9" + "9" * 400,
         "deadline=nan", "deadline=-1", "iterations=2.5", "nodes=1TiB", "tensor_bytes=" + "9" * 30 + "GiB"]  # fmt: skip


@door("numeric options")
def _(rng: Rng) -> Drawn:
    name, option, needed = rng.choice(options("number"))
    value = rng.choice(NUMBERS)

    def call(folder: Path) -> None:
        os.chdir(folder)
        command(name, *needed, f"{option}={value}")

    return Drawn("option", f"{name} {option}={value[:8]}", len(value), lambda folder: None, call)


@door("pair options")
def _(rng: Rng) -> Drawn:
    name, option, needed = rng.choice(options("pair"))
    value = rng.choice(PAIRS)
    given = ["m.onnx" if n == "nowhere.onnx" and rng.random() < 0.7 else n for n in needed]

    def call(folder: Path) -> None:
        os.chdir(folder)
        command(name, *given, option, value, *(["--random", "0"] if option == "--size" else []))

    return Drawn("option", f"{name} {option} {value[:12]}", len(value), net, call)


@door("paths to write")
def _(rng: Rng) -> Drawn:
    writers = [("run", "-o"), ("inspect", "--html"), ("profile", "--html"), ("profile", "--trace"),
               ("compare", "--html"), ("train", "-o"),
               ("train", "--plot"), ("optimize", "-o"), ("convert", "-o"), ("layout", "-o"), ("codegen", "-o")]  # fmt: skip
    name, option = rng.choice(writers)
    target = rng.choice(
        [".", "./", "there/", "nowhere/out.npz", "m.onnx/out", "x" * 300, "/proc/nothing/out", "", "loop/out", "/"]
    )
    more = {"run": ["--random", "0"], "layout": ["--to", "channels_last"],
            "train": ["--data", "t.npz"] + (["-o", "fine.onnx"] if option == "--plot" else [])}.get(name, [])  # fmt: skip

    def write(folder: Path) -> None:
        (trained_net if name == "train" else net)(folder)
        (folder / "there").mkdir()
        (folder / "loop").symlink_to("loop")
        (folder / "t.npz").write_bytes(whole("train"))

    def call(folder: Path) -> None:
        os.chdir(folder)
        before = sorted(folder.iterdir())
        try:
            command(name, "m.onnx", *more, option, target)
        finally:
            if sorted(folder.iterdir()) != before:
                raise AssertionError(f"{name} {option} {target!r} left {set(folder.iterdir()) - set(before)}")

    return Drawn("path", f"{name} {option} {target[:12]}", len(target), write, call)


@door("model paths")
def _(rng: Rng) -> Drawn:
    names = {"run": [], "check": [], "inspect": [], "profile": ["--runs", "1"], "compare": ["--against", "sonnx"],
             "optimize": ["-o", "o"], "convert": ["-o", "o"],
             "layout": ["-o", "o", "--to", "channels_last"], "codegen": ["-o", "o.py"],
             "train": ["--data", "t.npz", "-o", "o"]}  # fmt: skip
    name = rng.choice(list(names))
    what = rng.choice([p for p in PLACES if p != "hole"])

    def write(folder: Path) -> None:
        PLACES[what](folder / "m.onnx", rng)
        (folder / "t.npz").write_bytes(whole("train"))

    def call(folder: Path) -> None:
        os.chdir(folder)
        command(name, "m.onnx", *names[name])

    return Drawn(f"model of {name}", what, 0, write, call)


@door("folders of test data")
def _(rng: Rng) -> Drawn:
    names = rng.choice([["input_x.pb"], ["input_².pb"], ["input_1.pb"], ["input_0.pb", "input_1.pb"],
                        ["input_0.pb", "input_00.pb"],
                        ["input_0.pb", "output_7.pb"], ["input_-1.pb"], ["input_" + "9" * 60 + ".pb"],
                        [f"input_{i}.pb" for i in range(2000)], ["input_0_0.pb"]])  # fmt: skip

    def write(folder: Path) -> None:
        _in_set(folder)
        for name in names:
            (folder / "set" / name).write_bytes(whole("pb"))

    return Drawn("--data", names[-1][:16], len(names), write, lambda f: command("run", f / "m.onnx", "--data", f / "set"))


@door("keywords")
def _(rng: Rng) -> Drawn:
    wrong = rng.choice(["devcie", "limit", "Limits", "opset", "outputs", "training_", "x" * KIB, "é", "", "last_layer"])
    name = rng.choice(
        ["prepare", "run_model", "run_node", "is_compatible", "run", "run tensors", "forward", "to_onnx", "export", "convert"]
    )

    def call(folder: Path) -> None:
        from singa import autograd, sonnx
        from singa.tensor import Tensor

        path, more = str(folder / "m.onnx"), {wrong: 1}
        x = np.ones(2, np.float32)
        t = Tensor(data=x)
        node = helper.make_node("Neg", ["x"], ["y"])
        {
            "prepare": lambda: sonnx.prepare(path, **more), "run_model": lambda: sonnx.run_model(path, [x], **more),
            "run_node": lambda: sonnx.run_node(node, [x], **more), "is_compatible": lambda: sonnx.is_compatible(path, **more),
            "run": lambda: sonnx.prepare(path).run([x], **more), "run tensors": lambda: sonnx.prepare(path).run([t], **more),
            "forward": lambda: sonnx.SONNXModel(path).forward(t, **more),
            "to_onnx": lambda: sonnx.to_onnx([t], [autograd.abs(t)], **more),
            "export": lambda: sonnx.export(sonnx.SONNXModel(path), [t], folder / "o.onnx", **more),
            "convert": lambda: sonnx.convert(path, 20, **more),
        }[name]()  # fmt: skip

    return Drawn(name, f"keyword {wrong[:8]}", len(wrong), net, call)


class _Exchange:
    """An object whose DLPack methods return something else."""

    def __init__(self, capsule: Any, device: Any) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


@door("DLPack")
def _(rng: Rng) -> Drawn:
    import ml_dtypes

    x = np.ones(4, np.float32)
    used = x.__dlpack__()
    given: dict[str, Any] = {
        "list": [1, 2], "none": None, "capsule itself": x.__dlpack__(), "not a capsule": _Exchange(3, (1, 0)),
        "another device": _Exchange(x.__dlpack__(), (2, 0)), "no device": _Exchange(x.__dlpack__(), None),
        "raises": _Exchange(OSError("no"), (1, 0)),
        "strings": np.array(["a"]), "objects": np.array([{}]), "bfloat16": x.astype(ml_dtypes.bfloat16),
        "big endian": x.astype(">f4"), "structured": np.zeros(2, "f4,i4"), "datetime": np.zeros(2, "M8[s]"),
    }  # fmt: skip
    name = rng.choice([*given, "used capsule", "export strings", "export bfloat16", "export sequence", "export to a GPU"])

    def call(folder: Path) -> None:
        from singa import tensor

        exported = {"export strings": ["a"], "export bfloat16": given["bfloat16"], "export sequence": [x, x]}
        if name in exported:
            np.from_dlpack(tensor.Tensor(data=exported[name]))
        elif name == "export to a GPU":
            tensor.Tensor(data=x).__dlpack__(dl_device=(2, 0))
        elif name == "used capsule":
            source = _Exchange(used, (1, 0))
            np.from_dlpack(source)
            tensor.from_dlpack(source)
        else:
            tensor.from_dlpack(given[name])

    return Drawn("DLPack", name, 0, lambda folder: None, call)


@door("values")
def _(rng: Rng) -> Drawn:
    values: dict[str, Any] = {
        "ragged": [[1.0], [1.0, 2.0]], "deep": _deep(200), "none": [None], "object": object(), "objects": np.array([{}]),
        "mixed": [1, "a"], "large": [10**400], "wide float": [1e300, 1.0], "dates": np.zeros(2, "M8[s]"),
        "set": {1, 2}, "text": "a" * KIB,
        "structured": np.zeros(2, "f4,i4"), "long double": np.ones(2, np.longdouble), "dict": {"a": 1}, "bytes": [b"\xff"],
        "raises": _Raises(),
    }  # fmt: skip
    what = rng.choice(list(values))
    where = rng.choice(["Tensor", "from_numpy", "set_value", "copy_from_numpy", "copy_from", "+", "<", "@", "relu", "loss",
                        "layer", "set_states", "apply", "backward", "forward", "to_numpy", "concatenate"])  # fmt: skip

    def call(folder: Path) -> None:
        from singa import autograd, layer, opt, sonnx, tensor

        value = values[what]
        t = tensor.Tensor(data=np.ones((2, 2), np.float32))
        linear = layer.Linear(2)
        if where == "set_states":
            linear(t)
        {
            "Tensor": lambda: tensor.Tensor(data=value) + 1, "from_numpy": lambda: tensor.from_numpy(value) + 1,
            "set_value": lambda: t.set_value(value), "copy_from_numpy": lambda: t.copy_from_numpy(value),
            "copy_from": lambda: t.copy_from(value), "+": lambda: t + value, "<": lambda: t < value, "@": lambda: t @ value,
            "relu": lambda: autograd.relu(value), "loss": lambda: autograd.mse_loss(t, value), "layer": lambda: linear(value),
            "set_states": lambda: linear.set_states({"W": value}), "apply": lambda: opt.SGD(0.1).apply("w", t, value),
            "backward": lambda: list(autograd.backward(value)),
            "forward": lambda: sonnx.SONNXModel(str(folder / "m.onnx")).forward(value),
            "to_numpy": lambda: tensor.to_numpy(value),
            "concatenate": lambda: tensor.concatenate([t, value], 0),
        }[where]()  # fmt: skip

    return Drawn(where, what, 0, net, call)


def _deep(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


class _Raises:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("this library refuses")


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(seed: int, index: int) -> Drawn:
    """The input of an index; its door depends on the index, all else on both numbers."""
    names = [*FILE_DOORS, *OTHER_DOORS]
    name = names[index % len(names)]
    rng = Rng(f"{seed} {index}")
    if name in OTHER_DOORS:
        return OTHER_DOORS[name](rng)
    door = FILE_DOORS[name]
    size, way = rng.choice(SIZES), rng.choice(["whole file", "whole file", "part", "bomb", "place"])
    form = {"npy": "npy", "pb": "pb", "run": "json", "toml": "toml"}.get(door.form, "zip")
    write: Callable[[Path], None]
    if way == "place":
        what = rng.choice(list(PLACES))
        place = PLACES[what]

        def write(path: Path) -> None:
            place(path, rng)

    elif way == "bomb" and form == "zip":
        size, write = bomb(door.form, rng)
        what = "bomb"
    elif way == "part" and form == "zip":
        part = rng.choice(["json", "npy"] if door.form == "states" else ["npy"])
        damage = rng.choice(list(DAMAGES[part]))
        what = f"{part}_{damage}"

        def write(path: Path) -> None:
            path.write_bytes(within(door.form, part, damage, rng, size))

    else:
        what = rng.choice(list(DAMAGES[form]))

        def write(path: Path) -> None:
            path.write_bytes(DAMAGES[form][what](rng, whole(door.form), size))

    def fill(folder: Path) -> None:
        door.prepare(folder)
        write(folder / door.name)

    return Drawn(name, what, size, fill, door.call)
