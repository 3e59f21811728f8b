"""Long-format CSV: one row per case, arm and metric, for a spreadsheet or a data frame. Values are not rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bcgbench.metrics import METRICS
from bcgbench.reports import base

if TYPE_CHECKING:
    from bcgbench.reports.base import CaseView, Report
    from bcgbench.types import Record

COLUMNS = (
    "run_id", "case", "model", "resolution", "parallel", "steps", "arm", "attempt", "backend", "status", "reasons",
    "metric", "unit", "better", "value", "n", "note",
)  # fmt: skip


def render(report: Report) -> str:
    """CSV text with a header row; a missing value is empty and `note` says why."""
    import pandas as pd

    rows = [
        _head(view, label, record) | _metric(view, record, name)
        for view in base.views(report)
        for label, record in view.arms.items()
        for name in METRICS
    ]
    return str(pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(index=False, lineterminator="\n"))


def _head(view: CaseView, label: str, record: Record) -> dict[str, object]:
    name = base.model_name(view.case)
    is_folder = name != base.one_line(view.case.model)  # whose key spells out its path
    return {
        "run_id": record.run_id,
        "case": f"{view.case.resolution}-{view.case.key[-8:]}" if is_folder else view.case.key,
        "model": name,
        "resolution": view.case.resolution,
        "parallel": base.one_line(view.case.parallel),
        "steps": view.case.steps,
        "arm": base.one_line(label),
        "attempt": record.attempt,
        "backend": record.backend,
        "status": record.status,
        "reasons": "; ".join(base.reason_text(reason) for reason in record.reasons),
    }


def _metric(view: CaseView, record: Record, name: str) -> dict[str, object]:
    metric = METRICS[name]
    row = {"metric": name, "unit": metric.unit, "better": metric.better, "n": len(record.measured)}
    if metric.unit == "s" and not view.timed:
        return row | {"value": None, "note": "a CPU (tape) run carries no speed"}
    value = metric.read(record)
    return row | {"value": value, "note": base.why_missing(record, name) if value is None else ""}
