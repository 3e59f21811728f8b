"""Memory that a graph reads and writes: static inputs, and addresses of tensors that the graph's pool owns.

A segment's intermediates live in the graph pool and are rewritten by every replay. A break reads them through
non-owning views, so that a segmented graph needs no more memory than a whole one (0.18 GiB against 2.02 with strong
references, Qwen-Image at 512x512). A view is only safe for a tensor that the same replay writes first; `Capture`
decides which those are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bcgbench.engine import trees
from bcgbench.errors import StaticInputError

_TYPESTR = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a CUDA tensor lies, without owning it."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Address:
        """The address of a strided CUDA tensor."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array as integers of the same width: bfloat16 has no name in this protocol (version 3)."""
        width = self.dtype.itemsize
        strides = tuple(step * width for step in self.stride)
        return {"shape": self.shape, "typestr": _TYPESTR[width], "data": (self.pointer, False), "strides": strides,
                "version": 3}  # fmt: skip

    def view(self) -> Tensor:
        """A tensor over this memory that does not keep it alive."""
        carrier = torch.as_tensor(self, device=self.device)
        assert carrier.dtype == _CARRIER[self.dtype.itemsize]
        return carrier.view(self.dtype)


def borrow(tensor: Tensor) -> Tensor:
    """A non-owning view of a CUDA tensor; on a CPU, where no pool reuses memory, an alias, which `t_` does not turn."""
    if tensor.device.type != "cuda" or tensor.numel() == 0:
        return tensor.detach()
    return Address.of(tensor).view()


def empty_like_strided(tensor: Tensor, device: torch.device) -> Tensor:
    """An uninitialised tensor of equal shape, strides and dtype on `device`; expanded dimensions stay expanded."""
    kept = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    base = torch.empty_strided(kept, tensor.stride(), dtype=tensor.dtype, device=device)
    return base.as_strided(tensor.shape, tensor.stride()) if list(tensor.shape) != kept else base


def dense(tensor: Tensor) -> Tensor:
    """The elements of an expanded tensor once: copying into overlapping memory is refused by torch."""
    for axis, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def clone_strided(tensor: Tensor) -> Tensor:
    """A copy with the strides kept, which `Tensor.clone` does not promise: they are part of a call's signature."""
    copy = empty_like_strided(tensor, tensor.device)
    dense(copy).copy_(dense(tensor))
    return copy


def version(tensor: Tensor) -> int | None:
    """torch's in-place counter; None for an inference tensor, which has none and so counts as always changed."""
    return None if tensor.is_inference() else tensor._version


Seen = tuple[Callable[[], Tensor | None], int | None]
"""An argument that was copied, if it lives, and its in-place counter then."""
_NEVER: Seen = (lambda: None, None)


class StaticInputs:
    """The buffers that a graph reads its tensor arguments from.

    `update` copies an argument only if its object or its in-place counter changed since the last copy: in all DiTs
    studied only latents and timestep do. Data changed behind torch's counter (through `.data` or a raw pointer) is
    not seen.
    """

    def __init__(self, leaves: list[Any], device: torch.device, *, skip_unchanged: bool = True) -> None:
        self.copies = 0
        self._skip_unchanged = skip_unchanged
        self._buffers: dict[int, Tensor] = {}
        self._dense: dict[int, Tensor] = {}
        self._seen: dict[int, Seen] = {}
        first: dict[int, int] = {}
        self.leaves = list(leaves)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            source = first.setdefault(id(leaf), index)
            if source == index:
                self._buffers[index] = buffer = _new_buffer(leaf, device, index=index)
                self._dense[index] = dense(buffer)
            self.leaves[index] = self._buffers[source]
        self.update(leaves)

    @property
    def buffers(self) -> list[Tensor]:
        """Each buffer once."""
        return list(self._buffers.values())

    @property
    def versions(self) -> list[int | None]:
        """In-place counters of the buffers, to see whether a forward writes to its arguments."""
        return [version(buffer) for buffer in self._buffers.values()]

    def update(self, leaves: list[Any]) -> None:
        """Copy what changed. Raises `StaticInputError` on a different shape or dtype."""
        for index, buffer in self._buffers.items():
            leaf: Tensor = leaves[index]
            seen, count = self._seen.get(index, _NEVER)
            if count is not None and seen() is leaf and leaf._version == count:
                continue
            trees.check_like(buffer, leaf, name=f"argument leaf {index}")
            # from pinned memory a copy returns before it is done, and the caller may write there again
            once = self._dense[index]
            once.copy_(leaf if once is buffer else dense(leaf), non_blocking=leaf.is_cuda or not leaf.is_pinned())
            self._seen[index] = (weakref.ref(leaf), version(leaf) if self._skip_unchanged else None)
            self.copies += 1


def _new_buffer(leaf: Tensor, device: torch.device, *, index: int) -> Tensor:
    if leaf.layout is not torch.strided or type(leaf) not in {Tensor, torch.nn.Parameter}:
        raise StaticInputError(
            f"Argument leaf {index} is a {type(leaf).__name__} with layout {leaf.layout}; a graph can hold plain "
            "strided tensors only. Convert it before the call."
        )
    with torch.inference_mode(mode=False):  # an inference tensor has no counter to show that a forward wrote to it
        return empty_like_strided(leaf.detach(), device)
