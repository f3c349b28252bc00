"""The gradient matrix: for each operator version, whether its gradient is checked, or why it has none.

row         one operator version, judged at points drawn for it (its kind comes from autodiff/support.py)
run         judges rows in child processes, which may die or hang
page        the result as data and as Markdown, compared with the current declarations
ledger      known deviations, with their reasons
"""

from .ledger import KnownDeviation, read
from .page import stale, to_json, write
from .row import DOMAINS, MatrixRow, judged, listed
from .run import run

__all__ = ["DOMAINS", "KnownDeviation", "MatrixRow", "judged", "listed", "read", "run", "stale", "to_json", "write"]
