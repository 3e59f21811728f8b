"""What the stored differences between two arms' outputs amount to, in one phrase and one exit code.

Here: reading `Fidelity` answers and wording them. Not here: computing differences (`fidelity.py`), limits
(`verdict.py` passes them in).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bcgbench.comparable import share_prior
from bcgbench.types import Accuracy, Difference, Fidelity, Question, Reason, Record

PIXEL_LEVELS = 255
DIFFER = 3
"""Exit code of outputs that differ."""


LEAST_ERROR = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
"""Relative error below which a ratio to eager's says nothing. In half, that of rounding the result alone; in float32
sixteen times it: fused code takes other approximations of exp and erf. A fault of arithmetic is 1e-3 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Whether an arm computes what eager does. `exact` None means that it was not answered."""

    exact: bool | None
    phrase: str
    exit_code: int = 0
    reasons: tuple[Reason, ...] = ()


def answer(records: Iterable[Record], question: Question) -> Fidelity | None:
    """First answer to `question` among the records that compared any final output."""
    answers = (f for r in records for f in r.fidelity if f.question == question)
    return next((f for f in answers if f.finals or f.calls_exact < f.calls), None)


def judge_outputs(record: Record, *, rerun: Fidelity | None, margin_db: float, max_error_ratio: float) -> Outputs:
    """Whether the arm computes what eager computes on the same inputs: exactly, or as well as eager repeats itself.

    An arm in another arithmetic need not be exact: its error may be `max_error_ratio` times eager's own.

    Exit code 3 when it does not, 4 when a graph arm was never checked. An arm that is not OK gets no credit for
    equal outputs, which may be eager's own; a difference still counts.
    """
    if record.accuracy is not None:
        steady = rerun is None or rerun.exact
        return _judge_accuracy(record, record.accuracy, max_error_ratio=max_error_ratio, steady=steady)
    graph = answer((record,), "graph")
    if graph is None:
        return _unchecked(record)
    floor = None if rerun is None or rerun.exact else rerun
    note = f" (eager itself is not repeatable: {describe(floor)})" if floor else ""
    if graph.exact:
        believed = record.status == "OK"
        return Outputs(exact=True, phrase="exact" + note) if believed else Outputs(exact=None, phrase="not judged")
    if floor and (unsteady := _unsteady(floor, graph)):
        return Outputs(exact=None, phrase=f"not judged: {unsteady.text}", exit_code=4, reasons=(unsteady,))
    phrase = describe(graph)
    if floor and no_worse(graph, floor, margin_db=margin_db):
        return Outputs(exact=False, phrase=f"{phrase}, no worse than eager{note}")
    phrase += f", worse than eager{note}" if floor else ""
    reason = Reason(code="outputs-differ", text=f"{record.runner} against {graph.reference}: {phrase}")
    return Outputs(exact=False, phrase=phrase, exit_code=DIFFER, reasons=(reason,))


def _judge_accuracy(record: Record, found: Accuracy, *, max_error_ratio: float, steady: bool) -> Outputs:
    """An arm in another arithmetic: "exact", "within tolerance" or "different"; not judged without a reference."""
    fidelity = answer((record,), "arithmetic")
    if steady and found.unrepeated:
        text = f"{found.unrepeated} requests of {record.runner} did not give what they gave before, and eager's did"
        reason = Reason(code="outputs-differ", text=text)
        return Outputs(exact=False, phrase=f"different: {text}", exit_code=DIFFER, reasons=(reason,))
    if record.status == "OK" and fidelity is not None and fidelity.exact:
        return Outputs(exact=True, phrase="exact")
    if found.error is None or found.eager_error is None:
        text = f"no reference in {found.dtype} to judge {record.runner} by: SKIPPED, {found.note or 'no call has one'}"
        reason = Reason(code="fidelity-not-judged", text=text)
        return Outputs(exact=None, phrase=f"not judged: {text}", exit_code=4, reasons=(reason,))
    floor = LEAST_ERROR.get(record.case.dtype, 0.0)
    ratio = found.error / max(found.eager_error, floor)
    size = f"{ratio:.2f}x eager's error in call {found.worst_call}, {found.error:.2g} of its size, limit "
    size += f"{max_error_ratio:g}x ({found.calls} calls against {found.dtype})"
    if ratio <= max_error_ratio and record.status != "OK":
        return Outputs(exact=None, phrase="not judged")
    if ratio <= max_error_ratio:
        return Outputs(exact=False, phrase=f"within tolerance: {size}")
    reason = Reason(code="outputs-differ", text=f"{record.runner} against eager: {size}")
    return Outputs(exact=False, phrase=f"different: {size}", exit_code=DIFFER, reasons=(reason,))


def _unsteady(floor: Fidelity, graph: Fidelity) -> Reason | None:
    """Why eager is no measure for this graph: it differs from itself by another cause than kernels that vary.

    Kernels that vary do so in some calls and some requests. All calls alike and no two requests, or all requests alike
    and no call afterwards, is none of their doing, and would excuse any graph.
    """
    early = [d for d in floor.latents if " in round " not in d.name]
    steady_calls = floor.calls > 0 and floor.calls == floor.calls_exact
    if steady_calls and graph.calls == graph.calls_exact and early and not any(d.exact for d in floor.latents):
        text = "eager repeats each call and none of its requests: noise or tokens are not the same for every request"
        return Reason(code="requests-unlike", text=text)
    if floor.calls and not floor.calls_exact and early and all(d.exact for d in early):
        text = "eager repeated its requests and afterwards none of its calls: a switch, weights or a cache of the "
        return Reason(code="eager-changed", text=text + "model changed while the case ran")
    return None


def judge_across(a: Record, b: Record, *, own: Outputs, refused: tuple[Reason, ...], stable: bool) -> Outputs:
    """Outputs of one arm in two runs, by digest, where one prior, the settings and the environment are the same.

    `own` is what run b says of itself: it stays where its outputs are wrong already or the two cannot be compared.
    Exit code 3 where digests differ although eager repeats itself (`stable`).
    """
    if own.exit_code == DIFFER:
        return own
    if any(reason.code == "different-prior" for reason in refused):
        return Outputs(exact=None, phrase="different prior")
    before, after = _digests(a), _digests(b)
    shared = [name for name in before if name in after]
    unequal = [name for name in shared if before[name] != after[name]]
    tuned = unequal and b.accuracy is not None  # anew in each process: a reference judges it, not equal digests
    if refused or not share_prior(a, b) or not shared or tuned:
        return own
    if not unequal:
        return Outputs(exact=True, phrase=f"same outputs ({len(shared)} digests)")
    phrase = f"different outputs from one prior: {', '.join(unequal)}"
    if not stable:
        return Outputs(exact=False, phrase=f"{phrase} (eager itself is not repeatable)")
    reason = Reason(code="outputs-differ", text=f"{b.runner} of {a.run_id} and of {b.run_id}: {phrase}")
    return Outputs(exact=False, phrase=phrase, exit_code=DIFFER, reasons=(reason,))


def _digests(record: Record) -> dict[str, str]:
    """Digests of an arm's own final outputs by name: its first answer compares them with its reference."""
    return {d.name: d.sha256_b for f in record.fidelity[:1] for d in f.finals}


def _unchecked(record: Record) -> Outputs:
    if record.backend == "none" or record.status != "OK":
        return Outputs(exact=None, phrase="not judged")
    reason = Reason(code="fidelity-not-judged", text=f"outputs of {record.runner} were not compared with eager's")
    return Outputs(exact=None, phrase="not judged", exit_code=4, reasons=(reason,))


def describe(fidelity: Fidelity) -> str:
    """Return "exact", or "differs: max difference 3, PSNR 52.0 dB in image 0; 28 of 40 calls, first call 12".

    Where only whole requests differ, each call was right on its own inputs: what went wrong lies between the calls.
    """
    if fidelity.exact:
        return "exact"
    parts = [size_phrase(d) for d in [worst_difference(fidelity.finals)] if d]
    if wrong := fidelity.calls - fidelity.calls_exact:
        parts.append(f"{wrong} of {fidelity.calls} calls, first call {fidelity.first_call}")
    elif fidelity.calls:
        parts.append(f"each of {fidelity.calls} calls alone exact")
    return "differs: " + "; ".join(parts)


def padding_phrase(fidelity: Fidelity | None) -> str:
    """What padding alone changes, worst image (else sound, else latents); "" where the question was not asked."""
    if fidelity is None:
        return ""
    kinds = (fidelity.images, fidelity.audio, fidelity.latents)
    shown = next(filter(None, map(worst_difference, kinds)), None)
    return size_phrase(shown) if shown else describe(fidelity)


def size_phrase(difference: Difference) -> str:
    """Return "max difference 0.0156, PSNR 61.2 dB in latents 0"; of a sound it is the SNR."""
    ratio = "SNR" if difference.name.startswith("audio") else "PSNR"
    psnr = f"no finite {ratio}" if difference.psnr_db is None else f"{ratio} {difference.psnr_db:.1f} dB"
    return f"max difference {difference.max_abs:.3g}, {psnr} in {difference.name}"


def worst_difference(differences: Iterable[Difference]) -> Difference | None:
    """The one of lowest PSNR (a sound: SNR) among those not exact; one without a finite PSNR is worse than any."""
    wrong = [d for d in differences if not d.exact]
    return min(wrong, key=_psnr_db, default=None)


def no_worse(fidelity: Fidelity, floor: Fidelity, *, margin_db: float) -> bool:
    """Whether calls and all final outputs differ no more than in `floor`, worst against worst, within `margin_db`."""
    kinds = ((fidelity.latents, floor.latents), (fidelity.images, floor.images), (fidelity.audio, floor.audio))
    finals = all(_within(worst_difference(x), worst_difference(y), margin_db) for x, y in kinds)
    calls = fidelity.calls == fidelity.calls_exact or (
        fidelity.worst_call is not None and _within(fidelity.worst_call, floor.worst_call, margin_db)
    )
    return finals and calls


def _within(x: Difference | None, floor: Difference | None, margin_db: float) -> bool:
    if x is None or floor is None:
        return x is None
    # One pixel level is the least that an image can be off by, so it is granted to images on top of the margin.
    level = x.data_range / PIXEL_LEVELS if x.name.startswith("image") else 0.0
    limit = floor.max_abs * 10 ** (margin_db / 20) + level
    return x.max_abs <= limit and _psnr_db(x) >= _psnr_db(floor) - margin_db


def _psnr_db(difference: Difference) -> float:
    return float("-inf") if difference.psnr_db is None else difference.psnr_db
