"""Which records are paired with which, for `run` and for `compare`. No printing and no thresholds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from bcgbench import verdict as judge
from bcgbench.comparable import comparable, share_prior
from bcgbench.errors import NothingMeasured
from bcgbench.outputs import answer
from bcgbench.reports.base import arm_of_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bcgbench.types import Case, Record, Verdict

REFERENCE = "eager"
BOUNDS = (
    ("graph", "bcg"),
    ("graph-exact", "bcg"),
    ("eager-best", "bcg"),
    *((rival, "bcg+compile") for rival in ("compile", "compile-cudagraph", "compile-autotune", "graph+compile", "bcg")),
)
"""What breaks and padding cost against whole graphs, and graphs against rivals; shown, never a reason to fail a run."""


def judge_run(records: Sequence[Record]) -> tuple[Verdict, ...]:
    """Per case, every arm against eager (or the first arm there is), and graphs against their bounds and rivals.

    An arm that failed or was skipped is in no pair: its own record says why and sets the exit code.
    """
    measured = [record for record in records if record.status in ("OK", "INVALID")]
    return tuple(_judged(arms, a=a, b=b) for arms in _by_case(measured).values() for a, b in _pairs(tuple(arms)))


def judge_arms(records: Sequence[Record], *, a: str, b: str) -> tuple[Verdict, ...]:
    """Arm b against arm a on every case that has both. NothingMeasured names the arms that there are."""
    both = [arms for arms in _by_case(records).values() if a in arms and b in arms]
    if not both:
        present = ", ".join(dict.fromkeys(record.runner for record in records)) or "none"
        message = f"no case of this run has both arms {a} and {b}; arms measured: {present}"
        raise NothingMeasured(message)
    return tuple(_judged(arms, a=a, b=b) for arms in both)


def judge_runs(a: Sequence[Record], b: Sequence[Record], *, arms: Sequence[str] = ()) -> tuple[Verdict, ...]:
    """Equal arms of two runs, paired by case. The verdicts' arms name their run. NothingMeasured if none pairs.

    Cases that differ in their prior alone are paired where they have no equal: one may replay the other's.
    """
    exact = {(record.case.key, record.runner): record for record in b}
    ours = {(record.case.key, record.runner) for record in a}
    rest = [record for arm, record in exact.items() if arm not in ours]
    found = [
        (record, exact.get((record.case.key, record.runner)) or _nearest(record, rest))
        for record in a
        if not arms or record.runner in arms
    ]
    pairs = [(before, after) for before, after in found if after is not None]
    if not pairs:
        message = (
            f"no arm of the first run has a counterpart in the second: {_described(a)} against {_described(b)}"
            + (f", limited to {', '.join(arms)}" if arms else "")
            + _unlike(a, b)
        )
        raise NothingMeasured(message)
    return tuple(
        dataclasses.replace(
            judge.compare(before, after),
            a=arm_of_run(before),
            b=arm_of_run(after),
        )
        for before, after in pairs
    )


def cell(case: Case) -> str:
    """The key of a case without what only chooses its prior."""
    return dataclasses.replace(case, seed=0, prior=None, rewrite_prompts=False).key


def _nearest(record: Record, others: Sequence[Record]) -> Record | None:
    """The same arm of the same cell, of several the one with the same prior."""
    same = [other for other in others if (cell(other.case), other.runner) == (cell(record.case), record.runner)]
    return max(same, key=lambda other: share_prior(record, other), default=None)


def _judged(arms: dict[str, Record], *, a: str, b: str) -> Verdict:
    # How well eager repeats itself stands in eager's own record, also where eager is in neither arm.
    return judge.compare(arms[a], arms[b], rerun=answer(arms.values(), "rerun"))


def _by_case(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    cases: dict[str, dict[str, Record]] = {}
    for record in records:
        cases.setdefault(record.case.key, {})[record.runner] = record
    return cases


def _pairs(arms: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    reference = REFERENCE if REFERENCE in arms else arms[0]
    yield from ((reference, arm) for arm in arms if arm != reference)
    yield from (pair for pair in BOUNDS if set(pair) <= set(arms) and reference not in pair)


def _unlike(a: Sequence[Record], b: Sequence[Record]) -> str:
    """How an arm of one model differs in the two runs, as the end of a sentence; "" where none is in both."""
    same = ((x, y) for x in a for y in b if (x.case.model, x.runner) == (y.case.model, y.runner))
    return "".join(f"; {reason.text}" for pair in itertools.islice(same, 1) for reason in comparable(*pair))


def _described(records: Sequence[Record]) -> str:
    found = dict.fromkeys(f"{r.case.model} {r.case.resolution} {r.runner}" for r in records)
    return "; ".join(found) or "no record"
