"""What `run` and `plan` do behind their options: flags to cases, cases to a run folder with a report."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcgbench import __version__, store
from bcgbench.cli_compare import judge_run
from bcgbench.cli_options import parse_buckets, parse_prompts, split
from bcgbench.errors import StoreError, UsageError
from bcgbench.plan import UNVALIDATED
from bcgbench.reports import renderer
from bcgbench.reports.base import Report, model_name
from bcgbench.types import SCHEMA_VERSION, RunInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bcgbench.cli_progress import Display
    from bcgbench.store import Run
    from bcgbench.suite import Suite
    from bcgbench.types import Case

log = logging.getLogger(__name__)

FIRST_INTERRUPT = "stopping after the current image; press Ctrl-C again to stop now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the flags ask for, not yet checked. None means that the suite or the model decides."""

    suite: str | None = None
    only: Sequence[str] | None = None
    """Parts of the names of the cases to keep."""
    models: Sequence[str] | None = None
    resolutions: Sequence[str] | None = None
    runners: Sequence[str] | None = None
    prompts: Sequence[str] | None = None
    buckets: str | None = None
    values: Mapping[str, Any]
    """Further suite keys as given: steps, guidance, weights, source, device, dtype, break, seed, rounds, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    report: Report
    interrupted: bool


def cases_of(selection: Selection) -> tuple[Case, ...]:
    """The checked cases of a selection. UsageError for anything that could not run as asked."""
    from bcgbench import models, suite
    from bcgbench.models import loading
    from bcgbench.runners import RUNNERS

    chosen = _suite_of(selection)
    expanded = suite.expand(chosen, facts=models.facts, overrides=_overrides(selection), runner_names=RUNNERS)
    cases = suite.only(expanded, selection.only or ())
    for case in cases:
        if case.source is not None and not Path(case.source).is_dir():
            message = (
                f"source {case.source!r} is no folder: give a local one in diffusers layout, with model_index.json"
            )
            raise UsageError(message)
        _check_shared(case)
        adapter = models.adapter(case.model)
        loading.check(case, adapter)
        if adapter.facts.generic:
            log.warning("%s: %s", model_name(case), UNVALIDATED)
    return cases


def _check_shared(case: Case) -> None:
    """Raise UsageError for an arm that several processes cannot run: its reference is of whole calls."""
    from bcgbench.runners import RUNNERS

    other = [name for name in case.runners if not RUNNERS[name].same_arithmetic]
    if case.parallel != "none" and other:
        message = f"{case.model}, {case.parallel}: {', '.join(other)} run in one process only; leave them out"
        raise UsageError(message)


def alone(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases, for a command that looks at one process. UsageError where one is to be shared by several."""
    shared = next((case for case in cases if case.parallel != "none"), None)
    if shared is not None:
        message = (
            f"{shared.model}, {shared.parallel}: only `run` starts several processes; name the model without a suite"
        )
        raise UsageError(message)
    return cases


def _suite_of(selection: Selection) -> Suite:
    from bcgbench import suite

    if selection.suite is not None:
        return suite.load_suite(selection.suite)
    if not selection.models:
        message = "nothing to run: give --model MODEL or --suite SUITE (see `bcgbench list models` and `list suites`)"
        raise UsageError(message)
    return suite.Suite(name="", description="from flags", cases=({"model": list(selection.models)},))


def _overrides(selection: Selection) -> dict[str, Any]:
    given = {
        "model": list(selection.models) if selection.models else None,
        "resolution": list(split(selection.resolutions)) or None,
        "runners": list(split(selection.runners)) or None,
        "prompts": parse_prompts(selection.prompts),
        "buckets": parse_buckets(selection.buckets),
        **selection.values,
    }
    return {key: value for key, value in given.items() if value is not None}


def start(cases: Sequence[Case], *, results: Path, command: str, suite: str | None) -> Run:
    """A new run folder for these cases."""
    suite_name = Path(suite).stem if suite else None
    created = store.utc_now()
    info = RunInfo(
        run_id=store.run_id(created, name=suite_name or model_name(cases[0])),
        created_utc=created,
        schema_version=SCHEMA_VERSION,
        tool_version=__version__,
        command=command,
        suite=suite_name,
        cases=tuple(cases),
    )
    return store.create_run(results, info)


def execute(
    run: Run, *, display: Display, strict: bool, on_stop: Callable[[str], None], executor: str = "local"
) -> Outcome:
    """Measure what the run still lacks, then write its report, whatever happened in between.

    The first interrupt lets the current image finish, the second ends the worker at once; both leave a partial report.
    """
    stop = threading.Event()
    try:
        with display, interruptible(stop, on_stop=on_stop):
            measure(run, display=display, stop=stop, executor=executor)
    except KeyboardInterrupt:
        stop.set()
    finally:
        report = report_of(run, strict=strict, interrupted=stop.is_set())
        write_report(run.path, report)
    return Outcome(report=report, interrupted=stop.is_set())


def measure(run: Run, *, display: Display, stop: threading.Event, executor: str = "local") -> None:
    """Every case that has no complete result, one process each: here in turn, or on a Ray cluster at once."""
    from bcgbench import worker, worker_ray

    if executor == "ray":
        cases = [case for case in run.info.cases if not run.is_complete(case)]
        worker_ray.measure(run, cases, on_progress=display, stop=stop)
        return
    for case in run.info.cases:
        if stop.is_set():
            return
        if not run.is_complete(case):
            worker.run_case(case, run, on_progress=display, stop=stop)


@contextlib.contextmanager
def interruptible(stop: threading.Event, *, on_stop: Callable[[str], None]) -> Iterator[None]:
    """Within: SIGINT or SIGTERM sets `stop`; a second one raises KeyboardInterrupt. Handlers are restored."""

    def handle(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        on_stop(FIRST_INTERRUPT)

    if threading.current_thread() is not threading.main_thread():  # only there may Python install handlers
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report_of(run: Run, *, strict: bool = False, interrupted: bool = False) -> Report:
    """The records of a run with the verdicts on them."""
    records = run.records()
    there = {(record.case.key, record.runner) for record in records}
    asked = ((case.key, runner) for case in run.info.cases for runner in case.runners)
    missing = tuple(arm for arm in asked if arm not in there)
    what = "interrupted" if interrupted else "not finished" if missing else ""
    notes = (f"{what}: finish it with `bcgbench run --resume {run.info.run_id}`",) if what else ()
    verdicts = judge_run(records)
    return Report(info=run.info, records=records, verdicts=verdicts, notes=notes, strict=strict, missing=missing)


def write_report(folder: Path, report: Report) -> Path:
    """`report.md` of a run folder, replaced in one step so that a reader never sees half of it."""
    target, draft = folder / "report.md", folder / "report.md.new"
    try:
        draft.write_text(renderer("markdown")(report), encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        message = f"cannot write {target}: {error.strerror}; the journal beside it holds everything measured"
        raise StoreError(message) from error
    return target
