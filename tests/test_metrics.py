"""Behaviour of `bcgbench.metrics`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bcgbench.metrics import METRICS, clock_of, denoise_times, paired_log_ratios
from tests.factories import (
    GIB,
    accuracy,
    compilation,
    engagement,
    graph_record,
    memory,
    miss,
    profile,
    record,
    sample,
    samples,
)  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_described_and_reads_both_kinds_of_record(name: str) -> None:
    """The key is the name, and a number or None comes back from a graph arm, an eager arm and an empty record."""
    metric = METRICS[name]
    assert metric.name == name
    assert metric.description
    empty = record(samples=(), memory=None, profile=None, load_s=None, first_call_s=None, denoise_flops=None)
    assert metric.read(empty) is None
    full = graph_record(accuracy=accuracy(), compilation=compilation())
    assert isinstance(metric.read(full), (int, float))


def test_units_match_the_suffix_of_the_name() -> None:
    """`_s` is seconds and `_bytes` is bytes, and only they."""
    for name, metric in METRICS.items():
        assert (metric.unit == "s") == name.endswith("_s")
        assert (metric.unit == "bytes") == name.endswith("_bytes")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("denoise_s", 0.5),
        ("replays", 560),
        ("expected_forwards", 560),
        ("captures", 2),
        ("segments", 61),
        ("breaks", 60),
        ("pool_bytes", GIB),
        ("peak_allocated_bytes", 61 * GIB),
        ("growth_bytes", GIB / 2),
        ("launches_per_step", 186.0),
        ("kernels_per_step", 3640.0),
        ("prepare_s", 3.1),
        ("signature_s", 8e-6),
        ("hook_s", 2e-5),
        ("load_s", 41.0),
        ("decode_s", 0.05),
        ("encode_s", 0.02),
    ],
)
def test_metric_reads_the_field_it_is_named_after(name: str, value: float) -> None:
    """Values of the standard graph record."""
    assert METRICS[name].read(graph_record()) == pytest.approx(value, rel=1e-3)


def test_step_leaves_out_step_0_and_is_a_median_of_medians() -> None:
    """A slow first step and a slow image move neither the step nor each other."""
    images = [(9.0, 1.0, 2.0, 3.0), (9.5, 1.0, 2.0, 3.0), (9.0, 50.0, 50.0, 50.0)]
    measured = record(samples=tuple(sample(round=i, step_s=s) for i, s in enumerate(images)))
    assert METRICS["step_s"].read(measured) == 2.0
    assert METRICS["step0_s"].read(measured) == 9.0


def test_one_step_has_a_step_0_and_no_step() -> None:
    """A one-step model reports nothing in place of a steady step."""
    measured = record(samples=(sample(step_s=(0.7,)),))
    assert METRICS["step_s"].read(measured) is None
    assert METRICS["step0_s"].read(measured) == 0.7


def test_warm_up_samples_are_not_measured() -> None:
    """Only phase "measure" counts."""
    warm = sample(denoise_s=99.0, phase="warm")
    assert METRICS["denoise_s"].read(record(samples=(warm, sample(denoise_s=1.0)))) == 1.0


def test_a_missing_event_time_puts_the_whole_record_on_the_host_clock() -> None:
    """Clocks are never mixed within a record."""
    mixed = (sample(round=0, denoise_event_s=0.1, denoise_host_s=0.2), sample(round=1, denoise_event_s=None))
    measured = record(samples=mixed)
    assert clock_of(measured) == "host"
    assert denoise_times(measured) == {0: 0.2, 1: 1.0002}
    assert METRICS["denoise_s"].read(measured) == pytest.approx((0.2 + 1.0002) / 2)


def test_images_of_one_round_are_summed() -> None:
    """A round with two prompts is one pair, on both prompts together."""
    both = (sample(round=3, prompt=0, denoise_s=1.0), sample(round=3, prompt=1, denoise_s=2.0))
    assert denoise_times(record(samples=both)) == {3: 3.0}


def test_pairs_are_formed_by_round() -> None:
    """Rounds that only one arm has are left out, and order in the record does not matter."""
    a = record(samples=samples(denoise_s=[1.0, 2.0, 4.0]))
    b = graph_record(samples=tuple(reversed(samples(denoise_s=[0.5, 1.0]))))
    assert paired_log_ratios(a, b) == (pytest.approx(math.log(2)), pytest.approx(math.log(2)))


def test_a_round_with_other_prompts_is_no_pair() -> None:
    """A short prompt is never paired with a long one."""
    a = record(samples=samples(denoise_s=[1.0, 2.0]))
    b = graph_record(samples=tuple(replace(s, prompt=s.round) for s in samples(denoise_s=[1.0, 1.0])))
    assert paired_log_ratios(a, b) == (0.0,)


def test_both_arms_are_timed_on_one_clock() -> None:
    """One arm without event times puts the pair on the host clock."""
    a = record(samples=(sample(denoise_event_s=None, denoise_host_s=2.0),))
    b = graph_record(samples=(sample(denoise_event_s=0.1, denoise_host_s=1.0),))
    assert paired_log_ratios(a, b) == (pytest.approx(math.log(2)),)


def test_gpu_busy_divides_by_the_unprofiled_step() -> None:
    """20 ms of kernels in a measured step of 50 ms is 0.4; no figure without a complete trace."""
    assert METRICS["gpu_busy"].read(record()) == pytest.approx(0.4, rel=1e-3)
    assert METRICS["gpu_busy"].read(record(profile=profile(busy_s=None))) is None


def test_gpu_busy_of_two_loops_weighs_their_steps_as_the_profiled_pass_ran_them() -> None:
    """Three half-size steps of 10 ms and three full-size ones of 40, profiled as two and three: 28 ms on average."""
    steps = (0.5, 0.01, 0.01, 0.5, 0.04, 0.04)
    staged = samples(denoise_s=(1.1,) * 6, step_s=steps, loop_steps=(3, 3))
    found = record(samples=staged, profile=profile(busy_s=0.014, loop_steps=(2, 3)))
    assert METRICS["gpu_busy"].read(found) == pytest.approx(0.5)


def test_growth_is_the_median_and_absent_for_eager() -> None:
    """The first capture pays for the pool; the median shows the usual one."""
    grown = graph_record(memory=memory(growth_bytes=(900, 10, 20)))
    assert METRICS["growth_bytes"].read(grown) == 20
    assert METRICS["growth_bytes"].read(record()) is None


def test_misses_are_counted_by_call() -> None:
    """Two kinds of miss, five calls."""
    missed = graph_record(engagement=engagement(misses=(miss(count=3), miss(count=2))))
    assert METRICS["misses"].read(missed) == 5


def test_the_largest_picture_fills_the_gpu() -> None:
    """10 of the 87 GiB beside the weights are taken; nothing is said where memory or GPU are unknown."""
    found = METRICS["largest_pixels"].read(record())
    assert found == pytest.approx(8.7 * record().case.width_px * record().case.height_px)
    assert METRICS["largest_pixels"].read(record(memory=None)) is None
    assert METRICS["largest_pixels"].read(record(environment=None)) is None
    assert METRICS["largest_pixels"].read(record(memory=memory(peak_reserved_bytes=None))) is None
