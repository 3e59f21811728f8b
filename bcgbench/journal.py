"""A journal file: numbered JSON lines that are only ever appended, by one writer at a time.

Here: the lock, one fsync a line, what a kill or a power cut leaves behind. Not here: what a line means (`store.py`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcgbench.errors import StoreError

TORN = "journal.torn"
_FIELDS = {"seq", "kind", "data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a journal file holds."""

    lines: list[dict[str, Any]]
    """Complete lines: "seq" counts from 0, "kind" and "data" are the caller's."""
    torn: bytes
    """The end that is no complete line: a write was cut off."""


class Writer:
    """The one writer of a journal file, held by flock, which the kernel drops even when the process is killed."""

    def __init__(self, file: Path) -> None:
        import fcntl  # POSIX only, and reading a run does not need it

        self._file = file
        self._end = (0, 0)
        """Lines and bytes written for good, in one assignment: a KeyboardInterrupt falls before or after it."""
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"cannot write {file}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise StoreError(f"{file} is being written by another bcgbench: wait for it or stop it first") from error

    def continue_after(self, content: Content) -> None:
        """Go on after the complete lines; a torn end is moved to `journal.torn`, where it can be looked at."""
        if content.torn:
            with (self._file.parent / TORN).open("ab") as aside:
                aside.write(content.torn.rstrip(b"\n") + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
        self._end = (len(content.lines), os.fstat(self._fd).st_size - len(content.torn))
        self._cut()

    def append(self, *, kind: str, data: Any) -> None:
        """Write one line and wait until it is on disk; a failed or interrupted write leaves no trace."""
        seq, size_bytes = self._end
        line = json.dumps({"seq": seq, "kind": kind, "data": data}, separators=(",", ":"), allow_nan=False).encode()
        left = line + b"\n"
        try:
            self._cut()
            while left:
                left = left[os.write(self._fd, left) :]
            os.fsync(self._fd)
        except OSError as error:
            self._cut()
            raise StoreError(f"cannot write {self._file}: {error.strerror}; make room, then resume the run") from error
        self._end = (seq + 1, size_bytes + len(line) + 1)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)

    def _cut(self) -> None:
        """Drop whatever stands after the last line that counts."""
        if os.fstat(self._fd).st_size != self._end[1]:
            os.ftruncate(self._fd, self._end[1])
            os.fsync(self._fd)


def read(file: Path) -> Content:
    """All complete lines. StoreError naming the line when one before the last is damaged, lost or doubled."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}") from error
    *complete, torn = raw.split(b"\n")
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(complete, start=1):
        line = _line(text)
        if line is None and number == len(complete) and not torn:
            # After a power cut a file system may keep the length of the last write and not its bytes.
            return Content(lines=lines, torn=text + b"\n")
        if line is None:
            raise StoreError(f"{file} line {number} is damaged: {text[:40]!r}; restore the file from a copy")
        if line["seq"] != number - 1:
            raise StoreError(f"{file} line {number} has seq {line['seq']}, expected {number - 1}: line lost or doubled")
        lines.append(line)
    return Content(lines=lines, torn=torn)


def first_line(file: Path) -> dict[str, Any] | None:
    """The first line alone; None if it is damaged. StoreError if the file cannot be read."""
    try:
        with file.open("rb") as stream:
            return _line(stream.readline())
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}") from error


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.keys() == _FIELDS else None
