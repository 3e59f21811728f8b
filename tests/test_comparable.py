"""Behaviour of `bcgbench.comparable`, through `verdict.compare`."""

from __future__ import annotations

from typing import Any

import pytest

from bcgbench.cli_compare import judge_runs
from bcgbench.errors import NothingMeasured
from bcgbench.verdict import compare
from tests import factories as make
from tests.factories import codes, graph_record, record, text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"environment": make.environment(gpu=make.gpu(name="NVIDIA H100"))}, "environment.gpu"),
        ({"environment": make.environment(gpu=make.gpu(driver="580.1"))}, "environment.driver"),
        ({"environment": make.environment(packages={"torch": "2.14.0"})}, "environment.packages.torch"),
        ({"environment": make.environment(settings={"tf32": "True"})}, "environment.settings.tf32"),
        ({"environment": make.environment(gpu=None)}, "environment.gpu"),
        ({"environment": None}, "environment (not recorded)"),
        ({"case": make.case(steps=30)}, "case.steps (20 against 30)"),
        ({"settings": {"runner": "bcg", "attention": "flash", "dtype": "bfloat16"}}, "settings.attention"),
        ({"settings": {"runner": "bcg", "dtype": "bfloat16"}}, "settings.attention (native against absent)"),
        ({"synthetic": True}, "record.synthetic"),
    ],
)
def test_unlike_arms_are_refused_by_field_name(changes: dict[str, Any], name: str) -> None:
    """INVALID, exit 4, no ratio, and the sentence names the field."""
    found = compare(record(), graph_record(**changes))
    assert (found.speed, found.ratio, found.exit_code) == ("INVALID", None, 4)
    assert codes(found) == ["not-comparable"]
    assert name in text(found)


def test_the_switch_under_test_may_differ() -> None:
    """Runner, capture, break policy and padding do not make arms unlike; neither does the number of rounds."""
    fixed = {"attention": "native", "dtype": "bfloat16"}
    switched = {"runner": "graph", "capture": "whole", "break_policy": "none", "padding": "", **fixed}
    found = compare(graph_record(), graph_record(runner="graph", settings=switched, case=make.case(rounds=20)))
    assert found.speed == "SAME"


PRIOR = {"prior": "sha256:0123456789abcdef", "attention": "native", "dtype": "bfloat16"}
OTHER = PRIOR | {"prior": "sha256:fedcba9876543210"}


def test_different_priors_are_refused_as_such() -> None:
    """Exit 4 with both digests, and nothing else: the seed is why they differ."""
    found = compare(record(settings=PRIOR), record(run_id="b", settings=OTHER, case=make.case(seed=7)))
    assert (found.speed, found.fidelity, found.exact, found.exit_code) == ("INVALID", "different prior", None, 4)
    assert codes(found) == ["different-prior"]
    assert all(settings["prior"] in text(found) for settings in (PRIOR, OTHER))


def test_one_prior_makes_the_seed_and_its_file_irrelevant() -> None:
    """A replay asks for another file, perhaps another seed, and computes the same."""
    replayed = make.case(seed=7, prior="a.safetensors")
    found = compare(record(settings=PRIOR), record(run_id="b", settings=PRIOR, case=replayed))
    assert (found.speed, found.exit_code) == ("SAME", 0)


@pytest.mark.parametrize("settings", [PRIOR, {"attention": "native", "dtype": "bfloat16"}])
def test_without_both_digests_the_seed_must_agree(settings: dict[str, str]) -> None:
    """Records of schema 1 have none: their noise is known by its seed only."""
    old = record(settings={"attention": "native", "dtype": "bfloat16"})
    assert compare(old, record(run_id="b", settings=settings)).speed == "SAME"
    found = compare(old, record(run_id="b", settings=settings, case=make.case(seed=7)))
    assert "case.seed (42 against 7)" in text(found)


def test_runs_whose_cases_differ_are_told_how():
    """Model, size and arm may be equal and the work is not."""
    shared = make.record(case=make.case(parallel="cfg:2"), run_id="b")
    with pytest.raises(NothingMeasured, match=r"not run alike: case\.parallel \(none against cfg:2\)"):
        judge_runs([make.record()], [shared])
