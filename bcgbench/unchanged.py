"""Whether the weights that graphs were captured with are still the model's: a graph goes on with those it captured.

Here: seeing a change. Not here: what it is worth (`verdict.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from bcgbench.engine.buffers import version
from bcgbench.types import Reason

Mark = dict[str, tuple[int, int | None]]


def mark(module: nn.Module) -> Mark:
    """Address and in-place counter of every parameter: another one, or one written to, has another mark."""
    return {name: (weight.data_ptr(), version(weight)) for name, weight in module.named_parameters()}


def changed(modules: Mapping[str, tuple[nn.Module, Mark]]) -> Reason | None:
    """A reason "weights-changed" naming the first weights that are no longer what their mark says; else None."""
    names: list[str] = []
    for path, (module, before) in modules.items():
        now = mark(module)
        names += [f"{path}.{name}" for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = f"{names[0]}{more} changed while the case ran: the arms did not compute one model, and a graph goes on with "
    return Reason(code="weights-changed", text=text + "the weights that it captured; load LoRAs and casts before")
