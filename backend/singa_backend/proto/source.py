"""The files that a model was read from: a pickle names them, with their SHA-256, in place of the bytes of the model."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import InvalidModel
from ..limits import raise_shortage

MODEL = ""
"""The name of the model's own file among its files; the others have the locations of external data."""


class Identity(NamedTuple):
    """What the system reports of a file: it changes if the file is replaced or written to."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


_digests: dict[Identity, str] = {}
"""The SHA-256 of files that were read completely, so that each is read once in a process."""


@contextmanager
def forgotten_digests() -> Iterator[None]:
    """A context at whose end the digests of files that were read in it are forgotten."""
    before = set(_digests)
    try:
        yield
    finally:
        for identity in list(_digests):
            if identity not in before:
                _digests.pop(identity, None)


class ModelFiles:
    """The files of a model that was prepared by its path, as they were when it was read.

    Attributes:
        path: the absolute path of the model's file.
        files: what the system reported of each file, by its location in the folder of the model; `MODEL` for the model's file.
    """

    def __init__(self, path: str, files: Mapping[str, Identity]) -> None:
        self.path = path
        self.files = dict(files)

    @classmethod
    def before(cls, model: object) -> ModelFiles | None:
        """The source of a model that is about to be read; None if it is not a path."""
        if not isinstance(model, (str, os.PathLike)):
            return None
        try:
            return cls(os.path.abspath(model), {MODEL: Identity.of(os.stat(model))})
        except (OSError, ValueError):  # reading it reports the error
            return None

    def after(self, external: Mapping[str, Identity]) -> ModelFiles | None:
        """The source with its external data; None if the model's file was changed while it was read."""
        try:
            same = Identity.of(os.stat(self.path)) == self.files[MODEL]
        except OSError:
            same = False
        return ModelFiles(self.path, {**self.files, **external}) if same else None

    def check_external(self) -> None:
        """Raise InvalidModel if external data, which may be mapped into memory, were written to since they were read."""
        for name, identity in self.files.items():
            try:
                now = Identity.of(os.stat(_located(self.path, name)))
            except OSError:  # removed: what was mapped or read remains
                continue
            if name and now[:2] == identity[:2] and now[2:4] != identity[2:4]:
                raise InvalidModel(
                    f"{_located(self.path, name)} was overwritten after the model was prepared from it",
                    code="SX110",
                    hint="prepare it again; replace files by renaming",
                )

    def digests(self) -> dict[str, str] | None:
        """The SHA-256 of each file; None if one is not the file that was read: it was replaced, written to or removed."""
        found: dict[str, str] = {}
        for name, identity in self.files.items():
            try:
                now, digest = _digest(_located(self.path, name), identity)
            except OSError:
                return None
            if now != identity:
                return None
            found[name] = digest
        return found


def _located(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(os.path.realpath(path)), name) if name else path


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer must not block


def _digest(path: str, wanted: Identity | None = None) -> tuple[Identity, str]:
    """The identity and the SHA-256 of a file; "" if the identity is not the wanted one."""
    with open(path, "rb", opener=_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        before = Identity.of(status)
        if wanted is not None and before != wanted:
            return before, ""
        if before not in _digests:
            import hashlib  # 3 ms: it loads OpenSSL

            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if Identity.of(os.fstat(file.fileno())) != before:
                raise OSError(0, "it was changed while it was read", path)
            _digests[before] = digest
        return before, _digests[before]


def check_files(path: str, digests: Mapping[str, str]) -> None:
    """Check that the files of a pickled model are in place.

    Args:
        path: the path of the model's file.
        digests: the SHA-256 of each file, as `ModelFiles.digests` returned it.

    Raises:
        InvalidModel: a file is missing, or has other contents (SX112).
        ResourceExhausted: too many files are open (SX612).
    """
    for name, digest in digests.items():
        where = _located(path, name)
        try:
            found = _digest(where)[1]
        except OSError as error:
            raise_shortage(where, error)
            raise changed(where, f"which cannot be read here: {error.strerror}") from None
        if found != digest:
            raise changed(where, f"whose SHA-256 must be {digest}, got {found}")


def changed(path: str, what: str) -> InvalidModel:
    """The error for a file of a pickled model that is not the one that the model was prepared from."""
    return InvalidModel(
        f"the pickled model was prepared from {path}, {what}",
        code="SX112",
        hint="put the same file under this path on every machine; or prepare(onnx.load(path)): its pickles contain the weights",
    )


def file_digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, which is read once in a process while it is not changed; raises OSError."""
    return _digest(os.fspath(path))[1]
