"""Published figures beside ours: rows that match, floors, and the line that explains the difference."""

from __future__ import annotations

import pytest

from bcgbench import cases, cli_compare, models, plan
from bcgbench.floor import peak_of
from bcgbench.published import FIGURES, Figure
from bcgbench.reports import markdown
from bcgbench.reports.base import Report
from tests import factories as make


def figure(model: str, width_px: int = 512) -> Figure:
    """The row of a model and width."""
    return next(row for row in FIGURES if (row.model, row.width_px) == (model, width_px))


def rendered(*records) -> str:
    """A markdown report."""
    shown = tuple({record.case.key: record.case for record in records}.values())
    verdicts = cli_compare.judge_run(records)
    return markdown.render(Report(info=make.run_info(cases=shown), records=records, verdicts=verdicts))


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row.model} {row.width_px}")
def test_every_row_is_a_case_that_can_be_run(row: Figure):
    """A released model at a size that it makes; figures behind a floor are those of the model's facts."""
    frames = f"x{row.frames}" if row.frames else ""
    case = cases.make_case(row.model, facts=models.facts, resolution=f"{row.width_px}x{row.height_px}{frames}")
    facts = models.facts(row.model)
    assert row.fits(case)
    assert row.source.startswith("https://")
    assert peak_of(row.gpu) is not None
    if row.parameters is not None:
        assert (row.parameters, row.rows) == (facts.transformer_parameters, plan.image_tokens(case, facts))


def test_only_z_image_turbo_was_published_below_the_compute_floor():
    """9 steps of 1024 rows through 6.15 B parameters take a B200 50 ms at least; 26 ms were published."""
    below = [row.model for row in FIGURES if row.floor_s and row.denoise_s and min(row.denoise_s) < row.floor_s]
    assert below == ["Tongyi-MAI/Z-Image-Turbo"]
    turbo = figure("Tongyi-MAI/Z-Image-Turbo")
    assert turbo.floor_s == pytest.approx(2 * 6_154_908_736 * 1024 * 9 / 2.25e15)
    assert turbo.denoise_s[0] > turbo.floor_s > turbo.denoise_s[1]


def test_published_and_own_figures_stand_side_by_side():
    """Values of the source as they are, per step where the steps differ, and the reasons from the facts of both."""
    text = rendered(make.record(denoise_s=(1.0,) * 10), make.graph_record(denoise_s=(0.5,) * 10))
    block = text.partition("Published figures")[2].partition("</details>")[0]
    row = "| Qwen/Qwen-Image @ 512x512 |"
    assert f"{row} Denoise | 6.480 s -> 2.450 s, 2.64x (50 steps) | 1.000 s -> 500.0 ms, 2.00x (20 steps) |" in block
    assert f"{row} Step | 129.6 ms -> 49.00 ms, 2.64x | 50.00 ms -> 25.00 ms, 2.00x |" in block
    assert "B200 there, NVIDIA H200 here; SGLang and its kernels there, diffusers 0.42.1 here" in block
    assert "50 steps there, 20 here" in block
    assert "eager waits for the host here (busy 40.0 % and 4.200 µs per launch)" in block
    assert "https://github.com/sgl-project/sglang/pull/27436" in block


def test_a_figure_below_the_floor_is_called_so():
    """The work, the rate and the least time are named."""
    case = make.case(model="Tongyi-MAI/Z-Image-Turbo")
    text = rendered(make.record(case=case), make.graph_record(case=case))
    assert "the published bcg denoise of 26.00 ms is below the compute floor of 50.42 ms" in text
    assert "-> 26.00 ms, 4.26x (9 steps)" in text


def test_there_is_no_block_without_a_match_or_without_times():
    """Another size, another model, a CPU."""
    for case in (make.case(width_px=256), make.case(model="Lightricks/LTX-2.3"), make.case(device="cpu")):
        assert "Published figures" not in rendered(make.record(case=case), make.graph_record(case=case))


def test_an_arm_that_failed_shows_its_reason_beside_the_published_figure():
    """Nothing is computed from half a pair."""
    text = rendered(make.record(), make.graph_record(status="FAILED", reasons=(make.reason(),), samples=()))
    assert "-> n/a (FAILED: not-engaged) (20 steps)" in text.partition("Published figures")[2]
