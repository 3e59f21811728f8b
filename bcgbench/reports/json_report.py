"""One JSON document: the stored values as `store.to_json` writes them, with local paths redacted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bcgbench.reports import base, headline
from bcgbench.store import to_json
from bcgbench.types import SCHEMA_VERSION

if TYPE_CHECKING:
    from bcgbench.reports.base import Report


def render(report: Report) -> str:
    """`{schema_version, exit_code, outcome, run, records, verdicts, notes}`, indented, ending in a newline."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "exit_code": base.exit_code(report),
        "outcome": headline.overall(report),
        "run": to_json(report.info),
        "records": [to_json(record) for record in report.records],
        "verdicts": [to_json(verdict) for verdict in report.verdicts],
        "notes": list(report.notes),
    }
    return json.dumps(_redacted(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return base.redact(value)
    if isinstance(value, dict):
        return {key: _redacted(each) for key, each in value.items()}
    return [_redacted(each) for each in value] if isinstance(value, list) else value
