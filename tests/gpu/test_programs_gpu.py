"""The random programs of the tape on CUDA graphs: eager's answer bit for bit, or a refusal with a reason."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.engine import test_auto_programs as auto
from tests.engine.programs import BREAKS, CONSTANTS, IN_PLACE, PLAIN, RANDOM, READS, VIEWS, Program, check, programs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
HEALTHY = (HealthCheck.filter_too_much, HealthCheck.too_slow)


@pytest.fixture(autouse=True)
def _short_collections() -> Iterator[None]:
    """A capture collects garbage first: what is alive now need not be walked hundreds of times."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_programs_replay_exactly_or_are_refused():
    """All groups of operations at once; most programs are replayed."""
    tally: Counter[str] = Counter()

    @settings(max_examples=120, derandomize=True, database=None, suppress_health_check=HEALTHY)
    @given(programs(PLAIN, VIEWS, IN_PLACE, CONSTANTS, BREAKS, READS, RANDOM))
    def one(program: Program) -> None:
        check(program, CUDA, tally=tally)

    one()
    assert tally["replayed"] >= 0.6 * tally["all"], tally


@settings(max_examples=30, derandomize=True, database=None, suppress_health_check=HEALTHY)
@given(auto.PROGRAMS)
def test_programs_with_masks_replay_exactly_or_miss(program: auto.Program):
    """Under `--break auto`."""
    auto.check(program, CUDA)
