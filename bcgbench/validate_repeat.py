"""Checks of the reference and of the proof: is eager repeatable, do the graphs run, what does padding alone change."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from bcgbench import environment, fidelity, measure
from bcgbench.answers import CallTally
from bcgbench.codec import from_json, to_json
from bcgbench.engine import trees
from bcgbench.models.padding import OutsidePolicy
from bcgbench.records import ArmResult, assemble
from bcgbench.thresholds import DEFAULTS
from bcgbench.types import Case
from bcgbench.validate import FRESH_LIMIT_S, Answer, not_applicable, ruled
from bcgbench.validate_subject import RERUNS, Shape, Subject, largest_difference, opened


def digests(output: Any) -> tuple[str, ...]:
    """SHA-256 of every tensor of an output."""
    return tuple(fidelity.digest(tensor) for tensor in trees.tensors(output))


def repeatability(subject: Subject) -> Answer:
    """Eager calls on the same inputs again and again, one per signature: deterministic, multimodal or noisy."""
    classes, problems = [], []
    for number, shape in enumerate(subject.shapes):
        kind, floor = _kind(subject, shape)
        classes.append(kind)
        if kind != "deterministic":
            problems.append(
                f"eager is {kind}: {RERUNS} calls on the same inputs differ by up to {floor:.3g} (signature {number}, "
                f"{shape.module}); other checks compare within that floor. Switch on deterministic kernels to be exact"
            )
    return ruled(
        problems, fine=f"deterministic: {RERUNS} calls of each of {len(classes)} signatures give equal digests"
    )


def _kind(subject: Subject, shape: Shape) -> tuple[str, float]:
    """The class of one call's reruns, and the largest difference from the first."""
    first = subject.eager(shape)
    seen, floor = [digests(first)], 0.0
    for _ in range(RERUNS - 1):
        again = subject.eager(shape)
        seen.append(digests(again))
        floor = max(floor, largest_difference(first, again) if seen[-1] != seen[0] else 0.0)
    different = len(set(seen))
    return ("deterministic" if different == 1 else "noisy" if different == RERUNS else "multimodal"), floor


def fresh_process(subject: Subject) -> Answer:
    """The eager calls of prompt 0 in a process of their own, loaded anew; where they differ, in another one, too."""
    here = [list(digests(traced.output)) for traced in subject.trace.calls[0]]
    there = _fresh(subject)
    if isinstance(there, str):
        return not_applicable(there)
    if there == here:
        return ruled([], fine=f"deterministic: {len(here)} eager calls have equal digests in a fresh process")
    again = _fresh(subject)
    kind = "multimodal" if again in (here, there) else "noisy"
    problems = [] if len(there) == len(here) else [f"{len(there)} calls in a fresh process, {len(here)} in this one"]
    unequal = [index for index, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
    if unequal:
        problems.append(
            f"eager is {kind} across processes: {len(unequal)} of {len(here)} calls differ in a fresh one, first call "
            f"{unequal[0]}; digests of two runs cannot be compared (unseeded state, or kernels chosen by timing)"
        )
    return ruled(problems, fine="")


def _fresh(subject: Subject) -> list[list[str]] | str:
    """Digests of the calls in a new process, or why there are none."""
    command = [sys.executable, "-m", "bcgbench.validate_repeat"]
    try:
        done = subprocess.run(command, input=json.dumps(to_json(subject.session.case)), capture_output=True, text=True,
                              check=False, timeout=FRESH_LIMIT_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the fresh process did not end in {FRESH_LIMIT_S:.0f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"the fresh process ended with {done.returncode}: {last}"
    there: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    subject.replays += len(there)  # forwards of another process, counted by hand
    return there


def main() -> None:
    """Digests of the eager calls of prompt 0 of the case on stdin, as one line of JSON."""
    case = from_json(Case, json.loads(sys.stdin.read()))
    with torch.no_grad(), opened(case) as trace:
        found = [digests(traced.output) for traced in trace.calls[0]]
    sys.stdout.writelines(["\n", json.dumps(found), "\n"])


def engagement(subject: Subject) -> Answer:
    """Requests 0, 1 and 0 again through the arm: every call replayed, no miss, nothing captured late."""
    arm = subject.arm()
    captures, expected = [arm.captures], 0
    for prompt in (0, 1, 0):
        with arm.attached():
            measure.request(subject.session, prompt, clock=subject.trace.clock)
        expected += len(subject.trace.calls[prompt])
        captures.append(arm.captures)
    record = assemble(arm, ArmResult(captures=tuple(captures)), subject.session,
                      environment.collect(subject.session.case.device), run_id="validate", attempt=1,
                      expected_forwards=expected, denoise_flops=None)  # fmt: skip
    reasons = [f"{reason.code}: {reason.text}" for reason in record.reasons]
    replays = arm.counts.replays
    fine = f"{replays} of {expected} calls replayed, no miss, {arm.captures} graphs captured, none late"
    return ruled(reasons if record.status != "OK" else [], fine=fine)


def padding(subject: Subject) -> Answer:
    """Eager on padded inputs against eager at native length, call by call; no graph is involved."""
    tally, moved = CallTally(), False
    outside = 0
    for traced in subject.calls:
        try:
            padded = subject.padded.hooks[traced.module].pad(traced.arguments)
        except OutsidePolicy:
            outside += 1
            continue
        moved = moved or padded is not traced.arguments
        tally.add(traced.output, subject.padded.call(traced))
    if outside:
        return not_applicable(f"{outside} of {len(subject.calls)} calls are outside the length policy: see engagement")
    if not moved:
        return not_applicable(f"the length policy changes no argument of the {tally.calls} calls")
    if tally.worst is None:
        return ruled([], fine=f"{tally.calls} padded calls are exact")
    share = 2 * tally.worst.max_abs / tally.worst.data_range
    text = f"padding changes {tally.worst.name} by {share:.2g} of its size"
    if subject.session.case.dtype != "float32":
        return ruled([], fine=f"{text}; judged in float32 only (--dtype float32), where a missing mask shows")
    limit = DEFAULTS.max_padding_float32
    over = [f"{text} in float32, limit {limit:g}; is a mask missing?"] if share > limit else []
    return ruled(over, fine=f"{text} in float32, limit {limit:g}")


if __name__ == "__main__":
    main()
