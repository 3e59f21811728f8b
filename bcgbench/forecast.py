"""One short eager profile of a case on a GPU, for `predict.py`: nothing is captured and nothing stored."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bcgbench import measure
from bcgbench.arms import Arm, Hook
from bcgbench.binding import Arguments
from bcgbench.engine import trees
from bcgbench.errors import BcgbenchError, EnvironmentFault
from bcgbench.live import Live
from bcgbench.models import base
from bcgbench.predict import Eager
from bcgbench.runners import RUNNERS
from bcgbench.stats import median
from bcgbench.tracer import Tracer
from bcgbench.types import Case, Profile

STEPS = 4
"""Of the measured request; the first is left out."""
PROFILE_STEPS = 2


def observe(case: Case, *, on_stage: Callable[[str], object] = lambda _: None) -> Eager:
    """Load the model and measure eager, on padded inputs too where the model pads.

    EnvironmentFault without a GPU, whose busy time all rests on; BcgbenchError where the profiler lost kernels.
    """
    if not case.device.startswith("cuda"):
        raise EnvironmentFault(
            "A prediction rests on how long the GPU is busy in an eager step, and this case runs on a CPU. Run it on a "
            "machine with a GPU (--device cuda), or check the rule against a stored run: bcgbench predict --check RUN."
        )
    on_stage(f"load {case.model}")
    session = base.load(case)
    with torch.no_grad():
        return _observe(session, on_stage=on_stage)


def _observe(session: base.Session, *, on_stage: Callable[[str], object]) -> Eager:
    clock, steps = measure.clock_for(session.device), min(STEPS, session.case.steps)
    eager, padded = (Live(Arm(RUNNERS[name], session)) for name in ("eager", "eager-padded"))
    tracer = Tracer(eager.arm)
    on_stage("trace one request, measure another")
    with tracer.recording():
        measure.request(session, 0, clock=clock, steps=steps)
    with eager.arm.attached():
        measured = measure.request(session, 0, clock=clock, steps=steps)
    first = tracer.calls[0]
    pads = padded.arm.hooks[first.module].pad(first.arguments) is not first.arguments
    on_stage("profile eager")
    profile = _profile(eager, session)
    on_stage("profile eager on padded inputs" if pads else "nothing is padded")
    shapes = Arm(RUNNERS["bcg"], session).shapes(tracer.calls)
    return Eager(
        step_s=median(measured.step_s[1:] or measured.step_s),
        busy_s=_busy_s(profile),
        padded_busy_s=_busy_s(_profile(padded, session)) if pads else None,
        kernels=profile.kernels,
        forwards=len(tracer.calls) / len(measured.step_s),
        signatures=len(shapes),
        memory_bytes=_call_bytes(*max(shapes, key=lambda shape: _elements(shape[1])), device=session.device),
    )


def _profile(live: Live, session: base.Session) -> Profile:
    clock = measure.clock_for(session.device)

    def run() -> tuple[int, ...]:
        with live.arm.attached():
            return measure.request(session, 0, clock=clock, steps=PROFILE_STEPS).loop_steps

    live.profile(run)
    assert live.result.profile is not None
    return live.result.profile


def _busy_s(profile: Profile) -> float:
    if profile.busy_s is None:
        raise BcgbenchError(f"the profile of eager is no base for a prediction: {profile.note}; run it once more")
    return profile.busy_s


def _elements(arguments: Arguments) -> int:
    return sum(tensor.numel() for tensor in trees.tensors(arguments))


def _call_bytes(hook: Hook, arguments: Arguments, *, device: torch.device) -> int | None:
    """Peak of one call above what is held before it: all graphs share a pool as large as the largest needs."""
    held, _ = measure.memory(device)
    measure.peak_reset(device)
    hook.forward(arguments)
    peak, _ = measure.peak(device)
    return None if peak is None else max(0, peak - held)
