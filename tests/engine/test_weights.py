"""Weights that lie elsewhere than a graph reads them are named; values written in place and new caches are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bcgbench.engine.weights import WeightPlaces


def network() -> nn.Sequential:
    """Two linear layers and a buffer."""
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    return made.requires_grad_(requires_grad=False)


def _storage(module: nn.Sequential) -> None:
    module[0].weight.data = module[0].weight.clone()


def _parameter(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(torch.zeros(2, 2))


def _submodule(module: nn.Sequential) -> None:
    module[1] = nn.Linear(2, 2, bias=False)


def _buffer(module: nn.Sequential) -> None:
    module[2].running_mean = torch.zeros(2)


def _gone(module: nn.Sequential) -> None:
    module[0].bias = None


@pytest.mark.parametrize(
    ("change", "names"),
    [(_storage, ["0.weight"]), (_parameter, ["1.weight"]), (_submodule, ["1"]), (_buffer, ["2.running_mean"]),
     (_gone, ["0.bias"])],
)  # fmt: skip
def test_what_was_replaced_is_named(change: Callable[[nn.Sequential], None], names: list[str]):
    """New storage, a new parameter, a new layer (an adapter), a new buffer, none any more."""
    module = network()
    places = WeightPlaces(module)
    change(module)
    assert places.changed() == names


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: layer.train(), "1.training"),
        (lambda layer: layer.scaling.update(a=2.0), "1.scaling"),
        (lambda layer: setattr(layer, "_disable_adapters", True), "1._disable_adapters"),
        (lambda layer: layer.merged_adapters.append("a"), "1.merged_adapters"),
    ],
)
def test_a_submodule_that_was_switched_is_named(change: Callable[[nn.Module], None], name: str):
    """The training flag of any submodule, and what peft's LoRA layers keep in plain attributes."""
    module = network().eval()
    module[1].scaling, module[1]._disable_adapters, module[1].merged_adapters = {"a": 1.0}, False, []
    places = WeightPlaces(module)
    assert places.changed() == []
    change(module[1])
    assert places.changed() == [name]


def test_values_and_additions_are_no_replacement():
    """Graphs follow values written in place; a table that a forward caches in a buffer is no weight of theirs."""
    module = network()
    places = WeightPlaces(module)
    module[0].weight.mul_(2)
    module.register_buffer("table", torch.zeros(3))
    assert places.changed() == []
    assert WeightPlaces(None).changed() == []
