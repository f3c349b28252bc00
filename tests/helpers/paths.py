"""Folders that tests read, and a program that they run."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

PROJECT = Path(__file__).parents[2]
TESTS = PROJECT / "tests"
HELPERS = TESTS / "helpers"
MODELS = TESTS / "models"
MPIEXEC = (
    find_spec("mpi4py") and (shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec"))
) or ""
"""The launcher of the MPI library; "" if mpi4py or the launcher is not installed."""
