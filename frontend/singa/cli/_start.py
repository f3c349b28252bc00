"""The program `sonnx`: Ctrl-C ends it with exit code 130, a request to terminate with 143, at any moment, without a traceback."""

from __future__ import annotations

import signal
import sys

from ._interrupts import INTERRUPTED, Interrupts


def start() -> None:
    """Run the command line."""
    try:
        Interrupts().install()
        from ._main import main

        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
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
