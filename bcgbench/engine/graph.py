"""A captured forward: one ordered list of segments, breaks, regions and guards, and how it is replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.buffers import StaticInputs, dense
from bcgbench.engine.regions import Region, Slot, Values
from bcgbench.engine.signature import Signature
from bcgbench.engine.steps import Break, Guard, GuardFailed, Step
from bcgbench.errors import EngineError, ReplayError


@dataclass(slots=True)
class SegmentedGraph:
    """A captured forward. Hold it to keep alive everything that its segments read."""

    signature: Signature
    inputs: StaticInputs
    steps: list[Step]
    output: Any
    held: list[Tensor]
    """Tensors that segments read and this graph does not write: parameters, cached RoPE tables, hoisted constants."""
    values: Values | None = None
    """What its regions work on during a replay; None without regions."""
    forwards: int = 3
    """Calls of the forward that the capture took."""
    replays: int = 0
    guarded: bool = field(init=False)
    """Whether the host went on with a value that a replay compares: another value needs another graph."""

    _cloner: trees.Cloner | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.guarded = any(step.guarded for step in self.steps if isinstance(step, (Break, Region, Guard)))

    @property
    def segments(self) -> int:
        """Captured segments."""
        return sum(1 for step in self.steps if not isinstance(step, (Break, Region, Guard)))

    @property
    def breaks(self) -> int:
        """Eager calls between segments; neighbouring calls of a region are one."""
        return len(self.break_names)

    @property
    def break_names(self) -> list[str]:
        """For each break: the function, the module path and the source line of its call."""
        return [step.label for step in self.steps if isinstance(step, (Break, Region))]

    @property
    def nodes(self) -> int | None:
        """Operations in all segments; None if unknown."""
        return self._count("nodes")

    @property
    def kernels(self) -> int | None:
        """Kernels in all segments; None if unknown."""
        return self._count("kernels")

    def _count(self, what: str) -> int | None:
        counts = [getattr(step, what, 0) for step in self.steps]
        return None if None in counts else sum(counts)

    def replay(self, leaves: list[Any]) -> Any:
        """Run on new argument leaves and return a copy of the output, its types kept; counts as a replay.

        Raises `GuardFailed` if a host value changed, `StaticInputError` on another shape, `ReplayError` on any other
        failure.
        """
        self._run(leaves)
        self.replays += 1
        if self.values is not None:
            return trees.clone(self.result())
        if self._cloner is None:
            self._cloner = trees.Cloner(self.output)
        return self._cloner()

    def fits(self, leaves: list[Any]) -> bool:
        """Whether all guards hold on new argument leaves: they are tried, which advances the generator."""
        if not self.guarded:
            return True
        try:
            self._run(leaves)
        except GuardFailed:
            return False
        if self.values:
            self.values.clear()
        return True

    def _run(self, leaves: list[Any]) -> None:
        try:
            self.inputs.update(leaves)
            for step in self.steps:
                step.replay()
        except (GuardFailed, EngineError, torch.OutOfMemoryError):
            if self.values:
                self.values.clear()
            raise
        except Exception as error:  # a break is anybody's code
            raise ReplayError(
                f"A captured graph raised at replay: {type(error).__name__}: {error}. Signature: {self.signature}."
            ) from error

    def poison(self) -> None:
        """Write NaN into every break output and the output, all of which a replay writes before it reads them."""
        for step in self.steps:
            calls = step.calls if isinstance(step, Region) else [step] if isinstance(step, Break) else []
            for _, bridge in (each for call in calls for each in call.bridges):
                bridge.poison()
        kept = {tensor.untyped_storage()._cdata for tensor in (*self.held, *self.inputs.buffers)}
        for tensor in trees.tensors(self.output):
            if tensor.dtype.is_floating_point and tensor.untyped_storage()._cdata not in kept:
                dense(tensor).fill_(float("nan"))

    def result(self) -> Any:
        """The output of the replay that just ran, the values of its regions in their places; the next overwrites it."""
        values = self.values
        if values is None:
            return self.output
        output = trees.map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Slot) else leaf, self.output)
        values.clear()
        return output
