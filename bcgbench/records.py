"""What an arm gathered while its case ran, and the record made of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bcgbench.arms import Arm, Counts
from bcgbench.binding import Traced
from bcgbench.clock import Clock
from bcgbench.measure import Measured, Turn, time_call
from bcgbench.models.base import Session
from bcgbench.types import (
    Accuracy,
    Compilation,
    Environment,
    Fidelity,
    GpuState,
    Memory,
    Phase,
    Profile,
    Reason,
    Record,
    Sample,
)
from bcgbench.unchanged import changed
from bcgbench.verdict import judge

CALL_REPEATS = 200
"""Repeats for host times of single calls, which are tens of microseconds."""
PLACES_LIMIT = 8
"""Breaks that a record names; a block that repeats has one per repetition."""


@dataclass(slots=True)
class ArmResult:
    """Filled stage by stage; whatever was reached before a failure is kept."""

    samples: list[Sample] = field(default_factory=list)
    captures: tuple[int, ...] = ()
    foreign_bytes: tuple[int, int] = (0, 0)
    """(allocated, reserved) bytes that other arms hold in this process, excluded from this arm's memory."""
    fidelity: tuple[Fidelity, ...] = ()
    accuracy: Accuracy | None = None
    profile: Profile | None = None
    prepare_s: float | None = None
    signature_s: float | None = None
    hook_s: float | None = None
    artifacts: dict[str, str] = field(default_factory=dict)
    failure: Reason | None = None

    def time_calls(self, arm: Arm, traced: Traced, *, clock: Clock) -> None:
        """Host time of the signature, and of all that the hook adds to a forward, None if there is no hook.

        The latter (binding, padding, signing, counting) with a forward that returns at once, and no graph.
        """
        hook = arm.hooks[traced.module]
        arguments = next(hook.variants(traced.arguments)) if arm.runner.padded else traced.arguments
        self.signature_s = time_call(lambda: hook.graphed.sign(arguments), repeats=CALL_REPEATS, clock=clock)
        if arm.runner.hooked:
            idle = hook.idle(traced.output)
            self.hook_s = time_call(lambda: idle(**traced.arguments), repeats=CALL_REPEATS, clock=clock)


def sample_of(
    measured: Measured, *, phase: Phase, turn: Turn, counts: Counts,
    peak: tuple[int | None, int | None], gpu_state: GpuState | None,
) -> Sample:  # fmt: skip
    """The sample of one measured request."""
    times = {f.name: getattr(measured, f.name) for f in dataclasses.fields(measured) if f.name.endswith("_s")}
    return Sample(
        runner=turn.arm, phase=phase, round=turn.round, order=turn.order, prompt=turn.prompt, **times,
        forwards=counts.forwards, replays=counts.replays, fallbacks=counts.fallbacks,
        peak_allocated_bytes=peak[0], peak_reserved_bytes=peak[1], gpu_state=gpu_state, loop_steps=measured.loop_steps,
    )  # fmt: skip


def assemble(
    arm: Arm, result: ArmResult, session: Session, environment: Environment, *, run_id: str, attempt: int,
    expected_forwards: int, denoise_flops: float | None,
) -> Record:  # fmt: skip
    """The judged record of one arm."""
    case = session.case
    first = next((sample.end_to_end_s for sample in result.samples if sample.phase == "first"), None)
    weights = changed({name: (hook.module, hook.weights) for name, hook in arm.hooks.items()})
    record = Record(
        run_id=run_id,
        case=case,
        runner=arm.runner.name,
        attempt=attempt,
        status="FAILED" if result.failure else "INVALID" if weights else "OK",
        reasons=tuple(reason for reason in (result.failure, weights) if reason),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment,
        backend=arm.backend,
        synthetic=session.synthetic,
        settings=_settings(arm, session),
        token_counts=session.token_counts,
        samples=tuple(result.samples),
        engagement=arm.engagement(captures=result.captures, expected_forwards=expected_forwards),
        memory=_memory(arm, result, session),
        profile=result.profile,
        fidelity=result.fidelity,
        accuracy=result.accuracy,
        compilation=_compilation(arm),
        load_s=session.load_s,
        first_call_s=first,
        prepare_s=result.prepare_s,
        signature_s=result.signature_s,
        hook_s=result.hook_s,
        denoise_flops=denoise_flops,
        artifacts=result.artifacts,
    )
    status, reasons = judge(record)
    return dataclasses.replace(record, status=status, reasons=reasons)


def _compilation(arm: Arm) -> Compilation | None:
    """Summed over the denoisers."""
    found = [hook.variant.compilation for hook in arm.hooks.values() if hook.variant and hook.variant.compilation]
    names = [field.name for field in dataclasses.fields(Compilation)]
    return Compilation(**{name: sum(getattr(each, name) for each in found) for name in names}) if found else None


def _settings(arm: Arm, session: Session) -> dict[str, str]:
    """The resolved configuration; two arms may differ in those of `comparable.SWITCH` only."""
    case, row = session.case, arm.runner
    buckets = session.adapter.default_buckets if case.buckets is None else case.buckets
    policy = f"{session.adapter.facts.policy}: {', '.join(map(str, buckets)) or 'no buckets'}"
    breaks = (row.breaks or case.break_policy) if row.captured else "none"
    found = {"auto broke at": _broke_at(arm)} if {"auto", "best"} & set(breaks.split(",")) else {}
    chosen = [f"{name}: {hook.graphed.chosen}" for name, hook in arm.hooks.items() if hook.graphed.chosen]
    found |= {"break choice": "; ".join(chosen)} if chosen else {}
    found |= {"engine without": ", ".join(row.without)} if row.without else {}
    unvalidated = {"adapter": "generic, not validated"} if session.adapter.facts.generic else {}
    return {
        "runner": row.name,
        "capture": arm.backend if row.captured else "none",
        "break_policy": breaks,
        **found,
        **next((hook.variant.settings for hook in arm.hooks.values() if hook.variant), {}),
        "padding": policy if row.padded else "native length",
        "dtype": str(session.dtype).removeprefix("torch."),
        "pipeline": session.adapter.facts.pipeline,
        "scheduler": type(session.pipe.scheduler).__name__,
        "steps": " + ".join(map(str, filter(None, (case.steps, session.adapter.facts.second_stage_steps)))),
        "token counts from": session.token_source,
        **unvalidated,
        **session.prior.settings,
    }


def _broke_at(arm: Arm) -> str:
    """What the policy `auto` runs eagerly: function, module and source line of each kind of break in all graphs."""
    places = list(dict.fromkeys(name for graph in arm.graphs for name in graph.break_names))
    more = f"; and {len(places) - PLACES_LIMIT} more" if len(places) > PLACES_LIMIT else ""
    return "; ".join(places[:PLACES_LIMIT]) + more if places else "nothing"


def _memory(arm: Arm, result: ArmResult, session: Session) -> Memory:
    """Peaks as if the arm were alone in the process.

    Torch counts a graph pool's blocks as allocated only while a tensor lives in them, so the pool is added to the
    allocated peak; buffers of other arms are taken off.
    """
    images = [s for s in result.samples if s.phase != "measure"]
    allocated = [s.peak_allocated_bytes for s in images if s.peak_allocated_bytes is not None]
    reserved = [s.peak_reserved_bytes for s in images if s.peak_reserved_bytes is not None]
    pool = arm.pool_bytes
    return Memory(
        weights_bytes=session.weights_bytes,
        peak_allocated_bytes=max(allocated) - result.foreign_bytes[0] + pool if allocated else None,
        peak_reserved_bytes=max(reserved) - result.foreign_bytes[1] if reserved else None,
        pool_bytes=pool if session.device.type == "cuda" else None,
        growth_bytes=arm.growth_bytes,
    )
