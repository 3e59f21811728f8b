"""Whole cases on a GPU: tiny models through real CUDA graphs, and what a dying case leaves behind."""

import dataclasses
from pathlib import Path

import pytest

from bcgbench import bench, models, store, worker
from bcgbench.types import Case, Progress, Record
from tests import factories as make
from tests.running import records_of

pytestmark = pytest.mark.gpu
TINY = [name for name in models.MODELS if models.facts(name).tiny]
PROMPTS = ("A small red cube on a white table", "A glass observatory above a quiet lake at sunrise, with mist", "cube")
HERE = Path(__file__).stem


def tiny_case(model: str, **changes: object) -> Case:
    plain = Case(model=model, width_px=64, height_px=64, steps=2, prompts=PROMPTS, device="cuda", rounds=2)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", TINY)
def test_graphs_replay_bit_exactly(model: str, dtype: str, tmp_path: Path):
    """The CPU contract holds for CUDA graphs: exact on every call and prompt, constant captures, no miss, profiled."""
    records = records_of(tiny_case(model, dtype=dtype), tmp_path)
    for name in ("bcg", "graph"):
        record, proof = records[name], records[name].engagement
        assert (record.status, record.backend, record.fidelity[0].exact) == ("OK", "cuda", True), record.reasons
        assert len(set(proof.captures)) == 1
        assert proof.replays == proof.expected_forwards > 0
        assert proof.graph_nodes > 0
        assert record.memory.pool_bytes > 0
        assert record.profile.launches["graph"] > 0
    assert records["eager"].fidelity[0].exact
    assert records["eager"].profile.launches["graph"] == 0


def test_a_stop_while_profiling_keeps_the_records(tmp_path: Path):
    """By then all is measured and checked; a stop before has cost a run its eight arms."""
    events: list[object] = []

    def profiling() -> bool:
        return any(isinstance(event, Progress) and event.stage == "profile" for event in events)

    bench.run_case(tiny_case("tiny/z-image-turbo", runners=("eager", "bcg")), run_id="r", run_path=tmp_path, attempt=1,
                   emit=events.append, should_stop=profiling)  # fmt: skip
    records = [event for event in events if isinstance(event, Record)]
    assert [record.status for record in records] == ["OK", "OK"]
    assert [record.profile is None for record in records] == [False, True]


def out_of_memory(case: Case, **_: object) -> None:
    """A case that asks for more than any GPU has."""
    import torch

    torch.empty(1 << 45, dtype=torch.uint8, device=case.device)


def illegal_access(case: Case, **_: object) -> None:
    """A case whose kernel asserts on the device: the CUDA context is lost."""
    import torch

    torch.zeros(4, device=case.device)[torch.tensor([9], device=case.device)].sum().item()


@pytest.mark.parametrize(("target", "code"), [("out_of_memory", "out-of-memory"), ("illegal_access", "crashed")])
def test_a_lost_gpu_is_a_record(target: str, code: str, tmp_path: Path):
    """Whatever ends a case on the GPU becomes a record with its reason, and the next case runs in a fresh process."""
    case = tiny_case("tiny/z-image-turbo", runners=("eager", "bcg"), profile=False)
    with store.create_run(tmp_path, make.run_info(cases=(case,))) as run:
        worker.run_case(case, run, target=f"tests.gpu.{HERE}:{target}")
        assert {record.reasons[0].code for record in run.records()} == {code}
        worker.run_case(case, run)
        assert {record.status for record in run.records()} == {"OK"}
