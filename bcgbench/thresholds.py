"""Every limit that a judgement knows, in one place; `verdict.py` applies them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Every limit of the project. Relative limits are fractions, so 0.01 is 1 %."""

    min_effect: float = 0.01
    """Least ratio of times, minus 1, that is called FASTER or SLOWER; the measured A/A floor raises it."""
    cross_run_effect: float = 0.05
    """The same for arms of different runs: not interleaved, so drift (about 3 % on a shared GPU) does not cancel."""
    min_pairs: int = 6
    """Five pairs have no finite exact 95 % interval."""
    confidence: float = 0.95
    timer_relative: float = 0.02
    timer_absolute_s: float = 0.002
    """Two clocks of one span, or stages and total, may differ by the larger of the relative and absolute limit."""
    moved_relative: float = 0.5
    moved_absolute_s: float = 0.01
    """What a request takes outside the denoise span, which no graph touches, may grow by the larger of these: a share
    of that time, or seconds. Between arms of one run on an H200 it differed by at most 11 ms and 20 %."""
    floor_margin_db: float = 1.0
    """How much worse than eager against eager a graph may be, where eager is not repeatable; 1 dB is 12 % in error."""
    max_error_ratio: float = 2.0
    max_error_ratio_half: float = 3.0
    """Error of an arm in another arithmetic (compiled, fused) over eager's, in float32 and in half; as PyTorch's."""
    max_memory_ratio: float | None = None
    """Limit on peak allocated memory of b over a."""
    remarked_bytes: int = 1 << 30
    """Memory that is remarked on where nothing is gained for it."""
    remarked_kernels: float = 2.0
    """Kernels more per graph launch that are remarked on: a prologue that sets up the generator is two."""
    max_padding_float32: float = 1e-4
    """What padding may change of a transformer output in float32, relative to its largest magnitude. On tiny models
    right padding stays below 1e-6, a forgotten mask is above 1e-3; PSNR cannot tell them apart (54 dB when wrong)."""
    max_padding_half: float = 0.02
    """The same in bfloat16 and float16, for `divergence` alone: rounding is some 2^-8 there, a pad row that is attended
    to changed an attention by a fifth and more."""
    max_ranks_float32: float = 1e-3
    """What several processes may change of final latents in float32, against one; tiny models stay below 1e-5."""
    min_padding_psnr_db: float | None = None
    """Limit on what padding may change; None reports it only."""


DEFAULTS = Thresholds()
