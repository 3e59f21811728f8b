"""A watchdog of one rank: it ends a process that makes no progress, and says at which segment, break or exchange.

It costs a replay nothing: where the main thread is, is read from its frames once it is too late (`engine/place.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bcgbench.engine.place import place
from bcgbench.ranks import Ranks

POLLS = 10
"""Looks per time limit."""


class Watchdog:
    """Ends this process, by `give_up(where)`, when nobody called `beat` for `limit_s`. Started by the first `beat`."""

    def __init__(self, ranks: Ranks, *, limit_s: float, give_up: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._limit_s = limit_s
        self._give_up = give_up
        self.stage = "load"
        """What was reached last."""
        self._last_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._main = threading.get_ident()

    def beat(self, stage: str) -> None:
        """There is progress: this stage was reached."""
        self.stage, self._last_s = stage, time.monotonic()
        if self._thread.ident is None:
            self._thread.start()

    def _watch(self) -> None:
        while time.monotonic() - self._last_s < self._limit_s:
            time.sleep(self._limit_s / POLLS)
        where = f"waiting for {self._ranks.waiting}" if self._ranks.waiting else place(self._main)
        self._give_up(f"in stage {self.stage}, {where}")
