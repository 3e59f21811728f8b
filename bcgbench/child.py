"""The inside of a worker process: run one case and tell the parent what happens.

Started by `worker.py` with one JSON line as input; events leave as JSON lines on a descriptor of their own, so that
whatever a library prints lands in the log. Here: the process's boundary: signals, the parent's death, any exception.
Not here: the measurement (`bench.py`), the journal, which only the parent writes.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from bcgbench import errors
from bcgbench.codec import from_json, to_json
from bcgbench.engine.place import place
from bcgbench.types import Case, Reason

log = logging.getLogger(__name__)

PARENT_GONE = 75
"""Exit code, which nobody is left to read, after the parent died."""

CODES: dict[type[BaseException], str] = {
    errors.UsageError: "usage",
    errors.StoreError: "store",
    errors.NothingMeasured: "nothing-measured",
    errors.NotComparable: "not-comparable",
    errors.EnvironmentFault: "environment",
    errors.RankLost: "rank-lost",
    errors.SignatureError: "signature",
    errors.StaticInputError: "static-input",
    errors.CaptureError: "capture-failed",
    errors.ReplayError: "replay-failed",
    errors.ProcessPoisoned: "process-poisoned",
    errors.EngineError: "engine",
    errors.BcgbenchError: "failed",
}
"""Error class to reason code; the nearest base class counts."""


class Channel:
    """The pipes of the parent, taken from stdin and stdout: libraries and what they start cannot touch them.

    They are read and written without Python's buffers, whose locks a forked process would inherit locked.
    """

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)  # duplicates are not inherited by what the case starts
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._lock = threading.Lock()

    def receive(self) -> bytes:
        """The first line."""
        line = b""
        while not line.endswith(b"\n") and (data := os.read(self._in, 1 << 16)):
            line += data
        return line

    def answer_parent(self, worker: int) -> None:
        """Say where the thread `worker` is each time the parent asks; end when the input does, which is when the parent
        is gone, even by kill -9."""
        while os.read(self._in, 1 << 16):
            self.send("place", place(worker))
        _end_all()

    def emit(self, value: object) -> None:
        """Send a value; its class names the kind. StoreError for a value that cannot be stored, e.g. a NaN."""
        self.send(type(value).__name__.lower(), to_json(value))

    def send(self, kind: str, data: Any) -> None:
        """Send one event whole."""
        left = json.dumps({"kind": kind, "data": data}).encode() + b"\n"
        try:
            with self._lock:
                while left:
                    left = left[os.write(self._out, left) :]
        except BrokenPipeError:
            _end_all()


def _end_all() -> NoReturn:
    """End this process and what it started, if it was made their leader; nobody is left to tell."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(PARENT_GONE)


def main() -> None:
    """Run the case that stdin names; never returns."""
    channel = Channel()
    serve(channel, request=channel.receive(), work=_run)


def serve(channel: Channel, *, request: bytes, work: Callable[..., None]) -> NoReturn:
    """Do the work that a request describes, within a process that outlives neither its parent nor its work."""
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks for the stacks of a hung case
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    answering = partial(channel.answer_parent, threading.get_ident())
    threading.Thread(target=answering, name="answer-parent", daemon=True).start()
    try:
        work(json.loads(request), channel=channel, stop=stop)
        code = 0
    except Exception as error:
        log.exception("the case failed")
        channel.send("failure", to_json(reason_of(error)))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is said; tearing CUDA down could only turn a finished case into a crash


def _run(job: dict[str, Any], *, channel: Channel, stop: threading.Event) -> None:
    case = from_json(Case, job["case"])
    target = pkgutil.resolve_name(job["target"])
    target(case, emit=channel.emit, should_stop=stop.is_set, **options(job))


def options(job: dict[str, Any]) -> dict[str, Any]:
    """A job's further arguments; what is named a path is one."""
    return {name: Path(value) if name.endswith("_path") else value for name, value in job["options"].items()}


def reason_of(error: BaseException) -> Reason:
    """What a case died of, for its record. Out of memory counts wherever it stands in the chain of causes."""
    shortage = next((each for each in _chain(error) if _is_out_of_memory(each)), None)
    if shortage is not None:
        # What follows is torch's advice on fragmentation; the figures stand before it.
        figures = str(shortage).partition(" If reserved but")[0].strip() or "out of host memory"
        text = f"{figures}; use a smaller resolution, fewer runners per case, or a larger device"
        return Reason(code="out-of-memory", text=text)
    code = next((CODES[base] for base in type(error).__mro__ if base in CODES), None)
    if code is not None:
        return Reason(code=code, text=str(error))
    return Reason(code="crashed", text=f"{type(error).__name__}: {error}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # not imported here: a case that never loaded it has no such error
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # torch has no class of its own for host memory: c10/core/impl/alloc_cpu.cpp raises a RuntimeError with this name.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
