"""What a graph brings for what it costs is said in the verdict; nothing is decided by it."""

from __future__ import annotations

import pytest

from bcgbench.verdict import compare
from tests import factories as make
from tests.factories import GIB, codes, graph_record, memory, profile, record, text


def test_gigabytes_without_a_gain_are_remarked_on():
    """https://github.com/sgl-project/sglang/issues/36470: no gain, for gigabytes."""
    more = graph_record(denoise_s=1.0, memory=memory(peak_allocated_bytes=64 * GIB, pool_bytes=4 * GIB))
    found = compare(record(denoise_s=1.0), more)
    assert (found.speed, found.exit_code) == ("SAME", 0)
    assert "bcg is SAME and its peak is 4.3 GB above that of eager" in text(found)


@pytest.mark.parametrize(("denoise_s", "bytes_more"), [(0.5, 4 * GIB), (1.0, GIB // 2)])
def test_a_gain_or_little_memory_is_not(denoise_s: float, bytes_more: int):
    """Faster for gigabytes is what was asked for."""
    more = graph_record(denoise_s=denoise_s, memory=memory(peak_allocated_bytes=60 * GIB + bytes_more))
    assert "no-gain" not in codes(compare(record(denoise_s=1.0), more))


def test_what_the_allocator_reserved_counts_in_no_verdict():
    """https://github.com/sgl-project/sglang/issues/38172: 35.9 to 39.0 GB for identical work, by its history."""
    history = graph_record(memory=memory(peak_reserved_bytes=90 * GIB))
    verdicts = [compare(record(), other) for other in (graph_record(memory=memory()), history)]
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize(("kernels", "remarked"), [(3640.0 + 61 * 2, True), (3640.0 + 61, False)])
def test_kernels_that_each_replay_adds_are_remarked_on(kernels: float, remarked: bool):
    """https://github.com/pytorch/pytorch/issues/143572: two for each of 61 segments."""
    graph = graph_record(profile=profile(launches={"kernel": 60.0, "graph": 61.0}, kernels=kernels))
    found = compare(record(profile=profile(kernels=3640.0)), graph)
    assert ("more-kernels" in codes(found)) == remarked
    if remarked:
        assert "122 kernels per step more than eager, 2.0 for each of 61 graph launches" in text(found)


def test_what_a_break_costs_is_told_from_two_graph_arms():
    """https://github.com/sgl-project/sglang/issues/35851: 41 launches and idle time between them."""
    segmented = graph_record(denoise_s=1.0, profile=profile(launches={"graph": 41.0}))
    whole = graph_record(denoise_s=0.6, runner="graph", profile=profile(launches={"graph": 1.0}))
    found = compare(segmented, whole)
    assert found.speed == "FASTER"
    assert "cost-of-breaks" in codes(found)
    assert f"a break costs {0.4 / 40 / whole.case.steps:.2g} s of each step" in text(found)


def test_what_compiled_kernels_bring_is_not_laid_to_the_breaks():
    """Fewer segments and faster, but by other kernels; and it is not eager that is held against."""
    bcg = graph_record(denoise_s=1.0, profile=profile(launches={"graph": 61.0}, kernels=3000.0))
    compiled = graph_record(
        runner="bcg+compile", denoise_s=0.6, profile=profile(launches={"graph": 31.0}, kernels=4000.0),
        settings=bcg.settings | {"compile": "30 blocks: Block; inductor, mode default, static shapes"},
    )  # fmt: skip
    assert not {"cost-of-breaks", "more-kernels"} & set(codes(compare(bcg, compiled)))
    assert "more-kernels" not in codes(compare(record(profile=profile(kernels=100.0)), compiled))
    plain = record(runner="compile", profile=profile(kernels=3500.0), settings=compiled.settings)
    assert "more-kernels" not in codes(compare(plain, compiled))
    fused = record(runner="eager-best", profile=profile(kernels=100.0))
    fused = make.replace(fused, settings=fused.settings | {"fused projections": "60 attentions"})
    assert "more-kernels" not in codes(compare(fused, bcg))


def test_the_better_choice_is_the_arm_that_is_held_against():
    """Which need not be eager."""
    whole = graph_record(runner="graph", denoise_s=1.0)
    more = graph_record(denoise_s=1.2, memory=memory(peak_allocated_bytes=64 * GIB))
    assert "above that of graph, which is the better choice here" in text(compare(whole, more))
