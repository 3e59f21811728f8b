"""Ranks without torchrun: two processes forked from a server that has imported everything: seconds for a test."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

from bcgbench.codec import from_json, to_json
from bcgbench.types import Case, Record

LIMIT_S = 60.0
SILENT_S = 3.0
"""Time limit of the watchdogs."""


def _rank(case: Case, target: str, number: int, port: int, folder: str) -> None:
    """One process: what torchrun and `child_ranks` do, its events in a file."""
    from pkgutil import resolve_name

    from bcgbench.ranks import Ranks
    from bcgbench.watchdog import Watchdog

    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))  # fmt: skip
    with Path(folder, f"rank{number}.jsonl").open("w") as file:

        def emit(event: Any) -> None:
            if isinstance(event, Record):
                file.write(json.dumps(to_json(event)) + "\n")

        def give_up(where: str) -> None:
            Path(folder, f"rank{number}.hung").write_text(where)
            time.sleep(SILENT_S / 2)  # as `child_ranks`: the others are heard, too
            os._exit(70)

        ranks = Ranks(cuda=False, timeout_s=LIMIT_S)
        watchdog = Watchdog(ranks, limit_s=SILENT_S, give_up=give_up)
        resolve_name(target)(case, run_id="test", run_path=Path(folder), attempt=1, emit=emit,
                             should_stop=lambda: False, ranks=ranks, watchdog=watchdog)  # fmt: skip


def run_ranks(case: Case, folder: Path, *, target: str = "bcgbench.bench_ranks:run_case") -> dict[str, Record]:
    """Records by runner of a case on two ranks; where rank N hung is in `rankN.hung` of the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [_context().Process(target=_rank, args=(case, target, n, port, str(folder))) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    records = [from_json(Record, json.loads(line)) for line in lines]
    return {record.runner: record for record in records}


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context
