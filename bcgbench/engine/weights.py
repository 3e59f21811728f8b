"""Where a module's weights lie: a captured graph reads them by address, so replaced storage must not go unseen."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

Place = tuple[int, tuple[int, ...], tuple[int, ...], object]
"""Address, shape, strides and dtype."""


def weight_places(module: nn.Module | None) -> dict[str, Place]:
    """Place of every parameter and buffer by name, those of submodules included; empty without a module."""
    if module is None:
        return {}
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: (_address(tensor), tuple(tensor.shape), _strides(tensor), tensor.dtype) for name, tensor in named}


def changed_places(before: dict[str, Place], now: dict[str, Place]) -> list[str]:
    """Names of what moved, came or went. A buffer that came is left out: modules cache tables in them."""
    return [name for name, place in before.items() if now.get(name) != place]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper subclass (quantised weights) has no storage of its own
        return id(tensor)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride())
