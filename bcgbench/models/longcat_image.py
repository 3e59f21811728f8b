"""LongCat-Image: every prompt is 512 rows, pad rows attended by design, so one shape serves both branches.

The forward takes no mask and the image's RoPE begins at 512, so there is nothing to pad and another length would be
another model (0.10 off on outputs of about 2). Guidance passes `guidance=None` in one branch and leaves it out in the
other; bound with defaults, both are one signature.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bcgbench.models import tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bcgbench.types import Case

TEXT_ROWS = 512
NEGATIVE_PROMPT = ""


@dataclass(frozen=True, kw_only=True)
class LongCatImage(Adapter):
    """Pads nothing; lets the pipeline take embeddings and keeps it from rewriting prompts."""

    def prepare_pipeline(self, pipe: Any) -> None:
        """Let `encode_prompt` pass embeddings through: diffusers 0.42 counts the prompt's items even without one."""
        pipe.encode_prompt = _accepting_embeddings(pipe.encode_prompt)

    def tiny_text(self) -> dict[str, Any]:
        """A tiny Qwen2.5-VL with its tokenizer. Only rewriting needs the processor, and that needs torchvision."""
        tokenizer = tiny.qwen_tokenizer()
        return {"tokenizer": tokenizer, "text_encoder": tiny.qwen25_vl(len(tokenizer), width=self.text_width)}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size and guidance. Rewriting, on by default, samples from no generator: every arm would differ.

        Asked for, `rewrite` has done it before.
        """
        size = super().options(case, guidance=guidance)
        return size | {"guidance_scale": guidance, "enable_prompt_rewrite": False}

    def rewrite(self, pipe: Any, prompt: str, *, case: Case, generator: torch.Generator) -> str:
        """What the text encoder makes of the prompt: up to 512 tokens."""
        del case, generator
        (rewritten,) = pipe.rewire_prompt(prompt, pipe._execution_device)
        return rewritten

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt; the pipeline runs guidance above 1 with an empty negative prompt."""
        del guidance
        return {"prompt": prompt, "negative_prompt": NEGATIVE_PROMPT}

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """512 rows per prompt whatever its tokens: pad rows are attended like the others."""
        del tokens
        made = {"prompt_embeds": draw(TEXT_ROWS, stream)}
        return made | ({"negative_prompt_embeds": draw(TEXT_ROWS, 0)} if guidance > 1 else {})

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """Tokens of the prompt in its 512 rows: quoted text character by character, the template's cut off again."""
        from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

        pieces = [piece for text, quoted in split_quotation(prompt) for piece in (text if quoted else [text])]
        return sum(len(pipe.tokenizer(piece, add_special_tokens=False).input_ids) for piece in pieces)


def _accepting_embeddings(encode: Any) -> Any:
    """`encode_prompt` that counts given embeddings instead of a prompt that is not there."""

    @functools.wraps(encode)
    def encode_prompt(prompt: Any = None, *args: Any, prompt_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        if prompt is None and prompt_embeds is not None:
            prompt = [""] * len(prompt_embeds)
        return encode(prompt, *args, prompt_embeds=prompt_embeds, **kwargs)

    return encode_prompt


LONGCAT_IMAGE = LongCatImage(
    facts=ModelFacts(
        id="meituan-longcat/LongCat-Image",
        pipeline="LongCatImagePipeline",
        width_px=1024,
        height_px=1024,
        multiple_px=16,
        steps=50,
        guidance=4.5,
        branches=2,
        policy="fixed length",
        text_tokens=TEXT_ROWS,
        transformer_parameters=6_270_668_864,
        memory_bytes=19_000_000_000,
    ),
    networks={
        # The release's depth; the class default (19 + 38 blocks) is a model of 11.9 B.
        "transformer": Component(
            kind="LongCatImageTransformer2DModel", config={"num_layers": 10, "num_single_layers": 20}
        ),
        "vae": Component(
            kind="AutoencoderKL",
            config={
                "down_block_types": ["DownEncoderBlock2D"] * 4,
                "up_block_types": ["UpDecoderBlock2D"] * 4,
                "block_out_channels": [128, 256, 512, 512],
                "layers_per_block": 2,
                "latent_channels": 16,
                "norm_num_groups": 32,
                "sample_size": 1024,
                "scaling_factor": 0.3611,
                "shift_factor": 0.1159,
                "use_quant_conv": False,
                "use_post_quant_conv": False,
            },
        ),
    },
    scheduler=Component(
        kind="FlowMatchEulerDiscreteScheduler",
        config={
            "use_dynamic_shifting": True,
            "shift": 3.0,
            "base_shift": 0.5,
            "max_shift": 1.15,
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
        },
    ),
    text_width=3584,
    max_tokens=TEXT_ROWS,
    template_tokens=0,
    guidance_in="calls",
    text_encoder_bytes=16_600_000_000,
    text_parts=("tokenizer", "text_encoder", "text_processor"),
    unused_parts=("text_processor",),
    rewriter=("text_processor", "text_encoder"),
)

TINY_LONGCAT_IMAGE = replace(
    LONGCAT_IMAGE,
    facts=replace(
        LONGCAT_IMAGE.facts,
        id="tiny/longcat-image",
        width_px=64,
        height_px=64,
        multiple_px=4,
        steps=4,
        transformer_parameters=85_504,
        memory_bytes=1_000_000_000,
        tiny=True,
    ),
    networks={
        "transformer": Component(
            kind="LongCatImageTransformer2DModel",
            config={
                "num_layers": 1,
                "num_single_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 16,
                "pooled_projection_dim": 16,
                "axes_dims_rope": [4, 4, 8],
            },
        ),
        "vae": Component(
            kind="AutoencoderKL",
            config={
                "down_block_types": ["DownEncoderBlock2D"] * 2,
                "up_block_types": ["UpDecoderBlock2D"] * 2,
                "block_out_channels": [8, 16],
                "layers_per_block": 1,
                "latent_channels": 16,
                "norm_num_groups": 4,
                "sample_size": 64,
                "scaling_factor": 0.3611,
                "shift_factor": 0.1159,
            },
        ),
    },
    text_width=16,
    text_encoder_bytes=0,
)
