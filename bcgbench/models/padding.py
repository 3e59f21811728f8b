"""Padding a call to a shared shape: choose a bucket, extend a tensor, remember what was extended.

Told names and lengths, guesses none: which argument is padded and what a pad row means is the adapter's knowledge.
No torch import is needed, so that adapters stay importable without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class OutsidePolicy(Exception):
    """A call that the length policy has no shape for; the message is one sentence. The call can still run eagerly."""


def choose_bucket(length: int, buckets: Iterable[int]) -> int:
    """The smallest bucket that holds `length` tokens; OutsidePolicy when none does."""
    fitting = [bucket for bucket in buckets if bucket >= length]
    if not fitting:
        raise OutsidePolicy(f"prompt has {length} tokens, the largest bucket is {max(buckets, default=0)}")
    return min(fitting)


def round_up(length: int, *, multiple: int) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def pad_to(tensor: Tensor, *, length: int, dim: int, value: float = 0) -> Tensor:
    """`tensor` extended at the end of `dim` to `length` with `value`; same dtype and device, densely strided.

    A dense tensor that already has the length is returned itself. A longer one is a ValueError: cutting a prompt
    changes the picture and is never done silently.
    """
    present = tensor.shape[dim]
    if present > length:
        raise ValueError(f"dimension {dim} has {present} entries and cannot be padded to {length}")
    if present == length and _is_dense(tensor):
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length
    padded = tensor.new_full(shape, value)
    padded.narrow(dim, 0, present).copy_(tensor)
    return padded


def cut_to(tensor: Tensor, *, length: int, dim: int) -> Tensor:
    """A dense copy of the first `length` entries of `dim`, for capturing a bucket that the traced prompt overflows."""
    kept = tensor.narrow(dim, 0, length)
    return kept.new_empty(kept.shape).copy_(kept)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides are those of a new tensor.

    `is_contiguous` ignores the stride of a dimension of size 1, where a slice of a longer prompt differs, and strides
    are part of a graph's signature.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class _Entry:
    source: weakref.ref[Tensor]
    version: int
    value: Tensor


class PadCache:
    """Remembers what was made of a tensor, so that an unchanged source gives the very same object on every step.

    A prompt's embeddings are one object for a whole request; a new padded copy per step would make the engine copy it
    into the graph's input per step. An entry counts while the source object lives and its in-place counter stands
    still. Inference tensors have no counter, so nothing made of them is reused.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Hashable], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, source: Tensor, tag: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, or its earlier result for the same unchanged `source` and `tag`.

        The result must not share the source's storage unless it is the source: it would keep the source alive.
        """
        if source.is_inference():
            return make()
        key = (id(source), tag)
        entry = self._entries.get(key)
        if entry is not None and entry.source() is source and entry.version == source._version:
            return entry.value
        value = make()
        if value is not source:
            forget = weakref.ref(source, lambda ref: self._forget(key, ref))
            self._entries[key] = _Entry(forget, source._version, value)
        return value

    def _forget(self, key: tuple[int, Hashable], source: weakref.ref[Tensor]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.source is source:
            del self._entries[key]
