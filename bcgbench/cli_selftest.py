"""`bcgbench selftest`: faults put into the tool itself, and whether it found them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bcgbench import cli_options as opt
from bcgbench.cli_guard import say
from bcgbench.cli_info import aligned
from bcgbench.errors import EnvironmentFault, UsageError
from bcgbench.faults import FAULTS, selected, skipped
from bcgbench.reports.formats import duration, plural

if TYPE_CHECKING:
    from bcgbench.faults.fault import Fault
    from bcgbench.selftest import Outcome

MISSED = 4
"""Exit code where a fault was not found as it should be, or something alarmed without one."""


def selftest(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", "-k", metavar="TEXT", help="Only faults whose PART/NAME contains TEXT; repeatable."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Show the faults, and which cannot be shown here; run nothing.")
    ] = False,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="cpu (the tape), or cuda, which shows all faults.")
    ] = "cpu",
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> int:
    """Put faults into the tool and check that each is found."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r}: expected cpu or cuda")
    faults = selected(only or ())
    if not faults:
        parts = ", ".join(dict.fromkeys(fault.part for fault in FAULTS.values()))
        raise UsageError(f"no fault has {' or '.join(map(repr, only or ()))} in its PART/NAME; parts are {parts}")
    left_out = {n: why for n, fault in faults.items() if (why := skipped(fault, device=device, chosen=bool(only)))}
    if listed:
        typer.echo(_listing(faults, left_out, as_json=as_json))
        return 0
    shown = {name: fault for name, fault in faults.items() if name not in left_out}
    with _unheard(debug=debug):
        outcomes = _run(shown, device=device, controls=not only, quiet=quiet)
    typer.echo(_document(outcomes, left_out) if as_json else _text(outcomes, left_out))
    return 0 if all(outcome.passed for outcome in outcomes) else MISSED


def _run(faults: Mapping[str, Fault], *, device: str, controls: bool, quiet: bool) -> list[Outcome]:
    import torch

    from bcgbench import selftest as runner

    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault("torch finds no CUDA device here: leave --device out to test on the CPU")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broken = runner.run_faults(faults, device=device, folder=folder)
        with runner.controls(device=device, folder=folder) if controls else contextlib.nullcontext(()) as unbroken:
            # on a CPU a process beside this one runs the latter; on a GPU a fault may cost the process its device
            for running in (broken, unbroken) if device == "cpu" else (unbroken, broken):
                outcomes += _told(running, quiet=quiet)
    return outcomes


def _told(running: Iterable[Outcome], *, quiet: bool) -> Iterator[Outcome]:
    """Each outcome as it comes, told on stderr."""
    for outcome in running:
        if not quiet:
            good = "quiet" if outcome.is_control else "caught"
            say(f"{good if outcome.passed else 'NOT ' + good}: {outcome.name} ({duration(outcome.duration_s)})")
        yield outcome


@contextlib.contextmanager
def _unheard(*, debug: bool) -> Iterator[None]:
    """As `selftest.unheard`, until the block ends."""
    from bcgbench import selftest as runner

    before = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            if not debug:
                runner.unheard()
            yield
    finally:
        logging.disable(before)


def _text(outcomes: Sequence[Outcome], left_out: Mapping[str, str]) -> str:
    faults = [outcome for outcome in outcomes if not outcome.is_control]
    controls = [outcome for outcome in outcomes if outcome.is_control]
    rows: list[dict[str, Any]] = [
        {"fault": each.name, "caught": "yes" if each.passed else "NO", "found": each.found, "expected": each.expected}
        for each in faults
    ]
    rows += [{"fault": name, "caught": "skipped", "found": "-", "expected": why} for name, why in left_out.items()]
    lines = [aligned(rows), ""]
    lines += [f"{each.name} found: {each.told or 'nothing'}" for each in outcomes if not each.passed]
    lines += [
        f"{sum(each.passed for each in faults)} of {plural(len(faults), 'fault')} caught, {len(left_out)} skipped"
    ]
    if controls:
        alarms = sum(not each.passed for each in controls)
        lines += [f"{plural(alarms, 'false alarm')} in {plural(len(controls), 'case')} without a fault"]
    return "\n".join(lines)


def _document(outcomes: Sequence[Outcome], left_out: Mapping[str, str]) -> str:
    return json.dumps(
        {"outcomes": [dataclasses.asdict(each) for each in outcomes], "skipped": dict(left_out)}, indent=2
    )


def _listing(faults: Mapping[str, Fault], left_out: Mapping[str, str], *, as_json: bool) -> str:
    """The registry: every fault with its finding, and how many there are for each backend."""
    if as_json:
        return json.dumps({name: _about(fault, left_out.get(name, "")) for name, fault in faults.items()}, indent=2)
    rows = [
        {
            "fault": name,
            "part": fault.part,
            "backend": fault.backend,
            "what is broken, what must find it, where it was": "; ".join(
                (fault.breaks, fault.finding, *fault.published)
            ),
        }
        for name, fault in faults.items()
    ]
    counts = Counter(fault.backend for fault in faults.values())
    reasons = Counter(left_out.values())
    total = f"{plural(len(faults), 'fault')}: " + ", ".join(f"{number} {name}" for name, number in counts.items())
    return "\n".join([aligned(rows), "", total, *(f"skipped here: {n} ({why})" for why, n in reasons.items())])


def _about(fault: Fault, left_out: str) -> dict[str, Any]:
    about = dataclasses.asdict(fault)
    return {**about, "case": dict(fault.case), "published": fault.links, "skipped": left_out}
