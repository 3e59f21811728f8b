"""The tap on a pipeline's denoise loop: where it begins, steps and ends, and what latents it ends with.

Here: what is replaced on one pipeline for one request. Not here: the request around the loop (`measure.py`), the
transformer's calls (`runners.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from bcgbench.clock import Clock
from bcgbench.errors import BcgbenchError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
OnStep = Callable[[int], None]
"""Told the index of each finished step, counted from 0; may raise to end the request."""
DENOISE_SPAN = "bcgbench: denoise"
"""Name of the profiler annotation around the denoise loop; costs about a microsecond unless a profiler runs."""


class DenoiseTap:
    """Times the denoise loop of one request and keeps its final latents, through two methods of the pipeline.

    Every diffusers pipeline runs its loop inside `with self.progress_bar(...) as bar` and calls `bar.update()` after
    each step; `scheduler.step` returns the latents. Both are replaced on the instances while the context is open and
    restored whatever happens. The device is synchronised before the loop and after it, never inside: a synchronise per
    step would take away the host's run-ahead, which is what eager speed depends on. To keep the bar's own drawing out
    of the span, disable it (`pipe.set_progress_bar_config(disable=True)`).
    """

    def __init__(
        self, pipe: Any, clock: Clock, *, on_step: OnStep | None = None, on_end: Callable[[], None] | None = None
    ) -> None:
        self._pipe, self._clock, self._on_step, self._on_end = pipe, clock, on_step, on_end
        self._marks: list[Any] = []
        self._stack = ExitStack()
        self._annotation = ExitStack()
        self._start_s: float | None = None
        self._end_s: float | None = None
        self._resumed_s: float | None = None
        self._latents: Tensor | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(self._annotation)
        open_bar = self._pipe.progress_bar
        self._stack.enter_context(
            _replaced(self._pipe, "progress_bar", lambda *a, **k: _Bar(open_bar(*a, **k), tap=self))
        )
        scheduler = self._pipe.scheduler
        self._stack.enter_context(_replaced(scheduler, "step", _recording_step(scheduler, keep=self._keep)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self._check()

    @property
    def start_s(self) -> float:
        """Host time at which the loop began, on an idle device."""
        return _known(self._start_s)

    @property
    def end_s(self) -> float:
        """Host time at which all work of the loop was done."""
        return _known(self._end_s)

    @property
    def resumed_s(self) -> float:
        """Host time at which the request went on: `end_s`, or once `on_end` returned."""
        return _known(self._resumed_s)

    @property
    def denoise_host_s(self) -> float:
        """Host time of the loop, device idle at both ends."""
        return self.end_s - self.start_s

    @property
    def denoise_event_s(self) -> float | None:
        """The same span by the device's own clock; None where it has none."""
        return self._clock.elapsed_s(self._marks[0], self._marks[-1]) if self._clock.is_device_timed else None

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each step, from mark to mark. On a GPU step 0 has the host's head start to make up for."""
        steps = self._marks[:-1]  # the last mark ends the loop, after the last step's own
        return tuple(self._clock.elapsed_s(a, b) for a, b in pairwise(steps))

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return max(len(self._marks) - (1 if self._end_s is None else 2), 0)

    @property
    def latents(self) -> Tensor:
        """The last sample that the scheduler returned, by reference."""
        return _known(self._latents)

    def begin(self) -> None:
        """The loop begins. BcgbenchError at a second loop of one pipeline: one span cannot stand for two."""
        if self._start_s is not None:
            raise BcgbenchError(
                f"{self._name} opened a second progress bar in one request, so its denoise loop cannot be told from "
                "other work. Expected one bar; a pipeline of several stages names them as `stages`."
            )
        self._clock.synchronize()
        self._annotation.enter_context(torch.profiler.record_function(DENOISE_SPAN))
        self._start_s = self._clock.now_s()
        self._marks.append(self._clock.mark())

    def step(self) -> None:
        """A step ends."""
        self._marks.append(self._clock.mark())
        if self._on_step is not None:
            self._on_step(self.steps - 1)

    def finish(self) -> None:
        """The loop ends."""
        self._marks.append(self._clock.mark())
        self._clock.synchronize()
        self._end_s = self._resumed_s = self._clock.now_s()
        self._annotation.close()
        if self._on_end is not None:
            self._on_end()
            self._resumed_s = self._clock.now_s()

    def _keep(self, latents: Tensor) -> None:
        self._latents = latents

    @property
    def _name(self) -> str:
        return type(self._pipe).__name__

    def _check(self) -> None:
        """BcgbenchError unless the pipeline ran one loop of at least one step."""
        missing = {
            "it never opened its progress bar": self._start_s is None,
            "its progress bar was not closed": self._start_s is not None and self._end_s is None,
            "its progress bar was never updated": self._end_s is not None and self.steps == 0,
            "its scheduler made no step": self._latents is None,
        }
        found = [text for text, is_so in missing.items() if is_so]
        if found:
            raise BcgbenchError(
                f"the denoise loop of {self._name} cannot be timed: {'; '.join(found)}. Expected: "
                "`with self.progress_bar(total=...) as bar` around the loop, with `bar.update()` and `scheduler.step` "
                "in it. Check that the installed diffusers has this pipeline as bcgbench knows it."
            )


class _Bar:
    """The pipeline's own progress bar, which tells the tap when it begins, advances and ends."""

    def __init__(self, bar: Any, *, tap: DenoiseTap) -> None:
        self._bar, self._tap = bar, tap

    def __enter__(self) -> Self:
        self._bar.__enter__()
        self._tap.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # after an error the device may be unusable: a synchronise would hide the cause
            self._tap.finish()
        self._bar.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Any]:
        self._tap.begin()
        for item in self._bar:
            yield item
            self._tap.step()
        self._tap.finish()

    def update(self, n: float = 1) -> Any:
        self._tap.step()
        return self._bar.update(n)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the context, on this instance only; then exactly as before."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        for key, old in before.items():
            setattr(owner, key, old)


def _recording_step(scheduler: Any, *, keep: Callable[[Any], None]) -> MethodType:
    """`scheduler.step` that hands each returned sample to `keep`.

    A bound method, because `copy.deepcopy` binds it to the copy: LTX-2 copies its scheduler for the audio latents, and
    a closure would advance the video's scheduler twice. `wraps`, because pipelines pass `generator` only to a step
    whose signature names it.
    """
    step = scheduler.step

    @functools.wraps(getattr(step, "__func__", step))
    def record(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if owner is not scheduler:
            return type(owner).step(owner, *args, **kwargs)
        result = step(*args, **kwargs)
        keep(result[0] if isinstance(result, tuple) else result.prev_sample)
        return result

    return MethodType(record, scheduler)


def _known(value: T | None) -> T:
    """`value`, which is there once the tap's context was left without an error."""
    if value is None:
        raise BcgbenchError("the denoise loop has not run: read its times after the request")
    return value
