"""A rank's share of a denoiser's call, and the whole output put together again: the ways of `cfg:2`.

The call that the engine sees is this rank's alone, so nothing that is captured knows of other ranks; the exchange
stands around it, eagerly. Not here: collectives (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bcgbench.binding import Arguments
from bcgbench.engine import trees
from bcgbench.models.padding import PadCache
from bcgbench.ranks import Ranks

Call = Callable[[Arguments], Any]


@dataclass(slots=True)
class Tally:
    """Calls of the denoisers so far."""

    divided: int = 0
    whole: int = 0
    alone: bool = False
    """Whether every rank runs everything itself for now: what the ranks together are compared with."""


class Share(Protocol):
    """`models.base.Share` that counts what it divided."""

    tally: Tally

    def __call__(self, call: Call, arguments: Arguments) -> Any:
        """The output of the whole call."""


class Rows:
    """Both branches are rows of one call: this rank runs its rows, then all ranks get all rows.

    Rows are the entries of the first argument, a tensor [rows, ...] or a list; every other argument with as many rows
    is cut alike. A call of a number of rows that does not divide among the ranks is run whole by each of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.tally = Tally()
        self._ranks = ranks
        self._cut = PadCache()

    def __call__(self, call: Call, arguments: Arguments) -> Any:
        if self.tally.alone:
            return call(arguments)
        rows = _rows(next(iter(arguments.values())))
        if rows is None or rows < self._ranks.size or rows % self._ranks.size:
            self.tally.whole += 1
            return call(arguments)
        self.tally.divided += 1
        each = rows // self._ranks.size
        mine = slice(self._ranks.rank * each, (self._ranks.rank + 1) * each)
        own = {n: self._part(value, mine) if _rows(value) == rows else value for n, value in arguments.items()}
        return self._joined(call(own))

    def _part(self, value: Any, mine: slice) -> Any:
        """These rows; the same object again for an unchanged tensor, so that a graph's input is not copied anew."""
        if not isinstance(value, Tensor):
            return value[mine]
        return self._cut.get(value, (mine.start, mine.stop), partial(_copied, value, mine))

    def _joined(self, output: Any) -> Any:
        """The output with the rows of all ranks, in every tensor and every list of tensors within it."""
        if isinstance(output, Tensor):
            return self._ranks.exchange(output).flatten(0, 1)
        if isinstance(output, list):
            parts = [self._ranks.exchange(row) for row in output]
            return [part[rank] for rank in range(self._ranks.size) for part in parts]
        return trees.map_children(self._joined, output)


class Turns:
    """Each branch is a call of its own: rank r runs call r of each group, and all get all outputs at the last.

    Until then the outputs of others' calls are tensors full of NaN, filled where they lie: a pipeline may hold them
    and take views, and one that computed with them would give NaN, which no record hides. What an output looks like is
    learned from the first group of each shape, whose outputs are exchanged call by call.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.tally = Tally()
        self._ranks = ranks
        self._turn = 0
        self._known: dict[tuple[Any, ...], tuple[trees.Spec, list[Tensor]]] = {}
        self._pending: list[list[Tensor]] = []
        """Outputs of the group so far, by turn."""

    def __call__(self, call: Call, arguments: Arguments) -> Any:
        if self.tally.alone:
            return call(arguments)
        turn, self._turn = self._turn, (self._turn + 1) % self._ranks.size
        self.tally.divided += 1
        is_mine = turn == self._ranks.rank
        output = call(arguments) if is_mine else None
        key = (turn, *(tuple(each.shape) for each in trees.tensors(next(iter(arguments.values())))))
        is_new = key not in self._known
        if is_new:
            self._known[key] = self._learned(output, turn)
        spec, like = self._known[key]
        held = trees.tensors(output) if is_mine else [torch.full_like(each, float("nan")) for each in like]
        if is_new:
            self._fill(turn, held)
        self._pending.append([] if is_new else held)
        if turn == self._ranks.size - 1:
            for earlier, tensors in enumerate(self._pending):
                self._fill(earlier, tensors)
            self._pending.clear()
        return output if is_mine else trees.rebuild(spec, held)

    def _learned(self, output: Any, turn: int) -> tuple[trees.Spec, list[Tensor]]:
        """Containers and empty tensors as of the output that rank `turn` has."""
        leaves, spec = trees.flatten(output)
        mine = spec, [(tuple(leaf.shape), leaf.dtype, leaf.device.type) for leaf in leaves if isinstance(leaf, Tensor)]
        spec, shapes = self._ranks.gather(mine, what=f"the form of the output of call {turn}")[turn]
        return spec, [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]

    def _fill(self, turn: int, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            every = self._ranks.exchange(tensor)
            if turn != self._ranks.rank:
                tensor.copy_(every[turn])


def _rows(value: Any) -> int | None:
    """Entries of a tensor's first axis or of a list of tensors; None for anything else."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    is_rows = isinstance(value, list | tuple) and value and all(isinstance(each, Tensor) for each in value)
    return len(value) if is_rows else None


def _copied(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows].clone(memory_format=torch.contiguous_format)


WAYS: dict[str, Callable[[Ranks], Share]] = {"batch": Rows, "calls": Turns}
"""`Adapter.guidance_in` -> how `cfg:2` shares the calls."""
