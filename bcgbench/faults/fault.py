"""What a row of the tables of faults says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["tape", "cpu", "cuda", "none"]
Shown = Literal["run", "gpu", "runs", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is broken, where it can be shown, and what has to find it."""

    part: str
    """What it is put into: "replay", "padding", "settings", ..."""
    breaks: str
    published: tuple[str, ...] = ()
    """Published failures that it stands for, as `owner/repository#number`."""
    backend: Backend = "tape"
    """What replays where it shows: the "tape" of a CPU, and so a GPU's graphs too; only the "cpu", a fault of the tape
    itself; only "cuda" graphs; or "none", where any arm would do."""
    inject: str
    """`module:function` below this package; the function gives a context manager, and the fault is in while it is
    open."""
    model: str = "tiny/z-image-turbo"
    case: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the case that differ from `selftest.case_of`."""
    shown: Shown = "run"
    """"run": by a run's own verdict. "gpu": the same, its records marked as a GPU's before they are judged, because
    times count there only. "runs": by comparing a run without the fault with one that has it. "ranks": by a run of two
    processes of a CPU, the second of which has it, or both."""
    code: str
    """Reason code that must be among the findings ..."""
    says: str = ""
    """... with these words in its text ..."""
    exit_code: int
    """... and the exit code of the whole."""
    note: str = ""
    """Why several parts may end in one finding, or what the row does not show."""

    @property
    def links(self) -> tuple[str, ...]:
        """Addresses of the published failures; a pull request's forwards to itself."""
        return tuple(f"https://github.com/{each.replace('#', '/issues/')}" for each in self.published)

    @property
    def finding(self) -> str:
        """`padding-over-limit "is a mask missing?", exit 3`: what the fault must end in."""
        words = f' "{self.says}"' if self.says else ""
        return f"{self.code}{words}, exit {self.exit_code}"
