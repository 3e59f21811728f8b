"""Values that the host reads while a forward runs: one graph for each set of values, and never a stale result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.cache import Limits
from bcgbench.engine.graphed import GraphedForward


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def valid_rows(arguments: dict[str, Tensor]) -> Tensor:
    """Noise on the first rows, as many as the mask says: what the host reads decides the work."""
    noisy = arguments["rows"] + torch.randn(4, 3)
    length = int(arguments["mask"].sum())
    return noisy[:length] * 2


def call(length: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Rows and a mask of `length` valid ones, always of one signature."""
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return {"rows": rows, "mask": torch.arange(4) < length}


def engine(*lengths: int, limits: Limits | None = None) -> GraphedForward:
    made = GraphedForward(valid_rows, device=torch.device("cpu"), policy=BreakPolicy.parse("none"), limits=limits)
    for length in lengths:
        made.prepare(call(length))
    made.freeze()
    return made


def same_as_eager(made: GraphedForward, arguments: dict[str, Tensor]) -> bool:
    """Whether output and generator end as after an eager call."""
    torch.manual_seed(5)
    expected, state = valid_rows(arguments), torch.get_rng_state()
    torch.manual_seed(5)
    return torch.equal(made(arguments), expected) and torch.equal(torch.get_rng_state(), state)


def test_calls_of_one_signature_have_a_graph_for_each_value_read():
    """Each replays exactly, whatever came before; a prepared value is not captured twice."""
    made = engine(1, 3, 1, 3)
    assert len(made.cache.graphs) == made.cache.captures == 2
    assert len({graph.signature for graph in made.cache.graphs}) == 1
    assert all(same_as_eager(made, call(length, seed=seed)) for seed, length in enumerate((3, 1, 1, 3)))
    assert (made.replays, made.fallbacks) == (4, 0)


def test_a_value_of_no_graph_is_a_counted_miss():
    """Eager runs, with the random numbers that it would have had: the segment before the guard drew some."""
    made = engine(1, 3)
    assert same_as_eager(made, call(2))
    assert (made.replays, made.fallbacks) == (0, 1)
    (miss,) = made.cache.misses.values()
    assert "host read at" in miss.reason


def test_trying_guards_while_preparing_leaves_the_generator_alone():
    """A capture draws nothing either."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    made = engine(1, 1, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert [graph.replays for graph in made.cache.graphs] == [0, 0]


def test_graphs_of_one_signature_count_against_the_limit():
    """The oldest goes first, counted; its value is a miss then."""
    made = engine(1, 2, 3, limits=Limits(entries=2))
    assert (len(made.cache), made.cache.evictions) == (2, 1)
    assert same_as_eager(made, call(3))
    assert same_as_eager(made, call(1))
    assert (made.replays, made.fallbacks) == (1, 1)
