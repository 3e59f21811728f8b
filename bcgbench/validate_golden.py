"""Final outputs against those of an earlier run by digest: a check that sees what is wrong in eager and graph alike."""

from __future__ import annotations

from pathlib import Path

from bcgbench import answers, environment, store
from bcgbench.answers import CallTally
from bcgbench.comparable import comparable, share_prior
from bcgbench.outputs import Outputs, judge_across
from bcgbench.records import ArmResult, assemble
from bcgbench.types import Record
from bcgbench.validate import Answer, not_applicable, ruled
from bcgbench.validate_subject import Subject


def golden(subject: Subject) -> Answer:
    """Requests of all prompts through the arm; latents, images and sound have the digests that the run stored."""
    source = subject.trace.golden
    if source is None:
        return not_applicable("no earlier run given: --golden RUN")
    earlier = _record(subject, source)
    if earlier is None:
        return not_applicable(f"{source} holds no finished {subject.runner.name} record of this model and size")
    mine = _measured(subject)
    if not share_prior(earlier, mine):
        return not_applicable(f"another prior than in run {earlier.run_id}: give --prior with the file of that run")
    refused = comparable(earlier, mine)
    if refused:
        return not_applicable(refused[0].text)
    nothing = Outputs(exact=None, phrase="no digest in common")
    found = judge_across(earlier, mine, own=nothing, refused=(), stable=subject.floor == 0)
    if found.exact is None:
        return not_applicable(found.phrase)
    return ruled([] if found.exact else [found.phrase], fine=f"{found.phrase} as in run {earlier.run_id}")


def _record(subject: Subject, source: Path) -> Record | None:
    """The newest finished record of this runner at this size in a run: a folder, or its journal."""
    folder = source.parent if source.is_file() else source
    case = subject.session.case
    fitting = [
        record
        for record in store.open_run(folder).records()
        if (record.runner, record.case.model, record.case.resolution)
        == (subject.runner.name, case.model, case.resolution)
        and record.status in {"OK", "INVALID"}
    ]
    return fitting[-1] if fitting else None


def _measured(subject: Subject) -> Record:
    """A record of this arm's own final outputs, compared with themselves for their digests."""
    arm = subject.arm()
    finals = subject.finals(arm)
    finals.again.append(finals.by_prompt[0])
    own = answers.answer("graph", reference="eager-padded", tally=CallTally(), expected=finals, got=finals)
    expected = len(subject.calls)
    result = ArmResult(fidelity=(own,), captures=(arm.captures,) * 4)
    return assemble(arm, result, subject.session, environment.collect(subject.session.case.device), run_id="validate",
                    attempt=1, expected_forwards=expected, denoise_flops=None)  # fmt: skip
