"""The little markdown that reports need: escaped text, tables, folded blocks, code. No content here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bcgbench.reports.base import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "\\`*|~"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
)
_ARROW = "-&gt;"
_NO_FIGURE = ("n/a", "-", "none", "(reference)", "no graph")
_MENTION = re.compile(r"@(?=\w)")


def escape(text: str) -> str:
    """Text that shows as itself in a table cell or a line: one line, no markup, no HTML, no user mentions."""
    escaped = one_line(text).translate(_ESCAPES).replace(_ARROW, "->").replace("](", "]\\(")
    return _MENTION.sub("&#64;", escaped)  # a name must not notify a GitHub user


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are escaped already: columns of figures to the right, of words to the left."""
    rows = [list(row) for row in rows]
    rule = ["---:" if n and _is_figures(row[n] for row in rows) else ":---" for n in range(len(columns))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def _is_figures(cells: Iterable[str]) -> bool:
    """Whether every cell is one figure or says that there is none."""
    return all((cell[:1].isdigit() and ", " not in cell) or cell.startswith(_NO_FIGURE) for cell in cells)


def folded(summary: str, body: str) -> str:
    """A `<details>` block."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def code(text: str) -> str:
    """A fenced block whose fence is longer than any run of backticks within."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
