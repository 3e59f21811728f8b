"""How faults of one process among several are put in: each is a context, and a target for the worker of a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bcgbench import bench_ranks
from bcgbench.arms import Arm
from bcgbench.bench import CaseBench
from bcgbench.engine.graphed import GraphedForward
from bcgbench.engine.steps import Break
from bcgbench.errors import CaptureError
from bcgbench.faults.places import changed_final, changed_model, in_arm, replaced
from bcgbench.types import Case

Context = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class RankFault:
    """A fault of rank 1, or of all ranks."""

    put_in: Callable[[], Context]
    everywhere: bool = False

    def __call__(self) -> Context:
        """The fault is in while the context is open."""
        return self.put_in()

    def run_case(self, case: Case, *, ranks: Any, **job: Any) -> None:
        """As `bench_ranks.run_case`, with the fault in it."""
        has_it = self.everywhere or ranks.rank == 1
        with self.put_in() if has_it else contextlib.nullcontext():
            bench_ranks.run_case(case, ranks=ranks, **job)


def _captured_collective() -> Context:
    def forward(original: Callable[..., Any], **arguments: Any) -> Any:
        dist.all_reduce(torch.zeros(1))
        return original(**arguments)

    return changed_model(forward)


def _lone_capture_failure() -> Context:
    def prepare(original: Callable[..., Any], self: GraphedForward, arguments: Any) -> Any:
        if self.backend is not None:
            raise CaptureError("no room for a graph")
        return original(self, arguments)

    return replaced(GraphedForward, "prepare", prepare)


def _missed_signature() -> Context:
    def prepare(original: Callable[..., Any], self: Arm, calls: Any) -> None:
        original(self, calls)
        for hook in self.hooks.values():
            if len(hook.graphed.cache):
                hook.graphed.cache._graphs.popitem()

    return replaced(Arm, "prepare", prepare)


def _unlike_latents() -> Context:
    def change(final: Any) -> None:
        final.latents.add_(1)

    return changed_final(change)


def _killed_rank() -> Context:
    def image(original: Callable[..., Any], self: Any, live: Any, **turn: Any) -> Any:
        if turn["phase"] == "measure":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, live, **turn)

    return replaced(CaseBench, "_image", image)


def _hung_rank() -> Context:
    def replay(_original: Callable[..., Any], _self: Break) -> None:
        threading.Event().wait()

    return in_arm(lambda: replaced(Break, "replay", replay))


captured_collective = RankFault(_captured_collective, everywhere=True)
lone_capture_failure = RankFault(_lone_capture_failure)
missed_signature = RankFault(_missed_signature)
unlike_latents = RankFault(_unlike_latents)
killed_rank = RankFault(_killed_rank)
hung_rank = RankFault(_hung_rank)
