"""Faults injected into a capture: what they leave behind, and whether the engine recovers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bcgbench.arms import Arm
from bcgbench.engine.breaks import eager_on_graph
from bcgbench.engine.diagnose import bit_equal
from bcgbench.errors import CaptureError
from bcgbench.validate import Answer, not_applicable, ruled
from bcgbench.validate_subject import Shape, Subject

CAPTURING_PASS = 3
"""A capture calls the forward twice before the call that records."""
SLACK_BYTES = 1 << 20
"""Allocated memory may differ by this: generator state of the first use."""
PRESSURE_BYTES = (1 << 30, 256 << 20, 64 << 20)
"""Free memory left for a capture, in turn."""


class Injected(Exception):
    """Raised by a forward or a break on purpose."""


class _Fault:
    """Raises in the call that records, in the forward itself or in a break after its last module."""

    def __init__(self, *, in_break: bool) -> None:
        self._passes = 0
        self._raise = eager_on_graph(self._now) if in_break else self._now

    def _now(self) -> None:
        if self._passes >= CAPTURING_PASS:
            raise Injected("injected on purpose")

    def __call__(self) -> None:
        self._passes += 1
        self._raise()


@contextlib.contextmanager
def _injected(subject: Subject, fault: Callable[[], None]) -> Iterator[None]:
    subject.trace.after_forward = fault
    try:
        yield
    finally:
        subject.trace.after_forward = None


def capture_failure(subject: Subject) -> Answer:
    """A capture fails in a forward and in a break: older graphs, generator and memory are as before, the next works."""
    problems = [
        f"after {where} raised: {text}"
        for where, in_break in (("the forward", False), ("a break", True))
        for text in _checked(subject, _Fault(in_break=in_break))
    ]
    return ruled(problems, fine="a forward and a break that raise while capturing: named, cleaned up, captured again")


def _checked(subject: Subject, fault: _Fault) -> list[str]:
    """What is wrong after one failure. What was alive before is not walked again by the garbage collector."""
    gc.freeze()
    try:
        return list(_failure(subject, fault))
    finally:
        gc.unfreeze()


def _failure(subject: Subject, fault: _Fault) -> Iterator[str]:
    arm, shapes = subject.arm(captured=False), subject.shapes
    target, older = shapes[-1], shapes[:-1]
    for shape in older:
        subject.hook(arm, shape).graphed.prepare(shape.arguments)
    backend = subject.hook(arm, target).graphed.backend
    assert backend is not None
    with backend.capturing():  # keeps a generator state, and its stream a workspace of cuBLAS, from their first use on
        state = _random_state(subject)
        subject.eager(target)
    before = _held(subject)
    try:
        with _injected(subject, fault):
            subject.hook(arm, target).graphed.prepare(target.arguments)
        yield "the capture succeeded, so the error was swallowed"
    except CaptureError as error:
        if "Injected" not in str(error):
            yield f"the message does not name the cause: {error}"
        del error
    if not bit_equal(state, _random_state(subject)):
        yield "the random generator is elsewhere"
    grown = _held(subject) - before
    if grown > (SLACK_BYTES if subject.device.type == "cuda" else 0):
        yield f"memory leaked: {grown} {'bytes' if subject.device.type == 'cuda' else 'tensors'} more are held"
    if subject.hook(arm, target).graphed.cache.find(target.signature):
        yield "the failed graph is in the cache"
    yield from _exact(subject, arm, older, "an older graph")
    subject.hook(arm, target).graphed.prepare(target.arguments)
    yield from _exact(subject, arm, [target], "the graph captured next")


def _exact(subject: Subject, arm: Arm, shapes: list[Shape], what: str) -> Iterator[str]:
    for shape in shapes:
        if unlike := subject.unlike(subject.eager(shape), subject.replayed(arm, shape)):
            yield f"{what} of {shape.module}: {unlike}"


def _random_state(subject: Subject) -> torch.Tensor:
    on_gpu = subject.device.type == "cuda"
    return torch.cuda.get_rng_state(subject.device) if on_gpu else torch.get_rng_state()


def _held(subject: Subject) -> int:
    """Allocated bytes on a GPU; on a CPU, where torch does not count them, live tensors."""
    gc.collect()
    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
        return torch.cuda.memory_allocated(subject.device)
    return sum(_is_tensor(each) for each in gc.get_objects())


def _is_tensor(each: Any) -> bool:
    return issubclass(type(each), torch.Tensor)  # not isinstance: a lazy module's proxy would import itself


def memory_pressure(subject: Subject) -> Answer:
    """Captures with ever less free memory: exact, or refused with what is needed to know, and possible afterwards."""
    if subject.device.type != "cuda":
        return not_applicable("a CPU has no graph pool to run out of; needs a GPU")
    problems, outcomes = [], []
    shape = subject.shapes[0]
    expected = subject.eager(shape)
    for room in PRESSURE_BYTES:
        arm = subject.arm(captured=False)
        graphed = subject.hook(arm, shape).graphed
        try:
            with _little_memory(subject.device, room):
                graphed.prepare(shape.arguments)
            outcomes.append("captured")
        except (CaptureError, torch.OutOfMemoryError) as error:
            outcomes.append(f"refused ({type(error).__name__})")
            del error
        graphed.prepare(shape.arguments)
        if unlike := subject.unlike(expected, subject.replayed(arm, shape)):
            problems.append(f"after {room >> 20} MiB were free: {unlike}")
    left = ", ".join(f"{room >> 20} MiB free: {text}" for room, text in zip(PRESSURE_BYTES, outcomes, strict=True))
    return ruled(problems, fine=f"{left}; exact afterwards")


@contextlib.contextmanager
def _little_memory(device: torch.device, room: int) -> Iterator[None]:
    """Let torch allocate `room` more bytes at most. Filling the GPU instead would take it from others that share it."""
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(device) + room
    torch.cuda.set_per_process_memory_fraction(min(allowed / torch.cuda.mem_get_info(device)[1], before), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
