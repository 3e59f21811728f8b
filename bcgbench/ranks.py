"""The processes of one parallel case: joining, what they tell each other, and the exchange of tensors.

Here: every collective of this tool, each under a time limit and under a name that a watchdog can report. All run
eagerly and none may be captured: a collective in a graph replays the host's counters of its capture, and ranks that
disagree about them hang (pytorch's NCCL watchdog cannot see inside a graph). Not here: what is exchanged (`share.py`),
what the ranks decide (`bench_ranks.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bcgbench.errors import CaptureError, RankLost, first_line


class Ranks:
    """This process among its peers. Tensors travel by NCCL between GPUs, all else by gloo."""

    def __init__(self, *, cuda: bool, timeout_s: float) -> None:
        """Join the group that torchrun's variables describe; on CUDA make this rank's GPU the current one."""
        timeout = timedelta(seconds=timeout_s)
        self.waiting = "all ranks to start"
        """What this rank waits for with the others; "" while it works on its own."""
        self.exchanges = 0
        with self._together(self.waiting):
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if cuda:
                torch.cuda.set_device(dist.get_node_local_rank())

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """RankLost, in the words of the one who waits, for whatever a collective raises."""
        self.waiting = what
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"waited for {what}: {first_line(error)}") from error
        self.waiting = ""

    def gather(self, value: Any, *, what: str) -> list[Any]:
        """Each rank's value, rank 0 first, on every rank. Anything that can be pickled."""
        found: list[Any] = [None] * self.size
        with self._together(what):
            dist.all_gather_object(found, value)
        return found

    def any(self, value: bool, *, what: str) -> bool:  # noqa: FBT001 - one vote
        """Whether one rank says so."""
        vote = torch.tensor(int(value))
        with self._together(what):
            dist.all_reduce(vote, op=dist.ReduceOp.MAX)
        return bool(vote)

    def exchange(self, mine: Tensor) -> Tensor:
        """[ranks, *shape]: the tensors of all ranks, of one shape and dtype. Raises `CaptureError` while capturing."""
        if mine.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CaptureError("a collective would be captured: it must run in a break or outside the denoiser.")
        self.exchanges += 1
        every = mine.new_empty((self.size, *mine.shape))
        with self._together(f"the other ranks' parts in exchange {self.exchanges}"):
            dist.all_gather_into_tensor(every.view(-1), mine.contiguous().view(-1))
        return every
