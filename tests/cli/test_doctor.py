"""What this installation computes with: the library, threads and quotas, extras, and the commands that bring what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.helpers.paths import PROJECT

from singa.cli import main
from singa.cli.doctor import TRUST
from singa_backend import doctor, machine
from singa_backend.elementwise import compile as machine_code
from singa_backend.io import processes
from singa_backend.kernels import onednn
from singa_backend.kernels.onednn import loading, trust

METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]

needs_library = pytest.mark.skipif(onednn.library() is None, reason=f"oneDNN is not available: {onednn.missing()}")


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs do during a test is not described."""
    monkeypatch.setattr(machine, "used_by_others", lambda: 0.0)


@pytest.mark.skipif(loading.library() is None or loading.library().runtime != "OpenMP", reason="plans use one thread")
def test_other_programs_on_the_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "used_by_others", lambda: 1.4)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(doctor, "default_threads", lambda: 2)
    monkeypatch.delenv("SONNX_NUM_THREADS", raising=False)
    (one,) = [f for f in doctor.diagnose().findings if "other programs" in f.text]
    assert one.level == "hint" and "1.4 of 2" in one.text and "until the cores are free" in one.text
    monkeypatch.setenv("SONNX_NUM_THREADS", "2")
    (one,) = [f for f in doctor.diagnose().findings if "other programs" in f.text]
    assert one.command == "SONNX_NUM_THREADS=1" and "is set" in one.text
    monkeypatch.setattr(machine, "used_by_others", lambda: None)
    assert not [f for f in doctor.diagnose().findings if "other programs" in f.text]


@pytest.fixture
def searched() -> Iterator[None]:
    """The library is looked for again, within the test and after it."""
    onednn.reset()
    yield
    onednn.reset()


def found(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of the command in a fresh process."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("SONNX_", "ONEDNN_", "OMP_"))}
    command = [sys.executable, "-m", "singa.cli", "doctor", "--json", *arguments]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


@needs_library
def test_the_library_is_described() -> None:
    told = doctor.diagnose()
    library = onednn.library()
    assert library is not None
    assert told.onednn.path == library.path and told.onednn.isa == library.isa and told.onednn.runtime == library.runtime
    assert told.onednn.version.startswith("3.") and len(told.onednn.hash) == 40 and not told.onednn.reason


def test_a_hidden_library_is_a_problem() -> None:
    code, told = found(SONNX_ONEDNN="off")
    assert code == 1 and not told["well"] and told["onednn"]["path"] == ""
    assert told["findings"][0]["level"] == "problem" and "unset SONNX_ONEDNN" in told["findings"][0]["command"]


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel is for Linux")
@pytest.mark.parametrize("installed", [False, True])
def test_the_command_that_brings_the_library_is_that_of_the_dependency(
    installed: bool, searched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SONNX_ONEDNN", raising=False)
    monkeypatch.setattr(loading, "_candidates", lambda: iter(["libno-such-dnnl.so.3"]))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "_version", lambda *names: "2023.2.0" * installed)
    (wheel,) = (d.partition(";")[0].strip() for d in METADATA["dependencies"] if d.startswith("onednn"))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert f"pip install {wheel}" in done.output and ("--force-reinstall" in done.output) == installed
    assert "libno-such-dnnl.so.3" in done.output


def test_a_platform_without_a_wheel_has_no_problem(searched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SONNX_ONEDNN", raising=False)
    monkeypatch.setattr(loading, "_candidates", lambda: iter(["libno-such-dnnl.so.3"]))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "riscv64")
    told = doctor.diagnose()
    assert told.well and [f.level for f in told.findings if "oneDNN" in f.text] == ["hint"]


def test_missing_machine_code_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def commands() -> list[str]:
        return [f.command for f in doctor.diagnose().findings if f.level == "hint" and "not compiled" in f.text]

    monkeypatch.setattr(doctor, "available", lambda: "")
    assert commands() == []
    monkeypatch.undo()
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")
    assert commands() == ["unset SONNX_MACHINE_CODE"]
    monkeypatch.delenv("SONNX_MACHINE_CODE")
    machine_code._missing.cache_clear()
    monkeypatch.setattr(machine_code, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda *names: "")
    try:
        assert commands() == ["pip install 'sonnx[jit]'"]
    finally:
        machine_code._missing.cache_clear()


@needs_library
def test_a_limited_instruction_set_is_a_hint() -> None:
    code, told = found(ONEDNN_MAX_CPU_ISA="AVX2")
    assert code == 0 and told["onednn"]["isa"] == "avx2"
    texts = [f["text"] for f in told["findings"]]
    assert any("ONEDNN_MAX_CPU_ISA=AVX2" in t for t in texts) and any("VNNI" in t for t in texts)
    assert not any("bfloat16" in t for t in texts)


@needs_library
def test_implementations_that_are_not_trusted_are_counted() -> None:
    told = doctor.diagnose()
    assert told.onednn.not_trusted == len(trust.rows_of(told.onednn.isa)) > 0
    shown = CliRunner().invoke(main, ["doctor"]).output
    assert f"{told.onednn.not_trusted} implementations are not trusted" in shown and TRUST in shown
    page, _, title = TRUST.partition("#")
    lines = (PROJECT / page).read_text().splitlines()
    assert title in [line.lstrip("# ").lower().replace(" ", "-") for line in lines if line.startswith("#")]


@needs_library
@pytest.mark.parametrize("level", ["SSE41", "AVX"])
def test_a_level_below_avx2_is_a_hint(level: str) -> None:
    code, told = found(ONEDNN_MAX_CPU_ISA=level)
    assert code == 0 and told["well"] and told["onednn"]["path"] == ""
    assert told["onednn"]["reason"] == f"the processor's level is {level.lower()}; AVX2 is needed"
    (one,) = [f for f in told["findings"] if "oneDNN" in f["text"]]
    assert one["level"] == "hint" and one["command"] == "unset ONEDNN_MAX_CPU_ISA"


@needs_library
def test_a_processor_without_avx2_is_a_hint(searched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SONNX_ONEDNN", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(loading, "LOWEST", 1 << 30)  # as if this processor had no AVX2
    monkeypatch.setattr(loading, "X86", (platform.machine(),))
    told = doctor.diagnose()
    (one,) = [f for f in told.findings if "oneDNN" in f.text]
    assert told.well and one.level == "hint" and not one.command and "AVX2 is needed" in one.text


@pytest.mark.parametrize(("value", "used", "code"), [("3", 3, 0), ("1", 1, 0), ("0", 0, 1), ("two", 0, 1), ("9" * 30, 0, 1)])
def test_threads(value: str, used: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_NUM_THREADS", value)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    told = doctor.diagnose()
    assert told.threads.used == used and told.threads.environment["SONNX_NUM_THREADS"] == value
    assert any("SONNX_NUM_THREADS must be" in f.text for f in told.findings) == bool(code)
    assert any(f.command == "SONNX_NUM_THREADS=2" for f in told.findings) == (not code)


def test_extras_are_those_of_the_package() -> None:
    declared = {n: ps for n, ps in METADATA["optional-dependencies"].items() if not ps[0].startswith("sonnx")}
    assert doctor.EXTRAS.keys() == declared.keys()
    for name, (packages, _) in doctor.EXTRAS.items():
        assert packages[0] == re.split(r"[><=\[]", declared[name][0])[0]
    told = doctor.diagnose()
    assert {e.command for e in told.extras} == {f"pip install 'sonnx[{n}]'" for n in declared}
    assert told.versions["numpy"] and told.versions["onnx"] and told.blas


def test_the_table_has_what_the_json_has() -> None:
    told = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    shown = CliRunner().invoke(main, ["doctor"]).output
    for text in [*told["versions"].values(), told["blas"], told["system"], *(f["text"] for f in told["findings"])]:
        assert text in shown


GROUPS: list[tuple[str, str, dict[str, str], float | None]] = [
    ("version 2", "0::/a/b", {"a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}, 1.5),
    ("a group that contains it", "0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3.0),
    ("no quota", "0::/", {"cpu.max": "max 100000"}, None),
    ("in a container", "0::/../../elsewhere", {"cpu.max": "50000 100000"}, 0.5),
    ("version 1", "4:memory:/\n2:cpu,cpuacct:/job", {"cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
                                                    "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 2.0),
    ("version 1 without a quota", "2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ("damaged", "0::/", {"cpu.max": "what"}, None),
    ("no groups", "", {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "memberships", "files", "quota"), GROUPS, ids=[g[0] for g in GROUPS])
def test_quota(name: str, memberships: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    (tmp_path / "memberships").write_text(memberships)
    assert machine.cpu_quota(tmp_path, tmp_path / "memberships") == quota


@pytest.mark.parametrize(("allowed", "quota", "cores"), [(8, None, 8), (8, 2.0, 2), (2, 8.0, 2), (4, 1.9, 1), (4, 0.5, 1)])
def test_usable_cores(allowed: int, quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: allowed)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.usable_cores() == cores


def variables() -> Any:
    return lambda names: {n: os.environ.get(n) for n in names}


def test_children_that_share_the_cores_use_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And this process keeps its own numbers of threads."""
    names = ["SONNX_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    monkeypatch.setattr(processes, "_environment", {})
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert processes.share_cores(3, 2) == 2
    with processes.Child(variables) as child:
        assert child.ask(names, 60) == dict.fromkeys(names, "1")
    assert not any(n in os.environ for n in names)
