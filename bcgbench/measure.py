"""One timed request, memory peaks, the order of measured images, and the host time of small calls.

Here: filling in times and bytes. Not here: what a time means (`verdict.py`), counting what the GPU did
(`profile.py`), clocks and power of the GPU (`environment.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bcgbench.clock import Clock, CudaClock, FakeClock, HostClock, clock_for
from bcgbench.errors import BcgbenchError
from bcgbench.models.media import Media
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
    loop_steps: tuple[int, ...]
    """Steps of each denoise loop, one loop per stage."""
    media: Media
    """As the session returns them: frames, and sound where there is any."""
    latents: Tensor
    """The last sample of the last stage's scheduler, on its device, by reference."""


class Turn(NamedTuple):
    """One image to measure."""

    round: int
    order: int
    """Position within the round."""
    arm: str
    prompt: int
    """Index of the prompt."""


def request(
    session: Any, prompt: int, *, clock: Clock, steps: int | None = None, on_step: OnStep | None = None,
    on_end: Callable[[], None] | None = None,
) -> Measured:  # fmt: skip
    """Run `session.produce(prompt, steps=steps)`, a whole request, and time its stages.

    `session` is a `models.base.Session` or anything with `.pipe` and `.produce`. A pipeline of several stages names
    them, in order, as `.stages`: each is a pipeline whose denoise loop runs once. The denoise times are the sums over
    the loops; what lies between two loops prepares the next one and counts as before it. End-to-end time has its own
    readings around everything, so that it can disagree with the sum of the stages. `on_end` is called when a loop has
    ended, and its time is no part of any. BcgbenchError when a denoise loop
    cannot be seen, a stage that never ran included.
    """
    clock.synchronize()
    outer_start_s = clock.now_s()
    with ExitStack() as stack:
        taps: list[DenoiseTap] = []
        for stage in getattr(session.pipe, "stages", (session.pipe,)):
            counted = _counted(on_step, earlier=tuple(taps))
            taps.append(stack.enter_context(DenoiseTap(stage, clock, on_step=counted, on_end=on_end)))
        start_s = clock.now_s()
        media = session.produce(prompt, steps=steps)
        clock.synchronize()
        end_s = clock.now_s()
    outer_end_s = clock.now_s()
    _check_order(taps)
    events = [tap.denoise_event_s for tap in taps]
    ends = [start_s, *(tap.resumed_s for tap in taps)]
    paused_s = sum(tap.resumed_s - tap.end_s for tap in taps)
    return Measured(
        denoise_event_s=None if None in events else sum(s for s in events if s is not None),
        denoise_host_s=sum(tap.denoise_host_s for tap in taps),
        before_s=sum(tap.start_s - end for tap, end in zip(taps, ends, strict=False)),
        after_s=end_s - ends[-1],
        end_to_end_s=outer_end_s - outer_start_s - paused_s,
        step_s=tuple(step_s for tap in taps for step_s in tap.step_s),
        loop_steps=tuple(tap.steps for tap in taps),
        media=media,
        latents=taps[-1].latents,
    )


def _counted(on_step: OnStep | None, *, earlier: tuple[DenoiseTap, ...]) -> OnStep | None:
    """`on_step` that goes on counting where the loops before ended."""
    return on_step and (lambda step: on_step(sum(tap.steps for tap in earlier) + step))


def _check_order(taps: Sequence[DenoiseTap]) -> None:
    """BcgbenchError where a stage's loop began before the one before it ended: their times would count twice."""
    if any(later.start_s < tap.end_s for tap, later in pairwise(taps)):
        raise BcgbenchError("The stages of the pipeline did not run one after the other. List them in their order.")


def check_calls(calls: int, measured: Measured, pipe: Any) -> int:
    """`calls`, the traced ones of a request; BcgbenchError where there are fewer than denoise steps.

    Then a loop runs a module that is not hooked, a second stage with a transformer of its own for example.
    """
    if calls < len(measured.step_s):
        raise BcgbenchError(
            f"{type(pipe).__name__} made {len(measured.step_s)} denoise steps and {calls} calls of its hooked "
            "denoisers; expected at least one call per step. Name every denoiser in the adapter's `denoisers`."
        )
    return calls


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
