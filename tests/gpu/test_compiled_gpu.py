"""Rivals on a GPU: compiled code under CUDA graphs, torch's own and ours, on a tiny model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch._dynamo

from bcgbench.forecast import observe
from bcgbench.predict import predict
from bcgbench.types import Case
from bcgbench.verdict import compare
from tests.running import records_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
"""torch.compile advises on a GPU, on TF32 for example, and an error of that would be taken for one of the compiler."""
PROMPTS = ("A small red cube on a white table", "cube")
CASE = Case(model="tiny/z-image-turbo", width_px=64, height_px=64, steps=2, prompts=PROMPTS, device="cuda", rounds=2)


@pytest.mark.parametrize("names", [("compile", "bcg+compile"), ("compile-cudagraph", "eager-best"), ("graph+compile",)])
def test_rivals_are_within_tolerance_and_compile_nothing_late(names: tuple[str, ...], tmp_path: Path):
    """On real CUDA graphs, in bfloat16: no late compilation, no missed replay, errors of eager's size."""
    torch._dynamo.reset()
    records = records_of(dataclasses.replace(CASE, runners=("eager", *names)), tmp_path)
    for name in names:
        record = records[name]
        assert record.status == "OK", record.reasons
        assert record.accuracy.dtype == "float32"
        assert record.accuracy.calls > 0, record.accuracy.note
        outcome = compare(records["eager"], record)
        assert outcome.exit_code in (0, 1), (outcome.fidelity, outcome.reasons)
        assert outcome.fidelity.startswith(("exact", "within tolerance"))
        if record.compilation is not None:
            assert record.compilation.graphs > 0
            assert record.compilation.late_frames == 0


def test_compiled_blocks_replay_as_segments(tmp_path: Path):
    """Attention between segments of compiled code: fewer launches than eager, bridges in the graph pool as without."""
    torch._dynamo.reset()
    records = records_of(dataclasses.replace(CASE, runners=("eager", "bcg", "bcg+compile")), tmp_path)
    plain, compiled = records["bcg"], records["bcg+compile"]
    assert compiled.status == "OK", compiled.reasons
    assert (compiled.engagement.segments, compiled.engagement.breaks) == (
        plain.engagement.segments,
        plain.engagement.breaks,
    )
    assert compiled.engagement.replays == compiled.engagement.expected_forwards > 0
    assert compiled.compilation.regions > compiled.engagement.breaks
    assert compiled.engagement.graph_nodes < plain.engagement.graph_nodes
    assert compiled.memory.pool_bytes <= 2 * plain.memory.pool_bytes
    assert compiled.profile.launches["graph"] == plain.profile.launches["graph"]


def test_a_profile_predicts(tmp_path: Path):
    """A tiny model is launch-bound by far: a short eager profile sees it."""
    found = predict(observe(CASE), steps=CASE.steps)
    assert found.gain > 1.5
    assert (found.busy < 0.5, found.memory_bytes > 0, found.images > 0) == (True, True, True)


def test_torchs_own_graphs_are_launched(tmp_path: Path):
    """The whole forward as one CUDA graph of torch: its launches are seen, and its kernels are not guessed."""
    torch._dynamo.reset()
    record = records_of(dataclasses.replace(CASE, runners=("eager", "compile-cudagraph")), tmp_path)[
        "compile-cudagraph"
    ]
    assert record.status == "OK", record.reasons
    assert record.compilation.cudagraph_skips < record.compilation.graphs
    assert record.profile.launches["graph"] > 0
    assert record.profile.busy_s is None
