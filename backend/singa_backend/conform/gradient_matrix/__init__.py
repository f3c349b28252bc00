"""The gradient matrix: for each operator version, whether its gradient is checked, or why there is none.

standing    what the declarations say (see ../standing.py)
row         one operator version, judged at points drawn for it
run         many of them, in processes that may die or hang
page        the result as data, as Markdown, and held to the declarations of today
"""

from .ledger import Entry, read
from .page import stale, to_json, write
from .row import DOMAINS, Row, judged, listed
from .run import run

__all__ = ["DOMAINS", "Entry", "Row", "judged", "listed", "read", "run", "stale", "to_json", "write"]
