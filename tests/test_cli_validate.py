"""`bcgbench validate`: the table and its total, JSON, exit codes, what it refuses. One real run, else no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcgbench import cli, store, validate, validate_process
from bcgbench.validate import Finding

TINY = ("--model", "tiny/qwen-image", "--res", "32x32", "--steps", "2")


def invoke(*args: str):
    """A command in this process."""
    return CliRunner().invoke(cli.app, ["validate", *args])


def test_a_real_run_ends_with_its_total():
    """A fresh process included: the eager calls there give the digests of this one."""
    done = invoke(*TINY, "--only", "fresh-process,repeatability")
    assert done.exit_code == 0, done.output
    first, *_, total = done.output.splitlines()
    assert first == "tiny/qwen-image @ 32x32, float32 on cpu"
    assert "4 eager calls have equal digests in a fresh process" in " ".join(done.output.split())
    assert total.startswith("total: 2 OK; 14 forwards, ")


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed check and one that did not apply, in place of a run."""
    made = [
        Finding(check="order", runner="bcg", ruling="FAILED", reason="differs", details=("signature 1",), forwards=7,
                duration_s=0.25),
        Finding(check="memory-pressure", runner="bcg", ruling="NOT-APPLICABLE", reason="needs a GPU", details=(),
                forwards=0, duration_s=0.0),
    ]  # fmt: skip
    monkeypatch.setattr(validate_process, "run_checks", lambda *_, **__: iter(made))


@pytest.mark.usefixtures("findings")
def test_a_failed_check_is_the_exit_code_and_details_follow_the_table():
    """Wrong outputs are 3, as everywhere."""
    done = invoke(*TINY)
    assert done.exit_code == 3
    assert done.output.splitlines()[-2:] == [
        "  order: signature 1", "total: 1 FAILED, 1 NOT-APPLICABLE; 7 forwards, 0.2 s"
    ]  # fmt: skip


@pytest.mark.usefixtures("findings")
def test_json_holds_every_finding():
    """For scripts: verdict, reason, details and cost of each check."""
    done = invoke(*TINY, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["exit_code"]) == (3, 3)
    (case,) = document["cases"]
    assert (case["forwards"], case["duration_s"]) == (7, 0.25)
    assert [each["check"] for each in case["findings"]] == ["order", "memory-pressure"]
    assert case["findings"][0]["forwards"] == 7


def test_prompts_outside_every_bucket_are_told_not_raised():
    """Engagement says which bucket is missing; what needs a captured graph says that there is none."""
    done = invoke(*TINY, "--buckets", "8", "--only", "engagement,padding,order")
    assert done.exit_code == 3
    assert "add a bucket of at least 17 to --buckets" in done.output
    assert "No traced call is within the length policy" in " ".join(done.output.split())


def test_the_list_is_the_table():
    """One line per row of CHECKS, without a model."""
    rows = json.loads(invoke("--list", "--json").stdout)
    assert [row["check"] for row in rows] == list(validate.CHECKS)
    assert invoke("--list").output.count("\n") >= len(validate.CHECKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "orders"), "Unknown check orders. Known: repeatability"),
        (("--runner", "eager"), "validate checks arms that replay graphs exactly; give one of bcg, graph"),
    ],
)
def test_bad_input_stops_before_a_model_is_loaded(arguments: tuple[str, ...], message: str, tmp_path: Path):
    """Exit code 2, and what is possible instead."""
    done = invoke(*TINY, *arguments, "--results", str(tmp_path))
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert store.list_runs(tmp_path) == ()


def test_a_golden_run_that_is_not_there_stops_it(tmp_path: Path):
    """Before a model is loaded."""
    done = invoke(*TINY, "--golden", "no-such-run", "--results", str(tmp_path))
    assert done.exit_code == 6
    assert "no run under" in done.output
