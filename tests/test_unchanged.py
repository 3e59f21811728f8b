"""Weights that changed while a case ran: seen by address and by torch's in-place counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from bcgbench.unchanged import changed, mark


def replaced(net: nn.Linear) -> None:
    net.weight = nn.Parameter(net.weight.clone(), requires_grad=False)


def written(net: nn.Linear) -> None:
    net.weight.mul_(2)


def added(net: nn.Linear) -> None:
    net.register_parameter("lora", nn.Parameter(net.weight.clone(), requires_grad=False))


@pytest.fixture
def net() -> nn.Linear:
    """Frozen, as a loaded pipeline's modules are."""
    return nn.Linear(2, 2).requires_grad_(requires_grad=False)


@pytest.mark.parametrize(("change", "name"), [(replaced, "weight"), (written, "weight"), (added, "lora")])
def test_a_changed_weight_is_named(net: nn.Linear, change: Callable[[nn.Linear], None], name: str):
    """Replaced, written to or added."""
    before = mark(net)
    change(net)
    reason = changed({"transformer": (net, before)})
    assert reason is not None
    assert (reason.code, reason.text.split()[0]) == ("weights-changed", f"transformer.{name}")


def test_reading_changes_nothing(net: nn.Linear):
    """A forward leaves no trace."""
    before = mark(net)
    net(net.weight)
    assert changed({"transformer": (net, before)}) is None


def test_several_are_counted(net: nn.Linear):
    """The first is named."""
    before = mark(net)
    net.weight.zero_()
    net.bias.zero_()
    reason = changed({"t": (net, before)})
    assert reason is not None
    assert "t.weight and 1 more changed" in reason.text
