"""Runs ONNX's suite, tests of definitions, three nets, machine code and its bits on aarch64, which qemu-user emulates.

    python tests/helpers/aarch64.py FOLDER [suite] [tests] [nets] [code] [bits]     # tox -e aarch64; all by default

It needs Debian on another processor. FOLDER gets Python and its libraries from Debian's packages of arm64 (`root`), wheels from
PyPI (`site`), and `python`, which runs both by qemu-aarch64 for this program and for the processes that it starts. They, and
machine code, are kept for the next run. apt-get has its lists, its cache and its state in FOLDER, so that those of the system,
and its architectures, stay as they are. The step `bits` compares bits with this processor's: it needs sonnx[jit] here too.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2]
TOOLS = {"qemu-aarch64": "qemu-user", "apt-get": "apt", "dpkg-deb": "dpkg"}
"""The programs, and Debian's packages of them."""

PACKAGES = ("python3", "libgomp1", "libstdc++6")
"""What is unpacked, with everything that it depends on."""

EXTRAS = ("image", "jit", "text")
"""Those that the suite and machine code use."""

GLIBC = range(17, 37)
"""The versions 2.x for which wheels are accepted: up to that of Debian 12."""

TESTS = [
    f"tests/operators/test_{name}.py" for name in ("arithmetic", "conv", "linalg", "normalization", "pool", "reduction", "unary")
]
CODE = [f"tests/elementwise/test_{name}.py" for name in ("compile", "functions", "later", "load", "machine_code", "steps")]
CODE += ["tests/gemm/test_floats.py", "tests/gemm/test_integers.py"]
SONNX = ("-c", "from singa.cli import start; start()")
NETS = ("bert", "lstm", "mobilenetv2")
COMPARE = """
import sys
import numpy as np
from singa_backend import SingaBackend

for name in sys.argv[1:]:
    with np.load(f"tests/models/{name}.npz") as stored:
        arrays = {kind: [stored[n] for n in sorted(stored.files) if n.startswith(f"{kind}0_")] for kind in "xy"}
    outputs = SingaBackend.prepare(f"tests/models/{name}-dynamo-18.onnx").run(arrays["x"])
    errors = [float(abs(a - b).max() / abs(b).max()) for a, b in zip(outputs, arrays["y"], strict=True)]
    print(f"{name}: errors against PyTorch {', '.join(f'{e:.1e}' for e in errors)} of the largest value", flush=True)
    assert max(errors) < 1e-5, name
"""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
BITS = "bits"
STEPS: dict[str, tuple[str, ...]] = {
    "suite": (*SONNX, "conform", "--timeout", "1800"),
    "tests": (*PYTEST, "--without-plans", *TESTS),
    "nets": ("-c", COMPARE, *NETS),
    "code": (*PYTEST, *CODE),
    BITS: ("-m", "tests.helpers.elementwise_bits"),
}


def root(folder: Path) -> None:
    """Unpack Python for arm64; its version is that of the system's Debian."""
    apt = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "state"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    places = {"State": apt / "state", "State::Lists": apt / "lists", "State::status": apt / "status", "Cache": apt / "cache"}
    options = [f"-oDir::{name}={path}" for name, path in places.items()]
    options += ["-oAPT::Architecture=arm64", "-oAPT::Architectures::=arm64", "-oAPT::Sandbox::User=root"]
    failure = "packages of arm64 must be found in the sources of this system: it needs Debian and a network"
    call(["apt-get", "-q", *options, "update"], failure)
    call(["apt-get", "-qy", *options, "install", "--download-only", "--no-install-recommends", *PACKAGES], failure)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        call(["dpkg-deb", "-x", str(package), str(folder / "root")], f"{package.name} must be an archive")


def requirements() -> list[str]:
    """What this project, some of its extras and the steps need on aarch64."""
    with open(PROJECT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    texts = [*project["dependencies"], *extras, "onnx==1.23.2", "pytest>=8.2"]
    emulated = {"platform_machine": "aarch64", "sys_platform": "linux"}
    return [f"{r.name}{r.specifier}" for r in map(Requirement, texts) if r.marker is None or r.marker.evaluate(emulated)]


def site(folder: Path) -> None:
    """Install the requirements as wheels for the unpacked Python."""
    version = (folder / "root" / "usr" / "bin" / "python3").readlink().name.removeprefix("python")
    tags = [f"--platform=manylinux{t}_aarch64" for t in ("2014", *(f"_2_{n}" for n in GLIBC))]
    options = ["--quiet", "--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *tags]
    command = [sys.executable, "-m", "pip", "install", *options, f"--target={folder / 'site'}"]
    call([*command, *requirements()], "wheels for aarch64 must be found on PyPI: it needs a network")


def interpreter(folder: Path) -> Path:
    """Write the program that runs the unpacked Python; its `sys.executable` is that program."""
    python = folder / "python"
    path = os.pathsep.join(map(str, (folder / "site", PROJECT / "backend", PROJECT / "frontend")))
    command = shlex.join(["qemu-aarch64", "-L", str(folder / "root"), str(folder / "root" / "usr" / "bin" / "python3")])
    lines = [
        f"export PYTHONPATH={shlex.quote(path)} OPENBLAS_NUM_THREADS=1",
        "unset OPENBLAS_CORETYPE  # a name of a processor of the host",
        f'exec {command} "$@"',
    ]
    python.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    python.chmod(0o755)
    (folder / "site" / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {str(python)!r}\n")
    return python


def call(command: Sequence[str], failure: str) -> None:
    """Run a command of the host; end the program if it fails."""
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"aarch64: {failure}: `{shlex.join(command[:2])} ...` failed, see above")


def prepare(folder: Path) -> Path:
    """Make what is not there, each folder whole or not at all; returns the interpreter."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            sys.exit(f"aarch64: {tool} must be installed, got none: it is in Debian's package {package}")
    for make, wanted in ((root, PACKAGES), (site, requirements())):
        done, text = folder / f"{make.__name__}.done", "\n".join(wanted)
        if not done.exists() or done.read_text() != text:
            shutil.rmtree(folder / make.__name__, ignore_errors=True)
            make(folder)
            done.write_text(text)
    return interpreter(folder)


def main(folder: Path, steps: Sequence[str]) -> int:
    """Run the steps; returns 1 if one failed."""
    if unknown := set(steps) - set(STEPS):
        sys.exit(f"aarch64: a step must be one of {', '.join(STEPS)}, got {', '.join(sorted(unknown))}")
    folder = folder.resolve()
    python = str(prepare(folder))
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    failed = []
    for name in steps or STEPS:
        before, start = os.times(), time.monotonic()
        command = [sys.executable, *STEPS[name], str(folder / name), python] if name == BITS else [python, *STEPS[name]]
        if subprocess.run(command, env=environment, cwd=PROJECT, check=False).returncode:
            failed.append(name)
        now = os.times()
        cpu = now.children_user + now.children_system - before.children_user - before.children_system
        print(
            f"aarch64: {name}: {'FAILED' if name in failed else 'passed'}, {time.monotonic() - start:.0f} s, {cpu:.0f} s of CPU"
        )
    return bool(failed)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
