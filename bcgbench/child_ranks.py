"""The inside of one process of a parallel case: as `child.py`, and what torchrun started is one of several.

Rank 0 tells the parent what happens. The others keep silent, but for the one thing that only the rank itself can tell:
why it failed, or where it hangs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pkgutil
import threading
from pathlib import Path
from typing import Any

from bcgbench.child import Channel, options, reason_of, serve
from bcgbench.codec import from_json, to_json
from bcgbench.errors import RankFailed, RankLost
from bcgbench.ranks import Ranks
from bcgbench.types import Case, Reason
from bcgbench.watchdog import Watchdog

log = logging.getLogger(__name__)

FAILED, HUNG = 1, 70
"""Exit codes of a rank that said why it failed, and of one that its watchdog ended."""
PATIENCE_S = 2.0
"""How long a rank that gives up stays, for the others to be heard."""
LIMIT_S = 300.0
"""The longest that a rank may be silent, and that the others wait for it: a large model is built in less."""
LIMIT_SHARE = 1 / 6
"""The same as a share of the time limit of the case, so that a hung rank is named before the parent ends all."""


class RankChannel(Channel):
    """The parent's pipe, which all ranks have from torchrun: one event at a time, by a lock on the job's file."""

    def __init__(self, job: Path) -> None:
        super().__init__()
        self._job = job.open("rb")

    def send(self, kind: str, data: Any) -> None:
        """Send one event whole."""
        fcntl.flock(self._job, fcntl.LOCK_EX)
        try:
            super().send(kind, data)
        finally:
            fcntl.flock(self._job, fcntl.LOCK_UN)


def main(job: str) -> None:
    """Run this rank's part of the job in a file; never returns."""
    path = Path(job)
    serve(RankChannel(path), request=path.read_bytes(), work=_run)


def _run(job: dict[str, Any], *, channel: Channel, stop: threading.Event) -> None:
    case = from_json(Case, job["case"])
    limit_s = min(LIMIT_S, case.timeout_s * LIMIT_SHARE)
    ranks = Ranks(cuda=case.device != "cpu", timeout_s=2 * limit_s)

    def give_up(where: str) -> None:
        text = f"rank {ranks.rank} was silent for {limit_s:g} s, {where}"
        channel.send("failure", to_json(Reason(code="rank-hung", text=text)))
        threading.Event().wait(PATIENCE_S)  # torchrun ends the others once one has ended: let them speak, too
        os._exit(HUNG)

    watchdog = Watchdog(ranks, limit_s=limit_s, give_up=give_up)
    target = pkgutil.resolve_name(job["target"])
    try:
        target(
            case,
            **options(job),
            emit=channel.emit,
            should_stop=stop.is_set,
            ranks=ranks,
            watchdog=watchdog,
        )
    except Exception as error:
        log.exception("rank %d failed", ranks.rank)
        cause = error.__cause__ if isinstance(error, RankFailed) and error.__cause__ else error
        reason = reason_of(cause)
        text = f"rank {ranks.rank} in stage {watchdog.stage}: {reason.text}"
        channel.send("failure", to_json(Reason(code=reason.code, text=text)))
        if isinstance(cause, RankLost):  # let torchrun find the one that ended first, and end this one
            threading.Event().wait(PATIENCE_S)
        os._exit(FAILED)
