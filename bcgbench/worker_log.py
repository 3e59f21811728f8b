"""What a worker process leaves behind, its exit code and its log, as phrases."""

from __future__ import annotations

import re
import signal
from pathlib import Path

_LOG_TAIL_BYTES = 1 << 16
_LOG_LINE_LENGTH = 300
_TELLING = re.compile(r"^(\w+\.)*\w*(Error|Exception|Fault|Interrupt)\b|^Fatal |\berror:|terminate called|Assertion")


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
