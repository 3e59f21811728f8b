"""Faults that `selftest` puts into the tool itself, and the finding in which each must end: one literal row each.

Here: what a row is. Its rows stand in `of_graphs.py`, `of_runs.py` and `of_ranks.py`; how faults are put in, in
`engine.py`, `engagement.py`, `inputs.py`, `measured.py` and `ranks.py`, through `places.py`; running them is
`selftest.py`'s. Adding a fault is one function and one row. The tables import no torch, so that they can be listed
anywhere.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from bcgbench.errors import UsageError
from bcgbench.faults import of_graphs, of_ranks, of_runs
from bcgbench.faults.fault import Fault

FAULTS: dict[str, Fault] = {**of_graphs.FAULTS, **of_runs.FAULTS, **of_ranks.FAULTS}


def selected(only: Sequence[str]) -> dict[str, Fault]:
    """Faults whose `part/name` contains one of the texts; all without any."""
    return {name: f for name, f in FAULTS.items() if not only or any(text in f"{f.part}/{name}" for text in only)}


def injected(name: str) -> AbstractContextManager[Any]:
    """The fault of this name, in the tool while the context is open. Raises `UsageError` naming the known ones."""
    if name not in FAULTS:
        raise UsageError(f"Unknown fault {name!r}. Known: {', '.join(FAULTS)}.")
    return cast(AbstractContextManager[Any], pkgutil.resolve_name(f"{__name__}.{FAULTS[name].inject}")())


def skipped(fault: Fault, *, device: str, chosen: bool) -> str:
    """Why a fault is not shown on this device, "" where it is. `chosen`: by its part or name."""
    if fault.shown == "ranks" and not chosen:  # torchrun and two imports of everything, six times: a minute and a half
        return "needs processes of its own: --only ranks/"
    if fault.backend == "cuda" and device == "cpu":
        return "needs CUDA graphs: --device cuda"
    return "a fault of the tape itself: --device cpu" if fault.backend == "cpu" and device != "cpu" else ""
