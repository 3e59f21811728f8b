"""Pictures and latents of a run: written beside the journal, named after case and runner."""

from __future__ import annotations

from pathlib import Path

from bcgbench import fidelity
from bcgbench.answers import Finals
from bcgbench.types import Case


def save_finals(finals: Finals, run_path: Path, *, case: Case, runner: str) -> dict[str, str]:
    """Write each prompt's first image (PNG) and latents (safetensors); returns name -> path relative to the run."""
    folder = run_path / "artifacts"
    folder.mkdir(exist_ok=True)
    written: dict[str, str] = {}
    for prompt, final in finals.by_prompt.items():
        stem = f"{case.key}-{runner}-{prompt}"
        fidelity.save_png(final.images[0], folder / f"{stem}.png")
        fidelity.save_latents(final.latents, folder / f"{stem}.safetensors")
        written[f"image {prompt}"] = f"artifacts/{stem}.png"
        written[f"latents {prompt}"] = f"artifacts/{stem}.safetensors"
    return written
