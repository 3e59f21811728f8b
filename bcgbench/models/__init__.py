"""The models that can be benchmarked: names to adapters, imported on demand and without torch.

What a model is like stands in its own file, what can be said of any other in `generic`; loading and requests in `base`.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bcgbench.errors import UsageError
from bcgbench.models import folder

if TYPE_CHECKING:
    from bcgbench.models.base import Adapter
    from bcgbench.types import ModelFacts

MODELS: dict[str, str] = {
    "Qwen/Qwen-Image": "bcgbench.models.qwen_image:QWEN_IMAGE",
    "Qwen/Qwen-Image-2512": "bcgbench.models.qwen_image:QWEN_IMAGE_2512",
    "Tongyi-MAI/Z-Image": "bcgbench.models.z_image:Z_IMAGE",
    "Tongyi-MAI/Z-Image-Turbo": "bcgbench.models.z_image:Z_IMAGE_TURBO",
    "Comfy-Org/Ideogram-4": "bcgbench.models.ideogram4:IDEOGRAM_4",
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": "bcgbench.models.sana:SANA",
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": "bcgbench.models.sana_video:SANA_VIDEO",
    "Lightricks/LTX-2": "bcgbench.models.ltx2:LTX2",
    "Lightricks/LTX-2.3": "bcgbench.models.ltx2:LTX23",
    "Lightricks/LTX-2-two-stage": "bcgbench.models.ltx2_two_stage:LTX2_TWO_STAGE",
    "MiniMaxAI/MiniMax-H3": "bcgbench.models.minimax_h3:MINIMAX_H3",
    "zai-org/GLM-Image": "bcgbench.models.glm_image:GLM_IMAGE",
    "meituan-longcat/LongCat-Image": "bcgbench.models.longcat_image:LONGCAT_IMAGE",
    "tiny/qwen-image": "bcgbench.models.qwen_image:TINY_QWEN_IMAGE",
    "tiny/qwen-image-2512": "bcgbench.models.qwen_image:TINY_QWEN_IMAGE_2512",
    "tiny/z-image": "bcgbench.models.z_image:TINY_Z_IMAGE",
    "tiny/z-image-turbo": "bcgbench.models.z_image:TINY_Z_IMAGE_TURBO",
    "tiny/ideogram-4": "bcgbench.models.ideogram4:TINY_IDEOGRAM_4",
    "tiny/sana1.5": "bcgbench.models.sana:TINY_SANA",
    "tiny/sana-video": "bcgbench.models.sana_video:TINY_SANA_VIDEO",
    "tiny/ltx-2": "bcgbench.models.ltx2_tiny:TINY_LTX2",
    "tiny/ltx-2.3": "bcgbench.models.ltx2_tiny:TINY_LTX23",
    "tiny/ltx-2-two-stage": "bcgbench.models.ltx2_tiny:TINY_LTX2_TWO_STAGE",
    "tiny/minimax-h3": "bcgbench.models.minimax_h3:TINY_MINIMAX_H3",
    "tiny/glm-image": "bcgbench.models.glm_image:TINY_GLM_IMAGE",
    "tiny/longcat-image": "bcgbench.models.longcat_image:TINY_LONGCAT_IMAGE",
}
"""Model id to "module:attribute". Of several models with one pipeline class, the first serves a local folder of it."""

NEAR = 0.9
"""Least likeness of a typing error to an id: below, `org/name` is taken for a model without an adapter."""


def adapter(model: str) -> Adapter:
    """The adapter of a model id, of an alias, of a local diffusers folder, or of any other hub id.

    UsageError names the nearest ids, or says what is wrong with the folder; EnvironmentFault where a hub id that no
    adapter is written for can be read from neither the hub nor its cache.
    """
    if model in MODELS:
        return _load(model)
    for name in MODELS:
        if model in _load(name).facts.aliases:
            return _load(name)
    if Path(model).is_dir():
        return _adapter_of_folder(Path(model), model=model)
    if folder.HUB_ID.fullmatch(model) and not model.startswith("tiny/") and not _near(model, cutoff=NEAR):
        return _adapter_of_folder(folder.fetch(model), model=model)
    near = _near(model, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(MODELS)}."
    raise UsageError(f"Unknown model {model!r}. {hint} A local diffusers folder works too.")


def facts(model: str) -> ModelFacts:
    """What is known of a model without loading it."""
    return adapter(model).facts


def _near(model: str, *, cutoff: float) -> list[str]:
    by_lower = {name.lower(): name for name in MODELS}
    return [by_lower[name] for name in difflib.get_close_matches(model.lower(), by_lower, n=3, cutoff=cutoff)]


def _load(name: str) -> Adapter:
    module, _, attribute = MODELS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _adapter_of_folder(path: Path, *, model: str) -> Adapter:
    """The adapter that fits a folder, id and memory need replaced by the folder's own; else the generic one."""
    index = folder.index_of(path)
    found = next((each for each in map(_load, MODELS) if not each.facts.tiny and each.fits(path, index=index)), None)
    if found is None:
        from bcgbench.models import generic

        return generic.adapter_of(path, model=model)
    own, weight_bytes = replace(found.facts, id=model), folder.weight_bytes(path)
    if not weight_bytes:
        return replace(found, facts=own)
    # A fifth and 1 GB on top of the weights: activations, decoding and graph pools at 1024x1024.
    own = replace(own, memory_bytes=int(weight_bytes * 1.2) + 1_000_000_000)
    return replace(found, facts=own, text_encoder_bytes=0)
