"""Records in another arithmetic than eager's: how outputs, compilation and break-even are judged and shown."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from bcgbench.accuracy import ErrorTally, References, relative_error
from bcgbench.answers import Finals
from bcgbench.cli_compare import judge_run
from bcgbench.metrics import break_even_images
from bcgbench.reports import headline, renderer
from bcgbench.reports.base import Report, exit_code
from bcgbench.types import Record
from bcgbench.verdict import compare, judge
from tests import factories as make


def phrase(**changes: Any) -> tuple[bool | None, str, int]:
    """Exactness, first words and exit code of a rival's outputs."""
    found = compare(make.record(), make.rival_record(**changes))
    return found.exact, found.fidelity.partition(":")[0], found.exit_code


def test_an_error_of_eagers_size_is_within_tolerance():
    """Three times eager's own in bfloat16, twice in float32, and whatever rounding the result alone gives."""
    half = make.accuracy(eager_error=0.01)
    assert phrase(accuracy=make.replace(half, error=0.0299)) == (False, "within tolerance", 0)
    assert phrase(accuracy=make.replace(half, error=0.0301)) == (False, "different", 3)
    assert phrase(accuracy=make.replace(half, error=0.011, eager_error=1e-9)) == (False, "within tolerance", 0)
    single = make.case(dtype="float32")
    for error, word in ((1.9e-4, "within tolerance"), (2.1e-4, "different")):
        record = make.rival_record(case=single, accuracy=make.accuracy(error=error, eager_error=1e-4))
        assert compare(make.record(case=single), record).fidelity.startswith(word)


def test_equal_bits_are_exact_and_nothing_else_is_asked():
    """A rival may do exactly what eager does."""
    assert phrase(fidelity=(make.fidelity(question="arithmetic"),)) == (True, "exact", 0)


def test_a_rival_that_is_not_ok_gets_no_credit():
    """Outputs within tolerance may be eager's own; wrong ones still count."""
    late = make.compilation(late_frames=1)
    for accuracy, words, code in ((make.accuracy(), "not judged", 4), (make.accuracy(error=1.0), "different", 3)):
        record = make.rival_record(status="INVALID", compilation=late, accuracy=accuracy)
        found = compare(make.record(), record)
        assert (found.fidelity.partition(":")[0], found.exit_code) == (words, code)


def test_without_a_reference_nothing_is_judged():
    """The reason is named; a rival gets no credit for outputs that nobody could check."""
    unknown = make.accuracy(calls=0, worst_call=None, error=None, eager_error=None, note="OutOfMemoryError: no room")
    found = compare(make.record(), make.rival_record(accuracy=unknown))
    assert (found.exact, found.exit_code) == (None, 4)
    assert "SKIPPED, OutOfMemoryError: no room" in found.fidelity


def test_requests_that_do_not_repeat_themselves_are_different():
    """A stale input or an overwritten output of torch's own graphs shows there; eager's own noise excuses it."""
    assert phrase(accuracy=make.accuracy(unrepeated=1)) == (False, "different", 3)
    noisy = make.record(fidelity=(make.inexact(question="rerun"),))
    record = make.rival_record(accuracy=make.accuracy(unrepeated=1))
    assert compare(noisy, record).fidelity.startswith("within tolerance")
    assert re.search(r"outputs +reference +within tolerance\n", renderer("table")(report(noisy, record)))


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"late_frames": 1}, "INVALID", "late-compile"),
        ({"cudagraph_skips": 12}, "INVALID", "not-engaged"),
        ({"cudagraph_skips": 3}, "OK", "cudagraphs-skipped"),
    ],
)
def test_a_rival_that_did_not_run_as_named(changes: dict[str, int], status: str, code: str):
    """A late compilation is a late capture; graphs that torch skipped are none."""
    found = judge(make.rival_record(compilation=make.compilation(**changes)))
    assert (found[0], make.codes(found)) == (status, [code])
    assert judge(make.rival_record())[0] == "OK"


def test_preparation_is_paid_back_by_images():
    """30 s for 0.6 s an image; never by an arm that is slower, and unknown for one that was not prepared."""
    eager = make.record()
    assert break_even_images(eager, make.rival_record()) == pytest.approx(50, rel=1e-3)
    assert break_even_images(eager, make.rival_record(denoise_s=1.1)) == math.inf
    assert break_even_images(eager, make.rival_record(prepare_s=None)) is None
    assert break_even_images(eager, make.rival_record(status="INVALID")) is None


def report(*records: Record) -> Report:
    return Report(info=make.run_info(), records=records, verdicts=judge_run(records))


def test_the_first_line_tells_of_a_wrong_and_of_an_invalid_rival():
    """Whatever decides the exit code."""
    wrong = report(make.record(), make.graph_record(), make.rival_record(accuracy=make.accuracy(error=1.0)))
    assert headline.overall(wrong).startswith("OUTPUTS DIFFER: 1 case; bcg against eager FASTER 2.00x")
    assert "; outputs exact in 1 of 2; replays" in headline.overall(wrong)
    late = judged(make.rival_record(compilation=make.compilation(late_frames=1)))
    invalid = headline.overall(report(make.record(), make.graph_record(), late))
    assert invalid.startswith("INVALID: 1 case; 1 arm INVALID (late-compile: compile); bcg against eager FASTER 2.00x")


def judged(record: Record) -> Record:
    """With its status and reasons."""
    status, reasons = judge(record)
    return make.replace(record, status=status, reasons=reasons)


def test_a_run_without_compiled_arms_says_nothing_of_graph_breaks():
    """A row of "not compiled" alone."""
    assert "graph breaks" not in renderer("table")(report(make.record(), make.graph_record()))


def test_a_slow_rival_fails_no_run_and_a_wrong_one_does():
    """Rivals are held against, not under test; their outputs count like any other."""
    bcg = make.graph_record()
    assert exit_code(report(make.record(), bcg, make.rival_record(denoise_s=1.5))) == 0
    assert exit_code(report(make.record(), bcg, make.rival_record(accuracy=make.accuracy(error=1.0)))) == 3


def test_reports_show_tolerance_break_even_and_graph_breaks():
    """In the table of arms and in markdown, and bcg+compile against its rivals."""
    both = make.graph_record(runner="bcg+compile", accuracy=make.accuracy(), compilation=make.compilation(),
                             fidelity=(make.inexact(question="arithmetic"),))  # fmt: skip
    shown = report(make.record(), make.rival_record(), both)
    assert [(v.a, v.b) for v in shown.verdicts] == [
        ("eager", "compile"), ("eager", "bcg+compile"), ("compile", "bcg+compile"),
    ]  # fmt: skip
    text = renderer("table")(shown)
    for line in ("within tolerance", "after 50 images", "8 in 12 graphs", "bcg+compile against compile"):
        assert line in text
    assert "after 50 images of 20 steps" in renderer("markdown")(shown)


def test_errors_are_relative_and_the_worst_call_is_named():
    """Root mean squares against the reference; eager's and the arm's in the same call."""
    wide = {0: [torch.tensor([3.0, 4.0])], 2: [torch.tensor([3.0, 4.0])]}
    tally = ErrorTally(references=References(dtype=torch.float32, outputs=wide))
    eager, good, bad = torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.25]), torch.tensor([3.0, 5.0])
    for output in (good, bad, bad):  # the second call has no reference
        tally.add(eager, output)
    found = tally.accuracy(Finals())
    assert (found.calls, found.worst_call, found.dtype) == (2, 2, "float32")
    assert (found.error, found.eager_error) == (pytest.approx(0.2), pytest.approx(0.1))
    assert relative_error(torch.tensor([float("nan"), 4.0]), wide[0]) > 1e300
