"""GLM-Image: the form of the call that can be captured, the glyph length, and the prior that all arms share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

from bcgbench.arms import Binder
from bcgbench.engine.signature import sign
from bcgbench.errors import UsageError
from bcgbench.models import adapter, base, media
from bcgbench.models.padding import OutsidePolicy, PadCache
from bcgbench.models.weights import Builder
from bcgbench.types import Case
from tests.factories import case
from tests.running import records_of

MODEL = "tiny/glm-image"
GLM = adapter(MODEL)
PLAIN, QUOTED, TWICE = "A small red cube", "A sign that says 'HELLO WORLD'", "A 'red' cube beside a \"blue\" one"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tiny_case(**changes: Any) -> Case:
    fixed = {"width_px": 64, "height_px": 64, "steps": 2, "guidance": None, "device": "cpu", "prompts": (PLAIN, QUOTED)}
    return replace(case(model=MODEL, dtype="float32"), **(fixed | changes))


def traced(session: base.Session, prompt: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Bound arguments of every transformer call of one request."""
    module, calls = session.pipe.transformer, []
    bind = Binder(module.forward)
    handle = module.register_forward_pre_hook(lambda _, args, given: calls.append(bind(args, given)), with_kwargs=True)
    session.pipe(**(session.request(prompt) | changes))
    handle.remove()
    return calls


@pytest.fixture(scope="module")
def session() -> base.Session:
    """One loaded tiny model with a plain, a quoting and a twice quoting prompt."""
    return base.load(tiny_case(prompts=(PLAIN, QUOTED, TWICE)))


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> base.Session:
    """Loaded as the released one is with random weights."""
    monkeypatch.setattr(base, "find_adapter", lambda _: replace(GLM, facts=replace(GLM.facts, tiny=False)))
    return base.load(tiny_case(weights="random", token_counts=(1, 12), height_px=96))


# --------------------------------------------------------------------------------------------- the call's other form
def call(dtype: str, *, drop: torch.Tensor, glyphs: int = 1) -> tuple[Any, dict[str, Any]]:
    """A transformer and one bound call on an 8x4 grid of latents, as the pipeline makes it."""
    part = GLM.networks["transformer"]
    build = Builder(device=torch.device("cpu"), dtype=DTYPES[dtype], seed=0)
    module = build.model(part.kind, part.config, name="transformer")
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[dtype])

    arguments = Binder(module.forward)((), {
        "hidden_states": draw(1, 4, 8, 4), "encoder_hidden_states": draw(1, glyphs, 32),
        "prior_token_id": torch.randint(128, (1, 8), generator=generator), "prior_token_drop": drop,
        "timestep": torch.tensor([499.0]), "target_size": draw(1, 2), "crop_coords": draw(1, 2),
        "kv_caches": GlmImageKVCache(num_layers=2), "attention_kwargs": None, "return_dict": False,
    })  # fmt: skip
    return module, arguments


DROPS = [torch.zeros(1, 8).bool(), torch.ones(1, 8).bool(), torch.tensor([[True, False] * 4])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drop", DROPS, ids=["prompt", "negative", "mixed"])
@pytest.mark.parametrize("glyphs", [1, 12])
def test_the_captured_form_is_bitwise_the_native_call(dtype: str, drop: torch.Tensor, glyphs: int):
    """Tables as an argument, a factor in place of indexing, no cache: same bits, on a grid that is not square."""
    module, native = call(dtype, drop=drop, glyphs=glyphs)
    padded = GLM.pad(native, buckets=(), cache=PadCache())
    with torch.no_grad():
        reference = module(**native)[0]
        out = GLM.forward(module, module.forward, padded)[0]
    assert torch.equal(out, reference)
    assert reference.float().std() > 0.1
    assert padded["kv_caches"] is None
    assert not module.prior_token_embedding._forward_hooks, "the hook was left behind"
    assert [table.shape for table in padded["image_rotary_emb"]] == [(8, 8), (8, 8)]


def test_the_prior_reaches_the_output():
    """With a dead prior embedding the test above could not see a wrong factor."""
    module, native = call("float32", drop=DROPS[0])
    with torch.no_grad():
        kept, dropped = (module(**(native | {"prior_token_drop": drop}))[0] for drop in DROPS[:2])
    assert (kept - dropped).abs().max() > 0.1


def test_branches_and_requests_have_one_signature(session: base.Session):
    """Natively too, though every request has a cache object of its own: an empty one counts by its state."""
    calls, again = traced(session), traced(session)
    natives = {sign(made).signature for made in (*calls, *again)}
    padded = {sign(GLM.pad(made, buckets=(), cache=PadCache())).signature for made in (*calls, *again)}
    assert (len(natives), len(padded)) == (1, 1)


def test_a_request_is_prepared_once(session: base.Session):
    """Tables and factors are the same objects on every step, so the engine copies them once."""
    memory = PadCache()
    forms = [GLM.pad(made, buckets=(), cache=memory) for made in traced(session)]
    assert len({id(form["image_rotary_emb"][0]) for form in forms}) == 1
    assert len({id(form["image_rotary_emb"][1]) for form in forms}) == 1
    cond, uncond = forms[0]["prior_keep"], forms[1]["prior_keep"]
    assert [form["prior_keep"] is own for form, own in zip(forms, (cond, uncond) * 2, strict=True)] == [True] * 4
    assert (cond.unique().tolist(), uncond.unique().tolist()) == ([1.0], [0.0])


@pytest.mark.parametrize("mode", ["write", "read", "skip"])
def test_image_conditioned_calls_are_outside_the_policy(mode: str):
    """Their caches are Python lists that a replay neither fills nor reads."""
    module, native = call("float32", drop=DROPS[0])
    native["kv_caches"].set_mode(mode)
    with pytest.raises(OutsidePolicy, match="image-conditioned"):
        GLM.pad(native, buckets=(), cache=PadCache())
    with torch.no_grad():  # as the counted fallback runs it
        assert torch.isfinite(GLM.forward(module, module.forward, native)[0]).all()


def test_the_public_mask_does_not_mask():
    """Why glyphs keep their length: diffusers adds the mask as 0 and 1, so pad rows still count (diffusers#13587)."""
    module, native = call("float32", drop=DROPS[0], glyphs=7)
    rows = native["encoder_hidden_states"]
    longer = torch.cat([rows, torch.zeros(1, 25, 32)], dim=1)
    mask = torch.tensor([[1] * 7 + [0] * 25])
    with torch.no_grad():
        reference = module(**native)[0]
        masked = module(**(native | {"encoder_hidden_states": longer, "attention_mask": mask}))[0]
    assert (masked - reference).abs().max() / reference.abs().max() > 1e-3


def test_another_head_width_is_refused(session: base.Session):
    """RoPE tables are made from the adapter's configuration, which must be the loaded model's."""
    other = replace(GLM, networks={"transformer": adapter("zai-org/GLM-Image").networks["transformer"]})
    with pytest.raises(UsageError, match="attention_head_dim 8; the adapter of tiny/glm-image knows 128"):
        other.prepare_pipeline(session.pipe)


# ------------------------------------------------------------------------------------------------------------ glyphs
def test_only_quoted_text_has_a_length(session: base.Session):
    """One row for no quotation, bytes and an end token for one, a pad row more for each of two."""
    assert session.token_counts == (1, 12, 11)
    for prompt, rows in enumerate(session.token_counts):
        cond, uncond = (made["encoder_hidden_states"].shape[1] for made in traced(session, prompt)[:2])
        assert (cond, uncond) == (rows, 1)


@pytest.mark.parametrize("prompt", ["It's a dog's life", "“Grüße” and 「你好」", "''", '"a" "b" "c"'])
def test_glyph_rows_are_counted_as_the_pipeline_counts_them(session: base.Session, prompt: str):
    """Apostrophes quote, characters outside ASCII have several bytes, an empty quotation is one row."""
    rows = session.pipe._get_glyph_embeds(prompt).shape[1]
    assert GLM.count_tokens(session.pipe, prompt) == GLM.estimate_tokens(prompt) == rows


# ------------------------------------------------------------------------------------------------------------- prior
def test_the_prior_is_the_one_that_the_pipeline_would_draw(session: base.Session):
    """Giving it is bitwise the whole pipeline run with the same seed."""
    given = session.generate(1)
    request = session.request(1)
    assert request.pop("prior_token_ids").shape == (1, 16)
    made = media.frames(session.pipe(**request).images, adapter=session.adapter, case=session.case)
    assert (made == given).all()


def test_every_request_of_a_prompt_has_the_same_prior(session: base.Session):
    """One draw per prompt at loading, none afterwards, whichever arm asks."""
    priors = [session.request(prompt)["prior_token_ids"] for prompt in (0, 0, 1)]
    assert priors[0] is priors[1]
    assert not torch.equal(priors[0], priors[2])
    session.pipe.vision_language_encoder.generate, kept = None, session.pipe.vision_language_encoder.generate
    try:
        session.generate(0)
    finally:
        session.pipe.vision_language_encoder.generate = kept


def test_drawing_a_prior_leaves_the_global_generator_alone(session: base.Session):
    """The pipeline seeds it to sample."""
    state = torch.get_rng_state()
    drawn = GLM.drawn(session.pipe, session.case, prompt=0)["prior_token_ids"]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn, session.prior.sampled[0]["prior_token_ids"])


def test_another_seed_draws_another_prior(session: base.Session):
    """The case's seed reaches the autoregressive model."""
    other = GLM.drawn(session.pipe, replace(session.case, seed=7), prompt=0)["prior_token_ids"]
    assert not torch.equal(other, session.prior.sampled[0]["prior_token_ids"])


def test_random_weights_sample_with_the_real_class_at_reduced_size(synthetic: base.Session):
    """Its own layout, 3x2 cells of 2x2 positions, other tokens per prompt; the record says what sampled them."""
    assert type(synthetic.pipe.vision_language_encoder).__name__ == "GlmImageForConditionalGeneration"
    assert "reduced size, random weights" in synthetic.prior.sampler
    first, second = (synthetic.prior.sampled[prompt]["prior_token_ids"] for prompt in (0, 1))
    assert (first.shape, first.dtype) == ((1, 24), torch.int64)
    assert not torch.equal(first, second)
    grid = first.view(3, 2, 2, 2)
    assert torch.equal(grid, grid[:, :1, :, :1].expand_as(grid))
    assert synthetic.generate(0).shape == (1, 96, 64, 3)
    assert [made["encoder_hidden_states"].shape[1] for made in traced(synthetic, 1)] == [12] * 4


# ------------------------------------------------------------------------------------------------------- a whole case
def test_quoted_prompts_have_graphs_of_their_own(tmp_path: Path):
    """Three glyph lengths are three graphs, captured before the first request and exact."""
    quick = tiny_case(prompts=(PLAIN, QUOTED, TWICE), runners=("eager", "bcg"), rounds=1, profile=False)
    records = records_of(quick, tmp_path)
    proof = records["bcg"].engagement
    assert records["bcg"].status == "OK"
    assert len(proof.signatures) == 3
    assert (set(proof.captures), proof.misses, proof.uncalled) == ({3}, (), ())
    assert all(fidelity.exact for fidelity in records["bcg"].fidelity), "against eager as diffusers calls it"


def test_the_release_has_32_heads_of_128():
    """The class default, 64 of 40, is a model of less than half the size."""
    config = adapter("zai-org/GLM-Image").networks["transformer"].config
    assert (config["num_attention_heads"], config["attention_head_dim"]) == (32, 128)
