"""What the adapters promise about arithmetic: padded calls against native ones.

Transformers are the tiny ones with every parameter live; outputs are about 2 in size.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch

from bcgbench.models import adapter
from bcgbench.models.padding import OutsidePolicy, PadCache, pad_to
from bcgbench.models.weights import Builder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QWEN, Z_IMAGE = adapter("tiny/qwen-image"), adapter("tiny/z-image")


@pytest.fixture(autouse=True)
def _no_grad():
    """Pipelines run without gradients."""
    with torch.no_grad():
        yield


@cache
def transformer(model: str, dtype: str = "float32") -> Any:
    """The tiny transformer of a model."""
    part = adapter(model).networks["transformer"]
    build = Builder(device=torch.device("cpu"), dtype=DTYPES[dtype], seed=0)
    return build.model(part.kind, part.config, name="transformer")


def bind(module: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name with defaults, as the runners hand them over."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def draw(*shape: int, seed: int = 0, dtype: str = "float32") -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference over the largest reference value."""
    return ((out.float() - reference.float()).abs().max() / reference.float().abs().max()).item()


# ---------------------------------------------------------------------------------------------------- Qwen-Image
def qwen_call(length: int, *, mask: torch.Tensor | None = None, dtype: str = "float32") -> dict[str, Any]:
    """Arguments of one call with a prompt of `length` tokens on a 4x4 grid of image tokens."""
    return bind(
        transformer("tiny/qwen-image", dtype),
        hidden_states=draw(1, 16, 16, dtype=dtype),
        encoder_hidden_states=draw(1, length, 16, seed=length, dtype=dtype),
        encoder_hidden_states_mask=mask,
        timestep=torch.tensor([0.7]).to(DTYPES[dtype]),
        img_shapes=[[(1, 4, 4)]],
        attention_kwargs={},
        return_dict=False,
    )


def qwen_run(arguments: dict[str, Any], *, dtype: str = "float32") -> torch.Tensor:
    """The output of the adapter's forward."""
    module = transformer("tiny/qwen-image", dtype)
    return QWEN.forward(module, module.forward, arguments)[0]


@pytest.mark.parametrize("length", [1, 6, 17, 31, 32, 33, 63])
def test_qwen_padding_changes_only_rounding(length: int):
    """Short and long prompts, and the negative prompt's six tokens: the mask hides every pad row."""
    native = qwen_call(length)
    padded = QWEN.pad(native, buckets=(32, 64), cache=PadCache())
    assert padded["encoder_hidden_states"].shape == (1, 32 if length <= 32 else 64, 16)
    assert error(qwen_run(padded), qwen_run(native)) < 1e-6


def test_qwen_padding_changes_only_rounding_in_bfloat16():
    """A few units of 2^-8 at most, the rounding of bfloat16 itself."""
    native = qwen_call(17, dtype="bfloat16")
    padded = QWEN.pad(native, buckets=(64,), cache=PadCache())
    assert error(qwen_run(padded, dtype="bfloat16"), qwen_run(native, dtype="bfloat16")) < 0.02


def test_qwen_pad_rows_do_not_matter():
    """Garbage in the pad rows gives the same bits: the mask, not the zeros, is what hides them."""
    padded = QWEN.pad(qwen_call(17), buckets=(32,), cache=PadCache())
    dirty = padded["encoder_hidden_states"].clone()
    dirty[:, 17:] = 9
    assert torch.equal(qwen_run(padded | {"encoder_hidden_states": dirty}), qwen_run(padded))


def test_qwen_without_its_mask_is_visibly_wrong():
    """What a padder that forgets the mask does; the limits above can tell it."""
    native = qwen_call(17)
    padded = QWEN.pad(native, buckets=(64,), cache=PadCache()) | {"encoder_hidden_states_mask": None}
    assert error(qwen_run(padded), qwen_run(native)) > 1e-3


def test_qwen_extends_a_mask_that_is_given():
    """A batch of unequal prompts has a mask already: its rows stay, new ones are zero."""
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    padded = QWEN.pad(qwen_call(5, mask=mask), buckets=(8,), cache=PadCache())
    assert padded["encoder_hidden_states_mask"].tolist() == [[1, 1, 1, 0, 1, 0, 0, 0]]


def test_qwen_gives_a_mask_at_the_exact_length_too():
    """None and a tensor are two signatures, so length == bucket must not leave the mask out."""
    padded = QWEN.pad(qwen_call(32), buckets=(32, 64), cache=PadCache())
    assert padded["encoder_hidden_states_mask"].tolist() == [[1] * 32]
    assert padded["encoder_hidden_states_mask"].dtype == torch.int64


def test_qwen_touches_nothing_else():
    """No other argument is padded, dropped or invented, and the caller's dict is left alone."""
    native = qwen_call(5)
    before = dict(native)
    padded = QWEN.pad(native, buckets=(32,), cache=PadCache())
    changed = {name for name in padded if padded[name] is not native[name]}
    assert changed == {"encoder_hidden_states", "encoder_hidden_states_mask"}
    assert list(padded) == list(native)
    assert all(native[name] is before[name] for name in before)


def test_qwen_pads_a_request_once():
    """The second step of a request gets the very tensors of the first."""
    native, memory = qwen_call(5), PadCache()
    first, second = (QWEN.pad(native, buckets=(32,), cache=memory) for _ in range(2))
    assert first["encoder_hidden_states"] is second["encoder_hidden_states"]
    assert first["encoder_hidden_states_mask"] is second["encoder_hidden_states_mask"]


def test_qwen_without_buckets_is_native():
    """() asks for native lengths: the same object comes back."""
    native = qwen_call(5)
    assert QWEN.pad(native, buckets=(), cache=PadCache()) is native
    assert list(QWEN.variants(native, buckets=(), cache=PadCache())) == [native]


def test_qwen_refuses_a_prompt_above_its_buckets():
    """The runner turns this into a counted fallback."""
    with pytest.raises(OutsidePolicy, match="prompt has 65 tokens, the largest bucket is 64"):
        QWEN.pad(qwen_call(65), buckets=(32, 64), cache=PadCache())


def test_qwen_variants_cover_every_bucket_largest_first():
    """One traced call is enough to capture all buckets, also those that its prompt overflows."""
    forms = list(QWEN.variants(qwen_call(40), buckets=(16, 64, 32), cache=PadCache()))
    assert [form["encoder_hidden_states"].shape[1] for form in forms] == [64, 32, 16]
    assert [int(form["encoder_hidden_states_mask"].sum()) for form in forms] == [40, 32, 16]
    assert all(form["encoder_hidden_states"].is_contiguous() for form in forms)
    assert all(torch.isfinite(qwen_run(form)).all() for form in forms)


def test_a_qwen_variant_has_the_shape_of_a_padded_call():
    """What warm-up captured is what a request of that bucket asks for."""
    captured = list(QWEN.variants(qwen_call(40), buckets=(32, 64), cache=PadCache()))[1]
    asked = QWEN.pad(qwen_call(6), buckets=(32, 64), cache=PadCache())
    for name in ("encoder_hidden_states", "encoder_hidden_states_mask"):
        assert captured[name].shape == asked[name].shape
        assert captured[name].stride() == asked[name].stride()
        assert captured[name].dtype == asked[name].dtype


# ------------------------------------------------------------------------------------------------------- Z-Image
def z_call(*lengths: int, dtype: str = "float32", side: int = 8) -> dict[str, Any]:
    """Arguments of one call with a caption per length, as the pipeline passes them."""
    return bind(
        transformer("tiny/z-image", dtype),
        [draw(4, 1, side, side, dtype=dtype)] * len(lengths),
        torch.full((len(lengths),), 0.3),
        [draw(length, 16, seed=length, dtype=dtype) for length in lengths],
        joint_attention_kwargs=None,
        return_dict=False,
    )


def z_run(arguments: dict[str, Any], *, dtype: str = "float32") -> list[torch.Tensor]:
    """Outputs of the adapter's forward, one per caption."""
    module = transformer("tiny/z-image", dtype)
    return Z_IMAGE.forward(module, module.forward, arguments)[0]


def z_native(arguments: dict[str, Any], *, dtype: str = "float32") -> list[torch.Tensor]:
    """Outputs of the module itself."""
    return transformer("tiny/z-image", dtype)(**arguments)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_z_image_padding_is_bitwise_for_every_length(dtype: str):
    """Lengths 1 to 70 alone: rounding up to 32 with the mask from a tensor is what the model does itself.

    The image has 9 tokens, so the model pads it too, and those rows must keep the native mask.
    """
    for length in range(1, 71):
        native = z_call(length, dtype=dtype, side=6)
        padded = Z_IMAGE.pad(native, buckets=(), cache=PadCache())
        assert len(padded["cap_feats"][0]) % 32 == 0
        assert torch.equal(z_run(padded, dtype=dtype)[0], z_native(native, dtype=dtype)[0]), length


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(17, 8), (32, 8), (33, 8), (70, 8), (8, 8), (40, 64), (64, 65), (1, 70)])
def test_z_image_padding_is_bitwise_for_both_branches(dtype: str, lengths: tuple[int, int]):
    """Guidance is one call with two captions; where their multiples differ the model adds an attention mask."""
    native = z_call(*lengths, dtype=dtype)
    padded = Z_IMAGE.pad(native, buckets=(), cache=PadCache())
    for out, reference in zip(z_run(padded, dtype=dtype), z_native(native, dtype=dtype), strict=True):
        assert torch.equal(out, reference)


def test_z_image_lengths_of_one_multiple_share_a_shape():
    """Lengths come as tensors, so that 33 and 64 tokens have one signature."""
    first, second = (Z_IMAGE.pad(z_call(n, 8), buckets=(), cache=PadCache()) for n in (33, 64))
    for a, b in zip(first["cap_feats"] + first["cap_lens"], second["cap_feats"] + second["cap_lens"], strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    assert [int(length) for length in first["cap_lens"]] == [33, 8]
    assert first["cap_lens"][0].dtype == torch.int64


def test_z_image_reads_the_length_from_the_tensor():
    """A replay changes the tensor and nothing else: the result must follow it, not the captured Python value."""
    short, long = z_call(17), z_call(30)
    padded = Z_IMAGE.pad(short, buckets=(), cache=PadCache())
    target = Z_IMAGE.pad(long, buckets=(), cache=PadCache())
    padded["cap_feats"][0].copy_(target["cap_feats"][0])
    padded["cap_lens"][0].copy_(target["cap_lens"][0])
    assert torch.equal(z_run(padded)[0], z_native(long)[0])


def test_z_image_in_a_bucket_of_zero_rows_is_visibly_wrong():
    """Why there are no buckets: extra rows are attended and move the image's positions. Pad tokens are live."""
    native = z_call(17)
    bucketed = native | {"cap_feats": [pad_to(native["cap_feats"][0], length=64, dim=0)]}
    assert error(z_native(bucketed)[0], z_native(native)[0]) > 1e-2


def test_z_image_pad_token_is_live():
    """With a dead pad token the tests above could not see a wrong mask."""
    native = z_call(17)
    padded = Z_IMAGE.pad(native, buckets=(), cache=PadCache())
    wrong = padded | {"cap_lens": [torch.tensor([19])]}
    assert error(z_run(wrong)[0], z_native(native)[0]) > 1e-3


def test_z_image_leaves_the_module_as_it_was():
    """Also when the forward raises: a leftover patch would change eager runs of another arm."""
    module = transformer("tiny/z-image")
    padded = Z_IMAGE.pad(z_call(5), buckets=(), cache=PadCache())
    Z_IMAGE.forward(module, module.forward, padded)
    assert "_pad_with_ids" not in vars(module)

    def failing(**arguments: Any) -> Any:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Z_IMAGE.forward(module, failing, padded)
    assert "_pad_with_ids" not in vars(module)
    assert "cap_lens" in padded


def test_z_image_without_lengths_is_the_native_call():
    """The eager arm runs unpadded arguments through the same forward."""
    native = z_call(5)
    assert torch.equal(z_run(native)[0], z_native(native)[0])


def test_z_image_pads_a_request_once():
    """The pipeline builds a new list per step from the same tensors."""
    native, memory = z_call(5, 8), PadCache()
    first = Z_IMAGE.pad(native, buckets=(), cache=memory)
    second = Z_IMAGE.pad(native | {"cap_feats": list(native["cap_feats"])}, buckets=(), cache=memory)
    for name in ("cap_feats", "cap_lens"):
        assert all(a is b for a, b in zip(first[name], second[name], strict=True))


# ------------------------------------------------------------------------------------------------------- the others
def test_an_adapter_without_a_policy_hands_the_call_through():
    """SANA's prompts are 300 rows already."""
    sana, native = adapter("tiny/sana1.5"), {"hidden_states": torch.zeros(1)}
    assert sana.pad(native, buckets=(), cache=PadCache()) is native
    assert list(sana.variants(native, buckets=(), cache=PadCache())) == [native]
    assert sana.forward(None, lambda **arguments: arguments, native) == native


@pytest.mark.parametrize(("model", "buckets"), [
    ("Qwen/Qwen-Image", (64, 128, 256, 512, 1024)), ("tiny/qwen-image-2512", (32, 64)),
    ("Tongyi-MAI/Z-Image-Turbo", ()), ("Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers", ()),
])  # fmt: skip
def test_default_buckets(model: str, buckets: tuple[int, ...]):
    """The published buckets for Qwen-Image, none where the policy is another."""
    assert adapter(model).default_buckets == buckets
