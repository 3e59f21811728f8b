"""One case in a process of its own: whatever happens to it becomes a record, and the next case starts clean.

Here: watching and stopping the process, and the only writes to the journal while a case runs. A CUDA error, a
segmentation fault or a hang in one case thereby costs that case alone. Not here: the process itself (`process.py`),
what happens inside (`child.py`, `bench.py`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bcgbench.codec import from_json, to_json
from bcgbench.errors import StoreError
from bcgbench.process import Process, last_telling_line
from bcgbench.store import Run, utc_now
from bcgbench.types import Case, Progress, Reason, Record, Sample

TARGET, RANKS_TARGET = "bcgbench.bench:run_case", "bcgbench.bench_ranks:run_case"
LOST = "rank-lost"
"""The reason of a process that another one kept waiting: that other one, or its end, says more."""


def run_case(
    case: Case,
    run: Run,
    *,
    attempt: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    kill: threading.Event | None = None,
    target: str | None = None,
) -> None:
    """Run an attempt of a case, the next by default; afterwards every runner of the case has a record of it.

    Runners that the process left without one get a FAILED record with the samples that arrived. `stop` lets the current
    image finish; `kill`, or a KeyboardInterrupt raised here, ends the process at once; both leave "interrupted"
    records. Nothing is started once `stop` is set. Raises StoreError when the journal cannot be written, and
    KeyboardInterrupt after the records are written.
    """
    stop, kill = stop or threading.Event(), kill or threading.Event()
    if stop.is_set() or kill.is_set():
        return
    attempt = attempt or run.next_attempt(case.key)
    log_path = run.logs / f"{case.key}.{attempt}.log"
    job = {
        "case": to_json(case),
        "target": target or (TARGET if case.parallel == "none" else RANKS_TARGET),
        "options": {"run_id": run.info.run_id, "run_path": str(run.path.absolute()), "attempt": attempt},
    }
    watch = _Watch(case, run, attempt=attempt, log_path=log_path, on_progress=on_progress)
    try:
        process = _start(case, job, log_path=log_path)
    except OSError as error:
        watch.conclude(Reason(code="environment", text=f"cannot start a worker process: {error}"))
        return
    with process:
        try:
            watch.follow(process, stop=stop, kill=kill)
        except KeyboardInterrupt:
            process.kill()
            watch.conclude(Reason(code="interrupted", text="stopped by the user; resume the run to measure it"))
            raise
    watch.conclude(watch.reason(process.account()))


def _start(case: Case, job: dict[str, Any], *, log_path: Path) -> Process:
    if case.parallel == "none":
        return Process(job, log_path=log_path)
    from bcgbench.worker_ranks import RankProcess

    return RankProcess(case, job, log_path=log_path)


class _Watch:
    """What is known of a running case: its records, where it is, and why it had to be ended."""

    def __init__(
        self, case: Case, run: Run, *, attempt: int, log_path: Path, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self._case = case
        self._run = run
        self._attempt = attempt
        self._log_path = log_path
        self._on_progress = on_progress
        self._recorded: set[str] = set()
        self._progress: Progress | None = None
        self._ended_because: Reason | None = None
        self._stopped = False
        self._place = ""

    def follow(self, process: Process, *, stop: threading.Event, kill: threading.Event) -> None:
        """Take in events until the process has ended, by itself or because it had to."""
        deadline_s = time.monotonic() + self._case.timeout_s
        while (lines := process.read()) is not None:
            for line in lines:
                self._take(line, process=process)
            if stop.is_set() and not self._stopped:
                self._stopped = True
                process.interrupt()
            if kill.is_set():
                self._stopped = True
                process.kill()
            elif time.monotonic() > deadline_s and self._ended_because is None:
                self._ask_place(process)
                self._end(process, code="timeout", text=self._timeout_text())

    def _ask_place(self, process: Process) -> None:
        """Have the process say in which step of which graph, module and line it is; what else it sent is taken in."""
        for lines in process.ask_place():
            for line in lines:
                self._take(line, process=process)
            if self._place:
                return

    def reason(self, account: str) -> Reason:
        """Why there are runners without a record; `account` is how the process ended."""
        known = self._ended_because
        if known is not None:
            if known.code != LOST:
                return known
            return Reason(code="crashed", text=f"{account} {self._where()}; the others: {known.text}")
        if self._stopped:
            return Reason(code="interrupted", text="stopped by the user; resume the run to measure it")
        return Reason(code="crashed", text=self._with_log(f"{account} {self._where()}"))

    def conclude(self, reason: Reason) -> None:
        """Give every runner that has no record a FAILED one with its samples."""
        for runner in self._case.runners:
            if runner not in self._recorded:
                self._record(self._failed(runner, reason))

    def _take(self, line: bytes, *, process: Process) -> None:
        try:
            value = _value(line)
        except (ValueError, KeyError, TypeError, StoreError) as error:
            self._end(process, code="crashed", text=f"the worker sent an event that cannot be read: {error}")
            return
        if isinstance(value, Sample):
            self._run.append_sample(value, case_key=self._case.key, attempt=self._attempt)
        elif isinstance(value, Record):
            self._record(value)
        elif isinstance(value, str):
            self._place = value
        elif isinstance(value, Reason):
            self._fail(Reason(code=value.code, text=self._with_log(value.text, quoted=False)))
        else:
            self._progress = value
            if self._on_progress is not None:
                self._on_progress(value)

    def _fail(self, reason: Reason) -> None:
        """The first reason counts, and of several processes the one that the others waited for."""
        known = self._ended_because
        if known is None or known.code == LOST:
            self._ended_because = reason
        elif known.code == reason.code:
            self._ended_because = Reason(code=known.code, text=f"{known.text}; {reason.text}")

    def _end(self, process: Process, *, code: str, text: str) -> None:
        self._ended_because = self._ended_because or Reason(code=code, text=self._with_log(text))
        process.dump_stacks()
        process.kill()

    def _record(self, record: Record) -> None:
        self._run.append_record(record)
        self._recorded.add(record.runner)

    def _failed(self, runner: str, reason: Reason) -> Record:
        return Record(
            run_id=self._run.info.run_id,
            case=self._case,
            runner=runner,
            attempt=self._attempt,
            status="FAILED",
            reasons=(reason,),
            created_utc=utc_now(),
            samples=self._run.samples(self._case.key, attempt=self._attempt, runner=runner),
        )

    def _timeout_text(self) -> str:
        at = f" ({self._place})" if self._place else ""
        return (
            f"not finished after {self._case.timeout_s:g} s, {self._where()}{at}; raise timeout_s, or ask for fewer "
            "rounds, steps or runners"
        )

    def _where(self) -> str:
        at = self._progress
        if at is None:
            return "before it reported anything"
        done = f" {at.done}/{at.total}" if at.total else ""
        return f"in stage {at.stage}{f' of {at.arm}' if at.arm else ''}{done}"

    def _with_log(self, text: str, *, quoted: bool = True) -> str:
        line = last_telling_line(self._log_path) if quoted else ""
        quote = f"; last words: {line!r}" if line else ""
        return f"{text}{quote} (log: {self._log_path.relative_to(self._run.path)})"


def _value(line: bytes) -> Sample | Record | Progress | Reason | str:
    """An event; a text is where the process is."""
    event = json.loads(line)
    kinds: dict[str, type[Any]] = {"sample": Sample, "record": Record, "progress": Progress, "failure": Reason,
                                   "place": str}  # fmt: skip
    value: Sample | Record | Progress | Reason | str = from_json(kinds[event["kind"]], event["data"])
    return value
