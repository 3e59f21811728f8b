"""A break's output on its way into the next segment, as told to a segment that copies it; the copy needs a GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

from bcgbench.engine import pull
from bcgbench.engine.bridge import Bridge
from bcgbench.errors import StaticInputError


@pytest.fixture
def place() -> Tensor:
    return torch.zeros(4, 8)


@pytest.fixture
def cell() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


def test_the_segment_is_told_where_a_result_lies(place: Tensor, cell: Tensor):
    """It is kept until the segment was launched, and nothing is copied meanwhile."""
    bridge, result = Bridge(place, cell), torch.ones(4, 8)
    bridge.fill(result)
    assert int(cell) == result.data_ptr()
    assert bridge.handed is result
    bridge.launched()
    assert bridge.handed is place
    assert not place.any()


def test_an_address_is_written_only_when_it_changes(place: Tensor, cell: Tensor):
    """Each write is a launch."""
    bridge, result = Bridge(place, cell), torch.ones(4, 8)
    bridge.fill(result)
    written = cell._version
    bridge.fill(result)
    assert cell._version == written
    bridge.fill(other := torch.ones(4, 8))
    assert int(cell) == other.data_ptr()


@pytest.mark.parametrize("lay", [lambda t: t.t().contiguous().t(), lambda t: t[:1].expand(4, 8),
                                 lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(4, 8),
                                 lambda t: torch._neg_view(-t)])  # fmt: skip
def test_a_result_that_lies_otherwise_is_laid_out_as_captured(place: Tensor, cell: Tensor, lay):
    """The copy knows no strides, and takes 16 bytes at a time."""
    bridge, result = Bridge(place, cell), lay(torch.ones(4, 8))
    bridge.fill(result)
    assert torch.equal(bridge.handed, result)
    assert (bridge.handed.stride(), bridge.handed.data_ptr() % pull.WORD_BYTES) == (place.stride(), 0)
    assert int(cell) == bridge.handed.data_ptr() != result.data_ptr()


def test_another_shape_or_dtype_is_refused(place: Tensor, cell: Tensor):
    for result in (torch.ones(4, 4), torch.ones(4, 8, dtype=torch.float64)):
        with pytest.raises(StaticInputError):
            Bridge(place, cell).fill(result)


def test_a_wrong_address_is_not_taken_for_the_result(place: Tensor, cell: Tensor):
    """What `divergence` compares is what the segment is going to read."""
    bridge = Bridge(place, cell)
    bridge.fill(torch.ones(4, 8))
    cell.zero_()
    assert bridge.handed is place


def test_poison_shows_where_nothing_is_handed_on(place: Tensor, cell: Tensor):
    """A segment that is told nothing copies nothing, and reads NaN; told again, it copies again."""
    bridge, result = Bridge(place, cell), torch.ones(4, 8)
    bridge.fill(result)
    bridge.poison()
    assert int(cell) == 0
    assert place.isnan().all()
    bridge.fill(result)
    assert int(cell) == result.data_ptr()


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [((2, 4, 8), (32, 8, 1), True), ((2, 4, 8), (8, 16, 1), True), ((1, 4, 8), (7, 8, 1), True), ((16,), (1,), True),
     ((4, 8), (16, 1), False), ((4, 8), (0, 1), False), ((3, 3), (2, 2), False), ((4, 2), (0, 7), False),
     ((5,), (1,), False), ((0, 8), (8, 1), False)],
)  # fmt: skip
def test_whole_words_without_gaps_or_overlaps_can_be_copied_by_a_segment(
    shape: tuple[int, ...], strides: tuple[int, ...], fits: bool
):
    """On a GPU alone: memory of the host is not read by a kernel."""
    lies: Any = SimpleNamespace(
        shape=shape, stride=lambda: strides, itemsize=2, numel=lambda: math.prod(shape), is_cuda=True
    )
    assert pull.can_pull(lies) is fits
    assert not pull.can_pull(torch.empty_strided(shape, strides, dtype=torch.bfloat16))


def test_the_copy_is_compiled_without_a_toolkit(monkeypatch: pytest.MonkeyPatch):
    """torch looks for a toolkit's headers and raises without one; from wheels alone, there is none."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(OSError, match="CUDA_HOME"):
        cpp_extension.include_paths("cuda")
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda *_: cpp_extension.include_paths("cuda"))
    assert pull._compiled()
    assert cpp_extension.CUDA_HOME is None
