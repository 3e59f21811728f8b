"""`bcgbench predict`: what a breakable CUDA graph would bring, as text or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bcgbench import cli_options as opt
from bcgbench.cli_guard import guarded, say
from bcgbench.cli_options import DEFAULT_RESULTS
from bcgbench.errors import NothingMeasured, UsageError
from bcgbench.predict import Checked, Prediction
from bcgbench.reports import base, formats

if TYPE_CHECKING:
    from bcgbench.types import Case

CheckRun = Annotated[
    str | None,
    typer.Option("--check", metavar="RUN", help="Predict the cases of a stored run and show the error; needs no GPU."),
]


@guarded
def predict(
    *,
    model: opt.Models = None,
    res: opt.Resolutions = None,
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
    seed: opt.Seed = None,
    check: CheckRun = None,
    results: opt.Results = DEFAULT_RESULTS,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> int:
    """Predict the gain of graphs from one short eager profile."""
    from bcgbench import cli_run

    values = {
        "steps": steps, "guidance": guidance, "weights": weights, "source": source, "device": device, "dtype": dtype,
        "seed": seed,
    }  # fmt: skip
    selection = cli_run.Selection(
        suite=suite, only=only, models=model, resolutions=res, prompts=prompt, buckets=buckets, values=values
    )
    if check is None:
        _predicted(cli_run.alone(cli_run.cases_of(selection)), as_json=as_json, quiet=quiet)
        return 0
    if selection != cli_run.Selection(values=dict.fromkeys(values)):
        message = "--check reads the cases of a stored run: give it without --model, --suite and other case options"
        raise UsageError(message)
    typer.echo(checked_text(check, results=results, as_json=as_json))
    return 0


def _predicted(cases: Sequence[Case], *, as_json: bool, quiet: bool) -> None:
    from bcgbench import predict as rule
    from bcgbench.forecast import observe

    documents = []
    for case in cases:
        found = rule.predict(observe(case, on_stage=lambda stage: None if quiet else say(stage)), steps=case.steps)
        if as_json:
            documents.append({"case": case.key} | _plain(found))
        else:
            typer.echo("\n".join(lines(case, found)))
    if as_json:
        typer.echo(json.dumps(documents, indent=2))


def _plain(found: Prediction) -> dict[str, Any]:
    """JSON has no infinity: images that never come are null, and the advice says why."""
    return {name: None if value == math.inf else value for name, value in asdict(found).items()}


def lines(case: Case, found: Prediction) -> Iterator[str]:
    """The prediction for a reader."""
    yield f"{base.case_name(case)}: {found.advice}"
    yield f"  GPU busy  {formats.percent(found.busy)} of the eager step, so at most {formats.ratio(found.ceiling)}"
    yield f"  gain      {formats.ratio(found.gain)} expected, {formats.seconds(found.step_s)} per step"
    if found.memory_bytes is not None:
        yield f"  memory    about {formats.estimated_size(found.memory_bytes)} for the graphs"
    if found.prepare_s is not None and found.images is not None:
        pays = "never" if math.isinf(found.images) else f"after {formats.plural(math.ceil(found.images), 'image')}"
        pays += f" of {formats.plural(case.steps, 'step')}"
        yield f"  pays      {pays}; preparation takes about {formats.duration(found.prepare_s)}"


def checked_text(run: str, *, results: Any, as_json: bool) -> str:
    """Predicted against measured gain of every case of a run. NothingMeasured where none can be predicted."""
    from bcgbench import predict as rule
    from bcgbench import store

    found = rule.check(store.open_run(store.find_run(results, run)).records())
    if not found:
        message = f"run {run} has no case with eager, profiled on a GPU, and bcg: nothing to check the prediction with"
        raise NothingMeasured(message)
    if as_json:
        plain = [{"case": c.case.key, "measured": c.measured, "error": c.error} | _plain(c.prediction) for c in found]
        return json.dumps(plain, indent=2)
    return check_table(found)


CHECK_COLUMNS = ("Model / shape", "GPU busy", "Ceiling", "Predicted", "Measured", "Error", "Advice")


def check_table(found: Sequence[Checked]) -> str:
    """A markdown table, and what it rests on."""
    from bcgbench.reports.markdown_syntax import escape, table

    rows = [
        [
            escape(base.case_name(c.case)), formats.percent(c.prediction.busy),
            formats.ratio(c.prediction.ceiling), formats.ratio(c.prediction.gain), formats.ratio(c.measured),
            f"{100 * c.error:+.1f} %", escape(c.prediction.advice.partition(":")[0]),
        ]
        for c in found
    ]  # fmt: skip
    errors = sorted(abs(c.error) for c in found)
    middle = formats.percent(errors[len(errors) // 2])
    sentence = f"Error of the predicted gain: median {middle}, at most {formats.percent(errors[-1])}."
    unknown = [c for c in found if not c.padded]
    if unknown:
        sentence += (
            f" Eager on padded inputs was not profiled in {len(unknown)} of {len(found)}: what a mask costs there "
        )
        sentence += "is not in the prediction."
    return "\n".join([table(CHECK_COLUMNS, rows), "", sentence])
