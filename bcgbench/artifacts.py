"""Pictures and latents of a run: written beside the journal, named after case and runner."""

from __future__ import annotations

import logging
from pathlib import Path

from bcgbench import fidelity
from bcgbench.answers import Finals
from bcgbench.types import Case

log = logging.getLogger(__name__)


def save_finals(finals: Finals, run_path: Path, *, case: Case, runner: str) -> dict[str, str]:
    """Write each prompt's first image (PNG) and latents (safetensors); returns name -> path relative to the run.

    A full disk costs pictures, which the log says, and never the record of what was measured.
    """
    folder = run_path / "artifacts"
    written: dict[str, str] = {}
    try:
        folder.mkdir(exist_ok=True)
        for prompt, final in finals.by_prompt.items():
            stem = f"{case.key}-{runner}-{prompt}"
            fidelity.save_png(final.images[0], folder / f"{stem}.png")
            written[f"image {prompt}"] = f"artifacts/{stem}.png"
            fidelity.save_latents(final.latents, folder / f"{stem}.safetensors")
            written[f"latents {prompt}"] = f"artifacts/{stem}.safetensors"
    except OSError as error:
        log.warning("artifacts of %s were not written: %s", runner, error)
    return written
