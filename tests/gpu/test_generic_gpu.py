"""Foreign families through real CUDA graphs: the generic adapter on a GPU, weights from a folder and random."""

from pathlib import Path

import pytest

from bcgbench import bench, models
from bcgbench.cases import make_case
from bcgbench.types import Record
from tests.models import foreign

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("family", ["flux", "sd3", "wan", "chroma", "pixart-sigma"])
def test_foreign_families_replay_bit_exactly(family: str, weights: str, tmp_path: Path):
    """The CPU contract holds for CUDA graphs: exact on every call and prompt, constant captures, no miss."""
    folder = foreign.save(family, tmp_path / family)
    if weights == "random":
        foreign.drop_weights(folder)
    size = "64x64x5" if family == "wan" else "64x64"
    case = make_case(str(folder), facts=models.facts, resolution=size, steps=2, rounds=2, weights=weights)
    records: dict[str, Record] = {}

    def emit(event: object) -> None:
        if isinstance(event, Record):
            records[event.runner] = event

    bench.run_case(case, run_id="test", run_path=tmp_path, attempt=1, emit=emit, should_stop=lambda: False)
    for name in ("bcg", "graph"):
        record, proof = records[name], records[name].engagement
        assert (record.status, record.backend, record.fidelity[0].exact) == ("OK", "cuda", True), record.reasons
        assert len(set(proof.captures)) == 1
        assert proof.replays == proof.expected_forwards > 0
        assert record.profile.launches["graph"] > 0
