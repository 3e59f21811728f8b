"""A copy that lies in a graph and reads from memory where to copy from, so that this may change between replays.

What a break returns lies wherever the allocator put it. Copied between two graphs it costs the GPU 1.7 us, and 2 idle
before (2.3 MB: SANA1.5 at 512x512 on an H200); copied by the next graph's first kernel, 1.9 us per break less in all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

WORD_BYTES = 16
_THREADS = 256
_SOURCE = """
extern "C" __global__ void pull(const uint4* const* cell, uint4* to, int words) {
    const uint4* from = *cell;
    if (!from) return;
    for (int word = blockIdx.x * blockDim.x + threadIdx.x; word < words; word += gridDim.x * blockDim.x)
        to[word] = from[word];
}
"""
_MOST_CELLS = 1_024
"""LTX-2 has 288 breaks, the most of the twelve models."""
_MOST_BLOCKS = 2_048
"""More than an H200 runs at once (132 multiprocessors, 8 blocks each): a larger copy gives a thread several words."""


@functools.cache
def _kernel(device: int) -> Any:
    """The compiled kernel, run once: what a first launch loads may not be loaded in a capture."""
    kernel = _compiled()
    nowhere = torch.zeros(2, dtype=torch.int64, device=device)
    kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[nowhere, nowhere, 0])
    return kernel


def _compiled() -> Any:
    """By the compiler that comes with torch. torch also asks for the headers of a CUDA toolkit, which this needs none
    of, and raises where there is no toolkit."""
    from torch.utils import cpp_extension  # looks for a toolkit, and logs

    with patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or "/usr"):
        return torch.cuda._compile_kernel(_SOURCE, "pull")


def cells(device: torch.device) -> Iterator[Tensor]:
    """What one capture is to read addresses from (int64[1] each, all 0); compiles the kernel, which a capture may not.

    Not in the pool of the graphs: they are filled only when an address changes, and other segments write upon what lies
    there. For more breaks than this the outputs are copied by the breaks.
    """
    with torch.cuda.device(device), torch.inference_mode(mode=False):  # else they could not be filled outside that mode
        _kernel(device.index)
        return iter(torch.zeros(_MOST_CELLS, dtype=torch.int64, device=device).split(1))


def can_pull(target: Tensor) -> bool:
    """Whether a tensor is whole words of a GPU's memory without gaps or overlaps, in whatever order of dimensions."""
    words, rest = divmod(target.numel() * target.itemsize, WORD_BYTES)
    inner = 1
    for step, size in sorted(zip(target.stride(), target.shape, strict=True)):
        if size != 1 and step != inner:
            return False
        inner *= size
    return target.is_cuda and rest == 0 < words < 2**31


def pull(cell: Tensor, to: Tensor) -> None:
    """Launch a copy into `to`, which `can_pull` allows, from the address in `cell`, unless that is 0."""
    words = to.numel() * to.itemsize // WORD_BYTES
    blocks = min(_MOST_BLOCKS, -(-words // _THREADS))
    _kernel(to.device.index)(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[cell, to, words])
