"""Records of all ranks as one: the worst status, every finding, and what must be the same on all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bcgbench.merge import Part, merge, slowest
from bcgbench.reports import renderer
from bcgbench.reports.base import Report
from bcgbench.types import Reason, Record
from tests import factories as make

CASE = make.case(parallel="cfg:2", model="Lightricks/LTX-2", width_px=768, height_px=512, frames=121)


def part(**changes: Any) -> Part:
    """One rank's valid record of a graph arm."""
    divided = changes.pop("divided", 40)
    asked = changes.pop("asked", ("hidden_states bfloat16[1, 4096, 64]",))
    return Part(record=make.graph_record(case=CASE, **changes), asked=asked, divided=divided, whole=0)


def merged(*parts: Part, **how: Any) -> Record:
    """All parts as one record."""
    return merge(parts, **how)


def test_ranks_that_agree_are_one_ok_record():
    """Calls of all ranks count; the rest is of rank 0, beside every rank's own figures."""
    record = merged(part(denoise_s=0.5), part(denoise_s=0.6))
    assert (record.status, record.reasons) == ("OK", ())
    assert (record.fidelity[0].calls, record.fidelity[0].calls_exact, record.fidelity[0].exact) == (80, 80, True)
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert slowest(record) == record.ranks[1]


def test_an_inexact_rank_makes_the_whole_inexact():
    """Whichever it is."""
    record = merged(part(), part(fidelity=(make.inexact(),)))
    assert (record.fidelity[0].exact, record.fidelity[0].calls_exact) == (False, 52)
    assert record.fidelity[0].first_call == 12


def test_the_worst_status_counts_and_every_finding_is_kept():
    """A finding of another rank names it; an informational one changes no status."""
    broken = Reason(code="fallback", text="3 calls ran eagerly")
    record = merged(part(), part(status="INVALID", reasons=(broken,)))
    assert (record.status, record.reasons) == ("INVALID", (replace(broken, text="rank 1: 3 calls ran eagerly"),))
    spare = Reason(code="uncalled", text="1 graph was not needed")
    assert merged(part(), part(reasons=(spare,))).status == "OK"


def test_counters_and_signatures_must_agree():
    """Of ranks that are asked for the same; shares of unlike length may need other graphs."""
    short = replace(make.engagement(), replays=0, fallbacks=7)
    (replays, fallbacks) = merged(part(), part(engagement=short)).reasons
    assert replays.text.startswith("replays by rank: ")
    assert fallbacks.text == "fallbacks by rank: 0, 7"
    other = replace(make.engagement(), signatures=("hidden_states bfloat16[1, 1024, 64]",))
    assert "holds other graphs than rank 0" in merged(part(), part(engagement=other)).reasons[0].text
    assert merged(part(), part(engagement=other, asked=("another",))).status == "OK"


def test_what_no_rank_divided_is_not_parallel():
    """Each ran all of it, so the time is that of one GPU."""
    record = merged(part(divided=0), part(divided=0))
    assert (record.status, record.reasons[0].code) == ("INVALID", "not-parallel")


def test_what_the_ranks_decided_makes_the_record_invalid():
    """With the reason first."""
    vote = Reason(code="rank-vote", text="every rank ran eagerly")
    record = merged(part(), part(), reasons=(vote,))
    assert (record.status, record.reasons) == ("INVALID", (vote,))


def test_the_report_has_every_rank_beside_the_published_figure():
    """Busy per rank, the slowest in bold."""
    parts = [part(denoise_s=0.5), part(denoise_s=0.6)]
    info = make.run_info(cases=(CASE,))
    text = renderer("markdown")(Report(info=info, records=(merged(*parts),)))
    rows = [line for line in text.splitlines() if line.startswith("| Lightricks/LTX-2 @ 768x512x121, cfg:2 | bcg | ")]
    ranks = [row for row in rows if "96.2 %" in row]
    assert len(ranks) == 2
    assert "| **1** |" in ranks[1]
