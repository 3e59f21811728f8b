"""Signature -> graphs: open while preparing, frozen afterwards; bounded, and never silent about a miss.

A signature has one graph, or, where the host reads values while the forward runs, one for each set of values.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.signature import Signature, difference

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one cache. Exceeding one is an eviction or an error, and is counted."""

    entries: int = 64
    steps: int = 2_000
    """Segments, breaks and guards of one graph."""
    pool_bytes: int | None = None


@dataclass(slots=True)
class MissCount:
    """Calls that found no graph for one reason."""

    reason: str
    difference: tuple[str, ...]
    count: int = 0


class GraphCache:
    """Captured graphs of one module by signature; the least recently used goes first when full."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.frozen = False
        self.captures = 0
        self.evictions = 0
        self.misses: dict[tuple[str, tuple[str, ...]], MissCount] = {}
        self._graphs: OrderedDict[Signature, list[SegmentedGraph]] = OrderedDict()
        self._dropped = ""
        """Why there are no graphs any more."""

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    @property
    def graphs(self) -> list[SegmentedGraph]:
        """All graphs held, those of the least recently used signature first."""
        return [graph for held in self._graphs.values() for graph in held]

    def find(self, signature: Signature) -> list[SegmentedGraph]:
        """The graphs of this signature; several are told apart by their guards."""
        held = self._graphs.get(signature, [])
        if held:
            self._graphs.move_to_end(signature)
        return held

    def add(self, graph: SegmentedGraph) -> None:
        """Hold a new graph, within the limit."""
        self._graphs.setdefault(graph.signature, []).append(graph)
        self._graphs.move_to_end(graph.signature)
        self.captures += 1
        self.trim()

    def trim(self) -> None:
        """Evict the oldest of the least recently used signature past the limit, and say so."""
        while len(self) > self.limits.entries:
            signature, held = next(iter(self._graphs.items()))
            held.pop(0)
            if not held:
                del self._graphs[signature]
            self.evictions += 1
            log.warning("graph cache is full (%d entries): evicted %s", self.limits.entries, signature)

    def drop_all(self, reason: str) -> None:
        """Hold no graph any more; calls that miss say why."""
        log.warning("all %d graphs dropped: %s", len(self._graphs), reason)
        self._graphs.clear()
        self._dropped = reason

    def miss(self, signature: Signature) -> MissCount:
        """Count a call without a graph, with the nearest captured signature's differing fields."""
        if not self._graphs:
            return self.count(self._dropped or "nothing was captured")
        nearest = min((difference(held, signature) for held in self._graphs), key=len)
        return self.count("no graph for this signature", nearest)

    def count(self, reason: str, fields: tuple[str, ...] = (), *, key: str | None = None) -> MissCount:
        """Count a call that ran eagerly for `reason`; calls of one `key` are one miss, told by its first reason."""
        miss = self.misses.setdefault((key or reason, fields), MissCount(reason, fields))
        miss.count += 1
        return miss
