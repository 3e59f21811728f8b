"""Any other diffusers pipeline that turns text into images or video: what its signature and its configurations say.

Nothing here knows a model. Prompts keep their native length, text goes through the model's own encoders, and nobody has
validated the outcome: facts, records and reports say so. A model that needs more gets an adapter of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError
from bcgbench.models import folder as folders
from bcgbench.models.base import Adapter, Arguments, Component
from bcgbench.models.folder import Part
from bcgbench.types import ModelFacts

if TYPE_CHECKING:
    from torch import nn

    from bcgbench.models.weights import Builder
    from bcgbench.types import Case

BREAK_POLICY = "auto"
NEGATIVE_PROMPT = "blurry, low quality"
REQUIRED = ("prompt", "width", "height", "num_inference_steps", "generator", "output_type")
"""Arguments without which a request cannot be made or repeated."""
FRAME_ARGUMENTS = ("num_frames", "frames")
SWITCHED_OFF: Arguments = {"use_resolution_binning": False, "clean_caption": False}
"""Arguments that would run another size or another prompt than the case says."""
FALLBACK_PX, FALLBACK_STEPS = 1024, 50
"""Where a pipeline names no size or steps of its own; `--res` and `--steps` choose others."""
NO_LIMIT = 1_000_000
LEFT_OUT = ("safety_checker",)
"""Parts that would blacken pictures; they are neither loaded nor built."""
DENOISER = re.compile(r"(^|_)(transformer|unet)(_\d+)?$")
"""`transformer`, `transformer_2` of Wan 2.2, `unconditional_transformer`, `unet`."""


@dataclass(frozen=True, kw_only=True)
class Generic(Adapter):
    """A pipeline by its signature; random weights at the configurations of a folder."""

    folder: Path
    """The model's configurations, with or without its weights."""
    call: Mapping[str, Any]
    """Arguments of the pipeline's `__call__` with their defaults."""
    networks: Mapping[str, Component] = field(default_factory=dict)
    scheduler: Component = field(default_factory=lambda: Component(kind=""))
    text_width: int = 0
    template_tokens: int = 0

    def denoisers(self, pipe: Any) -> dict[str, nn.Module]:
        """Every part that is named like one; a model may leave some empty."""
        return {name: part for name, part in pipe.components.items() if DENOISER.search(name) and part is not None}

    def assemble(self, build: Builder) -> Any:
        """The pipeline with seeded random weights in every network, text encoders too; tokenizers are the folder's."""
        return assemble(self.folder, lambda part: build.filled(lay_out(part), name=part.name), other=_load)

    def options(self, case: Case, *, guidance: float) -> Arguments:
        """Size, frames and guidance, as far as the pipeline takes them. UsageError for guidance where it takes none."""
        if case.guidance is not None and "guidance_scale" not in self.call:
            raise UsageError(f"{self.facts.pipeline} takes no guidance scale, got {case.guidance}: leave it out.")
        asked = super().options(case, guidance=guidance) | {"guidance_scale": guidance} | SWITCHED_OFF
        asked |= dict.fromkeys(FRAME_ARGUMENTS, case.frames or self.facts.frames)
        return {name: value for name, value in asked.items() if name in self.call}

    def text(self, prompt: str, *, guidance: float) -> Arguments:
        """The prompt, with a negative one where the pipeline takes it and guidance is on."""
        negative = "negative_prompt" in self.call and guidance > 1
        return {"prompt": prompt} | ({"negative_prompt": NEGATIVE_PROMPT} if negative else {})

    def count_tokens(self, pipe: Any, prompt: str) -> int:
        """The most that any of the pipeline's tokenizers makes of the prompt."""
        tokenizers = [part for name, part in pipe.components.items() if name.startswith("tokenizer") and part]
        return max(len(tokenizer(prompt).input_ids) for tokenizer in tokenizers)

    def pixels(self, output: Any) -> Any:
        """Images, or the frames of the one video."""
        return output.images if hasattr(output, "images") else output.frames[0]


def adapter_of(folder: Path, *, model: str) -> Generic:
    """The generic adapter of a folder in diffusers layout, with or without weights; `model` is what the user called it.

    Reads configurations and lays the pipeline out without memory, which imports torch and diffusers and takes seconds.
    UsageError where the pipeline cannot be driven by text, size and steps.
    """
    from torch import nn

    from bcgbench.models.weights import count_parameters

    call = _call_of(_pipeline_class(folder), folder=folder)
    pipe = assemble(folder, lay_out, other=_scheduler_only)
    networks = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    denoisers = [part for name, part in networks.items() if DENOISER.search(name)]
    if not denoisers:
        raise UsageError(f"{model} has no part that is called transformer or unet, so there is nothing to capture.")
    parameters = sum(map(count_parameters, networks.values()))
    facts = ModelFacts(
        id=model,
        pipeline=type(pipe).__name__,
        width_px=_side_px(pipe, call, denoisers[0], side="width"),
        height_px=_side_px(pipe, call, denoisers[0], side="height"),
        frames=_frames(call, denoisers[0]),
        multiple_px=_multiple_px(pipe, denoisers[0]),
        steps=call["num_inference_steps"] or FALLBACK_STEPS,
        guidance=_guidance(call),
        branches=2 if "negative_prompt" in call and (call.get("true_cfg_scale") or _guidance(call)) > 1 else 1,
        policy="native length",
        transformer_parameters=count_parameters(denoisers[0]),
        # In bf16; a fifth and 1 GB on top: activations, decoding and graph pools at 1024x1024.
        memory_bytes=int(2 * parameters * 1.2) + 1_000_000_000,
        generic=True,
        break_policy=BREAK_POLICY,
    )
    limit = call.get("max_sequence_length") or NO_LIMIT
    unused = tuple(name for name in LEFT_OUT if name in folders.index_of(folder))
    return Generic(facts=facts, folder=folder, call=call, max_tokens=limit, unused_parts=unused)


def lay_out(part: Part) -> nn.Module:
    """A network of diffusers or transformers at its configuration: shapes without memory."""
    from diffusers import ConfigMixin
    from transformers import AutoConfig

    from bcgbench.models.weights import parameters_on_meta

    cls, config = part.cls(), part.config()
    if issubclass(cls, ConfigMixin):
        with parameters_on_meta():
            return cls.from_config(config).eval()
    known = AutoConfig.from_pretrained(part.folder, local_files_only=True)
    with parameters_on_meta():
        return cls(known).eval()


def assemble(folder: Path, network: Callable[[Part], Any], *, other: Callable[[Part], Any]) -> Any:
    """A folder's pipeline: each network by `network`, schedulers, tokenizers and processors by `other`."""
    from torch import nn

    index, cls = folders.index_of(folder), _pipeline_class(folder)
    accepted = inspect.signature(cls.__init__).parameters
    made: dict[str, Any] = {
        name: None for name, at in accepted.items() if at.default is at.empty and name != "self"
    }  # fmt: skip
    made |= {name: value for name, value in index.items() if name in accepted and value != [None, None]}
    for part in folders.parts_of(folder, index=index):
        if part.name in LEFT_OUT:
            made[part.name] = None
        elif part.name in accepted:
            made[part.name] = (network if issubclass(part.cls(), nn.Module) else other)(part)
    try:
        return cls(**made)
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"{folder} cannot be put together as a {cls.__name__} from its index and configurations: {error}. Write an "
            "adapter for it (bcgbench/models/README.md)."
        ) from error


def _load(part: Part) -> Any:
    """A scheduler, tokenizer or processor, which is read from its files. UsageError where they are missing."""
    try:
        return part.cls().from_pretrained(part.folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{part.folder} does not hold the files of a {part.kind}. Random weights still need them: prompts run "
            "through the model's own text encoders, whose tokenizers cannot be made up. Copy the folder's files (a few "
            "MB) from the released model."
        ) from error


def _scheduler_only(part: Part) -> Any:
    """A scheduler from its files; None for what only text needs."""
    from diffusers import SchedulerMixin

    return _load(part) if issubclass(part.cls(), SchedulerMixin) else None


def _pipeline_class(folder: Path) -> Any:
    """The pipeline class of a folder's index. UsageError where the installed diffusers has none of that name."""
    import diffusers

    name = folders.index_of(folder).get("_class_name")
    if not isinstance(name, str) or not hasattr(diffusers, name):
        raise UsageError(
            f"{folder} is a {name}, which diffusers {diffusers.__version__} does not have; code that a model brings "
            "along is not run. Update diffusers, or write an adapter (bcgbench/models/README.md)."
        )
    return getattr(diffusers, name)


def _call_of(cls: Any, *, folder: Path) -> dict[str, Any]:
    """A pipeline's arguments with their defaults. UsageError where a request cannot be made of text, size and steps."""
    parameters = inspect.signature(cls.__call__).parameters
    given = {*REQUIRED, *FRAME_ARGUMENTS, "self", "guidance_scale"}
    missing = [name for name in REQUIRED if name not in parameters]
    beyond = [
        name for name, at in parameters.items()
        if at.default is at.empty and name not in given and at.kind not in (at.VAR_POSITIONAL, at.VAR_KEYWORD)
    ]  # fmt: skip
    if missing or beyond:
        wrong = f"takes no {', '.join(missing)}" if missing else f"needs {', '.join(beyond)}"
        raise UsageError(
            f"{folder} is a {cls.__name__}, which {wrong}. Without an adapter, only pipelines run that make images or "
            f"video of {', '.join(REQUIRED)}. Write an adapter for it (bcgbench/models/README.md)."
        )
    return {name: None if at.default is at.empty else at.default for name, at in parameters.items()}


def _guidance(call: Mapping[str, Any]) -> float:
    scale = call.get("guidance_scale")
    return float(scale) if isinstance(scale, int | float) else 1.0


def _side_px(pipe: Any, call: Mapping[str, Any], denoiser: Any, *, side: str) -> int:
    """Pixels of a side: the pipeline's default, or what it makes of one: latent size times the autoencoder's factor."""
    if call[side] is not None:
        return int(call[side])
    config = denoiser.config
    own, common = config.get(f"sample_{side}"), config.get("sample_size")
    latent = getattr(pipe, "default_sample_size", None) or own or common
    factor = getattr(pipe, "vae_scale_factor", None) or getattr(pipe, "vae_scale_factor_spatial", None)
    return latent * factor if isinstance(latent, int) and factor else FALLBACK_PX


def _multiple_px(pipe: Any, denoiser: Any) -> int:
    """The factor of the pipeline's image processor times the denoiser's patch: never too small, at times doubled.

    The processor's own is the autoencoder's, doubled where the pipeline packs latents two by two.
    """
    processor = getattr(pipe, "image_processor", None) or getattr(pipe, "video_processor", None)
    factor = processor.config.vae_scale_factor if processor is not None else 8
    patch = denoiser.config.get("patch_size") or 1
    return factor * (patch if isinstance(patch, int) else patch[-1])


def _frames(call: Mapping[str, Any], denoiser: Any) -> int | None:
    """Frames of a video pipeline by default; None for images."""
    name = next((name for name in FRAME_ARGUMENTS if name in call), None)
    if name is None:
        return None
    return call[name] or denoiser.config.get("sample_frames") or 1
