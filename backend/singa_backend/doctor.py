"""What this installation computes with, what is missing, and what would make it faster."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np

from . import machine
from .devices import cuda
from .elementwise.compile import VARIABLE as MACHINE_CODE
from .elementwise.compile import available
from .errors import DeviceUnavailable, InvalidInput
from .io import installation
from .kernels import onednn
from .kernels.onednn.loading import REQUIRED, VARIABLE, WHEEL
from .kernels.onednn.trust import rows_of
from .kernels.options import VARIABLE as THREADS
from .kernels.options import default_threads

BUSY = 0.15
"""Cores that other programs may use without a finding: a system has small tasks of its own."""

WHEEL_VERSION = "2023.2.0"
"""The version of the wheel in the dependencies."""

EXTRAS = {
    "text": (("google-re2",), "RegexFullMatch, in linear time"),
    "image": (("pillow",), "ImageDecoder"),
    "jit": (("llvmlite",), "elementwise operators, softmax, norms and updates as machine code"),
    "plot": (("matplotlib",), "curves as .png"),
    "mpi": (("mpi4py",), "training in several processes"),
    "nccl": (("nvidia-nccl-cu13", "nvidia-nccl-cu12"), "training on several GPUs"),
    "nccl12": (("nvidia-nccl-cu12", "nvidia-nccl-cu13"), "in place of nccl, for drivers of CUDA 12"),
    "generate": (("tokenizers",), "sonnx generate"),
    "lora": (("safetensors",), "files of adapters"),
    "tensorboard": (("tensorboardX",), "events of sonnx train"),
    "zoo": (("tokenizers",), "examples/zoo"),
    "oracle": (("onnxruntime", "onnxruntime-gpu"), "comparisons"),
    "gpu": (("cupy-cuda13x", "cupy-cuda12x", "cupy"), "device='CUDA'"),
    "gpu12": (("cupy-cuda12x", "cupy-cuda13x", "cupy"), "in place of gpu, for drivers of CUDA 12"),
}
"""For each extra the distributions of which one is needed, the first being the one that it installs, and their use."""


@dataclass(frozen=True)
class OneDnn:
    """The library that computes the large operators.

    Attributes:
        path: the file; "" if there is none.
        version: such as "3.2.0".
        hash: the commit that it was built from.
        runtime: "OpenMP", "TBB" or "sequential".
        isa: the newest instruction set that it uses on this machine.
        not_trusted: the number of its implementations that are not used on this machine under some condition.
        reason: why there is none; "" if it is loaded.
    """

    path: str = ""
    version: str = ""
    hash: str = ""
    runtime: str = ""
    isa: str = ""
    not_trusted: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Threads:
    """The cores that this process may use, and the number of threads of a plan.

    Attributes:
        cores: of the machine.
        affinity: the cores that the scheduler may choose.
        quota: the cores that the control group allows; None without a quota.
        environment: the environment variables that set numbers of threads or how they wait, by name.
        used: the number of threads of a plan for which none is set.
        reason: why that number cannot be determined; "" if it can.
        others: how many of the usable cores other programs use now; None if the system does not report it.
    """

    cores: int
    affinity: int
    quota: float | None
    environment: dict[str, str]
    used: int
    reason: str = ""
    others: float | None = None


@dataclass(frozen=True)
class Extra:
    """An optional dependency.

    Attributes:
        name: of the extra.
        package: the installed distribution, or the one that the extra installs.
        version: of the installed distribution; "" if it is missing.
        use: what needs it.
        command: the command that installs it.
    """

    name: str
    package: str
    version: str
    use: str
    command: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that could be faster.

    Attributes:
        level: "problem" if models run much slower than they could or not at all; "hint" otherwise.
        text: what was found.
        command: the command or the setting that changes it; "" if there is none.
    """

    level: str
    text: str
    command: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        onednn: the library.
        threads: the cores and threads.
        blas: the BLAS of NumPy, such as "scipy-openblas 0.3.31".
        versions: the versions of Python, of the packages that are always needed, and of this one, by name.
        system: the operating system, the machine, and its processor with the level of its instructions that oneDNN uses.
        gpus: the number of usable GPUs: each has computed a small kernel and a product.
        gpu_reason: why there are none, or fewer than the driver reports; "" if all are usable.
        extras: the optional dependencies.
        findings: problems first, then hints.
    """

    onednn: OneDnn
    threads: Threads
    blas: str
    versions: dict[str, str]
    system: str
    gpus: int
    gpu_reason: str
    extras: list[Extra]
    findings: list[Finding] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether there is no problem; hints do not count."""
        return all(f.level != "problem" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data.

        Returns:
            A dict of the attributes and of `well`.
        """
        return {
            "well": self.well,
            "onednn": vars(self.onednn),
            "threads": vars(self.threads),
            "blas": self.blas,
            "versions": self.versions,
            "system": self.system,
            "gpus": self.gpus,
            "gpu_reason": self.gpu_reason,
            "extras": [vars(e) for e in self.extras],
            "findings": [vars(f) for f in self.findings],
        }


def processor() -> str:
    """The processor and the level of its instructions: what a measured time depends on.

    Returns:
        Such as "AMD EPYC (avx2)"; the level is that which oneDNN uses.
    """
    library = onednn.library()
    return f"{machine.processor()} ({'no oneDNN' if library is None else library.isa})"


def diagnose() -> Diagnosis:
    """Examine this installation; nothing is computed, except a small kernel and a product on each GPU.

    It measures for 0.2 s how busy the cores are.

    Returns:
        What was found.
    """
    library, threads = _onednn(), _threads()
    gpus, why, about_gpus = _gpus()
    names = ("onnx", "numpy", "ml_dtypes", "protobuf")
    versions = {"python": platform.python_version(), "sonnx": installation.version(), **{n: _version(n) for n in names}}
    extras = [_extra(name) for name in EXTRAS]
    blas = _blas()
    found = [*_about_onednn(library), *_about_machine_code(), *_about_threads(threads, library, blas), *about_gpus]
    found.sort(key=lambda f: f.level != "problem")
    system = f"{platform.system()} {platform.machine()}, {processor()}"
    return Diagnosis(library, threads, blas, versions, system, gpus, why, extras, found)


def _gpus() -> tuple[int, str, list[Finding]]:
    """The number of usable GPUs, why there are not more, and what to do where somebody expects them."""
    count, cause = cuda.situation()
    if cause is not None:
        expected = any(_version(p) for p in EXTRAS["gpu"][0]) or os.path.exists("/proc/driver/nvidia/version")
        return 0, cause.text, [Finding("hint", f"device='CUDA' cannot be used: {cause.text}", cause.hint)] * expected
    broken = []
    for ordinal in range(count):
        try:
            cuda.check(ordinal)
        except DeviceUnavailable as error:
            broken.append(Finding("problem", error.message, error.hint))
    return count - len(broken), broken[0].text if broken else "", broken


def _onednn() -> OneDnn:
    found = onednn.library()
    if found is None:
        return OneDnn(reason=onednn.missing())
    count = len(rows_of(found.isa))
    return OneDnn(found.path, ".".join(map(str, found.version)), found.hash, found.runtime, found.isa, count)


def _threads() -> Threads:
    names = (THREADS, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {n: os.environ[n] for n in names if os.environ.get(n)}
    try:
        used, reason = default_threads(), ""
    except InvalidInput as error:
        used, reason = 0, error.message
    return Threads(machine.cores(), machine.affinity(), machine.cpu_quota(), environment, used, reason, machine.used_by_others())


def _version(*names: str) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _extra(name: str) -> Extra:
    packages, use = EXTRAS[name]
    package = next((p for p in packages if _version(p)), packages[0])
    return Extra(name, package, _version(package), use, f"pip install 'sonnx[{name}]'")


def _blas() -> str:
    config: Any = np.show_config(mode="dicts")
    found = config.get("Build Dependencies", {}).get("blas", {})
    return " ".join(str(found[k]) for k in ("name", "version") if found.get(k)) or "none"


def _about_onednn(library: OneDnn) -> list[Finding]:
    if library.reason:
        return [_no_onednn(library.reason)]
    found = []
    for name, value in _limits().items():
        found.append(Finding("hint", f"{name}={value} limits the instruction set to {library.isa}", f"unset {name}"))
    parts = library.isa.split("_")
    if not {"vnni", "bf16", "fp16", "amx"} & set(parts):
        text = f"{library.isa} has no exact 8-bit products (VNNI): int8 models are not faster than float models"
        found.append(Finding("hint", text))
    if {"bf16", "fp16", "amx"} & set(parts):
        text = "this machine multiplies in bfloat16 faster than in float32, with an error of about 0.5 % of the largest value"
        found.append(Finding("hint", text, "prepare(model, precision='bf16')"))
    if library.runtime == "sequential":
        text = "this oneDNN is built for one thread"
        found.append(Finding("hint", text, f"unset {VARIABLE}" if os.environ.get(VARIABLE) else _install()))
    return found


def _limits() -> dict[str, str]:
    """The variables that limit the instruction set of oneDNN."""
    return {n: os.environ[n] for n in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA") if os.environ.get(n)}


def _no_onednn(reason: str) -> Finding:
    text = f"oneDNN is not used, so that models run several times slower: {reason}"
    if REQUIRED in reason:
        return Finding("hint", text, f"unset {' '.join(_limits())}".removesuffix("unset "))
    if os.environ.get(VARIABLE):
        rest = "" if _version(WHEEL) else f", and {_install()}"
        return Finding("problem", text, f"unset {VARIABLE}{rest}")
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return Finding("problem", text, _install() if not _version(WHEEL) else f"{_install()} --force-reinstall")
    return Finding("hint", f"{text}; there is no wheel for this platform", f"{VARIABLE}=/path/to/libdnnl.so.3")


def _install() -> str:
    return f"pip install {WHEEL}=={WHEEL_VERSION}"


def _about_machine_code() -> list[Finding]:
    reason, extra = available(), _extra("jit")
    if not reason:
        return []
    command = f"unset {MACHINE_CODE}" if MACHINE_CODE in reason else "" if extra.version else extra.command
    return [Finding("hint", f"elementwise operators, norms and updates are not compiled: {reason}", command)]


def _about_threads(threads: Threads, library: OneDnn, blas: str) -> list[Finding]:
    if threads.reason:
        return [Finding("problem", threads.reason, f"unset {THREADS}")]
    found = []
    usable = machine.usable_cores()
    if threads.used > usable:
        text = f"{threads.used} threads on {usable} usable cores wait for each other"
        found.append(Finding("hint", text, f"{THREADS}={usable}"))
    elif threads.used < usable:
        text = f"plans use {threads.used} of {usable} usable cores"
        found.append(Finding("hint", text, f"{THREADS}={usable}"))
    environment = threads.environment
    busy = threads.others is not None and threads.others > usable - threads.used + BUSY
    if busy and threads.used > 1:
        text = f"other programs use {threads.others:.1f} of {usable} usable cores: {threads.used} threads of a plan wait for them"
        if environment.get(THREADS):
            found.append(Finding("hint", f"{text} in each step, because {THREADS} is set", f"{THREADS}=1"))
        else:
            text = f"{text}, so runs use one thread until the cores are free"
            found.append(Finding("hint", text, f"{THREADS}=1 if they are never free"))
    if library.runtime == "OpenMP" and threads.used > 1:
        if environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or environment.get("GOMP_SPINCOUNT"):
            name = "OMP_WAIT_POLICY" if "OMP_WAIT_POLICY" in environment else "GOMP_SPINCOUNT"
            text = f"{name} lets threads sleep between the steps of a plan: on an idle machine runs are slower"
            found.append(Finding("hint", text, f"unset {name}"))
        if "openblas" in blas and environment.get("OPENBLAS_NUM_THREADS") != "1":
            text = "a program that multiplies large matrices in NumPy between runs slows both: their threads wait for each other"
            found.append(Finding("hint", text, "OPENBLAS_NUM_THREADS=1"))
    return found
