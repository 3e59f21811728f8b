"""What a breakable CUDA graph will bring, from one eager profile: pure arithmetic on a few figures.

A graph takes away the host: what is left of a step is the time that the GPU is busy, a gap after every kernel, and the
host's work at every break. The constants are those of an H200, fitted to the run of suite `resolution` in `results/`:
the error there is that of a fit. `check` sets predictions beside what a run measured. Nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bcgbench.metrics import METRICS
from bcgbench.types import Case, Record

KERNEL_GAP_S = 0.3e-6
"""Between two kernels inside a graph: 0.14 to 0.45 µs in seven cases."""
BREAK_GAP_S = 0.13e-6
"""Per kernel too: a break at every attention takes 5 to 14 µs, and there are 80 to 100 kernels between two of them."""
PREPARE_FORWARDS = 12
"""Eager forwards that one captured signature takes as long as: 10 to 15."""
BUSY_LIMIT = 0.95
"""Above it a graph is advised against: what it can win is less than padding may cost."""
LEAST_GAIN = 1.02
"""Below it a gain is within what the prediction is wrong by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """What one eager profile tells. Times are per denoise step."""

    step_s: float
    """Unprofiled."""
    busy_s: float
    """Kernel time at the native prompt length."""
    padded_busy_s: float | None
    """The same on the inputs that the graphs get; None where it was not profiled."""
    kernels: float
    forwards: float
    """Transformer calls per step."""
    signatures: int | None = None
    """Graphs to capture; None if not known."""
    memory_bytes: int | None = None
    """Peak of one transformer call above what is held before it: about what a graph keeps for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What to expect of `bcg` against `eager`, as ratios of times eager/bcg."""

    busy: float
    """Share of the eager step in which the GPU works."""
    ceiling: float
    """1 / busy: a step without any host time and gaps."""
    gain: float
    step_s: float
    """Of the graph."""
    memory_bytes: int | None
    prepare_s: float | None
    images: float | None
    """After which preparation is paid back; infinite for never, None if not known."""
    advice: str


def predict(eager: Eager, *, steps: int) -> Prediction:
    """The prediction for images of `steps` steps."""
    busy = eager.busy_s / eager.step_s
    graph_busy_s = eager.busy_s if eager.padded_busy_s is None else eager.padded_busy_s
    step_s = graph_busy_s + eager.kernels * (KERNEL_GAP_S + BREAK_GAP_S)
    gain = eager.step_s / step_s
    prepare_s = images = None
    if eager.signatures is not None:
        prepare_s = eager.signatures * PREPARE_FORWARDS * eager.step_s / eager.forwards
        saved_s = (eager.step_s - step_s) * steps
        images = prepare_s / saved_s if saved_s > 0 else math.inf
    return Prediction(
        busy=busy, ceiling=1 / busy, gain=gain, step_s=step_s, memory_bytes=eager.memory_bytes, prepare_s=prepare_s,
        images=images, advice=_advice(busy, gain),
    )  # fmt: skip


def _advice(busy: float, gain: float) -> str:
    if busy > BUSY_LIMIT:
        return f"against: the GPU is busy {busy:.0%} of the step, so that launches cost next to nothing"
    if gain < 1:
        return "against: padding costs the GPU more than launches cost now"
    if gain < LEAST_GAIN:
        return "not worth it: the gain is within the error of this prediction"
    return "for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A prediction from the eager arm of a stored case, beside what the run measured."""

    case: Case
    prediction: Prediction
    measured: float
    """eager/bcg, medians of denoise steps."""
    padded: bool
    """Whether the run profiled eager on padded inputs too."""

    @property
    def error(self) -> float:
        """Predicted over measured gain, minus 1."""
        return self.prediction.gain / self.measured - 1


def check(records: Iterable[Record]) -> tuple[Checked, ...]:
    """Every case whose arms eager and bcg were measured, and eager profiled, on a GPU."""
    cases: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.status == "OK":
            cases.setdefault(record.case.key, {})[record.runner] = record
    return tuple(found for arms in cases.values() if (found := _checked(arms)) is not None)


def _checked(arms: dict[str, Record]) -> Checked | None:
    native, graph, padded = arms.get("eager"), arms.get("bcg"), arms.get("eager-padded")
    if native is None or graph is None or native.profile is None or native.profile.busy_s is None:
        return None
    times = METRICS["step_s"].read(native), METRICS["step_s"].read(graph)
    if times[0] is None or times[1] is None:
        return None
    padded_busy_s = padded.profile.busy_s if padded and padded.profile else None
    eager = Eager(
        step_s=times[0], busy_s=native.profile.busy_s, padded_busy_s=padded_busy_s, kernels=native.profile.kernels,
        forwards=native.measured[0].forwards / max(1, len(native.measured[0].step_s)),
        signatures=len(graph.engagement.signatures) if graph.engagement else None,
    )  # fmt: skip
    prediction = predict(eager, steps=native.case.steps)
    return Checked(
        case=native.case, prediction=prediction, measured=times[0] / times[1], padded=padded_busy_s is not None
    )
