"""Static inputs are copied exactly when they changed; buffers have the argument's layout; addresses do not own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bcgbench.engine.buffers import Address, StaticInputs, borrow, clone_strided, empty_like_strided, version
from bcgbench.errors import StaticInputError

CPU = torch.device("cpu")


class Wrapped(Tensor):
    """A subclass, as quantized weights are."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def inputs(*leaves: Any) -> StaticInputs:
    """Buffers for these leaves, filled once."""
    return StaticInputs(list(leaves), CPU)


class TestUpdate:
    def test_an_unchanged_argument_is_not_copied(self):
        """In a DiT only latents and timestep change from step to step."""
        prompt, latents = torch.ones(3), torch.zeros(3)
        static = inputs(prompt, latents)
        assert static.copies == 2
        static.update([prompt, latents])
        assert static.copies == 2
        latents.add_(1)
        static.update([prompt, latents])
        assert static.copies == 3
        assert static.leaves[1].tolist() == [1, 1, 1]

    def test_another_object_at_the_same_address_is_copied(self):
        """CPython reuses the id of a freed tensor at once, and a new tensor's counter starts at 0."""
        static, ids = inputs(torch.full((3,), -1.0)), set()
        gc.collect()
        for value in range(20):
            leaf = torch.full((3,), float(value))
            ids.add(id(leaf))
            static.update([leaf])
            assert static.leaves[0].tolist() == [value] * 3
            del leaf
        assert len(ids) < 20, "no id was reused: this test shows nothing"

    def test_constants_pass_through(self):
        """They are part of the signature, so they cannot differ."""
        static = inputs(1, "a", None, torch.ones(1))
        assert static.leaves[:3] == [1, "a", None]
        assert len(static.buffers) == 1

    def test_an_argument_given_twice_has_one_buffer(self):
        """Aliasing is part of the signature."""
        leaf = torch.ones(2)
        static = inputs(leaf, 1, leaf)
        assert static.leaves[0] is static.leaves[2]
        assert static.copies == 1

    @pytest.mark.parametrize(
        "leaf", [torch.ones(1), torch.ones(1, 3), torch.ones(3).double(), torch.ones(4)],
        ids=["broadcast", "dimension", "dtype", "length"],
    )  # fmt: skip
    def test_shape_and_dtype_are_never_bent(self, leaf: Tensor):
        """And the buffer keeps what it had."""
        static = inputs(torch.zeros(3))
        with pytest.raises(StaticInputError, match=r"argument leaf 0: the graph holds float32\[3\]"):
            static.update([leaf])
        assert static.leaves[0].tolist() == [0, 0, 0]

    @pytest.mark.parametrize("leaf", [torch.eye(2).to_sparse(), torch.ones(2).as_subclass(Wrapped)])
    def test_what_is_no_plain_tensor_is_refused(self, leaf: Tensor):
        """A sparse tensor has no one block of memory; a subclass may compute what it likes."""
        with pytest.raises(StaticInputError, match=r"leaf 0 is a .* Convert it before the call"):
            inputs(leaf)

    def test_a_parameter_can_be_an_argument(self):
        """Copied without its gradient."""
        parameter = torch.nn.Parameter(torch.ones(2))
        static = inputs(parameter)
        assert not static.leaves[0].requires_grad
        parameter.mul_(3)
        static.update([parameter])
        assert static.leaves[0].tolist() == [3, 3]

    def test_lazy_conjugates_are_copied_by_value(self):
        """A conjugate is a flag on another tensor's memory."""
        leaf = torch.tensor([1 + 2j, 3 - 4j])
        static = inputs(leaf.conj())
        assert static.leaves[0].tolist() == [1 - 2j, 3 + 4j]

    def test_versions_show_a_write_even_under_inference_mode(self):
        """How a capture sees that a forward writes to its arguments."""
        with torch.inference_mode():
            static = inputs(torch.ones(2), torch.ones(2))
            before = static.versions
            static.leaves[1].add_(1)
            after = static.versions
        assert None not in before
        assert before[0] == after[0]
        assert before[1] != after[1]


def test_an_inference_tensor_has_no_version():
    """So it counts as changed at every call."""
    with torch.inference_mode():
        leaf = torch.ones(1)
    assert version(leaf) is None
    static = inputs(leaf)
    static.update([leaf])
    assert static.copies == 2


SIZES = st.lists(st.integers(0, 4), min_size=0, max_size=4)


@st.composite
def layouts(draw: st.DrawFn) -> Tensor:
    """A tensor in some layout: permuted, sliced, strided, expanded, windowed, empty, scalar."""
    shape = draw(SIZES)
    tensor = torch.arange(float(torch.tensor(shape).prod()) if shape else 1.0).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    for axis in range(tensor.dim()):
        tensor = tensor.narrow(axis, *draw(st.sampled_from([(0, tensor.shape[axis]), (tensor.shape[axis] // 2, 0)
                                                            , (0, (tensor.shape[axis] + 1) // 2)])))  # fmt: skip
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    if tensor.dim() and tensor.shape[-1] > 1 and draw(st.booleans()):
        tensor = tensor.unfold(-1, 2, 1)
    return tensor


@pytest.mark.parametrize("leaf", [torch.rand(1).expand(2), torch.rand(2, 4)[:, :3], torch.rand(3, 2).T])
def test_a_copy_keeps_strides(leaf: Tensor):
    """LTX-2 expands its timestep: a traced call must ask for the signature that the pipeline will ask for."""
    copy = clone_strided(leaf)
    assert torch.equal(copy, leaf)
    assert copy.stride() == leaf.stride()
    assert copy.data_ptr() != leaf.data_ptr()


@given(layouts())
def test_a_buffer_has_the_layout_and_the_values_of_its_argument(leaf: Tensor):
    """Kernels are chosen by strides, so these are kept; expanded and overlapping arguments are copied too."""
    buffer = empty_like_strided(leaf, CPU)
    assert (buffer.shape, buffer.stride(), buffer.dtype) == (leaf.shape, leaf.stride(), leaf.dtype)
    static = inputs(leaf)
    assert torch.equal(static.leaves[0], leaf)
    assert leaf.numel() == 0 or static.leaves[0].data_ptr() != leaf.data_ptr()
    negated = torch.empty(0).set_(leaf.untyped_storage()).mul(-1)
    fresh = negated.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
    static.update([fresh])
    assert torch.equal(static.leaves[0], fresh)


class TestAddress:
    def test_equal_for_the_same_place_alone(self):
        """How a break's result is recognised as the captured part of its arguments."""
        base = torch.arange(6.0)
        assert Address.of(base[1:3]) == Address.of(base.narrow(0, 1, 2))
        assert Address.of(base[1:3]) != Address.of(base[2:4])
        assert Address.of(base[:2]) != Address.of(base[:4:2])
        assert Address.of(base[:2]) != Address.of(base[:2].view(torch.int32))
        assert Address.of(base[:2]) != Address.of(base[:2].clone())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float32, torch.int64, torch.complex64])
    def test_the_array_protocol_carries_every_width(self, dtype: torch.dtype):
        """bfloat16 has no name in it and travels as an integer; strides are in bytes."""
        tensor = torch.zeros(4, 6, dtype=dtype)[:, ::2]
        array = Address.of(tensor).__cuda_array_interface__
        assert array["shape"] == (4, 3)
        assert array["strides"] == (6 * dtype.itemsize, 2 * dtype.itemsize)
        assert int(array["typestr"][2:]) == dtype.itemsize
        assert array["data"] == (tensor.data_ptr(), False)

    def test_a_cpu_tensor_is_borrowed_as_an_alias(self):
        """No pool reuses its memory; turning the tensor in place does not turn what was borrowed, as on a GPU."""
        tensor = torch.ones(2, 3)
        borrowed = borrow(tensor)
        tensor.t_()
        assert (borrowed.data_ptr(), borrowed.shape) == (tensor.data_ptr(), (2, 3))
