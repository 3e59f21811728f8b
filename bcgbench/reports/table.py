"""Plain text for a terminal or a log, at most 100 columns, never with escape sequences."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from bcgbench import stats
from bcgbench.metrics import clock_of
from bcgbench.outputs import answer
from bcgbench.reports import base, formats, headline
from bcgbench.verdict import judge_record_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bcgbench.reports.base import CaseView, Report
    from bcgbench.types import Engagement, Record, Verdict

WIDTH = 100
ARMS_PER_TABLE = 4
"""What fits beside the row names in WIDTH columns; further arms follow in a second table."""
NOT_ON_A_CPU = frozenset({formats.NOT_TIMED, "n/a (CPU run)", "n/a (not hooked)", "n/a (no graph)"})
"""A row of these alone says nothing; the line below the table says why."""
NOT_COMPILED = "not compiled"
REASON_LIMIT = 5
SAID_ALREADY = frozenset({"invalid", "failed", "skipped", "not-timed", "outputs-differ"})
"""Reasons of a verdict that its line, or the line of the arm below it, says in other words."""


def render(report: Report) -> str:
    """Overall verdict; per case the verdict of each pair of arms, then the metrics of every arm."""
    parts = [first_line(report), *(_case(view) for view in base.views(report))]
    parts += [wrapped(f"note: {base.redact(note)}", indent=6) for note in report.notes]
    return "\n\n".join(parts) + "\n"


def first_line(report: Report) -> str:
    """The overall verdict."""
    return wrapped(headline.overall(report), indent=2)


def verdict_block(view: CaseView, verdict: Verdict) -> str:
    """One pair of arms: outputs first, then speed, then memory, then the proof that graphs ran, then reasons."""
    lines = [wrapped(f"{view.name}: {verdict.b} against {verdict.a}", indent=2), _row("outputs", _outputs(verdict))]
    if view.timed:
        lines += [_row("speed", base.speed_phrase(verdict)), _row("memory", _memory(view, verdict))]
    arm = view.arms.get(verdict.b)
    if arm is not None and base.proof_of(arm) is not None:
        lines.append(_row("graphs", base.replay_phrase(arm)))
    if view.timed:
        lines.append(_row("pays", base.pays_phrase(view, view.arms.get(verdict.a), arm)))
    told = [reason for reason in verdict.reasons if reason.code != "not-timed"]  # the line below the metrics says it
    lines += [_row("why", base.reason_text(reason)) for reason in told[:REASON_LIMIT]]
    return "\n".join(lines)


def _case(view: CaseView) -> str:
    title = wrapped(view.title, indent=4)
    verdicts = [
        (verdict.b, _verdict_text(view, verdict)) for verdict in view.verdicts if view.timed or _of_eager(verdict)
    ]
    reasons = [
        (name, f" {record.status}: {base.reason_text(reason)}")
        for name, record in view.arms.items()
        for reason in record.reasons[:REASON_LIMIT]
    ]
    lines = [title, *_told_once(verdicts), *_told_once(reasons)]
    if not view.arms:
        return "\n".join([*lines, "  not run"])
    return "\n".join(part for part in (*lines, metrics_block(view)) if part)


def _of_eager(verdict: Verdict) -> bool:
    """Whether the pair has a baseline: without times, two graph arms side by side say nothing new."""
    return base.runner_of(verdict.a) in base.BASELINES


def _told_once(lines: list[tuple[str, str]]) -> Iterator[str]:
    """`  bcg, graph FAILED: ...`: arms of which the same is to be said share a line."""
    arms: dict[str, list[str]] = {}
    for arm, text in lines:
        arms.setdefault(text, []).append(arm)
    for text, names in arms.items():
        yield wrapped(f"  {', '.join(names)}{text}", indent=6)


def metrics_block(view: CaseView) -> str:
    """The metrics of every measured arm of a case side by side; "" where none was."""
    lines = list(_arm_tables(view))
    if lines and not view.timed:
        lines.append("  no times, launches or memory: a CPU (tape) run carries no speed")
    return "\n".join(lines)


def _verdict_text(view: CaseView, verdict: Verdict) -> str:
    parts = [f"outputs: {_outputs(verdict)}"]
    if view.timed:
        parts = [base.speed_phrase(verdict), *parts, f"peak memory {_memory(view, verdict)}"]
    new = [reason for reason in verdict.reasons if reason.code not in SAID_ALREADY]
    why = "".join(f"; {base.reason_text(reason)}" for reason in new[:REASON_LIMIT])
    return f" against {verdict.a}: " + " | ".join(parts) + why


def _outputs(verdict: Verdict) -> str:
    phrase = base.redact(base.one_line(verdict.fidelity)) or "not judged"
    if not verdict.padding:
        return phrase
    padding = base.one_line(verdict.padding)
    return f"{phrase}; " + ("padding changes nothing" if padding == "exact" else f"padding alone: {padding}")


def _memory(view: CaseView, verdict: Verdict) -> str:
    arms = (view.arms.get(verdict.a), view.arms.get(verdict.b))
    before, after = (base.metric_text(view, record, "peak_allocated_bytes") for record in arms)
    if before == after and verdict.memory_ratio is None:
        return before
    change = f" ({formats.ratio(verdict.memory_ratio)})" if verdict.memory_ratio is not None else ""
    if verdict.a not in view.arms:  # a run with another seed is another case, judged by the prior that it shares
        return after + change
    return f"{before} -> {after}{change}"


def _arm_tables(view: CaseView) -> Iterator[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    arms = [name for name, record in view.arms.items() if record.status not in ("FAILED", "SKIPPED")]
    for start in range(0, len(arms), ARMS_PER_TABLE):
        labels = arms[start : start + ARMS_PER_TABLE]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
        table.add_column("")
        for name in labels:
            table.add_column(base.one_line(name), justify="right", overflow="fold")
        for title, read in ROWS:
            cells = [read(view, view.arms[name]) for name in labels]
            nothing = {NOT_COMPILED} if view.timed else NOT_ON_A_CPU | {NOT_COMPILED}
            if not nothing.issuperset(cells):
                table.add_row(title, *cells)
        text = io.StringIO()
        console = Console(
            file=text, width=WIDTH - 2, color_system=None, force_terminal=False, markup=False, emoji=False
        )
        console.print(table)
        yield "\n".join(f"  {line}".rstrip() for line in text.getvalue().splitlines() if line.strip())


def _metric(name: str) -> Callable[[CaseView, Record], str]:
    return lambda view, record: base.metric_text(view, record, name)


def _interval(view: CaseView, record: Record) -> str:
    times = image_times(record)
    if not view.timed or record.status != "OK" or not times:
        return formats.NOT_TIMED
    interval = stats.order_statistic_interval(times)
    return formats.time_range(interval) if interval else "n/a (too few)"


def image_times(record: Record) -> list[float]:
    """Denoise seconds of every measured image, in the order measured, by the clock that the record's metric uses."""
    if clock_of(record) == "event":
        return [sample.denoise_event_s for sample in record.measured if sample.denoise_event_s is not None]
    return [sample.denoise_host_s for sample in record.measured]


def _of_graph(read: Callable[[Engagement], str]) -> Callable[[CaseView, Record], str]:
    def text(_: CaseView, record: Record) -> str:
        proof = base.proof_of(record)
        return read(proof) if proof else base.why_no_proof(record)

    return text


def _misses(proof: Engagement) -> str:
    return f"{sum(miss.count for miss in proof.misses)}, {proof.fallbacks}"


def _pays(view: CaseView, record: Record) -> str:
    eager = next((each for each in view.arms.values() if each.runner == "eager"), None)
    if not view.timed:
        return formats.NOT_TIMED
    return "reference" if record is eager else base.pays_phrase(view, eager, record)


def _graph_breaks(_: CaseView, record: Record) -> str:
    found = record.compilation
    if found is None:
        return NOT_COMPILED
    return f"{found.graph_breaks} in {formats.plural(found.graphs, 'graph')}"


def _exactness(view: CaseView, record: Record) -> str:
    if record.status != "OK":
        return "not judged"
    if record.accuracy is not None:
        return judge_record_outputs(record, rerun=answer(view.arms.values(), "rerun")).phrase.partition(":")[0]
    answers = {found.question: found.exact for found in record.fidelity}
    if "graph" not in answers:
        return "reference" if record.runner in ("eager", "eager-padded") else "not judged"
    return "exact" if answers["graph"] else "differ"


ROWS: tuple[tuple[str, Callable[[CaseView, Record], str]], ...] = (
    ("status", lambda _, record: record.status),
    ("denoise, median", _metric("denoise_s")),
    ("  95 % interval", _interval),
    ("images", lambda _, record: str(len(record.measured))),
    ("step, median", _metric("step_s")),
    ("step 0", _metric("step0_s")),
    ("end to end", _metric("end_to_end_s")),
    ("prepare (once)", _metric("prepare_s")),
    ("pays", _pays),
    ("graph breaks", _graph_breaks),
    ("hook per call", _metric("hook_s")),
    ("hook's share", _metric("hook_share")),
    ("launches per step", _metric("launches_per_step")),
    ("GPU busy", _metric("gpu_busy")),
    ("peak allocated", _metric("peak_allocated_bytes")),
    ("graph pool", _metric("pool_bytes")),
    ("captures", _of_graph(lambda proof: formats.arrow(proof.captures))),
    ("replays/expected", _of_graph(lambda proof: f"{proof.replays}/{proof.expected_forwards}")),
    ("misses, fallbacks", _of_graph(_misses)),
    ("outputs", _exactness),
)


def wrapped(text: str, *, indent: int) -> str:
    """Lines of at most WIDTH characters, all but the first indented; names are not broken at their hyphens."""
    return textwrap.fill(text, width=WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _row(name: str, text: str) -> str:
    return wrapped(f"  {name:<8} {text}", indent=11)
