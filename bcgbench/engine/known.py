"""Signatures of calls like those before: told from the call's objects, without walking its arguments anew.

From step to step a denoiser is given mostly the same objects: a new latent and timestep, the prompt's tensors and the
constants as before. Each argument is held against what it was; only a call that is like none of the last is signed.
"""

from __future__ import annotations

import contextlib
import marshal
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.buffers import version
from bcgbench.engine.signature import Call, Signature, leaf_key, sign

Match = Callable[[Any, list[Any]], bool]
"""Whether a value has the key that another had; appends its leaves."""
_EXACT = 2
"""Version of the marshal format that depends on types and values alone, not on who else refers to a part."""
_WRITTEN = frozenset({int, float, bool, str, bytes, type(None)})


class KnownCalls:
    """The last signatures of one forward."""

    RECENT = 8
    """Two branches of guidance have two each."""

    def __init__(self) -> None:
        self._known: OrderedDict[Signature, _Known | None] = OrderedDict()

    def sign(self, arguments: dict[str, Any], *, ambient: tuple[tuple[str, Any], ...]) -> Call:
        """As `signature.sign`. The signature is the very object of the call before, if there was one like this."""
        for known in reversed(self._known.values()):
            leaves = None if known is None else known.leaves(arguments, ambient)
            if known is not None and leaves is not None:
                return Call(leaves, known.signature)
        call = sign(arguments, ambient=ambient)
        if call.signature not in self._known:
            self._known[call.signature] = _Known.of(arguments, call)
        if len(self._known) > self.RECENT:
            self._known.popitem(last=False)
        return call


class _Known:
    """One signed call: how to tell whether another has its signature. Keeps no tensor alive."""

    def __init__(self, arguments: dict[str, Any], call: Call) -> None:
        self.signature = call.signature
        self._names = list(arguments)
        self._matches = [_match(value) for value in arguments.values()]
        self._tensors = [index for index, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        self._aliases = self._first_places(call.leaves)
        self._places = [id(call.leaves[index]) for index in self._tensors]
        """Equal ones have equal aliases."""

    @classmethod
    def of(cls, arguments: dict[str, Any], call: Call) -> _Known | None:
        """None for arguments that only a walk can tell."""
        try:
            return cls(arguments, call)
        except _Unknown:
            return None

    def leaves(self, arguments: dict[str, Any], ambient: tuple[tuple[str, Any], ...]) -> list[Any] | None:
        """The leaves of a call of this signature; None for one of another."""
        if ambient != self.signature.ambient or list(arguments) != self._names:
            return None
        leaves: list[Any] = []
        for match, value in zip(self._matches, arguments.values(), strict=False):
            if not match(value, leaves):
                return None
        places = [id(leaves[index]) for index in self._tensors]
        if places != self._places:
            if self._first_places(leaves) != self._aliases:
                return None
            self._places = places
        return leaves

    def _first_places(self, leaves: list[Any]) -> list[int]:
        """For each tensor, where it is met first."""
        first: dict[int, int] = {}
        return [first.setdefault(id(leaves[index]), index) for index in self._tensors]


class _Unknown(Exception):
    """Some container that has no short way."""


def _match(value: Any) -> Match:
    if isinstance(value, Tensor):
        return _like_tensor(value)
    if type(value) in {list, tuple, dict}:
        leaves, _ = trees.flatten(value)
        if leaves and all(type(leaf) in _WRITTEN for leaf in leaves):
            with contextlib.suppress(ValueError):  # a namedtuple is among the containers
                return _like_written(value, leaves)
        return _like_container(value)
    if not trees.is_leaf(value):
        raise _Unknown
    return _like_constant(value)


def _like_tensor(value: Tensor) -> Match:
    kind, shape, stride = type(value), value.shape, value.stride()
    dtype, device = value.dtype, value.device
    seen, count = weakref.ref(value), version(value)

    def match(other: Any, leaves: list[Any]) -> bool:
        nonlocal seen, count
        if type(other) is not kind:
            return False
        leaves.append(other)
        if count is not None and seen() is other and other._version == count:
            return True  # torch counts changes of shape and strides too
        if other.shape != shape or other.stride() != stride or other.dtype is not dtype or other.device != device:
            return False
        seen, count = weakref.ref(other), version(other)
        return True

    return match


def _like_written(value: Any, own: list[Any]) -> Match:
    """A container of Python's own constants: equal types and values are equal bytes."""
    kind, written = type(value), marshal.dumps(value, _EXACT)

    def match(other: Any, leaves: list[Any]) -> bool:
        try:
            same = type(other) is kind and marshal.dumps(other, _EXACT) == written
        except ValueError:  # something else is in it, or itself
            return False
        leaves.extend(own)
        return same

    return match


def _like_container(value: Any) -> Match:
    kind, size = type(value), len(value)
    names = list(value) if kind is dict else []
    if any(type(name) is not str for name in names):
        raise _Unknown
    matches = [_match(part) for part in (value.values() if kind is dict else value)]

    def match(other: Any, leaves: list[Any]) -> bool:
        if type(other) is not kind or len(other) != size or (names and list(other) != names):
            return False
        parts = other.values() if kind is dict else other
        return all(match(part, leaves) for match, part in zip(matches, parts, strict=True))

    return match


def _like_constant(value: Any) -> Match:
    key, fixed = leaf_key(value), type(value) in _WRITTEN

    def match(other: Any, leaves: list[Any]) -> bool:
        leaves.append(other)
        return (fixed and other is value) or (
            trees.is_leaf(other) and not isinstance(other, Tensor) and leaf_key(other) == key
        )

    return match
