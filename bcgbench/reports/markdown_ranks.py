"""The blocks about cases that several processes share: every rank beside the others, and all of them beside one."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from bcgbench.merge import slowest
from bcgbench.metrics import METRICS
from bcgbench.published import FIGURES
from bcgbench.reports import base, formats
from bcgbench.reports.markdown_syntax import escape, folded, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bcgbench.reports.base import CaseView
    from bcgbench.types import RankResult, Record

COLUMNS = (
    "Model / shape", "Arm", "Rank", "GPU", "Denoise", "GPU busy", "Published busy", "Launches per step",
    "Replays / expected", "Fallbacks", "Peak allocated",
)  # fmt: skip
ALONE_COLUMNS = ("Model / shape", "Arm", "Denoise on one", "Denoise on all", "One / all", "GPU busy on one")
ARMS = ("eager", "bcg")
_ABOUT = (
    "Each rank runs its share of every transformer call; the exchange of outputs is part of the denoise span. GPU busy "
    "leaves out kernels that wait for another GPU. Bold is the slowest rank of an arm."
)
_ABOUT_ALONE = (
    "Measured by other processes, not in turn, and of other shapes: a comparison of two ways to run, not a verdict."
)


def ranks(views: tuple[CaseView, ...]) -> list[str]:
    """The blocks, or nothing where no case was shared."""
    rows = [row for view in views for record in view.arms.values() for row in _rows(view, record)]
    alone = [row for view in views for row in _against_one(view, views)]
    blocks = [folded("Ranks", f"{_ABOUT}\n\n{table(COLUMNS, rows)}")] if rows else []
    return blocks + ([folded("One and several", f"{_ABOUT_ALONE}\n\n{table(ALONE_COLUMNS, alone)}")] if alone else [])


def _rows(view: CaseView, record: Record) -> Iterator[list[str]]:
    last = slowest(record)
    for rank in record.ranks:
        launches = sum(rank.profile.launches.values()) if rank.profile else None
        cells = [
            view.name,
            record.runner,
            str(rank.rank),
            rank.gpu or "n/a (CPU)",
            _denoise(view, rank),
            formats.percent(rank.gpu_busy) if rank.gpu_busy is not None else formats.missing("not profiled"),
            _published_busy(view, record),
            formats.missing("not profiled") if launches is None else f"{launches:.0f}",
            *_proof(rank),
            _peak(rank),
        ]
        shown = [escape(cell) for cell in cells]
        shown[2] = f"**{shown[2]}**" if rank is last and view.timed else shown[2]
        yield shown


def _denoise(view: CaseView, rank: RankResult) -> str:
    if not view.timed:
        return formats.NOT_TIMED
    return formats.seconds(median(rank.denoise_s)) if rank.denoise_s else formats.missing("not measured")


def _published_busy(view: CaseView, record: Record) -> str:
    """The published figure of this arm, on as many GPUs."""
    busy = next((f.busy for f in FIGURES if f.fits(view.case) and f.gpus == len(record.ranks) and f.busy), None)
    return formats.percent(busy[ARMS.index(record.runner)]) if busy and record.runner in ARMS else "none"


def _proof(rank: RankResult) -> list[str]:
    proof = rank.engagement
    if proof is None or not proof.captures or not max(proof.captures):
        return ["no graph", "no graph"]
    return [f"{proof.replays} / {proof.expected_forwards}", str(proof.fallbacks)]


def _peak(rank: RankResult) -> str:
    peak = rank.memory.peak_allocated_bytes if rank.memory else None
    return formats.missing("CPU") if peak is None else formats.size(peak)


def _against_one(view: CaseView, views: tuple[CaseView, ...]) -> Iterator[list[str]]:
    """Arms of a shared case beside those of the same case in one process, where a report has both."""
    if view.case.parallel == "none" or not view.timed:
        return
    key = replace(view.case, parallel="none").key
    one = next((other for other in views if other.case.key == key), None)
    for label, record in view.arms.items():
        before = one.arms.get(label) if one else None
        if before is None or before.status != "OK" or record.status != "OK":
            continue
        times = [METRICS["denoise_s"].read(each) for each in (before, record)]
        ratio = formats.ratio(times[0] / times[1]) if times[0] and times[1] else formats.missing("not measured")
        yield [
            escape(text)
            for text in (
                view.name,
                label,
                *(formats.missing("not measured") if each is None else formats.seconds(each) for each in times),
                ratio,
                base.metric_text(view, before, "gpu_busy"),
            )
        ]
