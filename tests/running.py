"""A case run in this process, as a worker would run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bcgbench import bench
from bcgbench.types import Case, Record


def records_of(case: Case, folder: Path, *, run_id: str = "test", events: list[Any] | None = None) -> dict[str, Record]:
    """Records by runner; whatever else is emitted, in order, goes to `events`."""
    records: dict[str, Record] = {}

    def emit(event: Any) -> None:
        if isinstance(event, Record):
            records[event.runner] = event
        elif events is not None:
            events.append(event)

    bench.run_case(case, run_id=run_id, run_path=folder, attempt=1, emit=emit, should_stop=lambda: False)
    return records
