"""The engine with its ideas switched off, one by one and all: the same answers, by replay."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bcgbench.engine.breaks import BreakPolicy, eager_on_graph
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.options import DEFAULT, Options
from bcgbench.runners import ONE_OFF, RUNNERS

NAMES = [field.name for field in fields(Options)]
kept = torch.arange(4.0)
keep = eager_on_graph(lambda x: kept if x.sum() > 0 else kept + x)


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def engine(forward, *off: str) -> GraphedForward:
    """Broken at attention, some ideas off."""
    return GraphedForward(forward, device=torch.device("cpu"), policy=BreakPolicy.parse("attention"),
                          options=DEFAULT.without(*off))  # fmt: skip


def forward(arguments: dict[str, Tensor]) -> Tensor:
    """Two masked attentions, and a break that may return what it does not own."""
    q = arguments["q"]
    for _ in range(2):
        q = F.scaled_dot_product_attention(q * 2, q, q, attn_mask=arguments["mask"]) + 1
    return q.sum() + keep(q.sum() * torch.ones(4) * arguments["sign"])


def call(rows: int, *, sign: float = 1.0) -> dict[str, Tensor]:
    """Fresh data, one mask."""
    return {"q": torch.rand(1, 2, 4, 8), "mask": (torch.arange(4) < rows)[None], "sign": torch.tensor(sign)}


@pytest.mark.parametrize(
    "off", [(), *[(name,) for name in NAMES], tuple(NAMES)], ids=lambda off: "-".join(off) or "all on"
)
def test_an_idea_switched_off_changes_no_answer(off: tuple[str, ...]):
    """Nor a tensor that a break returns without owning it."""
    graphed = engine(forward, *off)
    graphed.prepare(call(3))
    for rows, sign in ((2, 1.0), (4, -1.0), (1, 1.0)):
        given = call(rows, sign=sign)
        want = forward(given)
        for _ in range(2):
            assert bit_equal(graphed(given), want)
        assert kept.tolist() == [0, 1, 2, 3]
    assert (graphed.replays, graphed.fallbacks) == (6, 0)


def test_inputs_are_copied_at_every_call():
    """Without `skip_unchanged`."""
    counts = []
    for off in ((), ("skip_unchanged",)):
        graphed, given = engine(lambda a: a["x"] + 1, *off), {"x": torch.ones(2)}
        graph = graphed.prepare(given)
        for _ in range(3):
            graphed(given)
        counts.append(graph.inputs.copies)
    assert counts == [1, 4]


def test_a_call_break_holds_the_boolean_mask():
    """Without `kernel_breaks` three more launches are eager."""
    for off, dtype in (((), torch.float32), (("kernel_breaks",), torch.bool)):
        graph = engine(
            lambda a: F.scaled_dot_product_attention(a["q"] + 1, a["q"], a["q"], attn_mask=a["mask"]) + 1, *off
        ).prepare(call(3))
        (step,) = [step for step in graph.steps if hasattr(step, "kwargs")]
        assert step.kwargs["attn_mask"].dtype is dtype


def test_every_idea_has_an_arm_without_it():
    """So that the gain of each can be shown in one run; the scheme of SGLang's runner is off in several."""
    assert {row.without for row in ONE_OFF.values()} >= {(name,) for name in NAMES}
    assert set(ONE_OFF) <= set(RUNNERS)
    for row in ONE_OFF.values():
        DEFAULT.without(*row.without)
