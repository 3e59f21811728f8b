"""Two clocks of one span of work: the host's, and the device's own events. And a scripted one for tests.

Here: reading time. Not here: which span is read (`tap.py`, `measure.py`) and what disagreement means (`verdict.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Host time, and marks in the order of the device's work."""

    @property
    def is_device_timed(self) -> bool:
        """Whether marks are taken by the device itself: a second clock, independent of `now_s`."""

    def now_s(self) -> float:
        """Host seconds since an arbitrary origin, monotonic."""

    def synchronize(self) -> None:
        """Wait for all work that the device was given."""

    def mark(self) -> Any:
        """A point in the current stream of work, without waiting for it."""

    def elapsed_s(self, a: Any, b: Any) -> float:
        """Seconds from mark `a` to mark `b`; both must have been reached (`synchronize`)."""


class HostClock:
    """For CPU runs, where work is done when a call returns."""

    is_device_timed = False

    def now_s(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, a: float, b: float) -> float:
        return b - a


class CudaClock:
    """Marks are CUDA events on the stream that is current when they are taken; resolution about 0.5 µs."""

    is_device_timed = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)

    def now_s(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_s(self, a: torch.cuda.Event, b: torch.cuda.Event) -> float:
        return float(a.elapsed_time(b)) / 1e3


class FakeClock:
    """Returns scripted times, for tests: `times` one by one from `now_s`, `marks` likewise (from `times` if None)."""

    def __init__(self, times: Sequence[float], *, marks: Sequence[float] | None = None) -> None:
        self._times = iter(times)
        self._marks = self._times if marks is None else iter(marks)
        self.is_device_timed = marks is not None
        self.synchronized = 0
        """How often `synchronize` was called."""

    def now_s(self) -> float:
        return next(self._times)

    def synchronize(self) -> None:
        self.synchronized += 1

    def mark(self) -> float:
        return next(self._marks)

    def elapsed_s(self, a: float, b: float) -> float:
        return b - a


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device: events on CUDA, host time elsewhere."""
    return CudaClock(device) if torch.device(device).type == "cuda" else HostClock()
