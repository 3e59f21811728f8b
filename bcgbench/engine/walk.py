"""Replay a graph one step at a time beside a new capture of the same call, to find where the replay goes wrong.

The new capture holds the data of this very call, so its replay is right even where the engine's copies are not: an
input that is not copied, a bridge that is not filled. Memory: the second graph, and on a tape one segment's results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bcgbench.engine import diagnose, trees
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.segments import Backend, CudaBackend
from bcgbench.engine.steps import Break, Step
from bcgbench.engine.tape import TapeBackend, TapeSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that a step of a replay reads or writes."""

    step: int
    """Index in the graph's steps; -1 for its inputs."""
    what: str
    """In words: "input timestep", "what break X reads", "result of aten::mul"."""
    operation: str | None = None
    """The operation that wrote it, on a tape; the function, for a break."""
    where: str = ""
    """Module path and source line, where known."""
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The first thing that differs."""

    mark: Mark
    right: Tensor | None
    wrong: Tensor | None
    """Both None where the graphs do not have the same steps."""


class PlacedSegment(TapeSegment):
    """A taped segment that knows where in the model each operation was called."""

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()
        self.where: list[str] = []
        self._module = module

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        super().record(func, args, kwargs, out)
        if len(self._operations) > len(self.where):
            self.where.append(diagnose.operation_site(self._module))


class PlacedTape(TapeBackend):
    """The tape for a capture that is walked."""

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()
        self._module = module

    def segment(self) -> TapeSegment:
        return PlacedSegment(self._module)


def backend_apart(device: torch.device, module: nn.Module | None) -> Backend:
    """A backend with a memory pool of its own, so that the capture touches no other graph."""
    return CudaBackend(device) if device.type == "cuda" else PlacedTape(module)


def first_fault(fresh: SegmentedGraph, old: SegmentedGraph, leaves: list[Any]) -> Fault | None:
    """Replay both on `leaves`, step by step; the first input, break or operation of `old` that is not like `fresh`.

    None where all are alike. Raises what a replay raises.
    """
    fresh.inputs.update(leaves)
    old.inputs.update(leaves)
    names = list(trees.paths(fresh.signature.spec))
    for name, right, wrong in zip(names, fresh.inputs.leaves, old.inputs.leaves, strict=True):
        if isinstance(right, Tensor) and not bit_equal(right, wrong):
            return Fault(mark=Mark(step=-1, what=f"input {name}", tensors=[]), right=right, wrong=wrong)
    for index, (good, bad) in enumerate(zip(fresh.steps, old.steps, strict=False)):
        marks = [_copied(mark) for mark in _replayed(good, index, where=_place_of(good))]
        for right_mark, wrong_mark in zip(marks, _replayed(bad, index, where=_place_of(good)), strict=False):
            if (fault := _compare(right_mark, wrong_mark)) is not None:
                return fault
    for right, wrong in zip(trees.tensors(fresh.output), trees.tensors(old.output), strict=False):
        if not bit_equal(right, wrong):
            what = "what the last segment leaves as output"
            return Fault(mark=Mark(step=len(old.steps) - 1, what=what, tensors=[]), right=right, wrong=wrong)
    if len(fresh.steps) != len(old.steps):
        what = f"a graph of {len(old.steps)} steps where a new capture has {len(fresh.steps)}"
        return Fault(mark=Mark(step=len(old.steps), what=what, tensors=[]), right=None, wrong=None)
    return None


def first_unfilled(graph: SegmentedGraph, leaves: list[Any]) -> Fault | None:
    """Replay on `leaves`, each break called twice: the first whose result is not where the next segment reads it."""
    graph.inputs.update(leaves)
    for index, step in enumerate(graph.steps):
        step.replay()
        if not isinstance(step, Break):
            continue
        results, _ = trees.flatten(step.function(*step.args, **step.kwargs))
        for at, bridge in step.bridges:
            if not bit_equal(results[at], bridge.handed):
                mark = _handed_on(step, index)
                return Fault(mark=mark, right=results[at], wrong=bridge.handed.clone())
    return None


def _handed_on(step: Break, index: int) -> Mark:
    name = diagnose.function_name(step.function)
    return Mark(step=index, what=f"what break {name} hands on", operation=name, where=step.where,
                tensors=[bridge.handed for _, bridge in step.bridges])  # fmt: skip


def _place_of(step: Step) -> list[str]:
    return step.where if isinstance(step, PlacedSegment) else []


def _copied(mark: Mark) -> Mark:
    return Mark(step=mark.step, what=mark.what, operation=mark.operation, where=mark.where,
                tensors=[tensor.clone() for tensor in mark.tensors])  # fmt: skip


def _compare(right: Mark, wrong: Mark) -> Fault | None:
    if right.what != wrong.what or len(right.tensors) != len(wrong.tensors):
        return Fault(mark=right, right=None, wrong=None)
    pairs = zip(right.tensors, wrong.tensors, strict=True)
    return next((Fault(mark=right, right=a, wrong=b.clone()) for a, b in pairs if not bit_equal(a, b)), None)


def _replayed(step: Step, index: int, *, where: list[str]) -> Iterator[Mark]:
    """Replay a step; what it reads and writes, each noted when it is."""
    if isinstance(step, Break):
        name = diagnose.function_name(step.function)
        read = trees.tensors((step.args, step.kwargs))
        yield Mark(
            step=index,
            what=f"what break {name} reads from the segment before",
            operation=None,
            where=step.where,
            tensors=read,
        )
        step.replay()
        yield _handed_on(step, index)
    elif isinstance(step, TapeSegment):
        yield from _operations(step, index, where=where)
    else:
        step.replay()


def _operations(step: TapeSegment, index: int, *, where: list[str]) -> list[Mark]:
    marks: list[Mark] = []

    def seen(number: int, func: Any, wrote: list[Tensor]) -> None:
        name = func._schema.name if hasattr(func, "_schema") else "compiled code"
        place = where[number] if number < len(where) else ""
        kept = [tensor.clone() for tensor in wrote]  # a later operation may write there again
        marks.append(Mark(step=index, what=f"result of {name}", operation=name, where=place, tensors=kept))

    step.replay(seen)
    return marks
