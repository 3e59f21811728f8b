"""A watchdog of one rank: it ends a process that makes no progress, and says at which segment, break or exchange.

It costs a replay nothing: where the main thread is, is read from its frames once it is too late.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.steps import Break
from bcgbench.ranks import Ranks

PACKAGE = Path(__file__).parent
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
        waiting = f"waiting for {self._ranks.waiting}" if self._ranks.waiting else ""
        where = waiting or place(sys._current_frames().get(self._main))
        self._give_up(f"in stage {self.stage}, {where}")


def place(frame: FrameType | None) -> str:
    """What a thread does: the step of a replay, else the innermost function of this package."""
    found = ""
    while frame is not None:
        code = frame.f_code
        if code is SegmentedGraph._run.__code__ and "step" in frame.f_locals:
            return _step(frame.f_locals["self"], frame.f_locals["step"])
        if not found and Path(code.co_filename).is_relative_to(PACKAGE):
            found = f"in {code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return found or "in no code of this tool"


def _step(graph: SegmentedGraph, step: object) -> str:
    index = next(n for n, each in enumerate(graph.steps) if each is step)
    what = f"break {step.label}" if isinstance(step, Break) else type(step).__name__
    return f"replaying step {index + 1} of {len(graph.steps)}: {what}"
