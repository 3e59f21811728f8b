"""Behaviour of `bcgbench.verdict`: clocks, speed, arms that are not OK, exit codes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from bcgbench.thresholds import DEFAULTS, Thresholds
from bcgbench.types import Record, Sample
from bcgbench.verdict import compare, exit_code, judge, record_exit_code, speed_of, worst
from tests import factories as make
from tests.factories import GIB, codes, graph_record, inexact, record, samples, text, verdict


def on_tape(**changes: Any) -> Record:
    """A graph record replayed by the tape on a CPU."""
    return graph_record(backend="tape", case=make.case(device="cpu"), **changes)


def early_stop(**changes: Any) -> Record:
    """Host timer stopped at 26 ms of a 72 ms denoise; the rest is billed to decoding, so that stages add up."""
    times = {"denoise_event_s": 0.072, "denoise_host_s": 0.026, "before_s": 0.0, "after_s": 0.071}
    images = samples(runner="bcg", replays=40, **times, end_to_end_s=0.097)
    return graph_record(samples=images, denoise_flops=None, **changes)


def test_a_host_timer_stopped_too_early_is_a_timer_mismatch() -> None:
    """0.113 -> 0.026 s looked like 4.3x while the whole request went 0.138 -> 0.097 s."""
    found = judge(early_stop())
    assert found[0] == "INVALID"
    assert codes(found) == ["timer-mismatch"]
    assert "0.072 s against 0.026 s" in text(found)


def test_an_invalid_timer_is_never_quoted_as_a_speed() -> None:
    """The verdict of that record is INVALID with exit 4, without a ratio."""
    status, reasons = judge(early_stop())
    found = compare(record(denoise_s=0.113), early_stop(status=status, reasons=reasons))
    assert (found.speed, found.ratio, found.exit_code) == ("INVALID", None, 4)
    assert "timer-mismatch" in text(found)


@pytest.mark.parametrize(
    ("denoise_s", "gap_s", "status"),
    [(0.05, 0.0019, "OK"), (0.05, 0.0021, "INVALID"), (1.0, 0.0195, "OK"), (1.0, 0.0215, "INVALID")],
)
def test_clocks_may_differ_by_2_percent_or_2_ms(denoise_s: float, gap_s: float, status: str) -> None:
    """The larger of the two limits counts: 2 ms at 50 ms, 20 ms at 1 s."""
    one = make.sample(denoise_s=denoise_s)
    apart = replace(one, denoise_event_s=one.denoise_host_s - gap_s)
    assert judge(record(samples=(apart,) * 5))[0] == status


def test_one_odd_image_does_not_condemn_the_clocks() -> None:
    """The median over the images is judged."""
    measured = [*samples()]
    measured[0] = replace(measured[0], denoise_event_s=0.5)
    assert judge(record(samples=tuple(measured)))[0] == "OK"


def test_a_gpu_image_without_event_time_cannot_be_checked() -> None:
    """A missing second clock is a mismatch, not a pass."""
    assert codes(judge(record(samples=samples(denoise_event_s=None)))) == ["timer-mismatch"]


def test_stages_must_add_up_to_the_request() -> None:
    """50 ms of a 1.07 s request are in no stage."""
    measured = tuple(replace(s, end_to_end_s=s.end_to_end_s + 0.05) for s in samples())
    found = judge(record(samples=measured))
    assert found[0] == "INVALID"
    assert codes(found) == ["stages-do-not-add-up"]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_an_impossible_time_is_invalid(value: float) -> None:
    """Zero, negative and not-a-number never reach a logarithm."""
    assert "impossible-time" in codes(judge(record(samples=samples(denoise_event_s=value))))


def test_clocks_are_not_judged_on_a_cpu() -> None:
    """No events there, and noise of a shared CPU says nothing about correctness."""
    measured = tuple(replace(s, end_to_end_s=9.0) for s in samples(denoise_event_s=None))
    assert judge(record(case=make.case(device="cpu"), samples=measured))[0] == "OK"


@pytest.mark.parametrize("status", ["FAILED", "SKIPPED"])
def test_a_record_that_never_finished_keeps_status_and_reasons(status: Any) -> None:
    """Judging does not hide why."""
    why = (make.reason(code="out-of-memory", text="asked for 9 GiB"),)
    assert judge(graph_record(status=status, reasons=why, engagement=None)) == (status, why)


def test_judging_twice_gives_the_same_answer() -> None:
    """Reasons do not pile up, and an INVALID of other origin stays."""
    first = graph_record(engagement=make.engagement(fallbacks=3, captures=(2, 2, 3, 3)))
    status, reasons = judge(first)
    assert judge(replace(first, status=status, reasons=reasons)) == (status, reasons)
    aliased = (make.reason(code="aliased-output", text="request 1 was overwritten by request 2"),)
    assert judge(graph_record(status="INVALID", reasons=aliased)) == ("INVALID", aliased)


def test_twice_as_fast_is_faster_with_a_ratio_of_two() -> None:
    """Ratio a/b with its exact interval, exit 0."""
    found = compare(record(), graph_record())
    assert (found.speed, found.exit_code, found.reasons) == ("FASTER", 0, ())
    assert (found.a, found.b, found.pairs) == ("eager", "bcg", 10)
    assert found.ratio is not None
    assert found.ratio.centre == pytest.approx(2.0, rel=1e-3)
    assert found.ratio.low <= found.ratio.centre <= found.ratio.high


def test_slower_exits_1() -> None:
    """The same pair the other way round."""
    found = compare(record(), graph_record(denoise_s=1.1))
    assert (found.speed, found.exit_code) == ("SLOWER", 1)


def test_equal_arms_are_the_same() -> None:
    """The whole interval lies within 1 %."""
    assert compare(record(), graph_record(denoise_s=1.0)).speed == "SAME"


def test_a_real_but_small_effect_is_not_called_faster() -> None:
    """0.5 % without noise excludes 0 and stays below 1 %."""
    assert compare(record(), graph_record(denoise_s=1 / 1.005)).speed == "SAME"


def test_a_noisy_machine_raises_the_limit() -> None:
    """3 % is FASTER by default and SAME where A/A differs by 4 %."""
    assert compare(record(), graph_record(denoise_s=1 / 1.03)).speed == "FASTER"
    assert compare(record(), graph_record(denoise_s=1 / 1.03), floor=0.04).speed == "SAME"


def test_noise_is_inconclusive_and_says_how_many_pairs_would_do() -> None:
    """Ratios from 0.9 to 1.1: exit 0, and 5 only in strict mode."""
    noisy = [0.9, 1.1, 0.92, 1.08, 0.95, 1.05, 0.97, 1.1, 0.9, 1.02]
    found = compare(record(denoise_s=[1.0] * 10), graph_record(denoise_s=noisy))
    assert (found.speed, codes(found)) == ("INCONCLUSIVE", ["wide-interval"])
    assert "pairs would decide" in text(found)
    assert (found.exit_code, exit_code([found]), exit_code([found], strict=True)) == (0, 0, 5)


def test_an_interval_that_reaches_past_the_limit_on_either_side_is_not_the_same() -> None:
    """A median near 0 with possible 5 % either way decides nothing."""
    for sign in (1, -1):
        skewed = [sign * x for x in (0.0, 0.001, 0.001, 0.002, 0.002, 0.003, 0.04, 0.05, 0.05, 0.05)]
        assert speed_of(skewed, thresholds=DEFAULTS, floor=None).speed == "INCONCLUSIVE"


def test_pairs_are_asked_for_by_the_distance_to_the_nearest_decision() -> None:
    """The same spread needs few pairs at a median of 0 and many at a median just below the limit."""
    spread = (-0.02, -0.015, -0.012, -0.011, -0.01, 0.01, 0.011, 0.012, 0.015, 0.02)
    wanted = []
    for centre in (0.0, 0.0095):
        found = speed_of([x + centre for x in spread], thresholds=DEFAULTS, floor=None)
        wanted.append(int(found.reasons[0].text.split("about ")[1].split()[0]))
    assert wanted[0] == 20  # (1.96 * 1.2533 * 1.4826 * 0.012 / log(1.01))², rounded up
    assert wanted[1] == pytest.approx(16 * wanted[0], rel=0.1)


def test_five_common_rounds_are_too_few() -> None:
    """However clear they look: no exact 95 % interval exists."""
    found = compare(record(), graph_record(samples=samples(denoise_s=0.5, rounds=5, runner="bcg", replays=40)))
    assert (found.speed, found.ratio, found.pairs) == ("INCONCLUSIVE", None, 5)
    assert codes(found) == ["too-few-pairs"]


def test_arms_without_a_common_round_are_too_few_too() -> None:
    """Pairs are formed by round, never by position."""
    shifted = tuple(replace(s, round=s.round + 50) for s in graph_record().samples)
    assert codes(compare(record(), graph_record(samples=shifted))) == ["too-few-pairs"]


def test_the_tape_has_no_speed() -> None:
    """Fidelity and exit code stand; the time of a CPU is not quoted."""
    found = compare(record(case=make.case(device="cpu")), on_tape())
    assert (found.speed, found.ratio, found.exact, found.exit_code) == ("NOT-TIMED", None, True, 0)


def test_the_tape_has_no_speed_on_a_gpu_machine_either() -> None:
    """The replay decides, not the device; its clocks are not judged."""
    arm = graph_record(backend="tape", samples=samples(denoise_event_s=None, runner="bcg", replays=40))
    assert compare(record(), arm).speed == "NOT-TIMED"
    assert judge(arm) == ("OK", ())


def test_eager_on_a_cpu_has_no_speed_either() -> None:
    """Two CPU arms, no tape."""
    arm = record(case=make.case(device="cpu"))
    assert compare(arm, arm).speed == "NOT-TIMED"


def test_runs_that_were_not_interleaved_need_a_larger_effect() -> None:
    """Drift does not cancel between runs: 3 % is not called, 10 % is, and the reason says so."""
    other = {"run_id": "another"}
    small = compare(graph_record(), graph_record(denoise_s=0.5 / 1.03, **other))
    large = compare(graph_record(), graph_record(denoise_s=0.5 / 1.10, **other))
    assert (small.speed, large.speed) == ("SAME", "FASTER")
    assert codes(small) == codes(large) == ["not-interleaved"]


def test_the_speed_rule_is_a_function_of_log_ratios() -> None:
    """Ten times +2 % is FASTER, ten times -2 % SLOWER, none undecided."""
    assert speed_of([0.02] * 10, thresholds=DEFAULTS, floor=None).speed == "FASTER"
    assert speed_of([-0.02] * 10, thresholds=DEFAULTS, floor=None).speed == "SLOWER"
    assert speed_of([], thresholds=DEFAULTS, floor=None).speed == "INCONCLUSIVE"


def test_memory_is_a_ratio_and_a_limit_only_when_asked() -> None:
    """61 of 60 GiB: reported, and exit 1 past a limit of 1.01."""
    assert compare(record(), graph_record()).memory_ratio == pytest.approx(61 / 60)
    limited = compare(record(), graph_record(), thresholds=Thresholds(max_memory_ratio=1.01))
    assert (limited.exit_code, codes(limited)) == (1, ["memory-over-limit"])
    assert compare(record(memory=None), graph_record()).memory_ratio is None


@pytest.mark.parametrize(("status", "code"), [("INVALID", 4), ("FAILED", 7), ("SKIPPED", 6)])
@pytest.mark.parametrize("side", ["a", "b"])
def test_an_arm_that_is_not_ok_makes_no_verdict(status: Any, code: int, side: str) -> None:
    """On either side; the reason of the record is passed on."""
    why = (make.reason(code="out-of-memory", text="asked for 9 GiB"),)
    changes = {"status": status, "reasons": why}
    arms = (record(**changes), graph_record()) if side == "a" else (record(), graph_record(**changes))
    found = compare(*arms)
    assert (found.speed, found.exit_code) == ("INVALID", code)
    assert "asked for 9 GiB" in text(found)


def unstable() -> Record:
    """Eager that does not repeat itself: 52 dB in image 0."""
    return record(fidelity=(inexact(question="rerun"), make.fidelity(question="padding")))


def test_the_worst_code_wins_in_a_fixed_order() -> None:
    """Differs, invalid, slower, bad input, environment, nothing, inconclusive, fine."""
    order = [3, 4, 1, 2, 7, 6, 5, 0]
    assert [worst(order[i:]) for i in range(len(order))] == order
    assert worst([]) == 0


def test_no_verdict_is_6() -> None:
    """Nothing compared is not success."""
    assert exit_code([]) == 6


def test_exit_code_is_the_worst_of_all_verdicts() -> None:
    """One slower cell in a suite is enough."""
    assert exit_code([verdict(), verdict(speed="SLOWER", exit_code=1), verdict()]) == 1


@pytest.mark.parametrize(
    ("arms", "code"),
    [
        ([], 6),
        ([record(status="SKIPPED")], 6),
        ([record(), graph_record()], 0),
        ([record(), graph_record(status="SKIPPED")], 0),
        ([record(), graph_record(status="INVALID")], 4),
        ([record(), graph_record(status="FAILED")], 7),
        ([record(status="FAILED", reasons=(make.reason(code="usage"),))], 2),
        ([record(), graph_record(fidelity=(inexact(),))], 3),
        ([unstable(), graph_record(fidelity=(inexact(),))], 0),
    ],
)
def test_exit_code_of_a_run_comes_from_its_records(arms: list[Record], code: int) -> None:
    """Statuses and output checks; eager's own repeatability is the floor for the arms of its case."""
    assert record_exit_code(arms) == code


def test_the_floor_of_one_case_does_not_excuse_another() -> None:
    """An unstable eager at 512x512 says nothing at 1024x1024."""
    other = make.case(width_px=1024, height_px=1024)
    assert record_exit_code([unstable(), record(case=other), graph_record(case=other, fidelity=(inexact(),))]) == 3


def test_no_torch_is_imported() -> None:
    """Comparing works on a machine without it."""
    code = "import sys, bcgbench.verdict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_factories_are_consistent() -> None:
    """The standard values that all tests start from agree with each other."""
    one: Sample = make.sample()
    assert len(one.step_s) == make.case().steps
    assert graph_record().engagement.expected_forwards % one.forwards == 0  # type: ignore[union-attr]
    assert graph_record().memory.pool_bytes == GIB  # type: ignore[union-attr]
