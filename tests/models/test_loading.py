"""Sessions: tiny pipelines end to end, and the synthetic prompts of released sizes."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bcgbench.errors import BcgbenchError, UsageError
from bcgbench.models import MODELS, adapter, base, facts
from bcgbench.models.weights import Builder, count_parameters
from bcgbench.types import Case
from tests.factories import case

PROMPTS = (
    "A small red cube on a white table",
    "A detailed cinematic scene of a glass observatory above a quiet lake at sunrise, with soft mist, "
    "warm reflections, and crisp architectural detail",
)
TINY = [name for name in MODELS if facts(name).tiny]


def tiny_case(model: str, **changes: Any) -> Case:
    """A two-step CPU case with the model's own guidance."""
    size = dict.fromkeys(("width_px", "height_px"), max(32, facts(model).multiple_px))
    fixed = {**size, "steps": 2, "guidance": None, "device": "cpu", "prompts": PROMPTS}
    return replace(case(model=model, dtype="float32"), **(fixed | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", TINY)
def test_a_tiny_pipeline_runs_end_to_end_and_repeats(model: str, dtype: str):
    """Two loads of one seed give the same bits; the prompts give different pictures."""
    first, second = (base.load(tiny_case(model, dtype=dtype)) for _ in range(2))
    picture = first.generate(0)
    assert picture.shape == (first.adapter.facts.frames or 1, first.case.height_px, first.case.width_px, 3)
    assert picture.dtype == np.uint8
    assert picture.std() > 5
    assert np.array_equal(picture, second.generate(0))
    assert not np.array_equal(picture, first.generate(1))
    assert np.array_equal(picture, first.generate(0)), "an earlier request changed a later one"


def test_another_seed_is_another_model_and_another_picture():
    """The seed reaches weights and noise."""
    first, second = (base.load(tiny_case("tiny/qwen-image", seed=seed)) for seed in (1, 2))
    assert not torch.equal(first.pipe.transformer.proj_out.weight, second.pipe.transformer.proj_out.weight)
    assert not np.array_equal(first.generate(0), second.generate(0))


@pytest.mark.parametrize("model", TINY)
def test_a_session_describes_what_it_loaded(model: str):
    """Counts from the tokenizer, frozen weights in eval mode, bytes of all parts."""
    session = base.load(tiny_case(model))
    assert session.denoisers["transformer"] is session.pipe.transformer
    assert list(session.denoisers) == [name for name in session.adapter.networks if name.endswith("transformer")]
    if model == "tiny/glm-image":  # its denoiser sees quoted text only, and one row where there is none
        assert session.token_counts == (1, 1)
    else:
        assert session.token_counts[1] > session.token_counts[0] > 8
    assert not session.synthetic
    assert session.load_s > 0
    own = 4 * count_parameters(session.pipe.transformer)
    assert session.weights_bytes > own + 4 * count_parameters(session.pipe.vae)
    for part in (session.pipe.transformer, session.pipe.vae, session.pipe.text_encoder):
        assert not part.training
        assert not any(p.requires_grad for p in part.parameters())


def traced(session: base.Session, prompt: int) -> list[dict[str, Any]]:
    """Arguments of every denoiser call of one request, by name."""
    calls: list[dict[str, Any]] = []

    def watched(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(dict(signature.bind(*args, **kwargs).arguments))
            return original(*args, **kwargs)

        return forward

    for module in session.denoisers.values():
        module.forward = watched(module.forward)
    try:
        session.generate(prompt)
    finally:
        for module in session.denoisers.values():
            del module.forward
    return calls


@pytest.mark.parametrize(("model", "branches"), [(name, facts(name).branches) for name in TINY])
def test_calls_per_step_are_as_stated(model: str, branches: int):
    """Qwen runs both branches only with a negative prompt, the others batch them into one call."""
    assert len(traced(base.load(tiny_case(model)), 0)) == 2 * branches + facts(model).second_stage_steps


@pytest.mark.parametrize(("model", "batch"), [("tiny/z-image", 2), ("tiny/z-image-turbo", 1)])
def test_z_image_batches_its_branches(model: str, batch: int):
    """Turbo has no guidance, so one caption."""
    assert [len(call["cap_feats"]) for call in traced(base.load(tiny_case(model)), 0)] == [batch, batch]


def test_token_counts_are_what_the_transformer_sees():
    """Template tokens included, the prefix that the pipeline drops not."""
    qwen, z_image = base.load(tiny_case("tiny/qwen-image")), base.load(tiny_case("tiny/z-image-turbo"))
    for prompt in (0, 1):
        assert traced(qwen, prompt)[0]["encoder_hidden_states"].shape[1] == qwen.token_counts[prompt]
        assert len(traced(z_image, prompt)[0]["cap_feats"][0]) == z_image.token_counts[prompt]


@pytest.mark.parametrize(("model", "width_px", "height_px"), [
    ("tiny/sana1.5", 96, 64), ("tiny/qwen-image", 40, 64), ("tiny/z-image", 36, 60),
])  # fmt: skip
def test_a_picture_has_the_size_asked_for(model: str, width_px: int, height_px: int):
    """SANA's resolution binning would run another size and scale the picture."""
    session = base.load(tiny_case(model, width_px=width_px, height_px=height_px))
    assert session.generate(0).shape == (1, height_px, width_px, 3)
    if model == "tiny/sana1.5":
        assert traced(session, 0)[0]["hidden_states"].shape[-2:] == (height_px // 2, width_px // 2)


def test_sana_at_512x512_runs_512x512(monkeypatch: pytest.MonkeyPatch):
    """Left at its default, the released pipeline would run 1024x1024 and scale the picture down to what was asked."""
    released = adapter("Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers")
    tiny = adapter("tiny/sana1.5")
    binned = {"sample_size": released.networks["transformer"].config["sample_size"]}
    part = tiny.networks["transformer"]
    like_released = replace(part, config={**part.config, **binned})
    disguised = replace(tiny, networks={**tiny.networks, "transformer": like_released})
    monkeypatch.setattr(base, "find_adapter", lambda _: disguised)
    session = base.load(tiny_case("tiny/sana1.5", width_px=512, height_px=512, steps=1))
    assert session.pipe.transformer.config.sample_size == 32  # what makes diffusers look up its bins of 1024x1024
    assert {call["hidden_states"].shape[-2:] for call in traced(session, 0)} == {(256, 256)}
    assert session.generate(0).shape == (1, 512, 512, 3)
    assert not released.options(session.case, guidance=4.5)["use_resolution_binning"]


def test_a_picture_of_another_size_is_an_error():
    """Qwen's pipeline rounds 36 down to 32 with a warning; the benchmark must not measure that."""
    session = base.load(tiny_case("tiny/qwen-image", width_px=36))
    with pytest.raises(BcgbenchError, match="made 32x32 pixels, asked were 36x32"):
        session.generate(0)


def test_a_picture_with_nan_is_an_error():
    """A cast to uint8 would turn NaN into black."""
    session = base.load(tiny_case("tiny/qwen-image"))
    session.pipe.transformer.proj_out.bias[0] = float("nan")
    with pytest.raises(BcgbenchError, match="NaN or infinity in float32"):
        session.generate(0)


def test_a_request_leaves_no_trace_in_the_next():
    """Z-Image writes its template into a list of prompts, and generators move on: both are made anew."""
    session = base.load(tiny_case("tiny/z-image"))
    first = session.request(0)
    session.pipe(**first)
    second = session.request(0)
    assert second["prompt"] == PROMPTS[0]
    assert second["generator"] is not first["generator"]
    assert second["generator"].initial_seed() == session.case.seed
    assert session.request(0, steps=1)["num_inference_steps"] == 1


def test_too_few_steps_are_refused():
    """One step of Qwen-Image's schedule is 0 / 0 and gives a picture of NaN."""
    session = base.load(tiny_case("tiny/qwen-image"))
    with pytest.raises(UsageError, match="needs at least 2 denoise steps, got 1"):
        session.request(0, steps=1)


def test_sana_attention_goes_through_the_registry_and_stays_bitwise():
    """The other processor changes where the attention is called, not one bit of it."""
    for dtype in (torch.float32, torch.bfloat16):
        build = Builder(device=torch.device("cpu"), dtype=dtype, seed=0)
        part = adapter("tiny/sana1.5").networks["transformer"]
        plain, routed = (build.model(part.kind, part.config, name="transformer") for _ in range(2))
        adapter("tiny/sana1.5").prepare_pipeline(type("Pipe", (), {"transformer": routed}))
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, 4, 8, 8, generator=generator).to(dtype)
        text = torch.randn(2, 300, 8, generator=generator).to(dtype)
        mask = (torch.arange(300) < torch.tensor([[1], [40]])).long()
        out = [
            model(hidden, encoder_hidden_states=text, encoder_attention_mask=mask, timestep=torch.ones(2) * 500,
                  return_dict=False)[0]
            for model in (plain, routed)
        ]  # fmt: skip
        assert torch.equal(*out)


def test_every_softmax_attention_reaches_the_registry():
    """A break on the registry must see all of them: two cross-attentions in the tiny SANA."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    session, calls = base.load(tiny_case("tiny/sana1.5", steps=1)), []
    active = Registry._active_backend
    original = Registry._backends[active]
    Registry._backends[active] = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        session.pipe(**session.request(0) | {"output_type": "latent"})
    finally:
        Registry._backends[active] = original
    assert len(calls) == 2


def synthetic(model: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> base.Session:
    """A tiny model loaded the way a released one is with random weights: no tokenizer, seeded embeddings."""
    tiny = adapter(model)
    disguised = replace(tiny, facts=replace(tiny.facts, tiny=False))
    monkeypatch.setattr(base, "find_adapter", lambda _: disguised)
    return base.load(tiny_case(model, weights="random", **changes))


@pytest.mark.parametrize("model", ["tiny/qwen-image", "tiny/z-image", "tiny/z-image-turbo", "tiny/sana1.5"])
def test_synthetic_prompts_run_the_whole_pipeline(model: str, monkeypatch: pytest.MonkeyPatch):
    """Seeded embeddings in place of a text encoder: prompts differ, repeats are equal, guidance runs."""
    session = synthetic(model, monkeypatch, token_counts=(11, 47), dtype="bfloat16")
    assert session.synthetic
    assert session.pipe.tokenizer is None
    assert session.pipe.text_encoder is None
    assert session.token_counts == (11, 47)
    first = session.generate(0)
    assert np.array_equal(first, session.generate(0))
    assert not np.array_equal(first, session.generate(1))
    assert len(traced(session, 0)) == 2 * facts(model).branches


def test_synthetic_prompts_have_the_token_counts_of_the_case(monkeypatch: pytest.MonkeyPatch):
    """The short prompt comes first, then the negative one of six tokens."""
    session = synthetic("tiny/qwen-image", monkeypatch, token_counts=(11, 47))
    assert [call["encoder_hidden_states"].shape[1] for call in traced(session, 1)] == [47, 6, 47, 6]


def test_synthetic_sana_masks_the_rows_after_the_prompt(monkeypatch: pytest.MonkeyPatch):
    """300 rows, of which the prompt's tokens and one negative token count."""
    call = traced(synthetic("tiny/sana1.5", monkeypatch, token_counts=(11, 47)), 1)[0]
    assert call["encoder_hidden_states"].shape == (2, 300, 8)
    assert call["encoder_attention_mask"].sum(dim=1).tolist() == [1, 47]


def test_token_counts_are_estimated_where_nothing_states_them(monkeypatch: pytest.MonkeyPatch):
    """One per word and mark, plus the five template tokens of Qwen-Image; the record says that it is an estimate."""
    session = synthetic("tiny/qwen-image", monkeypatch)
    assert (session.token_counts, session.token_source) == ((8 + 5, 26 + 5), "estimate")


def test_token_counts_come_from_the_tokenizer_where_it_is_at_hand(monkeypatch: pytest.MonkeyPatch):
    """A cached tokenizer counts better than an estimate; the embeddings stay seeded. Given counts stay as they are: the
    lengths to run do not depend on what a machine has cached."""
    real = base.load(tiny_case("tiny/qwen-image"))
    monkeypatch.setattr(base.loading, "cached_tokenizer", lambda _: real.pipe.tokenizer)
    given = synthetic("tiny/qwen-image", monkeypatch, token_counts=(11, 47))
    assert (given.token_counts, given.token_source) == ((11, 47), "suite")
    session = synthetic("tiny/qwen-image", monkeypatch)
    assert (session.token_counts, session.token_source) == (real.token_counts, "tokenizer")
    assert next(call["encoder_hidden_states"].shape[1] for call in traced(session, 0)) == real.token_counts[0]


def test_prompts_above_the_pipelines_limit_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The pipeline would cut them without a word."""
    session = synthetic("tiny/z-image-turbo", monkeypatch, token_counts=(11, 900))
    assert session.token_counts == (11, 512)
    assert "prompt 1 has 900 tokens; tiny/z-image-turbo keeps 512" in caplog.text
