"""One case from loading to its records: trace, prepare, requests, rounds, checks, profile.

Runs inside the case's own worker process and reports by `emit`; nothing here writes the journal or decides what a
figure is worth. An arm that fails is a record with its reason, and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bcgbench import answers, environment, measure
from bcgbench.accuracy import References, references_for
from bcgbench.answers import CallTally, Final, Finals
from bcgbench.arms import Arm
from bcgbench.artifacts import Saver
from bcgbench.binding import Traced
from bcgbench.child import reason_of
from bcgbench.errors import BcgbenchError, ProcessPoisoned, first_line
from bcgbench.flops import count_flops
from bcgbench.live import Live, Stopped, ending_early
from bcgbench.models import base, prior
from bcgbench.records import assemble, sample_of
from bcgbench.runners import RUNNERS, runner
from bcgbench.tracer import Tracer
from bcgbench.types import Case, Environment, Fidelity, GpuState, Phase, Progress, Question, Record, Sample

log = logging.getLogger(__name__)

PROFILE_STEPS = 2
Emit = Callable[[Sample | Record | Progress], None]


def run_case(
    case: Case, *, run_id: str, run_path: Path, attempt: int, emit: Emit, should_stop: Callable[[], bool]
) -> None:
    """Measure one case and emit its samples as they come and one record per runner at the end."""
    names = [runner(name).name for name in case.runners]
    emit(Progress(case=case.key, stage="load"))
    bench = CaseBench(base.load(case), environment.collect(case.device), emit=emit, should_stop=should_stop)
    with torch.no_grad(), ending_early(bench.live):
        bench.run(names)
    saver = Saver(run_path, case, bench.session.adapter.facts.frame_rate)
    saved = prior.save(bench.session.prior, run_path, case=case)
    for live in bench.live.values():
        if live.usable:
            live.result.artifacts = saver.save(live.finals, runner=live.name) | saved
        emit(assemble(live.arm, live.result, bench.session, bench.environment, run_id=run_id, attempt=attempt,
                      expected_forwards=live.expected, denoise_flops=bench.denoise_flops))  # fmt: skip


class CaseBench:
    """The stages of one case on one loaded pipeline."""

    def __init__(
        self, session: base.Session, machine: Environment, *, emit: Emit, should_stop: Callable[[], bool]
    ) -> None:
        self.session = session
        self.environment = machine
        self.live: dict[str, Live] = {}
        self.denoise_flops: float | None = None
        self._case = session.case
        self._emit = emit
        self._should_stop = should_stop
        self._clock = measure.clock_for(session.device)
        self._calls: list[Traced] = []
        self._calls_of: dict[int, int] = {}
        self._traced = Finals()
        self._references: dict[bool, References] = {}
        self._progress = Progress(case=session.case.key, stage="load")
        self._base = measure.memory(session.device)
        self._monitor = environment.GpuMonitor(session.case.device) if session.device.type == "cuda" else None

    def run(self, names: list[str]) -> None:
        """All stages. Raises `Stopped`; `ProcessPoisoned` if CUDA is lost."""
        self.live |= {name: Live(Arm(RUNNERS[name], self.session)) for name in names}
        self._trace()
        for live in self.live.values():
            self._attempt("prepare", live, self._prepare)
            self._attempt("requests", live, self._requests)
        self._measure()
        self._check()
        if self._case.profile and self.session.device.type == "cuda":
            with contextlib.suppress(Stopped):  # all else is measured and checked: records hold without a profile
                for live in self.live.values():
                    self._attempt("profile", live, self._profile)

    # --- stages ---------------------------------------------------------------------------------------------------

    def _trace(self) -> None:
        """One eager denoise per prompt, all calls kept."""
        arm = Arm(RUNNERS["eager"], self.session)
        tracer = Tracer(arm)
        for prompt in range(len(self._case.prompts)):
            self._report("trace", "eager", done=prompt, total=len(self._case.prompts))
            before = len(tracer.calls)
            with tracer.recording():
                measured = measure.request(self.session, prompt, clock=self._clock, on_step=self._on_step)
            self._traced.by_prompt[prompt] = Final.of(measured)
            self._calls_of[prompt] = measure.check_calls(len(tracer.calls) - before, measured, self.session.pipe)
        self._calls = tracer.calls
        if self.session.device.type == "cuda":
            self.denoise_flops = count_flops(arm, self._calls[: self._calls_of[0]])
        # before any arm takes memory: the cast weights stand beside the model's own
        self._references = references_for(
            (live.arm.runner for live in self.live.values()), self.session, self._calls,
            report=lambda done, total: self._report("trace", "reference", done=done, total=total),
        )  # fmt: skip

    def _prepare(self, live: Live) -> None:
        self._report("prepare", live.name)
        others = measure.memory(self.session.device)
        live.result.foreign_bytes = (others[0] - self._base[0], others[1] - self._base[1])
        start = time.perf_counter()
        live.arm.prepare(self._calls)
        self._clock.synchronize()
        live.result.prepare_s = time.perf_counter() - start
        live.result.time_calls(live.arm, self._calls[0], clock=self._clock)

    def _requests(self, live: Live) -> None:
        """Warm, short prompt, long prompt, short again: nothing may be captured, nothing stale, nothing overwritten."""
        captures = [live.arm.captures]
        phases: list[tuple[Phase, int]] = [("first", 0), ("req1", 0), ("req2", 1), ("req1-again", 0)]
        phases += [("warm", prompt) for prompt in range(2, len(self._case.prompts))]
        for done, (phase, prompt) in enumerate(phases):
            self._report("requests", live.name, done=done, total=len(phases))
            final = self._image(live, phase=phase, turn=measure.Turn(0, 0, live.name, prompt))
            if phase == "req1-again":
                live.finals.again.append(final)
            elif phase != "first":
                live.finals.by_prompt[prompt] = final
            if phase.startswith("req"):
                captures.append(live.arm.captures)
        live.result.captures = tuple(captures)

    def _measure(self) -> None:
        names = [name for name, live in self.live.items() if live.usable]
        prompts = min(2, len(self._case.prompts))
        start = time.perf_counter()
        for turn in measure.schedule(names, self._case.rounds, prompts=prompts):
            done, total = turn.round * len(names) + turn.order, self._case.rounds * len(names)
            spent = time.perf_counter() - start
            self._report("measure", turn.arm, done=done, total=total,
                         eta_s=spent / done * (total - done) if done else None)  # fmt: skip
            self._attempt("measure", self.live[turn.arm], functools.partial(self._round, turn=turn))

    def _round(self, live: Live, *, turn: measure.Turn) -> None:
        """One measured image; the first that differs from the arm's earlier ones is kept for the check."""
        final = self._image(live, phase="measure", turn=turn)
        if not final.equals(live.finals.by_prompt[turn.prompt]):
            live.finals.changed.setdefault((turn.prompt, turn.round), final)

    def _check(self) -> None:
        """Calls on identical inputs, and final outputs, against their references."""
        eager = self.live.get("eager")
        if eager is not None and eager.usable:
            self._check_rerun(eager)
        usable = [live for live in self.live.values() if live.usable]
        judged = [live for live in usable if live.arm.runner.captured or not live.arm.runner.same_arithmetic]
        self._check_native([live for live in judged if not live.arm.runner.padded])
        padded = {live.name: live for live in judged if live.arm.runner.padded}
        if padded or "eager-padded" in self.live:
            self._check_padded(padded)

    def _check_native(self, arms: list[Live]) -> None:
        """Arms that run at the native length, against the traced outputs."""
        tallies = {live.name: live.tally(self._references) for live in arms}
        for traced in self._reported_calls(", ".join(tallies)) if arms else ():
            for live in arms:
                one = functools.partial(Live.compare, tally=tallies[live.name], traced=traced, expected=traced.output)
                self._attempt("check", live, one)
        for live in arms:
            one = functools.partial(Live.answer, tally=tallies[live.name], expected=self._traced)
            self._attempt("check", live, one)

    def _check_rerun(self, eager: Live) -> None:
        """Eager again, against the traced outputs."""
        again, tally = Live(Arm(RUNNERS["eager"], self.session)), CallTally()
        for traced in self._reported_calls("rerun"):
            one = functools.partial(Live.compare, tally=tally, traced=traced, expected=traced.output)
            self._attempt("check", again, one)
        if again.usable:
            eager.result.fidelity = (self._against_eager("rerun", tally=tally, got=eager.finals),)

    def _check_padded(self, graphs: dict[str, Live]) -> None:
        """Padding against eager, and graphs against padding; without a padded reference they stay unjudged."""
        padded = self.live.get("eager-padded")
        if padded is None or not padded.usable:
            padded = Live(Arm(RUNNERS["eager-padded"], self.session))
            self._attempt("check", padded, self._one_each)
        tallies = {"padding": CallTally()} | {name: live.tally(self._references) for name, live in graphs.items()}
        for traced in self._reported_calls(", ".join(tallies)):
            self._attempt("check", padded, functools.partial(self._compare_padded, tallies, traced, graphs))
        if not padded.usable:
            return
        padding = self._against_eager("padding", tally=tallies["padding"], got=padded.finals)
        padded.result.fidelity = (padding,)
        for name, live in graphs.items():
            one = functools.partial(Live.answer, tally=tallies[name], expected=padded.finals, others=(padding,))
            self._attempt("check", live, one)

    def _compare_padded(
        self, tallies: dict[str, CallTally], traced: Traced, graphs: dict[str, Live], padded: Live
    ) -> None:
        """One traced call: padded eager against it, and the graphs against padded eager."""
        padded.expected += 1
        expected = padded.arm.call(traced)
        tallies["padding"].add(traced.output, expected)
        for name, live in graphs.items():
            one = functools.partial(Live.compare, tally=tallies[name], traced=traced, expected=expected)
            self._attempt("check", live, one)

    def _reported_calls(self, what: str) -> Iterator[Traced]:
        for done, traced in enumerate(self._calls):
            self._report("check", what, done=done, total=len(self._calls))
            yield traced

    def _one_each(self, live: Live) -> None:
        """One image of each prompt, of an arm that is only a reference."""
        for prompt in range(len(self._case.prompts)):
            self._report("check", live.name, done=prompt, total=len(self._case.prompts))
            live.finals.by_prompt[prompt] = self._image(live, phase="req1", turn=measure.Turn(0, 0, live.name, prompt))

    def _against_eager(self, question: Question, *, tally: CallTally, got: Finals) -> Fidelity:
        return answers.answer(question, reference="eager", tally=tally, expected=self._traced, got=got)

    def _profile(self, live: Live) -> None:
        self._report("profile", live.name)

        def run() -> tuple[int, ...]:
            with live.arm.attached():
                measured = measure.request(self.session, 0, clock=self._clock, steps=PROFILE_STEPS)
            second = self.session.adapter.facts.second_stage_steps
            live.expected += (self._calls_of[0] - second) * PROFILE_STEPS // self._case.steps + second
            return measured.loop_steps

        live.profile(run)

    # --- one image ------------------------------------------------------------------------------------------------

    def _image(self, live: Live, *, phase: Phase, turn: measure.Turn) -> Final:
        """Measure one request of an arm; its sample is emitted at once."""
        before = live.arm.counts
        measure.peak_reset(self.session.device)
        on_step = None if phase == "measure" else self._on_step  # telling costs tens of microseconds per step
        states: list[GpuState | None] = []  # as the loop ends: after a video is decoded and written the GPU is cool
        on_end = (lambda: states.append(monitor.state())) if (monitor := self._monitor) else None
        with live.arm.attached():
            measured = measure.request(self.session, turn.prompt, clock=self._clock, on_step=on_step, on_end=on_end)
        live.expected += self._calls_of[turn.prompt]
        counts = live.arm.counts.since(before)
        allocated, reserved = measure.peak(self.session.device)
        sample = sample_of(measured, phase=phase, turn=turn, counts=counts, peak=(allocated, reserved),
                           gpu_state=states[-1] if states else None)  # fmt: skip
        live.result.samples.append(sample)
        if live.name in self.live:
            self._emit(sample)
        return Final.of(measured)

    def _attempt(self, stage: str, live: Live, work: Callable[[Live], object]) -> None:
        """Run a stage of an arm that did not fail before; what it raises is the arm's failure.

        CUDA lost and a stop end the case. Torch's own errors, out of memory among them, are RuntimeErrors.
        """
        if not live.usable:
            return
        try:
            work(live)
        except (BcgbenchError, RuntimeError) as error:
            reason = reason_of(error)
            live.result.failure = dataclasses.replace(reason, text=f"while in {stage}: {reason.text}")
            log.exception("%s failed", live.name)
            if isinstance(error, ProcessPoisoned):
                raise
            self._check_device()

    def _check_device(self) -> None:
        """After an arm failed: give its memory back. Raises `ProcessPoisoned` if it took the device with it."""
        try:
            measure.memory(self.session.device)
        except RuntimeError as error:
            raise ProcessPoisoned(f"The device does not answer: {first_line(error)}.") from error

    def _report(self, stage: str, arm: str, *, done: int = 0, total: int = 0, eta_s: float | None = None) -> None:
        if self._should_stop():
            raise Stopped
        self._progress = Progress(case=self._case.key, stage=stage, arm=arm, done=done, total=total, eta_s=eta_s)
        self._emit(self._progress)

    def _on_step(self, step: int) -> None:
        self._emit(dataclasses.replace(self._progress, step=step + 1))
