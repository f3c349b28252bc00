"""Shared by the programs of this folder: options, and loading and verification of published ONNX models.

    def main() -> int:
        parser = options(__doc__, "resnet18-v1-7.onnx")
        parser.add_argument("picture", nargs="?")
        args = parser.parse_args()
        rep = load(args)                       # a SingaRep; verified with --verify
        ...
        return 0

    if __name__ == "__main__":
        start(main)                            # errors as one message and an exit code

A model is a path, or a URL, whose file is kept in the user's cache folder.  It is an .onnx file, or a .tar.gz archive of the ONNX
Model Zoo (github.com/onnx/models, huggingface.co/onnxmodelzoo), which contains the model and folders `test_data_set_0`, ... with
inputs and outputs.  The exit code is 0; 1 if --verify finds other values; 2 for wrong options; 3 for an error; 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import http.client
import io
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, NoReturn
from urllib.parse import urlsplit

import numpy as np
import platformdirs
from onnx import GraphProto, ModelProto, ValueInfoProto
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from singa import sonnx
from singa_backend import limits
from singa_backend.errors import InvalidInput, InvalidModel, SonnxError
from singa_backend.io.archives import typed
from singa_backend.io.files import staged_folder, writing
from singa_backend.proto.test_data import data_set

DIFFERENT, FAILED, INTERRUPTED = 1, 3, 130
"""Exit codes, as those of `sonnx`; argparse exits with 2."""

DECIMALS = 4
CHUNK = 1 << 20
TIMEOUT = 60
"""Seconds without an answer, or without further data, after which a download ends."""


class Different(Exception):
    """The outputs are not those of the test data."""


# --- programs


def options(about: str | None, published: str, *, package: str = "") -> argparse.ArgumentParser:
    """Return a parser with the options of all programs; `published` is the name of the published file.

    With `package`, the name of the package that contains this file, --model is optional.
    """
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=lines)
    where = f"by default that of the installed package {package}" if package else "or its .tar.gz archive"
    parser.add_argument("--model", required=not package, metavar="PATH_OR_URL", help=f"{published}, {where}")
    parser.add_argument("--sha256", type=digest, help="the SHA-256 that the file of --model must have")
    parser.add_argument("--verify", action="store_true", help="compare with the test_data_set_* folders next to the model")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="the folder of downloaded models (%(default)s)")
    parser.add_argument("--device", default="CPU", help="CPU (the default), CUDA or CUDA:1")
    return parser


def digest(text: str) -> str:
    """Return a SHA-256 in lower case."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"must be 64 hexadecimal digits, got {text!r}")
    return text.lower()


def between(low: float, high: float, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    """Return the type of an option that is a number from `low` to `high`."""

    def number(text: str) -> float:
        found = kind(text)
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, got {text}")
        return found

    return number


def plain(text: str) -> str:
    """Return a text that is valid Unicode: an argument may have other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be valid text in the encoding of the terminal, got {text!a}") from None
    return text


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("sonnx", appauthor=False)) / "models"


def numbers(values: np.ndarray) -> np.ndarray:
    """Return an output of the model; raise InvalidModel if it has NaN, of which any result would be wrong."""
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise InvalidModel("the model returned NaN", code="SX110", hint="compare the file with --verify, or its SHA-256")
    return values


def softmax(scores: Any) -> np.ndarray:
    """Return the probabilities of scores along their last axis."""
    x = np.asarray(scores, np.float64)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)  # type: ignore[no-any-return]


def load(args: argparse.Namespace) -> Any:
    """Return the model of the options as a SingaRep, verified if that is requested."""
    path = find(args.model, args.sha256, args.cache)
    rep = sonnx.prepare(path, device=args.device)
    if args.verify:
        verify(rep, path)
    return rep


def start(main: Callable[[], int | None]) -> None:
    """Run a program; an error is one message on standard error, and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # names of files may be in no encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main() or 0)
    except Different as error:
        stop(error, DIFFERENT)
    except (SonnxError, OSError) as error:
        stop(error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def stop(error: Exception, code: int = FAILED) -> NoReturn:
    """Print an error and end the program."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


# --- files


def find(source: str, sha256: str | None = None, cache: Path | None = None) -> Path:
    """Return the .onnx file of a path or URL; its SHA-256 is printed, and compared with `sha256`.

    Raises:
        InvalidInput: there is no such file.
        InvalidModel: it cannot be downloaded, is not a model, or is not the one of `sha256`.
        ResourceExhausted: it is larger than the limit of a model file.
    """
    cache = cache or cache_folder()
    scheme = source.partition("://")[0].lower() if "://" in source else ""
    if scheme not in ("", "http", "https"):
        raise InvalidInput(f"--model must be a path, or a URL of http or https, got {source}")
    path = download(source, sha256, cache) if scheme else Path(source)
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}", hint="--model is the path or the URL of the published file")
    with path.open("rb") as file:
        kind = check_start(file.read(512), str(path))
        file.seek(0)
        found = hashlib.file_digest(file, "sha256").hexdigest()
    print(f"{path}: {limits.format_bytes(path.stat().st_size)}, SHA-256 {found}")
    check_digest(found, sha256, str(path))
    return unpack(path, cache / found[:16]) if kind == "archive" else path


def check_start(data: bytes, where: str) -> str:
    """Return "model" or "archive" by the first bytes of a file; raise InvalidModel for what servers return in their place."""
    text = data.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        size = re.search(rb"size (\d+)", text)
        what = f" (to a file of {limits.format_bytes(int(size[1]))})" if size else ""
        hint = "run `git lfs pull` in its repository, or use the address of the file itself"
        raise InvalidModel(f"{where} is a Git LFS pointer{what}, not a model", code="SX110", hint=hint)
    if not text or text[:1] in b"<{":  # neither begins a model
        what = "an empty file" if not text else "a web page or a message of the server"
        raise InvalidModel(f"{where} is {what}, not a model", code="SX110", hint="use the address of the file itself")
    return "archive" if data.startswith(b"\x1f\x8b") else "model"


def check_digest(found: str, wanted: str | None, where: str) -> None:
    if wanted not in (None, found):
        raise InvalidModel(f"the SHA-256 of {where} must be {wanted}, got {found}", code="SX110")


def download(url: str, sha256: str | None, cache: Path) -> Path:
    """Return the file of a URL in the cache, which it enters only if it is whole, a model, and the one of `sha256`."""
    try:
        name = PurePosixPath(urlsplit(url).path).name
        path = cache / hashlib.sha256(url.encode()).hexdigest()[:16] / (name if name.strip(".") else "model.onnx")
        if path.is_file():
            return path
        request = urllib.request.Request(url, headers={"User-Agent": "sonnx-zoo"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response, writing(path, parents=True) as out:
            check_digest(receive(response, out, url), sha256, url)
    except urllib.error.HTTPError as error:
        raise InvalidModel(f"{url}: the server answers {error.code} {error.reason}", code="SX110", hint="check the URL") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: what is not a URL, or a wrong header
        raise unavailable(url, error) from None
    return path


def unavailable(url: str, error: Exception) -> InvalidModel:
    why = getattr(error, "reason", None) or error
    hint = "check the network and the URL, or download the file by other means and pass its path"
    return InvalidModel(f"{url} cannot be downloaded: {why or type(error).__name__}", code="SX110", hint=hint)


def part(response: Any, url: str) -> bytes:
    try:
        data: bytes = response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:  # here, because an OSError of `writing` is about the file
        raise unavailable(url, error) from None
    return data


def receive(response: Any, out: BinaryIO, url: str) -> str:
    """Copy an answer to a file, and return its SHA-256."""
    most, length = limits.current().limits.model_bytes, response.headers.get("Content-Length")
    total, seen, state = int(length) if length else None, 0, hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("download", total=total)
        while data := part(response, url):
            if not seen:
                check_start(data[:512], url)
            seen += len(data)
            if seen > most:
                raise limits.exhausted("model_bytes", "SX610", f"{url} has more than {limits.format_bytes(most)}")
            state.update(data)
            out.write(data)
            progress.update(task, completed=seen)
    if not seen or (total is not None and seen != total):
        what = f"the download of {url} ended after {seen} of {'?' if total is None else total} bytes"
        raise InvalidModel(what, code="SX110", hint="run the program again")
    return state.hexdigest()


# --- archives

_DATA = re.compile(r"test_data_set_\d{1,9}/(?:in|out)put_\d{1,9}\.pb")


class _Counted:
    """A stream that may unpack to as many bytes as a model file may have."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self.stream, self.where, self.left = stream, where, limits.current().limits.model_bytes

    def read(self, size: int) -> bytes:
        data = self.stream.read(min(size, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise limits.exhausted("model_bytes", "SX610", f"{self.where} unpacks to more bytes than a model file may have")
        return data


def unpack(archive: Path, folder: Path) -> Path:
    """Return the model of an archive, unpacked with its test data to `folder`; names in the archive are not used as paths."""
    if not folder.is_dir():
        with staged_folder(folder) as stage, typed(str(archive), "SX307"), archive.open("rb") as raw:
            packed: Any = _Counted(gzip.GzipFile(fileobj=raw), str(archive))
            with tarfile.open(fileobj=packed, mode="r|") as pack:
                for member in pack:
                    name = member_name(member)
                    if not name:
                        continue
                    with writing(stage / name, parents=True, new=True) as out:
                        shutil.copyfileobj(pack.extractfile(member), out)  # type: ignore[arg-type]  # a regular file
            if not (stage / "model.onnx").exists():
                raise ValueError("the archive has no .onnx file")
    return folder / "model.onnx"


def member_name(member: tarfile.TarInfo) -> str:
    """Return the name that a member of an archive is unpacked to; "" if it is not needed."""
    parts = PurePosixPath(member.name).parts
    if not member.isreg() or not parts or parts[-1].startswith("."):  # "._model.onnx": attributes of macOS
        return ""
    if parts[-1].endswith(".onnx"):
        return "model.onnx"
    short = "/".join(parts[-2:])
    return short if _DATA.fullmatch(short) else ""


# --- test data


def verify(rep: Any, path: Path) -> None:
    """Run the model on the inputs of each test_data_set_* folder next to its file, and compare the outputs.

    They must be equal to 4 decimals, as in SINGA's programs; values above 1 by their relative difference.

    Raises:
        Different: they are not.
        InvalidInput: there are no such folders, or their files are damaged.
    """
    folders = sorted(p for p in path.absolute().parent.glob("test_data_set_*") if p.is_dir())
    if not folders:
        hint = "the .tar.gz archive of the model contains them; without --verify the model runs"
        raise InvalidInput(f"there are no folders test_data_set_* next to {path}", hint=hint)
    infos = [[ValueInfoProto(name=v.name) for v in ends] for ends in (rep.inputs, rep.outputs)]
    ends = ModelProto(graph=GraphProto(input=infos[0], output=infos[1]))  # without the weights, which old files list as inputs
    for folder in folders:
        inputs, wanted = data_set(folder, ends, by_name=True)
        got = rep.run(inputs)
        if not wanted:
            raise InvalidInput(f"{folder} has no files output_0.pb, ...")
        worst = 0.0
        for value, a, b in zip(rep.outputs, got, wanted, strict=False):
            where = f"{folder.name}, output {value.name!r}"
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Different(f"{where}: the model returns {a.dtype}{list(a.shape)}, the file has {b.dtype}{list(b.shape)}")
            worst = max(worst, compare(a, b, where))
        part = f"{len(wanted)} of {len(got)} outputs, the others have no files, " if len(wanted) < len(got) else ""
        print(f"{folder.name}: {part}equal to {DECIMALS} decimals; the largest difference is {worst:.2g}")


def compare(got: np.ndarray, wanted: np.ndarray, where: str) -> float:
    """Return the largest difference, relative for values above 1; raise Different if it is not below 1.5e-4."""
    if got.dtype.kind not in "fiub" or got.size == 0:
        if not np.array_equal(got, wanted):
            raise Different(f"{where}: the values differ")
        return 0.0
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b) / np.maximum(np.abs(b), 1))
    off = np.where(np.isnan(off), np.inf, off)
    worst = np.unravel_index(int(off.argmax()), off.shape)
    if not off[worst] < 1.5 * 10**-DECIMALS:
        place = [int(i) for i in worst]
        count = int((off >= 1.5 * 10**-DECIMALS).sum())
        what = f"{where}: {count} of {off.size} values differ from the file in {DECIMALS} decimals"
        raise Different(f"{what}; the largest difference is at {place}: {a[worst]:.6g}, expected {b[worst]:.6g}")
    return float(off[worst])
