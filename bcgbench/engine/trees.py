"""The one walker over nested arguments and outputs.

Containers are list, tuple, namedtuple, dict and its subclasses, dataclasses and model outputs (a dict that is also a
dataclass); everything else is a leaf. Their types survive `rebuild`. What a leaf means is decided by the callers.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bcgbench.errors import StaticInputError


class Spec(NamedTuple):
    """Shape of a tree without its leaves; equal specs have equal containers in equal order."""

    kind: type | None
    """Container type; None for a leaf."""
    keys: tuple[Hashable, ...] = ()
    key_types: tuple[type, ...] = ()
    """Beside the keys, because 1 equals True."""
    children: tuple[Spec, ...] = ()
    factory: Callable[[], Any] | None = None
    """The factory of a defaultdict."""


LEAF = Spec(None)
_PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})
"""Leaves known by their exact type: asking whether each is a dataclass took most of a signature's time."""


class TooManyLeaves(Exception):
    """Raised by `flatten` as soon as a tree has more leaves, or a container more entries, than the limit."""


def _entries(tree: Any) -> tuple[tuple[Hashable, ...], Iterable[Any]] | None:
    """Keys and values of a container; None for a leaf. A sequence's keys are its indices' count only: ()."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return (), tree
    if isinstance(tree, dict):
        return tuple(tree.keys()), tree.values()
    if isinstance(tree, (list, tuple)) and kind is not torch.Size:
        return (), tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name))
        return names, [getattr(tree, name) for name in names]
    return None


def is_leaf(tree: Any) -> bool:
    """Whether this is no container."""
    return type(tree) in _PLAIN or _entries(tree) is None


def _flatten(tree: Any, leaves: list[Any], limit: float) -> Spec:
    entries = None if type(tree) in _PLAIN else _entries(tree)
    if entries is None:
        leaves.append(tree)
        if len(leaves) > limit:
            raise TooManyLeaves
        return LEAF
    keys, values = entries
    children = tuple([_flatten(value, leaves, limit) for value in values])
    if len(children) > limit:
        raise TooManyLeaves
    factory = tree.default_factory if isinstance(tree, defaultdict) else None
    return Spec(type(tree), keys, tuple(map(type, keys)), children, factory)


def flatten(tree: Any, *, limit: float = float("inf")) -> tuple[list[Any], Spec]:
    """Leaves of `tree`, in order, and the spec to rebuild it. Raises `TooManyLeaves` past `limit`."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, limit)


def _build(spec: Spec, values: list[Any]) -> Any:
    kind = spec.kind
    assert kind is not None
    if issubclass(kind, dict):
        return _build_mapping(kind, spec, values)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*values)
    if issubclass(kind, (list, tuple)):
        return kind(values)
    made = kind.__new__(kind)  # not the constructor: a frozen dataclass may validate or derive fields in it
    for name, value in zip(spec.keys, values, strict=True):
        object.__setattr__(made, str(name), value)
    return made


def _build_mapping(kind: type[dict[Any, Any]], spec: Spec, values: list[Any]) -> Any:
    """A dict of any kind, entry by entry: Counter counts what its constructor is given."""
    made = kind.__new__(kind)
    if isinstance(made, defaultdict):
        made.default_factory = spec.factory
    if dataclasses.is_dataclass(kind):  # a model output: fields that are None are attributes without an entry
        for missing in dataclasses.fields(kind):
            object.__setattr__(made, missing.name, None)
    for key, value in zip(spec.keys, values, strict=True):
        made[key] = value
    return made


def _rebuild(spec: Spec, supply: Iterator[Any]) -> Any:
    if spec.kind is None:
        return next(supply)
    return _build(spec, [_rebuild(child, supply) for child in spec.children])


def rebuild(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The tree of `spec` over `leaves`, with the original container types.

    Leaves no reference cycle behind: a capture runs without garbage collection, and a cycle through its tensors kept
    0.45 GiB of graph memory at Qwen-Image 512x512.
    """
    return _rebuild(spec, iter(leaves))


def paths(spec: Spec, *, prefix: str = "") -> Iterator[str]:
    """One readable path per leaf: `cap_feats[0]`, `image_rotary_emb[1].cos`."""
    if spec.kind is None:
        yield prefix or "value"
        return
    for index, child in enumerate(spec.children):
        yield from paths(child, prefix=step_to(spec, index, prefix=prefix))


def step_to(spec: Spec, index: int, *, prefix: str) -> str:
    """Path of a child of the container at `prefix`."""
    if not spec.keys:
        return f"{prefix}[{index}]"
    key = spec.keys[index]
    if not isinstance(key, str):
        return f"{prefix}[{key!r}]"
    return f"{prefix}.{key}" if prefix else key


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with every leaf replaced by `function(leaf)`."""
    leaves, spec = flatten(tree)
    return rebuild(spec, [function(leaf) for leaf in leaves])


def map_children(function: Callable[[Any], Any], tree: Any) -> Any:
    """A container with each entry replaced by `function(entry)`; a leaf as it is."""
    entries = None if type(tree) in _PLAIN else _entries(tree)
    if entries is None:
        return tree
    keys, values = entries
    factory = tree.default_factory if isinstance(tree, defaultdict) else None
    return _build(Spec(type(tree), keys, tuple(map(type, keys)), (), factory), [function(value) for value in values])


def tensors(tree: Any) -> list[Tensor]:
    """The tensor leaves of `tree`, in order, repeats included."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    """As `_flatten` without a spec: a capture asks this of every operation."""
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) not in _PLAIN and (entries := _entries(tree)) is not None:
        for value in entries[1]:
            _collect(value, found)


def clone(tree: Any) -> Any:
    """`tree` with every tensor copied and container types kept; a tensor met twice stays one tensor.

    Dense strides are kept; a tensor with gaps or expanded dimensions comes back dense, as from `Tensor.clone`.
    """
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return map_leaves(copy, tree)


class Cloner:
    """`clone` for a tree that is cloned at every call: walked once."""

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = flatten(tree)
        first: dict[int, int] = {}
        self._sources = [leaf for index, leaf in enumerate(leaves) if first.setdefault(id(leaf), index) == index]
        places = {id(leaf): place for place, leaf in enumerate(self._sources)}
        self._places = [places[id(leaf)] for leaf in leaves]

    def __call__(self) -> Any:
        """A copy of the tree as it is now."""
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._sources]
        return copies[0] if self._spec is LEAF else rebuild(self._spec, [copies[place] for place in self._places])


def check_like(target: Tensor, source: Tensor, *, name: str) -> None:
    """Raise `StaticInputError` unless shape and dtype agree.

    `Tensor.copy_` alone would broadcast (1, 4) into (2, 4) and convert float64 to float32 without a word.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise StaticInputError(
            f"{name}: the graph holds {describe(target)}, the call gave {describe(source)}; "
            "shapes and dtypes are never broadcast or converted. Capture this signature first."
        )


def describe(tree: Any) -> str:
    """Short text: `bfloat16[1, 64, 3584]`, containers with their types, constants by repr."""
    if isinstance(tree, Tensor):
        device = "" if tree.device.type in {"cpu", "cuda"} else f"@{tree.device}"
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}{device}"
    entries = _entries(tree)
    if entries is None:
        text = repr(tree)
        return text if len(text) <= 60 else f"<{type(tree).__name__}>"  # noqa: PLR2004 - one terminal column
    keys, values = entries
    parts = [describe(value) for value in values]
    if keys:
        parts = [f"{key}: {part}" for key, part in zip(keys, parts, strict=True)]
    name = "" if type(tree) in {list, tuple, dict} else type(tree).__name__
    left, right = ("(", ")") if isinstance(tree, tuple) else ("{", "}") if keys else ("[", "]")
    return f"{name}{left}{', '.join(parts)}{right}"
