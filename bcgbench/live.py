"""An arm while its case runs: what it gathered, and whether it may go on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from bcgbench import answers
from bcgbench.accuracy import ErrorTally, References
from bcgbench.answers import CallTally, Finals
from bcgbench.arms import Arm
from bcgbench.binding import Traced
from bcgbench.compiled import CUDAGRAPH_MODES
from bcgbench.errors import ProcessPoisoned
from bcgbench.profile import profile_request
from bcgbench.records import ArmResult
from bcgbench.types import Fidelity, Question, Reason


class Stopped(Exception):
    """The user asked to stop; what was measured is kept."""


def _unfinished(error: Stopped | ProcessPoisoned) -> Reason:
    """Why an arm that did not fail itself has no complete record."""
    if isinstance(error, Stopped):
        return Reason(code="interrupted", text="stopped by the user; resume the run to measure the rest")
    return Reason(code="process-poisoned", text=f"another arm lost the device; resume the run. {error}")


@contextlib.contextmanager
def ending_early(arms: Mapping[str, Live]) -> Iterator[None]:
    """A stop, or a device lost, ends the block and is the failure of every arm that has none of its own."""
    try:
        yield
    except (Stopped, ProcessPoisoned) as error:
        for live in arms.values():
            live.result.failure = live.result.failure or _unfinished(error)


@dataclass(slots=True)
class Live:
    """An arm while its case runs."""

    arm: Arm
    result: ArmResult = field(default_factory=ArmResult)
    finals: Finals = field(default_factory=Finals)
    expected: int = 0
    """Transformer calls that this arm was asked for, known from the trace and not from the arm's own hook."""

    @property
    def name(self) -> str:
        """The runner's name."""
        return self.arm.runner.name

    @property
    def usable(self) -> bool:
        """Whether nothing failed so far."""
        return self.result.failure is None

    def compare(self, *, tally: CallTally, traced: Traced, expected: object) -> None:
        """Add this arm's output on a traced call's inputs to a tally."""
        self.expected += 1
        tally.add(expected, self.arm.call(traced))

    def tally(self, references: Mapping[bool, References]) -> CallTally:
        """An empty comparison of this arm's calls with eager's; `references` by whether calls are padded."""
        runner = self.arm.runner
        return CallTally() if runner.same_arithmetic else ErrorTally(references=references[runner.padded])

    def answer(self, tally: CallTally, expected: Finals, others: tuple[Fidelity, ...] = ()) -> None:
        """The finished comparison with eager on the same inputs, before answers to other questions."""
        question: Question = "graph" if self.arm.runner.same_arithmetic else "arithmetic"
        reference = "eager-padded" if self.arm.runner.padded else "eager"
        own = answers.answer(question, reference=reference, tally=tally, expected=expected, got=self.finals)
        self.result.fidelity = (own, *others)
        if isinstance(tally, ErrorTally):
            self.result.accuracy = tally.accuracy(self.finals)

    def profile(self, run: Callable[[], tuple[int, ...]]) -> None:
        """Profile a short request, after one that is not; `run` makes it and returns the steps of its loops."""
        before = [graph.replays for graph in self.arm.graphs]
        loop_steps = run()
        steps = sum(loop_steps)
        replayed = [(graph, graph.replays - old) for graph, old in zip(self.arm.graphs, before, strict=True)]
        # what torch's own CUDA graphs hold is not known
        known = self.arm.runner.mode not in CUDAGRAPH_MODES and all(graph.kernels is not None for graph, _ in replayed)
        kernels = sum((graph.kernels or 0) * count for graph, count in replayed) // steps if known else None
        found = profile_request(run, steps=steps, graph_kernels_per_step=kernels)
        self.result.profile = dataclasses.replace(found, loop_steps=loop_steps)
