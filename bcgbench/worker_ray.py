"""`--executor ray`: the cases of a run as tasks of a Ray cluster, each on a node with the GPUs that it needs.

A task is a whole case in a worker process of its node, with a run folder of its own, which comes home in one piece: the
journal of the run is written here alone. A case whose node is lost is tried once more, and both attempts are recorded.
Every record names its machine, and `comparable.py` refuses records of unlike ones. Ray is an extra: nothing but this
module imports it, and only when asked.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcgbench import store, worker
from bcgbench.child import reason_of
from bcgbench.codec import from_json, to_json
from bcgbench.errors import EnvironmentFault, UsageError, first_line
from bcgbench.parallel import parse_parallel
from bcgbench.store import Run, utc_now
from bcgbench.types import Case, Progress, Reason, Record, RunInfo, Sample

ATTEMPTS = 2
"""Of a case whose node is lost."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Result:
    """What a node sends home of one case."""

    samples: tuple[Sample, ...]
    records: tuple[Record, ...]
    files: dict[str, bytes]
    """Artifacts and logs, by path relative to the run folder."""


def measure(
    run: Run, cases: Sequence[Case], *, on_progress: Callable[[Progress], None], stop: threading.Event,
    target: str | None = None,
) -> None:  # fmt: skip
    """Run the cases on the cluster that Ray finds, or on this machine; each then has records, or was stopped.

    EnvironmentFault without Ray, or where no node has the GPUs of a case, UsageError for a device by number. StoreError
    when the journal cannot be written.
    """
    ray = _ray()
    _check_room(ray, cases)
    remote = ray.remote(measure_case)
    pending: dict[Any, tuple[Case, int]] = {}

    def submit(case: Case, tried: int) -> None:
        task = remote.options(max_retries=0, num_cpus=_ranks(case), num_gpus=_gpus(case))
        job = to_json(dataclasses.replace(run.info, cases=(case,)))
        pending[task.remote(job, attempt=run.next_attempt(case.key), target=target)] = case, tried
        on_progress(Progress(case=case.key, stage="on the cluster", arm=f"attempt {tried}"))

    for case in cases:
        submit(case, 1)
    while pending and not stop.is_set():
        done, _ = ray.wait(list(pending), timeout=_POLL_S)
        for task in done:
            case, tried = pending.pop(task)
            try:
                bring_home(ray.get(task), run)
            except ray.exceptions.RayTaskError as error:
                record_failure(case, run, reason=reason_of(error.cause))
            except ray.exceptions.RayError as error:
                why = f"the node that ran it was lost: {first_line(error)}"
                record_failure(case, run, reason=Reason(code="node-lost", text=why))
                if tried < ATTEMPTS:
                    submit(case, tried + 1)
    for task in pending:
        ray.cancel(task, force=True)


def measure_case(info: Any, *, attempt: int, target: str | None) -> Result:
    """One case on this node, as `worker.run_case`, in a folder that is gone afterwards."""
    header = from_json(RunInfo, info)
    (case,) = header.cases
    with tempfile.TemporaryDirectory() as folder, store.create_run(Path(folder), header) as run:
        worker.run_case(case, run, attempt=attempt, target=target)
        paths = [path for part in (run.artifacts, run.logs) for path in part.rglob("*") if path.is_file()]
        return Result(
            samples=run.samples(case.key, attempt=attempt),
            records=run.records(),
            files={path.relative_to(run.path).as_posix(): path.read_bytes() for path in paths},
        )


def bring_home(result: Result, run: Run) -> None:
    """Files first, so that no record names one that is not there."""
    for name, content in result.files.items():
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for record in result.records:
        for sample in result.samples:
            if sample.runner == record.runner:
                run.append_sample(sample, case_key=record.case.key, attempt=record.attempt)
        run.append_record(record)


def record_failure(case: Case, run: Run, *, reason: Reason) -> None:
    """A FAILED record of this attempt for every runner."""
    attempt = run.next_attempt(case.key)
    for runner in case.runners:
        record = Record(run_id=run.info.run_id, case=case, runner=runner, attempt=attempt, status="FAILED",
                        reasons=(reason,), created_utc=utc_now())  # fmt: skip
        run.append_record(record)


def _check_room(ray: Any, cases: Sequence[Case]) -> None:
    """Ray itself would wait for such a node for ever, and numbers a task's GPUs anew."""
    most = max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    for case in cases:
        if ":" in case.device:
            raise UsageError(f"{case.model} on {case.device}: Ray chooses the GPU of a task; give --device cuda")
        if _gpus(case) > most:
            raise EnvironmentFault(
                f"{case.model}, {case.parallel} on {case.device}, needs a node of {_gpus(case)} GPUs, and no node of "
                f"the Ray cluster has more than {most}: add one, or leave the case out with --only"
            )


def _ranks(case: Case) -> int:
    return parse_parallel(case.parallel).ranks


def _gpus(case: Case) -> int:
    return 0 if case.device == "cpu" else _ranks(case)


def require_ray() -> None:
    """Ray is installed. Raises `EnvironmentFault` otherwise."""
    try:
        import ray  # noqa: F401 - whether it can be imported is the question
    except ImportError as error:
        raise EnvironmentFault("--executor ray needs Ray: pip install ray") from error


def _ray() -> Any:
    """Ray, connected: to the cluster of RAY_ADDRESS or of this machine, else to one that it starts here."""
    require_ray()
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray
