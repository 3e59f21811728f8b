"""Tiny pipelines of families without an adapter, saved in diffusers layout: what the generic adapter is proven on.

Every parameter is live, so that a mask or a gate that goes wrong shows; tokenizers are trained or need no files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bcgbench.models import tiny
from bcgbench.models.weights import Builder

CLIP_TOKENS = 300


def save(family: str, folder: Path) -> Path:
    """A family's pipeline in float32, written to `folder`."""
    torch.manual_seed(0)
    FAMILIES[family]().save_pretrained(folder)
    return folder


def drop_weights(folder: Path) -> Path:
    """Only configurations and tokenizers stay."""
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    return folder


def _network(kind: str, *, name: str = "transformer", **config: Any) -> Any:
    return Builder(device=torch.device("cpu"), dtype=torch.float32, seed=0).model(kind, config, name=name)


def _vae(**changes: Any) -> Any:
    config = {
        "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
        "block_out_channels": [8, 16], "latent_channels": 4, "norm_num_groups": 4, "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    }  # fmt: skip
    return _network("AutoencoderKL", name="vae", **(config | changes))


def _scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


def _clip_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    marks = ["<|startoftext|>", "<|endoftext|>"]
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=CLIP_TOKENS, special_tokens=marks, end_of_word_suffix="</w>", show_progress=False
    )
    trained.train_from_iterator([sentence.lower() for sentence in tiny.CORPUS], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return CLIPTokenizer(vocab=model["vocab"], merges=merges, model_max_length=77)


def _clip(*, projected: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, projection_dim=16,
        vocab_size=CLIP_TOKENS, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def _byte_tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def flux() -> Any:
    """Guidance as an embedding: one call per step, and 512 rows of text whatever the prompt."""
    from diffusers import FluxPipeline

    transformer = _network(
        "FluxTransformer2DModel", in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=16, guidance_embeds=True,
        axes_dims_rope=[4, 6, 6],
    )  # fmt: skip
    return FluxPipeline(
        transformer=transformer, vae=_vae(), scheduler=_scheduler(), text_encoder=_clip(projected=False),
        tokenizer=_clip_tokenizer(), text_encoder_2=tiny.t5_encoder(), tokenizer_2=_byte_tokenizer(),
    )  # fmt: skip


def chroma() -> Any:
    """Two calls per step, and a mask over the text that differs between prompts."""
    from diffusers import ChromaPipeline

    transformer = _network(
        "ChromaTransformer2DModel", in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=[4, 6, 6], approximator_num_channels=8,
        approximator_hidden_dim=16, approximator_layers=1,
    )  # fmt: skip
    return ChromaPipeline(
        transformer=transformer, vae=_vae(), scheduler=_scheduler(), text_encoder=tiny.t5_encoder(),
        tokenizer=_byte_tokenizer(),
    )  # fmt: skip


def sd3() -> Any:
    """Three text encoders, both branches of guidance in one batch."""
    from diffusers import StableDiffusion3Pipeline

    transformer = _network(
        "SD3Transformer2DModel", sample_size=32, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32,
        pos_embed_max_size=32, dual_attention_layers=[0], qk_norm="rms_norm",
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer, vae=_vae(), scheduler=_scheduler(), text_encoder=_clip(projected=True),
        tokenizer=_clip_tokenizer(), text_encoder_2=_clip(projected=True), tokenizer_2=_clip_tokenizer(),
        text_encoder_3=tiny.t5_encoder(), tokenizer_3=_byte_tokenizer(),
    )  # fmt: skip


def wan() -> Any:
    """Video by two denoisers, one for each half of the steps, two calls per step."""
    from diffusers import WanPipeline
    from transformers import UMT5Config, UMT5EncoderModel

    config = {
        "patch_size": [1, 2, 2], "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 16,
        "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 1,
    }  # fmt: skip
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2))
    return WanPipeline(
        transformer=_network("WanTransformer3DModel", **config),
        transformer_2=_network("WanTransformer3DModel", name="transformer_2", **config),
        boundary_ratio=0.9,
        vae=_network("AutoencoderKLWan", name="vae", base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        scheduler=_scheduler(), text_encoder=encoder, tokenizer=_byte_tokenizer(),
    )  # fmt: skip


def lumina2() -> Any:
    """Its forward reads the lengths of the prompts from the mask on the host."""
    from diffusers import Lumina2Pipeline

    tokenizer = tiny.gemma_tokenizer()
    transformer = _network(
        "Lumina2Transformer2DModel", sample_size=8, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=[4, 2, 2], axes_lens=[512, 64, 64],
        cap_feat_dim=8,
    )  # fmt: skip
    return Lumina2Pipeline(
        transformer=transformer, vae=_vae(block_out_channels=[8] * 4, down_block_types=["DownEncoderBlock2D"] * 4,
                                          up_block_types=["UpDecoderBlock2D"] * 4),
        scheduler=_scheduler(), text_encoder=tiny.gemma2(len(tokenizer)), tokenizer=tokenizer,
    )  # fmt: skip


def pixart_sigma() -> Any:
    """Resolution binning and caption cleaning, which a case must not get."""
    from diffusers import DDIMScheduler, PixArtSigmaPipeline

    transformer = _network(
        "PixArtTransformer2DModel", sample_size=16, num_layers=2, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, caption_channels=32, norm_num_groups=4,
    )  # fmt: skip
    return PixArtSigmaPipeline(
        transformer=transformer, vae=_vae(shift_factor=None), scheduler=DDIMScheduler(),
        text_encoder=tiny.t5_encoder(), tokenizer=_byte_tokenizer(),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "flux": flux, "sd3": sd3, "wan": wan, "chroma": chroma, "lumina2": lumina2, "pixart-sigma": pixart_sigma,
}  # fmt: skip
