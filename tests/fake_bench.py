"""Stand-ins for `bench.run_case` that a worker process can run: slow, deterministic, without torch.

Each function takes what `bench.run_case` takes. `drive` is what `bcgbench run --resume` does with a run folder.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path

from bcgbench import worker
from bcgbench.errors import CaptureError, EnvironmentFault, UsageError
from bcgbench.store import open_run
from bcgbench.types import Progress, Reason, Record
from tests import factories as make

IMAGE_S = 0.004
TARGET = "tests.fake_bench:run_case"


def sample(case, runner, *, round):
    """What measuring this image gives, whenever it is measured."""
    return make.sample(denoise_s=1.0 + round / 8, runner=runner, round=round, order=case.runners.index(runner))


def record(case, runner, *, run_id, attempt, samples, **changes) -> Record:
    """A record of the samples given."""
    return make.record(
        run_id=run_id, case=case, runner=runner, attempt=attempt, samples=tuple(samples), fidelity=(), **changes
    )


def run_case(case, *, run_id, run_path, attempt, emit, should_stop):
    """Emit one sample per image and one record per runner; when asked to stop, records with what there is."""
    (run_path / "worker.pid").write_text(str(os.getpid()))
    samples = {runner: [] for runner in case.runners}
    stopped = False
    for round in range(case.rounds):
        for runner in case.runners:
            stopped = stopped or should_stop()
            if stopped:
                break
            emit(Progress(case=case.key, stage="measure", arm=runner, done=round, total=case.rounds))
            time.sleep(IMAGE_S)
            samples[runner].append(sample(case, runner, round=round))
            emit(samples[runner][-1])
    changes = {"status": "FAILED", "reasons": (Reason(code="interrupted", text="asked to"),)} if stopped else {}
    for runner in case.runners:
        emit(record(case, runner, run_id=run_id, attempt=attempt, samples=samples[runner], **changes))


def takes_long(case, **job):
    """Some seconds, long enough to lose a node meanwhile."""
    time.sleep(5)
    run_case(case, **job)


def _two_samples(case, emit):
    emit(Progress(case=case.key, stage="measure", arm="eager", done=1, total=case.rounds))
    for runner in case.runners:
        emit(sample(case, runner, round=0))


def exits(case, *, emit, **_):
    """A library that ends the process."""
    _two_samples(case, emit)
    sys.stderr.write("loading...\nRuntimeError: CUDA error: an illegal memory access was encountered\n\n  0%|     \r")
    sys.stderr.flush()
    os._exit(3)


def segfaults(case, *, emit, **_):
    """A real segmentation fault."""
    _two_samples(case, emit)
    ctypes.string_at(0)


def raises(case, *, emit, **_):
    """A bug."""
    _two_samples(case, emit)
    raise ZeroDivisionError("1/0 in the bench")


def leaves(case, *, emit, **_):
    """A library that calls sys.exit."""
    sys.exit("cannot go on")


def ends_early(case, **_):
    """Returns without a record."""


def hangs(case, *, emit, **_):
    """Never comes back from the second image."""
    _two_samples(case, emit)
    time.sleep(60)


def hangs_silently(case, *, run_path, **_):
    """Never says a word."""
    (run_path / "worker.pid").write_text(str(os.getpid()))
    time.sleep(60)


def refuses(case, **_):
    """Bad input that only loading finds."""
    raise UsageError("weights cannot be both")


def lacks(case, **_):
    """A machine without a GPU."""
    raise EnvironmentFault("no GPU here")


def fills_memory(case, **_):
    """Host memory runs out below an engine error."""
    try:
        raise MemoryError("Unable to allocate 8.00 GiB")
    except MemoryError as error:
        raise CaptureError("capture failed") from error


def not_a_number(case, *, emit, **_):
    """A result that must not be stored."""
    emit(make.sample(step_s=(float("nan"),)))


def prints(case, *, run_id, attempt, emit, **_):
    """Libraries that print to stdout, through Python and below it, and read stdin."""
    sys.stdout.write('{"kind": "record", "data": {}}\n')
    sys.stdout.flush()
    os.write(1, b"printf from C\n")
    logging.getLogger("lib").warning("a warning")
    assert sys.stdin.read() == ""
    for runner in case.runners:
        emit(record(case, runner, run_id=run_id, attempt=attempt, samples=()))


def half(case, *, run_id, attempt, emit, **_):
    """One arm finishes, the next takes the process with it."""
    emit(record(case, case.runners[0], run_id=run_id, attempt=attempt, samples=()))
    emit(sample(case, case.runners[1], round=0))
    os.kill(os.getpid(), signal.SIGABRT)


def keeps_pipe_open(case, *, run_path, **_):
    """Dies while a process that it forked lives on and holds every descriptor."""
    pid = os.fork()
    if pid == 0:
        time.sleep(5)
        os._exit(0)
    (run_path / "forked.pid").write_text(str(pid))
    os._exit(4)


def drive(path: Path, *, target: str = TARGET) -> None:
    """Run whatever a run folder still lacks."""
    with open_run(path, write=True) as run:
        for case in run.info.cases:
            if not run.is_complete(case):
                worker.run_case(case, run, target=target)
