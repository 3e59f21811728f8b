"""Whether a record can be believed, and what two of them say.

Here: `judge` (one arm), `compare` (two arms), exit codes. Not here: the limits (`thresholds.py`), how intervals are
computed (`stats.py`), what proves a replay (`engagement.py`), which fields must agree (`comparable.py`), how stored
differences are worded (`outputs.py`), how verdicts are shown (`reports/`). No I/O, no torch, no state.

Fidelity comes before speed, and speed before memory. "Unclear" is an allowed answer; a number that lacks its proof
(a graph arm without replays, a timer that disagrees with the other clock) is INVALID, not slow or fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bcgbench.comparable import comparable, interleaved
from bcgbench.engagement import CODES, INFORMATIONAL, engagement_reasons
from bcgbench.floor import floor_s
from bcgbench.gains import remarks
from bcgbench.metrics import denoise_times, outside_s, paired_log_ratios
from bcgbench.outputs import Outputs, answer, judge_across, judge_outputs, padding_phrase, size_phrase, worst_difference
from bcgbench.stats import median, order_statistic_interval, pairs_needed
from bcgbench.thresholds import DEFAULTS, Thresholds
from bcgbench.types import Fidelity, Interval, Reason, Record, Sample, Speed, Status, Verdict

SEVERITY = (3, 4, 1, 2, 7, 6, 5, 0)
"""Exit codes, worst first: wrong pictures, unbelievable figures, slower, bad input that only the model's process could
see, no environment, nothing, unclear, fine."""
_STATUS_EXIT = {"OK": 0, "INVALID": 4, "FAILED": 7, "SKIPPED": 6}
_JUDGED = CODES | {"impossible-time", "timer-mismatch", "stages-do-not-add-up", "below-compute-floor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFinding:
    """What the log ratios say. `interval` is in log units, None when there are too few pairs."""

    speed: Speed
    pairs: int
    interval: Interval | None = None
    reasons: tuple[Reason, ...] = ()


# --- one record -----------------------------------------------------------------------------------------------------


def judge(record: Record, *, thresholds: Thresholds = DEFAULTS) -> tuple[Status, tuple[Reason, ...]]:
    """Status and reasons of a finished arm. FAILED and SKIPPED stay; reasons of other origin are kept.

    Judging a judged record gives the same answer. Clocks are not judged where speed is not (tape, CPU).
    """
    if record.status in ("FAILED", "SKIPPED"):
        return record.status, record.reasons
    found = (*engagement_reasons(record), *(_timer_reasons(record, thresholds) if is_timed(record) else ()))
    kept = tuple(r for r in record.reasons if r.code not in _JUDGED)
    invalid = any(r.code not in INFORMATIONAL for r in found) or (record.status == "INVALID" and bool(kept))
    return ("INVALID" if invalid else "OK"), (*kept, *found)


def is_timed(record: Record) -> bool:
    """Whether times of this record are speed: on a GPU, and not replayed by the tape."""
    return record.backend != "tape" and record.case.device.startswith("cuda")


def _timer_reasons(record: Record, limits: Thresholds) -> Iterable[Reason]:
    measured = record.measured
    if not measured:
        return
    if bad := [s.round for s in measured if not _times_possible(s)]:
        yield Reason(code="impossible-time", text=f"times that are not finite and above 0 in rounds {bad}")
    events = [(s.denoise_event_s, s.denoise_host_s) for s in measured if s.denoise_event_s is not None]
    if len(events) < len(measured):
        text = f"{len(measured) - len(events)} images on a GPU have no CUDA-event time to check the host clock with"
        yield Reason(code="timer-mismatch", text=text)
    elif gap := _mismatch(events, limits):
        text = f"denoise by CUDA events against the host clock: {gap}; one of them stopped too early"
        yield Reason(code="timer-mismatch", text=text)
    stages = [(s.before_s + s.denoise_host_s + s.after_s, s.end_to_end_s) for s in measured]
    if gap := _mismatch(stages, limits):
        yield Reason(code="stages-do-not-add-up", text=f"before + denoise + after against the whole request: {gap}")
    least_s, shortest_s = floor_s(record), min(denoise_times(record).values())
    if least_s is not None and shortest_s < least_s:
        text = f"denoise in {shortest_s:.4g} s is impossible: its {record.denoise_flops:.4g} FLOP take {least_s:.4g} s "
        yield Reason(code="below-compute-floor", text=text + "at the GPU's dense peak; the timer stopped too early")


def _times_possible(sample: Sample) -> bool:
    spans = [sample.denoise_host_s, sample.end_to_end_s]
    spans += [sample.denoise_event_s] if sample.denoise_event_s is not None else []
    return all(math.isfinite(x) and x > 0 for x in spans)


def _mismatch(pairs: Sequence[tuple[float, float]], limits: Thresholds) -> str:
    """Phrase when the median of |x - y| over the images is above max(relative of y, absolute), else ""."""
    gap_s = median([abs(x - y) for x, y in pairs])
    y_s = median([y for _, y in pairs])
    limit_s = max(limits.timer_relative * y_s, limits.timer_absolute_s)
    x_s = median([x for x, _ in pairs])
    return f"{x_s:.4g} s against {y_s:.4g} s, {gap_s:.2g} s apart, limit {limit_s:.2g} s" if gap_s > limit_s else ""


def compare(
    a: Record,
    b: Record,
    *,
    thresholds: Thresholds = DEFAULTS,
    floor: float | None = None,
    rerun: Fidelity | None = None,
) -> Verdict:
    """Judge arm `b` against arm `a`. Ratios are a/b: above 1, b is faster.

    `floor` is the A/A floor measured on this machine (0.004 is 0.4 %). `rerun` is eager's own repeatability where
    neither record carries it.
    """
    refused = (*_unbelievable(a), *_unbelievable(b), *comparable(a, b), *_moved(a, b, thresholds))
    speed = SpeedFinding(speed="INVALID", pairs=0, reasons=refused) if refused else _speed(a, b, thresholds, floor)
    known = answer((a, b), "rerun") or rerun
    outputs = judge_record_outputs(b, thresholds, rerun=known)
    if a.run_id != b.run_id:
        outputs = judge_across(a, b, own=outputs, refused=refused, stable=known is None or known.exact)
    over = tuple(_limits_passed(a, b, thresholds, rerun=known))
    remarked = remarks(a, b, speed.speed, least_bytes=thresholds.remarked_bytes, kernels=thresholds.remarked_kernels)
    statuses = [_status_exit(r) for r in (a, b)]
    own = 4 if refused and not any(statuses) else int(speed.speed == "SLOWER")
    return Verdict(
        case=b.case,
        a=a.runner,
        b=b.runner,
        speed=speed.speed,
        ratio=speed.interval and _exponential(speed.interval),
        pairs=speed.pairs,
        exact=outputs.exact,
        fidelity=outputs.phrase,
        padding=padding_phrase(answer((b, a), "padding")),
        memory_ratio=_memory_ratio(a, b),
        reasons=(*outputs.reasons, *speed.reasons, *(reason for _, reason in over), *remarked),
        exit_code=worst([outputs.exit_code, *statuses, own, *(code for code, _ in over)]),
    )


def judge_record_outputs(record: Record, limits: Thresholds = DEFAULTS, *, rerun: Fidelity | None = None) -> Outputs:
    """Whether an arm computes what eager does, by the limits."""
    ratio = limits.max_error_ratio if record.case.dtype == "float32" else limits.max_error_ratio_half
    return judge_outputs(record, rerun=rerun, margin_db=limits.floor_margin_db, max_error_ratio=ratio)


def _status_exit(record: Record) -> int:
    asked_wrongly = record.status == "FAILED" and any(reason.code == "usage" for reason in record.reasons)
    return 2 if asked_wrongly else _STATUS_EXIT[record.status]


def _unbelievable(record: Record) -> tuple[Reason, ...]:
    if record.status == "OK":
        return ()
    why = "; ".join(f"{r.code}: {r.text}" for r in record.reasons) or "no reason recorded"
    return (Reason(code=record.status.lower(), text=f"{record.runner} is {record.status}: {why}"),)


def _moved(a: Record, b: Record, limits: Thresholds) -> Iterable[Reason]:
    """Time that left the denoise span of one arm and stands outside it in the other: billed to another stage."""
    a_s, b_s = outside_s(a), outside_s(b)
    if a_s is None or b_s is None or not (is_timed(a) and is_timed(b)):
        return
    if abs(a_s - b_s) > max(limits.moved_relative * min(a_s, b_s), limits.moved_absolute_s):
        text = f"outside the denoise span {a.runner} takes {a_s:.4g} s and {b.runner} {b_s:.4g} s, where both do the "
        yield Reason(code="time-moved", text=text + "same work: denoise time was billed to another stage")


def _speed(a: Record, b: Record, limits: Thresholds, floor: float | None) -> SpeedFinding:
    if not (is_timed(a) and is_timed(b)):
        text = "a CPU or the tape replays the same arithmetic, but its times say nothing about a GPU"
        return SpeedFinding(speed="NOT-TIMED", pairs=0, reasons=(Reason(code="not-timed", text=text),))
    if interleaved(a, b):
        return speed_of(paired_log_ratios(a, b), thresholds=limits, floor=floor)
    found = speed_of(paired_log_ratios(a, b), thresholds=limits, floor=max(floor or 0.0, limits.cross_run_effect))
    text = f"measured by two processes, not in turn: only differences above {limits.cross_run_effect:.0%} are called"
    return replace(found, reasons=(Reason(code="not-interleaved", text=text), *found.reasons))


def speed_of(log_ratios: Sequence[float], *, thresholds: Thresholds = DEFAULTS, floor: float | None) -> SpeedFinding:
    """The speed rule, on log(a/b) per pair: the median must be outside chance and outside what does not matter.

    FASTER or SLOWER: the exact interval of the median excludes 0 and the median is at least log(1 + max(min_effect,
    floor)). SAME: the whole interval is inside that limit. Else INCONCLUSIVE, with an estimate of the pairs needed.
    """
    pairs = len(log_ratios)
    interval = order_statistic_interval(log_ratios, confidence=thresholds.confidence)
    if pairs < thresholds.min_pairs or interval is None:
        text = f"{pairs} rounds were measured by both arms, at least {thresholds.min_pairs} are needed"
        reason = Reason(code="too-few-pairs", text=text)
        return SpeedFinding(speed="INCONCLUSIVE", pairs=pairs, reasons=(reason,))
    limit = math.log1p(max(thresholds.min_effect, floor or 0.0))
    if abs(interval.centre) >= limit and interval.low * interval.high > 0:
        return SpeedFinding(speed="FASTER" if interval.centre > 0 else "SLOWER", pairs=pairs, interval=interval)
    if -limit < interval.low and interval.high < limit:
        return SpeedFinding(speed="SAME", pairs=pairs, interval=interval)
    return SpeedFinding(
        speed="INCONCLUSIVE", pairs=pairs, interval=interval, reasons=(_unclear(log_ratios, interval, limit),)
    )


def _unclear(log_ratios: Sequence[float], interval: Interval, limit: float) -> Reason:
    # To decide, the interval must reach neither 0 (from a large median) nor the limit (from a small one). A median
    # right at the limit would ask for endless pairs, so a quarter of the limit is precise enough.
    size = abs(interval.centre)
    effect = max(size if size >= limit else limit - size, limit / 4)
    wanted = max(len(log_ratios) + 1, pairs_needed(log_ratios, effect=effect))
    shown = _exponential(interval)
    text = f"ratio {shown.centre:.4f}, interval {shown.low:.4f} to {shown.high:.4f}, limit {math.exp(limit):.4f}; "
    return Reason(code="wide-interval", text=text + f"about {wanted} pairs would decide")


def _exponential(interval: Interval) -> Interval:
    low, centre, high = (math.exp(x) for x in (interval.low, interval.centre, interval.high))
    return replace(interval, low=low, centre=centre, high=high)


def _memory_ratio(a: Record, b: Record) -> float | None:
    peaks = [r.memory.peak_allocated_bytes if r.memory else None for r in (a, b)]
    return peaks[1] / peaks[0] if peaks[0] and peaks[1] is not None else None


def _limits_passed(a: Record, b: Record, limits: Thresholds, *, rerun: Fidelity | None) -> Iterable[tuple[int, Reason]]:
    ratio = _memory_ratio(a, b)
    if limits.max_memory_ratio is not None and ratio is not None and ratio > limits.max_memory_ratio:
        text = f"peak memory is {ratio:.3f} times that of {a.runner}, limit {limits.max_memory_ratio:.3f}"
        yield 1, Reason(code="memory-over-limit", text=text)
    padding = answer((b, a), "padding")
    worst_call = padding.worst_call if padding else None
    if b.case.dtype == "float32" and worst_call and worst_call.data_range:
        own = rerun.worst_call.max_abs if rerun and rerun.worst_call else 0.0  # what eager does to itself, not padding
        share = (worst_call.max_abs - own) / (worst_call.data_range / 2)
        if share > limits.max_padding_float32:
            text = f"padding changes {worst_call.name} by {share:.2g} of its size in float32, limit "
            yield 3, Reason(code="padding-over-limit", text=f"{text}{limits.max_padding_float32:g}; is a mask missing?")
    found = padding and worst_difference(padding.finals)
    least_db = limits.min_padding_psnr_db
    if least_db is not None and found and (found.psnr_db is None or found.psnr_db < least_db):
        text = f"padding alone changes the output: {size_phrase(found)}, at least {least_db:.1f} dB wanted"
        yield 3, Reason(code="padding-over-limit", text=text)


def worst(codes: Iterable[int]) -> int:
    """The exit code that outranks the others in `SEVERITY`; 0 for none. ValueError for a code that is not listed."""
    return min(codes, key=SEVERITY.index, default=0)


def exit_code(verdicts: Sequence[Verdict], *, strict: bool = False) -> int:
    """Exit code of a comparison; 6 when there is no verdict. Only `strict` turns INCONCLUSIVE into 5."""
    unclear = [5 for v in verdicts if strict and v.speed == "INCONCLUSIVE"]
    return worst([*(v.exit_code for v in verdicts), *unclear]) if verdicts else 6


def record_exit_code(records: Sequence[Record], *, thresholds: Thresholds = DEFAULTS) -> int:
    """Exit code of a run: 6 when nothing was measured, else the worst of statuses and output checks of all arms."""
    if all(r.status == "SKIPPED" for r in records):
        return 6
    codes = [_status_exit(r) for r in records if r.status != "SKIPPED"]
    for record in records:
        rerun = answer((r for r in records if r.case.key == record.case.key), "rerun")
        codes.append(judge_record_outputs(record, thresholds, rerun=rerun).exit_code)
    return worst(codes)
