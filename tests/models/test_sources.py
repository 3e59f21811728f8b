"""Where a model comes from: a name, a local folder, the hub; and every refusal on the way."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bcgbench.errors import EnvironmentFault, UsageError
from bcgbench.models import adapter, base
from bcgbench.types import Case
from tests.factories import case


def tiny_case(model: str, **changes: Any) -> Case:
    """A two-step CPU case with the model's own guidance."""
    fixed = {"width_px": 32, "height_px": 32, "steps": 2, "guidance": None, "device": "cpu"}
    return replace(case(model=model, dtype="float32"), **(fixed | changes))


# ---------------------------------------------------------------------------------------------------- local folders
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen-Image in diffusers layout."""
    path = tmp_path_factory.mktemp("models") / "qwen"
    base.load(tiny_case("tiny/qwen-image")).pipe.save_pretrained(path)
    return path


def test_a_saved_pipeline_gives_the_same_picture(folder: Path):
    """Loading from a folder is the path that released weights take."""
    built, loaded = base.load(tiny_case("tiny/qwen-image")), base.load(tiny_case("tiny/qwen-image", source=str(folder)))
    assert loaded.token_counts == built.token_counts
    assert np.array_equal(loaded.generate(1), built.generate(1))


def test_a_folder_is_a_model_id(folder: Path):
    """Its pipeline class finds the adapter; id and memory need are the folder's own."""
    found = adapter(str(folder))
    assert type(found) is type(adapter("Qwen/Qwen-Image"))
    assert found.facts.id == str(folder)
    assert found.facts.memory_bytes < 2e9
    built = base.load(tiny_case("tiny/qwen-image"))
    assert np.array_equal(base.load(tiny_case(str(folder))).generate(0), built.generate(0))


def test_a_folder_of_another_pipeline_is_refused(folder: Path):
    """Before anything is loaded."""
    with pytest.raises(UsageError, match=r"holds a QwenImagePipeline, and tiny/sana1.5 needs a SanaPipeline"):
        base.load(tiny_case("tiny/sana1.5", source=str(folder)))


def test_a_folder_without_an_index_is_refused(tmp_path: Path):
    """A folder of one safetensors file is not in diffusers layout."""
    with pytest.raises(UsageError, match=r"holds no model_index.json"):
        adapter(str(tmp_path))
    with pytest.raises(UsageError, match=r"holds no model_index.json"):
        base.load(tiny_case("tiny/qwen-image", source=str(tmp_path)))


def test_a_folder_with_a_missing_part_says_which(folder: Path, tmp_path: Path):
    """A broken download is a fault of the machine, and not of the hub."""
    (tmp_path / "model_index.json").write_text((folder / "model_index.json").read_text())
    with pytest.raises(EnvironmentFault, match=f"{tmp_path} could not be loaded"):
        base.load(tiny_case("tiny/qwen-image", source=str(tmp_path)))


# --------------------------------------------------------------------------------------------------------- refusals
def test_an_unknown_model_names_the_nearest():
    """A typing error should cost one look."""
    with pytest.raises(UsageError, match=r"Unknown model 'Qwen/Qwen-Imag'. Did you mean Qwen/Qwen-Image"):
        adapter("Qwen/Qwen-Imag")


def test_a_far_off_name_lists_all():
    """Nothing is near, so everything is shown."""
    with pytest.raises(UsageError, match="Known: Qwen/Qwen-Image, "):
        adapter("%%%")


def test_released_weights_that_are_nowhere_name_two_ways_on():
    """No hub in tests: the message offers a local folder and random weights."""
    with pytest.raises(EnvironmentFault, match=r"(?s)Tongyi-MAI/Z-Image.*--source.*--weights random"):
        base.load(tiny_case("Tongyi-MAI/Z-Image"))


OWN_SIZE = {"device": "cuda", "dtype": "bfloat16", "width_px": 1024, "height_px": 1024}


def test_cuda_without_a_gpu_names_the_need_and_the_tiny_model(monkeypatch: pytest.MonkeyPatch):
    """Before anything is built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match=r"(?s)67 GB free, or the tiny model: tiny/qwen-image with device cpu"):
        base.load(tiny_case("Qwen/Qwen-Image", **OWN_SIZE))


def test_too_little_memory_names_needed_and_available(monkeypatch: pytest.MonkeyPatch):
    """Random weights need no text encoder, so less than pretrained ones; a smaller picture needs less."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20_000_000_000, 24_000_000_000))
    with pytest.raises(EnvironmentFault, match=r"needs about 26.0 GB of GPU memory; cuda has 20.0 of 24.0 GB free"):
        base.load(tiny_case("Tongyi-MAI/Z-Image", **OWN_SIZE))
    with pytest.raises(EnvironmentFault, match=r"needs about 50.0 GB"):
        base.load(tiny_case("Qwen/Qwen-Image", weights="random", **OWN_SIZE))
    with pytest.raises(EnvironmentFault, match=r"needs about 45.4 GB"):
        base.load(tiny_case("Qwen/Qwen-Image", weights="random", **OWN_SIZE | {"width_px": 256}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "Unknown dtype 'int4': expected one of bfloat16"),
        ({"device": "gpu"}, "Unknown device 'gpu'"),
        ({"token_counts": (3,)}, "token_counts has 1 entries for 2 prompts"),
        ({"steps": 1}, "needs at least 2 denoise steps, got 1"),
        ({"weights": "random", "source": "somewhere"}, "both random and those of somewhere"),
    ],
)
def test_impossible_cases_are_refused(changes: dict[str, Any], message: str):
    """Each names the field and what it may be."""
    with pytest.raises(UsageError, match=message):
        base.load(tiny_case("tiny/qwen-image", **changes))


@pytest.mark.parametrize("model", ["tiny/z-image", "tiny/sana1.5"])
def test_buckets_are_refused_where_the_policy_has_none(model: str):
    """Bucketed Z-Image captions are visibly wrong, and SANA has one length."""
    with pytest.raises(UsageError, match=f"{model} has no prompt-length buckets"):
        base.load(tiny_case(model, buckets=(64,)))


def test_facts_need_no_torch():
    """`list models` and `plan` read them in a fraction of a second."""
    code = (
        "import sys; from bcgbench.models import MODELS, facts; [facts(name) for name in MODELS]; "
        "import bcgbench.models.base; sys.exit(str({'torch', 'diffusers', 'transformers'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
