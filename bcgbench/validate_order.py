"""Checks of lifetime: graphs in every order over poisoned memory, calls after each other, eviction of one."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bcgbench.arms import Arm
from bcgbench.engine import trees
from bcgbench.validate import Answer, not_applicable, ruled
from bcgbench.validate_subject import Shape, Subject

ORDERS = 8
"""Orders of the graphs that are replayed; of up to three graphs all."""
CHURN_BYTES = (1 << 9, 1 << 14, 1 << 20, 1 << 23)
"""Sizes of blocks allocated, filled with NaN and freed between replays: whatever was freed too early is overwritten."""


def orders(count: int) -> list[tuple[int, ...]]:
    """All orders of up to three graphs; else as captured, reversed, and seeded others."""
    if count <= 3:  # noqa: PLR2004 - 6 orders
        return list(itertools.permutations(range(count)))
    shuffled, chance = list(range(count)), random.Random(0)
    found = {tuple(shuffled): None, tuple(reversed(shuffled)): None}
    while len(found) < ORDERS:
        chance.shuffle(shuffled)
        found[tuple(shuffled)] = None
    return list(found)


def churn(device: torch.device) -> None:
    """Allocate, fill with NaN and free blocks of several sizes."""
    blocks = [torch.full((size // 4,), float("nan"), device=device) for size in CHURN_BYTES for _ in range(4)]
    del blocks


def order(subject: Subject) -> Answer:
    """All captured signatures replayed in several orders, memory poisoned before each replay."""
    expected = [subject.eager(shape) for shape in subject.shapes]
    arm, problems = subject.arm(), []
    every = orders(len(subject.shapes))
    for sequence in every:
        for index in sequence:
            shape = subject.shapes[index]
            churn(subject.device)
            subject.graph(arm, shape).poison()
            if unlike := subject.unlike(expected[index], _call(subject, arm, shape)):
                problems.append(f"signature {index} of {shape.module} in order {sequence}: {unlike}")
    poisoned = f"{len(every)} orders of {len(subject.shapes)} graphs exact, break outputs and outputs poisoned with NaN"
    return ruled(problems[:ORDERS], fine=f"{poisoned}, {_called_only_misses(arm) or 'no miss'}")


def _call(subject: Subject, arm: Arm, shape: Shape) -> Any:
    return subject.hook(arm, shape).graphed(shape.arguments)


def _called_only_misses(arm: Arm) -> str:
    fallbacks = arm.counts.fallbacks
    return f"{fallbacks} of {arm.counts.forwards} calls ran eagerly" if fallbacks else ""


def aliasing(subject: Subject) -> Answer:
    """Calls after each other: what the first returned stays as it is, and has eager's types."""
    arm, problems, pairs = subject.arm(), [], 0
    for first, second in _pairs(subject):
        expected = trees.clone(subject.padded.call(first))
        held = arm.call(first)
        kept = trees.clone(held)
        arm.call(second)
        pairs += 1
        if unlike := subject.unlike(expected, kept):
            problems.append(f"a call of {first.module}: {unlike}")
        if unlike := subject.unlike(kept, held):
            problems.append(f"the result of {first.module} changed when {second.module} was called next: {unlike}")
    fine = f"{pairs} results stay as they were after the next call, with eager's types"
    return ruled(list(dict.fromkeys(problems)), fine=fine)


def _pairs(subject: Subject) -> Iterator[tuple[Any, Any]]:
    """Neighbouring calls of a request, which guidance makes of one step, and one signature twice with other data."""
    calls = subject.trace.calls[0]
    yield from itertools.pairwise(calls[:4])
    yield from itertools.pairwise(subject.samples)
    if len(calls) == 1:
        yield calls[0], calls[0]


def eviction(subject: Subject) -> Answer:
    """Room for one graph less than there are: the others replay exactly, and the evicted one after a new capture."""
    count = len(subject.shapes)
    if count < 2:  # noqa: PLR2004
        return not_applicable("one signature only: give prompts of two lengths, or --buckets, for another")
    arm, problems = subject.arm(captured=False), []
    for hook in arm.hooks.values():
        mine = sum(shape.module == name for shape in subject.shapes for name, own in arm.hooks.items() if own is hook)
        hook.graphed.cache.limits = replace(hook.graphed.cache.limits, entries=max(mine - 1, 1))
    expected = [subject.eager(shape) for shape in subject.shapes]
    for shape in (*subject.shapes, subject.shapes[0]):  # each capture past the limit evicts the oldest
        subject.hook(arm, shape).graphed.prepare(shape.arguments)
        gc.collect()
        churn(subject.device)
        for index, other in enumerate(subject.shapes):
            held = subject.hook(arm, other).graphed.cache.find(other.signature)
            if held is not None and (unlike := subject.unlike(expected[index], _call(subject, arm, other))):
                problems.append(f"signature {index} of {other.module} after an eviction: {unlike}")
    evicted = sum(hook.graphed.cache.evictions for hook in arm.hooks.values())
    if not evicted:
        return not_applicable("no denoiser has two signatures, so that none could be evicted")
    fine = f"{evicted} evictions: the other graphs replay exactly, and so does the one captured again"
    return ruled(list(dict.fromkeys(problems)), fine=fine)
