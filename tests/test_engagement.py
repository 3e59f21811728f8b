"""Behaviour of `bcgbench.engagement`, through `verdict.judge`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bcgbench.types import Record
from bcgbench.verdict import judge
from tests import factories as make
from tests.factories import codes, graph_record, record, samples, text


def engaged(**changes: Any) -> Record:
    """A graph record whose engagement is changed."""
    return graph_record(engagement=make.engagement(**changes))


def on_tape(**changes: Any) -> Record:
    """A graph record replayed by the tape on a CPU."""
    return graph_record(backend="tape", case=make.case(device="cpu"), **changes)


@pytest.mark.parametrize("arm", [record(), graph_record(), on_tape()], ids=["eager", "bcg", "tape"])
def test_a_sound_record_is_ok_without_reasons(arm: Record) -> None:
    """The standard records of all three backends."""
    assert judge(arm) == ("OK", ())


def test_a_denoise_time_without_proof_of_replay_is_invalid() -> None:
    """A graph arm without engagement is not slow or fast, it is nothing."""
    found = judge(graph_record(engagement=None))
    assert found[0] == "INVALID"
    assert codes(found) == ["not-engaged"]


def test_captured_and_never_replayed_is_invalid_and_says_so() -> None:
    """Graphs held, none used: the benchmark would compare eager with eager."""
    found = judge(engaged(replays=0, uncalled=("text 64", "text 128")))
    assert found[0] == "INVALID"
    assert codes(found) == ["not-engaged", "captured-not-engaged"]
    assert "2 graphs were captured and none was replayed" in text(found)


def test_nothing_expected_is_no_proof() -> None:
    """0 of 0 is not 100 %."""
    assert codes(judge(engaged(captures=(0, 0, 0, 0), replays=0, expected_forwards=0))) == ["not-engaged"]


@pytest.mark.parametrize("replays", [559, 561])
def test_replays_must_equal_forwards(replays: int) -> None:
    """One too few and one too many are both unexplained."""
    found = judge(engaged(replays=replays))
    assert codes(found) == ["not-engaged"]
    assert f"{replays} of 560" in text(found)


def test_a_measured_image_replayed_in_part_is_invalid_even_if_the_totals_agree() -> None:
    """Warm-up replays cannot make up for a timed image."""
    measured = [*samples(denoise_s=0.5, runner="bcg", replays=40)]
    measured[4] = replace(measured[4], replays=39)
    found = judge(graph_record(samples=tuple(measured)))
    assert codes(found) == ["not-engaged"]
    assert "first round 4: 39 replays for 40 calls" in text(found)


def test_a_fallback_is_invalid_and_names_the_miss() -> None:
    """The reason carries module, count and the differing field."""
    found = judge(engaged(fallbacks=3, replays=557, misses=(make.miss(),)))
    assert found[0] == "INVALID"
    assert "fallback" in codes(found)
    assert "3x transformer" in text(found)
    assert "shape (1, 64, 3584) captured, (1, 71, 3584) called" in text(found)


def test_a_miss_names_the_option_that_would_prevent_it() -> None:
    """The report is where the reader is when it happens."""
    line = "encoder_hidden_states: captured bfloat16[1, 64, 3584], asked bfloat16[1, 128, 3584]"
    miss = replace(make.miss(), difference=(line,))
    found = judge(engaged(fallbacks=3, replays=557, misses=(miss,)))
    assert f"{line}. another prompt length: add 128 to --buckets" in text(found)


def test_a_fallback_in_a_measured_image_counts_even_if_the_total_forgot_it() -> None:
    """Two counters, and the worse one is believed."""
    measured = [*samples(denoise_s=0.5, runner="bcg", replays=40)]
    measured[2] = replace(measured[2], replays=39, fallbacks=1)
    found = judge(graph_record(samples=tuple(measured)))
    assert codes(found) == ["not-engaged", "fallback"]
    assert "ran eagerly: 1; no miss was recorded" in text(found)


def test_a_capture_after_preparation_is_invalid() -> None:
    """Request 2 made a third graph, so its time holds a capture."""
    found = judge(engaged(captures=(2, 2, 3, 3)))
    assert found[0] == "INVALID"
    assert codes(found) == ["late-capture"]
    assert "2, 2, 3, 3" in text(found)


def test_a_graph_of_a_traced_call_that_no_request_replayed_is_invalid() -> None:
    """A second stage, captured and never served: the requests ask for it, in contrast to a spare bucket."""
    found = judge(engaged(unengaged=("hidden_states bfloat16[1, 24576, 128]",)))
    assert found[0] == "INVALID"
    assert codes(found) == ["captured-not-engaged"]
    assert "24576" in text(found)


def test_a_bucket_that_no_prompt_needs_is_reported_and_fine() -> None:
    """Uncalled graphs are named; the record stays OK."""
    found = judge(engaged(uncalled=("text 1024",)))
    assert found[0] == "OK"
    assert codes(found) == ["uncalled"]
    assert "text 1024" in text(found)


def test_an_eviction_is_never_silent() -> None:
    """Dropped graphs are named; the record stays OK while every call was replayed."""
    assert judge(engaged(evictions=2))[0] == "OK"
    assert codes(judge(engaged(evictions=2))) == ["evicted"]


def test_a_baseline_that_replays_is_no_baseline() -> None:
    """Eager left hooked to a graph is INVALID."""
    found = judge(record(samples=samples(replays=40)))
    assert found[0] == "INVALID"
    assert codes(found) == ["baseline-replayed"]


def test_the_tape_owes_proof_too() -> None:
    """A tape run without replays is INVALID."""
    assert codes(judge(on_tape(engagement=None))) == ["not-engaged"]


@pytest.mark.parametrize(("launched", "expected"), [(0.0, ["not-engaged"]), (122.0, [])])
def test_a_profile_without_a_graph_launch_contradicts_the_counters(launched: float, expected: list[str]) -> None:
    """Every counter says replayed, and the host launched kernels only."""
    found = judge(graph_record(profile=make.profile(launches={"kernel": 498.0, "graph": launched})))
    assert codes(found) == expected


def test_an_empty_profile_contradicts_nothing() -> None:
    """A trace that saw nothing at all is a broken trace."""
    assert judge(graph_record(profile=make.profile(launches={"kernel": 0.0, "graph": 0.0}))) == ("OK", ())
