"""Faults that only CUDA graphs show, and one that the tape shows too, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bcgbench import selftest
from bcgbench.faults import FAULTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*(n for n, fault in FAULTS.items() if fault.backend == "cuda"), "stale-input"])
def test_a_fault_ends_in_its_own_finding(name: str, tmp_path: Path):
    """Reason, words and exit code, through a whole tiny case on CUDA graphs."""
    outcome = selftest.run_fault(name, FAULTS[name], device="cuda", folder=tmp_path)
    assert outcome.passed, f"expected {outcome.expected}, found {outcome.found}: {outcome.told}"


def test_without_a_fault_nothing_alarms(tmp_path: Path):
    """Else every fault would be caught, by accident."""
    case = selftest.case_of("tiny/z-image-turbo", device="cuda")
    assert selftest.run_control(case, folder=tmp_path, as_gpu=True).passed
