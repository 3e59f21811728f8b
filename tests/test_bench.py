"""One case: what befalls one arm stays with it, and only what an answer needs is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bcgbench import bench
from bcgbench.engine import trees
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.types import Case, Progress, Record
from bcgbench.verdict import compare

PROMPTS = ("A small red cube on a white table", "cube")


def run(folder: Path, *runners: str) -> tuple[dict[str, Record], list[Progress]]:
    """Records by runner and the progress events of a tiny case."""
    case = Case(model="tiny/z-image-turbo", width_px=32, height_px=32, steps=2, prompts=PROMPTS, dtype="float32",
                device="cpu", rounds=1, profile=False, runners=runners)  # fmt: skip
    records: dict[str, Record] = {}
    progress: list[Progress] = []

    def emit(event: object) -> None:
        if isinstance(event, Record):
            records[event.runner] = event
        elif isinstance(event, Progress):
            progress.append(event)

    bench.run_case(case, run_id="test", run_path=folder, attempt=1, emit=emit, should_stop=lambda: False)
    return records, progress


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
    requests = bench.CaseBench._requests

    def short_of_memory(self: bench.CaseBench, live: bench.Live) -> None:
        if live.name == "eager-padded":
            raise torch.OutOfMemoryError("no room")
        requests(self, live)

    monkeypatch.setattr(bench.CaseBench, "_requests", short_of_memory)
    records, _ = run(tmp_path, *runners)
    assert (records["bcg"].status, records["bcg"].fidelity) == ("OK", ())
    verdict = compare(records["eager"], records["bcg"])
    assert (verdict.exact, verdict.exit_code) == (None, 4)


def test_a_run_of_eager_alone_pads_nothing(tmp_path: Path):
    """The padded reference is for graphs."""
    records, progress = run(tmp_path, "eager")
    assert records["eager"].fidelity[0].exact
    assert not [event for event in progress if "eager-padded" in event.arm or "padding" in event.arm]
