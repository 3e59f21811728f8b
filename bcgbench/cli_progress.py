"""Where a run is, on stderr: a live line on a terminal, a plain line now and then elsewhere, or nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TextIO

from bcgbench.reports.base import case_name
from bcgbench.reports.formats import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from bcgbench.types import Case, Progress

PLAIN_PERIOD_S = 10.0
"""Least time between two plain lines: a log of a long run stays readable."""


class Display(Protocol):
    """Shows progress while it is entered."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, progress: Progress) -> None: ...


def display(stream: TextIO, *, quiet: bool, cases: Sequence[Case]) -> Display:
    """The display that fits the stream, for the cases of a run."""
    if quiet:
        return SilentDisplay()
    names = case_names(cases)
    return LiveDisplay(stream, names=names) if stream.isatty() else PlainDisplay(stream, names=names)


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


def case_names(cases: Sequence[Case]) -> dict[str, str]:
    """Case key to `[2/6] Qwen/Qwen-Image @ 512x512`."""
    return {case.key: f"[{number}/{len(cases)}] {case_name(case)}" for number, case in enumerate(cases, start=1)}


class PlainDisplay:
    """Lines without control characters: one per new case, stage or arm, but at most one per period."""

    def __init__(
        self,
        stream: TextIO,
        *,
        names: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        period_s: float = PLAIN_PERIOD_S,
    ) -> None:
        self._stream = stream
        self._names = names
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
        name = self._names.get(progress.case, progress.case)
        now = self._clock()
        if self._shown_at is not None and now - self._shown_at < self._period_s:
            return
        self._shown_at = now
        self._stream.write(f"{name}: {describe(progress)}\n")
        self._stream.flush()


class LiveDisplay:
    """One line of a terminal, redrawn; colours are left to rich, which honours NO_COLOR."""

    def __init__(self, stream: TextIO, *, names: Mapping[str, str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._names = names
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
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
        text = f"{self._names.get(progress.case, progress.case)}: {describe(progress)}"
        self._bar.update(self._task, description=text, completed=progress.done, total=progress.total or None)


def describe(progress: Progress) -> str:
    """`measure bcg 3/10 step 7, about 12 s left`."""
    parts = [progress.stage, progress.arm]
    if progress.total:
        parts.append(f"{progress.done}/{progress.total}")
    if progress.step:
        parts.append(f"step {progress.step}")
    text = " ".join(part for part in parts if part)
    return text if progress.eta_s is None else f"{text}, about {duration(progress.eta_s)} left"
