"""Z-Image and Z-Image-Turbo: captions share a graph per multiple of 32 tokens, bitwise equal to the native call.

The model rounds every caption up to 32 rows with a learned pad token that is attended to like text, and the image's
RoPE positions start after those rows. So no bucket beyond that multiple is right (0.7 off on outputs of about 2), but
within it the one thing that depends on the native length is which rows become pad tokens. Given that as a tensor, the
prompts of a multiple share a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bcgbench.models import tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.models.padding import PadCache, pad_to, round_up
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from bcgbench.types import Case

CAPTION_MULTIPLE = 32
"""`SEQ_MULTI_OF` of the transformer."""
NEGATIVE_PROMPT = ""
NEGATIVE_TOKENS = 8
"""The chat template around an empty prompt."""


@dataclass(frozen=True, kw_only=True)
class ZImage(Adapter):
    """Pre-pads each caption to a multiple of 32 rows and adds `cap_lens`, one int64 tensor [1] per caption."""

    def pad(self, arguments: Arguments, *, buckets: tuple[int, ...], cache: PadCache) -> Arguments:
        """Captions with zero rows up to the multiple, and their native lengths as tensors on the device.

        The zero rows are replaced by the pad token inside, before anything mixes rows.
        """
        del buckets
        captions, lengths = [], []
        for caption in arguments["cap_feats"]:
            captions.append(cache.get(caption, "padded", partial(_fill_up, caption)))
            lengths.append(cache.get(caption, "length", partial(_length, caption)))
        return {**arguments, "cap_feats": captions, "cap_lens": lengths}

    def forward(self, module: Any, original: Callable[..., Any], arguments: Arguments) -> Any:
        """The native forward, its caption pad masks computed from `cap_lens` on the device for this call."""
        lengths = arguments.get("cap_lens")
        if lengths is None:
            return original(**arguments)
        native = {name: value for name, value in arguments.items() if name != "cap_lens"}
        # searched by identity: torch.compile would guard on the ids that are a dict's keys
        captions = list(zip(native["cap_feats"], lengths, strict=True))
        pad_with_ids = module._pad_with_ids

        def masked(feat: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            padded, positions, mask, rows, noise = pad_with_ids(feat, *args, **kwargs)
            length = next((length for caption, length in captions if caption is feat), None)
            return padded, positions, mask if length is None else _from(length, rows=rows), rows, noise

        module._pad_with_ids = masked
        try:
            return original(**native)
        finally:
            del module._pad_with_ids  # the instance attribute; the class keeps its method

    def tiny_text(self) -> dict[str, Any]:
        """A tiny Qwen3 with its tokenizer."""
        tokenizer = tiny.qwen_tokenizer()
        return {"tokenizer": tokenizer, "text_encoder": tiny.qwen3(len(tokenizer), width=self.text_width)}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size, guidance, and the longest prompt that the pipeline takes."""
        size = super().options(case, guidance=guidance)
        return size | {"guidance_scale": guidance, "max_sequence_length": self.max_tokens}

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt as a str: the pipeline writes its template into a list that it is given."""
        return {"prompt": prompt} | ({"negative_prompt": NEGATIVE_PROMPT} if guidance > 0 else {})

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """Lists of [tokens, width], as the text encoder gives them."""
        made: Arguments = {"prompt_embeds": [draw(tokens, stream)[0]]}
        if guidance > 0:
            made["negative_prompt_embeds"] = [draw(NEGATIVE_TOKENS, 0)[0]]
        return made

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """Tokens of the prompt within its chat template."""
        messages = [{"role": "user", "content": prompt}]
        templated = pipe.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return len(pipe.tokenizer(templated).input_ids)


def _fill_up(caption: Tensor) -> Tensor:
    return pad_to(caption, length=round_up(len(caption), multiple=CAPTION_MULTIPLE), dim=0)


def _length(caption: Tensor) -> Tensor:
    import torch

    return torch.full((1,), len(caption), dtype=torch.int64, device=caption.device)


def _from(length: Tensor, *, rows: int) -> Tensor:
    """Boolean mask [rows], true from `length` on."""
    import torch

    return torch.arange(rows, device=length.device) >= length


Z_IMAGE = ZImage(
    facts=ModelFacts(
        id="Tongyi-MAI/Z-Image",
        pipeline="ZImagePipeline",
        width_px=1024,
        height_px=1024,
        multiple_px=16,
        steps=50,
        guidance=5.0,
        branches=1,
        policy="multiples of 32",
        tokens=2 * 4096,  # guidance is one call of two pictures
        transformer_parameters=6_154_908_736,
        memory_bytes=18_000_000_000,
    ),
    networks={
        "transformer": Component(kind="ZImageTransformer2DModel"),
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
    scheduler=Component(kind="FlowMatchEulerDiscreteScheduler", config={"shift": 3.0}),
    text_width=2560,
    max_tokens=512,
    template_tokens=8,
    guidance_in="batch",
    text_encoder_bytes=8_000_000_000,
)
Z_IMAGE_TURBO = replace(
    Z_IMAGE, facts=replace(Z_IMAGE.facts, id="Tongyi-MAI/Z-Image-Turbo", steps=9, guidance=0.0, tokens=4096)
)

TINY_Z_IMAGE = replace(
    Z_IMAGE,
    facts=replace(
        Z_IMAGE.facts,
        id="tiny/z-image",
        width_px=64,
        height_px=64,
        multiple_px=4,
        steps=4,
        transformer_parameters=361_056,
        memory_bytes=1_000_000_000,
        tiny=True,
    ),
    networks={
        "transformer": Component(
            kind="ZImageTransformer2DModel",
            config={
                "in_channels": 4,
                "dim": 32,
                "n_layers": 2,
                "n_refiner_layers": 1,
                "n_heads": 2,
                "n_kv_heads": 2,
                "cap_feat_dim": 16,
                "axes_dims": [8, 4, 4],
                "axes_lens": [1024, 64, 64],
            },
        ),
        "vae": Component(
            kind="AutoencoderKL",
            config={
                "down_block_types": ["DownEncoderBlock2D"] * 2,
                "up_block_types": ["UpDecoderBlock2D"] * 2,
                "block_out_channels": [8, 16],
                "layers_per_block": 1,
                "latent_channels": 4,
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
TINY_Z_IMAGE_TURBO = replace(TINY_Z_IMAGE, facts=replace(TINY_Z_IMAGE.facts, id="tiny/z-image-turbo", guidance=0.0))
