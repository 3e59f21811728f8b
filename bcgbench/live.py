"""An arm while its case runs: what it gathered, and whether it may go on."""

from __future__ import annotations

from dataclasses import dataclass, field

from bcgbench.answers import CallTally, Finals
from bcgbench.arms import Arm, Traced
from bcgbench.records import ArmResult


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
