"""MiniMax-H3: a modular pipeline behind the common face, native lengths, two timestep shapes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from bcgbench import measure, models
from bcgbench.arms import Arm
from bcgbench.clock import HostClock
from bcgbench.engine.signature import difference
from bcgbench.errors import EnvironmentFault, UsageError
from bcgbench.models import base
from bcgbench.models.minimax_h3 import TINY_MINIMAX_H3
from bcgbench.models.weights import Builder
from bcgbench.runners import RUNNERS
from bcgbench.tracer import Tracer
from bcgbench.types import Case

CPU = torch.device("cpu")


def case(**changes: Any) -> Case:
    plain = Case(model="tiny/minimax-h3", width_px=32, height_px=32, frames=124, steps=3, device="cpu",
                 prompts=("a red cube", "a red cube on a white table by a lake"), dtype="float32")  # fmt: skip
    return dataclasses.replace(plain, **changes)


def traced(session: base.Session, *prompts: int) -> Tracer:
    """All calls of the prompts' requests."""
    tracer = Tracer(Arm(RUNNERS["eager"], session))
    with torch.no_grad(), tracer.recording():
        for prompt in prompts:
            session.generate(prompt)
    return tracer


def test_steps_are_forwards():
    """The model's schedule of N points makes N - 1; a case's steps are what its report divides by."""
    assert len(traced(base.load(case(steps=3)), 0).calls) == 3
    assert len(traced(base.load(case(steps=1)), 0).calls) == 1


def test_the_first_step_has_a_signature_of_its_own():
    """All rows share one noise level on step 0, later sound and picture differ: a warm-up needs both."""
    session = base.load(case())
    calls = traced(session, 0).calls
    assert [call.arguments["timestep"].shape[0] for call in calls] == [1, 2, 2]
    (hook,) = Arm(RUNNERS["bcg"], session).hooks.values()
    first, second, third = (hook.graphed.sign(call.arguments).signature for call in calls)
    assert second == third
    assert difference(first, second) == ("timestep: captured float32[1], asked float32[2]",)


def test_prompts_share_signatures_at_equal_length_only():
    """Text rows are part of the packed sequence, so their number is in seven arguments."""
    session = base.load(case())
    (hook,) = Arm(RUNNERS["bcg"], session).hooks.values()
    short, long, again = (
        {hook.graphed.sign(call.arguments).signature for call in traced(session, prompt).calls} for prompt in (0, 1, 0)
    )
    assert short == again
    assert not short & long


def test_padding_the_text_would_move_the_picture():
    """Why the length is native: nothing is masked, so a zero row of text is text."""
    session = base.load(case())
    embeds = session.adapter.embeddings(session._draw, tokens=7, stream=1, guidance=1.0)
    padded = {"prompt_embeds": torch.nn.functional.pad(embeds["prompt_embeds"], (0, 0, 0, 9)),
              "text_token_tags": torch.ones(16, dtype=torch.int64)}  # fmt: skip
    plain, moved = (synthetic().modular(**request(session, text)).get("videos") for text in (embeds, padded))
    assert abs(plain - moved).max() > 1e-3


def request(session: base.Session, text: dict[str, Any]) -> dict[str, Any]:
    """A request that carries embeddings."""
    made = session.request(0) | text
    del made["prompt"]
    return made


def synthetic() -> Any:
    """The tiny networks assembled as the released ones are: no text encoder, nor the block that runs it."""
    facts = dataclasses.replace(TINY_MINIMAX_H3.facts, tiny=False)
    adapter = dataclasses.replace(TINY_MINIMAX_H3, facts=facts)
    return adapter.assemble(Builder(device=CPU, dtype=torch.float32, seed=42))


def test_embeddings_stand_in_for_the_encoder():
    """Random weights carry no text encoder of 33 B; the blocks after it take embeddings and each row's modality."""
    session = base.load(case())
    pipe = synthetic()
    assert pipe.tokenizer is None
    assert "text_encoder" not in pipe.components
    text = session.adapter.embeddings(session._draw, tokens=7, stream=1, guidance=1.0)
    state = pipe(**request(session, text))
    assert session.adapter.pixels(state).shape == (124, 32, 32, 3)
    assert torch.isfinite(state.get("audio")).all()


def test_embeddings_compute_what_the_encoder_gives():
    """The same rows through either way in are the same video, bit for bit."""
    session = base.load(case())
    rows: list[torch.Tensor] = []
    session.pipe.transformer.register_forward_pre_hook(
        lambda _, __, arguments: rows.append(arguments["encoder_hidden_states"]), with_kwargs=True
    )
    encoded = session.adapter.pixels(session.pipe(**session.request(0)))
    tags = session.adapter.embeddings(session._draw, tokens=rows[0].shape[1], stream=1, guidance=1.0)
    state = synthetic()(**request(session, tags | {"prompt_embeds": rows[0]}))
    assert (session.adapter.pixels(state) == encoded).all()


def test_the_loop_is_timed_through_the_common_face():
    """diffusers keeps the bar on a block of the pipeline; the tap replaces it on the pipeline and is put back."""
    session = base.load(case())
    with torch.no_grad():
        measured = measure.request(session, 0, clock=HostClock())
    assert len(measured.step_s) == 3
    assert measured.latents.shape == (37, 16)
    assert "progress_bar" not in vars(session.pipe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in diffusers' modular layout, moved after it was saved, as a downloaded one is."""
    root = tmp_path_factory.mktemp("models")
    base.load(case()).pipe.modular.save_pretrained(str(root / "saved"), overwrite_modular_index=True)
    return (root / "saved").rename(root / "moved")


@pytest.mark.parametrize("changes", [{"source": "folder"}, {"model": "folder"}])
def test_a_local_folder_gives_the_same_video(changes: dict[str, Any], folder: Path):
    """As the model or as its source: the index is modular, and its paths are those of where it was saved."""
    loaded = base.load(case(**dict.fromkeys(changes, str(folder))))
    assert type(loaded.adapter) is type(TINY_MINIMAX_H3)
    assert (loaded.generate(1) == base.load(case()).generate(1)).all()


def test_a_folder_that_lacks_a_part_says_which(folder: Path, tmp_path: Path):
    """diffusers would log it and go on without."""
    for path in folder.iterdir():
        if path.name != "vae":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(EnvironmentFault, match="vae cannot be read"):
        base.load(case(source=str(tmp_path)))


def test_half_precision_keeps_the_parts_that_diffusers_keeps():
    """Projections and timestep embedding stay float32: a bfloat16 of all would be another model."""
    transformer = base.load(case(dtype="bfloat16")).pipe.transformer
    kept = {name.split(".")[0] for name, p in transformer.named_parameters() if p.dtype == torch.float32}
    assert kept == {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"}


@pytest.mark.parametrize("frames", [121, 125, 107, 362])
def test_frames_off_the_grid_are_refused(frames: int):
    """The pipeline rounds up with a warning, and a report would name another length than was run."""
    with pytest.raises(UsageError, match="17n \\+ 5 frames from 124 to 345"):
        models.adapter("MiniMaxAI/MiniMax-H3").options(case(frames=frames), guidance=1.0)


def test_half_precision_keeps_buffers_of_those_parts_too():
    """The sound's decoder filters with buffers: in bfloat16 its float32 convolutions could not take the result."""
    decoder = base.load(case(dtype="bfloat16")).pipe.audio_vae.decoder
    assert {buffer.dtype for buffer in decoder.buffers()} == {torch.float32}
