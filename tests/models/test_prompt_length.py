"""The suite `prompt_length` in tiny form: a token below, at and above every length at which the shape changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from bcgbench.models import base
from tests.models.test_contract import tiny_case
from tests.running import records_of

LENGTHS = {
    "tiny/qwen-image": (31, 64, 32, 63, 33),
    "tiny/z-image": (31, 65, 32, 64, 33, 63),
    "tiny/ideogram-4": (31, 128, 32, 127, 33, 65, 63, 64),
}
"""Tokens, short and long in turn; 65 and 129 are beyond the largest bucket of the first and the last."""
SHAPES = {"tiny/qwen-image": 2, "tiny/z-image": 3, "tiny/ideogram-4": 3 + 1}
"""Buckets or multiples met; Ideogram-4's second denoiser sees no text and needs one graph."""


def prompt_of(tokens: int, session: base.Session) -> str:
    """A text that the tiny tokenizer counts as so many tokens, one per word."""
    words = tokens - session.adapter.count_tokens(session.pipe, "cube") + 1
    return " ".join(["cube"] * words)


@pytest.mark.parametrize("model", LENGTHS)
def test_every_length_around_a_bucket_replays_exactly(model: str, tmp_path: Path):
    """Short then long then short: one graph per shape, nothing captured late, no miss, no fallback, bit-exact."""
    plain = tiny_case(model, rounds=1)
    session = base.load(plain)
    prompts = tuple(prompt_of(tokens, session) for tokens in LENGTHS[model])
    case = replace(plain, prompts=prompts, runners=("eager", "bcg"))
    records = records_of(case, tmp_path)
    record = records["bcg"]
    proof = record.engagement
    assert record.token_counts == LENGTHS[model]
    assert (record.status, record.fidelity[0].question, record.fidelity[0].exact) == ("OK", "graph", True)
    assert (proof.misses, proof.fallbacks, proof.uncalled) == ((), 0, ())
    assert proof.replays == proof.expected_forwards
    assert set(proof.captures) == {SHAPES[model]}
    assert record.fidelity[1].worst_call is None or record.fidelity[1].worst_call.max_abs <= 1e-6


@pytest.mark.parametrize("policy", ["attention", "best"])
def test_five_buckets_are_warm_after_fifteen_forwards(policy: str, tmp_path: Path):
    """A warm call, a rehearsal and a capture for each, and nothing captured twice, on the tape."""
    case = replace(tiny_case("tiny/qwen-image", rounds=1), runners=("eager", "bcg"), buckets=(16, 32, 48, 64, 80),
                   break_policy=policy)  # fmt: skip
    record = records_of(case, tmp_path)["bcg"]
    assert (record.status, record.fidelity[0].exact) == ("OK", True)
    assert set(record.engagement.captures) == {5}
    assert record.engagement.prepare_forwards == 15
    assert (record.engagement.breaks == 0) is (policy == "best")
    assert record.settings.get("break choice") == (
        "transformer: no break: the fewest that are legal; a tape has no speed" if policy == "best" else None
    )
