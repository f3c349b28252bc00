"""Run one task on many model files, each in a child process with limits; results are stored by content and never repeated.

found = Sweep(find_files("models", "compare"), SweepSettings("compare"), "results").run()
found.good, found.rows
"""

from .files import find_files
from .results import SweepReport, SweepRow
from .run import Sweep, sweep_one
from .settings import TASKS, SweepSettings

__all__ = ["TASKS", "Sweep", "SweepReport", "SweepRow", "SweepSettings", "find_files", "sweep_one"]
