"""Where a run is, on stderr: a live line on a terminal, a plain line now and then elsewhere, or nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TextIO

from bcgbench.reports.formats import seconds

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from bcgbench.types import Progress

PLAIN_PERIOD_S = 10.0
"""Least time between two plain lines: a log of a long run stays readable."""


class Display(Protocol):
    """Shows progress while it is entered."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, progress: Progress) -> None: ...


def display(stream: TextIO, *, quiet: bool, total: int) -> Display:
    """The display that fits the stream; `total` is the number of cases."""
    if quiet:
        return SilentDisplay()
    return LiveDisplay(stream, total=total) if stream.isatty() else PlainDisplay(stream, total=total)


class SilentDisplay:
    """Shows nothing."""

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to undo."""

    def __call__(self, progress: Progress) -> None:
        """Ignore the event."""


class CaseCounter:
    """Numbers the cases as they come, so that a line can say `case 2 of 6`."""

    def __init__(self, *, total: int) -> None:
        self.total = total
        self._seen: dict[str, int] = {}

    def __call__(self, case: str) -> str:
        number = self._seen.setdefault(case, len(self._seen) + 1)
        return f"[{number}/{max(self.total, number)}] {case}"


class PlainDisplay:
    """Lines without control characters: one per new case, stage or arm, but at most one per period."""

    def __init__(
        self,
        stream: TextIO,
        *,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        period_s: float = PLAIN_PERIOD_S,
    ) -> None:
        self._stream = stream
        self._name = CaseCounter(total=total)
        self._clock = clock
        self._period_s = period_s
        self._shown_at: float | None = None

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def __call__(self, progress: Progress) -> None:
        """Write the event, unless the last line is more recent than the period."""
        name = self._name(progress.case)
        now = self._clock()
        if self._shown_at is not None and now - self._shown_at < self._period_s:
            return
        self._shown_at = now
        self._stream.write(f"{name} {describe(progress)}\n")
        self._stream.flush()


class LiveDisplay:
    """One line of a terminal, redrawn; colours are left to rich, which honours NO_COLOR."""

    def __init__(self, stream: TextIO, *, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._name = CaseCounter(total=total)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> LiveDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Redraw the line."""
        text = f"{self._name(progress.case)} {describe(progress)}"
        self._bar.update(self._task, description=text, completed=progress.done, total=progress.total or None)


def describe(progress: Progress) -> str:
    """`measure bcg 3/10 step 7, about 12.00 s left`."""
    parts = [progress.stage, progress.arm]
    if progress.total:
        parts.append(f"{progress.done}/{progress.total}")
    if progress.step:
        parts.append(f"step {progress.step}")
    text = " ".join(part for part in parts if part)
    return text if progress.eta_s is None else f"{text}, about {seconds(progress.eta_s)} left"
