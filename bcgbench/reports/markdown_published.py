"""The folded block that sets published figures beside ours, with one line per case on why they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bcgbench.metrics import METRICS
from bcgbench.parallel import parse_parallel
from bcgbench.published import FIGURES
from bcgbench.reports import base, formats
from bcgbench.reports.markdown_syntax import escape, folded, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bcgbench.published import Figure, Pair
    from bcgbench.reports.base import CaseView
    from bcgbench.types import Record

COLUMNS = ("Model / shape", "Figure", "Published (Eager -> BCG)", "Here (Eager -> BCG)")
ARMS = ("eager", "bcg")
HOST_BOUND = 0.9
"""GPU busy below this share of an eager step: the host sets the pace, and every host another one."""


def published(views: tuple[CaseView, ...]) -> list[str]:
    """The block, or nothing where no measured case is one that somebody published."""
    matches = [(view, figure) for view in views if view.timed for figure in FIGURES if figure.fits(view.case)]
    rows = [row for view, figure in matches for row in _rows(view, figure)]
    lines = [f"- {escape(view.name)}: {escape(explanation(view, figure))}. {figure.source}" for view, figure in matches]
    return [folded("Published figures", f"{table(COLUMNS, rows)}\n\n" + "\n".join(lines))] if matches else []


def _rows(view: CaseView, figure: Figure) -> Iterator[list[str]]:
    there = f" ({formats.plural(figure.steps, 'step')})" if figure.steps else ""
    here = f" ({formats.plural(view.case.steps, 'step')})"
    figures: tuple[tuple[str, str, Pair | None, bool], ...] = (
        ("Denoise", "denoise_s", figure.denoise_s, True),
        ("Total", "end_to_end_s", figure.total_s, True),
        ("Step", "step_s", figure.per_step_s, False),
        ("GPU busy", "gpu_busy", figure.busy, False),
        ("Launches per step", "launches_per_step", figure.launches_per_step, False),
        ("Peak memory", "peak_allocated_bytes", figure.peak_bytes, False),
    )
    for name, metric, pair, of_all_steps in figures:
        if pair is not None:
            ends = (there, here) if of_all_steps else ("", "")
            ratio = (figure.speedup if metric == "denoise_s" else None) or pair[0] / pair[1]
            published_text, own_text = _published(metric, pair, ratio=ratio) + ends[0], _own(view, metric) + ends[1]
            yield [escape(text) for text in (view.name, name, published_text, own_text)]


def _published(metric: str, pair: Pair, *, ratio: float) -> str:
    unit = METRICS[metric].unit
    eager, bcg = (base.with_unit(value, unit) for value in pair)
    return f"{eager} -> {bcg}" + (f", {formats.ratio(ratio)}" if unit == "s" else "")


def _own(view: CaseView, metric: str) -> str:
    records = [_arm(view, runner) for runner in ARMS]
    eager, bcg = (base.metric_text(view, record, metric) for record in records)
    values = [METRICS[metric].read(record) if record and record.status == "OK" else None for record in records]
    ratio = values[0] / values[1] if METRICS[metric].unit == "s" and values[0] and values[1] else None
    return f"{eager} -> {bcg}" + (f", {formats.ratio(ratio)}" if ratio else "")


def explanation(view: CaseView, figure: Figure) -> str:
    """Why the figures differ, most of it from the facts of both: machine, engine, steps, host, compute floor."""
    derived = (*_machines(view, figure), *_steps(view, figure), *_host(view), *_memory(view, figure), *_floor(figure))
    return "; ".join(filter(None, (*derived, figure.note)))


def _machines(view: CaseView, figure: Figure) -> Iterator[str]:
    environment = next((record.environment for record in view.arms.values() if record.environment), None)
    gpu = environment.gpu.name if environment and environment.gpu else "an unknown GPU"
    there = figure.gpu if figure.gpus == 1 else f"{figure.gpus} {figure.gpu}"
    ours = parse_parallel(view.case.parallel).ranks
    if figure.gpus != ours or figure.gpu not in gpu:
        yield f"{there} there, {f'{ours} ' if ours > 1 else 'one ' if figure.gpus > 1 else ''}{gpu} here"
    version = environment.packages.get("diffusers", "") if environment else ""
    yield f"{figure.engine} and its kernels there, diffusers {version}".rstrip() + " here"


def _steps(view: CaseView, figure: Figure) -> Iterator[str]:
    if figure.denoise_s and figure.steps and figure.steps != view.case.steps:
        yield f"{figure.steps} steps there, {view.case.steps} here, so the step is what compares"


def _host(view: CaseView) -> Iterator[str]:
    eager = _arm(view, "eager")
    busy = METRICS["gpu_busy"].read(eager) if eager else None
    if eager is None or busy is None or busy >= HOST_BOUND:
        return
    launch_s = eager.environment.host_launch_s if eager.environment else None
    per_launch = f" and {formats.seconds(launch_s)} per launch" if launch_s else ""
    share = f"busy {formats.percent(busy)}{per_launch}"
    yield f"eager waits for the host here ({share}), so it and the speedup are the host's"


def _memory(view: CaseView, figure: Figure) -> Iterator[str]:
    if figure.peak_bytes and view.synthetic:
        yield "random weights here, so no text encoder in memory"


def _floor(figure: Figure) -> Iterator[str]:
    floor_s = figure.floor_s
    if floor_s is None or figure.denoise_s is None or figure.parameters is None:
        return
    for runner, denoise_s in zip(ARMS, figure.denoise_s, strict=True):
        if denoise_s < floor_s:
            work = f"2 x {figure.parameters / 1e9:.2f} B parameters x {figure.rows} rows x {figure.steps} steps"
            yield (
                f"the published {runner} denoise of {formats.seconds(denoise_s)} is below the compute floor of "
                f"{formats.seconds(floor_s)} ({work} at a {figure.gpu}'s dense bf16 peak): it cannot hold that work"
            )


def _arm(view: CaseView, runner: str) -> Record | None:
    return next((record for record in view.arms.values() if record.runner == runner), None)
