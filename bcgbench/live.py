"""An arm while its case runs: what it gathered, and whether it may go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bcgbench import answers
from bcgbench.accuracy import ErrorTally, References
from bcgbench.answers import CallTally, Finals
from bcgbench.arms import Arm, Traced
from bcgbench.records import ArmResult
from bcgbench.types import Fidelity, Question


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
