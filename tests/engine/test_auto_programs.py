"""Random programs that select by masks, under break policy `auto`: always eager's answer, by replay or counted miss.

Registers are 4x4 matrices and ragged matrices of four columns, whose rows are as many as a mask selects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from bcgbench.engine.breaks import BreakPolicy, eager_on_graph
from bcgbench.engine.diagnose import same_value
from bcgbench.engine.graphed import GraphedForward
from tests.engine.programs import CPU, times

N = 4
Operation = Callable[[Tensor, Tensor, Tensor], Any]


def put(a: Tensor, r: Tensor, m: Tensor) -> Tensor:
    """Write ragged rows back where they fit."""
    a[m] = r[:1].sum(0) + a[m] if r.shape[0] != N else r[m]
    return a


def scale(a: Tensor, _: Tensor, m: Tensor) -> Tensor:
    """As GLM-Image drops its prior."""
    a[m] *= 0.5
    return a


KNOWN: dict[str, Operation] = {
    "matmul": lambda a, _, m: a @ a.t() * 0.25,
    "where": lambda a, _, m: torch.where(m[:, None], a, a * 2),
    "add_": lambda a, _, m: a.add_(1),
    "relu": lambda a, _, m: a.relu(),
    "item": lambda a, _, m: a + round(a[0, 0].clamp(-1, 1).item()),
    "break": eager_on_graph(lambda a, _, m: a * m[:, None]),
}
FROM_RAGGED: dict[str, Operation] = {
    "scale": scale,
    "put": put,
    "masked_scatter": lambda a, r, m: a.masked_scatter(m[:, None], torch.cat([r, a])),
    "sum": lambda a, r, m: a - r.sum(),
    "rows": lambda a, r, m: a * len(r),
    "column": lambda a, r, m: a.add_(r.sum(0)),
}
TO_RAGGED: dict[str, Operation] = {
    "select": lambda a, r, m: a[m],
    "select others": lambda a, r, m: a[~m],
    "nonzero": lambda a, r, m: a[m.nonzero()[:, 0]] * 2,
    "masked_select": lambda a, r, m: a.masked_select(m[:, None]).view(-1, N),
    "repeat": lambda a, r, m: a.repeat_interleave(m.long(), 0),
    "whole": lambda a, r, m: a,
}
RAGGED: dict[str, Operation] = {
    "mul": lambda a, r, m: r * 0.5,
    "write": lambda a, r, m: r.mul_(0.5),
    "view": lambda a, r, m: r[:2],
    "write a view": lambda a, r, m: (r[1:].add_(1), r)[1],
    "cat": lambda a, r, m: torch.cat([r, a]),
    "project": lambda a, r, m: r @ a,
    "chunk": lambda a, r, m: torch.cat([*r.chunk(2)][::-1]),
    "flat": lambda a, r, m: r.flatten().view(-1, N),
    "break": eager_on_graph(lambda a, r, m: r + 1),
    "dense": lambda a, r, m: r.t().contiguous().t(),
}


@dataclass(frozen=True)
class Program:
    """Names of operations with the registers that they take, counted from the last."""

    steps: list[tuple[str, int, int]]

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """The last matrix, the last ragged one, and all that was selected."""
        masks = arguments["masks"]
        known, ragged = [arguments["x"] + 1], [arguments["x"] * 2]
        for number, (name, i, j) in enumerate(self.steps):
            a, r, m = known[-1 - i % len(known)], ragged[-1 - j % len(ragged)], masks[number % 2]
            if name in KNOWN or name in FROM_RAGGED:
                known.append((KNOWN | FROM_RAGGED)[name](a, r, m))
            else:
                ragged.append((TO_RAGGED | RAGGED)[name.removeprefix("ragged ")](a, r, m))
        return known[-1], ragged[-1], known[0]


def inputs(seed: int, device: torch.device = CPU) -> dict[str, Any]:
    """A matrix and two masks."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(N, generator=generator) > threshold for threshold in (0.5, seed % 3 / 2 - 0.1)]
    return {"x": torch.randn(N, N, generator=generator).to(device), "masks": [mask.to(device) for mask in masks]}


NAMES = [*KNOWN, *FROM_RAGGED, *TO_RAGGED, *(f"ragged {name}" for name in RAGGED)]
PROGRAMS = st.builds(
    Program, st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=10)
)


def check(program: Program, device: torch.device = CPU) -> None:
    """Fresh masks change the number of rows; nothing of the captured call is left in the answer."""
    engine = GraphedForward(program, device=device, policy=BreakPolicy.parse("auto"))
    with torch.no_grad():
        engine.prepare(inputs(0, device))
        engine.freeze()
        for seed in (1, 2, 0, 3, 2):
            got, want = engine(inputs(seed, device)), program(inputs(seed, device))
            assert same_value(got, want), (seed, got, want)
    assert engine.replays + engine.fallbacks == 5
    assert engine.replays >= 1, engine.cache.misses
    event(f"{engine.fallbacks} of 5 calls miss")


@times(2)
@given(PROGRAMS)
def test_programs_with_masks_replay_exactly_or_miss(program: Program):
    """By replay where the host's values hold, else by a counted miss."""
    check(program)
