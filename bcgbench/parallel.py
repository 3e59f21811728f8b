"""How one request may be shared among processes: `none`, `cfg:2`, `context:N` as text and as a value.

Here: parsing and what cannot be asked for at all. Not here: whether a model can be shared so (`models/base.py`), the
processes and what they exchange (`ranks.py`, `share.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bcgbench.errors import UsageError

CFG_BRANCHES = 2
"""With and without the prompt: there is no third to give to a third process."""
EXPECTED = "none, cfg:2 (one process per guidance branch) or context:N (N from 2, parts of the sequence)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """A kind of sharing and the number of processes."""

    kind: str = "none"
    ranks: int = 1

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}:{self.ranks}"


def is_parallel(text: object) -> bool:
    """Whether `parse_parallel` takes it."""
    match = re.fullmatch(r"none|(cfg|context):([1-9]\d{0,2})", str(text))
    if match is None or match[2] is None:
        return match is not None
    return int(match[2]) == CFG_BRANCHES if match[1] == "cfg" else int(match[2]) > 1


def parse_parallel(text: str | None, *, device: str = "cuda") -> Parallel:
    """The value of a text; None is none. UsageError for another text, or with a device that names one GPU."""
    if text is None or text == "none":
        return Parallel()
    if not is_parallel(text):
        raise UsageError(f"parallel {text!r}: expected {EXPECTED}")
    if device not in ("cuda", "cpu"):
        raise UsageError(f"parallel {text!r} gives each process a GPU of its own: give device cuda, not {device!r}")
    kind, _, ranks = text.partition(":")
    return Parallel(kind=kind, ranks=int(ranks))
