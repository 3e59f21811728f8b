"""Where a module's weights lie: a captured graph reads them by address, so replaced storage must not go unseen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

SWITCHES = ("training", "scaling", "_disable_adapters", "merged_adapters")
"""Attributes of a submodule that the host reads and a graph froze: the training flag, and the state of a LoRA layer
of peft (scale, whether it is on, what is merged into the weight)."""


class WeightPlaces:
    """Addresses of all parameters and buffers of a module, which submodules hold them, and how those are switched.

    Kept as flat lists, because walking the modules anew takes ten times as long.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._tensors: list[tuple[str, dict[str, Any], str, int]] = []
        self._children: list[tuple[str, dict[str, Any], str, nn.Module]] = []
        self._switches: list[tuple[str, dict[str, Any], str, str]] = []
        for prefix, owner in module.named_modules() if module is not None else ():
            path = f"{prefix}." if prefix else ""
            for registry in (owner._parameters, owner._buffers):
                there = [(key, tensor) for key, tensor in registry.items() if tensor is not None]
                self._tensors += [(path + key, registry, key, _address(tensor)) for key, tensor in there]
            children = [(key, child) for key, child in owner._modules.items() if child is not None]
            self._children += [(path + key, owner._modules, key, child) for key, child in children]
            held = vars(owner)
            self._switches += [(path + key, held, key, repr(held[key])) for key in SWITCHES if key in held]

    def changed(self) -> list[str]:
        """Names of what moved, went, was replaced or switched; not of what came: modules cache tables in buffers."""
        replaced = (name for name, held, key, child in self._children if held.get(key) is not child)
        switched = (name for name, held, key, value in self._switches if repr(held.get(key)) != value)
        return [*self._moved(), *replaced, *switched]

    def _moved(self) -> Iterator[str]:
        for name, registry, key, address in self._tensors:
            tensor = registry.get(key)
            if tensor is None or _address(tensor) != address:
                yield name


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper subclass (quantised weights) has no storage of its own
        return id(tensor)
