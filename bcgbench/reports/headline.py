"""The first line of a report: the outcome in words, then speed, outputs and graph use over all deciding verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bcgbench.reports import base, formats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bcgbench.reports.base import Report
    from bcgbench.types import Record, Verdict

OUTCOMES = {
    0: "PASS",
    1: "SLOWER",
    2: "BAD INPUT",
    3: "OUTPUTS DIFFER",
    4: "INVALID",
    5: "INCONCLUSIVE",
    6: "NOTHING MEASURED",
    7: "FAILED",
}
"""Exit code -> the words a report opens with."""

UNFINISHED = "UNFINISHED"
"""Where arms that were asked for were interrupted or have no record, and what there is is fine."""


def overall(report: Report) -> str:
    """`PASS: 1 case; bcg against eager FASTER 2.64x [2.60, 2.68], n = 10 pairs; outputs exact; replays 400/400`."""
    code = base.exit_code(report)
    outcome = UNFINISHED if _is_part(report, code=code) else OUTCOMES.get(code, "FAILED")
    verdicts = base.gating(report)
    judged = _speed_summary(verdicts), _fidelity_summary(base.of_arms(report))
    parts = (
        formats.plural(len(base.views(report)), "case"),
        *_bad_arms(report, verdicts),
        _missing(report),
        *(judged if verdicts else ("no pair of arms to compare",)),
        _replay_summary(report),
    )
    return f"{outcome}: " + "; ".join(part for part in parts if part)


def _is_part(report: Report, *, code: int) -> bool:
    if code == 0:
        return bool(report.missing)
    failed = (record for record in report.records if record.status == "FAILED")
    only_interrupted = {_code(record) for record in failed} == {"interrupted"}
    return only_interrupted and OUTCOMES.get(code) == "FAILED"


def _code(record: Record) -> str:
    return base.first_reason(record).partition(":")[0]


def _missing(report: Report) -> str:
    arms = ", ".join(dict.fromkeys(arm for _, arm in report.missing))
    return f"{formats.plural(len(report.missing), 'arm')} not run ({arms})" if report.missing else ""


def _bad_arms(report: Report, verdicts: tuple[Verdict, ...]) -> Iterator[str]:
    """`2 arms FAILED (out-of-memory: bcg, graph)`; INVALID ones only where no verdict tells of them."""
    told = {("INVALID", v.case.key, base.runner_of(arm)) for v in verdicts for arm in (v.a, v.b)}
    for status in ("FAILED", "INVALID", "SKIPPED"):
        bad = [r for r in report.records if r.status == status and (status, r.case.key, r.runner) not in told]
        by_reason: dict[str, dict[str, None]] = {}
        for record in bad:
            by_reason.setdefault(_code(record), {})[record.runner] = None
        if bad:
            reasons = "; ".join(f"{code}: {', '.join(runners)}" for code, runners in by_reason.items())
            yield f"{formats.plural(len(bad), 'arm')} {status} ({reasons})"


def _speed_summary(verdicts: tuple[Verdict, ...]) -> str:
    if all(verdict.speed == "NOT-TIMED" for verdict in verdicts):
        return "speed not timed on a CPU"
    by_arms: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_arms.setdefault(f"{verdict.b} against {verdict.a}", []).append(verdict)
    return "; ".join(f"{arms} {_speeds(group)}" for arms, group in by_arms.items())


def _speeds(group: list[Verdict]) -> str:
    if len(group) == 1:
        return base.speed_phrase(group[0])
    by_speed: dict[str, list[Verdict]] = {}
    for verdict in group:
        by_speed.setdefault(verdict.speed, []).append(verdict)
    return ", ".join(f"{len(same)} {speed}{_ratio_span(same)}" for speed, same in by_speed.items())


def _ratio_span(group: list[Verdict]) -> str:
    centres = sorted(verdict.ratio.centre for verdict in group if verdict.ratio)
    if not centres or group[0].speed not in ("FASTER", "SLOWER"):
        return ""
    low, high = formats.ratio(centres[0]), formats.ratio(centres[-1])
    return f" ({low})" if low == high else f" ({low} to {high})"


def _fidelity_summary(verdicts: tuple[Verdict, ...]) -> str:
    judged = [verdict for verdict in verdicts if verdict.exact is not None]
    if not judged:
        return "outputs not judged"
    exact = sum(verdict.exact is True for verdict in judged)
    asked = [v for v in verdicts if v.exact is not None or base.runner_of(v.b) not in base.BASELINES]
    within = sum(verdict.fidelity.startswith("within tolerance") for verdict in asked)
    more = f", within tolerance in {within}" if within else ""
    return "outputs exact" if exact == len(asked) else f"outputs exact in {exact} of {len(asked)}{more}"


def _replay_summary(report: Report) -> str:
    proofs = [proof for record in report.records if (proof := base.proof_of(record))]
    expected = sum(proof.expected_forwards for proof in proofs)
    return f"replays {sum(proof.replays for proof in proofs)}/{expected}" if expected else ""
