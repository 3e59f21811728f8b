"""Floating-point operations of a denoise, counted by torch while its transformer calls run once more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from bcgbench.arms import Arm
from bcgbench.binding import Traced


def count_flops(arm: Arm, calls: Iterable[Traced]) -> float:
    """FLOPs of the calls, each signature counted once: matrix products, convolutions and attention, 2 per multiply-add.

    Other operations count nothing, so a floor made of this is low rather than high.
    """
    counted: dict[Any, float] = {}
    total = 0.0
    for traced in calls:
        key = traced.module, arm.hooks[traced.module].graphed.sign(traced.arguments).signature
        if key not in counted:
            with FlopCounterMode(display=False) as counter:
                arm.call(traced)
            counted[key] = float(counter.get_total_flops())
        total += counted[key]
    return total
