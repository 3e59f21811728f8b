"""Behaviour of `bcgbench.stats`, and of the speed rule under simulated noise."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcgbench import stats
from bcgbench.thresholds import DEFAULTS
from bcgbench.verdict import speed_of


def test_median_of_even_count_is_the_mean_of_the_middle_two() -> None:
    """Four values give the mean of the second and third."""
    assert stats.median([4.0, 1.0, 3.0, 100.0]) == 3.5


def test_median_of_nothing_is_an_error() -> None:
    """No value in place of a missing one."""
    with pytest.raises(ValueError, match="no values"):
        stats.median([])


def test_two_arms_run_abba() -> None:
    """Two rounds of two arms are A B, B A."""
    assert stats.abba_order(("a", "b"), 0) + stats.abba_order(("a", "b"), 1) == ("a", "b", "b", "a")


@given(count=st.integers(1, 6))
def test_all_arms_share_a_mean_position_over_two_rounds(count: int) -> None:
    """So a linear drift cancels between any two arms."""
    arms = [str(i) for i in range(count)]
    slots = stats.abba_order(arms, 4) + stats.abba_order(arms, 5)
    assert {sum(i for i, x in enumerate(slots) if x == arm) for arm in arms} == {2 * count - 1}


def test_log_ratio_is_positive_when_b_is_faster() -> None:
    """a takes 2 s and b 1 s: log 2."""
    assert stats.log_ratios([2.0], [1.0]) == (pytest.approx(math.log(2)),)


def test_log_ratios_refuse_unequal_counts_and_impossible_times() -> None:
    """Unpaired values and times of zero raise instead of being dropped."""
    with pytest.raises(ValueError, match="got 2 and 1"):
        stats.log_ratios([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="above 0"):
        stats.log_ratios([1.0], [0.0])


@pytest.mark.parametrize(
    ("n", "ranks"), [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (15, (4, 12)), (20, (6, 15))]
)
def test_interval_uses_the_tabulated_ranks(n: int, ranks: tuple[int, int]) -> None:
    """Ranks of the 95 % sign-test interval as in published tables."""
    found = stats.order_statistic_interval([float(i) for i in range(1, n + 1)])
    assert found is not None
    assert (found.low, found.high) == ranks


@pytest.mark.parametrize("n", range(6))
def test_fewer_than_six_values_have_no_exact_interval(n: int) -> None:
    """Five values reach 93.75 %, which is not 95 %."""
    assert stats.order_statistic_interval([1.0] * n) is None


def test_five_values_have_an_interval_at_90_percent() -> None:
    """The least count follows from the confidence asked for."""
    found = stats.order_statistic_interval([5.0, 1.0, 4.0, 2.0, 3.0], confidence=0.9)
    assert found is not None
    assert (found.low, found.centre, found.high) == (1.0, 3.0, 5.0)


def test_method_names_ranks_and_exact_coverage() -> None:
    """1 - 2 * (1 + 10) / 1024 at ten values."""
    found = stats.order_statistic_interval([float(i) for i in range(10)])
    assert found is not None
    assert found.method == "order statistics 2 and 9 of 10, coverage 0.9785"


@given(st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=40))
def test_interval_encloses_the_median_whatever_the_order(values: list[float]) -> None:
    """Low <= median <= high, and sorting the input changes nothing."""
    found = stats.order_statistic_interval(values)
    assert found is not None
    assert found.low <= found.centre <= found.high
    assert found == stats.order_statistic_interval(sorted(values))


def test_interval_ignores_one_wild_outlier() -> None:
    """One value a thousand times too large does not move the upper end at ten values."""
    quiet = [1.0 + i / 1000 for i in range(10)]
    loud = [*quiet[:-1], 1000.0]
    a, b = stats.order_statistic_interval(quiet), stats.order_statistic_interval(loud)
    assert a is not None
    assert b is not None
    assert a.high == b.high


def test_coverage_holds_for_skewed_noise() -> None:
    """Over 2,000 exponential samples of 10 the true median is covered in at least 95 %."""
    generator, truth, hits = random.Random(1), math.log(2), 0
    for _ in range(2000):
        found = stats.order_statistic_interval([generator.expovariate(1) for _ in range(10)])
        hits += found is not None and found.low <= truth <= found.high
    assert hits / 2000 == pytest.approx(0.9785, abs=0.01)


def test_pairs_needed_grows_with_the_square_of_the_precision() -> None:
    """Half the effect asks for four times the pairs; no spread asks for the minimum."""
    noisy = [0.01 * (-1) ** i * (1 + i % 3) for i in range(12)]
    assert stats.pairs_needed(noisy, effect=0.005) == pytest.approx(4 * stats.pairs_needed(noisy, effect=0.01), abs=4)
    assert stats.pairs_needed([0.02] * 5, effect=0.01) == 6


def test_pairs_needed_refuses_no_effect() -> None:
    """Certainty about nothing would need endless pairs."""
    with pytest.raises(ValueError, match="effect"):
        stats.pairs_needed([0.1, 0.2], effect=0.0)


@cache
def simulated_speeds(*, effect: float, pairs: int, runs: int, min_effect: float = 0.01) -> dict[str, float]:
    """Share of each verdict over simulated ABBA runs: 0.5 % noise, 5 % outliers of +3..15 %, drift within +-3 %."""
    generator = random.Random(f"{effect} {pairs}")
    limits = type(DEFAULTS)(min_effect=min_effect)
    counts: dict[str, int] = {}
    for _ in range(runs):
        amplitude, phase, turns = generator.uniform(-0.03, 0.03), generator.uniform(0, 6.28), generator.uniform(0.1, 2)
        times: dict[str, list[float]] = {"a": [], "b": []}
        for index in range(pairs):
            for position, arm in enumerate(stats.abba_order(("a", "b"), index)):
                moment = (2 * index + position) / (2 * pairs)
                seconds = (1.0 if arm == "a" else 1 / (1 + effect)) * (1 + generator.gauss(0, 0.005))
                seconds *= 1 + amplitude * math.sin(phase + 2 * math.pi * turns * moment)
                outlier = generator.uniform(0.03, 0.15) if generator.random() < 0.05 else 0.0
                times[arm].append(seconds * (1 + outlier))
        speed = speed_of(stats.log_ratios(times["a"], times["b"]), thresholds=limits, floor=None).speed
        counts[speed] = counts.get(speed, 0) + 1
    return {speed: count / runs for speed, count in counts.items()}


def test_equal_arms_get_a_false_verdict_in_at_most_5_percent() -> None:
    """1,000 A/A runs of 10 pairs at the default minimum effect of 1 %."""
    shares = simulated_speeds(effect=0.0, pairs=10, runs=1000)
    assert shares.get("FASTER", 0) + shares.get("SLOWER", 0) <= 0.05


def test_the_interval_alone_keeps_false_verdicts_within_5_percent() -> None:
    """Without a minimum effect too, so the rule does not lean on it."""
    shares = simulated_speeds(effect=0.0, pairs=10, runs=1000, min_effect=0.0)
    assert shares.get("FASTER", 0) + shares.get("SLOWER", 0) <= 0.05


def test_a_true_2_percent_effect_is_found() -> None:
    """At least 85 % of 1,000 runs of 10 pairs say FASTER, and none says SLOWER."""
    shares = simulated_speeds(effect=0.02, pairs=10, runs=1000)
    assert shares["FASTER"] >= 0.85
    assert "SLOWER" not in shares


def test_six_pairs_are_honest_too() -> None:
    """The least count keeps the promise on false verdicts."""
    shares = simulated_speeds(effect=0.0, pairs=6, runs=1000)
    assert shares.get("FASTER", 0) + shares.get("SLOWER", 0) <= 0.05
