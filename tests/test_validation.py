"""The state of validation: what published journals prove, and for whom."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bcgbench import cli_models, models, store, validation
from bcgbench.types import Record
from tests import factories as make

TINY_CASE = make.case(model="tiny/qwen-image", device="cpu")


def publish(results: Path, *records: Record, day: int) -> str:
    """A run folder with these records; its id."""
    created = f"2026-11-{day}T15:12:00Z"
    run_id = store.run_id(created, name="test")
    cases = tuple({record.case.key: record.case for record in records}.values())
    with store.create_run(results, make.run_info(run_id=run_id, created_utc=created, cases=cases)) as run:
        for record in records:
            run.append_record(replace(record, run_id=run_id, created_utc=created))
    return run_id


def on_cpu(**changes) -> Record:
    """A bcg record of the tape."""
    plain = {"case": TINY_CASE, "backend": "tape", "environment": make.environment(gpu=None)}
    return make.graph_record(**plain | changes)


def test_every_released_model_has_its_tiny_form():
    """Same adapter and pipeline, so that what the tiny one shows holds for the released one's code."""
    released = {name for name in models.MODELS if not models.facts(name).tiny}
    assert set(validation.TINY_FORM) == released
    assert set(validation.TINY_FORM.values()) == set(models.MODELS) - released
    for name, tiny in validation.TINY_FORM.items():
        assert type(models.adapter(name)) is type(models.adapter(tiny))
        assert models.facts(name).pipeline == models.facts(tiny).pipeline


def test_a_gpu_run_proves_the_model_and_a_tape_run_its_released_form(tmp_path: Path):
    """Date, device, versions and commit come from the record."""
    run = publish(tmp_path, make.record(), make.graph_record(), on_cpu(), day=29)
    state = validation.read(tmp_path)
    gpu, cpu = (state.of("Qwen/Qwen-Image", kind) for kind in ("GPU", "CPU"))
    assert (gpu.exact, gpu.date, gpu.device, gpu.torch, gpu.diffusers, gpu.commit, gpu.run) == (
        True, "2026-11-29", "NVIDIA H200", "2.13.0", "0.42.1", "0123456", run,
    )  # fmt: skip
    assert (cpu.exact, cpu.model, cpu.device) == (True, "tiny/qwen-image", "CPU")
    assert state.of("tiny/qwen-image", "GPU") is None
    assert state.of("Tongyi-MAI/Z-Image", "GPU") is None


@pytest.mark.parametrize(
    "other",
    [
        make.graph_record(runner="graph", status="INVALID"),
        make.graph_record(runner="graph", fidelity=(make.inexact(question="graph"),)),
    ],
    ids=["not engaged", "differs"],
)
def test_one_graph_arm_that_is_wrong_is_no_proof(tmp_path: Path, other: Record):
    """Even beside a right one of the same run."""
    publish(tmp_path, make.graph_record(), other, day=29)
    assert not validation.read(tmp_path).of("Qwen/Qwen-Image", "GPU").exact


@pytest.mark.parametrize(
    "record",
    [
        make.graph_record(environment=make.environment(git_dirty=True)),
        make.graph_record(environment=make.environment(git_commit=None, git_dirty=None)),
        make.graph_record(status="FAILED", fidelity=()),
        make.graph_record(fidelity=()),
        make.record(),
    ],
    ids=["local changes", "no commit", "failed", "not compared", "eager"],
)
def test_what_cannot_be_repeated_or_compared_nothing_proves_nothing(tmp_path: Path, record: Record):
    """It is neither exact nor the contrary."""
    publish(tmp_path, record, day=29)
    assert validation.read(tmp_path).found == {}


def test_the_newest_run_decides(tmp_path: Path):
    """A model that is no longer exact is not shown with the day on which it was."""
    publish(tmp_path, make.graph_record(), day=28)
    publish(tmp_path, make.graph_record(fidelity=(make.inexact(question="graph"),)), day=29)
    found = validation.read(tmp_path).of("Qwen/Qwen-Image", "GPU")
    assert (found.exact, found.date) == (False, "2026-11-29")
    assert "NOT EXACT [1]" in cli_models.listing(tmp_path, as_json=False)


def test_the_list_shows_state_and_versions(tmp_path: Path):
    """A cell says the day, a line below the table what ran; what no run shows is said so."""
    run = publish(tmp_path, make.graph_record(), day=29)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / store.JOURNAL).write_text((tmp_path / run / store.JOURNAL).read_text() + "{}\n" * 2)
    text = cli_models.listing(tmp_path, as_json=False)
    lines = text.splitlines()
    assert lines[lines.index("Qwen/Qwen-Image") + 1].split()[-3:] == ["run", "2026-11-29", "[1]"]
    assert f"[1] {run}: NVIDIA H200, torch 2.13.0" in text
    assert "cannot be read: broken" in text
    assert max(map(len, lines)) <= 100
    rows = {row["model"]: row for row in json.loads(cli_models.listing(tmp_path, as_json=True))}
    assert rows["Qwen/Qwen-Image"]["GPU exact"]["run"] == run
    assert rows["Lightricks/LTX-2"]["GPU exact"] is None


def test_without_published_runs_the_state_is_unknown(tmp_path: Path):
    """An installed package has none; nothing is claimed from memory."""
    text = cli_models.listing(tmp_path, as_json=False)
    assert "unknown, because there are no published runs here" in text.replace("\n  ", " ")
    assert "2026" not in text


def test_the_published_runs_of_this_repository_can_be_read():
    """Every folder of results/ counts towards the state."""
    state = validation.read(validation.PUBLISHED)
    assert state.unreadable == ()
    assert state.runs == len(list(validation.PUBLISHED.glob(f"*/{store.JOURNAL}")))
    assert all(evidence.exact for evidence in state.found.values())
