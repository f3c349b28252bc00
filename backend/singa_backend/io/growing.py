"""Files to which a program appends, such as the measurements of a training."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from .places import HEAD, NO_LINK, StrPath, check, refused


class GrowingFile:
    """A file to which bytes are appended, and the digest of all of them.

    It is not opened through a link, and is new, or empty, or was continued: what follows its known beginning is then cut off.

    Attributes:
        path: the file.
        size: its bytes.

    Args:
        path: the file.
        mark: bytes in its first `HEAD` bytes, which a file that is continued must have.
    """

    _handle = -1

    def __init__(self, path: StrPath, mark: bytes) -> None:
        self.path, self.size, self._mark, self._digest = Path(path), 0, mark, hashlib.sha256()

    def check(self) -> None:
        """Refuse a file that cannot be written, a link, and a file that has content and is not continued; nothing is written.

        Raises:
            FileExistsError: the file has content.
            InvalidInput: it cannot be written (SX351).
        """
        check(self.path, mark=b"")
        if self._handle < 0 and os.path.exists(self.path) and self.path.stat().st_size:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def resume(self, size: int, digest: str) -> bool:
        """Continue the file after its first bytes, if they are known.

        Args:
            size: the number of these bytes.
            digest: their SHA-256.

        Returns:
            False if the file is absent or a link, does not begin with these bytes, or they do not have the mark.
        """
        state, left, head = hashlib.sha256(), size, b""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | NO_LINK)
        except OSError:
            return False
        try:
            with open(handle, "rb", closefd=False) as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return False
                while left and (block := file.read(min(left, 1 << 20))):
                    head = head or block[:HEAD]
                    state.update(block)
                    left -= len(block)
            if left or self._mark not in head or state.hexdigest() != digest:
                return False
            self.close()
            self.size, self._digest, self._handle, handle = size, state, handle, -1
        finally:
            if handle >= 0:
                os.close(handle)
        return True

    def open(self) -> None:
        """Create the file, or cut off what it has after the known bytes.

        Raises:
            InvalidInput: it cannot be written, or there is another file (SX351).
        """
        try:
            if self._handle < 0:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK, 0o666)
                if not stat.S_ISREG(os.fstat(self._handle).st_mode) or os.fstat(self._handle).st_size:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            elif os.fstat(self._handle).st_size > self.size:
                os.ftruncate(self._handle, self.size)
        except OSError as error:
            raise refused(self.path, error) from None

    def append(self, data: bytes) -> None:
        """Write at the end.

        Args:
            data: the bytes.

        Raises:
            InvalidInput: the file cannot be written (SX351).
        """
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            raise refused(self.path, error) from None
        self._digest.update(data)
        self.size += len(data)

    def sync(self) -> dict[str, Any]:
        """Flush to the disk.

        Returns:
            The number of bytes and their SHA-256, as `resume` takes them: "bytes" and "sha256".

        Raises:
            InvalidInput: the file cannot be written (SX351).
        """
        if self._handle >= 0:
            try:
                os.fsync(self._handle)
            except OSError as error:
                raise refused(self.path, error) from None
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()
