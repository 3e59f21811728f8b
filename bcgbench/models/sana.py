"""SANA1.5 1.6B: every prompt is 300 rows, so one shape serves them all and there is nothing to pad.

Its cross-attention is the only softmax attention, and calls torch directly; it is sent through diffusers' attention
registry here, bitwise equal, so that it can be a break like every other model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bcgbench.models import tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.models.padding import pad_to
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    from bcgbench.types import Case

TEXT_ROWS = 300
NEGATIVE_PROMPT = ""
NEGATIVE_TOKENS = 1
"""The begin token of an empty prompt."""


@dataclass(frozen=True, kw_only=True)
class Sana(Adapter):
    """Pads nothing; makes the cross-attention visible to the attention registry."""

    def prepare_pipeline(self, pipe: Any) -> None:
        """Give every cross-attention SANA-Video's processor: the same attention through `dispatch_attention_fn`."""
        from diffusers.models.transformers.transformer_sana_video import SanaAttnProcessor2_0

        for block in pipe.transformer.transformer_blocks:
            block.attn2.set_processor(SanaAttnProcessor2_0())

    def tiny_text(self) -> dict[str, Any]:
        """A tiny Gemma-2 with its tokenizer."""
        tokenizer = tiny.gemma_tokenizer()
        return {"tokenizer": tokenizer, "text_encoder": tiny.gemma2(len(tokenizer), width=self.text_width)}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size and guidance. Binning would run 512x512 as 1024x1024 and scale the picture down."""
        size = super().options(case, guidance=guidance)
        return size | {"guidance_scale": guidance, "use_resolution_binning": False}

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt; the pipeline runs guidance from 1 on with an empty negative prompt."""
        del guidance
        return {"prompt": prompt, "negative_prompt": NEGATIVE_PROMPT}

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """300 rows per prompt with an int64 mask over the valid ones, as the text encoder gives them."""
        import torch

        def masked(count: int, stream: int) -> Any:
            rows = draw(TEXT_ROWS, stream)
            return rows, pad_to(rows.new_ones((1, count), dtype=torch.int64), length=TEXT_ROWS, dim=1)

        made: Arguments = {"negative_prompt": None}
        made["prompt_embeds"], made["prompt_attention_mask"] = masked(tokens, stream)
        if guidance > 1:
            made["negative_prompt_embeds"], made["negative_prompt_attention_mask"] = masked(NEGATIVE_TOKENS, 0)
        return made


SANA = Sana(
    facts=ModelFacts(
        id="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
        pipeline="SanaPipeline",
        width_px=1024,
        height_px=1024,
        multiple_px=32,
        steps=20,
        guidance=4.5,
        branches=1,
        policy="fixed length",
        text_tokens=TEXT_ROWS,
        tokens=2 * 1024,  # guidance is one call of two pictures
        transformer_parameters=1_604_641_952,
        memory_bytes=12_000_000_000,
    ),
    networks={
        "transformer": Component(
            kind="SanaTransformer2DModel", config={"qk_norm": "rms_norm_across_heads", "sample_size": 32}
        ),
        "vae": Component(
            kind="AutoencoderDC",
            config={
                "latent_channels": 32,
                "encoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
                "decoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
                "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
                "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
                "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
                "decoder_layers_per_block": [3, 3, 3, 3, 3, 3],
                "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
                "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
                "downsample_block_type": "conv",
                "upsample_block_type": "interpolate",
                "scaling_factor": 0.41407,
            },
        ),
    },
    # What diffusers' converter writes by default and what the pipeline is annotated with.
    scheduler=Component(
        kind="DPMSolverMultistepScheduler",
        config={"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0},
    ),
    text_width=2304,
    max_tokens=TEXT_ROWS,
    template_tokens=1,
    guidance_in="batch",
    text_encoder_bytes=5_300_000_000,
)

TINY_SANA = replace(
    SANA,
    facts=replace(
        SANA.facts,
        id="tiny/sana1.5",
        width_px=64,
        height_px=64,
        steps=4,
        transformer_parameters=5_908,
        memory_bytes=1_000_000_000,
        tiny=True,
    ),
    networks={
        "transformer": Component(
            kind="SanaTransformer2DModel",
            config={
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "num_attention_heads": 2,
                "attention_head_dim": 4,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 4,
                "cross_attention_dim": 8,
                "caption_channels": 8,
                "sample_size": 32,
                "qk_norm": "rms_norm_across_heads",
            },
        ),
        "vae": Component(
            kind="AutoencoderDC",
            config={
                "latent_channels": 4,
                "attention_head_dim": 2,
                "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
                "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
                "encoder_block_out_channels": [8, 8],
                "decoder_block_out_channels": [8, 8],
                "encoder_layers_per_block": [1, 1],
                "decoder_layers_per_block": [1, 1],
                "encoder_qkv_multiscales": [[], [5]],
                "decoder_qkv_multiscales": [[], [5]],
                "downsample_block_type": "conv",
                "upsample_block_type": "interpolate",
                "scaling_factor": 0.41407,
            },
        ),
    },
    # The converter's other choice. The solver above makes numpy 2 warn, which a strict test run turns into an error.
    scheduler=Component(kind="FlowMatchEulerDiscreteScheduler", config={"shift": 3.0}),
    text_width=8,
    text_encoder_bytes=0,
)
