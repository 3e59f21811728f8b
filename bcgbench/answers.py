"""Are an arm's outputs the same? Every transformer call on identical inputs, then latents, images and sound.

Three questions, three references: eager again (rerun), eager on padded inputs against eager (padding), the arm against
eager on padded inputs (graph). What an answer is worth is decided in `verdict.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from bcgbench import fidelity
from bcgbench.engine import trees
from bcgbench.engine.diagnose import bit_equal
from bcgbench.errors import BcgbenchError
from bcgbench.measure import Measured
from bcgbench.models.media import Media, Sound
from bcgbench.types import Difference, Fidelity, Question

CHANGED_LIMIT = 3
"""Images of measured rounds that are compared in full once they differ from the same arm's earlier ones."""


@dataclass(frozen=True, slots=True)
class Final:
    """What one request ended with, on the host."""

    latents: Tensor
    media: Media

    @classmethod
    def of(cls, measured: Measured) -> Final:
        """What a measured request ended with."""
        return cls(measured.latents.detach().cpu(), measured.media)

    @property
    def images(self) -> np.ndarray[Any, Any]:
        """uint8, (images or frames, height, width, 3)."""
        return self.media.images

    @property
    def sound(self) -> Sound | None:
        """The waveform, where the model makes one."""
        return self.media.sound

    def equals(self, other: Final) -> bool:
        """Whether latents, images and sound have the same bytes."""
        return bit_equal(self.latents, other.latents) and self.media.equals(other.media)


@dataclass(slots=True)
class CallTally:
    """Comparison of two arms over traced calls, in order."""

    calls: int = 0
    exact: int = 0
    first: int | None = None
    worst: Difference | None = None

    def add(self, reference: Any, output: Any) -> None:
        """Compare the outputs of the next call; sizes that differ, or nothing to compare, raise a `BcgbenchError`."""
        index = self.calls
        self.calls += 1
        wanted, got = trees.tensors(reference), trees.tensors(output)
        if not wanted or len(wanted) != len(got):
            raise BcgbenchError(
                f"call {index}: the outputs cannot be compared, the reference is {trees.describe(reference)} and the "
                f"other {trees.describe(output)}. Expected as many tensors, at least one: return them in a tuple, dict "
                "or dataclass."
            )
        pairs = list(zip(wanted, got, strict=True))
        if all(bit_equal(a, b) for a, b in pairs):
            self.exact += 1
            return
        self.first = index if self.first is None else self.first
        for a, b in pairs:
            found = fidelity.compare(a, b, name=f"call {index}")
            if not found.exact and (self.worst is None or found.max_abs > self.worst.max_abs):
                self.worst = found


@dataclass(frozen=True, slots=True)
class Finals:
    """An arm's final outputs by prompt, and prompt 0 once more after prompt 1 ran."""

    by_prompt: dict[int, Final] = field(default_factory=dict)
    again: list[Final] = field(default_factory=list)
    changed: dict[tuple[int, int], Final] = field(default_factory=dict)
    """Measured images, by (prompt, round), that are not what the same request gave before."""


def answer(question: Question, *, reference: str, tally: CallTally, expected: Finals, got: Finals) -> Fidelity:
    """The fidelity of one arm against one reference.

    Prompt 0 after prompt 1 is compared with the reference too: a stale input or an overwritten output shows there.
    """
    pairs = [(str(prompt), final, got.by_prompt[prompt]) for prompt, final in expected.by_prompt.items()]
    pairs += [("0 again", expected.by_prompt[0], final) for final in got.again]
    pairs += [
        (f"{prompt} in round {round_}", expected.by_prompt[prompt], final)
        for (prompt, round_), final in list(got.changed.items())[:CHANGED_LIMIT]
    ]
    return Fidelity(
        question=question,
        reference=reference,
        calls=tally.calls,
        calls_exact=tally.exact,
        first_call=tally.first,
        worst_call=tally.worst,
        latents=tuple(fidelity.compare(a.latents, b.latents, name=f"latents {name}") for name, a, b in pairs),
        images=tuple(fidelity.compare(a.images, b.images, name=f"image {name}", ssim=True) for name, a, b in pairs),
        audio=tuple(
            compare_sound(a.sound, b.sound, name=f"audio {name}")
            for name, a, b in pairs
            if a.sound is not None or b.sound is not None
        ),
    )


def compare_sound(a: Sound | None, b: Sound | None, *, name: str) -> Difference:
    """Compare the waveform `b` with the reference `a`, as `fidelity.compare`, by (channel, sample).

    PSNR refers to the root mean square of the reference, not to full scale, and so is the signal-to-noise ratio: a
    quiet sound may not hide a large error. BcgbenchError where one is missing, or length, channels or rate differ.
    """
    if a is None or b is None:
        raise BcgbenchError(f"{name}: one of the outputs has no sound, so there is nothing to compare the other with.")
    if a.rate_hz != b.rate_hz:
        raise BcgbenchError(
            f"{name}: the sounds cannot be compared, the reference has {a.rate_hz} samples a second and the other "
            f"{b.rate_hz}. Nothing is resampled: run both with one vocoder."
        )
    rms = math.sqrt(np.square(a.samples, dtype=np.float64).mean()) if a.samples.size else 0.0
    return fidelity.compare(a.samples, b.samples, name=name, data_range=rms or 1.0)
