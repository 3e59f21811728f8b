"""LTX-2 in two stages: diffusers' own calls, two signatures, two loops, and a second that never runs."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2LatentUpsamplePipeline, LTX2Pipeline
from diffusers.pipelines.ltx2 import utils as published

from bcgbench import bench, measure, models
from bcgbench.arms import Arm
from bcgbench.clock import HostClock
from bcgbench.errors import BcgbenchError, UsageError
from bcgbench.models import base
from bcgbench.models.ltx2_two_stage import FIRST_SIGMAS, HUB_ID, LTX2_TWO_STAGE, SECOND_SIGMAS
from bcgbench.models.weights import count_parameters, lay_out
from bcgbench.runners import RUNNERS
from bcgbench.tracer import Tracer
from bcgbench.types import Case, Record
from tests.running import records_of


@pytest.fixture(autouse=True)
def _no_grad():
    """Pipelines run without gradients."""
    with torch.no_grad():
        yield


def case(**changes: Any) -> Case:
    plain = Case(model="tiny/ltx-2-two-stage", width_px=64, height_px=64, frames=5, steps=2, device="cpu", rounds=1,
                 prompts=("a cube", "a lake"), dtype="float32", profile=False, runners=("eager", "bcg"))  # fmt: skip
    return dataclasses.replace(plain, **changes)


def traced(session: base.Session) -> Tracer:
    """All calls of one request."""
    tracer = Tracer(Arm(RUNNERS["eager"], session))
    with tracer.recording():
        session.generate(0)
    return tracer


def run(folder: Path) -> dict[str, Record]:
    """Records by runner of a whole case."""
    return records_of(case(), folder)


def test_the_noise_levels_are_the_published_ones():
    """Copied, because a model's facts are read without diffusers."""
    assert list(FIRST_SIGMAS) == published.DISTILLED_SIGMA_VALUES
    assert list(SECOND_SIGMAS) == published.STAGE_2_DISTILLED_SIGMA_VALUES


def test_a_request_is_diffusers_own_three_calls():
    """Half-size latents, upsampled, noised and denoised again: bit for bit, every frame and the sound."""
    session = base.load(case(steps=8))
    found = session.produce(0)
    parts = base.load(case()).pipe
    plain = LTX2Pipeline(**parts.first.components)
    plain.scheduler = FlowMatchEulerDiscreteScheduler()
    plain.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(42)
    off = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0,
           "guidance_scale": 1.0, "audio_guidance_scale": 1.0, "guidance_rescale": 0.0, "audio_guidance_rescale": 0.0,
           "use_cross_timestep": False, "max_sequence_length": 128}  # fmt: skip
    shared = {"prompt": "a cube", "num_frames": 5, "frame_rate": 24.0, "generator": generator, "return_dict": False}
    video, audio = plain(
        **shared, **off, width=32, height=32, num_inference_steps=8, sigmas=published.DISTILLED_SIGMA_VALUES,
        output_type="latent",
    )  # fmt: skip
    upsample = LTX2LatentUpsamplePipeline(vae=plain.vae, latent_upsampler=parts.upsample.latent_upsampler)
    larger = upsample(latents=video, output_type="latent", return_dict=False)[0]
    frames, sound = plain(
        **shared, **off, width=64, height=64, num_inference_steps=3, latents=larger, audio_latents=audio,
        sigmas=published.STAGE_2_DISTILLED_SIGMA_VALUES, noise_scale=0.909375, output_type="np",
    )  # fmt: skip
    assert found.images.shape == (5, 64, 64, 3)
    assert (found.images == (frames[0] * 255).round().astype("uint8")).all()
    assert found.sound is not None
    assert (found.sound.samples == sound[0].numpy()).all()


@pytest.mark.parametrize(("guidance", "rows"), [(None, 1), (4.0, 2)])
def test_each_stage_has_a_signature_of_its_own(guidance: float | None, rows: int):
    """Half the side is a quarter of the tokens; guidance is the first stage's alone."""
    session = base.load(case(guidance=guidance))
    calls = traced(session).calls
    shapes = [tuple(call.arguments["hidden_states"].shape[:2]) for call in calls]
    assert shapes == [(rows, 48)] * 2 + [(1, 192)] * 3
    arm = Arm(RUNNERS["bcg"], session)
    arm.prepare(calls)
    with arm.attached():
        session.generate(0)
    assert arm.captures == 2
    assert (arm.counts.replays, arm.counts.fallbacks) == (5, 0)
    proof = arm.engagement(captures=(2, 2), expected_forwards=5)
    assert (proof.uncalled, proof.unengaged) == ((), ())


def test_both_loops_are_timed():
    """Steps in order, two of the first stage and three of the second; the loops lie apart and within the request."""
    measured = measure.request(base.load(case()), 0, clock=HostClock())
    assert measured.loop_steps == (2, 3)
    assert len(measured.step_s) == 5
    assert sum(measured.step_s) <= measured.denoise_host_s
    stages_s = measured.before_s + measured.denoise_host_s + measured.after_s
    # not to 2 %: on a busy machine the process may wait between two readings of the clock
    assert 0.7 * measured.end_to_end_s < stages_s <= measured.end_to_end_s
    assert measured.latents.shape == (1, 192, 4)


def test_a_second_stage_that_the_graphs_never_serve_is_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Outputs are right, since the stage runs eagerly on a copy: only the graphs tell. Captured, not engaged."""
    prepare = bench.CaseBench._prepare

    def elsewhere(self: bench.CaseBench, live: bench.Live) -> None:
        prepare(self, live)
        if live.name == "bcg":
            self.session.pipe.second.register_modules(transformer=copy.deepcopy(self.session.pipe.transformer))

    monkeypatch.setattr(bench.CaseBench, "_prepare", elsewhere)
    record = run(tmp_path)["bcg"]
    assert record.fidelity[0].exact
    assert record.status == "INVALID"
    reasons = {reason.code: reason.text for reason in record.reasons}
    assert reasons.keys() == {"not-engaged", "captured-not-engaged"}
    assert "hidden_states float32[1, 192, 4]" in reasons["captured-not-engaged"]
    assert "hidden_states float32[1, 48, 4]" not in reasons["captured-not-engaged"]


def test_a_second_stage_that_stops_running_fails_the_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The request is another one then; eager's record stands."""
    prepare = bench.CaseBench._prepare

    def shortened(self: bench.CaseBench, live: bench.Live) -> None:
        prepare(self, live)
        if live.name == "bcg":
            pipe = self.session.pipe
            monkeypatch.setattr(type(pipe), "__call__", lambda self, **request: self.first(**request))

    monkeypatch.setattr(bench.CaseBench, "_prepare", shortened)
    records = run(tmp_path)
    assert records["bcg"].status == "FAILED"
    assert "the denoise loop of LTX2Pipeline cannot be timed: it never opened" in records["bcg"].reasons[0].text


def test_a_second_stage_with_a_transformer_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No hook would see it, so every arm would run it eagerly and agree."""
    load = base.load

    def loaded(asked: Case) -> base.Session:
        session = load(asked)
        session.pipe.second.register_modules(transformer=copy.deepcopy(session.pipe.transformer))
        return session

    monkeypatch.setattr(base, "load", loaded)
    with pytest.raises(BcgbenchError, match="5 denoise steps and 2 calls of its hooked denoisers"):
        run(tmp_path)


def test_more_steps_than_it_was_distilled_for_are_refused():
    """There is no noise level for a ninth; of fewer, evenly picked ones."""
    sized = LTX2_TWO_STAGE.sized
    assert sized(case(), tokens=4, steps=8)["sigmas"] == list(FIRST_SIGMAS)
    assert sized(case(), tokens=4, steps=2)["sigmas"] == [1.0, 0.975]
    with pytest.raises(UsageError, match="distilled for 8 steps of its first stage, got 9"):
        sized(case(), tokens=4, steps=9)


def test_the_upsampler_has_the_released_size():
    """Four blocks of 1024 channels on either side."""
    part = LTX2_TWO_STAGE.upsampler
    assert count_parameters(lay_out(part.kind, part.config)) == 497_867_904


def test_a_folder_needs_the_upsampler(tmp_path: Path):
    """With it the folder runs both stages as the tiny model does; by itself it is an LTX-2 folder."""
    session = base.load(case())
    session.pipe.first.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert not LTX2_TWO_STAGE.fits(tmp_path, index=index)
    session.pipe.upsample.latent_upsampler.save_pretrained(tmp_path / "latent_upsampler")
    assert LTX2_TWO_STAGE.fits(tmp_path, index=index)
    again = base.load(case(source=str(tmp_path)))
    assert (again.generate(0) == session.generate(0)).all()


def test_the_distilled_checkpoint_is_the_two_stage_model():
    """Under its own id on the hub; the name of the recipe is no repository."""
    assert models.adapter(HUB_ID) is models.adapter("Lightricks/LTX-2-two-stage")
