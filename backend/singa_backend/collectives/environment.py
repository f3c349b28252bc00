"""What the launcher of MPI has told this process by environment variables."""

from __future__ import annotations

import os

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PMIX_SIZE", "SONNX_WORKERS")
"""Environment variables with the number of processes, as launchers of MPI, and `sonnx train --workers`, set them."""

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MPI_LOCALRANKID")
"""Environment variables with the number of this process."""


def launched_size() -> int:
    """Return the number of processes that an MPI launcher has started.

    Returns:
        The number; 1 without a launcher.
    """
    slurm = ("SLURM_STEP_NUM_TASKS",) if "PMIX_RANK" in os.environ else ()  # srun has its own name for the number
    return max(1, _number((*_SIZES, *slurm)))


def launched_rank() -> int:
    """Return the number of this process among those that an MPI launcher has started.

    Returns:
        The number, from 0; 0 without a launcher.
    """
    return _number(_RANKS)


def _number(names: tuple[str, ...]) -> int:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), 0)
