"""`context:N`: each rank computes a part of the sequence, by diffusers' own context parallelism (Ulysses).

Its collectives stand inside the forward, in breaks of their own. Not here: a collective anywhere else, whose capture
the engine refuses by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from bcgbench.binding import Arguments
from bcgbench.errors import UsageError
from bcgbench.ranks import Ranks
from bcgbench.share import Call, Tally

EXCHANGES = (
    "diffusers.models.attention_dispatch._templated_context_parallel_attention",
    "diffusers.hooks.context_parallel.EquipartitionSharder.unshard",
)
"""Breaks around diffusers' collectives: those before and after the attention's kernel, and the one that puts the parts
of the output together."""


class Parts:
    """Every call is divided, inside the denoiser."""

    def __init__(self) -> None:
        self.tally = Tally()

    def __call__(self, call: Call, arguments: Arguments) -> Any:
        self.tally.divided += 1
        return call(arguments)


def divide(modules: Iterable[nn.Module], ranks: Ranks) -> None:
    """Have each denoiser compute this rank's part of the sequence, from now on.

    UsageError where diffusers has no plan for a model, or a number of heads does not divide among the ranks.
    """
    from diffusers import ContextParallelConfig
    from diffusers.hooks.context_parallel import EquipartitionSharder

    for module in modules:
        plan, name = getattr(module, "_cp_plan", None), type(module).__name__
        heads = getattr(getattr(module, "config", None), "num_attention_heads", ranks.size)
        if plan is None or heads % ranks.size:
            why = "has no plan for it" if plan is None else f"divides its {heads} attention heads evenly"
            raise UsageError(f"context:{ranks.size}: diffusers {why}: {name}. Use cfg:2, or another number.")
        with _counted_devices(ranks.size):
            module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks.size))  # type: ignore[operator]
    EquipartitionSharder.shard, EquipartitionSharder.unshard = staticmethod(_shard), staticmethod(_unshard)


def _shard(tensor: torch.Tensor, dim: int, mesh: Any) -> torch.Tensor:
    """This rank's part of a tensor along `dim`; UsageError where diffusers' own ends in an assertion."""
    rows, ranks = tensor.shape[dim], mesh.size()
    if rows % ranks:
        raise UsageError(
            f"a sequence of {rows} rows does not divide among {ranks} ranks: choose prompts of other lengths "
            "(token_counts), another resolution or another number of ranks"
        )
    return tensor.chunk(ranks, dim=dim)[int(mesh.get_group().rank())]


def _unshard(tensor: torch.Tensor, dim: int, mesh: Any) -> torch.Tensor:
    """All ranks' parts of a tensor, along `dim`; a plain tensor, where diffusers' own may still be on its way."""
    every = tensor.new_empty((mesh.size(), *tensor.shape))
    dist.all_gather_into_tensor(every.view(-1), tensor.contiguous().view(-1), group=mesh.get_group())
    return torch.cat(every.unbind(), dim=dim)


def _counted_devices(ranks: int) -> contextlib.AbstractContextManager[Any]:
    """diffusers divides by the number of accelerators, which is 0 on a CPU; there each rank is taken for one."""
    if torch.accelerator.is_available():
        return contextlib.nullcontext()
    return patch.object(torch.accelerator, "device_count", lambda: ranks)
