"""LTX-2 in two stages: denoise at half the size, enlarge the latents twofold, denoise again for three steps.

Two pipeline calls, both through one transformer, so a request has two denoise loops and two signatures. This is the
recipe of the distilled checkpoint: one set of weights and a fixed list of noise levels per stage. The other published
recipe gives the undistilled model a LoRA between the stages, which needs peft and exchanges weights under the graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError
from bcgbench.models.base import Arguments, Component
from bcgbench.models.ltx2 import LTX2, Ltx2

if TYPE_CHECKING:
    import torch

    from bcgbench.models.weights import Builder
    from bcgbench.types import Case

FIRST_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)
SECOND_SIGMAS = (0.909375, 0.725, 0.421875)
"""Noise levels that the checkpoint was distilled for; diffusers has them in `pipelines.ltx2.utils`."""
UNGUIDED = {
    "guidance_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_rescale": 0.0,
}
"""The second stage is distilled for guidance-free steps, however the first is guided."""
MODEL_ID = "Lightricks/LTX-2-two-stage"
HUB_ID = "rootonchair/LTX-2-19b-distilled"
"""The distilled checkpoint in diffusers' layout, with the upsampler; the original has single files only."""


class TwoStages:
    """Both pipeline calls and the enlargement between them as one pipeline of the common face.

    `stages` are two pipelines over the same networks, each with its own scheduler and progress bar, so that each loop
    can be told from the other. Everything else is the first stage's.
    """

    def __init__(self, pipe: Any, *, upsampler: Any) -> None:
        import diffusers

        # The noise levels are taken as they are: neither shifted by the number of tokens nor stretched to an end.
        scheduler, other = (
            type(pipe.scheduler).from_config(pipe.scheduler.config, use_dynamic_shifting=False, shift_terminal=None)
            for _ in range(2)
        )
        pipe.register_modules(scheduler=scheduler)
        self.first = pipe
        self.second = type(pipe)(**{**pipe.components, "scheduler": other})
        self.upsample = diffusers.LTX2LatentUpsamplePipeline(vae=pipe.vae, latent_upsampler=upsampler)
        self.stages = (self.first, self.second)

    def __call__(self, *, width: int, height: int, output_type: str, **request: Any) -> Any:
        """Frames and sound at the full size; the second stage adds noise to what the first made, sound included."""
        half = self.first(width=width // 2, height=height // 2, output_type="latent", **request)
        larger = self.upsample(latents=half.frames, output_type="latent").frames
        again = request | UNGUIDED | {"num_inference_steps": len(SECOND_SIGMAS), "sigmas": list(SECOND_SIGMAS)}
        return self.second(
            width=width, height=height, output_type=output_type, latents=larger, audio_latents=half.audio,
            noise_scale=SECOND_SIGMAS[0], **again,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Parts and everything else of the first stage."""
        return getattr(self.first, name)

    @property
    def components(self) -> dict[str, Any]:
        """All networks of a request."""
        return {**self.first.components, **self.upsample.components}

    def to(self, device: torch.device) -> TwoStages:
        """Move all networks; the second stage has those of the first."""
        self.first.to(device)
        self.upsample.to(device)
        return self

    def register_modules(self, **parts: Any) -> None:
        """Set parts of both stages."""
        for stage in self.stages:
            stage.register_modules(**parts)

    def set_progress_bar_config(self, **config: Any) -> None:
        """Options of both stages' bars."""
        for stage in self.stages:
            stage.set_progress_bar_config(**config)


@dataclass(frozen=True, kw_only=True)
class Ltx2TwoStage(Ltx2):
    """LTX-2's prompts and frames; steps and guidance of a case are those of the first stage."""

    upsampler: Component = field(default_factory=lambda: Component(kind="pipelines.ltx2.LTX2LatentUpsamplerModel"))

    def fits(self, folder: Path, *, index: Mapping[str, Any]) -> bool:
        """An LTX-2 folder that holds the upsampler too."""
        return super().fits(folder, index=index) and (folder / "latent_upsampler").is_dir()

    def assemble(self, build: Builder) -> TwoStages:
        """Both stages on networks with seeded random weights."""
        upsampler = build.model(self.upsampler.kind, self.upsampler.config, name="latent_upsampler")
        return TwoStages(super().assemble(build), upsampler=upsampler)

    def from_pretrained(self, source: str, *, dtype: torch.dtype, local: bool) -> TwoStages:
        """Both stages on the networks of a local folder or of a hub id, upsampler included."""
        from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel

        held = HUB_ID if source == MODEL_ID else source
        upsampler = LTX2LatentUpsamplerModel.from_pretrained(
            held, subfolder="latent_upsampler", dtype=dtype, local_files_only=local
        )
        return TwoStages(super().from_pretrained(held, dtype=dtype, local=local), upsampler=upsampler)

    def prepare_pipeline(self, pipe: Any) -> None:
        """Decode the full-size video tile by tile, as the recipe does: whole it may not fit beside the transformer."""
        super().prepare_pipeline(pipe)
        pipe.vae.enable_tiling()

    def sized(self, case: Case, *, tokens: int, steps: int) -> Arguments:
        """Noise levels of the first stage; of fewer steps than it was distilled for, evenly picked ones."""
        del case, tokens
        if steps > len(FIRST_SIGMAS):
            raise UsageError(
                f"{self.facts.id} is distilled for {len(FIRST_SIGMAS)} steps of its first stage, got {steps}. Use at "
                f"most {len(FIRST_SIGMAS)}, or the undistilled {LTX2.facts.id} in one stage."
            )
        return {"sigmas": [FIRST_SIGMAS[step * len(FIRST_SIGMAS) // steps] for step in range(steps)]}


LTX2_TWO_STAGE = Ltx2TwoStage(
    **{each.name: getattr(LTX2, each.name) for each in fields(LTX2) if each.name not in ("facts", "min_steps")},
    facts=replace(
        LTX2.facts,
        id=MODEL_ID,
        aliases=(HUB_ID,),
        width_px=1536,
        height_px=1024,
        multiple_px=2 * LTX2.facts.multiple_px,
        steps=len(FIRST_SIGMAS),
        second_stage_steps=len(SECOND_SIGMAS),
        guidance=1.0,
        memory_bytes=80_000_000_000,
    ),
)
