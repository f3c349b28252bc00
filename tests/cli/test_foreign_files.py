"""No command deletes, cuts or follows what this program has not written: every option that writes, and every kind of target.

Generated from the commands: an option that writes must have a run here, or a reason in EXEMPT.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.cli.test_output_paths import FILES, RUNS, WRITTEN, folder  # noqa: F401  # a fixture

from singa.cli import main
from singa_backend.conform import results
from singa_backend.io.temporary import PREFIX
from singa_backend.proto import test_data

PRECIOUS = b"precious \0 bytes of the user\n" * 40

OTHERS = {
    ("train", "--metrics"): "m.onnx --data d.npz -o o.onnx --metrics {}",
    ("train", "--checkpoint"): "m.onnx --data d.npz --checkpoint {}",
    ("codegen", "--output"): "m.onnx -o {}",
}
"""Files that have others next to them, or that grow; the rest is in RUNS."""

KEEPS = {("train", "--metrics"), ("train", "--checkpoint"), ("codegen", "--output")}
"""Options that refuse a file with content; all others replace a regular file, and the file that a link names."""

FOLDERS = {
    ("sweep", "--results"): "models -k ^m.onnx$ --task check -n 1 --results {}",
    ("train", "--tensorboard"): "m.onnx --data d.npz -o o.onnx --tensorboard {}",
    ("adapter", "--output"): "a.safetensors --model m.onnx -o {}",
    ("bisect", "--to"): "wrong.onnx --against m.onnx --random 0 --to {}",
    ("guard", "--to"): "check m.guard --against sonnx --model wrong.onnx --to {}",
}
"""A run of each option that names a folder."""

EXEMPT = {
    ("reduce", "--to"): "writes by proto.test_data, as bisect",
    ("fuzz", "--write"): "writes by proto.test_data, as bisect",
    ("fuzz", "--report"): "writes by conform.results, tested below",
    ("conform", "--report"): "writes by conform.results, tested below; needs the whole suite",
    ("gradients", "--to"): "writes by conform.results, tested below",
    ("opsets", "--to"): "writes by conform.results, tested below; needs the whole matrix",
    ("report", "--to"): "writes by conform.results, tested below; needs the result of a whole suite",
    ("foreign", "--to"): "writes with the mark of conform.results, tested below",
    ("conform", "--cache"): "is written after a download",
    ("device-check", "--to"): "needs minutes; tests/conform/test_device_check.py",
}
"""Options without a run, and the reason."""


def option_of(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len) if parameter.opts[0].startswith("-") else parameter.opts[0]


def test_every_option_that_writes_is_here() -> None:
    short = {(c, option_of(p)) for c, p in WRITTEN if (c, p.opts[0]) in FILES}
    assert {(c, option_of(p)) for c, p in WRITTEN} == short | {*OTHERS, *FOLDERS, *EXEMPT}


FILE_LINES = {(c, o): words.replace(f"{o} -", f"{o} {{}}") for (c, o), (words, _) in RUNS.items()}
FILE_LINES = {k: w if "{}" in w else w.replace(" -o -", " -o {}") for k, w in FILE_LINES.items()} | OTHERS


def contents(top: Path) -> dict[str, bytes | str]:
    """Every file below a folder by its bytes, and every link by its target."""
    return {
        str(p.relative_to(top)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else "folder"
        for p in top.rglob("*")
    }


def suffix(key: tuple[str, str]) -> str:
    if key[1] == "--plot":
        return ".png"
    return {"codegen": ".py", "adapter": ".safetensors"}.get(key[0], ".out")


KINDS = ("file", "link", "dangling link", "folder", "link to a folder")


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user, with a folder in it whose name looks like a temporary one of this program."""
    top = tmp_path_factory.mktemp("outside")
    (top / "inner").mkdir()
    for name in ("notes", "inner/notes"):
        (top / name).write_bytes(PRECIOUS)
    return top


@pytest.mark.parametrize("key", FILE_LINES, ids=" ".join)
def test_a_file_that_is_written(key: tuple[str, str], folder: Path, outside: Path) -> None:  # noqa: F811
    """A regular file and the file of a link are replaced whole, or refused and kept; everything else is kept."""
    assert "{}" in FILE_LINES[key], FILE_LINES[key]
    (folder / f"{PREFIX}models").mkdir()
    (folder / f"{PREFIX}models" / "mine").write_bytes(PRECIOUS)
    for kind in KINDS:
        target, before = folder / f"target{suffix(key)}", contents(outside)
        {
            "file": lambda t: t.write_bytes(PRECIOUS), "link": lambda t: t.symlink_to(outside / "notes"),
            "dangling link": lambda t: t.symlink_to(outside / "absent"), "folder": lambda t: t.mkdir(),
            "link to a folder": lambda t: t.symlink_to(outside / "inner"),
        }[kind](target)  # fmt: skip
        if kind == "folder":
            (target / "mine").write_bytes(PRECIOUS)
        done = CliRunner().invoke(main, [key[0], *shlex.split(FILE_LINES[key].format(target.name))])
        assert done.exception is None or isinstance(done.exception, SystemExit), (kind, done.exception)
        after = contents(outside)
        changed = {n for n in before | after if before.get(n) != after.get(n)}
        if kind == "folder":
            assert done.exit_code in (2, 3) and (target / "mine").read_bytes() == PRECIOUS, (kind, done.output)
        elif kind == "file":
            assert (target.read_bytes() == PRECIOUS) == (key in KEEPS) == bool(done.exit_code), (kind, done.output)
        else:
            named = {"link": {"notes"}, "dangling link": {"absent"}, "link to a folder": set()}[kind]
            follows = key not in KEEPS or (kind == "dangling link" and key == ("train", "--checkpoint"))
            assert target.is_symlink() and changed <= (named if follows else set()), (kind, changed, done.output)
        assert (folder / f"{PREFIX}models" / "mine").read_bytes() == PRECIOUS
        if changed:
            for name in changed:
                (outside / name).unlink()
            (outside / "notes").write_bytes(PRECIOUS)
        if target.is_dir() and not target.is_symlink():
            target.rename(folder / "kept")
        else:
            target.unlink()
        (folder / "o.onnx").unlink(missing_ok=True)


@pytest.mark.parametrize("key", FOLDERS, ids=" ".join)
def test_a_folder_that_is_written(key: tuple[str, str], folder: Path, outside: Path) -> None:  # noqa: F811
    """Other files of a folder stay; a file or a link under a name that the command writes there is not replaced or followed."""
    if key[1] == "--tensorboard":
        pytest.importorskip("tensorboardX")
    if key[0] == "adapter":
        pytest.importorskip("safetensors")
    import onnx

    (folder / "models").mkdir()
    os.link(folder / "m.onnx", folder / "models" / "m.onnx")
    model = onnx.load(folder / "m.onnx")
    model.graph.initializer[0].float_data[0] = 9.0
    onnx.save(model, folder / "wrong.onnx")

    def run(target: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, [key[0], *shlex.split(FOLDERS[key].format(target))])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        (folder / "o.onnx").unlink(missing_ok=True)
        return done.exit_code, done.output

    run("first")
    names = [n for n, c in contents(folder / "first").items() if c != "folder"] if (folder / "first").is_dir() else []
    if not names and key[0] == "adapter":
        pytest.skip("the model has no module of this adapter")
    assert names
    (folder / "mine").mkdir()
    (folder / "mine" / "notes").write_bytes(PRECIOUS)
    (folder / "linked").symlink_to(outside)
    before = contents(outside)
    for target in ("mine", "linked"):
        run(target)
    assert (folder / "mine" / "notes").read_bytes() == PRECIOUS
    assert contents(outside).items() >= before.items() and (folder / "linked").is_symlink()
    if key[1] == "--tensorboard":  # a name of each training
        return
    before = contents(outside)
    for kind in ("file", "link"):
        for name in names:
            target = folder / f"{kind}-{name.replace('/', '_')}"
            place = target / name
            place.parent.mkdir(parents=True)
            place.write_bytes(PRECIOUS) if kind == "file" else place.symlink_to(outside / "notes")
            code, told = run(target.name)
            assert code == 3 and "SX351" in told, (kind, name, told)
            assert place.read_bytes() == PRECIOUS and contents(outside) == before


def test_documents_and_pages_replace_only_their_own(tmp_path: Path, outside: Path) -> None:
    """All commands with reports write by `publish`."""
    from singa_backend.errors import InvalidInput

    pages = {"a.md": lambda document: f"Generated by {document}"}
    for _ in range(2):  # its own files are replaced
        assert len(results.publish({"x": 1}, tmp_path / "own" / "a.json", pages)) == 2
    assert results.load(tmp_path / "own" / "a.json") == {"x": 1}
    for name in ("a.json", "a.md"):
        for kind in ("file", "link"):
            place = tmp_path / f"{kind}-{name}" / name
            place.parent.mkdir()
            place.write_bytes(PRECIOUS) if kind == "file" else place.symlink_to(outside / "notes")
            before = contents(outside)
            with pytest.raises(InvalidInput, match="SX351"):
                results.publish({"x": 2}, place.with_name("a.json"), pages)
            assert place.read_bytes() == PRECIOUS and contents(outside) == before and len(list(place.parent.iterdir())) == 1


def test_a_reproduction_takes_a_free_name_and_removes_only_its_own(tmp_path: Path, outside: Path) -> None:
    from onnx import ModelProto

    from singa_backend.errors import InvalidInput

    taken, other = tmp_path / "m-layer_MatMul", tmp_path / "data"
    taken.mkdir()
    (taken / "model.onnx").write_bytes(PRECIOUS)
    assert (
        test_data.free_folder(taken) == tmp_path / "m-layer_MatMul.1" and test_data.free_folder(tmp_path / "x") == tmp_path / "x"
    )
    (other / "test_data_set_0").mkdir(parents=True)
    (other / "test_data_set_0" / "input_0.pb").write_bytes(PRECIOUS)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "test_data_set_0").symlink_to(outside)
    for folder in (taken, other, linked):  # noqa: F402
        with pytest.raises(InvalidInput, match="SX351"):
            test_data.write(folder, ModelProto(), {"input_0.pb": b"x"})
    own = tmp_path / "own"
    test_data.write(own, ModelProto(producer_name="other"), {"input_0.pb": b"x", "input_1.pb": b"y"})
    (own / "test_data_set_0" / "my_output_x.pb").write_bytes(PRECIOUS)
    test_data.write(own, ModelProto(), {"input_0.pb": b"z"})
    assert sorted(p.name for p in (own / "test_data_set_0").iterdir()) == ["input_0.pb", "my_output_x.pb"]
    test_data.remove(own)
    assert sorted(contents(own)) == ["test_data_set_0", "test_data_set_0/my_output_x.pb"]


# --- targets without permission -------------------------------------------------------------------------------------------

DENIED = ("closed/target{}", "kept{}", "closed/none/target{}", "kept.out/target{}", "/proc/none/target{}", "x" * 300 + "{}")
"""In a folder that is not writable; a file that is not writable; below such ones; names that no system has."""

NO_RIGHTS = """
import ctypes, json, os, shlex, sys
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # no capabilities: root is a user as any other
assert os.geteuid() or not ctypes.CDLL(None, use_errno=True).capset(header, data), "capset"
from click.testing import CliRunner
from singa.cli import main
for key, target, line in json.load(sys.stdin):
    done = CliRunner().invoke(main, [key, *shlex.split(line)])
    bare = done.exception is not None and not isinstance(done.exception, SystemExit)
    print(json.dumps([done.exit_code, done.output, repr(done.exception) if bare else ""]), flush=True)
"""


def test_a_target_without_permission_is_a_typed_error(folder: Path) -> None:  # noqa: F811
    """Of every option that writes, in a process without the rights of root: a message that names the path; nothing changes."""
    import json
    import subprocess
    import sys

    import onnx

    (folder / "models").mkdir()
    os.link(folder / "m.onnx", folder / "models" / "m.onnx")
    model = onnx.load(folder / "m.onnx")
    model.graph.initializer[0].float_data[0] = 9.0
    onnx.save(model, folder / "wrong.onnx")
    (folder / "closed").mkdir()
    asked = []
    for key, line in {**FILE_LINES, **FOLDERS}.items():
        kept = folder / f"kept{suffix(key)}"
        kept.write_bytes(PRECIOUS)
        kept.chmod(0o444)
        asked += [(key[0], t.format(suffix(key)), line.format(t.format(suffix(key)))) for t in DENIED]
    (folder / "kept.out").write_bytes(PRECIOUS)
    (folder / "closed").chmod(0o555)
    before = contents(folder)
    done = subprocess.run(
        [sys.executable, "-c", NO_RIGHTS], input=json.dumps(asked), capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = []
    for (command, target, line), (code, output, bare) in zip(asked, answers, strict=True):
        shown = "".join(output.split())
        if bare or code not in (2, 3) or (Path(target).name[:60] not in shown and Path(target).parent.name not in shown):
            wrong.append(f"{command} {line[:200]}: {code} {bare} {output[-500:]}")
    assert not wrong, "\n".join(wrong)
    assert {n: c for n, c in contents(folder).items() if "__pycache__" not in n} == before
