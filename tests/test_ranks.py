"""Several processes of one case: exact together, one decision for all, and a record whatever befalls one of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bcgbench import selftest
from bcgbench.faults import FAULTS
from bcgbench.types import Case
from bcgbench.worker_ranks import RankProcess
from tests.ranks import run_ranks


def shared(model: str, **changes: object) -> Case:
    """A tiny case that two processes share."""
    return selftest.case_of(model, parallel="cfg:2", **changes)


@pytest.mark.parametrize(
    ("model", "graphs", "one_exact"),
    [("tiny/ltx-2", (1, 1), False), ("tiny/z-image", (1, 1), False), ("tiny/qwen-image", (2, 2), True)],
)
def test_two_ranks_replay_exactly_what_two_ranks_compute_eagerly(
    model: str, graphs: tuple[int, int], one_exact: bool, tmp_path: Path
):
    """Rows of one call, a list of two, one call each; every rank replays all its calls, and one alone agrees."""
    side = 64 if model == "tiny/ltx-2" else 32
    records = run_ranks(shared(model, width_px=side, height_px=side), tmp_path)
    eager, bcg = records["eager"], records["bcg"]
    assert (eager.status, bcg.status) == ("OK", "OK")
    graph = next(answer for answer in bcg.fidelity if answer.question == "graph")
    assert graph.exact
    assert graph.calls == 2 * 4  # both ranks, two prompts of two steps
    assert [rank.engagement.captures[-1] for rank in bcg.ranks] == list(graphs)
    assert {(rank.engagement.replays, rank.engagement.fallbacks) for rank in bcg.ranks} == {(14, 0)}
    assert all(rank.divided and not rank.whole and len(rank.denoise_s) == 1 for rank in bcg.ranks)
    one = next(answer for answer in eager.fidelity if answer.question == "ranks")
    assert one.latents[0].exact is one_exact
    assert one.latents[0].max_abs < 1e-4


def test_a_divided_sequence_replays_exactly_and_no_collective_is_captured(tmp_path: Path):
    """Attention and the final gather break; the whole graph, which cannot, is refused by the collective's name."""
    prompts = ("cube", "A red cube on a white table")  # with the video's, an even number of rows
    case = selftest.case_of("tiny/minimax-h3", parallel="context:2", prompts=prompts, steps=3, width_px=64,
                            height_px=64, frames=124, runners=("eager", "bcg", "graph"))  # fmt: skip
    records = run_ranks(case, tmp_path)
    bcg, whole = records["bcg"], records["graph"]
    assert (bcg.status, bcg.fidelity[0].exact, bcg.fidelity[0].calls) == ("OK", True, 2 * 2 * 3)
    held = [rank.engagement.signatures for rank in bcg.ranks]
    assert held[0] == held[1]
    assert all(rank.engagement.replays == rank.engagement.expected_forwards for rank in bcg.ranks)
    assert (whole.status, whole.reasons[0].code) == ("INVALID", "rank-vote")
    assert "; rank 0, 1: _c10d_functional::all_to_all_single in " in whole.reasons[0].text  # said once
    one = records["eager"].fidelity[-1]
    assert (one.question, one.latents[0].max_abs < 1e-5) == ("ranks", True)


TOLD = ("captured-collective", "lone-capture-failure", "missed-signature", "unlike-latents")
"""Faults of ranks that end in records; the others end the process."""


@pytest.mark.parametrize("name", TOLD)
def test_what_befalls_one_rank_is_told_of_the_arm(name: str, tmp_path: Path):
    """The row's own finding, without torchrun in between; eager's record stays clean where eager has no part in it."""
    fault = FAULTS[name]
    records = run_ranks(shared(fault.model), tmp_path, target=f"bcgbench.faults.{fault.inject}.run_case")
    reasons = records["bcg"].reasons
    assert records["bcg"].status == "INVALID"
    assert [reason for reason in reasons if reason.code == fault.code and fault.says in reason.text]
    assert (records["eager"].status, records["eager"].reasons) == ("OK", ())


def test_ranks_that_voted_for_eager_run_alike(tmp_path: Path):
    """Both count all calls as fallbacks, none as a replay, and the outputs are still those of eager."""
    target = "bcgbench.faults.ranks:lone_capture_failure.run_case"
    bcg = run_ranks(shared("tiny/z-image"), tmp_path, target=target)["bcg"]
    proofs = [rank.engagement for rank in bcg.ranks]
    assert [(proof.replays, proof.fallbacks) for proof in proofs] == [(0, proofs[0].expected_forwards)] * 2
    assert bcg.fidelity[0].exact
    assert {miss.reason for proof in proofs for miss in proof.misses} == {"every rank runs eagerly, by vote"}


def test_a_hung_rank_names_its_break_and_the_other_the_exchange(tmp_path: Path):
    """Each watchdog says where its own rank is."""
    run_ranks(shared("tiny/z-image"), tmp_path, target="bcgbench.faults.ranks:hung_rank.run_case")
    waiting, hung = ((tmp_path / f"rank{number}.hung").read_text() for number in range(2))
    assert "requests of bcg 0/4, waiting for the other ranks' parts in exchange" in waiting
    assert "the break aten._scaled_dot_product_flash_attention_for_cpu in noise_refiner.0.attention" in hung


def test_a_stop_that_comes_before_the_ranks_ends_torchrun(tmp_path: Path):
    """Nobody else is there to hear it."""
    case = shared("tiny/z-image")
    with RankProcess(case, {}, log_path=tmp_path / "log") as process:
        process.interrupt()
        until_s = time.monotonic() + 30
        while process.read() is not None and time.monotonic() < until_s:
            pass
        assert time.monotonic() < until_s
    assert "child_ranks" not in (tmp_path / "log").read_text()


def test_a_killed_rank_ends_in_records_within_the_time_limit(tmp_path: Path):
    """Through torchrun and the worker: no hang, and the rank is named. Only the log stays."""
    outcome = selftest.run_fault("killed-rank", FAULTS["killed-rank"], device="cpu", folder=tmp_path)
    assert outcome.passed, outcome.told
    assert outcome.duration_s < FAULTS["killed-rank"].case["timeout_s"]
    assert [path.suffix for path in tmp_path.glob("**/logs/*")] == [".log"]
