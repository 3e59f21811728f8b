"""The walker over nested arguments: nothing lost on the way down and up, nothing shared by a clone, no silent copy."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.utils import BaseOutput
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bcgbench.engine import trees
from bcgbench.errors import StaticInputError


class Pair(NamedTuple):
    """A namedtuple, as attention processors return."""

    cos: Any
    sin: Any


@dataclass
class Plain:
    """A dataclass, as some forwards take for their conditioning."""

    text: Any
    mask: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen dataclass that derives a field, so that calling the constructor again could change it."""

    text: Any
    derived: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", ("derived from", self.text))


@dataclass
class Output(BaseOutput):
    """An output of diffusers: a dict that is also a dataclass."""

    sample: Any
    audio: Any = None


@dataclass
class TwoNeeded(BaseOutput):
    """An output whose second field has no default and may still be None, like Stable Diffusion's."""

    images: Any
    nsfw: Any


def tensors() -> st.SearchStrategy[Tensor]:
    """Small tensors of several dtypes and shapes, scalars and empty ones included."""
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)


def outputs(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Output]:
    """Outputs as diffusers fills them; one that holds only a dict takes that dict's keys, so it is not drawn."""
    present = inner.filter(lambda value: value is not None and not isinstance(value, dict))
    return st.builds(Output, sample=present, audio=st.none() | present)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One level of each container that the walker knows, around `inner`."""
    names = st.dictionaries(st.sampled_from(["mask", "freqs", "scale"]), inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        names,
        names.map(OrderedDict),
        names.map(lambda pairs: defaultdict(list, pairs)),
        st.dictionaries(st.integers(0, 5), inner, max_size=2),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner),
        outputs(inner),
    )


def leaves() -> st.SearchStrategy[Any]:
    """Tensors and constants."""
    constants = st.sampled_from([None, True, 1, 1.0, -0.0, float("nan"), "joint", torch.float16, torch.Size([2, 3])])
    return tensors() | constants


NESTED = st.recursive(leaves(), containers, max_leaves=12)


def children(tree: Any) -> list[Any] | None:
    """What a container holds, by an independent reading; None for a leaf."""
    if isinstance(tree, dict):
        return [item for pair in tree.items() for item in pair]
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return list(tree)
    if isinstance(tree, Plain):
        return [tree.text, tree.mask]
    return [tree.text, tree.derived] if isinstance(tree, Frozen) else None


def same(a: Any, b: Any) -> bool:
    """Whether two trees have equal container types throughout and the very same objects as leaves."""
    if type(a) is not type(b):
        return False
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    inside_a, inside_b = children(a), children(b)
    if inside_a is None or inside_b is None:
        return a is b or (not isinstance(a, Tensor) and repr(a) == repr(b))
    return len(inside_a) == len(inside_b) and all(map(same, inside_a, inside_b))


def widest(spec: trees.Spec) -> int:
    """Entries of the largest container."""
    return max([len(spec.children), *map(widest, spec.children)])


class TestFlattenAndRebuild:
    @given(NESTED)
    def test_round_trip_keeps_types_and_objects(self, tree: Any) -> None:
        """Flattening and rebuilding gives equal containers around the very same leaves."""
        found, spec = trees.flatten(tree)
        assert same(trees.rebuild(spec, found), tree)

    @given(NESTED)
    def test_spec_survives_a_round_trip(self, tree: Any) -> None:
        """The rebuilt tree has the spec of the original, so it can be a key."""
        found, spec = trees.flatten(tree)
        again, spec_again = trees.flatten(trees.rebuild(spec, found))
        assert spec_again == spec
        assert hash(spec_again) == hash(spec)
        assert [id(leaf) for leaf in again] == [id(leaf) for leaf in found]

    @given(NESTED)
    def test_every_leaf_has_its_own_path(self, tree: Any) -> None:
        """Paths name each leaf once."""
        found, spec = trees.flatten(tree)
        names = list(trees.paths(spec))
        assert len(names) == len(found)
        assert len(set(names)) == len(names)

    @given(NESTED, st.integers(0, 12))
    def test_limit_is_exact(self, tree: Any, limit: int) -> None:
        """`limit` leaves, and entries of a container, are fine; one more is refused."""
        leaves, spec = trees.flatten(tree)
        if max(len(leaves), widest(spec)) <= limit:
            assert trees.flatten(tree, limit=limit)[0] == leaves
        else:
            with pytest.raises(trees.TooManyLeaves):
                trees.flatten(tree, limit=limit)

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            ([1], (1,)),
            ({"a": 1}, OrderedDict(a=1)),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            ({1: 0}, {"1": 0}),
            ({1: 0}, {True: 0}),
            (Pair(1, 2), (1, 2)),
            (Plain(1), Frozen(1)),
            (defaultdict(list, a=1), defaultdict(dict, a=1)),
            ([], None),
            ([[]], []),
        ],
    )
    def test_different_containers_have_different_specs(self, a: Any, b: Any) -> None:
        """Container type, key type, order of keys and nesting are part of the spec."""
        assert trees.flatten(a)[1] != trees.flatten(b)[1]

    def test_paths_read_like_python(self) -> None:
        """A path is what one would type to reach the leaf."""
        _, spec = trees.flatten({"cap_feats": [0, 1], "rope": [Pair(2, 3)], "by_layer": {7: 4}})
        assert list(trees.paths(spec)) == ["cap_feats[0]", "cap_feats[1]", "rope[0][0]", "rope[0][1]", "by_layer[7]"]

    def test_paths_of_a_dataclass_and_of_a_bare_leaf(self) -> None:
        """Fields are attributes; a tree that is a leaf is called value."""
        assert list(trees.paths(trees.flatten({"cond": Plain(0, 1)})[1])) == ["cond.text", "cond.mask"]
        assert list(trees.paths(trees.flatten(3)[1])) == ["value"]

    def test_a_derived_field_is_kept_not_derived_again(self) -> None:
        """A frozen dataclass is rebuilt from its fields, without its constructor."""
        rebuilt = trees.map_leaves(lambda leaf: leaf * 2 if isinstance(leaf, int) else leaf, Frozen(1))
        assert rebuilt.text == 2
        assert rebuilt.derived == ("derived from", 2)

    def test_model_output_is_readable_by_name_index_and_key(self) -> None:
        """A rebuilt diffusers output works in all three ways that pipelines use."""
        sample = torch.ones(2)
        rebuilt = trees.map_leaves(lambda leaf: leaf, Output(sample=sample))
        assert rebuilt.sample is sample
        assert rebuilt[0] is sample
        assert rebuilt["sample"] is sample
        assert rebuilt.audio is None

    def test_model_output_with_a_needed_field_that_is_none(self) -> None:
        """None in a field without a default comes back as None."""
        rebuilt = trees.map_leaves(lambda leaf: leaf, TwoNeeded(images=1, nsfw=None))
        assert (rebuilt.images, rebuilt.nsfw) == (1, None)

    def test_results_of_torch_calls_keep_their_type(self) -> None:
        """`torch.max(x, dim)` returns a named result; it stays one."""
        result = torch.max(torch.arange(4.0), dim=0)
        rebuilt = trees.map_leaves(lambda leaf: leaf, result)
        assert type(rebuilt) is type(result)
        assert rebuilt.indices.item() == 3

    def test_tensors_are_listed_in_order_with_repeats(self) -> None:
        """`tensors` gives every occurrence, so that aliasing can be seen."""
        one, two = torch.zeros(1), torch.ones(1)
        assert [id(t) for t in trees.tensors({"a": one, "b": [two, 3, one]})] == [id(one), id(two), id(one)]


class TestClone:
    @given(NESTED)
    def test_clone_shares_no_memory(self, tree: Any) -> None:
        """Equal values in other storages, constants and container types as they were."""
        copy = trees.clone(tree)
        originals, spec = trees.flatten(tree)
        copies, spec_of_copy = trees.flatten(copy)
        assert spec_of_copy == spec
        for original, cloned in zip(originals, copies, strict=True):
            if not isinstance(original, Tensor):
                assert cloned is original
                continue
            assert torch.equal(cloned, original)
            assert (cloned.dtype, cloned.shape) == (original.dtype, original.shape)
            assert cloned.numel() == 0 or cloned.data_ptr() != original.data_ptr()

    def test_later_writes_reach_neither_side(self) -> None:
        """The source overwritten by a next replay leaves the clone as it was, and the other way round."""
        source = {"sample": torch.zeros(3)}
        copy = trees.clone(source)
        source["sample"].fill_(7)
        assert copy["sample"].tolist() == [0, 0, 0]
        copy["sample"].fill_(5)
        assert source["sample"].tolist() == [7, 7, 7]

    def test_a_tensor_met_twice_stays_one(self) -> None:
        """Aliasing inside the tree is kept."""
        shared = torch.zeros(2)
        copy = trees.clone([shared, {"again": shared}])
        assert copy[0] is copy[1]["again"]

    @pytest.mark.parametrize(
        "view",
        [
            torch.zeros(2, 3).t(),
            torch.zeros(1, 4, 2, 2).to(memory_format=torch.channels_last),
        ],
        ids=["transposed", "channels-last"],
    )
    def test_dense_strides_are_kept(self, view: Tensor) -> None:
        """A clone of dense memory has the strides of its source."""
        assert trees.clone([view])[0].stride() == view.stride()


class TestCheckLike:
    @pytest.mark.parametrize(
        ("held", "given_value"),
        [
            (torch.zeros(2, 4), torch.ones(1, 4)),
            (torch.zeros(2, 4), torch.ones(4)),
            (torch.zeros(2, 4), torch.ones(())),
            (torch.zeros(2, 4), torch.ones(4, 2)),
            (torch.zeros(4, dtype=torch.float32), torch.ones(4, dtype=torch.float64)),
            (torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float16)),
            (torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool)),
        ],
        ids=["1x4-into-2x4", "4-into-2x4", "scalar-into-2x4", "4x2-into-2x4", "f64-f32", "f16-bf16", "bool-int"],
    )
    def test_nothing_is_broadcast_or_converted(self, held: Tensor, given_value: Tensor) -> None:
        """A shape or dtype that `Tensor.copy_` would adapt is refused."""
        with pytest.raises(StaticInputError, match="latents"):
            trees.check_like(held, given_value, name="latents")

    def test_the_message_says_expected_and_got(self) -> None:
        """Both shapes and dtypes stand in the message."""
        with pytest.raises(StaticInputError, match=r"float32\[2, 4\].*float64\[1, 4\]"):
            trees.check_like(torch.zeros(2, 4), torch.zeros(1, 4, dtype=torch.float64), name="x")


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (torch.zeros(1, 64, 8, dtype=torch.bfloat16), "bfloat16[1, 64, 8]"),
        (torch.zeros(2, device="meta"), "float32[2]@meta"),
        ([1, None], "[1, None]"),
        ({"a": "x"}, "{a: 'x'}"),
        ((torch.zeros(1),), "(float32[1])"),
        (Plain(1.0, True), "Plain{text: 1.0, mask: True}"),
        (Output(sample=2), "Output{sample: 2}"),
        ("x" * 80, "<str>"),
    ],
)
def test_describe(tree: Any, text: str) -> None:
    """Descriptions are short and carry container types, dtypes and shapes."""
    assert trees.describe(tree) == text
