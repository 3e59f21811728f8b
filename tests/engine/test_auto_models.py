"""Models as diffusers calls them, without an adapter's other form, under break policy `auto`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bcgbench.arms import Binder
from bcgbench.engine.breaks import BreakPolicy
from bcgbench.engine.diagnose import bit_equal
from bcgbench.engine.graphed import GraphedForward
from bcgbench.models import base
from bcgbench.types import Case
from tests.factories import case

CPU = torch.device("cpu")
PROMPTS = ("A small red cube", "A sign that says 'HELLO WORLD'", "A 'red' cube beside a \"blue\" one")
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def automatic(module: Any, device: torch.device = CPU) -> GraphedForward:
    """A module's own forward, nothing patched."""
    return GraphedForward(lambda a: module(**a), device=device, policy=BreakPolicy.parse("auto"), module=module)


def requested(session: base.Session, prompt: int) -> list[Arguments]:
    """Bound arguments of every transformer call of one request, as the pipeline makes them."""
    module, calls = session.pipe.transformer, []
    bind = Binder(module.forward)
    handle = module.register_forward_pre_hook(lambda _, args, given: calls.append(bind(args, given)), with_kwargs=True)
    try:
        session.pipe(**session.request(prompt))
    finally:
        handle.remove()
    return calls


def glm_case(dtype: str, device: str = "cpu") -> Case:
    return case(model="tiny/glm-image", dtype=dtype, width_px=64, height_px=64, steps=2, guidance=None, device=device,
                prompts=PROMPTS)  # fmt: skip


def check_glm_image(dtype: str, device: str) -> None:
    """Three prompts captured and replayed in several orders, against eager."""
    session = base.load(glm_case(dtype, device))
    module = session.pipe.transformer
    engine = automatic(module, session.device)
    lengths = set()
    for prompt in range(len(PROMPTS)):
        for call in requested(session, prompt):
            engine.prepare(call)
            lengths.add(call["encoder_hidden_states"].shape[1])
    engine.freeze()
    assert engine.cache.captures == len(lengths) == 3
    for graph in engine.cache.graphs:
        assert (graph.segments, graph.breaks) == (2, 1)
        (name,) = graph.break_names
        assert name.startswith("torch.Tensor.__getitem__ in GlmImageTransformer2DModel (transformer_glm_image.py:")
    dropped = set()
    for prompt in (0, 1, 2, 1, 0):
        for call in requested(session, prompt):
            dropped.add(bool(call["prior_token_drop"].all()))
            assert bit_equal(engine(call)[0], module(**call)[0])
    assert dropped == {True, False}
    assert (engine.replays, engine.fallbacks) == (engine.calls, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_glm_image_replays_as_diffusers_calls_it(dtype: str):
    """One region drops the prior; the prompt's branch and the negative one share a graph, requests too."""
    check_glm_image(dtype, "cpu")


def test_glm_image_may_drop_any_part_of_its_prior():
    """The graph was captured for a call that drops nothing."""
    session = base.load(glm_case("float32"))
    module = session.pipe.transformer
    call = requested(session, 0)[0]
    assert not call["prior_token_drop"].any()
    engine = automatic(module)
    engine.prepare(call)
    for modulus in (1, 2, 3):
        drop = torch.arange(call["prior_token_drop"].shape[1])[None] % modulus == 0
        asked = call | {"prior_token_drop": drop}
        assert bit_equal(engine(asked)[0], module(**asked)[0])
    assert engine.replays == 3


def lumina2() -> Any:
    """A tiny transformer of Lumina-Image 2.0 on the CPU."""
    from diffusers import Lumina2Transformer2DModel

    torch.manual_seed(0)
    return Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(64, 64, 64),
        cap_feat_dim=32,
    ).eval()  # fmt: skip


def caption(*lengths: int, seed: int, device: str) -> Arguments:
    """A call with captions of these lengths, in sixteen tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(16)[None] < torch.tensor(lengths)[:, None]
    count = len(lengths)
    tensors = {
        "hidden_states": torch.randn(count, 4, 8, 8, generator=generator),
        "timestep": torch.rand(count, generator=generator),
        "encoder_hidden_states": torch.randn(count, 16, 32, generator=generator),
        "encoder_attention_mask": mask,
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"return_dict": False}


def check_lumina2(device: str) -> None:
    """Captions of the captured and of other lengths, against eager."""
    module = lumina2().to(device)
    engine = automatic(module, torch.device(device))
    engine.prepare(caption(16, 9, seed=0, device=device))
    engine.freeze()
    for number, lengths in enumerate([(16, 9), (16, 12), (16, 9), (9, 16)]):
        call = caption(*lengths, seed=number, device=device)
        assert bit_equal(engine(call)[0], module(**call)[0])
    assert (engine.replays, engine.fallbacks) == (2, 2)
    (miss,) = engine.cache.misses.values()
    assert miss.count == 2
    assert "tolist in rope_embedder (transformer_lumina2.py:" in miss.reason
    assert "captured [16, 9], now [16, 12]" in miss.reason


def test_lumina2_replays_captions_of_the_captured_length():
    """Its rotary embedder reads the lengths on the host: other ones are a counted miss that says so, never stale."""
    check_lumina2("cpu")
