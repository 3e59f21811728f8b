"""The checks of `validate.py` in a process of their own: a hang or a crash is a finding, and no process stays behind.

Here: what the parent does with its child's events, and the child's side. No torch on the parent's side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcgbench.child import CODES
from bcgbench.codec import from_json, to_json
from bcgbench.errors import BcgbenchError, EnvironmentFault
from bcgbench.process import Process, last_telling_line
from bcgbench.types import Case, Progress, Reason
from bcgbench.validate import CHECKS, Finding, skipped

if TYPE_CHECKING:
    from bcgbench.validate_subject import Subject

TARGET = "bcgbench.validate_process:inside"
BEAT_S = 1.0
"""How often the child says how far it is, if it is further."""
NAMES_THE_STEP = "steps"
"""The check that synchronises after each step: asked in a new process where another check hung or crashed."""


def run_checks(
    case: Case, *, runners: Sequence[str], names: Sequence[str], golden: Path | None = None,
    limit_s: float | None = None, target: str = TARGET,
) -> Iterator[Finding]:  # fmt: skip
    """As `validate.run_checks`, in a process that is killed with all it started when a check hangs or this ends early.

    A check that hangs (`Check.limit_s`, or `limit_s`, without a forward) or crashes has FAILED with the last step,
    module and line known. `steps`, if asked for, is then run in a new process, to name the step; the others are
    NOT-APPLICABLE. Raises what loading raised.
    """
    asked = [(name, runner) for runner in runners for name in names]
    child = _Child(_Asked(case=case, names=names, runners=runners, golden=golden, limit_s=limit_s, target=target))
    told = []
    for finding in child.findings():
        told.append((finding.check, finding.runner))
        yield finding
    if child.lost:
        yield from _after(child, [pair for pair in asked if pair not in told])


def _after(child: _Child, left: list[tuple[str, str]]) -> Iterator[Finding]:
    """The checks that did not run: `steps` of the arm in a new process, the others not at all."""
    why = f"{child.check} did not end; run this check alone (--only)"
    for name, runner in left:
        if (name, runner) != (NAMES_THE_STEP, child.runner):
            yield skipped(name, runner, why)
            continue
        yield from _Child(dataclasses.replace(child.asked, names=[name], runners=[runner])).findings()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a process is to do."""

    case: Case
    names: Sequence[str]
    runners: Sequence[str]
    golden: Path | None
    limit_s: float | None
    target: str

    @property
    def job(self) -> dict[str, Any]:
        """For the process's input."""
        case = dataclasses.replace(self.case, runners=tuple(self.runners))
        golden = {} if self.golden is None else {"golden_path": str(self.golden.absolute())}
        return {"case": to_json(case), "target": self.target, "options": {"names": list(self.names), **golden}}


class _Child:
    """One process with checks, and where it is."""

    def __init__(self, asked: _Asked) -> None:
        self.asked = asked
        self.check = self.runner = ""
        self.lost = False
        """Whether a check hung, or the process died in one."""
        self._forwards = 0
        self._began_s = self._moved_s = time.monotonic()
        self._place = ""
        self._failure: Reason | None = None

    def findings(self) -> Iterator[Finding]:
        """Findings as they come; for a hang or the death of the process one more."""
        with tempfile.TemporaryDirectory() as folder:
            log_path = Path(folder) / "log"
            with Process(self.asked.job, log_path=log_path) as process:
                left = len(self.asked.names) * len(self.asked.runners)
                while (lines := process.read()) is not None:
                    for finding in filter(None, map(self._take, lines)):
                        left -= 1
                        yield finding
                    if not left:  # all is said: a process that has lost its device may not end by itself
                        return
                    if time.monotonic() - self._moved_s > self._limit_s:
                        yield self._hung(process)
                        return
            if self._failure is not None and not self.check:
                raise _error(self._failure)
            if self._failure is not None:
                yield self._lost(self._failure.text)
            else:
                yield self._died(process.account(), last_telling_line(log_path))

    @property
    def _limit_s(self) -> float:
        if not self.check:  # it loads
            return self.asked.case.timeout_s
        return self.asked.limit_s or CHECKS[self.check].limit_s

    def _take(self, line: bytes) -> Finding | None:
        event = json.loads(line)
        kind, data = event["kind"], event["data"]
        if kind == "finding":
            self.check, self._moved_s = "", time.monotonic()
            return from_json(Finding, data)
        if kind == "place":
            self._place = data
        elif kind == "failure":
            self._failure = from_json(Reason, data)
        else:
            self._go_on(from_json(Progress, data))
        return None

    def _go_on(self, at: Progress) -> None:
        self._moved_s = time.monotonic()
        if (self.check, self.runner) != (at.stage, at.arm):
            self.check, self.runner, self._began_s = at.stage, at.arm, self._moved_s
        self._forwards = at.done

    def _hung(self, process: Process) -> Finding:
        """Asks where it hangs, then ends it."""
        if not self.check:
            process.kill()
            raise EnvironmentFault(
                f"The model was not loaded and traced after {self._limit_s:g} s (`timeout_s` of a suite)."
            )
        check, runner = self.check, self.runner
        for lines in process.ask_place():
            for line in lines:
                self._take(line)
            if self._place:
                break
        self.check, self.runner = check, runner  # what ends after its limit is late
        process.kill()
        where = self._place or "it does not answer where (the interpreter's lock is held)"
        return self._lost(f"no forward ended within {self._limit_s:g} s: {where}")

    def _died(self, how: str, last: str) -> Finding:
        if not self.check:
            raise EnvironmentFault(f"While the model was loaded or between two checks, {how}: {last}")
        return self._lost(f"{how}: {last}")

    def _lost(self, reason: str) -> Finding:
        self.lost = True
        return Finding(check=self.check, runner=self.runner, ruling="FAILED", reason=reason, details=(),
                       forwards=self._forwards, duration_s=time.monotonic() - self._began_s)  # fmt: skip


def _error(reason: Reason) -> BcgbenchError:
    """The error that the child died of, of its own class where that is one of ours."""
    kind = next((kind for kind, code in CODES.items() if code == reason.code), BcgbenchError)
    error = kind(reason.text)
    assert isinstance(error, BcgbenchError)
    return error


# --- the child's side -------------------------------------------------------------------------------------------------


def inside(case: Case, *, names: Sequence[str], golden_path: Path | None = None, emit: Callable[[Any], None],
           should_stop: Callable[[], bool]) -> None:  # fmt: skip
    """Run checks and emit their findings, and how far each is while it runs."""
    from bcgbench import validate

    beat = _Beat(case, emit)
    with beat.beating():
        for finding in validate.run_checks(case, runners=case.runners, names=names, golden=golden_path,
                                           began=beat.began):  # fmt: skip
            beat.ended()
            emit(finding)
            if should_stop():
                return


class _Beat:
    """Tells the parent when a check begins, and each second how many forwards it has made, if they are more."""

    def __init__(self, case: Case, emit: Callable[[Any], None]) -> None:
        self._case, self._emit = case, emit
        self._lock = threading.Lock()
        self._check = ""
        self._subject: Subject | None = None
        self._first = self._told = 0

    def began(self, check: str, subject: Subject) -> None:
        """A check begins."""
        with self._lock:
            self._check, self._subject, self._first = check, subject, subject.forwards
            self._tell(0)

    def ended(self) -> None:
        """A check has ended; until the next begins there is nothing to tell."""
        with self._lock:
            self._subject = None

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """While the block runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), name="validate-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_S):
            with self._lock:
                if self._subject is not None and (done := self._subject.forwards - self._first) != self._told:
                    self._tell(done)

    def _tell(self, done: int) -> None:
        assert self._subject is not None
        self._told = done
        runner = self._subject.runner.name
        self._emit(Progress(case=self._case.key, stage=self._check, arm=runner, done=done))
