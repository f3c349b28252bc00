"""The command line: one module per command.

Exit codes: 0 success; 1 a comparison, a conformance run or a check failed; 2 wrong usage; 3 a model or an input was refused
(the error says why); 130 interrupted by Ctrl-C; 143 terminated.
"""

from ._start import __getattr__ as __getattr__
from ._start import start

__all__ = ["main", "start"]
