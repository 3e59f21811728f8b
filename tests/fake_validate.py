"""Stand-ins for `validate_process.inside` that a child process can run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from bcgbench.errors import UsageError
from bcgbench.types import Progress
from bcgbench.validate import Finding


def begin(case, emit, name, *, done=0):
    """A check begins, or goes on."""
    emit(Progress(case=case.key, stage=name, arm="bcg", done=done))


def end(emit, name):
    """A check is OK."""
    emit(Finding(check=name, runner="bcg", ruling="OK", reason="fine", details=(), forwards=1, duration_s=0.0))


def hangs(case, *, names, emit, golden_path=None, **_):
    """The second check hangs, with a process of its own running; alone, a check is OK."""
    if len(names) == 1:
        begin(case, emit, names[0])
        return end(emit, names[0])
    begin(case, emit, names[0])
    end(emit, names[0])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    golden_path.write_text(f"{os.getpid()} {child.pid}")
    begin(case, emit, names[1])
    begin(case, emit, names[1], done=3)
    return time.sleep(60)


def crashes(case, *, names, emit, **_):
    """The first check ends the process."""
    begin(case, emit, names[0])
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(case, *, names, emit, **_):
    """The first check raises what no check should."""
    begin(case, emit, names[0])
    raise KeyError("lost")


def refuses(case, **_):
    """Loading refuses the case."""
    raise UsageError("no such size")


def slow(case, *, names, emit, **_):
    """Longer than the limit, with forwards all the time."""
    for done in range(6):
        begin(case, emit, names[0], done=done)
        time.sleep(0.1)
    end(emit, names[0])


def break_hangs(case, **options):
    """The real checks on a graph whose second break does not end at replay."""
    _second_break(case, lambda: time.sleep(60), **options)


def kernel_hangs(case, **options):
    """The same on a GPU: the break launches a kernel that takes minutes."""
    import torch

    _second_break(case, lambda: torch.cuda._sleep(10**12), **options)


def _second_break(case, hang, **options):
    from bcgbench import validate_audit, validate_process
    from bcgbench.engine.steps import Break

    replay = Break.replay

    def hanging(self):
        if "transformer_blocks.1" in self.where:
            hang()
        replay(self)

    Break.replay = hanging
    validate_audit.STEP_LIMIT_S = 0.5
    validate_process.inside(case, **options)
