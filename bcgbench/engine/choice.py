"""Break policy `best`: the form of a graph that is exact and fastest on this device, and why it was taken.

A graph may break at attention, or only where capture is illegal, which for most models is nowhere: a mask is data, so
one bucket serves every prompt length without a break. Both forms are captured for one call, each held bit for bit
against eager as every capture is, and timed by turns. Where nothing can be timed, the form with fewer breaks is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.segments import Backend
from bcgbench.engine.tape import backend_for
from bcgbench.errors import CaptureError

ROUNDS = 9
"""Replays of each form by turns; the first two only warm the device."""
NOISE = 0.01
"""A form with more breaks must be faster by more than this share."""

Attempt = Callable[[BreakPolicy, Backend], SegmentedGraph]
"""Captures the call by a policy into a backend. Raises `CaptureError`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy to capture by, and why."""

    policy: BreakPolicy
    reason: str
    graph: SegmentedGraph | None = None
    """The graph of this call by that policy, where it lies in the engine's own memory."""


def choose(policy: BreakPolicy, attempt: Attempt, *, backend: Backend, leaves: list[Any]) -> Choice:
    """Capture `best` both ways. The form that is not taken leaves no graph and no pool behind.

    Raises `CaptureError` if neither can be captured.
    """
    fewest, attention = policy.forms
    try:
        graph = attempt(fewest, backend)
    except CaptureError as error:
        return Choice(attention, f"attention: with fewer breaks it cannot be captured ({_first_sentence(error)})")
    if backend.device.type != "cuda":
        return Choice(fewest, f"{_form(graph)}: the fewest that are legal; a tape has no speed", graph)
    try:
        rival = attempt(attention, backend_for(backend.device, backend.options))
    except (CaptureError, torch.OutOfMemoryError) as error:
        return Choice(
            fewest, f"{_form(graph)}: broken at attention it cannot be tried ({_first_sentence(error)})", graph
        )
    own_s, rival_s = _race([graph, rival], leaves)
    times = f"{own_s * 1e3:.3g} ms with {_form(graph)}, {rival_s * 1e3:.3g} ms with {_form(rival)}"
    if rival_s < own_s * (1 - NOISE):
        return Choice(attention, f"attention: {times}")
    return Choice(fewest, f"{_form(graph)}: {times}", graph)


def _form(graph: SegmentedGraph) -> str:
    return f"{graph.breaks} breaks" if graph.breaks else "no break"


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0]


def _race(graphs: list[SegmentedGraph], leaves: list[Any]) -> list[float]:
    """Median seconds of a replay of each, by turns, the host ahead of the GPU."""
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, timed in zip(graphs, spans, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay(leaves)
            end.record()
            timed.append((start, end))
    torch.cuda.synchronize()
    for graph in graphs:
        graph.replays = 0  # no request was served
    return [median(start.elapsed_time(end) / 1e3 for start, end in timed[2:]) for timed in spans]
