"""Tiny LTX-2 and LTX-2.3: their recipes on networks that run whole on a CPU. What the models are stands in `ltx2`."""

from __future__ import annotations

from dataclasses import replace

from bcgbench.models.base import Component
from bcgbench.models.ltx2 import (
    CONNECTORS,
    CONNECTORS_23,
    LTX2,
    LTX23,
    TRANSFORMER,
    TRANSFORMER_23,
    VOCODER,
    VOCODER_23,
    Ltx2,
)
from bcgbench.models.ltx2_two_stage import LTX2_TWO_STAGE

TINY_TRANSFORMER = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16,
    "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8, "num_layers": 2, "caption_channels": 16,
}  # fmt: skip
TINY_CONNECTORS = {
    "caption_channels": 16, "text_proj_in_factor": 3, "video_connector_num_attention_heads": 2,
    "video_connector_attention_head_dim": 8, "video_connector_num_layers": 1, "audio_connector_num_attention_heads": 2,
    "audio_connector_attention_head_dim": 8, "audio_connector_num_layers": 1, "connector_rope_base_seq_len": 32,
}  # fmt: skip
TINY_VAE = Component(
    kind="AutoencoderKLLTX2Video",
    config={
        "latent_channels": 4, "block_out_channels": [8], "decoder_block_out_channels": [8], "layers_per_block": [1],
        "decoder_layers_per_block": [1, 1], "spatio_temporal_scaling": [True],
        "decoder_spatio_temporal_scaling": [True], "decoder_inject_noise": [False, False],
        "downsample_type": ["spatiotemporal"], "upsample_type": ["spatiotemporal"], "upsample_residual": [False],
        "upsample_factor": [1], "decoder_causal": False,
    },
)  # fmt: skip
TINY_AUDIO_VAE = Component(
    kind="AutoencoderKLLTX2Audio",
    config={
        "base_channels": 4, "ch_mult": [1], "num_res_blocks": 1, "resolution": 32, "latent_channels": 2, "mel_bins": 8,
    },
)  # fmt: skip
TINY_VOCODER = {
    "in_channels": 16, "hidden_channels": 32, "upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2],
    "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]],
}  # fmt: skip


TEXT_ROWS = 128
"""The fewest that the connectors take: they replace pad rows by 128 registers."""


def _tiny(released: Ltx2, *, name: str, parameters: int, networks: dict[str, Component]) -> Ltx2:
    """The tiny model of a release: its recipe at 64x64 and five frames."""
    facts = replace(
        released.facts, id=name, aliases=(), width_px=64, height_px=64, frames=5, steps=4, text_tokens=TEXT_ROWS,
        transformer_parameters=parameters, memory_bytes=1_000_000_000, tiny=True,
    )  # fmt: skip
    return replace(
        released, facts=facts, networks={**networks, "vae": TINY_VAE, "audio_vae": TINY_AUDIO_VAE}, text_width=48,
        max_tokens=TEXT_ROWS, frame_step=2, text_encoder_bytes=0, stg_blocks=(1,) if released.stg_blocks else (),
    )  # fmt: skip


TINY_LTX2 = _tiny(
    LTX2,
    name="tiny/ltx-2",
    parameters=37_672,
    networks={
        "transformer": Component(kind=TRANSFORMER, config={"rope_type": "split", **TINY_TRANSFORMER}),
        "connectors": Component(kind=CONNECTORS, config={"rope_type": "split", **TINY_CONNECTORS}),
        "vocoder": Component(kind=VOCODER, config=TINY_VOCODER),
    },
)
TINY_LTX23 = _tiny(
    LTX23,
    name="tiny/ltx-2.3",
    parameters=45_704,
    networks={
        "transformer": Component(kind=TRANSFORMER, config={**TRANSFORMER_23, **TINY_TRANSFORMER}),
        "connectors": Component(
            kind=CONNECTORS,
            config={
                **CONNECTORS_23,
                **TINY_CONNECTORS,
                "audio_connector_attention_head_dim": 4,
                "video_hidden_dim": 16,
                "audio_hidden_dim": 8,
            },
        ),
        "vocoder": Component(
            kind=VOCODER_23,
            config={
                **TINY_VOCODER,
                **{f"bwe_{name}": value for name, value in TINY_VOCODER.items()},
                "bwe_upsample_kernel_sizes": [3, 4],
                "bwe_upsample_factors": [3, 4],
                "filter_length": 8,
                "hop_length": 4,
                "window_length": 8,
                "num_mel_channels": 8,
            },
        ),
    },
)
TINY_LTX2_TWO_STAGE = replace(
    LTX2_TWO_STAGE,
    **{name: getattr(TINY_LTX2, name) for name in ("networks", "text_width", "max_tokens", "frame_step",
                                                   "text_encoder_bytes")},
    facts=replace(
        LTX2_TWO_STAGE.facts, id="tiny/ltx-2-two-stage", aliases=(), width_px=128, height_px=128, frames=5, steps=4,
        text_tokens=TEXT_ROWS, transformer_parameters=TINY_LTX2.facts.transformer_parameters,
        memory_bytes=1_000_000_000, tiny=True,
    ),
    # Its norms have 32 groups, so 32 channels are the fewest.
    upsampler=replace(
        LTX2_TWO_STAGE.upsampler, config={"in_channels": 4, "mid_channels": 32, "num_blocks_per_stage": 1}
    ),
)  # fmt: skip
