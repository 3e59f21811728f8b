"""`--parallel` as text: what it takes, what a model can be asked for, and what it is to a case."""

from __future__ import annotations

import pytest

from bcgbench import cases, models
from bcgbench.comparable import comparable
from bcgbench.errors import UsageError
from bcgbench.models import loading
from bcgbench.parallel import Parallel, parse_parallel
from tests import factories as make


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (None, Parallel()),
        ("none", Parallel()),
        ("cfg:2", Parallel(kind="cfg", ranks=2)),
        ("context:8", Parallel(kind="context", ranks=8)),
    ],
)
def test_what_is_understood(text: str | None, value: Parallel):
    """And written as it was read."""
    assert parse_parallel(text) == value
    assert str(value) == (text or "none")


@pytest.mark.parametrize("text", ["cfg", "cfg:3", "context:1", "context:02", "tensor:2", "", "cfg:2 "])
def test_what_is_not_understood_names_what_is(text: str):
    """Guidance has two branches."""
    with pytest.raises(UsageError, match="expected none, cfg:2"):
        parse_parallel(text)


def test_one_named_gpu_cannot_be_shared():
    """Each process has a GPU of its own."""
    with pytest.raises(UsageError, match="give device cuda, not 'cuda:1'"):
        parse_parallel("cfg:2", device="cuda:1")


@pytest.mark.parametrize(
    ("model", "reason"), [("tiny/z-image-turbo", "guidance 0 of"), ("tiny/minimax-h3", "no two branches of guidance")]
)
def test_a_model_without_guidance_is_refused_before_it_is_loaded(model: str, reason: str):
    """Else every rank would run all of it."""
    case = cases.make_case(model, facts=models.facts, parallel="cfg:2")
    with pytest.raises(UsageError, match=reason):
        loading.check(case, models.adapter(model))


def test_a_shared_case_is_another_cell_and_keys_of_others_stay():
    """Samples are stored by key; records of unlike sharing are not compared in silence."""
    alone, shared = make.case(), make.case(parallel="cfg:2")
    assert alone.key == "qwen-qwen-image-512x512-43bad9d1"
    assert shared.key != alone.key
    (reason,) = comparable(make.record(case=alone), make.record(case=shared))
    assert "case.parallel (none against cfg:2)" in reason.text
