"""Checks of one forward from inside: what it asks of the host, and its graph step by step with a limit in time."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bcgbench.arms import Arm
from bcgbench.binding import Traced
from bcgbench.engine import jit, trees
from bcgbench.engine.audit import audit
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.place import step_place
from bcgbench.engine.signature import Call
from bcgbench.engine.steps import Guard, GuardFailed
from bcgbench.errors import ProcessPoisoned, first_line
from bcgbench.validate import Answer, ruled
from bcgbench.validate_subject import Subject

STEP_LIMIT_S = 60.0
"""A step that takes longer hangs: the slowest forward of all models takes seconds."""


def host_audit(subject: Subject) -> Answer:
    """What one eager forward asks of the host, what padding and replaying it ask more often, and all compilation."""
    arm = subject.arm()
    problems: list[str] = []
    details: list[str] = []
    first = {(traced.module, subject.signature(traced)): traced for traced in reversed(subject.samples)}
    for traced in first.values():
        problems += _compilations(subject, arm, traced)
        asked = _asked_of_host(subject, arm, traced)
        details += [f"{who}, {count}x {what}" for who, found in asked.items() for what, count in found.items()]
        if subject.device.type == "cpu":  # a tape cannot tell a padder's host data from the device's
            asked["padding"].clear()
        added = asked["padding"] + asked["replay"]
        if added.total() > asked["eager"].total():
            more = "; ".join(f"{count}x {what}" for what, count in added.items())
            counts = f"{added.total()} times, eager {asked['eager'].total()}"
            problems.append(f"a replay of {traced.module} asks the host {counts}: {more}")
    guards = [step.where for graph in arm.graphs for step in graph.steps if isinstance(step, Guard)]
    details += [f"step that waits for the device: {where}" for where in guards]
    if subject.device.type == "cuda" and torch.backends.cudnn.benchmark:
        details.append("cuDNN may time algorithms at each new shape (cudnn.benchmark is on), which cannot be seen")
    fine = (
        f"{len(first)} forwards: a replay asks the host no more than eager does, and nothing was compiled after "
        f"preparation; {len(guards)} guards of host reads"
    )
    return ruled(list(dict.fromkeys(problems)), fine=fine, details=tuple(dict.fromkeys(details)))


def _compilations(subject: Subject, arm: Arm, traced: Traced) -> Iterator[str]:
    """Just-in-time work of the first call after preparation, and of eager, which the trace has run before."""
    native = subject.padded.hooks[traced.module].graphed
    calls: dict[str, Callable[[], object]] = {
        "eager": lambda: native.fall_back(traced.arguments), "a replay": lambda: arm.call(traced),
    }  # fmt: skip
    for who, call in calls.items():
        for what, count in jit.compiled(call, root=arm.hooks[traced.module].module).items():
            yield f"{who} of {traced.module} after preparation: {count}x {what}"


def _asked_of_host(subject: Subject, arm: Arm, traced: Traced) -> dict[str, Counter[str]]:
    """By eager at native length, by padding the call, by replaying it; all not for the first time."""
    hook = arm.hooks[traced.module]
    native = subject.padded.hooks[traced.module].graphed
    padded = hook.pad(traced.arguments)
    runs: dict[str, Callable[[], object]] = {
        "eager": lambda: native.fall_back(traced.arguments),
        "padding": lambda: hook.pad(traced.arguments),
        "replay": lambda: hook.graphed(padded),
    }
    return {name: audit(run, root=hook.module, device=subject.device) for name, run in runs.items()}


def steps(subject: Subject) -> Answer:
    """Every graph replayed step by step, the device synchronised after each, by a thread that may not take too long."""
    arm, problems, count = subject.arm(), [], 0
    for index, shape in enumerate(subject.shapes):
        graph = subject.graph(arm, shape)
        expected, call = subject.eager(shape), subject.hook(arm, shape).graphed.sign(shape.arguments)
        count += len(graph.steps)
        graph.poison()
        walk = _Walk(subject, graph, call)
        fault = walk.run(limit_s=STEP_LIMIT_S)
        if walk.hangs:
            raise ProcessPoisoned(f"signature {index} of {shape.module}: {fault}")
        if not fault:
            fault = subject.unlike(expected, walk.output)
        problems += [f"signature {index} of {shape.module}: {fault}"] if fault else []
    fine = f"{count} steps of {len(subject.shapes)} graphs, each synchronised, within {STEP_LIMIT_S:.0f} s, exact"
    return ruled(problems, fine=fine)


class _Walk:
    """One replay, step by step, in a thread of its own: a thread that hangs can be reported, not ended."""

    def __init__(self, subject: Subject, graph: SegmentedGraph, call: Call) -> None:
        self._subject, self._graph, self._call = subject, graph, call
        self._reached = 0
        self._moved = threading.Event()
        self._error: BaseException | None = None
        self.hangs = False
        self.output: Any = None

    def run(self, *, limit_s: float) -> str:
        """What went wrong and where; "" for nothing."""
        thread = threading.Thread(target=self._walk, name="validate-steps", daemon=True)
        thread.start()
        while thread.is_alive():
            self._moved.clear()
            reached = self._reached
            if not self._moved.wait(limit_s) and thread.is_alive() and reached == self._reached:
                self.hangs = True
                return f"no end after {limit_s:g} s of {self._place()}"
            thread.join(0.0 if self._reached <= len(self._graph.steps) else limit_s)
        if self._error is None:
            return ""
        return f"{type(self._error).__name__} in {self._place()}: {first_line(self._error)}"

    def _walk(self) -> None:
        device = self._subject.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        try:
            with torch.no_grad(), on_device:
                self._graph.inputs.update(self._call.leaves)
                for step in self._graph.steps:
                    step.replay()
                    self._subject.synchronize()
                    self._reached += 1
                    self._moved.set()
                output = self._graph.result()
                self.output = trees.clone(output)
                self._subject.replays += 1
        except (Exception, GuardFailed) as error:  # noqa: BLE001 - a break is anybody's code; told by `run`
            self._error = error
        finally:
            self._reached += 1
            self._moved.set()

    def _place(self) -> str:
        """The step that was running."""
        steps = self._graph.steps
        return step_place(steps, min(self._reached - (self._error is not None), len(steps) - 1))
