"""Parameters by name in one file; deprecated: use `Model.save_states` and `Model.load_states`.

    with Snapshot("net.snapshot", True) as out:
        out.write("conv.W", w)
    params = Snapshot("net.snapshot", False).read()

The file is a zip of .npy members, and is read without pickling.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.io.archives import Archive, open_archive
from singa_backend.io.files import Stage

from ._core.tensor import Tensor

__all__ = ["Snapshot"]

_MEMBER = ".npy"


class Snapshot:
    """A file of tensors by name; deprecated.

    A written file appears as a whole, under its name, when the snapshot is closed: by `close`, at the end of `with` (unless that
    ends in an error), when the snapshot is deleted, when the program ends, or when the file is read in this process.

    Args:
        f: Path of the file.
        mode: True or "w" to write a new file, False or "r" to read one.
        buffer_size: Kept for old programs; ignored.

    Raises:
        InvalidInput: If the mode is unknown, or the file cannot be created (SX350).
    """

    def __init__(self, f: str | os.PathLike[str], mode: bool | str, buffer_size: int = 10) -> None:
        warnings.warn("Snapshot is deprecated: use Model.save_states and load_states", DeprecationWarning, stacklevel=2)
        if mode not in (True, False, "w", "r"):
            raise InvalidInput(f"mode of a snapshot must be True (write) or False (read), got {mode!r}", code="SX350")
        self.path = Path(os.path.abspath(f))
        self.mode = mode in (True, "w")
        self.buffer_size = buffer_size
        self._writer: _Writer | None = None
        if self.mode:
            self._writer = _open[_key(self.path)] = _Writer(self.path)
            self._closes = weakref.finalize(self, self._writer.publish)

    def write(self, param_name: str, param_val: Tensor) -> None:
        """Add a tensor.

        Args:
            param_name: Name of the tensor, unique in the file.
            param_val: The tensor.

        Raises:
            InvalidInput: If the name is already used, the value is not a numeric Tensor, or the snapshot is not open for writing
                (SX350).
        """
        if self._writer is None:
            raise InvalidInput(
                f"{self.path} must be open for writing; it was opened for reading or is closed",
                code="SX350",
                hint="open it with mode=True",
            )
        if not isinstance(param_val, Tensor):
            raise InvalidInput(f"{param_name!r} must be a Tensor, got {type(param_val).__name__}", code="SX350")
        self._writer.add(param_name, param_val.device.backend.get(param_val.data))

    def read(self) -> dict[str, Tensor]:
        """Read all tensors.

        Returns:
            The tensors by name, on the CPU.

        Raises:
            InvalidInput: If the file is not a snapshot, or the snapshot was opened for writing (SX350).
            ResourceExhausted: If the tensors exceed a limit.
        """
        if self.mode:
            raise InvalidInput(
                f"{self.path} must be opened for reading; it was opened for writing", code="SX350", hint="open it with mode=False"
            )
        writer = _open.get(_key(self.path))
        if writer is not None:
            writer.publish()
        with open_archive(self.path, "SX350") as pack:
            return {n.removesuffix(_MEMBER): Tensor(data=_read(pack, n), name=n.removesuffix(_MEMBER)) for n in pack.names}

    def close(self) -> None:
        """Finish the file; later calls do nothing."""
        if self._writer is not None:
            self._closes()
            self._writer = None

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None and self._writer is not None:
            self._writer.discard()
        self.close()


class _Writer:
    """A temporary file next to the target; it holds no reference to the snapshot, which may be deleted first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: set[str] = set()
        self.failed = False
        self._begin(append=False)

    def _begin(self, *, append: bool) -> None:
        try:
            self.stage = Stage(self.path)
            self.file = self.stage.create(self.stage.target.name)
            if append:
                with self.path.open("rb") as old:
                    shutil.copyfileobj(old, self.file)
            self.pack: zipfile.ZipFile | None = zipfile.ZipFile(self.file, "a" if append else "w")
        except OSError as error:
            raise InvalidInput(f"cannot write {self.path}: {error.strerror or error}", code="SX350") from None

    def add(self, name: str, array: Any) -> None:
        if name in self.names or "\0" in name:
            raise InvalidInput(f"the name of a tensor must be unused and without NUL characters, got {name!r}", code="SX350")
        if isinstance(array, list) or array.dtype == dtypes.STRING:
            raise InvalidInput(f"{name!r} must be numeric", code="SX350")
        if self.failed:
            raise InvalidInput(f"{self.path} was not written, because a tensor could not be", code="SX350")
        if self.pack is None:  # the file was published by a read
            self._begin(append=True)
        assert self.pack is not None
        info = zipfile.ZipInfo(name + _MEMBER)
        info.comment = dtypes.onnx_name(array.dtype).encode()
        plain = array.dtype.type.__module__ == "numpy"
        try:
            with self.pack.open(info, "w", force_zip64=True) as out:
                stored = np.ascontiguousarray(array if plain else array.view(f"u{array.dtype.itemsize}")).reshape(array.shape)
                np.lib.format.write_array(out, stored, allow_pickle=False)
        except BaseException as error:  # an interrupt too: the file must not appear with a part of this tensor
            self.discard()
            self.failed = True
            if isinstance(error, OSError):
                raise InvalidInput(f"cannot write {self.path}: {error.strerror or error}", code="SX350") from None
            raise
        self.names.add(name)

    def publish(self) -> None:
        if self.pack is not None:
            pack, self.pack = self.pack, None
            try:
                pack.close()
                self.file.close()
                self.stage.commit()
            except OSError as error:
                raise InvalidInput(f"cannot write {self.path}: {error.strerror or error}", code="SX350") from None
            finally:
                self.stage.close()

    def discard(self) -> None:
        if self.pack is not None:
            self.pack.fp = None  # it must not be completed
            self.pack = None
            with contextlib.suppress(OSError):
                self.file.close()
            self.stage.close()


_open: weakref.WeakValueDictionary[str, _Writer] = weakref.WeakValueDictionary()


def _key(path: Path) -> str:
    return os.path.realpath(path)


def _read(pack: Archive, name: str) -> Any:
    dtype = dtypes.from_type_string(f"tensor({pack.comment(name)})")
    if dtype is None or dtype == dtypes.STRING or not name.endswith(_MEMBER):
        raise InvalidInput(f"{pack.where}: the member {name[:200]!r} is not a tensor", code="SX350")
    stored = pack.header(name)[1]
    if stored != dtype and (stored != f"u{dtype.itemsize}" or dtype.type.__module__ == "numpy"):
        raise InvalidInput(f"{pack.where}: the member {name[:200]!r} must have dtype {dtype}, got {stored}", code="SX350")
    return pack.array(name).view(dtype)
