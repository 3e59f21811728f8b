"""Buckets, padding and the memory of what was padded."""

from __future__ import annotations

import gc

import pytest
import torch

from bcgbench.models.padding import OutsidePolicy, PadCache, choose_bucket, cut_to, pad_to, round_up

BUCKETS = (64, 128, 256, 512, 1024)


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 64), (63, 64), (64, 64), (65, 128), (128, 128), (513, 1024), (1024, 1024)]
)
def test_the_smallest_bucket_that_holds_the_prompt_is_chosen(length: int, bucket: int):
    """A length equal to a bucket stays in it."""
    assert choose_bucket(length, BUCKETS) == bucket


def test_the_order_of_buckets_does_not_matter():
    """Buckets come from a command line."""
    assert choose_bucket(65, (1024, 64, 256, 128)) == 128


def test_a_prompt_above_the_largest_bucket_is_outside_the_policy():
    """The runner shows this sentence as the reason of a fallback."""
    with pytest.raises(OutsidePolicy, match=r"^prompt has 1300 tokens, the largest bucket is 1024$"):
        choose_bucket(1300, BUCKETS)


@pytest.mark.parametrize(("length", "rounded"), [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64)])
def test_rounding_up_keeps_multiples(length: int, rounded: int):
    """32 stays 32."""
    assert round_up(length, multiple=32) == rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_padding_keeps_values_and_dtype(dtype: torch.dtype):
    """The rows come first, the padding after them."""
    source = torch.ones((2, 3), dtype=dtype)
    padded = pad_to(source, length=5, dim=1)
    assert padded.dtype == dtype
    assert torch.equal(padded, torch.tensor([[1, 1, 1, 0, 0]] * 2).to(dtype))


def test_padding_takes_a_value_and_a_dimension():
    """Any dimension, any value."""
    padded = pad_to(torch.zeros(2, 1), length=3, dim=0, value=7)
    assert padded.tolist() == [[0], [0], [7]]


def test_a_tensor_of_the_right_length_is_returned_itself():
    """No copy where there is nothing to do."""
    source = torch.zeros(2, 3)
    assert pad_to(source, length=3, dim=1) is source


@pytest.mark.parametrize("length", [4, 6])
@pytest.mark.parametrize("kind", ["transposed", "slice of a longer one"])
def test_the_strides_are_those_of_a_new_tensor(length: int, kind: str):
    """Strides are part of a graph's signature: the same bucket must always have the same ones.

    A slice of one long prompt is contiguous to torch, yet its first stride is the long one's.
    """
    source = torch.zeros(1, 3, 4).transpose(1, 2) if kind == "transposed" else torch.zeros(1, 9, 3)[:, :4]
    assert pad_to(source, length=length, dim=1).stride() == (3 * length, 3, 1)


def test_a_cut_tensor_has_the_strides_of_a_new_one():
    """A bucket captured from a cut prompt must be the one that a short prompt asks for."""
    assert cut_to(torch.zeros(1, 9, 3), length=4, dim=1).stride() == (12, 3, 1)


def test_padding_never_cuts():
    """A longer tensor is an error, not a shorter prompt."""
    with pytest.raises(ValueError, match="has 5 entries and cannot be padded to 4"):
        pad_to(torch.zeros(1, 5), length=4, dim=1)


def test_a_cut_tensor_owns_its_storage():
    """A view would keep the whole source alive in the cache that holds it."""
    source = torch.arange(6).reshape(1, 6)
    cut = cut_to(source, length=2, dim=1)
    assert cut.tolist() == [[0, 1]]
    assert cut.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


class Maker:
    """Counts how often it is called."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source, self.calls = source, 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return pad_to(self.source, length=8, dim=0)


@pytest.fixture
def source() -> torch.Tensor:
    """Three rows to pad."""
    return torch.ones(3, 2)


def test_an_unchanged_source_gives_the_same_object(source: torch.Tensor):
    """The engine copies an input only when its object changed: one copy per request instead of one per step."""
    cache, make = PadCache(), Maker(source)
    assert cache.get(source, "a", make) is cache.get(source, "a", make)
    assert make.calls == 1


def test_a_source_changed_in_place_is_padded_again(source: torch.Tensor):
    """Same object, other values: identity alone would replay the old prompt."""
    cache, make = PadCache(), Maker(source)
    before = cache.get(source, "a", make)
    source.mul_(5)
    after = cache.get(source, "a", make)
    assert after is not before
    assert after[0, 0] == 5
    assert len(cache) == 1


def test_tags_keep_several_results_of_one_source_apart(source: torch.Tensor):
    """One prompt has a padded form, a mask, and one of each per bucket."""
    cache = PadCache()
    padded = cache.get(source, ("embeds", 8), Maker(source))
    mask = cache.get(source, ("mask", 8), lambda: torch.zeros(8))
    assert padded is not mask
    assert cache.get(source, ("mask", 8), Maker(source)) is mask


def test_an_equal_tensor_at_a_reused_address_is_not_taken_for_the_source():
    """CPython reuses the id of a freed tensor at once; every request's embeddings may get the last one's."""
    cache, ids = PadCache(), set()
    for value in range(20):
        source = torch.full((3, 2), float(value))
        ids.add(id(source))
        assert cache.get(source, "a", Maker(source))[0, 0] == value
        del source
    assert len(ids) < 20, "no address was reused, so nothing was tested"


def test_results_die_with_their_source(source: torch.Tensor):
    """A long run does not collect the padded prompts of all its requests."""
    cache = PadCache()
    other = torch.ones(3, 2)
    cache.get(source, "a", Maker(source))
    cache.get(other, "a", Maker(other))
    del other
    gc.collect()
    assert len(cache) == 1


def test_a_source_that_needs_no_padding_is_not_kept_alive():
    """Holding the source as its own result would make it immortal."""
    cache, source = PadCache(), torch.ones(8, 2)
    assert cache.get(source, "a", Maker(source)) is source
    assert len(cache) == 0


def test_inference_tensors_are_never_reused():
    """They have no in-place counter, so a change could not be seen."""
    cache = PadCache()
    with torch.inference_mode():
        source = torch.ones(3, 2)
        make = Maker(source)
        first, second = cache.get(source, "a", make), cache.get(source, "a", make)
    assert first is not second
    assert make.calls == 2
