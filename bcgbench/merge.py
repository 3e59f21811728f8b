"""The records of one arm on all ranks of a parallel case, as one record.

Here: what must hold on every rank, and what must be the same on all. Not here: judging one record (`verdict.py`), whose
findings on each rank are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bcgbench.metrics import METRICS
from bcgbench.thresholds import DEFAULTS
from bcgbench.types import Engagement, Fidelity, RankResult, Reason, Record, Status

STATUSES: tuple[Status, ...] = ("OK", "SKIPPED", "INVALID", "FAILED")
"""From best to worst: an arm is what its worst rank is."""

COUNTERS: dict[str, Callable[[Engagement], int]] = {
    "expected calls": lambda e: e.expected_forwards,
    "replays": lambda e: e.replays,
    "fallbacks": lambda e: e.fallbacks,
    "graphs captured late": lambda e: e.captures[-1] - e.captures[0] if e.captures else 0,
}
"""What every rank counts, and all must count alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank hands in of one arm."""

    record: Record
    asked: tuple[str, ...]
    """Signatures that the traced requests ask for on this rank, sorted."""
    divided: int
    whole: int


def merge(parts: Sequence[Part], *, reasons: Sequence[Reason] = ()) -> Record:
    """Rank 0's record with the findings of all ranks, and `reasons` that the ranks agreed on, which make it INVALID."""
    records = [part.record for part in parts]
    own = records[0]
    together = [*reasons, *_disagreements(parts)]
    others = [
        replace(reason, text=f"rank {rank}: {reason.text}")
        for rank, record in enumerate(records[1:], start=1)
        for reason in record.reasons
        if reason not in own.reasons
    ]
    statuses: list[Status] = [record.status for record in records] + ["INVALID"] * bool(together)
    return replace(
        own,
        status=max(statuses, key=STATUSES.index),
        reasons=(*together, *own.reasons, *others),
        fidelity=tuple(_all(answer, records) for answer in own.fidelity),
        ranks=tuple(_result(rank, part) for rank, part in enumerate(parts)),
    )


def slowest(record: Record) -> RankResult | None:
    """The rank with the longest median denoise time; None where none was measured."""
    timed = [rank for rank in record.ranks if rank.denoise_s]
    return max(timed, key=lambda rank: median(rank.denoise_s), default=None)


def _result(rank: int, part: Part) -> RankResult:
    record, gpu = part.record, part.record.environment and part.record.environment.gpu
    return RankResult(
        rank=rank,
        gpu=gpu.name if gpu else None,
        denoise_s=tuple(s.denoise_host_s if s.denoise_event_s is None else s.denoise_event_s for s in record.measured),
        divided=part.divided,
        whole=part.whole,
        gpu_busy=METRICS["gpu_busy"].read(record),
        engagement=record.engagement,
        memory=record.memory,
        profile=record.profile,
    )


def _disagreements(parts: Sequence[Part]) -> list[Reason]:
    """What the ranks do not agree on, and calls that were never divided."""
    proofs = [part.record.engagement for part in parts]
    texts = []
    if all(proofs):
        for name, count in COUNTERS.items():
            counts = [count(proof) for proof in proofs if proof]
            if len(set(counts)) > 1:
                texts.append(f"{name} by rank: {', '.join(map(str, counts))}")
        texts += _signatures(
            [(part.asked, proof.signatures) for part, proof in zip(parts, proofs, strict=True) if proof]
        )
    found = [Reason(code="ranks-disagree", text=text) for text in texts]
    if not any(part.divided or part.record.status == "FAILED" for part in parts):
        text = f"no call was divided among {len(parts)} ranks: each ran all of it; is guidance off?"
        found.append(Reason(code="not-parallel", text=text))
    return found + [reason for part in parts[:1] for reason in _unlike_one(part.record)]


def _unlike_one(record: Record) -> Iterator[Reason]:
    """Latents of all ranks that are not those of one rank, beyond rounding. In float32, where rounding is small."""
    for answer in record.fidelity:
        worst = max((d.max_abs / (d.data_range / 2 or 1) for d in answer.latents), default=0.0)
        if answer.question == "ranks" and record.case.dtype == "float32" and worst > DEFAULTS.max_ranks_float32:
            text = f"latents differ by {worst:.2g} of their size from those of one rank that runs every call whole, "
            text += f"limit {DEFAULTS.max_ranks_float32:g}: is a call divided wrongly?"
            yield Reason(code="ranks-unlike-one", text=text)


def _signatures(ranks: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """Ranks that are asked for the same signatures must hold the same; they may be asked for others, by their share."""
    (asked, held), *others = ranks
    return [
        f"rank {rank} holds other graphs than rank 0, for the same calls: {sorted({*held} ^ {*theirs})}"
        for rank, (wanted, theirs) in enumerate(others, start=1)
        if wanted == asked and {*theirs} != {*held}
    ]


def _all(answer: Fidelity, records: Sequence[Record]) -> Fidelity:
    """One question answered by all ranks: every call counts, all else is of the rank that differs most."""
    every = [found for record in records for found in record.fidelity if found.question == answer.question]
    wrong = max(every, key=lambda found: (not found.exact, found.worst_call.max_abs if found.worst_call else 0.0))
    calls = sum(found.calls for found in every)
    exact = sum(found.calls_exact for found in every)
    return replace(wrong, calls=calls, calls_exact=exact)
