"""Foreign families through real CUDA graphs: the generic adapter on a GPU, weights from a folder and random."""

from pathlib import Path

import pytest

from bcgbench import models
from bcgbench.cases import make_case
from tests.models import foreign
from tests.running import records_of

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
    records = records_of(case, tmp_path)
    for name in ("bcg", "graph"):
        record, proof = records[name], records[name].engagement
        assert (record.status, record.backend, record.fidelity[0].exact) == ("OK", "cuda", True), record.reasons
        assert len(set(proof.captures)) == 1
        assert proof.replays == proof.expected_forwards > 0
        assert record.profile.launches["graph"] > 0
