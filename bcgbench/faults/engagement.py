"""Faults of the proof that graphs ran: calls that are eager under another name, and graphs that come late or never.

Here: what is broken and how. Not here: what has to find it (the table in `faults`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bcgbench.arms import Arm
from bcgbench.engine.cache import GraphCache
from bcgbench.engine.graphed import GraphedForward
from bcgbench.faults.places import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Patch = AbstractContextManager[Any]


def eager_in_disguise() -> Patch:
    """A call of a graph arm runs eagerly."""

    def call(_original: Callable[..., Any], self: GraphedForward, arguments: dict[str, Any]) -> Any:
        self.calls += 1
        return self._forward(arguments)

    return replaced(GraphedForward, "__call__", call)


def counted_not_done() -> Patch:
    """A call of a graph arm runs eagerly and counts as a replay of the cache."""

    def call(_original: Callable[..., Any], self: GraphedForward, arguments: dict[str, Any]) -> Any:
        self.calls += 1
        self.replays += self._policy is not None
        return self._forward(arguments)

    return replaced(GraphedForward, "__call__", call)


def replay_recomputed() -> Patch:
    """A call of a graph arm runs eagerly, and every counter, the graph's own too, calls it a replay."""

    def call(original: Callable[..., Any], self: GraphedForward, arguments: dict[str, Any]) -> Any:
        graph = self.serving(self.sign(arguments))
        if graph is None:
            return original(self, arguments)
        graph.replays += 1
        self.replays += 1
        self.calls += 1
        return self._forward(arguments)

    return replaced(GraphedForward, "__call__", call)


def baseline_replayed() -> Patch:
    """The eager arm's calls count as replays: it is not the baseline that it claims to be."""

    def call(original: Callable[..., Any], self: GraphedForward, arguments: dict[str, Any]) -> Any:
        self.replays += self._policy is None
        return original(self, arguments)

    return replaced(GraphedForward, "__call__", call)


@contextmanager
def late_capture() -> Iterator[None]:
    """Preparation captures nothing, and a call without a graph captures one in the middle of a request."""

    def call(original: Callable[..., Any], self: GraphedForward, arguments: dict[str, Any]) -> Any:
        self.prepare(arguments)
        return original(self, arguments)

    with (
        patch.object(GraphedForward, "freeze", lambda _self: None),
        patch.object(Arm, "shapes", lambda _self, _calls: []),
        replaced(GraphedForward, "__call__", call),
    ):
        yield


def lost_graph() -> Patch:
    """A call never finds the graph that was captured for it, and runs eagerly."""

    def find(original: Callable[..., Any], self: GraphCache, signature: Any) -> Any:
        return [] if self.frozen else original(self, signature)

    return replaced(GraphCache, "find", find)
