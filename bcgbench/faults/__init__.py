"""Faults that `selftest` puts into the tool itself, and the finding in which each must end: one literal row each.

Here: what a row is. Its rows stand in `of_graphs.py` and `of_runs.py`; how faults are put in, in `engine.py`,
`inputs.py` and `measured.py`, through `places.py`; running them is `selftest.py`'s. Adding a fault is one function and
one row. The tables import no torch, so that they can be listed anywhere.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Sequence

from bcgbench.errors import UsageError
from bcgbench.faults import of_graphs, of_runs
from bcgbench.faults.fault import Fault

FAULTS: dict[str, Fault] = {**of_graphs.FAULTS, **of_runs.FAULTS}


def selected(only: Sequence[str]) -> dict[str, Fault]:
    """Faults whose `part/name` contains one of the texts; all without any."""
    return {name: f for name, f in FAULTS.items() if not only or any(text in f"{f.part}/{name}" for text in only)}


def put_in(fault: Fault) -> contextlib.AbstractContextManager[object]:
    """Whatever runs inside has the fault."""
    inject: contextlib.AbstractContextManager[object] = pkgutil.resolve_name(f"bcgbench.faults.{fault.inject}")()
    return inject


def named(name: str) -> Fault:
    """The fault of this name. Raises `UsageError` naming the known ones."""
    if name not in FAULTS:
        raise UsageError(f"Unknown fault {name!r}. Known: {', '.join(FAULTS)}.")
    return FAULTS[name]


def skipped(fault: Fault, *, device: str) -> str:
    """Why a fault is not shown on this device, "" where it is."""
    return "needs CUDA graphs: --device cuda" if fault.backend == "cuda" and device == "cpu" else ""
