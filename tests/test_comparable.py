"""Behaviour of `bcgbench.comparable`, through `verdict.compare`."""

from __future__ import annotations

from typing import Any

import pytest

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
