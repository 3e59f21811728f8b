"""What requests ended with, as files beside the journal: pictures, videos, sound and latents, named by case and runner.

A picture is a PNG. A video is an animated WebP, lossless, with its first frame as a PNG; its sound is a WAV. Nothing is
written twice: where an arm's output equals that of an earlier arm, both names lead to one file.
"""

from __future__ import annotations

import logging
import wave
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bcgbench import fidelity
from bcgbench.answers import Final, Finals
from bcgbench.models.media import Sound

if TYPE_CHECKING:
    from bcgbench.types import Case

log = logging.getLogger(__name__)

FULL_SCALE = 32_767


@dataclass(slots=True)
class Saver:
    """Writes the outputs of one case, arm by arm."""

    run_path: Path
    case: Case
    frame_rate: float
    """Frames a second of a video."""
    _saved: dict[int, list[tuple[Final, dict[str, str]]]] = field(default_factory=dict)
    """By prompt: outputs that are on disk, with name -> path."""

    def save(self, finals: Finals, *, runner: str) -> dict[str, str]:
        """Write an arm's outputs of each prompt; returns name -> path relative to the run.

        A full disk costs pictures, which the log says, and never the record of what was measured.
        """
        paths: dict[str, str] = {}
        try:
            (self.run_path / "artifacts").mkdir(exist_ok=True)
            for prompt, final in finals.by_prompt.items():
                saved = self._saved.setdefault(prompt, [])
                files = next((held for other, held in saved if final.equals(other)), None)
                if files is None:
                    files = {}
                    for kind, path in self._write(final, stem=f"{self.case.key}-{runner}-{prompt}"):
                        files[f"{kind} {prompt}"] = paths[f"{kind} {prompt}"] = path
                    saved.append((final, files))
                paths |= files
        except OSError as error:
            log.warning("artifacts of %s were not written: %s", runner, error)
        return paths

    def _write(self, final: Final, *, stem: str) -> Iterator[tuple[str, str]]:
        """Kind and path of each file, once it is on disk; the latents come last."""
        path = f"artifacts/{stem}"
        fidelity.save_png(final.images[0], self.run_path / f"{path}.png")
        yield "image", f"{path}.png"
        if len(final.images) > 1:
            save_video(final.images, self.run_path / f"{path}.webp", frame_rate=self.frame_rate)
            yield "video", f"{path}.webp"
        if final.sound is not None:
            save_wav(final.sound, self.run_path / f"{path}.wav")
            yield "audio", f"{path}.wav"
        fidelity.save_latents(final.latents, self.run_path / f"{path}.safetensors")
        yield "latents", f"{path}.safetensors"


def save_video(frames: np.ndarray[Any, Any], path: Path, *, frame_rate: float) -> None:
    """Write uint8 frames (frames, height, width, 3) as an animated WebP, losslessly at the encoder's fastest.

    121 frames of 768x512 take 4 s on one core and at most their 143 MB; a PNG of them took 7 s and was no smaller.
    """
    from PIL import Image

    first, *others = (Image.fromarray(frame) for frame in frames)
    with fidelity.replacing(path) as draft:
        first.save(
            draft, format="WEBP", save_all=True, append_images=others, lossless=True, quality=0, method=0,
            duration=round(1000 / frame_rate), loop=0,
        )  # fmt: skip


def save_wav(sound: Sound, path: Path) -> None:
    """Write a sound as 16-bit PCM at its own rate; beyond full scale it is cut off, as a loudspeaker would."""
    samples = np.round(np.clip(sound.samples, -1, 1) * FULL_SCALE).astype("<i2")
    with fidelity.replacing(path) as draft, wave.open(str(draft), "wb") as file:
        file.setnchannels(len(samples))
        file.setsampwidth(samples.itemsize)
        file.setframerate(sound.rate_hz)
        file.writeframes(samples.T.tobytes())
