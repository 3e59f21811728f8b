"""The models that can be benchmarked: names to adapters, imported on demand and without torch.

What a model is like stands in its own file; loading and requests stand in `base`.
"""

from __future__ import annotations

import difflib
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bcgbench.errors import UsageError

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

INDEX_FILE = "model_index.json"


def adapter(model: str) -> Adapter:
    """The adapter of a model id, of an alias, or of a local diffusers folder.

    UsageError names the nearest ids, or says what is wrong with the folder.
    """
    if model in MODELS:
        return _load(model)
    for name in MODELS:
        if model in _load(name).facts.aliases:
            return _load(name)
    folder = Path(model)
    if folder.is_dir():
        return _adapter_of_folder(folder)
    near = difflib.get_close_matches(model, MODELS, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(MODELS)}."
    raise UsageError(f"Unknown model {model!r}. {hint} A local diffusers folder works too.")


def facts(model: str) -> ModelFacts:
    """What is known of a model without loading it."""
    return adapter(model).facts


def _load(name: str) -> Adapter:
    module, _, attribute = MODELS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _adapter_of_folder(folder: Path) -> Adapter:
    """The adapter that fits a local folder, with its id and memory need replaced by the folder's own."""
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise UsageError(f"{folder} holds no {INDEX_FILE}, so it is not a folder in diffusers layout.")
    index = json.loads(index_path.read_text(encoding="utf-8"))
    released = [found for found in map(_load, MODELS) if not found.facts.tiny]
    for found in released:
        if found.fits(folder, index=index):
            weights_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
            # A fifth and 1 GB on top of the weights: activations, decoding and graph pools at 1024x1024.
            memory_bytes = int(weights_bytes * 1.2) + 1_000_000_000
            own = replace(found.facts, id=str(folder), memory_bytes=memory_bytes)
            return replace(found, facts=own, text_encoder_bytes=0)
    known = ", ".join(sorted({found.facts.pipeline for found in released}))
    raise UsageError(f"{index_path} names the pipeline {index.get('_class_name')!r}; there are adapters for {known}.")
