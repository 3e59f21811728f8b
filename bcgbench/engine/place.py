"""Where a thread is, in the terms of a graph: the step, the break or module, the line. For a process that hangs.

Reads the thread's frames and imports no torch: a process may hang before it has, or while it imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_HERE = str(Path(__file__).parents[1])


def step_place(steps: Sequence[Any], at: int) -> str:
    """Number and kind of a graph's step, and between which breaks a segment stands."""
    number = f"step {at + 1} of {len(steps)}"
    if getattr(steps[at], "label", ""):
        return f"{number}, the break {steps[at].label}"
    if _named(steps[at]):
        return f"{number}, the host read {_named(steps[at])}"
    before = next((_named(step) for step in reversed(steps[:at]) if _named(step)), "the beginning")
    after = next((_named(step) for step in steps[at + 1 :] if _named(step)), "the end")
    return f"{number}, the segment between {before} and {after}"


def _named(step: Any) -> str:
    """Label of a break or region, place of a host read; "" for a segment."""
    name = getattr(step, "label", "") or getattr(step, "where", "")
    return name if isinstance(name, str) else ""


def place(thread: int) -> str:
    """Step of a graph, module and line of code that a thread is in; "" for a thread that has ended."""
    frames = list(_frames(sys._current_frames().get(thread)))
    told = [_step(frames), _module(frames), _line(frames)]
    return ", ".join(filter(None, told))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _step(frames: list[FrameType]) -> str:
    """The step that the innermost replay runs."""
    for frame in frames:
        step, owner = frame.f_locals.get("step"), frame.f_locals.get("self")
        steps: Any = getattr(owner, "steps", None) or getattr(getattr(owner, "_graph", None), "steps", ())
        at = next((index for index, each in enumerate(steps) if each is step), None)
        if at is not None:
            return step_place(steps, at)
    return ""


def _module(frames: list[FrameType]) -> str:
    """Path of the innermost module that is being called, from the outermost one."""
    owners: list[Any] = [frame.f_locals.get("self") for frame in frames]
    called = [owner for owner in owners if hasattr(type(owner), "named_modules")]
    if not called:
        return ""
    paths = [path for path, child in called[-1].named_modules() if child is called[0]]
    return f"in {paths[0] if paths and paths[0] else type(called[0]).__name__}"


def _line(frames: list[FrameType]) -> str:
    """The innermost line, and the innermost of this package where that is another."""
    own = [frame for frame in frames if frame.f_code.co_filename.startswith(_HERE)]
    shown = dict.fromkeys(_site(frame) for frame in (*frames[:1], *own[:1]))
    return "at " + ", called from ".join(shown) if shown else ""


def _site(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
