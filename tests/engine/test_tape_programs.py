"""Random programs: a captured program answers like eager, bit for bit, call after call, or its capture is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import event, example, given

from tests.engine.programs import (
    BREAKS,
    CONSTANTS,
    IN_PLACE,
    OPERATIONS,
    PLAIN,
    RANDOM,
    READS,
    VIEWS,
    Program,
    check,
    programs,
    replayed,
    run,
    times,
)

SHARES = {"replayed": 0.75, "break": 0.25, "view": 0.25, "write in place": 0.25, "constant": 0.25,
          "write and view": 0.1, "aliased arguments": 0.1, "nested arguments": 0.05, "nested result": 0.1}  # fmt: skip
"""Least shares of all programs that have a trait: else "random" would mean little."""


def test_programs_without_host_reads_replay_exactly():
    """Every call is a replay. The programs are of all kinds, and few are refused."""
    tally: Counter[str] = Counter()

    @times(3)
    @given(programs(PLAIN, VIEWS, IN_PLACE, CONSTANTS, BREAKS))
    @example(Program([("transpose", 0, 0), ("add_", 0, 1), ("break view", 1, 0), ("assign", 0, 2)], result="view"))
    @example(Program([("break argument", 0, 0), ("add_", 0, 1), ("break write", 0, 2), ("break tuple", 0, 1)]))
    @example(Program([("add", 0, 1), ("t_", 0, 0), ("turned in place", 0, 0), ("break expanded", 0, 1), ("t_", 0, 0)]))
    @example(Program([("matmul", 0, 1), ("break tuple", 0, 1), ("t_", 1, 0), ("add", 0, 1)]))
    def one(program: Program) -> None:
        replayed(program, tally=tally)

    one()
    shares = {trait: tally[trait] / tally["all"] for trait in SHARES}
    assert {trait: share for trait, share in shares.items() if share < SHARES[trait]} == {}, tally


@times(2)
@given(programs(PLAIN, IN_PLACE, CONSTANTS, BREAKS, READS))
def test_programs_with_host_reads_replay_exactly_or_miss(program: Program):
    """A value that the host read either holds, or the call is a counted eager one."""
    engine = check(program)
    event(f"{engine.fallbacks} of 4 calls miss" if engine else "refused")


@times(1)
@given(programs(PLAIN, VIEWS, BREAKS, RANDOM))
@example(Program([("break expanded", 0, 0), ("transpose", 0, 0), ("dropout", 0, 0)]))
def test_programs_that_draw_replay_like_eager(program: Program):
    """The generator is at the same place before and after."""
    engine = check(program)
    if engine is None:
        return
    assert engine.fallbacks == 0
    with torch.no_grad():
        ends = []
        for function in (engine, program):
            run(function, program, 5)
            ends.append(torch.get_rng_state())
    assert torch.equal(*ends)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation_is_captured(name: str):
    """None of the programs above passes because an operation is always refused."""
    assert check(Program([("add", 0, 1), (name, 0, 1), ("mul", 0, 2)])) is not None
