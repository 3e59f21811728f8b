"""The texts of `compare`, `list`, `plan` and `doctor`: values in, text out. No measuring and no torch."""

from __future__ import annotations

import difflib
import json
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bcgbench import cli_compare, cli_models, store
from bcgbench.errors import StoreError, UsageError
from bcgbench.reports import base, formats, table
from bcgbench.store import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bcgbench.plan import Estimate
    from bcgbench.reports.base import Report
    from bcgbench.types import Case

Rows = list[dict[str, Any]]
WIDTH = table.WIDTH
LEAST_ROOM = 16
"""Columns that the last cell of a row gets, even where the others leave less."""


def comparison(a: str, b: str, *, results: Path, run: str, arms: Sequence[str], strict: bool) -> Report:
    """Two arms of one run where both names are arms, else equal arms of the two runs that A and B name."""
    from bcgbench.runners import RUNNERS

    unknown = [name for name in (a, b) if name not in RUNNERS]
    if len(unknown) == 1:
        near = difflib.get_close_matches(unknown[0], RUNNERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        message = f"unknown arm {unknown[0]!r}{hint} Give two of {', '.join(RUNNERS)}, or two runs"
        raise UsageError(message)
    if not unknown:
        opened = store.open_run(store.find_run(results, run))
        records = opened.records()
        verdicts = cli_compare.judge_arms(records, a=a, b=b)
        shown = tuple(record for record in records if record.runner in (a, b))
        return base.Report(info=opened.info, records=shown, verdicts=verdicts, strict=strict)
    first, second = (store.open_run(store.find_run(results, reference)) for reference in (a, b))
    before, after = first.records(), second.records()
    verdicts = cli_compare.judge_runs(before, after, arms=arms)
    paired = {(cli_compare.cell(verdict.case), base.runner_of(verdict.a)) for verdict in verdicts}
    shown = tuple(r for r in (*before, *after) if (cli_compare.cell(r.case), r.runner) in paired)
    return base.Report(info=first.info, records=shown, verdicts=verdicts, strict=strict)


def comparison_text(report: Report) -> str:
    """The verdict of every case, outputs first, then the metrics. Two runs are called A and B."""
    runs = tuple(dict.fromkeys(record.run_id for record in report.records))
    if len(runs) == 2:  # noqa: PLR2004
        letters = dict(zip(runs, "AB", strict=True))
        legend = "\n".join(f"{letter}: {run}" for run, letter in letters.items())
        return f"{legend}\n\n{_judged_text(_lettered(report, letters))}"
    return _judged_text(report)


def _lettered(report: Report, letters: Mapping[str, str]) -> Report:
    """The report with run ids replaced, which are longer than a column is wide."""

    def arm(name: str) -> str:
        runner, of, run = name.partition(" of ")
        return f"{runner}{of}{letters.get(run, run)}"

    records = tuple(replace(record, run_id=letters[record.run_id]) for record in report.records)
    verdicts = tuple(replace(verdict, a=arm(verdict.a), b=arm(verdict.b)) for verdict in report.verdicts)
    return replace(report, records=records, verdicts=verdicts)


def _judged_text(report: Report) -> str:
    judged = [view for view in base.views(report) if view.verdicts]
    blocks = [table.verdict_block(view, verdict) for view in judged for verdict in view.verdicts]
    metrics = [f"{view.name}\n{block}" for view in judged if (block := table.metrics_block(view))]
    first = [table.first_line(report)] if len(blocks) > 1 else []
    return "\n\n".join([*first, *blocks, *metrics])


def listing(what: str, *, results: Path, as_json: bool) -> str:
    """One line per thing there is, or a JSON list of objects."""
    if what == "models":
        return cli_models.listing(results, as_json=as_json)
    rows = _LISTINGS[what](results)
    return _json(rows) if as_json else aligned(rows) or f"no {what}"


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
        try:
            info = store.open_run(path).info
        except StoreError as error:  # one folder that cannot be read must not hide the others
            rows.append({"run": path.name, "created": "-", "suite": "-", "models": f"cannot be read: {error}"})
            continue
        models = dict.fromkeys(case.model for case in info.cases)
        rows.append(
            {"run": info.run_id, "created": info.created_utc, "suite": info.suite or "-", "models": ", ".join(models)}
        )
    return rows


_LISTINGS: dict[str, Callable[[Path], Rows]] = {
    "runners": _runners,
    "metrics": _metrics,
    "suites": _suites,
    "runs": _runs,
}


def plan_text(cases: Sequence[Case], *, as_json: bool) -> str:
    """What the cases would need, one line each, with the sum of times and the largest memory."""
    from bcgbench import models, plan

    adapters = {case.model: models.adapter(case.model) for case in cases}
    estimates = [
        plan.estimate(case, adapters[case.model].facts, text_encoder_bytes=adapters[case.model].text_encoder_bytes)
        for case in cases
    ]
    total_s = sum(estimate.duration_s for estimate in estimates)
    if as_json:
        return _json({"duration_s": total_s, "cases": [to_json(estimate) for estimate in estimates]})
    largest = formats.estimated_size(max(estimate.memory_bytes for estimate in estimates))
    arms = " or ".join(dict.fromkeys(", ".join(case.runners) for case in cases))
    notes = dict.fromkeys(note for estimate in estimates for note in estimate.notes)
    sentences = (
        f"{formats.plural(len(cases), 'case')}: about {formats.duration(total_s)}, at most {largest} of memory",
        f"images: over all arms ({arms}), warm-up and checks included; calls: transformer calls per image",
        "estimates from model facts and round figures for a data-centre GPU, not measurements",
        *notes,
    )
    lines = (table.wrapped(sentence, indent=2) for sentence in sentences)
    return "\n".join([aligned([_plan_row(estimate) for estimate in estimates]), "", *lines])


def _plan_row(estimate: Estimate) -> dict[str, Any]:
    return {
        "case": base.case_name(estimate.case),
        "images": estimate.images,
        "calls": estimate.forwards,
        "memory": formats.estimated_size(estimate.memory_bytes),
        "time": formats.duration(estimate.duration_s),
    }


def diagnosis(*, results: Path, as_json: bool) -> tuple[str, bool]:
    """The checks of this machine with what it can do in the last lines, and whether none of them failed."""
    from bcgbench import environment

    checks = environment.doctor(results=results)
    fine = all(check.ok is not False for check in checks)
    if as_json:
        return _json({"ok": fine, "checks": [to_json(check) for check in checks]}), fine
    table = aligned([{"": _MARKS[check.ok], "check": check.name, "found": check.text} for check in checks])
    return "\n".join([table, "", *_abilities({check.name: check.ok for check in checks})]), fine


_MARKS = {True: "ok", False: "FAIL", None: "-"}
_NEEDS = {
    "check outputs and graph use on the CPU": ("Python", "torch", "diffusers", "transformers", "results folder"),
    "measure speed on the GPU": (
        "Python", "torch", "diffusers", "transformers", "results folder", "GPU", "compute capability", "cuda-bindings",
    ),
    "download pretrained weights": ("model hub",),
}  # fmt: skip
"""What a user may want, and the checks that it rests on."""


def _abilities(found: Mapping[str, bool | None]) -> Iterator[str]:
    for ability, needs in _NEEDS.items():
        failed = [name for name in needs if found.get(name) is False]
        lacking = failed or [name for name in needs if found.get(name) is None]
        yield f"cannot {ability}: {', '.join(lacking)}" if lacking else f"can {ability}"


def aligned(rows: Rows) -> str:
    """Rows as columns of equal width below their names, the last one wrapped; empty for no row."""
    if not rows:
        return ""
    cells = [[base.one_line(str(value)) for value in row.values()] for row in ({k: k for k in rows[0]}, *rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]) - 1)]
    indent = sum(widths) + 2 * len(widths)
    return "\n".join(_aligned(line, widths, indent=indent) for line in cells)


def _aligned(cells: Sequence[str], widths: Sequence[int], *, indent: int) -> str:
    start = "".join(f"{text:<{width}}  " for text, width in zip(cells, widths, strict=False))
    room = max(WIDTH - indent, LEAST_ROOM)
    last = textwrap.wrap(cells[-1], width=room, break_on_hyphens=False, break_long_words=False)
    return (start + f"\n{'':<{indent}}".join(last)).rstrip()


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
