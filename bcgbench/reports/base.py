"""What every format shares: the Report value, its cases, exit code, phrases, redaction. No layout here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bcgbench import verdict as judge
from bcgbench.metrics import METRICS, break_even_images
from bcgbench.reports import formats

if TYPE_CHECKING:
    from bcgbench.types import Case, Engagement, Reason, Record, RunInfo, Verdict

BASELINES = ("eager", "eager-padded", "untouched")
"""Arms that compute without a graph: references, never the thing under test."""

RIVALS = ("eager-best", "compile", "compile-cudagraph", "compile-autotune")
"""What graphs are held against: that one of them is slow is no failure of a run."""

HOOK_METRICS = frozenset({"hook_s", "hook_share"})
GRAPH_METRICS = frozenset({"prepare_s", "signature_s", "growth_bytes", "captures", "replays", "graph_nodes"})
PROFILE_METRICS = frozenset({"launches_per_step", "kernels_per_step", "gpu_busy"})

TINY = "tiny/"
"""Ids of models that exist only with seeded random weights."""

_URL_OR_PRIVATE = re.compile(
    r"(?P<url>https?://\S+)"
    r"|(?P<path>(?<![\w.~/-])(?:~[\w.-]*|\.\.?|[A-Za-z]:)?[/\\](?:[\w.@+~-]+[/\\]?)+(?:\.\.\.)?)"
    r"|(?P<login>\b[\w.-]+@[\w.-]+)"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is reported: the header of a run, the newest record of every arm, the verdicts on pairs of arms."""

    info: RunInfo
    records: tuple[Record, ...]
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the reader, e.g. that a run was interrupted."""
    strict: bool = False
    """Whether an inconclusive verdict counts as a failure (exit code 5)."""
    missing: tuple[tuple[str, str], ...] = ()
    """Case key and runner of every arm that was asked for and has no record, where that was to be expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseView:
    """One case with its arms by label. A label is the runner, with the run added where several runs are shown."""

    case: Case
    arms: dict[str, Record]
    verdicts: tuple[Verdict, ...]

    @property
    def timed(self) -> bool:
        """Whether times may be quoted: not on a CPU, and not where any arm ran on a tape."""
        return self.case.device != "cpu" and all(record.backend != "tape" for record in self.arms.values())

    @property
    def synthetic(self) -> bool:
        """Whether weights were random, as those of every tiny model are."""
        is_random = self.case.weights == "random" or self.case.model.startswith(TINY)
        return is_random or any(record.synthetic for record in self.arms.values())

    @property
    def title(self) -> str:
        """The name, with what a reader must know before any figure: weights that are not real, nobody's adapter."""
        unvalidated = any("adapter" in record.settings for record in self.arms.values())
        remarks = ["synthetic weights"] * self.synthetic + ["model not validated"] * unvalidated
        return self.name + (f" ({', '.join(remarks)})" if remarks else "")

    @property
    def name(self) -> str:
        """How the case is called."""
        return case_name(self.case)


def case_name(case: Case) -> str:
    """`Qwen/Qwen-Image @ 512x512`, without control characters; with `, cfg:2` where processes share a request."""
    shared = "" if case.parallel == "none" else f", {one_line(case.parallel)}"
    return f"{model_name(case)} @ {case.resolution}{shared}"


def model_name(case: Case) -> str:
    """The model's id; of a local folder only its own name, because a report is made to be published."""
    name = one_line(case.model)
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if redact(name) != name else name


def label(record: Record, *, run_ids: frozenset[str]) -> str:
    """How an arm is called in a report that shows the given runs."""
    return record.runner if len(run_ids) < 2 else arm_of_run(record)  # noqa: PLR2004 - one or several


def arm_of_run(record: Record) -> str:
    """`bcg of 20261129T151200Z-smoke-0a1b2c3d`."""
    return f"{record.runner} of {record.run_id}"


def runner_of(arm: str) -> str:
    """The runner of either kind of label."""
    return arm.partition(" of ")[0]


def views(report: Report) -> tuple[CaseView, ...]:
    """The cases of a report in the order of its records, then those of the header that have no record."""
    run_ids = frozenset(record.run_id for record in report.records)
    cases = {record.case.key: record.case for record in report.records}
    cases |= {case.key: case for case in report.info.cases if case.key not in cases}
    return tuple(
        CaseView(
            case=case,
            arms={label(r, run_ids=run_ids): r for r in report.records if r.case.key == key},
            verdicts=tuple(v for v in report.verdicts if v.case.key == key),
        )
        for key, case in cases.items()
    )


def gating(report: Report) -> tuple[Verdict, ...]:
    """The verdicts that decide the exit code: those on graph arms against a baseline, or whatever was asked for.

    An arm like eager-padded is slower by design, and a BCG arm a percent behind the whole graph is no failure.
    """
    deciding = tuple(
        v for v in report.verdicts if runner_of(v.a) in BASELINES and runner_of(v.b) not in BASELINES + RIVALS
    )
    return deciding or report.verdicts


def exit_code(report: Report) -> int:
    """The worst of verdicts and records; 6 when there is no record at all."""
    if not report.records:
        return 6
    codes = [judge.record_exit_code(report.records)]
    if report.verdicts:
        codes.append(judge.exit_code(gating(report), strict=report.strict))
    return judge.worst(codes)


def speed_phrase(verdict: Verdict) -> str:
    """`FASTER 2.64x [2.60, 2.68], n = 10 pairs`, or why there is no ratio."""
    if verdict.speed == "NOT-TIMED":
        return "not timed"
    if verdict.ratio is None:
        return verdict.speed
    return f"{verdict.speed} {formats.ratio_with_interval(verdict.ratio)}, n = {formats.plural(verdict.pairs, 'pair')}"


def replay_phrase(record: Record) -> str:
    """`replays 400/400, captures 5 -> 5 -> 5, 0 misses, 0 fallbacks`: the proof that graphs ran."""
    proof = proof_of(record)
    if proof is None:
        return why_no_proof(record)
    misses = sum(miss.count for miss in proof.misses)
    return (
        f"replays {proof.replays}/{proof.expected_forwards}, captures {formats.arrow(proof.captures)}, "
        f"{formats.plural(misses, 'miss')}, {formats.plural(proof.fallbacks, 'fallback')}"
    )


def proof_of(record: Record) -> Engagement | None:
    """The engagement of a graph arm; a baseline's counts nothing but zeros and proves nothing."""
    return None if record.backend == "none" else record.engagement


def why_no_proof(record: Record) -> str:
    """`no graph` of a baseline, else why a graph arm has no proof."""
    return "no graph" if record.status == "OK" else formats.missing(status_phrase(record))


def metric_text(view: CaseView, record: Record | None, name: str) -> str:
    """A metric of one arm with its unit; `-` for times that may not be quoted, `n/a` with the reason where missing."""
    if record is None:
        return formats.missing("arm not run")
    metric = METRICS[name]
    is_time = metric.unit == "s" or name in HOOK_METRICS  # a share of a time that means nothing means nothing
    if is_time and not view.timed:
        return formats.NOT_TIMED
    if is_time and record.status != "OK":  # an invalid time is in the JSON, never where it could be quoted
        return formats.missing(status_phrase(record))
    value = metric.read(record)
    return formats.missing(why_missing(record, name)) if value is None else with_unit(value, metric.unit)


def pays_phrase(view: CaseView, a: Record | None, b: Record | None) -> str:
    """`after 23 images of 4 steps`: when the time that b took to prepare is saved; `never` where it saves none."""
    images = break_even_images(a, b) if view.timed and a is not None and b is not None else None
    if images is None:
        return formats.NOT_TIMED if not view.timed else formats.missing("not both measured")
    if math.isinf(images):
        return "never"
    return f"after {formats.plural(math.ceil(images), 'image')} of {formats.plural(view.case.steps, 'step')}"


def with_unit(value: float, unit: str) -> str:
    """A value in the text form of its metric's unit."""
    if unit == "s":
        return formats.seconds(value)
    if unit == "bytes":
        return formats.size(value)
    if unit == "ratio":
        return formats.percent(value)
    return formats.count(value)


def status_phrase(record: Record) -> str:
    """`FAILED: out-of-memory`."""
    return f"{record.status}: {first_reason(record).split(':')[0]}"


def why_missing(record: Record, name: str) -> str:
    """The shortest true reason for a metric that a record lacks."""
    if record.case.device == "cpu" and name not in HOOK_METRICS | GRAPH_METRICS:
        return "CPU run"
    if record.status != "OK":
        return status_phrase(record)
    if name in HOOK_METRICS and record.hook_s is None:
        return "not hooked"
    if name in GRAPH_METRICS and record.backend == "none":
        return "no graph"
    return "not profiled" if name in PROFILE_METRICS and record.profile is None else "not recorded"


def first_reason(record: Record) -> str:
    """`code: text` of the first reason, redacted."""
    return reason_text(record.reasons[0]) if record.reasons else "no reason given"


def reason_text(reason: Reason) -> str:
    """`code: text`, redacted and on one line."""
    return f"{reason.code}: {redact(one_line(reason.text))}"


def one_line(text: str) -> str:
    """Text without control characters: newlines and escape sequences must not shape a report."""
    return _CONTROL.sub(" ", text).strip()


def redact(text: str) -> str:
    """Text with local paths and `user@host` replaced; model ids such as `Qwen/Qwen-Image` and URLs stay."""

    def replace(match: re.Match[str]) -> str:
        if match["url"]:
            return match[0]
        return "<path>" if match["path"] else "<login>"

    return _URL_OR_PRIVATE.sub(replace, text)
