"""One case on several processes: the stages of `bench.py` on every rank, in step, and one record of all.

Each rank loads the pipeline, runs every request with its share of each denoiser call, and measures and checks itself.
Two kinds of work are told apart: what a rank does alone may fail on it alone, and the ranks vote on it afterwards; in
a request each waits for the others, so a rank that fails there ends the case.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bcgbench import answers, context, environment, measure
from bcgbench.answers import CallTally, Final, Finals
from bcgbench.arms import Arm
from bcgbench.artifacts import Saver
from bcgbench.bench import CaseBench, Emit
from bcgbench.child import reason_of
from bcgbench.errors import BcgbenchError, ProcessPoisoned, RankFailed
from bcgbench.fidelity import digest
from bcgbench.live import Live, ending_early
from bcgbench.merge import Part, merge
from bcgbench.models import base, prior
from bcgbench.parallel import parse_parallel
from bcgbench.ranks import Ranks
from bcgbench.records import assemble
from bcgbench.runners import RUNNERS, runner
from bcgbench.share import WAYS, Share
from bcgbench.types import Case, Phase, Progress, Reason
from bcgbench.watchdog import Watchdog

log = logging.getLogger(__name__)


def run_case(
    case: Case, *, run_id: str, run_path: Path, attempt: int, emit: Emit, should_stop: Callable[[], bool],
    ranks: Ranks, watchdog: Watchdog,
) -> None:  # fmt: skip
    """As `bench.run_case`, on every rank; rank 0 emits samples as they come, and one record per runner at the end."""
    names = [runner(name).name for name in case.runners]
    say = _speaker(emit, case) if ranks.rank == 0 else _silent
    say(Progress(case=case.key, stage="load"))
    device = "cpu" if case.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    session = base.load(dataclasses.replace(case, device=device))
    share, session = _shared(session, ranks)
    machine = environment.collect(device)
    bench = RankBench(session, machine, emit=say, should_stop=should_stop, ranks=ranks, watchdog=watchdog, share=share)
    bench.check_alike()
    with torch.no_grad(), ending_early(bench.live):
        bench.run(names)
    _conclude(bench, case, share, run_id=run_id, run_path=run_path, attempt=attempt, emit=say)


def _shared(session: base.Session, ranks: Ranks) -> tuple[Share, base.Session]:
    """How this rank takes part in a call, and the session with it."""
    adapter = session.adapter
    if parse_parallel(session.case.parallel).kind == "cfg":
        share = WAYS[adapter.guidance_in](ranks)
        return share, dataclasses.replace(session, share=share)
    adapter = dataclasses.replace(adapter, breaks=(*adapter.breaks, *context.EXCHANGES))
    parts = context.Parts()
    return parts, dataclasses.replace(session, adapter=adapter, share=parts)


def _conclude(
    bench: RankBench, case: Case, share: Share, *, run_id: str, run_path: Path, attempt: int, emit: Emit
) -> None:
    """Every arm's record of every rank, made one; rank 0 keeps the pictures."""
    saver = Saver(run_path, case, bench.session.adapter.facts.frame_rate)
    is_first = bench.ranks.rank == 0
    saved = prior.save(bench.session.prior, run_path, case=case) if is_first else {}
    for live in bench.live.values():
        if live.usable and is_first:
            live.result.artifacts = saver.save(live.finals, runner=live.name) | saved
        record = assemble(live.arm, live.result, bench.session, bench.environment, run_id=run_id, attempt=attempt,
                          expected_forwards=live.expected, denoise_flops=bench.denoise_flops)  # fmt: skip
        part = Part(
            record=dataclasses.replace(record, case=case), asked=tuple(sorted(map(str, live.arm.asked))),
            divided=share.tally.divided, whole=share.tally.whole,
        )  # fmt: skip
        parts = bench.ranks.gather(part, what="the records of all ranks")
        emit(merge(parts, reasons=bench.decisions.get(live.name, ())))


def _speaker(emit: Emit, case: Case) -> Emit:
    """Progress under the name of the case as it was asked for: each rank's own names its device."""
    return lambda each: emit(dataclasses.replace(each, case=case.key) if isinstance(each, Progress) else each)


def _silent(_: object) -> None:
    pass


class RankBench(CaseBench):
    """The stages of one case on one rank, in step with the others."""

    def __init__(self, *args: Any, ranks: Ranks, watchdog: Watchdog, share: Share, **kwargs: Any) -> None:
        self._asked_to_stop, self._stopping = kwargs.pop("should_stop"), False
        super().__init__(*args, should_stop=lambda: self._stopping, **kwargs)
        self.ranks = ranks
        self.decisions: dict[str, tuple[Reason, ...]] = {}
        """What the ranks decided, or found, together: reasons for the record of an arm."""
        self._watchdog = watchdog
        self._share = share
        self._one = Finals()
        """What one rank makes of prompt 0 without the others."""

    def check_alike(self) -> None:
        """BcgbenchError unless all ranks hold the same denoiser weights and the same prior."""
        self._watchdog.beat("load")
        digests = [weights_digest(module) for module in self.session.denoisers.values()]
        mine = {"denoiser weights": digests, "prior": self.session.prior.settings}
        every = self.ranks.gather(mine, what="all ranks to load")
        unlike = [name for name, value in mine.items() if any(other[name] != value for other in every)]
        if unlike:
            raise BcgbenchError(
                f"the ranks did not load the same {' and '.join(unlike)}: are their GPUs and folders alike?"
            )

    def run(self, names: list[str]) -> None:
        """One request of each rank alone, then all stages together."""
        self._share.tally.alone = True
        with Arm(RUNNERS["eager"], self.session).attached():
            self._one.by_prompt[0] = Final.of(
                measure.request(self.session, 0, clock=self._clock, on_step=self._on_step)
            )
        self._share.tally.alone = False
        if parse_parallel(self._case.parallel).kind == "context":
            context.divide(self.session.denoisers.values(), self.ranks)
        super().run(names)

    # --- alone, then a vote -----------------------------------------------------------------------------------------

    def _prepare(self, live: Live) -> None:
        """Capture; if that fails on one rank, every rank runs the arm eagerly, and its record says so."""
        failed = ""
        try:
            super()._prepare(live)
        except ProcessPoisoned:
            raise
        except (BcgbenchError, RuntimeError) as error:
            log.exception("preparing %s failed", live.name)
            failed = reason_of(error).text
        votes = self.ranks.gather(failed, what=f"all ranks to prepare {live.name}")
        against: dict[str, list[str]] = {}
        for rank, vote in enumerate(votes):
            against.setdefault(vote, []).append(str(rank))
        against.pop("", None)
        if against:
            why = "; ".join(f"rank {', '.join(ranks)}: {vote}" for vote, ranks in against.items())
            text = f"every rank ran eagerly, by vote, since one has no graph; {why}"
            self._decide(live, code="rank-vote", text=text)
            for hook in live.arm.hooks.values():
                hook.graphed.cache.drop_all("every rank runs eagerly, by vote")
                hook.graphed.freeze()

    def _check(self) -> None:
        """Each rank checks its own calls; an arm that failed on one is not profiled on any."""
        super()._check()
        self._check_against_one()
        failures = {name: live.result.failure for name, live in self.live.items()}
        every = self.ranks.gather(failures, what="all ranks to check")
        for rank, theirs in enumerate(every):
            for name, failure in theirs.items():
                live = self.live[name]
                if failure is not None and live.usable:
                    text = f"rank {rank}: {failure.text}"
                    live.result.failure = Reason(code=failure.code, text=text)

    def _check_against_one(self) -> None:
        """All ranks' outputs of prompt 0 against those of the one that ran every call whole, which rounds otherwise."""
        live = self.live.get("eager") or next(iter(self.live.values()))
        found = answers.answer("ranks", reference="one rank", tally=CallTally(), expected=self._one,
                               got=Finals({0: self._traced.by_prompt[0]}))  # fmt: skip
        live.result.fidelity = (*live.result.fidelity, found)

    # --- together ---------------------------------------------------------------------------------------------------

    def _image(self, live: Live, *, phase: Phase, turn: measure.Turn) -> Final:
        """One request of all ranks, which must end with the same latents."""
        final: Final = self._together(lambda: super(RankBench, self)._image(live, phase=phase, turn=turn))
        if len(set(self.ranks.gather(digest(final.latents), what=f"the latents of all ranks ({phase})"))) > 1:
            text = f"the ranks ended {phase} of prompt {turn.prompt} in round {turn.round} with different latents"
            self._decide(live, code="ranks-disagree", text=text)
        return final

    def _profile(self, live: Live) -> None:
        self._together(lambda: super(RankBench, self)._profile(live))

    def _together(self, work: Callable[[], Any]) -> Any:
        """Work in which the others wait for this rank: what it raises ends the case."""
        try:
            return work()
        except (BcgbenchError, RuntimeError) as error:
            raise RankFailed from error

    def _report(self, stage: str, arm: str, *, done: int = 0, total: int = 0, eta_s: float | None = None) -> None:
        """Progress. Before each request all ranks vote on stopping, which also lets them begin at once."""
        self._watchdog.beat(f"{stage} of {arm} {done}/{total}")
        if stage != "check":  # there ranks work alone, each at its pace
            self._stopping = self.ranks.any(self._asked_to_stop(), what=f"all ranks in {stage} of {arm}")
        super()._report(stage, arm, done=done, total=total, eta_s=eta_s)

    def _on_step(self, step: int) -> None:
        self._watchdog.beat(f"{self._progress.stage} of {self._progress.arm}, step {step + 1}")
        super()._on_step(step)

    def _decide(self, live: Live, *, code: str, text: str) -> None:
        known = self.decisions.get(live.name, ())
        if code not in {reason.code for reason in known}:
            self.decisions[live.name] = (*known, Reason(code=code, text=text))


def weights_digest(module: torch.nn.Module) -> list[int]:
    """Sums of all parameters' bytes as integers: exact, whatever order they are added in."""
    return [int(p.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64)) for p in module.parameters()]
