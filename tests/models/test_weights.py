"""Seeded random weights: right size, right constants, live and finite at any depth."""

from __future__ import annotations

import inspect
from pathlib import Path

import diffusers
import pytest
import torch

from bcgbench.models import MODELS, adapter, facts
from bcgbench.models.weights import Builder, count_parameters, lay_out

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", MODELS)
def test_stated_parameter_counts_are_those_of_the_configuration(model: str):
    """Counted without memory; a wrong configuration would benchmark another model."""
    part = adapter(model).networks["transformer"]
    assert count_parameters(lay_out(part.kind, part.config)) == facts(model).transformer_parameters


@pytest.mark.parametrize("model", ["tiny/qwen-image", "tiny/z-image", "tiny/sana1.5"])
@pytest.mark.parametrize("name", ["transformer", "vae"])
def test_random_weights_leave_everything_else_as_constructed(model: str, name: str):
    """Buffers and plain tensors (RoPE tables) equal those of the ordinary constructor, and no parameter is dead."""
    part = adapter(model).networks[name]
    built = Builder(device=CPU, dtype=torch.float32, seed=3).model(part.kind, part.config, name=name)
    plain = getattr(diffusers, part.kind)(**part.config)
    assert {n: p.shape for n, p in built.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    for parameter in built.parameters():
        assert parameter.device == CPU
        assert torch.isfinite(parameter).all()
        assert parameter.abs().max() > 0
    for (path, one), (_, other) in zip(built.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(one, other), path
    tables = 0
    for one, other in zip(built.modules(), plain.modules(), strict=True):
        for attribute, value in vars(other).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(one, attribute), value)
                tables += 1
    assert tables == (2 if (model, name) == ("tiny/qwen-image", "transformer") else 0)


def test_a_model_with_random_weights_computes_what_an_ordinary_one_does():
    """Same parameters, same output: nothing that the constructor makes was lost."""
    part = adapter("tiny/qwen-image").networks["transformer"]
    built = Builder(device=CPU, dtype=torch.float32, seed=3).model(part.kind, part.config, name="transformer")
    plain = getattr(diffusers, part.kind)(**part.config).eval()
    plain.load_state_dict(built.state_dict())
    arguments = {
        "hidden_states": torch.randn(1, 16, 16), "encoder_hidden_states": torch.randn(1, 9, 16),
        "timestep": torch.tensor([0.5]), "img_shapes": [[(1, 4, 4)]], "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        out, reference = built(**arguments)[0], plain(**arguments)[0]
    assert torch.equal(out, reference)
    assert torch.isfinite(out).all()
    assert out.std() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_stay_finite_through_sixty_layers(dtype: torch.dtype):
    """Depth of Qwen-Image at a small width: neither overflow nor a dead signal."""
    part = adapter("tiny/qwen-image").networks["transformer"]
    config = {**part.config, "num_layers": 60}
    built = Builder(device=CPU, dtype=dtype, seed=0).model(part.kind, config, name="transformer")
    with torch.no_grad():
        out = built(
            hidden_states=torch.randn(1, 64, 16).to(dtype), encoder_hidden_states=torch.randn(1, 9, 16).to(dtype),
            timestep=torch.tensor([0.5]).to(dtype), img_shapes=[[(1, 8, 8)]], return_dict=False,
        )[0]  # fmt: skip
    assert torch.isfinite(out).all()
    assert 0.1 < out.float().std() < 20


def test_bfloat16_weights_are_the_float32_ones_rounded():
    """So that a comparison of dtypes compares one model."""
    part = adapter("tiny/qwen-image").networks["transformer"]
    single, half = (
        Builder(device=CPU, dtype=dtype, seed=0).model(part.kind, part.config, name="transformer")
        for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in zip(single.parameters(), half.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_tables_outside_the_checkpoint_keep_their_precision(tmp_path: Path):
    """As loading does it: RoPE frequencies rounded to bfloat16 would be another model's."""
    part = adapter("tiny/sana-video").networks["transformer"]
    built = Builder(device=CPU, dtype=torch.bfloat16, seed=0).model(part.kind, part.config, name="transformer")
    built.save_pretrained(tmp_path)
    loaded = type(built).from_pretrained(tmp_path, dtype=torch.bfloat16)
    tables = dict(loaded.named_buffers())
    assert tables.keys() == {"rope.freqs_cos", "rope.freqs_sin"}
    for name, table in built.named_buffers():
        assert table.dtype == torch.float32
        assert torch.equal(table, tables[name])


def test_laying_out_restores_torch():
    """The registration hook lives for one construction, also when that fails."""
    original = torch.nn.Module.register_parameter
    with pytest.raises(TypeError):
        lay_out("QwenImageTransformer2DModel", {"no_such_option": 1})
    assert torch.nn.Module.register_parameter is original
    assert torch.nn.Linear(2, 2).weight.device == CPU


@pytest.mark.parametrize("model", [name for name in MODELS if not facts(name).tiny])
def test_random_autoencoders_have_the_statistics_that_decoding_reads(model: str):
    """A class may leave its latents' mean and deviation to the released configuration: then decoding would fail."""
    for name, part in adapter(model).networks.items():
        options = inspect.signature(getattr(diffusers, part.kind)).parameters if "vae" in name else {}
        if "scaling_factor" not in options:
            for key in options.keys() & {"latents_mean", "latents_std"}:
                assert part.config.get(key, options[key].default) is not None, (name, key)
