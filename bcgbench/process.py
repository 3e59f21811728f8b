"""A process that works for this one: started with a job, read line by line, asked, ended with all that it started.

Here: pipes, signals and the log. Not here: what its events mean (`worker.py`, `validate_process.py`), its inside
(`child.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from bcgbench.child import main; main()"
"""The child imports what this process would. `-m` would put the current folder first, and a `random.py` there before
the standard library."""

_POLL_S = 0.1
_ASK_S = 2.0
"""A process that computes answers at once, one that holds the interpreter's lock never."""
_LOG_TAIL_BYTES = 1 << 16
_LOG_LINE_LENGTH = 300
_TELLING = re.compile(r"^(\w+\.)*\w*(Error|Exception|Fault|Interrupt)\b|^Fatal |\berror:|terminate called|Assertion")


class Process:
    """The child process, in a session of its own so that Ctrl-C at the terminal reaches only the parent."""

    def __init__(self, job: dict[str, Any] | None, *, log_path: Path, command: Sequence[str] = ("-c", _BOOT)) -> None:
        """Start Python on `command` and this process's `sys.path`, and send it the job; OSError where that fails."""
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", *command, *map(str, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._in, self._out = self._popen.stdin, self._popen.stdout.fileno()
        self._rest = b""
        if job is not None:
            self._send(json.dumps(job).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            self.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()

    def account(self) -> str:
        """How the process ended, as a phrase; only after it has."""
        return describe_exit(self._popen.wait())

    def read(self) -> list[bytes] | None:
        """Complete lines that came within a moment; None when the process has ended and all was read.

        The end of the pipe alone is not waited for: something that the case started may hold it open.
        """
        ended = self._popen.poll() is not None
        ready, _, _ = select.select([self._out], [], [], 0 if ended else _POLL_S)
        data = os.read(self._out, 1 << 16) if ready else b""
        if not data and ready:
            self._popen.wait()
        if not data and (ended or ready):
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def interrupt(self) -> None:
        """Ask the case to finish its image and stop."""
        self._signal(signal.SIGINT)

    def ask_place(self) -> Iterator[list[bytes]]:
        """Ask where it is, and what `read` gives until time for an answer is over; the answer is an event."""
        self._send(b"where\n")
        until_s = time.monotonic() + _ASK_S
        while time.monotonic() < until_s and (lines := self.read()) is not None:
            yield lines

    def dump_stacks(self) -> None:
        """Have faulthandler write where every thread is to the log, and give it a moment for that."""
        self._signal(signal.SIGUSR1)
        time.sleep(2 * _POLL_S)

    def kill(self) -> None:
        """End the process and what it started, now."""
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def _send(self, line: bytes) -> None:
        try:
            while line:
                line = line[self._in.write(line) or 0 :]
        except BrokenPipeError:
            pass  # it is dead already; its exit code and its log say why


def describe_exit(returncode: int) -> str:
    """An exit code or signal as a phrase."""
    if returncode == 0:
        return "the worker process ended without a record"
    if returncode > 0:
        return f"the worker process ended with exit code {returncode}"
    name = signal.Signals(-returncode).name
    hint = " (if nobody sent it, the kernel was out of memory: see dmesg)" if name == "SIGKILL" else ""
    return f"the worker process was ended by {name}{hint}"


def last_telling_line(log_path: Path) -> str:
    """The last line of a log that names an error, else the last that is not blank; "" for an empty or absent log."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log_path.stat().st_size - _LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or [""])[-1][:_LOG_LINE_LENGTH]
