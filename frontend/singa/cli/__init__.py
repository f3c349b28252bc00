"""The command line: one module per command.

Exit codes: 0 success; 1 a comparison, a conformance run or a check failed; 2 wrong usage; 3 a model or an input was refused
(the error says why).
"""

from ._main import main

__all__ = ["main"]
