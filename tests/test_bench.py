"""One case: what befalls one arm stays with it, and only what an answer needs is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bcgbench import bench
from bcgbench.engine import trees
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.tape import TapeBackend
from bcgbench.errors import ProcessPoisoned, ReplayError
from bcgbench.models.qwen_image import MASK, QwenImage
from bcgbench.types import Case, Progress, Record
from bcgbench.verdict import compare
from tests.running import records_of

PROMPTS = ("A small red cube on a white table", "cube")


def run(folder: Path, *runners: str, model: str = "tiny/z-image-turbo") -> tuple[dict[str, Record], list[Progress]]:
    """Records by runner and the progress events of a tiny case."""
    case = Case(model=model, width_px=32, height_px=32, steps=2, prompts=PROMPTS, dtype="float32",
                device="cpu", rounds=1, profile=False, runners=runners)  # fmt: skip
    events: list[Any] = []
    records = records_of(case, folder, events=events)
    return records, [event for event in events if isinstance(event, Progress)]


def test_a_picture_with_nan_fails_its_arm_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A broken graph may compute NaN; eager's figures are not lost with it."""
    replay = SegmentedGraph.replay

    def broken(graph: SegmentedGraph, leaves: list[Any]) -> Any:
        return trees.map_leaves(lambda leaf: leaf * float("nan"), replay(graph, leaves))

    monkeypatch.setattr(SegmentedGraph, "replay", broken)
    records, _ = run(tmp_path, "eager", "bcg")
    assert records["eager"].status == "OK"
    assert len(records["eager"].measured) == 1
    (reason,) = records["bcg"].reasons
    assert (records["bcg"].status, reason.code) == ("FAILED", "failed")
    assert "NaN" in reason.text


@pytest.mark.parametrize("runners", [("eager", "bcg"), ("eager", "eager-padded", "bcg")])
def test_without_a_padded_reference_a_graph_stays_unjudged(
    runners: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The measured records are kept; the missing check is exit code 4 and no "exact"."""
    image = bench.CaseBench._image

    def short_of_memory(self: bench.CaseBench, live: bench.Live, **turn: Any) -> Any:
        if live.name == "eager-padded":
            raise torch.OutOfMemoryError("no room")
        return image(self, live, **turn)

    monkeypatch.setattr(bench.CaseBench, "_image", short_of_memory)
    records, _ = run(tmp_path, *runners)
    assert (records["bcg"].status, records["bcg"].fidelity) == ("OK", ())
    verdict = compare(records["eager"], records["bcg"])
    assert (verdict.exact, verdict.exit_code) == (None, 4)


def test_a_run_of_eager_alone_pads_nothing(tmp_path: Path):
    """The padded reference is for graphs."""
    records, progress = run(tmp_path, "eager")
    assert records["eager"].fidelity[0].exact
    assert not [event for event in progress if "eager-padded" in event.arm or "padding" in event.arm]


def test_a_graph_for_every_exact_length_pads_nothing(tmp_path: Path):
    """What buckets are held against: three lengths, the empty negative prompt's among them, and eager's own outputs."""
    records, progress = run(tmp_path, "eager", "graph-exact", model="tiny/qwen-image")
    exact = records["graph-exact"]
    assert (exact.status, set(exact.engagement.captures)) == ("OK", {3})
    assert exact.engagement.replays == exact.engagement.expected_forwards > 0
    assert next(answer for answer in exact.fidelity if answer.question == "graph").exact
    assert not [event for event in progress if "eager-padded" in event.arm]


def test_a_graph_that_goes_wrong_late_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every measured image counts: a graph that was right in all requests and wrong in a round differs."""
    image = bench.CaseBench._image

    def wrong_in_a_round(self: bench.CaseBench, live: bench.Live, **turn: Any) -> Any:
        final = image(self, live, **turn)
        if live.name == "bcg" and turn["phase"] == "measure":
            final.latents.add_(1)
        return final

    monkeypatch.setattr(bench.CaseBench, "_image", wrong_in_a_round)
    records, _ = run(tmp_path, "eager", "bcg")
    graph = records["bcg"].fidelity[0]
    assert graph.calls_exact == graph.calls
    assert [d.name for d in graph.latents if not d.exact] == ["latents 0 in round 0"]
    assert compare(records["eager"], records["bcg"]).exit_code == 3


def test_a_lost_device_names_the_arm_that_lost_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other arms' records say that it was not theirs, and everything measured is kept."""

    def lost(_graph: SegmentedGraph, _leaves: list[Any]) -> Any:
        raise ReplayError("an illegal memory access was encountered")

    def dead(_backend: TapeBackend) -> None:
        raise ProcessPoisoned("A replay lost the device.")

    monkeypatch.setattr(SegmentedGraph, "replay", lost)
    monkeypatch.setattr(TapeBackend, "check_alive", dead)
    records, _ = run(tmp_path, "eager", "bcg", "graph")
    reasons = {name: record.reasons[0] for name, record in records.items()}
    assert {reason.code for reason in reasons.values()} == {"process-poisoned"}
    assert reasons["bcg"].text == "while in requests: A replay lost the device."
    assert "another arm lost the device" in reasons["eager"].text
    assert len(records["eager"].samples) == 4


def test_a_forgotten_mask_fails_the_run_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Graph and padded eager are equally wrong, so only the padding question can tell: exit code 3."""
    pad = QwenImage.pad

    def unmasked(self: QwenImage, arguments: dict[str, Any], **how: Any) -> dict[str, Any]:
        padded = pad(self, arguments, **how)
        return {**padded, MASK: torch.ones_like(padded[MASK])}

    def variants(self: QwenImage, arguments: dict[str, Any], **how: Any) -> Any:
        yield self.pad(arguments, **how)

    monkeypatch.setattr(QwenImage, "pad", unmasked)
    monkeypatch.setattr(QwenImage, "variants", variants)
    records, _ = run(tmp_path, "eager", "bcg", model="tiny/qwen-image")
    assert records["bcg"].fidelity[0].exact
    verdict = compare(records["eager"], records["bcg"])
    assert verdict.exit_code == 3
    assert "is a mask missing?" in " ".join(reason.text for reason in verdict.reasons)


def test_an_error_of_torch_in_one_arm_is_that_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kernel that raises in the warm call of a capture costs that arm alone."""
    prepare = bench.CaseBench._prepare

    def failing(self: bench.CaseBench, live: bench.Live) -> None:
        if live.name == "bcg":
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        prepare(self, live)

    monkeypatch.setattr(bench.CaseBench, "_prepare", failing)
    records, _ = run(tmp_path, "eager", "bcg", "graph")
    assert [records[name].status for name in ("eager", "graph")] == ["OK", "OK"]
    (reason,) = records["bcg"].reasons
    assert (records["bcg"].status, reason.code) == ("FAILED", "crashed")
    assert "while in prepare: RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED" in reason.text


def test_a_full_disk_costs_pictures_only(tmp_path: Path):
    """Records are kept without artifacts when the folder cannot be written."""
    (tmp_path / "artifacts").write_text("in the way")
    records, _ = run(tmp_path, "eager", "bcg")
    assert {record.status for record in records.values()} == {"OK"}
    assert {tuple(record.artifacts) for record in records.values()} == {()}
