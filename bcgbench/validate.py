"""Checks beyond `run`: each provokes published failure modes of captured graphs on one model and says what it found.

Here: the table of checks, what a check answers, running them in turn with what each costs. Not here: the checks
(`validate_*.py`), the process that they run in (`validate_process.py`), printing (`cli_validate.py`). Importable
without torch, so that the table can be listed.
"""

from __future__ import annotations

import logging
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bcgbench.errors import BcgbenchError, ProcessPoisoned, UsageError
from bcgbench.verdict import worst

if TYPE_CHECKING:
    from bcgbench.types import Case
    from bcgbench.validate_subject import Subject

log = logging.getLogger(__name__)

Ruling = Literal["OK", "FAILED", "NOT-APPLICABLE"]
OUTPUTS, GRAPHS = 3, 4
"""Exit codes: outputs differ; graphs that cannot be believed."""
FRESH_LIMIT_S = 1800.0
"""The fresh process loads the model once more."""
NOTHING = 6
"""Exit code where no check applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row: what is provoked, and the exit code of a failure."""

    target: str
    """ "module:function" of a function from a `Subject` to an `Answer`."""
    provokes: str
    exit_code: int
    limit_s: float = 300.0
    """Without a forward for so long it hangs: the slowest forward of all models takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a check found. `details` are for people, one line each."""

    ruling: Ruling
    reason: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An answer with its check and what it cost."""

    check: str
    runner: str
    ruling: Ruling
    reason: str
    details: tuple[str, ...]
    forwards: int
    """Eager calls, calls of captures and replays of the denoisers."""
    duration_s: float


def _check(target: str, provokes: str, exit_code: int, **more: float) -> Check:
    return Check(target=f"bcgbench.validate_{target}", provokes=provokes, exit_code=exit_code, **more)


CHECKS: dict[str, Check] = {
    "repeatability": _check("repeat:repeatability", "eager is not repeatable in one process", GRAPHS),
    "fresh-process": _check(
        "repeat:fresh_process", "eager is not repeatable across processes", GRAPHS, limit_s=2 * FRESH_LIMIT_S + 60
    ),
    "engagement": _check("repeat:engagement", "eager in disguise, misses, late captures", GRAPHS),
    "padding": _check("repeat:padding", "padding that is attended", OUTPUTS),
    "golden": _check("golden:golden", "both arms wrong alike: outputs of an earlier run", OUTPUTS),
    "inputs": _check("inputs:changed_inputs", "frozen inputs: every tensor argument changed in turn", OUTPUTS),
    "order": _check("order:order", "lifetime: graphs in every order, allocator churn, NaN poison", OUTPUTS),
    "aliasing": _check("order:aliasing", "outputs overwritten by the next call, output types lost", OUTPUTS),
    "eviction": _check("order:eviction", "a graph broken by the eviction of another", OUTPUTS),
    "capture-failure": _check("faults:capture_failure", "what a failed capture leaves behind", GRAPHS),
    "memory-pressure": _check("faults:memory_pressure", "a capture with little free memory", GRAPHS),
    "toggles": _check("toggles:toggles", "stale replay after a switch was turned", OUTPUTS),
    "weights": _check("toggles:weights", "stale replay after weights were changed or replaced", OUTPUTS),
    "host-audit": _check("audit:host_audit", "host reads, host copies, compilation that the graph adds", GRAPHS),
    "steps": _check("audit:steps", "faults and hangs of one segment, each step synchronised", GRAPHS),
}
"""Name -> check, in the order in which they run."""


def chosen(only: Sequence[str]) -> tuple[str, ...]:
    """Names of the checks to run, in the table's order. UsageError for an unknown one."""
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise UsageError(f"Unknown check {', '.join(unknown)}. Known: {', '.join(CHECKS)}.")
    return tuple(name for name in CHECKS if not only or name in only)


def run_checks(
    case: Case, *, runners: Sequence[str], names: Sequence[str], golden: Path | None = None,
    began: Callable[[str, Subject], None] | None = None,
) -> Iterator[Finding]:  # fmt: skip
    """Findings of one case, as they come: one per runner and check. The model is loaded and traced once; `began` is
    told each check before it runs. In this process: for one that may hang or crash, `validate_process.run_checks`.

    A check that raises has FAILED with what it raised; once CUDA is lost, the others are NOT-APPLICABLE.
    """
    import torch

    from bcgbench.validate_subject import Subject, opened

    with torch.no_grad(), opened(case, golden=golden) as trace:
        lost = ""
        for runner in runners:
            subject = Subject(trace, runner)
            for name in names:
                if began is not None:
                    began(name, subject)
                finding = skipped(name, runner, lost) if lost else _run(name, subject)
                lost = lost or ("" if subject.alive else f"{name} ended with CUDA lost; run this check alone (--only)")
                yield finding


def skipped(name: str, runner: str, why: str) -> Finding:
    """Of a check that was not run."""
    return Finding(check=name, runner=runner, ruling="NOT-APPLICABLE", reason=why, details=(), forwards=0,
                   duration_s=0.0)  # fmt: skip


def _run(name: str, subject: Subject) -> Finding:
    start_s, before = time.perf_counter(), subject.forwards
    module, _, attribute = CHECKS[name].target.partition(":")
    check: Callable[[Subject], Answer] = pkgutil.resolve_name(f"{module}:{attribute}")
    try:
        answer = check(subject)
    except (BcgbenchError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        log.debug("%s raised", name, exc_info=True)
        subject.alive = not isinstance(error, ProcessPoisoned)
        answer = Answer(ruling="FAILED", reason=f"{type(error).__name__}: {error}")
    return Finding(
        check=name, runner=subject.runner.name, ruling=answer.ruling, reason=answer.reason, details=answer.details,
        forwards=subject.forwards - before, duration_s=time.perf_counter() - start_s,
    )  # fmt: skip


def ruled(problems: Sequence[str], *, fine: str, details: Sequence[str] = ()) -> Answer:
    """OK with `fine` where there is no problem, else FAILED with the first; all others are details."""
    if not problems:
        return Answer(ruling="OK", reason=fine, details=tuple(details))
    return Answer(ruling="FAILED", reason=problems[0], details=(*problems[1:], *details))


def not_applicable(why: str) -> Answer:
    """Why a check could not be asked here."""
    return Answer(ruling="NOT-APPLICABLE", reason=why)


def exit_code(findings: Sequence[Finding]) -> int:
    """The worst exit code of the failed checks; 0 where all that applied are OK, 6 where none applied."""
    if all(finding.ruling == "NOT-APPLICABLE" for finding in findings):
        return NOTHING
    return worst(CHECKS[finding.check].exit_code for finding in findings if finding.ruling == "FAILED")
