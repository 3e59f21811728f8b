"""Priors: everything random is recorded once, saved, replayed bit by bit, and refused where it does not fit."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import LongCatImagePipeline
from diffusers.utils.torch_utils import randn_tensor
from safetensors.torch import load_file, save_file

from bcgbench import measure, models
from bcgbench.errors import UsageError
from bcgbench.models import base, draws, loading, prior
from bcgbench.models.longcat_image import LongCatImage
from bcgbench.types import Case, Record
from bcgbench.verdict import compare
from tests.running import records_of

PROMPTS = ("A small red cube", "A sign that says 'HELLO WORLD' on a white table")
TINY = [name for name in models.MODELS if models.facts(name).tiny]
DRAWS = {"tiny/ltx-2": 2, "tiny/ltx-2.3": 2, "tiny/ltx-2-two-stage": 4, "tiny/minimax-h3": 2}
"""Requests that draw more than once: video, then sound."""


def tiny_case(model: str = "tiny/glm-image", **changes: Any) -> Case:
    known = models.facts(model)
    size = 2 * known.multiple_px * (32 // (2 * known.multiple_px) or 1)
    plain = Case(model=model, width_px=size, height_px=size, steps=2, prompts=PROMPTS, dtype="float32", device="cpu",
                 runners=("eager", "bcg"), rounds=1, profile=False)  # fmt: skip
    return replace(plain, **changes)


def run(case: Case, folder: Path) -> dict[str, Record]:
    """Records by runner, of a run of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return records_of(case, folder, run_id=folder.name)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], str]:
    """A run of tiny GLM-Image, and the prior that it saved."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    records = run(tiny_case(), folder)
    return records, str(folder / records["bcg"].artifacts["prior"])


def rewritten_file(path: str, target: Path, **changes: Any) -> str:
    """A copy of a prior whose description of itself is changed."""
    about = prior._read_about(path) | changes
    save_file(load_file(path), target, {prior.METADATA: json.dumps(about)})
    return str(target)


# ------------------------------------------------------------------------------------------------- what is recorded
@pytest.mark.parametrize("model", TINY)
def test_every_draw_of_a_request_is_recorded_and_replayed(model: str):
    """Served from the prior, the seed no longer matters, and other noise is another output: nothing drew elsewhere."""
    session = base.load(tiny_case(model))
    clock = measure.HostClock()
    natural = measure.request(session, 0, clock=clock)
    noise = session.prior.noise[0]
    assert len(noise) == DRAWS.get(model, 1)
    assert natural.latents.data_ptr() not in {draw.data_ptr() for draw in noise}
    session.prior.seed, session.prior.replayed = 7, True
    replayed = measure.request(session, 0, clock=clock)
    assert torch.equal(replayed.latents, natural.latents)
    assert replayed.media.equals(natural.media)
    session.prior.noise[0] = tuple(draw * 0.5 for draw in noise)
    assert not torch.equal(measure.request(session, 0, clock=clock).latents, natural.latents)


def test_a_draw_is_kept_before_the_pipeline_writes_into_it():
    """MiniMax-H3 updates its noise in place, so a reference would hold the last latents."""
    recorder = draws.Recorder()
    with draws.patched(recorder):
        noise = randn_tensor((4,), generator=torch.Generator().manual_seed(1))
        noise.zero_()
    (kept,) = recorder.finish()
    assert kept.abs().min() > 0


def test_draws_without_a_generator_are_left_alone_and_torch_is_put_back():
    """Neither seen nor replaced; the functions are torch's own again, also after an error."""
    originals = {name: getattr(torch, name) for name in draws.NAMES}
    recorder = draws.Recorder()
    with pytest.raises(RuntimeError), draws.patched(recorder):
        torch.randn(-3)
    assert recorder.finish() == ()
    assert {name: getattr(torch, name) for name in draws.NAMES} == originals


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_draw_that_is_not_seen_is_reported(place: str, caplog: pytest.LogCaptureFixture):
    """A tensor filled in place goes past the recorder; the generator's state gives it away."""
    generator = torch.Generator().manual_seed(1)
    recorder = draws.Recorder()
    with caplog.at_level(logging.WARNING), draws.patched(recorder):
        for now in ("before", "draw", "between", "draw", "after"):
            if now == "draw":
                torch.randn(2, generator=generator)
            elif now == place:
                torch.empty(2).normal_(generator=generator)
        recorder.finish()
    assert len([line for line in caplog.messages if "the prior lacks it" in line]) == 1


def test_only_the_first_whole_request_of_a_prompt_is_patched(monkeypatch: pytest.MonkeyPatch):
    """Measured requests run on torch's own functions; one of fewer steps is not taken for the whole."""
    session = base.load(tiny_case("tiny/z-image"))
    original, seen = torch.randn, []
    monkeypatch.setattr(type(session.pipe), "__call__", lambda *_, **_k: seen.append(torch.randn is original))
    monkeypatch.setattr(base.media, "collect", lambda *_, **_k: SimpleNamespace(images=None))
    for steps in (1, None, None, 2):
        session.generate(0, steps=steps)
    assert seen == [True, False, True, True]


def test_synthetic_embeddings_are_no_part_of_the_noise(monkeypatch: pytest.MonkeyPatch):
    """They follow from the seed that the file holds, and would be megabytes."""
    found = models.adapter("tiny/sana1.5")
    monkeypatch.setattr(base, "find_adapter", lambda _: replace(found, facts=replace(found.facts, tiny=False)))
    session = base.load(tiny_case("tiny/sana1.5", weights="random", token_counts=(5, 9)))
    session.generate(0)
    assert [draw.dim() for draw in session.prior.noise[0]] == [4]


# ------------------------------------------------------------------------------------------------- saved and replayed
def test_a_run_saves_its_prior_and_says_so_in_every_record(first: tuple[dict[str, Record], str]):
    """One file per case, its digest and what it holds in the settings of each arm."""
    records, path = first
    assert {record.artifacts["prior"] for record in records.values()} == {records["eager"].artifacts["prior"]}
    assert {record.settings["prior"] for record in records.values()} == {records["eager"].settings["prior"]}
    assert records["bcg"].settings["prior"].startswith("sha256:")
    holds = records["bcg"].settings["prior holds"]
    assert "prior_token_ids 1x16 int64" in holds
    assert "noise 1x4x8x8 float32" in holds
    assert "reduced size, random weights" in holds
    assert set(load_file(path)) == {"0.prior_token_ids", "1.prior_token_ids", "0.noise.0", "1.noise.0"}


@pytest.mark.parametrize("seed", [42, 7])
def test_a_replayed_prior_gives_the_same_outputs_whatever_the_seed(
    first: tuple[dict[str, Record], str], seed: int, tmp_path: Path
):
    """Run B with A's prior: equal digests of latents and images, also in a run that asks for another seed."""
    records, path = first
    again = run(tiny_case(seed=seed, prior=path), tmp_path / "b")
    for arm in ("eager", "bcg"):
        found = compare(records[arm], again[arm])
        assert (found.exact, found.fidelity, found.exit_code) == (True, "same outputs (6 digests)", 0)
    assert again["bcg"].settings["prior"] == records["bcg"].settings["prior"]
    assert again["bcg"].case.seed == seed


def test_one_prior_gives_eager_and_graph_no_differing_value(first: tuple[dict[str, Record], str]):
    """The same-prior check: mean, rms and largest difference 0, nothing to put a box around."""
    records, _ = first
    graph = records["bcg"].fidelity[0]
    for found in (*graph.latents, *graph.images):
        assert (found.differing, found.max_abs, found.mean_abs, found.rms, found.bounding_box) == (0, 0, 0, 0, None)
    assert graph.calls_exact == graph.calls > 0


def test_two_priors_are_a_different_prior_and_no_different_output(first: tuple[dict[str, Record], str], tmp_path: Path):
    """Exit 4, not 3, with both digests."""
    records, path = first
    changed = load_file(path)
    changed["0.prior_token_ids"] = (changed["0.prior_token_ids"] + 1) % 128
    other = tmp_path / "other.safetensors"
    save_file(changed, other, {prior.METADATA: json.dumps(prior._read_about(path))})
    again = run(tiny_case(prior=str(other)), tmp_path / "b")
    for arm in ("eager", "bcg"):
        found = compare(records[arm], again[arm])
        assert (found.exact, found.fidelity, found.exit_code) == (None, "different prior", 4)
        (reason,) = [reason for reason in found.reasons if reason.code == "different-prior"]
        assert records[arm].settings["prior"] in reason.text
        assert again[arm].settings["prior"] in reason.text


def test_a_replayed_prior_that_runs_out_or_does_not_fit_is_refused():
    """Never the next draw of the seed in silence."""
    generator = torch.Generator().manual_seed(1)
    with draws.patched(draws.Server((torch.zeros(2, 3),))):
        assert torch.equal(torch.randn(2, 3, generator=generator), torch.zeros(2, 3))
        with pytest.raises(UsageError, match="more noise than the prior's 1 draws"):
            torch.randn(2, 3, generator=generator)
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with draws.patched(draws.Server((wrong,))), pytest.raises(UsageError, match="Draw 1 of the request"):
            torch.randn(2, 3, generator=generator)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"model": "tiny/z-image"}, "is the prior of tiny/z-image at 64x64 with 2 prompts, and the case is tiny/glm"),
        ({"resolution": "96x64"}, "at 96x64 with 2 prompts"),
        ({"prompts": ["one"]}, "with 1 prompts"),
        ({"prompts": ["one", "two"]}, "was sampled for other prompts: 'one', 'two'"),
    ],
)
def test_a_prior_of_another_case_is_refused(
    first: tuple[dict[str, Record], str], about: dict[str, Any], message: str, tmp_path: Path
):
    """Model, size, number of prompts, and the texts where something was sampled for them."""
    path = rewritten_file(first[1], tmp_path / "p.safetensors", **about)
    with pytest.raises(UsageError, match=message):
        loading.check(tiny_case(prior=path), models.adapter("tiny/glm-image"))


def test_noise_alone_may_be_given_to_other_prompts(first: tuple[dict[str, Record], str], tmp_path: Path):
    """It depends on no text."""
    path = rewritten_file(first[1], tmp_path / "p.safetensors", prompts=["one", "two"], bound=False)
    loading.check(tiny_case(prior=path), models.adapter("tiny/glm-image"))


def test_what_is_no_prior_is_refused(tmp_path: Path):
    """A file that is missing, of another format, or of tensors only."""
    text, latents = tmp_path / "text", tmp_path / "latents.safetensors"
    text.write_text("no tensors", encoding="utf-8")
    save_file({"latents": torch.zeros(1)}, latents)
    for path, message in ((tmp_path / "nothing", "does not exist"), (text, "cannot be read"), (latents, "is no prior")):
        with pytest.raises(UsageError, match=message):
            loading.check(tiny_case(prior=str(path)), models.adapter("tiny/glm-image"))


# ------------------------------------------------------------------------------------------------- rewritten prompts
class Processor:
    """Stands in for LongCat's, whose constructor needs torchvision."""


@pytest.fixture
def rewriting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tiny LongCat with a rewriter that samples from the global generator, as its text encoder does; prompts asked."""
    parts, asked = LongCatImage.tiny_text, []

    def rewire(self: Any, prompt: str, device: Any) -> list[str]:
        asked.append(prompt)
        return [f"{prompt} cube number {torch.randint(10**6, (1,)).item()}"]

    monkeypatch.setattr(LongCatImage, "tiny_text", lambda self: parts(self) | {"text_processor": Processor()})
    monkeypatch.setattr(LongCatImagePipeline, "rewire_prompt", rewire)
    return asked


def test_prompts_are_rewritten_once_seeded_and_shared(rewriting: list[str], tmp_path: Path):
    """One draw per prompt before any arm; tokens are those of the new text; a replay does not rewrite again."""
    case = tiny_case("tiny/longcat-image", rewrite_prompts=True, steps=1, runners=("eager",))
    records = run(case, tmp_path / "a")
    assert rewriting == list(PROMPTS)
    session = base.load(case)
    assert records["eager"].token_counts == session.token_counts
    counted = [len(session.pipe.tokenizer(text).input_ids) for text in session.prior.prompts]
    assert list(session.token_counts) == counted
    assert session.prior.prompts[0].startswith(f"{PROMPTS[0]} cube number ")
    assert session.request(0)["prompt"] == session.prior.prompts[0]
    assert session.request(0)["enable_prompt_rewrite"] is False
    del rewriting[:]
    path = str(tmp_path / "a" / records["eager"].artifacts["prior"])
    again = run(replace(case, rewrite_prompts=False, seed=7, prior=path), tmp_path / "b")
    assert rewriting == []
    assert compare(records["eager"], again["eager"]).fidelity == "same outputs (6 digests)"
    assert "rewritten prompts" in again["eager"].settings["prior holds"]


def test_rewriting_leaves_the_global_generator_alone(rewriting: list[str]):
    """It is seeded for the draw and put back; another seed is another text."""
    session = base.load(tiny_case("tiny/longcat-image"))
    state = torch.get_rng_state()

    def texts(seed: int) -> tuple[str, ...]:
        case = tiny_case("tiny/longcat-image", rewrite_prompts=True, seed=seed)
        return prior.prior_of(case, session.adapter, session.pipe, device=session.device).prompts

    assert texts(1) == texts(1) != texts(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_ideogram_and_ltx_rewrite_through_their_pipelines(monkeypatch: pytest.MonkeyPatch):
    """A generator of its own, not the request's, whose noise would otherwise be another."""

    class Pipe:
        _execution_device = torch.device("cpu")

        def upsample_prompt(self, prompt: str, **given: Any) -> list[str]:
            assert (given["height"], given["width"], given["max_new_tokens"]) == (32, 32, 128)
            return [f"caption {given['generator'].initial_seed()}"]

        def enhance_prompt(self, prompt: str, *, system_prompt: str, generator: torch.Generator) -> list[str]:
            assert len(system_prompt) > 100
            return [f"enhanced {generator.initial_seed()}"]

    generator = torch.Generator().manual_seed(5)
    for model, text in (("tiny/ideogram-4", "caption 5"), ("tiny/ltx-2", "enhanced 5"), ("tiny/ltx-2.3", "enhanced 5")):
        case = tiny_case(model, width_px=32, height_px=32)
        assert models.adapter(model).rewrite(Pipe(), "cube", case=case, generator=generator) == text


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("tiny/z-image", {}, "has no prompt rewriting of its own"),
        ("meituan-longcat/LongCat-Image", {"weights": "random"}, "random weights have not"),
    ],
)
def test_rewriting_is_refused_before_loading_where_nothing_can(model: str, changes: dict[str, Any], message: str):
    """Known from the case alone."""
    with pytest.raises(UsageError, match=message):
        loading.check(tiny_case(model, rewrite_prompts=True, **changes), models.adapter(model))


def test_rewriting_names_the_part_that_is_missing():
    """Tiny LongCat has no processor."""
    with pytest.raises(UsageError, match="needs text_processor"):
        base.load(tiny_case("tiny/longcat-image", rewrite_prompts=True))


def test_a_prior_without_rewritten_prompts_is_refused_for_rewriting(
    first: tuple[dict[str, Record], str], tmp_path: Path
):
    """The file decides what is replayed."""
    path = rewritten_file(first[1], tmp_path / "p.safetensors", model="tiny/longcat-image", bound=False)
    case = tiny_case("tiny/longcat-image", width_px=64, height_px=64, rewrite_prompts=True, prior=path)
    with pytest.raises(UsageError, match="holds no rewritten prompts"):
        loading.check(case, models.adapter(case.model))
