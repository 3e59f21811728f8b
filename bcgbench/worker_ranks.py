"""The processes of one parallel case, as one process to its parent: torchrun, and what it started.

torchrun gives each rank its number and a meeting place, ends all when one has ended badly, and says in the log which.
Not here: following the case (`worker.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from bcgbench.parallel import parse_parallel
from bcgbench.process import Process, describe_exit
from bcgbench.types import Case

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from bcgbench.child_ranks import main; main(sys.argv[1])"
_CAUSE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""torchrun's line on the rank that ended first."""


class RankProcess(Process):
    """torchrun in a session of its own, and each rank in another."""

    def __init__(self, case: Case, job: dict[str, Any], *, log_path: Path) -> None:
        """Start as many ranks as the case asks for; they read the job from a file. OSError as of `Process`."""
        ranks, self._log_path = parse_parallel(case.parallel).ranks, log_path
        self._job_path = log_path.with_suffix(".job.json")
        self._job_path.write_text(json.dumps(job), encoding="utf-8")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        command = [*torchrun, sys.executable, "-P", "-c", _BOOT, str(self._job_path.absolute())]
        super().__init__(None, log_path=log_path, command=command)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._job_path.unlink(missing_ok=True)

    def account(self) -> str:
        """How the first rank ended that did not end well, else torchrun itself."""
        ended = super().account()
        cause = _CAUSE.search(self._log_path.read_text(encoding="utf-8", errors="replace"))
        return f"rank {cause[2]}: {describe_exit(int(cause[1]))}" if cause else ended

    def kill(self) -> None:
        """End torchrun, its ranks and what they started, now."""
        ranks = self._ranks()
        super().kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To every rank: torchrun itself would give them 30 s to stop, and has no stacks to show."""
        ranks = self._ranks()
        if not ranks:  # torchrun starts still: in an import Python may swallow an interrupt, and they would be started
            super()._signal(signal.SIGTERM if number == signal.SIGINT else number)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _ranks(self) -> list[int]:
        """Processes that torchrun started; none once it has ended, for then it has ended them."""
        torchrun = self._popen.pid
        try:
            lists = Path(f"/proc/{torchrun}/task").glob("*/children")
            return [int(pid) for file in lists for pid in file.read_text().split()]
        except OSError:
            return []
