"""One timed request, memory peaks, the order of measured images, and the host time of small calls.

Here: filling in times and bytes. Not here: what a time means (`verdict.py`), counting what the GPU did
(`profile.py`), clocks and power of the GPU (`environment.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bcgbench.clock import Clock, CudaClock, FakeClock, HostClock, clock_for
from bcgbench.stats import abba_order, median
from bcgbench.tap import DenoiseTap, OnStep

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Clock", "CudaClock", "DenoiseTap", "FakeClock", "HostClock", "Measured", "Turn",
    "clock_for", "memory", "peak", "peak_reset", "request", "schedule", "time_call",
]  # fmt: skip

ROUNDS_PER_BLOCK = 2
"""A B B A takes two rounds: the prompt changes only after both, or drift and prompt would be confounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One request as measured. The times are those of `types.Sample`."""

    denoise_event_s: float | None
    denoise_host_s: float
    before_s: float
    after_s: float
    end_to_end_s: float
    step_s: tuple[float, ...]
    images: np.ndarray[Any, Any]
    """As the session returns them: uint8, (images or frames, height, width, 3)."""
    latents: Tensor
    """The last sample of the scheduler, on its device, by reference."""


class Turn(NamedTuple):
    """One image to measure."""

    round: int
    order: int
    """Position within the round."""
    arm: str
    prompt: int
    """Index of the prompt."""


def request(
    session: Any, prompt: int, *, clock: Clock, steps: int | None = None, on_step: OnStep | None = None
) -> Measured:
    """Run `session.generate(prompt, steps=steps)`, a whole pipeline call, and time its stages.

    `session` is a `models.base.Session` or anything with `.pipe` and `.generate`. End-to-end time has its own readings
    around everything, so that it can disagree with the sum of the stages. BcgbenchError when the pipeline's denoise
    loop cannot be seen.
    """
    clock.synchronize()
    outer_start_s = clock.now_s()
    with DenoiseTap(session.pipe, clock, on_step=on_step) as tap:
        start_s = clock.now_s()
        images = session.generate(prompt, steps=steps)
        clock.synchronize()
        end_s = clock.now_s()
    outer_end_s = clock.now_s()
    return Measured(
        denoise_event_s=tap.denoise_event_s,
        denoise_host_s=tap.denoise_host_s,
        before_s=tap.start_s - start_s,
        after_s=end_s - tap.end_s,
        end_to_end_s=outer_end_s - outer_start_s,
        step_s=tap.step_s,
        images=np.asarray(images),
        latents=tap.latents,
    )


def memory(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) bytes now, with the allocator's free blocks returned; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def peak_reset(device: torch.device | str = "cuda") -> None:
    """Begin a new peak of the caching allocator; nothing on a CPU."""
    if _has_allocator(device):
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device | str = "cuda") -> tuple[int, int] | tuple[None, None]:
    """(allocated, reserved) bytes at their highest since `peak_reset`; (None, None) on a CPU."""
    if not _has_allocator(device):
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def schedule(arms: Sequence[str], rounds: int, *, prompts: int = 2) -> Iterator[Turn]:
    """Every image to measure, in order: A B B A over two rounds of one prompt, then the next prompt."""
    for round_ in range(rounds):
        prompt = round_ // ROUNDS_PER_BLOCK % prompts
        for order, arm in enumerate(abba_order(arms, round_)):
            yield Turn(round_, order, arm, prompt)


def time_call(fn: Callable[[], object], *, repeats: int, clock: Clock) -> float:
    """Median host seconds of one call over `repeats` calls, after one untimed call. Does not wait for the device."""
    fn()
    times = []
    for _ in range(repeats):
        start_s = clock.now_s()
        fn()
        times.append(clock.now_s() - start_s)
    return median(times)


def _has_allocator(device: torch.device | str) -> bool:
    """Whether `device` is a CUDA device whose allocator this process has used."""
    return torch.device(device).type == "cuda" and torch.cuda.is_initialized()
