"""Does the tool find what is wrong? Every fault of `faults.FAULTS` in a tiny case, and tiny cases without a fault.

A fault is put into the engine, a padder, a clock, a metric or the settings; the case runs through `bench.run_case` like
any other, and the ordinary judgement of its records has to name the fault. Here: running and matching. Not here: the
table of faults (`faults`), printing (`cli_selftest.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bcgbench import __version__, bench, measure, worker
from bcgbench.child import reason_of
from bcgbench.clock import HostClock
from bcgbench.engagement import INFORMATIONAL
from bcgbench.engine.tape import TapeSegment
from bcgbench.errors import BcgbenchError
from bcgbench.faults import injected
from bcgbench.faults.fault import Fault
from bcgbench.faults.places import ARM, replaced
from bcgbench.models import MODELS
from bcgbench.outputs import answer
from bcgbench.store import create_run, utc_now
from bcgbench.types import SCHEMA_VERSION, Case, Gpu, Profile, Reason, Record, RunInfo
from bcgbench.verdict import compare, judge, record_exit_code, worst

if TYPE_CHECKING:
    from bcgbench.types import Progress, Sample

ARMS = ("eager", ARM)
PROMPTS = ("cube", "A small red cube on a white table")
SEEDS = (42, 43, 44, 45, 46)
OFTEN = ("tiny/z-image-turbo", "tiny/qwen-image", "tiny/sana1.5", "tiny/longcat-image", "tiny/ltx-2")
"""Tiny models that run without a fault from every seed, the others from the first: one denoiser call a step and two,
one graph and several, picture and sound."""
LARGER_PX = {"tiny/ltx-2-two-stage": 64}
"""Sides of models whose first stage runs at half the size."""
CARD = Gpu(name="NVIDIA B200", uuid_sha256="0" * 64, memory_bytes=180_000_000_000, driver="none")
"""Marks the records of a tiny run on a CPU as a GPU's: the card of the published figures."""

QUIET = INFORMATIONAL | {"not-timed"}
"""Reasons that say nothing against a record."""

Records = dict[str, Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one fault, or one case without a fault, ended in."""

    name: str
    expected: str
    found: str
    """Reason codes and exit code."""
    told: str
    """What the reasons say."""
    passed: bool
    """Whether the fault was caught; of a case without a fault, whether nothing alarmed."""
    is_control: bool = False
    duration_s: float = 0.0


def case_of(model: str, *, device: str = "cpu", **changes: Any) -> Case:
    """A tiny case of two steps and two prompts of unlike length, in float32.

    On a GPU three rounds: clocks are judged by the median of the images, and one may be off by chance.
    """
    side, rounds = LARGER_PX.get(model, 32), 1 if device == "cpu" else 3
    base = Case(model=model, width_px=side, height_px=side, steps=2, prompts=PROMPTS, dtype="float32", device=device,
                rounds=rounds, profile=False, runners=ARMS)  # fmt: skip
    return dataclasses.replace(base, **changes)


def _controls(*, device: str, folder: Path) -> Iterator[Callable[[], Outcome]]:
    """Cases of all tiny models without a fault; on a CPU one of them judged as a GPU's too."""
    for model in (name for name in MODELS if name.startswith("tiny/")):
        for seed in SEEDS if model in OFTEN else SEEDS[:1]:
            case = case_of(model, device=device, seed=seed)
            yield partial(run_control, case, folder=folder, as_gpu=device != "cpu")
    if device == "cpu":
        yield partial(run_control, case_of(OFTEN[0]), folder=folder, as_gpu=True)


@contextmanager
def controls(*, device: str, folder: Path) -> Iterator[Iterator[Outcome]]:
    """The cases without a fault, as each ends; on a CPU a process of their own runs them from now on."""
    runs = _controls(device=device, folder=folder)
    if device != "cpu":
        yield map(_timed, runs)
        return
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=unheard)
    try:
        yield pool.map(_timed, runs)
    finally:
        pool.shutdown(cancel_futures=True)


def unheard() -> None:
    """From now on: tracebacks of arms that are meant to fail, and warnings of tiny models, are no news."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def run_faults(faults: Mapping[str, Fault], *, device: str, folder: Path) -> Iterator[Outcome]:
    """Faults as each ends; last those that may cost the process its GPU."""
    for name, fault in sorted(faults.items(), key=lambda item: item[1].backend == "cuda"):
        yield _timed(partial(run_fault, name, fault, device=device, folder=folder))


def _timed(run: Callable[[], Outcome]) -> Outcome:
    start = time.perf_counter()
    outcome = run()
    return dataclasses.replace(outcome, duration_s=time.perf_counter() - start)


def run_control(case: Case, *, folder: Path, as_gpu: bool = False) -> Outcome:
    """A case without a fault: no reason to doubt it, exact outputs, exit code 0.

    With `as_gpu` its records are judged as a GPU's; then only its clocks and its proof of replay are looked at, for a
    tape is slower than eager.
    """
    if as_gpu:
        records = _run_as_gpu(case, folder=folder)
        alarms = [reason for record in records.values() for reason in record.reasons]
        code = record_exit_code(list(records.values()))
    else:
        records = run_records(case, folder=folder)
        alarms, code = _findings(records)
    alarms = [reason for reason in alarms if reason.code not in QUIET]
    name = f"{case.model} seed {case.seed}" + (", as a GPU's" if as_gpu else "")
    return _outcome(name, alarms, code, expected="exit 0", passed=not alarms and code == 0, is_control=True)


def run_fault(name: str, fault: Fault, *, device: str, folder: Path) -> Outcome:
    """The fault's case with the fault in it, and whether the ordinary judgement found it.

    A fault of the clocks alone needs no GPU, and a tiny model is too fast for it on one: a lost stage of 1 ms is within
    the limits.
    """
    if fault.shown == "gpu" and fault.backend == "none":
        device = "cpu"
    case = case_of(fault.model, device=device, **fault.case)
    if fault.shown == "gpu":
        with injected(name):
            found, code = _findings(_run_as_gpu(case, folder=folder))
    elif fault.shown == "runs":
        before = run_records(case, folder=folder, run_id="before")
        with injected(name):
            after = run_records(case, folder=folder, run_id="after")
        verdict = compare(before["eager"], after["eager"], rerun=answer(after.values(), "rerun"))
        found, code = list(verdict.reasons), verdict.exit_code
    elif fault.shown == "ranks":
        found, code = _findings(_run_ranks(fault, folder=folder / name))
    else:
        with injected(name):
            found, code = _findings(run_records(case, folder=folder))
    named = [reason for reason in found if reason.code == fault.code and fault.says in reason.text]
    passed = bool(named) and code == fault.exit_code
    return _outcome(name, named or found, code, expected=fault.finding, passed=passed)


def run_records(case: Case, *, folder: Path, run_id: str = "selftest") -> Records:
    """The judged records of a case by arm; a case that ends with an error has a FAILED one for each."""
    records: Records = {}

    def emit(event: Sample | Record | Progress) -> None:
        if isinstance(event, Record):
            records[event.runner] = event

    try:
        bench.run_case(case, run_id=run_id, run_path=folder, attempt=1, emit=emit, should_stop=lambda: False)
    except (BcgbenchError, RuntimeError) as error:
        for arm in case.runners:
            records[arm] = Record(run_id=run_id, case=case, runner=arm, attempt=1, status="FAILED",
                                  reasons=(reason_of(error),), created_utc=utc_now())  # fmt: skip
    return records


def _run_ranks(fault: Fault, *, folder: Path) -> Records:
    """The records of a case of two processes with a fault, through the worker as any run's."""
    case = case_of(fault.model, parallel="cfg:2", **fault.case)
    info = RunInfo(run_id="selftest", created_utc=utc_now(), schema_version=SCHEMA_VERSION, tool_version=__version__,
                   command="selftest", suite=None, cases=(case,))  # fmt: skip
    with create_run(folder, info) as run:
        worker.run_case(case, run, target=f"bcgbench.faults.{fault.inject}.run_case")
        return {record.runner: record for record in run.records()}


def _findings(records: Records) -> tuple[list[Reason], int]:
    """All reasons of the records and of the verdict on them, and the exit code of a run that ends so."""
    reasons = [reason for record in records.values() for reason in record.reasons]
    codes = [record_exit_code(list(records.values()))]
    if all(record.status in ("OK", "INVALID") for record in records.values()):
        verdict = compare(*(records[arm] for arm in ARMS))
        reasons += verdict.reasons
        codes.append(verdict.exit_code)
    return reasons, worst(codes)


def _outcome(name: str, reasons: Sequence[Reason], code: int, *, expected: str, passed: bool,
             is_control: bool = False) -> Outcome:  # fmt: skip
    codes = dict.fromkeys(reason.code for reason in reasons)
    told = "; ".join(dict.fromkeys(reason.text for reason in reasons))
    return Outcome(name=name, expected=expected, found=", ".join([*codes, f"exit {code}"]), told=told, passed=passed,
                   is_control=is_control)  # fmt: skip


# --- records of a CPU, marked as a GPU's ------------------------------------------------------------------------------


class DeviceClock(HostClock):
    """A CPU's clock in the place of a device's: on a CPU, work is done when a call returns."""

    is_device_timed = True


def _run_as_gpu(case: Case, *, folder: Path) -> Records:
    """Records of a run on a CPU with both clocks, judged as if a GPU had made them; a GPU's own as they are."""
    if case.device != "cpu":
        return run_records(case, folder=folder)
    launches = 0

    def replay(original: Callable[..., None], segment: TapeSegment) -> None:
        nonlocal launches
        launches += 1
        original(segment)

    clock = patch.object(measure, "clock_for", lambda _device: DeviceClock())
    with clock, replaced(TapeSegment, "replay", replay):
        records = run_records(case, folder=folder)
    return {arm: _as_gpu(record, launches=launches) for arm, record in records.items()}


def _as_gpu(record: Record, *, launches: int) -> Record:
    if record.environment is None:
        return record
    steps = sum(len(sample.step_s) for sample in record.samples)
    is_graph = record.backend == "tape"
    counted = {"kernel": 1.0, "graph": launches / steps if is_graph else 0.0}
    marked = dataclasses.replace(
        record, case=dataclasses.replace(record.case, device="cuda"), backend="cuda" if is_graph else "none",
        environment=dataclasses.replace(record.environment, gpu=CARD),
        profile=Profile(launches=counted, kernels=1.0, busy_s=None),
    )  # fmt: skip
    status, reasons = judge(marked)
    return dataclasses.replace(marked, status=status, reasons=reasons)
