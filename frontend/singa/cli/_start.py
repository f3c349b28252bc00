"""The program `sonnx`: Ctrl-C ends it with exit code 130, a request to terminate with 143, at any moment, without a traceback."""

from __future__ import annotations

import os
import signal
import sys

from ._interrupts import INTERRUPTED, Interrupts

UNWRITTEN = 3

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _tell_warnings() -> None:
    """Print a warning to the user of a command without the place in this package where it was raised."""
    import warnings

    full = warnings.formatwarning

    def text(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        own = filename.startswith(_PACKAGE + os.sep)
        return f"warning: {message}\n" if own else full(message, category, filename, lineno, line)

    warnings.formatwarning = text


def start() -> None:
    """Run the command line."""
    try:
        Interrupts().install()
        _tell_warnings()
        from ._main import main

        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        from errno import EDQUOT, EFBIG, EIO, ENOSPC  # click handles a closed pipe; errors of files are SonnxErrors

        if error.errno not in (EDQUOT, EFBIG, EIO, ENOSPC) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest of its buffer when it exits
        print(f"cannot write: {error.strerror}", file=sys.stderr)
        sys.exit(UNWRITTEN)
    finally:  # the command has ended, and its exit code is known
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)


def __getattr__(name: str) -> object:
    """Import the group of commands on first use."""
    if name != "main":
        raise AttributeError(f"module 'singa.cli' has no attribute {name!r}")
    from ._main import main

    return main
