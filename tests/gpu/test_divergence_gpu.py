"""The first divergence on a GPU: real graphs captured again beside the ones under test."""

from dataclasses import replace
from typing import Any

import pytest

from bcgbench import models
from bcgbench.divergence import diverge
from bcgbench.faults import injected
from bcgbench.models.base import Adapter
from bcgbench.types import Case
from tests.models.test_contract import tiny_case
from tests.models.test_wrong_padding import WRONG

pytestmark = pytest.mark.gpu


def on_gpu(model: str, **changes: Any) -> Case:
    return replace(tiny_case(model), device="cuda", **changes)


@pytest.mark.parametrize("arms", [("eager-padded", "bcg"), ("eager-padded", "graph")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_unbroken_engine_does_not_diverge(arms: tuple[str, str], dtype: str):
    """Every call bit-equal; the memory it took is stated."""
    result = diverge(on_gpu("tiny/qwen-image", dtype=dtype), arms=arms)
    assert (result.diverged, result.calls_equal) == (False, result.calls)
    assert (result.device_peak_bytes or 0) > 0


@pytest.mark.parametrize("arm", ["eager-padded", "bcg"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_wrong_bucket_names_the_refiner(arm: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    """Eager by hooks, the graph by capturing the call again under a watch."""
    kind = type(models.adapter("tiny/z-image"))
    monkeypatch.setattr(kind, "pad", lambda _self, arguments, **_known: WRONG["tiny/z-image"](arguments))
    monkeypatch.setattr(kind, "variants", Adapter.variants)
    result = diverge(on_gpu("tiny/z-image", dtype=dtype), arms=("eager", arm))
    assert result.module is not None
    assert result.module.module == "context_refiner.0.attention"
    assert result.replay is None


def test_a_replay_that_goes_wrong_is_told_from_a_capture():
    """Inputs are copied at capture and never again."""
    with injected("stale-input"):
        result = diverge(on_gpu("tiny/qwen-image"), arms=("eager-padded", "bcg"))
    assert result.replay is not None
    assert result.replay.new_capture == "right"
    assert result.replay.what.startswith("input ")


def test_a_replay_that_every_capture_gets_wrong_is_told_by_its_break():
    """A dropped copy of a break's output: a graph captured afresh is wrong in the same way (the tape's is not, as it
    computes while capturing)."""
    with injected("dropped-bridge"):
        result = diverge(on_gpu("tiny/qwen-image"), arms=("eager-padded", "bcg"))
    assert (result.diverged, result.module) == (True, None)
    assert result.replay is not None
    assert result.replay.new_capture == "alike"
    assert result.replay.what.startswith("what break")
    assert result.replay.where.startswith("transformer_blocks.0.attn"), result.replay
