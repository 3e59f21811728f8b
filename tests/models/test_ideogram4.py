"""Ideogram-4: the bucket is the pipeline's text length, two modules replay, guidance follows the steps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bcgbench.arms import Arm
from bcgbench.models import adapter, base
from bcgbench.models.padding import OutsidePolicy, PadCache
from bcgbench.models.weights import count_parameters, lay_out
from bcgbench.runners import RUNNERS
from bcgbench.tracer import Tracer
from bcgbench.types import Case
from tests.factories import case
from tests.models.test_capture_safety import Constants, Watch, empty
from tests.models.test_contract import run

MODEL = "tiny/ideogram-4"
PROMPTS = (
    "cube",
    "A glass observatory above a quiet lake at sunrise, with soft mist, warm reflections, and crisp detail",
)
IMAGE_ROWS = 64
"""32x32 pixels: a VAE of 2 and patches of 2."""


def tiny_case(**changes: Any) -> Case:
    fixed = {"width_px": 32, "height_px": 32, "steps": 2, "guidance": None, "device": "cpu", "prompts": PROMPTS}
    return replace(case(model=MODEL, dtype="float32"), **(fixed | changes))


@pytest.fixture(scope="module")
def session() -> base.Session:
    """One loaded tiny model for the tests that do not change it."""
    return base.load(tiny_case())


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> base.Session:
    """Loaded as the released one is with random weights: no tokenizer, no text encoder, seeded features."""
    tiny = adapter(MODEL)
    monkeypatch.setattr(base, "find_adapter", lambda _: replace(tiny, facts=replace(tiny.facts, tiny=False)))
    return base.load(tiny_case(weights="random", token_counts=(5, 40)))


def traced(session: base.Session, prompt: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Every denoiser call of one request: module name and bound arguments."""
    tracer = Tracer(Arm(RUNNERS["eager"], session))
    with torch.no_grad(), tracer.recording():
        session.generate(prompt)
    return [(call.module, call.arguments) for call in tracer.calls]


def test_each_step_calls_two_modules(session: base.Session):
    """Text and image in one sequence, then the image alone through weights of its own."""
    calls = traced(session)
    assert [name for name, _ in calls] == ["transformer", "unconditional_transformer"] * 2
    assert [call["hidden_states"].shape[1] for _, call in calls[:2]] == [32 + IMAGE_ROWS, IMAGE_ROWS]
    one, other = session.denoisers.values()
    assert not torch.equal(one.input_proj.weight, other.input_proj.weight)


def test_the_text_length_is_the_smallest_bucket(session: base.Session):
    """Not the pipeline's 2048; a case may ask for others, and for native length with ()."""
    assert session.token_counts == (13, 35)
    assert [session.request(prompt)["max_sequence_length"] for prompt in (0, 1)] == [32, 64]
    for buckets, lengths in (((128,), [128, 128]), ((), [13, 35]), ((16,), [16, 35])):
        asked = replace(session, case=tiny_case(buckets=buckets))
        assert [asked.request(prompt)["max_sequence_length"] for prompt in (0, 1)] == lengths


@pytest.mark.parametrize("rows", [32, 64, 256])
def test_the_bucket_changes_only_rounding(session: base.Session, rows: int):
    """Pad rows come first and are masked: the picture's velocity is the native one to 1e-6 in float32."""
    native = traced(replace(session, case=tiny_case(buckets=())))[0][1]
    padded = traced(replace(session, case=tiny_case(buckets=(rows,))))[0][1]
    assert padded["hidden_states"].shape[1] == rows + IMAGE_ROWS
    with torch.no_grad():
        out, reference = (session.pipe.transformer(**call)[0][:, -IMAGE_ROWS:] for call in (padded, native))
    assert (out - reference).abs().max() / reference.abs().max() < 1e-6


def test_a_bucket_without_its_mask_is_visibly_wrong(session: base.Session):
    """What a padder that forgets the segments does; the limit above can tell it."""
    native = traced(replace(session, case=tiny_case(buckets=())))[0][1]
    padded = traced(replace(session, case=tiny_case(buckets=(64,))))[0][1]
    unmasked = padded | {"segment_ids": torch.ones_like(padded["segment_ids"])}
    with torch.no_grad():
        out, reference = (session.pipe.transformer(**call)[0][:, -IMAGE_ROWS:] for call in (unmasked, native))
    assert (out - reference).abs().max() / reference.abs().max() > 1e-3


@pytest.mark.parametrize(("buckets", "graphs"), [((64,), 1), ((32, 64), 2)])
def test_a_bucket_has_one_graph_and_the_image_alone_has_one_for_all(
    session: base.Session, buckets: tuple[int, ...], graphs: int
):
    """The layout of the image alone is a slice of the whole one's: its strides would tell the prompt's bucket."""
    wide = replace(session, case=tiny_case(buckets=buckets))
    tracer, arm = Tracer(Arm(RUNNERS["eager"], wide)), Arm(RUNNERS["bcg"], wide)
    with torch.no_grad():
        with tracer.recording():
            wide.generate(0)
            wide.generate(1)
        arm.prepare(tracer.calls)
        with arm.attached():
            wide.generate(0)
            wide.generate(1)
    assert (arm.counts.replays, arm.counts.fallbacks) == (8, 0)
    held = {name: len(hook.graphed.cache.graphs) for name, hook in arm.hooks.items()}
    assert held == {"transformer": graphs, "unconditional_transformer": 1}
    assert {graph.breaks for graph in arm.graphs} == {2}


def test_a_prompt_above_the_buckets_is_a_counted_fallback(tmp_path: Path):
    """It runs at its own length, eagerly and right, in the module that sees text; the image alone still replays."""
    records, _ = run(tiny_case(buckets=(16,), runners=("eager", "bcg"), rounds=2, profile=False), tmp_path)
    record = records["bcg"]
    assert record.status == "INVALID"
    (miss,) = record.engagement.misses
    assert (miss.module, miss.reason) == ("transformer", "prompt has 35 tokens, the largest bucket is 16")
    assert miss.count == record.engagement.fallbacks > 0
    assert record.engagement.replays + record.engagement.fallbacks == record.engagement.expected_forwards
    assert all(found.exact for found in record.fidelity)


def test_text_rows_are_read_once_per_request(session: base.Session, monkeypatch: pytest.MonkeyPatch):
    """A read waits for the device, so every later step takes the remembered count."""
    from bcgbench.models import ideogram4

    calls, reads, memory = traced(session), [], PadCache()
    read = ideogram4._text_rows
    monkeypatch.setattr(ideogram4, "_text_rows", lambda indicator: reads.append(indicator) or read(indicator))
    for name, call in calls:
        padded = session.adapter.pad(call, buckets=(32,), cache=memory)
        assert padded is call or name == "unconditional_transformer"
        assert all(torch.equal(padded[key], call[key]) for key in ("position_ids", "segment_ids", "indicator"))
    assert len(reads) == 2
    with pytest.raises(OutsidePolicy, match="prompt has 32 tokens, the largest bucket is 16"):
        session.adapter.pad(calls[0][1], buckets=(16,), cache=memory)


def test_guidance_is_the_recipe_at_any_number_of_steps(session: base.Session):
    """The pipeline refuses a schedule of another length than the steps: 7.0, and 3.0 in the last sixteenth."""
    for steps, low in ((48, 3), (16, 1), (4, 0)):
        asked = session.request(0, steps=steps)
        assert asked["guidance_schedule"] == (7.0,) * (steps - low) + (3.0,) * low
        assert asked["guidance_scale"] is None
    session.generate(0, steps=3)


def test_guidance_that_is_asked_for_holds_in_every_step(session: base.Session):
    """Scale and schedule exclude each other in the pipeline; scale 1 still calls both modules."""
    constant = replace(session, case=tiny_case(guidance=1.0))
    asked = constant.request(0)
    assert (asked["guidance_scale"], asked["guidance_schedule"]) == (1.0, None)
    assert len(traced(constant)) == 4
    assert (constant.generate(0) != session.generate(0)).any()


def test_prompts_are_not_upsampled(session: base.Session):
    """It would draw from the generator that the noise comes from."""
    assert session.request(0)["prompt_upsampling"] is False


def test_tokens_are_counted_as_the_pipeline_counts_them(session: base.Session):
    """One length less and the pipeline refuses the prompt."""
    for prompt, tokens in enumerate(session.token_counts):
        session.pipe(**session.request(prompt) | {"max_sequence_length": tokens})
        with pytest.raises(ValueError, match=f"prompt has {tokens} tokens"):
            session.pipe(**session.request(prompt) | {"max_sequence_length": tokens - 1})


def test_features_are_packed_as_the_pipeline_packs_its_own(session: base.Session):
    """Given the text encoder's own rows, the wrapper returns what `encode_prompt` returns for the prompt."""
    native = session.pipe.encode_prompt(PROMPTS[1], 8, 8, 64, torch.device("cpu"))
    rows = native[0][:, 64 - session.token_counts[1] : 64]
    packed = session.pipe.encode_prompt([rows], 8, 8, 64, torch.device("cpu"))
    assert len(packed) == len(native) == 4
    for one, other in zip(packed, native, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="exceeds max_sequence_length=8"):
        session.pipe.encode_prompt([rows], 8, 8, 8, torch.device("cpu"))


def test_seeded_features_take_the_place_of_a_prompt(synthetic: base.Session):
    """Left of the image and right of the pad rows; repeats are equal, prompts differ."""
    assert synthetic.pipe.tokenizer is None
    assert synthetic.pipe.text_encoder is None
    call = traced(synthetic, 1)[0][1]
    filled = call["encoder_hidden_states"].abs().sum(dim=-1) > 0
    assert filled[0].nonzero().flatten().tolist() == list(range(64 - 40, 64))
    picture = synthetic.generate(0)
    assert (picture == synthetic.generate(0)).all()
    assert (picture != synthetic.generate(1)).any()


@pytest.mark.parametrize("name", ["transformer", "unconditional_transformer"])
def test_a_warm_forward_needs_nothing_of_the_host(name: str, monkeypatch: pytest.MonkeyPatch):
    """Neither a read nor a copy: the mask of segments and the indexed RoPE are ordinary kernels."""
    monkeypatch.setattr(torch, "autocast", lambda **_: nullcontext())  # it knows no meta device, and is off anyway
    part = adapter(MODEL).networks[name]
    module = lay_out(part.kind, part.config).to("meta")
    whole = {"dtype": torch.int64}
    arguments = {
        "hidden_states": empty(1, 96, 16), "timestep": empty(1), "encoder_hidden_states": empty(1, 96, 208),
        "position_ids": empty(1, 96, 3, **whole), "segment_ids": empty(1, 96, **whole),
        "indicator": empty(1, 96, **whole), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        module(**arguments)
        with Watch() as watch, Constants() as constants:
            module(**arguments)
    assert (watch.found, constants.found) == ([], [])


def test_both_denoisers_have_the_stated_size():
    """9.28 billion parameters each."""
    released = adapter("Comfy-Org/Ideogram-4")
    for name in ("transformer", "unconditional_transformer"):
        part = released.networks[name]
        assert count_parameters(lay_out(part.kind, part.config)) == released.facts.transformer_parameters


def test_a_saved_pipeline_gives_the_same_picture(session: base.Session, tmp_path: Path):
    """Loading from a folder is the path that released weights take; the optional upsampler is not loaded."""
    session.pipe.save_pretrained(tmp_path)
    loaded = base.load(tiny_case(source=str(tmp_path)))
    assert loaded.pipe.prompt_enhancer_head is None
    assert (loaded.generate(1) == session.generate(1)).all()


def test_ids_in_diffusers_layout_lead_to_the_same_adapter():
    """The published id is a repackaging for another program."""
    assert adapter("ideogram-ai/ideogram-4-nf4-diffusers") is adapter("Comfy-Org/Ideogram-4")
