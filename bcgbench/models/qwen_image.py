"""Qwen-Image and Qwen-Image-2512: prompt length enters the shapes, so prompts are padded to buckets under a mask.

The model masks text keys itself (a boolean key mask per block), and its text RoPE is a slice by length that does not
move the image's. So the embeddings and the mask are all there is to pad; against the native length only rounding
changes: 5e-7 in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bcgbench.models import tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.models.padding import PadCache, choose_bucket, cut_to, pad_to
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from bcgbench.types import Case

EMBEDS, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
NEGATIVE_PROMPT = " "
"""The model's own recipe; without a negative prompt the pipeline runs no guidance at all."""
NEGATIVE_TOKENS = 6
"""A space and the five template tokens after it."""


@dataclass(frozen=True, kw_only=True)
class QwenImage(Adapter):
    """Pads `encoder_hidden_states` to a bucket and always gives a mask; changes nothing else."""

    def pad(self, arguments: Arguments, *, buckets: tuple[int, ...], cache: PadCache) -> Arguments:
        """Embeddings padded with zeros to the smallest bucket that holds them; () keeps the native call."""
        if not buckets:
            return arguments
        return self._shaped(arguments, bucket=choose_bucket(arguments[EMBEDS].shape[1], buckets), cache=cache)

    def variants(self, arguments: Arguments, *, buckets: tuple[int, ...], cache: PadCache) -> Iterator[Arguments]:
        """The call in every bucket, largest first; buckets below the prompt's length hold a cut prompt."""
        if not buckets:
            yield arguments
        for bucket in sorted(buckets, reverse=True):
            yield self._shaped(arguments, bucket=bucket, cache=cache)

    def _shaped(self, arguments: Arguments, *, bucket: int, cache: PadCache) -> Arguments:
        embeds, mask = arguments[EMBEDS], arguments[MASK]
        shaped = cache.get(embeds, ("embeds", bucket), lambda: _fit(embeds, length=bucket))
        if mask is None:  # one prompt alone: every row counts
            rows = min(embeds.shape[1], bucket)
            made = cache.get(embeds, ("mask", bucket), lambda: pad_to(_ones(embeds, rows=rows), length=bucket, dim=1))
        else:
            made = cache.get(mask, ("mask", bucket), lambda: _fit(mask, length=bucket))
        return {**arguments, EMBEDS: shaped, MASK: made}

    def prepare_pipeline(self, pipe: Any) -> None:
        """Count the template's prefix under a tiny tokenizer: the pipeline's 34 is for the released one.

        Saved tiny pipelines need it too, since the number is not part of a saved pipeline.
        """
        if pipe.tokenizer is not None and len(pipe.tokenizer) < tiny.TINY_VOCABULARY:
            prefix, _, _ = pipe.prompt_template_encode.partition("{}")
            pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(prefix).input_ids)

    def tiny_text(self) -> dict[str, Any]:
        """A tiny Qwen2.5-VL with its tokenizer."""
        tokenizer = tiny.qwen_tokenizer()
        return {"tokenizer": tokenizer, "text_encoder": tiny.qwen25_vl(len(tokenizer), width=self.text_width)}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size, guidance, and the pipeline's longest prompt: a lower limit would cut prompts silently."""
        size = super().options(case, guidance=guidance)
        return size | {"true_cfg_scale": guidance, "max_sequence_length": self.max_tokens}

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt, with the negative prompt that turns guidance on."""
        return {"prompt": prompt} | ({"negative_prompt": NEGATIVE_PROMPT} if guidance > 1 else {})

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """Embeddings with an all-true mask, as the text encoder gives them."""
        positive, negative = draw(tokens, stream), draw(NEGATIVE_TOKENS, 0)
        made = {"prompt_embeds": positive, "prompt_embeds_mask": _ones(positive, rows=tokens)}
        if guidance > 1:
            made |= {
                "negative_prompt_embeds": negative,
                "negative_prompt_embeds_mask": _ones(negative, rows=NEGATIVE_TOKENS),
            }
        return made

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """Tokens after the template's prefix, which the pipeline drops."""
        templated = pipe.prompt_template_encode.format(prompt)
        return len(pipe.tokenizer(templated).input_ids) - pipe.prompt_template_encode_start_idx


def _fit(tensor: Tensor, *, length: int) -> Tensor:
    """Text rows padded with zeros, or cut, to a length."""
    if tensor.shape[1] > length:
        return cut_to(tensor, length=length, dim=1)
    return pad_to(tensor, length=length, dim=1)


def _ones(embeds: Tensor, *, rows: int) -> Tensor:
    """An int64 mask [batch, rows] of ones, as the pipeline's own masks are."""
    return embeds.new_ones((embeds.shape[0], rows), dtype=_int64())


def _int64() -> Any:
    import torch

    return torch.int64


SCHEDULER = Component(
    kind="FlowMatchEulerDiscreteScheduler",
    config={
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    },
)

QWEN_IMAGE = QwenImage(
    facts=ModelFacts(
        id="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        width_px=1024,
        height_px=1024,
        multiple_px=16,
        steps=50,
        guidance=4.0,
        branches=2,
        policy="buckets with mask",
        buckets=(64, 128, 256, 512, 1024),
        transformer_parameters=20_430_401_088,
        memory_bytes=50_000_000_000,
    ),
    networks={
        "transformer": Component(kind="QwenImageTransformer2DModel"),
        "vae": Component(kind="AutoencoderKLQwenImage"),
    },
    scheduler=SCHEDULER,
    # Stretching one step's schedule to `shift_terminal` divides 0 by 0: every latent would be NaN.
    min_steps=2,
    text_width=3584,
    max_tokens=1024,
    template_tokens=5,
    guidance_in="calls",
    text_encoder_bytes=16_600_000_000,
)
QWEN_IMAGE_2512 = replace(QWEN_IMAGE, facts=replace(QWEN_IMAGE.facts, id="Qwen/Qwen-Image-2512"))

TINY_QWEN_IMAGE = replace(
    QWEN_IMAGE,
    facts=replace(
        QWEN_IMAGE.facts,
        id="tiny/qwen-image",
        width_px=64,
        height_px=64,
        multiple_px=8,
        steps=4,
        buckets=(32, 64),
        transformer_parameters=190_720,
        memory_bytes=1_000_000_000,
        tiny=True,
    ),
    networks={
        "transformer": Component(
            kind="QwenImageTransformer2DModel",
            config={
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 3,
                "joint_attention_dim": 16,
                "axes_dims_rope": (8, 4, 4),
            },
        ),
        "vae": Component(
            kind="AutoencoderKLQwenImage",
            config={
                "base_dim": 24,
                "z_dim": 4,
                "dim_mult": [1, 2, 4],
                "num_res_blocks": 1,
                "temperal_downsample": [False, True],
                "latents_mean": [0.0] * 4,
                "latents_std": [1.0] * 4,
            },
        ),
    },
    text_width=16,
    text_encoder_bytes=0,
)
TINY_QWEN_IMAGE_2512 = replace(TINY_QWEN_IMAGE, facts=replace(TINY_QWEN_IMAGE.facts, id="tiny/qwen-image-2512"))
