"""Numbers as people read them: the one place that rounds and adds a unit. GB is 10^9 bytes. No layout here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bcgbench.types import Interval

NOT_AVAILABLE = "n/a"
NOT_TIMED = "-"
"""Stands where a time would: a CPU tape runs the arithmetic of a graph and says nothing about its speed."""

_TIME_UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))
_SIZE_UNITS = ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 1), (0.0, "B", 0))
_FINE_RATIO = 0.1
"""Ratios closer to 1 than this get a third decimal: 1.004x is a result, 1.00x hides it."""
_SMALL_SHARE = 0.01
"""Shares below it get a second decimal."""


def missing(reason: str) -> str:
    """`n/a` and why: a blank or a zero would read as a measurement."""
    return f"{NOT_AVAILABLE} ({reason})"


def seconds(value_s: float) -> str:
    """Four significant digits with the fitting unit: `2.450 s`, `34.10 ms`, `7.200 µs`."""
    unit, scale = _time_unit(value_s)
    return f"{_four_digits(value_s * scale)} {unit}"


def time_range(interval: Interval) -> str:
    """`[2.441, 2.460] s`, in the unit that fits the centre."""
    unit, scale = _time_unit(interval.centre)
    return f"[{_four_digits(interval.low * scale)}, {_four_digits(interval.high * scale)}] {unit}"


def size(value_bytes: float) -> str:
    """`58.10 GB`, `1.5 MB`; decimal units."""
    least, unit, decimals = next(row for row in _SIZE_UNITS if abs(value_bytes) >= row[0])
    return f"{value_bytes / (least or 1):.{decimals}f} {unit}"


def duration(value_s: float) -> str:
    """`45 s`, `12 min`, `2.5 h`: an estimate has no digits to spare."""
    if value_s < 90:  # noqa: PLR2004 - a minute and a half
        return f"{value_s:.0f} s"
    return f"{value_s / 60:.0f} min" if value_s < 5400 else f"{value_s / 3600:.1f} h"  # noqa: PLR2004


def estimated_size(value_bytes: float) -> str:
    """`50 GB`, `17 MB`: an estimate of memory."""
    least, unit, _ = next(row for row in _SIZE_UNITS if abs(value_bytes) >= row[0])
    return f"{value_bytes / (least or 1):.0f} {unit}"


def ratio(value: float) -> str:
    """`2.64x`, and `1.004x` near one."""
    return f"{value:.{_ratio_decimals(value)}f}x"


def ratio_with_interval(interval: Interval) -> str:
    """`2.64x [2.60, 2.68]`."""
    decimals = _ratio_decimals(interval.centre)
    return f"{ratio(interval.centre)} [{interval.low:.{decimals}f}, {interval.high:.{decimals}f}]"


def percent(fraction: float) -> str:
    """`42.1 %` of 0.421, `0.11 %` of 0.0011."""
    return f"{100 * fraction:.{1 if abs(fraction) >= _SMALL_SHARE else 2}f} %"


def count(value: float) -> str:
    """A whole number as such, a mean of counts with one decimal."""
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def span(values: Sequence[float], *, unit: str) -> str:
    """`1980 MHz` where all are equal, else `259 to 271 W`."""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def arrow(values: Sequence[int]) -> str:
    """`5 -> 5 -> 5`, the way reviewers already write capture counts."""
    return " -> ".join(str(value) for value in values)


def plural(number: int, noun: str) -> str:
    """`1 case`, `6 cases`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def decibels(value_db: float | None) -> str:
    """`48.1 dB`; none for an exact or a non-finite comparison."""
    return NOT_AVAILABLE if value_db is None else f"{value_db:.1f} dB"


def _ratio_decimals(value: float) -> int:
    return 3 if abs(value - 1) < _FINE_RATIO else 2


def _time_unit(value_s: float) -> tuple[str, float]:
    if value_s == 0:
        return "s", 1.0
    return next((unit, scale) for least, unit, scale in _TIME_UNITS if abs(value_s) >= least)


def _four_digits(scaled: float) -> str:
    before_point = len(str(int(abs(scaled))))
    return f"{scaled:.{max(0, 4 - before_point)}f}"
