"""One checked case: a model's defaults filled in, what the model cannot make refused with what it can.

Here: sizes, prompts, defaults of device and dtype. Not here: TOML and axes (`suite.py`), loading a model.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from bcgbench.errors import UsageError
from bcgbench.parallel import parse_parallel
from bcgbench.types import Case, ModelFacts, Weights

SHORT_PROMPT = "A small red cube on a white table"
LONG_PROMPT = (
    "A detailed cinematic scene of a glass observatory above a quiet lake at sunrise, "
    "with soft mist, warm reflections, and crisp architectural detail"
)
DEFAULT_PROMPTS = (SHORT_PROMPT, LONG_PROMPT)
"""The pair of https://github.com/sgl-project/sglang/pull/27436, so that figures can stand beside the published ones."""

LEAST_PROMPTS = 2
"""Request 2 must differ from request 1, or a graph that replays stale inputs looks correct."""


class Resolution(NamedTuple):
    """Pixels, and frames for a video."""

    width_px: int
    height_px: int
    frames: int | None


def make_case(
    model: str,
    *,
    facts: Callable[[str], ModelFacts],
    resolution: str | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    prompts: Sequence[str] | None = None,
    token_counts: Sequence[int] | None = None,
    seed: int = 42,
    dtype: str | None = None,
    device: str | None = None,
    weights: Weights = "pretrained",
    source: str | None = None,
    buckets: Sequence[int] | None = None,
    break_policy: str | None = None,
    runners: Sequence[str] = ("eager", "bcg", "graph"),
    rounds: int = 10,
    profile: bool = True,
    timeout_s: float = 1800.0,
    prior: str | None = None,
    rewrite_prompts: bool = False,
    parallel: str | None = None,
    runner_names: Collection[str] | None = None,
) -> Case:
    """One checked case, what is left out taken from the model. UsageError naming what is possible instead.

    A tiny model runs on the CPU unless a device is given; dtype is float32 on a CPU and bfloat16 on a GPU.
    Without prompts it is the default pair, or one made-up text per token count where there are not two.
    `runner_names` are the runners that exist; None does not check them.
    """
    known = facts(model)
    size = _resolution(resolution, known=known)
    texts = _prompts_for(token_counts, weights=weights) if prompts is None else _checked_prompts(prompts)
    on = device or ("cpu" if known.tiny else "cuda")
    return Case(
        model=model,
        width_px=size.width_px, height_px=size.height_px, frames=size.frames,
        steps=steps or known.steps,
        # As float, because a key is made from the JSON of the fields, where 4 and 4.0 differ.
        guidance=None if guidance is None else float(guidance),
        prompts=texts,
        token_counts=_checked_counts(token_counts, prompts=texts),
        seed=seed,
        dtype=dtype or ("float32" if on == "cpu" else "bfloat16"),
        device=on,
        weights=weights,
        source=source,
        buckets=None if buckets is None else tuple(buckets),
        break_policy=break_policy or known.break_policy,
        runners=_checked_runners(runners, names=runner_names),
        rounds=rounds,
        profile=profile, timeout_s=float(timeout_s), prior=prior, rewrite_prompts=rewrite_prompts,
        parallel=str(parse_parallel(parallel, device=on)),
    )  # fmt: skip


def parse_resolution(text: str) -> Resolution:
    """`512x512` or `768x512x121` (width, height, frames). UsageError for anything else, or a zero."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?", text.strip().lower())
    if match is None:
        raise UsageError(
            f"malformed resolution {text!r}: expected WxH (512x512) or WxHxFRAMES (768x512x121), in pixels"
        )
    width_px, height_px, frames = match.groups()
    return Resolution(int(width_px), int(height_px), int(frames) if frames else None)


def nearest_sizes(width_px: int, height_px: int, *, multiple_px: int) -> tuple[str, ...]:
    """Sizes around `width_px` by `height_px` whose sides are multiples of `multiple_px`, the nearest first."""

    def around(side_px: int) -> set[int]:
        below = side_px // multiple_px * multiple_px
        return {max(below, multiple_px), side_px if below == side_px else below + multiple_px}

    sizes = itertools.product(around(width_px), around(height_px))
    nearest = sorted(sizes, key=lambda size: (abs(size[0] - width_px) + abs(size[1] - height_px), size))
    return tuple(f"{width}x{height}" for width, height in nearest)


def _resolution(text: str | None, *, known: ModelFacts) -> Resolution:
    """The asked size, or the model's own; never rounded."""
    size = parse_resolution(text) if text else Resolution(known.width_px, known.height_px, known.frames)
    if size.frames and known.frames is None:
        raise UsageError(f"{text}: {known.id} makes images, so give WxH without frames")
    if size.width_px % known.multiple_px or size.height_px % known.multiple_px:
        near = nearest_sizes(size.width_px, size.height_px, multiple_px=known.multiple_px)
        raise UsageError(
            f"{size.width_px}x{size.height_px} is not possible: {known.id} needs multiples of {known.multiple_px} "
            f"pixels; nearest: {', '.join(near)}"
        )
    return size._replace(frames=size.frames or known.frames)


def _checked_prompts(prompts: Sequence[str]) -> tuple[str, ...]:
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise UsageError(f"prompt {number} is empty: give some text, or leave prompts out for the built-in pair")
    if len(set(prompts)) < LEAST_PROMPTS:
        raise UsageError(
            f"expected at least {LEAST_PROMPTS} different prompts, got {len(set(prompts))}: request 2 must differ from "
            f"request 1 to show stale inputs; add one of another length, e.g. {SHORT_PROMPT!r}"
        )
    return tuple(prompts)


def _prompts_for(counts: Sequence[int] | None, *, weights: Weights) -> tuple[str, ...]:
    """The default pair, or a name for each of another number of lengths, which no tokenizer would count so."""
    if counts is None or len(counts) == len(DEFAULT_PROMPTS):
        return DEFAULT_PROMPTS
    if weights != "random":
        raise UsageError("token_counts without prompts stand for prompts of random weights only: give prompts")
    return _checked_prompts([f"a prompt of {count} tokens" for count in counts])


def _checked_counts(counts: Sequence[int] | None, *, prompts: Sequence[str]) -> tuple[int, ...] | None:
    if counts is not None and len(counts) != len(prompts):
        raise UsageError(f"token_counts has {len(counts)} entries for {len(prompts)} prompts: give one per prompt")
    return None if counts is None else tuple(counts)


def _checked_runners(runners: Sequence[str], *, names: Collection[str] | None) -> tuple[str, ...]:
    for runner in runners:
        if names is not None and runner not in names:
            near = difflib.get_close_matches(runner, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UsageError(f"unknown runner {runner!r}{hint} There are {', '.join(names)}")
    return tuple(dict.fromkeys(runners))
