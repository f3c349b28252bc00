"""Loading of published models (examples/zoo/published.py): paths, URLs, the cache, archives, checksums, verification.

The program is squeezenet.py on a model of one layer; a server on this machine serves the files.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import runpy
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.helpers import zoo_programs

from singa_backend import limits
from singa_backend.errors import InvalidInput, InvalidModel, ResourceExhausted

pytest.importorskip("PIL")  # the program shows pictures

F = np.float32
X = np.arange(-6, 6, dtype=F).reshape(1, 12)
FIXED = "0" * 64


def model(name: str = "Relu") -> bytes:
    ends = [[helper.make_tensor_value_info(n, 1, [1, 12])] for n in "xy"]
    graph = helper.make_graph([helper.make_node(name, ["x"], ["y"])], "g", *ends)
    made: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3).SerializeToString()
    return made


def stored(array: np.ndarray) -> bytes:
    return numpy_helper.from_array(array).SerializeToString()


def packed(members: dict[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as pack:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            pack.addfile(info, io.BytesIO(data))
        for name in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            pack.addfile(info)
    return out.getvalue()


DATA = {"test_data_set_0/input_0.pb": stored(X), "test_data_set_0/output_0.pb": stored(np.maximum(X, 0))}
ARCHIVE = {"net/net.onnx": model(), **{f"net/{n}": d for n, d in DATA.items()}}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4c29\nsize 46000000\n"


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., zoo_programs.Done]:
    """go(source, options...): the program with this --model and a cache in tmp_path."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def run(source: Any, *options: Any) -> zoo_programs.Done:
        options = ("--model", source, "--cache", tmp_path / "cache", *options)
        return zoo_programs.run(monkeypatch, capsys, "squeezenet", *options)

    return run


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    return zoo_programs.module(monkeypatch, "published")


class Server:
    """Serves `files`; `missing` bytes at the end of each are declared, and not sent; connections stay open until `ends` is set.

    `asked` are the paths of all requests.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.missing, self.asked = 0, []
        self.ends = threading.Event()
        self.ends.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                data = outer.files.get(self.path.lstrip("/"))
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) - outer.missing])
                outer.ends.wait(60)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def cached(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "cache").rglob("*") if p.is_file())


# --- URLs


def test_a_url_is_fetched_once(go: Any, server: Server, tmp_path: Path) -> None:
    server.files["zoo/net.onnx"] = model()
    sha = hashlib.sha256(model()).hexdigest()
    first = go(f"{server.url}/zoo/net.onnx", "--sha256", sha.upper())
    assert first.code == 0 and sha in first.out and server.asked == ["/zoo/net.onnx"]
    assert cached(tmp_path) == ["net.onnx"]
    again = go(f"{server.url}/zoo/net.onnx")
    assert again == first and server.asked == ["/zoo/net.onnx"]
    server.files["other/net.onnx"] = model("Tanh")
    other = go(f"{server.url}/other/net.onnx")
    assert other.code == 0 and sha not in other.out and cached(tmp_path) == ["net.onnx", "net.onnx"]


def test_a_cached_file_needs_no_network(go: Any, tmp_path: Path) -> None:
    server = Server()
    server.files["net.onnx"] = model()
    url = f"{server.url}/net.onnx"
    try:
        assert go(url).code == 0
    finally:
        server.stop()
    assert go(url).code == 0
    wrong = go(url, "--sha256", FIXED)
    assert wrong.code == 3 and f"must be {FIXED}" in wrong.err


@pytest.mark.parametrize("name, content, message", [
    ("net.onnx", None, "the server answers 404"),
    ("net.onnx", POINTER, "is a Git LFS pointer (to a file of 43.9 MiB)"),
    ("net.onnx", b"\n<!DOCTYPE html><title>Sign in</title>", "a web page"),
    ("net.onnx", b'{"error": "gone"}', "a message of the server"),
    ("net.onnx", b"", "ended after 0 of 0 bytes"),
], ids=["404", "pointer", "page", "message", "empty"])  # fmt: skip
def test_what_a_server_returns_instead(name: str, content: Any, message: str, go: Any, server: Server, tmp_path: Path) -> None:
    if content is not None:
        server.files[name] = content
    done = go(f"{server.url}/{name}")
    assert done.code == 3 and done.out == "" and message in done.err
    assert cached(tmp_path) == []


def test_a_download_that_breaks_off_is_not_kept(go: Any, server: Server, tmp_path: Path) -> None:
    server.files["net.onnx"], server.missing = model(), 5
    done = go(f"{server.url}/net.onnx")
    size = len(model())
    assert done.code == 3 and f"ended after {size - 5} of {size} bytes" in done.err and cached(tmp_path) == []
    server.missing = 0
    assert go(f"{server.url}/net.onnx").code == 0


def test_a_server_that_stalls(published: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "TIMEOUT", 0.05)
    server.files["net.onnx"], server.missing = model(), 10
    server.ends.clear()
    with pytest.raises(InvalidModel, match=r"SX110.*net.onnx cannot be downloaded: timed out") as found:
        published.find(f"{server.url}/net.onnx", None, tmp_path / "cache")
    server.ends.set()
    assert "check the network" in found.value.hint and cached(tmp_path) == []


def test_a_wrong_checksum_is_not_kept(go: Any, server: Server, tmp_path: Path) -> None:
    server.files["net.onnx"] = model()
    done = go(f"{server.url}/net.onnx", "--sha256", FIXED)
    assert done.code == 3 and f"must be {FIXED}, got {hashlib.sha256(model()).hexdigest()}" in done.err
    assert cached(tmp_path) == []


@pytest.mark.parametrize("url", [
    "http://127.0.0.1:1/modèle.onnx", "http://[bad/net.onnx", "http://a..b/net.onnx", f"http://{'x' * 80}/net.onnx", "http://",
    "http://host:port/net.onnx", "http://127.0.0.1:1/a b.onnx", "http://\udcff/net.onnx", "http://127.0.0.1:1/..",
])  # fmt: skip
def test_urls_that_are_refused(url: str, go: Any, tmp_path: Path) -> None:
    done = go(url)
    assert done.code == 3 and "[SX110]" in done.err and "cannot be downloaded" in done.err and cached(tmp_path) == []


@pytest.mark.parametrize("name, encoding, shown", [("\udcff.onnx", "utf-8", "\\udcff.onnx"), ("ü.onnx", "ascii", "\\xfc.onnx")])
def test_names_that_standard_output_cannot_encode(
    name: str, encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(model())
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["squeezenet.py", "--model", str(tmp_path / name)])
    monkeypatch.syspath_prepend(zoo_programs.PROGRAMS)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(zoo_programs.PROGRAMS / "squeezenet.py"), run_name="__main__")
    out.seek(0)
    assert ended.value.code == 0 and f"{shown}: 69 bytes, SHA-256" in out.read()


def test_without_a_network(go: Any) -> None:
    server = Server()
    server.stop()  # nothing listens at its address
    done = go(f"{server.url}/net.onnx")
    assert done.code == 3 and "cannot be downloaded" in done.err and "check the network" in done.err
    done = go("http://sonnx.invalid/net.onnx")
    assert done.code == 3 and "sonnx.invalid/net.onnx cannot be downloaded" in done.err


def test_a_download_ends_at_the_limit_of_a_model(published: Any, server: Server, tmp_path: Path) -> None:
    server.files["net.onnx"] = model() + bytes(4000)
    with limits.spend(limits.Budget(limits.Limits(model_bytes=1000))), pytest.raises(ResourceExhausted, match="SX610"):
        published.find(f"{server.url}/net.onnx", None, tmp_path / "cache")
    assert cached(tmp_path) == []


# --- paths


@pytest.mark.parametrize("content, message", [
    (POINTER, "is a Git LFS pointer"), (b"<html>", "a web page"), (b"", "an empty file"),
    (model()[:-7], "not an ONNX file"),
], ids=["pointer", "page", "empty", "truncated"])  # fmt: skip
def test_a_file_that_is_not_a_model(content: bytes, message: str, go: Any, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    done = go(tmp_path / "net.onnx")
    assert done.code == 3 and message in done.err and done.err.startswith("error: [SX110]") and "Traceback" not in done.err


@pytest.mark.parametrize("source, options, code, message", [
    ("no.onnx", (), 3, "there is no file no.onnx"), ("ftp://host/net.onnx", (), 3, "http or https"),
    ("no.onnx", ("--sha256", "12"), 2, "64 hexadecimal digits"),
])  # fmt: skip
def test_wrong_options(source: str, options: Any, code: int, message: str, go: Any) -> None:
    done = go(source, *options)
    assert done.code == code and message in done.err


def test_without_pillow(go: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "images", raising=False)
    done = go(tmp_path / "net.onnx")
    assert done.code == 3 and "[SX700]" in done.err and "pip install 'sonnx[zoo]'" in done.err


def test_as_a_script(tmp_path: Path) -> None:
    """In a process, from another folder; without a model, argparse names the file."""
    script = [sys.executable, str(zoo_programs.PROGRAMS / "squeezenet.py")]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 2 and "--model" in done.stderr
    (tmp_path / "net.onnx").write_bytes(model())
    done = subprocess.run([*script, "--model", "net.onnx"], capture_output=True, text=True, cwd=tmp_path, timeout=300,
                          env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("net.onnx: ") and done.stderr == ""


# --- archives and verification


def test_an_archive_is_unpacked_and_verified(go: Any, server: Server, tmp_path: Path) -> None:
    server.files["net.tar.gz"] = packed({"net/._net.onnx": b"macOS", "net/notes.txt": b"read me", **ARCHIVE}, ("net/link.onnx",))
    first = go(f"{server.url}/net.tar.gz", "--verify")
    assert first.code == 0 and "test_data_set_0: equal to 4 decimals" in first.out
    assert cached(tmp_path) == ["input_0.pb", "model.onnx", "net.tar.gz", "output_0.pb"]
    assert go(f"{server.url}/net.tar.gz", "--verify") == first and len(server.asked) == 1


def test_names_in_an_archive_are_not_paths(go: Any, tmp_path: Path) -> None:
    outside = {"../../../escaped.onnx": model(), "/test_data_set_0/input_0.pb": DATA["test_data_set_0/input_0.pb"],
               "../test_data_set_0/output_0.pb": DATA["test_data_set_0/output_0.pb"]}  # fmt: skip
    (tmp_path / "net.tar.gz").write_bytes(packed(outside))
    assert go(tmp_path / "net.tar.gz", "--verify").code == 0
    assert cached(tmp_path) == ["input_0.pb", "model.onnx", "output_0.pb"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "net.tar.gz"]


@pytest.mark.parametrize("data, message", [
    (packed(ARCHIVE)[:-40], "Compressed file ended"), (packed({"notes.txt": b"x"}), "has no .onnx file"),
    (packed({"a.onnx": model(), "b.onnx": model()}), "a file model.onnx already"), (b"\x1f\x8b" + bytes(60), "SX307"),
], ids=["truncated", "without", "two", "damaged"])  # fmt: skip
def test_damaged_archives(data: bytes, message: str, go: Any, tmp_path: Path) -> None:
    (tmp_path / "net.tar.gz").write_bytes(data)
    done = go(tmp_path / "net.tar.gz")
    assert done.code == 3 and message in done.err and "SX307" in done.err and cached(tmp_path) == []


def test_an_archive_unpacks_to_the_limit_of_a_model(published: Any, tmp_path: Path) -> None:
    """Members that are not needed count too."""
    data = packed({"pad.bin": bytes(1 << 20), **ARCHIVE})
    (tmp_path / "net.tar.gz").write_bytes(data)
    assert len(data) < 5000
    with limits.spend(limits.Budget(limits.Limits(model_bytes=1 << 19))), pytest.raises(ResourceExhausted, match="SX610"):
        published.find(str(tmp_path / "net.tar.gz"), None, tmp_path / "cache")
    assert cached(tmp_path) == []


def placed(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "net.onnx").write_bytes(model())
    return folder / "net.onnx"


@pytest.mark.parametrize("shift, code", [(1.4e-4, 0), (1.6e-4, 1), (-1.6e-4, 1), (np.nan, 1), (np.inf, 1)])
def test_four_decimals_are_compared(shift: float, code: int, go: Any, tmp_path: Path) -> None:
    wanted = np.maximum(X, 0)
    wanted[0, 2] += F(shift)
    path = placed(tmp_path, {**DATA, "test_data_set_1/input_0.pb": stored(X), "test_data_set_1/output_0.pb": stored(wanted)})
    done = go(path, "--verify")
    assert done.code == code and "test_data_set_0: equal to 4 decimals" in done.out
    assert ("test_data_set_1, output 'y': 1 of 12 values differ" in done.err and "at [0, 2]" in done.err) == bool(code)


def test_values_above_one_are_compared_relatively(published: Any) -> None:
    a = np.array([1000, -2000, 3], F)
    assert published.compare(a * F(1 + 1e-4), a, "y") == pytest.approx(1e-4, rel=0.01)
    with pytest.raises(published.Different, match="3 of 3"):
        published.compare(a * F(1 + 2e-4), a, "y")


def test_equal_infinities_and_nans_are_equal(published: Any) -> None:
    a = np.array([np.inf, -np.inf, np.nan, 1], F)
    assert published.compare(a, a.copy(), "y") == 0
    with pytest.raises(published.Different):
        published.compare(a, a[::-1].copy(), "y")


@pytest.mark.parametrize("files, code, message", [
    ({}, 3, "there are no folders test_data_set_*"),
    ({"test_data_set_0/input_0.pb": stored(X)}, 3, "has no files output_0.pb"),
    (DATA | {"test_data_set_0/output_0.pb": b"\xff\xff"}, 3, "SX307"),
    (DATA | {"test_data_set_0/input_1.pb": stored(X)}, 3, "SX307"),
    (DATA | {"test_data_set_0/output_0.pb": stored(X.reshape(3, 4))}, 1, "returns float32[1, 12], the file has float32[3, 4]"),
    (DATA | {"test_data_set_0/output_0.pb": stored(X.astype(np.float64))}, 1, "the file has float64[1, 12]"),
], ids=["none", "inputs only", "damaged", "too many", "shape", "dtype"])  # fmt: skip
def test_what_cannot_be_verified(files: dict[str, bytes], code: int, message: str, go: Any, tmp_path: Path) -> None:
    done = go(placed(tmp_path, files), "--verify")
    assert done.code == code and message in done.err


def test_outputs_without_files_are_told(go: Any, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])], "g",
        [helper.make_tensor_value_info("x", 1, [1, 12])], [helper.make_tensor_value_info(n, 1, [1, 12]) for n in "yz"],
    )  # fmt: skip
    path = placed(tmp_path, DATA)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3), path)
    done = go(path, "--verify")
    assert done.code == 0 and "test_data_set_0: 1 of 2 outputs, the others have no files, equal to 4 decimals" in done.out


def test_weights_that_old_files_list_as_inputs_have_no_test_data(go: Any, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["w", "x"], ["y"])], "g", [helper.make_tensor_value_info(n, 1, [1, 12]) for n in "wx"],
        [helper.make_tensor_value_info("y", 1, [1, 12])], [numpy_helper.from_array(np.ones((1, 12), F), "w")],
    )  # fmt: skip
    path = placed(tmp_path, DATA | {"test_data_set_0/output_0.pb": stored(X + 1)})
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3), path)
    assert go(path, "--verify").code == 0


def test_errors_are_typed(published: Any, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(POINTER)
    with pytest.raises(InvalidModel, match="SX110"):
        published.find(str(tmp_path / "net.onnx"))
    with pytest.raises(InvalidInput, match="there is no file"):
        published.find(str(tmp_path / "other.onnx"))
