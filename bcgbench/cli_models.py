"""The text of `list models`: what each model is, and what published runs prove of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bcgbench import validation
from bcgbench.cli_options import DEFAULT_RESULTS
from bcgbench.reports import formats, table

if TYPE_CHECKING:
    from bcgbench.types import ModelFacts
    from bcgbench.validation import Evidence, State

KINDS: tuple[validation.Kind, ...] = get_args(validation.Kind)
UNKNOWN = "unknown"
Row = dict[str, str]


def listing(results: Path, *, as_json: bool) -> str:
    """Every model with its default, memory and length policy, and since when its graphs are known to be exact.

    The runs are those of `results`, or the published ones where it is left at its default.
    """
    from bcgbench import models

    folder = validation.PUBLISHED if results == DEFAULT_RESULTS else results
    state = validation.read(folder)
    known = [models.facts(name) for name in models.MODELS]
    if as_json:
        return json.dumps([_document(facts, state) for facts in known], indent=2, ensure_ascii=False)
    numbers = _numbers(state)
    rows = {facts.id: _row(facts, state, numbers=numbers) for facts in known}
    return "\n".join([*_table(rows), "", *_legend(state, numbers)])


def _document(facts: ModelFacts, state: State) -> dict[str, Any]:
    found = {kind: state.of(facts.id, kind) for kind in KINDS}
    about = {"model": facts.id, **_about(facts), "memory_bytes": facts.memory_bytes}
    return about | {f"{kind} exact": each and asdict(each) for kind, each in found.items()}


def _about(facts: ModelFacts) -> Row:
    shape = f"{facts.width_px}x{facts.height_px}" + (f"x{facts.frames}" if facts.frames else "")
    return {
        "default": f"{shape}, {formats.plural(facts.steps, 'step')}",
        "memory": formats.estimated_size(facts.memory_bytes),
        "prompt length": facts.policy,
    }


def _row(facts: ModelFacts, state: State, *, numbers: dict[str, int]) -> Row:
    def cell(evidence: Evidence | None) -> str:
        if evidence is None:
            return "no run" if state.runs else UNKNOWN
        return f"{evidence.date if evidence.exact else 'NOT EXACT'} [{numbers[evidence.run]}]"

    return _about(facts) | {f"{kind} exact": cell(state.of(facts.id, kind)) for kind in KINDS}


def _table(rows: dict[str, Row]) -> Iterator[str]:
    """A model's id on a line of its own, since some are half a line long, its columns below."""
    names = list(next(iter(rows.values())))
    widths = {name: max(len(name), *(len(row[name]) for row in rows.values())) for name in names}

    def line(row: Row) -> str:
        return "  " + "  ".join(f"{row[name]:<{widths[name]}}" for name in names).rstrip()

    yield "model"
    yield line({name: name for name in names})
    for model, row in rows.items():
        yield from (model, line(row))


def _numbers(state: State) -> dict[str, int]:
    """A number for each run that some evidence is from, the oldest first."""
    return {run: number for number, run in enumerate(sorted({each.run for each in state.found.values()}), start=1)}


def _legend(state: State, numbers: dict[str, int]) -> Iterator[str]:
    if not state.runs:
        yield table.wrapped(
            "exact: unknown, because there are no published runs here. They are in the repository of bcgbench, not in "
            "an installed package; --results DIR reads those of a folder.",
            indent=2,
        )
        return
    yield table.wrapped(
        "exact: day on which a published run showed bcg bit-equal to eager on the same padded inputs, every call "
        "replayed. On a CPU the model's tiny form with the same adapter and pipeline, on a GPU the full size with "
        "random weights or released ones.",
        indent=2,
    )
    by_run = {each.run: each for each in state.found.values()}
    for run, number in numbers.items():
        of = by_run[run]
        versions = f"torch {of.torch}, diffusers {of.diffusers}, bcgbench {of.commit}"
        yield table.wrapped(f"[{number}] {run}: {of.device}, {versions}", indent=2)
    yield from (f"cannot be read: {name}" for name in state.unreadable)
