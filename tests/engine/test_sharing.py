"""Equal results of one forward are made once, and never where somebody might write to one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bcgbench.engine.breaks import BreakPolicy, eager_on_graph
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.options import DEFAULT

LAYERS = 5


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def captured(forward: Any, *, policy: str = "none", off: tuple[str, ...] = (), **arguments: Tensor) -> GraphedForward:
    """`forward` captured for these arguments."""
    engine = GraphedForward(forward, device=torch.device("cpu"), policy=BreakPolicy.parse(policy),
                            options=DEFAULT.without(*off))  # fmt: skip
    engine.prepare(arguments)
    return engine


def graph_of(engine: GraphedForward) -> SegmentedGraph:
    """Its only graph."""
    (graph,) = engine.cache.graphs
    return graph


def saved(forward: Any, *, policy: str = "none", **arguments: Tensor) -> int:
    """Operations that the graph has less than one without sharing; both answer like eager, twice."""
    nodes = []
    for off in ((), ("shared_results",)):
        engine = captured(forward, policy=policy, off=off, **arguments)
        nodes.append(graph_of(engine).nodes or 0)
        for scale in (1.0, -2.0):
            fresh = {
                name: tensor * scale if tensor.is_floating_point() else ~tensor for name, tensor in arguments.items()
            }
            torch.manual_seed(0)
            want = forward(fresh)
            torch.manual_seed(0)
            assert bit_equal(engine(fresh), want)
        assert engine.fallbacks == 0
    return nodes[1] - nodes[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["none", "attention", "auto"])
def test_the_masks_of_all_blocks_are_one(policy: str, mode: Any):
    """Made in each block as Qwen-Image does: ones, cat, two scalars, where."""

    def forward(a: dict[str, Tensor]) -> Tensor:
        x = a["x"]
        for _ in range(LAYERS):
            mask = torch.cat([a["mask"], torch.ones(1, 2, dtype=torch.bool)], 1)[:, None, None]
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask) + F.silu(a["t"])
        return x

    with mode():
        less = saved(
            forward, policy=policy, x=torch.rand(1, 2, 4, 8), mask=torch.tensor([[True, False]]), t=torch.rand(8)
        )
    assert less >= (LAYERS - 1) * 5


@pytest.mark.parametrize(
    "step",
    [
        lambda x, _: x + torch.zeros(4).add_(x),
        lambda x, a: x + F.silu(a["t"]).mul_(x),
        lambda x, a: torch.add(x, 1, out=F.silu(a["t"])),
        lambda x, a: (F.silu(a["t"])[1:].copy_(x[1:]), x + F.silu(a["t"]))[1],
        lambda x, a: (a["t"] * 2).t().add_(x) + a["t"] * 2,
    ],
    ids=["zeros", "in place", "out", "view", "transposed"],
)
def test_what_is_written_to_is_not_shared(step: Any):
    """Each call of the forward's own writes would reach the others."""

    def forward(a: dict[str, Tensor]) -> Tensor:
        x = a["x"] + 0
        for _ in range(LAYERS):
            x = step(x, a)
        return x

    assert saved(forward, x=torch.rand(4), t=torch.rand(4)) == 0


def test_what_was_changed_in_between_is_made_again():
    """Its argument was written to, so equal calls are not equal."""

    def forward(a: dict[str, Tensor]) -> Tensor:
        x = a["x"] * 1
        first = F.silu(x)
        x.add_(1)
        return first + F.silu(x) * F.silu(x)

    assert saved(forward, x=torch.rand(4)) == 1


@pytest.mark.parametrize(
    ("step", "less"),
    [
        (lambda a: torch.rand(4), 0), (lambda a: F.dropout(a["x"], 0.5), 0), (lambda a: torch.randn_like(a["x"]), 0),
        (lambda a: a["x"][:2], 1), (lambda a: a["x"].view(2, 2).t(), 1), (lambda a: a["big"] * 2, 1),
    ],
    ids=["rand", "dropout", "like", "slices", "transposes", "large"],
)  # fmt: skip
def test_draws_differ_and_views_are_equal(step: Any, less: int):
    """The sum of equal things is made once; a large result twice, since it would take memory until the end."""

    def forward(a: dict[str, Tensor]) -> Tensor:
        return a["x"] + step(a).sum() + step(a).sum() * a["x"][2:].sum()

    assert saved(forward, x=torch.rand(4), big=torch.rand(2**19)) == less


def test_a_forward_that_writes_where_it_did_not_is_captured_without():
    """It did not write in the rehearsal; the capture takes one forward more."""
    calls = []

    def forward(a: dict[str, Tensor]) -> Tensor:
        calls.append(a)
        one, two = F.silu(a["x"]), F.silu(a["x"])
        return (one.mul_(1) if len(calls) > 2 else one) + two

    engine = captured(forward, x=torch.rand(4))
    assert engine.prepare_forwards == 4
    assert bit_equal(engine({"x": torch.ones(4)}), forward({"x": torch.ones(4)}))


def test_what_is_made_to_be_written_to_is_made_again():
    """By a kernel that torch does not see, such as one of Triton's."""

    def forward(a: dict[str, Tensor]) -> Tensor:
        total = a["x"] * 1
        for _ in range(2):
            total = total + torch.zeros(4) + torch.zeros_like(total)
        return total

    assert saved(forward, x=torch.rand(4)) == 0


def test_nothing_is_shared_beside_anybodys_break():
    """It may write to one of them, which no operation of the forward shows."""
    write = eager_on_graph(lambda x: x.add_(1))

    def forward(a: dict[str, Tensor]) -> Tensor:
        one, other = F.silu(a["x"]), F.silu(a["x"])
        write(one)
        return one * other

    assert saved(forward, x=torch.rand(4)) == 0


def test_the_same_object_is_never_handed_out_twice():
    """A forward may tell tensors apart by identity; the output's tensors are copies of their own."""

    def forward(a: dict[str, Tensor]) -> Any:
        one, two = F.silu(a["x"]), F.silu(a["x"])
        assert one is not two
        return one, two

    one, two = captured(forward, x=torch.rand(4))({"x": torch.ones(4)})
    assert one.data_ptr() != two.data_ptr()
    assert torch.equal(one, two)


STEPS = {
    "silu": lambda r, i, j: r.append(F.silu(r[i])),
    "mul": lambda r, i, j: r.append(r[i] * r[j]),
    "zeros": lambda r, i, j: r.append(torch.zeros(4)),
    "scalar": lambda r, i, j: r.append(r[i] * 0.5),
    "view": lambda r, i, j: r.append(r[i].view(2, 2).t().reshape(4)),
    "slice": lambda r, i, j: r.append(torch.cat([r[i][:2], r[j][2:]])),
    "alias": lambda r, i, j: r.append(r[i].detach()),
    "add_": lambda r, i, j: r[i].add_(r[j]),
    "copy_": lambda r, i, j: r[i][1:].copy_(r[j][:3].clone()),
    "out": lambda r, i, j: torch.mul(r[i], 0.5, out=r[j]),
    "rand": lambda r, i, j: r.append(torch.rand(4)),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 30), st.integers(0, 30)), max_size=14))
def test_random_forwards_full_of_repeats_answer_like_eager(steps: list[tuple[str, int, int]]):
    """Writes in place, views and aliases among calls of which many are equal."""

    def forward(a: dict[str, Tensor]) -> Tensor:
        registers = [a["x"] * 1, a["x"] + 1]
        for name, i, j in steps * 2:
            STEPS[name](registers, i % len(registers), j % len(registers))
        return torch.stack(registers).clamp(-9, 9)

    saved(forward, x=torch.rand(4))
