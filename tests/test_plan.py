"""Estimates: right order of magnitude, right direction, no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from bcgbench import cases, models, plan
from tests import factories as make

FACTS = make.model_facts()


def test_the_models_own_size_needs_the_stated_memory():
    """The facts' peak is the estimate at the model's default resolution in bf16."""
    case = make.case(width_px=FACTS.width_px, height_px=FACTS.height_px)
    assert plan.memory_bytes(case, FACTS) == FACTS.memory_bytes


def test_memory_follows_pixels_and_element_size_beyond_the_weights():
    """Twice the pixels scale what is not weights, half of which stays for the smallest picture; float32 doubles all."""
    own = make.case(width_px=FACTS.width_px, height_px=FACTS.height_px)
    wide = make.case(width_px=2 * FACTS.width_px, height_px=FACTS.height_px)
    small = make.case(width_px=256, height_px=256)
    rest_bytes = FACTS.memory_bytes - 2 * FACTS.transformer_parameters
    assert plan.memory_bytes(wide, FACTS) == FACTS.memory_bytes + rest_bytes
    assert plan.memory_bytes(small, FACTS) == FACTS.memory_bytes - rest_bytes / 2
    assert plan.memory_bytes(replace(own, dtype="float32"), FACTS) == 2 * plan.memory_bytes(own, FACTS)


def test_requests_are_counted_over_all_arms():
    """1 traced, then per arm 4 warm, the rounds, 1 profiled, 1 checked per prompt."""
    case = make.case(runners=("eager", "bcg"), rounds=10, profile=True)
    assert plan.request_count(case) == 1 + 2 * (4 + 10 + 1 + 2)
    assert plan.request_count(make.case(runners=("eager", "bcg"), rounds=10, profile=False)) == 1 + 2 * (4 + 10 + 2)


@pytest.mark.parametrize(("guidance", "forwards"), [(None, 40), (4.0, 40), (1.0, 20), (0.0, 20)])
def test_guidance_that_is_off_halves_the_calls(guidance: float | None, forwards: int):
    """20 steps, two branches."""
    assert plan.estimate(make.case(guidance=guidance), FACTS).forwards == forwards


def test_a_second_stage_has_its_own_calls_at_four_times_the_tokens():
    """8 half-size calls and 3 full-size ones cost what 20 half-size ones would."""
    staged = replace(FACTS, second_stage_steps=3, text_tokens=1, branches=1, multiple_px=64)
    case = make.case(width_px=4096, height_px=4096, steps=8)
    found = plan.estimate(case, staged)
    assert found.forwards == 11
    alike = plan.estimate(replace(case, steps=20), replace(staged, second_stage_steps=0))
    assert found.duration_s == pytest.approx(alike.duration_s, rel=1e-3)


def test_a_small_model_is_bound_by_launches():
    """No estimate claims a step faster than the host can launch it."""
    small = make.model_facts(transformer_parameters=1000, memory_bytes=10_000)
    case = make.case()
    assumed = plan.Assumptions(start_s=0.0, load_bytes_per_s=1e30)
    expected_s = plan.request_count(case) * 40 * assumed.least_forward_s
    assert plan.estimate(case, small, assumptions=assumed).duration_s == pytest.approx(expected_s)


def test_time_follows_two_flops_per_parameter_and_token():
    """1024 image tokens (16 px each way) and the longest prompt."""
    case = make.case(token_counts=(9, 76))
    assert plan.tokens(case, FACTS) == 1024 + 76
    assumed = plan.Assumptions(start_s=0.0, load_bytes_per_s=1e30, least_forward_s=0.0, gpu_flops=1e14)
    expected_s = plan.request_count(case) * 40 * 2 * FACTS.transformer_parameters * 1100 / 1e14
    assert plan.estimate(case, FACTS, assumptions=assumed).duration_s == pytest.approx(expected_s)


def test_stated_tokens_scale_with_pixels_and_frames():
    """A video model states the rows of its own size; half the frames and half the width are a quarter of them."""
    video = make.model_facts(width_px=1024, height_px=512, frames=120, tokens=12_000)
    assert plan.tokens(make.case(width_px=512, height_px=512, frames=60, token_counts=(10, 20)), video) == 3000 + 20


@pytest.mark.parametrize(
    ("model", "resolution", "rows"),
    [
        ("zai-org/GLM-Image", "512x512", 1024), ("Tongyi-MAI/Z-Image", "256x256", 2 * 256),
        ("Tongyi-MAI/Z-Image-Turbo", "512x512", 1024), ("Comfy-Org/Ideogram-4", "512x512", 1024),
        ("Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers", "512x512", 2 * 256),
        ("Lightricks/LTX-2", "768x512x121", 2 * 6270), ("MiniMaxAI/MiniMax-H3", "512x512x124", 9577),
    ],
)  # fmt: skip
def test_released_models_state_the_rows_of_a_call(model: str, resolution: str, rows: int):
    """Batch of guidance included; scaling MiniMax-H3's sound along with the picture is 3 % off."""
    case = cases.make_case(model, facts=models.facts, resolution=resolution)
    assert plan.image_tokens(case, models.facts(model)) == rows


def test_an_estimate_says_what_it_leaves_out():
    """The download of released weights; speed on a CPU."""
    (note,) = plan.estimate(make.case(), FACTS).notes
    assert note == "time to download pretrained weights is not included"
    (note,) = plan.estimate(make.case(device="cpu", weights="random"), FACTS).notes
    assert "no speed" in note


def test_the_text_encoder_counts_with_pretrained_weights_only():
    """The same memory that `run` asks for: random weights load no text encoder."""
    plain = plan.estimate(make.case(), FACTS)
    full = plan.estimate(make.case(), FACTS, text_encoder_bytes=8_000_000_000)
    assert full.memory_bytes - plain.memory_bytes == 8_000_000_000
    assert full.duration_s > plain.duration_s
    synthetic = make.case(weights="random")
    assert plan.estimate(synthetic, FACTS, text_encoder_bytes=8_000_000_000) == plan.estimate(synthetic, FACTS)


def test_another_arithmetic_needs_its_weights_twice_more():
    """Cast to a wider dtype, beside the own ones, for the reference that judges it."""
    facts = models.facts("Qwen/Qwen-Image")
    plain, compiled = (
        plan.estimate(
            make.case(model=facts.id, width_px=256, height_px=256, runners=("eager", arm)),
            facts,
            text_encoder_bytes=10**9,
        )
        for arm in ("bcg", "bcg+compile")
    )
    assert plain.memory_bytes < 2.5 * 2 * facts.transformer_parameters < compiled.memory_bytes
    assert compiled.memory_bytes == 3 * 2 * facts.transformer_parameters + 10**9  # whose text encoder is not cast
    assert not any("compilation" in note for note in plain.notes)
    assert any("compilation" in note for note in compiled.notes)


def test_planning_imports_no_torch():
    """A plan is made where there is no GPU and perhaps no torch."""
    code = "import sys, bcgbench.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
