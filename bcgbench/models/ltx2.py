"""LTX-2 and LTX-2.3: video with sound. Every prompt is 1024 rows, so frames and guidance calls make the graphs.

The connectors fill a prompt's pad rows with learned registers and hand on a mask of ones: there is nothing to pad.
LTX-2.3 guides with three transformer calls per step (text, spatio-temporal, modality), each a signature of its own:
two rows, one row with a block list, one row with the modalities isolated. LTX-2 was trained for the first only; its
spatio-temporal call is a whole forward that changes no bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError
from bcgbench.models import media, tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bcgbench.types import Case

TEXT_ROWS = 1024
FRAME_RATE = 24.0
NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted"
NEGATIVE_TOKENS = 15
LATENT_FRAMES = re.compile(r"^num_frames: captured (\d+), asked (\d+)$")


@dataclass(frozen=True, kw_only=True)
class Ltx2(Adapter):
    """Pads nothing; turns every guidance of both modalities on or off together."""

    frame_step: int = 8
    """Frames per latent frame: a video has a multiple of this and one frame."""
    audio_guidance: float | None = None
    """Text guidance of the audio; None is the video's."""
    stg_blocks: tuple[int, ...] = ()
    """Blocks of spatio-temporal guidance; () where the model has none, nor modality guidance."""
    cross_timestep: bool = False
    """Whether each modality is modulated by the other's noise level: LTX-2.3 and later."""

    def fits(self, folder: Path, *, index: Mapping[str, Any]) -> bool:
        """Both versions have one pipeline class; the transformer's own prompt projection tells them apart."""
        if not super().fits(folder, index=index):
            return False
        config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        return config.get("use_prompt_embeddings", True) == (not self.stg_blocks)

    def prepare_pipeline(self, pipe: Any) -> None:
        """Pad prompts on the left, as the pipeline does when it encodes text: synthetic prompts skip that line."""
        if pipe.tokenizer is not None:
            pipe.tokenizer.padding_side = "left"

    def tiny_text(self) -> dict[str, Any]:
        """A tiny Gemma-3 with its tokenizer; the prompt is all its hidden states side by side."""
        tokenizer = tiny.gemma_tokenizer()
        width = self.networks["connectors"].config["caption_channels"]
        return {"tokenizer": tokenizer, "text_encoder": tiny.gemma3(len(tokenizer), width=width)}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size, frames, and guidance with its audio twins, which follow the video's scales only where those are set.

        Nothing is left to the pipeline's defaults: they are those of LTX-2.3 and triple the calls of LTX-2.
        """
        frames = self.facts.frames if case.frames is None else case.frames
        if frames is None or (frames - 1) % self.frame_step:
            raise UsageError(
                f"{self.facts.id} makes videos of a multiple of {self.frame_step} frames and one more, got {frames}. "
                f"Nearest: {max((frames or 0) - 1, 0) // self.frame_step * self.frame_step + 1}."
            )
        size = super().options(case, guidance=guidance)
        guided = guidance > 1
        perturbed = 1.0 if guided and self.stg_blocks else 0.0
        isolated = 3.0 if guided and self.stg_blocks else 1.0
        rescale = 0.7 if self.stg_blocks else 0.0
        return size | {
            "num_frames": frames,
            "frame_rate": FRAME_RATE,
            "guidance_scale": guidance,
            "audio_guidance_scale": self.audio_guidance if guided and self.audio_guidance else guidance,
            "stg_scale": perturbed,
            "audio_stg_scale": perturbed,
            "modality_scale": isolated,
            "audio_modality_scale": isolated,
            "guidance_rescale": rescale,
            "audio_guidance_rescale": rescale,
            "spatio_temporal_guidance_blocks": list(self.stg_blocks) or None,
            "use_cross_timestep": self.cross_timestep,
            "max_sequence_length": self.max_tokens,
            # Off by default too. It samples another prompt from the global generator: every arm would differ.
            "enable_prompt_enhancement": False,
        }

    def rewrite(self, pipe: Any, prompt: str, *, case: Case, generator: torch.Generator) -> str:
        """The prompt as the text encoder enhances it, told what diffusers' own recipe tells it."""
        from diffusers.pipelines.ltx2.utils import T2V_DEFAULT_SYSTEM_PROMPT

        del case
        (enhanced,) = pipe.enhance_prompt(prompt, system_prompt=T2V_DEFAULT_SYSTEM_PROMPT, generator=generator)
        return enhanced

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt, with the recipe's negative prompt, which the pipeline reads where guidance is above 1."""
        del guidance
        return {"prompt": prompt, "negative_prompt": NEGATIVE_PROMPT}

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """1024 rows per prompt, pad rows first, with an int64 mask over the valid ones, as the text encoder gives them.

        Only valid rows are drawn: a row is 188 160 wide, and the connectors replace what stands in the others.
        """
        made: Arguments = {}
        made["prompt_embeds"], made["prompt_attention_mask"] = _left_padded(draw(tokens, stream), rows=self.max_tokens)
        if guidance > 1:
            negative = _left_padded(draw(NEGATIVE_TOKENS, 0), rows=self.max_tokens)
            made["negative_prompt_embeds"], made["negative_prompt_attention_mask"] = negative
        return made

    def pixels(self, output: Any) -> Any:
        """Frames of the video."""
        return output.frames[0]

    def audio(self, output: Any, *, pipe: Any) -> media.Sound:
        """The waveform, at the rate of the vocoder."""
        return media.sound(output.audio, rate_hz=pipe.vocoder.config.output_sampling_rate)

    def explain(self, difference: tuple[str, ...]) -> tuple[str, ...]:
        """`num_frames` of the forward counts latent frames; the frames of the video are told beside it."""
        return tuple(LATENT_FRAMES.sub(self._video_frames, line) for line in difference)

    def _video_frames(self, line: re.Match[str]) -> str:
        captured, asked = ((int(latent) - 1) * self.frame_step + 1 for latent in line.groups())
        return f"{line[0]} latent frames (a video of {captured} frames captured, one of {asked} asked)"


def _left_padded(embeds: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Embeddings [1, rows, width] that end with the given ones, and their int64 mask [1, rows]."""
    import torch

    added = rows - embeds.shape[1]
    mask = torch.ones((1, rows), dtype=torch.int64, device=embeds.device)
    mask[:, :added] = 0
    return torch.nn.functional.pad(embeds, (0, 0, added, 0)), mask


TRANSFORMER_23 = {
    "rope_type": "split",
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
CONNECTORS_23 = {
    "rope_type": "split",
    "video_gated_attn": True,
    "audio_gated_attn": True,
    "per_modality_projections": True,
    "proj_bias": True,
}
# Told nothing, the class works out 64 and 16 from its blocks: an eighth of the tokens.
VAE = {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
TRANSFORMER, CONNECTORS = "LTX2VideoTransformer3DModel", "pipelines.ltx2.LTX2TextConnectors"
VOCODER, VOCODER_23 = "pipelines.ltx2.LTX2Vocoder", "pipelines.ltx2.LTX2VocoderWithBWE"

LTX2 = Ltx2(
    facts=ModelFacts(
        id="Lightricks/LTX-2",
        pipeline="LTX2Pipeline",
        width_px=768,
        height_px=512,
        frames=121,
        multiple_px=32,
        steps=40,
        guidance=4.0,
        branches=1,
        policy="fixed length",
        text_tokens=TEXT_ROWS,
        tokens=2 * (16 * 16 * 24 + 126),  # guidance is one call of two videos of 16 latent frames, with their sound
        transformer_parameters=18_876_174_592,
        memory_bytes=62_000_000_000,
    ),
    networks={
        "transformer": Component(kind=TRANSFORMER, config={"rope_type": "split"}),
        "connectors": Component(kind=CONNECTORS, config={"rope_type": "split", "caption_channels": 3840}),
        "vae": Component(kind="AutoencoderKLLTX2Video", config=VAE),
        "audio_vae": Component(kind="AutoencoderKLLTX2Audio"),
        "vocoder": Component(kind=VOCODER),
    },
    scheduler=Component(
        kind="FlowMatchEulerDiscreteScheduler",
        config={
            "use_dynamic_shifting": True,
            "base_shift": 0.95,
            "max_shift": 2.05,
            "base_image_seq_len": 1024,
            "max_image_seq_len": 4096,
            "shift_terminal": 0.1,
        },
    ),
    # As Qwen-Image's: one step's schedule stretched to `shift_terminal` is 0 by 0.
    min_steps=2,
    text_width=3840 * 49,
    max_tokens=TEXT_ROWS,
    template_tokens=1,
    guidance_in="batch",
    text_encoder_bytes=24_400_000_000,
    # Enhancing a prompt needs the first two, a video without a frame count the last; LTX-2.5 alone has those.
    unused_parts=("processor", "prompt_enhancer", "duration_head"),
    rewriter=("processor", "text_encoder"),
)
LTX23 = replace(
    LTX2,
    facts=replace(
        LTX2.facts,
        id="Lightricks/LTX-2.3",
        # The first id holds the original single-file checkpoint, this one diffusers' layout of it.
        aliases=("diffusers/LTX-2.3-Diffusers",),
        steps=30,
        guidance=3.0,
        branches=3,
        tokens=4 * (16 * 16 * 24 + 126) // 3,  # two videos in the first call, one in the others
        transformer_parameters=18_988_838_144,
        memory_bytes=66_000_000_000,
    ),
    networks={
        "transformer": Component(kind=TRANSFORMER, config=TRANSFORMER_23),
        "connectors": Component(
            kind=CONNECTORS,
            config={
                **CONNECTORS_23,
                "caption_channels": 3840,
                "video_connector_num_attention_heads": 32,
                "video_connector_num_layers": 8,
                "audio_connector_num_attention_heads": 32,
                "audio_connector_attention_head_dim": 64,
                "audio_connector_num_layers": 8,
            },
        ),
        "vae": Component(
            kind="AutoencoderKLLTX2Video",
            config={
                **VAE,
                "block_out_channels": [256, 512, 1024, 1024],
                "decoder_block_out_channels": [256, 512, 512, 1024],
                "layers_per_block": [4, 6, 4, 2, 2],
                "decoder_layers_per_block": [4, 6, 4, 2, 2],
                "decoder_spatio_temporal_scaling": [True] * 4,
                "decoder_inject_noise": [False] * 5,
                "upsample_type": ["spatiotemporal", "spatiotemporal", "temporal", "spatial"],
                "upsample_residual": [False] * 4,
                "upsample_factor": [2, 2, 1, 2],
                "decoder_spatial_padding_mode": "zeros",
            },
        ),
        "audio_vae": Component(kind="AutoencoderKLLTX2Audio"),
        "vocoder": Component(kind=VOCODER_23),
    },
    audio_guidance=7.0,
    stg_blocks=(28,),
    cross_timestep=True,
)
