"""The prediction from an eager profile: what it says, when it advises against, how wrong it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bcgbench import forecast, store
from bcgbench.cli import app
from bcgbench.models import base
from bcgbench.predict import Eager, check, predict
from bcgbench.types import Case
from tests import factories as make

RESULTS = Path(__file__).parents[1] / "results"
RUN = "20261129T193806Z-resolution-8d3ee692"


def eager(**changes: float | None) -> Eager:
    """A launch-bound step of 100 ms with 10,000 kernels, busy for 40."""
    base = {"step_s": 0.1, "busy_s": 0.04, "padded_busy_s": None, "kernels": 1e4, "forwards": 2.0, "signatures": 5}
    return Eager(**(base | changes))


def invoke(*words: str | Path):
    return CliRunner().invoke(app, ["predict", *map(str, words)])


def test_a_launch_bound_step_gains_less_than_the_ceiling():
    """Gaps between kernels and breaks remain; preparation is paid back by images, in proportion to their steps."""
    found = predict(eager(), steps=10)
    assert (found.busy, found.ceiling, found.advice) == (pytest.approx(0.4), pytest.approx(2.5), "for")
    assert 2.2 < found.gain < found.ceiling
    assert found.prepare_s == pytest.approx(5 * 12 * 0.05)
    assert found.images == pytest.approx(found.prepare_s / (10 * (0.1 - found.step_s)))
    assert predict(eager(), steps=20).images == pytest.approx(found.images / 2)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"busy_s": 0.096}, "against: the GPU is busy 96%"),
        ({"busy_s": 0.094, "padded_busy_s": 0.104}, "against: padding costs"),
        ({"busy_s": 0.0945, "kernels": 1e4}, "not worth it"),
    ],
)
def test_it_advises_against_where_there_is_little_to_win(changes: dict[str, float], advice: str):
    """Above 95 % busy, where padding costs more than it saves, and within the prediction's own error."""
    assert predict(eager(**changes), steps=10).advice.startswith(advice)


def test_what_never_pays_is_infinite_and_what_is_not_known_is_none():
    """Neither is a number of images."""
    assert predict(eager(busy_s=0.0999), steps=10).images == math.inf
    assert predict(eager(signatures=None), steps=10).images is None


def test_published_gains_are_predicted_within_a_few_percent():
    """The error of the rule on the run that it was fitted to; the one case with a costlier mask is the outlier."""
    found = {f"{c.case.model} {c.case.width_px}": c for c in check(store.open_run(RESULTS / RUN).records())}
    masked = found.pop("Qwen/Qwen-Image 1024")
    assert len(found) == 6
    assert max(abs(c.error) for c in found.values()) < 0.03
    assert (0.09 < masked.error < 0.11, masked.padded) == (True, False)


def test_records_that_were_not_profiled_or_are_invalid_are_left_out():
    """A figure that cannot be believed checks nothing."""
    whole = (make.record(), make.graph_record())
    assert len(check(whole)) == 1
    assert check(whole[:1]) == check((make.record(profile=None), whole[1])) == ()
    assert check((whole[0], make.graph_record(status="INVALID"))) == ()


def test_a_stored_run_is_checked_without_a_gpu():
    """As the table of results/README.md, and as JSON."""
    shown = invoke("--check", RUN, "--results", RESULTS)
    assert shown.exit_code == 0
    assert "| Qwen/Qwen-Image @ 1024x1024 | 93.8 % | 1.066x | 1.050x | 0.955x | +9.9 % |" in shown.stdout
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert " ".join(shown.stdout.split()) in " ".join(page.split())  # wrapped there
    assert len(json.loads(invoke("--check", RUN, "--results", RESULTS, "--json").stdout)) == 7


def test_a_cpu_has_no_busy_time():
    """It says what to do instead; options of a case beside a stored run are refused."""
    found = invoke("--model", "tiny/qwen-image")
    assert (found.exit_code, "--check RUN" in found.stderr) == (7, True)
    assert invoke("--check", RUN, "--model", "tiny/qwen-image", "--results", RESULTS).exit_code == 2


def test_what_is_observed_of_a_model(monkeypatch: pytest.MonkeyPatch):
    """Two calls per step, a graph per bucket, and eager on padded inputs because the model pads."""
    monkeypatch.setattr(forecast, "_profile", lambda live, session: make.profile(busy_s=0.001, kernels=100.0))
    case = Case(model="tiny/qwen-image", width_px=32, height_px=32, steps=2, prompts=("cube", "a cube"), device="cpu",
                dtype="float32")  # fmt: skip
    with torch.no_grad():
        found = forecast._observe(base.load(case), on_stage=lambda _: None)
    assert (found.forwards, found.signatures, found.padded_busy_s, found.kernels) == (2.0, 2, 0.001, 100.0)
    assert found.step_s > 0
