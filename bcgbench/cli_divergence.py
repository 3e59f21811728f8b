"""`bcgbench divergence`: options to a case, the finding as text or JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from bcgbench import cli_options as opt
from bcgbench.cli_guard import guarded, say
from bcgbench.errors import UsageError
from bcgbench.faults import injected

if TYPE_CHECKING:
    from bcgbench.divergence import CaseDivergence, ReplayFinding
    from bcgbench.divergence_align import Contrast
    from bcgbench.divergence_modules import ModuleFinding
    from bcgbench.types import Case

DIFFERS, NOT_ENGAGED = 3, 4
Arms = Annotated[
    list[str] | None, typer.Argument(metavar="A B", help="Two arms, see `list runners`. Default: eager-padded bcg.")
]
Fault = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Put a fault of `selftest --list` into bcgbench, to see how it is found."),
]


@guarded
def divergence(
    arms: Arms = None,
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
    break_policy: opt.Break = None,
    seed: opt.Seed = None,
    prior: opt.Prior = None,
    rewrite_prompts: opt.RewritePrompts = False,
    fault: Fault = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> int:
    """Find where two arms differ first: call, module, operation."""
    from bcgbench import cli_run
    from bcgbench.runners import RUNNERS

    names = arms or ["eager-padded", "bcg"]
    if len(names) != 2:  # noqa: PLR2004 - a pair
        message = f"expected two arms such as `eager-padded bcg`, got {len(names)}: {' '.join(names)}"
        raise UsageError(message)
    if other := [name for name in names if name in RUNNERS and not RUNNERS[name].same_arithmetic]:
        message = (
            f"{', '.join(other)}: computes in another arithmetic than eager, so that every call differs by rounding"
        )
        raise UsageError(f"{message}; `run` judges it by a reference in float32")
    values = {
        "steps": steps, "guidance": guidance, "weights": weights, "source": source, "device": device, "dtype": dtype,
        "break": break_policy, "seed": seed, "prior": prior, "rewrite_prompts": rewrite_prompts or None,
    }  # fmt: skip
    selection = cli_run.Selection(
        suite=suite, only=only, models=model, resolutions=res, runners=names, prompts=prompt, buckets=buckets,
        values=values,
    )  # fmt: skip
    cases = cli_run.alone(cli_run.cases_of(selection))
    with contextlib.nullcontext() if fault is None else injected(fault):
        return _compared(cases, (names[0], names[1]), as_json=as_json, quiet=quiet)


def _compared(cases: Sequence[Case], arms: tuple[str, str], *, as_json: bool, quiet: bool) -> int:
    """Compare and show each case as it comes; the exit code of all."""
    from bcgbench.codec import to_json
    from bcgbench.divergence import diverge
    from bcgbench.verdict import worst

    found = []
    for case in cases:
        found.append(diverge(case, arms=arms, on_stage=lambda stage: None if quiet else say(stage)))
        if not as_json:
            typer.echo("\n".join(lines(found[-1])))
    if as_json:
        typer.echo(json.dumps([to_json(each) | {"diverged": each.diverged} for each in found], indent=2))
    return worst(_code(each) for each in found)


def _code(found: CaseDivergence) -> int:
    return DIFFERS if found.diverged else NOT_ENGAGED if found.fallbacks else 0


def lines(found: CaseDivergence) -> Iterator[str]:
    """The finding for a reader."""
    a, b = found.arms
    yield f"{found.model} {found.resolution} {found.dtype}: {b} against {a}"
    equal = f"{found.calls_equal} of {found.calls} transformer calls are bit-equal on identical inputs"
    yield f"  calls     {equal}"
    if found.rounding_limit is not None:
        seen = f", up to {found.rounding_seen:.2g} seen" if found.rounding_seen else ""
        yield f"            one arm alone pads: {found.rounding_limit:g} of the size counts as rounding{seen}"
    yield from (f"  eager     {text}" for text in found.fallbacks)
    if found.call is not None:
        call = found.call
        yield f"  call      {call.call}: prompt {call.prompt}, step {call.step}, branch {call.branch}, {call.denoiser}"
        yield from _contrast(call.contrast, a=a, b=b)
    if found.replay is not None:
        yield from _replay(found.replay)
    if found.module is not None:
        yield from _module(found.module, a=a, b=b)
    elif found.call is not None and found.replay is None:
        yield "  module    none of the submodules' outputs: it arises at the end of the outermost forward"
    if found.latents is not None:
        yield f"  latents   first differ after step {found.latents.step} of prompt {found.latents.prompt}, run freely"
        yield from _contrast(found.latents.contrast, a=a, b=b)
    yield f"  {_verdict(found)}"
    memory = f"{found.device_peak_bytes / 1e9:.2f} GB of GPU memory, " if found.device_peak_bytes else ""
    memory += f"{found.host_peak_bytes / 1e9:.2f} GB of host memory at most"
    time = f"{found.time_s:.1f} s, {found.load_s:.1f} s of it to load"
    yield f"  took      {time}; {found.forwards} forwards; {memory}"


def _verdict(found: CaseDivergence) -> str:
    if not found.diverged and found.fallbacks:
        return "INVALID: no divergence was seen, but calls of a graph arm ran eagerly and say nothing about its graph"
    if not found.diverged:
        what = " beyond rounding" if found.rounding_limit is not None and found.calls_equal < found.calls else ""
        return f"no divergence{what}"
    if found.call is None:
        return "DIVERGED between the calls: on identical inputs all are equal; an output was overwritten after its call"
    return "DIVERGED"


def _module(found: ModuleFinding, *, a: str, b: str) -> Iterator[str]:
    yield f"  module    {found.module or '(the outermost forward)'} ({found.kind})"
    if found.note:
        yield f"            {found.note}"
        return
    given = f"its input {', '.join(found.inputs)} differs already" if found.inputs else "its inputs are alike"
    yield f"            {given}; the first output that differs is that of {found.seen_at}"
    yield f"  operation {found.operation or 'not known'}"
    if found.contrast is not None:
        yield from _contrast(found.contrast, a=a, b=b)
    if found.uncompared:
        yield f"            not compared, unlike in more than rows: {', '.join(found.uncompared)}"
    if found.floor is not None:
        yield f"            floor there: {found.floor:.3g} between two eager runs"


def _replay(found: ReplayFinding) -> Iterator[str]:
    told = {"right": "differs, capture does not: a new capture of this call gives the eager output",
            "alike": "differs from eager, and a new capture's in the same way",
            "other": "differs from a new capture, and that from eager"}  # fmt: skip
    yield f"  replay    of {found.arm} {told[found.new_capture]}"
    at = "" if found.step is None else " inputs:" if found.step < 0 else f" step {found.step} of {found.steps}:"
    yield f"            first wrong:{at} {found.what}{f', {found.where}' if found.where else ''}"
    if found.contrast is not None:
        yield from _contrast(found.contrast, a="returned" if found.new_capture == "alike" else "capture", b="replay")


def _contrast(found: Contrast, *, a: str, b: str) -> Iterator[str]:
    d = found.difference
    size = f"max {d.max_abs:.3g}, mean {d.mean_abs:.3g}, rms {d.rms:.3g}, {found.share:.2g} of its size"
    yield f"            {d.differing} of {d.total} values differ: {size}"
    box = " x ".join(f"{first}..{last}" for first, last in d.bounding_box or ())
    yield f"            rows compared: {found.rows}; within {box}"
    index = ", ".join(map(str, found.index))
    yield f"            at [{index}]: {a} {found.value_a}, {b} {found.value_b}"
