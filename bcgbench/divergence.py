"""Where two arms differ first: the denoise step, the transformer call, the module, the operation.

Here: one case in this process, from load to a `CaseDivergence`. Not here: how a call is narrowed down
(`divergence_modules.py`), which rows are compared (`divergence_align.py`), how it is shown (`cli_divergence.py`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bcgbench import measure
from bcgbench.answers import CallTally
from bcgbench.arms import Arm, Hook
from bcgbench.binding import Traced
from bcgbench.divergence_align import Aligned, Contrast, alignments, contrast, differs, limit, share
from bcgbench.divergence_modules import Bisection, ModuleFinding
from bcgbench.divergence_watch import Side
from bcgbench.engine import trees
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.walk import Fault, backend_apart, first_fault, first_unfilled
from bcgbench.models import base
from bcgbench.runners import RUNNERS, runner
from bcgbench.tap import DenoiseTap
from bcgbench.tracer import Tracer
from bcgbench.types import Case

OnStage = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFinding:
    """The first transformer call whose output differs on identical inputs."""

    call: int
    """Among all calls of all prompts, from 0."""
    prompt: int
    step: int
    branch: int
    """Among the calls of the step, from 0: with guidance, conditional and unconditional in the pipeline's order."""
    denoiser: str
    contrast: Contrast


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinding:
    """The first denoise step after which the latents of two free-running arms differ."""

    prompt: int
    step: int
    contrast: Contrast


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFinding:
    """A graph whose replay is not what the arm's forward gives eagerly, or not what a new capture of the call gives."""

    arm: str
    new_capture: Literal["right", "alike", "other"]
    """What a new capture's replay gives: the eager output, the same wrong one, or a third."""
    step: int | None
    """Step of the graph that goes wrong, -1 for its inputs; None where each step alone is right."""
    steps: int
    what: str
    where: str
    """Module path and source line, where known."""
    operation: str | None
    contrast: Contrast | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseDivergence:
    """Arm b against arm a on one case."""

    model: str
    resolution: str
    dtype: str
    arms: tuple[str, str]
    calls: int
    calls_equal: int
    """Of them bit-equal."""
    rounding_limit: float | None
    """Share of a tensor's size up to which a difference counts as rounding; None where every byte counts, between arms
    that both pad or both do not."""
    rounding_seen: float | None
    """Largest share among the calls that differ by rounding only; None without any."""
    call: CallFinding | None
    latents: StepFinding | None
    module: ModuleFinding | None
    replay: ReplayFinding | None
    fallbacks: tuple[str, ...]
    """Why calls of a graph arm ran eagerly, and how many."""
    time_s: float
    load_s: float
    """Of it spent loading."""
    forwards: int
    """Forwards of the denoisers, those that captures take included."""
    device_peak_bytes: int | None
    """Most memory allocated on the GPU; None on a CPU."""
    host_peak_bytes: int
    """Largest resident size of this process so far."""

    @property
    def diverged(self) -> bool:
        """Whether the arms differ by more than the rounding that their padding may bring."""
        return self.call is not None or (self.rounding_limit is None and self.latents is not None)


def diverge(case: Case, *, arms: tuple[str, str], on_stage: OnStage = lambda _: None) -> CaseDivergence:
    """Compare two arms of a case, in this process. Raises what loading and preparing an arm raise."""
    for name in arms:
        runner(name)
    start = time.perf_counter()
    on_stage("load")
    session = base.load(case)
    measure.peak_reset(session.device)
    with torch.no_grad():
        return _Search(session, arms, on_stage=on_stage).run(start)


@dataclass(slots=True)
class _Trace:
    """A free run over all prompts."""

    ends: list[tuple[int, int]] = field(default_factory=list)
    """Prompt, and calls so far, at the end of each denoise step."""
    latents: list[Tensor] = field(default_factory=list)
    """After each step, on the host."""


class _Search:
    """The passes over one loaded case."""

    def __init__(self, session: base.Session, arms: tuple[str, str], *, on_stage: OnStage) -> None:
        self._session, self._names, self._on_stage = session, arms, on_stage
        self._a, self._b = (Arm(RUNNERS[name], session) for name in arms)
        self._rounding = self._a.runner.padded != self._b.runner.padded
        self._seen: list[float] = []

    def run(self, start: float) -> CaseDivergence:
        self._prepare(self._a)
        self._on_stage(f"trace {self._names[0]}")
        tracer = Tracer(self._a)
        trace = _Trace()
        for prompt in range(len(self._session.case.prompts)):
            with tracer.recording():
                self._request(prompt, trace, calls=lambda: len(tracer.calls))
        if self._b.runner.captured:
            self._on_stage(f"prepare {self._names[1]}")
            self._b.prepare(tracer.calls)
        self._on_stage(f"compare {len(tracer.calls)} calls")
        equal, found = self._calls(tracer.calls)
        latents = self._free_run(trace)
        module = replay = call = None
        if found is not None:
            index, pair, wrong = found
            self._on_stage(f"bisect call {index}")
            call = self._call_finding(index, tracer.calls[index], trace, pair)
            module, replay = self._narrow(tracer.calls[index], wrong)
        return CaseDivergence(
            model=self._session.case.model, resolution=self._session.case.resolution, dtype=self._session.case.dtype,
            arms=self._names, calls=len(tracer.calls), calls_equal=equal,
            rounding_limit=limit(self._session.dtype) if self._rounding else None,
            rounding_seen=max(self._seen, default=None), call=call, latents=latents, module=module, replay=replay,
            fallbacks=self._fallbacks(), time_s=time.perf_counter() - start, load_s=self._session.load_s,
            forwards=sum(hook.graphed.calls + hook.graphed.prepare_forwards for hook in self._hooks),
            device_peak_bytes=measure.peak(self._session.device)[0],
            host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )  # fmt: skip

    def _prepare(self, arm: Arm) -> None:
        """Capture arm a before it is traced: by the calls of an eager run."""
        if not arm.runner.captured:
            return
        self._on_stage(f"prepare {arm.runner.name}")
        tracer = Tracer(Arm(RUNNERS["eager"], self._session))
        with tracer.recording():
            for prompt in range(len(self._session.case.prompts)):
                self._session.produce(prompt)
        arm.prepare(tracer.calls)

    def _request(self, prompt: int, trace: _Trace, *, calls: Callable[[], int] = lambda: 0) -> None:
        clock = measure.clock_for(self._session.device)
        with ExitStack() as stack:
            for stage in getattr(self._session.pipe, "stages", (self._session.pipe,)):

                def on_step(_step: int, taps: list[DenoiseTap]) -> None:
                    trace.latents.append(taps[0].latents.detach().to("cpu", copy=True))
                    trace.ends.append((prompt, calls()))

                own: list[DenoiseTap] = []  # a tap is told at birth what its steps do, which read the tap
                own.append(stack.enter_context(DenoiseTap(stage, clock, on_step=partial(on_step, taps=own))))
            self._session.produce(prompt)

    def _calls(self, calls: list[Traced]) -> tuple[int, tuple[int, Aligned, Any] | None]:
        """How many calls are bit-equal; the first that differs, with arm b's output."""
        found = None
        tally = CallTally()
        for index, traced in enumerate(calls):
            output = self._b.call(traced)
            tally.add(traced.output, output)  # raises where the outputs cannot be compared
            pair = self._compare(traced.output, output)
            if pair is not None and found is None:
                found = index, pair, trees.clone(output)
        return tally.exact, found

    def _compare(self, a: Any, b: Any) -> Aligned | None:
        pairs = [alignments(x, y, ()) for x, y in zip(trees.tensors(a), trees.tensors(b), strict=True)]
        unlike = next((pair for each in pairs if (pair := differs(each, rounding=self._rounding))), None)
        if unlike is None and self._rounding:
            self._seen += [share(each[0].a, each[0].b) for each in pairs if not bit_equal(each[0].a, each[0].b)]
        return unlike

    def _free_run(self, expected: _Trace) -> StepFinding | None:
        """Arm b on its own, against the latents of arm a's free run."""
        self._on_stage(f"run {self._names[1]}")
        got = _Trace()
        for prompt in range(len(self._session.case.prompts)):
            with self._b.attached():
                self._request(prompt, got)
        first: dict[int, int] = {}
        for index, (a, b) in enumerate(zip(expected.latents, got.latents, strict=True)):
            prompt = expected.ends[index][0]
            step = index - first.setdefault(prompt, index)
            if not bit_equal(a, b):
                shown = contrast(
                    Aligned("all", a, b), name=f"latents of prompt {prompt} after step {step}", rounding=False
                )
                return StepFinding(prompt=prompt, step=step, contrast=shown)
        return None

    def _call_finding(self, index: int, traced: Traced, trace: _Trace, pair: Aligned) -> CallFinding:
        at = next((number for number, (_, end) in enumerate(trace.ends) if index < end), len(trace.ends) - 1)
        prompt = trace.ends[at][0]
        step = at - next(number for number, (other, _) in enumerate(trace.ends) if other == prompt)
        begin = trace.ends[at - 1][1] if at else 0
        return CallFinding(
            call=index, prompt=prompt, step=step, branch=index - begin, denoiser=traced.module,
            contrast=contrast(pair, name=f"call {index}", rounding=self._rounding),
        )  # fmt: skip

    def _narrow(self, traced: Traced, wrong: Any) -> tuple[ModuleFinding | None, ReplayFinding | None]:
        """The first module that differs, and what is wrong with a replay."""
        a, b = Side(self._a, traced), Side(self._b, traced)
        replay = self._replay(a, traced.output) or self._replay(b, wrong)
        if replay is not None and replay.new_capture != "other" and not self._rounding:
            return None, replay  # eager runs of one forward on the same inputs: there is nothing in the modules
        return Bisection(a, b, rounding=self._rounding).run(), replay

    def _replay(self, side: Side, output: Any) -> ReplayFinding | None:
        """Whether a graph's replay is what a new capture of the call gives, and the first step that goes wrong."""
        old = side.graph if side.arm.runner.captured else None
        if old is None:
            return None
        device = self._session.device
        fresh, call = side.hook.graphed.recapture(side.arguments, backend=backend_apart(device, side.hook.module))
        replayed = fresh.replay(call.leaves)
        right, alike = _equal(replayed, side.eagerly(lambda _event: None)), _equal(replayed, output)
        if right and alike:
            return None
        fault = first_unfilled(old, call.leaves) if alike else first_fault(fresh, old, call.leaves)
        whole = "a new capture's goes wrong alike" if alike else "each of its steps alone is right"
        return ReplayFinding(
            arm=side.arm.runner.name, new_capture="right" if right else "alike" if alike else "other",
            steps=len(old.steps),
            step=None if fault is None else fault.mark.step, where="" if fault is None else fault.mark.where,
            what=f"the replay as a whole: {whole}" if fault is None else fault.mark.what,
            operation=None if fault is None else fault.mark.operation,
            contrast=None if fault is None else _fault_contrast(fault),
        )  # fmt: skip

    def _fallbacks(self) -> tuple[str, ...]:
        hooks = [hook for hook in self._hooks if hook.graphed.backend is not None]
        misses = [miss for hook in hooks for miss in hook.graphed.cache.misses.values()]
        return tuple(f"{miss.reason} ({miss.count})" for miss in misses)

    @property
    def _hooks(self) -> list[Hook]:
        return [hook for arm in (self._a, self._b) for hook in arm.hooks.values()]


def _equal(a: Any, b: Any) -> bool:
    return all(bit_equal(x, y) for x, y in zip(trees.tensors(a), trees.tensors(b), strict=True))


def _fault_contrast(fault: Fault) -> Contrast | None:
    if fault.right is None or fault.wrong is None:
        return None
    if fault.right.shape != fault.wrong.shape or fault.right.dtype != fault.wrong.dtype:
        return None
    return contrast(Aligned("all", fault.right, fault.wrong), name=fault.mark.what, rounding=False)
