"""LongCat-Image: fixed 512 rows, one signature for both branches, no rewriting behind the benchmark's back."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from bcgbench.arms import Binder
from bcgbench.engine.signature import sign
from bcgbench.models import adapter, base
from bcgbench.types import Case
from tests.factories import case

MODEL = "tiny/longcat-image"
PROMPTS = ("A small red cube", 'A sign that says "red cube" on a white table')


def tiny_case(**changes: Any) -> Case:
    fixed = {"width_px": 32, "height_px": 32, "steps": 2, "guidance": None, "device": "cpu", "prompts": PROMPTS}
    return replace(case(model=MODEL, dtype="float32"), **(fixed | changes))


def traced(session: base.Session, prompt: int = 0) -> list[dict[str, Any]]:
    """Keyword arguments of every transformer call of one request, as the pipeline gives them."""
    module, calls = session.pipe.transformer, []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    session.generate(prompt)
    handle.remove()
    return calls


@pytest.fixture(scope="module")
def session() -> base.Session:
    """One loaded tiny model for the tests that do not change it."""
    return base.load(tiny_case())


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> base.Session:
    """Loaded as the released one is with random weights: no tokenizer, no text encoder, seeded embeddings."""
    tiny = adapter(MODEL)
    monkeypatch.setattr(base, "find_adapter", lambda _: replace(tiny, facts=replace(tiny.facts, tiny=False)))
    return base.load(tiny_case(weights="random", token_counts=(5, 40)))


def test_both_branches_have_one_signature_once_defaults_are_bound(session: base.Session):
    """The pipeline passes `guidance=None` for the prompt and leaves it out for the negative prompt."""
    calls = traced(session)
    assert ["guidance" in call for call in calls] == [True, False, True, False]
    bind = Binder(session.pipe.transformer.forward)
    assert len({sign(bind((), call)).signature for call in calls}) == 1


def test_every_prompt_is_512_rows(session: base.Session):
    """Prompt and negative prompt alike, whatever their length; positions of the image begin after them."""
    for prompt in (0, 1):
        for call in traced(session, prompt):
            assert call["encoder_hidden_states"].shape == (1, 512, 16)
            assert call["txt_ids"].shape == (512, 3)
            assert call["img_ids"][0].tolist() == [1, 512, 512]


def test_another_length_is_another_picture(session: base.Session):
    """Why there are no buckets: no mask hides pad rows, so cutting them changes the result visibly."""
    call = traced(session)[0]
    cut = call | {"encoder_hidden_states": call["encoder_hidden_states"][:, :64], "txt_ids": call["txt_ids"][:64]}
    with torch.no_grad():
        out, other = (session.pipe.transformer(**arguments)[0] for arguments in (call, cut))
    assert (out - other).abs().max() / out.abs().max() > 1e-2


def test_prompts_are_not_rewritten(session: base.Session, monkeypatch: pytest.MonkeyPatch):
    """The pipeline's default would sample another prompt per request, from the global generator."""
    assert inspect.signature(type(session.pipe).__call__).parameters["enable_prompt_rewrite"].default is True

    def rewire(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(session.pipe, "rewire_prompt", rewire, raising=True)
    session.generate(0)


def test_tokens_are_counted_as_the_pipeline_counts_them(session: base.Session, monkeypatch: pytest.MonkeyPatch):
    """Quoted text goes character by character."""
    kept = []
    pad = session.pipe.tokenizer.pad
    monkeypatch.setattr(
        session.pipe.tokenizer, "pad", lambda given, **kwargs: kept.extend(given["input_ids"]) or pad(given, **kwargs)
    )
    for prompt in (0, 1):
        kept.clear()
        session.generate(prompt)
        assert session.token_counts[prompt] == len(kept[0])
    assert session.token_counts[1] > len(session.pipe.tokenizer(PROMPTS[1]).input_ids)


def test_embeddings_take_the_place_of_a_prompt(synthetic: base.Session):
    """As diffusers has it, `prompt_embeds` without a prompt is a TypeError; 512 rows whatever the token count."""
    assert synthetic.pipe.tokenizer is None
    calls = traced(synthetic, 1)
    assert [call["encoder_hidden_states"].shape for call in calls] == [(1, 512, 16)] * 4
    cond, uncond = (call["encoder_hidden_states"] for call in calls[:2])
    assert not torch.equal(cond, uncond)
    with pytest.raises(TypeError):
        type(synthetic.pipe).encode_prompt(synthetic.pipe, prompt=None, prompt_embeds=cond)


def test_no_guidance_is_one_call_per_step(synthetic: base.Session):
    """At 1 and below the pipeline leaves the negative branch out."""
    plain = replace(synthetic, case=replace(synthetic.case, guidance=1.0))
    assert len(traced(plain)) == 2


def test_a_saved_pipeline_loads_without_its_processor(session: base.Session, tmp_path: Any):
    """The processor needs torchvision and serves rewriting only, so it is not loaded."""
    session.pipe.save_pretrained(tmp_path)
    loaded = base.load(tiny_case(source=str(tmp_path)))
    assert loaded.pipe.text_processor is None
    assert (loaded.generate(1) == session.generate(1)).all()


def test_the_release_is_ten_and_twenty_blocks():
    """The class default is a model of twice the size."""
    config = adapter("meituan-longcat/LongCat-Image").networks["transformer"].config
    assert (config["num_layers"], config["num_single_layers"]) == (10, 20)
