"""REPORTS: format name -> "module:attribute" of its `render(report) -> str`. A new format is one file and one row.

Reports turn values into text: no files, no clock, no torch. The command line decides where the text goes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bcgbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bcgbench.reports.base import Report

REPORTS: dict[str, str] = {
    "table": "bcgbench.reports.table:render",
    "markdown": "bcgbench.reports.markdown:render",
    "json": "bcgbench.reports.json_report:render",
    "csv": "bcgbench.reports.csv_report:render",
}


def renderer(name: str) -> Callable[[Report], str]:
    """The render function of a format, imported on demand. UsageError names the formats there are."""
    if name not in REPORTS:
        message = f"unknown report format {name!r}: expected one of {', '.join(REPORTS)}"
        raise UsageError(message)
    module, _, attribute = REPORTS[name].partition(":")
    function: Callable[[Report], str] = getattr(importlib.import_module(module), attribute)
    return function
