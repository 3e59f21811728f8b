"""Errors of an arm whose arithmetic is not eager's, against a reference of the same transformer calls in a wider dtype.

Compiled code fuses and reorders, so that its outputs differ from eager's by rounding; eager's own error says how much
that may be. Both are measured against the same module with its weights cast to float32 (a float32 model: to float64),
on the same inputs. Here: the reference and the errors. Not here: the limit (`thresholds.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bcgbench.answers import CallTally, Finals
from bcgbench.arms import Arm
from bcgbench.binding import Traced
from bcgbench.engine import trees
from bcgbench.errors import first_line
from bcgbench.models.base import Session
from bcgbench.models.padding import OutsidePolicy
from bcgbench.outputs import LEAST_ERROR
from bcgbench.runners import RUNNERS, Runner
from bcgbench.types import Accuracy
from bcgbench.variant import Switches

CALLS = 12
"""Calls with a reference, spread evenly from the first to the last: a float32 forward takes ten times a bf16 one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Outputs in the wider dtype, on the host, by index of the traced call."""

    dtype: torch.dtype
    outputs: Mapping[int, Any] = field(default_factory=dict)
    note: str = ""
    """Why there are none."""

    @property
    def dtype_name(self) -> str:
        """Such as "float32"."""
        return str(self.dtype).removeprefix("torch.")


def references_for(
    runners: Iterable[Runner], session: Session, calls: Sequence[Traced], *, report: Callable[[int, int], None]
) -> dict[bool, References]:
    """By whether calls are padded, what the runners in another arithmetic than eager's need; {} if there are none."""
    needed = {runner.padded for runner in runners if not runner.same_arithmetic}
    arms = {padded: Arm(RUNNERS["eager-padded" if padded else "eager"], session) for padded in sorted(needed)}
    return {padded: references(arm, calls, dtype=session.dtype, report=report) for padded, arm in arms.items()}


def references(
    arm: Arm, calls: Sequence[Traced], *, dtype: torch.dtype, report: Callable[[int, int], None]
) -> References:
    """Outputs of up to `CALLS` traced calls by an eager arm, padded or not, its weights cast meanwhile.

    Takes the memory of the cast weights beside the own ones; where that is not there, the note says so.
    """
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    modules = [hook.module for hook in arm.hooks.values()]
    outputs: dict[int, Any] = {}
    try:
        with _cast(modules, wide).on():
            chosen = _spread(len(calls), CALLS)
            for done, index in enumerate(chosen):
                report(done, len(chosen))
                with contextlib.suppress(OutsidePolicy):
                    outputs[index] = _on_host(_forward(arm, calls[index], dtype=wide))
    except (RuntimeError, TypeError) as error:  # out of memory; code that fixes a dtype
        return References(dtype=wide, note=f"{type(error).__name__}: {first_line(error)}")
    return References(dtype=wide, outputs=outputs)


def _forward(arm: Arm, traced: Traced, *, dtype: torch.dtype) -> Any:
    hook = arm.hooks[traced.module]
    return hook.forward(trees.map_leaves(lambda leaf: _widened(leaf, dtype), hook.pad(traced.arguments)))


def _widened(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _on_host(tree: Any) -> list[Tensor]:
    return [tensor.cpu() for tensor in trees.tensors(tree)]


def _spread(count: int, limit: int) -> list[int]:
    """Up to `limit` indices of `count`, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def _cast(modules: Sequence[nn.Module], dtype: torch.dtype) -> Switches:
    """Floating-point weights and buffers in another dtype; the modules' own ones are not touched."""
    made: dict[int, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().to(dtype)
        other = made[id(tensor)]
        return nn.Parameter(other, requires_grad=False) if isinstance(tensor, nn.Parameter) else other

    tables = [table for module in modules for part in module.modules() for table in (part._parameters, part._buffers)]
    return Switches([
        (table, name, cast(tensor))
        for table in tables
        for name, tensor in table.items()
        if tensor is not None and tensor.is_floating_point()
    ])  # fmt: skip


@dataclass(slots=True)
class ErrorTally(CallTally):
    """A comparison with eager that measures both against a reference, where there is one of the call."""

    references: References = field(default_factory=lambda: References(dtype=torch.float32))
    measured: int = 0
    worst_index: int | None = None
    errors: tuple[float, float] = (0.0, 0.0)
    """Of this arm and of eager in the worst call."""

    def add(self, reference: Any, output: Any) -> None:
        """Compare the outputs of the next call; `reference` is eager's."""
        index = self.calls
        CallTally.add(self, reference, output)
        wide = self.references.outputs.get(index)
        if wide is None:
            return
        self.measured += 1
        found = relative_error(output, wide), relative_error(reference, wide)
        floor = LEAST_ERROR.get(str(trees.tensors(output)[0].dtype).removeprefix("torch."), 0.0)
        if self.worst_index is None or _excess(found, floor) > _excess(self.errors, floor):
            self.worst_index, self.errors = index, found

    def accuracy(self, finals: Finals) -> Accuracy:
        """What a record holds of it."""
        known = self.worst_index is not None
        return Accuracy(
            dtype=self.references.dtype_name, calls=self.measured, worst_call=self.worst_index,
            error=self.errors[0] if known else None, eager_error=self.errors[1] if known else None,
            unrepeated=_unrepeated(finals), note=self.references.note,
        )  # fmt: skip


def _excess(errors: tuple[float, float], floor: float) -> float:
    return errors[0] / max(errors[1], floor)


def relative_error(output: Any, wide: Sequence[Tensor]) -> float:
    """Root mean square of output - reference over that of the reference, over all tensors; in float64.

    The largest float64 where a value is not finite: JSON has no infinity, and no limit lets it pass.
    """
    error = size = 0.0
    for got, wanted in zip(trees.tensors(output), wide, strict=True):
        exact = wanted.to(torch.float64)
        error += float((got.detach().cpu().to(torch.float64) - exact).square().sum())
        size += float(exact.square().sum())
    if not math.isfinite(error) or size == 0:
        return 0.0 if error == 0 else torch.finfo(torch.float64).max
    return math.sqrt(error / size)


def _unrepeated(finals: Finals) -> int:
    """Requests that did not give what the same request of the arm gave before."""
    return sum(not final.equals(finals.by_prompt[0]) for final in finals.again) + len(finals.changed)
