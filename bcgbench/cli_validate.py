"""`bcgbench validate`: the checks of `validate.py` on one or more cases, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bcgbench import cli_options as opt
from bcgbench.cli_guard import guarded, say
from bcgbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bcgbench.types import Case
    from bcgbench.validate import Finding

Golden = Annotated[
    Path | None,
    typer.Option("--golden", metavar="RUN", help="Run folder, id or journal whose final outputs these must equal."),
]
Runners = Annotated[
    list[str] | None,
    typer.Option("--runner", metavar="ARMS", help="Arms to check, such as bcg,graph. Default: bcg."),
]
OnlyChecks = Annotated[
    list[str] | None, typer.Option("--only", "-k", metavar="CHECK", help="Only these checks; repeatable. See --list.")
]
ListChecks = Annotated[bool, typer.Option("--list", help="List the checks and exit.")]


@guarded
def validate(
    *,
    model: opt.Models = None,
    res: opt.Resolutions = None,
    runner: Runners = None,
    only: OnlyChecks = None,
    golden: Golden = None,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    prompt: opt.Prompts = None,
    suite: opt.SuiteName = None,
    weights: opt.Weights = None,
    source: opt.Source = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    buckets: opt.Buckets = None,
    break_policy: opt.Break = None,
    seed: opt.Seed = None,
    prior: opt.Prior = None,
    rewrite_prompts: opt.RewritePrompts = False,
    results: opt.Results = opt.DEFAULT_RESULTS,
    list_checks: ListChecks = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> int:
    """Provoke the known failures of captured graphs on a model. Each check has a verdict and a reason."""
    from bcgbench import cli_run
    from bcgbench import validate as checks

    if list_checks:
        typer.echo(listing(as_json=as_json))
        return 0
    names = checks.chosen(opt.split(only))
    selection = cli_run.Selection(
        suite=suite, models=model, resolutions=res, runners=runner or ["bcg"], prompts=prompt, buckets=buckets,
        values={
            "steps": steps, "guidance": guidance, "weights": weights, "source": source, "device": device,
            "dtype": dtype, "break": break_policy, "seed": seed, "prior": prior,
            "rewrite_prompts": rewrite_prompts or None,
        },
    )  # fmt: skip
    golden = golden_run(golden, results=results)
    cases = cli_run.alone(cli_run.cases_of(selection))
    for case in cases:
        refuse_uncaptured(case)
    found = findings(cases, names=names, golden=golden)
    typer.echo(as_text(found, as_json=as_json))
    return max_exit(found)


Found = list[tuple["Case", "list[Finding]"]]


def refuse_uncaptured(case: Case) -> None:
    """UsageError for a runner without graphs, which has nothing to validate, or whose outputs need not be exact."""
    from bcgbench.runners import RUNNERS

    fit = [name for name, row in RUNNERS.items() if row.captured and row.same_arithmetic]
    bad = [name for name in case.runners if name not in fit]
    if bad:
        message = f"--runner {', '.join(bad)}: validate checks arms that replay graphs exactly; give one of "
        message += ", ".join(fit)
        raise UsageError(message)


def golden_run(golden: Path | None, *, results: Path) -> Path | None:
    """The folder that --golden names: a path, else a run id among the results."""
    from bcgbench import store

    if golden is None or golden.exists():
        return golden
    return store.find_run(results, str(golden))


def findings(cases: Sequence[Case], *, names: Sequence[str], golden: Path | None) -> Found:
    """The findings of every case; each is told on stderr as it comes."""
    from bcgbench import validate_process

    found: Found = []
    for case in cases:
        mine: list[Finding] = []
        for finding in validate_process.run_checks(case, runners=case.runners, names=names, golden=golden):
            mine.append(finding)
            if sys.stderr.isatty():
                say(f"{case.model} {finding.runner} {finding.check}: {finding.ruling}")
        found.append((case, mine))
    return found


def max_exit(found: Found) -> int:
    """The worst exit code of all cases."""
    from bcgbench import validate as checks

    return checks.exit_code([finding for _, mine in found for finding in mine])


def as_text(found: Found, *, as_json: bool) -> str:
    """A table per case with the details below it and the total cost in its last line; or one JSON document."""
    if as_json:
        cases = [{"case": case.key, "model": case.model, **_cost(mine), "findings": [asdict(each) for each in mine]}
                 for case, mine in found]  # fmt: skip
        return json.dumps({"exit_code": max_exit(found), "cases": cases}, indent=2, ensure_ascii=False)
    return "\n\n".join(_case_text(case, mine) for case, mine in found)


def _case_text(case: Case, mine: Sequence[Finding]) -> str:
    from bcgbench.cli_info import aligned

    rows = [_row(finding) for finding in mine]
    lines = [f"{case.model} @ {case.resolution}, {case.dtype} on {case.device}", aligned(rows)]
    lines += [f"  {each.check}: {detail}" for each in mine for detail in each.details]
    count = {ruling: sum(each.ruling == ruling for each in mine) for ruling in ("OK", "FAILED", "NOT-APPLICABLE")}
    told = ", ".join(f"{number} {ruling}" for ruling, number in count.items() if number)
    cost = _cost(mine)
    return "\n".join([*lines, f"total: {told}; {cost['forwards']} forwards, {cost['duration_s']:.1f} s"])


def _cost(findings: Sequence[Finding]) -> dict[str, Any]:
    """What all checks of a case took, loading and tracing the model left out."""
    return {
        "forwards": sum(each.forwards for each in findings), "duration_s": sum(each.duration_s for each in findings)
    }  # fmt: skip


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check, "arm": finding.runner, "verdict": finding.ruling, "forwards": finding.forwards,
        "seconds": f"{finding.duration_s:.2f}", "reason": finding.reason,
    }  # fmt: skip


def listing(*, as_json: bool) -> str:
    """One line per check."""
    from bcgbench import validate as checks
    from bcgbench.cli_info import aligned

    rows = [{"check": name, "exit": row.exit_code, "provokes": row.provokes} for name, row in checks.CHECKS.items()]
    return json.dumps(rows, indent=2) if as_json else aligned(rows)
