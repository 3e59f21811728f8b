"""Faults of capture and replay: each patches one function of the engine for as long as its context is open.

Here: what is broken and how. Not here: what has to find it (the table in `faults`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from bcgbench.arms import Arm
from bcgbench.engine import graphed, segments, trees
from bcgbench.engine.bridge import Bridge
from bcgbench.engine.buffers import Address, StaticInputs
from bcgbench.engine.cache import GraphCache, Limits
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.segments import CudaSegment
from bcgbench.engine.steps import Break, Guard
from bcgbench.engine.tape import TapeSegment
from bcgbench.faults.places import changed_model, replaced
from bcgbench.models import base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Patch = AbstractContextManager[Any]
MASK_AXES = 2
ODD = 2
CHURN = 16
"""Tensors of each size that take freed memory."""


def stale_input() -> Patch:
    """A graph reads what its inputs held at capture."""

    def update(original: Callable[..., None], self: StaticInputs, leaves: list[Any]) -> None:
        if not self.copies:
            original(self, leaves)

    return replaced(StaticInputs, "update", update)


def frozen_mask() -> Patch:
    """One input of many, the prompt's mask, stays as captured."""

    def is_mask(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.bool) and leaf.ndim == MASK_AXES

    def update(original: Callable[..., None], self: StaticInputs, leaves: list[Any]) -> None:
        own = dict(zip(self._buffers, self.buffers, strict=True)) if self.copies else {}
        original(self, [own.get(index, leaf) if is_mask(leaf) else leaf for index, leaf in enumerate(leaves)])

    return replaced(StaticInputs, "update", update)


def stale_timestep() -> Patch:
    """The smallest input stays as captured: a step computed for another time."""

    def update(original: Callable[..., None], self: StaticInputs, leaves: list[Any]) -> None:
        if self.copies:
            smallest = min(self._buffers, key=lambda index: self._buffers[index].numel())
            leaves = [self.leaves[index] if index == smallest else leaf for index, leaf in enumerate(leaves)]
        original(self, leaves)

    return replaced(StaticInputs, "update", update)


def uncloned_output() -> Patch:
    """A replay hands out the graph's own output memory."""

    def replay(original: Callable[..., Any], self: SegmentedGraph, leaves: list[Any]) -> Any:
        original(self, leaves)
        return self.output

    return replaced(SegmentedGraph, "replay", replay)


def dropped_bridge() -> Patch:
    """What a break returns at replay is not handed on: the next segment reads what lay there before."""

    def replay(_original: Callable[..., None], self: Break) -> None:
        self.function(*self.args, **self.kwargs)
        _hand_on_old(self)

    return replaced(Break, "replay", replay)


def _hand_on_old(step: Break) -> None:
    """What lay there before: where nothing is handed on at all, a segment may read memory that is the GPU's no more."""
    for _, bridge in step.bridges:
        bridge.fill(bridge.place.clone())


def skipped_break() -> Patch:
    """What runs eagerly between segments is not run again."""
    return patch.object(Break, "replay", _hand_on_old)


def skipped_segment() -> Patch:
    """A replay ends before its last step."""

    def replay(original: Callable[..., Any], self: SegmentedGraph, leaves: list[Any]) -> Any:
        with patch.object(self, "steps", self.steps[:-1]):
            return original(self, leaves)

    return replaced(SegmentedGraph, "replay", replay)


def lost_operation(name: str = "aten::add") -> Patch:
    """An operation runs while capturing and is not recorded."""

    def record(original: Callable[..., None], self: TapeSegment, func: Any, *rest: Any) -> None:
        if func._schema.name != name:
            original(self, func, *rest)

    return replaced(TapeSegment, "record", record)


def flipped_bit() -> Patch:
    """A segment's last result is off by one bit when it closes."""

    def end(original: Callable[..., None], self: TapeSegment) -> None:
        original(self)
        for *_, fresh in self._operations[-1:]:
            for tensor in fresh:
                tensor.mul_(1 + 2**-23)

    return replaced(TapeSegment, "end", end)


def wrong_graph() -> Patch:
    """Any signature finds the graph that was captured first."""

    def find(_original: Callable[..., Any], self: GraphCache, _signature: Any) -> list[SegmentedGraph]:
        return self.graphs[:1]

    return replaced(GraphCache, "find", find)


def wrong_branch() -> Patch:
    """Every other replay, the unconditional branch, returns what the one before it returned."""
    kept: list[Any] = []

    def replay(original: Callable[..., Any], self: SegmentedGraph, leaves: list[Any]) -> Any:
        kept.append(original(self, leaves))
        return trees.clone(kept[-1] if len(kept) % ODD else kept[-2])

    return replaced(SegmentedGraph, "replay", replay)


def baked_constant() -> ExitStack:
    """The model's output depends on its timestep read on the host, and guards do not look at it again."""

    def forward(original: Callable[..., Any], **arguments: Any) -> Any:
        factor = 1 + float(arguments["t"].flatten()[0])
        return trees.map_leaves(lambda leaf: leaf * factor, original(**arguments))

    both = ExitStack()
    both.enter_context(changed_model(forward))
    both.enter_context(patch.object(Guard, "replay", lambda _self: None))
    return both


def host_read() -> Patch:
    """The model counts its calls on the device and reads the count: another in each, so that no graph can have it."""
    counts: list[Tensor] = []

    def forward(original: Callable[..., Any], **arguments: Any) -> Any:
        if not counts:  # by the traced request, long before a capture
            counts.append(torch.zeros((), device=arguments["t"].device))
        float(counts[0].add_(1))
        return original(**arguments)

    return changed_model(forward)


def failing_capture() -> Patch:
    """The model indexes with a mask, which a graph cannot hold."""

    def forward(original: Callable[..., Any], **arguments: Any) -> Any:
        output = original(**arguments)
        trees.map_leaves(lambda leaf: leaf[leaf > 0].sum(), output)
        return output

    return changed_model(forward)


def dead_argument() -> Patch:
    """A call carries 72,000 values that nothing reads."""

    def call(original: Callable[..., Any], self: Any, arguments: dict[str, Any]) -> Any:
        return original(self, {**arguments, "dead": [None] * 72_000})

    return replaced(GraphedForward, "__call__", call)


@contextmanager
def lost_random_advance() -> Iterator[None]:
    """A model that draws random numbers in its forward, every request and every checked call from one
    seed; a replay never advances the generator.
    """

    def forward(original: Callable[..., Any], **arguments: Any) -> Any:
        return trees.map_leaves(lambda leaf: leaf + torch.randn_like(leaf), original(**arguments))

    def seeded(original: Callable[..., Any], *args: Any, **how: Any) -> Any:
        torch.manual_seed(0)
        return original(*args, **how)

    def replay(original: Callable[..., Any], self: SegmentedGraph, leaves: list[Any]) -> Any:
        with torch.random.fork_rng():
            return original(self, leaves)

    with (
        changed_model(forward),
        replaced(base.Session, "produce", seeded),
        replaced(Arm, "call", seeded),
        replaced(SegmentedGraph, "replay", replay),
    ):
        yield


def raising_replay() -> Patch:
    """An eager call between two segments raises."""

    def replay(_original: Callable[..., None], self: Break) -> None:
        raise RuntimeError(f"injected into {self.name}")

    return replaced(Break, "replay", replay)


def evicted_graph() -> Patch:
    """The cache holds one graph where the case needs more."""
    return patch.object(graphed, "Limits", lambda: Limits(entries=1))


def nan_output() -> Patch:
    """A replay computes NaN."""

    def replay(original: Callable[..., Any], self: SegmentedGraph, leaves: list[Any]) -> Any:
        return trees.map_leaves(lambda leaf: leaf * float("nan"), original(self, leaves))

    return replaced(SegmentedGraph, "replay", replay)


@contextmanager
def freed_reference() -> Iterator[None]:
    """A graph reads what a break returned where it lay, without keeping it, and the allocator gives it to others."""
    returned: list[Tensor] = []
    others: list[Tensor] = []

    def bridge(_original: Callable[..., Any], _self: CudaSegment, result: Tensor) -> tuple[Tensor, Bridge]:
        returned.append(torch.empty_like(result, device="meta"))
        return result, Bridge(Address.of(result))

    def capture(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        graph = original(*args, **kwargs)
        others.extend(torch.full_like(like, 7, device="cuda") for like in returned * CHURN)
        return graph

    with (
        replaced(CudaSegment, "bridge", bridge),
        patch.object(Bridge, "fill", lambda _self, _result: None),
        replaced(graphed, "capture", capture),
    ):
        yield


@contextmanager
def unjoined_stream() -> Iterator[None]:
    """The model leaves work on a side stream, and the engine does not join it before it ends a segment."""

    def forward(original: Callable[..., Any], **arguments: Any) -> Any:
        output = original(**arguments)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            trees.map_leaves(lambda leaf: leaf * 2, output)
        return output

    with changed_model(forward), patch.object(segments, "watch_forks", lambda _stream, _forks: ExitStack()):
        yield
