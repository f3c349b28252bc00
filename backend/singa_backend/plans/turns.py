"""What the runs of a plan take turns with."""

from __future__ import annotations

import threading
import weakref
from contextvars import Context

import numpy as np

exclusives: weakref.WeakSet[Exclusive] = weakref.WeakSet()


class Exclusive:
    """What the runs of a plan, which share its memory, take turns with.

    Attributes:
        lock: is held during a run.
        context: of the runs.
    """

    def __init__(self) -> None:
        self.renew()
        exclusives.add(self)

    def renew(self) -> None:
        """Make both; in a forked child another thread of the parent may have been in them."""
        self.lock = threading.Lock()
        self.context = Context()
        self.context.run(np.seterr, all="ignore")
