"""The command line: a module per command.

Exit codes: 0 done and as it should be; 1 a comparison, a conformance run or a report says no; 2 the command was written
wrongly; 3 a model or an input is not accepted (the error says why).
"""

from ._main import main

__all__ = ["main"]
