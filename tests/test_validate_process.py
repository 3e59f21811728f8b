"""Checks in a process of their own: a hang or a crash is a finding with the place, and no process stays behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from bcgbench import validate_process
from bcgbench.errors import UsageError
from bcgbench.types import Case
from bcgbench.validate import Finding

CASE = Case(model="tiny/qwen-image", width_px=32, height_px=32, steps=2, prompts=("A small red cube",), dtype="float32",
            device="cpu", rounds=1, profile=False, runners=("bcg",))  # fmt: skip


def findings(target: str, *names: str, limit_s: float = 0.4, **how: Any) -> list[Finding]:
    """Of checks run by a stand-in."""
    return list(validate_process.run_checks(CASE, runners=["bcg"], names=names, limit_s=limit_s,
                                            target=f"tests.fake_validate:{target}", **how))  # fmt: skip


def test_a_hang_is_a_finding_and_leaves_no_process(tmp_path: Path):
    """Killed with what it had started; the check that names the step runs anew, the others do not."""
    pids = tmp_path / "pids"
    found = findings("hangs", "repeatability", "engagement", "order", "steps", golden=pids)
    assert [(each.check, each.ruling) for each in found] == [
        ("repeatability", "OK"), ("engagement", "FAILED"), ("order", "NOT-APPLICABLE"), ("steps", "OK")
    ]  # fmt: skip
    assert found[1].reason.startswith("no forward ended within 0.4 s: at fake_validate.py:")
    assert (found[1].forwards, found[2].reason) == (3, "engagement did not end; run this check alone (--only)")
    for pid in pids.read_text().split():
        assert not _runs(int(pid))


def _runs(pid: int) -> bool:
    """Whether a process exists, a dead one that its new parent has yet to collect left out."""
    for _ in range(20):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def test_a_crash_is_a_finding():
    """With the signal that ended the process."""
    (found,) = findings("crashes", "engagement")
    assert (found.check, found.ruling) == ("engagement", "FAILED")
    assert found.reason.startswith("the worker process was ended by SIGSEGV")


def test_a_check_with_a_bug_is_a_finding():
    """What it raised, and the next check is not run in a process of unknown state."""
    found = findings("raises", "engagement", "order")
    assert [each.ruling for each in found] == ["FAILED", "NOT-APPLICABLE"]
    assert found[0].reason == "KeyError: 'lost'"


def test_what_loading_raises_is_raised_here():
    """Of its own class, so that the exit code is its own."""
    with pytest.raises(UsageError, match="no such size"):
        findings("refuses", "engagement")


def test_a_check_may_take_long_while_it_makes_forwards():
    """The limit is on a forward, not on a check."""
    (found,) = findings("slow", "engagement")
    assert found.ruling == "OK"


def test_a_stopped_parent_leaves_no_process(tmp_path: Path):
    """As Ctrl-C or a closed terminal would stop it."""
    pids = tmp_path / "pids"
    running = validate_process.run_checks(CASE, runners=["bcg"], names=["repeatability", "engagement"], golden=pids,
                                          target="tests.fake_validate:hangs")  # fmt: skip
    next(running)
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        time.sleep(0.01)
    running.close()
    assert not any(_runs(int(pid)) for pid in pids.read_text().split())


def test_a_hanging_break_is_named_by_whatever_check_meets_it():
    """Real checks on the tape: the watchdog reads the step off the hanging thread; `steps` finds it by itself."""
    hung, steps = findings("break_hangs", "order", "steps", limit_s=4.0)
    assert hung.ruling == steps.ruling == "FAILED"
    assert "step 4 of 5, the break" in hung.reason
    assert "transformer_blocks.1.attn" in hung.reason
    assert "fake_validate.py" in hung.reason
    assert "no end after 0.5 s of step 4 of 5, the break" in steps.reason
