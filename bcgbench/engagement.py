"""Proof that the graphs ran: what a record's counters say against its claim to replay them.

Here: one reason per way in which the proof fails. A denoise time without this proof may be eager's own, which is how
published comparisons of eager with eager came about. No limits, no times; those stand in `verdict.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bcgbench.hints import hint
from bcgbench.types import Engagement, Reason, Record, Sample

CODES = frozenset(
    {"not-engaged", "captured-not-engaged", "fallback", "late-capture", "baseline-replayed", "uncalled", "evicted",
     "late-compile", "cudagraphs-skipped"}
)  # fmt: skip
"""Every code that `engagement_reasons` gives."""
INFORMATIONAL = frozenset({"uncalled", "evicted", "cudagraphs-skipped"})
"""Those that leave a record OK: a bucket that no prompt needed, a graph dropped for room and made again, a part of a
compiled forward that torch runs without its CUDA graphs."""


def is_graph(record: Record) -> bool:
    """Whether the arm claims to replay graphs, and so owes proof of it."""
    return record.backend in ("cuda", "tape")


def engagement_reasons(record: Record) -> tuple[Reason, ...]:
    """Every way in which the record's counters contradict what its arm claims; also for tape runs."""
    compiled = tuple(_compile_reasons(record))
    if not is_graph(record):
        replays = sum(s.replays for s in record.samples)
        text = f"{record.runner} is a baseline without graphs, yet {replays} calls were replayed; run it unhooked"
        return (*((Reason(code="baseline-replayed", text=text),) if replays else ()), *compiled)
    proof = record.engagement
    if proof is None:
        text = f"{record.runner} carries no proof of replay (no engagement); its times may be eager times"
        return (Reason(code="not-engaged", text=text), *compiled)
    return (*compiled, *_replay_reasons(proof, record.measured), *_launch_reasons(record), *_capture_reasons(proof))


def _replay_reasons(proof: Engagement, measured: Sequence[Sample]) -> Iterable[Reason]:
    if not proof.replays or proof.replays != proof.expected_forwards:
        text = f"{proof.replays} of {proof.expected_forwards} transformer calls were replayed; all must be"
        yield Reason(code="not-engaged", text=text)
    elif short := [s for s in measured if s.replays != s.forwards]:
        first = short[0]
        text = f"{len(short)} measured images were not replayed whole, first round {first.round}: "
        yield Reason(code="not-engaged", text=text + f"{first.replays} replays for {first.forwards} calls")
    if not proof.replays and any(proof.captures):
        text = f"{max(proof.captures)} graphs were captured and none was replayed; the hook is not on the called module"
        yield Reason(code="captured-not-engaged", text=text)
    elif proof.unengaged:
        text = f"graphs captured for calls of the requests and never replayed by one: {'; '.join(proof.unengaged)}"
        yield Reason(code="captured-not-engaged", text=f"{text}; did a stage run, and through the hooked module?")
    fallbacks = max(proof.fallbacks, sum(s.fallbacks for s in measured))
    if fallbacks:
        yield Reason(code="fallback", text=f"transformer calls that ran eagerly: {fallbacks}; {_misses_phrase(proof)}")


def _launch_reasons(record: Record) -> Iterable[Reason]:
    """The arm's own counters against the profiler, which saw what the host launched."""
    launches = record.profile.launches if record.profile else {}
    if record.backend == "cuda" and any(launches.values()) and not launches.get("graph"):
        text = "the profiler saw no graph launch in a denoise loop whose calls count as replayed; they ran eagerly"
        yield Reason(code="not-engaged", text=text)


def _compile_reasons(record: Record) -> Iterable[Reason]:
    """torch.compile's own counters: nothing may be compiled, or fall back to eager, once preparation is over."""
    found = record.compilation
    if found is None:
        return
    if found.late_frames:
        text = f"torch.compile looked at {found.late_frames} functions after preparation and compiled "
        text += f"{found.late_graphs} graphs: measured requests compiled or ran eagerly; TORCH_LOGS=recompiles says why"
        yield Reason(code="late-compile", text=text)
    if found.cudagraph_skips and record.case.device != "cpu":
        text = f"{found.cudagraph_skips} of {found.graphs} compiled graphs run without torch's CUDA graphs"
        code = "not-engaged" if found.cudagraph_skips >= found.graphs else "cudagraphs-skipped"
        yield Reason(code=code, text=text + "; TORCH_LOGS=perf_hints says why")


def _misses_phrase(proof: Engagement) -> str:
    misses = (
        f"{m.count}x {m.module}: {'; '.join((m.reason, *m.difference))}" + (f". {text}" if (text := hint(m)) else "")
        for m in proof.misses
    )
    return " | ".join(misses) or "no miss was recorded, so the cause is unknown"


def _capture_reasons(proof: Engagement) -> Iterable[Reason]:
    if len(set(proof.captures)) > 1:
        held = ", ".join(map(str, proof.captures))
        text = f"graphs captured by preparation, req1, req2, req1 again: {held}; capture every shape in preparation"
        yield Reason(code="late-capture", text=text)
    if proof.uncalled and proof.replays:
        text = f"{len(proof.uncalled)} captured graphs were not needed by any prompt: {'; '.join(proof.uncalled)}"
        yield Reason(code="uncalled", text=text)
    if proof.evictions:
        yield Reason(code="evicted", text=f"{proof.evictions} graphs were dropped for room; raise the entry limit")
