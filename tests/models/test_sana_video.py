"""SANA-Video: frames belong to the graph's key and are never rounded, sizes are never binned, prompts are 300 rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bcgbench import measure
from bcgbench.arms import Arm
from bcgbench.errors import UsageError
from bcgbench.models import adapter, base
from bcgbench.runners import RUNNERS
from bcgbench.tracer import Tracer
from bcgbench.types import Case
from tests.factories import case

MODEL = "tiny/sana-video"


def tiny_case(**changes: Any) -> Case:
    fixed = {"width_px": 32, "height_px": 32, "frames": 5, "steps": 2, "guidance": None, "device": "cpu"}
    return replace(case(model=MODEL, dtype="float32"), **(fixed | changes))


def traced(session: base.Session, prompt: int = 0) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of every transformer call of one request, as the pipeline gives them."""
    module, calls = session.pipe.transformer, []
    handle = module.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True)
    session.generate(prompt)
    handle.remove()
    return calls


@pytest.fixture(scope="module")
def session() -> base.Session:
    """One loaded tiny model for the tests that do not change it."""
    return base.load(tiny_case())


def test_guidance_is_one_call_of_two_rows_and_every_prompt_is_300(session: base.Session):
    """The latents go in by position, in five axes: both branches, channels, latent frames, height, width."""
    for prompt in (0, 1):
        calls = traced(session, prompt)
        assert len(calls) == 2
        for args, kwargs in calls:
            assert [arg.shape for arg in args] == [(2, 16, 2, 4, 4)]
            assert kwargs["encoder_hidden_states"].shape == (2, 300, 8)
            assert kwargs["encoder_attention_mask"].shape == (2, 300)


def test_a_video_is_its_frames(session: base.Session):
    """Not the batch of one around them."""
    assert session.generate(0).shape == (5, 32, 32, 3)


def test_another_number_of_frames_is_a_miss_that_says_so(session: base.Session):
    """A graph of 5 frames never answers for 9; the call runs eagerly and right, and the shapes are named."""
    eager, arm = Arm(RUNNERS["eager"], session), Arm(RUNNERS["bcg"], session)
    tracer = Tracer(eager)
    with torch.no_grad():
        with tracer.recording():
            session.generate(0)
        arm.prepare(tracer.calls)
        longer = replace(session, case=tiny_case(frames=9))
        reference = longer.generate(0)
        with arm.attached():
            assert (longer.generate(0) == reference).all()
            assert (arm.counts.replays, arm.counts.fallbacks) == (0, 2)
            session.generate(0)
    assert (arm.counts.replays, arm.counts.fallbacks) == (2, 2)
    (miss,) = arm.engagement(captures=(), expected_forwards=4).misses
    shapes = "hidden_states: captured float32[2, 16, 2, 4, 4], asked float32[2, 16, 3, 4, 4]"
    assert miss.difference == (f"{shapes} (a video of 5 frames captured, one of 9 asked)",)


@pytest.mark.parametrize(("asked", "nearest"), [(82, 81), (4, 1), (2, 1)])
def test_frames_are_not_rounded(session: base.Session, asked: int, nearest: int):
    """The pipeline would make 81 frames of 82 without a word."""
    with pytest.raises(UsageError, match=f"got {asked}. Nearest: {nearest}"):
        replace(session, case=tiny_case(frames=asked)).request(0)


def test_frames_left_out_are_the_models(session: base.Session):
    """81 at the released size."""
    assert replace(session, case=tiny_case(frames=None)).request(0)["frames"] == 5


def test_sizes_are_not_binned(session: base.Session):
    """Binning would run another aspect ratio and crop: here it would even fail for the tiny model's sample size."""
    wide = replace(session, case=tiny_case(width_px=96, height_px=64))
    assert traced(wide)[0][0][0].shape == (2, 16, 2, 8, 12)
    assert wide.generate(0).shape == (5, 64, 96, 3)


def test_only_the_cross_attention_breaks(session: base.Session):
    """Two layers, two breaks: the linear self-attention with its rotary embedding stays inside the graphs."""
    arm, tracer = Arm(RUNNERS["bcg"], session), Tracer(Arm(RUNNERS["eager"], session))
    with torch.no_grad():
        with tracer.recording():
            measure.request(session, 0, clock=measure.clock_for(session.device))
        arm.prepare(tracer.calls)
    assert [(graph.breaks, graph.segments) for graph in arm.graphs] == [(2, 3)]


def test_synthetic_prompts_mask_the_rows_after_their_tokens(monkeypatch: pytest.MonkeyPatch):
    """As the released one runs with random weights: no tokenizer, no text encoder, 300 seeded rows."""
    tiny = adapter(MODEL)
    monkeypatch.setattr(base, "find_adapter", lambda _: replace(tiny, facts=replace(tiny.facts, tiny=False)))
    synthetic = base.load(tiny_case(weights="random", token_counts=(11, 47)))
    assert synthetic.pipe.tokenizer is None
    _, call = traced(synthetic, 1)[0]
    assert call["encoder_hidden_states"].shape == (2, 300, 8)
    assert call["encoder_attention_mask"].sum(dim=1).tolist() == [1, 47]


def test_a_saved_pipeline_gives_the_same_video(session: base.Session, tmp_path: Path):
    """Loading from a folder is the path that released weights take."""
    session.pipe.save_pretrained(tmp_path)
    assert (base.load(tiny_case(source=str(tmp_path))).generate(1) == session.generate(1)).all()
    assert adapter(str(tmp_path)).facts.pipeline == "SanaVideoPipeline"


@pytest.mark.parametrize(("part", "other"), [
    ("transformer", "SanaVideoCausalTransformer3DModel"), ("vae", "AutoencoderKLLTX2Video"),
])  # fmt: skip
def test_other_models_of_the_pipeline_class_are_not_taken_for_this_one(tmp_path: Path, part: str, other: str):
    """The causal model and the 720p one name the same pipeline in their index."""
    kinds = {"transformer": "SanaVideoTransformer3DModel", "vae": "AutoencoderKLWan"} | {part: other}
    index = {"_class_name": "SanaVideoPipeline"} | {name: ["diffusers", kind] for name, kind in kinds.items()}
    assert not adapter(MODEL).fits(tmp_path, index=index)


def test_the_release_has_the_converters_width():
    """`mlp_ratio` 3.0; the class default is a model of 1.9 billion parameters."""
    released = adapter("Efficient-Large-Model/SANA-Video_2B_480p_diffusers")
    assert released.networks["transformer"].config["mlp_ratio"] == 3.0
    assert released.facts.transformer_parameters == 2_056_862_144
