"""What checks work on: a loaded pipeline with its eager trace, counted forwards, and arms made for one check."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcgbench import answers, fidelity, measure
from bcgbench.answers import Final
from bcgbench.arms import Arm, Hook
from bcgbench.binding import Traced
from bcgbench.clock import Clock
from bcgbench.engine import trees
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graph import SegmentedGraph
from bcgbench.engine.signature import Signature
from bcgbench.errors import UsageError
from bcgbench.models import base
from bcgbench.models.padding import OutsidePolicy
from bcgbench.runners import RUNNERS, runner
from bcgbench.tracer import Tracer
from bcgbench.types import Case
from bcgbench.variant import replaced

RERUNS = 5
"""Eager calls on the same inputs: enough to see a value come back, which tells two modes from noise."""
MARGIN_DB = 1.0
"""How much worse than eager's own rerun a graph may be, where eager is not repeatable; as in `verdict.py`."""


@dataclass(slots=True)
class Trace:
    """One eager request per prompt, every denoiser call kept, and the count of forwards."""

    session: base.Session
    clock: Clock
    calls: dict[int, list[Traced]] = field(default_factory=dict)
    golden: Path | None = None
    forwards: int = 0
    after_forward: Callable[[], None] | None = None
    """Called inside every forward, after the module ran: where faults are injected."""


@contextlib.contextmanager
def opened(case: Case, *, golden: Path | None = None) -> Iterator[Trace]:
    """Load a case and run each prompt eagerly once. Until the block ends each forward of a denoiser is counted."""
    session = base.load(case)
    trace = Trace(session, measure.clock_for(session.device), golden=golden)
    with contextlib.ExitStack() as stack:
        for module in session.denoisers.values():
            stack.enter_context(replaced(module, _counting(module.forward, trace)))
        for prompt in range(len(case.prompts)):
            tracer = Tracer(Arm(RUNNERS["eager"], session))
            with tracer.recording():
                measure.request(session, prompt, clock=trace.clock)
            trace.calls[prompt] = tracer.calls
        yield trace


def _counting(original: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """`original` counted; hooks made while it stands in for a module's forward call it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        trace.forwards += 1
        output = original(*args, **kwargs)
        if trace.after_forward is not None:
            trace.after_forward()
        return output

    return forward


@dataclass(frozen=True, slots=True)
class Shape:
    """One signature that a warm-up captures: padded arguments of one denoiser."""

    module: str
    arguments: dict[str, Any]
    signature: Signature


class Subject:
    """A runner on a trace. Arms are made per check: no check sees what another left behind."""

    def __init__(self, trace: Trace, runner_name: str) -> None:
        self.trace = trace
        self.session = trace.session
        self.device = trace.session.device
        self.runner = runner(runner_name)
        self.padded = Arm(RUNNERS["eager-padded"], trace.session)
        self.alive = True
        self.replays = 0
        """Replays of graphs called directly."""
        self._arms: list[Arm] = []
        self._old_replays = 0

    @property
    def forwards(self) -> int:
        """Calls of the denoisers so far, replays included."""
        made = sum(arm.counts.replays for arm in self._arms)
        return self.trace.forwards + self.replays + self._old_replays + made

    @property
    def calls(self) -> list[Traced]:
        """All traced calls."""
        return [traced for calls in self.trace.calls.values() for traced in calls]

    @functools.cached_property
    def samples(self) -> list[Traced]:
        """First and last traced call of every padded signature; those outside the length policy left out."""
        found: dict[tuple[str, Signature], list[Traced]] = {}
        for traced in self.calls:
            with contextlib.suppress(OutsidePolicy):
                found.setdefault((traced.module, self.signature(traced)), []).append(traced)
        return [calls[index] for calls in found.values() for index in dict.fromkeys((0, len(calls) - 1))]

    @functools.cached_property
    def shapes(self) -> list[Shape]:
        """Every signature that the arm captures, lengths that no prompt has included; the largest first.

        Raises `UsageError` where there is none.
        """
        found: dict[tuple[str, Signature], Shape] = {}
        for traced in self.samples:
            hook = self.padded.hooks[traced.module]
            for arguments in hook.variants(traced.arguments):
                signature = hook.graphed.sign(arguments).signature
                found.setdefault((traced.module, signature), Shape(traced.module, arguments, signature))
        if not found:
            raise UsageError(
                "No traced call is within the length policy, so nothing is captured. Give larger --buckets."
            )
        return sorted(found.values(), key=_elements, reverse=True)

    def signature(self, traced: Traced) -> Signature:
        """Of the padded call. Raises `OutsidePolicy`."""
        hook = self.padded.hooks[traced.module]
        return hook.graphed.sign(hook.pad(traced.arguments)).signature

    def arm(self, *, captured: bool = True) -> Arm:
        """A new arm; captured and frozen unless told otherwise. Earlier ones that nobody holds are freed."""
        self._old_replays += sum(arm.counts.replays for arm in self._arms)
        self._arms.clear()
        self.collect()
        made = Arm(self.runner, self.session)
        self._arms.append(made)
        if captured:
            made.prepare(self.calls)
        return made

    def eager(self, shape: Shape, arguments: dict[str, Any] | None = None) -> Any:
        """Eager output on padded arguments."""
        given = shape.arguments if arguments is None else arguments
        return trees.clone(self.padded.hooks[shape.module].graphed(given))

    def graph(self, arm: Arm, shape: Shape) -> SegmentedGraph:
        """The arm's graph of a shape. RuntimeError where it holds none."""
        graphed = arm.hooks[shape.module].graphed
        graph = graphed.serving(graphed.sign(shape.arguments))
        if graph is None:
            raise RuntimeError(f"the arm holds no graph of {shape.signature}")
        return graph

    def hook(self, arm: Arm, shape: Shape) -> Hook:
        """The arm's hook on the denoiser of a shape."""
        return arm.hooks[shape.module]

    def replayed(self, arm: Arm, shape: Shape) -> Any:
        """The arm's output on a shape, what the graph writes filled with NaN first: the last output must not pass."""
        self.graph(arm, shape).poison()
        return self.hook(arm, shape).graphed(shape.arguments)

    @functools.cached_property
    def floor(self) -> float:
        """Largest difference between reruns of one eager call; 0.0 where eager is repeatable."""
        shape = self.shapes[0]
        first, again = self.eager(shape), [self.eager(shape) for _ in range(2)]
        return max(largest_difference(first, other) for other in again)

    def unlike(self, expected: Any, got: Any) -> str:
        """How `got` differs from what eager gives, in one phrase; "" where it does not, within eager's own floor."""
        wanted, spec = trees.flatten(expected)
        found, other = trees.flatten(got)
        if spec != other:
            return f"returned {trees.describe(got)} where eager returns {trees.describe(expected)}"
        if all(bit_equal(a, b) for a, b in zip(wanted, found, strict=True) if isinstance(a, Tensor)):
            return ""
        size = largest_difference(expected, got)
        if size <= self.floor * 10 ** (MARGIN_DB / 20):
            return ""
        noted = f", eager's own reruns by {self.floor:.3g}" if self.floor else ""
        return f"differs from eager by up to {size:.3g}{noted}"

    def finals(self, arm: Arm) -> answers.Finals:
        """What requests of all prompts through an arm end with."""
        finals = answers.Finals()
        for prompt in range(len(self.session.case.prompts)):
            with arm.attached():
                finals.by_prompt[prompt] = Final.of(measure.request(self.session, prompt, clock=self.trace.clock))
        return finals

    def collect(self) -> None:
        """Free what nobody holds any more, where memory is scarce; a collection of a whole process takes 0.3 s."""
        if self.device.type == "cuda":
            gc.collect()

    def synchronize(self) -> None:
        """Wait for the device; an error of an earlier launch is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def largest_difference(a: Any, b: Any) -> float:
    """Largest absolute difference of the tensors of two outputs; one shape against another is infinite."""
    pairs = list(zip(trees.tensors(a), trees.tensors(b), strict=True))
    if any(x.shape != y.shape or x.dtype != y.dtype for x, y in pairs):
        return float("inf")
    return max((fidelity.compare(x, y, name="output").max_abs for x, y in pairs), default=0.0)


def _elements(shape: Shape) -> int:
    return sum(tensor.numel() for tensor in trees.tensors(shape.arguments))
