"""The folder that `sonnx train --workers` shares with its workers, and what each of them prints."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

FOLDER = "SONNX_GROUP"
"""The environment variable with the folder of a parent and its workers."""


def first_to_tell(text: str) -> bool:
    """Whether this process prints a message, which other workers may have too."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return True
    try:
        told = Path(folder, hashlib.sha256(text.encode(errors="replace")).hexdigest())
        os.close(os.open(told, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:  # the parent has ended
        return True
    return True
