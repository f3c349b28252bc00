"""Files that cannot be opened: the error names the reason, and calls the model wrong only if it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.errors import InvalidModel
from singa_backend.proto.load import SMALL

WAYS = """
import os, pickle, resource, sys
import numpy as np
from singa import sonnx
from singa.cli import main
from singa_backend.io import archives
from singa_backend.proto.load import open_light

sonnx.prepare("external.onnx")
pickled = pickle.dumps(sonnx.prepare("mapped.onnx"))
open_light("mapped.onnx")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass

def tried(way, free, function):
    for _ in range(free):
        os.close(held.pop())
    try:
        function()
        print(way, "opened it")
    except Exception as error:
        print(way, type(error).__name__, getattr(error, "code", ""), str(error).replace("\\n", " "))
    for _ in range(free):
        held.append(os.open(os.devnull, os.O_RDONLY))

tried("model", 0, lambda: sonnx.prepare("external.onnx"))
tried("mapped", 0, lambda: sonnx.prepare("mapped.onnx"))
tried("mapped again", 1, lambda: sonnx.prepare("mapped.onnx").run([np.zeros((1, 64), np.float32)]))
tried("light", 0, lambda: open_light("mapped.onnx"))
tried("external", 1, lambda: sonnx.prepare("external.onnx").run([np.zeros((1, 64), np.float32)]))
tried("pickled", 0, lambda: pickle.loads(pickled))
tried("array", 0, lambda: archives.read_bytes("x.npy", "SX303"))
"""


def model(rows: int) -> onnx.ModelProto:
    w = numpy_helper.from_array(np.zeros((64, rows), np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, size]) for n, size in (("x", 64), ("y", rows)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def external(folder: Path) -> Path:
    onnx.save(model(64), folder / "external.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    return folder / "external.onnx"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of this kind")
def test_too_many_open_files_are_no_fault_of_the_file(tmp_path: Path) -> None:
    external(tmp_path)
    onnx.save(model(1 + SMALL // 256), tmp_path / "mapped.onnx")
    np.save(tmp_path / "x.npy", np.zeros(3))
    run = subprocess.run([sys.executable, "-c", WAYS], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = run.stdout.splitlines()
    assert len(lines) == 7, run.stderr
    rest = [line for line in lines if not line.startswith("mapped again")]
    assert [line for line in rest if "ResourceExhausted SX612" not in line or "too many open files" not in line] == []
    assert "mapped again opened it" in lines or "SX612" in lines[2]


def test_external_data_behind_links_are_refused_as_links(tmp_path: Path) -> None:
    path = external(tmp_path)
    os.rename(tmp_path / "w.data", tmp_path / "real")
    (tmp_path / "w.data").symlink_to("real")
    with pytest.raises(InvalidModel, match=r"external data cannot be read: .*must be a plain file, not a link") as found:
        SingaBackend.prepare(path)
    assert found.value.code == "SX105"
    (tmp_path / "folder").mkdir()
    os.rename(tmp_path / "real", tmp_path / "folder" / "w.data")
    (tmp_path / "linked").symlink_to("folder")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "linked/w.data"
    onnx.save(proto, path)
    with pytest.raises(InvalidModel, match=r"a part of its path is a link, or not a folder"):
        SingaBackend.prepare(path)
