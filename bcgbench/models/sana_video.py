"""SANA-Video 2B at 480p: SANA with frames. Every prompt is 300 rows, so size and frames make the graph.

Its linear self-attention stays inside the graphs; only the cross-attention, which diffusers sends through its attention
registry by itself, is a break. Guidance is one call of two rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError
from bcgbench.models.base import Arguments, Component
from bcgbench.models.sana import SANA, TEXT_ROWS, Sana
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    import numpy as np

    from bcgbench.types import Case

FRAME_STEP = 4
"""Frames per latent frame of the Wan VAE."""
LATENT_FRAMES = re.compile(r"^hidden_states: captured \w+\[\d+, \d+, (\d+), .*, asked \w+\[\d+, \d+, (\d+), .*$")


@dataclass(frozen=True, kw_only=True)
class SanaVideo(Sana):
    """SANA's prompts; the frames are checked, because the pipeline would round them down without a word."""

    def fits(self, folder: Path, *, index: Mapping[str, Any]) -> bool:
        """The same pipeline class also holds the 720p model (another VAE) and the causal one (another transformer)."""
        kinds = {name: part.kind for name, part in self.networks.items()}
        return super().fits(folder, index=index) and all(index.get(n, (None, None))[1] == k for n, k in kinds.items())

    def prepare_pipeline(self, pipe: Any) -> None:
        """Nothing: SANA's own preparation brings this model's attention processor to SANA."""

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """SANA's, with the frames. Binning would run 512x512 as 624x624 and crop the video."""
        frames = self.facts.frames if case.frames is None else case.frames
        if frames is None or (frames - 1) % FRAME_STEP:
            raise UsageError(
                f"{self.facts.id} makes videos of a multiple of {FRAME_STEP} frames and one more, got {frames}. "
                f"Nearest: {max((frames or 0) - 1, 0) // FRAME_STEP * FRAME_STEP + 1}."
            )
        return super().options(case, guidance=guidance) | {"frames": frames}

    def pixels(self, output: Any) -> np.ndarray:
        """The frames of the one video."""
        return output.frames[0]

    def explain(self, difference: tuple[str, ...]) -> tuple[str, ...]:
        """The third axis of the latents counts latent frames; the frames of the video are told beside it."""
        return tuple(LATENT_FRAMES.sub(_video_frames, line) for line in difference)


def _video_frames(line: re.Match[str]) -> str:
    captured, asked = ((int(latent) - 1) * FRAME_STEP + 1 for latent in line.groups())
    told = f"{line[0]} (a video of {captured} frames captured, one of {asked} asked)"
    return line[0] if captured == asked else told


SANA_VIDEO = SanaVideo(
    facts=ModelFacts(
        id="Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
        pipeline="SanaVideoPipeline",
        width_px=832,
        height_px=480,
        frames=81,
        frame_rate=16.0,
        multiple_px=32,
        steps=50,
        guidance=6.0,
        branches=1,
        policy="fixed length",
        text_tokens=TEXT_ROWS,
        tokens=2 * 21 * 30 * 52,  # two videos of 21 latent frames, 16 px square each
        transformer_parameters=2_056_862_144,
        memory_bytes=30_000_000_000,
    ),
    networks={
        # The class default, 2.5, is another model of 1.9 billion parameters.
        "transformer": Component(kind="SanaVideoTransformer3DModel", config={"mlp_ratio": 3.0}),
        "vae": Component(kind="AutoencoderKLWan"),
    },
    # What diffusers' converter writes by default and the released folder names.
    scheduler=Component(
        kind="DPMSolverMultistepScheduler",
        config={"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 8.0},
    ),
    text_width=SANA.text_width,
    max_tokens=TEXT_ROWS,
    template_tokens=SANA.template_tokens,
    guidance_in="batch",
    text_encoder_bytes=SANA.text_encoder_bytes,
)

TINY_SANA_VIDEO = replace(
    SANA_VIDEO,
    facts=replace(
        SANA_VIDEO.facts,
        id="tiny/sana-video",
        width_px=64,
        height_px=64,
        frames=5,
        steps=4,
        transformer_parameters=41_344,
        memory_bytes=1_000_000_000,
        tiny=True,
    ),
    networks={
        "transformer": Component(
            kind="SanaVideoTransformer3DModel",
            config={
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "num_layers": 2,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 12,
                "cross_attention_dim": 24,
                "caption_channels": 8,
                "mlp_ratio": 3.0,
                "sample_size": 8,
                "rope_max_seq_len": 32,
            },
        ),
        "vae": Component(
            kind="AutoencoderKLWan", config={"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        ),
    },
    # The converter's other choice. The solver above makes numpy 2 warn, which a strict test run turns into an error.
    scheduler=Component(kind="FlowMatchEulerDiscreteScheduler", config={"shift": 8.0}),
    text_width=8,
    text_encoder_bytes=0,
)
