"""Dataclasses to plain JSON values and back, strictly by their type hints.

Here: the one translation that the journal, the worker's pipe and `--json` share. Not here: files (`journal.py`).
Strict both ways, because a figure that is silently dropped, rounded or defaulted is worse than an error: a missing or
unknown field, a wrong type, NaN and infinity are refused with the path of the field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

from bcgbench.errors import StoreError

T = TypeVar("T")


def to_json(value: object) -> Any:
    """Dataclasses, tuples, dicts and scalars as plain JSON values. StoreError on NaN, infinity or another type."""
    return _encode(value, at=type(value).__name__)


def from_json(cls: type[T], data: object) -> T:
    """The value that `to_json` turned into `data`. StoreError naming the field that does not fit the type hints."""
    return typing.cast("T", _decode(cls, data, at=cls.__name__))


def _encode(value: object, *, at: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StoreError(f"{at} is {value}: only finite numbers are stored; store None and the reason instead")
        return value
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: _encode(getattr(value, f.name), at=f"{at}.{f.name}") for f in fields}
    if isinstance(value, tuple | list):
        return [_encode(item, at=f"{at}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, at=f"{at}[{key!r}]") for key, item in value.items()}
    raise StoreError(f"{at} is a {type(value).__name__}, which the store does not hold")


def _decode(hint: Any, data: Any, *, at: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, at=at)
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(arguments, data, at=at)
    if origin is typing.Literal:
        return _expect(data in arguments, data, expected=f"one of {', '.join(map(str, arguments))}", at=at)
    if origin is tuple:
        return _decode_tuple(arguments, data, at=at)
    if origin is dict:
        _expect(isinstance(data, dict), data, expected="an object", at=at)
        return {key: _decode(arguments[1], item, at=f"{at}[{key!r}]") for key, item in data.items()}
    return _decode_scalar(hint, data, at=at)


def _decode_scalar(hint: Any, data: Any, *, at: str) -> Any:
    # An int in a float field stays an int: it equals the float, and a case keeps the key that was made from it.
    accepted = (int, float) if hint is float else (hint,)
    fits = isinstance(data, accepted) and (hint is bool or not isinstance(data, bool))
    return _expect(fits, data, expected=getattr(hint, "__name__", str(hint)), at=at)


def _decode_tuple(arguments: tuple[Any, ...], data: Any, *, at: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), data, expected="a list", at=at)
    variadic = len(arguments) == 2 and arguments[1] is Ellipsis  # noqa: PLR2004 - tuple[X, ...]
    hints = (arguments[0],) * len(data) if variadic else arguments
    _expect(len(hints) == len(data), data, expected=f"{len(hints)} entries", at=at)
    return tuple(_decode(hint, item, at=f"{at}[{i}]") for i, (hint, item) in enumerate(zip(hints, data, strict=True)))


def _decode_optional(arguments: tuple[Any, ...], data: Any, *, at: str) -> Any:
    """Stored unions are all `X | None`."""
    if data is None and type(None) in arguments:
        return None
    (hint,) = (argument for argument in arguments if argument is not type(None))
    return _decode(hint, data, at=at)


def _decode_dataclass(cls: Any, data: Any, *, at: str) -> Any:
    hints = _hints(cls)
    _expect(isinstance(data, dict), data, expected="an object", at=at)
    _expect(data.keys() == hints.keys(), sorted(data.keys() ^ hints.keys()), expected="no field more or less", at=at)
    return cls(**{name: _decode(hint, data[name], at=f"{at}.{name}") for name, hint in hints.items()})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _expect(fits: bool, data: Any, *, expected: str, at: str) -> Any:  # noqa: FBT001 - reads as an assertion
    if not fits:
        raise StoreError(f"{at}: expected {expected}, got {str(data)[:80]!r}")
    return data
