"""LTX-2 and LTX-2.3: which calls a step makes, what a signature holds, and where a prompt's rows stand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline
from PIL import Image

from bcgbench import models
from bcgbench.arms import Arm
from bcgbench.engine.signature import difference
from bcgbench.errors import UsageError
from bcgbench.models import base
from bcgbench.models.ltx2 import LTX2, LTX23, NEGATIVE_TOKENS
from bcgbench.models.weights import lay_out
from bcgbench.runners import RUNNERS
from bcgbench.tracer import Tracer
from bcgbench.types import Case

RELEASED = {"Lightricks/LTX-2": LTX2, "Lightricks/LTX-2.3": LTX23}


def case(model: str = "tiny/ltx-2.3", **changes: Any) -> Case:
    facts = models.facts(model)
    plain = Case(model=model, width_px=64, height_px=64, frames=facts.frames, steps=2, prompts=("a cube", "a lake"),
                 dtype="float32", device="cpu")  # fmt: skip
    return dataclasses.replace(plain, **changes)


def traced(session: base.Session) -> Tracer:
    """All calls of one request."""
    tracer = Tracer(Arm(RUNNERS["eager"], session))
    with torch.no_grad(), tracer.recording():
        session.generate(0)
    return tracer


@pytest.mark.parametrize(("model", "guidance", "rows"), [
    ("tiny/ltx-2", None, [2]), ("tiny/ltx-2", 1.0, [1]), ("tiny/ltx-2.3", None, [2, 1, 1]), ("tiny/ltx-2.3", 1.0, [1]),
])  # fmt: skip
def test_calls_per_step(model: str, guidance: float | None, rows: list[int]):
    """The audio's scales are on by default and must be turned off with the video's, or LTX-2 makes three calls."""
    session = base.load(case(model, guidance=guidance))
    made = traced(session).calls
    assert [len(call.arguments["hidden_states"]) for call in made] == rows * 2


def test_three_guidance_calls_are_three_signatures():
    """Text guidance has two rows, the others one; those differ in the blocks and in the isolation alone."""
    session = base.load(case())
    tracer = traced(session)
    (hook,) = Arm(RUNNERS["bcg"], session).hooks.values()
    signatures = [hook.graphed.sign(call.arguments).signature for call in tracer.calls]
    assert len(set(signatures)) == 3
    assert signatures[:3] == signatures[3:]
    fields = " ".join(difference(signatures[1], signatures[2]))
    assert "isolate_modalities" in fields
    assert "spatio_temporal_guidance_blocks" in fields
    assert "hidden_states" not in fields


def prepared(session: base.Session) -> Arm:
    """A bcg arm with the graphs of one request."""
    arm = Arm(RUNNERS["bcg"], session)
    with torch.no_grad():
        arm.prepare(traced(session).calls)
    return arm


def test_another_number_of_frames_is_a_miss_that_says_so():
    """A graph warmed up at 9 frames does not serve 17: the call runs eagerly and right, and both numbers are told."""
    short, long = (base.load(case("tiny/ltx-2", frames=frames, width_px=32, height_px=32)) for frames in (9, 17))
    arm = prepared(short)
    request = long.request(0)
    with torch.no_grad():
        expected = short.pipe(**long.request(0)).frames
        with arm.attached():
            found = short.pipe(**request).frames
    assert (found == expected).all()
    (miss,) = arm.engagement(captures=(), expected_forwards=2).misses
    assert (miss.reason, miss.count) == ("no graph for this signature", 2)
    assert (
        "num_frames: captured 5, asked 9 latent frames (a video of 9 frames captured, one of 17 asked)"
    ) in miss.difference
    assert "video_coords: captured float32[2, 3, 80, 2], asked float32[2, 3, 144, 2]" in miss.difference
    assert "hidden_states: captured float32[2, 80, 4], asked float32[2, 144, 4]" in miss.difference


def test_a_call_with_an_image_never_shares_a_text_calls_graph():
    """Image-to-video noises each token by itself: `timestep` has a row per token, and the sound one of its own."""
    session = base.load(case("tiny/ltx-2", width_px=32, height_px=32))
    arm = prepared(session)
    parts = session.pipe.components
    with_image = LTX2ImageToVideoPipeline(**{k: v for k, v in parts.items() if k != "duration_head"})
    with_image.set_progress_bar_config(disable=True)
    with torch.no_grad(), arm.attached():
        with_image(image=Image.new("RGB", (32, 32)), image_crf=0, **session.request(0))
    assert arm.counts.replays == 0
    (miss,) = arm.engagement(captures=(), expected_forwards=2).misses
    assert miss.count == 2
    assert "timestep: captured float32[2], asked float32[2, 48]" in miss.difference
    assert "audio_timestep: captured None, asked float32[2]" in miss.difference


def test_a_traced_timestep_keeps_its_expanded_strides():
    """The pipeline expands one number over both rows; a dense copy would be captured and never asked for."""
    first = traced(base.load(case("tiny/ltx-2"))).calls[0].arguments
    assert first["timestep"].stride() == (0,)
    assert first["timestep"] is first["sigma"]


def test_spatio_temporal_guidance_changes_nothing_in_ltx2():
    """Why LTX-2 runs without it: its blocks ignore the perturbation, so the call is a second forward for nothing."""
    session = base.load(case("tiny/ltx-2"))
    arguments = traced(session).calls[0].arguments
    with torch.no_grad():
        plain = session.pipe.transformer(**arguments)
        perturbed = session.pipe.transformer(**arguments | {"spatio_temporal_guidance_blocks": [1]})
    assert all(torch.equal(a, b) for a, b in zip(plain, perturbed, strict=True))


def test_spatio_temporal_guidance_is_live_in_ltx23():
    """The same on the model that was trained for it: a block skips its attention."""
    session = base.load(case())
    arguments = traced(session).calls[0].arguments
    with torch.no_grad():
        plain = session.pipe.transformer(**arguments)
        perturbed = session.pipe.transformer(**arguments | {"spatio_temporal_guidance_blocks": [1]})
    assert not torch.equal(plain[0], perturbed[0])


@pytest.mark.parametrize(("model", "frames", "nearest"), [
    ("tiny/ltx-2", 6, 5), ("Lightricks/LTX-2", 120, 113), ("Lightricks/LTX-2", 1, None),
])  # fmt: skip
def test_frames_off_the_latent_grid_are_refused(model: str, frames: int, nearest: int | None):
    """The pipeline rounds down in silence and would time a shorter video than the report says."""
    adapter = models.adapter(model)
    if nearest is None:
        assert adapter.options(case(model, frames=frames), guidance=3.0)["num_frames"] == frames
        return
    with pytest.raises(UsageError, match=f"Nearest: {nearest}"):
        adapter.options(case(model, frames=frames), guidance=3.0)


def test_a_video_has_the_frames_and_the_size_asked_for():
    """uint8 frames from the session, audio beside them from the pipeline."""
    session = base.load(case())
    assert session.generate(0).shape == (5, 64, 64, 3)
    with torch.no_grad():
        audio = session.pipe(**session.request(0)).audio
    assert torch.isfinite(audio).all()
    assert audio.std() > 0


def draw(tokens: int, stream: int) -> torch.Tensor:
    return torch.randn((1, tokens, 48), generator=torch.Generator().manual_seed(stream))


def test_embeddings_end_with_the_prompt():
    """Pads stand first, as the text encoder's do: the other way round LTX-2 would normalise over zeros."""
    made = models.adapter("tiny/ltx-2").embeddings(draw, tokens=7, stream=1, guidance=3.0)
    assert made["prompt_embeds"].shape == made["negative_prompt_embeds"].shape == (1, 128, 48)
    assert made["prompt_attention_mask"].tolist() == [[0] * 121 + [1] * 7]
    assert torch.equal(made["prompt_embeds"][:, 121:], draw(7, 1))
    assert int(made["negative_prompt_attention_mask"].sum()) == NEGATIVE_TOKENS
    assert "negative_prompt_embeds" not in LTX2.embeddings(draw, tokens=7, stream=1, guidance=1.0)


@pytest.mark.parametrize("model", ["tiny/ltx-2", "tiny/ltx-2.3"])
def test_pad_rows_of_embeddings_do_not_matter(model: str):
    """The connectors replace them by registers: prompts of any length are one shape, exactly."""
    session = base.load(case(model))
    made = session.adapter.embeddings(draw, tokens=7, stream=1, guidance=3.0)
    dirty = made["prompt_embeds"].clone()
    dirty[:, :121] = 9
    outputs = []
    for embeds in (made["prompt_embeds"], dirty):
        request = session.request(0) | made | {"prompt_embeds": embeds}
        del request["prompt"], request["negative_prompt"]
        with torch.no_grad():
            outputs.append(session.pipe(**request).frames)
    assert (outputs[0] == outputs[1]).all()


def test_a_tokenizer_that_pads_right_is_set_right():
    """Synthetic prompts skip the pipeline's own line that sets it, and its connectors believe the tokenizer."""
    session = base.load(case())
    session.pipe.tokenizer.padding_side = "right"
    session.adapter.prepare_pipeline(session.pipe)
    assert session.pipe.tokenizer.padding_side == "left"


@pytest.mark.parametrize("adapter", RELEASED.values(), ids=RELEASED)
def test_the_released_vae_compresses_32_and_8_times(adapter: Any):
    """The class works out 64 and 16 when told nothing: an eighth of the tokens."""
    part = adapter.networks["vae"]
    vae = lay_out(part.kind, part.config)
    assert (vae.spatial_compression_ratio, vae.temporal_compression_ratio) == (32, 8)


@pytest.mark.parametrize(("model", "connectors"), [("Lightricks/LTX-2", 1_431_475_200),
                                                   ("Lightricks/LTX-2.3", 3_172_227_584)])  # fmt: skip
def test_connectors_have_the_released_size(model: str, connectors: int):
    """Two layers over a shared projection, eight over one per modality."""
    part = RELEASED[model].networks["connectors"]
    assert sum(p.numel() for p in lay_out(part.kind, part.config).parameters()) == connectors


@pytest.mark.parametrize("model", ["tiny/ltx-2", "tiny/ltx-2.3"])
def test_a_saved_folder_finds_its_version(model: str, tmp_path: Path):
    """One pipeline class stands for both; the wrong version's guidance would triple the calls or lose two."""
    session = base.load(case(model))
    session.pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "LTX2Pipeline"
    found = models.adapter(str(tmp_path))
    assert found.facts.branches == models.facts(model).branches
    reloaded = base.load(case(model, source=str(tmp_path)))
    assert (reloaded.generate(0) == session.generate(0)).all()
