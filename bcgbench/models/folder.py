"""A model in diffusers layout, read without its weights: the index, the parts that it names, their configurations.

A hub id becomes a folder of configurations first. What a part computes stands in diffusers; building it in `weights`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from bcgbench.errors import EnvironmentFault, UsageError

INDEX_FILES = ("model_index.json", "modular_model_index.json")
"""Of a pipeline, and of a modular pipeline."""
CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Everything but weights: configurations and tokenizers, a few MB."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def index_of(folder: Path) -> dict[str, Any]:
    """The folder's index. UsageError where it has none."""
    for name in INDEX_FILES:
        if (folder / name).is_file():
            return json.loads((folder / name).read_text(encoding="utf-8"))
    raise UsageError(f"{folder} holds no {INDEX_FILES[0]}, so it is not a folder in diffusers layout.")


def weight_bytes(folder: Path) -> int:
    """Size of all weights; 0 for a folder of configurations."""
    return sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.rglob(pattern))


def fetch(model: str) -> Path:
    """The configurations of a hub id as a folder; EnvironmentFault where neither the hub nor its cache has them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(model, allow_patterns=list(CONFIG_FILES)))
    except (OSError, HfHubHTTPError) as error:
        reason = shorten(str(error).strip().split("\n")[0], width=160, placeholder=" ...")
        raise EnvironmentFault(
            f"{model} has no adapter here and is no local folder, so its configuration is read from the hub: neither "
            "the hub nor its local cache gives it. Give a local diffusers folder as the model, or check the id "
            f"(`bcgbench list models` shows those with an adapter). The hub's client says: {reason}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One entry of an index: a pipeline argument and the class that it takes."""

    name: str
    library: str
    kind: str
    folder: Path

    def cls(self) -> Any:
        """The class. UsageError where the installed library has none of that name."""
        import diffusers

        # As diffusers resolves it: a pipeline's own parts are named after the pipeline's folder.
        module = getattr(diffusers.pipelines, self.library, None)
        if module is None and self.library in ("diffusers", "transformers"):
            module = importlib.import_module(self.library)
        if not hasattr(module, self.kind):
            raise UsageError(
                f"{self.folder.name} of the model is a {self.library}.{self.kind}, which diffusers "
                f"{diffusers.__version__} and the installed transformers do not have. Update them, or measure another "
                "model."
            )
        return getattr(module, self.kind)

    def config(self) -> dict[str, Any]:
        """The part's configuration. UsageError where the file is missing."""
        path = self.folder / "config.json"
        if not path.is_file():
            raise UsageError(f"{path} is missing: a model that is built from its configurations needs each part's.")
        return json.loads(path.read_text(encoding="utf-8"))


def parts_of(folder: Path, *, index: Mapping[str, Any]) -> Iterator[Part]:
    """The parts that a pipeline's index names; those that the model leaves empty are left out."""
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) > 1 and all(isinstance(item, str) for item in entry[:2]):
            yield Part(name=name, library=entry[0], kind=entry[1], folder=folder / name)
