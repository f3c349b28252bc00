from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from singa_backend.elementwise import compile as machine


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of these tests is not the user's."""
    place = tmp_path_factory.mktemp("cache") / "machine-code"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "folder", lambda: place)
        yield place
