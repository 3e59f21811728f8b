"""What every adapter promises, checked by a whole case: real pipeline, every arm, every prompt, both CFG branches.

A new model is covered by its row in `MODELS`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bcgbench import bench, models
from bcgbench.types import Case, Record, Sample
from bcgbench.verdict import compare, exit_code
from tests.running import records_of

PROMPTS = (
    "A small red cube on a white table",
    "A glass observatory above a quiet lake at sunrise, with soft mist, warm reflections, and crisp detail",
    "cube",
)
TINY = [name for name in models.MODELS if models.facts(name).tiny]
HOST_READS = {"tiny/ltx-2.3": 2}
"""Reads of a CPU tensor in a forward: free on a GPU, while the tape takes the tensor for device data and guards it."""
WITH_SOUND = {"LTX2Pipeline", "MiniMaxH3ModularPipeline"}
PADDED_LIMIT = 1e-6
"""float32, outputs of about 2: padding may change the order of additions and nothing else."""


def tiny_case(model: str, **changes: object) -> Case:
    facts = models.facts(model)
    size = max(32, min(2 * facts.multiple_px, 64))
    plain = Case(model=model, width_px=size, height_px=size, steps=2, prompts=PROMPTS, dtype="float32", device="cpu",
                 rounds=2, profile=False)  # fmt: skip
    return dataclasses.replace(plain, **changes)


def run(case: Case, folder: Path) -> tuple[dict[str, Record], list[Sample]]:
    """Records by runner, and the samples as they came."""
    events: list[Any] = []
    records = records_of(case, folder, events=events)
    return records, [event for event in events if isinstance(event, Sample)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", TINY)
def test_graphs_replay_bit_exactly(model: str, dtype: str, tmp_path: Path):
    """bcg and graph equal eager on the same inputs: every call, final latents and image; nothing is captured late."""
    records, samples = run(tiny_case(model, dtype=dtype), tmp_path)
    branches = models.facts(model).branches
    for name in ("bcg", "graph"):
        record = records[name]
        proof = record.engagement
        graph, padding = record.fidelity
        assert (record.status, graph.question, graph.exact) == ("OK", "graph", True)
        assert graph.calls == len(PROMPTS) * (2 * branches + models.facts(model).second_stage_steps)
        assert len(graph.audio) == (len(PROMPTS) + 1 if models.facts(model).pipeline in WITH_SOUND else 0)
        assert len(graph.latents) == len(PROMPTS) + 1
        assert len(set(proof.captures)) == 1
        assert proof.replays == proof.expected_forwards > graph.calls
        assert (proof.fallbacks, proof.misses) == (0, ())
        if dtype == "float32":
            worst = padding.worst_call
            assert worst is None or worst.max_abs <= PADDED_LIMIT
    assert records["bcg"].engagement.segments == records["bcg"].engagement.breaks + 1
    assert records["graph"].engagement.segments == 1 + HOST_READS.get(model, 0)
    assert records["graph"].engagement.breaks == 0
    assert records["eager"].fidelity[0].exact
    assert {sample.runner for sample in samples} == {"eager", "bcg", "graph"}
    verdicts = [compare(records["eager"], records[name]) for name in ("bcg", "graph")]
    assert [verdict.speed for verdict in verdicts] == ["NOT-TIMED"] * 2
    assert exit_code(verdicts) == 0


def test_a_prompt_longer_than_the_largest_bucket_is_a_counted_fallback(tmp_path: Path):
    """It runs eagerly and right, the record says why, and is not quoted as a graph's."""
    records, _ = run(tiny_case("tiny/qwen-image", buckets=(16,), runners=("eager", "bcg")), tmp_path)
    record = records["bcg"]
    assert record.status == "INVALID"
    assert "fallback" in {reason.code for reason in record.reasons}
    (miss, *_) = record.engagement.misses
    assert "the largest bucket is 16" in miss.reason
    assert record.engagement.fallbacks == sum(miss.count for miss in record.engagement.misses) > 0
    assert record.engagement.replays + record.engagement.fallbacks == record.engagement.expected_forwards


def test_an_arm_that_cannot_be_captured_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The record names the operation; the other arms are measured as if nothing had happened."""
    adapter = models.adapter("tiny/sana1.5")
    original = type(adapter).forward

    def masked(self, module, forward, arguments):
        keep = arguments["encoder_attention_mask"] > 0
        assert arguments["encoder_hidden_states"][keep].numel()
        return original(self, module, forward, arguments)

    monkeypatch.setattr(type(adapter), "forward", masked)
    records, _ = run(tiny_case("tiny/sana1.5"), tmp_path)
    assert records["eager"].status == "OK"
    assert records["bcg"].status == "FAILED"
    (reason,) = records["bcg"].reasons
    assert reason.code == "capture-failed"
    assert "indexing with a mask" in reason.text
    assert "test_contract.py" in reason.text


def test_stopping_keeps_what_was_measured(tmp_path: Path):
    """A stop between two images ends in records of everything measured so far, marked interrupted."""
    records: list[Record] = []
    samples: list[Sample] = []

    def emit(event: object) -> None:
        if isinstance(event, Record):
            records.append(event)
        elif isinstance(event, Sample):
            samples.append(event)

    bench.run_case(tiny_case("tiny/z-image-turbo"), run_id="test", run_path=tmp_path, attempt=1, emit=emit,
                   should_stop=lambda: len(samples) >= 3)  # fmt: skip
    assert {record.reasons[0].code for record in records} == {"interrupted"}
    assert sum(len(record.samples) for record in records) == len(samples) == 3
