"""Faults that `selftest` puts into the tool itself, and the finding in which each must end: one literal row each.

Here: what a row is. Its rows stand in `of_graphs.py`, `of_runs.py` and `of_ranks.py`; how faults are put in, in
`engine.py`, `inputs.py`, `measured.py` and `ranks.py`, through `places.py`; running them is `selftest.py`'s. Adding a
fault is one function and one row. The tables import no torch, so that they can be listed anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from bcgbench.faults import of_graphs, of_ranks, of_runs
from bcgbench.faults.fault import Fault

FAULTS: dict[str, Fault] = {**of_graphs.FAULTS, **of_runs.FAULTS, **of_ranks.FAULTS}


def selected(only: Sequence[str]) -> dict[str, Fault]:
    """Faults whose `part/name` contains one of the texts; all without any."""
    return {name: f for name, f in FAULTS.items() if not only or any(text in f"{f.part}/{name}" for text in only)}


def skipped(fault: Fault, *, device: str) -> str:
    """Why a fault is not shown on this device, "" where it is."""
    return "needs CUDA graphs: --device cuda" if fault.backend == "cuda" and device == "cpu" else ""
