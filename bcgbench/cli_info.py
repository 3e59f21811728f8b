"""The texts of `compare`, `list`, `plan` and `doctor`: values in, text out. No measuring and no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bcgbench import cli_compare, store
from bcgbench.reports import base, formats, table
from bcgbench.store import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bcgbench.plan import Estimate
    from bcgbench.reports.base import Report
    from bcgbench.types import Case

Rows = list[dict[str, Any]]


def comparison(a: str, b: str, *, results: Path, run: str, arms: Sequence[str], strict: bool) -> Report:
    """Two arms of one run where both names are arms, else equal arms of the two runs that A and B name."""
    from bcgbench.runners import RUNNERS

    if a in RUNNERS and b in RUNNERS:
        opened = store.open_run(store.find_run(results, run))
        records = opened.records()
        verdicts = cli_compare.judge_arms(records, a=a, b=b)
        shown = tuple(record for record in records if record.runner in (a, b))
        return base.Report(info=opened.info, records=shown, verdicts=verdicts, strict=strict)
    first, second = (store.open_run(store.find_run(results, reference)) for reference in (a, b))
    before, after = first.records(), second.records()
    verdicts = cli_compare.judge_runs(before, after, arms=arms)
    paired = {(verdict.case.key, base.runner_of(verdict.a)) for verdict in verdicts}
    shown = tuple(record for record in (*before, *after) if (record.case.key, record.runner) in paired)
    return base.Report(info=first.info, records=shown, verdicts=verdicts, strict=strict)


def comparison_text(report: Report) -> str:
    """The verdict of every case, outputs first, then the metrics."""
    judged = [view for view in base.views(report) if view.verdicts]
    blocks = [table.verdict_block(view, verdict) for view in judged for verdict in view.verdicts]
    metrics = [f"{view.name}\n{table.metrics_block(view)}" for view in judged]
    return "\n\n".join([*blocks, *metrics])


def listing(what: str, *, results: Path, as_json: bool) -> str:
    """One line per thing there is, or a JSON list of objects."""
    rows = _LISTINGS[what](results)
    return _json(rows) if as_json else aligned(rows) or f"no {what}"


def _models(_: Path) -> Rows:
    from bcgbench import models

    rows = []
    for name in models.MODELS:
        facts = models.facts(name)
        shape = f"{facts.width_px}x{facts.height_px}" + (f"x{facts.frames}" if facts.frames else "")
        rows.append(
            {
                "model": name,
                "default": f"{shape}, {formats.plural(facts.steps, 'step')}",
                "memory": formats.size(facts.memory_bytes),
                "prompt length": facts.policy,
            }
        )
    return rows


def _runners(_: Path) -> Rows:
    from bcgbench.runners import RUNNERS

    return [{"runner": name, "description": getattr(row, "description", str(row))} for name, row in RUNNERS.items()]


def _metrics(_: Path) -> Rows:
    from bcgbench.metrics import METRICS

    return [
        {"metric": metric.name, "unit": metric.unit, "better": metric.better, "description": metric.description}
        for metric in METRICS.values()
    ]


def _suites(_: Path) -> Rows:
    from bcgbench import suite

    loaded = [suite.load_suite(str(path)) for path in sorted(suite.SUITES_DIR.glob("*.toml"))]
    return [{"suite": each.name, "description": each.description} for each in loaded]


def _runs(results: Path) -> Rows:
    rows = []
    for path in store.list_runs(results):
        info = store.open_run(path).info
        models = dict.fromkeys(case.model for case in info.cases)
        rows.append(
            {"run": info.run_id, "created": info.created_utc, "suite": info.suite or "-", "models": ", ".join(models)}
        )
    return rows


_LISTINGS: dict[str, Callable[[Path], Rows]] = {
    "models": _models,
    "runners": _runners,
    "metrics": _metrics,
    "suites": _suites,
    "runs": _runs,
}


def plan_text(cases: Sequence[Case], *, as_json: bool) -> str:
    """What the cases would need, one line each, with the sum of times and the largest memory."""
    from bcgbench import models, plan

    estimates = [plan.estimate(case, models.facts(case.model)) for case in cases]
    total_s = sum(estimate.duration_s for estimate in estimates)
    if as_json:
        return _json({"duration_s": total_s, "cases": [to_json(estimate) for estimate in estimates]})
    largest = max(estimate.memory_bytes for estimate in estimates)
    summary = (
        f"{formats.plural(len(cases), 'case')}: about {duration(total_s)}, at most {formats.size(largest)} "
        "(estimates from model facts and round figures for a data-centre GPU, not measurements)"
    )
    return f"{aligned([_plan_row(estimate) for estimate in estimates])}\n{summary}"


def _plan_row(estimate: Estimate) -> dict[str, Any]:
    case = estimate.case
    return {
        "case": f"{case.model} @ {case.resolution}",
        "arms": ",".join(case.runners),
        "requests": estimate.images,
        "calls each": estimate.forwards,
        "memory": formats.size(estimate.memory_bytes),
        "time": duration(estimate.duration_s),
        "notes": "; ".join(estimate.notes),
    }


def duration(value_s: float) -> str:
    """`45 s`, `12 min`, `2.5 h`: an estimate has no digits to spare."""
    if value_s < 90:  # noqa: PLR2004 - a minute and a half
        return f"{value_s:.0f} s"
    return f"{value_s / 60:.0f} min" if value_s < 5400 else f"{value_s / 3600:.1f} h"  # noqa: PLR2004


def diagnosis(*, results: Path, as_json: bool) -> tuple[str, bool]:
    """The checks of this machine, and whether none of them failed."""
    from bcgbench import environment

    checks = environment.doctor(results=results)
    fine = all(check.ok is not False for check in checks)
    if as_json:
        return _json({"ok": fine, "checks": [to_json(check) for check in checks]}), fine
    return aligned([{"": _MARKS[check.ok], "check": check.name, "found": check.text} for check in checks]), fine


_MARKS = {True: "ok", False: "FAIL", None: "-"}


def aligned(rows: Rows) -> str:
    """Rows as columns of equal width below their names; empty for no row."""
    if not rows:
        return ""
    cells = [[base.one_line(str(value)) for value in row.values()] for row in ({k: k for k in rows[0]}, *rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
