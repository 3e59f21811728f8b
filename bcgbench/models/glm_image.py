"""GLM-Image: native glyph length, and a form of the call that a graph can hold, bitwise equal to the pipeline's own.

Only quoted text in a prompt changes a shape. As the pipeline calls it, the forward cannot be captured: it zeroes prior
embeddings by boolean indexing, copies RoPE from the host 120 times, and is given a new, empty cache object per request.
All three have an equal on the device: a factor of 0 or 1, tables passed as `image_rotary_emb`, and no cache.

The prior, image tokens that an autoregressive model samples, is drawn once per prompt and given to every arm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError
from bcgbench.models import tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.models.draws import sampling
from bcgbench.models.padding import OutsidePolicy, PadCache
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from bcgbench.models.weights import Builder
    from bcgbench.types import Case

KEEP = "prior_keep"
"""Added argument [batch, tokens, 1]: 0 where `prior_token_drop` is true, else 1."""
GLYPHS = (r"'([^']*)'", "\u201c([^\u201c\u201d]*)\u201d", r'"([^"]*)"', "「([^「」]*)」")
"""What the pipeline takes for quoted text; two apostrophes are a quotation too."""


@dataclass(frozen=True, kw_only=True)
class GlmImage(Adapter):
    """Replaces what cannot be captured by equal inputs on the device; keeps every length as it is."""

    def pad(self, arguments: Arguments, *, buckets: tuple[int, ...], cache: PadCache) -> Arguments:
        """The call with RoPE tables and `prior_keep` on the device and no cache: one form for both branches.

        OutsidePolicy for image-conditioned calls, whose keys and values pass through Python lists between calls.
        """
        del buckets
        if not _is_empty(arguments["kv_caches"]):
            raise OutsidePolicy("image-conditioned call: its keys and values are kept in Python, outside any graph")
        prior, drop, latents = (arguments[name] for name in ("prior_token_id", "prior_token_drop", "hidden_states"))
        made = {**arguments, "kv_caches": None}
        if arguments["image_rotary_emb"] is None:
            grid = tuple(latents.shape[-2:])
            made["image_rotary_emb"] = tuple(
                cache.get(prior, (part, grid), partial(self._rope, latents, part=part)) for part in (0, 1)
            )
        made[KEEP] = cache.get(drop, ("keep", latents.dtype), lambda: (~drop).unsqueeze(-1).to(latents.dtype))
        made["prior_token_drop"] = slice(0, 0)
        return made

    def forward(self, module: Any, original: Callable[..., Any], arguments: Arguments) -> Any:
        """The native forward, its prior embeddings multiplied by `prior_keep` in place of the boolean indexing."""
        keep = arguments.get(KEEP)
        if keep is None:
            return original(**arguments)
        native = {name: value for name, value in arguments.items() if name != KEEP}
        hook = module.prior_token_embedding.register_forward_hook(lambda _module, _inputs, rows: rows * keep)
        try:
            return original(**native)
        finally:
            hook.remove()

    def _rope(self, latents: Tensor, *, part: int) -> Tensor:
        """Cosines (part 0) or sines of the latents' grid, fp32 [tokens, head width], made as the model makes them."""
        from diffusers.models.transformers.transformer_glm_image import GlmImageRotaryPosEmbed

        config = self.networks["transformer"].config
        tables = GlmImageRotaryPosEmbed(config["attention_head_dim"], config["patch_size"])(latents)
        return tables[part].to(latents.device)

    def prepare_pipeline(self, pipe: Any) -> None:
        """Refuse a transformer whose RoPE is not the one that `pad` makes (UsageError)."""
        known = self.networks["transformer"].config
        for name in ("attention_head_dim", "patch_size"):
            if pipe.transformer.config[name] != known[name]:
                raise UsageError(
                    f"The transformer has {name} {pipe.transformer.config[name]}; the adapter of {self.facts.id} "
                    f"knows {known[name]}. Correct its configuration in bcgbench/models/glm_image.py."
                )

    def drawn(self, pipe: Any, case: Case, *, prompt: int) -> Arguments:
        """The prior, int64 [1, tokens], that the pipeline itself would draw for this prompt and seed."""
        with sampling(pipe._execution_device, seed=case.seed) as generator:
            prior, _, _ = pipe.generate_prior_tokens(
                case.prompts[prompt], height=case.height_px, width=case.width_px, generator=generator
            )
        return {"prior_token_ids": prior}

    def sampler(self, pipe: Any) -> str:
        """Class and size of the autoregressive model, and whether its weights are random."""
        from bcgbench.models.weights import count_parameters

        model = pipe.vision_language_encoder
        reduced = model.config.text_config.hidden_size == tiny.GLM_AR_WIDTH
        size = f"{count_parameters(model):,} parameters" + (", reduced size, random weights" if reduced else "")
        return f"tokens sampled by {type(model).__name__} ({size})"

    def assemble(self, build: Builder) -> Any:
        """Random weights with an autoregressive model of the real class and codebook, its size reduced: real sampling.

        The released one has 20 GB and would sample for half a minute per prompt.
        """
        pipe = super().assemble(build)
        if pipe.vision_language_encoder is None:
            parts = self._autoregressive()
            parts["vision_language_encoder"].to(build.device, build.dtype)
            pipe.register_modules(**parts)
        return pipe

    def _autoregressive(self) -> dict[str, Any]:
        codebook = self.networks["transformer"].config["prior_vq_quantizer_codebook_size"]
        return {
            "processor": tiny.glm_image_processor(),
            "vision_language_encoder": tiny.glm_image_ar(codebook=codebook),
        }

    def tiny_text(self) -> dict[str, Any]:
        """A tiny glyph encoder and a tiny autoregressive model with their tokenizers."""
        from transformers import ByT5Tokenizer

        encoder = tiny.t5_encoder(width=self.text_width)
        return {"tokenizer": ByT5Tokenizer(), "text_encoder": encoder, **self._autoregressive()}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size and guidance."""
        return super().options(case, guidance=guidance) | {"guidance_scale": guidance}

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt; the negative prompt is always empty."""
        del guidance
        return {"prompt": prompt}

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """Glyph rows. The pipeline wants as many negative rows; an empty negative prompt would have one."""
        made = {"prompt_embeds": draw(tokens, stream)}
        return made | ({"negative_prompt_embeds": draw(tokens, 0)} if guidance > 1 else {})

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """Glyph rows: bytes of quoted text with an end token each; one row where nothing is quoted."""
        del pipe
        return self.estimate_tokens(prompt)

    def estimate_tokens(self, prompt: str) -> int:
        """The same: the tokenizer is bytes. An even number of quotations gets a pad row each."""
        quoted = [text for pattern in GLYPHS for text in re.findall(pattern, prompt)] or [""]
        return sum(min(len(text.encode()) + 1, self.max_tokens) + (len(quoted) + 1) % 2 for text in quoted)


def _is_empty(caches: Any) -> bool:
    """Whether a call's caches store and read nothing, as in text-to-image."""
    return caches is None or all(cache.mode is None and not cache.k_caches for cache in caches.caches)


GLM_IMAGE = GlmImage(
    facts=ModelFacts(
        id="zai-org/GLM-Image",
        pipeline="GlmImagePipeline",
        width_px=1024,
        height_px=1024,
        multiple_px=32,
        steps=50,
        guidance=1.5,
        branches=2,
        policy="native glyph length",
        tokens=4096,  # 16 px square each
        transformer_parameters=6_926_882_880,
        memory_bytes=21_000_000_000,
    ),
    networks={
        # The release has 32 heads of 128; the class default (64 of 40) is a model of 2.9 B.
        "transformer": Component(
            kind="GlmImageTransformer2DModel",
            config={
                "patch_size": 2,
                "attention_head_dim": 128,
                "num_attention_heads": 32,
                "prior_vq_quantizer_codebook_size": 16_384,
            },
        ),
        # The latents' statistics come with released weights; random ones need none.
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
                "latents_mean": [0.0] * 16,
                "latents_std": [1.0] * 16,
                "use_quant_conv": False,
                "use_post_quant_conv": False,
            },
        ),
    },
    scheduler=Component(
        kind="FlowMatchEulerDiscreteScheduler",
        config={
            "use_dynamic_shifting": True,
            "base_shift": 0.25,
            "max_shift": 0.75,
            "base_image_seq_len": 256,
            "time_shift_type": "linear",
        },
    ),
    text_width=1472,
    max_tokens=2048,
    template_tokens=0,
    guidance_in="calls",
    text_encoder_bytes=20_700_000_000,
    text_parts=("tokenizer", "text_encoder", "processor", "vision_language_encoder"),
)

TINY_GLM_IMAGE = replace(
    GLM_IMAGE,
    facts=replace(
        GLM_IMAGE.facts,
        id="tiny/glm-image",
        width_px=64,
        height_px=64,
        steps=4,
        transformer_parameters=18_784,
        memory_bytes=1_000_000_000,
        tiny=True,
    ),
    networks={
        "transformer": Component(
            kind="GlmImageTransformer2DModel",
            config={
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "text_embed_dim": 32,
                "time_embed_dim": 16,
                "condition_dim": 8,
                "prior_vq_quantizer_codebook_size": 128,
            },
        ),
        "vae": Component(
            kind="AutoencoderKL",
            config={
                "down_block_types": ["DownEncoderBlock2D"] * 4,
                "up_block_types": ["UpDecoderBlock2D"] * 4,
                "block_out_channels": [4, 8, 16, 16],
                "layers_per_block": 1,
                "latent_channels": 4,
                "norm_num_groups": 4,
                "sample_size": 64,
                "latents_mean": [0.0] * 4,
                "latents_std": [1.0] * 4,
            },
        ),
    },
    text_width=32,
    text_encoder_bytes=0,
)
