"""Capture a forward: warm call, rehearsal, capturing call, check.

While capturing, each segment is executed when it closes, so breaks see real data, and the captured output must equal
the rehearsal's bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bcgbench.engine import breaks, diagnose, trees
from bcgbench.engine.auto import AutoCapture, Plan, Survey
from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.buffers import StaticInputs
from bcgbench.engine.constants import FunctionWatch, HostConstants, Rehearsal
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.recorder import Capture
from bcgbench.engine.segments import Backend
from bcgbench.engine.sharing import Key, Repeats, Shared, SharedWritten, Table
from bcgbench.engine.signature import Call, changed_objects
from bcgbench.errors import CaptureError

Forward = Callable[[dict[str, Any]], Any]
"""A forward as the engine calls it: the bound arguments by name."""
ATTEMPTS = 16
"""Captures of one signature under `auto`: each costs a forward, and on a GPU a memory pool."""


@dataclass(slots=True)
class _Passes:
    """The calls of one forward that make a graph."""

    run: Callable[[], Any]
    backend: Backend
    policy: BreakPolicy
    module: nn.Module | None
    forwards: int = 0
    repeated: tuple[Table, frozenset[Key]] | None = None
    """What the rehearsal made more than once; None where nothing may be shared."""

    def warm(self) -> None:
        """The first call, outside any watch."""
        self.forwards += 1
        self.run()
        self.backend.rewind()

    def rehearse(self) -> tuple[Any, HostConstants, Plan | None]:
        """The output of an eager call, the host constants in it, and under `auto` what is illegal in it."""
        constants = HostConstants(self.backend.device)
        plan = Plan(self.backend.device) if self.policy.auto else None
        rehearsal = Rehearsal(constants) if plan is None else Survey(constants, plan)
        table: Table = {}
        repeats = Repeats(table) if self.backend.options.shared_results else None
        self.forwards += 1
        with FunctionWatch(rehearsal.handle), rehearsal.watching(), breaks.active(rehearsal), self.policy.patched():
            with repeats or contextlib.nullcontext():
                output = self.run()
            output = trees.clone(output)
        self.backend.rewind()
        anybodys = rehearsal.broke or (plan is not None and bool(plan.dynamic))
        self.repeated = (table, repeats.found) if repeats is not None and not anybodys else None
        return output, constants, plan

    def record(
        self, constants: HostConstants, plan: Plan | None, *, watch: diagnose.Watch | None = None
    ) -> tuple[Capture, Any]:
        """The capture and its output, `watch` noting the modules' outputs. Under `auto` a call that raises enters the
        plan; the next try breaks there."""
        for _ in range(ATTEMPTS if plan else 2):
            recorder = (Capture(self.backend, constants, module=self.module) if plan is None else
                        AutoCapture(self.backend, constants, module=self.module, plan=plan))  # fmt: skip
            if self.repeated is not None and not (plan and plan.illegal):
                recorder.shared = Shared(*self.repeated)
            recorder.watch = watch or recorder.watch
            try:
                with watch.hooked(self.module) if watch and self.module else contextlib.nullcontext():
                    return recorder, self._record(recorder)
            except SharedWritten:
                self.repeated, last = None, "a shared tensor is written to"
            except CaptureError as error:
                failed = recorder.failed if isinstance(recorder, AutoCapture) else None
                if plan is None or failed is None or failed in plan.illegal:
                    raise
                plan.illegal.append(failed)
                last = str(error)  # not the error: its traceback holds the tensors of the failed capture
            gc.collect()  # those tensors may be part of a cycle; freed later, they would invalidate the next capture
            self.backend.rewind()
            constants.rewind()
        tried = "; ".join(map(str, plan.illegal if plan else ()))
        raise CaptureError(f"{ATTEMPTS} captures failed, each at another call: {tried}. The last said: {last}")

    @property
    def _advice(self) -> str:
        if self.policy.auto:
            return "--break auto could not break there; break around it by name (--break auto,dotted.name)."
        return "--break auto would break there, if a torch call raised; so does --break with the call's dotted name."

    def _record(self, recorder: Capture) -> Any:
        """After a failure the backend is recovered; an error that is not the engine's is wrapped."""
        self.forwards += 1
        try:
            with self.policy.patched():
                return recorder.run(self.run)
        except (CaptureError, KeyboardInterrupt, torch.OutOfMemoryError):
            self.backend.recover()
            raise
        except Exception as error:
            self.backend.recover()
            operation = diagnose.error_operation(error)
            raise CaptureError(
                f"Capture failed in {diagnose.error_site(error, recorder.module)}: {type(error).__name__}: {error}"
                + (f" (at `{operation}`). " if operation else ". ")
                + self._advice
            ) from error


def capture(
    forward: Forward, call: Call, *, backend: Backend, policy: BreakPolicy, module: nn.Module | None, step_limit: int,
    watch: diagnose.Watch | None = None,
) -> SegmentedGraph:  # fmt: skip
    """Capture `forward(arguments)` for the signature of `call`, in three passes: warm, rehearsal, capture.

    `watch` sees what the submodules give in the capturing call.

    Raises `CaptureError` if the forward cannot be captured or replays differently; the process is then usable, the
    generator where it was. Raises `ProcessPoisoned` if it is not.
    """
    if torch.is_grad_enabled():
        raise CaptureError("Grad mode is on; a graph holds inference only. Call the model under torch.no_grad().")
    inputs = StaticInputs(call.leaves, backend.device, skip_unchanged=backend.options.skip_unchanged)

    def run() -> Any:  # rebuilt at each pass: a model may change a list that it was given
        return forward(trees.rebuild(call.signature.spec, inputs.leaves))

    passes = _Passes(run, backend, policy, module)
    with backend.capturing():
        before = inputs.versions
        passes.warm()
        _check_objects(call)
        expected, constants, plan = passes.rehearse()
        _check_unwritten(before, inputs)
        recorder, output = passes.record(constants, plan, watch=watch)
    _check_limits(recorder, step_limit)
    diagnose.check_same(expected, output, explain=lambda: _first_module(passes))
    graph = SegmentedGraph(call.signature, inputs, recorder.steps, output, list(recorder.held.values()),
                           forwards=passes.forwards)  # fmt: skip
    if isinstance(recorder, AutoCapture):
        graph.values, graph.output = recorder.fresh.values, recorder.fresh.settle(output)
    return graph


def _check_objects(call: Call) -> None:
    for path in changed_objects(call):
        raise CaptureError(
            f"The forward changes its argument {path}, an object that the graph took for a constant; a replay would "
            "not change it. Pass what changes as a tensor, or run this call eagerly."
        )


def _check_unwritten(before: list[int | None], inputs: StaticInputs) -> None:
    for index, (old, new) in enumerate(itertools.zip_longest(before, inputs.versions)):
        if old != new:
            raise CaptureError(
                f"The forward writes to its tensor argument {index} in place; the caller of a graph would not see it. "
                "Clone the argument inside the forward."
            )


def _check_limits(recorder: Capture, step_limit: int) -> None:
    if len(recorder.steps) > step_limit:
        raise CaptureError(
            f"The capture has {len(recorder.steps)} steps, the limit is {step_limit}. Break at fewer functions, or "
            "raise the limit."
        )


def _first_module(passes: _Passes) -> str:
    """Run once eagerly and once capturing with every module's output digested; name the first that differs."""
    if passes.module is None:
        return "no module is known"
    with passes.backend.capturing():
        eager = diagnose.Watch()
        with eager.hooked(passes.module):
            passes.run()
            eager.settle()
        passes.backend.rewind()
        _, constants, plan = passes.rehearse()
        captured = diagnose.Watch()
        passes.record(constants, plan, watch=captured)
    return diagnose.first_difference(eager, captured)
