"""A run folder: a journal of everything measured, with artifacts and logs beside it.

    results/<run id>/journal.jsonl   {"seq": n, "kind": "run" | "sample" | "record", "data": {...}}
                     journal.torn    what a kill left of a half-written last line
                     artifacts/ logs/

Here: run folders, schema versions, which attempt of an arm counts, what a resume still has to do. Not here: how a line
reaches the disk (`journal.py`), how an older one is brought up (`migrations.py`), what a record means (`verdict.py`),
what to store (`bench.py`, `worker.py`).
"""

from __future__ import annotations

import difflib
import logging
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from bcgbench import journal
from bcgbench.codec import from_json, to_json
from bcgbench.errors import NothingMeasured, StoreError
from bcgbench.migrations import MIGRATIONS
from bcgbench.types import SCHEMA_VERSION, Case, Record, RunInfo, Sample

__all__ = [
    "JOURNAL", "MIGRATIONS", "RETRIED", "Run", "create_run", "find_run", "from_json", "is_final", "list_runs",
    "open_run", "run_id", "to_json", "utc_now",
]  # fmt: skip

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"

RETRIED = frozenset({"interrupted", "crashed", "timeout", "out-of-memory", "environment", "process-poisoned",
                     "node-lost", "rank-hung"})  # fmt: skip
"""Reasons of a FAILED record that a further attempt may not meet again; any other failure is final."""


def utc_now() -> str:
    """Now, ISO 8601 with milliseconds, so that runs begun in one second keep their order."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def run_id(created_utc: str, *, name: str) -> str:
    """Folder name that sorts by time, `20261129T151200Z-pr27436-0a1b2c3d`; the random end keeps it unique."""
    seconds = re.sub(r"[-:]|\.\d+", "", created_utc)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.").lower()[:60]
    return f"{seconds}-{slug or 'run'}-{secrets.token_hex(4)}"


def create_run(results: Path, info: RunInfo) -> Run:
    """A new folder under `results`, open for writing, its header on disk. StoreError if it exists or cannot be made."""
    path = Path(results) / info.run_id
    try:
        path.mkdir(parents=True)
        (path / JOURNAL).touch(exist_ok=False)
    except OSError as error:
        raise StoreError(f"cannot create the run folder {path}: {error.strerror}; choose another --results") from error
    run = Run(path, info=info, writer=journal.Writer(path / JOURNAL))
    run._append("run", to_json(info))
    return run


def open_run(path: Path, *, write: bool = False) -> Run:
    """An existing run; `write` to resume it. StoreError if damaged, newer, or being written by another process.

    A torn last line is left out with a warning; on writing it is first moved to `journal.torn`.
    """
    file = Path(path) / JOURNAL
    if not file.is_file():
        raise StoreError(f"{path} holds no {JOURNAL}: expected a run folder, see `bcgbench list runs`")
    if not write:
        return _load(file, writer=None)
    writer = journal.Writer(file)
    try:
        return _load(file, writer=writer)
    except BaseException:
        writer.close()
        raise


def list_runs(results: Path) -> tuple[Path, ...]:
    """Run folders with a readable header, newest last."""
    created = {file.parent: _created_utc(file) for file in Path(results).glob(f"*/{JOURNAL}")}
    return tuple(sorted((path for path in created if created[path]), key=lambda path: (created[path], path.name)))


def find_run(results: Path, ref: str | None = None) -> Path:
    """The folder of "latest" (or None), of a run id, or of a path. NothingMeasured without any run, else StoreError."""
    name = ref or "latest"
    if name != "latest":
        for path in (Path(results) / name, Path(name), Path(name).parent):
            if (path / JOURNAL).is_file():
                return path
    runs = list_runs(results)
    if not runs:
        raise NothingMeasured(f"no run under {results}: measure one first, e.g. `bcgbench run --suite smoke`")
    if name == "latest":
        return runs[-1]
    near = difflib.get_close_matches(name, [path.name for path in runs], n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"the latest is {runs[-1].name}; see `bcgbench list runs`"
    raise StoreError(f"no run {name!r} under {results}; {hint}")


def is_final(record: Record) -> bool:
    """Whether another attempt would not change the record."""
    return record.status != "FAILED" or not RETRIED.intersection(reason.code for reason in record.reasons)


class Run:
    """An open run folder and a context manager. Only a run opened for writing can append."""

    def __init__(self, path: Path, *, info: RunInfo, writer: journal.Writer | None = None) -> None:
        self.path = path
        self.info = info
        self._writer = writer
        self._samples: list[tuple[str, int, Sample]] = []
        self._records: list[Record] = []
        if writer is not None:
            self.artifacts.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def artifacts(self) -> Path:
        """Folder of images and latents."""
        return self.path / "artifacts"

    @property
    def logs(self) -> Path:
        """Folder of what the worker processes wrote to stdout and stderr."""
        return self.path / "logs"

    def append_sample(self, sample: Sample, *, case_key: str, attempt: int) -> None:
        """Put one sample on disk; once this returns, neither a kill nor a power cut loses it."""
        self._append("sample", {"case_key": case_key, "attempt": attempt, "sample": to_json(sample)})
        self._samples.append((case_key, attempt, sample))

    def append_record(self, record: Record) -> None:
        """Put one record on disk."""
        self._append("record", to_json(record))
        self._records.append(record)

    def samples(self, case_key: str, *, attempt: int, runner: str | None = None) -> tuple[Sample, ...]:
        """Raw samples of one attempt in the order measured, also those of arms that never got a record."""
        return tuple(
            sample
            for key, number, sample in self._samples
            if (key, number) == (case_key, attempt) and runner in (None, sample.runner)
        )

    def records(self) -> tuple[Record, ...]:
        """The newest attempt of each case and runner, in suite order."""
        arms = [(case.key, runner) for case in self.info.cases for runner in case.runners]
        newest = self._newest()
        return tuple(newest[arm] for arm in dict.fromkeys([*arms, *newest]) if arm in newest)

    def next_attempt(self, case_key: str) -> int:
        """One more than the highest attempt that left a line; the first is 1."""
        attempts = [number for key, number, _ in self._samples if key == case_key]
        attempts += [record.attempt for record in self._records if record.case.key == case_key]
        return max(attempts, default=0) + 1

    def is_complete(self, case: Case) -> bool:
        """Whether every runner of the case has a record that another attempt would not change."""
        newest = self._newest()
        records = [newest.get((case.key, runner)) for runner in case.runners]
        return all(record is not None and is_final(record) for record in records)

    def close(self) -> None:
        """Give up the right to write; what was read stays readable."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _newest(self) -> dict[tuple[str, str], Record]:
        ordered = sorted(self._records, key=lambda record: record.attempt)  # stable: within an attempt the last counts
        return {(record.case.key, record.runner): record for record in ordered}

    def _append(self, kind: str, data: Any) -> None:
        if self._writer is None:
            raise StoreError(f"{self.path} is open for reading only: use open_run(path, write=True) to add to it")
        self._writer.append(kind=kind, data=data)

    def _adopt(self, kind: str, data: dict[str, Any]) -> None:
        """Take in a line that is on disk already."""
        if kind == "sample":
            self._samples.append((data["case_key"], data["attempt"], from_json(Sample, data["sample"])))
        elif kind == "record":
            self._records.append(from_json(Record, data))
        else:
            raise StoreError(f"unknown kind {kind!r}, expected sample or record")


def _load(file: Path, *, writer: journal.Writer | None) -> Run:
    content = journal.read(file)
    if not content.lines:
        raise StoreError(f"{file} has no header, because the run ended while it began: delete the folder")
    version = _schema_version(content.lines[0], file=file, write=writer is not None)
    if content.torn:
        log.warning("%s ends in a torn line of %d bytes, left by a kill: not read", file, len(content.torn))
    if writer is not None:
        writer.continue_after(content)
    number = 1
    try:
        data = [_migrated(line["kind"], line["data"], version=version) for line in content.lines]
        run = Run(file.parent, info=from_json(RunInfo, data[0]), writer=writer)
        for number, line in enumerate(content.lines[1:], start=2):
            run._adopt(line["kind"], data[number - 1])
    except (StoreError, KeyError, TypeError) as error:
        raise StoreError(f"{file} line {number} does not fit schema {SCHEMA_VERSION}: {error}") from error
    return run


def _schema_version(header: dict[str, Any], *, file: Path, write: bool) -> int:
    version = header["data"].get("schema_version") if isinstance(header["data"], dict) else None
    if header["kind"] != "run" or not isinstance(version, int):
        raise StoreError(f"{file} line 1 is no run header: expected kind 'run' with a schema_version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{file} was written by a newer bcgbench (schema {version}, this one reads up to {SCHEMA_VERSION}): upgrade"
        )
    if write and version != SCHEMA_VERSION:
        raise StoreError(
            f"{file} has schema {version} and this bcgbench writes {SCHEMA_VERSION}: it can be read, not resumed; "
            "begin a new run"
        )
    return version


def _migrated(kind: str, data: dict[str, Any], *, version: int) -> dict[str, Any]:
    for step in range(version, SCHEMA_VERSION):
        if step not in MIGRATIONS:
            raise StoreError(f"no migration from schema {step} to {step + 1}; use the bcgbench that wrote it")
        data = MIGRATIONS[step](kind, data)
    return data


def _created_utc(file: Path) -> str:
    """When a run began, "" for a folder whose header cannot be read."""
    try:
        header = journal.first_line(file)
    except StoreError:
        header = None
    created = header["data"].get("created_utc") if header and isinstance(header["data"], dict) else None
    return created if isinstance(created, str) else ""
