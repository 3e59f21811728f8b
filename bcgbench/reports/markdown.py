"""GitHub-flavoured markdown for a pull request: verdict first, the reviewers' table, every arm, folded details."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bcgbench.reports import base, formats, headline
from bcgbench.reports.markdown_details import details
from bcgbench.reports.markdown_published import published
from bcgbench.reports.markdown_ranks import ranks
from bcgbench.reports.markdown_syntax import escape, table

if TYPE_CHECKING:
    from bcgbench.reports.base import CaseView, Report
    from bcgbench.types import Record, Verdict

SUMMARY_COLUMNS = (
    "Model / shape",
    "Capture after warmup -> req1 -> req2",
    "Eager denoise",
    "BCG denoise",
    "Denoise speedup",
    "Eager total",
    "BCG total",
    "Peak mem (Eager -> BCG)",
)
"""The columns that reviewers of breakable CUDA graphs already read, in their order and words."""

PROOF_COLUMNS = (
    "Replays / expected",
    "Misses",
    "Fallbacks",
    "Outputs (BCG vs padded eager)",
    "GPU busy (Eager -> BCG)",
)
"""What makes the figures before them believable."""

GRAPH_COLUMNS = ("Graph denoise", "Graph / BCG")
"""The whole graph without breaks: the bound that breaks cost against. Above 1, BCG is the faster."""

ARM_COLUMNS = (
    "Model / shape",
    "Arm",
    "Status",
    "Against",
    "Speed [95 % interval]",
    "Denoise",
    "Step",
    "Launches per step",
    "GPU busy",
    "Hook's share",
    "Prepare",
    "Pays",
    "Outputs",
    "Padding alone",
    "Captures",
)
TIMED_COLUMNS = frozenset(ARM_COLUMNS[4:12])
"""What only a GPU can tell: speed, times, launches."""
EAGER, BCG, GRAPH = "eager", "bcg", "graph"
_SUMMARY_CAPTURES = 3
"""After warm-up, after request 1, after request 2; the details list the repeat of request 1 as well."""


def render(report: Report) -> str:
    """A report whose first line is the verdict, so that a folded comment still says it."""
    views = base.views(report)
    columns = SUMMARY_COLUMNS + PROOF_COLUMNS + GRAPH_COLUMNS
    parts = [
        f"**{escape(headline.overall(report))}**",
        table(columns, [_summary_row(view) for view in views]),
        _caption(views),
        "**Every arm**",
        _arm_table(views),
        *(f"> {escape(base.redact(note))}" for note in report.notes),
        *published(views),
        *ranks(views),
        *details(report, views),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _arm(view: CaseView, runner: str) -> Record | None:
    """The arm of a runner; with several runs side by side, the first that has it."""
    return next((record for record in view.arms.values() if record.runner == runner), None)


def _verdict(view: CaseView, a: str, b: str) -> Verdict | None:
    return next((v for v in view.verdicts if (base.runner_of(v.a), base.runner_of(v.b)) == (a, b)), None)


def _summary_row(view: CaseView) -> list[str]:
    eager, bcg, graph = (_arm(view, runner) for runner in (EAGER, BCG, GRAPH))
    verdict = _verdict(view, EAGER, BCG)

    def metric(record: Record | None, name: str) -> str:
        return escape(base.metric_text(view, record, name))

    def change(name: str) -> str:
        before, after = metric(eager, name), metric(bcg, name)
        return before if before == after and before.startswith(formats.NOT_AVAILABLE) else f"{before} -> {after}"

    return [
        _name(view),
        _captures(bcg, limit=_SUMMARY_CAPTURES),
        _with_count(metric(eager, "denoise_s"), eager),
        _with_count(metric(bcg, "denoise_s"), bcg),
        _speed(view, eager, bcg),
        metric(eager, "end_to_end_s"),
        metric(bcg, "end_to_end_s"),
        change("peak_allocated_bytes"),
        *_proof(bcg),
        escape(base.redact(verdict.fidelity)) if verdict else formats.missing("no pair eager, bcg"),
        change("gpu_busy"),
        _with_count(metric(graph, "denoise_s"), graph),
        _speed(view, graph, bcg, bound=True),
    ]


def _name(view: CaseView) -> str:
    return escape(view.title)


def _with_count(text: str, record: Record | None) -> str:
    timed = record is not None and not text.startswith((formats.NOT_AVAILABLE, formats.NOT_TIMED))
    return f"{text} (n = {len(record.measured)})" if timed and record is not None else text


def _speed(view: CaseView, a: Record | None, b: Record | None, *, bound: bool = False) -> str:
    """Arm b against arm a in a cell; against the bound only the ratio, because nothing is judged by it."""
    if not view.timed:
        return formats.NOT_TIMED
    if a is None or b is None:
        return formats.missing("arm not run")
    bad = next((record for record in (b, a) if record.status != "OK"), None)
    if bad is not None:
        return formats.missing(escape(base.status_phrase(bad)))
    verdict = _verdict(view, a.runner, b.runner)
    if verdict is None or verdict.ratio is None:
        why = verdict.reasons[0].code if verdict and verdict.reasons else "not compared"
        return formats.missing(escape(f"{verdict.speed}: {why}" if verdict else why))
    figures = f"{formats.ratio_with_interval(verdict.ratio)} (n = {verdict.pairs})"
    return figures if bound else f"{verdict.speed} {figures}"


def _captures(record: Record | None, *, limit: int | None = None) -> str:
    if record is None:
        return formats.missing("arm not run")
    proof = base.proof_of(record)
    return formats.arrow(proof.captures[:limit]) if proof else escape(base.why_no_proof(record))


def _proof(record: Record | None) -> list[str]:
    proof = base.proof_of(record) if record else None
    if proof is None:
        return [_captures(record)] * 3
    misses = sum(miss.count for miss in proof.misses)
    return [f"{proof.replays} / {proof.expected_forwards}", str(misses), str(proof.fallbacks)]


def _arm_table(views: tuple[CaseView, ...]) -> str:
    """Every arm of every case; without the columns of times where none was measured."""
    shown = [n for n, name in enumerate(ARM_COLUMNS) if name not in TIMED_COLUMNS or any(view.timed for view in views)]
    rows = [[row[n] for n in shown] for view in views for row in _arm_rows(view)]
    return table([ARM_COLUMNS[n] for n in shown], rows)


def _arm_rows(view: CaseView) -> list[list[str]]:
    if not view.arms:
        return [[_name(view), formats.missing("not run"), *[""] * (len(ARM_COLUMNS) - 2)]]
    return [_arm_row(view, label, record) for label, record in view.arms.items()]


def _arm_row(view: CaseView, label: str, record: Record) -> list[str]:
    def metric(name: str) -> str:
        return escape(base.metric_text(view, record, name))

    against, speed, outputs, padding = _judged_cells(view, label, record)
    return [
        _name(view),
        escape(label),
        escape(record.status if record.status == "OK" else f"{record.status}: {base.first_reason(record)}"),
        against,
        speed,
        _with_count(metric("denoise_s"), record),
        metric("step_s"),
        metric("launches_per_step"),
        metric("gpu_busy"),
        metric("hook_share"),
        metric("prepare_s"),
        _pays(view, label, record),
        outputs,
        padding,
        _captures(record),
    ]


def _pays(view: CaseView, label: str, record: Record) -> str:
    """When the first verdict's arm is paid back against what it is held against."""
    verdict = next((v for v in view.verdicts if v.b == label), None)
    return base.pays_phrase(view, view.arms.get(verdict.a), record) if verdict else "(reference)"


def _judged_cells(view: CaseView, label: str, record: Record) -> list[str]:
    """Against, speed, outputs and padding of an arm, by the first verdict on it."""
    verdict = next((v for v in view.verdicts if v.b == label), None)
    if verdict is None:
        compared = record.status in ("OK", "INVALID")
        return ["(reference)" if compared else formats.missing(record.status)] * 4
    return [
        escape(verdict.a),
        _speed(view, view.arms.get(verdict.a), record),
        escape(base.redact(verdict.fidelity)),
        escape(verdict.padding) or "none",
    ]


def _caption(views: tuple[CaseView, ...]) -> str:
    sentences = []
    if any(view.timed for view in views):
        sentences += [
            "One sample is one image (or video); times are medians over n samples, measured in interleaved rounds.",
            "Denoise is the span of the denoise loop by CUDA events, total is the whole request.",
            "A speedup is the median of the pairwise ratios of denoise times with its 95 % order-statistic interval.",
            "GB is 10^9 bytes.",
        ]
    if any(not view.timed for view in views):
        sentences.append(
            "A dash stands for a time on a CPU, which carries no speed: outputs and graph use are checked there, on a "
            "tape that replays the operations in place of a CUDA graph."
        )
    if any(view.synthetic for view in views):
        sentences.append(
            "Synthetic weights are random: the arithmetic and its cost are real, the pictures mean nothing."
        )
    return " ".join(sentences)
