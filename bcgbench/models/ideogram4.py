"""Ideogram-4: two denoisers, one that sees the prompt and one that does not; the bucket is `max_sequence_length`.

The pipeline pads a prompt on the left up to that length itself and masks the pad rows, so there is nothing left to pad:
choosing the length is the whole policy, and all arms run at the chosen one, eager too. diffusers' own default, 2048
rows for every prompt, would make the first denoiser's sequence three times as long at 512x512.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bcgbench.models import tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.models.padding import OutsidePolicy, PadCache, choose_bucket, pad_to
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bcgbench.types import Case

POLISH_GUIDANCE = 3.0
POLISH_SHARE = 16
"""One step in 16 is a polish step: the recipe's last 3 of 48."""
TAPPED_LAYERS = 13
"""Hidden states of the text encoder that stand side by side in a prompt's row."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


@dataclass(frozen=True, kw_only=True)
class Ideogram4(Adapter):
    """Asks the pipeline for the smallest bucket that holds the prompt; a longer prompt runs at its own length."""

    def denoisers(self, pipe: Any) -> dict[str, nn.Module]:
        """The denoiser of text and image and the one of the image alone: another module with other weights."""
        return {name: getattr(pipe, name) for name in ("transformer", "unconditional_transformer")}

    def pad(self, arguments: Arguments, *, buckets: tuple[int, ...], cache: PadCache) -> Arguments:
        """The call as it is. OutsidePolicy where its text rows are no bucket: no warm-up stands for such a prompt.

        Which rows are text stands in a tensor, read once per request and module. The image alone has none, but its
        layout is slices of the whole one's, whose strides tell the bucket: made dense, one graph serves all buckets.
        """
        indicator = arguments["indicator"]
        rows = int(cache.get(indicator, "text rows", partial(_text_rows, indicator)))
        if buckets and rows and rows not in buckets:
            raise OutsidePolicy(f"prompt has {rows} tokens, the largest bucket is {max(buckets)}")
        if rows:
            return arguments
        layout = {name: arguments[name] for name in ("position_ids", "segment_ids", "indicator")}
        return arguments | {name: cache.get(part, "dense", partial(_dense, part)) for name, part in layout.items()}

    def prepare_pipeline(self, pipe: Any) -> None:
        """Let `encode_prompt` take embeddings: the pipeline has no argument for them."""
        pipe.encode_prompt = _accepting_embeddings(pipe)

    def tiny_text(self) -> dict[str, Any]:
        """A tiny Qwen3-VL without head, deep enough for the layers that the pipeline taps, with its tokenizer."""
        tokenizer = tiny.qwen_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        encoder = tiny.qwen3_vl(len(tokenizer), layers=36, width=self.text_width // TAPPED_LAYERS).model
        return {"tokenizer": tokenizer, "text_encoder": encoder}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size. Upsampling, off by default too, would draw from the request's generator before the noise is drawn."""
        return super().options(case, guidance=guidance) | {"prompt_upsampling": False}

    def sized(self, case: Case, *, tokens: int, steps: int) -> Arguments:
        """The bucket, else the prompt's own length; and a weight per step, or the one weight that the case asks for."""
        buckets = self.default_buckets if case.buckets is None else case.buckets
        try:
            rows = choose_bucket(tokens, buckets)
        except OutsidePolicy:
            rows = tokens
        polish = steps // POLISH_SHARE
        recipe = (self.facts.guidance,) * (steps - polish) + (POLISH_GUIDANCE,) * polish
        return {
            "max_sequence_length": rows,
            "guidance_scale": case.guidance,
            "guidance_schedule": recipe if case.guidance is None else None,
        }

    def rewrite(self, pipe: Any, prompt: str, *, case: Case, generator: torch.Generator) -> str:
        """The JSON caption that the text encoder makes of the prompt, with a generator of its own."""
        (caption,) = pipe.upsample_prompt(
            prompt, height=case.height_px, width=case.width_px, max_new_tokens=max(self.default_buckets),
            generator=generator, device=pipe._execution_device,
        )  # fmt: skip
        return caption

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt. There is no negative one: the second denoiser sees none."""
        del guidance
        return {"prompt": prompt}

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """Features [1, tokens, width] in the place of the prompt."""
        del guidance
        return {"prompt": [draw(tokens, stream)]}

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """Tokens of the prompt within its chat template."""
        messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        templated = pipe.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(pipe.tokenizer(templated, add_special_tokens=False).input_ids)


def _text_rows(indicator: Tensor) -> Tensor:
    """Rows before the image, pad rows included: int64 scalar on the host."""
    from diffusers.models.transformers.transformer_ideogram4 import OUTPUT_IMAGE_INDICATOR

    return (indicator[0] != OUTPUT_IMAGE_INDICATOR).sum().cpu()


def _dense(part: Tensor) -> Tensor:
    return pad_to(part, length=part.shape[1], dim=1)


def _accepting_embeddings(pipe: Any) -> Any:
    """`encode_prompt` that packs given features [1, tokens, width] as it packs those of its own text encoder."""
    encode = pipe.encode_prompt

    @functools.wraps(encode)
    def encode_prompt(
        prompt: Any, grid_h: int, grid_w: int, max_sequence_length: int, device: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        import torch

        if isinstance(prompt, str) or not isinstance(prompt[0], torch.Tensor):
            return encode(prompt, grid_h, grid_w, max_sequence_length, device)
        (features,) = prompt
        tokens = features.shape[1]
        if tokens > max_sequence_length:
            raise ValueError(f"prompt has {tokens} tokens, exceeds max_sequence_length={max_sequence_length}")
        packed = torch.nn.functional.pad(
            features.to(device, torch.float32), (0, 0, max_sequence_length - tokens, grid_h * grid_w)
        )
        return packed, *pipe._prepare_ids([tokens], grid_h, grid_w, max_sequence_length, device)

    return encode_prompt


IDEOGRAM_4 = Ideogram4(
    facts=ModelFacts(
        id="Comfy-Org/Ideogram-4",
        pipeline="Ideogram4Pipeline",
        aliases=("ideogram-ai/ideogram-4-nf4-diffusers", "ideogram-ai/ideogram-4-fp8", "ideogram-ai/ideogram-v4"),
        width_px=2048,
        height_px=2048,
        multiple_px=16,
        steps=48,
        guidance=7.0,
        branches=2,
        policy="buckets by max_sequence_length",
        # The published five, and diffusers' default.
        buckets=(64, 128, 256, 512, 1024, 2048),
        transformer_parameters=9_279_288_448,
        # 37 GB of weights. A prompt's features are 53 248 wide for every row, those of the image too: 1.8 GB per call,
        # held by two traced prompts and two graph arms, and 3.5 GB as the float32 that the pipeline packs and that each
        # graph arm normalises with two copies.
        memory_bytes=95_000_000_000,
    ),
    networks={
        "transformer": Component(kind="Ideogram4Transformer2DModel"),
        "unconditional_transformer": Component(kind="Ideogram4Transformer2DModel"),
        "vae": Component(kind="AutoencoderKLFlux2"),
    },
    scheduler=Component(kind="FlowMatchEulerDiscreteScheduler"),
    text_width=53_248,
    # The pipeline cuts nothing; positions of the image begin here.
    max_tokens=65_536,
    template_tokens=8,
    guidance_in="calls",
    text_encoder_bytes=16_300_000_000,
    unused_parts=("prompt_enhancer_head",),
    rewriter=("prompt_enhancer_head", "text_encoder"),
)

_TINY_TRANSFORMER = Component(
    kind="Ideogram4Transformer2DModel",
    config={
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": TAPPED_LAYERS * 16,
        "rope_theta": 10_000,
        "mrope_section": (2, 1, 1),
    },
)
TINY_IDEOGRAM_4 = replace(
    IDEOGRAM_4,
    facts=replace(
        IDEOGRAM_4.facts,
        id="tiny/ideogram-4",
        aliases=(),
        width_px=64,
        height_px=64,
        multiple_px=4,
        steps=4,
        buckets=(32, 64, 128),
        transformer_parameters=30_192,
        memory_bytes=1_000_000_000,
        tiny=True,
    ),
    networks={
        "transformer": _TINY_TRANSFORMER,
        "unconditional_transformer": _TINY_TRANSFORMER,
        "vae": Component(
            kind="AutoencoderKLFlux2",
            config={
                "down_block_types": ["DownEncoderBlock2D"] * 2,
                "up_block_types": ["UpDecoderBlock2D"] * 2,
                "block_out_channels": [8, 16],
                "layers_per_block": 1,
                "latent_channels": 4,
                "norm_num_groups": 4,
                "sample_size": 64,
            },
        ),
    },
    text_width=TAPPED_LAYERS * 16,
    text_encoder_bytes=0,
)
