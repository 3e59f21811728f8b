"""The cache is bounded, frozen when told, and says why a call found no graph."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bcgbench.engine import graphed
from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.cache import GraphCache, Limits
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.signature import sign
from bcgbench.errors import CaptureError


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def graph(size: int, **arguments: Any) -> Any:
    """A stand-in for a captured graph with one tensor argument."""
    return SimpleNamespace(signature=sign({"x": torch.ones(size), **arguments}).signature)


def engine(**limits: Any) -> GraphedForward:
    """An open engine that doubles its argument."""
    return GraphedForward(lambda a: a["x"] * 2, device=torch.device("cpu"), policy=BreakPolicy(),
                          limits=Limits(**limits))  # fmt: skip


def test_the_least_recently_used_goes_first_counted_and_logged(caplog: pytest.LogCaptureFixture):
    """A hit makes a graph recent; eviction is never silent."""
    cache = GraphCache(Limits(entries=2))
    one, two, three = graph(1), graph(2), graph(3)
    cache.add(one)
    cache.add(two)
    assert cache.find(one.signature) == [one]
    with caplog.at_level(logging.WARNING):
        cache.add(three)
    assert cache.graphs == [one, three]
    assert (cache.captures, cache.evictions) == (3, 1)
    assert caplog.messages == ["graph cache is full (2 entries): evicted x float32[2]"]


def test_an_evicted_signature_is_a_miss_and_can_be_captured_again():
    """The others go on replaying."""
    forward = engine(entries=1)
    forward.prepare({"x": torch.ones(1)})
    forward.prepare({"x": torch.ones(2)})
    assert forward({"x": torch.ones(1)}).tolist() == [2]
    assert (forward.replays, forward.fallbacks) == (0, 1)
    forward.prepare({"x": torch.ones(1)})
    assert forward({"x": torch.ones(1)}).tolist() == [2]
    assert (forward.replays, forward.fallbacks, forward.cache.evictions) == (1, 1, 2)


@pytest.mark.parametrize(
    ("asked", "difference"),
    [
        ({"x": torch.ones(5)}, "x: captured float32[4], asked float32[5]"),
        ({"x": torch.ones(4).double()}, "x: captured float32[4], asked float64[4]"),
        ({"n": 2}, "n: captured 1, asked 2"),
        ({"n": None}, "n: captured 1, asked None"),
        ({"opts": {"scale": 3.0}}, "opts.scale: captured 2.0, asked 3.0"),
        ({"opts": {}}, "opts.scale: captured 2.0, asked absent"),
    ],
)
def test_a_miss_names_the_argument_that_differs(asked: dict[str, Any], difference: str):
    """From the nearest graph, in words."""
    base = {"x": torch.ones(4), "n": 1, "opts": {"scale": 2.0}}
    forward = engine()
    forward.prepare(base)
    forward.prepare({"x": torch.ones(9), "n": 7, "opts": {"scale": 9.0}})
    forward.freeze()
    forward(base | asked)
    (miss,) = forward.cache.misses.values()
    assert miss.reason == "no graph for this signature"
    assert difference in miss.difference
    assert len(miss.difference) == 1, "the other graph differs in three fields"


def test_strides_are_named():
    """Same shape, other layout: a kernel was chosen for the captured one."""
    forward = engine()
    forward.prepare({"x": torch.ones(3, 4)})
    forward({"x": torch.ones(4, 3).t()})
    (miss,) = forward.cache.misses.values()
    assert len(miss.difference) == 1
    assert "strides [4, 1]" in miss.difference[0]
    assert "strides [1, 3]" in miss.difference[0]


def test_equal_misses_are_counted_together():
    """One line per reason in a report."""
    forward = engine()
    for size in (1, 1, 2):
        forward({"x": torch.ones(size)})
    assert [(miss.reason, miss.count) for miss in forward.cache.misses.values()] == [("nothing was captured", 3)]
    forward.prepare({"x": torch.ones(1)})
    for size in (2, 2, 3):
        forward({"x": torch.ones(size)})
    assert [miss.count for miss in forward.cache.misses.values()] == [3, 2, 1]
    assert forward.fallbacks == forward.calls == 6


def test_a_frozen_cache_refuses_to_capture_even_what_it_holds():
    """After `freeze`, preparing is a mistake in the caller."""
    forward = engine()
    forward.prepare({"x": torch.ones(1)})
    forward.freeze()
    with pytest.raises(CaptureError, match="before the first measured request"):
        forward.prepare({"x": torch.ones(1)})
    assert forward({"x": torch.ones(1)}).tolist() == [2]


def test_a_call_never_captures_by_itself():
    """Open or frozen: only `prepare` does."""
    forward = engine()
    forward({"x": torch.ones(1)})
    assert len(forward.cache) == forward.cache.captures == 0


def test_a_pool_over_its_limit_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """Before the next capture fills the device; the graph that went over it is not kept."""
    forward = engine(pool_bytes=1_000)
    monkeypatch.setattr(forward.backend, "pool_bytes", lambda: 2_000)
    with pytest.raises(CaptureError, match=r"holds 2,000 bytes, the limit is 1,000"):
        forward.prepare({"x": torch.ones(1)})
    assert len(forward.cache) == 0


def test_growth_is_read_before_an_eviction_gives_memory_back(monkeypatch: pytest.MonkeyPatch):
    """Else a graph that takes another's place would cost nothing."""
    forward, evicted = engine(entries=1), []
    monkeypatch.setattr(graphed, "_reserved_bytes", lambda _device: evicted.append(forward.cache.evictions) or 0)
    forward.prepare({"x": torch.ones(1)})
    forward.prepare({"x": torch.ones(2)})
    assert evicted == [0, 0, 0, 0]
    assert forward.cache.evictions == 1
