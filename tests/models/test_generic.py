"""Models without an adapter: foreign families in every arm, facts from configurations, random weights, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bcgbench import cli, models, store
from bcgbench.cases import make_case
from bcgbench.errors import BcgbenchError, EnvironmentFault, UsageError
from bcgbench.models import base, generic, loading, weights
from bcgbench.types import Case
from tests.models import foreign
from tests.models.test_contract import run

CALLS_PER_STEP = {"flux": 1, "sd3": 1, "wan": 2, "chroma": 2, "pixart-sigma": 1}
"""Flux takes guidance as an embedding; SD3 and PixArt run both branches in one batch."""
CHECKED = [(family, dtype) for family in ("flux", "sd3", "wan", "chroma") for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny foreign family with weights, saved once."""
    root = tmp_path_factory.mktemp("foreign")
    return lambda family: root / family if (root / family).is_dir() else foreign.save(family, root / family)


@pytest.fixture
def configs(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder of Flux that holds configurations and tokenizers only."""
    return foreign.drop_weights(Path(shutil.copytree(saved("flux"), tmp_path / "configs")))


def foreign_case(folder: Path | str, **changes: Any) -> Case:
    """Two steps at the smallest size that all families make, on a CPU."""
    frames = "x5" if "wan" in Path(folder).name else ""
    fixed = {"resolution": f"32x32{frames}", "steps": 2, "device": "cpu", "rounds": 1, "profile": False}
    return make_case(str(folder), facts=models.facts, **(fixed | changes))


# ---------------------------------------------------------------------------------------------------- proven families
@pytest.mark.parametrize(("family", "dtype"), [*CHECKED, ("pixart-sigma", "float32")])
def test_foreign_families_replay_bit_exactly(family: str, dtype: str, saved: Callable[[str], Path], tmp_path: Path):
    """bcg and graph equal eager on every call, latent and image; nothing is captured late, nothing falls back."""
    case = foreign_case(saved(family), dtype=dtype, runners=("eager", "eager-padded", "bcg", "graph"))
    records, _ = run(case, tmp_path)
    for name in ("bcg", "graph"):
        record = records[name]
        proof, (graph, padding) = record.engagement, record.fidelity
        assert (record.status, graph.exact, padding.exact) == ("OK", True, True), record.reasons
        assert graph.calls == len(case.prompts) * case.steps * CALLS_PER_STEP[family]
        assert len(set(proof.captures)) == 1
        assert proof.replays == proof.expected_forwards > graph.calls
        assert (proof.fallbacks, proof.misses, proof.uncalled) == (0, (), ())
        assert record.settings["adapter"] == "generic, not validated"
    assert records["bcg"].engagement.segments == records["bcg"].engagement.breaks + 1
    assert {record.status for record in records.values()} == {"OK"}
    assert records["eager"].fidelity[0].exact


def test_both_denoisers_of_wan_are_captured(saved: Callable[[str], Path]):
    """Wan 2.2 leaves the early steps to one transformer and the late ones to another."""
    session = base.load(foreign_case(saved("wan")))
    assert set(session.denoisers) == {"transformer", "transformer_2"}
    assert session.generate(0).shape == (5, 32, 32, 3)


@pytest.mark.parametrize("policy", ["attention", "auto"])
def test_a_model_that_reads_its_mask_on_the_host_has_a_graph_per_prompt(
    policy: str, saved: Callable[[str], Path], tmp_path: Path
):
    """Lumina 2 asks the mask for the prompt's length: two prompts and a negative one are three graphs of one shape."""
    case = foreign_case(saved("lumina2"), break_policy=policy, runners=("eager", "bcg"))
    record = run(case, tmp_path)[0]["bcg"]
    assert (record.status, record.reasons) == ("OK", ())
    assert record.fidelity[0].exact
    assert record.engagement is not None
    assert set(record.engagement.captures) == {3}
    assert len(set(record.engagement.signatures)) == 1


def test_the_command_line_says_that_nobody_validated_it(saved: Callable[[str], Path], tmp_path: Path):
    """Before the run on stderr, in the printed report and in the stored one; the outcome is as of any model."""
    options = ["--model", str(saved("sd3")), "--res", "64x64", "--steps", "2", "--rounds", "1", "--device", "cpu"]
    done = CliRunner().invoke(cli.app, ["run", *options, "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "nobody has validated that" in done.stderr
    assert "sd3 @ 64x64 (model not validated)" in done.stdout
    assert "outputs exact; replays" in done.stdout
    (path,) = store.list_runs(tmp_path)
    assert "(model not validated)" in (path / "report.md").read_text()
    planned = CliRunner().invoke(cli.app, ["plan", *options])
    assert "no adapter is written for this model" in " ".join(planned.stdout.split())


# ------------------------------------------------------------------------------------------------------------- facts
def test_facts_are_those_of_the_pipeline(saved: Callable[[str], Path]):
    """Size, steps and guidance are the pipeline's defaults, parameters are counted, the break policy is its own."""
    facts = models.facts(str(saved("sd3")))
    assert (facts.pipeline, facts.width_px, facts.height_px, facts.frames) == ("StableDiffusion3Pipeline", 64, 64, None)
    assert (facts.steps, facts.guidance, facts.branches, facts.multiple_px) == (28, 7.0, 2, 4)
    assert (facts.policy, facts.buckets, facts.generic) == ("native length", (), True)
    transformer = base.load(foreign_case(saved("sd3"))).pipe.transformer
    assert facts.transformer_parameters == weights.count_parameters(transformer)
    assert foreign_case(saved("sd3")).break_policy == generic.BREAK_POLICY
    assert foreign_case(saved("sd3"), break_policy="none").break_policy == "none"


def test_facts_of_a_video_pipeline(saved: Callable[[str], Path]):
    """Wan names size and frames in its signature."""
    facts = models.facts(str(saved("wan")))
    assert (facts.width_px, facts.height_px, facts.frames, facts.multiple_px) == (832, 480, 81, 16)


def test_facts_at_full_size_need_no_weights(configs: Path):
    """The release's configuration gives its 11.9 B parameters without the memory that they take."""
    weights.lay_out("FluxTransformer2DModel", {"guidance_embeds": True}).save_config(configs / "transformer")
    facts = models.facts(str(configs))
    assert facts.transformer_parameters == 11_901_408_320
    assert 2 * 11.9e9 < facts.memory_bytes < 4e10


def test_a_request_holds_what_the_pipeline_takes(saved: Callable[[str], Path]):
    """Guidance off drops the negative prompt; nothing bins the size or rewrites the caption."""
    session = base.load(foreign_case(saved("pixart-sigma"), guidance=1.0))
    asked = session.request(0)
    assert (asked["guidance_scale"], asked["use_resolution_binning"], asked["clean_caption"]) == (1.0, False, False)
    assert "negative_prompt" not in asked
    assert "num_frames" not in asked
    assert session.adapter.text("cube", guidance=4.5)["negative_prompt"] == generic.NEGATIVE_PROMPT


def test_what_the_pipeline_cannot_do_is_said(saved: Callable[[str], Path]):
    """Wan rounds frames to 4n + 1 by itself; a pipeline may know no guidance scale."""
    session = base.load(foreign_case(saved("wan"), resolution="32x32x7"))
    with pytest.raises(BcgbenchError, match="and 5 of 7 frames"):
        session.generate(0)
    taking = {name: default for name, default in session.adapter.call.items() if name != "guidance_scale"}
    adapter = dataclasses.replace(session.adapter, call=taking)
    with pytest.raises(UsageError, match=r"WanPipeline takes no guidance scale, got 3.0"):
        adapter.options(foreign_case(saved("wan"), guidance=3.0), guidance=3.0)


# ---------------------------------------------------------------------------------------------------- random weights
def test_a_folder_of_configurations_runs_on_random_weights(configs: Path, tmp_path: Path):
    """Denoiser, autoencoder and text encoders are drawn from the seed; prompts are text, and the arms agree."""
    case = foreign_case(configs, weights="random", dtype="bfloat16")
    first, second = (base.load(case) for _ in range(2))
    picture = first.generate(0)
    assert np.array_equal(picture, second.generate(0))
    assert not np.array_equal(picture, first.generate(1))
    assert not np.array_equal(picture, base.load(foreign_case(configs, weights="random", seed=7)).generate(0))
    encoder = first.pipe.text_encoder_2
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.bfloat16}
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    records, _ = run(case, tmp_path)
    assert {record.status for record in records.values()} == {"OK"}


def test_missing_tokenizer_files_are_named(configs: Path):
    """They cannot be made up, and a random tokenizer would be another prompt."""
    shutil.rmtree(configs / "tokenizer_2")
    with pytest.raises(UsageError, match=r"tokenizer_2 does not hold the files of a ByT5Tokenizer.*Copy the folder"):
        base.load(foreign_case(configs, weights="random"))


def test_weights_have_one_origin(configs: Path, saved: Callable[[str], Path], tmp_path: Path):
    """Random and stored ones at once are refused, and so are stored ones that are not there."""
    with pytest.raises(UsageError, match="Weights cannot be both random and those of"):
        base.load(foreign_case(saved("flux"), weights="random"))
    with pytest.raises(UsageError, match="run through its own tokenizers: leave token_counts out"):
        base.load(foreign_case(configs, weights="random", token_counts=(3, 40)))
    with pytest.raises(UsageError, match="holds configurations and no weights: add --weights random"):
        base.load(foreign_case(configs))
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    with pytest.raises(UsageError, match="have its release's size: name it, Qwen/Qwen-Image"):
        base.load(foreign_case(tmp_path, weights="random"))


# ---------------------------------------------------------------------------------------------------------- the hub
def test_a_hub_id_without_adapter_needs_the_hub():
    """Offline the way on is a local folder, and the exit code that of the environment."""
    with pytest.raises(EnvironmentFault, match=r"FLUX.1-dev has no adapter.*Give a local diffusers folder") as error:
        models.adapter("black-forest-labs/FLUX.1-dev")
    assert error.value.exit_code == 7


@pytest.mark.parametrize("model", ["Qwen/Qwen-Imag", "qwen/qwen-image", "tiny/flux", "./Qwen-Image", "Flux"])
def test_typing_errors_never_reach_the_hub(model: str):
    """A near miss of a known id, a tiny model that does not exist, a path, a bare name."""
    with pytest.raises(UsageError, match="Unknown model"):
        models.adapter(model)


def test_a_hub_id_is_read_from_its_configurations(configs: Path, monkeypatch: pytest.MonkeyPatch):
    """Facts need no weights, and carry the id; random weights need nothing else."""
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda *args, **kwargs: asked.append((args, kwargs)) or str(configs))  # fmt: skip
    found = models.adapter("black-forest-labs/FLUX.1-dev")
    assert (found.facts.id, found.facts.generic) == ("black-forest-labs/FLUX.1-dev", True)
    assert asked == [(("black-forest-labs/FLUX.1-dev",), {"allow_patterns": ["*.json", "*.txt", "*.model", "*.jinja"]})]
    assert base.load(foreign_case("black-forest-labs/FLUX.1-dev", weights="random")).generate(0).shape[0] == 1


def test_a_hub_id_of_a_known_pipeline_gets_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fine-tuned model is driven as its release is."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "ZImagePipeline"}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    found = models.adapter("somebody/painted-z")
    assert type(found) is type(models.adapter("Tongyi-MAI/Z-Image"))
    assert (found.facts.id, found.facts.generic) == ("somebody/painted-z", False)
    assert found.facts.memory_bytes == models.facts("Tongyi-MAI/Z-Image").memory_bytes


# --------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("NoSuchPipeline", "is a NoSuchPipeline, which diffusers .* does not have"),
        ("StableDiffusionUpscalePipeline", "StableDiffusionUpscalePipeline, which takes no width, height"),
        ("FluxPipeline", "has no part that is called transformer or unet"),
    ],
)
def test_pipelines_that_text_and_size_cannot_drive_are_refused(pipeline: str, message: str, tmp_path: Path):
    """Before anything is loaded, with what is missing."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    with pytest.raises(UsageError, match=message):
        models.adapter(str(tmp_path))


def test_a_class_that_is_not_installed_is_named(configs: Path):
    """A folder of a later diffusers, or of code that comes with the model."""
    index = json.loads((configs / "model_index.json").read_text())
    (configs / "model_index.json").write_text(json.dumps(index | {"transformer": ["diffusers", "Flux9Transformer"]}))
    with pytest.raises(UsageError, match=r"transformer of the model is a diffusers.Flux9Transformer, which"):
        models.adapter(str(configs))


def test_too_little_memory_offers_the_cpu(configs: Path, monkeypatch: pytest.MonkeyPatch):
    """There is no tiny model of a foreign family to fall back on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="Use a GPU with 1 GB free, or device cpu"):
        loading.device_of(foreign_case(configs, device="cuda"), models.adapter(str(configs)))
