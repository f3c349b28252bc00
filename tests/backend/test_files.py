"""The door to files: what is written appears whole or not at all, whoever writes it and whenever it stops."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser
from tests.helpers.paths import HELPERS, PROJECT

from singa import sonnx
from singa.cli import main
from singa_backend import InvalidInput, InvalidModel
from singa_backend.io import files, temporary
from singa_backend.io.files import Stage, staged, staged_folder, write_bytes, write_npz, write_text, writing
from singa_backend.io.places import check
from singa_backend.io.temporary import PREFIX, claim
from singa_backend.proto.named_arrays import named_arrays
from singa_backend.proto.save import save

FAULTS = HELPERS / "faults.py"
WHOLE = os.environ.get("SONNX_FAULTS") == "all"


def listed(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- a fault at each operation of every writer ------------------------------------------------------------------------


class Server:
    """The process of faults.py."""

    def __init__(self) -> None:
        path = os.pathsep.join(str(PROJECT / f) for f in ("backend", "frontend"))
        self.process = subprocess.Popen([sys.executable, "-W", "ignore", str(FAULTS)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})  # fmt: skip

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if not hasattr(os, "fork"):
        pytest.skip("there is no fork")
    made = Server()
    yield made
    assert made.process.stdin
    made.process.stdin.close()
    made.process.wait(60)


def cases() -> dict[str, str]:
    """The cases of faults.py, and the options of commands that each covers."""
    found = {}
    for node in ast.walk(ast.parse(FAULTS.read_text())):
        if isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "case":
                    found[node.name] = "".join(ast.literal_eval(k.value) for k in call.keywords if k.arg == "covers")
    return found


@pytest.mark.parametrize("name", cases())
def test_old_or_new_whatever_fails(name: str, server: Server) -> None:
    """A failure and a death at every operation (at every second in the usual run), and 50 kills at random bytes in all."""
    found = server.ask(name=name, kills=20 if WHOLE else 2, every=1 if WHOLE else 2)
    assert not found["wrong"], "\n".join(found["wrong"][:5])
    assert found["operations"] > 8  # a folder, its lock, the file, its flush, its move, the removal of the rest


READ = {
    "train --data", "train --validation", "train --inputs", "train --resume", "conform --cache", "foreign folder",
    "guard --model",
}  # fmt: skip
"""Options that name files to read, although they need not exist when the command line is parsed."""


def test_every_option_that_writes_has_a_case() -> None:
    covered = {pair.strip() for pairs in cases().values() for pair in pairs.split(",") if pair}
    writes = set()
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.type, click.Path) and not option.type.exists:
                long = max(option.opts, key=len)
                if long not in ("--inputs", "--data") and f"{name} {long}" not in READ:
                    writes.add(f"{name} {long}")
    assert writes == covered


WRITERS = {
    "write_text",
    "write_bytes",
    "savez",
    "savez_compressed",
    "savetxt",
    "savefig",
    "tofile",
    "mkstemp",
    "NamedTemporaryFile",
}
MODULES = {"onnx": {"save", "save_model", "save_tensor"}, "np": {"save"}, "numpy": {"save"}, "os": {"replace", "rename", "link"},
           "shutil": {"move", "copy", "copyfile", "copy2"}}  # fmt: skip
CHANGES = {"unlink", "rmdir", "rmtree", "removedirs", "mkdir", "makedirs", "symlink_to", "hardlink_to", "truncate", "ftruncate",
           "mkfifo", "mkdtemp", "copytree", "renames"}  # fmt: skip
"""Methods and functions that remove, cut or create what a folder has."""

OPENERS = {"open", "fdopen", "ZipFile", "TarFile", "FileIO", "memmap"}
SUSPECTED = re.compile(
    rf"\b({'|'.join({*WRITERS, *CHANGES, *OPENERS, 'rename', 'replace', 'remove'}.union(*MODULES.values()))})\s*\("
)
"""The end of the name of every call that may write a file."""

SAFE = {
    "singa_backend/debug/spill.py": "a temporary folder of the process",
    "singa_backend/collectives/sockets.py": "the socket that it has bound, under a name that nobody else has",
    "singa/cli/_group.py": "a temporary folder of the parent",
}
"""Files that write without the door, and where."""

ROOM = tuple(f"singa_backend/io/{name}.py" for name in ("files", "growing", "places", "temporary"))
"""The door."""


def direct_writes(path: Path) -> Iterator[str]:
    """The calls that write a file without the door; a file or folder of the door may be written."""
    text = path.read_text()
    if not SUSPECTED.search(text):
        return
    tree = ast.parse(text)
    opened = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and isinstance(item.context_expr, ast.Call)
        and _last(item.context_expr.func) in ("writing", "staged", "staged_folder", "create", "BytesIO")
    }  # fmt: skip
    opened |= {
        n.id if isinstance(n, ast.Name) else n.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _last(node.value.func) in ("create", "BytesIO")
        for n in node.targets
        if isinstance(n, (ast.Name, ast.Attribute))
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, owner = _last(node.func), _last(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if not SUSPECTED.search(f"{name}("):
            continue
        names = {_last(n) for a in (*node.args, node.func) for n in ast.walk(a) if isinstance(n, (ast.Name, ast.Attribute))}
        direct = isinstance(node.func, ast.Attribute) and name in WRITERS and owner not in ("files",)
        direct |= name in MODULES.get(owner, ())
        direct |= isinstance(node.func, ast.Attribute) and name in CHANGES
        direct |= (
            isinstance(node.func, ast.Attribute) and name in ("rename", "replace") and len(node.args) == 1 and not node.keywords
        )
        direct |= (owner, name) == ("os", "remove") or (
            (owner, name) == ("os", "open") and bool(names & FLAGS) and "devnull" not in names
        )
        if name in OPENERS and owner not in ("pack", "archive"):
            modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
            direct |= any(isinstance(m, str) and set(m) <= set("rwxab+t") and set(m) & set("wxa+") for m in modes)
        texts = (a.value for a in ast.walk(node) if isinstance(a, ast.Constant) and isinstance(a.value, str))
        direct &= not any(t.startswith("/proc/") for t in texts)  # a switch of the kernel, not a file on disk
        if direct and not names & opened:
            yield f"{path.relative_to(PROJECT)}:{node.lineno}: {ast.unparse(node)[:80]}"


FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_nothing_is_written_without_the_door() -> None:
    roots = ("backend", "frontend", "benchmarks", "conformance", "examples")
    paths = [p for root in roots for p in (PROJECT / root).rglob("*.py") if not str(p).endswith(ROOM)]
    assert len(paths) > 250
    found = [w for p in paths if not any(str(p).endswith(s) for s in SAFE) for w in direct_writes(p)]
    assert not found, "write by singa_backend.io.files:\n" + "\n".join(found)


@pytest.mark.parametrize("line", [
    "open(path, 'w')", "path.open('wb')", "open(path, mode='x')", "path.write_text(t)", "np.savez(path, x=x)", "np.save(path, x)",
    "onnx.save(m, path)", "os.replace(a, b)", "zipfile.ZipFile(path, 'w')", "figure.savefig(path)", "a.tofile(path)",
    "path.unlink()", "os.remove(path)", "shutil.rmtree(path)", "path.mkdir()", "os.makedirs(path)", "path.rename(other)",
    "path.replace(other)", "os.open(path, os.O_WRONLY | os.O_CREAT)", "os.ftruncate(handle, 0)", "path.symlink_to(other)",
])  # fmt: skip
def test_a_direct_write_is_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PROJECT", tmp_path)
    (tmp_path / "a.py").write_text(f"def f(path):\n    {line}\n")
    assert list(direct_writes(tmp_path / "a.py"))


# --- targets ----------------------------------------------------------------------------------------------------------


def test_a_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "a")
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    finally:
        os.umask(before)
    os.chmod(tmp_path / "new", 0o604)
    write_text(tmp_path / "new", "b")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604 and (tmp_path / "new").read_text() == "b"


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")  # of a file that does not exist yet
    for text in ("one", "two"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "file").read_text() == text
    assert listed(tmp_path) == ["link", "real"] and listed(tmp_path / "real") == ["file"]


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_npz(tmp_path / "pipe", {"x": np.arange(5)})
    reader.join(60)
    (tmp_path / "copy.npz").write_bytes(found[0])
    assert np.load(tmp_path / "copy.npz")["x"].tolist() == [0, 1, 2, 3, 4] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_device_is_written_through_and_its_errors_count() -> None:
    before = os.stat("/dev/full").st_rdev, listed(Path("/dev"))
    with pytest.raises(InvalidInput, match=r"SX351.*No space left"):
        write_text("/dev/full", "text")
    write_text("/dev/null", "text")
    assert (os.stat("/dev/full").st_rdev, listed(Path("/dev"))) == before


def test_the_standard_output_is_written_after_what_was_printed(tmp_path: Path) -> None:
    code = "from singa_backend.io.files import write_text\nprint('first')\nwrite_text('/dev/stdout', 'second')"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == (tmp_path / "out").read_bytes() == b"first\nsecond" and listed(tmp_path) == ["out"]


def test_what_cannot_be_a_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for bad in (tmp_path, tmp_path / "no" / "x", tmp_path / "file" / "x", tmp_path / "loop", "", "a\0b", "x" * 300):
        for ask in (check, lambda p: write_text(p, "text", parents=False)):
            with pytest.raises(InvalidInput) as found:
                ask(bad)
            assert found.value.code == "SX351"
    assert listed(tmp_path) == ["file", "loop"]
    check(tmp_path / "file"), check(tmp_path / "new"), check("/dev/null")


def test_a_target_that_is_read_is_refused_under_each_of_its_names(tmp_path: Path) -> None:
    read, link = tmp_path / "read", tmp_path / "link"
    read.write_text("kept")
    link.symlink_to(read)
    for bad in (read, link, tmp_path / "." / "read"):
        with pytest.raises(InvalidInput, match="is read here") as found:
            check(bad, keeps=(None, read))
        assert found.value.code == "SX351"
    check(tmp_path / "other", keeps=(read, None, tmp_path / "none")), check(read, keeps=(tmp_path / "other",))
    check("/dev/null", keeps=("/dev/null",))


def test_a_new_file_does_not_replace_another(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), staged(tmp_path / "a", new=True) as stage:
        stage.write("a", "mine")
        stage.write("b", "mine")
        (tmp_path / "a").write_text("another's")  # meanwhile
    assert (tmp_path / "a").read_text() == "another's" and listed(tmp_path) == ["a"]
    with pytest.raises(InvalidInput, match="there is a file b already"), staged(tmp_path / "a") as stage:
        stage.write("a", "mine")
        stage.write("b", "mine")
        (tmp_path / "b").write_text("another's")
    assert (tmp_path / "a").read_text() == "another's" and (tmp_path / "b").read_text() == "another's"


def test_an_error_in_the_body_is_not_changed(tmp_path: Path) -> None:
    for error in (KeyError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), writing(tmp_path / "a") as out:
            out.write(b"half")
            raise error
    with pytest.raises(KeyError), staged_folder(tmp_path / "b") as folder:
        write_text(folder / "half", "")
        raise KeyError
    assert not listed(tmp_path)


def test_arrays_of_any_name_without_pickles(tmp_path: Path) -> None:
    arrays = {"file": np.ones(2), "a/b": np.array([[True]]), "s": np.array([["é", ""], ["long", "x"]], object)}
    write_npz(tmp_path / "a.npz", arrays)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert {n: found[n].tolist() for n in found.files} == {n: a.tolist() for n, a in arrays.items()}
    for bad in (np.array([{}], object), np.array(["a\0"], object), np.array([None], object)):
        with pytest.raises(InvalidInput, match="SX351"):
            write_npz(tmp_path / "a.npz", {"x": bad})
    assert zipfile.is_zipfile(tmp_path / "a.npz") and listed(tmp_path) == ["a.npz"]


def test_two_values_of_one_array_are_refused() -> None:
    pair = [np.ones(2), np.zeros(2)]
    assert list(named_arrays({"a": pair, "b": {"x": 1}, "c": None})) == ["a/0", "a/1", "b/keys", "b/values"]
    for values in ({"a": pair, "a/1": pair[0]}, {"a/keys": pair[0], "a": {1: 2.0}}):
        with pytest.raises(InvalidInput, match="SX351"):
            named_arrays(values)


# --- owners -----------------------------------------------------------------------------------------------------------


def test_a_file_system_on_which_every_lock_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(handle: int, how: int) -> None:
        raise BlockingIOError(11, "taken")

    monkeypatch.setattr("fcntl.flock", taken)
    with pytest.raises(InvalidInput, match="SX351"):
        write_text(tmp_path / "new", "a")
    assert not listed(tmp_path)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if path == tmp_path:
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        save(model(1), tmp_path / "m.onnx")
    assert listed(tmp_path) == ["m.onnx"]


def abandon(path: Path, *, commit: bool = False) -> None:
    """A child that dies while it writes."""
    child = os.fork()
    if not child:
        stage = Stage(path)
        stage.write(path.name, "half")
        if commit:
            os.rmdir = stage.commit  # type: ignore[assignment]
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_next_write_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    live = Stage(tmp_path / "live")
    live.write("live", "mine")
    (tmp_path / f"{PREFIX}file").write_text("not a folder")
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path)
    kept = listed(tmp_path)
    abandon(tmp_path / "a")
    assert len(listed(tmp_path)) == len(kept) + 1
    write_text(tmp_path / "other", "")
    assert listed(tmp_path) == sorted([*kept, "other"])
    live.commit()
    live.close()
    assert (tmp_path / "live").read_text() == "mine" and len(listed(tmp_path)) == 4


def test_a_journal_removes_only_the_files_that_it_means(tmp_path: Path) -> None:
    """A folder of that name may come from an archive of someone else, even with the mark."""
    (tmp_path / "mine").write_text("keep")
    (tmp_path / "in").mkdir()
    same = os.stat(tmp_path / "mine")
    names = [("mine", 1), ("../mine", same.st_mtime_ns), ("in/../mine", same.st_mtime_ns)]
    listing = [{n: [same.st_ino, same.st_size, t]} for n, t in names]
    journals = [json.dumps({"main": "m", "placed": {}, "stale": stale}) for stale in listing]
    for text in (*journals, '{"main": 3, "placed": [], "stale": {}}', "[" * 100_000, "\0", "{}"):
        top, lock = claim(tmp_path)
        (top / "new").mkdir()
        os.write(lock, text.encode())
        os.close(lock)
        write_text(tmp_path / "a", "")
        assert listed(tmp_path) == ["a", "in", "mine"] and (tmp_path / "mine").read_text() == "keep"


def test_a_folder_without_the_mark_stays(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}x"
    folder.mkdir()
    (folder / "lock").write_text("keep")
    write_text(tmp_path / "a", "")
    assert listed(tmp_path) == [folder.name, "a"] and (folder / "lock").read_text() == "keep"


def test_a_process_that_was_forked_does_not_remove_what_its_parent_writes(tmp_path: Path) -> None:
    code = f"""if True:
        import os, sys
        from singa_backend.io.files import writing
        with writing({str(tmp_path / "a")!r}) as out:
            out.write(b"text")
            out.flush()
            if not os.fork():
                sys.exit()
            os.wait()
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "a").read_bytes() == b"text" and listed(tmp_path) == ["a"]


def test_writers_at_the_same_time_in_one_folder(tmp_path: Path) -> None:
    def write(i: int) -> None:
        for k in range(20):
            write_bytes(tmp_path / "one", bytes([i]) * 1000)
            write_bytes(tmp_path / f"own{i}", bytes([k]) * 10)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set((tmp_path / "one").read_bytes())) == 1
    assert all((tmp_path / f"own{i}").read_bytes() == bytes([19]) * 10 for i in range(4)) and len(listed(tmp_path)) == 5


# --- models and their external data -----------------------------------------------------------------------------------


def model(value: float) -> onnx.ModelProto:
    made = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[1, 2, 20, 20] x) => (float[1, 2, 20, 20] y, int64[300] o)'
        "{ p = Add(x, w) \n z = Add(p, inner) \n y = Relu(z) \n o = Identity(order) }"
    )
    for name, array in (("w", np.full((1, 2, 20, 20), value, np.float32)), ("order", np.arange(300) + int(value)),
                        ("inner", np.full((1, 2, 20, 20), 1, np.float32))):  # fmt: skip
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def order(path: Path) -> int:
    return int(sonnx.prepare(path).run([np.zeros((1, 2, 20, 20), np.float32)])[1][0])


COMMANDS = {
    "convert": ["--opset", "17"],
    "layout": ["--to", "channels_last"],
    "optimize": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_external_data_go_along_to_another_folder(command: str, tmp_path: Path) -> None:
    """Also those of integers; again over the result, which then has one file of data."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    for value in (1, 2):
        source = tmp_path / "in" / "m.onnx"
        sonnx.save(model(value), source, save_as_external_data=True, location="m.bin", size_threshold=0)
        done = CliRunner().invoke(main, [command, str(source), *COMMANDS[command], "-o", str(tmp_path / "out" / "m.onnx")])
        assert done.exit_code == 0, done.output
        for p in (tmp_path / "in").iterdir():
            p.unlink()
        run = sonnx.prepare(tmp_path / "out" / "m.onnx")
        x = np.zeros((1, 20, 20, 2) if command == "layout" else (1, 2, 20, 20), np.float32)
        assert run.run([x])[1][0] == value
        assert len(listed(tmp_path / "out")) <= 2 and "m.onnx" in listed(tmp_path / "out")


def test_save_does_not_write_a_model_without_its_data(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    sonnx.save(model(3), tmp_path / "in" / "m.onnx", save_as_external_data=True)
    light = sonnx.load(tmp_path / "in" / "m.onnx")  # without the data
    with pytest.raises(InvalidModel, match=r"m\.onnx\.data") as found:
        sonnx.save(light, tmp_path / "m.onnx")
    assert found.value.code == "SX105" and listed(tmp_path) == ["in"]
    light.doc_string = "noted"
    sonnx.save(light, tmp_path / "in" / "m.onnx")  # the data stay where they are
    assert order(tmp_path / "in" / "m.onnx") == 3 and listed(tmp_path / "in") == ["m.onnx", "m.onnx.data"]


@pytest.mark.parametrize("keywords", [
    {}, {"location": "w.bin"}, {"location": "sub/w.bin"}, {"all_tensors_to_one_file": False, "size_threshold": 0},
], ids=str)  # fmt: skip
def test_save_again_and_again(keywords: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the names that were requested, without those of the model before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    sizes = set()
    for value in (1, 2, 3):
        sonnx.save(model(value), tmp_path / "m.onnx", save_as_external_data=True, **keywords)
        assert order(tmp_path / "m.onnx") == value
        sizes.add(len([p for p in tmp_path.rglob("*") if p.is_file()]))
    assert len(sizes) == 1
    if "location" in keywords:
        assert (tmp_path / keywords["location"]).is_file()


def test_two_models_of_one_folder_keep_their_data(tmp_path: Path) -> None:
    """A file of data that another model may use is not removed, and not written over."""
    sonnx.save(model(1), tmp_path / "a.onnx", save_as_external_data=True)
    os.rename(tmp_path / "a.onnx", tmp_path / "b.onnx")
    sonnx.save(model(2), tmp_path / "a.onnx", save_as_external_data=True)
    assert order(tmp_path / "a.onnx") == 2 and order(tmp_path / "b.onnx") == 1


def test_a_device_has_no_room_for_external_data(tmp_path: Path) -> None:
    sonnx.save(model(1), "/dev/null")
    with pytest.raises(InvalidInput, match="SX351"):
        sonnx.save(model(1), "/dev/null", save_as_external_data=True)
    assert not [n for n in listed(Path("/dev")) if n.endswith(".data")]


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    sonnx.save(model(1), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_run_writes_through_or_refuses(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plain.parent)
    for target, code in (("/dev/full", 3), ("./", 3), ("no/o.npz", 3), ("/dev/null", 0), ("o.npz", 0), ("other", 0)):
        done = CliRunner().invoke(main, ["run", str(plain), "--random", "0", "-o", target])
        assert done.exit_code == code, (target, done.output)
    assert listed(plain.parent) == ["m.onnx", "o.npz", "other"]
    assert sorted(np.load("o.npz").files) == sorted(np.load("other").files) == ["o", "y"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_a_program_is_not_written_to_a_pipe(plain: Path) -> None:
    pipe = plain.with_name("net.py")
    os.mkfifo(pipe)
    path = os.pathsep.join(str(PROJECT / f) for f in ("backend", "frontend"))
    command = [sys.executable, "-m", "singa.cli", "codegen", str(plain), "-o", str(pipe), "--force"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 3 and "SX351" in done.stderr and stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_standard_output(plain: Path) -> None:
    path = os.pathsep.join(str(PROJECT / f) for f in ("backend", "frontend"))
    for arguments in (["--help"], ["run", str(plain), "--random", "0"], ["run", str(plain), "--random", "0", "--json"]):
        command = [sys.executable, "-m", "singa.cli", *arguments]
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
        assert (done.returncode, done.stderr) == (3, "cannot write: No space left on device\n"), arguments


def exporting(folder: Path) -> subprocess.Popen[str]:
    """`sonnx export` of a program in a folder, in a process group of its own."""
    command = [sys.executable, "-m", "singa.cli", "export", "net.py:Net", "-o", "o.onnx"]
    path = os.pathsep.join(str(PROJECT / f) for f in ("backend", "frontend"))
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True, env=os.environ | {"PYTHONPATH": path})  # fmt: skip


SLEEP = "import time\ndef Net():\n    print('waiting', flush=True)\n    time.sleep(60)\n"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SLEEP)
    running = exporting(tmp_path)
    assert running.stdout and running.stdout.readline() == "waiting\n"
    running.send_signal(number)
    _, log = running.communicate(timeout=60)
    assert running.returncode == code and "Traceback" not in log and "o.onnx" not in listed(tmp_path)


DESTRUCTOR = """
import signal, time
from singa.cli._interrupts import Interrupts
class Dropped:
    def __del__(self):
        signal.raise_signal(NUMBER)
Interrupts().install()
dropped = Dropped()
try:
    del dropped
    for _ in range(300):
        time.sleep(0.01)
except KeyboardInterrupt:
    raise SystemExit(130) from None
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_destructor_is_raised_after_it(number: int, code: int) -> None:
    """Python prints an exception of a destructor, or of the hook that it calls then, and continues."""
    path = os.pathsep.join(str(PROJECT / f) for f in ("backend", "frontend"))
    done = subprocess.run([sys.executable, "-c", DESTRUCTOR.replace("NUMBER", str(int(number)))], text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")


def test_an_interrupt_at_any_line_of_a_command(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised at every system call that the writing of a file makes."""
    seen = 0
    for stop in range(1, 1000):
        seen = 0

        def count(frame: Any, event: str, argument: Any, stop: int = stop) -> Any:
            nonlocal seen
            if frame.f_code.co_filename in (files.__file__, temporary.__file__):
                if "__del__" in (f.f_code.co_name for f, _ in traceback.walk_stack(frame)):
                    return None  # Python reports an exception there and drops it
                seen += 1
                if seen == stop * 13:
                    raise KeyboardInterrupt
                return count
            return None

        sys.settrace(count)
        try:
            done = CliRunner().invoke(main, ["run", str(plain), "--random", "0", "-o", str(plain.parent / "o.npz")])
        finally:
            sys.settrace(None)
        if seen < stop * 13:
            break
        assert done.exit_code == 130, (stop, done.output, done.exception)
        if (plain.parent / "o.npz").exists():
            np.load(plain.parent / "o.npz")["y"]
            (plain.parent / "o.npz").unlink()
    assert stop > 5 and done.exit_code == 0
    assert [n for n in listed(plain.parent) if not n.startswith(PREFIX)] == ["m.onnx", "o.npz"]


def test_an_interrupt_at_any_line_of_close_closes_no_other_file(tmp_path: Path) -> None:
    """The number of the closed lock may be that of another file when the stage is closed again."""
    stop, interrupted = 0, True
    while interrupted:
        stop, seen, interrupted = stop + 1, 0, False
        stage = files.Stage(tmp_path / "o")

        def count(frame: Any, event: str, argument: Any, stop: int = stop, stage: files.Stage = stage) -> Any:
            nonlocal seen
            if frame.f_code is not files.Stage.close.__code__ or frame.f_locals["self"] is not stage:
                return None
            seen += event == "line"
            if event == "line" and seen == stop:
                raise KeyboardInterrupt
            return count

        sys.settrace(count)
        try:
            stage.close()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        taken = [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]
        stage.close()
        for number in taken:
            os.close(number)  # an OSError if the stage closed it
    assert stop > 5


CHILD = """
import time
from singa_backend.io.processes import Child
def Net():
    child = Child(eval, "lambda seconds: __import__('time').sleep(seconds)")
    WARM
    child.send(60)
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("warm", ["", "child.ask(0)"], ids=["a child that starts", "a child that works"])
def test_an_interrupt_of_the_whole_group_ends_the_children_without_a_word(warm: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CHILD.replace("WARM", warm))
    running = exporting(tmp_path)
    assert running.stdout
    child = int(running.stdout.readline())
    os.killpg(running.pid, signal.SIGINT)
    _, log = running.communicate(timeout=60)
    assert (running.returncode, log) == (130, "interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
