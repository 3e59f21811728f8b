"""The compute floor: a time that the GPU could not have reached was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bcgbench.arms import Arm
from bcgbench.clock import HostClock
from bcgbench.floor import floor_s, peak_flops
from bcgbench.flops import count_flops
from bcgbench.measure import request
from bcgbench.metrics import METRICS
from bcgbench.models.base import load
from bcgbench.runners import RUNNERS
from bcgbench.tracer import Tracer
from bcgbench.verdict import compare, judge
from tests.factories import case, environment, gpu, graph_record, record, sample

TURBO_FLOPS = 9 * 11.2e12
"""Nine forwards of Z-Image-Turbo at 512x512."""


def turbo(runner, *, denoise_s, total_s):
    """Z-Image-Turbo at 512x512 on a B200 as https://github.com/sgl-project/sglang/pull/27436 publishes it."""
    make = record if runner == "eager" else graph_record
    times = {"denoise_event_s": denoise_s, "denoise_host_s": denoise_s, "before_s": 0.005, "end_to_end_s": total_s,
             "after_s": total_s - denoise_s - 0.005}  # fmt: skip
    replays = 0 if runner == "eager" else 40
    images = tuple(sample(runner=runner, round=i, replays=replays, **times) for i in range(10))
    return make(
        case=case(model="Tongyi-MAI/Z-Image-Turbo", steps=9),
        environment=environment(gpu=gpu(name="NVIDIA B200")),
        samples=images,
        denoise_flops=TURBO_FLOPS,
    )


def test_the_published_turbo_time_is_below_the_floor():
    """0.026 s for 9 forwards of 11.2 TFLOP: 45 ms at a B200's 2.25 PFLOP/s."""
    status, reasons = judge(turbo("bcg", denoise_s=0.026, total_s=0.097))
    assert status == "INVALID"
    assert [reason.code for reason in reasons] == ["below-compute-floor"]
    assert "0.026 s is impossible" in reasons[0].text
    assert "0.0448 s" in reasons[0].text


def test_the_published_eager_time_is_above_the_floor():
    """0.113 s is slow, not impossible."""
    assert judge(turbo("eager", denoise_s=0.113, total_s=0.138))[0] == "OK"


def test_time_that_moved_out_of_the_denoise_span_is_refused():
    """0.113 -> 0.026 s of denoise beside 0.138 -> 0.097 s in all: 46 ms went elsewhere, even with no FLOPs known."""
    eager, bcg = turbo("eager", denoise_s=0.113, total_s=0.138), turbo("bcg", denoise_s=0.026, total_s=0.097)
    verdict = compare(replace(eager, denoise_flops=None), replace(bcg, denoise_flops=None))
    assert verdict.speed == "INVALID"
    assert verdict.exit_code == 4
    assert "outside the denoise span eager takes 0.025 s and bcg 0.071 s" in verdict.reasons[0].text


def test_noise_outside_the_denoise_span_is_not_a_moved_time():
    """11 ms of 55 is what two arms of one run differed by on an H200."""
    eager, bcg = turbo("eager", denoise_s=0.300, total_s=0.355), turbo("bcg", denoise_s=0.200, total_s=0.266)
    assert compare(eager, bcg).speed == "FASTER"


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [("NVIDIA H200", "bfloat16", 989), ("NVIDIA H100 PCIe", "bfloat16", 756),
     ("NVIDIA H100 80GB HBM3", "float32", 494.5), ("NVIDIA GB200", "float16", 2500), ("Radeon", "bfloat16", None)],
)  # fmt: skip
def test_the_longest_known_name_gives_the_peak(name, dtype, tflops):
    """ "H100" is part of "H100 PCIe", which is slower."""
    found = peak_flops(record(case=case(dtype=dtype), environment=environment(gpu=gpu(name=name))))
    assert found == (None if tflops is None else tflops * 1e12)


def test_an_unknown_gpu_has_no_floor():
    """Nothing is judged where the peak is not known."""
    assert floor_s(record(environment=environment(gpu=gpu(name="Radeon")), denoise_flops=1e15)) is None


def test_flop_use_is_the_share_of_the_peak():
    """One second at half of the peak."""
    half = record(denoise_flops=989e12 / 2, samples=(sample(denoise_s=1.0),))
    assert METRICS["flop_use"].read(half) == pytest.approx(0.5)


def test_flops_are_those_of_the_products():
    """Each traced call is counted, and one signature runs once."""
    session = load(
        case(model="tiny/z-image", width_px=32, height_px=32, steps=3, device="cpu", dtype="float32", token_counts=None)
    )
    arm = Arm(RUNNERS["eager"], session)
    tracer = Tracer(arm)
    with torch.no_grad(), tracer.recording():
        request(session, 0, clock=HostClock())
    with torch.no_grad():
        one = count_flops(arm, tracer.calls[:1])
        before = arm.counts.forwards
        assert count_flops(arm, tracer.calls) == one * len(tracer.calls)
    assert arm.counts.forwards == before + 1
    parameters = sum(p.numel() for p in session.pipe.transformer.parameters() if p.dim() == 2)
    assert one > 2 * parameters
