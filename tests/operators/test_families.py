"""The list of families is that of the modules; a look-up imports one family, and an iteration all of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.families import LIST

from singa_backend import domains
from singa_backend.domains import Families


def test_the_list_is_that_of_the_modules() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.helpers.families"], capture_output=True, text=True, check=True)
    assert done.stdout == LIST.read_text(encoding="utf-8"), "run `python -m tests.helpers.families --write`"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Families[int]]:
    """A table of two modules, of which the first adds to both keys, slowly."""
    (tmp_path / "family_one.py").write_text(
        "import time\nfrom tests.operators.test_families import TABLES\nTABLES[0]['', 'A'] = 1\n"
        "time.sleep(0.2)\nTABLES[0]['', 'B'] = 2\nTABLES[0]['', 'A'] = 3\n"
    )
    (tmp_path / "family_two.py").write_text("from tests.operators.test_families import TABLES\nTABLES[0]['', 'C'] = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = {("", "A"): ["family_one"], ("", "B"): ["family_one"], ("", "C"): ["family_two"]}
    monkeypatch.setitem(domains.listed, "of a test", keys)
    TABLES[:] = [Families("of a test")]
    yield TABLES[0]
    for name in ("family_one", "family_two"):
        sys.modules.pop(name, None)


TABLES: list[Families[int]] = []


def test_a_look_up_imports_one_family(table: Families[int]) -> None:
    assert table["", "C"] == 4 and ("", "D") not in table and table.get(("", "D")) is None
    assert ("", "A") in table and "family_two" in sys.modules and "family_one" not in sys.modules


def test_an_iteration_imports_all_in_the_order_of_the_list(table: Families[int]) -> None:
    table["", "D"] = 5
    assert table["", "C"] == 4
    assert dict(table) == {("", "A"): 3, ("", "B"): 2, ("", "C"): 4, ("", "D"): 5}
    assert [name for _, name in table] == ["A", "B", "C", "D"] and len(table) == 4


def test_a_thread_waits_for_the_import_of_another(table: Families[int]) -> None:
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(table["", "A"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [3] * 4


def test_an_interrupted_import_of_a_family_can_be_repeated() -> None:
    code = (
        "import sys\n"
        "from singa_backend.ir.declaration import Declaration, declarations\n"
        "flops, Declaration.flops = Declaration.flops, None\n"  # fails after some operators
        "try:\n    declarations['', 'Softmax']\n"
        "except TypeError:\n    pass\n"
        "assert 'singa_backend.operators.activation' not in sys.modules and declarations.present(('', 'Softmax'), {})\n"
        "Declaration.flops = flops\n"
        "assert declarations['', 'Softmax'][13].flops_rule and declarations['', 'Gelu'][20].gradient_rule\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
