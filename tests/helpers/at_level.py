"""Run a command at a lower level of the processor's instructions, if the machine has a higher one.

    python tests/helpers/at_level.py avx2 pytest tests/kernels

oneDNN's kernels, and so the bits and the speed of plans, depend on the level.  A machine whose own level is not higher has run
the tests at it already.
"""

from __future__ import annotations

import os
import subprocess
import sys

from singa_backend.kernels import onednn
from singa_backend.kernels.onednn.constants import ISA


def higher(own: str, level: str) -> bool:
    """Whether a level has all instructions of another one, and more."""
    numbers = {name: number for number, name in ISA.items()}
    return own != level and numbers[own] & numbers[level] == numbers[level]


if __name__ == "__main__":
    level, *command = sys.argv[1:]
    library = onednn.library()
    if library is None or not higher(library.isa, level):
        own = f"there is no oneDNN: {onednn.missing()}" if library is None else f"the level of this machine is {library.isa}"
        sys.exit(print(f"{own}; the tests at {level} are those that it runs without a limit"))
    sys.exit(subprocess.run(command, env={**os.environ, "ONEDNN_MAX_CPU_ISA": level.upper()}, check=False).returncode)
