"""The command line: parse, call, print, exit code. Data on stdout; progress, log and warnings on stderr.

Only this module and its parts `cli_*.py` print. Nothing heavy is imported before a command needs it: torch only in the
worker process that `run` starts.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bcgbench import __version__, cli_divergence, cli_predict, cli_validate
from bcgbench import cli_options as opt
from bcgbench.cli_guard import INTERRUPTED, guarded, say
from bcgbench.cli_options import DEFAULT_RESULTS
from bcgbench.cli_selftest import selftest
from bcgbench.errors import NothingMeasured, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from bcgbench.cli_run import Selection
    from bcgbench.reports.base import Report
    from bcgbench.store import Run

EXAMPLES = """
Benchmark and validate diffusion transformers under breakable CUDA graphs (BCG).

\b
bcgbench run --model Qwen/Qwen-Image --res 512x512
bcgbench compare eager bcg
bcgbench report --format markdown

\b
Exit codes: 0 fine, 1 slower, 2 bad input, 3 outputs differ, 4 invalid,
5 inconclusive (--strict), 6 nothing measured, 7 environment or out of memory,
130 interrupted.
"""

app = typer.Typer(
    help=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: no escape sequences, and rich takes 0.1 s to import
    pretty_exceptions_enable=False,  # its traceback shows local variables, which may hold tokens
)


def main() -> None:
    """Entry point of the console script."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        from bcgbench.types import SCHEMA_VERSION

        typer.echo(f"bcgbench {__version__} (result schema {SCHEMA_VERSION})")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command(cls=opt.ResumableCommand)
@guarded
def run(
    *,
    model: opt.Models = None,
    res: opt.Resolutions = None,
    runner: opt.Runners = None,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    prompt: opt.Prompts = None,
    suite: opt.SuiteName = None,
    only: opt.Only = None,
    weights: opt.Weights = None,
    source: opt.Source = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    buckets: opt.Buckets = None,
    break_policy: opt.Break = None,
    seed: opt.Seed = None,
    rounds: opt.Rounds = None,
    no_profile: opt.NoProfile = False,
    prior: opt.Prior = None,
    rewrite_prompts: opt.RewritePrompts = False,
    parallel: opt.Parallel = None,
    timeout: opt.Timeout = None,
    results: opt.Results = DEFAULT_RESULTS,
    resume: opt.Resume = None,
    executor: opt.Executor = "local",
    strict: opt.Strict = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> int:
    """Measure models under several arms and show the report."""
    from bcgbench import cli_run

    _require(executor)
    selection = cli_run.Selection(
        suite=suite, only=only, models=model, resolutions=res, runners=runner, prompts=prompt, buckets=buckets,
        values={
            "steps": steps, "guidance": guidance, "weights": weights, "source": source, "device": device,
            "dtype": dtype, "break": break_policy, "seed": seed, "rounds": rounds, "timeout_s": timeout,
            "profile": False if no_profile else None, "prior": prior, "rewrite_prompts": rewrite_prompts or None,
            "parallel": parallel,
        },
    )  # fmt: skip
    if resume is not None:
        opened = _resumed(selection, results=results, reference=resume)
    else:
        command = shlex.join(["bcgbench", *sys.argv[1:]])
        cases = cli_run.cases_of(selection)
        opened = cli_run.start(cases, results=results, command=command, suite=suite)
    return _measured(opened, strict=strict, as_json=as_json, quiet=quiet, executor=executor)


def _require(executor: str) -> None:
    """What the executor needs is asked for before there is a run folder, which would be the latest run."""
    if executor == "ray":
        from bcgbench.worker_ray import require_ray

        require_ray()


def _resumed(selection: Selection, *, results: Path, reference: str) -> Run:
    from bcgbench import cli_run, store

    nothing = cli_run.Selection(values=dict.fromkeys(selection.values))
    if selection != nothing:
        message = "--resume finishes a run as it was asked for: give it without --model, --suite and other case options"
        raise UsageError(message)
    return store.open_run(store.find_run(results, reference), write=True)


def _measured(opened: Run, *, strict: bool, as_json: bool, quiet: bool, executor: str) -> int:
    from bcgbench import cli_progress, cli_run
    from bcgbench.reports import base

    say(f"run folder: {opened.path}")
    shown = cli_progress.display(sys.stderr, quiet=quiet, cases=opened.info.cases)
    try:
        outcome = cli_run.execute(opened, display=shown, strict=strict, on_stop=say, executor=executor)
    finally:
        opened.close()
    _print(outcome.report, "json" if as_json else "table")
    say(f"report: {opened.path / 'report.md'}")
    if outcome.interrupted:
        say(f"resume with: bcgbench run --resume {opened.info.run_id} --results {shlex.quote(str(opened.path.parent))}")
        return INTERRUPTED
    return base.exit_code(outcome.report)


def _print(report: Report, style: str) -> None:
    from bcgbench.reports import renderer

    typer.echo(renderer(style)(report), nl=False)


@app.command()
@guarded
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="An arm such as eager, or a run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="An arm such as bcg, or a run.")],
    reference: Annotated[str | None, typer.Argument(metavar="RUN", help="Run of the two arms, like --run.")] = None,
    *,
    run: opt.RunRef = opt.LATEST,
    arm: opt.Arm = None,
    results: opt.Results = DEFAULT_RESULTS,
    strict: opt.Strict = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> int:
    """Judge arm B against arm A, or run B against run A."""
    from bcgbench import cli_info
    from bcgbench.reports import base

    report = cli_info.comparison(a, b, results=results, run=reference or run, arms=opt.split(arm), strict=strict)
    if as_json:
        _print(report, "json")
    else:
        typer.echo(cli_info.comparison_text(report))
    return base.exit_code(report)


@app.command()
@guarded
def report(
    reference: Annotated[str, typer.Argument(metavar="RUN", help="Run id or folder.")] = opt.LATEST,
    *,
    style: opt.Format = "table",
    output: opt.Output = None,
    results: opt.Results = DEFAULT_RESULTS,
    debug: opt.Debug = False,
) -> int:
    """Show a run as a table, markdown, JSON or CSV."""
    from bcgbench import cli_run, store
    from bcgbench.reports import renderer

    render = renderer(style)
    stored = cli_run.report_of(store.open_run(store.find_run(results, reference)))
    if not stored.records:
        message = f"run {stored.info.run_id} holds no record yet: finish it with `bcgbench run --resume {reference}`"
        raise NothingMeasured(message)
    text = render(stored)
    if output is None:
        typer.echo(text, nl=False)
        return 0
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {output}: {error.strerror}; choose another --output"
        raise UsageError(message) from error
    say(f"written: {output}")
    return 0


@app.command("list")
@guarded
def list_(
    what: Annotated[Literal["models", "runners", "metrics", "suites", "runs"], typer.Argument(help="What to list.")],
    *,
    results: opt.Results = DEFAULT_RESULTS,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> int:
    """List what there is: models, runners, metrics, suites or runs."""
    from bcgbench import cli_info

    typer.echo(cli_info.listing(what, results=results, as_json=as_json))
    return 0


@app.command()
@guarded
def plan(
    *,
    model: opt.Models = None,
    res: opt.Resolutions = None,
    runner: opt.Runners = None,
    steps: opt.Steps = None,
    guidance: opt.Guidance = None,
    suite: opt.SuiteName = None,
    only: opt.Only = None,
    weights: opt.Weights = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    rounds: opt.Rounds = None,
    no_profile: opt.NoProfile = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> int:
    """Estimate memory and time of a run without touching a GPU."""
    from bcgbench import cli_info, cli_run

    values = {
        "steps": steps, "guidance": guidance, "weights": weights, "device": device, "dtype": dtype, "rounds": rounds,
        "profile": False if no_profile else None,
    }  # fmt: skip
    selection = cli_run.Selection(suite=suite, only=only, models=model, resolutions=res, runners=runner, values=values)
    typer.echo(cli_info.plan_text(cli_run.cases_of(selection), as_json=as_json))
    return 0


@app.command()
@guarded
def doctor(
    *,
    results: opt.Results = DEFAULT_RESULTS,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 7 where a check fails.")] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> int:
    """Check that this machine has what a run needs."""
    from bcgbench import cli_info

    text, fine = cli_info.diagnosis(results=results, as_json=as_json)
    typer.echo(text)
    return 7 if strict and not fine else 0


app.command()(cli_predict.predict)
app.command()(cli_validate.validate)
app.command()(cli_divergence.divergence)
app.command()(guarded(selftest))
