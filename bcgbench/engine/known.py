"""Signatures of calls like those before: told from the call's objects, without walking its arguments anew.

From step to step a denoiser is given mostly the same objects: a new latent and timestep, the prompt's tensors and the
constants as before. Each argument is held against what it was; only a call that is like none of the last is signed.
"""

from __future__ import annotations

import contextlib
import marshal
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.buffers import version
from bcgbench.engine.signature import Call, leaf_key, sign

Match = Callable[[Any, list[Any], int], bool]
"""Whether a value has the key that another had; writes its leaves from an index on."""
_EXACT = 2
"""Version of the marshal format that depends on types and values alone, not on who else refers to a part."""
_WRITTEN = frozenset({int, float, bool, str, bytes, type(None)})


class KnownCalls:
    """The last signatures of one forward."""

    RECENT = 8
    """Two branches of guidance have two each."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def sign(self, arguments: dict[str, Any], *, ambient: tuple[tuple[str, Any], ...]) -> Call:
        """As `signature.sign`. The signature is the very object of the call before, if there was one like this."""
        for known in self._known:
            leaves = known.leaves(arguments, ambient)
            if leaves is not None:
                return Call(leaves, known.signature)
        call = sign(arguments, ambient=ambient)
        with contextlib.suppress(_Unknown):
            self._known.insert(0, _Known(arguments, call))
        del self._known[self.RECENT :]
        return call


class _Unknown(Exception):
    """Some container has no short way: only a walk can tell."""


class _Known:
    """One signed call: how to tell whether another has its signature. Keeps no tensor alive."""

    def __init__(self, arguments: dict[str, Any], call: Call) -> None:
        self.signature = call.signature
        self._names = list(arguments)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        self._tensors = [index for index, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        self._aliases = self._first_places(call.leaves)
        self._ids = [id(call.leaves[index]) for index in self._tensors]
        self._constants: list[tuple[int, Any]] = []
        """Places and values of arguments that are Python's own constants; the same object needs no look at its key."""
        self._varying: list[tuple[int, Match, int]] = []
        at = 0
        for place, value in enumerate(arguments.values()):
            match, count = _match(value)
            if type(value) in _WRITTEN:
                self._constants.append((place, value))
            else:
                self._varying.append((place, match, at))
            at += count

    def leaves(self, arguments: dict[str, Any], ambient: tuple[tuple[str, Any], ...]) -> list[Any] | None:
        """The leaves of a call of this signature; None for one of another."""
        if ambient != self.signature.ambient or list(arguments) != self._names:
            return None
        values, leaves = list(arguments.values()), self._leaves.copy()
        for place, value in self._constants:
            if values[place] is not value and not _is_key_of(values[place], leaf_key(value)):
                return None
        for place, match, at in self._varying:
            if not match(values[place], leaves, at):
                return None
        ids = [id(leaves[index]) for index in self._tensors]
        if ids != self._ids:  # equal ones have equal aliases
            if self._first_places(leaves) != self._aliases:
                return None
            self._ids = ids
        return leaves

    def _first_places(self, leaves: list[Any]) -> list[int]:
        """For each tensor, where it is met first."""
        first: dict[int, int] = {}
        return [first.setdefault(id(leaves[index]), index) for index in self._tensors]


def _match(value: Any) -> tuple[Match, int]:
    """How to tell a value like this, and how many leaves it has."""
    if isinstance(value, Tensor):
        return _like_tensor(value), 1
    if type(value) in {list, tuple, dict}:
        leaves, _ = trees.flatten(value)
        if leaves and all(type(leaf) in _WRITTEN for leaf in leaves):
            with contextlib.suppress(ValueError):  # a namedtuple is among the containers
                return _like_written(value), len(leaves)
        return _like_container(value), len(leaves)
    if not trees.is_leaf(value):
        raise _Unknown
    return _like_constant(value), 1


def _like_tensor(value: Tensor) -> Match:
    kind, shape, stride = type(value), value.shape, value.stride()
    dtype, device = value.dtype, value.device
    seen, count = weakref.ref(value), version(value)

    def match(other: Any, leaves: list[Any], at: int) -> bool:
        nonlocal seen, count
        if type(other) is not kind:
            return False
        leaves[at] = other
        if count is not None and seen() is other and other._version == count:
            return True  # torch counts changes of shape and strides too
        if other.shape != shape or other.stride() != stride or other.dtype is not dtype or other.device != device:
            return False
        seen, count = weakref.ref(other), version(other)
        return True

    return match


def _like_written(value: Any) -> Match:
    """A container of Python's own constants: equal types and values are equal bytes."""
    kind, written = type(value), marshal.dumps(value, _EXACT)

    def match(other: Any, _leaves: list[Any], _at: int) -> bool:
        try:
            return type(other) is kind and marshal.dumps(other, _EXACT) == written
        except ValueError:  # something else is in it, or itself
            return False

    return match


def _like_container(value: Any) -> Match:
    kind, size = type(value), len(value)
    names = list(value) if kind is dict else []
    if any(type(name) is not str for name in names):
        raise _Unknown
    parts: list[tuple[Match, int]] = []
    offset = 0
    for part in value.values() if kind is dict else value:
        match_part, count = _match(part)
        parts.append((match_part, offset))
        offset += count

    def match(other: Any, leaves: list[Any], at: int) -> bool:
        if type(other) is not kind or len(other) != size or (names and list(other) != names):
            return False
        for (match_part, offset), part in zip(parts, other.values() if kind is dict else other, strict=True):
            if not match_part(part, leaves, at + offset):
                return False
        return True

    return match


def _like_constant(value: Any) -> Match:
    key, fixed = leaf_key(value), type(value) in _WRITTEN

    def match(other: Any, leaves: list[Any], at: int) -> bool:
        leaves[at] = other
        return (fixed and other is value) or _is_key_of(other, key)

    return match


def _is_key_of(value: Any, key: tuple[Any, ...]) -> bool:
    return trees.is_leaf(value) and not isinstance(value, Tensor) and leaf_key(value) == key
