"""What a constant counts as in a signature: by type and value, or by type and state for a plain object."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcgbench.engine import trees
from bcgbench.errors import SignatureError

LEAF_LIMIT = 1_000
"""A DiT call has 10 to 80 leaves; a published case hashed 72,000 per forward and ran 4 times slower (sglang#33989)."""
ARRAY_LIMIT_BYTES = 4_096
"""A NumPy array up to this size counts by content; a larger one is refused, its content could change unseen."""

_BY_VALUE = (int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
             range, enum.Enum)  # fmt: skip
_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__")


class Plain:
    """Marks the key of a plain object: (Plain, type, spec and keys of its attributes)."""


def constant_key(leaf: Any) -> tuple[Any, ...] | None:
    """Type and value of a constant; None for anything that is none. Raises `SignatureError` for a large array."""
    kind = type(leaf)
    if kind is float:
        return (float, leaf.hex())  # hex tells -0.0 from 0.0 and makes NaN equal itself
    if kind is complex:
        return (complex, leaf.real.hex(), leaf.imag.hex())
    if isinstance(leaf, _BY_VALUE):
        return (kind, leaf)
    if kind in {frozenset, slice}:
        parts = leaf if kind is frozenset else (leaf.start, leaf.stop, leaf.step)
        return _compound_key(kind, [constant_key(part) for part in parts])
    if isinstance(leaf, np.generic) or (isinstance(leaf, np.ndarray) and leaf.nbytes <= ARRAY_LIMIT_BYTES):
        return (kind, leaf.dtype.str, leaf.shape, leaf.tobytes())
    if isinstance(leaf, np.ndarray):
        raise SignatureError(
            f"A NumPy array of {leaf.nbytes:,} bytes is an argument; at most {ARRAY_LIMIT_BYTES:,} count by content. "
            "Pass it as a tensor."
        )
    return None


def _compound_key(kind: type, parts: list[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """Key of a constant made of constants; None if one of them counts by identity."""
    if None in parts:
        return None
    return (kind, frozenset(parts)) if kind is frozenset else (kind, *parts)


def object_key(leaf: Any) -> tuple[Any, ...] | None:
    """Type and attributes of an object made of constants, lists and further such objects, in Python alone.

    None for what counts by identity: an object without any state, a callable, one that holds a tensor, itself, memory
    outside Python, or more than `LEAF_LIMIT` leaves.
    """
    try:
        return _Walk().key(leaf)
    except (_NotPlain, trees.TooManyLeaves, RecursionError, SignatureError):
        return None


class _NotPlain(Exception):
    """Somewhere in an object is what has no value."""


class _Walk:
    """One walk through an object."""

    def __init__(self) -> None:
        self._left = LEAF_LIMIT
        self._open: set[int] = set()

    def key(self, held: Any) -> tuple[Any, ...]:
        if id(held) in self._open:
            raise _NotPlain
        self._open.add(id(held))
        leaves, spec = trees.flatten(_attributes(held), limit=self._left)
        self._left -= len(leaves)
        keys = tuple([self._leaf(leaf) for leaf in leaves])
        self._open.remove(id(held))
        return (Plain, type(held), spec, keys)

    def _leaf(self, leaf: Any) -> tuple[Any, ...]:
        if isinstance(leaf, Tensor):
            raise _NotPlain
        return constant_key(leaf) or self.key(leaf)


def _attributes(held: Any) -> dict[str, Any]:
    """All state of an object, as pickle would find it. Raises `_NotPlain` for one that pickles in its own way."""
    kind = type(held)
    own = any(getattr(kind, name) is not getattr(object, name) for name in _PICKLING)
    if own or callable(held) or isinstance(held, ModuleType) or hasattr(kind, "__getnewargs__"):
        raise _NotPlain
    try:
        state = object.__reduce_ex__(held, 2)[2]
    except TypeError:  # part of its state is not Python's
        raise _NotPlain from None
    parts = state if isinstance(state, tuple) else (state,)  # a pair where the class has slots
    attributes = {name: value for part in parts for name, value in (part or {}).items()}
    if not attributes:
        raise _NotPlain
    return attributes
