"""Signatures of calls like those before: told from the call's objects, without walking its arguments anew.

From step to step a denoiser is given mostly the same objects: a new latent and timestep, the prompt's tensors and the
constants as before. Each argument is held against what it was; only a call that is like none of the last is signed.
"""

from __future__ import annotations

import contextlib
import marshal
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from bcgbench.engine import trees
from bcgbench.engine.buffers import version
from bcgbench.engine.signature import Call, leaf_key, sign

_EXACT = 2
"""Version of the marshal format that depends on types and values alone, not on who else refers to a part."""
_FIXED = frozenset({int, float, bool, str, type(None)})
"""Python's own constants; bytes are not among them, as marshal writes a NumPy array like bytes."""


class KnownCalls:
    """The last signatures of one forward."""

    RECENT = 8
    """Two branches of guidance have two each."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def sign(self, arguments: dict[str, Any], *, ambient: tuple[Any, ...]) -> Call:
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


class _Container(NamedTuple):
    """A container whose parts are looked at one by one, and what is asked of it before."""

    at: int
    kind: Any
    size: int
    names: list[str] | None
    """Keys of a dict."""


class _Known:
    """One signed call: how to tell whether another has its signature. Keeps alive what its signature does, no tensor.

    The parts of a call are its arguments, then what is in each container, container after container: in two calls
    whose containers agree, the same part stands at the same place.
    """

    def __init__(self, arguments: dict[str, Any], call: Call) -> None:
        self.signature = call.signature
        self._names = list(arguments)
        self._leaves = [leaf if type(leaf) in _FIXED else None for leaf in call.leaves]
        """Those that are constants; the others are the call's own."""
        self._containers: list[_Container] = []
        self._tensors: list[tuple[int, int, _Seen]] = []
        """Places of tensors, and which leaves they are."""
        self._fixed: list[tuple[int, Any]] = []
        """Places and values of constants that cannot change: the same object needs no other look."""
        self._written: list[tuple[int, type, bytes]] = []
        """The same for containers of constants, whose parts can."""
        self._others: list[tuple[int, int, tuple[Any, ...]]] = []
        """Any other leaf: its place, which leaf it is, and its key."""
        parts = _with_leaf_numbers(arguments.values(), 0)
        for at, (part, leaf) in enumerate(parts):  # which grow meanwhile
            self._enter(at, part, leaf, parts)
        self._aliases = self._first_places(call.leaves)

    def _enter(self, at: int, part: Any, leaf: int, parts: list[tuple[Any, int]]) -> None:
        """How this part is told; what it contains goes to the end of `parts`. Raises `_Unknown`."""
        kind = type(part)
        if isinstance(part, Tensor):
            self._tensors.append((at, leaf, _Seen(part)))
        elif kind in _FIXED or (kind is tuple and _FIXED.issuperset(map(type, part))):
            self._fixed.append((at, part))
        elif kind in {list, tuple, dict}:
            written = _written(part) if _is_fixed(*trees.flatten(part)) else None
            if written is not None:  # a namedtuple would be None
                self._written.append((at, kind, written))
                return
            names = list(part) if kind is dict else None
            if any(type(name) is not str for name in names or ()):
                raise _Unknown
            self._containers.append(_Container(at, kind, len(part), names))
            parts += _with_leaf_numbers(part if names is None else part.values(), leaf)
        elif trees.is_leaf(part):
            self._others.append((at, leaf, leaf_key(part)))
        else:
            raise _Unknown

    def leaves(self, arguments: dict[str, Any], ambient: tuple[Any, ...]) -> list[Any] | None:
        """The leaves of a call of this signature; None for one of another."""
        if ambient != self.signature.ambient or list(arguments) != self._names:
            return None
        parts = list(arguments.values())
        for at, kind, size, names in self._containers:
            part = parts[at]
            if type(part) is not kind or len(part) != size or (names is not None and not _has_names(part, names)):
                return None
            parts += part if names is None else part.values()
        for at, known in self._fixed:
            part = parts[at]
            if part is not known and (type(part) is not type(known) or _written(part) != _written(known)):
                return None
        leaves = self._leaves.copy()
        if (self._written or self._others) and not self._like_others(parts, leaves):
            return None
        changed: list[tuple[_Seen, Tensor]] = []
        for at, leaf, seen in self._tensors:
            leaves[leaf] = tensor = parts[at]
            if seen.object() is tensor is not None and tensor._version == seen.version:
                continue  # torch counts changes of shape and strides too, unless made through `.data`
            if not seen.is_like(tensor):
                return None
            changed.append((seen, tensor))
        return leaves if not changed or self._note(changed, leaves) else None

    def _like_others(self, parts: list[Any], leaves: list[Any]) -> bool:
        """Whether what is no tensor and may have changed counts as before; it goes to the leaves."""
        for at, kind, written in self._written:
            if type(parts[at]) is not kind or _written(parts[at]) != written:
                return False
        for at, leaf, key in self._others:
            leaves[leaf] = other = parts[at]
            if not trees.is_leaf(other) or isinstance(other, Tensor) or leaf_key(other) != key:
                return False
        return True

    def _note(self, changed: list[tuple[_Seen, Tensor]], leaves: list[Any]) -> bool:
        """Take these tensors for those of the last call; False where one of them stands at other places.

        Only when all were looked at: what is noted belongs to one call.
        """
        if self._first_places(leaves) != self._aliases:
            return False
        for seen, tensor in changed:
            seen.note(tensor)
        return True

    def _first_places(self, leaves: list[Any]) -> list[int]:
        """For each tensor, where it is met first."""
        first: dict[int, int] = {}
        return [first.setdefault(id(leaves[leaf]), leaf) for _, leaf, _ in self._tensors]


class _Seen:
    """What a tensor was at one place of a call, and which tensor that was last."""

    __slots__ = ("device", "dtype", "kind", "object", "shape", "stride", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.kind, self.shape, self.stride = type(tensor), tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        """This tensor, as it is now, has been looked at; one without a counter will be every time."""
        self.version = version(tensor)
        self.object: Callable[[], Tensor | None] = _nothing if self.version is None else weakref.ref(tensor)

    def is_like(self, other: Any) -> bool:
        """Whether a value has the same key, aliases aside."""
        return (type(other) is self.kind and other.shape == self.shape and other.stride() == self.stride
                and other.dtype is self.dtype and other.device == self.device)  # fmt: skip


def _nothing() -> None:
    """As a reference to a tensor that is gone."""


def _with_leaf_numbers(parts: Iterable[Any], leaf: int) -> list[tuple[Any, int]]:
    """Each part with the number of its first leaf; they begin with `leaf`."""
    numbered = []
    for part in parts:
        numbered.append((part, leaf))
        leaf += len(trees.flatten(part)[0])
    return numbered


def _is_fixed(leaves: list[Any], spec: trees.Spec) -> bool:
    """Whether a container holds Python's own constants alone, as keys too."""
    return bool(leaves) and _FIXED.issuperset(map(type, leaves)) and _has_fixed_keys(spec)


def _has_fixed_keys(spec: trees.Spec) -> bool:
    return _FIXED.issuperset(spec.key_types) and all(map(_has_fixed_keys, spec.children))


def _has_names(part: dict[Any, Any], names: list[str]) -> bool:
    """Whether a dict has these keys in this order; a subclass of str is another key."""
    return list(part) == names and all(type(name) is str for name in part)


def _written(value: Any) -> bytes | None:
    """A constant, or a container of such, as bytes: equal ones have equal types and values. None for anything else."""
    try:
        return marshal.dumps(value, _EXACT)
    except ValueError:
        return None
