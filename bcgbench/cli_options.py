"""The options of the command line: their names and help texts once, and the text of an option turned into a value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from bcgbench.errors import UsageError

LATEST = "latest"
NATIVE = "native"
DEFAULT_RESULTS = Path("results")

Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="MODEL", help="Model id or local folder; repeatable. See `list models`."),
]
Resolutions = Annotated[
    list[str] | None, typer.Option("--res", metavar="WxH", help="Pixels, as WxH or WxHxFRAMES; repeatable.")
]
Runners = Annotated[
    list[str] | None,
    typer.Option("--runner", metavar="ARMS", help="Arms to measure, see `list runners`. Default: eager,bcg,graph."),
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", min=1, help="Denoise steps. Default: the model's.")]
Guidance = Annotated[
    float | None, typer.Option("--guidance", metavar="SCALE", help="Guidance scale. Default: the model's.")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="Prompt; repeatable. A single one is joined by a built-in one of another length.",
    ),
]
SuiteName = Annotated[
    str | None,
    typer.Option("--suite", metavar="NAME|PATH", help="Built-in suite or TOML file. Other flags override it."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        "-k",
        metavar="TEXT",
        help="Only cases whose MODEL @ WxH contains TEXT; a whole model id is that model alone; repeatable.",
    ),
]
Weights = Annotated[
    str | None, typer.Option("--weights", metavar="KIND", help="pretrained or random. Default: pretrained.")
]
Source = Annotated[
    str | None, typer.Option("--source", metavar="FOLDER", help="Local diffusers folder with the weights of MODEL.")
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", help="cuda or cpu (a tape: no speed). Default: cuda; cpu for tiny models."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="bfloat16, float16 or float32. Default: bfloat16; float32 on a CPU."),
]
Buckets = Annotated[
    str | None,
    typer.Option(
        "--buckets",
        metavar="LENGTHS",
        help="Prompt lengths to pad to, such as 64,128; 'native' for no padding. Default: the model's.",
    ),
]
Break = Annotated[
    str | None,
    typer.Option(
        "--break",
        metavar="POLICY",
        help="What bcg runs eagerly: none, or attention, auto (only what cannot be captured), best (the faster of the "
        "two) and dotted names of functions, separated by commas. Default: the model's.",
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Seed of initial latents and random weights. Default: 42.")
]
Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds", metavar="N", min=1, help="Measured images per arm; a verdict on speed needs 6. Default: 10."
    ),
]
NoProfile = Annotated[bool, typer.Option("--no-profile", help="Skip the separate profiling pass.")]
Prior = Annotated[
    str | None,
    typer.Option(
        "--prior", metavar="FILE", help="Replay the noise, sampled tokens and rewritten prompts that a run saved."
    ),
]
Parallel = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="KIND:N",
        help="Share each request among N processes, one GPU each: cfg:2 by guidance branch, context:N by sequence.",
    ),
]
RewritePrompts = Annotated[
    bool, typer.Option("--rewrite-prompts", help="Let the model rewrite its prompts first, once for all arms.")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Seconds after which a case is ended. Default: 1800."),
]
Results = Annotated[Path, typer.Option("--results", metavar="DIR", help="Folder of run folders.")]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="[RUN]", help="Finish a run; the latest if RUN is left out.")
]
Executor = Annotated[
    Literal["local", "ray"],
    typer.Option("--executor", help="Where cases run: one after the other here, or as tasks of a Ray cluster."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 5 where a verdict is inconclusive.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Log in detail; show a traceback on errors.")]
RunRef = Annotated[str, typer.Option("--run", metavar="RUN", help="Run id or folder.")]
Arm = Annotated[
    list[str] | None, typer.Option("--arm", metavar="ARM", help="Arms to pair when two runs are compared; repeatable.")
]
Format = Annotated[str, typer.Option("--format", "-f", metavar="NAME", help="table, markdown, json or csv.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead of stdout.")
]


class ResumableCommand(TyperCommand):
    """A command whose `--resume` may stand without a value, which Typer's options cannot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse after a bare `--resume` was given the value `latest`."""
        return super().parse_args(ctx, with_latest(args))


def with_latest(args: Sequence[str]) -> list[str]:
    """The arguments with `latest` after a `--resume` that ends the line or is followed by another option."""
    filled = []
    for argument, following in zip(args, [*args, "-"][1:], strict=True):
        filled.append(argument)
        if argument == "--resume" and following.startswith("-"):
            filled.append(LATEST)
    return filled


def split(values: Sequence[str] | None) -> tuple[str, ...]:
    """`["eager,bcg", "graph"]` to `("eager", "bcg", "graph")`, without repeats."""
    names = [name.strip() for value in values or () for name in value.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def parse_buckets(text: str | None) -> list[int] | None:
    """`64,128` to [64, 128]; `native` to []; None, which is the model's own policy, stays."""
    if text is None:
        return None
    if text.strip().lower() == NATIVE:
        return []
    try:
        buckets = [int(part) for part in text.split(",")]
    except ValueError:
        buckets = []
    if not buckets or min(buckets) <= 0:
        message = f"--buckets {text!r}: expected lengths above 0 such as 64,128, or {NATIVE!r} for none"
        raise UsageError(message)
    return sorted(set(buckets))


def parse_prompts(values: Sequence[str] | None) -> list[str] | None:
    """At least two prompts, or None if none was given; a single prompt gets the built-in one of the other length."""
    from bcgbench.suite import LONG_PROMPT, SHORT_PROMPT

    if not values:
        return None
    if any(not value.strip() for value in values):
        message = "--prompt is empty: give some text, or leave the option out for the built-in short and long prompt"
        raise UsageError(message)
    if len(values) > 1:
        return list(values)
    own = values[0]
    is_short = len(own) <= (len(SHORT_PROMPT) + len(LONG_PROMPT)) / 2
    return [own, LONG_PROMPT] if is_short else [SHORT_PROMPT, own]
