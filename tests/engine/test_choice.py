"""Policy `best`: the form that is legal and faster, captured once more than needed at most, and the reason kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bcgbench.engine import choice
from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.choice import choose
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.options import DEFAULT
from bcgbench.errors import CaptureError

BEST = BreakPolicy.parse("best")


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def attend(arguments: dict[str, Tensor]) -> Tensor:
    """A masked attention between two sums."""
    q = arguments["q"] + 1
    return F.scaled_dot_product_attention(q, q, q, attn_mask=arguments["mask"]) + 1


def call(length: int, rows: int) -> dict[str, Tensor]:
    """Fresh data; only some rows count."""
    return {"q": torch.rand(1, 2, length, 8), "mask": (torch.arange(length) < rows)[None]}


def engine(forward: Any) -> GraphedForward:
    """Open, on the CPU."""
    return GraphedForward(forward, device=torch.device("cpu"), policy=BEST)


def test_on_a_cpu_one_bucket_serves_every_prompt_length_without_a_break():
    """A mask is data, so nothing in a masked attention needs a break; each bucket takes three forwards as ever."""
    graphed = engine(attend)
    for length in (8, 4):
        assert graphed.prepare(call(length, 3)).breaks == 0
    assert graphed.prepare_forwards == 6
    assert graphed.chosen == "no break: the fewest that are legal; a tape has no speed"
    for length, rows in ((8, 1), (4, 4), (8, 8), (8, 5), (4, 1)):
        given = call(length, rows)
        assert bit_equal(graphed(given), attend(given))
    assert (graphed.replays, graphed.fallbacks) == (5, 0)


def test_what_is_illegal_breaks_all_the_same():
    """Indexing with a mask: its result's shape depends on data."""

    def forward(arguments: dict[str, Tensor]) -> Tensor:
        return attend(arguments)[:, :, arguments["mask"][0]].sum(2) * 2

    graphed = engine(forward)
    assert graphed.prepare(call(4, 3)).breaks == 1
    assert graphed.chosen.startswith("1 breaks")
    for rows in (1, 4):
        given = call(4, rows)
        assert bit_equal(graphed(given), forward(given))


def graph(breaks: int) -> Any:
    """Stands in for a captured one."""
    return SimpleNamespace(breaks=breaks)


@pytest.mark.parametrize(
    ("own_s", "rival_s", "attention", "reason"),
    [
        (0.060, 0.0605, False, "no break: 60 ms with no break, 60.5 ms with 60 breaks"),
        (0.060, 0.0597, False, "no break: 60 ms"),
        (0.060, 0.050, True, "attention: 60 ms with no break, 50 ms with 60 breaks"),
    ],
    ids=["faster", "as fast", "slower"],
)
def test_on_a_gpu_the_faster_form_is_taken(
    own_s: float, rival_s: float, attention: bool, reason: str, monkeypatch: pytest.MonkeyPatch
):
    """Within the noise the one with fewer breaks; the other has its own memory, and goes with it."""
    own, apart = SimpleNamespace(device=torch.device("cuda"), options=DEFAULT), object()
    monkeypatch.setattr(choice, "_race", lambda graphs, leaves: [own_s, rival_s])
    monkeypatch.setattr(choice, "backend_for", lambda device, options: apart)
    tried = []

    def attempt(policy: BreakPolicy, backend: Any) -> Any:
        tried.append((policy.attention, backend))
        return graph(60 if policy.attention else 0)

    found = choose(BEST, attempt, backend=own, leaves=[])
    assert tried == [(False, own), (True, apart)]
    assert found.policy == BreakPolicy(auto=True, attention=attention)
    assert found.reason.startswith(reason)
    assert (found.graph is None) is attention


@pytest.mark.parametrize("fails", ["fewest", "attention", "both"])
def test_a_form_that_cannot_be_captured_is_not_taken(fails: str, monkeypatch: pytest.MonkeyPatch):
    """The reason is kept; only where both fail is there no graph."""
    own = SimpleNamespace(device=torch.device("cuda"), options=DEFAULT)
    monkeypatch.setattr(choice, "backend_for", lambda device, options: None)

    def attempt(policy: BreakPolicy, backend: Any) -> Any:
        if fails in {"both", "attention" if policy.attention else "fewest"}:
            raise CaptureError("The forward reads its pool. More words.")
        return graph(0)

    found = choose(BEST, attempt, backend=own, leaves=[])
    assert found.policy.attention is (fails != "attention")
    assert "(The forward reads its pool)" in found.reason


def test_best_goes_with_named_breaks():
    """They break in both forms."""
    assert [form.names for form in BreakPolicy.parse("best,torch.relu").forms] == [("torch.relu",)] * 2
