"""Checks of lifetime: graphs in every order over poisoned memory, calls after each other, eviction of one."""

from __future__ import annotations

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
            if unlike := subject.unlike(expected[index], subject.replayed(arm, shape)):
                problems.append(f"signature {index} of {shape.module} in order {sequence}: {unlike}")
    poisoned = f"{len(every)} orders of {len(subject.shapes)} graphs exact, break outputs and outputs poisoned with NaN"
    return ruled(problems[:ORDERS], fine=f"{poisoned}, {_called_only_misses(arm) or 'no miss'}")


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
    """Each graph evicted in turn: the others replay exactly, and so does the evicted one after a new capture."""
    modules = [shape.module for shape in subject.shapes]
    shapes = [shape for shape in subject.shapes if modules.count(shape.module) > 1]
    if not shapes:
        return not_applicable("one signature only: give prompts of two lengths, or --buckets, for another")
    arm, problems = subject.arm(captured=False), []
    expected = [subject.eager(shape) for shape in shapes]

    def replay_all(*, but: Shape | None = None, when: str) -> None:
        for index, shape in enumerate(shapes):
            if shape is not but and (unlike := subject.unlike(expected[index], subject.replayed(arm, shape))):
                problems.append(f"signature {index} of {shape.module} {when}: {unlike}")

    for shape in shapes:
        subject.hook(arm, shape).graphed.prepare(shape.arguments)
    for evicted in shapes:
        graphed = subject.hook(arm, evicted).graphed
        replay_all(but=evicted, when="before an eviction")  # which leaves it the least recently used
        graphed.cache.limits = replace(graphed.cache.limits, entries=len(graphed.cache) - 1)
        graphed.cache.trim()
        subject.collect()
        churn(subject.device)
        replay_all(but=evicted, when="after an eviction")
        graphed.cache.limits = replace(graphed.cache.limits, entries=len(graphed.cache) + 1)
        graphed.prepare(evicted.arguments)
        replay_all(when="after the evicted graph was captured again")
    problems += [text] if (text := _called_only_misses(arm)) else []
    fine = f"{len(shapes)} evictions: the other graphs replay exactly, and so does the one captured again"
    return ruled(list(dict.fromkeys(problems)), fine=fine)
