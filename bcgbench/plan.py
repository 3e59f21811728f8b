"""What a suite would need, from facts alone: memory and time per case. No torch, no GPU, no I/O.

An estimate answers "does this fit, and is it minutes or hours"; it is not a measurement and is never stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bcgbench.runners import runner

if TYPE_CHECKING:
    from bcgbench.types import Case, ModelFacts

WARM_REQUESTS = 4
"""Requests of each arm before the measured rounds: warm, req1, req2, req1 again."""

UNVALIDATED = "no adapter is written for this model: the generic one runs it, and nobody has validated that"

_BYTES_PER_ELEMENT = {"float32": 4, "float64": 8}
_LEAST_REST = 0.5
"""Part of the memory beyond the denoiser that does not shrink with the picture: other weights, text, the library."""
_FALLBACK_TEXT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The speeds that an estimate rests on; round figures on purpose, to be replaced by those of a known machine."""

    gpu_flops: float = 3e14
    """Sustained bf16 rate of a data-centre GPU, a third to a half of the data sheet's dense peak."""
    cpu_flops: float = 5e10
    least_forward_s: float = 0.02
    """Host-bound floor of one eager transformer call: about 2,000 launches at 10 µs."""
    load_bytes_per_s: float = 1e9
    random_bytes_per_s: float = 1e10
    """Random weights are drawn on the device: 41 GB took as long as 4 GB, within the start."""
    start_s: float = 15.0
    """Imports and device set-up of the process of a case."""
    cpu_start_s: float = 10.0
    """The same without a device, with a tiny model's loading: 6 to 9 s on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one case would need."""

    case: Case
    memory_bytes: int
    """Peak on the device with every arm loaded once."""
    images: int
    """Requests over all arms, traced, warm, measured and checked."""
    forwards: int
    """Transformer calls of one request."""
    duration_s: float
    notes: tuple[str, ...]


def estimate(
    case: Case, facts: ModelFacts, *, text_encoder_bytes: int = 0, assumptions: Assumptions | None = None
) -> Estimate:
    """Memory from the model's stated peak, scaled by pixels; time from 2 * parameters * tokens per call.

    `text_encoder_bytes` count with pretrained weights only: random ones load no text encoder. The attention's quadratic
    part, encoding and decoding are not counted, so times are on the low side.
    """
    assumed = assumptions or Assumptions()
    first, second = case.steps * _branches(case, facts), facts.second_stage_steps
    images = request_count(case)
    text_bytes = text_encoder_bytes if case.weights == "pretrained" else 0
    transformer_bytes = facts.transformer_parameters * _BYTES_PER_ELEMENT.get(case.dtype, 2)
    weights_bytes = transformer_bytes + text_bytes
    duration_s = assumed.cpu_start_s if case.device == "cpu" else assumed.start_s
    is_random = case.weights == "random"
    duration_s += weights_bytes / (assumed.random_bytes_per_s if is_random else assumed.load_bytes_per_s)
    # A size is a multiple of what one token of the first, half-size stage covers in the finished video.
    twice = replace(case, width_px=2 * case.width_px, height_px=2 * case.height_px)
    request_s = first * _forward_s(case, facts, assumed=assumed) + second * _forward_s(twice, facts, assumed=assumed)
    duration_s += images * request_s
    # arms in another arithmetic are judged by weights cast to a wider dtype, beside the own ones
    cast_bytes = 0 if all(runner(name).same_arithmetic for name in case.runners) else 2 * transformer_bytes
    return Estimate(
        case=case,
        memory_bytes=max(memory_bytes(case, facts) + text_bytes, weights_bytes + cast_bytes),
        images=images,
        forwards=first + second,
        duration_s=duration_s,
        notes=_notes(case, facts),
    )


def request_count(case: Case) -> int:
    """Requests of a case: one traced, per arm the warm ones and the rounds, one profiled, one checked per prompt."""
    per_arm = WARM_REQUESTS + case.rounds + int(case.profile) + len(case.prompts)
    return 1 + per_arm * len(case.runners)


def memory_bytes(case: Case, facts: ModelFacts) -> int:
    """The model's stated peak, its part beyond the bf16 weights scaled with the volume and the element size."""
    weights_bytes = 2 * facts.transformer_parameters
    rest_bytes = max(0, facts.memory_bytes - weights_bytes)
    volume = _relative_volume(case, facts)
    elements = _BYTES_PER_ELEMENT.get(case.dtype, 2) / 2
    return round(elements * (weights_bytes + rest_bytes * max(_LEAST_REST, volume)))


def tokens(case: Case, facts: ModelFacts) -> int:
    """Image or video rows of one transformer call plus the longest prompt."""
    text = facts.text_tokens or max(case.token_counts or (), default=_FALLBACK_TEXT_TOKENS)
    return image_tokens(case, facts) + text


def image_tokens(case: Case, facts: ModelFacts) -> int:
    """The stated rows of the default size, scaled with pixels and frames; else one per square of `multiple_px`."""
    if facts.tokens is not None and not facts.tiny:  # a tiny model inherits the figure of another size
        return round(facts.tokens * _relative_volume(case, facts))
    return math.ceil(case.width_px / facts.multiple_px) * math.ceil(case.height_px / facts.multiple_px)


def _forward_s(case: Case, facts: ModelFacts, *, assumed: Assumptions) -> float:
    flops = 2 * facts.transformer_parameters * tokens(case, facts)
    if case.device == "cpu":
        return flops / assumed.cpu_flops
    return max(assumed.least_forward_s, flops / assumed.gpu_flops)


def _branches(case: Case, facts: ModelFacts) -> int:
    """Guidance that is off needs one transformer call per step."""
    return 1 if case.guidance is not None and case.guidance <= 1 else facts.branches


def _relative_volume(case: Case, facts: ModelFacts) -> float:
    """Pixels and frames of the case over those of the model's default size."""
    own = facts.width_px * facts.height_px * (facts.frames or 1)
    return case.width_px * case.height_px * (case.frames or 1) / own


def _notes(case: Case, facts: ModelFacts) -> tuple[str, ...]:
    notes = []
    if case.weights == "pretrained" and not facts.tiny:
        notes.append("time to download pretrained weights is not included")
    if facts.generic:
        notes.append(UNVALIDATED)
    if any(runner(name).compiled for name in case.runners):
        notes.append("compilation is not included: some 20 s for blocks, 1 to 3 min for a whole forward or for tuning")
    if case.parallel != "none":
        notes.append("of a case that several GPUs share: memory of each, time as if one ran it")
    if case.device == "cpu":
        notes.append("on a CPU outputs and graph use are checked, and no speed is measured")
    return tuple(notes)
