"""Two GPUs share a request: exact over NCCL, every rank busy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bcgbench import selftest, worker
from bcgbench.store import create_run
from tests import factories as make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("model", ["tiny/ltx-2", "tiny/z-image", "tiny/qwen-image"])
def test_two_gpus_replay_exactly_what_two_gpus_compute_eagerly(model: str, tmp_path: Path):
    """Through torchrun; each rank on its own GPU, profiled on both."""
    case = selftest.case_of(model, device="cuda", parallel="cfg:2", width_px=64, height_px=64, profile=True)
    with create_run(tmp_path, make.run_info(cases=(case,))) as run:
        worker.run_case(case, run)
        records = {record.runner: record for record in run.records()}
    assert {record.status for record in records.values()} == {"OK"}, records["bcg"].reasons
    bcg = records["bcg"]
    assert next(answer for answer in bcg.fidelity if answer.question == "graph").exact
    assert [rank.engagement.replays > 0 and not rank.engagement.fallbacks for rank in bcg.ranks] == [True, True]
    assert all(rank.profile is not None and rank.profile.launches["graph"] for rank in bcg.ranks)
