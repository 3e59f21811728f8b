"""MiniMax-H3: text, sound and video rows in one packed sequence, at native length; a modular pipeline.

Nothing is masked and the text's length moves the media's clock, so prompts share a graph at equal length only (padding
text and sequence is 7e-2 off). Guidance is distilled: one call per step. On step 0 all rows share one noise level and
`timestep` has one entry, later two: two signatures per length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError
from bcgbench.models import media, tiny
from bcgbench.models.base import Adapter, Arguments, Component, Draw
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    import torch

    from bcgbench.models.weights import Builder
    from bcgbench.types import Case

FRAME_STEP, FRAME_REST = 17, 5
MIN_FRAMES, MAX_FRAMES = 124, 345
"""Five and fifteen seconds at 24 frames, on the grid of the video's autoencoder."""
AUDIO_SHIFT, AUDIO_CHANNELS = 3.0, 32


class Pipeline:
    """The modular pipeline with the face of the others: `progress_bar` and `scheduler`, steps counted as forwards.

    diffusers keeps the bar on the loop's block; here the block asks for this object's, so that it can be replaced.
    """

    def __init__(self, modular: Any) -> None:
        self.modular = modular
        self._loop = next(iter(_loops(modular._blocks)))
        self._open_bar = self._loop.progress_bar
        self._loop.progress_bar = self._bar_of_loop

    def __call__(self, *, num_inference_steps: int, **arguments: Any) -> Any:
        """The state after a run. N points of the model's schedule are N - 1 steps, so one more is asked for."""
        return self.modular(num_inference_steps=num_inference_steps + 1, **arguments)

    def __getattr__(self, name: str) -> Any:
        """Parts and everything else of the modular pipeline."""
        return getattr(self.modular, name)

    @property
    def tokenizer(self) -> Any:
        """None with synthetic prompts."""
        return getattr(self.modular, "tokenizer", None)

    def _bar_of_loop(self, *args: Any, **kwargs: Any) -> Any:
        return self.progress_bar(*args, **kwargs)  # looked up now: it may have been replaced since

    def progress_bar(self, *args: Any, **kwargs: Any) -> Any:
        """What the denoise loop opens."""
        return self._open_bar(*args, **kwargs)

    def set_progress_bar_config(self, **config: Any) -> None:
        """Options of the bar."""
        self._loop.set_progress_bar_config(**config)

    def register_modules(self, **parts: Any) -> None:
        """Set parts that are no component of the blocks, a tokenizer to count with for example."""
        for name, part in parts.items():
            setattr(self.modular, name, part)

    def to(self, device: torch.device) -> Pipeline:
        """Move all networks; dtypes stay, since several networks keep parts in float32."""
        self.modular.to(device)
        return self


def _loops(blocks: Any) -> Any:
    """Every denoise loop below some blocks."""
    if hasattr(blocks, "progress_bar"):
        yield blocks
    for block in getattr(blocks, "sub_blocks", {}).values():
        yield from _loops(block)


class TextOnlyProcessor:
    """What text alone needs of Qwen3-VL's processor, whose constructor needs torchvision."""

    def create_mm_token_type_ids(self, token_ids: list[list[int]]) -> list[list[int]]:
        """Modality per token: 0, text."""
        return [[0] * len(row) for row in token_ids]


@dataclass(frozen=True, kw_only=True)
class MiniMaxH3(Adapter):
    """Pads nothing; assembles the text-to-video-and-audio workflow from its blocks."""

    def assemble(self, build: Builder) -> Any:
        """The workflow's blocks with seeded random networks; without the block that encodes text if nothing can."""
        import diffusers
        from diffusers.modular_pipelines import MiniMaxH3Blocks

        blocks = MiniMaxH3Blocks().get_workflow("t2va")
        text: dict[str, Any] = {}
        if self.facts.tiny:
            text = self.tiny_text()
            text["text_encoder"].to(build.device, build.dtype)
        else:
            blocks.sub_blocks.pop("text_encoder")
        modular = blocks.init_pipeline()
        parts = {name: build.model(part.kind, part.config, name=name) for name, part in self.networks.items()}
        scheduler = getattr(diffusers, self.scheduler.kind)
        modular.update_components(
            **parts,
            **text,
            scheduler=scheduler(**self.scheduler.config),
            audio_scheduler=scheduler(shift=AUDIO_SHIFT),
        )
        return Pipeline(modular)

    def from_pretrained(self, source: str, *, dtype: torch.dtype, local: bool) -> Any:
        """The workflow's half of the repository: without a workflow both transformers of 66 GB would be loaded."""
        from diffusers import ModularPipeline

        modular = ModularPipeline.from_pretrained(source, workflow="t2va", local_files_only=local)
        parts = [name for name in modular.component_names if name != "processor"]
        modular.load_components(parts, dtype=dtype, local_files_only=local)
        lost = [name for name in parts if getattr(modular, name, None) is None]
        if lost:  # diffusers logs why and goes on
            raise OSError(f"{', '.join(lost)} cannot be read, see the log above")
        modular.update_components(processor=TextOnlyProcessor())
        return Pipeline(modular)

    def tiny_text(self) -> dict[str, Any]:
        """A tiny Qwen3-VL with its tokenizer; the prompt is its fiftieth hidden state."""
        tokenizer = tiny.qwen_tokenizer()
        encoder = tiny.qwen3_vl(len(tokenizer), layers=51, width=self.text_width)
        return {"tokenizer": tokenizer, "text_encoder": encoder, "processor": TextOnlyProcessor()}

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size and frames, which the pipeline would round up with no more than a warning."""
        frames = self.facts.frames if case.frames is None else case.frames
        if frames is None or frames % FRAME_STEP != FRAME_REST or not MIN_FRAMES <= frames <= MAX_FRAMES:
            raise UsageError(
                f"{self.facts.id} makes videos of {FRAME_STEP}n + {FRAME_REST} frames from {MIN_FRAMES} to "
                f"{MAX_FRAMES}, got {frames}. Try {MIN_FRAMES}."
            )
        return super().options(case, guidance=guidance) | {"num_frames": frames}

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt; there is no negative one."""
        del guidance
        return {"prompt": prompt}

    def embeddings(self, draw: Draw, *, tokens: int, stream: int, guidance: float) -> Arguments:
        """Embeddings with the modality of each row, all text, on the CPU as the encoding block leaves it."""
        import torch

        del guidance
        tags = torch.full((tokens,), 1, dtype=torch.int64)
        return {"prompt_embeds": draw(tokens, stream), "text_token_tags": tags}

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """Tokens of the bare prompt: no template, no special tokens."""
        return len(pipe.tokenizer(prompt, add_special_tokens=False).input_ids)

    def pixels(self, output: Any) -> Any:
        """Frames of the video."""
        return output.get("videos")[0]

    def audio(self, output: Any, *, pipe: Any) -> media.Sound:
        """The soundtrack, at the rate of the audio's autoencoder."""
        del pipe
        return media.sound(output.get("audio"), rate_hz=output.get("sampling_rate"))


MINIMAX_H3 = MiniMaxH3(
    facts=ModelFacts(
        id="MiniMaxAI/MiniMax-H3",
        pipeline="MiniMaxH3ModularPipeline",
        width_px=1344,
        height_px=768,
        frames=MIN_FRAMES,
        multiple_px=32,
        steps=20,
        guidance=1.0,
        branches=1,
        policy="native length",
        tokens=37 * 24 * 42 + 414,  # 37 latent frames, and the sound
        transformer_parameters=33_122_992_896,
        # 75 GB of weights (parts of the autoencoders stay in float32), some 5 GB of activations per graph arm for
        # 38 000 rows, and the decoding of 124 frames.
        memory_bytes=100_000_000_000,
    ),
    networks={
        "transformer": Component(kind="MiniMaxH3Transformer3DModel"),
        "vae": Component(kind="AutoencoderKLMiniMaxH3"),
        # The class leaves out the statistics by which the sound's latents are scaled back; random weights have none.
        "audio_vae": Component(
            kind="AutoencoderKLMiniMaxH3Audio",
            config={"latents_mean": [0.0] * AUDIO_CHANNELS, "latents_std": [1.0] * AUDIO_CHANNELS},
        ),
    },
    scheduler=Component(kind="MiniMaxH3Scheduler", config={"shift": 12.0}),
    text_width=5120,
    max_tokens=4096,
    template_tokens=0,
    text_encoder_bytes=66_800_000_000,
    text_parts=("tokenizer", "text_encoder", "processor"),
)
TINY_MINIMAX_H3 = replace(
    MINIMAX_H3,
    facts=replace(
        MINIMAX_H3.facts, id="tiny/minimax-h3", width_px=64, height_px=64, steps=4, transformer_parameters=39_624,
        memory_bytes=1_000_000_000, tiny=True,
    ),
    networks={
        "transformer": Component(
            kind="MiniMaxH3Transformer3DModel",
            config={
                "num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 2,
                "num_refiner_layers": 2, "ffn_dim": 32, "in_channels": 4, "audio_in_channels": 8, "text_dim": 16,
                "freq_dim": 8, "time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2,
            },
        ),
        "vae": Component(
            kind="AutoencoderKLMiniMaxH3",
            config={
                "latent_channels": 4, "block_out_channels": [8, 16], "layers_per_block": 1,
                "spatial_downsample_factors": [4, 4], "temporal_downsample_factors": [2, 2], "norm_num_groups": 8,
                "decoder_num_layers": 2, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 8,
                "decoder_num_register_tokens": 2, "decoder_ffn_mult": 2, "latents_mean": [0.0] * 4,
                "latents_std": [1.0] * 4,
            },
        ),
        "audio_vae": Component(
            kind="AutoencoderKLMiniMaxH3Audio",
            config={
                "encoder_dim": 4, "encoder_rates": [2, 2], "latent_dim": 32, "latent_channels": 8,
                "num_attention_heads": 2, "decoder_dim": 16, "decoder_rates": [2, 2], "decoder_kernel_sizes": [4, 4],
                "resblock_kernel_sizes": [3, 7], "resblock_dilation_sizes": [[1, 3], [1, 3]],
                "latents_mean": [0.0] * 8, "latents_std": [1.0] * 8,
            },
        ),
    },
    text_width=16,
    text_encoder_bytes=0,
)  # fmt: skip
